"""How far llama.cpp's logits are from those of the same weights in f64.

    make oracle-llama && .venv/bin/python -m benchmarks.llama_cpp

llama.cpp looks GELU up in a table of f16, so a GPT-2 there is not an f32 computation. The second
column takes that rounding, and nothing else, out of the comparison. A Llama model has no GELU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from euler_ir.errors import EulerError
from runtime.cli import Parser, integer, run_command
from runtime.convert import export_gguf, import_folder
from tests.hugging_face import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gpt2_logits,
    gpt2_tensors,
    llama_logits,
    llama_tensors,
    small_tokenizer,
    write_model,
)

CONTEXT = 64


def parser() -> Parser:
    p = Parser(prog="python -m benchmarks.llama_cpp", description=__doc__.splitlines()[0])
    p.add_argument("--models", type=integer(1), default=5, metavar="N",
                   help="random models of each kind (%(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    seeds = range(parser().parse_args(argv).models)
    judge = _judge()
    gpt2 = {**GPT2_CONFIG, "n_positions": CONTEXT, "n_ctx": CONTEXT}
    llama = {**LLAMA_CONFIG, "max_position_embeddings": CONTEXT}
    print(f"{'model':8}{'largest logit':>14}{'difference':>12}{'GELU in f16':>13}")
    for seed in seeds:
        tensors = llama_tensors(llama, seed)
        tokens, found = _found(judge, llama, tensors, seed)
        exact = llama_logits(llama, tensors, tokens)
        print(f"llama {seed} {np.abs(exact).max():14.2f}{_largest(found, exact):12.1e}{'-':>13}")
    for seed in seeds:
        tensors = gpt2_tensors(gpt2, seed)
        tokens, found = _found(judge, gpt2, tensors, seed)
        exact = gpt2_logits(gpt2, tensors, tokens)
        looked_up = gpt2_logits(gpt2, tensors, tokens, gelu_rounded=judge.in_type(np.float16))
        print(f"gpt2 {seed}  {np.abs(exact).max():14.2f}{_largest(found, exact):12.1e}"
              f"{_largest(found, looked_up):13.1e}")


def _judge() -> SimpleNamespace:
    """llama.cpp, and how the tests ask it; EulerError where either is not installed."""
    try:
        import llama_cpp

        from tests.test_oracle_llama_cpp import in_type, loaded, their_logits
    except ModuleNotFoundError as error:
        raise EulerError(f"{error.name} is not installed: `make oracle-llama` installs what this "
                         "needs") from None
    return SimpleNamespace(in_type=in_type, their_logits=their_logits,
                           loaded=lambda path: loaded(llama_cpp, path))


def _found(judge: SimpleNamespace, config: dict, tensors: dict[str, np.ndarray],
           seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, and llama.cpp's logits [T, V] from our GGUF file of the model."""
    tokens = np.random.default_rng(seed).integers(0, config["vocab_size"], CONTEXT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "in", config, tensors, small_tokenizer())
        import_folder(folder / "in", folder / "run")
        export_gguf(folder / "run", folder / "model.gguf")
        return tokens, judge.their_logits(judge.loaded(folder / "model.gguf"), tokens)


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


if __name__ == "__main__":
    sys.exit(run_command(main))
