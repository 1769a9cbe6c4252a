"""Measure how fast a preset runs: training, decoding, or the kernels that training is made of.

    python -m runtime.bench --preset nano-1m --backend llvm --batch-size 8 --context 128 --json

Times are medians of `--steps` runs after three to warm up. The last line is a JSON object; without
`--json`, tables for people come before it.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from backends.backend import Backend
from euler_ir.types import DType
from model.parameters import parameter_count
from runtime.arguments import (
    add_backend,
    add_precision,
    add_preset,
    add_rows,
    backend_of,
    model_of,
)
from runtime.cli import Parser, integer, run_command
from runtime.profiling.clock import seconds_since_start
from runtime.profiling.roofline import Row, kernel_rows, measure_limits, merged, table
from runtime.profiling.workloads import MODES, Case, planned_bytes
from runtime.settings import precision

_WARM_UP = 3


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """The median duration of `run`, after the warm-up."""
    for _ in range(_WARM_UP):
        run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(case: Case, runs: int) -> Row:
    """A case as often as a step has it."""
    seconds = median_seconds(case.run, runs)
    return Row(case.name, case.count, seconds * case.count, case.flops * case.count,
               case.bytes * case.count)


def report(result: dict, rows: Sequence[Row], cases: Sequence[Case], backend: Backend,
           dtype: DType) -> str:
    """The result for people, with a table of the kernels and one of the ops where they are known:
    from the backend's own times, or because they are what was measured."""
    lines = [
        f"{result['preset']} {result['mode']}, {result['batch_size']} x {result['context']}, "
        f"{result['precision']}, backend {result['backend']}: {result['parameters']:,} parameters",
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['step_ms']:.3f} ms a step, "
        f"{result['tflops'] * 1e3:.1f} GFLOP/s",
        f"first step {result['first_step_seconds']:.2f} s after the process started; "
        f"{result['peak_bytes'] / 2**20:.1f} MiB planned, "
        f"{result['resident_bytes'] / 2**20:.1f} MiB resident",
    ]
    if len(cases) == 1:
        (case,) = cases
        rows = kernel_rows(case.run, case.program, result["steps"])
    if rows:
        limits = measure_limits(backend, dtype)
        lines += ["", f"limits measured here: {limits.flops / 1e9:.1f} GFLOP/s in a matmul, "
                  f"{limits.bytes / 1e9:.1f} GB/s in an addition", "", table(rows, limits), "",
                  table(merged(rows, lambda row: row.name.split()[0]), limits)]
    return "\n".join(lines)


def parser() -> Parser:
    p = Parser(prog="python -m runtime.bench", description=__doc__.splitlines()[0])
    add_preset(p)
    add_backend(p)
    add_rows(p, batch_size=8)
    add_precision(p)
    p.add_argument("--mode", choices=list(MODES), default="train", help="what to run (train)")
    p.add_argument("--steps", type=integer(1), default=20, metavar="N",
                   help="runs to take the median of (20)")
    p.add_argument("--json", action="store_true", help="the JSON object only")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    (config, context), dtype = model_of(arguments), precision(arguments.precision)
    backend = backend_of(arguments, timed=not arguments.json)
    cases = MODES[arguments.mode](config, backend, arguments.batch_size, context, dtype)
    cases[0].run()
    first_step = seconds_since_start()

    rows = [measure(case, arguments.steps) for case in cases]
    step = sum(row.seconds for row in rows)
    tokens = arguments.batch_size * (1 if arguments.mode == "decode" else context)
    result = {
        "preset": arguments.preset, "backend": backend.name, "mode": arguments.mode,
        "batch_size": arguments.batch_size, "context": context,
        "precision": arguments.precision, "threads": arguments.threads,
        "steps": arguments.steps, "parameters": parameter_count(config),
        "tokens_per_second": tokens / step, "step_ms": step * 1e3,
        "tflops": sum(row.flops for row in rows) / step / 1e12,
        "first_step_seconds": first_step, "peak_bytes": planned_bytes(cases),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if not arguments.json:
        print(report(result, rows, cases, backend, dtype))
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
