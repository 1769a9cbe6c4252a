"""A model in memory: its weights, and the compiled functions that train and evaluate it.

Weights, moments and gradient sums are buffers of the backend that live as long as the engine; the
compiled programs are bound to them and update them in place (their functions donate them).
Everything else a program needs lies in its own planned arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from backends.backend import Backend, Buffer
from euler_ir.errors import EulerError
from euler_ir.graph import Function
from euler_ir.types import F32, I32, DType, TensorType
from model.config import ModelConfig
from model.objective import evaluation_function, training_step
from model.optimizer import AdamWConfig
from model.parameters import parameters
from model.transformer import layer_segments, rotary_tables
from runtime.compiler.driver import compile_function, to_buffers
from runtime.compiler.dump import Dump
from runtime.data.batches import MicroBatch, StepBatch, ValidationSet


class Model:
    """Weights and rotary tables of a configuration in a backend's memory, shared by all programs
    that use them."""

    def __init__(self, config: ModelConfig, backend: Backend, dtype: DType = F32) -> None:
        self.config, self.backend, self.dtype = config, backend, dtype
        self.parameters = parameters(config)
        self.weights = {p.name: self.allocate(p.padded_shape) for p in self.parameters}
        self.tables = to_buffers(rotary_tables(config, dtype.numpy), backend)

    def allocate(self, shape: tuple[int, ...]) -> Buffer:
        """Zeros of the model's type."""
        return self.backend.allocate(TensorType(self.dtype, shape))

    def initialise(self, seed: int) -> None:
        for p in self.parameters:
            self.weights[p.name].write(p.initial(seed, self.dtype.numpy))

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take over tensors by name; shapes must have been checked."""
        for name, weight in self.weights.items():
            weight.write(tensors[name])

    def stored(self) -> dict[str, np.ndarray]:
        """The weights as files hold them, without the padding, to read before the next step."""
        return {p.name: self.weights[p.name].read(p.shape) for p in self.parameters}

    @property
    def bound(self) -> dict[str, Buffer]:
        return {**self.weights, **self.tables}

    def checked_context(self, context: int | None) -> int:
        """How many tokens a program is to see: so many, by default all that the model's positions
        cover. Raises EulerError for more than these, and for none."""
        limit = self.config.context
        if context is None:
            return limit
        if not 1 <= context <= limit:
            raise EulerError(f"the context must be 1 to {limit} tokens, which is what the model's "
                             f"positions cover, got {context}")
        return context

    def check_tokens(self, tokens: Iterable[int]) -> None:
        """Raise EulerError for an id that is no row of the embedding."""
        vocabulary = self.config.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise EulerError(f"{token} is not a token id: the model's ids go from 0 to "
                                 f"{vocabulary - 1}")


@dataclass(frozen=True)
class StepResult:
    """`loss` is head 0's mean over the step's tokens, in nats; `losses` those of all heads.
    Where `applied` is false the gradient was not finite or over the limit, and nothing changed."""

    loss: float
    losses: np.ndarray
    gradient_norm: float
    applied: bool


class Trainer:
    """Runs training steps on a model. `recompute` counts the layers whose activations are computed
    again in the backward pass: less memory, more time, the same results."""

    def __init__(self, model: Model, optimizer: AdamWConfig, batch_size: int, context: int,
                 accumulate: int = 1, norm_limit: float = math.inf, dump: Dump | None = None,
                 recompute: int = 0) -> None:
        self.model, self.accumulate = model, accumulate
        self.moments = {f"{moment}.{p.name}": model.allocate(p.padded_shape)
                        for moment in "mv" for p in model.parameters}
        self.t = model.backend.allocate(TensorType(I32, ()))
        self._limit = np.array(norm_limit, model.dtype.numpy)
        functions = training_step(model.config, optimizer, batch_size, context,
                                  accumulate > 1, model.dtype).functions
        bound = {**model.bound, **self.moments, "t": self.t}
        if accumulate > 1:
            self._sums = {f"sum.{p.name}": model.allocate(p.padded_shape)
                          for p in model.parameters}
            self._sums["sum.losses"] = model.allocate((model.config.prediction_heads,))
            bound |= self._sums
        recomputed = layer_segments(model.config, recompute)
        self.programs = {name: compile_function(function, model.backend, _used(function, bound),
                                                dump, recomputed)
                         for name, function in functions.items()}

    @property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """The moments' names, and their shapes without the padding."""
        return {f"{moment}.{p.name}": p.shape for moment in "mv" for p in self.model.parameters}

    def load(self, moments: Mapping[str, np.ndarray], t: int) -> None:
        """Take over moments by name, of shapes that have been checked, and the count of updates."""
        for name, moment in self.moments.items():
            moment.write(moments[name])
        self.t.write(np.array(t))

    def stored_moments(self) -> dict[str, np.ndarray]:
        """The moments as files hold them, without the padding, to read before the next step."""
        return {name: self.moments[name].read(shape) for name, shape in self.moment_shapes.items()}

    def step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """One update from all micro-batches of the step; `t` counts the applied ones."""
        dtype = self.model.dtype.numpy
        update = {"learning_rate": np.array(learning_rate, dtype), "norm_limit": self._limit}
        if self.accumulate == 1:
            (micro_batch,) = batch.micro_batches
            results = self.programs["step"].run(
                {**_fields(micro_batch, batch.inverse_counts, dtype), **update})
            losses = results["losses"]
        else:
            for total in self._sums.values():
                total.clear()
            for micro_batch in batch.micro_batches:
                self.programs["accumulate"].run(
                    _fields(micro_batch, batch.inverse_counts, dtype))
            losses = self._sums["sum.losses"].read().copy()
            results = self.programs["apply"].run(update)
        return StepResult(float(losses[0]), losses, float(results["gradient_norm"]),
                          bool(results["applied"]))


class Evaluator:
    """Scores a model on a validation set."""

    def __init__(self, model: Model, batch_size: int, context: int,
                 dump: Dump | None = None) -> None:
        self.model = model
        function = evaluation_function(model.config, batch_size, context, model.dtype)
        self._program = compile_function(function, model.backend, _used(function, model.bound),
                                         dump)

    def loss(self, validation: ValidationSet) -> float:
        """Head 0's mean loss in nats a token over the whole set."""
        dtype = self.model.dtype.numpy
        return math.fsum(
            float(self._program.run(_fields(batch, validation.inverse_counts, dtype))["losses"][0])
            for batch in validation.batches())


def _fields(batch: MicroBatch, inverse_counts: np.ndarray, dtype) -> dict[str, np.ndarray]:
    return {"tokens": batch.tokens, "targets": batch.targets, "lo": batch.lo, "hi": batch.hi,
            "inverse_counts": inverse_counts.astype(dtype)}


def _used(function: Function, buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Those of the buffers that the function has as inputs."""
    names = {value.name for value in function.inputs}
    return {name: buffer for name, buffer in buffers.items() if name in names}
