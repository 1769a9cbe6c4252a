"""Hugging Face folders in and out: what they compute, and what comes back."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.parameters import parameters
from model.tokenizer import Tokenizer
from runtime import convert, generate, train
from runtime.cli import run_command
from runtime.compiler.driver import compile_function
from runtime.convert import export_folder, import_folder
from runtime.inference.trained import load_trained
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    VOCABULARY,
    file_tensors,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
    small_tokenizer,
    split_file,
    write_model,
)
from tests.models import logits_function
from tests.runners import backend

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 12)


def our_logits(run: Path) -> np.ndarray:
    """[T, V] of TOKENS, with the interpreter's backend."""
    model = load_trained(run, backend("reference")).model
    time = len(TOKENS)
    function = logits_function(model.config, 1, time, model.dtype)
    inputs = {"tokens": TOKENS[None].astype(np.int32), "lo": np.zeros((1, time), np.int32),
              "hi": np.arange(1, time + 1, dtype=np.int32)[None]}
    program = compile_function(function, model.backend, model.bound)
    return program.run(inputs)["logits"][0]


def assert_same_tensors(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


# What they compute, and that they come back


def with_prefix(tensors: dict) -> dict:
    return {f"transformer.{name}": array for name, array in tensors.items()}


def with_masks(tensors: dict) -> dict:
    mask = np.tri(GPT2_CONFIG["n_positions"], dtype=np.float32)[None, None]
    masks = {f"h.{i}.attn.bias": mask for i in range(2)}
    return tensors | masks | {f"h.{i}.attn.masked_bias": np.array(-1e4, np.float32)
                              for i in range(2)}


def with_masks_of_today(tensors: dict) -> dict:
    """Bytes, and truth values, as later releases of transformers wrote them."""
    mask = np.tri(GPT2_CONFIG["n_positions"])[None, None]
    return tensors | {"h.0.attn.bias": mask.astype(np.uint8), "h.1.attn.bias": mask.astype(bool)}


def with_head(tensors: dict) -> dict:
    return tensors | {"lm_head.weight": tensors["wte.weight"]}


GPT2_FILES = {"plain": lambda t: t, "prefix": with_prefix, "masks": with_masks,
              "masks of bytes": with_masks_of_today,
              "prefix and masks": lambda t: with_prefix(with_masks(t)), "head twice": with_head}


@pytest.mark.parametrize("inner", [None, 72, 24])
@pytest.mark.parametrize("variant", GPT2_FILES)
def test_gpt2_files(tmp_path, variant, inner):
    """Inner size 24: every matrix but c_attn is square."""
    config = {**GPT2_CONFIG, "n_inner": inner}
    tensors = gpt2_tensors(config)
    stored = GPT2_FILES[variant](tensors)
    folder = write_model(tmp_path / "in", config, stored)
    import_folder(folder, tmp_path / "run")
    expected = gpt2_logits(config, tensors, TOKENS)
    assert np.abs(expected).max() > 3
    np.testing.assert_allclose(our_logits(tmp_path / "run"), expected, rtol=0, atol=1e-4)
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), stored)
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


LLAMA_FILES = {
    "grouped, head size given": {},
    "one KV head": {"num_key_value_heads": 1},
    "KV heads not said": {"num_key_value_heads": 4},
    "usual head size": {"head_dim": 6},
    "tied": {"tie_word_embeddings": True},
    "newer rotary keys": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
}


