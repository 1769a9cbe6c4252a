"""Measure a trained model on tasks of lm-evaluation-harness.

    python -m runtime.evaluate --checkpoint runs/2025-01-31-nano-1m --tasks lambada_openai,piqa

The harness downloads its tasks' data from the Hugging Face hub. Tasks of your own, a YAML file each
in the folder that `--include-path` names, need no network if their data are files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from euler_ir.errors import EulerError
from runtime.arguments import add_backend, add_checkpoint, backend_of
from runtime.cli import Parser, integer, path, print_notes, run_command
from runtime.evaluation.scoring import ROWS
from runtime.inference.trained import load_trained
from runtime.storage.files import write_atomic


def parser() -> Parser:
    p = Parser(prog="python -m runtime.evaluate", description=__doc__.splitlines()[0])
    add_checkpoint(p)
    p.add_argument("--tasks", required=True, metavar="NAMES",
                   help="tasks, groups or tags of the harness, separated by commas "
                        "(`lm-eval ls tasks` lists them)")
    p.add_argument("--include-path", type=path, metavar="DIR",
                   help="a folder of further tasks, a YAML file of the harness for each")
    p.add_argument("--limit", type=integer(1), metavar="N",
                   help="the first N documents of each task (all)")
    p.add_argument("--num-fewshot", type=integer(0), metavar="N",
                   help="examples in each prompt (the task's)")
    p.add_argument("--batch-size", type=integer(1), default=ROWS, metavar="B",
                   help=f"rows that are scored at a time ({ROWS})")
    p.add_argument("--out", type=path, metavar="FILE.json",
                   help="also write the results here, with the tasks' settings")
    add_backend(p)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not names:
        raise EulerError("--tasks names no task")
    backend = backend_of(arguments)
    out = arguments.out and Path(arguments.out)
    if out and not out.parent.is_dir():
        raise EulerError(f"--out {out}: its directory does not exist")
    if out and out.exists() and not out.is_file():
        raise EulerError(f"--out {out} is there and no file that results could replace")
    harness = _harness()
    trained = load_trained(arguments.checkpoint, backend)
    print_notes(trained.notes)
    model = harness.EulerLM(trained, arguments.batch_size)
    results = harness.run_tasks(model, names, arguments.include_path, arguments.limit,
                                arguments.num_fewshot)
    if out:  # before stdout, whose reader may be gone
        write_atomic(out, f"{harness.as_json(results)}\n".encode())
    print(harness.tables(results))


def _harness() -> ModuleType:
    try:
        import runtime.evaluation.lm_eval_model
    except ImportError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise EulerError("evaluation needs lm-evaluation-harness: pip install -e '.[eval]' in "
                         "the project's folder") from None
    return runtime.evaluation.lm_eval_model


if __name__ == "__main__":
    sys.exit(run_command(main))
