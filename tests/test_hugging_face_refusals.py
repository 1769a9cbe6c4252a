"""Hugging Face folders that are refused: each in one line that says why."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from euler_ir.errors import EulerError
from runtime.convert import import_folder
from runtime.exchange.hugging_face_import import read_folder
from tests.hugging_face import (
    GPT2_CONFIG,
    gpt2_tensors,
    small_tokenizer,
    split_file,
    write_model,
)


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
    refused(write_model(tmp_path / "in", GPT2_CONFIG, tensors), message)


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
    document = json.loads(small_tokenizer())
    document["added_tokens"][0]["id"] = 10**9
    document["model"]["vocab"]["<|endoftext|>"] = 10**9
    (gpt2 / "tokenizer.json").write_text(json.dumps(document))
    refused(gpt2, "has ids up to 1000000000, the model's vocabulary is 300")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files_are_named(gpt2, name):
    (gpt2 / name).unlink()
    (gpt2 / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refused(gpt2, {"model.safetensors": "is a pickle, which is never read"}.get(name, name))


def test_nothing_is_written_where_the_import_is_refused(tmp_path, gpt2):
    (gpt2 / "tokenizer.json").unlink()
    with pytest.raises(EulerError):
        import_folder(gpt2, tmp_path / "run")
    assert not (tmp_path / "run").exists()
