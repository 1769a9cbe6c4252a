"""Checkpoints with sound checksums that no save of ours wrote: one line that names file and key."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.parameters import parameters
from model.tokenizer import train_tokenizer
from runtime import convert, generate, train
from runtime.cli import run_command
from runtime.convert import import_folder
from runtime.data.batches import BatchStream
from runtime.data.streams import load_stream
from runtime.settings import Settings
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.hugging_face import GPT2_CONFIG, gpt2_tensors, small_tokenizer, write_model

TEXT = "What's in a name? That which we call a rose by any other name would smell as sweet. " * 5
CONTEXT = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run after its first step."""
    directory = tmp_path_factory.mktemp("trained")
    text = directory / "text.txt"
    text.write_text(TEXT)
    tokenizer = train_tokenizer([TEXT], 260)
    config = ModelConfig("nano", width=8, heads=2, kv_heads=1, layers=1, context=CONTEXT,
                         vocabulary=tokenizer.vocabulary_size, hidden=8)
    settings = Settings("nano-1m", steps=2, batch_size=1, context=CONTEXT, lr=1e-3,
                        schedule="constant", warmup=0, data=(str(text),))
    tensors = {p.name: p.initial(0) for p in parameters(config)}
    moments = {f"{moment}.{name}": np.zeros_like(array)
               for moment in "mv" for name, array in tensors.items()}
    train_part, _ = load_stream([text], tokenizer).split()
    state = {"step": 1, "t": 1, "skipped_in_a_row": 0, "model": config.to_dict(),
             "settings": settings.to_dict(),
             "data": BatchStream(train_part, batch_size=1, context=CONTEXT).state()}
    with CheckpointWriter(directory) as writer:
        writer.save(tensors, moments, state, tokenizer.to_json())
    return directory


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("imported")
    tensors = {**gpt2_tensors(GPT2_CONFIG), "h.0.attn.masked_bias": np.array(-1e4, np.float32)}
    import_folder(write_model(directory / "in", GPT2_CONFIG, tensors),
                  directory / "run")
    return directory / "run"


def forged(run: Path, directory: Path, path: tuple, value: object) -> Path:
    """A copy of the run whose state has another value in one place, with its checksum."""
    copy = shutil.copytree(run, directory / "forged")
    (file,) = copy.glob("checkpoints/*/state.json")
    document = json.loads(file.read_text())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    del document["checksum"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**document, "checksum": zlib.crc32(text.encode())}))
    return copy


def generation(run: Path):
    return generate.main, ["--checkpoint", str(run), "--prompt", "a", "--max-tokens", "1",
                           "--backend", "reference"]


def resuming(run: Path):
    return train.main, ["--resume", str(run), "--backend", "reference"]


def export(run: Path):
    return convert.main, ["--checkpoint", str(run), "--to", str(run.parent / "out")]


