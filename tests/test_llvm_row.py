"""Row kernels of the LLVM backend: every kind of expression, odd sizes, several vector widths.

The rule of `runtime.testing` holds throughout: at most twice the typed interpreter's error against
f64, plus a floor of a few units in the last place.
"""

import numpy as np
import pytest

from backends.llvm.kernels import lower_node
from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.op import REGISTRY
from euler_ir.passes.extract import fused_node
from euler_ir.passes.pipeline import optimize
from euler_ir.types import BF16, BOOL, F16, F32, F64, I32, I64, U32
from runtime.compiler.driver import link_function
from runtime.testing import check_close
from tests import llvm_runner
from tests.llvm_backends import apply, backend, run_with_threads, sample

SIZES = [1, 2, 3, 7, 17, 33, 65, 257]
#: The targets of `llvm_runner` that differ on this machine.
WIDTHS = [name for name, target in llvm_runner.TARGETS.items()
          if name == "host" or target != llvm_runner.HOST]


def check(function, inputs, target="host", fuse=False):
    """Against the interpreter, as typed and in f64; the same to the bit for any thread count."""
    typed = interpreter.run(function, inputs)
    exact = interpreter.run(function, inputs, precise=True)
    found = run_with_threads(optimize(function) if fuse else function, inputs, target)
    for name, value in zip(function.output_names, function.outputs, strict=True):
        check_close(f"{name} on {target}", found[name], typed[name], exact[name], value.type)
    return found


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def make(name, *attributes):
    return REGISTRY[name](*attributes)


def row_ops(rows, columns, dtype=F32):
    """Every row op and its gradient over [rows, columns]."""
    padded = columns - columns // 4
    with Builder("rows") as b:
        x, g = (b.input(name, dtype, (rows, columns)) for name in "xg")
        w, bias = (b.input(name, dtype, (columns,)) for name in ("w", "bias"))
        target = b.input("target", I32, (rows, 1))
        grad_loss = b.input("grad_loss", dtype, (rows, 1))
        soft = b.softmax(x)
        loss, log_sum = b.apply(ops.CrossEntropy(padded), x, target)
        outputs = {"softmax": soft, "softmax_backward": b.apply(make("softmax_backward"), soft, g),
                   "rms_norm": b.rms_norm(x, w, 1e-5), "loss": loss, "log_sum": log_sum,
                   "layer_norm": b.layer_norm(x, w, bias, 1e-5),
                   "cross_entropy_backward": b.apply(make("cross_entropy_backward", padded), x,
                                                     target, log_sum, grad_loss)}
        for name, values in [
                ("rms", b.apply(make("rms_norm_backward", 1e-5), x, w, g)),
                ("layer", b.apply(make("layer_norm_backward", 1e-5), x, w, g))]:
            outputs |= {f"{name}_backward{i}": value for i, value in enumerate(values)}
        if columns % 2 == 0:
            outputs["rotary"] = b.rotary(x, w, bias)
        function = b.function(outputs)
    inputs = sample(function, columns)
    inputs["target"] = np.random.default_rng(columns).integers(
        -1, padded, (rows, 1)).astype(np.int32)
    return function, inputs


@pytest.mark.parametrize("columns", [*SIZES, 32])
def test_row_ops(columns):
    check(*row_ops(5, columns))


@pytest.mark.parametrize("target", WIDTHS[1:])
@pytest.mark.parametrize("columns", [3, 66])
def test_row_ops_on_other_vectors(target, columns):
    check(*row_ops(3, columns), target=target)


def test_row_ops_in_f64():
    check(*row_ops(3, 65, F64))


def test_row_ops_over_many_tiles():
    """Hundreds of rows: several tiles, and several blocks of partial column sums."""
    check(*row_ops(700, 257))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_row_ops_on_16_bits(dtype):
    check(*row_ops(6, 33, dtype))


