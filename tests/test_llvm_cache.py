"""The object cache: damaged entries, many writers, and disks that do not cooperate."""

import importlib
import multiprocessing
import os
import signal

import pytest

from backends.llvm import cache as cache_module
from backends.llvm import lowering
from backends.llvm.cache import ObjectCache, emitter_fingerprint, entry_name
from backends.llvm.compiler import Compiler
from backends.llvm.target import Target
from euler_ir.builder import Builder
from euler_ir.op import Composite
from euler_ir.types import F32
from tests.llvm_kernels import call, constant_kernel

NAME = "0" * 64


def results(directory, values) -> tuple[list[int], Compiler]:
    """Compile and call the constant kernels for `values` with a cache in `directory`."""
    compiler = Compiler(Target.host(), ObjectCache(directory), servers=0)
    sources = [constant_kernel(value) for value in values]
    addresses = compiler.load(sources)
    return [call(addresses[source.key][0]) for source in sources], compiler


def in_children(count, function) -> list[int]:
    """Run `function` in `count` forked children that start together; their exit codes."""
    context = multiprocessing.get_context("fork")
    gate = context.Event()

    def child():
        gate.wait(30)
        function()

    children = [context.Process(target=child) for _ in range(count)]
    for process in children:
        process.start()
    gate.set()
    for process in children:
        process.join(60)
    return [process.exitcode for process in children]


def test_what_was_put_is_got(tmp_path):
    cache = ObjectCache(tmp_path / "new" / "directory")
    assert cache.get(NAME) is None
    cache.put(NAME, b"object")
    assert cache.get(NAME) == b"object"
    assert [path.name for path in cache.directory.iterdir()] == [NAME]


def test_directory_is_the_owners_alone(tmp_path):
    cache = ObjectCache(tmp_path / "private")
    cache.put(NAME, b"object")
    assert cache.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[: len(entry) // 2],
        lambda entry: entry[:10],
        lambda entry: entry[:-1],
        lambda entry: entry + b"\0",
        lambda entry: bytes([entry[0] ^ 1]) + entry[1:],
        lambda entry: entry[:20] + bytes([entry[20] ^ 128]) + entry[21:],
        lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]),
        lambda entry: b"not an entry at all, but long enough to have a header " * 3,
    ],
)
def test_damaged_entry_is_rebuilt(tmp_path, damage):
    assert results(tmp_path, [7])[0] == [7]
    (path,) = tmp_path.iterdir()
    genuine = path.read_bytes()
    path.write_bytes(damage(genuine))

    got, compiler = results(tmp_path, [7])

    assert got == [7]
    assert (compiler.hits, compiler.compiled) == (0, 1)
    assert path.read_bytes() == genuine


def test_entry_under_another_name_is_not_taken(tmp_path):
    results(tmp_path, [1])
    (one,) = tmp_path.iterdir()
    results(tmp_path, [2])
    (two,) = set(tmp_path.iterdir()) - {one}
    two.write_bytes(one.read_bytes())
    assert results(tmp_path, [1, 2])[0] == [1, 2]


def test_warm_load_compiles_nothing(tmp_path):
    _, cold = results(tmp_path, range(5))
    got, warm = results(tmp_path, range(5))
    assert got == list(range(5))
    assert (cold.hits, cold.compiled) == (0, 5)
    assert (warm.hits, warm.compiled) == (5, 0)


def test_many_processes_fill_an_empty_cache(tmp_path):
    for attempt in range(3):
        directory = tmp_path / str(attempt)

        def check(directory=directory):
            assert results(directory, [1, 2, 3])[0] == [1, 2, 3]

        assert in_children(8, check) == [0] * 8
        assert len(list(directory.iterdir())) == 3, "a temporary file was left behind"
        assert results(directory, [1, 2, 3])[1].compiled == 0


def test_writer_killed_before_its_rename(tmp_path, monkeypatch):
    def die(source, destination):
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        assert in_children(1, lambda: results(tmp_path, [5])) == [-signal.SIGKILL]
    (leftover,) = tmp_path.iterdir()

    got, compiler = results(tmp_path, [5])
    assert got == [5] and compiler.compiled == 1

    os.utime(leftover, (0, 0))
    compiler.cache.trim()
    assert not leftover.exists()
    assert results(tmp_path, [5])[1].hits == 1


def test_unwritable_directory_warns_once_and_compiles(tmp_path, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert results(blocked, [3, 4])[0] == [3, 4]
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert str(blocked) in warning and "EULER_CACHE" in warning


def test_full_disk_warns_once_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    def full(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert results(tmp_path, [3, 4])[0] == [3, 4]
    assert capfd.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_go_first(tmp_path):
    cache = ObjectCache(tmp_path, limit_bytes=1000)
    names = [f"{index:064d}" for index in range(4)]
    for age, name in enumerate(names):
        cache.put(name, bytes(300))
        os.utime(tmp_path / name, (age + 1, age + 1))
    cache.get(names[0])
    cache.trim()
    assert [cache.get(name) is not None for name in names] == [True, False, False, True]


def test_trim_keeps_what_fits(tmp_path):
    cache = ObjectCache(tmp_path, limit_bytes=10_000)
    cache.put(NAME, bytes(300))
    cache.trim()
    assert cache.get(NAME) == bytes(300)


def test_names_tell_parts_and_targets_apart():
    assert entry_name("ab", "c") != entry_name("a", "bc")
    host = Target.host()
    older = Target(host.triple, "x86-64", "", 16, 16)
    source = constant_kernel(1)
    symbols = [Compiler(target, servers=0).symbols(source) for target in (host, older)]
    assert symbols[0] != symbols[1]


def test_fingerprint_follows_the_sources(tmp_path):
    source = tmp_path / "euler_ir" / "ops.py"
    source.parent.mkdir()
    source.write_text("x = 1")
    before = emitter_fingerprint(tmp_path)
    source.write_text("x = 2")
    assert emitter_fingerprint(tmp_path) != before


def test_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EULER_CACHE", str(tmp_path))
    assert cache_module.default_directory() == tmp_path
    monkeypatch.delenv("EULER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_module.default_directory() == tmp_path / ".cache" / "euler"


class Shifted(Composite):
    """y = x + 1"""
    name = "test_shifted"

    def decompose(self, b, x):
        return x + 1.0


def test_a_lowering_from_outside_is_known_by_its_file_too(tmp_path, monkeypatch):
    """Else an edited one would get the objects of the old one, if its key stayed as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    with Builder("f") as b:
        b.apply(Shifted(), b.input("x", F32, (2,)))
    keys = []
    for number in (1, 2):
        (tmp_path / f"lowering{number}.py").write_text(
            "from backends.llvm.kernel import KernelSource\n\n\n"
            f"def lower(node, target):\n    return KernelSource('shifted', (), {number})\n")
        monkeypatch.setattr(lowering, "LOWERINGS", {})
        lowering.lowers(Shifted)(importlib.import_module(f"lowering{number}").lower)
        keys.append(lowering.lower_node(b.nodes[0], Target.host()).key)
    assert all(key.startswith("shifted of ") for key in keys) and keys[0] != keys[1]
