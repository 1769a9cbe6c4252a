"""Arguments that commands share: one wording, and combinations that cannot be are refused first."""

from __future__ import annotations

import argparse

import pytest

from backends.backend import create
from euler_ir.errors import EulerError
from runtime import bench, convert, evaluate, generate, gradcheck, inspect, train
from runtime.arguments import refuse_together
from runtime.cli import run_command

COMMANDS = {"bench": bench, "convert": convert, "evaluate": evaluate, "generate": generate,
            "gradcheck": gradcheck, "inspect": inspect, "train": train}
#: What a command cannot do without; none of it is there.
NEEDED = {"evaluate": ["--checkpoint", "none", "--tasks", "none"],
          "generate": ["--checkpoint", "none"], "train": ["--data", "none"]}


def option(command: str, flag: str) -> argparse.Action | None:
    return COMMANDS[command].parser()._option_string_actions.get(flag)


@pytest.mark.parametrize("flag", ["--preset", "--backend", "--cpu-features", "--precision",
                                  "--recompute"])
def test_an_argument_reads_the_same_in_every_command(flag):
    actions = [action for name in COMMANDS if (action := option(name, flag))]
    assert len(actions) > 1
    assert len({(action.help, action.metavar) for action in actions}) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_every_argument_and_ends_well(name, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for action in COMMANDS[name].parser()._actions:
        assert action.help and action.option_strings[0] in shown


@pytest.mark.parametrize("name", ["bench", "evaluate", "generate", "gradcheck", "inspect", "train"])
@pytest.mark.parametrize(("arguments", "message"), [
    (["--backend", "tpu"], "no backend 'tpu'; known: auto, llvm"),
    (["--cpu-features", "+warp-drive"], "--cpu-features: unknown feature 'warp-drive'"),
    (["--backend", "reference", "--cpu-features=-avx2"],
     "--cpu-features: backend 'reference' compiles nothing"),
])
def test_a_backend_that_cannot_be_is_refused_before_anything_is_read(name, arguments, message,
                                                                     capsys):
    assert run_command(COMMANDS[name].main, [*NEEDED.get(name, []), *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith(f"error: {message}")
    assert written.err.count("\n") == 1


def test_hints_that_a_backend_has_no_use_for_are_let_pass():
    assert create("reference", threads=4, timed=True).name == "reference"


@pytest.mark.parametrize("name", ["bench", "gradcheck", "inspect", "train"])
def test_an_unknown_preset_is_refused_as_it_is_parsed(name, capsys):
    arguments = ["--backend", "tpu", "--preset", "gpt5"]
    assert run_command(COMMANDS[name].main, arguments) == 2
    assert capsys.readouterr().err.startswith("error: no preset 'gpt5'; known: nano-1m")


def test_arguments_that_do_not_go_together():
    conflicts = [("resume", "dump_ir", "why not")]
    for resume, dump in ((None, "b"), ("a", None), ("a", False)):
        refuse_together(argparse.Namespace(resume=resume, dump_ir=dump), conflicts)
    with pytest.raises(EulerError, match="^--dump-ir does not go with --resume: why not$"):
        refuse_together(argparse.Namespace(resume="a", dump_ir=0), conflicts)


@pytest.mark.parametrize("flag", ["--stage", "--out"])
def test_the_table_of_recomputation_takes_no_other_output(flag, tmp_path, capsys):
    arguments = ["--recompute-table", flag, str(tmp_path / "x")]
    assert run_command(inspect.main, arguments) == 2
    assert f"{flag} does not go with --recompute-table" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
