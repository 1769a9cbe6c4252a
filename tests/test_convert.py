"""Hugging Face folders in and out: what they compute, what comes back, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.parameters import parameters
from model.tokenizer import Tokenizer
from runtime import convert, generate, train
from runtime.checkpoint import CheckpointWriter, load_checkpoint
from runtime.cli import run_command
from runtime.convert import export_folder, import_folder
from runtime.execute import compile_function
from runtime.hugging_face import read_folder
from runtime.trained import load_trained
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    VOCABULARY,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
    small_tokenizer,
    write_model,
)
from tests.models import logits_function
from tests.runners import backend

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 12)
tokenizer_json = cache(small_tokenizer)


def write(folder: Path, config: dict, tensors: dict, **changes) -> Path:
    return write_model(folder, {**config, **changes}, tensors, tokenizer_json())


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return write(tmp_path / "gpt2", GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG))


@pytest.fixture
def llama(tmp_path) -> Path:
    return write(tmp_path / "llama", LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG))


def our_logits(run: Path) -> np.ndarray:
    """[T, V] of TOKENS, with the interpreter's backend."""
    model = load_trained(run, backend("reference")).model
    time = len(TOKENS)
    function = logits_function(model.config, 1, time, model.dtype)
    inputs = {"tokens": TOKENS[None].astype(np.int32), "lo": np.zeros((1, time), np.int32),
              "hi": np.arange(1, time + 1, dtype=np.int32)[None]}
    program = compile_function(function, model.backend, model.bound)
    return program.run(inputs)["logits"][0]


def file_tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


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
    folder = write(tmp_path / "in", config, stored)
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
    folder = write(tmp_path / "in", config, tensors)
    import_folder(folder, tmp_path / "run")
    np.testing.assert_allclose(our_logits(tmp_path / "run"), expected, rtol=0, atol=1e-4)
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types_of_the_source_come_back(tmp_path, dtype):
    tensors = llama_tensors(LLAMA_CONFIG, dtype=dtype)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    import_folder(write(tmp_path / "in", LLAMA_CONFIG, tensors), tmp_path / "run")
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
    import_folder(write(tmp_path / "in", LLAMA_CONFIG, tensors), tmp_path / "run")
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


