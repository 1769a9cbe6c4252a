"""The scalar language: types, evaluation with numpy, and Philox against its published vectors."""

import math

import numpy as np
import pytest

from euler_ir import ops, scalar
from euler_ir.op import REGISTRY, Pointwise, Row, result_types
from euler_ir.ops.random import philox
from euler_ir.types import BF16, BOOL, F16, F32, F64, I32, I64, U32, DType, ShapeError, TensorType


def leaf(dtype=F32, place=0):
    return scalar.inputs([TensorType(dtype, (4,))] * (place + 1))[place]


def evaluate(expr, *arrays):
    return scalar.evaluate([expr], arrays)[0]


# Known answers of Philox4x32-10 from Random123 (examples/kat_vectors).
@pytest.mark.parametrize("counter, key, words", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_known_answers(counter, key, words):
    arrays = [np.array([word], np.uint32) for word in (*counter, *key)]
    leaves = scalar.array_inputs(arrays)
    found = scalar.evaluate(philox(leaves[:4], leaves[4:]), arrays)
    assert tuple(int(word[0]) for word in found) == words


def test_random_bits_are_philox_words_in_order():
    size = 11
    operands = [np.full(size, word, np.uint32) for word in (3, 5, 7)]
    (bits,) = ops.RandomBits().evaluate(*operands)
    for block in range(3):
        arrays = [np.array([word], np.uint32) for word in (block, 7, 0, 0, 3, 5)]
        leaves = scalar.array_inputs(arrays)
        words = scalar.evaluate(philox(leaves[:4], leaves[4:]), arrays)
        part = bits[4 * block:4 * block + 4]
        assert part.tolist() == [int(word[0]) for word in words][:len(part)]


def test_uniform_numbers():
    key0, key1, counter = (np.full(1 << 16, word, np.uint32) for word in (1, 2, 3))
    (bits,) = ops.RandomBits().evaluate(key0, key1, counter)
    (uniform,) = ops.UniformFromBits().evaluate(bits)
    assert uniform.dtype == np.float32 and uniform.min() >= 0 and uniform.max() < 1
    # 5 standard errors of the mean of 2^16 uniform numbers, and of a sixteenth's share.
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12) / 256
    shares = np.histogram(uniform, 16, (0, 1))[0] / len(uniform)
    assert np.abs(shares - 1 / 16).max() < 5 * math.sqrt(1 / 16 * 15 / 16) / 256
    other = ops.RandomBits().evaluate(key0, key1, counter + np.uint32(1))[0]
    assert (bits == other).sum() < 4
    assert ops.UniformFromBits().evaluate(np.array([0, 2**32 - 1], np.uint32))[0].tolist() == [
        0.0, 1.0 - 2.0**-24]


def test_python_numbers_take_the_other_operands_type():
    for expr in (leaf(F32) + 1, 2 - leaf(F32), leaf(F32) * 0.5, 1 / leaf(F32), -leaf(F32)):
        assert expr.dtype is F32
    assert (leaf(F64) + 1).dtype is F64
    assert (leaf(U32) >> 3).dtype is U32
    assert (leaf(I32) < 3).dtype is BOOL


def test_narrow_floats_are_computed_wide():
    assert leaf(BF16).dtype is F32 and leaf(F16).dtype is F32
    assert leaf(F32).cast(BF16).dtype is F32


