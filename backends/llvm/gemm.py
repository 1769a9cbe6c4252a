"""Matrix products for the LLVM backend: C[b] = op(A[b])·op(B[b]), with a fused epilogue.

This is the entry; `blocking.py` decides how the product is cut, `gemm_emitter.py` writes the code
around the register tiles of `microkernel.py` and the packing of `packing.py`, and where k is cut
into chunks `gemm_chunks.py` adds up their results.
"""

from llvmlite import ir

from backends.llvm.blocking import plan_gemm
from backends.llvm.epilogue import Epilogue
from backends.llvm.gemm_chunks import emit_sum, sum_tiles
from backends.llvm.gemm_emitter import GemmEmitter
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.target import Target
from euler_ir.types import DType

__all__ = ["gemm"]


def gemm(
    target: Target,
    dtype: DType,
    batch: int,
    m: int,
    n: int,
    k: int,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    shared_a: bool = False,
    shared_b: bool = False,
    epilogue: Epilogue | None = None,
    key: str = "matmul",
) -> KernelSource:
    """The kernel of C[b] = op(A[b])·op(B[b]) for `dtype` F32 or F64; C is [batch, m, n].

    A is stored [batch, m, k], or [batch, k, m] with `trans_a`; B [batch, k, n], or [batch, n, k]
    with `trans_b`. A `shared` operand has no batch axis and serves every item of the batch. The
    kernel's args are A, B, the epilogue's operands, C. Sizes of 0 are fine: with k = 0 the product
    is 0, and with an empty C there is nothing to run. `key` comes first in the kernel's key.
    """
    layout = ("T" if trans_a else "N") + ("T" if trans_b else "N")
    parts = [key, str(dtype), layout, f"{batch}x{m}x{n}x{k}"]
    parts += ["shared-a"] * shared_a + ["shared-b"] * shared_b
    parts += [f"epilogue({epilogue.key})"] if epilogue else []
    full_key = " ".join(parts)
    if batch * m * n == 0:
        return KernelSource(full_key, (), lambda module, symbols: None)
    if shared_b and not shared_a and not trans_a:
        batch, m, shared_b = 1, batch * m, False  # the batch is more rows of one product
    if m == 1:
        trans_a = False  # a vector lies as it lies
    if n == 1:
        trans_b = True
    plan = plan_gemm(target, dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b)
    phases = [Phase("matmul", plan.tiles)]
    if plan.chunks > 1:
        phases.append(Phase("sum of chunks", sum_tiles(plan)))
    # With several blocks of k, C holds partial sums while operands are still to be read.
    whole = plan.chunks > 1 or plan.depth_blocks == 1
    elementwise = epilogue.elementwise if epilogue and whole else ()

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        GemmEmitter(plan, epilogue, module, symbols[0]).emit_kernel()
        if plan.chunks > 1:
            emit_sum(plan, epilogue, module, symbols[1])

    return KernelSource(
        key=full_key,
        phases=tuple(phases),
        emit=emit,
        workspace_bytes=plan.workspace_bytes,
        scratch_bytes=plan.scratch_bytes,
        inplace=tuple((0, 2 + i) for i in elementwise),
    )
