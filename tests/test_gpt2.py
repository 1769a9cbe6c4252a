"""The GPT-2 kind: tied head, padded vocabulary, learned positions, decoding, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from euler_ir.autodiff import value_and_grad
from euler_ir.errors import EulerError
from euler_ir.types import F32, F64
from model.config import PRESETS, ModelConfig, shrink
from model.objective import loss_function
from model.optimizer import AdamWConfig
from model.parameters import flops_per_token, parameter_count, parameters
from runtime import train
from runtime.cli import run_command
from runtime.compiler.driver import compile_function
from runtime.data.batches import MicroBatch
from runtime.engine import Model, Trainer
from runtime.gradcheck import (
    central_difference,
    check_gradients,
    objective_at,
    well_conditioned_weights,
)
from runtime.inference.generation import Generator
from runtime.settings import RECIPES, Settings
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from tests.models import contents, logits_function, micro_batch, step_batch
from tests.runners import BACKENDS, backend

SMALL = shrink(PRESETS["gpt2-124m"])
UNTIED = replace(SMALL, tied_head=False)
ROWS, TIME = 8, 8

every_backend = pytest.mark.parametrize("name", BACKENDS)


def model(name: str, config: ModelConfig = SMALL, dtype=F64) -> Model:
    result = Model(config, backend(name), dtype)
    result.load(well_conditioned_weights(config, 1))
    return result


def trainer(name: str, dtype=F32, **options) -> Trainer:
    return Trainer(model(name, dtype=dtype), AdamWConfig(**options), ROWS, TIME)


def fields(batch: MicroBatch, dtype=np.float64) -> dict[str, np.ndarray]:
    counts = step_batch(batch).inverse_counts
    return {"tokens": batch.tokens, "targets": batch.targets, "lo": batch.lo, "hi": batch.hi,
            "inverse_counts": counts.astype(dtype)}


def loss_and_gradients(m: Model, batch: MicroBatch) -> dict[str, np.ndarray]:
    function = value_and_grad(loss_function(m.config, ROWS, TIME, m.dtype), list(m.weights))
    return compile_function(function, m.backend, m.bound).run(fields(batch))


# Sizes and starting values


@pytest.mark.parametrize(("preset", "count"), [
    ("gpt2-124m", 124_439_808), ("gpt2-355m", 354_823_168), ("gpt2-774m", 774_030_080),
    ("gpt2-1558m", 1_557_611_200)])
def test_presets_have_gpt2s_parameters(preset, count):
    """The published checkpoints' sizes; padding is not counted."""
    config = PRESETS[preset]
    assert parameter_count(config) == count
    assert config.padded_vocabulary == 50304
    # The embedding is multiplied with, as the head; a row of the position table is only read.
    dense = count - config.context * config.width
    assert flops_per_token(config, 1024) == 6 * (dense + config.layers * config.width * 1024)


def test_every_preset_has_a_recipe():
    assert RECIPES.keys() == PRESETS.keys()


def test_starting_values():
    config = replace(PRESETS["gpt2-124m"], vocabulary=1000, layers=2)
    m = Model(config, backend("reference"))
    m.initialise(0)
    deviations = {"embedding.weight": 0.02, "positions.weight": 0.01,
                  "layers.0.attention.qkv.weight": 0.02, "layers.1.attention.output.weight": 0.01,
                  "layers.0.mlp.up.weight": 0.02, "layers.1.mlp.down.weight": 0.01}
    stored = m.stored()
    for name, deviation in deviations.items():
        assert np.std(stored[name]) == pytest.approx(deviation, rel=0.02)
    for name, array in stored.items():
        if name.endswith(".bias"):
            assert not array.any()
        elif array.ndim == 1:
            assert (array == 1).all()
    embedding = m.weights["embedding.weight"].read()
    assert embedding.shape == (1024, 768) and not embedding[1000:].any()


