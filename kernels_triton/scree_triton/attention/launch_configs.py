"""Launch configs of attention: the allocations and kernel launches of a call.

A launch config holds everything that follows from a call's static metadata: device, dtype, shapes
except the number of tokens, strides and the kind of mask. Launch configs are cached. For a given
pair of row layouts, a launch config prepares functions that only allocate their results and launch.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton

from ..runtime.device import device_info
from ..runtime.launch import (
    BoundLaunch,
    Launch,
    bind_launch,
    bind_launches,
    contiguous,
    empty,
    on_device,
    ragged,
)
from . import portable, sum_splits
from .arguments import (
    BackwardNumbers,
    DkdvArgs,
    DkdvNumbers,
    DkdvStrides,
    DqArgs,
    DqNumbers,
    DqStrides,
    DropoutNumbers,
    Float32DkdvArgs,
    Float32DqArgs,
    Float32ForwardArgs,
    Float32ForwardStrides,
    ForwardArgs,
    ForwardNumbers,
    ForwardStrides,
    PortableDkdvArgs,
    PortableDkdvStrides,
    PortableDqArgs,
    PortableDqStrides,
    PortableForwardArgs,
    PortableForwardStrides,
    SplitArgs,
    SplitDoutArgs,
    SumSplitsArgs,
)
from .tile_configs import (
    FEW_QUERIES,
    FEWEST_MIN_SEQLEN,
    FEWEST_QUERIES,
    LONG_SEQLEN,
    MANY_ROWS,
    MERGED_MEAN_SEQLEN,
    MERGED_SEQLEN,
    SHORT_SEQLEN,
    SM90_LONG_ROW_TILES,
    SM90_MERGED_TILES,
    SM90_SMALL_BATCH_TILES,
    SM90_TILES,
    Sm90Tiles,
    Tile,
    Tiles,
    count_rows,
    portable_tiles,
)
from .tile_scheduler import UNBOUNDED, max_tiles, schedule_tiles

LOG2E = 1.4426950408889634
_MAX_CONFIGS = 1024
#: The L2 cache of an H100 holds the keys and values of this many numbers, summed over heads.
_L2_NUMBERS = 40_000_000
#: Elements per CTA of the kernel that sums over splits.
_SUM_BLOCK = 1024
#: The cost model of `choose_splits`: operations per second and SM of dK and dV, and bytes of partial
#: sums per second and seconds per launch of the kernel that adds them. Measured on an H200.
_SPLIT_FLOPS, _SPLIT_BYTES, _SPLIT_SECONDS = 4.2e12, 2.5e12, 3e-6
#: Seconds of a tile before and after its products, and queries per block.
_TILE_SECONDS, _QUERY_BLOCK = 3e-6, 64
#: Whether the first call of a kind measures the tiles of the portable kernels.
AUTOTUNE = os.environ.get("SCREE_AUTOTUNE") == "1"
#: The parameters of the functions that launch.
_FORWARD = "q, k, v, slopes, out, lse, count, seed=None"
_BACKWARD = "q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count, seed=None"


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

    def query_key(
        self, total_q: int, block_m: int, spec: AttentionSpec, rows: Rows = ALL_ROWS
    ) -> tuple:
        """Return the key of a schedule of query tiles in the cache."""
        return "q", id(self.cu_seqlens_k), total_q, block_m, spec[0], spec[1], *rows

    def key_key(
        self, total_k: int, block_n: int, spec: AttentionSpec, rows: Rows = ALL_ROWS
    ) -> tuple:
        """Return the key of a schedule of key tiles in the cache.

        For keys, the left and right sides of the window are swapped.
        """
        return "k", id(self.cu_seqlens_k), total_k, block_n, spec[1], spec[0], *rows

    def query_tiles(
        self, total_q: int, block_m: int, spec: AttentionSpec, rows: Rows
    ) -> torch.Tensor:
        """Return the schedule of query tiles."""
        key = self.query_key(total_q, block_m, spec, rows)
        cached = self.cache.get(key) if self.cache else None
        return cached[0] if cached else self._schedule(key, self.cu_seqlens_q, self.cu_seqlens_k)

    def key_tiles(
        self, total_k: int, block_n: int, spec: AttentionSpec, rows: Rows
    ) -> torch.Tensor:
        """Return the schedule of key tiles."""
        if rows.merged and self.cu_seqlens_k is self.cu_seqlens_q:
            # The schedule of the queries has the same groups; the window affects only their order.
            return self.query_tiles(total_k, block_n, spec, rows)
        key = self.key_key(total_k, block_n, spec, rows)
        cached = self.cache.get(key) if self.cache else None
        return cached[0] if cached else self._schedule(key, self.cu_seqlens_k, self.cu_seqlens_q)

    def _schedule(
        self, key: tuple, cu_seqlens: torch.Tensor, other_cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        tiles = schedule_tiles(cu_seqlens, other_cu_seqlens, *key[2:])
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


#: Static metadata of a call -> launch config.
CONFIG_CACHE: dict[tuple, "LaunchConfig"] = {}


def get_launch_config(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    spec: AttentionSpec,
    alibi: int,
) -> "LaunchConfig":
    """Return the launch config of a call, from the cache or new.

    `alibi` is the number of axes of the slopes, or 0: (heads,) or (total_q, heads).
    """
    key = _config_key(q, k, v, layout, spec, alibi)
    config = CONFIG_CACHE.get(key)
    if config is None:
        # Bounds the cache when strides change with the number of tokens.
        if len(CONFIG_CACHE) >= _MAX_CONFIGS:
            CONFIG_CACHE.clear()
        config = select_config(q.device, q.dtype, _head_layouts(q, k, v), *key[9:])
        is_tunable = isinstance(config, PortableConfig) and not q.is_meta
        if AUTOTUNE and is_tunable and q.shape[0] > 0 and k.shape[0] > 0:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                return config  # a graph cannot contain measurements; a later call tunes
            config = config.autotuned(q, k, v, layout, spec)
        CONFIG_CACHE[key] = config
    return config


def replace_by_portable_config(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    spec: AttentionSpec,
    alibi: int,
) -> bool:
    """Use the portable kernels for calls of this kind; return False if they do so already."""
    key = _config_key(q, k, v, layout, spec, alibi)
    if isinstance(CONFIG_CACHE.get(key), PortableConfig):
        return False
    has_left, has_right, _, has_softcap, _, has_dropout, *_ = key[9:]
    CONFIG_CACHE[key] = PortableConfig(
        q.device,
        q.dtype,
        _head_layouts(q, k, v),
        has_left,
        has_right,
        has_softcap,
        alibi,
        has_dropout,
        allows_tf32(q.dtype),
    )
    return True


def _head_layouts(*arrays: torch.Tensor) -> tuple[HeadLayout, ...]:
    return tuple(HeadLayout(*x.shape[1:], *x.stride()[:2]) for x in arrays)


def _config_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    spec: AttentionSpec,
    alibi: int,
) -> tuple:
    window_left, window_right, _, softcap, dropout = spec
    total_q, heads, head_dim = q.shape
    total_k, k_heads, head_dim_v = v.shape
    has_tokens = total_q > 0 and total_k > 0
    num_rows = layout.cu_seqlens_q.shape[0] - 1
    return (
        q.device,
        q.dtype,
        heads,
        head_dim,
        k_heads,
        head_dim_v,
        q.stride(),
        k.stride(),
        v.stride(),
        window_left < UNBOUNDED,
        window_right < UNBOUNDED,
        window_right == 0,
        softcap > 0,
        alibi,
        dropout > 0,
        has_tokens and is_tma_aligned(q, k, v),
        layout.cu_seqlens_q is layout.cu_seqlens_k,
        allows_tf32(q.dtype),
        _is_small_batch(layout, total_q * heads),
        layout.max_seqlen < UNBOUNDED
        and max(total_q, total_k) <= MERGED_MEAN_SEQLEN * num_rows
        and count_rows(num_rows * heads, max(head_dim, head_dim_v)) >= MANY_ROWS,
        window_left >= UNBOUNDED and _has_long_rows(layout, total_k),
    )


def as_arguments(seed: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a prepared function after its others: the seed, if there is one."""
    return () if seed is None else (seed,)


