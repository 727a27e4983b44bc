"""Measured tile sizes: a plain table, so that the first call compiles one kernel and times none."""

from math import prod
from typing import Literal, NamedTuple

import triton

from ..runtime.device import LARGE_SHARED_MEMORY


class Tile(NamedTuple):
    """Queries and keys of a tile of a portable kernel, and the kernel's compile options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The tiles of the three portable kernels."""

    forward: Tile
    dq: Tile
    dkdv: Tile


class Sm90Tile(NamedTuple):
    """Queries and keys of a tile of a Gluon kernel, and the stages of its rings.

    `own_stages` are the stages of the side that the tile cuts: the queries in forward and dq, the
    keys in dkdv. `ctas_per_sm` is the number of CTAs that share an SM. `ping_pong` makes the warp
    groups of dq or dkdv start their products one after another, as in every forward. With
    `queries_in_registers`, the forward holds its queries there, see `has_registers_for_queries`. With
    `wide_parts`, the forward loads heads in parts of 64 numbers instead of 32, see `head_parts`.
    """

    block_m: int
    block_n: int
    stages: int
    own_stages: int
    ctas_per_sm: int = 1
    ping_pong: bool = False
    queries_in_registers: bool = False
    wide_parts: bool = False


class Sm90Tiles(NamedTuple):
    """The tiles of the three Gluon kernels.

    With `split_dkdv`, dk and dv come from two launches, because registers have no room for both.
    """

    forward: Sm90Tile
    dq: Sm90Tile
    dkdv: Sm90Tile
    split_dkdv: bool = False


def _sm90(forward: tuple, dq: tuple, dkdv: tuple, split_dkdv: bool = False) -> Sm90Tiles:
    return Sm90Tiles(Sm90Tile(*forward), Sm90Tile(*dq), Sm90Tile(*dkdv), split_dkdv)


#: By bytes per element and padded head_dim, or the padded head_dims of q and of v. Measured on an
#: H100; head_dim 65 to 96 and 129 to 192 on an H200. The keys of a half-precision forward tile are a
#: multiple of 64: in causal rows, only the last block of 64 queries then has a diagonal.
SM90_TILES = {
    (2, 32): _sm90((64, 64, 3, 2, 3), (192, 64, 6, 2), (64, 192, 6, 2)),
    (2, 64): _sm90((64, 64, 3, 2, 3), (192, 64, 6, 2), (64, 128, 4, 2, 1, True)),
    (2, 96): _sm90(
        (192, 64, 3, 2, 1, False, True, True), (192, 64, 3, 1, 1, True), (64, 128, 3, 2, 1, True)
    ),
    (2, 128): _sm90((192, 64, 3, 2, 1), (128, 64, 3, 2), (64, 128, 3, 1)),
    (2, 160): _sm90((128, 128, 2, 1, 1), (128, 64, 2, 1), (32, 128, 4, 1)),
    (2, 192, 128): _sm90((192, 64, 3, 1, 1), (128, 64, 3, 1), (32, 128, 4, 1)),
    (2, 192): _sm90(
        (128, 64, 3, 1, 1, False, True), (128, 64, 2, 1), (64, 128, 2, 1), split_dkdv=True
    ),
    (2, 256): _sm90((128, 64, 2, 1, 1), (128, 32, 2, 1), (32, 128, 2, 1), split_dkdv=True),
    (4, 32): _sm90((128, 64, 3, 1, 1), (128, 64, 2, 1), (64, 128, 2, 1)),
    (4, 64): _sm90((128, 64, 3, 1, 1), (128, 64, 2, 1), (64, 128, 2, 1)),
}

#: The lengths and the number of rows by which a batch has tiles of its own, see `SM90_BATCH_TILES`.
BatchKind = Literal[
    "usual",
    "few tiles",
    "few medium tiles",
    "few large tiles",
    "short rows",
    "small window",
    "medium rows",
    "long rows",
    "two long rows",
]

