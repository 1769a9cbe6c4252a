"""The machine that code is generated for: emitters take a `Target` and never ask the host.

A target is LLVM's triple, CPU and feature string plus the two facts that decide the shape of a
vector kernel: how wide a vector register is and how many there are. `Target.host()` describes this
machine; `--cpu-features` (a list such as `-avx512f` or `-avx2,-fma`) switches features off, to
debug, to compare, or to make objects that older machines run too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

from euler_ir.errors import EulerError

__all__ = ["Target"]

# Switching off the feature on the left means nothing unless those on the right go with it: LLVM
# would switch it back on because they imply it. avx512* stands for the whole family.
_REQUIRED_BY = {
    "avx": ("avx2", "fma", "f16c", "vaes", "vpclmulqdq", "avxvnni", "avx512*"),
    "avx2": ("avx512*", "avxvnni", "avxifma", "avxneconvert", "avxvnniint8", "avxvnniint16"),
    "fma": ("avx512*",),
    "f16c": ("avx512*",),
    "avx512f": ("avx512*",),
    "avx512bw": ("avx512bf16", "avx512fp16", "avx512vbmi", "avx512vbmi2", "avx512bitalg"),
    "avx512vl": ("avx512fp16",),
}
# What all code for an architecture has: LLVM stops the process where one of these is missing.
_ALWAYS = {"x86_64": frozenset({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})}


@dataclass(frozen=True)
class Target:
    """Where the code runs.

    `features` is LLVM's feature string, sorted, so equal targets compare and hash equal.
    `vector_bytes` is the width of the widest vector register, `registers` their number.
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int

    @classmethod
    def host(cls, cpu_features: str = "") -> "Target":
        """This machine, less (or plus) the comma-separated `cpu_features`: `-name` or `name`.

        Raises EulerError for a name that LLVM does not know here, for one that this CPU lacks, and
        for one that its architecture cannot be without.
        """
        triple = llvm.get_process_triple()
        architecture = triple.split("-")[0]
        known = dict(llvm.get_host_cpu_features())
        features = dict(known)
        for item in filter(None, (part.strip() for part in cpu_features.split(","))):
            name, wanted = item.lstrip("+-"), not item.startswith("-")
            if name not in known:
                near = ", ".join(sorted(f for f in known if f[:3] == name[:3])) or "none alike"
                raise EulerError(f"--cpu-features: unknown feature '{name}' (known: {near})")
            if wanted and not known[name]:
                raise EulerError(f"--cpu-features: this CPU has no '{name}'")
            if not wanted and name in _ALWAYS.get(architecture, ()):
                raise EulerError(f"--cpu-features: {architecture} code cannot do without '{name}'")
            features[name] = wanted
            if not wanted:
                _switch_off_dependents(features, name)
        return cls.of(triple, llvm.get_host_cpu_name(), features)

    @classmethod
    def of(cls, triple: str, cpu: str, features: Mapping[str, bool]) -> "Target":
        """Any machine, e.g. `of("x86_64-unknown-linux-gnu", "znver4", {"avx512f": True})`."""
        vector_bytes, registers = _vector_registers(triple, features)
        text = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
        return cls(triple, cpu, text, vector_bytes, registers)

    def has(self, feature: str) -> bool:
        """Whether `feature` (LLVM's name) is switched on."""
        return f"+{feature}" in self.features.split(",")

    def lanes(self, item_bytes: int) -> int:
        """Elements of `item_bytes` bytes in one vector register."""
        return self.vector_bytes // item_bytes


def _switch_off_dependents(features: dict[str, bool], name: str) -> None:
    for pattern in _REQUIRED_BY.get(name, ()):
        for other in features:
            if other == pattern or (pattern.endswith("*") and other.startswith(pattern[:-1])):
                features[other] = False


def _vector_registers(triple: str, features: Mapping[str, bool]) -> tuple[int, int]:
    architecture = triple.split("-")[0]
    if architecture == "x86_64":
        if features.get("avx512f"):
            return 64, 32
        return (32 if features.get("avx") else 16), 16
    return 16, 32  # NEON, and a safe guess for what else LLVM calls a 64-bit machine
