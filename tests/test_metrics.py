"""metrics.jsonl, its picture, and the directories that runs live in."""

import json
import math

import matplotlib.image
import numpy as np
import pytest

from euler_ir.errors import EulerError
from runtime.storage.metrics import MetricsWriter, plot_losses, read_metrics, smooth
from runtime.storage.run_directory import claim_run_directory, new_run_directory


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, loss=np.float32(2.5), applied=np.bool_(True), tokens_per_second=10)
        writer.write(2, loss=math.nan, grad_norm=math.inf)
        text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] == [
        {"step": 1, "loss": 2.5, "applied": True, "tokens_per_second": 10},
        {"step": 2, "loss": None, "grad_norm": None},
    ]


@pytest.mark.parametrize("line", ["[" * 9999, '{"step": "1"}', '{"step": -1}', "[]", "{}",
                                  '{"step": 1' + "0" * 400 + "}"])
def test_lines_that_no_run_writes_are_dropped(tmp_path, line):
    good = '{"step": 1, "loss": "low", "val_loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + good)
    assert plot_losses(tmp_path).exists()  # without what is no number
    MetricsWriter(tmp_path, step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == good


@pytest.mark.parametrize("tail", ["", '{"step": 6, "lo', '{"step": 5}\n{"step"'])
def test_resuming_drops_what_lies_past_the_checkpoint(tmp_path, tail):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, loss=step / 2)
            if step % 2 == 0:
                writer.write(step, val_loss=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(tail)
    with MetricsWriter(tmp_path, step=4) as writer:
        writer.write(5, loss=9.0)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4, 5]
    assert lines[-1]["loss"] == 9.0
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 7
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_begins_an_empty_file(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, loss=1.0)
    assert len(read_metrics(tmp_path)) == 1


def test_a_directory_that_is_not_there_is_a_user_error(tmp_path):
    with pytest.raises(EulerError, match="cannot write .*metrics.jsonl"):
        MetricsWriter(tmp_path / "missing")


def test_smoothing_follows_a_line_and_averages_noise():
    line = np.linspace(5.0, 1.0, 200)
    assert smooth(line, reach=20)[:180] == pytest.approx(line[:180])
    assert smooth(np.array([1.0, 2.0, 6.0, 3.0]), reach=1).tolist() == pytest.approx(
        [1.0, 3.0, 11 / 3, 4.5]
    )


def test_the_picture_shows_training_and_validation(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 200):
            writer.write(step, loss=6 / step**0.3 if step != 50 else math.nan)
        writer.write(199, val_loss=1.5, val_bits_per_byte=2.5)
    path = plot_losses(tmp_path)
    assert path == tmp_path / "loss.png"
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape == (675, 1200, 3)
    colours = {"#4c72b0": (76, 114, 176), "#dd8452": (221, 132, 82)}
    for rgb in colours.values():
        assert (np.abs(pixels - np.array(rgb) / 255).max(axis=2) < 0.01).sum() > 50
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_nothing_measured_gives_no_picture(tmp_path):
    MetricsWriter(tmp_path).close()
    assert plot_losses(tmp_path) is None and not (tmp_path / "loss.png").exists()


def test_runs_of_one_day_get_names_of_their_own(tmp_path):
    names = [new_run_directory("nano-1m", tmp_path / "runs").name for _ in range(3)]
    assert names[0].endswith("-nano-1m") and len(names[0]) == len("2025-01-31-nano-1m")
    assert names[1:] == [names[0] + "-2", names[0] + "-3"]


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    path = claim_run_directory(tmp_path / "a" / "b")
    assert path.is_dir() and claim_run_directory(path) == path
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(EulerError, match="holds a run already"):
        claim_run_directory(path)


def test_what_a_run_leaves_that_was_killed_as_it_began_is_no_run(tmp_path):
    (tmp_path / "checkpoints" / ".writing").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    assert claim_run_directory(tmp_path) == tmp_path
    (tmp_path / "checkpoints" / "step-000010").mkdir()
    with pytest.raises(EulerError, match="holds a run already"):
        claim_run_directory(tmp_path)


def test_a_file_is_no_place_for_runs(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EulerError, match="file"):
        claim_run_directory(tmp_path / "file")
    with pytest.raises(EulerError, match="file"):
        new_run_directory("nano-1m", tmp_path / "file")
