"""Measured tile sizes. A plain table, so that the first call compiles one kernel and times none."""

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries and keys of a tile, and how a program is laid out."""

    m: int
    n: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the three portable kernels."""

    forward: Tile
    dq: Tile
    dkdv: Tile


class GluonTiles(NamedTuple):
    """Queries, keys and stages of the three Gluon kernels, and the stages of the side that a program owns.

    Further, of the forward the programs that share a multiprocessor. `apart`: dk and dv come from two launches, as registers have
    no room for both.
    """

    forward: tuple[int, int, int, int, int]
    dq: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]
    apart: bool = False


# By bytes of an element and the width of a head in shared memory, or those of q and of v; measured on an H100.
GLUON = {
    (2, 32): GluonTiles((64, 64, 3, 2, 3), (192, 64, 6, 2), (64, 192, 6, 2)),
    (2, 64): GluonTiles((64, 64, 3, 2, 3), (192, 64, 6, 2), (64, 128, 4, 2)),
    (2, 128): GluonTiles((192, 64, 3, 2, 1), (128, 64, 3, 2), (64, 128, 3, 1)),
    (2, 192, 128): GluonTiles((192, 64, 3, 1, 1), (128, 64, 3, 1), (32, 128, 4, 1)),
    (2, 192): GluonTiles((128, 64, 3, 1, 1), (128, 64, 2, 1), (32, 128, 3, 1), apart=True),
    (2, 256): GluonTiles((128, 64, 2, 1, 1), (128, 32, 2, 1), (32, 128, 2, 1), apart=True),
    (4, 32): GluonTiles((128, 64, 3, 1, 1), (128, 64, 2, 1), (64, 128, 2, 1)),
    (4, 64): GluonTiles((128, 64, 3, 1, 1), (128, 64, 2, 1), (64, 128, 2, 1)),
}

#: Rows are known to be short up to so many tokens, and few up to so many queries, those of all heads counted: 512 for each
#: multiprocessor of an H100. Then the time of the last tile counts, and some kernels take smaller ones.
SHORT, FEW = 1600, 512 * 132
GLUON_FEW = {
    GLUON[2, 32]: GLUON[2, 32]._replace(dkdv=(64, 128, 6, 2)),
    GLUON[2, 64]: GLUON[2, 64]._replace(dq=(128, 64, 6, 2)),
    GLUON[2, 128]: GLUON[2, 128]._replace(forward=(64, 64, 2, 2, 2)),
}

# By bytes of an element and padded head_dim. Measured on Hopper.
_HOPPER = {
    (2, 32): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 2, 3)),
    (2, 64): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(32, 128, 4, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3)),
    (2, 256): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
    (4, 32): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (4, 64): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 2)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 256): Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
# Ada and consumer Blackwell have 99 KB of shared memory a program, Ampere 163 KB; these fit all.
_SMALL = {
    (2, 32): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    (2, 256): Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 32): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 64): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 128): Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
    (4, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


#: Compute capabilities of devices where a program may have 227 KB of shared memory.
ROOMY = ((9, 0), (10, 0), (10, 3))


def portable_tiles(capability: tuple[int, int], itemsize: int, block_d: int) -> Tiles:
    """The tiles of the portable kernels, by device, bytes of an element and the wider padded head_dim, at least 32."""
    return (_HOPPER if capability in ROOMY else _SMALL)[itemsize, block_d]
