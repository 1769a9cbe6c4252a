"""PyTorch and transformers as judges: same weights, same batches, same logits and losses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from euler_ir.types import F32, F64, DType
from model.config import ModelConfig
from model.optimizer import AdamWConfig, LearningRate
from model.parameters import parameters
from runtime.compiler.driver import compile_function
from runtime.data.batches import StepBatch
from runtime.engine import Model, Trainer
from tests.models import logits_function, micro_batch, step_batch
from tests.runners import backend

pytestmark = pytest.mark.oracle

NANO = ModelConfig("nano", width=32, heads=4, kv_heads=2, layers=2, context=24, vocabulary=61,
                   hidden=44, prediction_heads=4)
GPT2 = ModelConfig("gpt2", width=32, heads=4, kv_heads=4, layers=2, context=24, vocabulary=61,
                   hidden=128, tied_head=True)
ROWS, TIME, STEPS = 4, 16, 100
RATE = LearningRate("cosine", 3e-3, STEPS, warmup=10)
OPTIMIZER = AdamWConfig()


@pytest.fixture(scope="module", autouse=True)
def torch():
    """torch, on one thread: its work here is too small to share."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


def initial_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Larger than those a run starts from, and with no zeros: every term should count."""
    generator = np.random.default_rng(3)
    return {p.name: p.initial(5, np.float64) + generator.normal(scale=0.1, size=p.shape)
            for p in parameters(config)}


def torch_logits(torch, config: ModelConfig, w: dict, tokens):
    """[B, T, heads, V]. The architecture once more, in PyTorch's own functions."""
    f = torch.nn.functional
    gpt2 = config.kind == "gpt2"

    def linear(name, x):
        return f.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name, x):
        weight, shape = w[f"{name}.weight"], (config.width,)
        if gpt2:
            return f.layer_norm(x, shape, weight, w[f"{name}.bias"], config.norm_eps)
        return f.rms_norm(x, shape, weight, config.norm_eps)

    def rotated(x):
        """By complex multiplication: element i is paired with i + D/2."""
        half = config.head_size // 2
        angle = torch.outer(torch.arange(x.shape[2], dtype=x.dtype),
                            config.rope_base ** (-torch.arange(half, dtype=x.dtype) / half))
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    def attention(layer, x):
        rows, time, _ = x.shape
        sizes = [n * config.head_size for n in (config.heads, config.kv_heads, config.kv_heads)]
        q, k, v = (part.view(rows, time, -1, config.head_size).transpose(1, 2)
                   for part in linear(f"{layer}.attention.qkv", x).split(sizes, -1))
        if not gpt2:
            q, k = rotated(q), rotated(k)
        mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear(f"{layer}.attention.output", mixed.transpose(1, 2).reshape(x.shape))

    def mlp(layer, x):
        if gpt2:
            hidden = f.gelu(linear(f"{layer}.mlp.up", x), approximate="tanh")
        else:
            gate, up = linear(f"{layer}.mlp.gate_up", x).chunk(2, -1)
            hidden = f.silu(gate) * up
        return linear(f"{layer}.mlp.down", hidden)

    x = f.embedding(tokens, w["embedding.weight"])
    if gpt2:
        x = x + w["positions.weight"][:tokens.shape[1]]
    for layer in (f"layers.{i}" for i in range(config.layers)):
        x = x + attention(layer, norm(f"{layer}.attention_norm", x))
        x = x + mlp(layer, norm(f"{layer}.mlp_norm", x))
    heads = w["embedding.weight"][None] if config.tied_head else w["heads.weight"]
    return torch.einsum("btc,kvc->btkv", norm("norm", x), heads)


