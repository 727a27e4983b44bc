"""Reductions of the rows of a ragged array, and their gradients, on the kernels of `shares`."""
import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import shares
from .host import FLOATS, Function, multiprocessors, once_differentiable, refuses, start
from .launch import Launch

_ELEMENTS = 2048  # in a tile
_WARPS = 4  # of a program
_PROGRAMS = 16  # a multiprocessor
_WIDEST = 1 << 20  # so that places in a share fit 32 bits
_MOST_ROWS = 256  # side by side in a tile
_MOST_TILES = 32  # that a program reads one after another rather than cut a row
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
_ACC = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int32: tl.int32, torch.int64: tl.int64}
OPS = {"sum": shares.SUM, "prod": shares.PROD, "max": shares.MAX, "min": shares.MIN, "any": shares.ANY, "all": shares.ALL}
_ARGS = (shares.ARGMAX.value, shares.ARGMIN.value)
_SCANS = (shares.RUNNING.value, shares.RUNNING_BACK.value)


class Rows(NamedTuple):
    """The rows that a call runs over: offsets, and a bound on the longest that is known on the host, or None."""

    offsets: torch.Tensor
    max_length: int | None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.int32 if dtype == torch.bool else dtype


def _identity(op: int, dtype: torch.dtype) -> float | int:
    if op in (shares.MAX.value, shares.MIN.value, shares.LSE.value, *_ARGS):
        sign = 1 if op == shares.MIN.value else -1
        if dtype.is_floating_point:
            return sign * float("inf")
        info = torch.iinfo(dtype)
        return info.max if sign == 1 else info.min
    return int(op in (shares.PROD.value, shares.ALL.value))


