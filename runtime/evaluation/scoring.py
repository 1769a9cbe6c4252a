"""How likely a model finds given text: log-probabilities of tokens after what stands before them.

Programs have fixed shapes, so requests are sorted into batches of a few lengths, each compiled when
it is first needed; what a row does not fill has an empty key range and costs no attention. A
request whose tokens begin another one shares that one's row, since a causal model's states
depend on no later token: the answers to a question of one token each are scored with one row.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from backends.backend import Program
from euler_ir.errors import EulerError
from model.scoring import hidden_function, scoring_function
from runtime.compiler.driver import compile_function
from runtime.engine import Model

#: Rows of a batch: with the shortest length some 256 tokens, enough for matmuls to be efficient.
ROWS = 8
#: The shortest row; each further one is twice as long, the last as long as the context.
SHORTEST = 32
#: States that the head takes at once: enough for an efficient matmul, few enough to waste little
#: on a batch that has fewer. Of 32 to 512 the fastest with GPT-2's vocabulary, on Zen 3.
STATES = 128


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens of which the last `scored` are to be scored, each after all tokens before it."""

    tokens: Sequence[int]
    scored: int

    @property
    def targets(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - self.scored:]


@dataclass(frozen=True)
class Score:
    """The natural logarithm of each scored token's probability, in f64, and whether the token is
    the one that greedy decoding would take."""

    log_probabilities: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """The log-probability of all tokens together."""
        return math.fsum(self.log_probabilities)


@dataclass(frozen=True)
class _Row:
    """Tokens to run, and the requests (by their numbers) whose tokens but the last begin them."""

    tokens: tuple[int, ...]
    requests: list[int]


class Scorer:
    """Scores requests of at most `context` + 1 tokens, of which the model sees all but the last.

    `context` is by default what the model's positions cover; `rows` are run at a time."""

    def __init__(self, model: Model, context: int | None = None, rows: int = ROWS) -> None:
        self.context = model.checked_context(context)
        self.model, self._rows = model, rows
        self._lengths = _lengths(self.context)
        self._programs: dict[int, Program] = {}

    def scores(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[int, Score]]:
        """Each request's number and score, in the order in which they are done.

        All requests are checked before this returns. Raises EulerError for one that is too long or
        has nothing to score or to begin with, for ids outside the vocabulary, and, on the way,
        where the model's logits are not finite."""
        for request in requests:
            self._check(request)
        return self._scores(requests)

    def _check(self, request: ScoreRequest) -> None:
        count = len(request.tokens)
        if not 1 <= request.scored < count:
            raise EulerError(f"of {count} tokens {request.scored} are to be scored: it must be at "
                             "least one, and at least one must stand before it")
        if count > self.context + 1:
            raise EulerError(f"the text has {count} tokens, with the model's context of "
                             f"{self.context} at most {self.context + 1} can be scored: cut its "
                             "beginning")
        self.model.check_tokens(request.tokens)

    def _scores(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[int, Score]]:
        rows = _shared_rows(requests)
        for first in range(0, len(rows), self._rows):
            batch = rows[first:first + self._rows]
            hidden = self._hidden_states(batch)
            states, targets, numbers = [], [], []
            for place, row in enumerate(batch):
                for number in row.requests:
                    request = requests[number]
                    stop = len(request.tokens) - 1
                    states.append(hidden[place, stop - request.scored:stop])
                    targets.append(np.array(request.targets, np.int32))
                    numbers.append(number)
            log_probabilities, greedy = self._head(np.concatenate(states), np.concatenate(targets))
            start = 0
            for number in numbers:
                own = slice(start, start + requests[number].scored)
                yield number, Score(log_probabilities[own], greedy[own])
                start = own.stop

    def _hidden_states(self, batch: Sequence[_Row]) -> np.ndarray:
        """[rows, T, width] of a batch whose first row is its longest."""
        time = self._lengths[bisect_left(self._lengths, len(batch[0].tokens))]
        tokens, lo, hi = np.zeros((3, self._rows, time), np.int32)
        for place, row in enumerate(batch):
            count = len(row.tokens)
            tokens[place, :count] = row.tokens
            hi[place, :count] = np.arange(1, count + 1)
        return self._hidden(time).run({"tokens": tokens, "lo": lo, "hi": hi})["hidden"]

    def _head(self, states: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities f64 [N] and greedy bool [N] of targets [N] after states [N, width]."""
        log_probabilities = np.empty(len(targets), np.float64)
        greedy = np.empty(len(targets), bool)
        for first in range(0, len(targets), STATES):
            part = slice(first, min(first + STATES, len(targets)))
            count = part.stop - part.start
            hidden = np.zeros((STATES, states.shape[1]), states.dtype)
            hidden[:count] = states[part]
            padded = np.full(STATES, -1, np.int32)
            padded[:count] = targets[part]
            outputs = self._scoring.run({"hidden": hidden, "targets": padded})
            log_probabilities[part] = outputs["log_probabilities"][:count]
            greedy[part] = outputs["greedy"][:count]
        if np.isnan(log_probabilities).any():
            raise EulerError("the model's logits hold NaN or infinity: its weights are broken (a "
                             "training run that diverged?); use an earlier checkpoint")
        return log_probabilities, greedy

    def _hidden(self, time: int) -> Program:
        """Compiled when first needed."""
        if time not in self._programs:
            model = self.model
            function = hidden_function(model.config, self._rows, time, model.dtype)
            self._programs[time] = compile_function(function, model.backend, model.bound)
        return self._programs[time]

    @cached_property
    def _scoring(self) -> Program:
        model = self.model
        function = scoring_function(model.config, STATES, model.dtype)
        return compile_function(function, model.backend, model.weights)


def _lengths(context: int) -> list[int]:
    """The lengths that rows are padded to, ascending: each is twice the last."""
    lengths = [min(SHORTEST, context)]
    while lengths[-1] < context:
        lengths.append(min(2 * lengths[-1], context))
    return lengths


def _shared_rows(requests: Sequence[ScoreRequest]) -> list[_Row]:
    """The rows to run, the longest first. In descending order a request stands right after those
    that it begins, so the row before it is the only one that it can be part of."""
    inputs = [tuple(request.tokens[:-1]) for request in requests]
    rows: list[_Row] = []
    for number in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        tokens = inputs[number]
        if not rows or rows[-1].tokens[:len(tokens)] != tokens:
            rows.append(_Row(tokens, []))
        rows[-1].requests.append(number)
    return sorted(rows, key=lambda row: -len(row.tokens))
