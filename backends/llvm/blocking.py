"""How a matrix product is cut: into tiles for threads, blocks for caches, tiles for registers.

The register tile is given by the registers (`outer_tile`), the depth of a block of k by L1, and the
most of A and B that a thread keeps packed by L2. What is left to choose is a tile of C, the unit
that threads take. A wide one reads A seldom, a tall one packs B seldom, and small ones keep more
threads busy to the end. Where C is small and k long, as in a weight's gradient, k too is cut: into
chunks, whose results a second phase adds up. A rough cost model weighs all that, in multiply-adds.
It knows the shape and the target, never how many threads there are.

Measured on a Zen 3 core (AVX2, 32 KiB L1, 512 KiB L2) by CPU time, the machine shared with other
work, so as shares of what a micro-kernel alone reached in the same milliseconds, +-5 points:

- [1024, 128]·[688, 128]ᵀ: A as it lies 92 %, packed 85 %: broadcasts with constant displacements
  need no packing. [k, m] is another matter: read as it lies it fills a cache line a step.
- Tiles of [1024, 256]·[256, 128]: 1026 x 16 read A from L3 eight times over, 93 %; 258 x 64, 98 %.
- k = 344: one block of 344 89 %, two of 172 84 %; A [1024, 688] by its columns: blocks of 256
  82 %, of 344 78 %, of 512 70 %.
- [1024, 128]ᵀ·[1024, 128] in 8 tiles with all of k: packed 36 x 64 numbers at a time, a third of
  the time is packing; 4 chunks of 66 x 128 take 16 % less in all. Chunks' results that do not stay
  in L2 undo that: 4 of 512 KiB 83 % of the speed without, 2 of 512 KiB 99 %.
- [m, 768]·[2304, 768]ᵀ as dot products, and with B transposed first: m = 4: 33 and 23 %;
  m = 12: 47 and 38 %; m = 24: 38 and 60 %.

The AVX-512 tile's figure is from another machine (249 GFLOP/s on one core); everything else about
AVX-512 and NEON here is arithmetic, not measurement.
"""

import itertools
import math
from dataclasses import dataclass

from backends.llvm.microkernel import Tile, dot_rows, outer_tile
from backends.llvm.target import Target
from euler_ir.types import DType

__all__ = ["Plan", "plan_gemm"]

# The depth of a block of k, as near as equal blocks come: a panel of A (6 KiB) and one of B
# (16 KiB) meet in a 32 KiB L1, and L2 holds a block of each.
_DEPTH = 256
# A block's depth is a multiple of this, and it has no fewer: the lanes of the widest vectors.
_DEPTH_UNIT = 16
# What packed blocks may take of L2, which is 512 KiB on the smallest server cores of today.
_A_BLOCK_BYTES = 256 * 1024
_B_BLOCK_BYTES = 256 * 1024
# Up to so many rows, B [n, k] is multiplied as it lies (dot products) rather than transposed.
_DOT_MAX_ROWS = 16
# About what it costs to fetch a number into a tile, in multiply-adds: A read as it lies, A packed,
# B packed, B transposed.
_READ_A, _PACK_A, _PACK_B, _TRANSPOSE_B = 3, 12, 6, 8
# What handing out a tile is taken to cost, in multiply-adds (0.2 microseconds).
_TILE_COST = 10_000
# The most chunks of k (their sums are added in registers), what storing and adding one number of a
# chunk costs, and what the barrier before the adding costs each thread (2 microseconds).
_MOST_CHUNKS, _CHUNK_COST, _BARRIER_COST = 16, 14, 100_000
# The most that the chunks' results may take, the L2 of two cores less what is packed.
_WORKSPACE_BYTES = 768 * 1024


@dataclass(frozen=True)
class Plan:
    """A matmul's sizes and how it is cut.

    `form` is the micro-kernel: 'outer', 'dot' or, for k = 0, 'zero'. `block_rows` and
    `block_columns` are whole register tiles, and so may pass C's edge. `depth` divides a chunk into
    blocks and `chunk` divides k, in which only the last of each may be shorter.
    """

    dtype: DType
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
    chunk: int
    block_rows: int
    block_columns: int

    @property
    def chunks(self) -> int:
        """Chunks of k; 1 for k = 0, which still has zeros to store."""
        return max(1, _ceil(self.k, self.chunk))

    @property
    def depth_blocks(self) -> int:
        """Blocks of a chunk; the last chunk may have fewer."""
        return _ceil(self.chunk, self.depth)

    @property
    def row_tiles(self) -> int:
        return _ceil(self.m, self.block_rows)

    @property
    def column_tiles(self) -> int:
        return _ceil(self.n, self.block_columns)

    @property
    def tiles(self) -> int:
        return self.batch * self.chunks * self.row_tiles * self.column_tiles

    @property
    def chunk_columns(self) -> int:
        """Columns of a chunk's result in the workspace: whole register tiles."""
        return _round_up(self.n, self.tile.width)

    @property
    def chunk_items(self) -> int:
        """Numbers of a chunk's result."""
        return self.batch * self.m * self.chunk_columns

    @property
    def workspace_bytes(self) -> int:
        """The chunks' results, where there is more than one."""
        return self.chunks * self.chunk_items * self.dtype.itemsize if self.chunks > 1 else 0

    def panel_items(self, width: int) -> int:
        """Numbers from one packed panel to the next: what packing writes too much lies between, and
        an odd number of cache lines keeps panels from falling into the same sets of L1."""
        line = 64 // self.dtype.itemsize
        return (_ceil(width * self.depth, line) + 1 | 1) * line

    @property
    def scratch_layout(self) -> tuple[int, int, int]:
        """Numbers of scratch before the packed block of A, before packed B, and in all."""
        a_panels = self.block_rows // self.tile.rows if self.pack_a else 0
        b_panels = self.block_columns // self.tile.width if self.pack_b else 0
        if self.form == "outer" and not self.pack_b and self.n % self.tile.width:
            b_panels = 1  # only C's right edge
        a_start = _round_up(self.tile.rows * self.tile.width, 16)
        b_start = a_start + a_panels * self.panel_items(self.tile.rows)
        return a_start, b_start, b_start + b_panels * self.panel_items(self.tile.width)

    @property
    def scratch_bytes(self) -> int:
        return self.scratch_layout[2] * self.dtype.itemsize


