"""Compare training speed and start-up with a PyTorch script, in turn, in one run.

    python benchmarks/compare_torch.py PEER [--repeat 5]

PEER is a script called as `PEER ARCH B T --device cpu --dtype fp32 --compile 1 --steps N`, which
trains the same architecture on random tokens and prints `tok/s=` and `first=` (seconds from after
its imports to the end of its first step). Each repetition is a cold start of either, with caches of
its own that are new and empty, then a warm start with the same caches. Speed is that of the warm
starts. A peer's time from process start to first step is its `first=` plus the median time of
`import torch` in a process of its own, which leaves out the building of its model: in its favour.

Prints a table of medians, then a JSON object as the last line.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs without an installed project too

from euler_ir.errors import EulerError  # noqa: E402
from runtime.cli import Parser, integer, run_command  # noqa: E402

#: What peers call the presets.
PEER_NAMES = {"nano-1m": "nano1m", "nano-10m": "tiny10m", "nano-116m": "nano116",
              "llama-124m": "llama124"}
_FIELD = r"{}=([0-9]+(?:\.[0-9]+)?)"


@dataclass(frozen=True)
class Sample:
    """One process: training speed, and seconds from its start to the end of its first step."""

    tokens_per_second: float
    first_step: float


def run(command: Sequence[str], caches: Path) -> str:
    """What the command prints, with all compilation caches under `caches`."""
    places = {name: str(caches / name.lower())
              for name in ("EULER_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(command, text=True, capture_output=True,
                            env=os.environ | places | {"PYTHONPATH": paths})
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EulerError(f"{' '.join(command)} ended with code {result.returncode}: {last}")
    return result.stdout


def ours(arguments, caches: Path) -> Sample:
    command = [sys.executable, "-m", "runtime.bench", "--preset", arguments.preset,
               "--backend", "llvm", "--batch-size", str(arguments.batch_size),
               "--context", str(arguments.context), "--mode", "train",
               "--steps", str(arguments.steps), "--json"]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    result = json.loads(run(command, caches).splitlines()[-1])
    return Sample(result["tokens_per_second"], result["first_step_seconds"])


def peer(arguments, caches: Path, import_seconds: float) -> Sample:
    command = [arguments.peer_python, arguments.peer, PEER_NAMES[arguments.preset],
               str(arguments.batch_size), str(arguments.context), "--device", "cpu",
               "--dtype", "fp32", "--compile", "1", "--steps", str(arguments.steps)]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    printed = run(command, caches)
    found = [re.search(_FIELD.format(field), printed) for field in ("tok/s", "first")]
    if not all(found):
        raise EulerError(f"{arguments.peer} printed no 'tok/s=' and 'first=': {printed[-200:]!r}")
    speed, first = (float(match.group(1)) for match in found)
    return Sample(speed, import_seconds + first)


def import_time(arguments, caches: Path) -> float:
    """Median seconds of a process that imports torch and ends; the first, which may read the disk,
    does not count."""
    times = []
    for _ in range(arguments.repeat + 1):
        start = time.perf_counter()
        run([arguments.peer_python, "-c", "import torch"], caches)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def compare(arguments) -> dict[str, list[Sample]]:
    """Samples of ours and the peer's, cold and warm, taken in turn."""
    samples = {name: [] for name in ("ours cold", "peer cold", "ours warm", "peer warm")}
    with tempfile.TemporaryDirectory() as directory:
        imported = import_time(arguments, Path(directory))
    for number in range(arguments.repeat):
        with tempfile.TemporaryDirectory() as directory:
            caches = Path(directory)
            for state in ("cold", "warm"):
                samples[f"ours {state}"].append(ours(arguments, caches))
                samples[f"peer {state}"].append(peer(arguments, caches, imported))
        print(f"repetition {number + 1} of {arguments.repeat} done", file=sys.stderr)
    return samples


def summarise(samples: dict[str, list[Sample]]) -> list[dict]:
    """Rows of medians. A ratio above 1 says that ours is better."""
    speed = {who: [s.tokens_per_second for s in samples[f"{who} warm"]] for who in ("ours", "peer")}
    rows = [_row("tokens/s", speed["ours"], speed["peer"], larger_is_better=True)]
    for state in ("cold", "warm"):
        first = {who: [s.first_step for s in samples[f"{who} {state}"]] for who in ("ours", "peer")}
        rows.append(_row(f"first step, {state} (s)", first["ours"], first["peer"],
                         larger_is_better=False))
    return rows


def _row(what: str, ours_values: list[float], peer_values: list[float],
         larger_is_better: bool) -> dict:
    mine, theirs = statistics.median(ours_values), statistics.median(peer_values)
    return {"what": what, "ours": mine, "peer": theirs,
            "ratio": mine / theirs if larger_is_better else theirs / mine,
            "ours_range": [min(ours_values), max(ours_values)],
            "peer_range": [min(peer_values), max(peer_values)]}


def table(rows: list[dict]) -> str:
    lines = [f"{'':<24} {'ours':>30} {'peer':>30} {'ratio':>7}"]
    for row in rows:
        cells = [f"{row[who]:,.2f} ({row[f'{who}_range'][0]:,.2f}..{row[f'{who}_range'][1]:,.2f})"
                 for who in ("ours", "peer")]
        lines.append(f"{row['what']:<24} {cells[0]:>30} {cells[1]:>30} {row['ratio']:>7.2f}")
    return "\n".join(lines)


def parser() -> Parser:
    p = Parser(prog="python benchmarks/compare_torch.py", description=__doc__.splitlines()[0])
    p.add_argument("peer", metavar="PEER", help="the PyTorch script")
    p.add_argument("--peer-python", default=sys.executable, metavar="FILE",
                   help="an interpreter that has torch (this one)")
    p.add_argument("--preset", choices=list(PEER_NAMES), default="nano-1m", help="(nano-1m)")
    p.add_argument("--batch-size", type=integer(1), default=8, metavar="B", help="rows (8)")
    p.add_argument("--context", type=integer(1), default=128, metavar="T",
                   help="tokens a row (128)")
    p.add_argument("--steps", type=integer(1), default=20, metavar="N", help="timed steps (20)")
    p.add_argument("--repeat", type=integer(1), default=5, metavar="N", help="repetitions (5)")
    p.add_argument("--threads", type=integer(1, 1024), metavar="N", help="CPU threads (all)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    if not Path(arguments.peer).is_file():
        raise EulerError(f"there is no script {arguments.peer}")
    rows = summarise(compare(arguments))
    print(table(rows))
    print(json.dumps({"preset": arguments.preset, "batch_size": arguments.batch_size,
                      "context": arguments.context, "repeat": arguments.repeat, "rows": rows}))


if __name__ == "__main__":
    sys.exit(run_command(main))
