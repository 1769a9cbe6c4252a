"""Shapes of models, and the presets people name on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from euler_ir.errors import EulerError, shown
from model.json_values import check_keys, check_whole, is_number, is_positive_number

#: More than any model has. What a file claims beyond is a fault, or an attack on our memory.
MOST, MOST_POSITIONS = 1 << 24, 1 << 20


@dataclass(frozen=True)
class Kind:
    """The parts that a kind's pre-norm transformer is made of.

    `norm` is rms or layer, `positions` rotary or learned (a table added to the embedding), `mlp`
    swiglu or gelu; `biases` tells whether the linear layers have them. Rows of zeros round the
    vocabulary up to a multiple of `vocabulary_multiple` in memory. A `given_vocabulary` is that of
    a published tokenizer: none can be trained in its place. `embedding_std` and `matrix_std` are
    the deviations of initial values, the latter 1/√inputs where None; model/parameters.py says
    why."""

    norm: str = "rms"
    positions: str = "rotary"
    mlp: str = "swiglu"
    biases: bool = False
    vocabulary_multiple: int = 1
    given_vocabulary: bool = False
    embedding_std: float = 1.0
    matrix_std: float | None = None


#: `nano` and `llama` differ in their presets only: nano's may have several prediction heads.
KINDS = {
    "nano": Kind(),
    "llama": Kind(),
    "gpt2": Kind(norm="layer", positions="learned", mlp="gelu", biases=True,
                 vocabulary_multiple=64, given_vocabulary=True, embedding_std=0.02,
                 matrix_std=0.02),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched, for a model to reach further than it did at first.

    `linear` turns every pair of elements slower by `factor` (Chen et al. 2023, arXiv:2306.15595).
    `llama3` does so with pairs that turn less than `low_freq_factor` times in `original_context`
    tokens, leaves those alone that turn more than `high_freq_factor` times, and takes a mean
    between (meta-llama/llama-models, apply_scaling; Grattafiori et al. 2024, arXiv:2407.21783,
    trained with it from Llama 3.1 on)."""

    kind: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise EulerError(f"no rotary scaling {shown(self.kind)}; known: linear, llama3")
        if not is_number(self.factor) or self.factor < 1:
            raise EulerError(f"rotary scaling's factor must be a number from 1 on, "
                             f"got {shown(self.factor)}")
        low, high, context = self.low_freq_factor, self.high_freq_factor, self.original_context
        if self.kind == "linear":
            if (low, high, context) != (None, None, None):
                raise EulerError("linear rotary scaling has a factor and nothing else")
            return
        if not (is_number(low) and is_number(high) and 0 < low < high):
            raise EulerError("rotary scaling's low_freq_factor and high_freq_factor must be "
                             f"positive numbers, the second larger; got {shown(low)} and "
                             f"{shown(high)}")
        check_whole("rotary scaling's original_context", context, 1, MOST_POSITIONS)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: the parts of its kind in these sizes.

    Of `prediction_heads`, head k predicts the token k + 1 ahead (multi-token prediction, Gloeckle
    et al. 2024, arXiv:2404.19737). With `tied_head` the embedding is the one head as well
    (Press & Wolf 2017, arXiv:1608.05859). `rope_base` and `rope_scaling` are for rotary positions.
    Attention heads share the width evenly unless a `given_head_size` says otherwise."""

    kind: str
    width: int
    heads: int
    kv_heads: int
    layers: int
    context: int
    vocabulary: int
    hidden: int
    prediction_heads: int = 1
    tied_head: bool = False
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    given_head_size: int | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise EulerError(f"no model kind {shown(self.kind)}; known: {', '.join(KINDS)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                most = MOST_POSITIONS if f.name == "context" else MOST
                check_whole(f"model {f.name}", value, 1, most)
            elif f.type == "float" and not is_positive_number(value):
                raise EulerError(f"model {f.name} must be a positive number, got {shown(value)}")
        given = self.given_head_size
        if given is not None:
            check_whole("model given_head_size", given, 2, MOST)
            if given % 2:
                raise EulerError(f"model given_head_size must be even, got {given}")
        uneven = given is None and self.width % self.heads
        if uneven or self.heads % self.kv_heads or self.head_size % 2:
            raise EulerError(f"width {self.width}, {self.heads} heads, {self.kv_heads} KV heads: "
                             "heads must divide the width into even parts, KV heads the heads")
        if type(self.tied_head) is not bool:
            raise EulerError(f"model tied_head must be true or false, got {shown(self.tied_head)}")
        if self.tied_head and self.prediction_heads > 1:
            raise EulerError("the embedding can be one head's matrix, not that of "
                             f"{self.prediction_heads}: untie the head or have one")
        if self.rope_scaling is not None and self.parts.positions != "rotary":
            raise EulerError(f"model kind {self.kind} has no rotary positions to scale")

    @property
    def parts(self) -> Kind:
        return KINDS[self.kind]

    @property
    def head_size(self) -> int:
        return self.given_head_size or self.width // self.heads

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and heads in memory; those from `vocabulary` on are zero."""
        multiple = self.parts.vocabulary_multiple
        return -(-self.vocabulary // multiple) * multiple

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> ModelConfig:
        """From a run's or checkpoint's JSON; unknown and missing keys are named."""
        check_keys("model configuration", values, ModelConfig)
        if (scaling := values.get("rope_scaling")) is not None:
            check_keys("model rope_scaling", scaling, RopeScaling)
            values = {**values, "rope_scaling": RopeScaling(**scaling)}
        return ModelConfig(**values)


def _gpt2(width: int, heads: int, layers: int) -> ModelConfig:
    """GPT-2 in one of its sizes (Radford et al. 2019; openai/gpt-2, src/model.py)."""
    return ModelConfig("gpt2", width=width, heads=heads, kv_heads=heads, layers=layers,
                       context=1024, vocabulary=50257, hidden=4 * width, tied_head=True)


PRESETS = {
    "nano-1m": ModelConfig("nano", width=128, heads=4, kv_heads=2, layers=4, context=128,
                           vocabulary=512, hidden=344, prediction_heads=4),
    "nano-10m": ModelConfig("nano", width=320, heads=5, kv_heads=5, layers=8, context=256,
                            vocabulary=4096, hidden=864),
    "nano-116m": ModelConfig("nano", width=768, heads=12, kv_heads=4, layers=16, context=512,
                             vocabulary=4096, hidden=2048, prediction_heads=4),
    "llama-124m": ModelConfig("llama", width=768, heads=12, kv_heads=12, layers=12, context=1024,
                              vocabulary=50304, hidden=2048),
    "gpt2-124m": _gpt2(width=768, heads=12, layers=12),
    "gpt2-355m": _gpt2(width=1024, heads=16, layers=24),
    "gpt2-774m": _gpt2(width=1280, heads=20, layers=36),
    "gpt2-1558m": _gpt2(width=1600, heads=25, layers=48),
}


def preset(name: str) -> ModelConfig:
    """The preset of this name; EulerError lists the known ones."""
    if name not in PRESETS:
        raise EulerError(f"no preset {shown(name)}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def shrink(config: ModelConfig) -> ModelConfig:
    """The same architecture with a few thousand parameters: every kind of tensor, grouped heads and
    all prediction heads stay. For checks that visit each element."""
    grouping = config.heads // config.kv_heads
    kv_heads = 1 if grouping > 1 else 2
    heads = kv_heads * min(grouping, 2)
    return replace(config, width=4 * heads, heads=heads, kv_heads=kv_heads, layers=2,
                   context=min(config.context, 8), vocabulary=13, hidden=11,
                   given_head_size=None)
