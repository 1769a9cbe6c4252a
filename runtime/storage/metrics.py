"""metrics.jsonl, one JSON object a line, and the picture of it.

A line has `step` and whatever was measured: `loss`, `grad_norm`, `lr`, `tokens_per_second` for a
training step, `val_loss` and `val_bits_per_byte` for a validation. Each line is handed to the
system as it is written, so a killed run keeps all of them. A number that is not finite is written
as null, because JSON has no other word for it.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np

from model.json_values import LARGEST, is_number
from runtime.storage.files import read_error, write_atomic, write_error
from runtime.storage.run_directory import METRICS, PICTURE

_REACH = 25  # steps on both sides that the smoothed curve takes the mean of


class MetricsWriter:
    """Appends to a run's metrics. A run that goes on from `step` first drops the lines past it,
    which the steps to come will write again, and a last line that a kill cut short."""

    def __init__(self, run_dir: Path | str, *, step: int = 0):
        self._path = Path(run_dir) / METRICS
        if self._path.exists():
            _drop_after(self._path, step)
        try:
            self._file = open(self._path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise write_error(error, self._path) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, step: int, **values: float | int | bool | str | None) -> None:
        """Append a line. Raises EulerError when the system refuses it."""
        line = {"step": step} | {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise write_error(error, self._path) from error

    def close(self) -> None:
        self._file.close()


def _plain(value: object) -> object:
    """A JSON value: numpy scalars become Python's, numbers that are not finite None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _drop_after(path: Path, step: int) -> None:
    content = _read(path)
    kept = b"".join(
        line
        for line in content.splitlines(keepends=True)
        if line.endswith(b"\n") and (parsed := _parse(line)) and parsed["step"] <= step
    )
    if kept != content:
        write_atomic(path, kept)


def read_metrics(run_dir: Path | str) -> list[dict]:
    """The lines of a run's metrics, without any that a kill cut short."""
    content = _read(Path(run_dir) / METRICS)
    return [parsed for line in content.splitlines() if (parsed := _parse(line))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_error(error, path) from error


def _parse(line: bytes) -> dict | None:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or type(parsed.get("step")) is not int:
        return None
    return parsed if 0 <= parsed["step"] <= LARGEST else None


def smooth(values: np.ndarray, reach: int = _REACH) -> np.ndarray:
    """The mean of each value and up to `reach` neighbours on both sides, float64 [n].

    Near the start both sides are cut alike, because a mean of more later than earlier values (or a
    running average, which has earlier ones only) would lie off the steep part of the curve.
    """
    place = np.arange(len(values))
    first = place - np.minimum(place, reach)
    stop = np.minimum(2 * place - first + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)


def plot_losses(run_dir: Path | str) -> Path | None:
    """Draw `loss.png`: training loss as it came and smoothed, and the validations. None, and no
    picture, when nothing was measured yet."""
    lines = read_metrics(run_dir)
    train = _series(lines, "loss")
    validation = _series(lines, "val_loss")
    if not len(train) and not len(validation):
        return None

    from matplotlib.figure import Figure  # half a second to import: only when a picture is due

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if len(train):
        steps, losses = train.T
        axes.plot(steps, losses, color="#4c72b0", alpha=0.25, linewidth=0.7)
        smoothed = smooth(losses)
        label = f"training, smoothed (last {smoothed[-1]:.3f})"
        axes.plot(steps, smoothed, color="#4c72b0", linewidth=1.8, label=label)
    if len(validation):
        steps, losses = validation.T
        label = f"validation (last {losses[-1]:.3f}{_last_bits(lines)})"
        axes.plot(steps, losses, "o-", color="#dd8452", markersize=5, linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title(Path(run_dir).resolve().name, loc="left")
    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return _save(figure, Path(run_dir) / PICTURE)


def _save(figure, path: Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())
    return path


def _series(lines: list[dict], name: str) -> np.ndarray:
    """(step, value) of each line that has a value of that name, float64 [n, 2]."""
    pairs = [(line["step"], line[name]) for line in lines if is_number(line.get(name))]
    return np.array(pairs, np.float64).reshape(-1, 2)


def _last_bits(lines: list[dict]) -> str:
    bits = _series(lines, "val_bits_per_byte")
    return f", {bits[-1, 1]:.3f} bits a byte" if len(bits) else ""
