"""Launches of the kernels that reduce, map and scan the rows of a ragged array, and segment
reductions with their gradients.

Rows of scalars are processed by `merge_path`, rows of wide tokens by `wide_features`. On Hopper,
`cluster_sm90` processes long rows of scalars whose tokens are mapped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import scree
from scree.layout import Layout
from scree.ops.segment import segment_reduce as standard_reduce

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import FLOATS, device_info, unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import (
    Launch,
    bind_args,
    contiguous,
    empty,
    launch_on_device,
    method_on_device,
)
from . import merge_path, reductions, wide_features

# Tokens of a tile per warp.
_TOKENS_PER_WARP = 512
_MAX_WARPS = 16
# Maximum number of rows in a tile.
_MAX_ROWS = 256
_MIN_THREADS_PER_ROW = 8
# Registers per thread, so that many CTAs run at once. COUNT_EQUAL needs more.
_MAX_REGISTERS = 64
_MAX_REGISTERS_OF_COUNTS = 80
# Tiles per partition, unless the rows are so long on average that a partition has one long row.
_PARTITION_TILES = 2
# A row of up to this many tiles is processed by one CTA. Longer rows are cut into parts.
_MAX_UNCUT_TILES = 16
# Rows longer than this on average are processed faster by clusters of CTAs.
_MIN_CLUSTER_LENGTH = 1 << 14
# Merge-path positions per part of the rows that are cut.
_PART_SIZE = 8192
# Warps of a CTA that processes a part, and tokens per step.
_PART_WARPS = 4
_PART_STEP = 2048
# Parts of the first pass that run ahead of the parts of the longest row.
_LAG_MARGIN = 2
# Partitions per CTA of `segment_partition_starts_kernel`.
_STARTS_PER_CTA = 128
# Rows that a CTA compares at once to search its rows, where no cache holds the rows of the partitions.
_SAMPLED_ROWS = 256
# A small batch has at most this many partitions of _SMALL_PARTITION positions. If launches are recorded, one
# kernel processes all of its rows, with more warps per token.
_MAX_SMALL_PARTITIONS = 1280
_SMALL_PARTITION = 512
_SMALL_WARPS = 4
# Tokens of a tile of a small batch without parts.
_SMALL_TILE = 1024
# In a small batch one CTA processes a row of up to this many tokens if no row can be longer: the counters
# of rows that are cut must be cleared before the kernel starts.
_MAX_SMALL_UNCUT_LENGTH = 1 << 15
# Tokens per step of longer rows of a small batch, and registers per thread for these steps.
_LONG_STEP = 4096
_LONG_STEP_REGISTERS = 128
# Registers per thread of the kernel for all rows if some can be cut.
_ALL_ROWS_REGISTERS = 80
# Maximum elements of a token, so that positions in a partition fit 32 bits.
_MAX_TOKEN_ELEMENTS = 1 << 20
_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
OPS = {
    "sum": reductions.SUM,
    "mean": reductions.MEAN,
    "prod": reductions.PROD,
    "max": reductions.MAX,
    "min": reductions.MIN,
    "any": reductions.ANY,
    "all": reductions.ALL,
}
# Maps of the gradients that depend only on the gradient of the result, not on the values.
_GRADIENT_MAPS = {"sum": reductions.BROADCAST, "mean": reductions.MEAN_BACKWARD}
# Searches, and the reduction that gives the extremum.
_SEARCHES = {
    reductions.ARGMAX.value: reductions.MAX.value,
    reductions.ARGMIN.value: reductions.MIN.value,
}
_BOOLEAN_OPS = (reductions.ANY.value, reductions.ALL.value)
_SCANS = (reductions.CUMULATIVE.value, reductions.CUMULATIVE_REVERSE.value)


class Rows(NamedTuple):
    """The offsets of a call, and its `scree.layout.Layout`, or None.

    `max_length` is a bound on the length of the longest row, or None if the host knows no bound.
    """

    offsets: torch.Tensor
    max_length: int | None
    layout: Any = None

    def first_rows(self, partition_size: int, num_partitions: int) -> torch.Tensor:
        """Return the number of rows that begin before each partition, (num_partitions + 1,).

        The last entry is the number of rows that begin before the end of the last partition.
        """
        key = "partitions", partition_size, num_partitions
        cache = {} if self.layout is None else self.layout.cache
        first_rows = cache.get(key)
        if first_rows is None:
            device, n = self.offsets.device, self.offsets.shape[0] - 1
            first_rows = torch.empty((num_partitions + 1,), dtype=torch.int32, device=device)
            args = merge_path.PartitionStartsArgs(
                OFFSETS=self.offsets,
                FIRST_ROWS=first_rows,
                n=n,
                num_partitions=num_partitions,
                partition_size=partition_size,
                bisections=(n + 1).bit_length(),
            )
            launch = _partition_starts_launch(device, self.offsets.dtype)
            launch_on_device(launch, num_partitions // _STARTS_PER_CTA + 1, args)
            cache[key] = first_rows
        return first_rows


@cache
def _partition_starts_launch(device: torch.device, dtype: torch.dtype) -> Launch:
    """Return the launch of `segment_partition_starts_kernel`, one per device and dtype of the offsets."""
    return Launch(
        merge_path.segment_partition_starts_kernel,
        dict(BLOCK=_STARTS_PER_CTA),
        dict(num_warps=4),
        args=merge_path.PartitionStartsArgs,
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of a dtype are summed."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.int32 if dtype == torch.bool else dtype


def _identity(op: int, dtype: torch.dtype) -> float | int:
    """Return the state of a reduction of no tokens, and the value of masked tokens."""
    if op in (reductions.MAX.value, reductions.MIN.value, reductions.LSE.value, *_SEARCHES):
        sign = 1 if op == reductions.MIN.value else -1
        if dtype.is_floating_point:
            return sign * float("inf")
        if dtype == torch.bool:
            return int(sign == 1)
        info = torch.iinfo(dtype)
        return info.max if sign == 1 else info.min
    return int(op in (reductions.PROD.value, reductions.PROD_AND_ZEROS.value))


def over_rows(
    x: torch.Tensor,
    rows: Rows,
    op: tl.constexpr,
    map: tl.constexpr = reductions.NONE,
    *,
    y: torch.Tensor | None = None,
    row_a: torch.Tensor | None = None,
    row_b: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reduce the rows of x to (n, ...); with `map`, return the mapped tokens (total, ...).

    Parameters
    ----------
    x, y
        Values (total, ...), contiguous; y only if `op` or `map` needs two values. BROADCAST and
        MEAN_BACKWARD overwrite x.
    rows
        The offsets of the rows.
    op, map
        The reduction and the map, constants of `reductions`.
    row_a, row_b
        Operands with one entry per row, (n, ...), contiguous.
    dtype
        The dtype of the reduction and its result; by default the accumulation dtype of x. For scans
        the dtype of the result, for positions of an extremum an integer dtype.
    """
    config = launch_config(x, rows, op, map, y=y, row_a=row_a, row_b=row_b, dtype=dtype)
    return config.run(x, rows, y, row_a, row_b)


