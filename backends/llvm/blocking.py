"""How a matrix product is cut: into tiles for threads, blocks for caches, tiles for registers.

DRAFT
"""

from collections.abc import Iterator
from dataclasses import dataclass

from backends.llvm.microkernel import Tile, dot_rows, outer_tile
from backends.llvm.target import Target

__all__ = ["Plan", "plan_gemm"]

ITEM_BYTES = {"f32": 4, "f64": 8}

# The depth of a block of k: a panel of B and one of A stay in a 32 KiB L1 while they meet.
_DEPTH = 384
# What a packed block of B may take of L2 (512 KiB on the smallest server cores of today).
_B_BLOCK_BYTES = 256 * 1024
# Up to so many rows, B [n, k] is multiplied as it lies (dot products) rather than transposed.
_DOT_MAX_ROWS = 8
# What packing one number costs, in multiply-adds.
_PACK_A_COST, _PACK_B_COST, _TRANSPOSE_B_COST = 3, 4, 5
# What handing out a tile costs, in multiply-adds (0.2 microseconds).
_TILE_COST = 10_000


@dataclass(frozen=True)
class Plan:
    """A matmul's sizes and how it is cut. `form` is 'outer', 'dot' or, for k = 0, 'zero'."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    shared_a: bool
    shared_b: bool
    form: str
    tile: Tile
    pack_a: bool
    pack_b: bool
    depth: int
    block_rows: int
    block_columns: int

    @property
    def depth_blocks(self) -> int:
        """Blocks of k; 1 for k = 0, which still has zeros to store."""
        return max(1, _ceil(self.k, self.depth))

    @property
    def row_tiles(self) -> int:
        return _ceil(self.m, self.block_rows)

    @property
    def column_tiles(self) -> int:
        return _ceil(self.n, self.block_columns)

    @property
    def tiles(self) -> int:
        return self.batch * self.row_tiles * self.column_tiles

    @property
    def panel_items(self) -> int:
        """Numbers from one packed panel of B to the next."""
        return self.depth * self.tile.width

    @property
    def scratch_layout(self) -> tuple[int, int, int]:
        """Numbers of scratch before the packed panel of A, before packed B, and in all."""
        sums = self.tile.rows * self.tile.width
        a_panel = _round_up(self.depth * self.tile.rows, 16) if self.pack_a else 0
        panels = 0
        if self.pack_b:
            panels = _ceil(self.block_columns, self.tile.width)
        elif self.form == "outer" and self.n % self.tile.width:
            panels = 1  # only C's right edge
        a_start = _round_up(sums, 16)
        return a_start, a_start + a_panel, a_start + a_panel + panels * self.panel_items

    @property
    def scratch_bytes(self) -> int:
        return self.scratch_layout[2] * ITEM_BYTES[self.dtype]


def plan_gemm(
    target: Target,
    dtype: str,
    batch: int,
    m: int,
    n: int,
    k: int,
    trans_a: bool,
    trans_b: bool,
    shared_a: bool,
    shared_b: bool,
) -> Plan:
    """The plan for sizes of at least 1 (k may be 0)."""
    lanes = target.lanes(ITEM_BYTES[dtype])
    tile = outer_tile(target, ITEM_BYTES[dtype], m, n)
    form, pack_a, pack_b = "outer", trans_a and m > 1, True
    if k == 0:
        form, pack_a, pack_b = "zero", False, False
    elif trans_b and m <= _DOT_MAX_ROWS and not pack_a:
        rows = _ceil(m, _ceil(m, dot_rows(target)))
        form, pack_b, tile = "dot", False, Tile(rows, 16 // lanes, lanes)
    elif not trans_b and m <= tile.rows:
        pack_b = False
    # Blocks of equal depth, so that the last is no sliver (and no shorter than a vector).
    depth = max(1, k)
    if pack_b:
        depth = min(_round_up(_ceil(k, _ceil(k, _DEPTH)), 4), k)
    pack_cost = (
        (_TRANSPOSE_B_COST if trans_b else _PACK_B_COST) if pack_b else 0,
        _PACK_A_COST if pack_a else 0,
    )
    block_bytes = _B_BLOCK_BYTES // (depth * ITEM_BYTES[dtype]) if pack_b else n
    block_rows, block_columns = _cut(batch, m, n, k, tile, pack_cost, block_bytes)
    return Plan(
        dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b, form, tile,
        pack_a, pack_b, depth, block_rows, block_columns,
    )  # fmt: skip


def _cut(
    batch: int, m: int, n: int, k: int, tile: Tile, pack_cost: tuple[int, int], columns_at_most: int
) -> tuple[int, int]:
    """The rows and columns of a thread's tile that cost the least, packing and idling included."""

    def cost(shape: tuple[int, int]) -> float:
        rows, columns = shape
        tiles = batch * _ceil(m, rows) * _ceil(n, columns)
        work = batch * m * n * k * (1 + pack_cost[0] / min(rows, m) + pack_cost[1] / min(columns, n))
        per_tile = work / tiles + _TILE_COST
        # The last round of tiles leaves threads idle: the mean over likely teams.
        return sum(_ceil(tiles, team) * per_tile * team for team in (2, 4, 8))

    rows = sorted(set(_shares(m, tile.rows)))
    columns = sorted({c for c in _shares(n, tile.width) if c <= max(columns_at_most, tile.width)})
    return min(((r, c) for r in rows for c in columns), key=cost)


def _shares(size: int, unit: int) -> Iterator[int]:
    """Lengths that cut `size` into 1, 2, 3, 4, 6, 8, 12, … nearly equal parts of whole units."""
    units = _ceil(size, unit)
    parts = 1
    while parts <= units:
        yield _ceil(units, parts) * unit
        if 3 * parts // 2 <= units and parts > 1:
            yield _ceil(units, 3 * parts // 2) * unit
        parts *= 2
    yield unit


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, unit: int) -> int:
    return _ceil(a, unit) * unit
