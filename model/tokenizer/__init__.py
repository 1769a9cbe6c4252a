"""Byte-level BPE written by hand: learnt from text, encodes, decodes, kept as `tokenizer.json`.

text -> pretokenizer (pieces) -> trainer (merges) -> Vocabulary -> Tokenizer -> ids

>>> tokenizer = train_tokenizer(["to be, or not to be"], vocabulary_size=260)
>>> tokenizer.decode(tokenizer.encode("or not"))
'or not'
"""

from model.tokenizer.bpe import StreamDecoder, Tokenizer
from model.tokenizer.trainer import train_tokenizer
from model.tokenizer.vocabulary import END_OF_DOCUMENT, Vocabulary

__all__ = ["END_OF_DOCUMENT", "StreamDecoder", "Tokenizer", "Vocabulary", "train_tokenizer"]
