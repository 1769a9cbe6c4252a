"""Kernels that move or gather data: exact for every element type, at odd sizes and odd places."""

import itertools

import numpy as np
import pytest

from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.types import BF16, BOOL, F16, F32, F64, I32, I64, U32
from runtime.compiler.driver import compile_function, link_function, to_buffers
from runtime.testing import check_close
from tests.llvm_backends import apply, backend, run_with_threads, sample

DTYPES = [F64, F32, BF16, F16, I64, I32, U32, BOOL]
WIDTHS = ["host", "wide", "neon"]


def check_equal(function, inputs, target="host"):
    expected = interpreter.run(function, inputs)
    for name, array in run_with_threads(function, inputs, target).items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape, name
        assert array.tobytes() == expected[name].tobytes(), name


def check_near(function, inputs, target="host"):
    typed, exact = (interpreter.run(function, inputs, precise=p) for p in (False, True))
    found = run_with_threads(function, inputs, target)
    for name, value in zip(function.output_names, function.outputs, strict=True):
        check_close(name, found[name], typed[name], exact[name], value.type)


def moves(b, x):
    rank = len(x.shape)
    permutations = list(itertools.permutations(range(rank)))
    yield from (b.transpose(x, p) for p in permutations)
    yield b.slice(x, (1,) * rank, tuple(n - 1 for n in x.shape))
    yield b.part(x, rank - 1, 1, 2)
    yield b.pad(x, tuple(n + 3 for n in x.shape), (2,) * rank)
    for axis in range(rank):
        yield b.concat([x, b.part(x, axis, 0, 1), x], axis)
    yield b.broadcast(x, (2, *x.shape))
    yield b.broadcast(b.part(x, 0, 0, 1), x.shape)
    yield b.broadcast(b.part(x, rank - 1, 1, 2), x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_are_exact(dtype):
    f = apply(lambda b, x: list(moves(b, x)), (dtype, (3, 5, 4)))
    check_equal(f, sample(f))


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("shape", [(2, 3), (33, 65), (3, 5, 7)], ids=str)
def test_moves_at_odd_sizes(shape, target):
    f = apply(lambda b, x: list(moves(b, x)), (F32, shape))
    check_equal(f, sample(f), target)


def test_moves_over_many_tiles():
    f = apply(lambda b, x: list(moves(b, x)), (F32, (1030, 133)))
    check_equal(f, sample(f))


def test_scalars_and_constants():
    def build(b, x):
        return [b.broadcast(x, (3, 70)), b.broadcast(x, ()), b.full(-0.0, F32, (5, 2)),
                b.full(True, BOOL, (9,)), b.full(-7, I64, ()), b.full(2**32 - 1, U32, (3,)),
                b.iota(77), b.broadcast(b.iota(5), (3, 5)), b.pad(b.reshape(x, (1,)), (3,), (1,)),
                b.transpose(b.reshape(x, (1, 1)), (1, 0))]

    f = apply(build, (F32, ()))
    check_equal(f, sample(f))


@pytest.mark.parametrize("dtype", [F32, BF16, BOOL], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("position", [-100, -3, -1, 0, 2, 4, 5, 100])
def test_cache_writes_and_reads_at_any_place(position, axis, dtype):
    """Rows outside are dropped, or read as 0."""
    shape, new = (3, 5, 6), [3, 5, 6]
    new[axis] = 3
    f = apply(lambda b, x, n, p: [b.update_slice(x, n, p, axis), b.dynamic_slice(x, p, axis, 3),
                                  b.dynamic_slice(x, p, axis, shape[axis])],
              (dtype, shape), (dtype, tuple(new)), (I32, ()))
    check_equal(f, {**sample(f), "x2": np.array(position, np.int32)})


@pytest.mark.parametrize("position", [-2, 0, 900, 1022, 5000])
def test_a_donated_cache_is_written_in_place(position):
    """Large enough for many tiles; only the new rows are touched."""
    with Builder("append") as b:
        cache = b.input("cache", F32, (2, 1024, 3, 64))
        new = b.input("new", F32, (2, 4, 3, 64))
        at = b.input("position", I32, ())
        y = b.update_slice(cache, new, at, 1)
        f = b.function({"cache.new": y, "sum": b.sum(y)}, {"cache": "cache.new"})
    inputs = {**sample(f), "position": np.array(position, np.int32)}
    expected = interpreter.run(f, inputs)
    bound = to_buffers({"cache": inputs.pop("cache")}, backend("host", 2))
    program = compile_function(f, backend("host", 2), bound)
    assert not program.plan.copies
    assert set(program.run(inputs)) == {"sum"}
    np.testing.assert_array_equal(bound["cache"].read(), expected["cache.new"])


@pytest.mark.parametrize("dtype,target", [
    (F32, "host"), (F64, "host"), (BF16, "host"), (I32, "host"), (F32, "wide"), (F32, "neon")])
def test_reductions_over_every_choice_of_axes(dtype, target):
    def build(b, x):
        results = []
        for count in range(4):
            for axes in itertools.combinations(range(3), count):
                results += [b.reduce_sum(x, axes), b.reduce_max(x, axes, keep=True),
                            b.apply(ops.ReduceMin(axes), x)]
        return results

    f = apply(build, (dtype, (3, 7, 33)))
    inputs = sample(f)
    if dtype is I32:
        inputs["x0"] //= 1000  # sums that fit
    check_near(f, inputs, target)


@pytest.mark.parametrize("shape", [(1, 100_000), (100_000, 1), (3, 50_000), (700, 300),
                                   (40, 500, 3), (2000, 1, 17), (1, 1), (5, 1, 1)], ids=str)
def test_long_reductions(shape):
    """Few results of many elements: cut into blocks, in an order that no thread count changes."""
    axes = [a for n in range(len(shape) + 1) for a in itertools.combinations(range(len(shape)), n)]
    f = apply(lambda b, x: [r for a in axes for r in (b.reduce_sum(x, a), b.reduce_max(x, a))],
              (F32, shape))
    check_near(f, sample(f))


@pytest.mark.parametrize("kind", [ops.ReduceMax, ops.ReduceMin])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_extrema_keep_nan_from_any_place(kind, axes):
    f = apply(lambda b, x: b.apply(kind(axes), x), (F32, (21, 37)))
    program = link_function(f, backend())
    for place in range(21 * 37):
        x = np.full(21 * 37, -np.inf, np.float32)
        x[place] = np.nan
        x = x.reshape(21, 37)
        found = program.run({"x0": x})["y0"]
        assert np.array_equal(np.isnan(found), np.isnan(x).any(axes))


@pytest.mark.parametrize("dtype", [F64, F32, BF16, I32], ids=str)
def test_argmax_takes_the_first(dtype):
    f = apply(lambda b, x: b.argmax(x), (dtype, (40, 67)))
    x = np.random.default_rng(0).integers(0, 5, (40, 67)).astype(dtype.numpy)
    if dtype.is_float:
        x[3, 5:9] = np.nan
        x[4] = -np.inf
    check_equal(f, {"x0": x})


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("rows,columns,shape", [
    (50, 33, (4, 77)), (1, 1, (5,)), (3, 256, (2, 3, 9)), (5000, 8, (700,)), (7, 5, ()),
    (7, 5, (0,))])
def test_look_up_and_its_gradient(rows, columns, shape, dtype):
    """Indices outside give zeros, and add nothing."""
    f = apply(lambda b, t, i, u: [b.gather(t, i), b.scatter_add(i, u, rows)],
              (dtype, (rows, columns)), (I32, shape), (dtype, (*shape, columns)))
    inputs = sample(f)
    inputs["x1"] = np.random.default_rng(1).integers(-2, rows + 2, shape).astype(np.int32)
    check_near(f, inputs)


def test_scatter_add_sums_in_order():
    """A sum that only comes out so if every row's updates are added one by one, first to last."""
    f = apply(lambda b, i, u: b.scatter_add(i, u, 3), (I32, (64,)), (F32, (64, 19)))
    inputs = sample(f)
    inputs["x0"] = np.tile(np.array([1, 1, 0, 2], np.int32), 16)
    inputs["x1"] *= np.float32(10.0) ** np.arange(-8, 8, 0.25, dtype=np.float32)[:, None]
    check_equal(f, inputs)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 5)], ids=str)
def test_nothing_to_move(shape):
    last = len(shape) - 1

    def build(b, x):
        return [b.transpose(x, tuple(range(len(shape)))[::-1]), b.concat([x, x], last),
                b.broadcast(x, (2, *shape)), b.reduce_sum(x, (0,)), b.reduce_sum(x, (last,)),
                b.pad(x, tuple(n + 1 for n in shape), (1,) * len(shape))]

    f = apply(build, (F32, shape))
    check_equal(f, sample(f))
