"""RMS norm and layer norm, forward and backward: one kernel each way, `CENTRE` says whether the mean goes.

The forward reads and writes every element once; with a residual it adds that first and writes the sum too. The backward
computes the statistics again from the row that it needs anyway, so that the forward saves none; a fixed number of programs
walk over the tokens and each keeps its share of the gradients of weight and bias, which a second small kernel adds up in a
fixed order: equal inputs give equal bits.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator
from ..runtime.device import device_info, unsupported_dtype
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    Stride,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)

_WIDEST = 16384
_COLUMNS = 16  # of a program that adds up


@triton.jit
def _places(tokens, columns, stride, count, D: tl.constexpr):
    """Where the elements of some tokens stand, and which exist."""
    return tokens.to(tl.int64)[:, None] * stride + columns[None, :], (tokens < count)[:, None] & (
        columns < D
    )[None, :]


@triton.jit
def _load(X, tokens, columns, stride, count, D: tl.constexpr):
    """As they are. The hint takes 1 to 2% off the forward, which kernels that follow do not pay for."""
    at, inside = _places(tokens, columns, stride, count, D)
    return tl.load(X + at, mask=inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def _store(Y, y, tokens, columns, stride, count, D: tl.constexpr):
    at, inside = _places(tokens, columns, stride, count, D)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _vector(W, columns, D: tl.constexpr):
    return tl.load(W + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _centred(x, columns, D: tl.constexpr, CENTRE: tl.constexpr):
    if CENTRE:
        x = x - tl.sum(x, 1, keep_dims=True) / D
        x = tl.where((columns < D)[None, :], x, 0.0)
    return x


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(x, y):
    """Of each token, both at once: the warps wait for each other once."""
    return tl.reduce((x, y), 1, _add_both, keep_dims=True)


@triton.jit(do_not_specialize=("count", "eps"))
def forward_kernel(
    X,
    RESIDUAL,
    W,
    B,
    Y,
    SUM,
    x_stride,
    residual_stride,
    y_stride,
    count,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Y = (X - mean) / sqrt(var + eps) * W + B, ROWS tokens a program; with ADD of SUM = X + RESIDUAL instead of X."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    x = _load(X, tokens, columns, x_stride, count, D).to(tl.float32)
    if ADD:
        total = (x + _load(RESIDUAL, tokens, columns, residual_stride, count, D).to(tl.float32)).to(
            SUM.dtype.element_ty
        )
        x = total.to(tl.float32)
    if WEIGHT:
        w = _vector(W, columns, D)
    if BIAS:
        b = _vector(B, columns, D)
    x = _centred(x, columns, D, CENTRE)
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    if WEIGHT:
        y *= w
    if BIAS:
        y += b
    if ADD:  # here rather than above: 1 to 3% faster
        _store(SUM, total, tokens, columns, y_stride, count, D)
    _store(Y, y, tokens, columns, y_stride, count, D)


@triton.jit
def _inputs(X, DY, DSUM, tokens, columns, x_stride, dy_stride, dsum_stride, count, D: tl.constexpr):
    x = _load(X, tokens, columns, x_stride, count, D)
    dy = _load(DY, tokens, columns, dy_stride, count, D)
    return x, dy, _load(DSUM, tokens, columns, dsum_stride, count, D)


@triton.jit(do_not_specialize=("count", "eps"))
def backward_kernel(
    X,
    W,
    DY,
    DSUM,
    DX,
    PARTS,
    x_stride,
    dy_stride,
    dsum_stride,
    dx_stride,
    count,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    DW: tl.constexpr,
    DB: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """DX, with ADD plus DSUM; and PARTS (2, programs, D), what each program adds to the gradients of weight and bias.

    The next tokens are on their way to shared memory, or with AHEAD, for which ADD must be set, to registers. With AGAIN the weight
    is read for each token, as there are no registers left to keep it in.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    if WEIGHT and not AGAIN:
        w = _vector(W, columns, D)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if AHEAD:
        tokens = program * ROWS + tl.arange(0, ROWS)
        ahead = _inputs(X, DY, DSUM, tokens, columns, x_stride, dy_stride, dsum_stride, count, D)
    for block in tl.range(program, tl.cdiv(count, ROWS), programs, num_stages=STAGES):
        tokens = block * ROWS + tl.arange(0, ROWS)
        if AHEAD:
            x, dy, dsum = ahead
            later = tokens + programs * ROWS
            ahead = _inputs(X, DY, DSUM, later, columns, x_stride, dy_stride, dsum_stride, count, D)
        else:
            x = _load(X, tokens, columns, x_stride, count, D)
            dy = _load(DY, tokens, columns, dy_stride, count, D)
        if WEIGHT and AGAIN:
            w = _vector(W, columns, D)
        x = x.to(tl.float32)
        dy = dy.to(tl.float32)
        dx = dy
        if WEIGHT:
            dx *= w
        if CENTRE:
            mean, total = _sums(x, dx)
            x = tl.where((columns < D)[None, :], x - mean / D, 0.0)
            dx -= total / D
        square, along = _sums(x * x, dx * x)
        scale = tl.rsqrt(square / D + eps)
        x *= scale
        if DW:
            dw += dy * x
        if DB:
            db += dy
        dx = (dx - x * (along * scale / D)) * scale
        if ADD:
            if not AHEAD:
                dsum = _load(DSUM, tokens, columns, dsum_stride, count, D)
            dx += dsum.to(tl.float32)
        _store(DX, dx, tokens, columns, dx_stride, count, D)
    if DW:
        tl.store(PARTS + program * D + columns, tl.sum(dw, 0), mask=columns < D)
    if DB:
        tl.store(PARTS + (programs + program) * D + columns, tl.sum(db, 0), mask=columns < D)


