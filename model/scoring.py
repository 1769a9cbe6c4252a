"""Scoring tokens that are given: hidden states of whole rows, then head 0 on chosen ones of them.

These are two functions because logits are by far the largest tensor of a language model, and few
of their rows are wanted: of a question and an answer only those that predict the answer. The host
picks the hidden states in between. So the head costs time and memory for scored tokens alone, and
one compiled head serves rows of every length.
"""

from __future__ import annotations

from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.types import F32, I32, DType
from model.config import ModelConfig
from model.transformer import hidden_states, logits, rotary_inputs, token_positions, weight_inputs


def hidden_function(config: ModelConfig, batch: int, time: int, dtype: DType = F32) -> Function:
    """weights, rotary tables, tokens i32 [B, T] and key ranges lo, hi i32 [B, T] → `hidden`
    [B, T, width]."""
    with Builder("hidden") as b:
        weights = weight_inputs(b, config, dtype)
        tables = rotary_inputs(b, config, dtype)
        tokens, lo, hi = (b.input(name, I32, (batch, time)) for name in ("tokens", "lo", "hi"))
        positions = token_positions(b, weights, tables, lo, hi)
        hidden, _ = hidden_states(b, config, weights, tokens, positions)
        return b.function({"hidden": hidden})


def scoring_function(config: ModelConfig, count: int, dtype: DType = F32) -> Function:
    """weights, `hidden` [N, width] and `targets` i32 [N] → for each state and the token that is to
    follow it `log_probabilities` [N], in nats, and `greedy` bool [N]: whether it is the likeliest
    one, of equal ones that with the lowest id. A target of -1 gives 0 and false.

    Rows that pad the vocabulary take no part."""
    with Builder("score") as b:
        weights = weight_inputs(b, config, dtype)
        hidden = b.input("hidden", dtype, (count, config.width))
        targets = b.input("targets", I32, (count,))
        scores = logits(b, config, weights, b.reshape(hidden, (1, count, config.width)), 1)
        scores = b.reshape(scores, (count, config.padded_vocabulary))
        losses = b.cross_entropy(scores, b.reshape(targets, (count, 1)), config.vocabulary)
        likeliest = b.argmax(b.part(scores, 1, 0, config.vocabulary))
        return b.function({"log_probabilities": -b.reshape(losses, (count,)),
                           "greedy": b.equal(likeliest, targets)})
