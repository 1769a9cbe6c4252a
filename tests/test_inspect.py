"""What `runtime.inspect` prints and writes is what the compiler made."""

from __future__ import annotations

import pytest

from backends.llvm.backend import LLVMBackend
from euler_ir.builder import Builder
from euler_ir.text import parse_function, print_function
from euler_ir.types import F32
from euler_ir.verify import verify
from model.config import PRESETS
from model.objective import training_step
from model.optimizer import AdamWConfig
from model.parameters import parameters
from runtime import inspect
from runtime.cli import run_command
from runtime.compiler.dump import Dump
from runtime.inspect import compile_stages
from tests.runners import backend

SMALL = ["--preset", "nano-1m", "--batch-size", "2", "--context", "16"]
FUNCTIONS = {"step", "evaluate", "prefill", "decode"}


def output(capsys, *arguments: str) -> str:
    assert run_command(inspect.main, [*SMALL, *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("backend", ["reference", "llvm"])
def test_the_overview_names_every_parameter_function_and_stage(backend, capsys):
    text = output(capsys, "--backend", backend)
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    for p in parameters(PRESETS["nano-1m"]):
        shape, elements = "x".join(map(str, p.shape)), f"{p.size:,}"
        assert lines[p.name][1:3] == [shape, elements]
    assert lines["all"][1] == "1,053,824"
    assert {f"@{name}:" for name in FUNCTIONS} <= set(lines)
    assert lines["weights"][1:] == ["4.02", "MiB"] and lines["moments"][1:] == ["8.04", "MiB"]
    assert {"00-build", "03-cse", "schedule", "kernels"} <= set(lines)


def test_the_first_stage_is_the_function_as_built(capsys):
    config = PRESETS["nano-1m"]
    text = output(capsys, "--stage", "build", "--context", str(config.context))
    built = training_step(config, AdamWConfig(), 2, config.context, False)["step"]
    assert parse_function(text) == built


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("stage", ["decompose", "03-cse", "fuse"])
def test_a_stage_is_text_that_parses_and_verifies(name, stage, capsys):
    text = output(capsys, "--stage", stage, "--function", name)
    function = parse_function(text)
    verify(function)
    assert function.name == name and print_function(function).strip() == text.strip()


def test_a_stage_that_comes_twice_is_the_last_one_unless_numbered(capsys):
    by_name, last, first = (output(capsys, "--stage", stage)
                            for stage in ("dce", "07-dce", "04-dce"))
    assert by_name == last != first


def test_the_schedule_and_the_kernels(capsys):
    schedule = output(capsys, "--stage", "schedule")
    assert schedule.startswith("@step: ") and "lower bound" in schedule.splitlines()[1]
    kernels = output(capsys, "--stage", "kernels").splitlines()
    assert [int(line.split()[0]) for line in kernels] == list(range(len(kernels)))
    assert kernels[0].split()[1] == "gather"
    assert "adamw" in {line.split()[1] for line in kernels[-3:]}


def test_out_has_every_stage_of_every_function(tmp_path, capsys, monkeypatch):
    # Listings of all kernels take a while; that they say what was compiled is tested elsewhere.
    monkeypatch.setattr(LLVMBackend, "listing", lambda self, kernel: {"ll": kernel.code.key})
    text = output(capsys, "--backend", "llvm", "--out", str(tmp_path / "ir"))
    assert str(tmp_path / "ir") in text
    for name in FUNCTIONS:
        directory = tmp_path / "ir" / name
        stages = [parse_function(path.read_text()) for path in sorted(directory.glob("*.ir"))]
        assert len(stages) == 8 and all(stage.name == name for stage in stages)
        assert (directory / "schedule.txt").read_text().startswith(f"@{name}: ")
        kernels = [path.read_text() for path in (directory / "kernels").iterdir()]
        assert len(set(kernels)) == len(kernels) > 10  # each distinct one once


def test_a_kernel_is_listed_as_llvm_ir_and_assembly(tmp_path):
    with Builder("twice") as b:
        x = b.input("x", F32, (64,))
        function = b.function({"y": x + x})
    compile_stages(function, backend("llvm"), Dump(tmp_path))
    names = sorted(path.name for path in (tmp_path / "twice" / "kernels").iterdir())
    assert [name.partition(".")[2] for name in names] == ["ll", "s"]
    assert "fadd" in (tmp_path / "twice" / "kernels" / names[0]).read_text()


def test_the_largest_preset_can_be_inspected(capsys):
    assert run_command(inspect.main, ["--preset", "llama-124m", "--batch-size", "8"]) == 0
    assert "162,220,800" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "gpt5"], "no preset 'gpt5'; known: nano-1m"),
    (["--backend", "tpu"], "no backend 'tpu'; known: auto, llvm"),
    (["--stage", "magic"], "no stage 'magic'; known: 00-build, 01-decompose"),
    (["--function", "train"], "no function 'train'; known: step, evaluate, prefill, decode"),
    (["--precision", "f8"], "precision 'f8' is not available"),
    (["--out", "/proc/none"], "cannot write /proc/none"),
])
def test_wrong_names_end_in_one_line(arguments, message, capsys):
    assert run_command(inspect.main, [*SMALL, *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith(f"error: {message}")
    assert written.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--context", "0"], ["--batch-size", "two"], ["--frob"]])
def test_flags_that_cannot_be_parsed_end_in_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(inspect.main, arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