#: A batch has few tiles if its rows are known to have at most SHORT_SEQLEN tokens, and it has at most
#: FEW_QUERIES queries summed over heads: 512 per SM of an H100. Then the time of the last tile matters,
#: and some kernels take smaller tiles. It has few medium or large tiles if every SM gets as many queries as
#: such a tile has, and the mean row fills two thirds of a large one. Then smaller tiles of heads in narrow
#: parts cost more loads than they save.
SHORT_SEQLEN, FEW_QUERIES, MEDIUM_TILE = 1600, 512 * 132, 128
#: A batch with a longer row and a head_dim of at most SMALL_TILE_HEAD_DIM has few tiles if its work per
#: SM, times SMALL_TILE_COST, is less than one tile of LARGE_TILE queries of its longest row. Smaller tiles
#: take longer for the same work.
LARGE_TILE, SMALL_TILE_COST, SMALL_TILE_HEAD_DIM, SM_COUNT = 192, 1.5, 128, 132
#: A batch has short rows if no row is known to have more tokens than the first number, and the mean row
#: not more than the second. Tiles of 192 queries are then empty in part.
SHORTEST_SEQLEN, SHORTEST_MEAN_SEQLEN = 192, 128
#: A batch has long rows if the row of a mean pair of query and key is known to have this length.
#: Small tiles would read the keys more often than the L2 cache can deliver them. It has two long rows if
#: the longest row of queries may attend to few keys, and another row of few queries to most keys: a tile
#: of that row would then take longer than the work per SM.
LONG_SEQLEN = 4096
#: A batch has medium rows if all rows are known to be at most this long, and its heads have 129 to 160 numbers.
#: Then tiles of 128 x 64 in wide parts take less time than 128 x 128.
MEDIUM_SEQLEN = 2048
#: A batch has a small window if a query attends to fewer keys. A tile of 128 x 128 or 192 x 64 processes about
#: 256 keys more than that, and a tile of 64 x 64 128 keys more, assumed to take up to 1.25 times as long per key.
SMALL_WINDOW = 384
#: Tiles of a table above -> kind of batch -> its tiles, if the kind has others.
SM90_BATCH_TILES: dict[Sm90Tiles, dict[BatchKind, Sm90Tiles]] = {
    SM90_TILES[2, 32]: {
        "few tiles": SM90_TILES[2, 32]._replace(dkdv=Sm90Tile(64, 128, 6, 2)),
        "long rows": _sm90((192, 128, 4, 2, 1), (192, 64, 6, 2, 1, True), (64, 192, 6, 2, 1, True)),
    },
    SM90_TILES[2, 64]: {
        "few tiles": SM90_TILES[2, 64]._replace(dq=Sm90Tile(128, 64, 6, 2)),
        "short rows": SM90_TILES[2, 64]._replace(dq=Sm90Tile(128, 64, 6, 2)),
        "long rows": SM90_TILES[2, 64]._replace(
            forward=Sm90Tile(192, 128, 3, 2, 1), dq=Sm90Tile(192, 64, 6, 2, 1, True)
        ),
    },
    SM90_TILES[2, 96]: {
        "few tiles": SM90_TILES[2, 96]._replace(
            forward=Sm90Tile(64, 64, 3, 2, 2), dq=Sm90Tile(128, 64, 3, 2)
        ),
        "few medium tiles": SM90_TILES[2, 96]._replace(
            forward=Sm90Tile(128, 64, 3, 2), dq=Sm90Tile(128, 64, 3, 2)
        ),
        "few large tiles": SM90_TILES[2, 96]._replace(dq=Sm90Tile(128, 64, 3, 2)),
        "short rows": SM90_TILES[2, 96]._replace(
            forward=Sm90Tile(64, 64, 2, 2, 2, wide_parts=True), dq=Sm90Tile(128, 64, 3, 2)
        ),
        "small window": SM90_TILES[2, 96]._replace(forward=Sm90Tile(64, 64, 3, 2, 2)),
    },
    SM90_TILES[2, 128]: {
        "few tiles": SM90_TILES[2, 128]._replace(forward=Sm90Tile(64, 64, 2, 2, 2)),
        "short rows": SM90_TILES[2, 128]._replace(forward=Sm90Tile(64, 64, 2, 2, 2)),
        "small window": SM90_TILES[2, 128]._replace(forward=Sm90Tile(64, 64, 2, 2, 2)),
        "long rows": SM90_TILES[2, 128]._replace(dq=Sm90Tile(192, 64, 2, 1)),
        "two long rows": SM90_TILES[2, 128]._replace(forward=Sm90Tile(128, 128, 2, 2)),
    },
    SM90_TILES[2, 160]: {
        "few tiles": SM90_TILES[2, 160]._replace(forward=Sm90Tile(128, 64, 2, 2)),
        "short rows": SM90_TILES[2, 160]._replace(forward=Sm90Tile(128, 64, 2, 2)),
        "small window": SM90_TILES[2, 160]._replace(forward=Sm90Tile(64, 64, 2, 1, 2)),
        "medium rows": SM90_TILES[2, 160]._replace(
            forward=Sm90Tile(128, 64, 3, 1, 1, False, True, True)
        ),
    },
    SM90_TILES[2, 192]: {
        "long rows": SM90_TILES[2, 192]._replace(forward=Sm90Tile(128, 64, 2, 2, 1, False, True))
    },
}
#: By padded head_dim -> kind of batch -> the forward tile of heads whose bytes are no multiple of 32, where it
#: differs; "usual" is for kinds without an entry. TMA loads narrow parts of such heads slowly. Measured on an
#: H200.
SM90_UNALIGNED_FORWARD: dict[int, dict[BatchKind, Sm90Tile]] = {
    96: {
        "few tiles": Sm90Tile(128, 64, 3, 2, wide_parts=True),
        "few medium tiles": Sm90Tile(128, 64, 3, 2, wide_parts=True),
    },
    160: {
        "usual": Sm90Tile(128, 64, 3, 1, 1, False, True, True),
        "few tiles": Sm90Tile(128, 64, 2, 2, wide_parts=True),
        "short rows": Sm90Tile(128, 64, 2, 2, wide_parts=True),
        "small window": Sm90Tile(64, 64, 2, 1, 2),
    },
}