@pytest.mark.parametrize("make, message", [
    (lambda: leaf(F32) + leaf(I32, 1), "'add' of one type, got f32 and i32"),
    (lambda: leaf(I32) * 0.5, "a number of type i32, got 0.5"),
    (lambda: leaf(U32) + -1, "a number of type u32, got -1"),
    (lambda: leaf(I32) + math.inf, "a number of type i32, got inf"),
    (lambda: leaf(BOOL) + leaf(BOOL, 1), "'add' of numbers, got bool"),
    (lambda: scalar.exp(leaf(I32)), "'exp' of floats, got i32"),
    (lambda: ~leaf(F32), "'not' of integers or bool, got f32"),
    (lambda: leaf(F32) & leaf(F32, 1), "'and' of integers or bool, got f32"),
    (lambda: leaf(BOOL) >> leaf(BOOL, 1), "'shr' of integers, got bool"),
    (lambda: scalar.where(leaf(F32), leaf(F32), leaf(F32)), "where(bool, T, T)"),
    (lambda: scalar.where(leaf(BOOL), leaf(F32), leaf(F64)), "where(bool, T, T)"),
    (lambda: scalar.RowContext(0).max(leaf(F32)), "the maximum of nothing"),
])
def test_types_are_checked_when_an_expression_is_made(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


def test_maximum_of_two_is_not_the_maximum_of_a_row():
    x, y = np.array([[1.0, 5.0]]), np.array([[3.0, 2.0]])
    a, b = scalar.array_inputs([x, y], 2)
    row = scalar.RowContext(2)
    assert evaluate(scalar.maximum(a, b), x, y).tolist() == [[3.0, 5.0]]
    assert evaluate(scalar.minimum(a, b), x, y).tolist() == [[1.0, 2.0]]
    assert evaluate(row.max(a), x, y).tolist() == [[5.0]]
    assert not set(scalar.REDUCTIONS) & {*scalar.UNARY, *scalar.BINARY, *scalar.COMPARE}


def test_row_expressions():
    x = np.arange(6.0).reshape(2, 3)
    row = scalar.RowContext(3)
    (a,) = scalar.array_inputs([x], 3)
    assert evaluate(row.sum(a), x).tolist() == [[3.0], [12.0]]
    assert evaluate(row.mean(a), x).tolist() == [[1.0], [4.0]]
    assert evaluate(row.column_sum(a), x).tolist() == [3.0, 5.0, 7.0]
    assert evaluate(row.roll(a, 1), x).tolist() == [[1.0, 2.0, 0.0], [4.0, 5.0, 3.0]]
    assert evaluate(row.index, x).tolist() == [0, 1, 2]
    assert evaluate(scalar.linear_index(), x).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert evaluate(row.sum(row.index.cast(F64)), x).tolist() == [[3.0], [3.0]]


def test_integer_operations():
    x = np.array([0, 1, 0x80000000, 0xFFFFFFFF], np.uint32)
    (a,) = scalar.array_inputs([x])
    assert evaluate(scalar.multiply_high(a, 0xFFFFFFFF), x).tolist() == [
        0, 0, 0x7FFFFFFF, 0xFFFFFFFE]
    assert evaluate(a * 3, x).tolist() == [0, 3, 0x80000000, 0xFFFFFFFD]
    assert evaluate(a >> 31, x).tolist() == [0, 0, 1, 1]
    assert evaluate(a ^ 1, x).tolist() == [1, 0, 0x80000001, 0xFFFFFFFE]
    assert evaluate(a.bitcast(F32), np.array([0x3F800000], np.uint32)).tolist() == [1.0]


def test_shared_expressions_are_visited_once():
    """A chain that doubles at every step has 2^60 paths and 61 expressions."""
    x = expr = leaf(F64)
    for _ in range(60):
        expr = expr + expr
    order = scalar.topological([expr])
    assert len(order) == 61 and order[0] is x and order[-1] is expr
    assert evaluate(expr, np.ones(4)).tolist() == [2.0**60] * 4


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_results_are_stored_in_operand_zeros_type_but_row_statistics_wide(dtype, columns):
    def infer(op, *shapes):
        return [t.dtype for t in result_types(op, [TensorType(dtype, shape) for shape in shapes])]

    wide = dtype.compute
    full, vector, column = (3, columns), (columns,), (3, 1)
    assert infer(ops.Add(), full, full) == [dtype]
    assert infer(ops.Softmax(), full) == [dtype]
    assert infer(ops.RMSNorm(), full, vector) == [dtype]
    backward = REGISTRY["rms_norm_backward"](1e-5)
    assert infer(backward, full, vector, full) == [dtype, wide]
    target = TensorType(I32, column)
    assert [t.dtype for t in result_types(ops.CrossEntropy(), [TensorType(dtype, full), target])
            ] == [wide, wide]


@pytest.mark.parametrize("name", sorted(
    name for name, op in REGISTRY.items() if issubclass(op, Pointwise | Row)
    and op.__module__.startswith("euler_ir.")))
def test_ops_have_the_arity_of_their_scalar_method(name):
    assert REGISTRY[name].arity is not None


@pytest.mark.parametrize("dtype, inside, outside", [
    (BOOL, [0, 1, True, 1.0], [2, -1, 0.5]),
    (I32, [2**31 - 1, -2**31, 3.0], [2**31, 0.5, math.nan, math.inf]),
    (U32, [0, 2**32 - 1], [-1, 2**32]), (I64, [2**63 - 1], [2**63, -math.inf]),
    (F32, [0.1, math.nan, 1e300, True], [])])
def test_which_numbers_a_type_holds(dtype: DType, inside, outside):
    assert all(dtype.holds(value) for value in inside)
    assert not any(dtype.holds(value) for value in outside)