def torch_losses(torch, config: ModelConfig, batches: list[StepBatch]) -> list[list[float]]:
    """Every head's loss in each of the steps, trained in f64."""
    w = {name: torch.tensor(array, requires_grad=True)
         for name, array in initial_weights(config).items()}
    groups = [{"params": [x for x in w.values() if (x.ndim > 1) == decayed],
               "weight_decay": OPTIMIZER.weight_decay * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
                                  eps=OPTIMIZER.eps)
    history = []
    for step, batch in enumerate(batches):
        (micro,) = batch.micro_batches
        scores = torch_logits(torch, config, w, torch.tensor(micro.tokens.astype(np.int64)))
        targets = torch.tensor(micro.targets.astype(np.int64))
        losses = torch.stack([
            torch.nn.functional.cross_entropy(scores[:, :, k].flatten(0, 1),
                                              targets[:, :, k].flatten(), ignore_index=-1)
            for k in range(config.prediction_heads)])
        optimizer.zero_grad()
        losses.mean().backward()
        # clip_grad_norm_ adds 1e-6 to the norm; the rule here is the bare quotient.
        norm = math.sqrt(sum(float((x.grad ** 2).sum()) for x in w.values()))
        for x in w.values():
            x.grad *= min(1.0, OPTIMIZER.clip_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = RATE.at(step)
        optimizer.step()
        history.append(losses.tolist())
    return history


def our_losses(config: ModelConfig, batches: list[StepBatch], dtype: DType) -> list[np.ndarray]:
    model = Model(config, backend("llvm"), dtype)
    model.load(initial_weights(config))
    trainer = Trainer(model, OPTIMIZER, ROWS, TIME)
    return [trainer.step(batch, RATE.at(step)).losses for step, batch in enumerate(batches)]


@pytest.mark.parametrize("config", [NANO, GPT2], ids=lambda config: config.kind)
def test_a_hundred_steps_have_torchs_losses(torch, config):
    """Five batches in turn, the last positions without targets."""
    few = [step_batch(micro_batch(config, ROWS, TIME, seed, keep=ROWS * TIME - 3))
           for seed in range(5)]
    batches = [few[step % 5] for step in range(STEPS)]
    expected = np.array(torch_losses(torch, config, batches))
    assert expected[-1, 0] < 0.7 * expected[0, 0]  # it learns
    for dtype, tolerance in ((F64, 1e-8), (F32, 1e-3)):
        np.testing.assert_allclose(our_losses(config, batches, dtype), expected, rtol=tolerance,
                                   atol=0, err_msg=str(dtype))


def hugging_face_weights(model) -> dict[str, np.ndarray]:
    """A GPT2LMHeadModel's tensors by our names; its matrices are [inputs, outputs]."""
    names = {"ln_1": "attention_norm", "attn.c_attn": "attention.qkv",
             "attn.c_proj": "attention.output", "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up",
             "mlp.c_proj": "mlp.down"}
    whole = {"wte.weight": "embedding.weight", "wpe.weight": "positions.weight",
             "ln_f.weight": "norm.weight", "ln_f.bias": "norm.bias"}
    weights = {}
    for name, tensor in model.transformer.state_dict().items():
        array = tensor.numpy()
        if name in whole:
            weights[whole[name]] = array
            continue
        _, layer, part = name.split(".", 2)
        part, kind = part.rsplit(".", 1)
        weights[f"layers.{layer}.{names[part]}.{kind}"] = array.T
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-4), (F64, 1e-12)], ids=str)
def test_logits_are_those_of_transformers(torch, dtype, tolerance):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig("gpt2", width=48, heads=3, kv_heads=3, layers=3, context=32,
                         vocabulary=101, hidden=192, tied_head=True)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=101, n_positions=32, n_embd=48, n_layer=3, n_head=3, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager")).eval().to(getattr(torch, dtype.numpy.name))
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor += 0.2 * torch.randn(tensor.shape, dtype=tensor.dtype)
    batch = micro_batch(config, 2, 32, 0)
    with torch.no_grad():
        expected = theirs(torch.tensor(batch.tokens.astype(np.int64))).logits.numpy()
    model = Model(config, backend("llvm"), dtype)
    model.load(hugging_face_weights(theirs))
    program = compile_function(logits_function(config, 2, 32, dtype), model.backend, model.bound)
    got = program.run({"tokens": batch.tokens, "lo": batch.lo, "hi": batch.hi})["logits"]
    assert np.abs(expected).max() > 3  # no trivial agreement
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