#: Rows with at most MERGED_SEQLEN queries and keys share tiles, in launches of their own. Conditions:
#: the mean row has at most MERGED_MEAN_SEQLEN tokens, and `weight_rows` returns at least MANY_ROWS for
#: the rows that `count_short_rows` estimates.
MERGED_SEQLEN, MERGED_MEAN_SEQLEN, MANY_ROWS = 64, 96, 3000
#: In a batch with a row of this length, sharing tiles of wide heads pays off only for more rows.
_MERGED_MAX_SEQLEN = 2048
#: By the wider padded head_dim, half precision. A tile has MERGED_SEQLEN tokens of the rows that it
#: cuts, and as many keys in forward and dq. Measured on an H200.
SM90_MERGED_TILES = {
    32: _sm90((64, 64, 2, 2, 4), (64, 64, 2, 2, 4), (32, 64, 2, 2, 4)),
    64: _sm90((64, 64, 2, 2, 4), (64, 64, 2, 2, 3), (64, 64, 2, 2, 2)),
    96: _sm90((64, 64, 2, 2, 2), (64, 64, 1, 2, 2), (32, 64, 3, 1, 2)),
    128: _sm90((64, 64, 2, 2, 2), (64, 64, 1, 2, 2), (32, 64, 3, 1, 2)),
    160: _sm90((64, 64, 1, 1, 2), (64, 64, 1, 1, 2), (64, 64, 1, 1, 2), split_dkdv=True),
    192: _sm90((64, 64, 1, 1, 2), (64, 64, 1, 1, 2), (64, 64, 1, 1, 2), split_dkdv=True),
    256: _sm90((64, 64, 2, 2, 1), (64, 64, 1, 1, 1), (32, 64, 2, 1, 1), split_dkdv=True),
}


def count_short_rows(rows: int, tokens: int, max_seqlen: int) -> float:
    """Estimate how many rows share tiles, from the metadata on the host.

    These rows have half of MERGED_SEQLEN tokens, and the other rows `max_seqlen` tokens.
    """
    half = MERGED_SEQLEN // 2
    if max_seqlen <= MERGED_SEQLEN:
        return rows
    return rows - max(tokens - half * rows, 0) / (max_seqlen - half)


def weight_rows(rows: float, head_dim: int, max_seqlen: int) -> float:
    """Return a number of rows summed over heads, weighted by head_dim, to compare with MANY_ROWS.

    A tile of wide heads takes longer, and an SM runs one CTA with such tiles instead of three. So
    sharing tiles pays off for fewer rows. A long row takes much longer than a few short rows, so these
    need no shared tiles.
    """
    if head_dim <= 64:
        return rows
    return 3 * rows if head_dim <= 128 or max_seqlen >= _MERGED_MAX_SEQLEN else 7.5 * rows


