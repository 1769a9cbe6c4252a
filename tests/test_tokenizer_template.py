"""Special tokens around a whole text: what the file says, who applies it, what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.tokenizer import Tokenizer, train_tokenizer
from model.tokenizer.pretokenizer import LLAMA3
from runtime.data.streams import Text, encode

TEXTS = ("Hello, it's 2024!\n\n  é", "", "a<|begin_of_text|>b", "<|eot|> end")
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
              "use_regex": True}


def special(*names, type_id=0):
    return [{"SpecialToken": {"id": name, "type_id": type_id}} for name in names]


def text(name="A", type_id=0):
    return [{"Sequence": {"id": name, "type_id": type_id}}]


def template(ids, single):
    """As Llama 3's file has it, for the special tokens of `single`."""
    names = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
    return {
        "type": "TemplateProcessing", "single": single,
        "pair": [*single, *special(*names[:1], type_id=1), *text("B", 1)],
        "special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in names},
    }


@pytest.fixture(scope="module")
def plain():
    """Llama 3's pre-tokenizer and names, in 270 tokens."""
    trained = train_tokenizer(["hello, this is the text of it all. " * 9], 270,
                              [BEGIN, END, "<|eot|>"])
    return Tokenizer(replace(trained.vocabulary, pattern=LLAMA3, ignore_merges=True))


def with_post_processor(plain, part):
    return json.dumps({**json.loads(plain.to_json()), "post_processor": part})


def single_of(case):
    return {
        "prefix": [*special(BEGIN), *text()],
        "suffix": [*text(), *special(END)],
        "both, several": [*special(BEGIN, "<|eot|>"), *text(), *special("<|eot|>", END, END)],
        "text alone": text(),
    }[case]


EXPECTED = {  # ids before and after the text, by name
    "prefix": ([BEGIN], []),
    "suffix": ([], [END]),
    "both, several": ([BEGIN, "<|eot|>"], ["<|eot|>", END, END]),
    "text alone": ([], []),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("case", EXPECTED)
def test_ids_around_a_whole_text(plain, case, alone):
    ids = plain.special_tokens
    part = template(ids, single_of(case))
    if not alone:
        part = {"type": "Sequence", "processors": [BYTE_LEVEL, part]}
    tokenizer = Tokenizer.from_json(with_post_processor(plain, part))
    before, after = ([ids[name] for name in names] for names in EXPECTED[case])
    for line in TEXTS:
        assert tokenizer.encode(line) == plain.encode(line)
        assert tokenizer.encode_prompt(line) == before + plain.encode(line)
        assert tokenizer.encode_document(line) == before + plain.encode(line) + after
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.vocabulary == tokenizer.vocabulary
    assert again.to_json() == tokenizer.to_json()


def test_one_name_may_stand_for_several_tokens(plain):
    ids = plain.special_tokens
    part = template(ids, [*special(BEGIN), *text()])
    part["special_tokens"][BEGIN] |= {"ids": [ids[END], ids[BEGIN]], "tokens": [END, BEGIN]}
    tokenizer = Tokenizer.from_json(with_post_processor(plain, part))
    assert tokenizer.encode_prompt("") == [ids[END], ids[BEGIN]]


@pytest.mark.parametrize("part", [
    None, BYTE_LEVEL, {"type": "Sequence", "processors": []},
    {"type": "Sequence", "processors": [BYTE_LEVEL]},
])
def test_without_a_template_nothing_is_added(plain, part):
    tokenizer = Tokenizer.from_json(with_post_processor(plain, part))
    assert tokenizer.encode_document("hello") == plain.encode("hello")
    assert tokenizer.to_json() == plain.to_json()


def test_documents_of_the_data_are_whole_texts(plain):
    vocabulary = replace(plain.vocabulary, prefix=(plain.special_tokens[BEGIN],),
                         suffix=(plain.special_tokens[END],))
    tokens = encode(Text("file", "hello"), Tokenizer(vocabulary)).tokens
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [vocabulary.prefix[0], *plain.encode("hello"), vocabulary.suffix[0]]


def test_ids_around_a_text_are_those_of_control_tokens(plain):
    with pytest.raises(EulerError, match="begin or end with id 65, which is neither a special"):
        replace(plain.vocabulary, suffix=(65,))


def change(**values):
    return lambda part: {**part, **values}


def entry(**values):
    return lambda part: {**part, "special_tokens": {BEGIN: {"id": BEGIN, "ids": [267],
                                                            "tokens": [BEGIN], **values}}}


@pytest.mark.parametrize(("spoil", "message"), [
    (change(single=special(BEGIN)), "has the Sequence A 0 times in 'single'"),
    (change(single=[*text(), *text()]), "has the Sequence A 2 times in 'single'"),
    (change(single=[*text(), *text("B")]), "'B'.* in 'single' is not supported"),
    (change(single=["$A"]), r"'\$A' in 'single' is not supported"),
    (change(single=[{"x" * 5000: 1}]), r"x\.\.\. in 'single' is not supported"),
    (change(single="$A"), "must have a list 'single'"),
    (change(special_tokens=[]), "an object 'special_tokens'"),
    (change(special_tokens={}), r"does not say the ids and tokens of '<\|begin_of_text\|>'"),
    (entry(ids=[]), "does not say the ids and tokens of"),
    (entry(tokens=[BEGIN, BEGIN]), "does not say the ids and tokens of"),
    (entry(ids=[128000]), "has the id 128000, among the added tokens 267"),
    (entry(ids=["267"]), "has the id '267', among the added tokens 267"),
    (entry(tokens=["<s>"]), "'<s>' is not among the added tokens"),
    (entry(tokens=[["<s>"]]), r"\['<s>'\] is not among the added tokens"),
    (lambda part: {"type": "Sequence", "processors": [part, part]}, "TemplateProcessing 2 times"),
    (lambda part: {"type": "Sequence", "processors": part}, "has no list of processors"),
    (lambda part: {"type": "Sequence", "processors": [{"type": "RobertaProcessing"}]},
     "post_processor 'RobertaProcessing' is not supported"),
    (lambda part: {"type": "Sequence", "processors": [{"type": "Sequence", "processors": []}]},
     "post_processor 'Sequence' is not supported"),
    (lambda part: {"type": ["ByteLevel"]}, r"post_processor \['ByteLevel'\] is not supported"),
    (lambda part: 7, "post_processor 7 is not supported"),
])
def test_templates_that_are_refused(plain, spoil, message):
    part = template(plain.special_tokens, [*special(BEGIN), *text()])
    with pytest.raises(EulerError, match=message) as caught:
        Tokenizer.from_json(with_post_processor(plain, spoil(part)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.oracle
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("case", EXPECTED)
def test_an_outside_reader_adds_the_same_ids(plain, case, alone):
    """The file as it came, and as we write it; special tokens in a text are text here."""
    tokenizers = pytest.importorskip("tokenizers")
    part = template(plain.special_tokens, single_of(case))
    if not alone:
        part = {"type": "Sequence", "processors": [BYTE_LEVEL, part]}
    source = with_post_processor(plain, part)
    ours = Tokenizer.from_json(source)
    for file in (source, ours.to_json()):
        reader = tokenizers.Tokenizer.from_str(file)
        reader.encode_special_tokens = True
        for line in TEXTS:
            assert reader.encode(line).ids == ours.encode_document(line)
            assert reader.encode(line, add_special_tokens=False).ids == ours.encode(line)
        pair = reader.encode("a", "b").ids
        assert pair[:len(ours.encode_prompt("a"))] == ours.encode_prompt("a")
