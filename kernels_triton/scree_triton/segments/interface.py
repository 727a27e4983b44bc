"""Reductions of the rows of a ragged array, and their gradients, on the kernels of `merge_path`
and, for wide tokens, `wide_features`.

On devices that have them, clusters of CTAs take long rows whose tokens are written.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator
from ..runtime.device import FLOATS, GLUON_KNOWN, device_info, unsupported_dtype
from ..runtime.launch import (
    INTERPRETED,
    Launch,
    bind_args,
    contiguous,
    empty,
    launch_on_device,
    method_on_device,
)
from . import merge_path, wide_features

_TOKENS = 512  # in a tile, for each warp
_MOST_WARPS = 16  # of a program
_MOST_ROWS = 256  # side by side in a tile
_THREADS_PER_ROW = 8  # at least
_REGISTERS, _REGISTERS_OF_COUNTS = (
    64,
    80,
)  # of a thread, so that many programs run at once; counts of extrema want more
_PARTITION_TILES = 2  # tiles of a partition, if rows are not too long for one program on average
_LONG = (
    1 << 14
)  # tokens of a row on average, beyond which clusters of programs are faster, where there are any
_MOST_TILES = 16  # that a program reads one after another rather than cut a row
_PART = 8192  # places in a part of a row that is cut
_PART_WARPS, _PART_TOKENS = 4, 2048  # of a program that works on it, and in its tile
_AHEAD = 2  # parts that are reduced ahead of those of the longest row
_BOUNDARIES = 128  # of partitions, that one program finds
_WIDEST = 1 << 20  # so that positions in a partition fit 32 bits
_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
)
_ACC = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
OPS = {
    "sum": merge_path.SUM,
    "mean": merge_path.MEAN,
    "prod": merge_path.PROD,
    "max": merge_path.MAX,
    "min": merge_path.MIN,
    "any": merge_path.ANY,
    "all": merge_path.ALL,
}
_SPREAD = {
    "sum": merge_path.COPY,
    "mean": merge_path.MEAN_BACKWARD,
}  # gradients that follow from that of the result alone
_ARGS = {
    merge_path.ARGMAX.value: merge_path.MAX.value,
    merge_path.ARGMIN.value: merge_path.MIN.value,
}  # searches, and for what
_TRUTHS = (merge_path.ANY.value, merge_path.ALL.value)
_SCANS = (merge_path.RUNNING.value, merge_path.RUNNING_BACK.value)


class Rows(NamedTuple):
    """The layout of a call, and the cache of the layout, or None.

    `max_length` is a bound on the longest row, None where the host knows none.
    """

    offsets: torch.Tensor
    max_length: int | None
    cache: dict[Any, Any] | None = None

    def first(self, partition: int, partitions: int) -> torch.Tensor:
        """Return (partitions + 1,) the number of rows that begin before each partition, and before
        the end.
        """
        key = "partitions", partition, partitions
        first = None if self.cache is None else self.cache.get(key)
        if first is None:
            device, n = self.offsets.device, self.offsets.shape[0] - 1
            first = torch.empty((partitions + 1,), dtype=torch.int32, device=device)
            args = merge_path.FirstArgs(
                OFFSETS=self.offsets,
                FIRST=first,
                n=n,
                count=partitions,
                partition=partition,
                bisections=(n + 1).bit_length(),
            )
            launch = _find_first(device, self.offsets.dtype)
            launch_on_device(launch, partitions // _BOUNDARIES + 1, args)
            # A tensor made during capture belongs to the graph and has no values before a replay.
            if self.cache is not None and not (
                device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            ):
                self.cache[key] = first
        return first


@cache
def _find_first(device: torch.device, dtype: torch.dtype) -> Launch:
    return Launch(
        merge_path.first_kernel,
        dict(BLOCK=_BOUNDARIES),
        dict(num_warps=4),
        args=merge_path.FirstArgs,
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.int32 if dtype == torch.bool else dtype


def _identity(op: int, dtype: torch.dtype) -> float | int:
    if op in (merge_path.MAX.value, merge_path.MIN.value, merge_path.LSE.value, *_ARGS):
        sign = 1 if op == merge_path.MIN.value else -1
        if dtype.is_floating_point:
            return sign * float("inf")
        if dtype == torch.bool:
            return int(sign == 1)
        info = torch.iinfo(dtype)
        return info.max if sign == 1 else info.min
    return int(op in (merge_path.PROD.value, merge_path.FACTORS.value))


def over_rows(
    x: torch.Tensor,
    rows: Rows,
    op: tl.constexpr,
    map: tl.constexpr = merge_path.NONE,
    *,
    y: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reduce the rows of x, (total, ...), by `op`, to (n, ...); with `map` give the tokens, (total,
    ...), that come of it.

    Parameters
    ----------
    x, y
        Values (total, ...), contiguous; y where `op` or `map` has two. With COPY and MEAN_BACKWARD
        x is what is written.
    rows
        The rows.
    op, map
        Constants of `merge_path`.
    a, b
        Operands with one entry per row, (n, ...), contiguous.
    dtype
        The dtype of the reduction and its result; by default the accumulation dtype of x. For scans
        the dtype of the result, for positions of an extremum an integer dtype.
    """
    return launch_config(x, rows, op, map, y=y, a=a, b=b, dtype=dtype).run(x, rows, y, a, b)