def head_parts(head_dim: int, wide: bool = False) -> tuple[int, int]:
    """Return the width of a head's parts in shared memory and their number.

    TMA fills the last part with zeros. Narrow parts take less shared memory. Wide parts of the same heads
    take fewer loads, with a last part that products read only to the end of the head.
    """
    if 64 < head_dim <= 96:
        return (64, 2) if wide else (32, 3)
    if head_dim <= 128:
        return triton.next_power_of_2(head_dim), 1
    if head_dim <= 160:
        return (64, 3) if wide else (32, 5)
    return (64, 3) if head_dim <= 192 else (128, 2)


def sm90_tiles(
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    batch_kind: BatchKind = "usual",
    merged: bool = False,
) -> Sm90Tiles | None:
    """Return the tiles of the Gluon kernels, or None if no Gluon kernel has these head_dims."""
    if itemsize == 4:
        return SM90_TILES.get((itemsize, head_dim)) if head_dim == head_dim_v else None
    width, width_v = (prod(head_parts(x)) for x in (head_dim, head_dim_v))
    if min(width, width_v) < 32:
        return None
    if merged:
        return SM90_MERGED_TILES[max(width, width_v)]
    tiles = SM90_TILES.get((itemsize, width, width_v)) or SM90_TILES.get(
        (itemsize, max(width, width_v))
    )
    kinds = SM90_BATCH_TILES.get(tiles, {})
    if batch_kind == "two long rows" and batch_kind not in kinds:
        batch_kind = "long rows"
    if batch_kind in ("few medium tiles", "few large tiles") and batch_kind not in kinds:
        batch_kind = "few tiles"
    tiles = kinds.get(batch_kind, tiles)
    if head_dim % 16 or head_dim_v % 16:
        unaligned = SM90_UNALIGNED_FORWARD.get(max(width, width_v), {})
        tiles = tiles._replace(
            forward=unaligned.get(batch_kind, unaligned.get("usual", tiles.forward))
        )
    return tiles


def _product_columns(head_dim: int) -> int:
    """Return the columns of the products of a head; the last 16 of narrow parts may be left out."""
    width, parts = head_parts(head_dim)
    columns = width * parts
    return columns - 16 if width == 32 and parts > 1 and head_dim <= columns - 16 else columns


def has_registers_for_queries(tile: Sm90Tile, head_dim: int, head_dim_v: int) -> bool:
    """Return whether 24 registers of a thread remain if a tile of the forward holds its queries there.

    The 128 threads of a warp group have the float32 accumulators, scores and weights of 64 queries.
    """
    available = 240 if tile.block_m <= 128 else 160
    sums = _product_columns(head_dim_v) + 2 * tile.block_n
    return sums // 2 + _product_columns(head_dim) // 4 + 24 <= available


# By bytes per element and padded head_dim. Measured on Hopper.
_LARGE_SMEM = {
    (2, 32): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 2, 3)),
    (2, 64): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(32, 128, 4, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3)),
    (2, 256): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
    (4, 32): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (4, 64): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 2)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 256): Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
# Ada and consumer Blackwell have 99 KB of shared memory per CTA, Ampere 163 KB; these fit all.
_SMALL_SMEM = {
    (2, 32): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    (2, 256): Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 32): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 64): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 128): Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
    (4, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
#: Tile of dK and dV -> the tile with dropout, whose random numbers need registers.
_DROPOUT_DKDV = {Tile(32, 128, 4, 2): Tile(32, 128, 8, 2)}


def portable_tiles(
    capability: tuple[int, int], itemsize: int, block_d: int, dropout: bool = False
) -> Tiles:
    """Return the tiles of the portable kernels.

    Parameters
    ----------
    capability
        The device's compute capability.
    itemsize
        Bytes per element.
    block_d
        The wider padded head_dim of q and v, at least 32.
    dropout
        Whether the call has dropout.
    """
    tiles = (_LARGE_SMEM if capability in LARGE_SHARED_MEMORY else _SMALL_SMEM)[itemsize, block_d]
    if dropout:
        tiles = tiles._replace(dkdv=_DROPOUT_DKDV.get(tiles.dkdv, tiles.dkdv))
    return tiles
