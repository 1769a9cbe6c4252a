"""llama.cpp as the judge of our GGUF files: what it computes from them, and the text it writes.

llama.cpp saves bits where it can. It is asked for f32 in its cache of keys and values (f16 is its
default) and for attention in separate steps. One place is left, fixed when it is compiled: GELU is
looked up in a table of f16 (ggml's GGML_GELU_FP16), so that its operand and result are rounded to
11 bits; what we compare with is our model with that rounding. Matrices of f16 and bf16 it
multiplies with activations rounded to the same type.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

from euler_ir.builder import Builder
from euler_ir.graph import Value
from euler_ir.types import F16, F32
from model.config import ModelConfig, RopeScaling
from model.parameters import parameters
from model.tokenizer import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from runtime import convert, generate, train
from runtime.cli import run_command
from runtime.compiler.driver import compile_function
from runtime.convert import export_gguf, import_folder
from runtime.data.streams import DEFAULT_TEXT
from runtime.engine import Model
from runtime.exchange.gguf_export import write_gguf
from runtime.inference.generation import Generator
from runtime.inference.sampler import Sampler
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    Rounding,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
    small_tokenizer,
    write_model,
)
from tests.models import logits_function
from tests.runners import backend

pytestmark = [pytest.mark.oracle, pytest.mark.llama_cpp]

CONTEXT, PROMPT = 64, 8
NANO = ModelConfig("nano", width=32, heads=4, kv_heads=2, layers=2, context=CONTEXT, vocabulary=300,
                   hidden=44, prediction_heads=4, norm_eps=0.01, rope_base=500.0)
LLAMA = replace(NANO, kind="llama", prediction_heads=1)
GPT2 = replace(LLAMA, kind="gpt2", kv_heads=4, tied_head=True, hidden=32)
MODELS = {
    "nano, the first of four heads": NANO,
    "llama": LLAMA,
    "llama tied, a KV head for each": replace(LLAMA, tied_head=True, kv_heads=4, rope_base=1e6),
    "llama, heads of 12 in a width of 32": replace(LLAMA, given_head_size=12, kv_heads=1),
    # Wavelengths 6, 30 and longer: the first is left alone, the second is between.
    "llama scaled as Llama 3": replace(LLAMA, rope_scaling=RopeScaling(
        "llama3", 8.0, 1.0, 4.0, CONTEXT // 2)),
    "llama scaled evenly": replace(LLAMA, rope_scaling=RopeScaling("linear", 2.5)),
    "gpt2 tied, square": GPT2,
    "gpt2 untied": replace(GPT2, tied_head=False, hidden=50),
}


@pytest.fixture(scope="module")
def llama_cpp():
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make oracle-llama")


def loaded(llama_cpp, path: Path):
    """llama.cpp's model of a file, with the context it was trained on."""
    return llama_cpp.Llama(str(path), n_ctx=0, n_threads=1, n_threads_batch=1, logits_all=True,
                           type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
                           flash_attn=False, verbose=False)


def their_logits(theirs, tokens: np.ndarray) -> np.ndarray:
    """[T, V]; the last tokens in a batch of their own, by way of the cache."""
    theirs.reset()
    theirs.eval(tokens[:-PROMPT].tolist())
    theirs.eval(tokens[-PROMPT:].tolist())
    return theirs.scores[:len(tokens)].copy()


def our_logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """[T, V], with GELU as llama.cpp looks it up."""
    gelu, shape = Builder.gelu, (1, len(tokens))

    def looked_up(b: Builder, x: Value) -> Value:
        return b.cast(b.cast(gelu(b, b.cast(b.cast(x, F16), F32)), F16), F32)

    with patch.object(Builder, "gelu", looked_up):
        function = logits_function(model.config, *shape)
    program = compile_function(function, model.backend, model.bound)
    return program.run({"tokens": tokens[None], "lo": np.zeros(shape, np.int32),
                        "hi": np.arange(1, len(tokens) + 1, dtype=np.int32)[None]})["logits"][0]


def greedy(theirs, prompt: list[int], count: int) -> list[int]:
    return list(islice(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), count))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text(llama_cpp, tmp_path, name):
    """Logits at all positions of random tokens, by the interpreter; fifty tokens after a few of
    them, by compiled code. Rows that pad the vocabulary in memory are not in the file."""
    config = MODELS[name]
    generator = np.random.default_rng(0)
    tensors = {p.name: p.initial(0) + generator.normal(scale=0.3, size=p.shape).astype(np.float32)
               for p in parameters(config)}
    if config.kind == "gpt2":
        # A number near the middle of two of f16 may be rounded to either. That it costs a good
        # deal less than 1e-3 of a logit takes small weights behind GELU.
        for i in range(config.layers):
            tensors[f"layers.{i}.mlp.down.weight"] /= 4
    write_gguf(tmp_path / "model.gguf", config, tensors,
               Tokenizer.from_json(small_tokenizer()))
    theirs = loaded(llama_cpp, tmp_path / "model.gguf")
    tokens = generator.integers(0, config.vocabulary, CONTEXT).astype(np.int32)
    expected = their_logits(theirs, tokens)
    assert np.abs(expected).max() > 5 and expected.shape == (CONTEXT, config.vocabulary)
    model, compiled = (Model(config, backend(name)) for name in ("reference", "llvm"))
    model.load(tensors)
    np.testing.assert_allclose(our_logits(model, tokens), expected, rtol=0, atol=1e-3)

    compiled.load(tensors)
    prompt = tokens[:PROMPT].tolist()
    sampler = Sampler(temperature=0.0, ids=range(config.vocabulary))
    text = list(Generator(compiled).stream(prompt, 50, sampler))
    assert len(set(text)) > 5
    assert greedy(theirs, prompt, 50) == text