def launch_config(
    x: torch.Tensor,
    rows: Rows,
    op: tl.constexpr,
    map: tl.constexpr = reductions.NONE,
    *,
    y: torch.Tensor | None = None,
    row_a: torch.Tensor | None = None,
    row_b: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> "_LaunchConfig":
    """Return the launch config of `over_rows` for arguments with this metadata."""
    offsets = rows.offsets
    dtypes = (
        x.dtype,
        None if y is None else y.dtype,
        None if row_a is None else row_a.dtype,
        None if row_b is None else row_b.dtype,
        offsets.dtype,
    )
    return _launch_config(
        x.device, dtypes, op.value, map.value, dtype, x.shape, offsets.shape[0] - 1, rows.max_length
    )


@dataclass
class _LaunchConfig:
    """The launch of a call, as far as the host metadata determines it."""

    #: Index of the CUDA device, or None.
    index: int | None
    #: Allocate a tensor on the device.
    new: Callable[..., torch.Tensor]
    #: Shape, strides and dtype of the result; None to overwrite x.
    out: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
    #: The launch for wide tokens, which uses no other launch of this class.
    wide: wide_features.LaunchConfig | None
    state_dtype: torch.dtype
    sizes: "_Sizes"
    #: The launch for the rows that are not cut, and the function that builds its arguments.
    rows_launch: Launch | None = None
    rows_args: Callable[..., Any] | None = None
    #: CTAs per cluster if `rows_launch` launches `cluster_sm90`, else 0.
    cluster_size: int = 0
    #: The launch for the rows that are cut into parts; None if no row can be cut.
    part_launch: Launch | None = None
    part_args: Callable[..., Any] | None = None
    num_passes: int = 1
    #: Whether each CTA searches its rows in the offsets, because no cache holds them.
    searches_rows: bool = False

    @method_on_device
    def run(
        self,
        x: torch.Tensor,
        rows: Rows,
        y: torch.Tensor | None = None,
        row_a: torch.Tensor | None = None,
        row_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `over_rows`."""
        out = self.new(*self.out) if self.out else x
        if out.numel() == 0:
            return out
        offsets, sizes = rows.offsets, self.sizes
        x, kernel_out = (p.view(torch.uint8) if p.dtype == torch.bool else p for p in (x, out))
        if x is kernel_out:  # overwritten, and not read
            x = row_a
        tensors = dict(
            X=x,
            Y=x if y is None else y,
            ROW_A=x if row_a is None else row_a,
            ROW_B=x if row_b is None else row_b,
            OUT=kernel_out,
            OFFSETS=offsets,
        )
        if self.wide is not None:
            wide_features.run(self.wide, tensors)
            return out
        if self.cluster_size:
            n = offsets.shape[0] - 1
            parts = self.new(*contiguous((n, 2, self.cluster_size)), self.state_dtype)
            self.rows_launch(n, self.rows_args(**tensors, PARTS=parts))
        elif not self.searches_rows:
            first_rows = rows.first_rows(sizes.partition_size, sizes.num_partitions)
            self.rows_launch(sizes.num_partitions, self.rows_args(**tensors, FIRST_ROWS=first_rows))
        elif self.part_launch is not None or not sizes.num_parts:
            self.rows_launch(sizes.num_partitions, self.rows_args(**tensors, FIRST_ROWS=offsets))
        if sizes.num_parts:
            tensors |= dict(
                PARTS=self.new((sizes.num_parts, 2, 2), (4, 2, 1), self.state_dtype),
                COUNTS=wide_features.counters(x.device, sizes.num_parts),
            )
            num_slots = sizes.num_parts * self.num_passes
            if self.part_launch is None:
                self.rows_launch(num_slots + sizes.num_partitions, self.rows_args(**tensors))
            else:
                first_rows = rows.first_rows(_PART_SIZE, sizes.num_parts)
                self.part_launch(num_slots, self.part_args(**tensors, FIRST_ROWS=first_rows))
        return out


class _Sizes(NamedTuple):
    """Sizes of tiles, partitions and parts."""

    #: Mean length of the rows, without one row that is much longer than the others.
    mean_length: int
    #: Tokens per row in a tile.
    width: int
    #: Tokens of a tile.
    tile: int
    num_warps: int
    #: Tokens per step of rows that are much longer than a tile, or 0.
    long_step: int
    #: Merge-path positions per partition.
    partition_size: int
    num_partitions: int
    #: Rows longer than this are cut into parts.
    max_uncut_length: int
    #: 0 if no row can be cut.
    num_parts: int
    #: Parts between the first and the second pass over a part.
    lag: int
    #: Whether the batch is small and its launches are recorded. Then one kernel processes all rows.
    is_small: bool


def _select_sizes(total: int, n: int, max_length: int | None, is_recorded: bool = False) -> _Sizes:
    """Return the sizes for rows with these host-visible lengths."""
    longest = total if max_length is None else min(max_length, total)
    other_tokens, other_rows = total, max(n, 1)
    # A row that dominates the tokens would distort the mean length of the other rows.
    if longest > _MAX_UNCUT_TILES * _TOKENS_PER_WARP and total - longest >= n - 1 > 0:
        other_tokens, other_rows = total - longest, n - 1
    mean_length = -(-other_tokens // other_rows)
    width = min(triton.next_power_of_2(max(mean_length, 1)), _MAX_WARPS * _TOKENS_PER_WARP)
    # Wider tiles fit rows that are longer than the mean but not cut.
    if width < _TOKENS_PER_WARP and width < longest <= _MAX_UNCUT_TILES * _TOKENS_PER_WARP:
        width *= 2
    num_warps = max(width // _TOKENS_PER_WARP, 1)
    tile = num_warps * _TOKENS_PER_WARP
    max_uncut_length = _MAX_UNCUT_TILES * tile
    partition_size = _PARTITION_TILES * tile
    if other_tokens > max_uncut_length * other_rows:
        partition_size = max_uncut_length
    long_step = 0
    is_small = (
        is_recorded
        and num_warps < _SMALL_WARPS
        and total + n <= _MAX_SMALL_PARTITIONS * _SMALL_PARTITION
    )
    if is_small:
        num_warps, partition_size = _SMALL_WARPS, max(_SMALL_PARTITION, width)
        if longest <= _MAX_SMALL_UNCUT_LENGTH:
            tile, max_uncut_length = _SMALL_TILE, _MAX_SMALL_UNCUT_LENGTH
            long_step = _LONG_STEP if longest > _LONG_STEP // 2 else 0
    num_parts = -(-(total + n) // _PART_SIZE) if longest > max_uncut_length else 0
    return _Sizes(
        mean_length=mean_length,
        width=width,
        tile=tile,
        num_warps=num_warps,
        long_step=long_step,
        partition_size=partition_size,
        num_partitions=-(-(total + n) // partition_size),
        max_uncut_length=max_uncut_length,
        num_parts=num_parts,
        lag=min(longest // _PART_SIZE + _LAG_MARGIN, num_parts),
        is_small=is_small,
    )


def _search_constants(n: int) -> dict[str, int]:
    """Return the constants by which a CTA searches its rows among n; with n = 0 it loads them."""
    sampled_rows = min(triton.next_power_of_2(n), _SAMPLED_ROWS) if n else 0
    rounds, remaining = 0, n
    while remaining > 0:
        rounds, remaining = rounds + 1, -(-remaining // sampled_rows) - 1
    return dict(SAMPLED_ROWS=sampled_rows, SAMPLE_ROUNDS=rounds)


@lru_cache(1024)
def _launch_config(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    op: int,
    map: int,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    n: int,
    max_length: int | None,
) -> _LaunchConfig:
    """Return the launch config for x of this shape.

    `dtypes` are the dtypes of x, y, row_a, row_b and offsets.
    """
    total, *token_shape = shape
    is_search, is_boolean = op in _SEARCHES, op in _BOOLEAN_OPS
    compute_dtype = accumulator(dtypes[0] if dtype is None or is_search or is_boolean else dtype)
    state_dtype = torch.int64 if is_search else torch.int32 if is_boolean else compute_dtype
    identity = _identity(op, state_dtype if dtypes[0] != torch.bool else torch.bool)
    # Recorded launches belong to one call, so a launch for the rows of the partitions would too.
    is_recorded = device.type == "meta"
    sizes = _select_sizes(total, n, max_length, is_recorded)
    searches_rows = is_recorded and n > 0 and (sizes.is_small or n <= _SAMPLED_ROWS)
    strides = tuple(math.prod(token_shape[i:]) for i in range(len(token_shape) + 1))
    out = None
    if map not in wide_features.MAPS_WITHOUT_INPUT:
        out_dtype = dtype or (dtypes[0] if map else compute_dtype)
        out = (total if map else n, *token_shape), strides, out_dtype
    index, new = device.index if device.type == "cuda" else None, empty(device.type)
    if strides[0] >= wide_features.MIN_ELEMENTS:
        wide_dtypes = (
            dtypes[0],
            dtypes[1] is not None,
            *dtypes[2:4],
            out[2] if out else dtypes[0],
            dtypes[4],
        )
        wide = wide_features.make_config(
            device, wide_dtypes, op, map, compute_dtype, state_dtype, identity, shape, n, max_length
        )
        return _LaunchConfig(index, new, out, wide, state_dtype, sizes)

    num_inputs = 2 if dtypes[1] else int(map not in wide_features.MAPS_WITHOUT_INPUT)
    operation = dict(OP=op, MAP=map)
    inputs = dict(NUM_INPUTS=num_inputs, HAS_A=dtypes[2] is not None, HAS_B=dtypes[3] is not None)
    common = inputs | dict(
        IDENTITY=identity,
        FILL=_identity(_SEARCHES.get(op, op), dtypes[0]),
        COMPUTE_DTYPE=_TRITON_DTYPES[compute_dtype],
        STATE_DTYPE=_TRITON_DTYPES[state_dtype],
    )
    num_warps, width, threads = sizes.num_warps, sizes.width, 32 * sizes.num_warps
    tile = min(sizes.tile, width * _MAX_ROWS)
    has_wide_tiles = sizes.tile > _TOKENS_PER_WARP
    tiles = dict(
        ROWS=tile // width,
        WIDTH=width,
        THREADS_PER_ROW=min(width, max(_MIN_THREADS_PER_ROW, threads * width // tile)),
        THREADS_PER_LONG_ROW=min(4 * threads, tile) if has_wide_tiles else threads,
        LONG_STEP=sizes.long_step,
        VECTOR=has_wide_tiles,
        EVEN=bool(op) and max_length is not None and n * max_length == total,
    )
    options = dict(num_warps=num_warps)
    # 64-bit values, and two inputs in a CTA of one warp, need more registers than the bound.
    if max(compute_dtype.itemsize, state_dtype.itemsize) <= 4 and not (
        num_inputs == 2 and num_warps == 1
    ):
        is_count = op == reductions.COUNT_EQUAL.value
        options |= dict(maxnreg=_MAX_REGISTERS_OF_COUNTS if is_count else _MAX_REGISTERS)
        if sizes.long_step:
            options |= dict(maxnreg=_LONG_STEP_REGISTERS)
        elif sizes.is_small and sizes.num_parts:
            options |= dict(maxnreg=_ALL_ROWS_REGISTERS)
    search = _search_constants(n if searches_rows else 0)
    key = device, dtypes, out and out[2]
    cluster_kernels = None
    if (
        op
        and map
        and map not in _SCANS
        and n
        and sizes.mean_length > _MIN_CLUSTER_LENGTH
        and compute_dtype == torch.float32
        and op != reductions.PROD_AND_ZEROS.value
    ):
        cluster_kernels = _cluster_kernels(device)
    has_parts = sizes.num_parts > 0
    launches_once = searches_rows and sizes.is_small and has_parts
    use_pdl = has_parts and device_info(device).supports_pdl
    part_warps = num_warps if launches_once else _PART_WARPS
    part_step = max(_PART_STEP, part_warps * _TOKENS_PER_WARP)
    part_threads = min(128 * part_warps, part_step)
    row_numbers = dict(
        n=n,
        total=total,
        partition_size=sizes.partition_size,
        max_uncut_length=sizes.max_uncut_length,
        max_length=max_length or 0,
    )
    part_numbers = dict(
        part_size=_PART_SIZE,
        max_uncut_length=sizes.max_uncut_length,
        num_parts=sizes.num_parts,
        lag=sizes.lag,
    )
    if cluster_kernels:
        rows_launch = cluster_kernels.launch(
            sizes.mean_length, operation | inputs | dict(LAUNCH_DEPENDENTS=use_pdl)
        )
        rows_args = bind_args(
            cluster_kernels.ClusterArgs, n=n, total=total, max_uncut_length=sizes.max_uncut_length
        )
    elif launches_once:
        part_tiles = dict(PART_STEP=part_step, THREADS_PER_PART=part_threads)
        rows_launch = _launch(
            key,
            merge_path.segment_rows_kernel,
            merge_path.RowsArgs,
            _items(operation | tiles | part_tiles | common | search),
            _items(options),
        )
        rows_args = bind_args(merge_path.RowsArgs, **row_numbers | part_numbers)
    else:
        rows_launch = _launch(
            key,
            merge_path.segment_partition_kernel,
            merge_path.PartitionArgs,
            _items(operation | tiles | common | dict(LAUNCH_DEPENDENTS=use_pdl) | search),
            _items(options),
        )
        rows_args = bind_args(merge_path.PartitionArgs, **row_numbers)
    part_launch = part_args = None
    if has_parts and not launches_once:
        part_tiles = dict(STEP=part_step, THREADS_PER_LONG_ROW=part_threads)
        part_launch = _launch(
            key,
            merge_path.segment_part_kernel,
            merge_path.PartArgs,
            _items(operation | part_tiles | common | dict(WAIT_FOR_PREVIOUS=use_pdl)),
            _items(dict(num_warps=_PART_WARPS, launch_pdl=use_pdl)),
        )
        part_args = bind_args(merge_path.PartArgs, **part_numbers)
    return _LaunchConfig(
        index,
        new,
        out,
        None,
        state_dtype,
        sizes,
        rows_launch=rows_launch,
        rows_args=rows_args,
        cluster_size=cluster_kernels.CTAS_PER_CLUSTER if cluster_kernels else 0,
        part_launch=part_launch,
        part_args=part_args,
        num_passes=2 if op and map else 1,
        searches_rows=searches_rows,
    )


@cache
def _cluster_kernels(device: torch.device) -> Any:
    """Return the module of the kernels for clusters of CTAs; None if the device has none.

    Recorded launches have no clusters.
    """
    if device.type == "meta" or not device_info(device).supports_sm90_gluon:
        return None
    from . import cluster_sm90

    return cluster_sm90


def _items(constants: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return constants in a form that can be hashed."""
    return tuple(constants.items())


@cache
def _launch(
    key: Any,
    kernel: Any,
    args: Any,
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
) -> Launch:
    """Return the launch of a kernel with these constants and options, one per `key`."""
    return Launch(kernel, dict(constants), dict(options), args=args)


def _standard(x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype) -> torch.Tensor:
    return standard_reduce(op, x, layout_of(x, rows), "standard", dtype)


def _standard_gradient(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: Rows,
    op: str,
) -> torch.Tensor:
    x = dout.new_zeros(shape, dtype=dtype) if x is None else x
    rows = rows._replace(layout=layout_of(x, rows))
    return gradients(lambda x: _standard(x, rows, op, dout.dtype), (x,), dout)[0]


@falls_back_to(_standard_gradient)
def _gradient(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: Rows,
    op: str,
) -> torch.Tensor:
    """Return the gradient of a reduction of x, which has this shape and dtype, to `out`.

    For sums and means x and `out` may be None. Tokens that are equal to the extremum of their row
    share its gradient.
    """
    dout = dout.contiguous()
    if op in _GRADIENT_MAPS:
        return over_rows(
            dout.new_empty(shape, dtype=dtype),
            rows,
            reductions.NONE,
            _GRADIENT_MAPS[op],
            row_a=dout,
        )
    x = x.contiguous()
    if op == "prod":
        return over_rows(x, rows, reductions.PROD_AND_ZEROS, reductions.PROD_BACKWARD, row_a=dout)
    return over_rows(
        x, rows, reductions.COUNT_EQUAL, reductions.EXTREMUM_BACKWARD, row_a=out, row_b=dout
    )


def _record_reduce(ctx, x, rows, op, config):
    out = config.run(x.contiguous(), rows)
    ctx.save_for_backward(*((None, None) if op in _GRADIENT_MAPS else (x, out)))
    ctx.constants = x.shape, x.dtype, rows, op
    return out


def _reduce_gradient(ctx, dout):
    return _gradient(dout, *ctx.saved_tensors, *ctx.constants), None, None, None


_differentiable_reduce = differentiable("Reduce", _record_reduce, _reduce_gradient)


@falls_back_to(
    lambda x, offsets, max_length, op, dtype: _standard(x, Rows(offsets, max_length), op, dtype)
)
def _reduce_operator(
    x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, op: str, dtype: torch.dtype
) -> torch.Tensor:
    return over_rows(x.contiguous(), Rows(offsets, max_length), OPS[op], dtype=dtype)


def _reduce_fake(x, offsets, max_length, op, dtype):
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=dtype)


def _reduce_backward_operator(
    dout: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    max_length: int | None,
    op: str,
) -> torch.Tensor:
    return _gradient(dout, x, out, x.shape, x.dtype, Rows(offsets, max_length), op)


def _reduce_backward_fake(dout, x, out, offsets, max_length, op):
    return x.new_empty(x.shape)


_reduce_backward_op = define_operator(
    "segment_reduce_backward", _reduce_backward_operator, _reduce_backward_fake
)


def _save(ctx, inputs, output):
    x, offsets, ctx.max_length, ctx.op, _ = inputs
    ctx.save_for_backward(x, output, offsets)


_reduce_op = define_operator(
    "segment_reduce",
    _reduce_operator,
    _reduce_fake,
    save=_save,
    backward=lambda ctx, dout: (
        _reduce_backward_op(dout, *ctx.saved_tensors, ctx.max_length, ctx.op),
        None,
        None,
        None,
        None,
    ),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `SegmentCall`; None if they do."""
    if reason := unsupported_dtype(call.values, _DTYPES) or too_wide(call.values):
        return reason
    is_boolean = call.op in ("any", "all")
    is_truncated = call.values.dtype.is_floating_point and not call.dtype.is_floating_point
    if not is_boolean and (is_truncated or call.dtype not in (*FLOATS, *_TRITON_DTYPES)):
        return f"the Triton kernels do not reduce {call.values.dtype} in {call.dtype}"
    return None


def segment_reduce(call: Any) -> torch.Tensor:
    """Compute a `SegmentCall`."""
    if not uses_operators(call.values):
        return prepare_segment_reduce(call)(call.layout, call.values)
    rows = rows_of(call.layout)
    return _reduce_op(call.values, rows.offsets, rows.max_length, call.op, call.dtype)


def prepare_segment_reduce(call: Any) -> Callable[..., torch.Tensor]:
    """Return a function for calls with the same metadata."""
    op, requires_grad = call.op, call.values.requires_grad
    config = launch_config(call.values, rows_of(call.layout), OPS[op], dtype=call.dtype)

    def reduce(layout: Any, values: torch.Tensor) -> torch.Tensor:
        rows = rows_of(layout)
        if requires_grad and torch.is_grad_enabled():
            return _differentiable_reduce(values, rows, op, config)
        return config.run(values.contiguous(), rows)

    return reduce


def too_wide(x: torch.Tensor) -> str | None:
    """Return why a token of x, (total, ...), has too many elements; None if it has not."""
    width = math.prod(x.shape[1:])
    return (
        f"the Triton kernels take tokens of up to {_MAX_TOKEN_ELEMENTS} elements here, not {width}"
        if width > _MAX_TOKEN_ELEMENTS
        else None
    )


def layout_of(x: torch.Tensor, rows: Rows) -> Layout:
    """Return the layout of x, (total, ...), on these rows."""
    return rows.layout or scree.Array.unchecked(x, rows.offsets, 0, rows.max_length).layout


def rows_of(layout: Any) -> Rows:
    """Return the rows of a `scree.layout.Layout`."""
    return Rows(layout.offsets.contiguous(), layout.max_length, layout)