def launch_config(
    x: torch.Tensor,
    rows: Rows,
    op: tl.constexpr,
    map: tl.constexpr = merge_path.NONE,
    *,
    y: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> "_LaunchConfig":
    """Return the launch config of `over_rows` for arguments with this metadata."""
    offsets = rows.offsets
    dtypes = (
        x.dtype,
        None if y is None else y.dtype,
        None if a is None else a.dtype,
        None if b is None else b.dtype,
        offsets.dtype,
    )
    return _launch_config(
        x.device, dtypes, op.value, map.value, dtype, x.shape, offsets.shape[0] - 1, rows.max_length
    )


@dataclass
class _LaunchConfig:
    """The launch of a call, as far as the host metadata determines it."""

    index: int | None  # of the CUDA device
    new: Callable[..., torch.Tensor]  # makes a tensor there
    out: (
        tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
    )  # its shape, strides and dtype; None to write into x
    wide: wide_features.LaunchConfig | None  # for wide tokens, which want nothing of what follows
    state_dtype: torch.dtype  # in which tokens are reduced
    cut: "_Cut"
    whole: Launch | None = None
    whole_args: Callable[..., Any] | None = None  # its arguments from the tensors
    cluster_size: int = 0  # CTAs of a cluster, if the kernel of `whole` is `cluster_sm90`
    parts: Launch | None = None  # for rows that are cut; None if no row can be cut
    part_args: Callable[..., Any] | None = None  # its arguments from the tensors
    visits: int = 1  # to each of their parts

    @method_on_device
    def run(
        self,
        x: torch.Tensor,
        rows: Rows,
        y: torch.Tensor | None = None,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `over_rows`."""
        out = self.new(*self.out) if self.out else x
        if out.numel() == 0:
            return out
        if self.wide is not None:
            wide_features.run(self.wide, x, y, a, b, out, rows.offsets)
            return out
        cut = self.cut
        x, written = (p.view(torch.uint8) if p.dtype == torch.bool else p for p in (x, out))
        y, a, b = x if y is None else y, x if a is None else a, x if b is None else b
        offsets = rows.offsets
        if self.cluster_size:
            n = offsets.shape[0] - 1
            parts = self.new(*contiguous((n, 2, self.cluster_size)), self.state_dtype)
            args = self.whole_args(X=x, Y=y, A=a, B=b, OUT=written, OFFSETS=offsets, PARTS=parts)
            self.whole(n, args)
        else:
            first = rows.first(cut.partition, cut.partitions)
            args = self.whole_args(X=x, Y=y, A=a, B=b, OUT=written, OFFSETS=offsets, FIRST=first)
            self.whole(cut.partitions, args)
        if self.parts is not None:
            args = self.part_args(
                X=x,
                Y=y,
                A=a,
                B=b,
                OUT=written,
                OFFSETS=offsets,
                FIRST=rows.first(_PART, cut.parts),
                PARTS=self.new((cut.parts, 2, 2), (4, 2, 1), self.state_dtype),
                COUNTS=wide_features.counters(x.device, cut.parts),
            )
            self.parts(cut.parts * self.visits, args)
        return out


class _Cut(NamedTuple):
    """Sizes of tiles, partitions and parts."""

    mean: int  # tokens of a row, without one that is much longer than the others
    width: int  # tokens of a row in a tile
    warps: int  # of a program
    partition: int  # positions in a partition
    partitions: int
    most: int  # tokens of a row that is not cut into parts
    parts: int  # 0 where it is known that no row is cut
    lag: int  # parts between the first visit to one and the second


def _cut(total: int, n: int, max_length: int | None) -> _Cut:
    longest = total if max_length is None else min(max_length, total)
    rest, others = total, max(n, 1)
    if (
        longest > _MOST_TILES * _TOKENS and total - longest >= n - 1 > 0
    ):  # a row as long as many says nothing of the others
        rest, others = total - longest, n - 1
    mean = -(-rest // others)
    width = min(triton.next_power_of_2(max(mean, 1)), _MOST_WARPS * _TOKENS)
    if width < _TOKENS and width < longest <= _MOST_TILES * _TOKENS:
        width *= 2  # room for rows that are longer than others, but not cut
    warps = max(width // _TOKENS, 1)
    most = _MOST_TILES * warps * _TOKENS
    partition = most if rest > most * others else _PARTITION_TILES * warps * _TOKENS
    parts = -(-(total + n) // _PART) if longest > most else 0
    return _Cut(
        mean,
        width,
        warps,
        partition,
        -(-(total + n) // partition),
        most,
        parts,
        min(longest // _PART + _AHEAD, parts),
    )


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
    """For x, y, a, b and offsets of these dtypes, and x of this shape."""
    total, *token = shape
    acc = accumulator(dtypes[0] if dtype is None or op in _ARGS or op in _TRUTHS else dtype)
    state_dtype = torch.int64 if op in _ARGS else torch.int32 if op in _TRUTHS else acc
    identity, cut = (
        _identity(op, state_dtype if dtypes[0] != torch.bool else torch.bool),
        _cut(total, n, max_length),
    )
    strides = tuple(math.prod(token[i:]) for i in range(len(token) + 1))
    out = None
    if map not in wide_features.SPREAD:
        out = (total if map else n, *token), strides, dtype or (dtypes[0] if map else acc)
    index, new = device.index if device.type == "cuda" else None, empty(device.type)
    if strides[0] >= wide_features.LEAST:
        kinds = (
            dtypes[0],
            dtypes[1] is not None,
            *dtypes[2:4],
            out[2] if out else dtypes[0],
            dtypes[4],
        )
        wide = wide_features.make_config(
            device, kinds, op, map, acc, state_dtype, identity, shape, n, max_length
        )
        return _LaunchConfig(index, new, out, wide, state_dtype, cut)
    reads = 2 if dtypes[1] else int(map not in wide_features.SPREAD)
    what = dict(OP=op, MAP=map)
    operands = dict(READS=reads, HAS_A=dtypes[2] is not None, HAS_B=dtypes[3] is not None)
    same = operands | dict(
        IDENTITY=identity,
        OTHER=_identity(_ARGS.get(op, op), dtypes[0]),
        ACC=_ACC[acc],
        KEPT=_ACC[state_dtype],
    )
    tile, threads = min(cut.warps * _TOKENS, cut.width * _MOST_ROWS), min(32, _TOKENS) * cut.warps
    tiles = dict(
        G=tile // cut.width,
        W=cut.width,
        L=min(cut.width, max(_THREADS_PER_ROW, threads * cut.width // tile)),
        FL=threads if cut.warps == 1 else min(4 * threads, tile),
        VECTOR=cut.warps > 1,
        EVEN=bool(op) and max_length is not None and n * max_length == total,
    )
    many = max(acc.itemsize, state_dtype.itemsize) > 4 or (reads == 2 and cut.warps == 1)
    registers = _REGISTERS_OF_COUNTS if op == merge_path.EQUAL.value else _REGISTERS
    options = dict(num_warps=cut.warps) if many else dict(num_warps=cut.warps, maxnreg=registers)
    key = device, dtypes, out and out[2]
    twice, long = op and map and map not in _SCANS, n and cut.mean > _LONG
    clusters = (
        _clusters(device)
        if twice and long and acc == torch.float32 and op != merge_path.FACTORS.value
        else None
    )
    follow = bool(cut.parts) and device_info(device).supports_pdl
    if clusters:
        whole = clusters.launch(cut.mean, what | operands | dict(FOLLOWED=follow))
        whole_args = bind_args(clusters.ClusterArgs, n=n, total=total, most=cut.most)
    else:
        whole = _launch(
            key,
            merge_path.share_kernel,
            merge_path.ShareArgs,
            _items(what | tiles | same | dict(FOLLOWED=follow)),
            _items(options),
        )
        whole_args = bind_args(
            merge_path.ShareArgs,
            n=n,
            total=total,
            partition=cut.partition,
            most=cut.most,
            longest=max_length or 0,
        )
    tiles = dict(F=_PART_TOKENS, L=min(128 * _PART_WARPS, _PART_TOKENS))
    options = dict(num_warps=_PART_WARPS, launch_pdl=follow)
    constants = what | tiles | same | dict(FOLLOWS=follow)
    parts = part_args = None
    if cut.parts:
        parts = _launch(
            key, merge_path.part_kernel, merge_path.PartArgs, _items(constants), _items(options)
        )
        part_args = bind_args(
            merge_path.PartArgs, part=_PART, most=cut.most, parts=cut.parts, lag=cut.lag
        )
    return _LaunchConfig(
        index,
        new,
        out,
        None,
        state_dtype,
        cut,
        whole=whole,
        whole_args=whole_args,
        cluster_size=clusters.PROGRAMS if clusters else 0,
        parts=parts,
        part_args=part_args,
        visits=2 if op and map else 1,
    )


@cache
def _clusters(device: torch.device) -> Any:
    """The kernel of this device for clusters of programs, if there is one."""
    if (
        INTERPRETED
        or not GLUON_KNOWN
        or device.type != "cuda"
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return None
    from . import cluster_sm90

    return cluster_sm90


def _items(named: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(named.items())


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


def _gradient(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: Rows,
    op: str,
) -> torch.Tensor:
    """Return the gradient of a reduction of x, of this shape and dtype, to out; x and out may be
    None for sums.

    Tokens that are all the extremum of their row share its gradient.
    """
    dout = dout.contiguous()
    if op in _SPREAD:
        return over_rows(
            dout.new_empty(shape, dtype=dtype), rows, merge_path.NONE, _SPREAD[op], a=dout
        )
    x = x.contiguous()
    if op == "prod":
        return over_rows(x, rows, merge_path.FACTORS, merge_path.PROD_BACKWARD, a=dout)
    return over_rows(x, rows, merge_path.EQUAL, merge_path.PICK, a=out, b=dout)


def _record_reduce(ctx, x, rows, op, config):
    out = config.run(x.contiguous(), rows)
    ctx.save_for_backward(*((None, None) if op in _SPREAD else (x, out)))
    ctx.constants = x.shape, x.dtype, rows, op
    return out


def _reduce_gradient(ctx, dout):
    return _gradient(dout, *ctx.saved_tensors, *ctx.constants), None, None, None


_differentiable_reduce = differentiable("Reduce", _record_reduce, _reduce_gradient)


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
    """Why the kernels do not take a `SegmentCall`; None if they do."""
    if reason := unsupported_dtype(call.values, _DTYPES) or too_wide(call.values):
        return reason
    truth = call.op in ("any", "all")
    narrower = call.values.dtype.is_floating_point and not call.dtype.is_floating_point
    if not truth and (narrower or call.dtype not in (*FLOATS, *_ACC)):
        return f"the Triton kernels do not reduce {call.values.dtype} in {call.dtype}"
    return None


def segment_reduce(call: Any) -> torch.Tensor:
    """Run a `SegmentCall`."""
    if not torch.compiler.is_compiling():
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
    """Why a token of x, (total, ...), has too many elements; None if it has not."""
    width = math.prod(x.shape[1:])
    return (
        f"the Triton kernels take tokens of up to {_WIDEST} elements here, not {width}"
        if width > _WIDEST
        else None
    )


def rows_of(layout: Any) -> Rows:
    """The rows of a `scree.layout.Layout`."""
    return Rows(layout.offsets.contiguous(), layout.max_length, layout.cache)
