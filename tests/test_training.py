"""Whole runs through the command: stopped, killed and resumed ones equal straight ones, to the bit;
wrong input ends in one line."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.backend import create
from euler_ir.errors import EulerError
from runtime import train
from runtime.cli import run_command
from runtime.storage.checkpoint import load_checkpoint
from runtime.storage.checkpoint_writer import CheckpointWriter
from runtime.storage.metrics import read_metrics
from runtime.training import Run, read_settings

ROOT = Path(__file__).parent.parent
TEXT = ("Now is the winter of our discontent made glorious summer by this sun of York; and all the "
        "clouds that lour'd upon our house in the deep bosom of the ocean buried. ") * 14


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Some 2,100 bytes: at vocabulary 300 one epoch is a few dozen windows of 16 tokens."""
    path = tmp_path_factory.mktemp("data") / "york.txt"
    path.write_text(TEXT)
    return path


def flags(text: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(text), "--out", str(out), "--steps", "40", "--batch-size", "1",
            "--context", "16", "--accumulate", "3", "--eval-every", "20",
            "--checkpoint-every", "4", *more]


def start(arguments: list[str], **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "runtime.train", *arguments], cwd=ROOT,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(directory) if "loss" in line]


def final_state(directory: Path) -> dict[str, np.ndarray]:
    checkpoint = load_checkpoint(directory)
    assert checkpoint.step == 40
    return {**checkpoint.tensors, **checkpoint.moments}


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("straight") / "run"
    assert run_command(train.main, flags(text, directory, "--threads", "1")) == 0
    epochs = 40 * 3 / load_checkpoint(directory).state["data"]["position"]
    assert epochs == 1.0
    return directory


def assert_same_run(directory: Path, straight: Path) -> None:
    assert losses(directory) == losses(straight)
    expected = final_state(straight)
    for name, array in final_state(directory).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_a_run_writes_what_it_promises(straight):
    lines = read_metrics(straight)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert all({"loss", "grad_norm", "lr", "tokens_per_second"} <= line.keys()
               for line in lines if "loss" in line)
    assert [line["step"] for line in lines if "val_bits_per_byte" in line] == [20, 40]
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((straight / "config.json").read_text())["settings"]["accumulate"] == 3
    assert losses(straight)[-1][1] < losses(straight)[0][1]


@pytest.mark.parametrize("threads", ["2", "4"])
def test_the_thread_count_changes_no_bit(text, straight, tmp_path, threads):
    directory = tmp_path / "run"
    assert run_command(train.main, flags(text, directory, "--threads", threads)) == 0
    assert_same_run(directory, straight)


@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_a_run_killed_at_any_moment_resumes_to_the_bit(text, straight, tmp_path, threads):
    directory, chance = tmp_path / "run", random.Random(int(threads))
    process = start(flags(text, directory, "--threads", threads))
    kills = 0
    while True:
        wait_for_step(directory, process, chance.randrange(3, 12))
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        process.stderr.close()
        kills += 1
        if kills == 3 or (losses(directory) and losses(directory)[-1][0] >= 38):
            break
        process = start(["--resume", str(directory), "--threads", threads])
    assert run_command(train.main, ["--resume", str(directory), "--threads", threads]) == 0
    assert_same_run(directory, straight)