def refused(command, capsys, *messages: str) -> None:
    main, arguments = command
    assert run_command(main, arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and len(line) < 600
    for message in messages:
        assert message in line


def test_the_runs_are_sound(trained, imported, tmp_path, capsys):
    for run, commands in ((trained, (generation, resuming, export)),
                          (imported, (generation, export))):
        for command in commands:
            copy = forged(run, tmp_path / run.name / command.__name__, ("format_version",), 1)
            assert run_command(*command(copy)) == 0
    capsys.readouterr()


MODEL, SETTINGS = ("state", "model"), ("state", "settings")
FILES = ("files", "model.safetensors")
OF_ALL = [
    (("state",), 5, "state must be of JSON type dict, not int"),
    (("state", "step"), "1", "step must be of JSON type int, not str"),
    (("state", "step"), -1, "step must be from 0 to"),
    (("state", "step"), 10**30, "step must be from 0 to"),
    (("files",), [], "files must be of JSON type dict, not list"),
    (FILES, None, "model.safetensors must be of JSON type dict, not NoneType"),
    (FILES, {"bytes": 1}, "model.safetensors has missing keys: 'checksum'"),
    ((*FILES, "bytes"), "1", "bytes must be of JSON type int, not str"),
    (MODEL, None, "model must be of JSON type dict, not NoneType"),
    (MODEL, {"kind": "nano"}, "model configuration has missing keys: 'context', 'heads'"),
    ((*MODEL, "colour"), 1, "model configuration has unknown keys: 'colour'"),
    ((*MODEL, "kind"), [], "no model kind []"),
    ((*MODEL, "width"), "8", "model width must be a whole number from 1 to"),
    ((*MODEL, "width"), 10**30, "model width must be a whole number from 1 to"),
    ((*MODEL, "context"), 10**12, "model context must be a whole number from 1 to 1048576"),
    ((*MODEL, "layers"), 10**7, "10000000 layers do not go with 9 tensors"),
    ((*MODEL, "norm_eps"), "small", "model norm_eps must be a positive number, got 'small'"),
    ((*MODEL, "rope_base"), float("nan"), "model rope_base must be a positive number, got nan"),
    ((*MODEL, "rope_scaling"), 8, "model rope_scaling must be an object, got 8"),
]


@pytest.mark.parametrize(("path", "value", "message"), OF_ALL, ids=lambda value: str(value)[:40])
def test_a_forged_state_is_refused_by_every_command(trained, tmp_path, capsys, path, value,
                                                    message):
    run = forged(trained, tmp_path, path, value)
    for command in (generation, resuming, export):
        refused(command(run), capsys, "state.json", message)


OF_GENERATION = [
    (SETTINGS, [], "settings must be of JSON type dict, not list"),
    ((*SETTINGS, "precision"), 5, "precision must be of JSON type str, not int"),
    ((*SETTINGS, "precision"), "f8", "precision 'f8' is not available"),
    ((*SETTINGS, "context"), "x", "context must be of JSON type int, not str"),
    ((*SETTINGS, "context"), 0, "context must be from 1 to"),
]


@pytest.mark.parametrize(("path", "value", "message"), OF_GENERATION)
def test_what_generation_reads_of_the_settings(trained, tmp_path, capsys, path, value, message):
    refused(generation(forged(trained, tmp_path, path, value)), capsys, "state.json", message)


OF_RESUMING = [
    ((*SETTINGS, "steps"), "2", "setting steps must be a whole number from 1"),
    ((*SETTINGS, "batch_size"), 0, "setting batch_size must be a whole number from 1"),
    ((*SETTINGS, "accumulate"), 1.0, "setting accumulate must be a whole number from 1"),
    ((*SETTINGS, "seed"), -1, "setting seed must be a whole number from 0"),
    ((*SETTINGS, "lr"), float("inf"), "setting lr must be a positive number, got inf"),
    ((*SETTINGS, "data"), "text.txt", "setting data must be a list of paths, got 'text.txt'"),
    ((*SETTINGS, "data"), [1], "setting data must be a list of paths, got (1,)"),
    ((*SETTINGS, "schedule"), None, "setting schedule must be a string, got None"),
    ((*SETTINGS, "preset"), ["nano-1m"], "setting preset must be a string"),
    ((*SETTINGS, "colour"), 1, "settings has unknown keys: 'colour'"),
    (("state", "t"), None, "t must be of JSON type int, not NoneType"),
    (("state", "t"), 2**31, "t must be from 0 to"),
    (("state", "skipped_in_a_row"), -1, "skipped_in_a_row must be from 0 to"),
    (("state", "data"), 5, "data must be of JSON type dict, not int"),
    (("state", "data", "position"), -1, "position must be from 0 to"),
    (("state", "data", "position"), 10**30, "position must be from 0 to"),
    (("state", "data", "seed"), {}, "the checkpoint's seed is {}, here it is 0"),
]


@pytest.mark.parametrize(("path", "value", "message"), OF_RESUMING, ids=lambda v: str(v)[:40])
def test_what_resuming_reads(trained, tmp_path, capsys, path, value, message):
    refused(resuming(forged(trained, tmp_path, path, value)), capsys, "state.json", message)


def test_rows_longer_than_the_positions_are_refused(trained, tmp_path, capsys):
    run = forged(trained, tmp_path, (*SETTINGS, "context"), 9)
    refused(resuming(run), capsys, "rows of 9 tokens are longer than the 8")
    refused(generation(run), capsys, "the context must be 1 to 8 tokens", "got 9")


SOURCE = ("state", "source")
OF_EXPORT = [
    (SOURCE, 5, "source must be of JSON type dict, not int"),
    ((*SOURCE, "architecture"), "LlamaForCausalLM", "are not those of the model"),
    ((*SOURCE, "config"), {**GPT2_CONFIG, "n_head": 4}, "are not those of the model"),
    ((*SOURCE, "config"), {}, "architectures None is not supported"),
    ((*SOURCE, "files", "../../../evil"), "x", "files of the source are texts of"),
    ((*SOURCE, "files", "/tmp/evil"), "x", "files of the source are texts of"),
    ((*SOURCE, "files", "config.json"), "x", "files of the source are texts of"),
    ((*SOURCE, "files", "generation_config.json"), 5, "files of the source are texts of"),
    ((*SOURCE, "tensors"), {}, "tensors of the source: missing transformer.h.0.attn.c_attn.bias"),
    ((*SOURCE, "tensors", "evil"), "F32", "tensors of the source: unknown evil"),
    ((*SOURCE, "tensors", "wte.weight"), "F8", "'wte.weight' of the source has the type 'F8'"),
    ((*SOURCE, "constants", "evil"), [1.0], "constants of the source have 'evil'"),
    ((*SOURCE, "constants", "h.0.attn.masked_bias"), None, "constants of the source have 'h.0"),
    ((*SOURCE, "constants", "h.0.attn.masked_bias"), ["x"], "constants of the source have 'h.0"),
    ((*SOURCE, "constants", "wte.weight"), [1.0], "constants of the source have 'wte.weight'"),
    ((*SOURCE, "further_heads"), {"heads.1.weight": 5}, "has the type 5"),
]


@pytest.mark.parametrize(("path", "value", "message"), OF_EXPORT, ids=lambda v: str(v)[:40])
def test_a_forged_import_record_names_no_files(imported, tmp_path, capsys, path, value, message):
    run = forged(imported, tmp_path, path, value)
    for command in (generation, export):
        refused(command(run), capsys, "state.json", message)
    assert [entry.name for entry in tmp_path.iterdir()] == ["forged"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: {name: array.astype(np.int32) for name, array in tensors.items()},
     "embedding.weight has the type int32, which is no type of parameters"),
    (lambda tensors: {**tensors, "evil": np.zeros(1)}, "has a tensor evil"),
])
def test_tensors_of_another_kind_are_refused(trained, tmp_path, capsys, change, message):
    checkpoint = next((trained / "checkpoints").iterdir())
    state = json.loads((checkpoint / "state.json").read_text())["state"]
    config = ModelConfig.from_dict(state["model"])
    tensors = change({p.name: p.initial(0) for p in parameters(config)})
    with CheckpointWriter(tmp_path) as writer:
        writer.save(tensors, {}, state, (checkpoint / "tokenizer.json").read_text())
    for command in (generation, resuming, export):
        refused(command(tmp_path), capsys, "model.safetensors", message)


@pytest.mark.parametrize(("tokenizer_json", "message"), [
    ("{}", "pre_tokenizer None is not supported"),
    (small_tokenizer(), "the tokenizer has ids up to 279, the model's vocabulary is 260"),
])
def test_a_tokenizer_of_another_model_is_refused(trained, tmp_path, capsys, tokenizer_json,
                                                 message):
    """An id past the embedding's end must not reach the code that looks it up."""
    checkpoint = next((trained / "checkpoints").iterdir())
    state = json.loads((checkpoint / "state.json").read_text())["state"]
    config = ModelConfig.from_dict(state["model"])
    with CheckpointWriter(tmp_path) as writer:
        writer.save({p.name: p.initial(0) for p in parameters(config)}, {}, state, tokenizer_json)
    for command in (generation, resuming, export):
        refused(command(tmp_path), capsys, "tokenizer.json", message)
