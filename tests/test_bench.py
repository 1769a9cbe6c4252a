"""What `runtime.bench` reports is consistent; how fast anything is, no test may say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from euler_ir.builder import Builder
from euler_ir.graph import Node
from euler_ir.types import F32, I32
from model.config import PRESETS
from model.parameters import flops_per_token
from runtime import bench
from runtime.cli import run_command
from runtime.profiling.clock import seconds_since_start
from runtime.profiling.costs import Cost, cost
from runtime.profiling.roofline import Limits, Row, label, merged
from runtime.profiling.workloads import MODES

ROOT = Path(__file__).parent.parent
SMALL = ["--preset", "nano-1m", "--batch-size", "2", "--context", "8", "--steps", "2"]
KEYS = {"tokens_per_second", "step_ms", "tflops", "first_step_seconds", "peak_bytes"}


def lines(capsys, *arguments: str) -> list[str]:
    assert run_command(bench.main, [*SMALL, *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("mode", list(MODES))
def test_the_last_line_is_one_json_object(mode, capsys):
    (line,) = lines(capsys, "--backend", "llvm", "--mode", mode, "--json")
    result = json.loads(line)
    assert KEYS <= set(result) and all(result[key] > 0 for key in KEYS)
    assert (result["backend"], result["mode"], result["context"]) == ("llvm", mode, 8)
    tokens = 2 if mode == "decode" else 2 * 8
    assert result["tokens_per_second"] * result["step_ms"] == pytest.approx(1e3 * tokens)


def test_training_counts_the_operations_of_the_formula(capsys):
    result = json.loads(lines(capsys, "--backend", "llvm", "--json")[-1])
    expected = result["tokens_per_second"] * flops_per_token(PRESETS["nano-1m"], 8) / 1e12
    assert result["tflops"] == pytest.approx(expected)


def test_planned_memory_has_weights_moments_and_activations(capsys):
    small, large = (json.loads(lines(capsys, "--backend", "llvm", "--json", "--context", size)[-1])
                    for size in ("8", "64"))
    assert 3 * 4 * small["parameters"] < small["peak_bytes"] < large["peak_bytes"]


def test_tables_for_people_come_before_the_json(capsys):
    *text, line = lines(capsys, "--backend", "llvm")
    assert json.loads(line)["mode"] == "train"
    names = [row.split()[0] for row in text if row.strip()]
    assert "adamw" in names and "limits" in names and any(n.startswith("matmul_nt") for n in names)


def test_the_matmuls_are_those_of_a_training_step(capsys):
    *text, line = lines(capsys, "--backend", "llvm", "--mode", "matmul")
    rows = [row.split() for row in text if row.startswith("matmul_") and "->" in row]
    # Four in each of four layers and one for the heads, each with two more in the backward pass.
    assert sum(int(row[row.index("->") + 2]) for row in rows) == 3 * (4 * 4 + 1)


def test_a_backend_that_takes_no_times_has_no_table_of_kernels(capsys):
    text = "\n".join(lines(capsys, "--backend", "reference", "--mode", "decode"))
    assert "tokens/s" in text and "of limit" not in text


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "gpt5"], "no preset 'gpt5'; known: nano-1m"),
    (["--backend", "tpu"], "no backend 'tpu'; known: auto, llvm"),
    (["--precision", "f8"], "precision 'f8' is not available: use f32 or f64"),
])
def test_wrong_names_end_in_one_line(arguments, message, capsys):
    assert run_command(bench.main, [*SMALL, *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith(f"error: {message}")
    assert written.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--mode", "fly"], ["--batch-size", "0"], ["--steps", "0"],
                                       ["--threads", "0"], ["--frob"]])
def test_flags_that_cannot_be_parsed_end_in_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(bench.main, arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_command_as_a_process():
    done = subprocess.run([sys.executable, "-m", "runtime.bench", *SMALL, "--json",
                           "--backend", "llvm"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert 0 < json.loads(done.stdout)["first_step_seconds"] < 600


def test_the_age_of_the_process_includes_what_came_before_python_code():
    script = ("import time; start = time.perf_counter(); time.sleep(0.3)\n"
              "from runtime.profiling.clock import seconds_since_start as age\n"
              "print(age() - (time.perf_counter() - start))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert 0 <= float(done.stdout) < 30  # starting Python and nothing else
    assert seconds_since_start() < seconds_since_start() + 1


# Costs


def node(build) -> Node:
    with Builder() as b:
        b.function({"y": build(b)})
        return b.nodes[-1]


@pytest.mark.parametrize(("build", "expected"), [
    (lambda b: b.matmul(b.input("x", F32, (2, 3, 5)), b.input("w", F32, (7, 5)),
                        transpose_b=True), Cost(2 * 2 * 3 * 5 * 7, 4 * (30 + 35 + 42))),
    (lambda b: b.matmul(b.input("x", F32, (5, 3)), b.input("w", F32, (5, 7)),
                        transpose_a=True), Cost(2 * 3 * 5 * 7, 4 * (15 + 35 + 21))),
    (lambda b: b.input("x", F32, (4, 6)) + b.input("y", F32, (4, 6)), Cost(24, 4 * 72)),
    # relu(x) of one operand read once; max only.
    (lambda b: b.reduce_sum(b.input("x", F32, (4, 6)), (1,)), Cost(24, 4 * 28)),
    (lambda b: b.gather(b.input("t", F32, (1000, 6)), b.input("i", I32, (5,))),
     Cost(0, 4 * (2 * 30 + 5))),
    (lambda b: b.update_slice(b.input("t", F32, (1000, 6)), b.input("n", F32, (1, 6)),
                              b.input("p", I32, ()), 0), Cost(0, 4 * 12)),
], ids=["linear", "weight gradient", "add", "sum", "gather", "cache write"])
def test_costs(build, expected):
    assert cost(node(build)) == expected


def test_causal_attention_counts_half_the_matrix_and_decoding_all_of_it():
    def attend(queries):
        return lambda b: b.attention(
            b.input("q", F32, (2, queries, 4, 8)), b.input("k", F32, (2, 16, 2, 8)),
            b.input("v", F32, (2, 16, 2, 8)), *(b.input(n, I32, (2, queries)) for n in ("l", "h")))

    assert cost(node(attend(16))).flops == 4 * 2 * 4 * 16 * 16 * 8 // 2
    assert cost(node(attend(1))).flops == 4 * 2 * 4 * 1 * 16 * 8


def test_the_share_of_the_limit_is_the_least_time_over_the_time():
    limits = Limits(flops=100.0, bytes=10.0)
    assert limits.share(Row("arithmetic", 1, 2.0, 100, 5)) == 0.5
    assert limits.share(Row("traffic", 1, 2.0, 100, 15)) == 0.75


def test_rows_of_one_key_add_up_and_the_longest_comes_first():
    rows = [Row("a x", 1, 1.0, 1, 2), Row("b", 1, 1.5, 0, 0), Row("a y", 2, 1.0, 3, 4)]
    assert merged(rows, lambda row: row.name.split()[0]) == [
        Row("a", 3, 2.0, 4, 6), Row("b", 1, 1.5, 0, 0)]


def test_labels_tell_transposes_and_shapes():
    matmul = node(lambda b: b.matmul(b.input("x", F32, (4, 3)), b.input("w", F32, (7, 3)),
                                     transpose_b=True))
    assert label(matmul) == "matmul_nt 4x3 7x3 -> 4x7"


def test_random_tokens_are_the_same_in_every_run():
    """Two runs measure the same work: nothing in a workload depends on the time."""
    first, second = (MODES["train"](PRESETS["nano-1m"], _reference(), 1, 4, F32)[0].run()
                     for _ in range(2))
    assert first.loss == second.loss and np.isfinite(first.loss)


def _reference():
    from tests.runners import backend
    return backend("reference")