def slope_axes(slopes: torch.Tensor | None) -> int:
    """Return the number of axes of ALiBi slopes; 0 for none."""
    return 0 if slopes is None else slopes.ndim


def _is_small_batch(layout: VarlenLayout, queries: int) -> bool:
    """Return whether the time of the last tile matters; `queries` is the sum over heads."""
    if layout.max_seqlen <= SHORT_SEQLEN:
        return queries <= FEW_QUERIES
    return FEWEST_MIN_SEQLEN <= layout.max_seqlen < UNBOUNDED and queries <= FEWEST_QUERIES


def _has_long_rows(layout: VarlenLayout, total_k: int) -> bool:
    """Return whether most work is in long rows.

    This is known if the length of the longest row is. The other rows are assumed to be equal.
    """
    longest = min(layout.max_seqlen, total_k)
    if longest < LONG_SEQLEN or layout.max_seqlen >= UNBOUNDED:
        return False
    others, num_others = total_k - longest, max(layout.cu_seqlens_k.shape[0] - 2, 1)
    return longest**2 + others**2 / num_others >= LONG_SEQLEN * total_k


def is_tma_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the tensors' addresses have the alignment that TMA needs."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def allows_tf32(dtype: torch.dtype) -> bool:
    """Return whether products may round float32 to tf32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def select_config(
    device: torch.device,
    dtype: torch.dtype,
    layouts: tuple[HeadLayout, ...],
    has_left: bool,
    has_right: bool,
    causal: bool,
    softcap: bool,
    alibi: int,
    dropout: bool,
    tma_aligned: bool,
    same_offsets: bool,
    tf32: bool,
    small_batch: bool,
    many_short_rows: bool,
    long_rows: bool,
) -> "LaunchConfig":
    """Return a new launch config of the fastest kernels that can serve the call."""
    q, _, v = layouts
    window = has_left or (has_right and not causal)
    half = dtype != torch.float32
    sm90 = (
        tma_aligned
        and not dropout
        and alibi < 2
        and has_sm90_kernels(device, dtype, q.head_dim, v.head_dim)
        and all(
            _are_strides_tma_addressable(x.token_stride, x.head_stride, x.heads) for x in layouts
        )
    )
    if sm90 and half:
        options = causal, window, softcap, alibi > 0, same_offsets, small_batch, long_rows
        if many_short_rows:
            return Sm90MixedConfig(
                *(Sm90Config(device, dtype, layouts, *options, x) for x in (SHORT_ROWS, OTHER_ROWS))
            )
        return Sm90Config(device, dtype, layouts, *options)
    if sm90 and not tf32:
        return Bf16x3Config(device, layouts, causal, window, softcap, alibi > 0)
    return PortableConfig(
        device, dtype, layouts, has_left, has_right, softcap, alibi, dropout, tf32
    )


def has_sm90_kernels(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> bool:
    """Return whether Gluon kernels for Hopper support these head_dims on the device."""
    return (
        device_info(device).supports_sm90_gluon
        and _sm90_tiles(dtype.itemsize, head_dim, head_dim_v) is not None
        and head_dim % 8 == head_dim_v % 8 == 0
    )


class TileSizes(NamedTuple):
    """Queries per tile of the forward kernel and of dQ, and keys per tile of dK and dV."""

    forward: int
    dq: int
    dkdv: int


def usual_tile_sizes(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> TileSizes:
    """Return the tile sizes of most calls.

    Calls that TMA cannot address, autotuned calls and batches of a few short rows have others.
    """
    tiles: Sm90Tiles | Tiles | None = None
    if has_sm90_kernels(device, dtype, head_dim, head_dim_v) and not allows_tf32(dtype):
        tiles = _sm90_tiles(dtype.itemsize, head_dim, head_dim_v)
    if tiles is None:
        block_d = max(32, *(triton.next_power_of_2(x) for x in (head_dim, head_dim_v)))
        tiles = portable_tiles(device_info(device).capability, dtype.itemsize, block_d)
    return TileSizes(tiles.forward.block_m, tiles.dq.block_m, tiles.dkdv.block_n)


def _head_parts(head_dim: int) -> tuple[int, int]:
    """Return the width of a head's parts in shared memory and their number.

    TMA fills the last part with zeros. Narrow parts waste fewer products on zeros.
    """
    if 64 < head_dim <= 96:
        return 32, 3
    if head_dim <= 128:
        return triton.next_power_of_2(head_dim), 1
    if head_dim <= 160:
        return 32, 5
    return (64, 3) if head_dim <= 192 else (128, 2)


def _sm90_tiles(
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    small_batch: bool = False,
    long_rows: bool = False,
    merged: bool = False,
) -> Sm90Tiles | None:
    """Return the tiles of the Gluon kernels, or None if no Gluon kernel has these head_dims."""
    if itemsize == 4:
        return SM90_TILES.get((itemsize, head_dim)) if head_dim == head_dim_v else None
    width, width_v = (prod(_head_parts(x)) for x in (head_dim, head_dim_v))
    if min(width, width_v) < 32:
        return None
    if merged:
        return SM90_MERGED_TILES[max(width, width_v)]
    tiles = SM90_TILES.get((itemsize, width, width_v)) or SM90_TILES.get(
        (itemsize, max(width, width_v))
    )
    if small_batch:
        return SM90_SMALL_BATCH_TILES.get(tiles, tiles)
    return SM90_LONG_ROW_TILES.get(tiles, tiles) if long_rows else tiles


def _descriptor(layout: HeadLayout) -> Any:
    """Return the ragged descriptor of values with this layout, in parts of a head."""
    return ragged(*layout, *_head_parts(layout.head_dim))


def _initial_registers(ctas_per_sm: int, consumers: int) -> int:
    """Return the registers per thread at launch.

    `ctas_per_sm` CTAs share an SM, each with a producer and `consumers` consumers of 4 warps each.
    """
    return 512 // (ctas_per_sm * (consumers + 1)) // 8 * 8


def is_tma_addressable(x: torch.Tensor) -> bool:
    """Return whether TMA can address values (total, heads, dim)."""
    return _are_strides_tma_addressable(x.stride(0), x.stride(1), x.shape[1])


def _are_strides_tma_addressable(token_stride: int, head_stride: int, heads: int) -> bool:
    """Return whether TMA can address a tensor.

    Its strides must be multiples of 16 bytes and within the range of TMA coordinates.
    """
    return (
        token_stride % 8 == 0
        and head_stride % 8 == 0
        and 0 < token_stride < 1 << 31
        and 0 < heads * head_stride < 1 << 31
    )


def _heads_in_l2(heads: int, limit: int) -> int:
    """Return how many heads run concurrently: the largest divisor of `heads` up to `limit`.

    The L2 cache holds the keys of few heads.
    """
    return max(g for g in range(1, heads + 1) if heads % g == 0 and g <= limit)


class KeyTileWork(NamedTuple):
    """The work of dK and dV for one query head, in pairs of query and key."""

    longest: float
    """The pairs of the tile with the most queries."""
    total: float
    """The pairs of all tiles."""
    tiles: float
    """The number of tiles."""


def estimate_work(
    num_rows: int, max_seqlen: int, total_q: int, total_k: int, tile_size: int, spec: AttentionSpec
) -> KeyTileWork:
    """Estimate the work of tiles of `tile_size` keys from the metadata on the host.

    One row has the largest length, and the others are equal. Where the largest length is unknown,
    it is four times the mean.
    """
    num_others = max(num_rows - 1, 1)
    longest_rows = [
        min(total, 4 * total / max(num_rows, 1) if max_seqlen >= UNBOUNDED else max_seqlen)
        for total in (total_q, total_k)
    ]
    longest_q, longest_k = longest_rows
    pairs = longest_q * longest_k + (total_q - longest_q) * (total_k - longest_k) / num_others
    window_left, window_right, *_ = spec
    if min(window_left, window_right) < UNBOUNDED:
        # A causal mask leaves about half of the pairs.
        reach = max(window_left, 0) + max(window_right, 0) + 1
        pairs = min(pairs / 2, float(total_k * reach))
        longest_q = min(longest_q, reach + tile_size)
    # Masks and the ends of rows leave about one block of queries per tile in part unused.
    tiles = max(total_k / tile_size + num_rows / 2, float(num_rows))
    longest = (longest_q + _QUERY_BLOCK) * tile_size
    return KeyTileWork(longest, pairs + tiles * _QUERY_BLOCK * tile_size, tiles)


def choose_splits(
    group: int, k_heads: int, total_k: int, dims: int, work: KeyTileWork, sm_count: int
) -> int:
    """Return into how many splits to divide the query heads of a key head in dK and dV.

    More splits balance the load of the SMs better, and write more partial sums.

    Parameters
    ----------
    group
        Query heads per key head.
    k_heads, total_k
        Number of key heads, and of keys.
    dims
        head_dim of q and k plus head_dim of v.
    work
        Work of one query head, see `estimate_work`.
    sm_count
        Number of CTAs that run at once.
    """
    seconds = 4 * dims / _SPLIT_FLOPS
    mean = work.total * seconds * k_heads * group / sm_count
    costs = {}
    for splits in (s for s in range(1, group + 1) if group % s == 0):
        longest = work.longest * seconds * group / splits
        tiles_per_sm = max(work.tiles * k_heads * splits / sm_count, 1.0)
        # With few tiles per SM, the last CTA ends a part of the longest tile after the mean.
        imbalance = longest / 4 * min(3 / tiles_per_sm, 1.0)
        costs[splits] = max(longest, mean + imbalance) + tiles_per_sm * _TILE_SECONDS
        if splits > 1:
            costs[splits] += _SPLIT_SECONDS + 4 * splits * total_k * k_heads * dims / _SPLIT_BYTES
    limit = 1.04 * min(costs.values())
    return next(splits for splits, cost in costs.items() if cost <= limit)


class LaunchConfig:
    """The common part of launch configs: shapes, and the allocations of forward and backward."""

    #: The maximum number of CTAs; persistent CTAs take one tile after another.
    max_ctas = sys.maxsize
    rows = ALL_ROWS

    def __init__(self, device: torch.device, dtype: torch.dtype, layouts: tuple[HeadLayout, ...]):
        self.device, self.dtype = device, dtype
        self.index = device.index if device.type == "cuda" else None
        self.q, self.k, self.v = layouts
        self.heads, self.k_heads = self.q.heads, self.k.heads
        self.out_stride = self.heads * self.v.head_dim
        self.empty = empty(device.type)

    def next_counter(self) -> torch.Tensor | None:
        """Return the tile counters of the next launches; None for kernels without counters."""
        return None

    def _query_tiles(
        self,
        layout: VarlenLayout,
        total_q: int,
        block_m: int,
        spec: AttentionSpec,
        ctas_per_sm: int = 1,
    ) -> tuple[torch.Tensor, int]:
        """Return the schedule of query tiles and the number of CTAs."""
        bound = max_tiles(total_q, layout.cu_seqlens_q.shape[0] - 1, block_m) * self.heads
        tiles = layout.query_tiles(total_q, block_m, spec, self.rows)
        return tiles, min(ctas_per_sm * self.max_ctas, bound)

    def _key_tiles(
        self,
        layout: VarlenLayout,
        total_k: int,
        block_n: int,
        spec: AttentionSpec,
        ctas_per_sm: int = 1,
        splits_per_khead: int = 1,
    ) -> tuple[torch.Tensor, int]:
        """Return the schedule of key tiles and the number of CTAs."""
        heads = self.k_heads * splits_per_khead
        bound = max_tiles(total_k, layout.cu_seqlens_q.shape[0] - 1, block_n) * heads
        tiles = layout.key_tiles(total_k, block_n, spec, self.rows)
        return tiles, min(ctas_per_sm * self.max_ctas, bound)

    def _has_few_queries(self, total_q: int) -> bool:
        """Return whether the order of tiles matters more than hits in the L2 cache.

        If so, no head waits for other heads, and the longest tiles of all heads come first.
        """
        return total_q * self.heads <= FEW_QUERIES

    def _head_counts(
        self, heads: int, tokens: int, few_queries: bool = False
    ) -> tuple[int, int, int]:
        """Return the query heads, the query heads per key head, and the heads that share the L2.

        The last number is for `heads` heads that read `tokens` tokens each.
        """
        fitting = _L2_NUMBERS // max(tokens * (self.q.head_dim + self.v.head_dim), 1)
        is_narrow = max(self.q.head_dim, self.v.head_dim) < 128
        limit = heads if is_narrow or few_queries else 8
        return (
            self.heads,
            self.heads // self.k_heads,
            _heads_in_l2(heads, max(min(fitting, limit), 4)),
        )

    def _reads_in_place(self, dout: torch.Tensor) -> bool:
        """Return whether the kernels can read a gradient of the output without a copy."""
        return dout.stride(2) == 1

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        layout: VarlenLayout,
        spec: AttentionSpec,
        seed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (total_q, heads, head_dim_v) and the log-sum-exp (heads, total_q)."""
        run = self.prepare_forward(layout, q.shape[0], k.shape[0], spec)
        return run(q, k, v, slopes, *as_arguments(seed))  # type: ignore[no-any-return]

    def prepare_forward(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> Callable[..., Any]:
        """Return a function of q, k, v and slopes that computes `forward` on these rows.

        With dropout it takes the seed too, an int64 tensor of one element.
        """
        out_shape = contiguous((total_q, self.heads, self.v.head_dim))
        new_out = partial(self.empty, *out_shape, self.dtype)
        new_lse = partial(self.empty, *contiguous((self.heads, total_q)), torch.float32)
        launch = self._forward(layout, total_q, spec) if total_q > 0 else lambda *_: None
        next_counter = self.next_counter

        def run(q, k, v, slopes, *seed):
            out, lse = new_out(), new_lse()
            launch(q, k, v, slopes, out, lse, next_counter(), *seed)
            return out, lse

        return on_device(self.index, run)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        layout: VarlenLayout,
        spec: AttentionSpec,
        seed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v, contiguous; dlse has the shape of lse."""
        run = self.prepare_backward(layout, q.shape[0], k.shape[0], spec)
        return run(q, k, v, slopes, out, lse, dout, dlse, *as_arguments(seed))  # type: ignore[no-any-return]

    def prepare_backward(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> Callable[..., Any]:
        """Return a function of the other arguments that computes `backward` on these rows."""
        prepare, next_counter = self._backward(layout, total_q, total_k, spec), self.next_counter
        new_dq, new_dk, new_dv = (
            partial(self.empty, *contiguous(shape), self.dtype)
            for shape in (
                (total_q, self.heads, self.q.head_dim),
                (total_k, self.k_heads, self.q.head_dim),
                (total_k, self.k_heads, self.v.head_dim),
            )
        )
        new_stats = partial(self.empty, *contiguous((2, self.heads, total_q)), torch.float32)
        launches: dict[Any, Callable[..., None]] = {}

        def run(q, k, v, slopes, out, lse, dout, dlse, *seed):
            if dout is None:
                dout = torch.zeros_like(out)
            key = dout.stride(), None if dlse is None else dlse.stride(), dout.data_ptr() & 15
            launch = launches.get(key)
            if launch is None:
                dout = dout if self._reads_in_place(dout) else dout.contiguous()
                strides = dout.stride(), key[1]
                launch = launches[*strides, dout.data_ptr() & 15] = prepare(*strides)
            dq, dk, dv, stats = new_dq(), new_dk(), new_dv(), new_stats()
            count = next_counter()
            launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count, *seed)
            return dq, dk, dv

        return on_device(self.index, run)


class PortableConfig(LaunchConfig):
    """Launch config of the kernels in plain Triton: one CTA per tile and head."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layouts: tuple[HeadLayout, ...],
        has_left: bool,
        has_right: bool,
        softcap: bool,
        alibi: int,
        dropout: bool,
        tf32: bool,
        tiles: Tiles | None = None,
    ):
        super().__init__(device, dtype, layouts)
        self.features = dict(
            has_left=has_left,
            has_right=has_right,
            softcap=softcap,
            alibi=alibi,
            dropout=dropout,
            tf32=tf32,
        )
        block_d, block_dv = (triton.next_power_of_2(x) for x in (self.q.head_dim, self.v.head_dim))
        if any(stride % 16 for x in layouts for stride in (x.token_stride, x.head_stride)):
            # Triton does not pipeline loads with such strides, and then Triton 3.6 allocates too
            # little shared memory if the two widths differ.
            block_d = block_dv = max(block_d, block_dv)
        self.kind = dtype.itemsize, max(block_d, block_dv, 32)
        capability = device_info(device).capability
        self.tiles = tiles or portable_tiles(capability, *self.kind, dropout=dropout)
        self.strides = (*self.q[2:], *self.k[2:], *self.v[2:])
        # Arrays that a call does not have get any pointer, which the kernels do not read.
        self.tensors = dict(
            Q="q", K="k", V="v", SLOPES="slopes" if alibi else "q", SEED="seed" if dropout else "q"
        )

        def launch(kernel: Any, args: Any, tile: Tile, **constants: Any) -> Launch:
            return Launch(
                kernel,
                dict(
                    HEAD_DIM=self.q.head_dim,
                    HEAD_DIM_V=self.v.head_dim,
                    BLOCK_D=block_d,
                    BLOCK_DV=block_dv,
                    BLOCK_M=tile.block_m,
                    BLOCK_N=tile.block_n,
                    HAS_LEFT=has_left,
                    HAS_RIGHT=has_right,
                    SOFTCAP=softcap,
                    ALIBI=alibi,
                    DROPOUT=dropout,
                    PRECISION="tf32" if tf32 else "tf32x3",
                    **constants,
                ),
                dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
                args=args,
            )

        self.forward_launch = launch(
            portable.attention_forward_kernel, PortableForwardArgs, self.tiles.forward
        )
        self.dq_launches = [
            launch(portable.attention_dq_kernel, PortableDqArgs, self.tiles.dq, HAS_DLSE=x)
            for x in (False, True)
        ]
        self.dkdv_launch = launch(portable.attention_dkdv_kernel, PortableDkdvArgs, self.tiles.dkdv)

    def autotuned(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: VarlenLayout,
        spec: AttentionSpec,
    ) -> "PortableConfig":
        """Return this launch config with the fastest tiles for these arguments."""
        from .autotune import autotune_tiles

        def make_config(tiles: Tiles) -> PortableConfig:
            return PortableConfig(
                self.device, self.dtype, (self.q, self.k, self.v), **self.features, tiles=tiles
            )

        features = tuple(
            name.removeprefix("has_") for name, present in self.features.items() if present
        )
        tiles = autotune_tiles(
            (*self.kind, self.dtype, *features),
            make_config,
            self.tiles,
            q,
            k,
            v,
            layout,
            spec,
            self.features["alibi"],
        )
        return make_config(tiles)

    def _forward(self, layout, total_q, spec):
        tiles, ctas = self._query_tiles(layout, total_q, self.tiles.forward.block_m, spec)
        dropout = DropoutNumbers(spec.dropout)
        strides = PortableForwardStrides(*self.strides, stride_om=self.out_stride)
        numbers = ForwardNumbers(total_q, *self._head_counts(self.heads, total_q), *spec[:4])
        launch = BoundLaunch(
            self.forward_launch,
            ctas,
            PortableForwardArgs,
            **self.tensors,
            OUT="out",
            LSE="lse",
            TILES=tiles,
            **strides._asdict(),
            **numbers._asdict(),
            **dropout._asdict(),
        )
        return bind_launches(_FORWARD, launch)

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride = self.heads * total_q
        query_tiles, key_tiles, dq_ctas, dkdv_ctas = None, None, 0, 0
        if total_q > 0:
            query_tiles, dq_ctas = self._query_tiles(layout, total_q, self.tiles.dq.block_m, spec)
        if total_k > 0:
            key_tiles, dkdv_ctas = self._key_tiles(layout, total_k, self.tiles.dkdv.block_n, spec)
        dropout = DropoutNumbers(spec.dropout)
        dkdv_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.k_heads, total_q), *spec[:4]
        )

        def prepare(dout_strides, dlse_strides):
            stride_dom, stride_doh, _ = dout_strides
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            dq_strides = PortableDqStrides(
                *self.strides,
                stride_om=self.out_stride,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dqm=self.heads * self.q.head_dim,
            )
            dq_numbers = DqNumbers(
                stride_dlsem,
                stride_dlseh,
                total_q,
                stats_stride,
                *self._head_counts(self.heads, total_k),
                *spec[:4],
            )
            dkdv_strides = PortableDkdvStrides(
                *self.strides,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dkn=self.k_heads * self.q.head_dim,
                stride_dvn=self.k_heads * self.v.head_dim,
            )

            launches = []
            if query_tiles is not None:
                launches.append(
                    BoundLaunch(
                        self.dq_launches[dlse_strides is not None],
                        dq_ctas,
                        PortableDqArgs,
                        **self.tensors,
                        OUT="out",
                        LSE="lse",
                        DO="dout",
                        DLSE="lse" if dlse_strides is None else "dlse",
                        STATS="stats",
                        DQ="dq",
                        TILES=query_tiles,
                        **dq_strides._asdict(),
                        **dq_numbers._asdict(),
                        **dropout._asdict(),
                    )
                )
            if key_tiles is not None:
                launches.append(
                    BoundLaunch(
                        self.dkdv_launch,
                        dkdv_ctas,
                        PortableDkdvArgs,
                        **self.tensors,
                        DO="dout",
                        STATS="stats",
                        DK="dk",
                        DV="dv",
                        TILES=key_tiles,
                        **dkdv_strides._asdict(),
                        **dkdv_numbers._asdict(),
                        **dropout._asdict(),
                    )
                )
            return bind_launches(_BACKWARD, *launches) if launches else lambda *_: None

        return prepare


