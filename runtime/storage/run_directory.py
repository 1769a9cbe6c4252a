"""Where a run lives: a directory with its configuration, metrics, `loss.png` and checkpoints."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from euler_ir.errors import EulerError
from runtime.storage.files import write_error

#: Names of what a run directory holds.
CONFIG, METRICS, CHECKPOINTS, PICTURE = "config.json", "metrics.jsonl", "checkpoints", "loss.png"
_DATE = re.compile(r"^\d{4}-\d\d-\d\d-")


def new_run_directory(run: str, root: Path | str = "runs") -> Path:
    """Create `ROOT/<date>-<run>`, or with `-2`, `-3`, ... where that name is taken."""
    name = f"{datetime.date.today().isoformat()}-{run}"
    number = 1
    while True:
        path = Path(root) / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not Path(root).is_dir():
                raise EulerError(f"{root} is a file, not a directory to put runs in") from None
            number += 1
        except OSError as error:
            raise write_error(error, path) from error


def run_name(checkpoint: Path) -> str:
    """The name, less its date, of the run that a checkpoint lies in; of one that lies in none, its
    own."""
    in_run = checkpoint.parent.name == CHECKPOINTS
    return _DATE.sub("", (checkpoint.parent.parent if in_run else checkpoint).name)


def run_directory_of(checkpoint: Path) -> Path:
    """The run that a checkpoint lies in, whatever directory its path is relative to. Raises
    EulerError for a checkpoint that was moved out of its run: there is no run to go on with."""
    checkpoints = checkpoint.resolve().parent
    if checkpoints.name != CHECKPOINTS:
        raise EulerError(f"{checkpoint} lies in no run directory: put it into the checkpoints/ of "
                         "one to go on with it")
    return checkpoints.parent


def claim_run_directory(path: Path | str) -> Path:
    """Create the directory that the user named for a new run. Raises EulerError when it holds a
    run already: a new run there would mix with it, or replace it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise EulerError(f"{path} is a file, not a directory to put a run in") from None
    except OSError as error:
        raise write_error(error, path) from error
    for name in (CONFIG, METRICS, CHECKPOINTS):
        if _holds_something(path / name):
            raise EulerError(
                f"{path} holds a run already ({name}): resume that one, or name another directory"
            )
    return path


def _holds_something(path: Path) -> bool:
    """False also for what a run leaves that was killed as it began: a file without content, a
    directory without checkpoints."""
    if path.is_file():
        return path.stat().st_size > 0
    return any(path.glob("[!.]*"))
