"""The gradient check passes where gradients are right, and sees each way they can be wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from euler_ir import ops
from euler_ir.autodiff import value_and_grad
from euler_ir.interpreter import run
from euler_ir.types import F64
from model.config import PRESETS, shrink
from model.objective import loss_function
from model.parameters import parameters as model_parameters
from model.transformer import rotary_tables
from runtime import gradcheck
from runtime.cli import run_command
from runtime.gradcheck import (
    BAR,
    Finding,
    awkward_batch,
    central_difference,
    check_gradients,
    well_conditioned_weights,
)
from tests.runners import backend

ROOT = Path(__file__).parent.parent
NANO = shrink(PRESETS["nano-1m"])
ONE_LAYER = replace(NANO, layers=1)


@pytest.mark.parametrize("preset", ["nano-1m", "llama-124m"])
def test_every_element_passes_on_compiled_code(preset, capsys):
    assert run_command(gradcheck.main, ["--preset", preset, "--backend", "llvm"]) == 0
    *tensors, verdict = capsys.readouterr().out.splitlines()[1:]
    parameters = model_parameters(shrink(PRESETS[preset]))
    assert [line.split()[0] for line in tensors] == [p.name for p in parameters]
    for p, line in zip(parameters, tensors, strict=True):
        assert line.endswith("ok") and int(line.split()[2]) == p.size
    assert verdict.startswith(f"passed: {len(parameters)} tensors")


def test_a_few_elements_pass_on_the_interpreter():
    findings = list(check_gradients(ONE_LAYER, backend("reference"), samples=2))
    assert all(f.passed and not f.zero and f.checked == 2 and f.error < 1e-8 for f in findings)


@pytest.mark.parametrize(("op", "tensor"), [
    (ops.RMSNorm, "norm.weight"),
    (ops.SwiGLU, "layers.0.mlp.gate_up.weight"),
    (ops.Rotary, "layers.0.attention.qkv.weight"),
    (ops.Gather, "embedding.weight"),
])
def test_a_gradient_that_is_wrong_by_a_millionth_fails(op, tensor, monkeypatch, capsys):
    original = op.backward

    def wrong(self, b, node, grads):
        return [g if g is None else g * (1 + 1e-6) for g in original(self, b, node, grads)]

    monkeypatch.setattr(op, "backward", wrong)
    assert run_command(gradcheck.main, ["--backend", "llvm"]) == 1
    *_, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("FAILED") and tensor in verdict


def test_a_gradient_that_is_missing_fails(monkeypatch):
    monkeypatch.setattr(ops.Rotary, "backward", lambda self, b, node, grads: [None] * 3)
    findings = {f.name: f for f in check_gradients(ONE_LAYER, backend("llvm"), samples=8)}
    assert not findings["layers.0.attention.qkv.weight"].passed
    assert findings["heads.weight"].passed


@pytest.mark.parametrize(("analytic", "numeric", "error", "passed"), [
    (1.0, 1.0, BAR, True),
    (1.0, 1.0, 2 * BAR, False),
    (1.0, 1.0, np.nan, False),
    (0.0, 1e-11, np.inf, True),  # a key bias: no gradient, and rounding in the differences
    (1e-12, 0.0, 1.0, True),
    (0.0, 1e-6, np.inf, False),
    (1e-6, 0.0, 1.0, False),
])
def test_what_passes(analytic, numeric, error, passed):
    assert Finding("x", (3,), 3, analytic, numeric, error).passed is passed


def test_central_differences_are_of_fourth_order_and_leave_the_weight():
    weight = np.array([[0.5, 1.5]])
    before = weight.copy()

    def quartic(moved):
        return float((moved**4).sum())

    for element, x in enumerate(before.flat):
        assert central_difference(quartic, weight, element) == pytest.approx(4 * x**3, rel=1e-11)
    # Exact up to the fifth power but for rounding, whatever the step.
    assert central_difference(quartic, weight, 1, step=0.3) == pytest.approx(13.5, rel=1e-13)
    np.testing.assert_array_equal(weight, before)


def test_the_batch_has_what_training_meets():
    batch, heads = awkward_batch(NANO, 8, 0), NANO.prediction_heads
    lo, hi, targets = batch["lo"], batch["hi"], batch["targets"]
    assert lo[0].tolist() == [0] * 8 and hi[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lo[1].tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert (hi[2, :2] == lo[2, :2]).all() and (targets[2, :2] == -1).all()
    for k in range(heads):  # the last of each document have no token k + 1 ahead
        assert (targets[:, 7 - k:, k] == -1).all() and (targets[1, 3 - k:4, k] == -1).all()
        count = np.count_nonzero(targets[:, :, k] >= 0)
        assert batch["inverse_counts"][k] == 1 / count


def test_the_weights_keep_the_model_off_its_flat_regions():
    function = value_and_grad(loss_function(NANO, 3, 8, F64),
                              list(well_conditioned_weights(NANO, 0)))
    weights = well_conditioned_weights(NANO, 0)
    tables = rotary_tables(NANO, np.float64)
    results = run(function, {**weights, **tables, **awkward_batch(NANO, 8, 0)})
    assert abs(results["losses"][0] - np.log(NANO.vocabulary)) > 0.1
    for name in weights:
        assert 1e-2 < np.abs(results[f"grad.{name}"]).max() < 10


def test_full_takes_samples_of_the_real_size(monkeypatch, capsys):
    real = replace(PRESETS["nano-1m"], width=32, layers=1, vocabulary=64, hidden=40)
    monkeypatch.setitem(PRESETS, "nano-1m", real)
    assert run_command(gradcheck.main, ["--full", "--backend", "llvm"]) == 0
    head, *tensors, verdict = capsys.readouterr().out.splitlines()
    assert head.startswith("nano-1m: ") and all(" 3 checked" in line for line in tensors)
    assert verdict.startswith(f"passed: {len(tensors)} tensors, {3 * len(tensors)} elements")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "gpt5"], "no preset 'gpt5'; known: nano-1m"),
    (["--backend", "tpu"], "no backend 'tpu'; known:"),
])
def test_wrong_names_end_in_one_line(arguments, message, capsys):
    assert run_command(gradcheck.main, arguments) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith(f"error: {message}")
    assert written.err.count("\n") == 1


def test_the_command_as_a_process():
    done = subprocess.run([sys.executable, "-m", "runtime.gradcheck", "--backend", "llvm"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("passed: 15 tensors, 1472 elements")
