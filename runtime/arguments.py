"""Arguments that several commands take, each with one wording, one type and one default.

Names (of presets, precisions) are checked as they are parsed, combinations right after: a command
reads and compiles nothing before it knows that it can do what it was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace

from backends.backend import Backend, create
from euler_ir.errors import EulerError
from model.config import PRESETS, ModelConfig, preset
from runtime.cli import integer, path
from runtime.settings import MAX_SEED, PRECISIONS, precision

DEFAULT_PRESET = "nano-1m"
#: What an argument that names a checkpoint takes, for its help text.
CHECKPOINT = "a run directory (its newest checkpoint) or a checkpoint"
_OF_PRESET = "the preset's"


def add_preset(p: argparse.ArgumentParser, default: str | None = DEFAULT_PRESET) -> None:
    p.add_argument("--preset", type=_known(preset), default=default, metavar="NAME",
                   help=f"one of {', '.join(PRESETS)} ({DEFAULT_PRESET})")


def add_checkpoint(p: argparse.ArgumentParser) -> None:
    p.add_argument("--checkpoint", type=path, required=True, metavar="DIR", help=CHECKPOINT)


def add_backend(p: argparse.ArgumentParser, *, threads: str | None = "all") -> None:
    """What `backend_of` reads. `threads` says how many there are by default; None for a command
    that runs nothing, and has no such argument."""
    p.add_argument("--backend", default="auto", metavar="NAME",
                   help="auto, llvm or reference (auto)")
    if threads is not None:
        p.add_argument("--threads", type=integer(1, 1024), metavar="N",
                       help=f"CPU threads ({threads})")
    p.add_argument("--cpu-features", metavar="LIST",
                   help="LLVM features to compile with or without, separated by commas, after "
                        "an equals sign: =-avx512f,-fma (all that this CPU has)")


def backend_of(arguments: argparse.Namespace, **options) -> Backend:
    """The backend that the arguments of `add_backend` ask for. `options` are further ones of
    `backends.backend.create`, and a `threads` that takes the argument's place."""
    options = {"threads": getattr(arguments, "threads", None), **options}
    return create(arguments.backend, cpu_features=arguments.cpu_features, **options)


def add_precision(p: argparse.ArgumentParser, default: str | None = "f32") -> None:
    p.add_argument("--precision", type=_known(precision), default=default, metavar="P",
                   help=f"{' or '.join(PRECISIONS)} (f32)")


def add_rows(p: argparse.ArgumentParser, batch_size: int | None = None) -> None:
    """The shape of a batch; without a `batch_size` both are the preset's by default."""
    p.add_argument("--batch-size", type=integer(1), default=batch_size, metavar="B",
                   help=f"rows of a micro-batch ({batch_size or _OF_PRESET})")
    p.add_argument("--context", type=integer(1), metavar="T",
                   help=f"tokens of a row ({_OF_PRESET})")


def model_of(arguments: argparse.Namespace) -> tuple[ModelConfig, int]:
    """The model of `--preset`, with position tables for `--context` where that is longer, and the
    length of a row."""
    config = preset(arguments.preset)
    context = arguments.context or config.context
    return replace(config, context=max(context, config.context)), context


def add_recompute(p: argparse.ArgumentParser, default: int | None = 0) -> None:
    p.add_argument("--recompute", type=integer(0), default=default, metavar="N",
                   help="layers, from the first, whose activations are recomputed in the "
                        "backward pass instead of kept (0)")


def add_seed(p: argparse.ArgumentParser, purpose: str, default: int | None = 0) -> None:
    p.add_argument("--seed", type=integer(0, MAX_SEED), default=default, metavar="S",
                   help=f"of {purpose} (0)")


def refuse_together(arguments: argparse.Namespace,
                    conflicts: Iterable[tuple[str, str, str]]) -> None:
    """Raise EulerError where both of a conflict's arguments, by their names in the namespace, were
    given: neither is None nor False. The third item says why they do not go together."""
    for one, other, reason in conflicts:
        values = (getattr(arguments, name) for name in (one, other))
        if all(value is not None and value is not False for value in values):
            flags = [f"--{name.replace('_', '-')}" for name in (one, other)]
            raise EulerError(f"{flags[1]} does not go with {flags[0]}: {reason}")


def _known(check: Callable[[str], object]) -> Callable[[str], str]:
    """An argument type: a name that `check` takes. Others it refuses itself, listing the known
    ones: an EulerError, which argparse lets pass."""

    def parse(text: str) -> str:
        check(text)
        return text

    return parse
