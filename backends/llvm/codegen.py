"""Textual LLVM IR to a native object: the one place where LLVM's optimiser and code generator run.

Run as a script it is a compile server: it takes modules on standard input and answers with objects
on standard output, so that a cold start can use more than one core. Threads cannot do that, since
llvmlite holds one lock around every call into LLVM; a forked copy could inherit that lock taken.
For the same reason this file imports nothing of this project: the server starts in the time that
llvmlite takes to load.

The message format, both ways, is a length (8 bytes, little endian) and as many bytes. The first
message to the server is the target, three lines: triple, CPU, features. An empty answer means that
the module did not compile.
"""

from __future__ import annotations

import struct
import sys
from typing import BinaryIO

import llvmlite.binding as llvm

_LENGTH = struct.Struct("<Q")


class CodeGenerator:
    """Optimises and compiles modules for one target (LLVM's names of triple, CPU and features)."""

    def __init__(self, triple: str, cpu: str, features: str):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        llvm.initialize_native_asmparser()  # for inline assembly
        self.target_machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=cpu,
            features=features,
            opt=2,
            reloc="pic",
            # One object's code and constants are linked into one block of memory, so that 32-bit
            # distances reach and constants fold into instructions; the large model can't do that.
            codemodel="small",
            jit=True,
        )

    def optimise(self, text: str) -> llvm.ModuleRef:
        """Parse, verify and optimise a module; RuntimeError with LLVM's words if it is invalid."""
        module = llvm.parse_assembly(text, llvm.create_context())
        module.triple = self.target_machine.triple
        module.data_layout = str(self.target_machine.target_data)
        module.verify()
        # Inner loops are explicit vectors already: LLVM's vectorisers would only rewrite the
        # remainder loops, at a cost in compile time.
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = False
        options.slp_vectorization = False
        # Emitters unroll where it pays; a loop can still ask for it with metadata. Unrolling the
        # rest made matmul kernels no faster and 40% longer to compile.
        options.loop_unrolling = False
        builder = llvm.create_pass_builder(self.target_machine, options)
        builder.getModulePassManager().run(module, builder)
        return module

    def compile(self, text: str) -> bytes:
        """The object file of a module."""
        return self.target_machine.emit_object(self.optimise(text))

    def assembly(self, text: str) -> str:
        """The assembly of a module, as `compile` would encode it."""
        return self.target_machine.emit_assembly(self.optimise(text))


def send(stream: BinaryIO, message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """The next message; EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return _read_exactly(stream, length)


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("the compile server's pipe closed")
    return data


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    generator = CodeGenerator(*receive(requests).decode().split("\n"))
    while True:
        text = receive(requests).decode()
        try:
            compiled = generator.compile(text)
        except RuntimeError:
            compiled = b""  # the client compiles it itself and so reports the error
        send(answers, compiled)


if __name__ == "__main__":
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
