"""The second phase of a matrix product whose k is cut into chunks: their results' sum, to C.

Each chunk's result lies in the workspace as `gemm_emitter.py` left it, rows of `chunk_columns`
numbers. A tile of this phase takes some rows of C: for each vector it loads every chunk's, adds
them pairwise, which is a fixed order, and passes the sum through the epilogue.
"""

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.blocking import Plan
from backends.llvm.emit import address, constant
from backends.llvm.epilogue import Epilogue, store_result
from backends.llvm.folding import combine_pairs

__all__ = ["emit_sum", "sum_tiles"]

# Tiles at most, and the numbers of C that one takes at least.
_TILES, _NUMBERS = 16, 2048


def emit_sum(plan: Plan, epilogue: Epilogue | None, module: ir.Module, symbol: str) -> None:
    """The phase's function; its args are those of the whole kernel."""
    b, args, tile, _ = e.kernel(module, symbol)
    operand_count = epilogue.operand_count if epilogue else 0
    operands = tuple(e.operand(b, args, 2 + i) for i in range(operand_count))
    c, workspace = (e.operand(b, args, 2 + operand_count + i) for i in (0, 1))
    vector = se.value_type(plan.dtype, plan.tile.lanes)
    rows = _tile_rows(plan)
    first_row = b.mul(tile, constant(rows))
    left = b.sub(constant(plan.batch * plan.m), first_row)

    def store(row: ir.Value, col: ir.Value, mask: ir.Constant | None) -> None:
        place = b.add(b.mul(row, constant(plan.chunk_columns)), col)
        parts = []
        for chunk in range(plan.chunks):
            own = b.add(place, constant(chunk * plan.chunk_items))
            parts.append(e.load(b, address(b, workspace, own, vector.element), vector))
        value = combine_pairs(b, "sum", parts, plan.dtype)
        pointer = address(b, c, b.add(b.mul(row, constant(plan.n)), col), vector.element)
        store_result(b, epilogue, operands, value, pointer, row, col, mask)

    rest = plan.n % vector.count
    with e.loop(b, e.minimum(b, constant(rows), left), 1) as (r, _):
        row = b.add(first_row, r)
        if plan.n > rest:
            with e.loop(b, constant(plan.n - rest), vector.count) as (col, _):
                store(row, col, None)
        if rest:
            store(row, constant(plan.n - rest), e.prefix_mask(vector.count, rest))
    b.ret_void()


def sum_tiles(plan: Plan) -> int:
    """Tiles of the phase."""
    rows = plan.batch * plan.m
    return -(-rows // _tile_rows(plan))


def _tile_rows(plan: Plan) -> int:
    rows = plan.batch * plan.m
    return min(rows, max(-(-rows // _TILES), -(-_NUMBERS // plan.n)))