@pytest.mark.parametrize("fuse", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("target", WIDTHS)
def test_chains_of_pointwise_ops(target, fuse):
    def build(b, x, y, z, i, u, flag):
        a = b.gelu(x) * b.sigmoid(y) - b.tanh(z)
        c = b.select(b.logical_and(flag, b.less(x, y)), a, b.maximum(x, b.minimum(y, z)))
        mixed = b.cast(i, F32) + b.cast(u, F32) + b.cast(flag, F32)
        return [c, b.erf(c) / (1.0 + b.abs(z)), b.log(b.exp(x) + 1.0), b.cast(x * 10.0, I32),
                b.is_finite(x / (x - x)), mixed, b.logical_not(flag), b.sign(x), b.cast(i, I64),
                b.cast(b.abs(x) * 1e5, U32)]

    types = [(F32, (3, 67))] * 3 + [(I32, (3, 67)), (U32, (3, 67)), (BOOL, (3, 67))]
    f = apply(build, *types)
    check(f, sample(f, 1), target, fuse)


@pytest.mark.parametrize("columns", [1, 7, 33, 257])
def test_large_pointwise_kernels_are_cut_into_tiles(columns):
    """[999, C] is flattened to one row and cut; with a broadcast operand it cannot be."""
    f = apply(lambda b, x, y, w, r: [x * y + 1.0, x * w, x + r], (F32, (999, columns)),
              (F32, (999, columns)), (F32, (columns,)), (F32, (999, 1)))
    for fuse in (False, True):
        check(f, sample(f, 0), fuse=fuse)


def test_operands_of_every_broadcast_shape():
    shapes = [(4, 5, 3, 18), (18,), (5, 1, 18), (4, 1, 1, 1), (4, 1, 3, 18), (1, 5, 3, 1), ()]

    def build(b, x, *others):
        return sum((x * other for other in others), x)

    f = apply(build, *((F32, shape) for shape in shapes))
    for fuse in (False, True):
        check(f, sample(f, 3), fuse=fuse)


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("width", [2, 6, 16, 32, 34, 64])
def test_rotary_turns_rows_with_position_tables(width, target):
    f = apply(lambda b, x, cos, sin: [b.rotary(x, cos, sin),
                                      b.apply(ops.Rotary(True), x, cos, sin)],
              (F32, (2, 5, 3, width)), (F32, (5, 1, width)), (F32, (5, 1, width)))
    check(f, sample(f, 4), target)


def test_slices_are_read_and_concatenations_written_in_place():
    def build(b, x, g):
        gate, up = b.part(x, -1, 0, 33), b.part(x, -1, 33, 66)
        y = b.silu(gate) * up
        return [y, b.concat([y * g, y - g], 2), b.softmax(b.part(x, 1, 1, 3)),
                b.part(x, 2, 1, 5)]

    f = apply(build, (F32, (3, 4, 66)), (F32, (3, 4, 33)))
    alone = [node for node in optimize(f).nodes if node.op.name in ("slice", "concat")]
    assert [node.output.shape for node in alone] == [(3, 4, 4)]  # a result, not an operand
    check(f, sample(f, 5), fuse=True)


def test_a_norm_with_its_residual_is_one_kernel():
    """The sum is a result and the norm's operand: it is kept, not read back or computed twice."""
    f = apply(lambda b, x, r, w: [s := x + r * 0.5, b.rms_norm(s, w, 1e-5), b.exp(s)],
              (F32, (9, 65)), (F32, (9, 65)), (F32, (65,)))
    fused = optimize(f)
    assert len(fused.nodes) == 1
    (kernel,) = backend().lower(fused)
    assert kernel.code.scratch_bytes > 0
    check(f, sample(f, 6), fuse=True)


def test_a_chain_of_a_thousand_ops_is_one_kernel():
    def build(b, x, y):
        for _ in range(500):
            x = x * y + 1.0
        return x

    f = apply(build, (F32, (2, 19)), (F32, (2, 19)))
    assert len(optimize(f).nodes) == 1
    inputs = {"x0": normal(2, 19), "x1": 0.1 * normal(2, 19, seed=1)}
    check(f, inputs, fuse=True)


def test_random_bits_do_not_depend_on_how_they_are_computed():
    f = apply(lambda b, k0, k1, c: [b.random_bits(k0, k1, c, (7, 4099)),
                                    b.uniform(b.random_bits(k0, c, k1, (33,)))],
              (U32, ()), (U32, ()), (U32, ()))
    inputs = {f"x{i}": np.array(2**31 + 77 * i, np.uint32) for i in range(3)}
    for target in ("host", "wide"):
        check(f, inputs, target)


@pytest.mark.parametrize("target", WIDTHS)
def test_nan_in_any_lane_spoils_its_row_only(target):
    """Row i has NaN in place i; the last row has none."""
    x = np.vstack([np.where(np.arange(67) == i, np.nan, normal(67)) for i in range(67)]
                  + [normal(67)]).astype(np.float32)
    f = apply(lambda b, x: [b.softmax(x), b.reduce_max(x, (1,)), b.argmax(x), b.relu(x),
                            b.reduce_sum(x, (1,)), b.is_finite(x)], (F32, x.shape))
    y = run_with_threads(f, {"x0": x}, target)
    bad = np.arange(68) < 67
    assert np.array_equal(np.isnan(y["y0"]), np.broadcast_to(bad[:, None], x.shape))
    assert np.array_equal(np.isnan(y["y1"]), bad) and np.array_equal(np.isnan(y["y4"]), bad)
    assert np.array_equal(y["y2"][:67], np.arange(67))
    assert np.array_equal(np.isnan(y["y3"]), np.isnan(x))
    assert np.array_equal(y["y5"], ~np.isnan(x))


def test_finiteness_survives_contraction():
    """x - x of a product x must not become the product's rounding error."""
    f = apply(lambda b, x, y: b.is_finite(x * y), (F32, (257,)), (F32, (257,)))
    inputs = {"x0": normal(257), "x1": normal(257, seed=1)}
    assert link_function(optimize(f), backend()).run(inputs)["y0"].all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_floats_are_rounded_to_nearest_even(dtype):
    """Every f32 that lies on, or beside, a 16-bit number or the middle between two."""
    narrow = np.arange(2**16, dtype=np.uint16).view(dtype.numpy)
    with np.errstate(all="ignore"):
        values = narrow.astype(np.float32)
        middles = (values + np.nextafter(narrow, narrow.dtype.type(np.inf)).astype(np.float32)) / 2
        x = np.concatenate([f(v) for v in (values, middles)
                            for f in (lambda v: v, lambda v: np.nextafter(v, np.float32(-np.inf)),
                                      lambda v: np.nextafter(v, np.float32(np.inf)))])
        right = x.astype(dtype.numpy)
    f = apply(lambda b, x: [b.cast(x, dtype), b.cast(b.cast(x, dtype), F32)], (F32, x.shape))
    y = run_with_threads(f, {"x0": x})
    nan = np.isnan(right.astype(np.float32))
    assert np.array_equal(np.isnan(y["y0"].astype(np.float32)), nan)
    assert np.array_equal(y["y0"].view(np.uint16)[~nan], right.view(np.uint16)[~nan])
    np.testing.assert_array_equal(y["y1"], right.astype(np.float32))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (2, 0, 3)], ids=str)