def _base2_spec(spec: AttentionSpec) -> tuple[int, int, float, float]:
    """Return the window, and the factors of the scores before and after the softcap.

    The last factor that a kernel applies includes log2(e).
    """
    window_left, window_right, scale, softcap, _ = spec
    if softcap:
        return window_left, window_right, scale / softcap, softcap * LOG2E
    return window_left, window_right, scale * LOG2E, 0.0


class Sm90Config(LaunchConfig):
    """Launch config of the half-precision Gluon kernels on Hopper, with persistent CTAs."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layouts: tuple[HeadLayout, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
        same_offsets: bool,
        small_batch: bool,
        long_rows: bool,
        rows: Rows = ALL_ROWS,
    ):
        from ..sm90 import pipeline
        from . import backward_sm90, forward_sm90

        super().__init__(device, dtype, layouts)
        block_d, parts = _head_parts(self.q.head_dim)
        block_dv, parts_v = _head_parts(self.v.head_dim)
        width = max(block_d * parts, block_dv * parts_v)
        # Softcap and ALiBi are compiled only together with a window, which may be unbounded.
        window = window or softcap or alibi
        causal = causal and not window
        self.next_counter = pipeline.tile_counters(device)
        self.slopes = "slopes" if alibi else "q"  # a pointer that the kernels do not read
        self.rows = rows
        self.tiles = _sm90_tiles(
            2, self.q.head_dim, self.v.head_dim, small_batch, long_rows, rows.merged
        )
        self.max_ctas = device_info(device).sm_count
        self.descriptors = tuple(_descriptor(x) for x in layouts)
        self.head_strides = self.q.head_stride, self.k.head_stride, self.v.head_stride
        values = dict(HEAD_DIM_V=self.v.head_dim, BLOCK_DV=block_dv, PARTS=parts, PARTS_V=parts_v)
        features = dict(CAUSAL=causal, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        self.forward_heads_in_l2 = _heads_in_l2(self.heads, 4 if width >= 128 else 8)
        m, n, stages, own_stages, ctas_per_sm, _ = self.tiles.forward
        # Whether the kernel writes the output through the descriptor, instead of the pointer.
        self.stores_by_tma = own_stages > 1 and self.q.head_dim == self.v.head_dim
        self.forward_launch = Launch(
            forward_sm90.attention_forward_sm90_kernel,
            dict(
                BLOCK_M=m,
                BLOCK_N=n,
                HEAD_DIM=self.q.head_dim,
                **values,
                STAGES=stages,
                Q_STAGES=own_stages,
                STORE_IN_Q_SMEM=self.stores_by_tma,
                CONSUMERS=m // 64,
                SAME_OFFSETS=same_offsets and causal,
                MERGED=rows.merged,
                **features,
            ),
            dict(num_warps=4, maxnreg=_initial_registers(ctas_per_sm, m // 64)),
            (64, n, n, 64),
            args=ForwardArgs,
            unwritten="OUT" if self.stores_by_tma else "o_desc",
        )
        values = dict(HEAD_DIM=self.q.head_dim, BLOCK_D=block_d, **values)
        m, n, stages, own_stages, ctas_per_sm, ping_pong = self.tiles.dq
        self.dq_launches = [
            Launch(
                backward_sm90.attention_dq_sm90_kernel,
                dict(
                    BLOCK_M=m,
                    BLOCK_N=n,
                    **values,
                    STAGES=stages,
                    Q_STAGES=own_stages,
                    CONSUMERS=m // 64,
                    MERGED=rows.merged,
                    **features,
                    HAS_DLSE=x,
                    PING_PONG=m // 64 if ping_pong else 1,
                ),
                dict(
                    num_warps=4, maxnreg=_initial_registers(ctas_per_sm, m // 64), launch_pdl=True
                ),
                (64, n, n, 64, 64),
                args=DqArgs,
            )
            for x in (False, True)
        ]
        m, n, stages, own_stages, ctas_per_sm, ping_pong = self.tiles.dkdv
        # Skipping blocks takes registers, which at head_dim 128 the loops themselves need.
        self.dkdv_launches, self.dkdv_split_launches = (
            [
                Launch(
                    backward_sm90.attention_dkdv_sm90_kernel,
                    dict(
                        BLOCK_M=m,
                        BLOCK_N=n,
                        **values,
                        HAS_DK=dk,
                        HAS_DV=dv,
                        STAGES=stages,
                        K_STAGES=own_stages,
                        CONSUMERS=n // 64,
                        MERGED=rows.merged,
                        **features,
                        KV_IN_REGISTERS=width == 64 and causal and not rows.merged,
                        SKIP_BLOCKS=width != 128,
                        IN_FLOAT32=in_float32,
                        PING_PONG=n // 64 if ping_pong else 1,
                    ),
                    dict(
                        num_warps=4,
                        maxnreg=_initial_registers(ctas_per_sm, n // 64),
                        launch_pdl=True,
                    ),
                    (m, 64, 64, m),
                    args=DkdvArgs,
                )
                for dk, dv in (
                    [(True, False), (False, True)] if self.tiles.split_dkdv else [(True, True)]
                )
            ]
            for in_float32 in (False, True)
        )
        #: Splits per key head -> the launch that sums over the splits.
        self.sum_splits_launches: dict[int, Launch] = {}

    def _count_splits(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> int:
        """Return the number of splits of the query heads that share a key head."""
        if self.rows != ALL_ROWS:  # sums over the splits of all rows, of which this config has some
            return 1
        num_rows = layout.cu_seqlens_q.shape[0] - 1
        group, dims = self.heads // self.k_heads, self.q.head_dim + self.v.head_dim
        block_n = self.tiles.dkdv.block_n
        work = estimate_work(num_rows, layout.max_seqlen, total_q, total_k, block_n, spec)
        return choose_splits(group, self.k_heads, total_k, dims, work, self.max_ctas)

    def _sum_splits_launch(self, splits_per_khead: int) -> Launch:
        """Return the launch that sums dk and dv over so many splits per key head."""
        launch = self.sum_splits_launches.get(splits_per_khead)
        if launch is None:
            launch = self.sum_splits_launches[splits_per_khead] = Launch(
                sum_splits.attention_sum_splits_kernel,
                dict(
                    NUM_SPLITS=splits_per_khead,
                    HEAD_DIM=self.q.head_dim,
                    HEAD_DIM_V=self.v.head_dim,
                    BLOCK=_SUM_BLOCK,
                    DEPENDENT=True,
                ),
                dict(num_warps=4, launch_pdl=True),
                args=SumSplitsArgs,
            )
        return launch

    def _reads_in_place(self, dout: torch.Tensor) -> bool:
        token_stride, head_stride, last_stride = dout.stride()
        return (
            last_stride == 1
            and dout.data_ptr() & 15 == 0
            and _are_strides_tma_addressable(token_stride, head_stride, self.heads)
        )

    def _forward(self, layout, total_q, spec):
        out_layout = HeadLayout(self.heads, self.v.head_dim, self.out_stride, self.v.head_dim)
        q_desc, k_desc, v_desc = self.descriptors
        tile = self.tiles.forward
        tiles, ctas = self._query_tiles(layout, total_q, tile.block_m, spec, tile.ctas_per_sm)
        strides = ForwardStrides(*self.head_strides, stride_om=self.out_stride)
        heads_in_l2 = self.heads if self._has_few_queries(total_q) else self.forward_heads_in_l2
        numbers = ForwardNumbers(
            total_q, self.heads, self.heads // self.k_heads, heads_in_l2, *_base2_spec(spec)
        )
        # The unused one of descriptor and pointer gets a tensor that the kernel does not write.
        described, written = ("out", "q") if self.stores_by_tma else ("q", "out")
        launch = BoundLaunch(
            self.forward_launch,
            ctas,
            ForwardArgs,
            q_desc=("q", q_desc),
            k_desc=("k", k_desc),
            v_desc=("v", v_desc),
            o_desc=(described, _descriptor(out_layout)),
            SLOPES=self.slopes,
            OUT=written,
            LSE="lse",
            TILES=tiles,
            COUNTER="count",
            **strides._asdict(),
            **numbers._asdict(),
        )
        return bind_launches(_FORWARD, launch)

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride, base2_spec = self.heads * total_q, _base2_spec(spec)
        k_heads = self.k_heads
        dq, dkdv = self.tiles.dq, self.tiles.dkdv
        query_tiles, dq_ctas = self._query_tiles(layout, total_q, dq.block_m, spec, dq.ctas_per_sm)
        splits = self._count_splits(layout, total_q, total_k, spec)
        key_tiles, dkdv_ctas = self._key_tiles(
            layout, total_k, dkdv.block_n, spec, dkdv.ctas_per_sm, splits
        )
        dkdv_launches = self.dkdv_launches if splits == 1 else self.dkdv_split_launches
        few_queries = self._has_few_queries(total_q)
        *_, heads_in_l2 = self._head_counts(k_heads * splits, total_q, few_queries)
        dkdv_numbers = DkdvNumbers(
            total_q,
            stats_stride,
            self.heads,
            self.heads // (k_heads * splits),
            splits,
            heads_in_l2,
            *base2_spec,
        )
        k_rows, new = total_k * k_heads, self.empty
        dk_like, dv_like = (
            (*contiguous((k_rows, splits, x.head_dim)), torch.float32) for x in (self.q, self.v)
        )
        if splits > 1:
            sum_ctas = sum(triton.cdiv(k_rows * x.head_dim, _SUM_BLOCK) for x in (self.q, self.v))
            sum_launch = BoundLaunch(
                self._sum_splits_launch(splits),
                sum_ctas,
                SumSplitsArgs,
                DK_SPLITS="dk_splits",
                DV_SPLITS="dv_splits",
                DK="dk",
                DV="dv",
                rows=k_rows,
            )

        def prepare(dout_strides, dlse_strides):
            stride_dom, stride_doh, _ = dout_strides
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            heads, head_dim = self.heads, self.q.head_dim
            dout_layout = HeadLayout(heads, self.v.head_dim, stride_dom, stride_doh)
            dq_layout = HeadLayout(heads, head_dim, heads * head_dim, head_dim)
            q_desc, k_desc, v_desc = self.descriptors
            descriptors = dict(
                q_desc=("q", q_desc),
                k_desc=("k", k_desc),
                v_desc=("v", v_desc),
                do_desc=("dout", _descriptor(dout_layout)),
            )
            dq_strides = DqStrides(
                *self.head_strides, stride_doh=stride_doh, stride_om=self.out_stride
            )
            dq_numbers = DqNumbers(
                stride_dlsem,
                stride_dlseh,
                total_q,
                stats_stride,
                *self._head_counts(heads, total_k, few_queries),
                *base2_spec,
            )
            dkdv_strides = DkdvStrides(
                *self.head_strides,
                stride_doh=stride_doh,
                stride_dkn=k_heads * splits * head_dim,
                stride_dvn=k_heads * splits * self.v.head_dim,
            )
            launches = [
                BoundLaunch(
                    self.dq_launches[dlse_strides is not None],
                    dq_ctas,
                    DqArgs,
                    **descriptors,
                    dq_desc=("dq", _descriptor(dq_layout)),
                    SLOPES=self.slopes,
                    OUT="out",
                    LSE="lse",
                    DLSE="lse" if dlse_strides is None else "dlse",
                    STATS="stats",
                    TILES=query_tiles,
                    COUNTER="count",
                    **dq_strides._asdict(),
                    **dq_numbers._asdict(),
                )
            ]
            launches += [
                BoundLaunch(
                    launch,
                    dkdv_ctas,
                    DkdvArgs,
                    **descriptors,
                    SLOPES=self.slopes,
                    STATS="stats",
                    DK="dk" if splits == 1 else "dk_splits",
                    DV="dv" if splits == 1 else "dv_splits",
                    TILES=key_tiles,
                    COUNTER="count",
                    **dkdv_strides._asdict(),
                    **dkdv_numbers._asdict(),
                )
                for launch in dkdv_launches
            ]
            if splits == 1:
                return bind_launches(_BACKWARD, *launches)
            launch_all = bind_launches(
                f"{_BACKWARD}, *, dk_splits, dv_splits", *launches, sum_launch
            )
            return lambda *args: launch_all(*args, dk_splits=new(*dk_like), dv_splits=new(*dv_like))

        return prepare


class Sm90MixedConfig(LaunchConfig):
    """Launch config of two launches per kernel: short rows, which share tiles, and other rows."""

    def __init__(self, short: Sm90Config, other: Sm90Config):
        super().__init__(short.device, short.dtype, (short.q, short.k, short.v))
        self.short, self.other = short, other
        self._reads_in_place, self.next_counter = other._reads_in_place, other.next_counter

    def _forward(self, layout, total_q, spec):
        short, other = (x._forward(layout, total_q, spec) for x in (self.short, self.other))
        return self._run_both(short, other)

    def _run_both(self, short, other):
        next_counter = self.next_counter

        def run(*args):
            other(*args)
            short(*args[:-1], next_counter())

        return run

    def _backward(self, layout, total_q, total_k, spec):
        prepare_short, prepare_other = (
            x._backward(layout, total_q, total_k, spec) for x in (self.short, self.other)
        )

        def prepare(*strides):
            return self._run_both(prepare_short(*strides), prepare_other(*strides))

        return prepare


class Bf16x3Config(LaunchConfig):
    """Launch config of the float32 Gluon kernels on Hopper, which split operands into bfloat16."""

    #: Heads of tokens that one CTA of a splitting kernel takes.
    BLOCK = 32

    def __init__(
        self,
        device: torch.device,
        layouts: tuple[HeadLayout, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
    ):
        from ..sm90 import pipeline
        from . import bf16x3, float32_sm90

        super().__init__(device, torch.float32, layouts)
        dim, count = self.q.head_dim, bf16x3.TERMS.value
        self.next_counter, self.terms = pipeline.tile_counters(device), count
        self.has_slopes = alibi
        self.tiles = SM90_TILES[4, dim]
        self.max_ctas = device_info(device).sm_count
        # The terms of a head are adjacent. dout has the layout of q.
        split = [ragged(count * x.heads, dim, count * x.heads * dim, dim) for x in layouts]
        self.descriptors = *split, split[0]
        self.forward_descriptors = ragged(*self.q), *split[1:]
        window = window or softcap or alibi
        features = dict(CAUSAL=causal and not window, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        constants, options = dict(HEAD_DIM=dim, BLOCK=self.BLOCK), dict(num_warps=4)
        self.split_launch = Launch(
            bf16x3.attention_split_kernel, constants, options, args=SplitArgs
        )
        self.split_dout_launches = [
            Launch(
                bf16x3.attention_split_dout_kernel,
                dict(**constants, HAS_DLSE=x),
                options,
                args=SplitDoutArgs,
            )
            for x in (False, True)
        ]
        options = dict(num_warps=4, maxnreg=_initial_registers(1, 2))
        m, n, stages, *_ = self.tiles.forward
        self.forward_launch = Launch(
            float32_sm90.attention_forward_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n),
            args=Float32ForwardArgs,
        )
        m, n, stages, *_ = self.tiles.dq
        self.dq_launch = Launch(
            float32_sm90.attention_dq_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n, m // 2),
            args=Float32DqArgs,
        )
        m, n, stages, *_ = self.tiles.dkdv
        self.dkdv_launch = Launch(
            float32_sm90.attention_dkdv_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m, n // 2, n // 2, m),
            args=Float32DkdvArgs,
        )

    def _empty_terms(self, x: torch.Tensor) -> torch.Tensor:
        total, heads, dim = x.shape
        heads *= self.terms
        return self.empty((total, heads, dim), (heads * dim, dim, 1), torch.bfloat16)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bfloat16 terms of a float32 tensor."""
        terms, (total, heads, _) = self._empty_terms(x), x.shape
        self.split_launch(
            triton.cdiv(total * heads, self.BLOCK),
            SplitArgs(
                X=x,
                SPLIT=terms,
                stride_xt=x.stride(0),
                stride_xh=x.stride(1),
                total=total,
                heads=heads,
            ),
        )
        return terms

    def _forward(self, layout, total_q, spec):
        split, has_slopes = self._split, self.has_slopes
        q_desc, k_desc, v_desc = self.forward_descriptors
        tiles, ctas = self._query_tiles(layout, total_q, self.tiles.forward.block_m, spec)
        strides = Float32ForwardStrides(self.q.head_stride, self.out_stride)
        numbers = ForwardNumbers(
            total_q, *self._head_counts(self.heads, total_q), *_base2_spec(spec)
        )
        launch = bind_launch(
            self.forward_launch,
            ctas,
            Float32ForwardArgs,
            q_desc=q_desc,
            k_desc=k_desc,
            v_desc=v_desc,
            TILES=tiles,
            **strides._asdict(),
            **numbers._asdict(),
        )

        def run(q, k, v, slopes, out, lse, count):
            launch(
                q_desc=q,
                k_desc=split(k),
                v_desc=split(v),
                SLOPES=slopes if has_slopes else q,
                OUT=out,
                LSE=lse,
                COUNTER=count,
            )

        return run

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride, base2_spec = self.heads * total_q, _base2_spec(spec)
        split, has_slopes = self._split, self.has_slopes
        query_tiles, dq_ctas = self._query_tiles(layout, total_q, self.tiles.dq.block_m, spec)
        key_tiles, dkdv_ctas = self._key_tiles(layout, total_k, self.tiles.dkdv.block_n, spec)
        stride_dqm, stride_dkn = self.out_stride, self.k_heads * self.q.head_dim
        dq_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.heads, total_k), *base2_spec
        )
        dkdv_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.k_heads, total_q), *base2_spec
        )

        def prepare(dout_strides, dlse_strides):
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            stride_dom, stride_doh, _ = dout_strides
            names = "q_desc", "k_desc", "v_desc", "do_desc"
            descriptors = dict(zip(names, self.descriptors, strict=True))
            split_dout_launch = bind_launch(
                self.split_dout_launches[dlse_strides is not None],
                triton.cdiv(stats_stride, self.BLOCK),
                SplitDoutArgs,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dlsem=stride_dlsem,
                stride_dlseh=stride_dlseh,
                total_q=total_q,
                stats_stride=stats_stride,
                heads=self.heads,
            )
            dq_launch = bind_launch(
                self.dq_launch,
                dq_ctas,
                Float32DqArgs,
                **descriptors,
                TILES=query_tiles,
                stride_dqm=stride_dqm,
                **dq_numbers._asdict(),
            )
            dkdv_launch = bind_launch(
                self.dkdv_launch,
                dkdv_ctas,
                Float32DkdvArgs,
                **descriptors,
                TILES=key_tiles,
                stride_dkn=stride_dkn,
                **dkdv_numbers._asdict(),
            )

            def run(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count):
                slopes, split_dout = slopes if has_slopes else q, self._empty_terms(dout)
                split_dout_launch(
                    OUT=out,
                    DO=dout,
                    LSE=lse,
                    DLSE=lse if dlse is None else dlse,
                    STATS=stats,
                    SPLIT=split_dout,
                )
                terms = dict(q_desc=split(q), k_desc=split(k), v_desc=split(v), do_desc=split_dout)
                dq_launch(**terms, SLOPES=slopes, STATS=stats, DQ=dq, COUNTER=count)
                dkdv_launch(**terms, SLOPES=slopes, STATS=stats, DK=dk, DV=dv, COUNTER=count)

            return run

        return prepare
