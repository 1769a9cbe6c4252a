"""The LLVM backend's matmul against numpy in f64, compiled and run tile by tile without a team."""

import itertools

import numpy as np
import pytest
from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.blocking import plan_gemm
from backends.llvm.epilogue import Epilogue, EpilogueContext
from backends.llvm.gemm import gemm
from backends.llvm.target import Target
from euler_ir.types import F32, F64, TensorType
from runtime.testing import check_close
from tests.llvm_runner import HOST, OTHER_TARGETS, TARGETS, fenced, generator, run

DTYPES = [F32, F64]


def operands(rng, dtype, batch, m, n, k, trans_a, trans_b, shared_a=False, shared_b=False):
    a_shape = (k, m) if trans_a else (m, k)
    b_shape = (n, k) if trans_b else (k, n)
    a = rng.standard_normal((1 if shared_a else batch, *a_shape)).astype(dtype.numpy)
    b = rng.standard_normal((1 if shared_b else batch, *b_shape)).astype(dtype.numpy)
    return fenced(a)[0], fenced(b)[0]


def product(a, b, trans_a, trans_b):
    """The product in f64, and the sum of the terms' magnitudes, which bounds its rounding."""
    a = (a.swapaxes(1, 2) if trans_a else a).astype(np.float64)
    b = (b.swapaxes(1, 2) if trans_b else b).astype(np.float64)
    return a @ b, np.abs(a) @ np.abs(b)


def check(target, dtype, batch, m, n, k, trans_a, trans_b, shared_a=False, shared_b=False):
    rng = np.random.default_rng([m, n, k])
    a, b = operands(rng, dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b)
    c, fence = fenced(np.full((batch, m, n), np.nan, dtype.numpy))
    source = gemm(
        target, dtype, batch, m, n, k, trans_a, trans_b, shared_a=shared_a, shared_b=shared_b
    )
    run(source, [a, b, c], target)
    expected, magnitude = product(a, b, trans_a, trans_b)
    # Each number is at most k roundings away; random signs leave about sqrt(k) of them.
    bound = 4 * np.sqrt(k) * np.finfo(dtype.numpy).eps * magnitude
    assert np.all(np.abs(c - expected) <= bound), source.key
    assert np.isnan(np.delete(fence, np.arange(41, 41 + c.size))).all(), source.key


ODD_SHAPES = [
    (1, 1, 1),
    (1, 257, 63),
    (2, 3, 7),
    (3, 17, 257),
    (7, 17, 63),
    (63, 65, 17),
    (65, 257, 2),
    (257, 1, 65),
    (19, 40, 600),
    (30, 64, 21),
]


@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_odd_shapes(shape, trans):
    for dtype in DTYPES:
        check(HOST, dtype, 1, *shape, trans[0] == "T", trans[1] == "T")


@pytest.mark.parametrize("name", OTHER_TARGETS)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN"])
def test_other_vector_widths(name, trans):
    flags = trans[0] == "T", trans[1] == "T"
    shapes = [(3, 70, 19), (33, 67, 300), (19, 40, 512), (18, 64, 20), (20, 40, 5000)]
    for dtype, shape in itertools.product(DTYPES, shapes):
        check(TARGETS[name], dtype, 1, *shape, *flags)


@pytest.mark.parametrize("trans", ["NN", "NT", "TN"])
@pytest.mark.parametrize(
    "shared", [(False, False), (True, False), (False, True), (True, True)], ids=str
)
def test_batches_and_shared_operands(shared, trans):
    check(HOST, F32, 3, 20, 18, 33, trans[0] == "T", trans[1] == "T", *shared)


def test_blocks_of_every_kind():
    """More rows, columns and depth than one block of each holds, none of them round."""
    check(HOST, F32, 1, 521, 603, 519, False, False)
    check(HOST, F32, 1, 521, 603, 519, False, True)
    check(HOST, F32, 1, 521, 603, 519, True, False)


# batch, m, n, k: dot products, rows, columns, small results of long sums, weights' gradients.
LONG_SUMS = [
    (16, 1, 1, 4100),
    (16, 1, 1, 100_003),
    (2, 1, 7, 20_000),
    (1, 1, 300, 3000),
    (2, 7, 1, 20_000),
    (1, 300, 1, 3000),
    (2, 3, 5, 30_001),
    (1, 20, 20, 20_000),
    (1, 64, 88, 1024),
    (1, 64, 172, 1024),
]


