"""RMS norm and layer norm, forward and backward; `CENTRE` selects layer norm, which subtracts the
mean.

The forward kernel reads and writes every element once. With a residual it adds the residual first
and writes the sum too. The backward kernel recomputes the statistics from the token, which it reads
anyway, so the forward kernel saves none. A fixed number of CTAs iterate over the tokens; each
accumulates its part of the gradients of weight and bias. A second small kernel adds these parts in
a fixed order, so equal inputs give equal bits.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

import scree

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import device_info, unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)

_MAX_WIDTH = 16384
#: Columns per CTA of `norm_add_kernel`.
_COLUMNS = 16


@triton.jit
def _element_offsets(tokens, columns, stride, count, D: tl.constexpr):
    """Return the offsets of the elements of some tokens, and a mask of the ones that exist."""
    return tokens.to(tl.int64)[:, None] * stride + columns[None, :], (tokens < count)[:, None] & (
        columns < D
    )[None, :]


@triton.jit
def _load(X, tokens, columns, stride, count, D: tl.constexpr):
    """Load the elements of some tokens.

    The eviction policy makes the forward 1 to 2% faster and does not slow down later kernels.
    """
    offsets, mask = _element_offsets(tokens, columns, stride, count, D)
    return tl.load(X + offsets, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _store(Y, y, tokens, columns, stride, count, D: tl.constexpr):
    offsets, mask = _element_offsets(tokens, columns, stride, count, D)
    tl.store(Y + offsets, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _load_vector(W, columns, D: tl.constexpr):
    return tl.load(W + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _subtract_mean(x, columns, D: tl.constexpr, CENTRE: tl.constexpr):
    if CENTRE:
        x = x - tl.sum(x, 1, keep_dims=True) / D
        x = tl.where((columns < D)[None, :], x, 0.0)
    return x


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _token_sums(x, y):
    """Return the sums of x and y per token, in one reduction: the warps synchronize once."""
    return tl.reduce((x, y), 1, _add_both, keep_dims=True)


@triton.jit(do_not_specialize=("count", "eps"))
def norm_forward_kernel(
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
    """Compute Y = (X - mean) / sqrt(var + eps) * W + B, ROWS tokens per CTA.

    With ADD it normalizes X + RESIDUAL instead of X, and rounds it to SUM.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    x = _load(X, tokens, columns, x_stride, count, D).to(tl.float32)
    if ADD:
        # The norm is of the sum before it is rounded.
        x += _load(RESIDUAL, tokens, columns, residual_stride, count, D).to(tl.float32)
        total = x.to(SUM.dtype.element_ty)
    if WEIGHT:
        w = _load_vector(W, columns, D)
    if BIAS:
        b = _load_vector(B, columns, D)
    x = _subtract_mean(x, columns, D, CENTRE)
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    if WEIGHT:
        y *= w
    if BIAS:
        y += b
    # Storing the sum here instead of above is 1 to 3% faster.
    if ADD:
        _store(SUM, total, tokens, columns, y_stride, count, D)
    _store(Y, y, tokens, columns, y_stride, count, D)


@triton.jit
def _load_inputs(
    X, DY, DSUM, tokens, columns, x_stride, dy_stride, dsum_stride, count, D: tl.constexpr
):
    x = _load(X, tokens, columns, x_stride, count, D)
    dy = _load(DY, tokens, columns, dy_stride, count, D)
    return x, dy, _load(DSUM, tokens, columns, dsum_stride, count, D)


