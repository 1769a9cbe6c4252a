"""Where texts begin and end: what imported files and the tokenizer say, what exports keep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.parameters import parameters
from model.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from runtime import generate
from runtime.cli import run_command
from runtime.convert import export_folder, export_gguf, import_folder
from runtime.exchange.boundaries import Boundaries, boundaries
from runtime.inference.generation import END_OF_TEXT, Generator
from runtime.inference.sampler import Sampler
from runtime.inference.trained import load_trained
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gpt2_tensors,
    llama_tensors,
    write_model,
)
from tests.runners import backend

NAMES = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", END_OF_DOCUMENT]
TEXT = "to be, or not to be, that is the question: "


def tokenizer(names=NAMES[:3], prefix=(), suffix=()) -> Tokenizer:
    """Of 270 tokens, the last ones special; `prefix` and `suffix` are indices of `names`."""
    vocabulary = train_tokenizer([TEXT * 9], 270, names).vocabulary
    ids = list(vocabulary.special_tokens.values())
    return Tokenizer(replace(vocabulary, prefix=tuple(ids[i] for i in prefix),
                             suffix=tuple(ids[i] for i in suffix)))


def source(config=None, generation=None) -> dict:
    files = {} if generation is None else {"generation_config.json": generation}
    return {"config": config or {}, "files": files}


# Ids of NAMES[:3] in a vocabulary of 270.
BEGIN, END, EOT = 267, 268, 269


@pytest.mark.parametrize(("names", "prefix", "suffix", "expected"), [
    (NAMES[3:], (), (), Boundaries(269, (269,))),
    ([], (), (), Boundaries(None, ())),
    (NAMES[:3], (), (), Boundaries(None, ())),
    (NAMES[:3], (0,), (), Boundaries(BEGIN, (BEGIN,))),
    (NAMES[:3], (0,), (2, 1), Boundaries(BEGIN, (END,))),
    (NAMES[1:], (0,), (), Boundaries(267, (269,))),
], ids=["separator", "none", "only names", "prefix", "both", "prefix and separator"])
def test_what_the_tokenizer_says(names, prefix, suffix, expected):
    assert boundaries(tokenizer(names, prefix, suffix).vocabulary) == expected


@pytest.mark.parametrize(("config", "generation", "expected"), [
    ({"bos_token_id": BEGIN, "eos_token_id": END}, None, Boundaries(BEGIN, (END,))),
    ({"eos_token_id": [END, EOT]}, None, Boundaries(None, (END, EOT))),
    ({"bos_token_id": BEGIN, "eos_token_id": END}, {"eos_token_id": [EOT, END]},
     Boundaries(BEGIN, (EOT, END))),
    ({"eos_token_id": END}, {"eos_token_id": None, "temperature": 0.6}, Boundaries(None, (END,))),
    ({"eos_token_id": END}, {"bos_token_id": BEGIN, "eos_token_id": []}, Boundaries(BEGIN, (END,))),
    ({"bos_token_id": 50256, "eos_token_id": 50256}, None, Boundaries(None, ())),
    ({"eos_token_id": [-1, 128009, EOT]}, None, Boundaries(None, (EOT,))),
    ({"bos_token_id": None, "eos_token_id": None}, None, Boundaries(None, ())),
])
def test_what_imported_files_say(config, generation, expected):
    record = source(config, None if generation is None else json.dumps(generation))
    assert boundaries(tokenizer().vocabulary, record) == expected


def test_ids_of_other_vocabularies_leave_it_to_the_tokenizer():
    record = source({"bos_token_id": 50256, "eos_token_id": 50256})
    assert boundaries(tokenizer(NAMES[3:]).vocabulary, record) == Boundaries(269, (269,))


def test_texts_begin_as_the_tokenizer_begins_them():
    record = source({"bos_token_id": END, "eos_token_id": EOT})
    assert boundaries(tokenizer(prefix=(0,)).vocabulary, record) == Boundaries(BEGIN, (EOT,))


@pytest.mark.parametrize(("config", "generation", "message"), [
    ({"eos_token_id": "</s>"}, None, "config.json: eos_token_id must be a token id or a list of"),
    ({"eos_token_id": [1, [2]]}, None, "config.json: eos_token_id must be a token id"),
    ({"eos_token_id": True}, None, "config.json: eos_token_id must be a token id"),
    ({"bos_token_id": 1.0}, None, "config.json: bos_token_id must be a token id"),
    ({}, '{"eos_token_id": {}}', "generation_config.json: eos_token_id must be a token id"),
    ({}, "[]", "generation_config.json: not a JSON object"),
    ({}, "[" * 100_000, "generation_config.json: not a JSON document"),
    ({}, '{"eos_token_id": ' + "9" * 5000 + "}", "generation_config.json: not a JSON document"),
])
def test_what_is_no_id_is_refused_on_import(tmp_path, config, generation, message):
    config = {**GPT2_CONFIG, **config}
    folder = write_model(tmp_path / "in", config, gpt2_tensors(config), tokenizer().to_json())
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    with pytest.raises(EulerError, match=message) as caught:
        import_folder(folder, tmp_path / "run")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def imported(directory, ends, **around):
    """The run of a Llama model, and its folder's name."""
    config = {**LLAMA_CONFIG, "bos_token_id": BEGIN, "eos_token_id": ends}
    write_model(directory / "in", config, llama_tensors(config), tokenizer(**around).to_json())
    import_folder(directory / "in", directory / "run")
    return directory / "run"


