"""Fixtures of several test files."""

import signal
import threading
from pathlib import Path

import pytest

from backends.llvm.cache import ObjectCache
from backends.llvm.compiler import Compiler
from backends.llvm.target import Target
from backends.llvm.team import Team
from tests.hugging_face import GPT2_CONFIG, LLAMA_CONFIG, gpt2_tensors, llama_tensors, write_model


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """What a shell starts in the background ignores Ctrl-C, and so would the processes that tests
    start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def gpt2(tmp_path) -> Path:
    """The folder of a small GPT-2."""
    return write_model(tmp_path / "gpt2", GPT2_CONFIG, gpt2_tensors(GPT2_CONFIG))


@pytest.fixture
def llama(tmp_path) -> Path:
    """The folder of a small Llama."""
    return write_model(tmp_path / "llama", LLAMA_CONFIG, llama_tensors(LLAMA_CONFIG))


@pytest.fixture(scope="module")
def compiler():
    """A compiler that keeps nothing on disk."""
    return Compiler(Target.host(), ObjectCache(None), servers=0)


@pytest.fixture(params=[1, 2, 4, 8])
def team(compiler, request):
    """A team of 1, 2, 4 or 8 threads."""
    before = threading.active_count()
    team = Team(compiler, request.param)
    yield team
    team.close()
    assert threading.active_count() == before, "a thread of the team did not find its way out"
