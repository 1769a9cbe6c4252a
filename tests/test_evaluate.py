"""What of the evaluation needs no lm-evaluation-harness: stop strings, requests, the command."""

from __future__ import annotations

import sys

import pytest

from euler_ir.errors import EulerError
from model.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from runtime import evaluate
from runtime.cli import run_command
from runtime.evaluation.generation_request import generation_request
from runtime.evaluation.stop_strings import text_until


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["to be, or not to be"] * 9, 264, [END_OF_DOCUMENT])


@pytest.mark.parametrize(("text", "stops", "expected", "read"), [
    ("abcdef", ["cd"], "ab", 4), ("abcdef", ["ef", "bc"], "a", 3), ("abcdef", ["a"], "", 1),
    ("abcdef", ["bcd", "c"], "ab", 3), ("abcdef", ["x"], "abcdef", 6), ("abcdef", [], "abcdef", 6),
    ("aéb", ["é"], "a", 3), ("aéb", ["b"], "aé", 4), ("a\n\nb", ["\n\n"], "a", 3),
])
def test_text_ends_before_the_first_stop_string_and_reads_no_further(tokenizer, text, stops,
                                                                     expected, read):
    """Tokens of one byte each: every stop string of more than one lies across several."""
    bytes_of = tokenizer.vocabulary.id_of_bytes
    tokens = iter([bytes_of[bytes([byte])] for byte in text.encode()])
    assert text_until(tokenizer, tokens, stops) == expected
    assert len(list(tokens)) == len(text.encode()) - read


def test_a_stop_string_inside_a_token(tokenizer):
    (be,) = tokenizer.encode(" be")
    assert text_until(tokenizer, tokenizer.encode("to be"), ["b"]) == "to "
    assert text_until(tokenizer, [be, be], ["e b"]) == " b"


def test_tokens_without_text_and_a_character_that_is_never_completed(tokenizer):
    end = tokenizer.special_tokens[END_OF_DOCUMENT]
    half = tokenizer.vocabulary.id_of_bytes["é".encode()[:1]]
    assert text_until(tokenizer, [end, *tokenizer.encode("to")], [], silent=[end]) == "to"
    assert text_until(tokenizer, [end], []) == END_OF_DOCUMENT
    assert text_until(tokenizer, [half], []) == "\ufffd"
    assert text_until(tokenizer, [half], ["\ufffd"]) == ""


@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, ((), 64, 0.0, 0, 1.0)),
    ({"until": "\n"}, (("\n",), 64, 0.0, 0, 1.0)),
    ({"until": ["a", "", "b"], "max_gen_toks": 5}, (("a", "b"), 5, 0.0, 0, 1.0)),
    ({"until": None, "max_tokens": "7", "max_gen_toks": None}, ((), 7, 0.0, 0, 1.0)),
    ({"max_new_tokens": 8, "max_gen_toks": 6.0}, ((), 6, 0.0, 0, 1.0)),
    ({"do_sample": False, "temperature": 0.7}, ((), 64, 0.0, 0, 1.0)),
    ({"do_sample": True}, ((), 64, 1.0, 0, 1.0)),
    ({"do_sample": True, "temperature": 0}, ((), 64, 0.0, 0, 1.0)),
    ({"temperature": 0.7, "top_k": 4, "top_p": 0.5}, ((), 64, 0.7, 4, 0.5)),
])
def test_requests(arguments, expected):
    found = generation_request(arguments, 64)
    assert (found.until, found.max_tokens, found.temperature, found.top_k, found.top_p) == expected


def test_a_sampler_goes_on_where_the_last_one_ended():
    sampler = generation_request({"temperature": 0.7, "top_k": 4}, 9).sampler([1, 3], 5)
    assert (sampler.temperature, sampler.top_k, sampler.draws) == (0.7, 4, 5)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"num_beams": 4, "eos": 1}, "generation_kwargs has 'eos', 'num_beams', which is not supp"),
    ({"until": 3}, "until must be a string or a list of strings, got 3"),
    ({"until": ["a", 3]}, "until must be a string or a list of strings"),
    ({"max_gen_toks": 0}, "max_gen_toks must be at least 1, got 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, got 1.5"),
    ({"max_tokens": float("inf")}, "max_tokens must be a whole number, got inf"),
    ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_k": [1]}, r"top_k must be a whole number, got \[1\]"),
    ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
])
def test_requests_that_cannot_be(arguments, message):
    with pytest.raises(EulerError, match=f"^{message}"):
        generation_request(arguments, 64)


def test_without_the_harness_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "runtime.evaluation.lm_eval_model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run_command(evaluate.main, ["--checkpoint", "none", "--tasks", "x"]) == 2
    assert capsys.readouterr() == (
        "", "error: evaluation needs lm-evaluation-harness: pip install -e '.[eval]' in "
        "the project's folder\n")


@pytest.mark.parametrize("arguments", [["--tasks", "x"], ["--checkpoint", "x"],
                                       ["--checkpoint", "x", "--tasks", "x", "--limit", "0"],
                                       ["--checkpoint", "x", "--tasks", "x", "--batch-size", "0"]])
def test_arguments_that_cannot_be(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")
