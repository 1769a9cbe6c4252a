"""Train a model: `python -m runtime.train` learns Shakespeare on this machine's CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from euler_ir.errors import EulerError
from model.optimizer import SCHEDULES
from runtime.arguments import (
    CHECKPOINT,
    DEFAULT_PRESET,
    add_backend,
    add_precision,
    add_preset,
    add_recompute,
    add_rows,
    add_seed,
    backend_of,
    refuse_together,
)
from runtime.cli import (
    INTERRUPTED,
    OK,
    Parser,
    integer,
    number,
    path,
    print_notes,
    run_command,
)
from runtime.compiler.dump import Dump
from runtime.inference.generation import Generator
from runtime.inference.sampler import Sampler
from runtime.settings import Settings
from runtime.storage.checkpoint import load_checkpoint, load_model
from runtime.storage.run_directory import claim_run_directory, new_run_directory, run_directory_of
from runtime.training import Run, read_settings

_SAMPLE_TOKENS = 200


#: Arguments that do not go together, and why.
_CONFLICTS = (
    ("resume", "out", "a resumed run stays in its own directory"),
    ("resume", "init", "a resumed run goes on with its own weights"),
    ("init", "preset", "the model is that of the checkpoint"),
    ("init", "tokenizer", "the tokenizer is that of the checkpoint"),
)


def parser() -> Parser:
    p = Parser(prog="python -m runtime.train", description=__doc__)
    add_preset(p, default=None)
    add_backend(p)
    p.add_argument("--data", type=path, nargs="+", metavar="PATH",
                   help="text files, token shards as llm.c writes them (.bin), or directories of "
                        ".txt and .bin files (the shipped Shakespeare)")
    p.add_argument("--tokenizer", type=path, metavar="FILE",
                   help="a tokenizer.json (one trained on the data)")
    p.add_argument("--out", type=path, metavar="DIR",
                   help="the run's directory (runs/<date>-<preset or name of --init's run>)")
    p.add_argument("--steps", type=integer(1), metavar="N",
                   help="length of the whole run, resumed parts included (the preset's)")
    add_rows(p)
    add_precision(p, default=None)
    p.add_argument("--accumulate", type=integer(1), metavar="N", help="micro-batches a step (1)")
    add_recompute(p, default=None)
    p.add_argument("--lr", type=number(0, above=True), metavar="X",
                   help="peak learning rate (the preset's)")
    p.add_argument("--schedule", choices=SCHEDULES,
                   help="of the learning rate after the warm-up: cosine falls to a tenth; wsd "
                        "stays, and falls to a tenth over the last fifth of the run (cosine)")
    p.add_argument("--warmup", type=integer(0), metavar="N",
                   help="steps of linear warm-up (the preset's)")
    p.add_argument("--eval-every", type=integer(0), metavar="N",
                   help="steps between validations (a third of the run; 0: none)")
    p.add_argument("--checkpoint-every", type=integer(1), metavar="N",
                   help="steps between checkpoints, of which the newest are kept (10)")
    add_seed(p, "everything random", default=None)
    p.add_argument("--dump-ir", type=path, metavar="DIR",
                   help="write every stage of the compiler to this folder")
    p.add_argument("--init", type=path, metavar="DIR",
                   help="begin with the weights, the model's shape and the tokenizer of "
                        f"{CHECKPOINT}, imported ones included; by default with a tenth of the "
                        "rate and steps of the preset nearest in size")
    p.add_argument("--resume", type=path, metavar="DIR", help=f"go on with a run: {CHECKPOINT}")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    refuse_together(arguments, _CONFLICTS)
    given = {name: getattr(arguments, name) for name in (
        "steps", "batch_size", "context", "lr", "schedule", "warmup", "precision", "tokenizer",
        "accumulate", "recompute", "eval_every", "checkpoint_every", "seed")}
    given["data"] = tuple(str(Path(name).absolute()) for name in arguments.data or ()) or None
    if given["tokenizer"]:
        given["tokenizer"] = str(Path(given["tokenizer"]).absolute())
    backend = backend_of(arguments)
    dump = Dump(arguments.dump_ir) if arguments.dump_ir else None
    if arguments.resume:
        run, directory = _resume(arguments, given, backend, dump)
    else:
        run = _begin(arguments, given, backend, dump)
        directory = (claim_run_directory(arguments.out) if arguments.out
                     else new_run_directory(run.settings.name))
    print(f"{run.describe()}\nrun directory {directory}", file=sys.stderr)
    if not run.train(directory):
        print(f"stopped after step {run.progress.step}; go on with --resume {directory}",
              file=sys.stderr)
        return INTERRUPTED
    _sample(run)
    return OK


def _begin(arguments, given: dict, backend, dump: Dump | None) -> Run:
    """A new run, of a preset or with the model of a checkpoint."""
    if not arguments.init:
        settings = Settings.for_preset(arguments.preset or DEFAULT_PRESET, **given)
        return Run(settings, backend, dump=dump)
    initial, config = load_model(arguments.init)
    print_notes(initial.notes)
    settings = Settings.for_checkpoint(initial.path, config, initial.settings(), **given)
    return Run(settings, backend, dump=dump, initial=initial)


def _resume(arguments, given: dict, backend, dump: Dump | None) -> tuple[Run, Path]:
    """The run of a run directory or of a checkpoint in one, and that directory."""
    resumed = Path(arguments.resume)
    checkpoint = load_checkpoint(resumed)
    if checkpoint is None:
        settings, directory = read_settings(resumed), resumed
        if settings.init:
            raise EulerError(f"{resumed} has lost the checkpoint that it began with, a copy of "
                             f"{settings.init}: start a new run with --init")
        print(f"{resumed} has no checkpoint yet: starting at step 0", file=sys.stderr)
    else:
        print_notes(checkpoint.notes)
        if "data" not in checkpoint.state:
            raise EulerError(f"{checkpoint.path} was imported: it has no run to go on with; begin "
                             "one with --init")
        values = checkpoint.settings()
        with checkpoint.error_context():
            settings = Settings.from_dict(values)
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
    context, tokenizer = run.settings.context, run.data.tokenizer
    text = run.data.held_out if len(run.data.held_out) else run.data.train
    prompt = [int(token) for token in text.read(0, 1)]
    sampler = Sampler(temperature=0.8, top_k=50, seed=run.settings.seed,
                      ids=tokenizer.vocabulary.ids)
    count = min(_SAMPLE_TOKENS, context - len(prompt))
    sampled = Generator(run.model, context).stream(prompt, count, sampler)
    print(tokenizer.decode(prompt + list(sampled)))


if __name__ == "__main__":
    sys.exit(run_command(main))
