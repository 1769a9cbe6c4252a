"""GGUF files as an independent reader sees them: configuration, tokens, the layout of Q and K."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.tokenizer import Tokenizer, train_tokenizer
from runtime import convert
from runtime.cli import run_command
from runtime.convert import export_gguf, import_folder
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    VOCABULARY,
    gpt2_tensors,
    llama_tensors,
    small_tokenizer,
    write_model,
)
from tests.test_convert import NANO, trained_run

PADDED = 320


def imported(directory: Path, config: dict, tensors: dict, tokenizer=None) -> Path:
    write_model(directory / "in", config, tensors, tokenizer)
    import_folder(directory / "in", directory / "run")
    return directory / "run"


def fields(reader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def values(tensor) -> np.ndarray:
    """A tensor's numbers, [outputs, inputs]."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return np.ascontiguousarray(tensor.data).view(ml_dtypes.bfloat16)
    return tensor.data


GPT2_NAMES = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
              "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
LLAMA_NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
               "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
               "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def expected_gpt2(tensors: dict, tied: bool) -> dict[str, np.ndarray]:
    result = {"token_embd.weight": tensors["wte.weight"],
              "position_embd.weight": tensors["wpe.weight"],
              "output.weight": tensors["wte.weight" if tied else "lm_head.weight"]}
    for kind in ("weight", "bias"):
        result[f"output_norm.{kind}"] = tensors[f"ln_f.{kind}"]
        for i in range(2):
            result |= {f"blk.{i}.{ours}.{kind}": tensors[f"h.{i}.{theirs}.{kind}"].T
                       for ours, theirs in GPT2_NAMES.items()}
    return result


