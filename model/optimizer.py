"""AdamW over a model's parameters, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from euler_ir import ops
from euler_ir.builder import Builder
from euler_ir.errors import EulerError
from euler_ir.graph import Value
from euler_ir.types import I32
from model.config import ModelConfig
from model.parameters import parameters

SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class AdamWConfig:
    """The optimizer's constants. `Parameter.decayed` tells what weight decay acts on."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


def apply_adamw(b: Builder, config: ModelConfig, optimizer: AdamWConfig,
                weights: Mapping[str, Value], grads: Mapping[str, Value]
                ) -> tuple[dict[str, Value], dict[str, str]]:
    """Append the update; gives outputs by name and donations.

    New inputs: moments `m.<name>` and `v.<name>`, learning_rate [], t i32 [] (updates applied so
    far), norm_limit [] (above it, or not finite, the update is left out and `applied` is false)."""
    specs = parameters(config)
    dtype = weights[specs[0].name].dtype
    moments = [[b.input(f"{moment}.{p.name}", dtype, p.padded_shape) for p in specs]
               for moment in "mv"]
    rate, t = b.input("learning_rate", dtype, ()), b.input("t", I32, ())
    limit = b.input("norm_limit", dtype, ())
    ordered = [grads[p.name] for p in specs]
    norm = b.global_norm(ordered)
    op = ops.AdamW(tuple(optimizer.weight_decay if p.decayed else 0.0 for p in specs),
                   optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.clip_norm)
    results = b.apply(op, *(weights[p.name] for p in specs), *ordered, *moments[0], *moments[1],
                      rate, t, norm, limit)
    names = [prefix + p.name for prefix in ("", "m.", "v.") for p in specs]
    applied = b.logical_and(b.is_finite(norm), b.less_equal(norm, limit))
    outputs = dict(zip(names, results, strict=True))
    outputs |= {"t": t + b.cast(applied, I32), "gradient_norm": norm, "applied": applied}
    return outputs, {name: name for name in (*names, "t")}


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each step.

    Linear warm-up to `peak`, then `cosine` decay to `peak · final` at the last step (Loshchilov &
    Hutter 2017, arXiv:1608.03983), or `wsd`: constant, with a linear decay to `peak · final` over
    the last `decay_share` of the steps (Hu et al. 2024, arXiv:2404.06395), or `constant`."""

    schedule: str
    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.1
    decay_share: float = 0.2

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise EulerError(f"no schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}")

    def at(self, step: int) -> float:
        """The rate of step 0, 1, …"""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.peak
        start = self.warmup
        if self.schedule == "wsd":
            start = max(start, self.steps - round(self.steps * self.decay_share))
        progress = min(max((step - start) / max(self.steps - start, 1), 0.0), 1.0)
        if self.schedule == "wsd":
            return self.peak * (1.0 - (1.0 - self.final) * progress)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.final + (1.0 - self.final) * cosine)
