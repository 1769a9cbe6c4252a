"""From kernel sources to addresses: loading in turns, servers, dumps and broken kernels."""

import dataclasses
from collections import deque

import pytest
from llvmlite import ir

from backends.llvm import compiler as compiler_module
from backends.llvm.cache import ObjectCache
from backends.llvm.compiler import Compiler
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.target import Target
from euler_ir.errors import EulerError
from tests.llvm_kernels import call, constant_kernel


def make_compiler(servers=0):
    return Compiler(Target.host(), ObjectCache(None), servers)


def check(compiler, values):
    addresses = compiler.load([constant_kernel(value) for value in values])
    assert [call(addresses[f"constant {value}"][0]) for value in values] == list(values)


def test_kernels_of_equal_key_are_compiled_once():
    compiler = make_compiler()
    compiler.load([constant_kernel(1), constant_kernel(1)])
    check(compiler, [1, 2])
    assert compiler.compiled == 2


def test_loading_more_leaves_earlier_addresses_valid():
    compiler = make_compiler()
    first = compiler.load([constant_kernel(1)])
    check(compiler, [2, 3])
    assert compiler.load([constant_kernel(1)]) == first
    check(compiler, [1])


def test_kernel_without_phases_needs_no_code():
    compiler = make_compiler()
    empty = dataclasses.replace(constant_kernel(1), key="empty", phases=())
    addresses = compiler.load([empty, constant_kernel(2)])
    assert addresses["empty"] == ()
    assert compiler.compiled == 1


def test_two_compilers_of_the_same_kernel_do_not_clash():
    one, two = make_compiler(), make_compiler()
    check(one, [1, 2])
    check(two, [1, 2])


def test_server_gives_the_same_objects():
    sources = [constant_kernel(value) for value in range(4)]
    waiting, done = deque(sources), []
    make_compiler()._compile_remotely(waiting, done)
    assert not waiting
    assert _by_key(done) == _by_key(make_compiler()._compile(sources))


def test_server_puts_back_what_it_cannot_compile():
    kernels = [constant_kernel(1), broken_kernel(), constant_kernel(2)]
    waiting, done = deque(kernels), []
    make_compiler()._compile_remotely(waiting, done)
    assert [source.key for source, _ in done] == ["constant 1"]
    assert {source.key for source in waiting} == {"broken", "constant 2"}


def test_work_is_shared_with_servers(monkeypatch):
    monkeypatch.setattr(compiler_module, "_KERNELS_WORTH_A_SERVER", 2)
    check(make_compiler(servers=2), range(20))


def test_servers_that_fail_are_done_without(monkeypatch):
    monkeypatch.setattr(compiler_module, "_KERNELS_WORTH_A_SERVER", 2)
    monkeypatch.setattr(compiler_module.sys, "executable", "/bin/false")
    check(make_compiler(servers=2), range(8))
    monkeypatch.setattr(compiler_module.sys, "executable", "/no/such/python")
    check(make_compiler(servers=2), range(8))


@pytest.mark.parametrize("servers", [0, 2])
def test_invalid_ir_is_reported(monkeypatch, servers):
    monkeypatch.setattr(compiler_module, "_KERNELS_WORTH_A_SERVER", 2)

    good = [constant_kernel(value) for value in range(6)]
    with pytest.raises(RuntimeError, match="ret"):
        make_compiler(servers).load([broken_kernel(), *good])


def test_phase_that_was_not_defined_is_reported():
    kernel = dataclasses.replace(
        constant_kernel(1), key="two phases", phases=(Phase("one", 1), Phase("two", 1))
    )
    with pytest.raises(RuntimeError, match="'two phases' did not define its phase euler_.*_two"):
        make_compiler().load([kernel])


def test_dumps_name_the_kernels_function():
    compiler, source = make_compiler(), constant_kernel(42)
    (symbol,) = compiler.symbols(source)
    assert f"define void @\"{symbol}\"" in compiler.llvm_ir(source)
    assert "target datalayout" in compiler.llvm_ir(source, optimised=True)
    assert f"{symbol}:" in compiler.assembly(source)


def broken_kernel():
    """A kernel whose function lacks the value that it should return."""

    def emit(module, symbols):
        signature = ir.FunctionType(ir.IntType(64), [])
        function = ir.Function(module, signature, symbols[0])
        ir.IRBuilder(function.append_basic_block()).ret_void()

    return KernelSource(key="broken", phases=(Phase("main", 1),), emit=emit)


def _by_key(compiled):
    return [(source.key, machine_code) for source, machine_code in compiled]


@pytest.mark.parametrize("name", ["64bit", "sse2"])
def test_what_all_code_for_an_architecture_has_cannot_be_switched_off(name):
    if not Target.host().triple.startswith("x86_64"):
        pytest.skip("features of x86-64")
    with pytest.raises(EulerError, match=f"x86_64 code cannot do without '{name}'"):
        Target.host(f"-{name}")
