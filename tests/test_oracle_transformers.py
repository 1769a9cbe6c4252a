"""transformers as the judge of both directions: models it makes at random, models we hand out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig, RopeScaling
from model.tokenizer import Tokenizer
from runtime.compiler.driver import compile_function
from runtime.convert import export_folder, import_folder
from runtime.inference.generation import END_OF_TEXT, Generator
from runtime.inference.sampler import Sampler
from runtime.inference.trained import load_trained
from tests.hugging_face import VOCABULARY, small_tokenizer
from tests.models import logits_function
from tests.runners import backend
from tests.test_boundaries import BEGIN, END, tokenizer
from tests.test_convert import NANO, trained_run

pytestmark = pytest.mark.oracle

CONTEXT, PROMPT = 64, 8
GPT2 = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 48, "n_head": 3, "n_layer": 2}
LLAMA = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 48,
         "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Twice the 32 positions of the first training. Heads of 12 have wavelengths 6, 29 and longer: one
#: that llama3 leaves alone, one between, and slowed ones.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": CONTEXT // 2}
THEIRS = {
    "gpt2 tied": ("GPT2", GPT2),
    "gpt2 untied, square": ("GPT2", {**GPT2, "n_inner": 48, "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA),
    "llama grouped, tied": ("Llama", {**LLAMA, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                                      "tie_word_embeddings": True}),
    "llama, head size given": ("Llama", {**LLAMA, "num_key_value_heads": 1, "head_dim": 20,
                                         "rope_parameters": {"rope_type": "default",
                                                             "rope_theta": 500.0}}),
    "llama, scaled as Llama 3": ("Llama", {**LLAMA, "num_key_value_heads": 2,
                                           "rope_parameters": LLAMA3}),
    "llama, scaled evenly": ("Llama", {**LLAMA, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama, scaled in older words": ("Llama", {**LLAMA, "rope_theta": 1e4, "rope_scaling": {
        "type": "linear", "factor": 2}}),
}
OURS = {
    "nano with three heads": replace(NANO, context=CONTEXT),
    "llama tied": replace(NANO, context=CONTEXT, prediction_heads=1, kind="llama", tied_head=True,
                          rope_base=700.0, given_head_size=6),
    "llama scaled as Llama 3": replace(NANO, context=CONTEXT, prediction_heads=1, kind="llama",
                                       given_head_size=12, rope_scaling=RopeScaling(
                                           "llama3", 8.0, 1.0, 4.0, CONTEXT // 2)),
    "nano scaled evenly": replace(NANO, context=CONTEXT, given_head_size=12,
                                  rope_scaling=RopeScaling("linear", 2.5)),
    "gpt2 tied": ModelConfig("gpt2", width=24, heads=4, kv_heads=4, layers=2, context=CONTEXT,
                             vocabulary=281, hidden=24, tied_head=True),
    "gpt2 untied": ModelConfig("gpt2", width=24, heads=4, kv_heads=4, layers=2, context=CONTEXT,
                               vocabulary=281, hidden=50),
}


@pytest.fixture(scope="module")
def libraries():
    """torch, on one thread, and transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch, transformers
    torch.set_num_threads(threads)


def loaded(transformers, folder: Path):
    """The folder's model; no tensor missing and none left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def assert_same_text(torch, theirs, run: Path) -> None:
    """Logits at all positions of random tokens, and fifty greedy tokens after a few of them."""
    trained = load_trained(run, backend("llvm"))
    model, vocabulary = trained.model, trained.model.config.vocabulary
    tokens = np.random.default_rng(2).integers(0, vocabulary, (1, CONTEXT)).astype(np.int32)
    lo = np.zeros((1, CONTEXT), np.int32)
    hi = np.arange(1, CONTEXT + 1, dtype=np.int32)[None]
    function = logits_function(model.config, 1, CONTEXT)
    program = compile_function(function, model.backend, model.bound)
    ours = program.run({"tokens": tokens, "lo": lo, "hi": hi})["logits"]
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
        prompt = torch.tensor(tokens[:, :PROMPT].astype(np.int64))
        text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                               max_new_tokens=50, eos_token_id=None, pad_token_id=0)
    greedy = Sampler(temperature=0.0, ids=range(vocabulary))
    generator = Generator(model)
    assert list(generator.stream(tokens[0, :PROMPT].tolist(), 50, greedy)) == (
        text[0, PROMPT:].tolist())


@pytest.mark.parametrize("name", THEIRS)
def test_their_random_models(libraries, tmp_path, name):
    torch, transformers = libraries
    family, options = THEIRS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, bos_token_id=None,
                                                      eos_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor += 0.2 * torch.randn(tensor.shape)
    theirs.eval().save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(small_tokenizer(), encoding="utf-8")
    import_folder(tmp_path / "in", tmp_path / "run")
    assert_same_text(torch, theirs, tmp_path / "run")

    export_folder(tmp_path / "run", tmp_path / "out")
    again = loaded(transformers, tmp_path / "out").state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again[key], tensor), key


def test_their_shards(libraries, tmp_path):
    torch, transformers = libraries
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor *= 5
    theirs.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    assert (tmp_path / "in/model.safetensors.index.json").exists()
    (tmp_path / "in/tokenizer.json").write_text(small_tokenizer(), encoding="utf-8")
    import_folder(tmp_path / "in", tmp_path / "run")
    assert_same_text(torch, theirs, tmp_path / "run")


def test_a_folder_as_llama3s(libraries, tmp_path):
    """Ids of a prompt, and where the text after it ends: at the second of the model's ends."""
    torch, transformers = libraries
    torch.manual_seed(0)
    own = tokenizer(prefix=(0,))
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 270}, rope_parameters=LLAMA3,
                                      bos_token_id=BEGIN, eos_token_id=[END])
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor += 0.2 * torch.randn(tensor.shape)
    prompt = own.encode_prompt("to be")

    def continued() -> list[int]:
        ids = torch.tensor([prompt])
        text = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                               max_new_tokens=30, pad_token_id=0)
        return text[0, len(prompt):].tolist()

    stop = continued()[20]
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = [END, stop]
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(own.to_json(), encoding="utf-8")
    reader = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "in/tokenizer.json"))
    import_folder(tmp_path / "in", tmp_path / "run")
    trained = load_trained(tmp_path / "run", backend("llvm"))
    assert trained.encode("to be") == reader.encode("to be") == prompt
    generator = Generator(trained.model)
    ours = list(generator.stream(prompt, 30, Sampler(0), trained.boundaries.ends))
    assert generator.stop_reason == END_OF_TEXT
    assert [*ours, stop] == continued()

    export_folder(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == (
            json.loads((tmp_path / "in" / name).read_text())), name


@pytest.mark.parametrize("name", OURS)
def test_our_models(libraries, tmp_path, name):
    torch, transformers = libraries
    trained_run(tmp_path / "run", OURS[name])
    export_folder(tmp_path / "run", tmp_path / "out")
    assert_same_text(torch, loaded(transformers, tmp_path / "out"), tmp_path / "run")


def test_our_tokenizer(libraries, tmp_path):
    _, transformers = libraries
    trained_run(tmp_path / "run", NANO)
    export_folder(tmp_path / "run", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = Tokenizer.load(tmp_path / "out/tokenizer.json")
    text = "To be, or not to be:\n  that's the 42nd question… "
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.special_tokens["<|endoftext|>"]
