"""Look into the compiler: what a preset becomes, from parameters to kernels.

    python -m runtime.inspect --preset nano-1m               parameters, functions, memory, stages
    python -m runtime.inspect --preset nano-1m --stage fuse  the training step's IR after a pass
    python -m runtime.inspect --preset nano-1m --out DIR     every stage of every function as files

Nothing is run, and the memory a plan describes is not taken: any preset can be looked at anywhere.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backends.backend import Backend
from euler_ir.errors import EulerError
from euler_ir.graph import Function
from euler_ir.passes.pipeline import optimize
from euler_ir.plan import Plan, size_text
from euler_ir.text import print_function
from euler_ir.types import DType
from model.config import ModelConfig
from model.objective import evaluation_function, training_step
from model.optimizer import AdamWConfig
from model.parameters import parameter_count, parameters
from model.transformer import forward_cached, layer_segments
from runtime.arguments import (
    add_backend,
    add_precision,
    add_preset,
    add_recompute,
    add_rows,
    backend_of,
    model_of,
    refuse_together,
)
from runtime.cli import Parser, path, run_command
from runtime.compiler.driver import plan_function
from runtime.compiler.dump import Dump
from runtime.compiler.plan_text import describe
from runtime.inference.generation import CHUNK
from runtime.profiling.roofline import label
from runtime.settings import precision


@dataclass(frozen=True)
class Compiled:
    """A function with what the compiler made of it: the IR after each pass, and the plan."""

    stages: Mapping[str, Function]
    plan: Plan

    @property
    def built(self) -> Function:
        return next(iter(self.stages.values()))

    def text(self, stage: str) -> str:
        """A stage for people, by its name or its name without the number (the last one so called).

        Raises EulerError, listing all, for one that is not there."""
        if stage == "schedule":
            return describe(self.plan)
        if stage == "kernels":
            return "\n".join(f"{number:>4}  {label(step.kernel.node)}"
                             f"{_workspace(step.kernel.workspace)}"
                             for number, step in enumerate(self.plan.steps))
        for name in reversed(self.stages):
            if stage in (name, name.partition("-")[2]):
                return print_function(self.stages[name])
        raise EulerError(f"no stage {stage!r}; known: {', '.join(self.stages)}, schedule, kernels")


def _workspace(size: int) -> str:
    return f"  (workspace {size_text(size)})" if size else ""


def functions(config: ModelConfig, batch: int, context: int, dtype: DType) -> dict[str, Function]:
    """What training, evaluation and generation run."""
    found = [
        training_step(config, AdamWConfig(), batch, context, False, dtype)["step"],
        evaluation_function(config, batch, context, dtype),
        forward_cached(config, 1, min(CHUNK, context), context, dtype),
        forward_cached(config, 1, 1, context, dtype),
    ]
    return {function.name: function for function in found}


def compile_stages(function: Function, backend: Backend, dump: Dump | None = None,
                   recomputed: Collection[str] = ()) -> Compiled:
    """Compile a function up to its plan, and keep every stage (written down too, with `dump`)."""
    stages: dict[str, Function] = {}

    def observe(stage: str, function_then: Function) -> None:
        stages[f"{len(stages):02d}-{stage}"] = function_then
        if dump:
            dump.stage(function.name, stage, function_then)

    optimized = optimize(function, backend.composites, backend.epilogues, observe, recomputed)
    return Compiled(stages, plan_function(optimized, backend, dump=dump))


def overview(config: ModelConfig, compiled: Mapping[str, Compiled], dtype: DType) -> str:
    lines = [*_parameter_table(config), ""]
    for name, one in compiled.items():
        lines += [*_function_summary(name, one), ""]
    lines += [*_memory_table(config, compiled["step"].plan, dtype), ""]
    lines += ["stages of @step, for --stage:"]
    lines += [f"  {name:<14} {len(function.nodes)} nodes"
              for name, function in compiled["step"].stages.items()]
    lines += ["  schedule       every buffer's place, size and lifetime",
              "  kernels        in the order they run"]
    return "\n".join(lines)


def _parameter_table(config: ModelConfig) -> Iterator[str]:
    total = parameter_count(config)
    yield f"{'parameter':<34} {'shape':>14} {'elements':>12}   share  initial       decayed"
    for p in parameters(config):
        shape = "x".join(map(str, p.shape))
        start = f"N(0, {p.std:.4f}\N{SUPERSCRIPT TWO})" if p.std else f"all {p.mean:g}"
        yield (f"{p.name:<34} {shape:>14} {p.size:>12,} {p.size / total:>7.1%}  {start:<13} "
               f"{'yes' if p.decayed else 'no'}")
    yield f"{'all':<34} {'':>14} {total:>12,}"


def _function_summary(name: str, compiled: Compiled) -> Iterator[str]:
    plan, built = compiled.plan, compiled.built
    counts = Counter(step.kernel.node.op.name for step in plan.steps)
    yield (f"@{name}: {len(built.nodes)} nodes as built, {len(plan.function.nodes)} after all "
           f"passes, {len(plan.steps)} kernels")
    yield f"  arena {size_text(plan.arena_bytes)}, lower bound {size_text(plan.lower_bound)}"
    yield "  " + ", ".join(f"{count} {op}" for op, count in counts.most_common())


def _memory_table(config: ModelConfig, plan: Plan, dtype: DType) -> Iterator[str]:
    weights = sum(math.prod(p.padded_shape) for p in parameters(config)) * dtype.itemsize
    inputs = sum(value.type.bytes for value in plan.function.inputs)
    rows = {"weights": weights, "moments": 2 * weights, "batch and tables": inputs - 3 * weights,
            "arena (activations, gradients, workspaces)": plan.arena_bytes}
    yield "memory of a training step"
    for name, size in rows.items():
        yield f"  {name:<44} {size_text(size):>14}"
    yield f"  {'together':<44} {size_text(sum(rows.values())):>14}"


#: Arguments that do not go together, and why.
_CONFLICTS = tuple(("recompute_table", other, "the table is of the training step alone, and is "
                    "printed") for other in ("stage", "out"))


def parser() -> Parser:
    p = Parser(prog="python -m runtime.inspect", description=__doc__.splitlines()[0])
    add_preset(p)
    add_backend(p, threads=None)
    p.add_argument("--stage", metavar="NAME",
                   help="print this stage: a pass, 'schedule' or 'kernels'")
    p.add_argument("--function", metavar="NAME", default="step",
                   help="whose stage: step, evaluate, prefill or decode (step)")
    p.add_argument("--out", type=path, metavar="DIR", help="write every stage of every function")
    add_rows(p, batch_size=8)
    add_precision(p)
    add_recompute(p)
    p.add_argument("--recompute-table", action="store_true",
                   help="print a training step's memory for every number of recomputed layers")
    return p


def recompute_table(config: ModelConfig, function: Function, backend: Backend) -> Iterator[str]:
    """The training step's arena and kernels for 0, 1, … recomputed layers."""
    yield f"{'recompute':>9} {'arena':>14} {'kernels':>8}"
    for count in range(config.layers + 1):
        plan = compile_stages(function, backend,
                              recomputed=layer_segments(config, count)).plan
        yield f"{count:>9} {size_text(plan.arena_bytes):>14} {len(plan.steps):>8}"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    refuse_together(arguments, _CONFLICTS)
    (config, context), dtype = model_of(arguments), precision(arguments.precision)
    backend = backend_of(arguments)
    found = functions(config, arguments.batch_size, context, dtype)
    if arguments.function not in found:
        raise EulerError(f"no function {arguments.function!r}; known: {', '.join(found)}")
    if arguments.recompute_table:
        for line in recompute_table(config, found["step"], backend):
            print(line, flush=True)
        return
    recomputed = layer_segments(config, arguments.recompute)
    dump = Dump(arguments.out) if arguments.out else None
    if arguments.stage and not dump:
        one = compile_stages(found[arguments.function], backend, recomputed=recomputed)
        print(one.text(arguments.stage))
        return
    compiled = {name: compile_stages(function, backend, dump, recomputed)
                for name, function in found.items()}
    if arguments.stage:
        print(compiled[arguments.function].text(arguments.stage))
        return
    print(f"{arguments.preset}, {arguments.precision}, rows {arguments.batch_size} x {context}, "
          f"backend {backend.name}\n")
    print(overview(config, compiled, dtype))
    if dump:
        print(f"\neverything is in {arguments.out}")


if __name__ == "__main__":
    sys.exit(run_command(main))
