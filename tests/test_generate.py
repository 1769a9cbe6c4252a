"""Decoding with a cache equals a full forward pass; the context is a limit; the command."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from euler_ir import interpreter
from euler_ir.errors import EulerError
from euler_ir.types import F32, F64
from model.config import PRESETS, shrink
from model.tokenizer import END_OF_DOCUMENT, train_tokenizer
from runtime import generate
from runtime.cli import run_command
from runtime.engine import Model
from runtime.gradcheck import well_conditioned_weights
from runtime.inference import generation
from runtime.inference.generation import CONTEXT_FULL, END_OF_TEXT, MAX_TOKENS, Generator
from runtime.inference.sampler import Sampler
from runtime.inference.trained import load_trained
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.models import contents, logits_function
from tests.runners import BACKENDS, backend

ROOT = Path(__file__).parent.parent
GROUPED = replace(shrink(PRESETS["nano-1m"]), context=32)
PLAIN = replace(shrink(PRESETS["llama-124m"]), context=32)
LEARNED = replace(shrink(PRESETS["gpt2-124m"]), context=32)
TOKENS = np.random.default_rng(5).integers(0, GROUPED.vocabulary, 20).tolist()
every_backend = pytest.mark.parametrize("name", BACKENDS)
every_kind = pytest.mark.parametrize("config", [GROUPED, PLAIN, LEARNED],
                                     ids=["grouped", "plain", "learned"])


def model(config, name="reference", dtype=F32) -> Model:
    result = Model(config, backend(name), dtype)
    result.load(well_conditioned_weights(config, 1))
    return result


@cache
def compiled(name: str, config, **options) -> Generator:
    return Generator(model(config, name), **options)


def generator(name="reference", config=GROUPED, chunk=8, **options) -> Generator:
    """One without a text; compiled once for all tests."""
    result = compiled(name, config, chunk=chunk, **options)
    result.reset()
    return result


@cache
def logits_at_every_position(config, time: int):
    return logits_function(config, 1, time, F64)


def full_logits(config, tokens) -> np.ndarray:
    """Logits at every position, [T, V], of one forward pass without a cache, in f64."""
    time = len(tokens)
    inputs = {"tokens": np.array([tokens]), "lo": np.zeros((1, time), np.int32),
              "hi": np.arange(1, time + 1)[None]}
    function = logits_at_every_position(config, time)
    return interpreter.run(
        function, {**contents(model(config, dtype=F64).bound), **inputs})["logits"][0]


@every_backend
@every_kind
@pytest.mark.parametrize("chunk", [8, 32])
@pytest.mark.parametrize("sizes", [(1,) * 20, (7, 1, 12), (1, 19), (20,), (8, 8, 4), (3, 9, 8)],
                         ids=str)
def test_logits_with_the_cache_are_those_of_a_full_forward_pass(name, config, chunk, sizes):
    expected = full_logits(config, TOKENS)
    text, end = generator(name, config, chunk=chunk), 0
    for size in sizes:
        found = text.extend(TOKENS[end:end + size])
        end += size
        np.testing.assert_allclose(found, expected[end - 1], atol=1e-5)
        assert found.argmax() == expected[end - 1].argmax()


@every_backend
@every_kind
def test_a_text_that_fills_the_context_is_right_to_its_last_token(name, config):
    tokens = np.random.default_rng(6).integers(0, config.vocabulary, 32).tolist()
    expected = full_logits(config, tokens)
    text = generator(name, config, chunk=7)  # does not divide 32: the last chunks overlap
    np.testing.assert_allclose(text.extend(tokens[:30]), expected[29], atol=1e-5)
    np.testing.assert_allclose(text.extend(tokens[30:]), expected[31], atol=1e-5)


def test_no_program_is_asked_to_go_past_the_end_of_the_cache(monkeypatch):
    """Not even with the padding of a chunk, whatever the ops would do with it."""
    text, spans = Generator(model(LEARNED), chunk=7), []

    def recorded(program):
        def run(inputs):
            start = int(inputs["position"])
            spans.append((start, start + inputs["tokens"].shape[1]))
            return run_program(inputs)
        run_program = program.run
        return run

    for program in (text._decode, text._prefill):
        monkeypatch.setattr(program, "run", recorded(program))
    for prompt in (1, 7, 8, 25, 28, 31, 32):
        text.reset()
        list(text.stream((TOKENS * 2)[:prompt], 40, Sampler()))
    assert min(start for start, _ in spans) == 0 and max(stop for _, stop in spans) == 32


@every_backend
@pytest.mark.parametrize("prompt", [29, 31, 32])
def test_generation_stops_where_the_context_is_full(name, prompt):
    """The model sees at most 32 tokens; the one that follows them is still its prediction."""
    tokens = (TOKENS * 2)[:prompt]
    text = generator(name)
    found = list(text.stream(tokens, 10, Sampler(temperature=0)))
    assert len(found) == 33 - prompt and text.stop_reason == CONTEXT_FULL
    assert text.tokens == tokens + found
    for end in range(prompt, 33):
        assert found[end - prompt] == full_logits(GROUPED, text.tokens[:end])[-1].argmax()


@every_backend
def test_a_prompt_longer_than_the_context_is_refused_and_changes_nothing(name):
    expected = generator(name).extend(TOKENS)
    text = generator(name)
    with pytest.raises(EulerError, match="has 33 tokens, the model's context is 32"):
        text.stream((TOKENS * 2)[:33], 10, Sampler())
    assert text.tokens == []
    np.testing.assert_array_equal(text.extend(TOKENS), expected)


def test_a_conversation_grows_to_the_limit_and_no_further():
    text = generator()
    for turn in range(3):
        list(text.stream(TOKENS[:6], 4, Sampler(seed=turn)))
    assert len(text.tokens) == 30
    expected = full_logits(GROUPED, text.tokens)[-1]
    np.testing.assert_allclose(text.extend(()), expected, atol=1e-5)
    with pytest.raises(EulerError, match="has 36 tokens, the model's context is 32"):
        text.stream(TOKENS[:6], 4, Sampler())
    assert len(text.tokens) == 30


def test_a_text_can_be_left_in_the_middle_and_gone_on_with():
    text = generator()
    stream = text.stream(TOKENS[:5], 10, Sampler(seed=1))
    begun = [next(stream), next(stream)]
    stream.close()
    assert text.tokens == TOKENS[:5] + begun
    expected = full_logits(GROUPED, text.tokens + TOKENS[:3])[-1]
    np.testing.assert_allclose(text.extend(TOKENS[:3]), expected, atol=1e-5)


def test_reset_forgets_the_text():
    text = Generator(model(GROUPED), chunk=8)
    expected = text.extend(TOKENS[:3])
    text.extend(TOKENS)
    text.reset()
    np.testing.assert_array_equal(text.extend(TOKENS[:3]), expected)


def test_why_a_text_ended():
    text = generator()
    first = list(text.stream(TOKENS[:4], 6, Sampler(temperature=0)))
    assert len(first) == 6 and text.stop_reason == MAX_TOKENS
    text.reset()
    cut = first.index(first[3])  # greedy texts may repeat
    assert list(text.stream(TOKENS[:4], 6, Sampler(temperature=0), {first[3]})) == first[:cut]
    assert text.stop_reason == END_OF_TEXT and text.tokens == TOKENS[:4] + first[:cut]


def test_the_number_of_compiled_programs_does_not_depend_on_the_prompts(monkeypatch):
    times = []
    original = Generator._compile
    monkeypatch.setattr(Generator, "_compile",
                        lambda self, time: times.append(time) or original(self, time))
    text = Generator(model(GROUPED), chunk=8)
    for length in range(1, 20):
        text.reset()
        text.extend(TOKENS[:length])
    assert times == [1, 8]


@pytest.mark.parametrize(("tokens", "message"), [
    ([], "the prompt is empty"),
    ([3, 13], "13 is not a token id: the model's ids go from 0 to 12"),
    ([-1], "-1 is not a token id"),
])
def test_a_prompt_that_cannot_be_is_refused(tokens, message):
    with pytest.raises(EulerError, match=message):
        generator().stream(tokens, 3, Sampler())


@pytest.mark.parametrize("context", [0, 33])
def test_a_context_the_positions_do_not_cover_is_refused(context):
    with pytest.raises(EulerError, match=f"the context must be 1 to 32 tokens.* got {context}"):
        generator(context=context)


def test_weights_that_are_nan_end_in_an_error():
    broken = model(GROUPED)
    broken.weights["norm.weight"].write(np.full(1, np.nan))
    with pytest.raises(EulerError, match="hold NaN"):
        list(Generator(broken).stream(TOKENS, 3, Sampler()))


# The command

TEXT = "What's in a name? That which we call a rose by any other name would smell as sweet. " * 5


def save_run(directory: Path, special=(END_OF_DOCUMENT,), context=32) -> Path:
    """A run whose model has seven ids more than its tokenizer."""
    tokenizer = train_tokenizer([TEXT], 280, special_tokens=special)
    config = replace(GROUPED, vocabulary=tokenizer.vocabulary_size + 7)
    state = {"step": 5, "model": config.to_dict(),
             "settings": {"precision": "f32", "context": context}}
    with CheckpointWriter(directory) as writer:
        writer.save(model(config).stored(), {}, state, tokenizer.to_json())
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


def command(run, *more):
    return run_command(generate.main, ["--checkpoint", str(run), "--backend", "reference", *more])


def test_the_prompt_and_what_follows_are_printed_and_come_again(run, capsys):
    assert command(run, "--prompt", "a rose", "--max-tokens", "9", "--seed", "3") == 0
    first = capsys.readouterr()
    assert first.out.startswith("a rose") and first.out.endswith("\n")
    assert first.err.startswith("9 tokens, ") and "tokens/s, ended by: the number" in first.err
    assert first.err.count("\n") == 1
    checkpoint = next((run / "checkpoints").glob("step-*"))
    assert command(checkpoint, "--prompt", "a rose", "--max-tokens", "9", "--seed", "3") == 0
    assert capsys.readouterr().out == first.out
    assert command(run, "--prompt", "a rose", "--max-tokens", "9", "--seed", "4") == 0
    assert capsys.readouterr().out != first.out


def test_the_text_is_that_of_the_tokens(run, capsys):
    assert command(run, "--prompt", "a rose", "--max-tokens", "12", "--temperature", "0") == 0
    trained = load_trained(run, backend("reference"))
    text = Generator(trained.model, trained.context)
    sampler = Sampler(0, ids=trained.tokenizer.vocabulary.ids)
    ids = list(text.stream(trained.encode("a rose"), 12, sampler))
    assert capsys.readouterr().out == "a rose" + trained.tokenizer.decode(ids) + "\n"


def test_ids_the_tokenizer_does_not_know_are_never_chosen(run):
    trained = load_trained(run, backend("reference"))
    size = trained.tokenizer.vocabulary_size
    heads = trained.model.stored()["heads.weight"].copy()
    heads[:, size:] *= 100  # the model would love to
    trained.model.weights["heads.weight"].write(heads)
    text = Generator(trained.model)
    sampler = Sampler(5.0, ids=trained.tokenizer.vocabulary.ids)
    ids = list(text.stream(trained.encode("a"), 25, sampler))
    assert len(ids) == 25 and max(ids) < size


def test_an_empty_prompt_begins_a_document(run, tmp_path, capsys):
    assert command(run, "--max-tokens", "4") == 0
    capsys.readouterr()
    nothing_special = save_run(tmp_path, special=())
    assert command(nothing_special, "--prompt", "") == 2
    assert capsys.readouterr().err.startswith("error: the prompt is empty")


def test_the_room_for_a_text_grows_by_powers_of_two(tmp_path, capsys, monkeypatch):
    """A long context takes memory only where the text is long."""
    monkeypatch.setattr(generation, "SMALLEST_CAPACITY", 8)
    asked = []
    monkeypatch.setattr(generate, "Generator", lambda model, context: asked.append(context)
                        or Generator(model, context))
    run = save_run(tmp_path, context=24)
    prompt = load_trained(run, backend("reference")).encode("a")
    for more, room in ((4, 8), (8 - len(prompt), 8), (9 - len(prompt), 16), (99, 24)):
        assert command(run, "--prompt", "a", "--max-tokens", str(more)) == 0
        assert asked.pop() == room
    assert "the context is full" in capsys.readouterr().err


def test_a_prompt_cannot_forge_the_end_of_a_document(run):
    trained = load_trained(run, backend("reference"))
    assert trained.boundaries.begin not in trained.encode(f"rose{END_OF_DOCUMENT}name")


def test_the_context_is_that_of_the_training(tmp_path, capsys):
    run = save_run(tmp_path, context=8)
    assert command(run, "--prompt", "a", "--max-tokens", "30") == 0
    written = capsys.readouterr()
    assert written.err.startswith("8 tokens") and "the context is full" in written.err
    assert command(run, "--prompt", "To be, or not to be, that is") == 2
    assert "the model's context is 8" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--temperature", "nan"], "temperature must be a finite number"),
    (["--temperature", "-1"], "temperature must be a finite number"),
    (["--temperature", "inf", "--top-k", "-1"], "temperature must be a finite number"),
    (["--top-p", "nan"], "top-p must be between 0 and 1"),
    (["--top-p=-1e-9"], "top-p must be between 0 and 1"),
    (["--top-p", "1.5"], "top-p must be between 0 and 1"),
    (["--top-k", "-1"], "top-k must be 0"),
    (["--backend", "tpu"], "no backend 'tpu'"),
])
def test_wrong_settings_end_in_one_line_before_anything_is_printed(run, capsys, arguments, message):
    assert command(run, *arguments) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.count("\n") == 1
    assert written.err.startswith("error: ") and message in written.err


def test_settings_are_refused_before_the_checkpoint_is_read(tmp_path, capsys):
    assert command(tmp_path / "none", "--top-p", "2") == 2
    assert capsys.readouterr().err.startswith("error: top-p must be between 0 and 1, got 2")


def test_logits_that_turn_nan_in_the_middle_end_in_one_line(run, capsys, monkeypatch):
    extend, calls = Generator.extend, []

    def turning(self, tokens):
        calls.append(1)
        logits = extend(self, tokens)
        return logits if len(calls) < 3 else np.full_like(logits, np.nan)

    monkeypatch.setattr(Generator, "extend", turning)
    assert command(run, "--prompt", "a rose", "--max-tokens", "9") == 2
    written = capsys.readouterr()
    assert written.out.startswith("a rose") and written.err.count("\n") == 1
    assert "error: the model's logits hold NaN" in written.err


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--top-k", "many"],
                                       ["--seed", "-1"], ["--frob"]])
def test_flags_that_cannot_be_parsed_end_in_code_2(run, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        command(run, *arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_run_without_a_checkpoint_is_an_error(tmp_path, capsys):
    assert command(tmp_path / "none") == 2
    (tmp_path / "config.json").write_text("{}")
    assert command(tmp_path) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_is_an_error(tmp_path, capsys):
    tokenizer = train_tokenizer([TEXT], 280)
    config = replace(GROUPED, vocabulary=tokenizer.vocabulary_size)
    state = {"step": 5, "model": replace(config, hidden=12).to_dict(),
             "settings": {"precision": "f32", "context": 32}}
    with CheckpointWriter(tmp_path) as writer:
        writer.save(model(config).stored(), {}, state, tokenizer.to_json())
    assert command(tmp_path) == 2
    written = capsys.readouterr().err
    assert "layers.0.mlp.gate_up.weight has shape [22, 8], not [24, 8]" in written


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\N{REPLACEMENT CHARACTER}"),
                                                 ("ascii", "?")])
def test_the_command_as_a_process(run, encoding, shown):
    """A prompt that is no text, on a terminal that can show it or not."""
    done = subprocess.run([sys.executable, "-m", "runtime.generate", "--checkpoint", str(run),
                           "--backend", "reference", "--prompt", b"ros\xe9", "--max-tokens", "3"],
                          cwd=ROOT, capture_output=True, text=True, encoding="utf-8",
                          env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and done.stdout.startswith("ros" + shown)
    assert done.stderr.startswith("3 tokens")