@pytest.mark.parametrize("variant", LLAMA_FILES)
def test_llama_files(tmp_path, variant):
    config = {**LLAMA_CONFIG, **LLAMA_FILES[variant]}
    tensors = llama_tensors(config)
    expected = llama_logits(config, tensors, TOKENS)
    assert np.abs(expected).max() > 3
    if variant == "KV heads not said":
        del config["num_key_value_heads"]
    if variant == "usual head size":
        del config["head_dim"]
    if variant == "newer rotary keys":
        del config["rope_theta"], config["rope_scaling"]
    folder = write_model(tmp_path / "in", config, tensors)
    import_folder(folder, tmp_path / "run")
    np.testing.assert_allclose(our_logits(tmp_path / "run"), expected, rtol=0, atol=1e-4)
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types_of_the_source_come_back(tmp_path, dtype):
    tensors = llama_tensors(LLAMA_CONFIG, dtype=dtype)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    import_folder(write_model(tmp_path / "in", LLAMA_CONFIG, tensors), tmp_path / "run")
    inside = {array.dtype for array in load_checkpoint(tmp_path / "run").tensors.values()}
    assert inside == {np.dtype(np.float64 if dtype is np.float64 else np.float32)}
    expected = llama_logits(LLAMA_CONFIG, tensors, TOKENS)
    tolerance = 1e-11 if dtype is np.float64 else 1e-4
    np.testing.assert_allclose(our_logits(tmp_path / "run"), expected, rtol=0, atol=tolerance)
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)


def test_old_rotary_frequencies_come_back(tmp_path):
    tensors = llama_tensors(LLAMA_CONFIG)
    frequencies = 1 / np.float32(5000) ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = frequencies
    import_folder(write_model(tmp_path / "in", LLAMA_CONFIG, tensors), tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)