def split_file(folder: Path) -> dict:
    """Make the folder's tensors two shards; the index, written beside them."""
    tensors = file_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, own in shards.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_shards_are_one_model(tmp_path, llama):
    tensors = file_tensors(llama)
    split_file(llama)
    import_folder(llama, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(file_tensors(tmp_path / "out"), tensors)


# Trained models out

NANO = ModelConfig("nano", width=16, heads=4, kv_heads=2, layers=2, context=16, vocabulary=281,
                   hidden=20, prediction_heads=3)


def trained_run(directory: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """A run with one checkpoint; its parameters."""
    tokenizer = tokenizer_json()
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
    import_folder(write(tmp_path / "big", LLAMA_CONFIG, tensors), tmp_path / "run2")
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


def test_flags_that_do_not_go_together(tmp_path, gpt2, capsys):
    for argv, message in [
        ((), "one of the arguments --from --checkpoint is required"),
        (("--from", gpt2), "--from needs --out"),
        (("--checkpoint", gpt2), "--checkpoint needs --to"),
        (("--from", gpt2, "--out", "x", "--dtype", "f16"), "--dtype does not go with --from"),
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


# What is refused, in one line


def refused(folder: Path, message: str) -> None:
    with pytest.raises(EulerError, match=message) as caught:
        read_folder(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


CONFIGS = [
    ({"architectures": ["MistralForCausalLM"]}, r"architectures \['MistralForCausalLM'\] is not"),
    ({"architectures": None, "model_type": "bert"}, r"architectures \['bert'\] is not supported"),
    ({"model_type": "gpt2"}, "model_type 'gpt2' does not go with LlamaForCausalLM"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_scaling of type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 5000.0 and, in rope_parameters, 1.0"),
    ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
    ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
    ({"sliding_window": 4096}, "'sliding_window' 4096 is not supported"),
    ({"quantization_config": {"bits": 4}}, "'quantization_config' .* is not supported"),
    ({"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map' .* is not supported"),
    ({"num_key_value_heads": 3}, "KV heads the heads"),
    ({"head_dim": 7}, "given_head_size must be even"),
    ({"vocab_size": 10**9}, "vocab_size must be a whole number from 1 to 16777216, got 1000000000"),
    ({"max_position_embeddings": 10**7}, "must be a whole number from 1 to 1048576, got 10000000"),
    ({"vocab_size": 301}, r"embed_tokens.weight has shape \[300, 24\], .* asks for \[301, 24\]"),
    ({"num_hidden_layers": 10**7}, "10000000 layers do not go with 21 tensors, .* enough for 3"),
    ({"num_hidden_layers": 4}, "config.json: 4 layers do not go with 21 tensors"),
    ({"num_hidden_layers": 3}, "missing tensors: model.layers.2"),
    ({"num_hidden_layers": 1}, "unknown tensors: model.layers.1"),
    ({"hidden_size": "24"}, "hidden_size must be a whole number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
    ({"hidden_size": "x" * 10**5}, r"got 'x+\.\.\.$"),
    ({"x" * 10**5: 1}, r"'x+\.\.\. 1 is not supported"),
    ({"max_position_embeddings": None}, "max_position_embeddings must be a whole number, got null"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=lambda value: str(value)[:40])
def test_configurations_that_are_refused(llama, change, message):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    refused(llama, message)


@pytest.mark.parametrize(("change", "message"), [
    ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not"),
    ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
    ({"n_ctx": 17}, "n_ctx 17 is not n_positions 16"),
    ({"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
])
def test_gpt2_configurations_that_are_refused(gpt2, change, message):
    (gpt2 / "config.json").write_text(json.dumps({**GPT2_CONFIG, **change}))
    refused(gpt2, message)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("h.1.ln_2.bias"), "missing tensors: transformer.h.1.ln_2.bias"),
    (lambda t: t.update({"h.0.extra": t["ln_f.bias"]}), "unknown tensors: h.0.extra"),
    (lambda t: t.update({"transformer.ln_f.bias": t["ln_f.bias"]}), "ln_f.bias twice"),
    (lambda t: t.update({"ln_f.bias": np.zeros(24, np.int8)}), "has the type I8, which is none of"),
    (lambda t: t.update({"ln_f.bias": np.zeros(23, np.float32)}), r"shape \[23\]"),
    (lambda t: t.update({"h.0.attn.bias": np.ones((1, 1, 16, 16), bool)}), "not the causal mask"),
    (lambda t: t.update({"h.0.attn.masked_bias": np.array(0, np.float32)}), "no large negative"),
    (lambda t: t.update({"lm_head.weight": t["wte.weight"] + 1}), "lm_head.weight differs from"),
])
def test_tensors_that_are_refused(tmp_path, change, message):
    tensors = gpt2_tensors(GPT2_CONFIG)
    change(tensors)
    refused(write(tmp_path / "in", GPT2_CONFIG, tensors), message)


def header(entries: dict, data: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(begin: int, end: int, shape) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("content", [
    b"", b"\x01", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2**40), b"\x80\x04pickle" * 9,
    struct.pack("<Q", 90 << 20) + b"{" + b" " * 100,
    header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12),
    header({"a": entry(0, 8, [2])}, 4),
    header({"a": entry(8, 0, [2])}, 8),
    header({"a": entry(0, 8, [2**62, 8])}, 8),
    header({"a": entry(0, 8, [-2])}, 8),
    header({"a": {**entry(0, 8, [2]), "dtype": "pickle"}}, 8),
    struct.pack("<Q", 1 << 20) + b"[" * (1 << 20),
    header({"a" * 10**5: entry(8, 0, [2])}, 8),
    header({"a": "x" * 10**5}),
], ids=lambda content: str(content[8:40]))
def test_files_that_are_no_safetensors(gpt2, content):
    (gpt2 / "model.safetensors").write_bytes(content)
    refused(gpt2, "is no sound safetensors file")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "sub/x.safetensors", "", "a\0b",
                                  "..\\x", "missing.safetensors"])
def test_index_files_cannot_name_files_elsewhere(llama, name):
    index = split_file(llama)
    index["weight_map"]["lm_head.weight"] = name
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(llama, "is missing" if "missing" in name else "is not one in that folder")


@pytest.mark.parametrize(("index", "message"), [
    ([], "not a JSON object"), ({"weight_map": {}}, "has no weight_map"),
    ({"weight_map": {"a": 1}}, "has no weight_map"),
    ({"weight_map": {"a": "model-1.safetensors"}}, "do not agree on a, "),
])
def test_index_files_that_are_refused(llama, index, message):
    split_file(llama)
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(llama, message)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_out_of_the_folder_are_refused(tmp_path, gpt2, name):
    (gpt2 / name).rename(tmp_path / name)
    (gpt2 / name).symlink_to(tmp_path / name)
    refused(gpt2, f"{name} is a link that leads out of the folder")
    (gpt2 / name).unlink()
    os.mkfifo(gpt2 / name)
    refused(gpt2, f"{name} is not a regular file")
    (gpt2 / name).unlink()
    (gpt2 / name).symlink_to(name)
    refused(gpt2, f"cannot read .*{name}")


def test_links_of_hugging_faces_cache_are_followed(tmp_path, gpt2):
    blobs, snapshot = tmp_path / "model/blobs", tmp_path / "model/snapshots/abc"
    shutil.copytree(gpt2, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert read_folder(snapshot).config == read_folder(gpt2).config


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", b"[" * 100_000, "config.json: not a JSON document"),
    ("config.json", b"[1,2]", "config.json: not a JSON object"),
    ("config.json", b'{"a":' + b"9" * 5000 + b"}", "config.json: not a JSON document"),
    ("config.json", b" " * (2 << 20), "is larger than 1048576 bytes"),
    ("config.json", b"\xff", "not UTF-8 at byte 0"),
    ("tokenizer.json", b"[" * (1 << 20), "not a JSON document"),
    ("tokenizer.json", b"9" * 5000, "not a JSON document"),
    ("tokenizer.json", b" " * (2 << 20), "is larger than 1096576 bytes"),
    ("tokenizer.json", b"{}", "tokenizer .*pre_tokenizer None"),
])
def test_json_files_that_are_refused(gpt2, name, content, message):
    (gpt2 / name).write_bytes(content)
    refused(gpt2, message)


def test_a_tokenizer_with_more_ids_than_the_vocabulary_is_refused(gpt2):
    document = json.loads(tokenizer_json())
    document["added_tokens"][0]["id"] = 10**9
    document["model"]["vocab"]["<|endoftext|>"] = 10**9
    (gpt2 / "tokenizer.json").write_text(json.dumps(document))
    refused(gpt2, "has ids up to 1000000000, the model's vocabulary is 300")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files_are_named(gpt2, name):
    (gpt2 / name).unlink()
    (gpt2 / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refused(gpt2, {"model.safetensors": "is a pickle, which is never read"}.get(name, name))


def test_a_tokenizer_from_elsewhere(tmp_path, gpt2):
    (gpt2 / "tokenizer.json").rename(tmp_path / "t.json")
    import_folder(gpt2, tmp_path / "run", tmp_path / "t.json")
    assert load_checkpoint(tmp_path / "run").tokenizer_json == tokenizer_json()


def test_nothing_is_written_where_the_import_is_refused(tmp_path, gpt2):
    (gpt2 / "tokenizer.json").unlink()
    with pytest.raises(EulerError):
        import_folder(gpt2, tmp_path / "run")
    assert not (tmp_path / "run").exists()