def expected_llama(tensors: dict, tied: bool) -> dict[str, np.ndarray]:
    result = {"token_embd.weight": tensors["model.embed_tokens.weight"],
              "output_norm.weight": tensors["model.norm.weight"]}
    if not tied:
        result["output.weight"] = tensors["lm_head.weight"]
    for i in range(2):
        for ours, theirs in LLAMA_NAMES.items():
            array = tensors[f"model.layers.{i}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):  # heads of 8: row 2j is j, row 2j + 1 is j + 4
                order = [8 * h + j + 4 * half for h in range(len(array) // 8) for j in range(4)
                         for half in (0, 1)]
                array = array[order]
            result[f"blk.{i}.{ours}.weight"] = array
    return result


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights(tmp_path, kind, tied, dtype):
    """4 query and 2 KV heads of 8: K's rows go by its own number of heads."""
    if kind == "gpt2":
        config = {**GPT2_CONFIG, "tie_word_embeddings": tied, "vocab_size": PADDED}
        tensors = gpt2_tensors(config)
        if not tied:
            tensors["lm_head.weight"] = tensors["wte.weight"] + 1
        expected = expected_gpt2(tensors, tied)
    else:
        config = {**LLAMA_CONFIG, "tie_word_embeddings": tied, "vocab_size": PADDED}
        tensors = llama_tensors(config)
        expected = expected_llama(tensors, tied)
    run = imported(tmp_path, config, tensors)
    path = tmp_path / "model.gguf"
    export_gguf(run, path, dtype)
    reader = gguf.GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    numpy_type = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    for tensor in reader.tensors:
        array = expected[tensor.name]
        flat = array.ndim == 1 or tensor.name == "position_embd.weight"
        assert tensor.tensor_type.name == ("F32" if flat else dtype), tensor.name
        assert tensor.data_offset % reader.alignment == 0
        np.testing.assert_array_equal(values(tensor), array.astype(
            np.float32 if flat else numpy_type), err_msg=tensor.name)
    export_gguf(run, tmp_path / "again.gguf", dtype)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


def test_configuration_of_llama(tmp_path):
    run = imported(tmp_path, LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG))
    export_gguf(run, tmp_path / "model.gguf")
    found = fields(gguf.GGUFReader(tmp_path / "model.gguf"))
    assert found["general.architecture"] == "llama" and found["general.file_type"] == 0
    for key, value in {"block_count": 2, "context_length": 16, "embedding_length": 24,
                       "feed_forward_length": 40, "attention.head_count": 4,
                       "attention.head_count_kv": 2, "attention.key_length": 8,
                       "attention.value_length": 8, "rope.dimension_count": 8,
                       "rope.freq_base": 5000.0, "vocab_size": VOCABULARY}.items():
        assert found[f"llama.{key}"] == value, key
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_configuration_of_gpt2(tmp_path):
    run = imported(tmp_path, {**GPT2_CONFIG, "n_inner": 72}, gpt2_tensors(
        {**GPT2_CONFIG, "n_inner": 72}))
    export_gguf(run, tmp_path / "model.gguf")
    found = fields(gguf.GGUFReader(tmp_path / "model.gguf"))
    assert found["general.architecture"] == "gpt2"
    for key, value in {"block_count": 2, "context_length": 16, "embedding_length": 24,
                       "feed_forward_length": 72, "attention.head_count": 3}.items():
        assert found[f"gpt2.{key}"] == value, key
    assert found["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)


def test_tokens(tmp_path):
    """Token ids keep their numbers; rows that no token has are unused."""
    document = json.loads(small_tokenizer())
    for number, text, special in ((290, "<tool>", False), (310, "<|user|>", True)):
        document["added_tokens"].append({"id": number, "content": text, "special": special})
    config = {**GPT2_CONFIG, "vocab_size": PADDED}
    text = json.dumps(document)
    run = imported(tmp_path, config, gpt2_tensors(config), text)
    export_gguf(run, tmp_path / "model.gguf")
    found = fields(gguf.GGUFReader(tmp_path / "model.gguf"))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == PADDED
    vocabulary = Tokenizer.from_json(text).vocabulary
    for number in range(PADDED):
        if number in vocabulary.tokens:
            assert types[number] == gguf.TokenType.NORMAL
            assert document["model"]["vocab"][tokens[number]] == number
        elif number not in (290, 310, vocabulary.special_tokens["<|endoftext|>"]):
            assert types[number] == gguf.TokenType.UNUSED
    assert (tokens[290], types[290]) == ("<tool>", gguf.TokenType.USER_DEFINED)
    assert (tokens[310], types[310]) == ("<|user|>", gguf.TokenType.CONTROL)
    assert len(set(tokens)) == PADDED
    assert found["tokenizer.ggml.merges"] == [
        " ".join(pair) for pair in document["model"]["merges"]]
    assert found["tokenizer.ggml.eos_token_id"] == found["tokenizer.ggml.bos_token_id"] == (
        vocabulary.special_tokens["<|endoftext|>"])
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_a_tokenizer_without_an_end_of_text(tmp_path):
    """A file that names none would have llama.cpp stop at token 11, an ordinary one. Byte 255 is
    in no text."""
    text = train_tokenizer(["to be, or not to be"], 260, []).to_json()
    run = imported(tmp_path, GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG), text)
    export_gguf(run, tmp_path / "model.gguf")
    found = fields(gguf.GGUFReader(tmp_path / "model.gguf"))
    assert found["tokenizer.ggml.eos_token_id"] == found["tokenizer.ggml.bos_token_id"] == 255
    assert found["tokenizer.ggml.tokens"][255] == "ÿ"


def command(*argv) -> int:
    return run_command(convert.main, [str(word) for word in argv])


def test_further_heads_are_left_out_only_when_asked(tmp_path, capsys):
    tensors = trained_run(tmp_path / "run", NANO)
    argv = ("--checkpoint", tmp_path / "run", "--to", tmp_path / "m.gguf", "--format", "gguf")
    assert command(*argv) == 2
    assert "no place for 2 of the model's 3 prediction heads" in capsys.readouterr().err
    assert command(*argv, "--first-head-only", "--dtype", "f16") == 0
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    np.testing.assert_array_equal(found["output.weight"],
                                  tensors["heads.weight"][0].astype(np.float16))
    assert command(*argv, "--first-head-only") == 2
    assert "exists already: name a new file" in capsys.readouterr().err


def test_what_llama_cpp_cannot_say_is_refused(tmp_path, capsys):
    document = json.loads(small_tokenizer())
    document["model"]["ignore_merges"] = True
    run = imported(tmp_path, GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG), json.dumps(document))
    assert command("--checkpoint", run, "--to", tmp_path / "m.gguf", "--format", "gguf") == 2
    assert "pre-tokenizer of gpt2 and ignore_merges True" in capsys.readouterr().err
    document["model"]["ignore_merges"] = False
    document["added_tokens"].append({"id": 290, "content": "[PAD291]", "special": True})
    run = imported(tmp_path / "twice", GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG),
                   json.dumps(document))
    assert command("--checkpoint", run, "--to", tmp_path / "m.gguf", "--format", "gguf") == 2
    assert "2 of the tokenizer's are spelled '[PAD291]'" in capsys.readouterr().err
    shared = ModelConfig("gpt2", width=16, heads=4, kv_heads=2, layers=1, context=8,
                         vocabulary=281, hidden=8)
    trained_run(tmp_path / "shared", replace(shared))
    assert command("--checkpoint", tmp_path / "shared", "--to", tmp_path / "m.gguf",
                   "--format", "gguf") == 2
    assert "no KV heads shared by several heads" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*gguf*")] == []


def test_the_missing_package_is_named(tmp_path, capsys, monkeypatch):
    trained_run(tmp_path / "run", replace(NANO, prediction_heads=1))
    load = builtins.__import__

    def without(name, *rest):
        if name == "gguf":
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert command("--checkpoint", tmp_path / "run", "--to", tmp_path / "m.gguf",
                   "--format", "gguf") == 2
    assert "pip install -e '.[gguf]'" in capsys.readouterr().err
