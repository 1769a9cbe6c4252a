"""Fixtures of several test files."""

from pathlib import Path

import pytest

from tests.hugging_face import GPT2_CONFIG, LLAMA_CONFIG, gpt2_tensors, llama_tensors, write_model


@pytest.fixture
def gpt2(tmp_path) -> Path:
    """The folder of a small GPT-2."""
    return write_model(tmp_path / "gpt2", GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG))


@pytest.fixture
def llama(tmp_path) -> Path:
    """The folder of a small Llama."""
    return write_model(tmp_path / "llama", LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG))
