"""How far llama.cpp's logits are from those of the same weights in f64.

    make oracle-llama && .venv/bin/python -m benchmarks.llama_cpp

llama.cpp looks GELU up in a table of f16, so a GPT-2 there is not an f32 computation. The second
column takes that rounding, and nothing else, out of the comparison. A Llama model has no GELU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

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
from tests.test_oracle_llama_cpp import in_type, loaded, their_logits

CONTEXT = 64
SEEDS = range(5)


def main() -> None:
    import llama_cpp

    gpt2 = {**GPT2_CONFIG, "n_positions": CONTEXT, "n_ctx": CONTEXT}
    llama = {**LLAMA_CONFIG, "max_position_embeddings": CONTEXT}
    print(f"{'model':8}{'largest logit':>14}{'difference':>12}{'GELU in f16':>13}")
    for seed in SEEDS:
        tensors = llama_tensors(llama, seed)
        tokens, found = _found(llama_cpp, llama, tensors, seed)
        exact = llama_logits(llama, tensors, tokens)
        print(f"llama {seed} {np.abs(exact).max():14.2f}{_largest(found, exact):12.1e}{'-':>13}")
    for seed in SEEDS:
        tensors = gpt2_tensors(gpt2, seed)
        tokens, found = _found(llama_cpp, gpt2, tensors, seed)
        exact = gpt2_logits(gpt2, tensors, tokens)
        looked_up = gpt2_logits(gpt2, tensors, tokens, gelu_rounded=in_type(np.float16))
        print(f"gpt2 {seed}  {np.abs(exact).max():14.2f}{_largest(found, exact):12.1e}"
              f"{_largest(found, looked_up):13.1e}")


def _found(llama_cpp, config: dict, tensors: dict[str, np.ndarray],
           seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, and llama.cpp's logits [T, V] from our GGUF file of the model."""
    tokens = np.random.default_rng(seed).integers(0, config["vocab_size"], CONTEXT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "in", config, tensors, small_tokenizer())
        import_folder(folder / "in", folder / "run")
        export_gguf(folder / "run", folder / "model.gguf")
        return tokens, their_logits(loaded(llama_cpp, folder / "model.gguf"), tokens)


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


if __name__ == "__main__":
    main()
