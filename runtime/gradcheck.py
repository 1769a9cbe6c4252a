"""Check every gradient of a model against central differences, on the code that trains it.

    python -m runtime.gradcheck --preset nano-1m --backend llvm

In f64, the preset's architecture is shrunk to a few thousand parameters. The backend's compiled
backward pass gives the gradients; the differences are of the same backend's compiled objective,
and move each element of each tensor in turn. `--full` keeps the real size and takes a few elements
of each tensor: the one of the largest gradient, and others at random.

- **The batch** has what training meets: a plain row, a row of two packed documents (the second
  cannot see the first), and a left-padded one whose first queries see nothing. Targets are missing
  at the padding and at each document's end, for head k the last k + 1.
- **The weights** keep every layer away from its linear and flat regions, where a wrong gradient
  can hide behind a tiny one: matrices have deviation 1/√inputs, so that signals keep unit size
  on their way, attention is far from uniform and the losses far from log V; vectors get 0.2 of
  noise on their initial values.
- **The differences** are of fourth order (Abramowitz & Stegun, 25.3.6): with step h, the error is
  the objective's rounding over h, some 1e-15/h, plus h⁴/30 of its fifth derivative, which reaches
  1e5 where a norm follows small values. Near h = 3e-4 both are a thousandth of the bar. Weights are
  of order one by design, so one step suits all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from backends.backend import Backend, Buffer, Program
from euler_ir.types import F64
from model.config import ModelConfig, preset, shrink
from model.objective import gradient_function, loss_function
from model.parameters import parameter_count, parameters
from runtime.arguments import add_backend, add_preset, add_seed, backend_of
from runtime.cli import Parser, run_command
from runtime.compiler.driver import compile_function
from runtime.data.batches import inverse_counts
from runtime.engine import Model

#: The largest error of a tensor's gradient that passes.
BAR = 1e-7
#: Below this in all elements, both ways, a gradient is zero: there is no size to compare with.
ZERO = 1e-9
#: Elements of each tensor that `--full` checks, and the most tokens a row then has.
SAMPLES, FULL_CONTEXT = 3, 64

_STEP = 3e-4
_ROWS = 3


@dataclass(frozen=True)
class Finding:
    """What the check found for a tensor: its largest gradient, analytic and numeric, and the
    error max|analytic - numeric| / max|analytic| over the elements checked."""

    name: str
    shape: tuple[int, ...]
    checked: int
    largest: float
    largest_numeric: float
    error: float

    @property
    def zero(self) -> bool:
        return self.largest < ZERO and self.largest_numeric < ZERO

    @property
    def passed(self) -> bool:
        return self.zero or self.error <= BAR  # False for NaN

    def __str__(self) -> str:
        verdict = "zero" if self.zero else "ok" if self.passed else "WRONG"
        return (f"{self.name:<32} {'x'.join(map(str, self.shape)):>14} {self.checked:>6} checked  "
                f"max|g| {self.largest:9.2e}  error {self.error:8.1e}  {verdict}")


def check_gradients(config: ModelConfig, backend: Backend, seed: int = 0,
                    samples: int | None = None) -> Iterator[Finding]:
    """A finding for each parameter tensor; of `samples` elements each, or of all."""
    model = Model(config, backend, F64)
    model.load(well_conditioned_weights(config, seed))
    batch = awkward_batch(config, min(config.context, FULL_CONTEXT), seed)
    time = batch["tokens"].shape[1]
    program = compile_function(loss_function(config, _ROWS, time, F64), backend, model.bound)
    gradients = compile_function(gradient_function(config, _ROWS, time, F64), backend,
                                 model.bound).run(batch)
    generator = np.random.default_rng(seed)
    for p in model.parameters:
        weight = model.weights[p.name]
        original = weight.read(p.shape).copy()
        objective = partial(objective_at, program, batch, weight)
        analytic = gradients[f"grad.{p.name}"][tuple(map(slice, p.shape))].reshape(-1)
        if samples is None or analytic.size <= samples:
            elements = np.arange(analytic.size)
        else:
            others = generator.choice(analytic.size, samples - 1, replace=False)
            elements = np.unique(np.append(others, np.argmax(np.abs(analytic))))
        numeric = np.array([central_difference(objective, original, element)
                            for element in elements])
        weight.write(original)
        largest = float(np.abs(analytic).max())
        with np.errstate(all="ignore"):
            error = float(np.abs(analytic[elements] - numeric).max() / largest)
        yield Finding(p.name, p.shape, len(elements), largest, float(np.abs(numeric).max()),
                      error)


def objective_at(program: Program, batch: Mapping[str, np.ndarray], weight: Buffer,
                 values: np.ndarray) -> float:
    """The objective where a weight has these values, which it keeps."""
    weight.write(values)
    return float(program.run(batch)["objective"])


def central_difference(objective: Callable[[np.ndarray], float], x: np.ndarray, element: int,
                       step: float = _STEP) -> float:
    """The derivative of `objective(x)` by one element of x:
    (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h."""
    moved, values = x.copy(), []
    for shift in (1, -1, 2, -2):
        moved.flat[element] = x.flat[element] + shift * step
        values.append(objective(moved))
    near, far = values[0] - values[1], values[2] - values[3]
    return (8 * near - far) / (12 * step)


def well_conditioned_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights at which gradients are neither tiny nor huge, f64; see the module's text."""
    generator = np.random.default_rng(seed)
    weights = {}
    for p in parameters(config):
        noise = generator.standard_normal(p.shape)
        weights[p.name] = (noise / np.sqrt(p.shape[-1]) if len(p.shape) > 1
                           else p.initial(seed, np.float64) + 0.2 * noise)
    return weights


def awkward_batch(config: ModelConfig, time: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs of `loss_function` for three rows: plain, two documents, left-padded."""
    generator, heads = np.random.default_rng(seed), config.prediction_heads
    tokens = generator.integers(0, config.vocabulary, (_ROWS, time), dtype=np.int32)
    targets = generator.integers(0, config.vocabulary, (_ROWS, time, heads), dtype=np.int32)
    starts, stops = np.zeros((2, _ROWS, time), np.int64)  # of the document at each position
    stops[:] = time
    middle, padding = time // 2, time // 3
    stops[1, :middle], starts[1, middle:] = middle, middle
    starts[2] = padding
    position = np.arange(time)
    hi = np.maximum(position + 1, starts)  # nothing to see before the document
    left = (stops - position)[:, :, None]
    missing = (left <= np.arange(1, heads + 1)) | (position < starts)[:, :, None]
    targets[missing] = -1
    counts = np.count_nonzero(targets >= 0, axis=(0, 1))
    return {"tokens": tokens, "targets": targets, "lo": starts.astype(np.int32),
            "hi": hi.astype(np.int32), "inverse_counts": inverse_counts(counts)}


def parser() -> Parser:
    p = Parser(prog="python -m runtime.gradcheck", description=__doc__.splitlines()[0])
    add_preset(p)
    add_backend(p, threads="1; with --full all")
    p.add_argument("--full", action="store_true",
                   help=f"the real size, {SAMPLES} elements a tensor")
    add_seed(p, "weights and batch")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    config = preset(arguments.preset)
    if not arguments.full:
        config = shrink(config)
    # Kernels this small are done before a second thread has heard of them.
    threads = arguments.threads or (None if arguments.full else 1)
    backend = backend_of(arguments, threads=threads)
    print(f"{arguments.preset}{'' if arguments.full else ' shrunk'}: "
          f"{parameter_count(config):,} parameters, f64, backend {backend.name}")
    findings = []
    for finding in check_gradients(config, backend, arguments.seed,
                                   SAMPLES if arguments.full else None):
        print(finding, flush=True)
        findings.append(finding)
    print(verdict(findings))
    return int(not all(finding.passed for finding in findings))


def verdict(findings: Sequence[Finding]) -> str:
    """The last line: how many tensors passed, and the worst of all."""
    wrong = [finding.name for finding in findings if not finding.passed]
    if wrong:
        return f"FAILED: {len(wrong)} of {len(findings)} tensors over {BAR:g}: {', '.join(wrong)}"
    worst = max((f for f in findings if not f.zero), key=lambda f: f.error)
    checked = sum(finding.checked for finding in findings)
    return (f"passed: {len(findings)} tensors, {checked} elements, largest error "
            f"{worst.error:.1e} ({worst.name}), at most {BAR:g} is allowed")


if __name__ == "__main__":
    sys.exit(run_command(main))