def over_rows(x: torch.Tensor, rows: Rows, op: tl.constexpr, map: tl.constexpr = shares.NONE, *,
              y: torch.Tensor | None = None, a: torch.Tensor | None = None, b: torch.Tensor | None = None,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """Reduce the rows of x, (total, ...), by `op`, to (n, ...); with `map` give the tokens, (total, ...), that come of it.

    Parameters
    ----------
    x, y
        Values (total, ...), contiguous; y where `op` or `map` has two. With COPY x is what is written.
    rows
        The rows.
    op, map
        Constants of `shares`.
    a, b
        Operands with one entry a row, (n, ...), contiguous.
    dtype
        Of the reduction and its result; by default the accumulator's of x. Of scans that of the result, and of the place of an
        extremum an integer one.
    """
    total, n = x.shape[0], rows.offsets.shape[0] - 1
    arg, scan = op.value in _ARGS, map.value in _SCANS
    acc = accumulator(x.dtype if dtype is None or arg else dtype)
    held = torch.int64 if arg else acc
    if map.value:
        out = x if map.value == shares.COPY.value else torch.empty_like(x, dtype=dtype)
    else:
        out = torch.empty((n, *x.shape[1:]), dtype=acc if dtype is None else dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = math.prod(x.shape[1:])
    plan = _plan(x.device, total, n, rows.max_length, width)
    dtypes = tuple(p if p is None else p.dtype for p in (x, y, a, b, out, rows.offsets))
    first, between, again = _launches(x.device, dtypes, acc, held, op.value, map.value, plan.cut, plan.group, plan.mean, width)
    cut = plan.cut and op.value > 0
    x, kept = (p.view(torch.uint8) if p.dtype == torch.bool else p for p in (x, out))
    parts = torch.empty((plan.shares, 2, 2, width), dtype=held, device=x.device) if cut else kept
    long = torch.empty((plan.shares, 2), dtype=torch.int32, device=x.device) if cut else rows.offsets
    stats = torch.empty((2, n, width), dtype=acc, device=x.device) if cut and map.value and not scan else kept
    pointers = (x, x if y is None else y, x if a is None else a, x if b is None else b, stats, kept, parts, long,
                rows.offsets)
    start(first, plan.programs, pointers, (), plan.numbers)
    if cut:
        where = (parts, long, rows.offsets) if scan else (parts, long, stats, rows.offsets)
        start(between, plan.programs, where, (), plan.numbers[:3])
        if map.value:
            start(again, plan.programs, pointers, (), plan.numbers)
    return out


class _Plan(NamedTuple):
    """How a batch is cut: what it depends on is known on the host."""

    shares: int
    programs: int
    cut: bool  # whether rows may be longer than a share
    group: int  # rows beside each other in a tile
    mean: int  # and the tokens of each
    numbers: tuple[int, int, int, int]


@lru_cache(1024)
def _plan(device: torch.device, total: int, n: int, max_length: int | None, width: int) -> _Plan:
    block = _block(width)
    tokens, blocks = _ELEMENTS // block, -(-width // block)
    items = total + n + 1
    mean = min(tokens, triton.next_power_of_2(-(-total // max(n, 1)))) if total else 1
    share = -(-items * blocks // (multiprocessors(device) * _PROGRAMS * tokens)) * tokens
    if max_length is not None:
        share = max(share, max_length)
    share = min(share, _MOST_TILES * tokens)
    count = -(-items // share)
    stride = 1
    while stride * shares.WIDE < n + 1:
        stride *= shares.WIDE
    return _Plan(count, count * blocks, count > 1 and (max_length is None or max_length > share),
                 min(max(tokens // 2 // mean, 1), _MOST_ROWS), mean,
                 (n, total, share, stride))


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), 128)


@cache
def _launches(device: torch.device, dtypes: tuple[torch.dtype | None, ...], acc: torch.dtype, held: torch.dtype, op: int,
              map: int, cut: bool, group: int, mean: int, width: int) -> tuple[Launch, Launch, Launch]:
    """The first visit, what works on the parts of long rows, and the second visit, for x, y, a, b, ... of these dtypes."""
    _, y, a, b, *_ = dtypes
    block = _block(width)
    reads = 2 if y is not None else int(map != shares.COPY.value)
    same = dict(IDENTITY=_identity(op, held), C=width, BC=block)
    more = dict(G=group, W=mean, READS=reads, HAS_A=a is not None, HAS_B=b is not None, ACC=_ACC[acc], KEPT=_ACC[held])
    visits = [Launch(shares.share_kernel, dict(OP=op, MAP=map, CUT=cut, AGAIN=again, **same, **more), dict(num_warps=_WARPS))
              for again in (False, True)]
    kernel = shares.before_kernel if map in _SCANS else shares.add_kernel
    between = Launch(kernel, dict(OP=op, MAP=map, **same, F=max(1, 1024 // block)), dict(num_warps=4))
    return visits[0], between, visits[1]


def _reduce(x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype) -> torch.Tensor:
    return over_rows(x.contiguous(), rows, OPS[op], dtype=dtype)


def _differentiate(dout: torch.Tensor, x: torch.Tensor, out: torch.Tensor, rows: Rows, op: str) -> torch.Tensor:
    """The gradient of x; tokens that are all the maximum of their row share its gradient."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if op == "sum":
        return over_rows(dx, rows, shares.NONE, shares.COPY, a=dout.contiguous())
    return over_rows(x.contiguous(), rows, shares.EQUAL, shares.PICK, a=out, b=dout.contiguous())


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, rows, op, dtype):
        out = _reduce(x, rows, op, dtype)
        ctx.save_for_backward(x, out)
        ctx.rows, ctx.op = rows, op
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, out = ctx.saved_tensors
        return _differentiate(dout, x, out, ctx.rows, ctx.op), None, None, None


@torch.library.custom_op("scree_triton::segment_reduce", mutates_args=())
def _reduce_op(x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, op: str, dtype: torch.dtype) -> torch.Tensor:
    return _reduce(x, Rows(offsets, max_length), op, dtype)


@_reduce_op.register_fake
def _(x, offsets, max_length, op, dtype):
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=dtype)


@torch.library.custom_op("scree_triton::segment_reduce_backward", mutates_args=())
def _reduce_backward_op(dout: torch.Tensor, x: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, max_length: int | None,
                        op: str) -> torch.Tensor:
    return _differentiate(dout, x, out, Rows(offsets, max_length), op)


@_reduce_backward_op.register_fake
def _(dout, x, out, offsets, max_length, op):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    x, offsets, ctx.max_length, ctx.op, _ = inputs
    ctx.save_for_backward(x, output, offsets)


_reduce_op.register_autograd(
    lambda ctx, dout: (_reduce_backward_op(dout, *ctx.saved_tensors, ctx.max_length, ctx.op), None, None, None, None),
    setup_context=_save)


def reduce(x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype) -> torch.Tensor:
    """Reduce the rows of x, (total, ...), in `dtype`, by "sum", "prod", "max", "min", "any" or "all"."""
    if torch.compiler.is_compiling():
        return _reduce_op(x, *rows, op, dtype)
    if x.requires_grad and torch.is_grad_enabled() and op not in ("any", "all"):
        return _Reduce.apply(x, rows, op, dtype)
    return _reduce(x, rows, op, dtype)


def rejects(call: Any) -> str | None:
    """Why the kernels do not take a `SegmentCall`; None if they do."""
    if reason := refuses(call.values, _DTYPES) or too_wide(call.values):
        return reason
    narrower = call.values.dtype.is_floating_point and not call.dtype.is_floating_point
    if call.op not in ("any", "all") and (narrower or call.dtype not in (*FLOATS, *_ACC)):
        return f"the Triton kernels do not reduce {call.values.dtype} in {call.dtype}"
    if call.op == "prod" and call.values.requires_grad:
        return "the Triton kernels have no gradient of prod"
    return None


def run(call: Any) -> torch.Tensor:
    """Run a `SegmentCall`."""
    return reduce(call.values, rows_of(call.layout), call.op, call.dtype)


def too_wide(x: torch.Tensor) -> str | None:
    """Why a token of x, (total, ...), has too many elements; None if it has not."""
    width = math.prod(x.shape[1:])
    return f"the Triton kernels take tokens of up to {_WIDEST} elements here, not {width}" if width > _WIDEST else None


def rows_of(layout: Any) -> Rows:
    """The rows of a `scree.layout.Layout`."""
    return Rows(layout.offsets.contiguous(), layout.max_length)
