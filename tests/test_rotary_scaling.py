"""Rotary scaling: what it computes, how files spell it, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.config import PRESETS, ModelConfig, RopeScaling
from model.hugging_face_config import read_config, write_config
from model.transformer import rotary_frequencies
from runtime.compiler.driver import compile_function
from runtime.convert import export_folder, export_gguf, import_folder
from runtime.inference.trained import load_trained
from tests.hugging_face import (
    LLAMA_CONFIG,
    VOCABULARY,
    llama_logits,
    llama_tensors,
    rotary_frequency,
    write_model,
)
from tests.models import logits_function
from tests.runners import backend

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
#: Wavelengths 6.3, 19.9, 62.8, 198.7: one that llama3 leaves alone, one between, two slowed.
CONFIG = {**LLAMA_CONFIG, "rope_theta": 100.0, "max_position_embeddings": 64}
SCALINGS = {
    "llama3": LLAMA3,
    "llama3, both names of the type": {**LLAMA3, "type": "llama3", "factor": 32},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, older name": {"type": "linear", "factor": 4},
}
OURS = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_llama3_has_three_bands():
    frequencies = rotary_frequencies(read_config({**CONFIG, "rope_scaling": LLAMA3}))
    unscaled = rotary_frequencies(read_config(CONFIG))
    slowed = unscaled / frequencies
    assert slowed[0] == 1 and 1.5 < slowed[1] < 7 and slowed[2:].tolist() == [8, 8]


@pytest.mark.parametrize("name", SCALINGS)
def test_models_compute_what_the_definition_says(tmp_path, name):
    """48 tokens, more than the 32 of the first training; then out again, as it came."""
    config = {**CONFIG, "rope_scaling": SCALINGS[name]}
    tensors = llama_tensors(config)
    folder = write_model(tmp_path / "in", config, tensors)
    import_folder(folder, tmp_path / "run")
    model = load_trained(tmp_path / "run", backend("reference")).model
    time = 48
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, time)
    inputs = {"tokens": tokens[None].astype(np.int32), "lo": np.zeros((1, time), np.int32),
              "hi": np.arange(1, time + 1, dtype=np.int32)[None]}
    program = compile_function(logits_function(model.config, 1, time, model.dtype), model.backend,
                               model.bound)
    expected = llama_logits(config, tensors, tokens)
    np.testing.assert_allclose(program.run(inputs)["logits"][0], expected, rtol=0, atol=1e-4)
    unscaled = llama_logits(CONFIG, tensors, tokens)
    assert np.abs(unscaled - expected).max() > 0.1

    export_folder(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.parametrize("name", SCALINGS)
def test_the_newer_spelling_says_the_same(name):
    older = {**CONFIG, "rope_scaling": SCALINGS[name]}
    parameters = {**SCALINGS[name], "rope_theta": 100.0}
    newer = {key: value for key, value in CONFIG.items() if not key.startswith("rope_")}
    newer["rope_parameters"] = parameters
    assert read_config(newer) == read_config(older) == read_config({**older, **newer})


@pytest.mark.parametrize("scaling", [None, OURS, RopeScaling("linear", 2.5)])
def test_configurations_go_out_and_come_back(scaling):
    config = replace(PRESETS["llama-124m"], rope_scaling=scaling)
    assert read_config(write_config(config, "float32", None, None)) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_checkpoints_from_before_have_none():
    values = PRESETS["llama-124m"].to_dict()
    del values["rope_scaling"]
    assert ModelConfig.from_dict(values) == PRESETS["llama-124m"]


@pytest.mark.parametrize(("values", "message"), [
    (("yarn", 2.0), "no rotary scaling 'yarn'; known: linear, llama3"),
    (("linear", 0.5), "factor must be a number from 1 on, got 0.5"),
    (("linear", float("nan")), "factor must be a number from 1 on, got nan"),
    (("linear", True), "factor must be a number from 1 on, got True"),
    (("linear", 2.0, 1.0), "has a factor and nothing else"),
    (("llama3", 2.0, 4.0, 4.0, 32), "the second larger; got 4.0 and 4.0"),
    (("llama3", 2.0, 0.0, 4.0, 32), "positive numbers, the second larger; got 0.0"),
    (("llama3", 2.0), "the second larger; got None and None"),
    (("llama3", 2.0, 1.0, 4.0), "original_context must be a whole number from 1 to .* got None"),
])
def test_scalings_that_cannot_be(values, message):
    with pytest.raises(EulerError, match=message):
        RopeScaling(*values)


def test_kinds_without_rotary_positions_have_none():
    with pytest.raises(EulerError, match="gpt2 has no rotary positions to scale"):
        replace(PRESETS["gpt2-124m"], rope_scaling=OURS)


def test_unknown_keys_of_a_checkpoint_are_named():
    values = PRESETS["llama-124m"].to_dict() | {"rope_scaling": {"kind": "linear", "size": 3}}
    with pytest.raises(EulerError, match="model rope_scaling has unknown keys: 'size'"):
        ModelConfig.from_dict(values)


def without(key):
    return {name: value for name, value in LLAMA3.items() if name != key}


@pytest.mark.parametrize(("scaling", "message"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling of type 'dynamic' is not supported"),
    ({"type": "yarn", "factor": 2.0}, "rope_scaling of type 'yarn' is not supported"),
    ({"rope_type": "longrope"}, "rope_scaling of type 'longrope' is not supported"),
    ({"rope_type": ["llama3"]}, r"rope_scaling of type \['llama3'\] is not supported"),
    ({**LLAMA3, "type": "linear"}, "has the rope_type 'llama3' and the type 'linear'"),
    ({**LLAMA3, "beta_fast": 32}, "rope_scaling option 'beta_fast' = 32 is not supported"),
    ({"rope_type": "default", "factor": 2.0}, "option 'factor' = 2.0 is not supported"),
    (without("factor"), "rope_scaling has no factor"),
    (without("high_freq_factor"), "rope_scaling has no high_freq_factor"),
    (without("original_max_position_embeddings"), "original_max_position_embeddings is missing"),
    ({**LLAMA3, "original_max_position_embeddings": 8.5}, "must be a whole number from 1"),
    ({**LLAMA3, "factor": "8"}, "option factor must be a positive number, got '8'"),
    ({**LLAMA3, "factor": 0.25}, "config.json: rope_scaling: .* from 1 on, got 0.25"),
    ({**LLAMA3, "low_freq_factor": 4.0}, "the second larger; got 4.0 and 4.0"),
    ("llama3", "rope_scaling must be an object or null"),
])
def test_scalings_of_files_that_are_refused(scaling, message):
    with pytest.raises(EulerError, match=message) as caught:
        read_config({**CONFIG, "rope_scaling": scaling})
    assert "\n" not in str(caught.value)


def test_two_spellings_that_disagree_are_refused():
    both = {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(EulerError, match="rope_scaling and rope_parameters do not say the same"):
        read_config({**CONFIG, **both})


@pytest.mark.parametrize("name", SCALINGS)
def test_gguf_has_it_as_llama_cpp_reads_it(tmp_path, name):
    """linear by a key, llama3 by what each pair of elements is divided by."""
    gguf = pytest.importorskip("gguf")
    config = {**CONFIG, "rope_scaling": SCALINGS[name]}
    folder = write_model(tmp_path / "in", config, llama_tensors(config))
    import_folder(folder, tmp_path / "run")
    export_gguf(tmp_path / "run", tmp_path / "model.gguf", "F16")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    factors = [t for t in reader.tensors if t.name == "rope_freqs.weight"]
    kind = reader.fields.get("llama.rope.scaling.type")
    if "linear" in name:
        assert not factors and kind.contents() == "linear"
        found = reader.fields["llama.rope.scaling.factor"].contents()
        assert found == SCALINGS[name]["factor"]
    else:
        assert kind is None and factors[0].tensor_type.name == "F32"
        expected = [rotary_frequency(CONFIG, i) / rotary_frequency(config, i) for i in range(4)]
        np.testing.assert_allclose(factors[0].data, expected, rtol=1e-6)