def plan_gemm(
    target: Target,
    dtype: DType,
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
    lanes = target.lanes(dtype.itemsize)
    tile = outer_tile(target, dtype.itemsize, m, n)
    pack_a = m > 1 and (trans_a or _rows_collide(tile.rows, k * dtype.itemsize))
    form, pack_b = "outer", True
    if k == 0:
        form, pack_a, pack_b = "zero", False, False
    elif trans_b and m <= _DOT_MAX_ROWS and not (trans_a and m > 1):
        rows = _ceil(m, _ceil(m, dot_rows(target)))
        form, pack_a, pack_b, tile = "dot", False, False, Tile(rows, 16 // lanes, lanes)
    elif not trans_b and m <= tile.rows:
        pack_b = False
    depth = _depth(k)
    sizes = (batch, m, n, k)
    block_rows, block_columns, chunk = _cut(
        sizes,
        tile,
        rows_at_most=_A_BLOCK_BYTES // (depth * dtype.itemsize) if pack_a else m,
        columns_at_most=_B_BLOCK_BYTES // (depth * dtype.itemsize) if pack_b else n,
        chunks=_chunks(sizes, tile, depth, dtype),
        a_cost=_PACK_A if pack_a else _READ_A,
        b_cost=(_TRANSPOSE_B if trans_b else _PACK_B) if pack_b else 0,
    )
    if form == "dot":
        depth = chunk  # the micro-kernel has blocks of its own
    return Plan(
        dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b, form, tile,
        pack_a, pack_b, depth, chunk, block_rows, block_columns,
    )  # fmt: skip


def _depth(k: int) -> int:
    """The depth of k's blocks: nearly equal ones, so that the last is no sliver."""
    blocks = max(1, (k + _DEPTH // 2) // _DEPTH)
    depth = _round_up(_ceil(max(1, k), blocks), _DEPTH_UNIT)
    while depth < k and 0 < k % depth < _DEPTH_UNIT:
        depth += _DEPTH_UNIT
    return min(depth, max(1, k))


def _chunks(sizes: tuple[int, int, int, int], tile: Tile, depth: int, dtype: DType) -> list[int]:
    """The lengths of chunks that k may be cut into, whole blocks; the first is all of k."""
    batch, m, n, k = sizes
    blocks = max(1, _ceil(k, depth))
    result_bytes = batch * m * _round_up(n, tile.width) * dtype.itemsize
    lengths = {
        length * depth
        for length in _shares(blocks, 1)
        if 1 < _ceil(blocks, length) <= min(_MOST_CHUNKS, _WORKSPACE_BYTES // result_bytes)
    }
    return [blocks * depth, *sorted(lengths, reverse=True)]


def _rows_collide(rows: int, stride_bytes: int) -> bool:
    """Whether `rows` numbers a stride apart fall into too few of L1's 64 sets of 8 lines."""
    sets = 64 // math.gcd(64, _ceil(stride_bytes, 64)) if stride_bytes % 64 == 0 else 64
    return rows > 6 * sets


def _cut(
    sizes: tuple[int, int, int, int],
    tile: Tile,
    rows_at_most: int,
    columns_at_most: int,
    chunks: list[int],
    a_cost: int,
    b_cost: int,
) -> tuple[int, int, int]:
    """The rows and columns of a thread's tile, and the chunk of k that it takes, for which
    fetching, adding up chunks and idling cost the least.

    The costs are those of one number of A and of B, in multiply-adds.
    """
    batch, m, n, k = sizes

    def cost(shape: tuple[int, int, int]) -> float:
        rows, columns = min(shape[0], m), min(shape[1], n)
        parts = max(1, _ceil(k, shape[2]))
        tiles = batch * parts * _ceil(m, rows) * _ceil(n, columns)
        work = batch * m * n * k * (1 + a_cost / columns + b_cost / rows)
        after = 0
        if parts > 1:
            work += batch * m * n * parts * _CHUNK_COST
            after = _BARRIER_COST
        per_tile = work / tiles + _TILE_COST
        # The last round of tiles leaves threads idle: the sum over likely teams.
        return sum(team * (_ceil(tiles, team) * per_tile + after) for team in (2, 4, 8))

    rows = {r for r in _shares(m, tile.rows) if r <= max(rows_at_most, tile.rows)}
    columns = {c for c in _shares(n, tile.width) if c <= max(columns_at_most, tile.width)}
    return min(itertools.product(sorted(rows), sorted(columns), chunks), key=cost)


def _shares(size: int, unit: int) -> set[int]:
    """Lengths in whole units that cut `size` into 1, 2, 3, 4, 6, 8, 12, … nearly equal parts."""
    units = _ceil(size, unit)
    parts = {factor << shift for factor in (2, 3) for shift in range(units.bit_length())}
    return {_ceil(units, min(count, units)) * unit for count in parts | {1}}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, unit: int) -> int:
    return _ceil(a, unit) * unit
