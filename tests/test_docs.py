"""The Python in the documentation runs, and prints what the page says.

All `python` blocks of a page are one program, run in order in a process of its own (the ops they
define would otherwise join every other test's registry). A `text` block right after a `python`
block is what that block prints, with the source notes (`file.py:line`) of a file that has the name
in PAGES and two lines between blocks. The lines of `ir` blocks come from nano-1m's training step,
after one pass or another; their source lines and numbers of values are not compared: they change
with every edit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends.backend import create
from euler_ir.passes.pipeline import optimize
from euler_ir.text import print_function
from model.config import preset
from model.objective import training_step
from model.optimizer import AdamWConfig

ROOT = Path(__file__).resolve().parents[1]
#: The pages with programs, and what each calls the file that the program is in.
PAGES = {"README.md": "my_program.py", "docs/writing-an-op.md": "my_ops.py"}
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
_IR_BLOCK = re.compile(r"^```ir\n(.*?)^```\n", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_MARK = "=== end of block ==="


def blocks(page: str) -> list[tuple[str, str | None]]:
    """The page's Python blocks with the output that it shows for each (None: it shows none)."""
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [(code, shown or None) for code, shown in found]


def comparable(text: str) -> str:
    lines = [re.sub(r"[\w-]+\.py:\d+", "FILE:LINE", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip()


@pytest.mark.parametrize(("page", "file"), PAGES.items())
def test_python_blocks_run_and_print_what_the_page_shows(page, file, tmp_path):
    shown = blocks(page)
    assert shown, f"{page} has no python blocks"
    script = tmp_path / file
    script.write_text("".join(f"{code}\nprint({_MARK!r})\n" for code, _ in shown), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, text=True, timeout=120,
        capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"})
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split(_MARK + "\n")[:-1]
    assert len(printed) == len(shown)
    for (code, expected), output in zip(shown, printed, strict=True):
        if expected is not None:
            assert output.strip() == expected.strip(), f"of the block\n{code}"


@pytest.fixture(scope="module")
def step_lines() -> set[str]:
    """Every line of the default preset's training step as built and after each pass."""
    backend = create("llvm")
    texts: list[str] = []
    function = training_step(preset("nano-1m"), AdamWConfig(), 4, 128, False)["step"]
    optimize(function, backend.composites, backend.epilogues,
             lambda stage, function: texts.append(print_function(function)))
    return {unnumbered(line) for text in texts for line in text.splitlines()}


def unnumbered(line: str) -> str:
    """The line as compared: `%v12` and `%12` are both some value."""
    return re.sub(r"%[a-z]?\d+", "%N", comparable(line))


@pytest.mark.parametrize("page", ["README.md", "docs/one-step.md"])
def test_ir_on_the_page_is_that_of_the_training_step(page, step_lines):
    shown = _IR_BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert shown, f"{page} shows no IR"
    for line in "".join(shown).splitlines():
        assert unnumbered(line) in step_lines, f"{page} shows a line that no stage has: {line}"


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md",
                                  *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])
def test_links_lead_to_files(page):
    path = ROOT / page
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}, which is not there"
