"""Metadata of an attention call: the mask and scale, the rows, and the shapes and strides."""

from typing import NamedTuple

import torch

from .tile_chunks import ChunkSpec, cut_tiles
from .tile_configs import MERGED_SEQLEN
from .tile_scheduler import UNBOUNDED, schedule_tiles

LOG2E = 1.4426950408889634


class AttentionSpec(NamedTuple):
    """The window, the scale, the softcap and the dropout in plain numbers.

    An open side of the window is `UNBOUNDED`; softcap 0 means none. The probability of dropout is
    ``dropout / 2**16``.
    """

    window_left: int
    window_right: int
    scale: float
    softcap: float
    dropout: int = 0


def to_base2(spec: AttentionSpec) -> tuple[int, int, float, float]:
    """Return the window, and the factors of the scores before and after the softcap.

    The last factor that a kernel applies includes log2(e).
    """
    window_left, window_right, scale, softcap, _ = spec
    if softcap:
        return window_left, window_right, scale / softcap, softcap * LOG2E
    return window_left, window_right, scale * LOG2E, 0.0


class Rows(NamedTuple):
    """The rows that a launch config processes, see `schedule_tiles`."""

    min_length: int = 0
    merged: bool = False


#: Short rows, and the other rows, of a batch whose short rows share tiles.
SHORT_ROWS, OTHER_ROWS = Rows(merged=True), Rows(min_length=MERGED_SEQLEN + 1)
ALL_ROWS = Rows()


class VarlenLayout(NamedTuple):
    """The rows of queries and keys.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k
        The offsets of the rows of the queries and of the keys.
    cache
        The dict in which tile schedules are kept, or None. It belongs to the rows of the queries
        and to the current stream, see `scree.layout.Layout.cache`.
    max_seqlen
        A bound on the rows' lengths that is known without reading the offsets.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    cache: dict | None
    max_seqlen: int = UNBOUNDED

    def schedule_key(
        self,
        total: int,
        tile_size: int,
        spec: AttentionSpec,
        rows: Rows = ALL_ROWS,
        *,
        is_of_keys: bool = False,
    ) -> tuple:
        """Return the key of a schedule of query tiles in the cache, or of key tiles if `is_of_keys`.

        For keys, the left and right sides of the window are swapped.
        """
        window = (spec[1], spec[0]) if is_of_keys else (spec[0], spec[1])
        return is_of_keys, id(self.cu_seqlens_k), total, tile_size, *window, *rows

    def query_tiles(
        self, total_q: int, block_m: int, spec: AttentionSpec, rows: Rows
    ) -> torch.Tensor:
        """Return the schedule of query tiles."""
        return self._tiles(total_q, block_m, spec, rows)

    def key_tiles(
        self, total_k: int, block_n: int, spec: AttentionSpec, rows: Rows
    ) -> torch.Tensor:
        """Return the schedule of key tiles."""
        # If queries and keys have the same merged rows, the schedule of the queries has the same groups.
        # The window affects only their order.
        is_shared = rows.merged and self.cu_seqlens_k is self.cu_seqlens_q
        return self._tiles(total_k, block_n, spec, rows, is_of_keys=not is_shared)

    def chunks(self, tiles: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
        """Return the items of a schedule of this layout, see `cut_tiles`."""
        key = id(tiles), spec
        cached = self.cache.get(key) if self.cache else None
        if cached:
            return cached[0]  # type: ignore[no-any-return]
        items = cut_tiles(tiles, spec)
        if self.cache is not None:
            # The tiles are kept with the items, so that no other tensor gets their id.
            self.cache[key] = items, tiles
        return items

    def _tiles(
        self,
        total: int,
        tile_size: int,
        spec: AttentionSpec,
        rows: Rows,
        *,
        is_of_keys: bool = False,
    ) -> torch.Tensor:
        key = self.schedule_key(total, tile_size, spec, rows, is_of_keys=is_of_keys)
        cached = self.cache.get(key) if self.cache else None
        if cached:
            return cached[0]
        offsets = self.cu_seqlens_q, self.cu_seqlens_k
        tiles = schedule_tiles(*(reversed(offsets) if is_of_keys else offsets), *key[2:])
        if self.cache is not None:
            # The keys' offsets are kept with the schedule, so that no other object gets their id.
            same = self.cu_seqlens_k is self.cu_seqlens_q
            self.cache[key] = tiles, None if same else self.cu_seqlens_k
        return tiles


class HeadLayout(NamedTuple):
    """The static part of a tensor's shape and strides: everything but the number of tokens."""

    heads: int
    head_dim: int
    token_stride: int
    head_stride: int


def slope_axes(slopes: torch.Tensor | None) -> int:
    """Return the number of axes of ALiBi slopes; 0 for none."""
    return 0 if slopes is None else slopes.ndim


def is_tma_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the tensors' addresses have the alignment that TMA needs."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def is_tma_addressable(x: torch.Tensor) -> bool:
    """Return whether TMA can address values (total, heads, dim)."""
    return are_strides_tma_addressable(x.stride(0), x.stride(1), x.shape[1])


def are_strides_tma_addressable(token_stride: int, head_stride: int, heads: int) -> bool:
    """Return whether TMA can address a tensor.

    Its strides must be multiples of 16 bytes and within the range of TMA coordinates.
    """
    return (
        token_stride % 8 == 0
        and head_stride % 8 == 0
        and 0 < token_stride < 1 << 31
        and 0 < heads * head_stride < 1 << 31
    )


def allows_tf32(dtype: torch.dtype) -> bool:
    """Return whether products may round float32 to tf32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
