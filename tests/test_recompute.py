"""Activation checkpointing changes memory and time, and no bit of any result."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import create
from euler_ir.interpreter import run
from euler_ir.passes.pipeline import optimize
from euler_ir.verify import verify
from model.config import PRESETS, shrink
from model.objective import training_step
from model.optimizer import AdamWConfig
from model.transformer import layer_segments
from runtime.compiler.driver import plan_function
from runtime.engine import Model, Trainer
from tests.models import contents, micro_batch, step_batch

COMPOSITES = {"attention", "attention_backward"}
KINDS = {"nano": shrink(PRESETS["nano-1m"]), "gpt2": shrink(PRESETS["gpt2-124m"])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_the_same_to_the_bit(kind, accumulate):
    """Three steps on the compiled backend with 0, 1 and all layers recomputed."""
    config, backend, states = KINDS[kind], create("llvm"), []
    batch = step_batch(*(micro_batch(config, 2, 8, i) for i in range(accumulate)))
    for count in (0, 1, config.layers):
        model = Model(config, backend)
        model.initialise(3)
        trainer = Trainer(model, AdamWConfig(), 2, 8, accumulate, recompute=count)
        losses = [trainer.step(batch, 1e-2).losses for _ in range(3)]
        states.append({**contents({**model.weights, **trainer.moments}),
                       "losses": np.array(losses)})
    for other in states[1:]:
        for name, array in states[0].items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_functions_are_valid_and_mean_the_same(kind):
    config = KINDS[kind]
    function = training_step(config, AdamWConfig(), 2, 8, False)["step"]
    generator = np.random.default_rng(0)
    inputs = {value.name: generator.normal(size=value.shape) ** 2 if value.dtype.is_float
              else generator.integers(0, 5, value.shape) for value in function.inputs}
    inputs["norm_limit"] = np.array(1e9)
    after = optimize(function, COMPOSITES, recomputed=layer_segments(config, 9))
    verify(after)
    before, got = run(function, inputs, precise=True), run(after, inputs, precise=True)
    for name, array in before.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("preset, rows", [("nano-1m", 8), ("gpt2-124m", 4)])
def test_each_recomputed_layer_frees_memory(preset, rows):
    """A layer's kept activations, less its input, where activations and not gradients are what
    fills the arena."""
    config, backend = PRESETS[preset], create("reference")
    function = training_step(config, AdamWConfig(), rows, config.context, False)["step"]
    arenas = []
    for count in (0, 1, 2, config.layers):
        optimized = optimize(function, COMPOSITES, recomputed=layer_segments(config, count))
        arenas.append(plan_function(optimized, backend).arena_bytes)
    assert arenas[0] > arenas[1] > arenas[2] > arenas[3]
    assert arenas[3] < 0.6 * arenas[0]
