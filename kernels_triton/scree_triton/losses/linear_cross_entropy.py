"""Cross-entropy fused with the product that makes the logits, a few thousand tokens at a time.

The product writes the logits, `cross_entropy_kernels.visit_logits` replaces them by their gradient,
and two more products compute the gradients of hidden states and weight from it.

With many classes a few tokens have as many logits as the weight has elements. Then the logits are
computed twice. The first pass runs over tokens, with the logits in the memory of the gradient of
the weight, and computes the losses and the gradient of the hidden states. The second pass runs over
classes, computes their logits again, and computes the gradient of the weight.

All of this can run in the forward pass if the gradient of the losses is one number for all tokens.
Otherwise, and for float16, whose loss is scaled against underflow, the backward pass computes it
again.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator
from ..runtime.launch import Launch, Number, Pointer, Stride, launch_args, launch_on_device
from . import cross_entropy
from .cross_entropy_kernels import rowwise, visit_logits
from .reductions import SUMMED, Targets, of_each, reduced, row_means, share_of, targets_of

#: Least tokens whose logits exist at a time, so that the matrix products are efficient.
LEAST = 1024
#: Most chunks of tokens, because the gradient of the weight is rounded after each chunk.
PARTS = 12
#: Above this ratio of classes to the width of a hidden state there are two passes over the logits.
MANY = 16
#: Most tokens (unless PARTS requires more) and classes whose logits the second pass holds at a
#: time.
SECOND = (4352, 4096)


@triton.jit
def scale_kernel(X, FACTOR, OUT, count, SAME: tl.constexpr, BLOCK: tl.constexpr):
    """Compute OUT = X * FACTOR in float32; PyTorch would round the factor to the dtype of X.

    In place, a factor of 1 changes nothing.
    """
    factor = tl.load(FACTOR).to(tl.float32)
    if SAME & (factor == 1.0):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(
        OUT + at,
        (tl.load(X + at, mask=mask).to(tl.float32) * factor).to(OUT.dtype.element_ty),
        mask=mask,
    )


@launch_args
class ScaleArgs:
    """Arguments of `scale_kernel`."""

    X: Pointer
    FACTOR: Pointer
    OUT: Pointer
    count: Stride


_BLOCK = 8192


@cache
def _scale_launch(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, factor: torch.dtype
) -> Launch:
    return Launch(
        scale_kernel, dict(SAME=dtype == out, BLOCK=_BLOCK), dict(num_warps=8), args=ScaleArgs
    )


@triton.jit(do_not_specialize=("n", "first", "ignored"))
def known_kernel(
    X,
    TARGETS,
    OFFSETS,
    OUT,
    x_stride,
    out_stride,
    n,
    first,
    ignored,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy X to OUT, with 0 for ignored tokens; one CTA per token."""
    i = tl.program_id(0)
    token = first + i
    counted = tl.load(TARGETS + token) != ignored
    if ROWS:
        counted = counted & (token < tl.load(OFFSETS + n))
    for at in range(0, WIDTH, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(
            X + i.to(tl.int64) * x_stride + column, mask=counted & (column < WIDTH), other=0.0
        )
        tl.store(OUT + i.to(tl.int64) * out_stride + column, x, mask=column < WIDTH)


@launch_args
class KnownArgs:
    """Arguments of `known_kernel`."""

    X: Pointer
    TARGETS: Pointer
    OFFSETS: Pointer
    OUT: Pointer
    x_stride: Stride
    out_stride: Stride
    n: Number
    first: Number
    ignored: Number


@cache
def _known_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], width: int
) -> Launch:
    block = min(triton.next_power_of_2(width), 2048)
    return Launch(
        known_kernel,
        dict(WIDTH=width, BLOCK=block, ROWS=dtypes[2] is not None),
        dict(num_warps=max(1, block // 512)),
        args=KnownArgs,
    )


class Wanted(NamedTuple):
    """Gradients that a caller wants."""

    x: bool
    weight: bool
    bias: bool


NONE = Wanted(False, False, False)
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _Head(NamedTuple):
    """Inputs of the logits of hidden states x (total, width), and the gradient of their losses."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: Targets
    dlosses: torch.Tensor | None
    share: torch.Tensor | None

    def visit(self, logits: torch.Tensor, first: int, low: int = 0, **outputs: Any) -> None:
        """Write the logits of the tokens from `first` and the classes from `low` on, and run the
        kernel.
        """
        tokens, classes = slice(first, first + logits.shape[0]), slice(low, low + logits.shape[1])
        if self.bias is None:
            torch.mm(self.x[tokens], self.weight[classes].mT, out=logits)
        else:
            torch.addmm(self.bias[classes], self.x[tokens], self.weight[classes].mT, out=logits)
        visit_logits(
            logits, self.targets, first, low, dlosses=self.dlosses, share=self.share, **outputs
        )

    def counted(self, first: int, out: torch.Tensor) -> torch.Tensor:
        """Copy x from the token `first` on to `out`, with 0 for ignored tokens, which have no
        gradient.
        """
        x, (offsets, n) = self.x[first : first + out.shape[0]], self.targets.rows
        launch_on_device(
            _known_launch(x.device, (x.dtype, *self.targets.dtypes), x.shape[1]),
            x.shape[0],
            KnownArgs(
                X=x,
                TARGETS=self.targets.classes,
                OFFSETS=offsets,
                OUT=out,
                x_stride=x.stride(0),
                out_stride=out.stride(0),
                n=n,
                first=first,
                ignored=self.targets.ignored,
            ),
        )
        return out


def fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    reduction: str,
    wanted: Wanted = NONE,
    dlosses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """Return the reduced losses of x (total, width) by weight (classes, width), and the wanted
    gradients.

    The gradient of the bias is float32.
    """
    (total, width), classes = x.shape, weight.shape[0]
    new = partial(torch.empty, dtype=x.dtype, device=x.device)
    twice = wanted.weight and total > 0 and classes > MANY * width
    losses = None if reduction in SUMMED else new((total,), dtype=torch.float32)
    parts: list[torch.Tensor] | None = [] if losses is None else None
    stats = new((2, total), dtype=torch.float32) if twice else None
    share = share_of(targets) if any(wanted) and reduction == "mean" else None
    head = _Head(x, weight, bias, targets, dlosses, share)
    dx = new((total, width)) if wanted.x or (wanted.weight and not twice) else None
    dweight = new((classes, width)) if wanted.weight else None
    dbias = new((classes,), dtype=torch.float32) if wanted.bias else None
    stride = -(-classes // 16) * 16  # so that rows are aligned
    most = (
        classes * width // stride
        if twice
        else tokens_at_a_time(total, width, classes, wanted.weight)
    )
    chunk = _even(total, most)
    memory = (dweight.view(-1)[: chunk * stride] if twice else new((chunk * stride,))).view(
        chunk, stride
    )
    for first in range(0, max(total, 1), chunk):
        some = slice(first, min(first + chunk, total))
        logits = memory[: some.stop - first, :classes]
        head.visit(
            logits,
            first,
            losses=losses,
            parts=parts,
            stats=stats,
            out=logits if any(wanted) else None,
        )
        if not twice:  # the memory of dx holds the masked x until dx is computed
            _add(
                dweight,
                dbias,
                logits,
                head.counted(first, dx[some]) if wanted.weight else None,
                first,
            )
        if wanted.x:
            torch.mm(logits, weight, out=dx[some])
    if twice:
        most, wide = SECOND
        chunk = _even(total, max(most, -(-total // PARTS)))
        memory, spare = new((chunk, min(wide, classes))), new((chunk, width))
        for first in range(0, total, chunk):
            counted = head.counted(first, spare[: min(chunk, total - first)])
            for low in range(0, classes, wide):
                block = slice(low, low + wide)
                logits = memory[: counted.shape[0], : classes - low]
                head.visit(logits, first, low, stats=stats, out=logits)
                _add(dweight[block], dbias[block] if wanted.bias else None, logits, counted, first)
    losses = (
        reduced(parts, reduction)[0]
        if losses is None
        else row_means(losses, targets)
        if reduction == "row_mean"
        else losses
    )
    return losses, (dx if wanted.x else None, dweight, dbias)


def _add(
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dlogits: torch.Tensor,
    counted: torch.Tensor | None,
    first: int,
) -> None:
    """Accumulate the gradients of weight and bias; the chunk with `first` 0 overwrites them."""
    if dweight is not None:
        torch.addmm(dweight, dlogits.mT, counted, beta=int(first > 0), out=dweight)
    if dbias is not None:
        part = dlogits.sum(0, dtype=torch.float32)
        dbias.copy_(part) if first == 0 else dbias.add_(part)


def tokens_at_a_time(total: int, width: int, classes: int, weight: bool) -> int:
    """Return the most tokens whose logits exist at a time, in one pass.

    The logits have no more elements than x, unless LEAST requires more tokens, or PARTS does for
    the gradient of the weight.
    """
    return max(LEAST, width * total // classes, -(-total // PARTS) if weight else 0)


def _even(total: int, most: int) -> int:
    """Return the tokens per chunk, with chunks of equal size of at most `most` tokens."""
    return -(-total // -(-total // max(most, 1))) if total else 1


def _record_fused(ctx, x, weight, bias, targets, reduction):
    early = Wanted(*ctx.needs_input_grad[:3]) if _early(x, reduction) else NONE
    losses, gradients = fused(x, weight, bias, targets, reduction, early)
    ctx.save_for_backward(x, weight, bias, targets.classes, targets.offsets)
    ctx.ignored, ctx.reduction, ctx.gradients = (
        targets.ignored,
        reduction,
        gradients if any(early) else None,
    )
    return losses


def _fused_gradient(ctx, dloss):
    x, weight, bias, classes, offsets = ctx.saved_tensors
    # The gradients of the forward pass are handed out once; a second backward recomputes them.
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        targets, wanted = (
            Targets(classes, offsets, ctx.ignored),
            Wanted(*ctx.needs_input_grad[:3]),
        )
        gradients = fused(
            x, weight, bias, targets, ctx.reduction, wanted, of_each(dloss, targets, ctx.reduction)
        )[1]
        dloss = None
    return *(_finished(g, dloss, x.dtype) for g in gradients), None, None


_differentiable_fused = differentiable("Fused", _record_fused, _fused_gradient)


def _early(x: torch.Tensor, reduction: str) -> bool:
    """Return whether gradients are computed in the forward pass."""
    return reduction in SUMMED and x.dtype != torch.float16


def _finished(
    gradient: torch.Tensor | None, factor: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a gradient times a factor in the dtype of the inputs, in place if it has that dtype."""
    if gradient is None or (factor is None and gradient.dtype == dtype):
        return gradient
    out = (
        gradient
        if gradient.dtype == dtype
        else torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    )
    if factor is None:
        return out.copy_(gradient)
    if out.numel():
        launch = _scale_launch(out.device, gradient.dtype, dtype, factor.dtype)
        args = ScaleArgs(X=gradient, FACTOR=factor, OUT=out, count=out.numel())
        launch_on_device(launch, -(-out.numel() // _BLOCK), args)
    return out


def _or_empty(
    gradients: Gradients, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(like.new_empty((0,)) if g is None else g.to(like.dtype) for g in gradients)


def _fused_operator(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    reduction: str,
    early: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = Wanted(early, early, early and bias is not None)
    losses, gradients = fused(
        x, weight, bias, Targets(classes, offsets, ignored), reduction, wanted
    )
    return losses, *_or_empty(gradients, x)


def _fused_fake(x, weight, bias, classes, offsets, ignored, reduction, early):
    shape = (
        ()
        if reduction in SUMMED
        else x.shape[:1]
        if reduction == "none"
        else (offsets.shape[0] - 1,)
    )
    loss = x.new_empty(shape, dtype=torch.float32)
    return loss, *(
        x.new_empty((0,) if p is None or not early else p.shape) for p in (x, weight, bias)
    )


def _fused_backward_operator(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, wanted = Targets(classes, offsets, ignored), Wanted(True, True, bias is not None)
    return _or_empty(
        fused(x, weight, bias, targets, reduction, wanted, of_each(dloss, targets, reduction))[1], x
    )


def _fused_backward_fake(dloss, x, weight, bias, classes, offsets, ignored, reduction):
    return tuple(x.new_empty((0,) if p is None else p.shape) for p in (x, weight, bias))


_fused_backward_op = define_operator(
    "linear_cross_entropy_backward", _fused_backward_operator, _fused_backward_fake
)


def _save_fused(ctx, inputs, output):
    x, weight, bias, classes, offsets, ctx.ignored, ctx.reduction, ctx.early = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(*(output[1:] if ctx.early else (x, weight, bias, classes, offsets)))


def _differentiate_fused(ctx, dloss, *_):
    if ctx.early:
        dx, dweight, dbias = ((g.float() * dloss).to(g.dtype) for g in ctx.saved_tensors)
    else:
        dx, dweight, dbias = _fused_backward_op(
            dloss, *ctx.saved_tensors, ctx.ignored, ctx.reduction
        )
    return dx, dweight, dbias if ctx.biased else None, None, None, None, None, None


_fused_op = define_operator(
    "linear_cross_entropy",
    _fused_operator,
    _fused_fake,
    save=_save_fused,
    backward=_differentiate_fused,
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `LinearCrossEntropyCall`; None if they do."""
    return cross_entropy.rejects(call)


def linear_cross_entropy(call: Any) -> Any:
    """Compute a `LinearCrossEntropyCall`."""
    x, weight, bias, targets = rowwise(call.values), call.weight, call.bias, targets_of(call)
    wants = torch.is_grad_enabled() and any(
        p is not None and p.requires_grad for p in (x, weight, bias)
    )
    if torch.compiler.is_compiling():
        early = wants and _early(x, call.reduction)
        out = _fused_op(x, weight, bias, *targets, call.reduction, early)[0]
    elif wants:
        out = _differentiable_fused(x, weight, bias, targets, call.reduction)
    else:
        out = fused(x, weight, bias, targets, call.reduction)[0]
    return call.result(out)