def test_empty_tensors(shape):
    def build(b, x, w):
        y, z = b.rms_norm(x, w, 1e-5), x * 2.0
        return [y, z, b.apply(make("rms_norm_backward", 1e-5), x, w, x)[1],
                b.reduce_sum(x, (len(shape) - 1,)), b.sum(x)]

    f = apply(build, (F32, shape), (F32, shape[-1:]))
    inputs = {"x0": np.ones(shape, np.float32), "x1": np.ones(shape[-1:], np.float32)}
    expected = interpreter.run(f, inputs)
    for name, array in run_with_threads(f, inputs).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def in_place_cases():
    f32 = (F32, (5, 67))
    yield "pointwise", lambda b, x, y: [x * y, b.exp(x - y)], [f32, f32]
    yield "softmax", lambda b, x: b.softmax(x), [f32]
    yield "norm", lambda b, x, r, w: [x + r, b.rms_norm(x + r, w, 1e-5)], [f32, f32, (F32, (67,))]
    yield "rows", lambda b, x, r: [x * r, r * 2.0], [f32, (F32, (5, 1))]
    yield "rotary", lambda b, x, c: b.rotary(x, c, c), [(F32, (5, 66)), (F32, (66,))]
    yield "twice", lambda b, x: [x * x + 1.0], [f32]


@pytest.mark.parametrize("case", list(in_place_cases()), ids=lambda case: case[0])
def test_results_may_overwrite_the_operands_they_name(case):
    _, build, types = case
    f = apply(build, *types)
    node = fused_node("row", f.nodes, f.outputs)
    source = lower_node(node, llvm_runner.HOST)
    arrays = [normal(*shape, seed=i) for i, (_, shape) in enumerate(types)]
    order = [f.inputs.index(value) for value in node.inputs]
    given = [arrays[i] for i in order]

    def run(pair=None):
        inputs = [array.copy() for array in given]
        results = [np.full(value.shape, np.nan, np.float32) for value in node.outputs]
        if pair:
            results[pair[0]] = inputs[pair[1]]
        llvm_runner.run(source, [*inputs, *results])
        return results

    apart = run()
    for pair in source.inplace:
        for one, other in zip(run(pair), apart, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(pair))
    # A turned row is read after its own place was written.
    assert bool(source.inplace) == (case[0] != "rotary")


def test_kernels_of_equal_structure_are_one():
    with Builder("twice") as b:
        x, w = b.input("x", F32, (4, 9)), b.input("w", F32, (9,))
        for _ in range(3):
            x = b.rms_norm(x + 1.0, w, 1e-5)
        f = optimize(b.function({"y": x}))
    assert len({kernel.code.key for kernel in backend().lower(f)}) == 1
