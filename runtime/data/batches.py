"""A stream of tokens becomes batches, by rules that let a run stop anywhere and resume exactly.

- **Windows.** A window of T tokens starts at each multiple of T. What is left at the end of the
  stream gets one more window, moved back to end with the stream, in which the positions of the
  window before it carry no target. So each token but a document's first is a target exactly once
  an epoch, and no window passes the end.
- **Order.** Epoch e visits the windows in an order that depends on (seed, e) alone. Epochs follow
  one another without a seam: a batch that begins in one may end in the next, hence batches are
  always full. The state of the loader is one number, the windows that finished steps have used.
- **Ranks.** The windows of a step are dealt out micro-batch by micro-batch, rank by rank, so a step
  of the same total size uses the same windows whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np

from euler_ir.errors import EulerError, shown
from model.json_values import whole_number
from runtime.data.streams import TokenStream

_MOST_WINDOWS = 1 << 62
_CHUNK = 1 << 20  # tokens read at a time where a whole stream is walked


@dataclass(frozen=True)
class MicroBatch:
    """B windows of T tokens, all int32: `tokens` [B, T]; `targets` [B, T, K], the token k + 1 ahead
    or -1 where the document ends first; query t sees the keys j with `lo` <= j < `hi`, [B, T]."""

    tokens: np.ndarray
    targets: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a training step: its micro-batches, and what normalises the loss.

    `target_counts` [K] counts head k's targets in the whole step, over all micro-batches and ranks,
    and `inverse_counts` (float64 [K]) is 1 / count, or 0 where a head has no target at all: each
    micro-batch's loss is a sum times this, so the step's gradient is the mean over its tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    target_counts: np.ndarray

    @property
    def inverse_counts(self) -> np.ndarray:
        return inverse_counts(self.target_counts)


def inverse_counts(counts: np.ndarray) -> np.ndarray:
    """1 / counts as float64, 0 where the count is 0."""
    return np.divide(1.0, counts, out=np.zeros(counts.shape), where=counts > 0)


class Windows:
    """The windows of a stream, by number: `context` tokens each, with targets up to `heads` ahead.

    Raises EulerError when the stream is too short for one window, unless `pad` allows a single
    window that the stream does not fill: its rest holds token 0 and no targets.
    """

    def __init__(self, stream: TokenStream, context: int, heads: int = 1, *, pad: bool = False):
        if len(stream) <= context and not pad:
            raise EulerError(
                f"the training part of the data has {len(stream)} tokens, one window of context "
                f"{context} takes {context + 1}: give more text or a smaller context"
            )
        self.stream, self.context, self.heads = stream, context, heads
        self.count = max(-(-(len(stream) - 1) // context), 0)
        self._causal = np.arange(1, context + 1, dtype=np.int32)
        self._ahead = np.arange(1, heads + 1)
        # Row d, column k: the targets of head k in all documents before d.
        lengths = np.diff(stream.starts)[:, None] - 1 - np.arange(heads)
        self._own_targets = np.maximum(lengths, 0)
        self._targets_before = np.cumsum(self._own_targets, axis=0) - self._own_targets

    def start(self, indices: np.ndarray) -> np.ndarray:
        """The first position of each window."""
        return np.minimum(indices * self.context, max(len(self.stream) - 1 - self.context, 0))

    def target_counts(self, indices: np.ndarray) -> np.ndarray:
        """The targets of each head in the given windows together, int64 [heads], by arithmetic."""
        stops = np.minimum(self.start(indices) + self.context, len(self.stream))
        counts = self._targets_up_to(stops) - self._targets_up_to(indices * self.context)
        return counts.sum(axis=0)

    def _targets_up_to(self, positions: np.ndarray) -> np.ndarray:
        """[positions, heads]: the targets that positions before the given one have."""
        document = self.stream.document_of(positions)
        inside = (positions - self.stream.starts[document])[:, None]
        return self._targets_before[document] + np.minimum(inside, self._own_targets[document])

    def micro_batch(self, indices: np.ndarray, rows: int | None = None) -> MicroBatch:
        """The windows `indices`, one a row, then empty rows (no targets) up to `rows`."""
        rows, context, heads = rows or len(indices), self.context, self.heads
        starts = np.zeros(rows, np.int64)
        starts[: len(indices)] = self.start(indices)
        ahead = np.zeros((rows, context + heads), np.int32)
        for row in range(len(indices)):
            tokens = self.stream.read(int(starts[row]), context + heads)
            ahead[row, : len(tokens)] = tokens

        positions = starts[:, None] + np.arange(context)
        document = self.stream.document_of(positions[:, [0, -1]])
        if (document[:, 0] == document[:, 1]).all():
            document = document[:, :1]  # the common case: each window inside one document
        else:
            document = self.stream.document_of(positions)
        # Tokens from here to the document's end. What the window before has scored, and what lies
        # past the stream's end or in an empty row, has no target: nothing left.
        left = self.stream.starts[document + 1] - positions
        scored_from = np.full(rows, len(self.stream))
        scored_from[: len(indices)] = indices * context
        left[positions < scored_from[:, None]] = 0

        # [B, T, K]: column t + k + 1 of the row is the target of head k at position t.
        targets = ahead[:, np.arange(context)[:, None] + self._ahead]
        targets[self._ahead >= left[:, :, None]] = -1
        lo, hi = np.empty((2, rows, context), np.int32)
        lo[:] = np.maximum(self.stream.starts[document] - starts[:, None], 0)
        hi[:] = self._causal
        return MicroBatch(np.ascontiguousarray(ahead[:, :context]), targets, lo, hi)


class BatchStream:
    """Endless training batches over a stream; see the module's rules for windows and order.

    `batch()` gives the batch of the step to come, as often as it is asked; `advance()` says that
    the step is finished. So `state()` always describes finished steps: a run that is stopped in
    the middle of one begins it again, whatever the number of micro-batches already done.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        context: int,
        heads: int = 1,
        seed: int = 0,
        accumulate: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.windows = Windows(stream, context, heads)
        self.batch_size, self.accumulate = batch_size, accumulate
        self.rank, self.ranks = rank, ranks
        self.seed = seed
        self.position = 0
        self._orders: dict[int, np.ndarray] = {}

    @property
    def windows_per_step(self) -> int:
        return self.accumulate * self.ranks * self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens a step trains on, over all micro-batches and ranks."""
        return self.windows_per_step * self.windows.context

    @property
    def epoch(self) -> float:
        """How often the data has been seen so far."""
        return self.position / self.windows.count

    def batch(self) -> StepBatch:
        """This rank's share of the step at the current position."""
        step = self._sequence(self.position, self.windows_per_step)
        own = step.reshape(self.accumulate, self.ranks, self.batch_size)[:, self.rank]
        micro_batches = tuple(self.windows.micro_batch(indices) for indices in own)
        return StepBatch(micro_batches, self.windows.target_counts(step))

    def advance(self) -> None:
        """The step at the current position is finished."""
        self.position += self.windows_per_step

    def state(self) -> dict:
        """What `restore` needs, for a checkpoint's JSON."""
        return {
            "position": self.position,
            "seed": self.seed,
            "context": self.windows.context,
            "data": self.windows.stream.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. The number of ranks, the batch size and the accumulation
        may differ; data, context and seed decide which window comes when, and may not.

        Raises EulerError when one of them differs, and for a position that is none.
        """
        for key, here in self.state().items():
            if key != "position" and state.get(key) != here:
                raise EulerError(
                    f"cannot go on in the data: the checkpoint's {key} is {shown(state.get(key))}, "
                    f"here it is {here!r}; resume with the same data, tokenizer, context and seed"
                )
        self.position = whole_number(state, "position", most=_MOST_WINDOWS)

    def _sequence(self, start: int, count: int) -> np.ndarray:
        """Window numbers at places [start, start + count) of all epochs laid end to end."""
        epochs, places = np.divmod(np.arange(start, start + count), self.windows.count)
        first = int(epochs[0])
        self._orders = {e: order for e, order in self._orders.items() if e >= first}
        numbers = np.empty(count, np.int64)
        for epoch in range(first, int(epochs[-1]) + 1):
            if epoch not in self._orders:
                self._orders[epoch] = shuffled(self.windows.count, self.seed, epoch)
            here = epochs == epoch
            numbers[here] = self._orders[epoch][places[here]]
        return numbers


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count) that depends on (seed, epoch) alone: the order of Philox's raw
    64-bit words. (numpy promises its bit generators' raw streams to stay as they are, but not
    what its `permutation` makes of them, and a run may be resumed under another numpy.)"""
    generator = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return np.argsort(generator.random_raw(count), kind="stable")


class ValidationSet:
    """Fixed windows over the held-out part, in order, at most about `max_tokens` of it.

    The whole set is normalised like one step: the losses that `batches()` give under
    `inverse_counts` add up to the mean over all targets, whatever the batch size. `bytes` is the
    exact number of bytes that head 0's targets stand for.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        context: int,
        byte_lengths: np.ndarray,
        heads: int = 1,
        max_tokens: int | None = None,
    ):
        if max_tokens is not None:
            # Whole windows, each with its last target: no short window at the cut.
            stream = stream.slice(0, -(-max_tokens // context) * context + 1)
        self.windows = Windows(stream, context, heads, pad=True)
        self.batch_size = batch_size
        self.target_counts = self.windows.target_counts(np.arange(self.windows.count))
        self._byte_lengths = byte_lengths

    @property
    def inverse_counts(self) -> np.ndarray:
        """float64 [heads], as StepBatch's."""
        return inverse_counts(self.target_counts)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the targets: every token but the first of each document."""
        stream = self.windows.stream
        total = sum(
            int(self._byte_lengths[stream.read(start, _CHUNK)].sum())
            for start in range(0, len(stream), _CHUNK)
        )
        firsts = [int(self._byte_lengths[document.tokens[0]]) for document in stream.documents]
        return total - sum(firsts)

    def batches(self) -> Iterator[MicroBatch]:
        """The windows in order, `batch_size` a batch; the last batch is filled with empty rows."""
        for first in range(0, self.windows.count, self.batch_size):
            indices = np.arange(first, min(first + self.batch_size, self.windows.count))
            yield self.windows.micro_batch(indices, rows=self.batch_size)

    def check(self) -> None:
        """Raise EulerError when the held-out part has no target, since then there is no mean."""
        if not self.target_counts[0] or not self.bytes:
            raise EulerError(
                f"the held-out part has no tokens to score ({len(self.windows.stream)} tokens): "
                "give more text, or train without validation (--eval-every 0)"
            )

    def metrics(self, loss: float) -> dict[str, float]:
        """The metrics of a mean loss in nats a token: `val_loss` and `val_bits_per_byte`.

        Raises EulerError where `check` does.
        """
        self.check()
        bits = loss * int(self.target_counts[0]) / (log(2) * self.bytes)
        return {"val_loss": loss, "val_bits_per_byte": bits}
