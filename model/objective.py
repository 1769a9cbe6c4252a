"""The training objective, evaluation, and the functions of a training step.

The objective is the mean over heads of S_k · (1/N_k): S_k sums head k's token losses and N_k counts
its supervised tokens over the *whole* step, all micro-batches and ranks, and is known to the loader
beforehand (1/N_k = 0 where there are none). So gradients of micro-batches simply add up, and a
step's loss does not depend on how it was cut into them.

A step is made in three parts, each a function of its own: the forward pass, that with its gradients
(`value_and_grad`), and the step, which joins the optimizer's update to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder
from euler_ir.graph import Function, Module, Value
from euler_ir.types import F32, I32, DType
from model.config import ModelConfig
from model.optimizer import AdamWConfig, apply_adamw
from model.parameters import parameters
from model.transformer import hidden_states, logits, rotary_inputs, token_positions, weight_inputs


def batch_inputs(b: Builder, batch: int, time: int, heads: int, dtype: DType
                 ) -> dict[str, Value]:
    """A micro-batch: tokens [B, T], targets [B, T, heads] (-1: none), key ranges lo, hi [B, T],
    inverse_counts [heads]."""
    return {
        "tokens": b.input("tokens", I32, (batch, time)),
        "targets": b.input("targets", I32, (batch, time, heads)),
        "lo": b.input("lo", I32, (batch, time)),
        "hi": b.input("hi", I32, (batch, time)),
        "inverse_counts": b.input("inverse_counts", dtype, (heads,)),
    }


def head_losses(b: Builder, config: ModelConfig, weights: Mapping[str, Value],
                batch: Mapping[str, Value], tables: Mapping[str, Value]) -> Value:
    """S_k / N_k of this micro-batch for the heads that `targets` has: [heads]."""
    heads = batch["targets"].shape[2]
    positions = token_positions(b, weights, tables, batch["lo"], batch["hi"])
    hidden, _ = hidden_states(b, config, weights, batch["tokens"], positions)
    scores = logits(b, config, weights, hidden, heads)
    targets = b.reshape(batch["targets"], (*batch["targets"].shape, 1))
    token_losses = b.cross_entropy(scores, targets, config.vocabulary)
    return b.reduce_sum(token_losses, (0, 1, 3)) * batch["inverse_counts"]


def loss_function(config: ModelConfig, batch: int, time: int, dtype: DType = F32) -> Function:
    """weights and a micro-batch → objective [] and the heads' losses [K]."""
    with Builder("loss") as b:
        weights = weight_inputs(b, config, dtype)
        tables = rotary_inputs(b, config, dtype)
        fields = batch_inputs(b, batch, time, config.prediction_heads, dtype)
        losses = head_losses(b, config, weights, fields, tables)
        return b.function({"objective": b.mean(losses), "losses": losses})


def evaluation_function(config: ModelConfig, batch: int, time: int,
                        dtype: DType = F32) -> Function:
    """weights and a micro-batch with next-token targets [B, T, 1] → losses [1] of head 0."""
    with Builder("evaluate") as b:
        weights = weight_inputs(b, config, dtype)
        tables = rotary_inputs(b, config, dtype)
        fields = batch_inputs(b, batch, time, 1, dtype)
        return b.function({"losses": head_losses(b, config, weights, fields, tables)})


def gradient_function(config: ModelConfig, batch: int, time: int, dtype: DType = F32) -> Function:
    """As `loss_function`, with the objective's gradient `grad.<name>` by every parameter."""
    return value_and_grad(loss_function(config, batch, time, dtype),
                          [p.name for p in parameters(config)], "objective")


def training_step(config: ModelConfig, optimizer: AdamWConfig, batch: int, time: int,
                  accumulate: bool, dtype: DType = F32) -> Module:
    """The functions of a step.

    Without accumulation one, `step`: weights, moments, micro-batch, rate, t, limit → new weights
    and moments (donated), losses [K], gradient norm, applied, t. With it two: `accumulate` adds a
    micro-batch's gradients and losses to sums (donated), `apply` updates from the sums."""
    gradient = gradient_function(config, batch, time, dtype)
    if not accumulate:
        return Module({"step": _step(config, optimizer, gradient)})
    return Module({"accumulate": _accumulate(config, gradient, dtype),
                   "apply": _apply(config, optimizer, dtype)})


def _step(config: ModelConfig, optimizer: AdamWConfig, gradient: Function) -> Function:
    with Builder("step") as b:
        inputs = b.inputs_like(gradient)
        results = b.inline(gradient, inputs)
        grads = {p.name: results[f"grad.{p.name}"] for p in parameters(config)}
        outputs, donations = apply_adamw(b, config, optimizer, inputs, grads)
        return b.function({"losses": results["losses"], **outputs}, donations)


def _accumulate(config: ModelConfig, gradient: Function, dtype: DType) -> Function:
    with Builder("accumulate") as b:
        inputs = b.inputs_like(gradient)
        sums = sum_inputs(b, config, dtype)
        losses_so_far = b.input("sum.losses", dtype, (config.prediction_heads,))
        results = b.inline(gradient, inputs)
        outputs = {f"sum.{name}": so_far + results[f"grad.{name}"]
                   for name, so_far in sums.items()}
        outputs["sum.losses"] = losses_so_far + results["losses"]
        return b.function(outputs, {name: name for name in outputs})


def _apply(config: ModelConfig, optimizer: AdamWConfig, dtype: DType) -> Function:
    with Builder("apply") as b:
        weights = weight_inputs(b, config, dtype)
        outputs, donations = apply_adamw(b, config, optimizer, weights,
                                         sum_inputs(b, config, dtype))
        return b.function(outputs, donations)


def sum_inputs(b: Builder, config: ModelConfig, dtype: DType) -> dict[str, Value]:
    """Accumulated gradients, an input `sum.<name>` for every parameter."""
    return {p.name: b.input(f"sum.{p.name}", dtype, p.padded_shape) for p in parameters(config)}
