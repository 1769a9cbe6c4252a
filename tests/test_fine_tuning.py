"""New runs with the weights of others: `train --init`."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.config import PRESETS, ModelConfig, preset
from model.parameters import parameter_count, parameters
from model.tokenizer import Tokenizer
from runtime import generate, train
from runtime.cli import run_command
from runtime.convert import export_folder, export_gguf, import_folder
from runtime.engine import Trainer
from runtime.exchange.hugging_face_import import read_folder
from runtime.settings import RECIPES, Settings, fine_tuning_recipe
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from runtime.storage.metrics import read_metrics
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
    small_tokenizer,
    write_model,
)

TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 30
NANO = ModelConfig("nano", width=16, heads=4, kv_heads=2, layers=2, context=16, vocabulary=300,
                   hidden=24, prediction_heads=3)
TIED = {**LLAMA_CONFIG, "tie_word_embeddings": True}


@pytest.fixture(scope="module", autouse=True)
def quick():
    """A picture or a long sample takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.training.plot_losses", lambda directory: None)
        patched.setattr("runtime.train._SAMPLE_TOKENS", 2)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "hamlet.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def origins(tmp_path_factory) -> Path:
    """Runs to begin with: imports of each kind, and one of a model with three heads."""
    root = tmp_path_factory.mktemp("origins")
    for name, config, tensors in (("gpt2", GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG)),
                                  ("llama", LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG)),
                                  ("tied", TIED, llama_tensors(TIED))):
        write_model(root / "folders" / name, config, tensors)
        import_folder(root / "folders" / name, root / name)
    tokenizer = small_tokenizer()
    config = replace(NANO, vocabulary=Tokenizer.from_json(tokenizer).vocabulary_size)
    tensors = {p.name: p.initial(seed=5) for p in parameters(config)}
    state = {"step": 40, "model": config.to_dict(),
             "settings": {"precision": "f32", "context": 12}}
    with CheckpointWriter(root / "2026-01-31-nano") as writer:
        writer.save(tensors, {}, state, tokenizer)
    return root


def flags(origin: Path, text: Path, out: Path, *more: str) -> list[str]:
    return ["--init", str(origin), "--data", str(text), "--out", str(out), "--backend",
            "reference", "--steps", "4", "--batch-size", "2", "--eval-every", "0",
            "--checkpoint-every", "2", *more]


def tune(origin: Path, text: Path, out: Path, *more: str) -> Path:
    assert run_command(train.main, flags(origin, text, out, *more)) == 0
    return out


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if "loss" in line]


def refuse(capsys, *arguments: str) -> str:
    """The one line that a command with wrong input ends in."""
    assert run_command(train.main, list(arguments)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def straight(origins, text, tmp_path_factory) -> Path:
    return tune(origins / "gpt2", text, tmp_path_factory.mktemp("straight") / "run")


def test_the_first_loss_is_that_of_the_weights(origins, text, tmp_path, monkeypatch):
    """Against the published definition of the models, in f64, on the first step's own batch."""
    batches = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batch, rate: (
        batches.append(batch) or step(self, batch, rate)))
    logits = {"gpt2": (gpt2_logits, GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG)),
              "llama": (llama_logits, LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG)),
              "tied": (llama_logits, TIED, llama_tensors(TIED))}
    for name, (forward, config, tensors) in logits.items():
        batches.clear()
        run = tune(origins / name, text, tmp_path / name, "--steps", "1")
        (batch,) = batches[0].micro_batches
        total = 0.0
        for tokens, targets in zip(batch.tokens, batch.targets[..., 0], strict=True):
            scores = forward(config, tensors, tokens)
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            total -= sum(scores[t, target] for t, target in enumerate(targets) if target >= 0)
        expected = total / batches[0].target_counts[0]
        assert math.isclose(losses(run)[0], expected, rel_tol=1e-5), name


def test_a_run_trains_what_it_began_with(origins, text, straight):
    first, trained = load_checkpoint(origins / "gpt2"), load_checkpoint(straight)
    assert trained.step == 4 and trained.state["t"] == 4
    assert trained.state["model"] == first.state["model"]
    assert trained.tokenizer_json == first.tokenizer_json
    assert all((trained.tensors[name] != array).any() for name, array in first.tensors.items())
    config = json.loads((straight / "config.json").read_text())
    assert config["settings"]["init"] == str(first.path.resolve())
    assert config["model"] == first.state["model"]


def test_the_prediction_heads_are_kept(origins, text, tmp_path):
    origin = origins / "2026-01-31-nano"
    run = tune(origin, text, tmp_path / "run", "--steps", "1")
    checkpoint = load_checkpoint(run)
    assert checkpoint.tensors["heads.weight"].shape[0] == 3
    settings = checkpoint.state["settings"]
    assert settings["context"] == 12  # the rows it was trained on
    assert Settings.from_dict(settings).name == "nano"
    assert run_command(generate.main, ["--checkpoint", str(run), "--prompt", "to", "--backend",
                                       "reference", "--max-tokens", "2"]) == 0


class Killed(BaseException):
    """Nothing is saved after it, as after a kill."""


