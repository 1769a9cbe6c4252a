"""Shapes of models, and the presets people name on the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from euler_ir.errors import EulerError

KINDS = ("nano", "llama")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: pre-norm RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases.

    The kinds differ in the objective: `llama` has one head that predicts the next token, `nano`
    has `prediction_heads` of them, head k predicting the token k + 1 ahead (multi-token
    prediction, Gloeckle et al. 2024, arXiv:2404.19737)."""

    kind: str
    width: int
    heads: int
    kv_heads: int
    layers: int
    context: int
    vocabulary: int
    hidden: int
    prediction_heads: int = 1
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EulerError(f"no model kind {self.kind!r}; known: {', '.join(KINDS)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and (type(value) is not int or value < 1):
                raise EulerError(f"model {f.name} must be a positive whole number, got {value!r}")
        if self.width % self.heads or self.heads % self.kv_heads or self.head_size % 2:
            raise EulerError(f"width {self.width}, {self.heads} heads, {self.kv_heads} KV heads: "
                             "heads must divide the width into even parts, KV heads the heads")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> ModelConfig:
        """From a run's or checkpoint's JSON; unknown and missing keys are named."""
        known = {f.name for f in fields(ModelConfig)}
        if set(values) - known:
            raise EulerError(f"model configuration has unknown keys {sorted(set(values) - known)}")
        try:
            return ModelConfig(**values)
        except TypeError as error:
            raise EulerError(f"model configuration is incomplete: {error}") from None


PRESETS = {
    "nano-1m": ModelConfig("nano", width=128, heads=4, kv_heads=2, layers=4, context=128,
                           vocabulary=512, hidden=344, prediction_heads=4),
    "nano-10m": ModelConfig("nano", width=320, heads=5, kv_heads=5, layers=8, context=256,
                            vocabulary=4096, hidden=864),
    "nano-116m": ModelConfig("nano", width=768, heads=12, kv_heads=4, layers=16, context=512,
                             vocabulary=4096, hidden=2048, prediction_heads=4),
    "llama-124m": ModelConfig("llama", width=768, heads=12, kv_heads=12, layers=12, context=1024,
                              vocabulary=50304, hidden=2048),
}


def preset(name: str) -> ModelConfig:
    """The preset of this name; EulerError lists the known ones."""
    if name not in PRESETS:
        raise EulerError(f"no preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def shrink(config: ModelConfig) -> ModelConfig:
    """The same architecture with a few thousand parameters: every kind of tensor, grouped heads and
    all prediction heads stay. For checks that visit each element."""
    grouping = config.heads // config.kv_heads
    kv_heads = 1 if grouping > 1 else 2
    heads = kv_heads * min(grouping, 2)
    return replace(config, width=4 * heads, heads=heads, kv_heads=kv_heads, layers=2,
                   context=min(config.context, 8), vocabulary=13, hidden=11)
