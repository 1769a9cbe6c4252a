"""Attention's key ranges through every runner: empty ones, junk behind the mask, a KV cache."""

import math

import numpy as np
import pytest

from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder
from euler_ir.types import BF16, F32, I32
from tests.runners import every_runner

NAN, INF = math.nan, math.inf


def attention_function(batch=1, queries=3, keys=6, heads=2, groups=1, width=4, dtype=F32):
    with Builder("attention") as b:
        q = b.input("q", dtype, (batch, queries, heads, width))
        k = b.input("k", dtype, (batch, keys, groups, width))
        v = b.input("v", dtype, (batch, keys, groups, width))
        lo, hi = b.input("lo", I32, (batch, queries)), b.input("hi", I32, (batch, queries))
        function = b.function({"o": b.attention(q, k, v, lo, hi)})
    return value_and_grad(function, ["q", "k", "v"], seed=True)


def attention_inputs(function, lo, hi, seed=0):
    rng = np.random.default_rng(seed)
    inputs = {value.name: rng.standard_normal(value.shape) for value in function.inputs}
    return {**inputs, "lo": np.array(lo, np.int32), "hi": np.array(hi, np.int32)}


@every_runner
def test_a_query_without_keys_gives_zero_and_no_gradient(run):
    function = attention_function()
    inputs = attention_inputs(function, [[2, 0, 3]], [[2, 3, 1]])
    result = run(function, inputs)
    for row in (0, 2):
        assert not result["o"][0, row].any() and not result["grad.q"][0, row].any()
    assert result["o"][0, 1].all() and result["grad.q"][0, 1].any()
    alone = run(function, {**inputs, "seed": inputs["seed"] * [[[[0.0]], [[1.0]], [[0.0]]]]})
    for name in ("grad.q", "grad.k", "grad.v"):
        np.testing.assert_array_equal(result[name], alone[name])


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("junk", [1e30, -1e30, NAN, INF])
def test_junk_behind_the_mask_changes_nothing(run, junk, dtype):
    function = attention_function(batch=2, dtype=dtype)
    lo, hi = [[1, 1, 2], [0, 0, 0]], [[2, 3, 4], [1, 2, 3]]
    inputs = attention_inputs(function, lo, hi)
    dirty = {name: array.copy() for name, array in inputs.items()}
    for name in ("k", "v"):
        dirty[name][0, [0, 4, 5]] = junk
        dirty[name][1, 3:] = junk
    clean, found = run(function, inputs), run(function, dirty)
    for name in clean:
        np.testing.assert_array_equal(found[name], clean[name])
    assert not found["grad.k"][0, [0, 4, 5]].any() and not found["grad.v"][1, 3:].any()


@every_runner
def test_junk_that_one_query_sees_stays_out_of_the_others(run):
    """Finite junk at a key that a later query attends to: earlier queries are masked from it."""
    function = attention_function()
    inputs = attention_inputs(function, [[0, 0, 0]], [[2, 3, 6]])
    dirty = {**inputs, "v": inputs["v"].copy()}
    dirty["v"][0, 5] = 1e30
    np.testing.assert_array_equal(run(function, dirty)["o"][0, :2],
                                  run(function, inputs)["o"][0, :2])


@every_runner
def test_nan_that_is_seen_shows(run):
    function = attention_function()
    inputs = attention_inputs(function, [[0, 0, 3]], [[1, 3, 6]])
    inputs["k"][0, 1] = NAN
    o = run(function, inputs)["o"]
    assert np.isnan(o[0, 1]).all() and np.isfinite(o[0, [0, 2]]).all()


@every_runner
def test_large_scores(run):
    function = attention_function()
    inputs = attention_inputs(function, [[0, 0, 0]], [[6, 6, 6]])
    inputs["q"] *= 1e4
    result = run(function, inputs)
    assert all(np.isfinite(array).all() for array in result.values())
    scores = np.einsum("qhd,kd->qhk", inputs["q"][0], inputs["k"][0, :, 0])
    np.testing.assert_allclose(result["o"][0], inputs["v"][0, scores.argmax(-1), 0], rtol=1e-5)


@every_runner
@pytest.mark.parametrize("chunks", [[1] * 20, [7, 1, 12], [1, 19], [20]], ids=str)
@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 3), (4, 1)])
def test_cached_attention_is_full_attention(run, chunks, heads, groups):
    """Through a cache of 32 slots, NaN where unwritten, with a dense reference in numpy."""
    total, slots, width = 20, 32, 4
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, total, heads, width))
    k, v = rng.standard_normal((2, 1, total, groups, width))
    expected = causal_attention(q[0], k[0].repeat(heads // groups, 1),
                                v[0].repeat(heads // groups, 1))
    cache = {name: np.full((1, slots, groups, width), NAN, np.float32) for name in ("k", "v")}
    start, outputs = 0, []
    for size in chunks:
        stop = start + size
        with Builder("chunk") as b:
            query = b.input("q", F32, (1, size, heads, width))
            at = b.input("position", I32, ())
            written = {}
            for name in ("k", "v"):
                buffer = b.input(f"cache.{name}", F32, (1, slots, groups, width))
                new = b.input(name, F32, (1, size, groups, width))
                written[name] = b.update_slice(buffer, new, at, axis=1)
            steps = b.broadcast(b.reshape(b.iota(size), (1, size)), (1, size))
            hi = steps + b.reshape(at, (1, 1)) + 1
            lo = b.full(0, I32, (1, size))
            o = b.attention(query, written["k"], written["v"], lo, hi)
            function = b.function({"o": o, **written}, {"cache.k": "k", "cache.v": "v"})
        result = run(function, {
            "q": q[:, start:stop], "k": k[:, start:stop], "v": v[:, start:stop],
            "position": np.array(start), "cache.k": cache["k"], "cache.v": cache["v"]})
        cache = {name: result[name] for name in ("k", "v")}
        outputs.append(result["o"][0])
        start = stop
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-5)


def causal_attention(q, k, v):
    """q, k, v [T, H, D] → [T, H, D] in f64, one query at a time."""
    result = np.zeros_like(q)
    for t in range(len(q)):
        for head in range(q.shape[1]):
            scores = k[:t + 1, head] @ q[t, head] / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            result[t, head] = weights / weights.sum() @ v[:t + 1, head]
    return result
