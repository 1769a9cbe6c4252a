"""From logits to the next token: temperature, top-k, top-p, and a random state that can be named.

The order is fixed: logits are divided by the temperature, the `top_k` likeliest tokens are kept,
then of these the likeliest whose probabilities reach `top_p`; among what is left one is drawn.
Tokens of equal logits rank by id, the lowest first, so no cut depends on a sort's whim.

Draw number n depends on (seed, n) alone (Philox, a counter-based generator: Salmon et al. 2011),
hence two numbers are the whole random state, and a text can be made again from any point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from euler_ir.errors import EulerError

#: How far below `top_p` a sum of probabilities may fall and count as having reached it: what
#: rounding f32 logits of ordinary size does to a probability.
_ROUNDING = 1e-6


class Sampler:
    """Chooses tokens one by one.

    `temperature` 0 takes the likeliest token (the lowest id of equal ones) and draws nothing.
    `top_k` 0 keeps all tokens, as does any number from the vocabulary's size up. `top_p` keeps the
    fewest likeliest tokens whose probabilities add up to at least `top_p` (up to a rounding of
    1e-6), and never less than one token; 1 keeps all. With probabilities .5 .3 .1 .1 that are 2
    tokens for .79 and .80, and 3 for .81.

    `ids` (ascending) are those that stand for a token; all by default. Others are left out: rows
    that pad a model's table to a round size, gaps in a vocabulary. `draws` counts the random
    numbers used so far; a sampler of the same seed and draws goes on in the same way.

    Raises EulerError for settings out of range."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 seed: int = 0, ids: Sequence[int] | None = None, draws: int = 0) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise EulerError("temperature must be a finite number, 0 (the likeliest token) or "
                             f"more, got {temperature}")
        if top_k < 0:
            raise EulerError(f"top-k must be 0 (no limit) or more, got {top_k}")
        if not 0 <= top_p <= 1:
            raise EulerError(f"top-p must be between 0 and 1, got {top_p}")
        if not 0 <= seed < 1 << 64:
            raise EulerError(f"seed must be a number from 0 to 2**64 - 1, got {seed}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.seed, self.draws = seed, draws
        self._ids = None if ids is None else np.asarray(ids, np.int64)

    def sample(self, logits: np.ndarray) -> int:
        """The id of the next token, given its logits [V].

        Raises EulerError when they hold NaN or +inf, or rule out every token (all -inf)."""
        ids, probabilities = self.distribution(logits)
        if len(ids) == 1:
            return int(ids[0])
        # A zero probability is never drawn: its sum does not exceed that of the token before.
        sums = np.cumsum(probabilities)
        return int(ids[np.searchsorted(sums, self._uniform() * sums[-1], side="right")])

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids that remain after all cuts, likeliest first where there was a cut, and their
        probabilities (f64, sum 1)."""
        ids = np.arange(logits.size) if self._ids is None else self._ids
        scores = logits.reshape(-1)[ids].astype(np.float64)
        largest = scores.max(initial=-np.inf)
        if not np.isfinite(largest):
            raise _unusable(largest)
        if self.temperature == 0 or self.top_k == 1:
            return ids[[np.argmax(scores)]], np.ones(1)
        # Differences first: they cannot overflow upwards, however small the temperature is.
        with np.errstate(over="ignore"):
            scores = (scores - largest) / self.temperature
        if 0 < self.top_k < len(ids):
            ids, scores = _likeliest(ids, scores, self.top_k)
        probabilities = np.exp(scores)
        probabilities /= probabilities.sum()
        if self.top_p < 1:
            ids, probabilities = _nucleus(ids, probabilities, self.top_p)
        return ids, probabilities

    def _uniform(self) -> float:
        """The next random number, in [0, 1) with 53 bits."""
        generator = np.random.Philox(key=np.uint64(self.seed), counter=self.draws)
        self.draws += 1
        return (int(generator.random_raw()) >> 11) * 2.0**-53


def _likeliest(ids: np.ndarray, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` highest scores in order, of equal ones the lowest ids, and their ids."""
    bar = np.partition(scores, -count)[-count]
    kept = np.flatnonzero(scores >= bar)
    kept = kept[np.argsort(-scores[kept], kind="stable")][:count]
    return ids[kept], scores[kept]


def _nucleus(ids: np.ndarray, probabilities: np.ndarray,
             share: float) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest ids that together reach `share` (Holtzman et al. 2020, arXiv:1904.09751)."""
    order = np.argsort(-probabilities, kind="stable")
    ids, probabilities = ids[order], probabilities[order]
    missing = np.cumsum(probabilities) < share - _ROUNDING
    count = min(1 + np.count_nonzero(missing), len(ids))
    kept = probabilities[:count]
    return ids[:count], kept / kept.sum()


def _unusable(largest: float) -> EulerError:
    if np.isnan(largest):
        return EulerError("the model's logits hold NaN: its weights are broken (a training run "
                          "that diverged?); use an earlier checkpoint")
    if largest > 0:
        return EulerError("the model's logits hold infinity: its weights have grown out of the "
                          "range of their type; use an earlier checkpoint")
    return EulerError("the model's logits rule out every token: all are -inf")
