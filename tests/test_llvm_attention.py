"""The LLVM backend's attention kernels against the interpreter in f64, compiled and run alone."""

import math
from functools import cache

import numpy as np
import pytest
from llvmlite import ir

from backends.llvm.attention import attention_kernel
from backends.llvm.attention_backward import backward_kernel
from backends.llvm.attention_blocks import Sizes
from backends.llvm.target import Target
from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.types import BF16, F16, F32, F64, I32
from runtime.testing import check_close
from tests.llvm_runner import HOST, OTHER_TARGETS, TARGETS, fenced, generator, run

# batch, queries, keys, heads, groups, width: sizes of models, and edges of every kind of block.
TRAINING = [
    (2, 128, 128, 4, 2, 32),
    (1, 256, 256, 5, 5, 64),
    (6, 50, 50, 2, 1, 16),
    (6, 17, 33, 3, 1, 72),
    (6, 3, 33, 4, 2, 20),
    (6, 40, 300, 6, 2, 3),
    (1, 5, 5, 1, 1, 1),
    (2, 7, 2, 2, 2, 5),
]
DECODING = [
    (6, 1, 33, 2, 1, 8),
    (6, 1, 300, 6, 2, 64),
    (2, 1, 64, 5, 1, 72),
    (6, 2, 29, 3, 3, 20),
    (1, 1, 1, 1, 1, 1),
]
NAN, INF = math.nan, math.inf


def ranges(batch: int, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """lo and hi with another kind of mask in each row of the batch: causal behind a cache, all,
    left padding, documents, a sliding window, and anything."""
    rng = np.random.default_rng(queries)
    position = np.arange(queries) + max(keys - queries, 0)
    causal, zero = position + 1, np.zeros(queries, int)
    document = np.maximum.accumulate(np.where(rng.random(queries) < 0.1, position, 0))
    kinds = [
        (zero, causal),
        (zero, zero + keys),
        (zero + 4, causal),
        (document, causal),
        (position - 7, causal),
        (rng.integers(-3, keys + 1, queries), rng.integers(-1, keys + 4, queries)),
    ]
    lo, hi = np.array([kinds[b % len(kinds)] for b in range(batch)]).swapaxes(0, 1)
    return lo.astype(np.int32), hi.astype(np.int32)


@cache
def function(shape: tuple[int, ...], dtype) -> Function:
    """o, log_sum and the gradients of q, k and v for a gradient do of o."""
    batch, queries, keys, heads, groups, width = shape
    with Builder("attention") as b:
        q = b.input("q", dtype, (batch, queries, heads, width))
        k, v = (b.input(name, dtype, (batch, keys, groups, width)) for name in "kv")
        lo, hi = (b.input(name, I32, (batch, queries)) for name in ("lo", "hi"))
        do = b.input("do", dtype, q.shape)
        scale = 1 / math.sqrt(width)
        o, log_sum = b.apply(ops.Attention(scale), q, k, v, lo, hi)
        backward = ops.AttentionBackward(scale)
        dq, dk, dv = b.apply(backward, q, k, v, lo, hi, o, log_sum, do)
        return b.function({"o": o, "log_sum": log_sum, "dq": dq, "dk": dk, "dv": dv})


def inputs(shape: tuple[int, ...], dtype=F32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lo, hi = ranges(*shape[:3])
    arrays = {value.name: rng.standard_normal(value.shape).astype(value.dtype.numpy)
              for value in function(shape, dtype).inputs if value.dtype is dtype}
    return {**arrays, "lo": lo, "hi": hi}


def compiled(shape, given, dtype=F32, target=HOST, threads=1, backward=True):
    """The kernels' results by name. Every operand lies between NaN, and so does every result,
    which must leave its surroundings as they were."""
    sizes = Sizes(dtype, *shape, 1 / math.sqrt(shape[-1]))
    results = {value.name: fenced(np.full(value.shape, NAN, value.dtype.numpy))
               for value in function(shape, dtype).outputs}
    names = dict(zip(function(shape, dtype).output_names, results.values(), strict=True))
    operands = {name: fenced(array)[0] for name, array in given.items()
                if name not in ("lo", "hi")} | {name: given[name] for name in ("lo", "hi")}
    arrays = operands | {name: inner for name, (inner, _) in names.items()}
    launch = [(attention_kernel(sizes, target), "q k v lo hi o log_sum")]
    if backward:
        launch += [(backward_kernel(sizes, target), "q k v lo hi o log_sum do dq dk dv")]
    for source, args in launch:
        run(source, [arrays[name] for name in args.split()], target, threads)
    for name, (inner, fence) in names.items():
        assert np.isnan(np.delete(fence, np.arange(41, 41 + inner.size))).all(), name
    return {name: inner for name, (inner, _) in names.items()}


def check(shape, dtype=F32, target=HOST):
    """Every result against f64, by the rule of `check_close`; f64 itself to 1e-12."""
    given = inputs(shape, dtype)
    exact = interpreter.run(function(shape, dtype), given, precise=True)
    typed = interpreter.run(function(shape, dtype), given)
    found = compiled(shape, given, dtype, target)
    f = function(shape, dtype)
    for name, value in zip(f.output_names, f.outputs, strict=True):
        if dtype is F64:
            np.testing.assert_allclose(found[name], exact[name], rtol=0, atol=1e-12, err_msg=name)
        else:
            check_close(name, found[name], typed[name], exact[name], value.type)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", TRAINING + DECODING, ids=str)
def test_against_f64(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(6, 17, 33, 3, 1, 24), (6, 1, 33, 4, 2, 20)], ids=str)
def test_16_bit_tensors(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("name", OTHER_TARGETS)
@pytest.mark.parametrize("shape", [(6, 50, 70, 4, 2, 24), (6, 1, 70, 4, 2, 24)], ids=str)
def test_other_vector_widths(shape, name):
    for dtype in (F32, F64):
        check(shape, dtype, TARGETS[name])


@pytest.mark.parametrize("shape", [(2, 150, 150, 2, 1, 16), (1, 70, 300, 2, 2, 24)], ids=str)
def test_bits_do_not_depend_on_threads(shape):
    sizes = Sizes(F32, *shape, 1.0)
    assert len(backward_kernel(sizes, HOST).phases) == 2
    assert min(k(sizes, HOST).phases[0].tiles for k in (attention_kernel, backward_kernel)) >= 4
    given = inputs(shape)
    results = [compiled(shape, given, threads=threads) for threads in (1, 2, 4)]
    for name in results[0]:
        assert len({result[name].tobytes() for result in results}) == 1, name


@pytest.mark.parametrize("shape", [(6, 50, 60, 2, 1, 24), (6, 1, 60, 2, 1, 24)], ids=str)
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30, -1e30])
def test_keys_that_nobody_sees_may_hold_anything(shape, junk):
    clean = inputs(shape)
    index = np.arange(shape[2])
    seen = ((clean["lo"][..., None] <= index) & (index < clean["hi"][..., None])).any(1)
    assert not seen.all()
    dirty = clean | {name: np.where(seen[..., None, None], clean[name], np.float32(junk))
                     for name in "kv"}
    expected, found = compiled(shape, clean), compiled(shape, dirty)
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    assert not found["dk"][~seen].any() and not found["dv"][~seen].any()


