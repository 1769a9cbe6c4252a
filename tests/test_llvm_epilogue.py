"""Matmuls with the chain of ops that follows them, whatever the number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from euler_ir import interpreter
from euler_ir.builder import Builder
from euler_ir.passes.pipeline import optimize
from euler_ir.types import BF16, F32, F64, TensorType
from runtime.compiler.driver import run_function
from runtime.testing import check_close
from tests.runners import backend

CHAINS = {
    "bias": lambda b, y, bias, row, residual: y + bias,
    "residual": lambda b, y, bias, row, residual: residual + y,
    "all": lambda b, y, bias, row, residual: residual + b.gelu(y * row + bias),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (3, 1), (1, 3), (2, 3)], ids=str)
def test_operands_are_read_at_their_row_and_column(chain, dtype, rows):
    with Builder() as b:
        x, w = b.input("x", dtype, (*rows, 8)), b.input("w", dtype, (40, 8))
        bias, row = b.input("bias", dtype, (40,)), b.input("row", dtype, (*rows, 1))
        residual = b.input("residual", dtype, (*rows, 40))
        f = b.function({"y": CHAINS[chain](b, b.linear(x, w), bias, row, residual)})
    generator = np.random.default_rng(0)
    inputs = {v.name: generator.normal(size=v.shape).astype(dtype.numpy) for v in f.inputs}
    got = run_function(f, inputs, backend("llvm"))["y"]
    expected = interpreter.run(f, inputs, precise=True)["y"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 if dtype is F32 else 1e-14)


@pytest.mark.parametrize("chain", [None, *CHAINS])
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_a_product_in_chunks_passes_through_its_epilogue_once(chain, dtype, same):
    """Its workspace is found whatever the node's operands, their order and their type are."""
    with Builder() as b:
        bias, row = b.input("bias", dtype, (40,)), b.input("row", dtype, (40, 1))
        residual = b.input("residual", dtype, (40, 40))
        x, w = b.input("x", dtype, (5000, 40)), b.input("w", dtype, (5000, 40))
        y = b.matmul(x, x if same else w, transpose_a=True)
        f = b.function({"y": CHAINS[chain](b, y, bias, row, residual) if chain else y})
    chosen = backend("llvm")
    products = [kernel for kernel in chosen.lower(optimize(f)) if "matmul" in kernel.code.key]
    assert [kernel.workspace > 0 for kernel in products] == [True]
    generator = np.random.default_rng(0)
    inputs = {v.name: generator.normal(size=v.shape).astype(dtype.numpy) for v in f.inputs}
    got = run_function(f, inputs, chosen)["y"]
    exact, typed = interpreter.run(f, inputs, precise=True)["y"], interpreter.run(f, inputs)["y"]
    if dtype is F64:  # the reference is in f64 too
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-14 * np.abs(exact).max())
    else:
        check_close("y", got, typed, exact, TensorType(dtype, got.shape))
