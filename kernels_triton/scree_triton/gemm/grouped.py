"""Grouped GEMM: every row of a ragged array times its own matrix, and the gradients of both.

The product and the gradient of the rows share a kernel: a tile of a row's tokens times a tile of
its matrix. For the gradient of a matrix, one CTA per tile iterates over the tokens of the row.
There are no atomics, so equal inputs give equal bits.

There are three pairs of kernels:

- The kernels of `grouped_sm90`, in half precision, are the fastest.
- The tiled kernels do the same in plain Triton, for other versions of Triton and later devices.
  They also use TMA. One persistent CTA per SM counts the tiles of each row and processes tile after
  tile.
- The pointer kernels support everything else. A slot holds tokens of one row only: block ``j`` of
  row ``b`` is slot ``offsets[b] // BLOCK_T + b + j``, found by bisection. float32 operands are
  multiplied as three TF32 products, see `attention.portable`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

import scree
from scree.dispatch.operation import OPERATIONS
from scree.functions.linear_algebra import GroupedCall

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.descriptors import ragged_shape, tiled
from ..runtime.device import INTERPRETED, device_info, unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import (
    Descriptor,
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    WrittenDescriptor,
    launch_args,
    launch_on_device,
)

#: Maximum rows whose tiles a CTA counts at once.
_MAX_COUNTED_ROWS = 1024
# The end of every row, see `descriptors.ragged_shape`.
_FAR = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=("n", "total"))
def grouped_tiled_kernel(
    X,
    W,
    OUT,
    OFFSETS,
    n,
    total,
    K: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Compute OUT (total, M): X (total, K) times the matrix (K, M) of the row of each token.

    W is (n, K, M), or with TRANSPOSED (n, M, K).
    """
    COLUMNS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    # Row n is the tail: the tokens after the last row.
    row = tl.arange(0, ROWS)
    start = tl.load(OFFSETS + row, mask=row <= n, other=total).to(tl.int32)
    end = tl.load(OFFSETS + row + 1, mask=row < n, other=total).to(tl.int32)
    blocks = tl.where(row <= n, tl.cdiv(end - start, BLOCK_T), 0)
    slots_before = tl.cumsum(blocks, 0) - blocks
    slots = tl.sum(blocks, 0)
    for tile in tl.range(tl.program_id(0), slots * COLUMNS, tl.num_programs(0), flatten=True):
        # GROUP consecutive slots run together, so that they share tiles of the matrices in the
        # cache.
        first = tile // (GROUP * COLUMNS) * GROUP
        group_size = tl.minimum(slots - first, GROUP)
        slot = first + tile % (GROUP * COLUMNS) % group_size
        column = tile % (GROUP * COLUMNS) // group_size * BLOCK_M
        matrix_row = tl.sum(((slots_before <= slot) & (row <= n)).to(tl.int32), 0) - 1
        token_start = tl.sum(
            tl.where(row == matrix_row, start + (slot - slots_before) * BLOCK_T, 0), 0
        )
        row_end = tl.sum(tl.where(row == matrix_row, end, 0), 0)
        matrix = tl.minimum(matrix_row, n - 1)
        acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for k in range(0, K, BLOCK_K):
            if TRANSPOSED:
                w = tl.trans(tl.reshape(W.load([matrix, column, k]), [BLOCK_M, BLOCK_K]))
            else:
                w = tl.reshape(W.load([matrix, k, column]), [BLOCK_K, BLOCK_M])
            acc = tl.dot(X.load([token_start, k]), w, acc)
        # Halves leave shared memory for one more stage.
        y = tl.reshape(tl.where(matrix_row < n, acc, 0.0), [BLOCK_T, 2, BLOCK_M // 2])
        left_half, right_half = tl.split(tl.permute(y, [0, 2, 1]))
        ragged_index = _FAR - row_end + token_start
        OUT.store(
            [_FAR, row_end, ragged_index, column],
            tl.reshape(left_half.to(OUT.dtype), [1, 1, BLOCK_T, BLOCK_M // 2]),
        )
        OUT.store(
            [_FAR, row_end, ragged_index, column + BLOCK_M // 2],
            tl.reshape(right_half.to(OUT.dtype), [1, 1, BLOCK_T, BLOCK_M // 2]),
        )


@triton.jit(do_not_specialize=("unused",))
def grouped_tiled_weight_kernel(
    X,
    DY,
    DW,
    OFFSETS,
    unused,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute DW (n, K, M): per row, the transpose of X (tokens, K) times DY (tokens, M)."""
    COLUMNS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * COLUMNS
    row = tl.program_id(0) // TILES
    column = tl.program_id(0) % COLUMNS * BLOCK_M
    depth = tl.program_id(0) % TILES // COLUMNS * BLOCK_K
    start = tl.load(OFFSETS + row).to(tl.int32)
    end = tl.load(OFFSETS + row + 1).to(tl.int32)
    acc = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for token_start in range(start, end, BLOCK_T):
        x = tl.reshape(X.load([_FAR, end, _FAR - end + token_start, depth]), [BLOCK_T, BLOCK_K])
        dy = tl.reshape(DY.load([_FAR, end, _FAR - end + token_start, column]), [BLOCK_T, BLOCK_M])
        acc = tl.dot(tl.trans(x), dy, acc)
    k = depth + tl.arange(0, BLOCK_K)
    m = column + tl.arange(0, BLOCK_M)
    out = DW + (row.to(tl.int64) * K + k[:, None]) * M + m[None, :]
    tl.store(out, acc.to(DW.dtype.element_ty), mask=(k < K)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=("n", "total", "bisections"))
def grouped_product_kernel(
    X,
    W,
    OUT,
    OFFSETS,
    x_stride,
    w_group,
    w_k,
    w_m,
    n,
    total,
    bisections,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute OUT (total, M): X (total, K) times the matrix (K, M) of the row of each token."""
    columns = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    slots = tl.num_programs(0) // columns
    # GROUP consecutive slots run together, so that they share tiles of the matrices in the cache.
    band = pid // (GROUP * columns)
    first = band * GROUP
    size = tl.minimum(slots - first, GROUP)
    slot = first + (pid % (GROUP * columns)) % size
    column = (pid % (GROUP * columns)) // size
    row = slot * 0
    upper = row + n + 1
    for _ in range(bisections):
        middle = (row + upper) // 2
        if tl.load(OFFSETS + middle) // BLOCK_T + middle <= slot:
            row = middle
        else:
            upper = middle
    start = tl.load(OFFSETS + row).to(tl.int64)
    end = tl.load(OFFSETS + row + 1, mask=row < n, other=total).to(tl.int64)
    start += (slot - (start // BLOCK_T + row)) * BLOCK_T
    if start >= end:
        return
    token = tl.arange(0, BLOCK_T)
    valid = (token < end - start)[:, None]
    m = column * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    if row < n:
        x = X + (start + token)[:, None] * x_stride + k[None, :]
        w_row = W + row.to(tl.int64) * w_group
        w = w_row + k.to(tl.int64)[:, None] * w_k + m.to(tl.int64)[None, :] * w_m
        for depth in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a = tl.load(x, mask=valid, other=0.0)
            else:
                a = tl.load(x, mask=valid & (depth + k < K)[None, :], other=0.0)
            if (K % BLOCK_K == 0) & (M % BLOCK_M == 0):
                b = tl.load(w)
            else:
                b = tl.load(w, mask=(depth + k < K)[:, None] & (m < M)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="tf32x3")
            x += BLOCK_K
            w += tl.full([], BLOCK_K, tl.int64) * w_k
    out = OUT + (start + token)[:, None] * M + m[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=valid & (m < M)[None, :])


@triton.jit(do_not_specialize=("unused",))
def grouped_weight_kernel(
    X,
    DY,
    DW,
    OFFSETS,
    x_stride,
    dy_stride,
    unused,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute DW (n, K, M): per row, the transpose of X (tokens, K) times DY (tokens, M)."""
    columns = tl.cdiv(M, BLOCK_M)
    tiles = columns * tl.cdiv(K, BLOCK_K)
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = (tile % columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tile // columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    start = tl.load(OFFSETS + row).to(tl.int64)
    length = (tl.load(OFFSETS + row + 1) - start).to(tl.int32)
    token = tl.arange(0, BLOCK_T)
    x = X + (start + token)[:, None] * x_stride + k[None, :]
    dy = DY + (start + token)[:, None] * dy_stride + m[None, :]
    acc = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for token_start in range(0, length, BLOCK_T):
        valid = (token_start + token < length)[:, None]
        a = tl.load(x, mask=valid & (k < K)[None, :], other=0.0)
        b = tl.load(dy, mask=valid & (m < M)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="tf32x3")
        x += tl.full([], BLOCK_T, tl.int64) * x_stride
        dy += tl.full([], BLOCK_T, tl.int64) * dy_stride
    out = DW + (row.to(tl.int64) * K + k[:, None]) * M + m[None, :]
    tl.store(out, acc.to(DW.dtype.element_ty), mask=(k < K)[:, None] & (m < M)[None, :])


@launch_args
class TiledArgs:
    """Arguments of `grouped_tiled_kernel`."""

    X: Descriptor
    W: Descriptor
    OUT: WrittenDescriptor
    OFFSETS: Pointer
    n: Number
    total: Number


@launch_args
class TiledWeightArgs:
    """Arguments of `grouped_tiled_weight_kernel`."""

    X: Descriptor
    DY: Descriptor
    DW: Written
    OFFSETS: Pointer
    unused: Number


@launch_args
class ProductArgs:
    """Arguments of `grouped_product_kernel`."""

    X: Pointer
    W: Pointer
    OUT: Written
    OFFSETS: Pointer
    x_stride: Stride
    w_group: Stride
    w_k: Stride
    w_m: Stride
    n: Number
    total: Number
    bisections: Number


@launch_args
class WeightArgs:
    """Arguments of `grouped_weight_kernel`."""

    X: Pointer
    DY: Pointer
    DW: Written
    OFFSETS: Pointer
    x_stride: Stride
    dy_stride: Stride
    unused: Number


#: Launch configs by bytes per element: (tokens, columns, depth, warps, stages) of the product, and
#: (depth, columns, tokens, warps, stages) of the gradient of the matrices.
PRODUCT = {2: (128, 128, 64, 8, 3), 4: (64, 64, 32, 4, 2)}
WEIGHT = {2: (128, 128, 64, 8, 3), 4: (64, 64, 32, 4, 2)}
#: The same for the tiled kernels. The gradient of the matrices has one config for rows that are
#: short on average (below SHORT_ROWS tokens), and one for others. A fourth stage of the product does
#: not fit into the shared memory of compute capability 10.0.
TILED_PRODUCT = (128, 256, 64, 8, 3)
TILED_WEIGHT = ((128, 128, 64, 4, 3), (256, 128, 64, 8, 4))
SHORT_ROWS = 384
GROUP = 8


@cache
def _launches(
    device: torch.device, dtype: torch.dtype, offsets: torch.dtype, k: int, m: int
) -> tuple[Launch, Launch]:
    """Return the pointer kernels of the product and of the gradient of the matrices."""
    tokens, columns, depth, warps, stages = PRODUCT[dtype.itemsize]
    product = Launch(
        grouped_product_kernel,
        dict(K=k, M=m, BLOCK_T=tokens, BLOCK_M=columns, BLOCK_K=depth, GROUP=GROUP),
        dict(num_warps=warps, num_stages=stages),
        args=ProductArgs,
    )
    depth, columns, tokens, warps, stages = WEIGHT[dtype.itemsize]
    return product, Launch(
        grouped_weight_kernel,
        dict(K=k, M=m, BLOCK_T=tokens, BLOCK_M=columns, BLOCK_K=depth),
        dict(num_warps=warps, num_stages=stages),
        args=WeightArgs,
    )


@cache
def _tiled_launch(
    device: torch.device,
    dtype: torch.dtype,
    offsets: torch.dtype,
    k: int,
    m: int,
    rows: int,
    transposed: bool,
) -> Launch:
    """Return the tiled kernel of the product; `rows` is a power of 2 above the number of rows."""
    tokens, columns, depth, warps, stages = TILED_PRODUCT
    return Launch(
        grouped_tiled_kernel,
        dict(
            K=k,
            M=m,
            ROWS=rows,
            BLOCK_T=tokens,
            BLOCK_M=columns,
            BLOCK_K=depth,
            GROUP=GROUP,
            TRANSPOSED=transposed,
        ),
        dict(num_warps=warps, num_stages=stages),
        (tokens, columns if transposed else depth, tokens),
        args=TiledArgs,
    )


@cache
def _tiled_weight_launch(
    device: torch.device,
    dtype: torch.dtype,
    offsets: torch.dtype,
    k: int,
    m: int,
    tile: tuple[int, int, int, int, int],
) -> Launch:
    """Return the tiled kernel of the gradient of the matrices."""
    depth, columns, tokens, warps, stages = tile
    return Launch(
        grouped_tiled_weight_kernel,
        dict(K=k, M=m, BLOCK_T=tokens, BLOCK_M=columns, BLOCK_K=depth),
        dict(num_warps=warps, num_stages=stages),
        (tokens, tokens),
        args=TiledWeightArgs,
    )


@cache
def _supports_tiled(device: torch.device) -> bool:
    info = device_info(device)
    return INTERPRETED or (info.has_large_shared_memory and info.has_descriptors)


@cache
def _sm90_kernels(device: torch.device) -> Any:
    """Return the module of the Gluon kernels if the device supports them."""
    if not device_info(device).supports_sm90_gluon:
        return None
    from . import grouped_sm90

    return grouped_sm90


def _is_tma_compatible(x: torch.Tensor) -> bool:
    """Return whether TMA can address x, whose last axis is contiguous.

    That requires 16-byte alignment, no overlapping elements and at most 2**30 rows.
    """
    steps = x.stride()[:-1]
    return (
        x.element_size() == 2
        and x.data_ptr() % 16 == 0
        and x.shape[0] <= _FAR.value
        and all(step % 8 == 0 and step >= x.shape[-1] for step in steps)
    )


def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return x (total, k) times the matrix of each row: (total, m), contiguous.

    The weight (n, k, m) may have any strides.
    """
    total, (n, k, m) = x.shape[0], weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((total, m), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    transposed = weight.stride(2) != 1
    row_major = weight.mT if transposed else weight
    if (
        0 < n < _MAX_COUNTED_ROWS
        and row_major.stride(2) == 1
        and all(map(_is_tma_compatible, (x, row_major, out)))
        and _supports_tiled(x.device)
    ):
        if kernels := _sm90_kernels(x.device):
            kernels.product(x, row_major, transposed, offsets, out)
            return out
        launch = _tiled_launch(
            x.device, x.dtype, offsets.dtype, k, m, max(16, 1 << n.bit_length()), transposed
        )
        _, columns, depth, *_ = TILED_PRODUCT
        weight_columns = depth if transposed else columns
        args = TiledArgs(
            X=(x, tiled(tuple(x.shape), x.stride(), depth)),
            W=(row_major, tiled(tuple(row_major.shape), row_major.stride(), weight_columns)),
            OUT=(out, tiled(*ragged_shape(1, m, m, m), columns // 2)),
            OFFSETS=offsets,
            n=n,
            total=total,
        )
        launch_on_device(launch, device_info(x.device).sm_count, args)
    else:
        tokens, columns = PRODUCT[x.dtype.itemsize][:2]
        w_group, w_k, w_m = weight.stride()
        args = ProductArgs(
            X=x,
            W=weight,
            OUT=out,
            OFFSETS=offsets,
            x_stride=x.stride(0),
            w_group=w_group,
            w_k=w_k,
            w_m=w_m,
            n=n,
            total=total,
            bisections=(n + 1).bit_length(),
        )
        launch = _launches(x.device, x.dtype, offsets.dtype, k, m)[0]
        launch_on_device(launch, (total // tokens + n + 1) * -(-m // columns), args)
    return out


def weight_gradient(x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return, per row, the transpose of x (tokens, k) times dy (tokens, m): (n, k, m)."""
    n, k, m = offsets.shape[0] - 1, x.shape[1], dy.shape[1]
    x, dy = (t if t.stride(1) == 1 else t.contiguous() for t in (x, dy))
    dw = torch.empty((n, k, m), dtype=x.dtype, device=x.device)
    if not n:
        return dw
    if (
        x.shape[0]
        and _is_tma_compatible(x)
        and _is_tma_compatible(dy)
        and _supports_tiled(x.device)
    ):
        if (kernels := _sm90_kernels(x.device)) and _is_tma_compatible(dw):
            kernels.weight_gradient(x, dy, offsets, dw)
            return dw
        tile = TILED_WEIGHT[x.shape[0] >= SHORT_ROWS * n]
        launch = _tiled_weight_launch(x.device, x.dtype, offsets.dtype, k, m, tile)
        depth, columns, *_ = tile
        args = TiledWeightArgs(
            X=(x, tiled(*ragged_shape(1, k, x.stride(0), k), depth)),
            DY=(dy, tiled(*ragged_shape(1, m, dy.stride(0), m), columns)),
            DW=dw,
            OFFSETS=offsets,
            unused=0,
        )
    else:
        depth, columns = WEIGHT[x.dtype.itemsize][:2]
        launch = _launches(x.device, x.dtype, offsets.dtype, k, m)[1]
        args = WeightArgs(
            X=x,
            DY=dy,
            DW=dw,
            OFFSETS=offsets,
            x_stride=x.stride(0),
            dy_stride=dy.stride(0),
            unused=0,
        )
    launch_on_device(launch, n * -(-k // depth) * -(-m // columns), args)
    return dw


def _standard(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    layout = scree.Array.unchecked(x, offsets, 0, None).layout
    return _standard_on(layout, x, weight)


def _standard_on(layout: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    call = GroupedCall(scree.Array.from_layout(x, layout), weight)
    return OPERATIONS["grouped_matmul"].run_call(call, "standard").values


def _standard_weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    layout = scree.Array.unchecked(x, offsets, 0, None).layout
    weight = x.new_zeros((offsets.shape[0] - 1, x.shape[1], dy.shape[1]))
    return gradients(partial(_standard_on, layout, x), (weight,), dy)[0]


# For gradients and operators; the dispatch of scree replaces the product of an eager call.
_product = falls_back_to(_standard)(product)
_weight_gradient = falls_back_to(_standard_weight_gradient)(weight_gradient)


def _record_product(ctx, x, weight, offsets):
    ctx.save_for_backward(x, weight, offsets)
    return product(x, weight, offsets)


def _product_gradient(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    dx = _product(dy, weight.mT, offsets) if ctx.needs_input_grad[0] else None
    return dx, _weight_gradient(x, dy, offsets) if ctx.needs_input_grad[1] else None, None


_differentiable_product = differentiable("Product", _record_product, _product_gradient)


def _run_operator(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _product(x, weight, offsets)


def _fake(x, weight, offsets):
    return x.new_empty((x.shape[0], weight.shape[2]))


def _weight_operator(x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _weight_gradient(x, dy, offsets)


def _weight_fake(x, dy, offsets):
    return x.new_empty((offsets.shape[0] - 1, x.shape[1], dy.shape[1]))


def _weight_flops(x, dy, offsets):
    return 2 * x.shape[0] * x.shape[1] * dy.shape[1]


_weight_op = define_operator(
    "grouped_weight_gradient", _weight_operator, _weight_fake, flops=_weight_flops
)


def _differentiate(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    needs_dx, needs_dweight, _ = ctx.needs_input_grad
    dx = _op(dy, weight.mT, offsets) if needs_dx else None
    return dx, _weight_op(x, dy, offsets) if needs_dweight else None, None


_op = define_operator(
    "grouped_product",
    _run_operator,
    _fake,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=_differentiate,
    flops=lambda x, weight, offsets: 2 * x.shape[0] * weight.shape[1] * weight.shape[2],
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `GroupedCall`; None if they do."""
    if 0 in call.weight.shape[1:]:
        return f"the Triton kernels take matrices of at least one element, not {tuple(call.weight.shape)}"
    if call.x.ragged_dim:
        return "the Triton kernels take a grouped product with the ragged axis in front"
    return unsupported_dtype(call.x.values)


def note(call: Any) -> str | None:
    """Return why no kernel for Hopper runs on a Hopper GPU; None if one does."""
    x, weight = call.x.values, call.weight
    device = device_info(x.device)
    if not device.is_hopper or device.note:
        return device.note
    if not (_is_tma_compatible(x) and any(map(_is_tma_compatible, (weight, weight.mT)))):
        return (
            "the faster kernels for Hopper take half precision whose addresses and strides are "
            "multiples of 16 bytes"
        )
    return None


def grouped_matmul(call: Any) -> Any:
    """Compute a `GroupedCall`."""
    x, weight = call.x, call.weight
    if uses_operators(x.values, weight):
        return x.with_values(_op(x.values, weight, x.offsets.contiguous()))
    return prepare_grouped_matmul(call)(x, weight)


def prepare_grouped_matmul(call: Any) -> Callable[..., Any]:
    """Return a function for calls on ragged arrays with the same metadata."""
    needs_grad = call.x.values.requires_grad or call.weight.requires_grad

    def multiply(x: Any, weight: torch.Tensor) -> Any:
        run = _differentiable_product if needs_grad and torch.is_grad_enabled() else product
        return x.from_layout(run(x.values, weight, x.offsets.contiguous()), x.layout)

    return multiply