def test_rows_for_a_smaller_tokenizer_are_padded_too():
    config = Settings.for_preset("gpt2-124m", tokenizer="tokenizer.json").model(300)
    assert (config.vocabulary, config.padded_vocabulary) == (300, 320)


def test_presets_need_a_tokenizer_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(train.main, ["--preset", "gpt2-124m"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: gpt2-124m") and "--tokenizer" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("change", "message"), [
    ({"prediction_heads": 2}, "the embedding can be one head's matrix, not that of 2"),
    ({"tied_head": 1}, "model tied_head must be true or false, got 1"),
])
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(EulerError, match=message):
        replace(SMALL, **change)


# Gradients


TIED_LLAMA = replace(shrink(PRESETS["llama-124m"]), tied_head=True)


@pytest.mark.parametrize("config", [SMALL, UNTIED, TIED_LLAMA], ids=["tied", "untied", "llama"])
def test_every_gradient_is_right_on_compiled_code(config):
    findings = list(check_gradients(config, backend("llvm")))
    assert [f.checked for f in findings] == [p.size for p in parameters(config)]
    assert all(f.passed and not f.zero for f in findings)


def test_a_few_gradients_are_right_on_the_interpreter():
    findings = list(check_gradients(replace(SMALL, layers=1), backend("reference"), samples=2))
    assert all(f.passed and not f.zero for f in findings)


@every_backend
def test_the_tied_gradient_is_the_sum_of_lookup_and_head(name):
    """In a batch that has one id 50 times; against the two gradients of an untied model with
    equal matrices, and against differences."""
    batch = micro_batch(SMALL, ROWS, TIME, 0)
    batch.tokens.reshape(-1)[:50] = 3
    tied, untied = model(name), Model(UNTIED, backend(name), F64)
    matrix = tied.stored()["embedding.weight"].copy()
    untied.load({**tied.stored(), "heads.weight": matrix[None]})
    one, two = (loss_and_gradients(m, batch) for m in (tied, untied))
    assert one["objective"] == pytest.approx(two["objective"], rel=1e-14)
    gradient = one["grad.embedding.weight"]
    total = two["grad.embedding.weight"] + two["grad.heads.weight"][0]
    np.testing.assert_allclose(gradient, total, rtol=0, atol=1e-14)
    program = compile_function(loss_function(SMALL, ROWS, TIME, F64), backend(name), tied.bound)
    objective = partial(objective_at, program, fields(batch), tied.weights["embedding.weight"])
    for element in range(3 * SMALL.width, 4 * SMALL.width):
        numeric = central_difference(objective, matrix, element)
        assert abs(gradient.flat[element] - numeric) <= 1e-7 * np.abs(gradient).max()


# Padding


@every_backend
@pytest.mark.parametrize("config", [SMALL, UNTIED], ids=["tied", "untied"])
def test_padded_rows_take_no_part(name, config):
    """Whatever stands in them: same loss and gradients to the bit, none of theirs."""
    batch = micro_batch(config, ROWS, TIME, 0)
    clean, junk = model(name, config), model(name, config)
    padded = [p for p in clean.parameters if p.padding]
    assert len(padded) == 1 + (not config.tied_head)
    for p in padded:
        values = np.full(p.padded_shape, 1e3)
        values[..., :config.vocabulary, :] = clean.stored()[p.name]
        junk.weights[p.name].write(values)
    expected, got = (loss_and_gradients(m, batch) for m in (clean, junk))
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)
    for p in padded:
        assert not expected[f"grad.{p.name}"][..., config.vocabulary:, :].any()


@every_backend
def test_padded_rows_stay_zero_in_training(name):
    t = trainer(name)
    for step in range(10):
        assert t.step(step_batch(micro_batch(SMALL, ROWS, TIME, step)), 1e-2).applied
    for buffer in (t.model.weights["embedding.weight"], t.moments["m.embedding.weight"],
                   t.moments["v.embedding.weight"]):
        array = buffer.read()
        assert array.shape[0] == 64
        assert array[:SMALL.vocabulary].all() and not array[SMALL.vocabulary:].any()