def wait_for_step(directory: Path, process: subprocess.Popen, more: int) -> None:
    """Until the run has done so many steps more than it has now, or has ended."""
    def steps() -> int:
        return len(losses(directory)) if (directory / "metrics.jsonl").exists() else 0

    target, deadline = steps() + more, time.monotonic() + 60
    while steps() < target and process.poll() is None:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_last_finished_step(text, straight, tmp_path, number):
    directory = tmp_path / "run"
    process = start(flags(text, directory, "--checkpoint-every", "1000"))
    wait_for_step(directory, process, 5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the run ended before it was interrupted: make it longer")
    assert process.returncode == 130 and "Traceback" not in errors
    step = load_checkpoint(directory).step
    assert losses(directory)[-1][0] == step
    assert f"stopped after step {step}" in errors
    assert run_command(train.main, ["--resume", str(directory)]) == 0
    assert_same_run(directory, straight)


def test_resume_before_the_first_checkpoint_starts_at_step_0(text, straight, tmp_path, capsys):
    directory = tmp_path / "run"
    directory.mkdir()
    settings = json.loads((straight / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings))
    assert run_command(train.main, ["--resume", str(directory)]) == 0
    assert "no checkpoint yet: starting at step 0" in capsys.readouterr().err
    assert_same_run(directory, straight)


def test_a_finished_run_can_be_made_longer(text, tmp_path):
    directory = tmp_path / "run"
    arguments = flags(text, directory, "--schedule", "constant", "--steps", "6")
    assert run_command(train.main, arguments) == 0
    assert run_command(train.main, ["--resume", str(directory), "--steps", "10"]) == 0
    assert [step for step, _ in losses(directory)] == list(range(1, 11))


@pytest.fixture(scope="module")
def eight_steps(text, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("eight") / "run"
    assert run_command(train.main, flags(text, directory, "--steps", "8")) == 0
    return directory


@pytest.mark.parametrize("place, name", [
    ("run/checkpoints", "step-000008"), ("run/checkpoints/step-000008", "."), ("", "link")])
def test_a_checkpoint_leads_to_its_run_wherever_one_stands(eight_steps, tmp_path, monkeypatch,
                                                           place, name):
    directory = shutil.copytree(eight_steps, tmp_path / "run")
    (tmp_path / "link").symlink_to(directory / "checkpoints" / "step-000008")
    monkeypatch.chdir(tmp_path / place)
    assert run_command(train.main, ["--resume", name, "--steps", "9"]) == 0
    assert {path.name for path in directory.iterdir()} == {
        "config.json", "metrics.jsonl", "loss.png", "checkpoints"}
    assert load_checkpoint(directory).step == 9


def test_a_checkpoint_outside_a_run_cannot_be_gone_on_with(capsys, straight, tmp_path):
    shutil.copytree(load_checkpoint(straight).path, tmp_path / "step-000040")
    assert "lies in no run directory" in refuse(capsys, "--resume", str(tmp_path / "step-000040"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000040"]


def test_a_second_run_in_a_directory_changes_nothing_there(text, straight):
    config = (straight / "config.json").read_bytes()
    settings = read_settings(straight)
    with CheckpointWriter(straight, step=40):  # the first run
        with pytest.raises(EulerError, match="another process is training"):
            Run(replace(settings, seed=5), create("llvm")).train(straight)
    assert (straight / "config.json").read_bytes() == config


def test_a_run_that_diverges_does_not_save_over_what_was_good(capsys, text, tmp_path):
    """One step of this size leaves weights that are not finite; no later update is applied."""
    message = refuse(capsys, *flags(text, tmp_path / "run", "--lr", "1e38", "--warmup", "0",
                                    "--checkpoint-every", "1"))
    assert "20 updates in a row had no finite gradient" in message
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == ["step-000001"]


def refuse(capsys, *arguments: str) -> str:
    """The one line that a command with wrong input ends in."""
    try:
        code = run_command(train.main, list(arguments))
    except SystemExit as exit:
        code = exit.code
    errors = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and errors[-1].startswith("error: ")
    assert not [line for line in errors if "Traceback" in line]
    return errors[-1]


@pytest.mark.parametrize("arguments, message", [
    (["--preset", "nano-2m"], "no preset 'nano-2m'; known: nano-1m"),
    (["--backend", "opencl"], "no backend 'opencl'; known: auto, llvm"),
    (["--bogus"], "unrecognized arguments: --bogus"),
    (["--step", "3"], "unrecognized arguments: --step 3"),
    (["--steps", "0"], "--steps: must be an integer at least 1"),
    (["--lr", "nan"], "--lr: must be a number above 0"),
    (["--context", "4096"], "--context 4096 is longer than nano-1m's 128"),
    (["--precision", "f8"], "precision 'f8' is not available: use f32 or f64"),
    (["--schedule", "linear"], "invalid choice: 'linear'"),
    (["--data", "no-such-file.txt"], "no-such-file.txt does not exist"),
    (["--tokenizer", "no-such-file.json"], "no-such-file.json"),
    (["--resume", "no-such-run"], "no-such-run"),
    (["--cpu-features", "+warp-drive"], "warp-drive"),
    (["--steps", "9" * 400], "--steps: must be an integer at least 1 and at most 2147483647"),
    (["--resume", ""], "--resume: must be a path"),
    (["--data", ""], "--data: must be a path"),
    (["--steps", "40", "--warmup", "41"], "a warm-up of 41 steps is longer than the run of 40"),
])
def test_wrong_flags_end_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refuse(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_run_cannot_be_resumed_to_end_in_its_warmup(capsys, text, tmp_path):
    """One whose warm-up is as long as the run is refused only where it is made shorter."""
    directory = tmp_path / "run"
    assert run_command(train.main, flags(text, directory, "--steps", "3", "--warmup", "3")) == 0
    resumed = json.loads((directory / "config.json").read_text())
    shutil.rmtree(directory / "checkpoints")
    message = refuse(capsys, "--resume", str(directory), "--steps", "2")
    assert "a warm-up of 3 steps is longer than the run of 2: take a shorter --warmup" in message
    assert json.loads((directory / "config.json").read_text()) == resumed
    assert run_command(train.main, ["--resume", str(directory)]) == 0


@pytest.mark.parametrize("content, message", [
    (b"", "is empty"),
    (b"x" * 9, "one window of context 128 takes 129"),
    (b"abc\xff\xfe" * 100, "is not UTF-8: byte 0xff at offset 3"),
])
def test_data_that_cannot_be_used_ends_in_one_line(capsys, tmp_path, content, message):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    assert message in refuse(capsys, "--data", str(path), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_text_too_short_to_validate_is_refused_at_once(capsys, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a!b!c!d!e!f!g!h")  # pieces of one byte: 15 tokens, one held out
    arguments = ["--data", str(path), "--out", str(tmp_path / "run"), "--context", "4",
                 "--batch-size", "1", "--steps", "2"]
    assert "the held-out part has no tokens to score" in refuse(capsys, *arguments)
    assert not (tmp_path / "run").exists()
    path.write_text("a!b!c!d!")  # none of it held out
    assert run_command(train.main, [*arguments, "--eval-every", "0"]) == 0


@pytest.mark.parametrize("flag", ["--data", "--tokenizer"])
def test_a_link_to_itself_ends_in_one_line(capsys, tmp_path, flag):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refuse(capsys, flag, str(tmp_path / "loop"))


def test_out_must_not_hold_a_run(capsys, straight, text):
    assert "holds a run already" in refuse(capsys, "--data", str(text), "--out", str(straight))


@pytest.mark.parametrize("arguments, message", [
    (["--batch-size", "2"], "--batch-size 2 does not fit the run to resume, which has 1"),
    (["--preset", "nano-10m"], "--preset nano-10m does not fit"),
    (["--seed", "5"], "--seed 5 does not fit"),
    (["--out", "elsewhere"], "--out does not go with --resume: a resumed run stays"),
    (["--steps", "39"], "--steps 39: the run has done 40 steps already"),
])
def test_resume_refuses_what_would_make_another_run(capsys, straight, arguments, message):
    assert message in refuse(capsys, "--resume", str(straight), *arguments)


def test_resume_refuses_other_data(capsys, straight, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "A horse! a horse! my kingdom for a horse!")
    assert "checkpoint's data is" in refuse(capsys, "--resume", str(straight), "--data", str(other))


def test_a_full_disk_ends_in_one_line_and_keeps_the_last_checkpoint(text, tmp_path):
    """A file size limit stands in for a full disk: checkpoints of 12 MB do not fit in 8."""
    directory = tmp_path / "run"
    script = (f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
              f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
              f"from runtime import train; from runtime.cli import run_command; "
              f"sys.exit(run_command(train.main, {flags(text, directory)!r}))")
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                            text=True, env={**os.environ, "EULER_CACHE": str(tmp_path / "cache")})
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(r"error: .*checkpoints", result.stderr)
    assert load_checkpoint(directory) is None
    assert not list((directory / "checkpoints").glob("*/*"))


@pytest.mark.parametrize("module", ["numpy", "llvmlite"])
def test_an_interrupt_during_the_imports_ends_in_one_line(tmp_path, module):
    """Sent as soon as a module is imported, long before the command's own code runs."""
    command = [sys.executable, "-X", "importtime", "-m", "runtime.train",
               "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130 and said == ["interrupted"]
    assert not (tmp_path / "run").exists()