def test_large_values_stay_out_of_queries_that_do_not_see_them():
    shape = (1, 50, 50, 2, 1, 24)
    clean = inputs(shape)
    dirty = clean | {name: clean[name].copy() for name in "kv"}
    for name in "kv":
        dirty[name][0, 30] = 1e30
    expected, found = compiled(shape, clean), compiled(shape, dirty)
    for name in ("o", "log_sum", "dq"):
        assert np.array_equal(found[name][0, :30], expected[name][0, :30]), name


def test_queries_without_keys_give_zero_and_no_gradient():
    shape = (1, 20, 20, 2, 1, 8)
    given = inputs(shape)
    given["hi"][0, ::3] = 0
    for name in ("q", "do"):
        given[name][0, ::3] = NAN
    found = compiled(shape, given)
    for name in ("o", "log_sum", "dq"):
        assert not found[name][0, ::3].any(), name
    assert all(np.isfinite(array).all() for array in found.values())
    given["hi"][:] = 0
    assert not any(array.any() for array in compiled(shape, given).values())


@pytest.mark.parametrize("queries", [1, 20])
def test_nan_that_is_seen_shows(queries):
    shape = (3, queries, 40, 2, 2, 8)
    given = inputs(shape)
    given["lo"][:], given["hi"][:] = 0, 40
    given["k"][0, 17, 1, 3] = given["v"][1, 39, 0, 2] = given["q"][2, -1, 1, 0] = NAN
    typed = interpreter.run(function(shape, F32), given)
    found = compiled(shape, given, backward=False)
    for name in ("o", "log_sum"):
        assert np.array_equal(np.isnan(found[name]), np.isnan(typed[name])), name
    assert np.isnan(found["o"]).any() and np.isfinite(found["o"]).any()


def test_scores_that_overflow_the_exponential():
    shape = (1, 40, 40, 2, 1, 8)
    given = inputs(shape)
    given["q"] *= 1e4
    found = compiled(shape, given)
    exact = interpreter.run(function(shape, F32), given, precise=True)
    np.testing.assert_allclose(found["o"], exact["o"], rtol=2e-3, atol=2e-3)
    assert all(np.isfinite(array).all() for array in found.values())


def test_avx512_code_keeps_its_tile_in_registers():
    features = {"avx512f": True, "avx512vl": True, "avx512bw": True, "avx512dq": True, "fma": True}
    target = Target.of("x86_64-unknown-linux-gnu", "znver4", features)
    source = backward_kernel(Sizes(F32, 1, 256, 256, 4, 2, 64, 0.125), target)
    module = ir.Module(name="kernel")
    source.emit(module, tuple(phase.name for phase in source.phases))
    assembly = generator(target).assembly(str(module))
    for name in ("score", "add_dq", "add_keys"):
        body = assembly.split(f"\ngradients_{name}:")[1].split(".Lfunc_end")[0]
        loop = body[: body.rindex("vfmadd")]
        assert body.count("vfmadd") == 28 and "zmm" in loop
        assert "(%rsp)" not in loop


@pytest.mark.parametrize("shape", [(2, 3, 0, 2, 1, 4), (2, 0, 3, 2, 1, 4)], ids=str)
def test_nothing_to_attend_to(shape):
    given = inputs(shape)
    assert not any(array.any() for array in compiled(shape, given).values())


def test_keys_tell_kernels_apart():
    shapes = [(1, 4, 4, 2, 2, 8), (1, 4, 4, 2, 1, 8), (2, 4, 4, 2, 2, 8), (1, 1, 4, 2, 2, 8)]
    sources = [kernel(Sizes(dtype, *shape, scale), HOST) for shape in shapes
               for kernel in (attention_kernel, backward_kernel)
               for dtype in (F32, F64, BF16) for scale in (0.5, 0.25)]
    assert len({source.key for source in sources}) == len(sources)