@every_backend
def test_decay_acts_once_on_what_has_two_axes(name):
    t = trainer(name, weight_decay=0.1)
    before = contents(t.model.weights)
    t.step(step_batch(micro_batch(SMALL, ROWS, TIME, 0, keep=0)), 0.1)
    for p in t.model.parameters:
        factor = np.float32(0.99 if len(p.shape) > 1 else 1.0)
        np.testing.assert_allclose(t.model.weights[p.name].read(), before[p.name] * factor,
                                   rtol=2e-7, err_msg=p.name)


# Decoding


@every_backend
def test_decoding_with_a_cache_equals_the_whole_pass(name):
    """Prefill in chunks that do not divide the text, then token by token, up to a full context."""
    m = model(name)
    tokens = micro_batch(SMALL, 1, 8, 3).tokens
    hi = np.arange(1, 9, dtype=np.int32)[None]
    whole = compile_function(logits_function(SMALL, 1, 8, F64), backend(name), m.bound).run(
        {"tokens": tokens, "lo": np.zeros_like(hi), "hi": hi})["logits"][0]
    generator = Generator(m, chunk=3)
    text = list(map(int, tokens[0]))
    got = [generator.extend(text[:4]), generator.extend(text[4:6]),
           generator.extend(text[6:7]), generator.extend(text[7:])]
    for logits, position in zip(got, (3, 5, 6, 7), strict=True):
        assert logits.shape == (SMALL.vocabulary,)
        np.testing.assert_allclose(logits, whole[position], rtol=0, atol=1e-12)


# Checkpoints


def save(t: Trainer, directory) -> None:
    with CheckpointWriter(directory) as writer:
        writer.save(t.model.stored(), t.stored_moments(), {"step": 1, "t": int(t.t.read())}, "{}")


def test_a_checkpoint_holds_the_tied_matrix_once_and_no_padding(tmp_path):
    t = trainer("llvm")
    t.step(step_batch(micro_batch(SMALL, ROWS, TIME, 0)), 1e-2)
    save(t, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {p.name for p in parameters(SMALL)}
    assert "heads.weight" not in checkpoint.tensors
    assert sum(array.size for array in checkpoint.tensors.values()) == parameter_count(SMALL)
    for name in ("m.embedding.weight", "v.embedding.weight"):
        assert checkpoint.moments[name].shape == (SMALL.vocabulary, SMALL.width)


@every_backend
def test_a_loaded_model_goes_on_tied_and_to_the_bit(tmp_path, name):
    t = trainer(name)
    other = Trainer(Model(SMALL, backend(name)), AdamWConfig(), ROWS, TIME)
    t.step(step_batch(micro_batch(SMALL, ROWS, TIME, 0)), 1e-2)
    save(t, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    checkpoint.check_shapes({p.name: p.shape for p in other.model.parameters})
    other.model.load(checkpoint.tensors)
    other.load(checkpoint.moments, checkpoint.state["t"])
    for step in range(5):
        batch = step_batch(micro_batch(SMALL, ROWS, TIME, 1 + step))
        assert t.step(batch, 1e-2).loss == other.step(batch, 1e-2).loss
    for key, buffer in {**t.model.weights, **t.moments}.items():
        np.testing.assert_array_equal({**other.model.weights, **other.moments}[key].read(),
                                      buffer.read())


@pytest.mark.parametrize(("saved", "wanted", "message"), [
    (UNTIED, SMALL, "has a tensor heads.weight, which the model does not know"),
    (SMALL, UNTIED, "has no tensor heads.weight, which the model needs"),
])
def test_a_head_of_its_own_is_no_tied_one(tmp_path, saved, wanted, message):
    save(Trainer(model("reference", saved, F32), AdamWConfig(), ROWS, TIME), tmp_path)
    with pytest.raises(EulerError, match=message):
        load_checkpoint(tmp_path).check_shapes({p.name: p.shape for p in parameters(wanted)})
