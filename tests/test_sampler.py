"""Sampling: the cuts, their borders, and the random state."""

import itertools

import numpy as np
import pytest

from euler_ir.errors import EulerError
from runtime.inference.sampler import Sampler

VOCABULARY = 4096
LOGITS = np.random.default_rng(1).normal(0, 3, VOCABULARY).astype(np.float32)
SPLIT = np.log(np.array([0.1, 0.5, 0.1, 0.3]))  # ids by falling probability: 1, 3, 0, 2


def kept(logits, **options):
    return Sampler(**options).distribution(np.asarray(logits))[0].tolist()


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-8},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {"temperature": 1e-6}, {"temperature": 5e-324},
])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_these_settings_take_the_likeliest_token(options, dtype):
    sampler = Sampler(**options)
    assert {sampler.sample(LOGITS.astype(dtype)) for _ in range(5)} == {int(LOGITS.argmax())}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0},
                                     {"top_p": 1e-8, "top_k": 3}])
def test_of_equal_logits_the_lowest_id_is_the_likeliest(options):
    assert kept(np.zeros(50), **options) == [0]
    assert kept([-1.0, 2.0, 2.0, 2.0], **options) == [1]


@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": VOCABULARY}, {"top_k": 10**6},
                                     {"top_p": 1.0}])
def test_settings_that_cut_nothing_give_the_softmax(options):
    ids, probabilities = Sampler(0.7, **options).distribution(LOGITS)
    expected = np.exp(LOGITS.astype(np.float64) / 0.7)
    np.testing.assert_array_equal(ids, np.arange(VOCABULARY))
    np.testing.assert_allclose(probabilities, expected / expected.sum(), rtol=1e-12)


@pytest.mark.parametrize(("top_p", "ids"), [
    (0.3, [1]), (0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.80, [1, 3]), (0.81, [1, 3, 0]),
    (0.90, [1, 3, 0]), (0.95, [1, 3, 0, 2]),
])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, ids, dtype):
    # .5 + .3 rounds to just below or above .8, by type; the stated rule is the same for both.
    assert kept(SPLIT.astype(dtype), top_p=top_p) == ids


def test_top_k_keeps_the_lowest_ids_of_equal_logits():
    assert kept([0.0, 1.0, 0.0, 0.0, 1.0], top_k=3) == [1, 4, 0]


def test_top_p_acts_on_what_top_k_has_left():
    # .5 and .3 become .625 and .375: the first alone reaches .6, which it did not before.
    assert kept(SPLIT, top_k=2, top_p=0.6) == [1]
    assert kept(SPLIT, top_p=0.6) == [1, 3]


def test_cut_probabilities_are_those_of_the_rest():
    ids, probabilities = Sampler(top_p=0.85).distribution(SPLIT)
    assert ids.tolist() == [1, 3, 0]
    np.testing.assert_allclose(probabilities, np.array([5, 3, 1]) / 9)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), list(itertools.product(
    [0.0, 1e-6, 1.0, 1e30], [0, 1, 4096, 10**6], [0.0, 1e-8, 1.0])))
def test_no_combination_gives_nan_or_a_token_that_is_ruled_out(temperature, top_k, top_p):
    logits = np.concatenate([[-np.inf, 2.0, 2.0], LOGITS[:VOCABULARY - 3].clip(-9, 2)])
    sampler = Sampler(temperature, top_k, top_p)
    ids, probabilities = sampler.distribution(logits)
    assert np.isfinite(probabilities).all() and probabilities.sum() == pytest.approx(1)
    assert all(sampler.sample(logits) != 0 for _ in range(20))
    if temperature == 0 or top_k == 1 or top_p < 1:
        assert sampler.sample(logits) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1.0}, "temperature must be a finite number, 0 .* got -1.0"),
    ({"temperature": float("nan")}, "temperature .* got nan"),
    ({"temperature": float("inf")}, "temperature .* got inf"),
    ({"top_k": -1}, "top-k must be 0 .* got -1"),
    ({"top_p": -0.1}, "top-p must be between 0 and 1, got -0.1"),
    ({"top_p": 1.0001}, "top-p .* got 1.0001"),
    ({"top_p": float("nan")}, "top-p .* got nan"),
])
def test_settings_out_of_range_are_refused_at_once(options, message):
    with pytest.raises(EulerError, match=message):
        Sampler(**options)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(EulerError, match="seed must be a number from 0"):
        Sampler(seed=seed)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize(("logits", "message"), [
    ([0.0, np.nan, 1.0], "hold NaN"),
    ([0.0, np.inf, 1.0], "hold infinity"),
    ([-np.inf, -np.inf], "rule out every token"),
])
def test_logits_that_give_no_distribution_are_an_error(options, logits, message):
    with pytest.raises(EulerError, match=message):
        Sampler(**options).sample(np.array(logits))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.99}])
def test_ids_that_are_no_tokens_are_never_sampled(options):
    logits = np.array([0.0, 50.0, 0.1, 0.2, np.nan, 50.0])  # 1, 4 and 5 stand for nothing
    sampler = Sampler(**options, ids=[0, 2, 3])
    assert {sampler.sample(logits) for _ in range(100)} <= {0, 2, 3}


def test_frequencies_are_the_probabilities():
    """Each of 4 counts lies within 5 standard deviations: a false alarm in 10^6 seeds."""
    sampler, n = Sampler(seed=7), 4000
    counts = np.bincount([sampler.sample(SPLIT) for _ in range(n)], minlength=4)
    p = np.exp(SPLIT)
    assert (np.abs(counts - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()


def test_a_draw_depends_on_the_seed_and_its_number_alone():
    sampler = Sampler(seed=3)
    text = [sampler.sample(LOGITS) for _ in range(12)]
    assert [Sampler(seed=3, draws=n).sample(LOGITS) for n in range(12)] == text
    assert sampler.draws == 12
    other = Sampler(seed=4)
    assert [other.sample(LOGITS) for _ in range(12)] != text
