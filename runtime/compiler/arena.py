"""Offsets in one arena for blocks whose lifetimes are known.

Finding the least arena is NP-hard (it is dynamic storage allocation: Garey & Johnson, problem SR2),
but a training step is easy: what the forward pass keeps dies in reverse order. A greedy placement
in a good order comes close to the lower bound, so a few orders are tried and the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from euler_ir.plan import ALIGNMENT


def pack(sizes: Sequence[int], firsts: Sequence[int],
         lasts: Sequence[int]) -> tuple[list[int], int, int]:
    """Offsets, bytes used, and the lower bound, for blocks alive from `first` to `last` inclusive.

    Sizes are in bytes and are rounded up to ALIGNMENT, as offsets are. The lower bound is the
    largest sum of rounded sizes alive at one step."""
    size = -(-np.asarray(sizes, np.int64) // ALIGNMENT) * ALIGNMENT
    first, last = np.asarray(firsts, np.int64), np.asarray(lasts, np.int64)
    live = live_bytes(size, first, last)
    bound = int(live.max(initial=0))
    best, peak = np.zeros(len(size), np.int64), int(size.sum())
    for order in _orders(size, first, last, live):
        offsets = _best_fit(order, size, first, last)
        used = int((offsets + size).max(initial=0))
        if used <= peak:
            best, peak = offsets, used
        if peak == bound:
            break
    return best.tolist(), peak, bound


def live_bytes(size: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Bytes alive at each step."""
    change = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
    np.add.at(change, first, size)
    np.add.at(change, last + 1, -size)
    return np.cumsum(change)


def _orders(size, first, last, live) -> Iterator[np.ndarray]:
    """Orders to place the blocks in. Late ones see only the gaps that are left, so what is hard to
    fit goes first: what is large, long-lived, or alive when the most is."""
    life = last - first + 1
    yield np.lexsort((first, -life, -size))
    yield np.lexsort((first, -size, -size * life))
    # The heaviest moment of each block's life, by size within the same moment.
    heaviest = np.array([live[a:b + 1].max() for a, b in zip(first, last, strict=True)])
    yield np.lexsort((first, -size, -heaviest))
    yield np.lexsort((-size, first))


def _best_fit(order: np.ndarray, size: np.ndarray, first: np.ndarray,
              last: np.ndarray) -> np.ndarray:
    """Place blocks one by one in the smallest gap that holds them, the lowest of equal ones, or on
    top of all that live at the same time."""
    offset = np.zeros(len(size), np.int64)
    # Placed blocks, sorted by offset: starts, ends, and lifetimes.
    placed = np.zeros((4, len(size)), np.int64)
    for count, block in enumerate(order):
        starts, ends, firsts, lasts = placed[:, :count]
        neighbours = (firsts <= last[block]) & (lasts >= first[block])
        tops = np.maximum.accumulate(np.concatenate(([0], ends[neighbours])))
        gaps = starts[neighbours] - tops[:-1]
        fitting = np.flatnonzero(gaps >= size[block])
        where = fitting[gaps[fitting].argmin()] if len(fitting) else -1
        offset[block] = start = tops[where]
        at = starts.searchsorted(start)
        placed[:, at + 1:count + 1] = placed[:, at:count].copy()
        placed[:, at] = start, start + size[block], first[block], last[block]
    return offset
