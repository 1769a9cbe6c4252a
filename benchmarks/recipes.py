"""Compare recipes for the default run: initial values, batch, learning rate, schedule.

    python -m benchmarks.recipes --tokens 384000 [--threads N] NAME ...

Trains nano-1m on the shipped text once for each named recipe (all without a name) and prints its
bits a byte on the whole held-out tenth. Figures and the choice made: default-run.md.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace

from backends.backend import create
from model.config import preset
from model.optimizer import AdamWConfig, LearningRate
from model.parameters import Parameter
from model.tokenizer import train_tokenizer
from runtime.data.batches import BatchStream, ValidationSet
from runtime.data.streams import DEFAULT_TEXT, TokenStream, byte_lengths, encode, load_text
from runtime.engine import Evaluator, Model, Trainer

CONFIG = preset("nano-1m")


@dataclass(frozen=True)
class Recipe:
    """`gpt2_values` takes GPT-2's initial values (0.02 everywhere) in place of the model's own."""

    batch_size: int = 2
    lr: float = 2.5e-3
    warmup: int = 100
    schedule: str = "cosine"
    final: float = 0.1
    beta2: float = 0.95
    gpt2_values: bool = False
    seed: int = 0


RECIPES = {
    "default": Recipe(),
    "seed1": Recipe(seed=1),
    "gpt2": Recipe(gpt2_values=True),
    "gpt2-lr2e-3": Recipe(gpt2_values=True, lr=2e-3),
    "lr1.5e-3": Recipe(lr=1.5e-3),
    "lr2e-3": Recipe(lr=2e-3),
    "lr3e-3": Recipe(lr=3e-3),
    "batch1": Recipe(batch_size=1, lr=1.5e-3),
    "batch4": Recipe(batch_size=4, lr=3e-3),
    "final0": Recipe(final=0.0),
    "wsd": Recipe(schedule="wsd", final=0.0),
    "beta2-0.99": Recipe(beta2=0.99),
}


def gpt2_value(p: Parameter) -> Parameter:
    """The parameter with deviation 0.02, residual projections divided by √(2·layers)."""
    if not p.std:
        return p
    residual = p.name.endswith(("attention.output.weight", "mlp.down.weight"))
    return replace(p, std=0.02 / (math.sqrt(2 * CONFIG.layers) if residual else 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"{', '.join(RECIPES)} (all)")
    parser.add_argument("--tokens", type=int, default=384_000,
                        help="to train on (384000, the default run's)")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in RECIPES:
            parser.error(f"no recipe {name!r}; known: {', '.join(RECIPES)}")
    texts = load_text([DEFAULT_TEXT])
    tokenizer = train_tokenizer([text.text for text in texts], CONFIG.vocabulary)
    stream = TokenStream([encode(text, tokenizer) for text in texts], CONFIG.vocabulary)
    train, held_out = stream.split()
    validation = ValidationSet(held_out, batch_size=8, context=CONFIG.context,
                               byte_lengths=byte_lengths(tokenizer))
    backend = create("llvm", threads=arguments.threads)
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        start = time.perf_counter()
        model = trained(recipe, train, arguments.tokens, backend)
        seconds = time.perf_counter() - start
        loss = Evaluator(model, 8, CONFIG.context).loss(validation)
        bits = validation.metrics(loss)["val_bits_per_byte"]
        print(f"{name:12} {bits:.4f} bits a byte, {arguments.tokens / seconds:,.0f} tokens/s",
              flush=True)


def trained(recipe: Recipe, stream: TokenStream, tokens: int, backend) -> Model:
    """nano-1m after that many tokens."""
    model = Model(CONFIG, backend)
    for p in model.parameters:
        drawn = gpt2_value(p) if recipe.gpt2_values else p
        model.weights[p.name].write(drawn.initial(recipe.seed))
    trainer = Trainer(model, AdamWConfig(beta2=recipe.beta2), recipe.batch_size, CONFIG.context)
    batches = BatchStream(stream, batch_size=recipe.batch_size, context=CONFIG.context,
                          heads=CONFIG.prediction_heads, seed=recipe.seed)
    steps = tokens // batches.tokens_per_step
    rate = LearningRate(recipe.schedule, recipe.lr, steps, recipe.warmup, recipe.final)
    for step in range(steps):
        trainer.step(batches.batch(), rate.at(step))
        batches.advance()
    return model


if __name__ == "__main__":
    main()
