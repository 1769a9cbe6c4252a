"""How commands parse and how they end."""

import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from euler_ir.errors import EulerError
from runtime.cli import Parser, integer, number, path, run_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EulerError("no preset 'x'\n  known: a, b"), 2, "error: no preset 'x' known: a, b"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "", "out.bin"), 2, "error: out.bin: No space left on device"),
        (OSError(errno.ENOSPC, ""), 2, "error: No space left on device"),
        (PermissionError(errno.EACCES, "", "/x"), 2, "error: /x: Permission denied"),
        (MemoryError("Unable to allocate 9 GiB"), 2, "error: out of memory: Unable to allocate 9"),
    ],
)
def test_each_way_to_end_has_its_code_and_one_line(capsys, error, code, line):
    def main(argv):
        raise error

    assert run_command(main, []) == code
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith(line) and written.err.count("\n") == 1


def test_what_a_message_quotes_is_neither_obeyed_nor_endless(capsys):
    def main(argv):
        raise EulerError("bad \x1b[2J\u202e\ud800 " + "x" * 10**6 + " end")

    assert run_command(main, []) == 2
    written = capsys.readouterr().err
    assert written.startswith(r"error: bad \x1b[2J\u202e\ud800 xxx")
    assert written.endswith("xxx end\n") and len(written) < 2100


def test_the_code_of_the_command_itself_is_passed_on():
    assert run_command(lambda argv: None, []) == 0
    assert run_command(lambda argv: len(argv), ["a"]) == 1


@pytest.mark.parametrize("error", [ValueError("bug"), IndexError("bug"), OSError("no errno")])
def test_a_bug_keeps_its_traceback(error):
    def main(argv):
        raise error

    with pytest.raises(type(error)):
        run_command(main, [])


def parser():
    result = Parser(prog="train")
    result.add_argument("--steps", type=integer(1, 100))
    result.add_argument("--lr", type=number(0, above=True))
    result.add_argument("--top-p", type=number(0, 1, above=True))
    result.add_argument("--dropout", type=number(0, 1, below=True))
    result.add_argument("--backend", choices=["auto", "llvm"])
    result.add_argument("--seed", type=integer(0))
    result.add_argument("--out", type=path)
    return result


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("--steps", "1", 1),
        ("--steps", "100", 100),
        ("--lr", "1e-3", 1e-3),
        ("--top-p", "1", 1.0),
        ("--dropout", "0", 0.0),
    ],
)
def test_values_in_range_parse(flag, text, value):
    parsed = parser().parse_args([flag, text])
    assert getattr(parsed, flag[2:].replace("-", "_")) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: must be an integer at least 1 and at most 100, got '0'"),
        (["--steps", "101"], "got '101'"),
        (["--steps", "1.5"], "got '1.5'"),
        (["--steps", "many"], "got 'many'"),
        (["--seed", "1" + "0" * 400], "--seed: must be an integer at least 0 and at most"),
        (["--out", ""], "--out: must be a path, got ''"),
        (["--lr", "0"], "--lr: must be a number above 0, got '0'"),
        (["--lr", "nan"], "got 'nan'"),
        (["--lr", "inf"], "got 'inf'"),
        (["--lr=-inf"], "got '-inf'"),
        (["--top-p", "1.01"], "must be a number above 0 and at most 1"),
        (["--dropout", "1"], "at least 0 and below 1"),
        (["--backend", "tpu"], "invalid choice: 'tpu'"),
        (["--stpes", "1"], "unrecognized arguments: --stpes"),
        (["--step", "1"], "unrecognized arguments: --step"),
        (["--steps"], "--steps: expected one argument"),
    ],
)
def test_a_bad_argument_is_one_line_and_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    written = capsys.readouterr()
    assert ended.value.code == 2 and written.out == ""
    assert written.err.startswith("error: ") and written.err.count("\n") == 1
    assert message in written.err


def test_argument_types_raise_what_argparse_expects():
    for parse in (integer(0), number()):
        with pytest.raises(argparse.ArgumentTypeError):
            parse("")


def run_script(body, **options):
    script = f"import sys\nfrom runtime.cli import run_command\n{body}\nsys.exit(run_command(main))"
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_reader_that_goes_away_is_no_fault():
    process = run_script("def main(argv):\n  while True: print('x' * 100)")
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_closed_standard_streams_are_no_fault(tmp_path):
    body = ("def main(argv):\n  print('out'); print('err', file=sys.stderr, flush=True)\n"
            f"  open({str(tmp_path / 'file')!r}, 'w').write('mine')")
    process = run_script(body, preexec_fn=lambda: os.closerange(1, 3))
    assert process.communicate() == ("", "") and process.returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_ends_in_one_line():
    process = run_script("import time\ndef main(argv):\n  print('up', flush=True); time.sleep(60)")
    process.stdout.readline()
    process.send_signal(2)
    assert process.communicate() == ("", "interrupted\n")
    assert process.returncode == 130