@triton.jit(do_not_specialize=("parts",))
def add_kernel(
    PARTS,
    DW,
    DB,
    parts,
    D: tl.constexpr,
    DO_DW: tl.constexpr,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """The sums of PARTS (2, parts, D) over its parts, COLUMNS columns a program: with DO_DW first those of DW, then of DB."""
    if FOLLOWS:  # the backward, whose end it waits for
        gdc_wait()
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    which = tl.program_id(0) // blocks + (0 if DO_DW else 1)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, MOST)
    inside = (part < parts)[:, None] & (columns < D)[None, :]
    total = tl.sum(
        tl.load(
            PARTS + (which * parts + part)[:, None] * D + columns[None, :], mask=inside, other=0.0
        ),
        0,
    )
    if which == 0:
        tl.store(DW + columns, total.to(DW.dtype.element_ty), mask=columns < D)
    else:
        tl.store(DB + columns, total.to(DB.dtype.element_ty), mask=columns < D)


@launch_args
class ForwardArgs:
    """Arguments of `forward_kernel`."""

    X: Pointer
    RESIDUAL: Pointer
    W: Pointer
    B: Pointer
    Y: Pointer
    SUM: Pointer
    x_stride: Stride
    residual_stride: Stride
    y_stride: Stride
    count: Number
    eps: Number


@launch_args
class BackwardArgs:
    """Arguments of `backward_kernel`."""

    X: Pointer
    W: Pointer
    DY: Pointer
    DSUM: Pointer
    DX: Pointer
    PARTS: Pointer
    x_stride: Stride
    dy_stride: Stride
    dsum_stride: Stride
    dx_stride: Stride
    count: Number
    eps: Number


@launch_args
class AddArgs:
    """Arguments of `add_kernel`."""

    PARTS: Pointer
    DW: Pointer
    DB: Pointer
    parts: Number


def _forward_shape(width: int, block: int, itemsize: int, centre: bool) -> tuple[int, int]:
    """By the width, the padded width and bytes of an element: tokens and warps of a program. Measured on an H100 and an H200."""
    warps = min(max(block // 1024, 4), 16)
    # Warps wait for each other twice, of which a second token hides 4% on an H200; not in padded widths, nor in more bytes.
    if centre and width in (4096, 8192) and width * itemsize <= 16384:
        return 2, 2 * warps
    return max(1, 4096 // block), warps


def _backward_shape(block: int, itemsize: int) -> tuple[int, int, int, int]:
    """By the padded width and bytes of an element: tokens and warps of a program, programs a multiprocessor, and stages."""
    warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    # Stages hold the next rows of x and dy in shared memory, of which the smallest devices have 99 KB.
    return max(1, 512 * warps // block), warps, 16 // warps, 3 if block * itemsize <= 16384 else 1


@cache
def _forward_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], width: int, centre: bool
) -> tuple[Launch, int]:
    """The forward for x, residual, weight and bias of these dtypes, or None, and how many tokens a program has."""
    block = triton.next_power_of_2(width)
    rows, warps = _forward_shape(width, block, dtypes[0].itemsize, centre)
    _, add, weight, bias = (dtype is not None for dtype in dtypes)
    return Launch(
        forward_kernel,
        dict(D=width, BLOCK=block, ROWS=rows, CENTRE=centre, ADD=add, WEIGHT=weight, BIAS=bias),
        dict(num_warps=warps),
        args=ForwardArgs,
    ), rows


@cache
def _backward_launches(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    width: int,
    centre: bool,
    dy: torch.dtype,
    add: bool,
    weight_too: bool,
    bias_too: bool,
) -> tuple[Launch, Launch, int, int]:
    """The two kernels of the backward, how many tokens a program has, and the most programs of the first."""
    x, _, weight, _ = dtypes
    block = triton.next_power_of_2(width)
    rows, warps, each, stages = _backward_shape(block, x.itemsize)
    # Three arrays of 16 bits go to registers, which takes 3 to 7% less; of longer rows or numbers they hold too little.
    ahead = add and x.itemsize == 2 and 1024 <= block <= 4096
    how = dict(STAGES=1 if ahead else stages, AHEAD=ahead, AGAIN=ahead or block > 8192)
    first = Launch(
        backward_kernel,
        dict(
            D=width,
            BLOCK=block,
            ROWS=rows,
            CENTRE=centre,
            ADD=add,
            WEIGHT=weight is not None,
            DW=weight_too,
            DB=bias_too,
            **how,
        ),
        dict(num_warps=warps, maxnreg=128 if ahead else None),
        args=BackwardArgs,
    )
    most, chained = device_info(device).sm_count * each, device_info(device).supports_pdl
    second = Launch(
        add_kernel,
        dict(
            D=width,
            DO_DW=weight_too,
            MOST=triton.next_power_of_2(most),
            COLUMNS=_COLUMNS,
            FOLLOWS=chained,
        ),
        dict(num_warps=8, launch_pdl=chained),
        args=AddArgs,
    )
    return first, second, rows, most


class _Plan:
    """What follows from what the host knows of the arrays of a norm, so that a call only allocates and launches."""

    def __init__(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype | None, ...],
        shape: tuple[int, ...],
        eps: float,
        centre: bool,
    ):
        *axes, width = shape
        self.index = device.index if device.type == "cuda" else None
        self.device, self.dtypes, self.width, self.centre = device, dtypes, width, centre
        self.out = *contiguous(shape), dtypes[0]
        self.launch, rows = _forward_launch(device, dtypes, width, centre)
        self.numbers = count, _ = math.prod(axes), eps
        self.programs = -(-count // rows)
        self.new = empty(device.type)
        self.ways: dict[tuple[torch.dtype, bool, bool, bool], tuple[Any, ...]] = {}  # back

    @method_on_device
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x over its last axis, contiguous, and what was normalised: x or its sum with the residual."""
        y = self.new(*self.out)
        total = x if residual is None else self.new(*self.out)
        if self.programs:
            x, stride = even(x)
            residual, residual_stride = (x, stride) if residual is None else even(residual)
            count, eps = self.numbers
            args = ForwardArgs(
                X=x,
                RESIDUAL=residual,
                W=x if weight is None else weight,
                B=x if bias is None else bias,
                Y=y,
                SUM=total,
                x_stride=stride,
                residual_stride=residual_stride,
                y_stride=self.width,
                count=count,
                eps=eps,
            )
            self.launch(self.programs, args)
        return y, total

    @method_on_device
    def backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        dy: torch.Tensor,
        dsum: torch.Tensor | None,
        weight_too: bool,
        bias_too: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of x, which was normalised, of weight and bias; dsum is what reaches x besides."""
        asked = dy.dtype, dsum is not None, weight_too, bias_too
        first, second, programs, adding, dw_like, db_like, parts_like = self.ways.get(
            asked
        ) or self._way(asked)
        dx = self.new(*self.out)
        dw = self.new(*dw_like) if dw_like else None
        db = self.new(*db_like) if db_like else None
        parts = self.new(*parts_like) if parts_like else dx
        if programs:
            x, stride = even(x)
            dy, dy_stride = even(dy)
            dsum, dsum_stride = (dy, dy_stride) if dsum is None else even(dsum)
            count, eps = self.numbers
            args = BackwardArgs(
                X=x,
                W=x if weight is None else weight,
                DY=dy,
                DSUM=dsum,
                DX=dx,
                PARTS=parts,
                x_stride=stride,
                dy_stride=dy_stride,
                dsum_stride=dsum_stride,
                dx_stride=self.width,
                count=count,
                eps=eps,
            )
            first(programs, args)
        if parts_like:
            args = AddArgs(
                PARTS=parts,
                DW=dx if dw is None else dw,
                DB=dx if db is None else db,
                parts=programs,
            )
            second(adding, args)
        return dx, dw, db

    def _way(self, asked: tuple[torch.dtype, bool, bool, bool]) -> tuple[Any, ...]:
        """The launches of a backward, the programs of both, and what dw, db and their parts look like, if they are there."""
        first, second, rows, most = _backward_launches(
            self.device, self.dtypes, self.width, self.centre, *asked
        )
        programs, width = min(-(-self.numbers[0] // rows), most), self.width
        likes = [
            ((width,), (1,), dtype) if wanted else None
            for dtype, wanted in zip(self.dtypes[2:], asked[2:])
        ]
        parts = (*contiguous((2, programs, width)), torch.float32) if any(likes) else None
        adding = -(-width // _COLUMNS) * sum(asked[2:])
        way = self.ways[asked] = first, second, programs, adding, *likes, parts
        return way


@lru_cache(1024)
def _cached(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: tuple[int, ...],
    eps: float,
    centre: bool,
) -> _Plan:
    return _Plan(device, dtypes, shape, eps, centre)


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> _Plan:
    dtypes = tuple(None if p is None else p.dtype for p in (x, residual, weight, bias))
    return _cached(x.device, dtypes, x.shape, eps, centre)


def even(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Values with tokens at equal distances and the elements of each side by side, a copy where it must be; the distance."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def _record_norm(ctx, x, residual, weight, bias, plan):
    y, total = plan.forward(x, residual, weight, bias)
    ctx.save_for_backward(total, weight)
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    return y if residual is None else (y, total)


def _norm_gradient(ctx, dy, dsum=None):
    _, residual_too, weight_too, bias_too, _ = ctx.needs_input_grad
    if dy is None:
        return dsum, dsum, None, None, None
    total, weight = ctx.saved_tensors
    dx, dw, db = ctx.plan.backward(total, weight, dy, dsum, weight_too, bias_too)
    return dx, dx if residual_too else None, dw, db, None


_differentiable_norm = differentiable("Norm", _record_norm, _norm_gradient)


def _run_operator(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> list[torch.Tensor]:
    return list(_plan(x, residual, weight, bias, eps, centre).forward(x, residual, weight, bias))[
        : 1 if residual is None else 2
    ]


def _fake(x, residual, weight, bias, eps, centre):
    return [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]


def _backward_operator(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = x.new_empty((0,))
    plan = _plan(x, dsum, weight, bias, eps, centre)
    dx, dw, db = plan.backward(x, weight, dy, dsum, weight is not None, bias is not None)
    return dx, none if dw is None else dw, none.clone() if db is None else db


def _backward_fake(x, weight, bias, dy, dsum, eps, centre):
    return x.new_empty(x.shape), *(
        x.new_empty((0,)) if p is None else p.new_empty(p.shape) for p in (weight, bias)
    )


_backward_op = define_operator("norm_backward", _backward_operator, _backward_fake)


def _save(ctx, inputs, output):
    x, residual, weight, bias, ctx.eps, ctx.centre = inputs
    ctx.add = residual is not None
    ctx.save_for_backward(output[1] if ctx.add else x, weight, bias)


def _differentiate(ctx, grads):
    total, weight, bias = ctx.saved_tensors
    dx, dw, db = _backward_op(
        total, weight, bias, grads[0], grads[1] if ctx.add else None, ctx.eps, ctx.centre
    )
    return (
        dx,
        dx if ctx.add else None,
        None if weight is None else dw,
        None if bias is None else db,
        None,
        None,
    )


_op = define_operator("norm", _run_operator, _fake, save=_save, backward=_differentiate)


def norm(
    plan: _Plan,
    wanted: bool,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `plan.forward` gives; `wanted` is whether one of the arrays requires a gradient. Weight and bias are contiguous."""
    if not (wanted and torch.is_grad_enabled()):
        return plan.forward(x, residual, weight, bias)
    found = _differentiable_norm(x, residual, weight, bias, plan)
    return (found, x) if residual is None else found


def rejects(call: Any) -> str | None:
    """Why the kernels do not take a norm; None if they do."""
    width = call.values.shape[-1]
    if not 1 <= width <= _WIDEST:
        return f"the Triton kernels take a last axis of 1 to {_WIDEST} elements, not {width}"
    for x in (call.values, call.weight, call.bias):  # the residual has the dtype of the values
        if x is not None and (reason := unsupported_dtype(x)):
            return reason
    return None


def _run(call: Any, centre: bool) -> Any:
    weight, bias = (None if p is None else p.contiguous() for p in (call.weight, call.bias))
    arrays = call.values, call.added, weight, bias
    if torch.compiler.is_compiling():
        y, *more = _op(*arrays, call.eps, centre)
        return call.result(y, more[0] if more else None)
    return call.result(*norm(_plan(*arrays, call.eps, centre), _wanted(*arrays), *arrays))


def _wanted(*arrays: torch.Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in arrays)


def _prepare(call: Any, centre: bool) -> Callable[..., Any]:
    arrays = call.values, call.added, call.weight, call.bias
    plan, wanted = _plan(*arrays, call.eps, centre), _wanted(*arrays)
    even_too = all(p is None or p.is_contiguous() for p in (call.weight, call.bias))

    def run(
        x: Any, weight: torch.Tensor | None, residual: Any, bias: torch.Tensor | None = None
    ) -> Any:
        if not even_too:
            weight, bias = (
                weight if weight is None else weight.contiguous(),
                bias if bias is None else bias.contiguous(),
            )
        y, total = norm(
            plan, wanted, x.values, None if residual is None else residual.values, weight, bias
        )
        y = x.from_layout(y, x.layout, x.ragged_dim)
        return y if residual is None else (y, x.from_layout(total, x.layout, x.ragged_dim))

    return run


def layer_norm(call: Any) -> Any:
    """Run a `NormCall` as layer norm."""
    return _run(call, True)


def prepare_layer_norm(call: Any) -> Callable[..., Any]:
    """What runs calls on the rows of a ragged array that differ from this one in the contents of their arrays alone."""
    return _prepare(call, True)


def rms_norm(call: Any) -> Any:
    """Run a `NormCall` as RMS norm."""
    return _run(call, False)


def prepare_rms_norm(call: Any) -> Callable[..., Any]:
    """The same as `prepare_layer_norm`."""
    return _prepare(call, False)
