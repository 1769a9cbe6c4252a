"""Train a model: `python -m runtime.train` learns Shakespeare on this machine's CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from backends.backend import create
from euler_ir.errors import EulerError
from model.config import PRESETS
from model.optimizer import SCHEDULES
from runtime.checkpoint import load_checkpoint
from runtime.cli import INTERRUPTED, OK, Parser, integer, number, path, run_command
from runtime.dump import Dump
from runtime.generation import Generator
from runtime.run_directory import claim_run_directory, new_run_directory, run_directory_of
from runtime.sampler import Sampler
from runtime.settings import Settings
from runtime.training import Run, read_settings

_SAMPLE_TOKENS = 200


def parser() -> Parser:
    p = Parser(prog="python -m runtime.train", description=__doc__)
    p.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)} (nano-1m)")
    p.add_argument("--backend", metavar="NAME", default="auto", help="auto, llvm or reference")
    p.add_argument("--data", type=path, nargs="+", metavar="PATH",
                   help="text files, token shards or directories of them (the shipped Shakespeare)")
    p.add_argument("--tokenizer", type=path, metavar="FILE",
                   help="a tokenizer.json (one trained on the data)")
    p.add_argument("--out", type=path, metavar="DIR",
                   help="the run's directory (runs/<date>-<preset>)")
    p.add_argument("--steps", type=integer(1), metavar="N", help="length of the whole run")
    p.add_argument("--batch-size", type=integer(1), metavar="B", help="rows of a micro-batch")
    p.add_argument("--context", type=integer(1), metavar="T", help="tokens of a row")
    p.add_argument("--precision", metavar="P", help="f32 or f64 (f32)")
    p.add_argument("--accumulate", type=integer(1), metavar="N", help="micro-batches a step (1)")
    p.add_argument("--recompute", type=integer(0), metavar="N",
                   help="layers whose activations are recomputed in the backward pass (0)")
    p.add_argument("--lr", type=number(0, above=True), metavar="X", help="peak learning rate")
    p.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate (cosine)")
    p.add_argument("--warmup", type=integer(0), metavar="N", help="steps of linear warm-up")
    p.add_argument("--eval-every", type=integer(0), metavar="N",
                   help="steps between validations (a third of the run; 0: none)")
    p.add_argument("--checkpoint-every", type=integer(1), metavar="N",
                   help="steps between checkpoints (10)")
    p.add_argument("--seed", type=integer(0, 2**63 - 1), metavar="S", help="of everything random")
    p.add_argument("--threads", type=integer(1, 1024), metavar="N", help="CPU threads (all)")
    p.add_argument("--cpu-features", metavar="LIST", help="LLVM features, such as -avx512f")
    p.add_argument("--dump-ir", type=path, metavar="DIR",
                   help="write down every stage of the compiler")
    p.add_argument("--resume", type=path, metavar="DIR",
                   help="go on with a run directory or checkpoint")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    given = {name: getattr(arguments, name) for name in (
        "steps", "batch_size", "context", "lr", "schedule", "warmup", "precision", "tokenizer",
        "accumulate", "recompute", "eval_every", "checkpoint_every", "seed")}
    given["data"] = tuple(str(Path(name).absolute()) for name in arguments.data or ()) or None
    if given["tokenizer"]:
        given["tokenizer"] = str(Path(given["tokenizer"]).absolute())
    backend = create(arguments.backend, threads=arguments.threads,
                     cpu_features=arguments.cpu_features)
    dump = Dump(arguments.dump_ir) if arguments.dump_ir else None
    if arguments.resume:
        run, directory = _resume(arguments, given, backend, dump)
    else:
        settings = Settings.for_preset(arguments.preset or "nano-1m", **given)
        run = Run(settings, backend, dump=dump)
        directory = (claim_run_directory(arguments.out) if arguments.out
                     else new_run_directory(settings.preset))
    print(f"{run.describe()}\nrun directory {directory}", file=sys.stderr)
    if not run.train(directory):
        print(f"stopped after step {run.progress.step}; go on with --resume {directory}",
              file=sys.stderr)
        return INTERRUPTED
    _sample(run)
    return OK


def _resume(arguments, given: dict, backend, dump: Dump | None) -> tuple[Run, Path]:
    """The run of a run directory or of a checkpoint in one, and that directory."""
    if arguments.out:
        raise EulerError("--out names a new run's directory; a resumed run stays in its own")
    resumed = Path(arguments.resume)
    checkpoint = load_checkpoint(resumed)
    if checkpoint is None:
        print(f"{resumed} has no checkpoint yet: starting at step 0", file=sys.stderr)
        settings, directory = read_settings(resumed), resumed
    else:
        for note in checkpoint.notes:
            print(note, file=sys.stderr)
        if "source" in checkpoint.state:
            raise EulerError(f"{checkpoint.path} was imported: it has no run to go on with")
        settings = Settings.from_dict(checkpoint.state["settings"])
        directory = run_directory_of(checkpoint.path)
        print(f"resuming after step {checkpoint.step}", file=sys.stderr)
    settings = settings.resumed_with(preset=arguments.preset, **given)
    if checkpoint and settings.steps < checkpoint.step:
        raise EulerError(f"--steps {settings.steps}: the run has done {checkpoint.step} steps "
                         "already; --steps is the length of the whole run")
    return Run(settings, backend, checkpoint, dump), directory


def _sample(run: Run) -> None:
    """What the trained model writes after the first token of the held-out text (if there is any,
    else of the training text), as far as its context reaches."""
    text = run.data.held_out if len(run.data.held_out) else run.data.train
    prompt = [int(token) for token in text.read(0, 1)]
    generator = Generator(run.model, run.backend)
    sampler = Sampler(temperature=0.8, top_k=50, seed=run.settings.seed)
    count = min(_SAMPLE_TOKENS, run.config.context - len(prompt))
    print(run.data.tokenizer.decode(prompt + list(generator.stream(prompt, count, sampler))))


if __name__ == "__main__":
    sys.exit(run_command(main))
