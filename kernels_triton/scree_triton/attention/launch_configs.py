"""The selection of launch configs, and their cache.

A launch config holds everything that follows from a call's static metadata: device, dtype, shapes
except the number of tokens, strides and the kind of mask. Launch configs are cached. For a given
pair of row layouts, a launch config prepares functions that only allocate their results and launch.
"""

import os
from typing import NamedTuple

import torch
import triton

from ..runtime.device import device_info
from .base_config import LaunchConfig
from .dkdv_splits import estimate_pairs
from .metadata import (
    OTHER_ROWS,
    SHORT_ROWS,
    AttentionSpec,
    HeadLayout,
    VarlenLayout,
    allows_tf32,
    are_strides_tma_addressable,
    is_tma_aligned,
)
from .portable_config import PortableConfig
from .sm90_configs import Bf16x3Config, Sm90Config, Sm90MixedConfig
from .tile_configs import (
    FEW_QUERIES,
    LARGE_TILE,
    LONG_SEQLEN,
    MANY_ROWS,
    MEDIUM_SEQLEN,
    MEDIUM_TILE,
    MERGED_MEAN_SEQLEN,
    SHORT_SEQLEN,
    SHORTEST_MEAN_SEQLEN,
    SHORTEST_SEQLEN,
    SM_COUNT,
    SMALL_TILE_COST,
    SMALL_TILE_HEAD_DIM,
    SMALL_WINDOW,
    BatchKind,
    Sm90Tiles,
    Tiles,
    count_short_rows,
    portable_tiles,
    sm90_tiles,
    weight_rows,
)
from .tile_scheduler import UNBOUNDED

_MAX_CONFIGS = 1024
#: Whether the first call of a kind measures the tiles of the portable kernels.
AUTOTUNE = os.environ.get("SCREE_AUTOTUNE") == "1"
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
        _batch_kind(layout, total_q, total_k, heads, max(head_dim, head_dim_v), spec),
        layout.max_seqlen < UNBOUNDED
        and max(total_q, total_k) <= MERGED_MEAN_SEQLEN * num_rows
        and _has_many_short_rows(layout, max(total_q, total_k), heads, max(head_dim, head_dim_v)),
    )


def _head_layouts(*arrays: torch.Tensor) -> tuple[HeadLayout, ...]:
    return tuple(HeadLayout(*x.shape[1:], *x.stride()[:2]) for x in arrays)


def _batch_kind(
    layout: VarlenLayout, total_q: int, total_k: int, heads: int, head_dim: int, spec: AttentionSpec
) -> BatchKind:
    """Return which tiles a batch takes; only a known length of the longest row selects others."""
    max_seqlen = layout.max_seqlen
    if max_seqlen >= UNBOUNDED:
        return "usual"
    num_rows = layout.cu_seqlens_q.shape[0] - 1
    if max_seqlen <= SHORT_SEQLEN and total_q * heads <= FEW_QUERIES:
        queries_per_sm = total_q * heads / SM_COUNT
        if 3 * total_q < 2 * LARGE_TILE * num_rows or queries_per_sm < MEDIUM_TILE:
            return "few tiles"
        return "few large tiles" if queries_per_sm >= LARGE_TILE else "few medium tiles"
    if max_seqlen <= SHORTEST_SEQLEN:
        return "short rows" if total_q <= SHORTEST_MEAN_SEQLEN * num_rows else "usual"
    work = layout, total_q, total_k, heads, spec
    # A compiled model passes SHORT_SEQLEN + 1 for shorter rows.
    has_smaller_tiles = head_dim <= SMALL_TILE_HEAD_DIM and max_seqlen > SHORT_SEQLEN + 1
    if has_smaller_tiles and _has_long_tiles(*work, aligned=True):
        return "few tiles"
    if max(spec.window_left, 0) + max(spec.window_right, 0) + 1 < SMALL_WINDOW:
        return "small window"
    if spec.window_left < UNBOUNDED:
        return "usual"
    if not _has_long_rows(layout, total_k):
        is_medium = max_seqlen <= MEDIUM_SEQLEN and 128 < head_dim <= 160
        return "medium rows" if is_medium else "usual"
    # In causal rows, queries before the first key attend to nothing, so tiles have less work.
    is_aligned = (
        layout.cu_seqlens_q is layout.cu_seqlens_k
        or layout.cu_seqlens_q.shape[0] == 2  # one row
        or spec.window_right < UNBOUNDED
    )
    if not is_aligned and _has_long_tiles(*work, aligned=False):
        return "two long rows"
    return "long rows"


def _has_long_tiles(
    layout: VarlenLayout, total_q: int, total_k: int, heads: int, spec: AttentionSpec, aligned: bool
) -> bool:
    """Return whether one large tile takes longer than the work per SM of small tiles.

    The rows are as in `estimate_pairs`.
    """
    longest_q, longest_k = min(layout.max_seqlen, total_q), min(layout.max_seqlen, total_k)
    num_rows = layout.cu_seqlens_q.shape[0] - 1
    pairs = estimate_pairs(num_rows, longest_q, longest_k, total_q, total_k, aligned)
    if min(spec.window_left, spec.window_right) < UNBOUNDED:
        # A causal mask leaves about half of the pairs.
        reach = max(spec.window_left, 0) + max(spec.window_right, 0) + 1
        pairs = min(pairs / 2, float(total_q * reach))
        longest_k = min(longest_k, reach + LARGE_TILE)
    return SMALL_TILE_COST * heads * pairs < SM_COUNT * LARGE_TILE * longest_k


def _has_many_short_rows(layout: VarlenLayout, tokens: int, heads: int, head_dim: int) -> bool:
    """Return whether so many rows are short that sharing tiles pays off."""
    num_rows, max_seqlen = layout.cu_seqlens_q.shape[0] - 1, layout.max_seqlen
    rows = count_short_rows(num_rows, tokens, max_seqlen) * heads
    return weight_rows(rows, head_dim, max_seqlen) >= MANY_ROWS


def _has_long_rows(layout: VarlenLayout, total_k: int) -> bool:
    """Return whether most work is in long rows.

    This is known if the length of the longest row is. The other rows are assumed to be equal.
    """
    longest = min(layout.max_seqlen, total_k)
    if longest < LONG_SEQLEN or layout.max_seqlen >= UNBOUNDED:
        return False
    others, num_others = total_k - longest, max(layout.cu_seqlens_k.shape[0] - 2, 1)
    return longest**2 + others**2 / num_others >= LONG_SEQLEN * total_k


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
    batch_kind: BatchKind,
    many_short_rows: bool,
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
            are_strides_tma_addressable(x.token_stride, x.head_stride, x.heads) for x in layouts
        )
    )
    if sm90 and half:
        options = causal, window, softcap, alibi > 0, same_offsets, batch_kind
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
        and sm90_tiles(dtype.itemsize, head_dim, head_dim_v) is not None
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
        tiles = sm90_tiles(dtype.itemsize, head_dim, head_dim_v)
    if tiles is None:
        block_d = max(32, *(triton.next_power_of_2(x) for x in (head_dim, head_dim_v)))
        tiles = portable_tiles(device_info(device).capability, dtype.itemsize, block_d)
    return TileSizes(tiles.forward.block_m, tiles.dq.block_m, tiles.dkdv.block_n)