@triton.jit(do_not_specialize=("count", "eps"))
def norm_backward_kernel(
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
    PREFETCH: tl.constexpr,
    RELOAD_WEIGHT: tl.constexpr,
):
    """Compute DX, plus DSUM with ADD, and PARTS (2, CTAs, D), the parts of dW and dB of each CTA.

    The next tokens are prefetched to shared memory. With PREFETCH, which requires ADD, they are
    prefetched to registers. With RELOAD_WEIGHT the weight is read for each token, because no
    registers are left to keep it in.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    if WEIGHT and not RELOAD_WEIGHT:
        w = _load_vector(W, columns, D)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if PREFETCH:
        tokens = program * ROWS + tl.arange(0, ROWS)
        prefetched = _load_inputs(
            X, DY, DSUM, tokens, columns, x_stride, dy_stride, dsum_stride, count, D
        )
    for block in tl.range(program, tl.cdiv(count, ROWS), programs, num_stages=STAGES):
        tokens = block * ROWS + tl.arange(0, ROWS)
        if PREFETCH:
            x, dy, dsum = prefetched
            next_tokens = tokens + programs * ROWS
            prefetched = _load_inputs(
                X, DY, DSUM, next_tokens, columns, x_stride, dy_stride, dsum_stride, count, D
            )
        else:
            x = _load(X, tokens, columns, x_stride, count, D)
            dy = _load(DY, tokens, columns, dy_stride, count, D)
        if WEIGHT and RELOAD_WEIGHT:
            w = _load_vector(W, columns, D)
        x = x.to(tl.float32)
        dy = dy.to(tl.float32)
        dx = dy
        if WEIGHT:
            dx *= w
        if CENTRE:
            mean, total = _token_sums(x, dx)
            x = tl.where((columns < D)[None, :], x - mean / D, 0.0)
            dx -= total / D
        sum_of_squares, dot = _token_sums(x * x, dx * x)
        scale = tl.rsqrt(sum_of_squares / D + eps)
        x *= scale
        if DW:
            dw += dy * x
        if DB:
            db += dy
        dx = (dx - x * (dot * scale / D)) * scale
        if ADD:
            if not PREFETCH:
                dsum = _load(DSUM, tokens, columns, dsum_stride, count, D)
            dx += dsum.to(tl.float32)
        _store(DX, dx, tokens, columns, dx_stride, count, D)
    if DW:
        tl.store(PARTS + program * D + columns, tl.sum(dw, 0), mask=columns < D)
    if DB:
        tl.store(PARTS + (programs + program) * D + columns, tl.sum(db, 0), mask=columns < D)


@triton.jit(do_not_specialize=("parts",))
def norm_add_kernel(
    PARTS,
    DW,
    DB,
    parts,
    D: tl.constexpr,
    DO_DW: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Sum PARTS (2, parts, D) over its parts, COLUMNS columns per CTA.

    With DO_DW the first CTAs compute DW and the others DB; otherwise all compute DB.
    """
    # With programmatic dependent launch, the backward kernel may still be running.
    if CHAINED:
        gdc_wait()
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    is_bias = tl.program_id(0) // blocks + (0 if DO_DW else 1)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, MAX_PARTS)
    mask = (part < parts)[:, None] & (columns < D)[None, :]
    total = tl.sum(
        tl.load(
            PARTS + (is_bias * parts + part)[:, None] * D + columns[None, :], mask=mask, other=0.0
        ),
        0,
    )
    if is_bias == 0:
        tl.store(DW + columns, total.to(DW.dtype.element_ty), mask=columns < D)
    else:
        tl.store(DB + columns, total.to(DB.dtype.element_ty), mask=columns < D)


@launch_args
class ForwardArgs:
    """Arguments of `norm_forward_kernel`."""

    X: Pointer
    RESIDUAL: Pointer
    W: Pointer
    B: Pointer
    Y: Written
    SUM: Written
    x_stride: Stride
    residual_stride: Stride
    y_stride: Stride
    count: Number
    eps: Number


@launch_args
class BackwardArgs:
    """Arguments of `norm_backward_kernel`."""

    X: Pointer
    W: Pointer
    DY: Pointer
    DSUM: Pointer
    DX: Written
    PARTS: Written
    x_stride: Stride
    dy_stride: Stride
    dsum_stride: Stride
    dx_stride: Stride
    count: Number
    eps: Number


@launch_args
class AddArgs:
    """Arguments of `norm_add_kernel`."""

    PARTS: Pointer
    DW: Written
    DB: Written
    parts: Number