def in_type(dtype) -> Rounding:
    return lambda array: array.astype(np.float32).astype(dtype).astype(np.float64)


def as_exported(tensors: dict[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    """What the file holds of tensors: matrices in the type, vectors and positions in f32."""
    return {name: array if array.ndim == 1 or name == "wpe.weight" else array.astype(dtype)
            for name, array in tensors.items()}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_types_of_matrices(llama_cpp, tmp_path, kind, dtype):
    """Against f64 in numpy, from the weights as the file holds them. llama.cpp may err twice as
    much as the same arithmetic that rounds activations where it does, and 1e-3 for f32."""
    numpy_type = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    half, rounded = in_type(np.float16), in_type(numpy_type)
    if kind == "gpt2":
        config = {**GPT2_CONFIG, "n_positions": CONTEXT, "n_ctx": CONTEXT}
        tensors, logits = gpt2_tensors(config), gpt2_logits
        rounding = {"rounded": rounded, "gelu_rounded": half}
    else:
        config = {**LLAMA_CONFIG, "max_position_embeddings": CONTEXT}
        tensors, logits, rounding = llama_tensors(config), llama_logits, {"rounded": rounded}
    write_model(tmp_path / "in", config, tensors)
    import_folder(tmp_path / "in", tmp_path / "run")
    export_gguf(tmp_path / "run", tmp_path / "model.gguf", dtype)
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], CONTEXT)
    found = their_logits(loaded(llama_cpp, tmp_path / "model.gguf"), tokens)

    stored = as_exported(tensors, numpy_type)
    exact = logits(config, stored, tokens)
    allowed = 2 * np.abs(logits(config, stored, tokens, **rounding) - exact).max() + 1e-3
    assert allowed < np.abs(exact).max() / 20
    np.testing.assert_allclose(found, exact, rtol=0, atol=allowed)


def test_a_trained_model_writes_the_same_text(llama_cpp, tmp_path, capsys):
    """Commands from end to end: train, convert, generate."""
    def command(module, *arguments) -> str:
        assert run_command(module.main, list(map(str, arguments))) == 0
        return capsys.readouterr().out

    data, run, path = tmp_path / "few.txt", tmp_path / "run", tmp_path / "model.gguf"
    data.write_bytes(DEFAULT_TEXT.read_bytes()[:3000])
    command(train, "--data", data, "--out", run, "--steps", 100, "--batch-size", 2, "--context", 64,
            "--eval-every", 0, "--checkpoint-every", 100)
    command(convert, "--checkpoint", run, "--to", path, "--format", "gguf", "--first-head-only")
    ours = command(generate, "--checkpoint", run, "--prompt", "First Citizen:", "--temperature", 0,
                   "--max-tokens", 50)
    theirs = loaded(llama_cpp, path).create_completion(
        "First Citizen:", max_tokens=50, temperature=0.0, repeat_penalty=1.0)
    assert theirs["usage"]["completion_tokens"] == 50 and len(set(ours.split())) > 5
    assert "First Citizen:" + theirs["choices"][0]["text"] + "\n" == ours


@pytest.mark.parametrize("special", [[], [END_OF_DOCUMENT]], ids=["none", "one"])
def test_where_a_text_ends(llama_cpp, tmp_path, special):
    """A model that says token 11 and nothing else. llama.cpp takes id 11 for the end of a text
    unless the file names another one."""
    tokenizer = train_tokenizer(["to be, or not to be, that is the question: " * 9], 270, special)
    config = replace(GPT2, vocabulary=270, layers=1, tied_head=False)
    tensors = {p.name: np.zeros(p.shape, np.float32) for p in parameters(config)}
    tensors["norm.bias"][:] = 1
    tensors["heads.weight"][0, 11] = 1
    write_gguf(tmp_path / "model.gguf", config, tensors, tokenizer)
    theirs = loaded(llama_cpp, tmp_path / "model.gguf")
    text = theirs.create_completion(" to be", max_tokens=20, temperature=0.0)["choices"][0]
    assert text["text"] == tokenizer.decode([11] * 20) and text["finish_reason"] == "length"
