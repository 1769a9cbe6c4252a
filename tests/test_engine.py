"""Training steps as a whole: loss normalisation, accumulation, the optimizer, compiled accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.backend import create
from euler_ir.autodiff import value_and_grad
from euler_ir.interpreter import run
from euler_ir.types import F32, F64
from model.config import PRESETS, shrink
from model.objective import loss_function
from model.optimizer import AdamWConfig
from model.parameters import parameters
from model.transformer import rotary_tables
from runtime.compiler.driver import compile_function
from runtime.data.batches import MicroBatch
from runtime.engine import Evaluator, Model, Trainer
from tests.models import contents, micro_batch, step_batch

TINY = shrink(PRESETS["nano-1m"])
BACKENDS = {name: create(name) for name in ("reference", "llvm")}


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return BACKENDS[request.param]


def joined(*micro_batches: MicroBatch) -> MicroBatch:
    return MicroBatch(*(np.concatenate([getattr(m, name) for m in micro_batches])
                        for name in ("tokens", "targets", "lo", "hi")))


def trainer(backend, rows: int, accumulate: int = 1, dtype=F32,
            optimizer: AdamWConfig | None = None) -> Trainer:
    model = Model(TINY, backend, dtype)
    model.initialise(3)
    return Trainer(model, optimizer or AdamWConfig(), rows, 8, accumulate)


def state(t: Trainer) -> dict[str, np.ndarray]:
    return contents({**t.model.weights, **t.moments, "t": t.t})


def assert_close(a: dict, b: dict, tolerance: float) -> None:
    for name in a:
        scale = max(np.abs(b[name]).max(), 1e-12)
        assert np.abs(a[name] - b[name]).max() <= tolerance * scale, name


def test_unequal_micro_batches_weigh_by_their_tokens(backend):
    """3 and 13 supervised tokens: two micro-batches equal one batch of both."""
    few, many = micro_batch(TINY, 2, 8, 0, keep=3), micro_batch(TINY, 2, 8, 1, keep=13)
    apart, together = trainer(backend, 2, accumulate=2), trainer(backend, 4)
    a = apart.step(step_batch(few, many), 1e-3)
    b = together.step(step_batch(joined(few, many)), 1e-3)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5)
    # First moments are the clipped gradients times 1 - beta1.
    assert_close(contents(apart.moments), contents(together.moments), 2e-5)


def test_a_micro_batch_without_targets_changes_nothing(backend):
    live, masked = micro_batch(TINY, 2, 8, 0), micro_batch(TINY, 2, 8, 1, keep=0)
    both, alone = trainer(backend, 2, accumulate=2), trainer(backend, 2)
    a = both.step(step_batch(live, masked), 1e-3)
    b = alone.step(step_batch(live), 1e-3)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-6)
    assert_close(contents(both.moments), contents(alone.moments), 1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_targets_has_zero_loss_and_gradient(backend, accumulate):
    t = trainer(backend, 2, accumulate)
    masked = [micro_batch(TINY, 2, 8, i, keep=0) for i in range(accumulate)]
    result = t.step(step_batch(*masked), 1e-3)
    assert result.loss == 0.0 and result.gradient_norm == 0.0 and result.applied
    assert all(np.isfinite(array).all() for array in state(t).values())
    assert all(not moment.read().any() for moment in t.moments.values())


def test_masked_positions_have_no_gradient(backend):
    """What stands after the last supervised token cannot change the gradient."""
    first = micro_batch(TINY, 1, 8, 0, keep=4)
    other = MicroBatch(first.tokens.copy(), first.targets, first.lo, first.hi)
    other.tokens[0, 4:] = (other.tokens[0, 4:] + 1) % TINY.vocabulary
    a, b = trainer(backend, 1), trainer(backend, 1)
    a.step(step_batch(first), 1e-3)
    b.step(step_batch(other), 1e-3)
    assert_close(contents(a.moments), contents(b.moments), 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(backend, bad, accumulate):
    t = trainer(backend, 2, accumulate)
    batch = step_batch(*(micro_batch(TINY, 2, 8, i) for i in range(accumulate)))
    t.step(batch, 1e-3)
    t.model.weights["layers.0.mlp.down.weight"].write(np.full((1, 1), bad))
    before = state(t)
    result = t.step(batch, 1e-3)
    assert not result.applied and not math.isfinite(result.gradient_norm)
    for name, array in state(t).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_a_norm_over_the_limit_leaves_everything_as_it_was(backend):
    model = Model(TINY, backend)
    model.initialise(3)
    t = Trainer(model, AdamWConfig(), 2, 8, norm_limit=1e-6)
    before = state(t)
    assert not t.step(step_batch(micro_batch(TINY, 2, 8, 0)), 1e-3).applied
    for name, array in state(t).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_decay_acts_on_matrices_once_and_on_nothing_else(backend):
    t = trainer(backend, 2, optimizer=AdamWConfig(weight_decay=0.1))
    before = state(t)
    t.step(step_batch(micro_batch(TINY, 2, 8, 0, keep=0)), 0.1)
    for p in t.model.parameters:
        factor = 0.99 if len(p.shape) > 1 else 1.0
        np.testing.assert_allclose(t.model.weights[p.name].read(),
                                   before[p.name] * np.float32(factor), rtol=2e-7, err_msg=p.name)


def test_evaluation_does_not_depend_on_the_batch_size(backend):
    from runtime.data.batches import ValidationSet
    from runtime.data.streams import Document, TokenStream
    tokens = np.random.default_rng(0).integers(0, TINY.vocabulary, 60).astype(np.int32)
    stream = TokenStream([Document("x", tokens)], TINY.vocabulary)
    model = Model(TINY, backend, F64)
    model.initialise(1)
    losses = []
    for rows in (1, 3, 8):
        validation = ValidationSet(stream, batch_size=rows, context=8,
                                   byte_lengths=np.ones(TINY.vocabulary, np.int64))
        losses.append(Evaluator(model, rows, 8).loss(validation))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


def test_compiled_f32_is_as_good_as_f32_can_be():
    """nano-1m itself: loss within 5e-6 relative of the f64 interpreter's, every gradient tensor
    within 5e-6 relative L2."""
    config, rows, time = PRESETS["nano-1m"], 2, 64
    weights = {p.name: p.initial(7) for p in parameters(config)}
    batch = micro_batch(config, rows, time, 0)
    inputs = {**weights, "tokens": batch.tokens, "targets": batch.targets, "lo": batch.lo,
              "hi": batch.hi, "inverse_counts": np.full(4, 1 / (rows * time))}
    names = list(weights)
    exact = run(value_and_grad(loss_function(config, rows, time, F64), names),
                {**inputs, **rotary_tables(config, np.float64)}, precise=True)
    compiled = compile_function(value_and_grad(loss_function(config, rows, time), names),
                                BACKENDS["llvm"])
    got = compiled.run({**inputs, **rotary_tables(config)})
    assert abs(got["objective"] - exact["objective"]) <= 5e-6 * exact["objective"]
    for name in names:
        difference = np.linalg.norm(got[f"grad.{name}"] - exact[f"grad.{name}"])
        assert difference <= 5e-6 * np.linalg.norm(exact[f"grad.{name}"]), name