@pytest.mark.parametrize("step", range(4))
def test_a_run_killed_at_any_step_resumes_to_the_bit_without_the_origin(
        origins, text, straight, tmp_path, monkeypatch, step):
    origin = tmp_path / "origin"
    shutil.copytree(origins / "gpt2", origin)
    with monkeypatch.context() as patched:
        original = Trainer.step
        left = iter(range(step))

        def dying(self, batch, rate):
            if next(left, None) is None:
                raise Killed
            return original(self, batch, rate)

        patched.setattr(Trainer, "step", dying)
        with pytest.raises(Killed):
            train.main(flags(origin, text, tmp_path / "run"))
    shutil.rmtree(origin)
    assert run_command(train.main, ["--resume", str(tmp_path / "run"), "--backend",
                                    "reference"]) == 0
    assert losses(tmp_path / "run") == losses(straight)
    resumed, expected = load_checkpoint(tmp_path / "run"), load_checkpoint(straight)
    assert resumed.state["source"] == expected.state["source"]
    for name, array in {**expected.tensors, **expected.moments}.items():
        np.testing.assert_array_equal({**resumed.tensors, **resumed.moments}[name], array, name)


def test_a_run_killed_before_its_beginning_is_saved_can_be_started_again(
        origins, text, straight, tmp_path, monkeypatch, capsys):
    def dying(self, *arguments, **options):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "save", dying)
        with pytest.raises(Killed):
            train.main(flags(origins / "gpt2", text, tmp_path / "run"))
    assert "is no run directory" in refuse(capsys, "--resume", str(tmp_path / "run"))
    assert losses(tune(origins / "gpt2", text, tmp_path / "run")) == losses(straight)


def test_a_run_without_its_beginning_says_so(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    message = refuse(capsys, "--resume", str(tmp_path / "run"))
    assert "has lost the checkpoint that it began with" in message and "--init" in message


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "nano-1m"], "--preset does not go with --init: the model is that of"),
    (["--tokenizer", "t.json"], "--tokenizer does not go with --init"),
    (["--resume", "x"], "--init does not go with --resume"),
    (["--context", "17"], "--context 17 is longer than gpt2's 16"),
])
def test_what_does_not_go_with_a_checkpoint_is_refused(origins, text, tmp_path, capsys, arguments,
                                                       message):
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "run")]
    assert message in refuse(capsys, "--init", str(origins / "gpt2"), "--data", str(text), *out,
                             *arguments)
    assert not (tmp_path / "run").exists()


def test_an_origin_without_a_checkpoint_is_refused(tmp_path, capsys):
    assert "does not exist" in refuse(capsys, "--init", str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    assert "has no checkpoint yet" in refuse(capsys, "--init", str(tmp_path))


def test_another_preset_or_tokenizer_does_not_fit_the_run(straight, capsys):
    message = refuse(capsys, "--resume", str(straight), "--preset", "nano-1m")
    assert "--preset nano-1m does not fit the run to resume, which has none" in message


# Export


def test_a_trained_import_is_exported_under_its_own_names(origins, straight, tmp_path):
    export_folder(straight, tmp_path / "out")
    folder, again = origins / "folders" / "gpt2", read_folder(tmp_path / "out")
    trained = load_checkpoint(straight)
    assert again.record["tensors"] == read_folder(folder).record["tensors"]
    assert again.record["config"] == GPT2_CONFIG
    assert again.tokenizer_json == trained.tokenizer_json
    for name, array in trained.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], array, name)


@pytest.mark.parametrize("dtype", [None, "F16"])
def test_training_is_not_rounded_to_the_type_of_the_import(text, tmp_path, dtype):
    """A checkpoint begun with f16 weights holds f32 ones; further trained ones stay f32 too."""
    write_model(tmp_path / "in", TIED | {"torch_dtype": "float16"},
                llama_tensors(TIED, dtype=np.float16))
    import_folder(tmp_path / "in", tmp_path / "import")
    once = tune(tmp_path / "import", text, tmp_path / "once", "--steps", "2")
    twice = tune(once, text, tmp_path / "twice", "--steps", "1")
    export_folder(twice, tmp_path / "out", dtype)
    again, trained = read_folder(tmp_path / "out"), load_checkpoint(twice)
    assert set(again.record["tensors"].values()) == {dtype or "F32"}
    assert again.record["config"]["torch_dtype"] == ("float16" if dtype else "float32")
    for name, array in trained.tensors.items():
        expected = array.astype(np.float16).astype(np.float32) if dtype else array
        np.testing.assert_array_equal(again.tensors[name], expected, name)


def test_a_trained_import_goes_to_gguf(straight, tmp_path):
    reader = pytest.importorskip("gguf").GGUFReader
    export_gguf(straight, tmp_path / "out.gguf")
    found = {tensor.name: tensor.data for tensor in reader(tmp_path / "out.gguf").tensors}
    np.testing.assert_array_equal(found["output_norm.weight"],
                                  load_checkpoint(straight).tensors["norm.weight"])


# Settings


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_that_of_the_nearest_size(name):
    recipe = fine_tuning_recipe(replace(preset(name), vocabulary=preset(name).vocabulary - 9))
    sizes = {other: parameter_count(PRESETS[other]) for other in PRESETS}
    alike = [other for other in PRESETS if 0.99 < sizes[other] / sizes[name] < 1.01]
    assert alike == [name]
    assert recipe.lr == RECIPES[name].lr / 10 and recipe.steps == RECIPES[name].steps // 10


def test_long_contexts_are_not_the_default(tmp_path):
    config = replace(NANO, vocabulary=300, context=1 << 17)
    trained = {"precision": "f64", "context": config.context}
    settings = Settings.for_checkpoint(tmp_path, config, trained)
    assert (settings.context, settings.precision) == (1024, "f64")
    assert Settings.for_checkpoint(tmp_path, config, trained, context=4096).context == 4096
    assert Settings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize("origin", [{"preset": None}, {"init": "somewhere"}])
def test_settings_have_one_origin(origin):
    settings = Settings.for_preset("nano-1m").to_dict()
    with pytest.raises(EulerError, match="comes from a preset or from a checkpoint"):
        Settings.from_dict(settings | origin)
