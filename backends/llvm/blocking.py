"""How a matrix product is cut: into tiles for threads, blocks for caches, tiles for registers.

The register tile is given by the registers (`outer_tile`), the depth of a block of k by L1, and the
most of A and B that a thread keeps packed by L2. What is left to choose is a tile of C, the unit
that threads take. A wide one reads A seldom, a tall one packs B seldom, and small ones keep more
threads busy to the end; a rough cost model weighs that, in multiply-adds.

Measured on a Zen 3 core (AVX2, 32 KiB L1, 512 KiB L2) by CPU time, the machine shared with other
work, so as shares of what a micro-kernel alone reached in the same milliseconds, +-5 points:

- [1024, 128]·[688, 128]ᵀ: A as it lies 92 %, packed 85 %: broadcasts with constant displacements
  need no packing. [k, m] is another matter: read as it lies it fills a cache line a step.
- Tiles of [1024, 256]·[256, 128]: 1026 x 16 read A from L3 eight times over, 93 %; 258 x 64, 98 %.
- k = 344: one block of 344 89 %, two of 172 84 %; A [1024, 688] by its columns: blocks of 256
  82 %, of 344 78 %, of 512 70 %.
- [m, 768]·[2304, 768]ᵀ as dot products, and with B transposed first: m = 4: 33 and 23 %;
  m = 12: 47 and 38 %; m = 24: 38 and 60 %.

The AVX-512 tile's figure is from another machine (249 GFLOP/s on one core); everything else about
AVX-512 and NEON here is arithmetic, not measurement.
"""

import math
from dataclasses import dataclass

from backends.llvm.microkernel import Tile, dot_rows, outer_tile
from backends.llvm.target import Target

__all__ = ["Plan", "plan_gemm"]

ITEM_BYTES = {"f32": 4, "f64": 8}

# The depth of a block of k, as near as equal blocks come: a panel of A (6 KiB) and one of B
# (16 KiB) meet in a 32 KiB L1, and L2 holds a block of each.
_DEPTH = 256
# What packed blocks may take of L2, which is 512 KiB on the smallest server cores of today.
_A_BLOCK_BYTES = 256 * 1024
_B_BLOCK_BYTES = 256 * 1024
# Up to so many rows, B [n, k] is multiplied as it lies (dot products) rather than transposed.
_DOT_MAX_ROWS = 16
# About what it costs to fetch a number into a tile, in multiply-adds: A read as it lies, A packed,
# B packed, B transposed. Packing itself measured 5 for A in L2, 3 for B; the rest is for L3.
_READ_A, _PACK_A, _PACK_B, _TRANSPOSE_B = 3, 8, 6, 8
# What handing out a tile is taken to cost, in multiply-adds (0.2 microseconds).
_TILE_COST = 10_000


@dataclass(frozen=True)
class Plan:
    """A matmul's sizes and how it is cut.

    `form` is the micro-kernel: 'outer', 'dot' or, for k = 0, 'zero'. `block_rows` and
    `block_columns` are whole register tiles, and so may pass C's edge; `depth` divides k into
    blocks of which only the last may be shorter.
    """

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
    def scratch_layout(self) -> tuple[int, int, int]:
        """Numbers of scratch before the packed block of A, before packed B, and in all."""
        a_start = _round_up(self.tile.rows * self.tile.width, 16)
        a_rows = self.block_rows if self.pack_a else 0
        b_columns = self.block_columns if self.pack_b else 0
        if self.form == "outer" and not self.pack_b and self.n % self.tile.width:
            b_columns = self.tile.width  # only C's right edge
        # A transposed panel may be written up to a vector past its end.
        b_start = a_start + _round_up(a_rows * self.depth + self.tile.lanes, 16)
        return a_start, b_start, b_start + b_columns * self.depth

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
    pack_a = m > 1 and (trans_a or _rows_collide(tile.rows, k * ITEM_BYTES[dtype]))
    form, pack_b = "outer", True
    if k == 0:
        form, pack_a, pack_b = "zero", False, False
    elif trans_b and m <= _DOT_MAX_ROWS and not (trans_a and m > 1):
        rows = _ceil(m, _ceil(m, dot_rows(target)))
        form, pack_a, pack_b, tile = "dot", False, False, Tile(rows, 16 // lanes, lanes)
    elif not trans_b and m <= tile.rows:
        pack_b = False
    # Blocks of equal depth, so that the last is no sliver (and no shorter than a vector).
    depth = max(1, k)
    if pack_b:
        blocks = max(1, (k + _DEPTH // 2) // _DEPTH)
        depth = min(_round_up(_ceil(k, blocks), 4), k)
    block_rows, block_columns = _cut(
        (batch, m, n, k),
        tile,
        rows_at_most=_A_BLOCK_BYTES // (depth * ITEM_BYTES[dtype]) if pack_a else m,
        columns_at_most=_B_BLOCK_BYTES // (depth * ITEM_BYTES[dtype]) if pack_b else n,
        a_cost=_PACK_A if pack_a else _READ_A,
        b_cost=(_TRANSPOSE_B if trans_b else _PACK_B) if pack_b else 0,
    )
    return Plan(
        dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b, form, tile,
        pack_a, pack_b, depth, block_rows, block_columns,
    )  # fmt: skip


def _rows_collide(rows: int, stride_bytes: int) -> bool:
    """Whether `rows` numbers a stride apart fall into too few of L1's 64 sets of 8 lines."""
    sets = 64 // math.gcd(64, _ceil(stride_bytes, 64)) if stride_bytes % 64 == 0 else 64
    return rows > 6 * sets


def _cut(
    sizes: tuple[int, int, int, int],
    tile: Tile,
    rows_at_most: int,
    columns_at_most: int,
    a_cost: int,
    b_cost: int,
) -> tuple[int, int]:
    """The rows and columns of a thread's tile for which fetching and idling cost the least.

    The costs are those of one number of A and of B, in multiply-adds.
    """
    batch, m, n, k = sizes

    def cost(shape: tuple[int, int]) -> float:
        rows, columns = min(shape[0], m), min(shape[1], n)
        tiles = batch * _ceil(m, rows) * _ceil(n, columns)
        work = batch * m * n * k * (1 + a_cost / columns + b_cost / rows)
        per_tile = work / tiles + _TILE_COST
        # The last round of tiles leaves threads idle: the sum over likely teams.
        return sum(_ceil(tiles, team) * team * per_tile for team in (2, 4, 8))

    rows = {r for r in _shares(m, tile.rows) if r <= max(rows_at_most, tile.rows)}
    columns = {c for c in _shares(n, tile.width) if c <= max(columns_at_most, tile.width)}
    return min(((r, c) for r in sorted(rows) for c in sorted(columns)), key=cost)


def _shares(size: int, unit: int) -> set[int]:
    """Lengths in whole units that cut `size` into 1, 2, 3, 4, 6, 8, 12, … nearly equal parts."""
    units = _ceil(size, unit)
    parts = {factor << shift for factor in (2, 3) for shift in range(units.bit_length())}
    return {_ceil(units, min(count, units)) * unit for count in parts | {1}}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, unit: int) -> int:
    return _ceil(a, unit) * unit
