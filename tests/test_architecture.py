"""Imports go one way: runtime → model, backends → euler_ir → numpy. Read from the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What each package may import beside the standard library and itself.
ALLOWED = {
    "euler_ir": {"numpy", "ml_dtypes"},
    "backends": {"euler_ir", "numpy", "ml_dtypes", "llvmlite", "cuda", "nvmath"},
    "model": {"euler_ir", "numpy", "ml_dtypes", "regex"},
    "runtime": {"euler_ir", "backends", "model", "numpy", "ml_dtypes", "safetensors", "gguf",
                "lm_eval", "tqdm", "matplotlib"},
}

#: The rooms of runtime/: each may import from those before it. The commands come last.
RUNTIME_ROOMS = ("storage", "data", "compiler", "exchange", "settings", "engine", "inference",
                 "training", "evaluation", "profiling", "cli", "arguments")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text(), str(path))
           for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))}


def imported(statements) -> Iterator[str]:
    """Absolute names of what import statements among these nodes import, the module's own names
    included (`from a import b` imports a.b if that is a module, else a)."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def at_import_time(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those in functions, and not those for
    type checkers only."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    """Everywhere in the module, also in functions and for type checkers."""
    package = name.split(".")[0]
    allowed = ALLOWED[package] | {package} | sys.stdlib_module_names
    for target in imported(ast.walk(MODULES[name])):
        assert target.split(".")[0] in allowed, f"{name} imports {target}"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("runtime.")])
def test_rooms_of_the_runtime_import_one_way(name):
    room = name.split(".")[1]
    before = RUNTIME_ROOMS[:RUNTIME_ROOMS.index(room)] if room in RUNTIME_ROOMS else RUNTIME_ROOMS
    for target in imported(ast.walk(MODULES[name])):
        if target.startswith("runtime."):
            assert target.split(".")[1] in {*before, room}, f"{name} imports {target}"


def test_no_module_imports_itself_in_a_circle():
    edges = {name: sorted({target for target in imported(at_import_time(tree))
                           if target in MODULES and target != name})
             for name, tree in MODULES.items()}
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " → ".join([*path[path.index(name):], name])
        if name not in finished:
            for target in edges[name]:
                visit(target, [*path, name])
            finished.add(name)

    for name in MODULES:
        visit(name, [])


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are(name):
    assert ast.get_docstring(MODULES[name]), f"{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_no_pickle_and_no_executed_text(name):
    """Files and caches are data: nothing read from them is run."""
    for target in imported(ast.walk(MODULES[name])):
        assert target.split(".")[0] not in ("pickle", "marshal", "shelve", "dill"), target
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("exec", "eval", "__import__"), node.func.id