def _forward_shape(width: int, block: int, itemsize: int, centre: bool) -> tuple[int, int]:
    """Return tokens and warps per CTA of the forward; measured on an H100 and an H200."""
    warps = min(max(block // 1024, 4), 16)
    # Warps synchronize twice. A second token hides this, 4% on an H200. It does not help with
    # padded widths or with more bytes per token.
    if centre and width in (4096, 8192) and width * itemsize <= 16384:
        return 2, 2 * warps
    return max(1, 4096 // block), warps


def _backward_shape(block: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return tokens and warps per CTA, CTAs per SM, and pipeline stages of the backward."""
    warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    # Stages hold the next tokens of x and dy in shared memory; the smallest devices have 99 KB.
    return max(1, 512 * warps // block), warps, 16 // warps, 3 if block * itemsize <= 16384 else 1


@cache
def _forward_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], width: int, centre: bool
) -> tuple[Launch, int]:
    """Return the forward launch, and the tokens per CTA.

    `dtypes` are the dtypes of x, residual, weight and bias; None if the array is absent.
    """
    block = triton.next_power_of_2(width)
    rows, warps = _forward_shape(width, block, dtypes[0].itemsize, centre)
    _, add, weight, bias = (dtype is not None for dtype in dtypes)
    return Launch(
        norm_forward_kernel,
        dict(D=width, BLOCK=block, ROWS=rows, CENTRE=centre, ADD=add, WEIGHT=weight, BIAS=bias),
        dict(num_warps=warps),
        args=ForwardArgs,
        unwritten=() if add else ("SUM",),
    ), rows


@cache
def _backward_launches(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    width: int,
    centre: bool,
    dy: torch.dtype,
    add: bool,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[Launch, Launch, int, int]:
    """Return the two launches of the backward, and tokens per CTA and maximum CTAs of the first."""
    x, _, weight, _ = dtypes
    block = triton.next_power_of_2(width)
    rows, warps, ctas_per_sm, stages = _backward_shape(block, x.itemsize)
    # Three arrays of 16 bits fit into registers, which is 3 to 7% faster. Longer tokens or wider
    # elements do not fit.
    prefetched = add and x.itemsize == 2 and 1024 <= block <= 4096
    pipeline = dict(
        STAGES=1 if prefetched else stages,
        PREFETCH=prefetched,
        RELOAD_WEIGHT=prefetched or block > 8192,
    )
    first = Launch(
        norm_backward_kernel,
        dict(
            D=width,
            BLOCK=block,
            ROWS=rows,
            CENTRE=centre,
            ADD=add,
            WEIGHT=weight is not None,
            DW=needs_dweight,
            DB=needs_dbias,
            **pipeline,
        ),
        dict(num_warps=warps, maxnreg=128 if prefetched else None),
        args=BackwardArgs,
        unwritten=() if needs_dweight or needs_dbias else ("PARTS",),
    )
    max_programs, chained = (
        device_info(device).sm_count * ctas_per_sm,
        device_info(device).supports_pdl,
    )
    second = Launch(
        norm_add_kernel,
        dict(
            D=width,
            DO_DW=needs_dweight,
            MAX_PARTS=triton.next_power_of_2(max_programs),
            COLUMNS=_COLUMNS,
            CHAINED=chained,
        ),
        dict(num_warps=8, launch_pdl=chained),
        args=AddArgs,
        unwritten=() if needs_dweight and needs_dbias else ("DB",) if needs_dweight else ("DW",),
    )
    return first, second, rows, max_programs


class _LaunchConfig:
    """Everything that the metadata of the arrays determines, so that a call only allocates and
    launches.
    """

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
        self.backward_configs: dict[tuple[torch.dtype, bool, bool, bool], tuple[Any, ...]] = {}

    @method_on_device
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x over its last axis, and the normalized array: x, or x + residual."""
        y = self.new(*self.out)
        total = x if residual is None else self.new(*self.out)
        if self.programs:
            x, stride = as_token_matrix(x)
            residual, residual_stride = (
                (x, stride) if residual is None else as_token_matrix(residual)
            )
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
        needs_dweight: bool,
        needs_dbias: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the normalized array x, of weight and of bias.

        `dsum` is the gradient that reaches x directly, through the second result.
        """
        key = dy.dtype, dsum is not None, needs_dweight, needs_dbias
        first, second, programs, add_programs, dw_allocation, db_allocation, parts_allocation = (
            self.backward_configs.get(key) or self._backward_config(key)
        )
        dx = self.new(*self.out)
        dw = self.new(*dw_allocation) if dw_allocation else None
        db = self.new(*db_allocation) if db_allocation else None
        parts = self.new(*parts_allocation) if parts_allocation else x
        if programs:
            x, stride = as_token_matrix(x)
            dy, dy_stride = as_token_matrix(dy)
            dsum, dsum_stride = (dy, dy_stride) if dsum is None else as_token_matrix(dsum)
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
        if parts_allocation:
            args = AddArgs(
                PARTS=parts,
                DW=parts if dw is None else dw,
                DB=parts if db is None else db,
                parts=programs,
            )
            second(add_programs, args)
        return dx, dw, db

    def _backward_config(self, key: tuple[torch.dtype, bool, bool, bool]) -> tuple[Any, ...]:
        """Return the launches of a backward, their grids, and shape, strides and dtype of dw, db
        and parts.
        """
        first, second, rows, max_programs = _backward_launches(
            self.device, self.dtypes, self.width, self.centre, *key
        )
        programs, width = min(-(-self.numbers[0] // rows), max_programs), self.width
        allocations = [
            ((width,), (1,), dtype) if needs_grad else None
            for dtype, needs_grad in zip(self.dtypes[2:], key[2:])
        ]
        parts = (*contiguous((2, programs, width)), torch.float32) if any(allocations) else None
        add_programs = -(-width // _COLUMNS) * sum(key[2:])
        config = self.backward_configs[key] = (
            first,
            second,
            programs,
            add_programs,
            *allocations,
            parts,
        )
        return config


@lru_cache(1024)
def _cached_launch_config(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: tuple[int, ...],
    eps: float,
    centre: bool,
) -> _LaunchConfig:
    return _LaunchConfig(device, dtypes, shape, eps, centre)


def _launch_config(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> _LaunchConfig:
    dtypes = tuple(None if p is None else p.dtype for p in (x, residual, weight, bias))
    return _cached_launch_config(x.device, dtypes, x.shape, eps, centre)


def as_token_matrix(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return x as (tokens, width) with contiguous elements, copied if necessary, and its token
    stride.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def _standard(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> list[torch.Tensor]:
    options = dict(residual=residual, eps=eps, kernel="standard")
    if centre:
        out = scree.layer_norm(x, weight, bias, **options)
    else:
        out = scree.rms_norm(x, weight, **options)
    return [out] if residual is None else [*out]


def _standard_backward(
    config: _LaunchConfig,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
        return _standard(x, None, weight, bias, config.numbers[1], config.centre)[0]

    # The gradients do not depend on the bias.
    bias = x.new_zeros(x.shape[-1:], dtype=config.dtypes[3]) if needs_dbias else None
    dx, dweight, dbias = gradients(run, (x, weight, bias), dy)
    return dx if dsum is None else dx + dsum, dweight if needs_dweight else None, dbias


@falls_back_to(_standard_backward)
def _backward(
    config: _LaunchConfig,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return config.backward(x, weight, dy, dsum, needs_dweight, needs_dbias)


def _record_norm(ctx, x, residual, weight, bias, config):
    y, total = config.forward(x, residual, weight, bias)
    ctx.save_for_backward(total, weight)
    ctx.config = config
    ctx.set_materialize_grads(False)
    return y if residual is None else (y, total)


def _norm_gradient(ctx, dy, dsum=None):
    _, needs_dresidual, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
    if dy is None:
        return dsum, dsum, None, None, None
    total, weight = ctx.saved_tensors
    dx, dw, db = _backward(ctx.config, total, weight, dy, dsum, needs_dweight, needs_dbias)
    return dx, dx if needs_dresidual else None, dw, db, None


_differentiable_norm = differentiable("Norm", _record_norm, _norm_gradient)


@falls_back_to(_standard)
def _run_operator(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centre: bool,
) -> list[torch.Tensor]:
    return list(
        _launch_config(x, residual, weight, bias, eps, centre).forward(x, residual, weight, bias)
    )[: 1 if residual is None else 2]


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
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = x.new_empty((0,))
    config = _launch_config(x, dsum, weight, bias, eps, centre)
    dx, dw, db = _backward(config, x, weight, dy, dsum, needs_dweight, needs_dbias)
    return dx, none if dw is None else dw, none.clone() if db is None else db


def _backward_fake(x, weight, bias, dy, dsum, eps, centre, needs_dweight, needs_dbias):
    return x.new_empty(x.shape), *(
        p.new_empty(p.shape) if is_needed else x.new_empty((0,))
        for p, is_needed in ((weight, needs_dweight), (bias, needs_dbias))
    )


_backward_op = define_operator("norm_backward", _backward_operator, _backward_fake)


def _save(ctx, inputs, output):
    x, residual, weight, bias, ctx.eps, ctx.centre = inputs
    ctx.add = residual is not None
    ctx.save_for_backward(output[1] if ctx.add else x, weight, bias)


def _differentiate(ctx, grads):
    total, weight, bias = ctx.saved_tensors
    _, _, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    dsum = grads[1] if ctx.add else None
    constants = ctx.eps, ctx.centre, needs_dweight, needs_dbias
    dx, dw, db = _backward_op(total, weight, bias, grads[0], dsum, *constants)
    dresidual = dx if ctx.add else None
    return dx, dresidual, dw if needs_dweight else None, db if needs_dbias else None, None, None


_op = define_operator("norm", _run_operator, _fake, save=_save, backward=_differentiate)


def _norm(
    config: _LaunchConfig,
    needs_grad: bool,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `config.forward`, recorded by autograd if needed.

    `needs_grad` says that one of the arrays requires a gradient. Weight and bias are contiguous.
    """
    if not (needs_grad and torch.is_grad_enabled()):
        return config.forward(x, residual, weight, bias)
    result = _differentiable_norm(x, residual, weight, bias, config)
    return (result, x) if residual is None else result


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `NormCall`; None if they do."""
    width = call.values.shape[-1]
    if not 1 <= width <= _MAX_WIDTH:
        return f"the Triton kernels take a last axis of 1 to {_MAX_WIDTH} elements, not {width}"
    # The residual has the dtype of the values.
    for x in (call.values, call.weight, call.bias):
        if x is not None and (reason := unsupported_dtype(x)):
            return reason
    return None


def _run(call: Any, centre: bool) -> Any:
    weight, bias = (None if p is None else p.contiguous() for p in (call.weight, call.bias))
    arrays = call.values, call.residual_values, weight, bias
    if uses_operators(*arrays):
        y, *sums = _op(*arrays, call.eps, centre)
        return call.result(y, sums[0] if sums else None)
    return call.result(
        *_norm(_launch_config(*arrays, call.eps, centre), _needs_grad(*arrays), *arrays)
    )


def _needs_grad(*arrays: torch.Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in arrays)


def _prepare(call: Any, centre: bool) -> Callable[..., Any]:
    arrays = call.values, call.residual_values, call.weight, call.bias
    config, needs_grad = _launch_config(*arrays, call.eps, centre), _needs_grad(*arrays)
    are_contiguous = all(p is None or p.is_contiguous() for p in (call.weight, call.bias))

    def run(
        x: Any, weight: torch.Tensor | None, residual: Any, bias: torch.Tensor | None = None
    ) -> Any:
        if not are_contiguous:
            weight, bias = (
                weight if weight is None else weight.contiguous(),
                bias if bias is None else bias.contiguous(),
            )
        y, total = _norm(
            config,
            needs_grad,
            x.values,
            None if residual is None else residual.values,
            weight,
            bias,
        )
        y = x.from_layout(y, x.layout, x.ragged_dim)
        return y if residual is None else (y, x.from_layout(total, x.layout, x.ragged_dim))

    return run


def layer_norm(call: Any) -> Any:
    """Compute a `NormCall` as layer norm."""
    return _run(call, True)


def prepare_layer_norm(call: Any) -> Callable[..., Any]:
    """Return a function for calls on ragged arrays with the same metadata."""
    return _prepare(call, True)


def rms_norm(call: Any) -> Any:
    """Compute a `NormCall` as RMS norm."""
    return _run(call, False)


def prepare_rms_norm(call: Any) -> Callable[..., Any]:
    """Return a function for calls on ragged arrays with the same metadata."""
    return _prepare(call, False)
