"""GFLOP/s of the LLVM backend's matmul by shape, on teams of one thread and of several.

    python -m benchmarks.gemm [--threads 2] [--seconds 0.5] [WORD ...]

Each shape is timed through the persistent team, one kernel a program, in turn with a product whose
operands stay in L2, which is near the most that the cores can do: the last column is the share of
that. Figures are medians of wall-clock rates, and mean little while anything else is running. WORDs
choose the shapes whose name has one of them.
"""

import argparse
import statistics
import time

import numpy as np

from backends.llvm.cache import ObjectCache, default_directory
from backends.llvm.compiler import Compiler
from backends.llvm.gemm import gemm
from backends.llvm.launch import Launch, Program, aligned_array
from backends.llvm.target import Target
from backends.llvm.team import Team
from euler_ir.types import F32

# name, batch, m, n, k, trans_a, trans_b
SHAPES = [("limit", 64, 96, 16, 256, False, False)]
for _name, _n, _k in [("qkv", 256, 128), ("out", 128, 128), ("up", 688, 128), ("down", 128, 344),
                      ("head", 2048, 128)]:  # fmt: skip
    SHAPES += [
        (f"nano-1m {_name}", 1, 1024, _n, _k, False, True),
        (f"nano-1m {_name} dX", 1, 1024, _k, _n, False, False),
        (f"nano-1m {_name} dW", 1, _n, _k, 1024, True, False),
    ]
for _name, _n, _k in [("qkv", 2304, 768), ("fc", 3072, 768), ("proj", 768, 3072),
                      ("head", 50304, 768)]:  # fmt: skip
    SHAPES += [
        (f"gpt2 {_name}", 1, 256, _n, _k, False, True),
        (f"gpt2 {_name} dX", 1, 256, _k, _n, False, False),
        (f"gpt2 {_name} dW", 1, _n, _k, 256, True, False),
    ]
SHAPES += [("decode", 1, m, 2304, 768, False, True) for m in (1, 4)]
SHAPES += [("square NN", 1, 2048, 2048, 2048, False, False),
           ("square NT", 1, 2048, 2048, 2048, False, True),
           ("square TN", 1, 2048, 2048, 2048, True, False)]  # fmt: skip


def program_of(compiler: Compiler, shape: tuple) -> Program:
    """A program that multiplies once, and holds its operands."""
    name, batch, m, n, k, trans_a, trans_b = shape
    shared = name == "limit"
    source = gemm(compiler.target, F32, batch, m, n, k, trans_a, trans_b,
                  shared_a=shared, shared_b=shared)  # fmt: skip
    (addresses,) = compiler.load([source]).values()
    sizes = [m * k, n * k, batch * m * n] if shared else [batch * m * k, batch * n * k, m * n]
    sizes += [source.workspace_bytes // 4] * (source.workspace_bytes > 0)
    buffers = [aligned_array(size // 2 + 1).view(np.float32) for size in sizes]
    for buffer in buffers[:2]:
        buffer[:] = np.random.default_rng(0).standard_normal(buffer.size, dtype=np.float32)
    args = [buffer.ctypes.data for buffer in buffers]
    launches = [Launch(address, args, phase.tiles)
                for address, phase in zip(addresses, source.phases, strict=True)]  # fmt: skip
    return Program(launches, source.scratch_bytes, keep=(compiler, buffers))


def seconds_a_run(team: Team, program: Program, budget: float) -> float:
    """The mean over as many runs as fill the budget, at least one."""
    start, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - start < budget:
        team.run(program)
        runs += 1
    return (time.perf_counter() - start) / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of the larger team (2)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each shape and team (0.5)")
    parser.add_argument("words", nargs="*", metavar="WORD",
                        help="only the shapes that have one of these words in their name (all)")
    arguments = parser.parse_args()
    if arguments.words and not any(word in shape[0] for word in arguments.words
                                   for shape in SHAPES[1:]):
        parser.error(f"no shape is named like {' or '.join(arguments.words)}")
    compiler = Compiler(Target.host(), ObjectCache(default_directory()))
    teams = [Team(compiler, threads) for threads in sorted({1, arguments.threads})]
    flops = {shape: 2.0 * np.prod(shape[1:5], dtype=float) for shape in SHAPES}
    limit = SHAPES[0]
    limit_program = program_of(compiler, limit)
    rounds = 9
    for shape in SHAPES[1:]:
        if arguments.words and not any(word in shape[0] for word in arguments.words):
            continue
        program = program_of(compiler, shape)
        cells = []
        for team in teams:
            team.run(program)
            rates, shares = [], []
            for _ in range(rounds):
                budget = arguments.seconds / rounds / 2
                rate = flops[shape] / seconds_a_run(team, program, budget)
                peak = flops[limit] / seconds_a_run(team, limit_program, budget)
                rates.append(rate)
                shares.append(rate / peak)
            cells.append(f"{team.threads} threads {statistics.median(rates) / 1e9:6.1f} GFLOP/s "
                         f"{statistics.median(shares):4.0%}")  # fmt: skip
        name, _, m, n, k, trans_a, trans_b = shape
        layout = ("T" if trans_a else "N") + ("T" if trans_b else "N")
        print(f"{name:16} {m:5} x {n:5} x {k:5} {layout}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
