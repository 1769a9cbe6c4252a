"""Writing down what the compiler made of a function: `--dump-ir DIR`.

    DIR/step/00-build.ir ... 07-dce.ir    the function after each pass
    DIR/step/schedule.txt                 every buffer's offset, size and lifetime
    DIR/step/kernels/003-fused.ll, .s     each kernel's LLVM IR and assembly
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from backends.backend import Backend
from euler_ir.graph import Function
from euler_ir.plan import Kernel, Plan
from euler_ir.text import print_function
from euler_ir.verify import verify
from runtime.compiler.plan_text import describe
from runtime.storage.files import write_error


class Dump:
    """Writes into one directory; files of an earlier dump there are replaced by name."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self._stages: dict[str, int] = {}

    def stage(self, function_name: str, stage: str, function: Function) -> None:
        """The function after a pass; it is verified, so that a faulty pass is caught here."""
        number = self._stages.get(function_name, 0)
        self._stages[function_name] = number + 1
        self._write(Path(function_name, f"{number:02d}-{stage}.ir"), print_function(function))
        verify(function)

    def schedule(self, plan: Plan) -> None:
        self._write(Path(plan.function.name, "schedule.txt"), describe(plan))

    def kernels(self, function: Function, kernels: Sequence[Kernel], backend: Backend) -> None:
        """One listing for each distinct kernel, named after its first use."""
        distinct = {id(kernel.code): number for number, kernel in reversed([*enumerate(kernels)])}
        for number in sorted(distinct.values()):
            kernel = kernels[number]
            for ending, text in backend.listing(kernel).items():
                name = re.sub(r"\W", "_", kernel.node.op.name)
                self._write(Path(function.name, "kernels", f"{number:03d}-{name}.{ending}"), text)

    def _write(self, relative: Path, text: str) -> None:
        path = self._directory / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        except OSError as error:
            raise write_error(error, path) from error
