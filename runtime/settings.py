"""What a training run was asked to do: the settings, their defaults, their place in JSON.

A run directory's `config.json` and every checkpoint hold them, so `--resume` needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from euler_ir.errors import EulerError, shown
from euler_ir.types import F32, F64, DType
from model.config import ModelConfig, preset
from model.json_values import LARGEST, check_keys, check_whole, is_positive_number
from model.optimizer import AdamWConfig, LearningRate
from model.parameters import parameter_count
from runtime.storage.run_directory import run_name


@dataclass(frozen=True)
class Recipe:
    """Batch, length and learning rate that suit a preset on the machine it is meant for."""

    batch_size: int
    steps: int
    lr: float
    warmup: int


#: nano-1m's are chosen for a minute on two cores, see benchmarks/default-run.md. From 100M
#: parameters on, rates are those of GPT-3's models of like size (Brown et al. 2020,
#: arXiv:2005.14165, table 2.1).
#:
#: A run that begins with trained weights has the recipe of the preset nearest in size, with a tenth
#: of its rate and of its steps. That gives 6e-5 at 124M parameters, where GPT was fine-tuned with
#: 6.25e-5 (Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training",
#: section 4.1), and 2e-5 from 1.5B on, as Llama 2 was (Touvron et al. 2023, arXiv:2307.09288,
#: section 3.1).
RECIPES = {
    "nano-1m": Recipe(batch_size=2, steps=1500, lr=2.5e-3, warmup=100),
    "nano-10m": Recipe(batch_size=8, steps=2000, lr=1e-3, warmup=100),
    "nano-116m": Recipe(batch_size=8, steps=5000, lr=6e-4, warmup=200),
    "llama-124m": Recipe(batch_size=4, steps=5000, lr=6e-4, warmup=200),
    "gpt2-124m": Recipe(batch_size=4, steps=5000, lr=6e-4, warmup=200),
    "gpt2-355m": Recipe(batch_size=4, steps=5000, lr=3e-4, warmup=200),
    "gpt2-774m": Recipe(batch_size=1, steps=5000, lr=2.5e-4, warmup=200),
    "gpt2-1558m": Recipe(batch_size=1, steps=5000, lr=2e-4, warmup=200),
}

#: What `--precision` takes, and the type a run then computes in.
PRECISIONS = {"f32": F32, "f64": F64}

_FINE_TUNING_SHARE = 10
#: The longest rows that a run takes from a checkpoint: models that reach further are rarely trained
#: that far, and memory grows with it.
_FINE_TUNING_CONTEXT = 1024


def precision(name: str) -> DType:
    """The type of a precision by its name; EulerError for one no backend has."""
    if name not in PRECISIONS:
        raise EulerError(f"precision {shown(name)} is not available: use "
                         f"{' or '.join(PRECISIONS)}")
    return PRECISIONS[name]


def fine_tuning_recipe(config: ModelConfig) -> Recipe:
    """The recipe for going on with the weights of such a model (see RECIPES)."""
    size = parameter_count(config)
    nearest = min(RECIPES, key=lambda name: abs(math.log(parameter_count(preset(name)) / size)))
    recipe = RECIPES[nearest]
    return replace(recipe, steps=recipe.steps // _FINE_TUNING_SHARE,
                   lr=recipe.lr / _FINE_TUNING_SHARE)


#: The largest seed, of runs and of everything else that takes one.
MAX_SEED = 2**63 - 1

#: The whole numbers among the settings, with their least and largest value.
_RANGES = {name: (least, LARGEST) for name, least in {
    "steps": 1, "batch_size": 1, "context": 1, "warmup": 0, "accumulate": 1, "recompute": 0,
    "eval_every": 0, "checkpoint_every": 1}.items()} | {"seed": (0, MAX_SEED)}
_MAY_BE_NONE = ("preset", "tokenizer", "init")


@dataclass(frozen=True)
class Settings:
    """A run's settings.

    Its model is new, of a `preset`, or that of the checkpoint `init`, which gives the tokenizer
    too. `data` are the paths given (none: the shipped text), `tokenizer` a file or None for one
    trained on the data; `steps` is the whole run's length, resumed parts included."""

    preset: str | None
    steps: int
    batch_size: int
    context: int
    lr: float
    schedule: str
    warmup: int
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    precision: str = "f32"
    accumulate: int = 1
    recompute: int = 0
    eval_every: int = 0
    checkpoint_every: int = 10
    seed: int = 0
    init: str | None = None

    #: What a resumed run may change without being another run.
    CHANGEABLE: ClassVar = ("steps", "data", "eval_every", "checkpoint_every", "recompute")

    def __post_init__(self) -> None:
        for f in fields(self):
            self._check(f.name, getattr(self, f.name))
        if (self.preset is None) == (self.init is None):
            raise EulerError("a run's model comes from a preset or from a checkpoint (init), got "
                             f"preset {self.preset!r} and init {self.init!r}")

    @staticmethod
    def _check(name: str, value: object) -> None:
        """Raise EulerError unless the value of a setting has its type and range."""
        if name in _RANGES:
            check_whole(f"setting {name}", value, *_RANGES[name])
        elif name == "lr":
            if not is_positive_number(value):
                raise EulerError(f"setting lr must be a positive number, got {shown(value)}")
        elif name == "data":
            if type(value) is not tuple or not all(isinstance(path, str) for path in value):
                raise EulerError(f"setting data must be a list of paths, got {shown(value)}")
        elif not isinstance(value, str) and not (value is None and name in _MAY_BE_NONE):
            raise EulerError(f"setting {name} must be a string, got {shown(value)}")

    @staticmethod
    def for_preset(name: str, **given) -> Settings:
        """The preset's recipe with what was given (not None) in its place."""
        config = preset(name)
        settings = _complete(config, RECIPES[name], given, preset=name, context=config.context)
        if config.parts.given_vocabulary and not settings.tokenizer:
            raise EulerError(f"{name} has the vocabulary of a published tokenizer: give its "
                             "tokenizer.json with --tokenizer")
        return settings

    @staticmethod
    def for_checkpoint(path: Path, config: ModelConfig, trained: Mapping[str, Any],
                       **given) -> Settings:
        """Settings of a new run that begins with a checkpoint's model: the recipe for its size,
        rows and precision of the settings it was `trained` with, and what was given (not None) in
        their place."""
        context = min(trained["context"], config.context, _FINE_TUNING_CONTEXT)
        return _complete(config, fine_tuning_recipe(config), given, preset=None,
                         init=str(path.resolve()), context=context,
                         precision=trained["precision"])

    @property
    def name(self) -> str:
        """What to call the run: after its preset, or after the run that its weights come from."""
        return self.preset or run_name(Path(self.init))

    def resumed_with(self, **given) -> Settings:
        """These settings with the changes a resumed run may make; others are refused."""
        changes = {key: value for key, value in given.items()
                   if value is not None and value != getattr(self, key)}
        for key in changes:
            if key not in self.CHANGEABLE:
                flag, own = "--" + key.replace("_", "-"), getattr(self, key)
                raise EulerError(f"{flag} {changes[key]} does not fit the run to resume, which has "
                                 f"{'none' if own is None else own}; leave it out, or start a new "
                                 "run")
        return replace(self, **changes)

    def check_warmup(self) -> None:
        """Raise EulerError for a warm-up that the run would end in. (Not when settings are made:
        those of such a run can still be read, and resumed with more steps.)"""
        if self.warmup > self.steps:
            raise EulerError(f"a warm-up of {self.warmup} steps is longer than the run of "
                             f"{self.steps}: take a shorter --warmup (for a new run only) or more "
                             "--steps")

    @property
    def learning_rate(self) -> LearningRate:
        return LearningRate(self.schedule, self.lr, self.steps, self.warmup)

    @property
    def optimizer(self) -> AdamWConfig:
        return AdamWConfig()

    def model(self, vocabulary_size: int) -> ModelConfig:
        """A preset's model for a tokenizer: one with fewer tokens than the preset allows makes
        the embedding and heads smaller, one with more is refused."""
        config = preset(self.preset)
        if vocabulary_size > config.vocabulary:
            raise EulerError(f"the tokenizer has {vocabulary_size} tokens, {self.preset} takes at "
                             f"most {config.vocabulary}")
        return replace(config, vocabulary=vocabulary_size)

    def to_dict(self) -> dict:
        return {**asdict(self), "data": list(self.data)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Settings:
        """From JSON; raises EulerError naming keys that are unknown or missing."""
        check_keys("the run's settings", values, Settings)
        data = values.get("data", [])
        return Settings(**{**values, "data": tuple(data) if isinstance(data, list) else data})


def _complete(config: ModelConfig, recipe: Recipe, given: Mapping[str, Any], *, context: int,
              **origin) -> Settings:
    """Settings for such a model: those given (not None), else the recipe's and the other ones."""
    given = {key: value for key, value in given.items() if value is not None}
    values = {**origin, "context": context, "schedule": "cosine", **asdict(recipe), **given}
    if "warmup" not in given:
        values["warmup"] = min(values["warmup"], values["steps"] // 10)
    if "eval_every" not in given:
        values["eval_every"] = max(values["steps"] // 3, 1)
    settings = Settings(**values)
    if settings.context > config.context:
        raise EulerError(f"--context {settings.context} is longer than {settings.name}'s "
                         f"{config.context}")
    return settings