def test_files_beside_the_tensors_come_back(tmp_path, gpt2):
    text = '{"eos_token_id": 7}\n'
    for name in ("generation_config.json", "tokenizer_config.json"):
        (gpt2 / name).write_text(text)
    import_folder(gpt2, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/generation_config.json").read_text() == text
    assert (tmp_path / "out/tokenizer_config.json").read_text() == text
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (gpt2 / "tokenizer.json").read_bytes()


def test_half_a_surrogate_pair_comes_back(tmp_path, gpt2):
    """JSON can name it, UTF-8 cannot."""
    config = {**GPT2_CONFIG, "_name_or_path": "\ud83d"}
    (gpt2 / "config.json").write_text(json.dumps(config))
    import_folder(gpt2, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


def test_shards_are_one_model(tmp_path, llama):
    tensors = file_tensors(llama)
    split_file(llama)
    import_folder(llama, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)


def test_a_tokenizer_from_elsewhere(tmp_path, gpt2):
    (gpt2 / "tokenizer.json").rename(tmp_path / "t.json")
    import_folder(gpt2, tmp_path / "run", tmp_path / "t.json")
    assert load_checkpoint(tmp_path / "run").tokenizer_json == small_tokenizer()


# Trained models out

NANO = ModelConfig("nano", width=16, heads=4, kv_heads=2, layers=2, context=16, vocabulary=281,
                   hidden=20, prediction_heads=3)


def trained_run(directory: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """A run with one checkpoint; its parameters."""
    tokenizer = small_tokenizer()
    config = replace(config, vocabulary=Tokenizer.from_json(tokenizer).vocabulary_size)
    generator = np.random.default_rng(0)
    tensors = {p.name: p.initial(0) + generator.normal(scale=0.1, size=p.shape).astype(np.float32)
               for p in parameters(config)}
    state = {"step": 3, "model": config.to_dict(),
             "settings": {"precision": "f32", "context": config.context}}
    with CheckpointWriter(directory) as writer:
        writer.save(tensors, {}, state, tokenizer)
    return tensors


@pytest.mark.parametrize("config", [
    NANO, replace(NANO, prediction_heads=1, kind="llama", tied_head=True),
    replace(NANO, prediction_heads=1, kind="gpt2", kv_heads=4, tied_head=True),
    replace(NANO, prediction_heads=1, kind="gpt2", kv_heads=4),
], ids=["three heads", "llama tied", "gpt2 tied", "gpt2 untied"])
def test_a_trained_model_goes_out_and_comes_back(tmp_path, config):
    tensors = trained_run(tmp_path / "run", config)
    export_folder(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf/mtp_heads.safetensors").exists() == (config.prediction_heads > 1)
    stored = file_tensors(tmp_path / "hf")
    assert ("lm_head.weight" in stored) != config.tied_head
    further = tensors["heads.weight"][1:].nbytes if not config.tied_head else 0
    assert sum(array.nbytes for array in stored.values()) == sum(
        array.nbytes for array in tensors.values()) - further
    import_folder(tmp_path / "hf", tmp_path / "back")
    back = load_checkpoint(tmp_path / "back")
    assert_same_tensors(back.tensors, tensors)
    assert ModelConfig.from_dict(back.state["model"]) == replace(
        config, vocabulary=back.state["model"]["vocabulary"])
    export_folder(tmp_path / "back", tmp_path / "again")
    for path in (tmp_path / "hf").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_type_on_the_way_out(tmp_path, llama):
    import_folder(llama, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out", "BF16")
    for name, array in file_tensors(llama).items():
        found = file_tensors(tmp_path / "out")[name]
        assert found.tobytes() == array.astype(ml_dtypes.bfloat16).tobytes()
    tensors = file_tensors(llama)
    tensors["model.norm.weight"][3] = 1e6
    import_folder(write_model(tmp_path / "big", LLAMA_CONFIG, tensors), tmp_path / "run2")
    with pytest.raises(EulerError, match="model.norm.weight has numbers that do not fit F16"):
        export_folder(tmp_path / "run2", tmp_path / "out2", "F16")
    assert not (tmp_path / "out2").exists()


def test_what_gpt2_has_no_place_for_is_refused(tmp_path):
    trained_run(tmp_path / "run", replace(NANO, prediction_heads=1, kind="gpt2"))
    with pytest.raises(EulerError, match="has no KV heads shared .* 4 heads and 2 KV heads"):
        export_folder(tmp_path / "run", tmp_path / "out")


# The command


def run(*argv) -> int:
    return run_command(convert.main, [str(word) for word in argv])


def test_the_command_imports_generates_and_exports(tmp_path, gpt2, capsys):
    assert run("--from", gpt2, "--out", tmp_path / "run") == 0
    assert "GPT2LMHeadModel: 22,080 parameters" in capsys.readouterr().out
    generation = ["--checkpoint", str(tmp_path / "run"), "--prompt", "to be", "--backend",
                  "reference", "--max-tokens", "3", "--temperature", "0"]
    assert run_command(generate.main, generation) == 0
    assert capsys.readouterr().out.startswith("to be")
    assert run("--checkpoint", tmp_path / "run", "--to", tmp_path / "out") == 0
    assert run_command(train.main, ["--resume", str(tmp_path / "run")]) == 2
    assert "was imported: it has no run to go on with" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("size", [1000, 30_000])
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path, llama, capsys, form, size):
    """A limit on the size of files stands in for it: of JSON files, and of tensors."""
    import_folder(llama, tmp_path / "run")
    capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code = run("--checkpoint", tmp_path / "run", "--to", tmp_path / "out", "--format", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    written = capsys.readouterr()
    assert (code, written.out) == (2, "")
    assert written.err.startswith(f"error: cannot write {tmp_path / 'out'} (")
    assert written.err.endswith("): free some space or write elsewhere\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "run"]


def test_flags_that_do_not_go_together(tmp_path, gpt2, capsys):
    for argv, message in [
        ((), "one of the arguments --from --checkpoint is required"),
        (("--from", gpt2), "--from needs --out"),
        (("--checkpoint", gpt2), "--checkpoint needs --to"),
        (("--from", gpt2, "--out", "x", "--dtype", "f16"), "--dtype does not go with --from"),
        (("--checkpoint", gpt2, "--to", "x.gguf"), "is named like a GGUF file: add --format gguf"),
        (("--from", gpt2, "--out", gpt2), "holds a run already"),
    ]:
        try:
            assert run(*argv) == 2
        except SystemExit as exit_:
            assert exit_.code == 2
        assert message in capsys.readouterr().err
    run("--from", gpt2, "--out", tmp_path / "run")
    assert run("--checkpoint", tmp_path / "run", "--to", gpt2) == 2
    assert "exists already: name a new folder" in capsys.readouterr().err