def test_every_end_of_an_imported_model_stops_generation(tmp_path, capsys):
    trained = load_trained(imported(tmp_path / "1", [END, EOT], prefix=(0,)), backend("reference"))
    assert trained.boundaries == Boundaries(BEGIN, (END, EOT))
    assert trained.encode("") == [BEGIN]
    prompt = trained.encode("be")
    assert prompt == [BEGIN, *trained.tokenizer.encode("be")]
    greedy = Sampler(0, ids=trained.tokenizer.vocabulary.ids)
    tokens = list(Generator(trained.model).stream(prompt, 8, greedy))

    stop = tokens[4]
    again = imported(tmp_path / "2", [END, stop], prefix=(0,))
    assert run_command(generate.main, ["--checkpoint", str(again), "--prompt", "be", "--backend",
                                       "reference", "--max-tokens", "8", "--temperature", "0"]) == 0
    written = capsys.readouterr()
    expected = tokens[:tokens.index(stop)]
    assert written.out.splitlines()[-1:] == ["be" + trained.tokenizer.decode(expected)]
    assert written.err.startswith(f"{len(expected)} tokens")
    assert f"ended by: {END_OF_TEXT}" in written.err


def test_an_empty_prompt_begins_as_the_imported_files_say(tmp_path):
    trained = load_trained(imported(tmp_path, [END]), backend("reference"))
    assert trained.encode("") == [BEGIN]
    assert trained.encode("be") == trained.tokenizer.encode("be")


def trained_run(directory, own: Tokenizer):
    config = ModelConfig("llama", width=16, heads=4, kv_heads=2, layers=1, context=16,
                         vocabulary=own.vocabulary_size, hidden=20)
    state = {"step": 1, "model": config.to_dict(),
             "settings": {"precision": "f32", "context": 16}}
    with CheckpointWriter(directory) as writer:
        writer.save({p.name: p.initial(0) for p in parameters(config)}, {}, state, own.to_json())
    return directory


def test_exports_of_a_trained_model_say_it(tmp_path):
    run = trained_run(tmp_path / "run", tokenizer(prefix=(0,), suffix=(1,)))
    export_folder(run, tmp_path / "out")
    config, settings = (json.loads((tmp_path / "out" / name).read_text())
                        for name in ("config.json", "tokenizer_config.json"))
    assert (config["bos_token_id"], config["eos_token_id"]) == (BEGIN, END)
    assert (settings["bos_token"], settings["eos_token"]) == tuple(NAMES[:2])


@pytest.mark.parametrize("case", [
    ((), (), [END, EOT], (BEGIN, END, False, False)),
    ((0,), (), [EOT], (BEGIN, EOT, True, False)),
    ((0,), (1,), [END, EOT], (BEGIN, END, True, True)),
    ((2,), (), END, (EOT, END, True, False)),
], ids=["nothing around", "before", "around", "another before"])
def test_gguf_says_it(tmp_path, case):
    gguf = pytest.importorskip("gguf")
    prefix, suffix, ends, expected = case
    run = imported(tmp_path, ends, names=NAMES[:3], prefix=prefix, suffix=suffix)
    vocabulary = load_trained(run, backend("reference")).tokenizer.vocabulary
    assert vocabulary.ignore_merges is False
    export_gguf(run, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    keys = ("bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token")
    assert tuple(fields[f"tokenizer.ggml.{key}"].contents() for key in keys) == expected


@pytest.mark.parametrize(("prefix", "suffix"), [((0, 2), ()), ((0,), (2,)), ((), (1, 1))])
def test_what_llama_cpp_cannot_put_around_a_text_is_refused(tmp_path, prefix, suffix):
    pytest.importorskip("gguf")
    run = imported(tmp_path, END, prefix=prefix, suffix=suffix)
    with pytest.raises(EulerError, match="one token before a text and its end after it, or none"):
        export_gguf(run, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


@pytest.mark.oracle
def test_transformers_puts_the_same_around_a_text(tmp_path):
    transformers = pytest.importorskip("transformers")
    own = tokenizer(prefix=(0,))
    export_folder(trained_run(tmp_path / "run", own), tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode(TEXT) == own.encode_prompt(TEXT)
    assert theirs.encode(TEXT, add_special_tokens=False) == own.encode(TEXT)
    assert theirs.bos_token_id == theirs.eos_token_id == BEGIN