@pytest.mark.parametrize("trans", ["NN", "NT", "TN"])
@pytest.mark.parametrize("shape", LONG_SUMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_sums_are_as_exact_as_numpys(dtype, shape, trans):
    """By the rule of `check_close`. Single dot products come in a batch: of one number numpy's
    error may be 0 by chance."""
    trans_a, trans_b = trans[0] == "T", trans[1] == "T"
    a, b = operands(np.random.default_rng(4), dtype, *shape, trans_a, trans_b)
    c = np.full(shape[:3], np.nan, dtype.numpy)
    run(gemm(HOST, dtype, *shape, trans_a, trans_b), [a, b, c])
    a, b = (a.swapaxes(1, 2) if trans_a else a), (b.swapaxes(1, 2) if trans_b else b)
    wide = np.longdouble if dtype is F64 else np.float64
    exact = np.matmul(a.astype(wide), b.astype(wide))
    check_close("C", c, np.matmul(a, b), exact, TensorType(dtype, shape[:3]))


def test_blocks_and_chunks_of_k():
    """Whatever k is, blocks and chunks cover it, and no block is shorter than a vector."""
    ks = [*range(1, 600), 1000, 1023, 1025, 4095, 16_901, 99_999, 100_000]
    for k, (m, n), trans_b in itertools.product(ks, [(1, 1), (40, 24)], [False, True]):
        plan = plan_gemm(HOST, F32, 1, m, n, k, False, trans_b, False, False)
        assert (plan.chunks - 1) * plan.chunk < k <= plan.chunks * plan.chunk
        assert plan.chunks == 1 or plan.chunk % plan.depth == 0
        assert (k - 1) % plan.depth + 1 >= min(k, 16), (k, plan.depth)
        assert plan.workspace_bytes <= 768 * 1024


def test_empty_sizes():
    for m, n, k in [(0, 3, 4), (3, 0, 4)]:
        source = gemm(HOST, F32, 2, m, n, k)
        assert source.phases == ()
    c, _ = fenced(np.full((2, 5, 19), np.nan, np.float32))
    run(gemm(HOST, F32, 2, 5, 19, 0), [np.empty(0, np.float32)] * 2 + [c])
    assert np.array_equal(c, np.zeros_like(c))


@pytest.mark.parametrize("trans", ["NN", "NT", "TN"])
@pytest.mark.parametrize(
    "shape, phases", [((130, 150, 600), 1), ((50, 70, 4000), 2), ((1, 1, 90_001), 2)], ids=str
)
def test_bits_do_not_depend_on_threads(shape, phases, trans):
    trans_a, trans_b = trans[0] == "T", trans[1] == "T"
    rng = np.random.default_rng(0)
    a, b = operands(rng, F32, 1, *shape, trans_a, trans_b)
    source = gemm(HOST, F32, 1, *shape, trans_a, trans_b)
    assert len(source.phases) == phases and source.phases[0].tiles >= 4
    results = set()
    for threads in (1, 2, 3, 4):
        c = np.full((1, *shape[:2]), np.nan, np.float32)
        run(source, [a, b, c], threads=threads)
        results.add(c.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("trans", ["NN", "NT", "TN"])
@pytest.mark.parametrize("m", [4, 30])
def test_nan_and_infinity_reach_what_they_should(m, trans):
    trans_a, trans_b = trans[0] == "T", trans[1] == "T"
    a, b = operands(np.random.default_rng(1), F32, 1, m, 37, 50, trans_a, trans_b)
    (a.swapaxes(1, 2) if trans_a else a)[0, 2, 49] = np.nan
    (b.swapaxes(1, 2) if trans_b else b)[0, 7, 36] = np.inf
    c = np.zeros((1, m, 37), np.float32)
    run(gemm(HOST, F32, 1, m, 37, 50, trans_a, trans_b), [a, b, c])
    expected, _ = product(a, b, trans_a, trans_b)
    assert np.array_equal(np.isnan(c), np.isnan(expected))
    assert np.array_equal(np.isposinf(c), np.isposinf(expected))
    assert np.isfinite(np.delete(c[0, :, :36], 2, axis=0)).all()


def element(b: ir.IRBuilder, context: EpilogueContext, operand: int, index: ir.Value) -> ir.Value:
    """The address of an element of an epilogue's operand."""
    return e.address(b, context.operands[operand], index, context.vector.element)


def bias_and_residual(n: int) -> Epilogue:
    def emit(b, context, value, row, col):
        index = b.add(b.mul(row, e.constant(n)), col)
        for pointer in (element(b, context, 0, col), element(b, context, 1, index)):
            value = b.fadd(value, e.load_lanes(b, pointer, context.vector, context.mask))
        return value

    return Epilogue(f"bias+residual[{n}]", 2, emit, elementwise=(1,))


@pytest.mark.parametrize("m, n, k", [(23, 43, 40), (23, 43, 600), (6, 7, 5000)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epilogue_with_bias_and_residual(dtype, m, n, k):
    rng = np.random.default_rng(2)
    batch = 2
    a, b = operands(rng, dtype, batch, m, n, k, False, False)
    bias = fenced(rng.standard_normal(n).astype(dtype.numpy))[0]
    residual = fenced(rng.standard_normal((batch, m, n)).astype(dtype.numpy))[0]
    source = gemm(HOST, dtype, batch, m, n, k, epilogue=bias_and_residual(n))
    expected = product(a, b, False, False)[0] + bias + residual
    c = np.full((batch, m, n), np.nan, dtype.numpy)
    run(source, [a, b, bias, residual, c])
    tolerance = 100 * np.finfo(dtype.numpy).eps
    np.testing.assert_allclose(c, expected, rtol=tolerance, atol=tolerance * np.sqrt(k))
    # In place where the kernel allows it: C holds sums meanwhile where k is cut into blocks, and
    # the workspace where it is cut into chunks.
    assert len(source.phases) == (2 if k == 5000 else 1)
    assert source.inplace == (() if k == 600 else ((0, 3),))
    if source.inplace:
        run(source, [a, b, bias, residual, residual])
        assert residual.tobytes() == c.tobytes()


def test_epilogue_reads_one_number_a_row():
    def emit(b, context, value, row, col):
        number = e.load(b, element(b, context, 0, row), context.vector.element)
        return b.fmul(value, e.splat(b, number, context.vector.count))

    a, b = operands(np.random.default_rng(3), F32, 1, 9, 21, 8, False, True)
    scale = np.arange(9, dtype=np.float32)
    c = np.empty((1, 9, 21), np.float32)
    epilogue = Epilogue("times row scale", 1, emit)
    run(gemm(HOST, F32, 1, 9, 21, 8, False, True, epilogue=epilogue), [a, b, scale, c])
    expected = product(a, b, False, True)[0] * scale[:, None]
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-5)


def test_avx512_code_keeps_its_tile_in_registers():
    features = {"avx512f": True, "avx512vl": True, "avx512bw": True, "avx512dq": True, "fma": True}
    target = Target.of("x86_64-unknown-linux-gnu", "znver4", features)
    source = gemm(target, F32, 1, 1024, 256, 128, False, True)
    module = ir.Module(name="gemm")
    source.emit(module, ("f",))
    assembly = generator(target).assembly(str(module))
    kernel = assembly.split("f_outer_14_32:")[1].split("f_outer_2_32:")[0].split("retq")[0]
    loop = kernel[: kernel.rindex("jl") if "jl" in kernel else kernel.rindex("j")]
    assert loop.count("vfmadd") == 28
    assert "zmm31" in kernel
    assert "(%rsp)" not in kernel


def test_keys_tell_kernels_apart():
    sources = [
        gemm(HOST, dtype, batch, 8, 8, 8, ta, tb, shared_a=sa, shared_b=sb, epilogue=ep)
        for dtype, batch, ta, tb, sa, sb, ep in itertools.product(
            DTYPES, (1, 2), (0, 1), (0, 1), (0, 1), (0, 1), (None, bias_and_residual(8))
        )
    ]
    assert len({source.key for source in sources}) == len(sources)
