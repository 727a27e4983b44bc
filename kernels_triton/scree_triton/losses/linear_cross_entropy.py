"""Cross-entropy fused with the product that makes the logits, a few thousand tokens at a time.

The product writes the logits, `cross_entropy_kernels.visit_logits` replaces them by their gradient,
and two more products compute the gradients of hidden states and weight from it.

With many classes a few tokens have as many logits as the weight has elements. Then the logits are
computed twice, unless the caller allows enough of them. The first pass runs over tokens, with the
logits in the memory of the gradient of the weight, and computes the losses and the gradient of the
hidden states. The second pass runs over classes, computes their logits again, and computes the
gradient of the weight.

All of this can run in the forward pass if the gradient of the losses is one number for all tokens.
Otherwise, and for float16, whose loss is scaled against underflow, the backward pass computes it
again.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import scree
from scree.ops.cross_entropy import LinearCrossEntropyCall, linear_token_losses

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import Launch, Number, Pointer, Stride, launch_args, launch_on_device
from . import cross_entropy
from .cross_entropy_kernels import rowwise, visit_logits
from .reductions import (
    PLAIN,
    SCALAR_REDUCTIONS,
    LossOptions,
    Targets,
    loss_gradients,
    mean_loss_weight,
    on_rows,
    options_of,
    reduce_partial_sums,
    reduce_weighted,
    row_means,
    targets_of,
)

#: Minimum tokens whose logits exist at a time, so that the matrix products are efficient.
MIN_CHUNK_TOKENS = 1024
#: Maximum chunks of tokens, because the gradient of the weight is rounded after each chunk.
MAX_CHUNKS = 12
#: Above this ratio of classes to the width of a hidden state there are two passes over the logits.
MAX_CLASSES_PER_WIDTH = 16
#: Maximum tokens (unless MAX_CHUNKS requires more) and classes whose logits the second pass holds
#: at a time.
SECOND_PASS_TILE = (4352, 4096)
#: Matrix products with other sizes are several times slower on a GPU, in a 16-bit dtype.
ALIGNED_SIZE = 8


@triton.jit
def linear_cross_entropy_scale_kernel(
    X, FACTOR, OUT, count, SAME: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute OUT = X * FACTOR in float32; PyTorch would round the factor to the dtype of X.

    In place, a factor of 1 changes nothing.
    """
    factor = tl.load(FACTOR).to(tl.float32)
    if SAME & (factor == 1.0):
        return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    tl.store(
        OUT + index,
        (tl.load(X + index, mask=mask).to(tl.float32) * factor).to(OUT.dtype.element_ty),
        mask=mask,
    )


@launch_args
class ScaleArgs:
    """Arguments of `linear_cross_entropy_scale_kernel`."""

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
        linear_cross_entropy_scale_kernel,
        dict(SAME=dtype == out, BLOCK=_BLOCK),
        dict(num_warps=8),
        args=ScaleArgs,
    )


@triton.jit(do_not_specialize=("n", "first", "ignored"))
def linear_cross_entropy_mask_ignored_kernel(
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
    is_counted = tl.load(TARGETS + token) != ignored
    if ROWS:
        is_counted = is_counted & (token < tl.load(OFFSETS + n))
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            X + i.to(tl.int64) * x_stride + column, mask=is_counted & (column < WIDTH), other=0.0
        )
        tl.store(OUT + i.to(tl.int64) * out_stride + column, x, mask=column < WIDTH)


@launch_args
class MaskIgnoredArgs:
    """Arguments of `linear_cross_entropy_mask_ignored_kernel`."""

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
def _mask_ignored_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], width: int
) -> Launch:
    block = min(triton.next_power_of_2(width), 2048)
    return Launch(
        linear_cross_entropy_mask_ignored_kernel,
        dict(WIDTH=width, BLOCK=block, ROWS=dtypes[2] is not None),
        dict(num_warps=max(1, block // 512)),
        args=MaskIgnoredArgs,
    )


class NeededGradients(NamedTuple):
    """Gradients to compute."""

    x: bool
    weight: bool
    bias: bool


NO_GRADIENTS = NeededGradients(False, False, False)
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _Head(NamedTuple):
    """Inputs of the logits of hidden states x (total, width), and the gradient of their losses."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: Targets
    dlosses: torch.Tensor | None
    share: torch.Tensor | None
    options: LossOptions

    def visit(self, logits: torch.Tensor, first: int, low: int = 0, **outputs: Any) -> None:
        """Write the logits of the tokens from `first` and the classes from `low` on, and run the
        kernel.
        """
        x, weight = self.x[first : first + logits.shape[0]], self.weight[low:]
        for block in aligned_blocks(logits):
            if self.bias is None:
                torch.mm(x, weight[block].mT, out=logits[:, block])
            else:
                torch.addmm(self.bias[low:][block], x, weight[block].mT, out=logits[:, block])
        visit_logits(
            logits,
            self.targets,
            first,
            low,
            dlosses=self.dlosses,
            share=self.share,
            options=self.options,
            **outputs,
        )

    def mask_ignored(self, first: int, out: torch.Tensor) -> torch.Tensor:
        """Copy x from the token `first` on to `out`, with 0 for ignored tokens, which have no
        gradient.
        """
        x, (offsets, n) = self.x[first : first + out.shape[0]], self.targets.rows
        launch_on_device(
            _mask_ignored_launch(x.device, (x.dtype, *self.targets.dtypes), x.shape[1]),
            x.shape[0],
            MaskIgnoredArgs(
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
    needed: NeededGradients = NO_GRADIENTS,
    dlosses: torch.Tensor | None = None,
    options: LossOptions = PLAIN,
    accuracies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """Return the reduced losses of x (total, width) by weight (classes, width), and the needed
    gradients.

    The gradient of the bias is float32. The accuracies (total,) are written if present.
    """
    (total, width), classes = x.shape, weight.shape[0]
    allocate = partial(torch.empty, dtype=x.dtype, device=x.device)
    allowed = options.max_logits // classes
    two_passes = (
        needed.weight
        and total > 0
        and classes > MAX_CLASSES_PER_WIDTH * width
        and allowed < min(total, least_chunk_tokens(total))
    )
    losses = None if reduction in SCALAR_REDUCTIONS else allocate((total,), dtype=torch.float32)
    parts: list[torch.Tensor] | None = [] if losses is None else None
    stats = allocate((2, total), dtype=torch.float32) if two_passes else None
    share = None
    if any(needed) and reduction == "mean":
        weights = options.class_weights
        share = mean_loss_weight(targets) if weights is None else weights[2]
    head = _Head(x, weight, bias, targets, dlosses, share, options)
    dx = allocate((total, width)) if needed.x or (needed.weight and not two_passes) else None
    dweight = allocate((classes, width)) if needed.weight else None
    dbias = allocate((classes,), dtype=torch.float32) if needed.bias else None
    # Rows of the logits start at a multiple of 16 elements.
    stride = -(-classes // 16) * 16
    max_tokens = (
        classes * width // stride
        if two_passes
        else max(allowed, max_chunk_tokens(total, width, classes, needed.weight))
    )
    chunk = _chunk_size(total, max_tokens)
    logits_buffer = (
        dweight.view(-1)[: chunk * stride] if two_passes else allocate((chunk * stride,))
    ).view(chunk, stride)
    for first in range(0, max(total, 1), chunk):
        tokens = slice(first, min(first + chunk, total))
        logits = logits_buffer[: tokens.stop - first, :classes]
        head.visit(
            logits,
            first,
            losses=losses,
            parts=parts,
            stats=stats,
            out=logits if any(needed) else None,
            accuracies=accuracies,
        )
        # The memory of dx holds the masked x until dx is computed.
        if not two_passes:
            _accumulate(
                dweight,
                dbias,
                logits,
                head.mask_ignored(first, dx[tokens]) if needed.weight else None,
                first,
            )
        if needed.x:
            _multiply(logits, weight, out=dx[tokens])
    if two_passes:
        max_tokens, max_classes = SECOND_PASS_TILE
        chunk = _chunk_size(total, max(max_tokens, -(-total // MAX_CHUNKS)))
        logits_buffer = allocate((chunk, min(max_classes, classes)))
        x_buffer = allocate((chunk, width))
        for first in range(0, total, chunk):
            masked_x = head.mask_ignored(first, x_buffer[: min(chunk, total - first)])
            for low in range(0, classes, max_classes):
                block = slice(low, low + max_classes)
                logits = logits_buffer[: masked_x.shape[0], : classes - low]
                head.visit(logits, first, low, stats=stats, out=logits)
                _accumulate(
                    dweight[block], dbias[block] if needed.bias else None, logits, masked_x, first
                )
    losses = (
        reduce_partial_sums(parts, reduction, options.class_weights)[0]
        if losses is None
        else row_means(losses, targets)
        if reduction == "row_mean"
        else losses
    )
    return losses, (dx if needed.x else None, dweight, dbias)


def aligned_blocks(logits: torch.Tensor) -> list[slice]:
    """Return the blocks of classes that one matrix product each computes.

    A first block with an aligned size contains all but a few of the classes.
    """
    classes = logits.shape[1]
    aligned = classes - classes % ALIGNED_SIZE
    if aligned in (0, classes) or logits.dtype.itemsize != 2:
        return [slice(0, classes)]
    return [slice(0, aligned), slice(aligned, classes)]


def _accumulate(
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dlogits: torch.Tensor,
    masked_x: torch.Tensor | None,
    first: int,
) -> None:
    """Accumulate the gradients of weight and bias; the chunk with `first` 0 overwrites them."""
    if dweight is not None:
        for block in aligned_blocks(dlogits):
            part = dweight[block]
            torch.addmm(part, dlogits[:, block].mT, masked_x, beta=int(first > 0), out=part)
    if dbias is not None:
        sums = dlogits.sum(0, dtype=torch.float32)
        dbias.copy_(sums) if first == 0 else dbias.add_(sums)


def _multiply(dlogits: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = dlogits @ weight, the gradient of the hidden states."""
    # The few classes come first: the sum with the other product is rounded once.
    for beta, block in enumerate(reversed(aligned_blocks(dlogits))):
        torch.addmm(out, dlogits[:, block], weight[block], beta=beta, out=out)


def max_chunk_tokens(total: int, width: int, classes: int, weight: bool) -> int:
    """Return the most tokens whose logits exist at a time, in one pass.

    The logits have no more elements than x, unless MIN_CHUNK_TOKENS requires more tokens, or
    MAX_CHUNKS does for the gradient of the weight.
    """
    least = least_chunk_tokens(total) if weight else MIN_CHUNK_TOKENS
    return max(least, width * total // classes)


def least_chunk_tokens(total: int) -> int:
    """Return the fewest tokens per chunk of a pass that adds up the gradient of the weight."""
    return max(MIN_CHUNK_TOKENS, -(-total // MAX_CHUNKS))


def _chunk_size(total: int, max_tokens: int) -> int:
    """Return the tokens per chunk, with chunks of equal size of at most `most` tokens."""
    return -(-total // -(-total // max(max_tokens, 1))) if total else 1


def _record_fused(ctx, x, weight, bias, targets, reduction, options, accuracies):
    early = (
        NeededGradients(*ctx.needs_input_grad[:3])
        if _computes_gradients_early(x, reduction)
        else NO_GRADIENTS
    )
    losses, gradients = fused(
        x, weight, bias, targets, reduction, early, options=options, accuracies=accuracies
    )
    ctx.save_for_backward(x, weight, bias, targets.classes, targets.offsets)
    ctx.ignored, ctx.reduction, ctx.options, ctx.gradients = (
        targets.ignored,
        reduction,
        options,
        gradients if any(early) else None,
    )
    return losses


def _standard(
    targets: Targets,
    reduction: str,
    options: LossOptions,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    tokens, labels = on_rows(targets, x), on_rows(targets, targets.classes)
    keywords = cross_entropy.standard_options(targets, options)
    if options.class_weights is None:
        losses = scree.linear_cross_entropy(
            tokens, weight, labels, bias, reduction=reduction, kernel="standard", **keywords
        )
        return losses if isinstance(losses, torch.Tensor) else losses.values
    call = LinearCrossEntropyCall(tokens, weight, labels, bias, **keywords)
    return reduce_weighted(linear_token_losses(call), reduction, options)


def _standard_gradients(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    reduction: str,
    needed: NeededGradients,
    options: LossOptions,
) -> Gradients:
    results = gradients(partial(_standard, targets, reduction, options), (x, weight, bias), dloss)
    return tuple(g if is_needed else None for g, is_needed in zip(results, needed))  # type: ignore[return-value]


@falls_back_to(_standard_gradients)
def _gradients(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    reduction: str,
    needed: NeededGradients,
    options: LossOptions,
) -> Gradients:
    """Return the needed gradients from the gradient of the reduced losses."""
    dlosses = loss_gradients(dloss, targets, reduction)
    return fused(x, weight, bias, targets, reduction, needed, dlosses, options)[1]


def _fused_gradient(ctx, dloss):
    x, weight, bias, classes, offsets = ctx.saved_tensors
    # The first backward pass returns the gradients of the forward pass; a second one recomputes them.
    results, ctx.gradients = ctx.gradients, None
    if results is None or torch.is_grad_enabled():  # a second derivative needs their graph
        targets, needed = (
            Targets(classes, offsets, ctx.ignored),
            NeededGradients(*ctx.needs_input_grad[:3]),
        )
        results = _gradients(dloss, x, weight, bias, targets, ctx.reduction, needed, ctx.options)
        dloss = None
    return *(_scale_gradient(g, dloss, x.dtype) for g in results), *(None,) * 4


_differentiable_fused = differentiable("Fused", _record_fused, _fused_gradient)


def _computes_gradients_early(x: torch.Tensor, reduction: str) -> bool:
    """Return whether gradients are computed in the forward pass."""
    return reduction in SCALAR_REDUCTIONS and x.dtype != torch.float16


def _scale_standard(
    gradient: torch.Tensor | None, factor: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    if gradient is None or factor is None:
        return None if gradient is None else gradient.to(dtype)
    return (gradient.float() * factor).to(dtype)


@falls_back_to(_scale_standard)
def _scale_gradient(
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


def _standard_operator(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    max_logits: int,
    reduction: str,
    accuracy: bool,
    early: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, needed = Targets(classes, offsets, ignored), NeededGradients(*early)
    options = LossOptions(
        label_smoothing, softcap, z_loss, weight.shape[0], class_weights, max_logits
    )
    losses = _standard(targets, reduction, options, x, weight, bias)
    results: Gradients = (None, None, None)
    if any(early):
        one = torch.ones_like(losses)
        results = _standard_gradients(one, x, weight, bias, targets, reduction, needed, options)
    accuracies = x.new_empty((0,), dtype=torch.float32)
    if accuracy:
        labels = on_rows(targets, classes)
        keywords = cross_entropy.standard_options(targets, options)
        call = LinearCrossEntropyCall(
            on_rows(targets, x), weight, labels, bias, return_accuracy=True, **keywords
        )
        accuracies = linear_token_losses(call)["accuracy"]
    return losses, *_or_empty(results, x), accuracies


@falls_back_to(_standard_operator)
def _fused_operator(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    max_logits: int,
    reduction: str,
    accuracy: bool,
    early: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, needed = Targets(classes, offsets, ignored), NeededGradients(*early)
    options = LossOptions(
        label_smoothing, softcap, z_loss, weight.shape[0], class_weights, max_logits
    )
    accuracies = x.new_empty((x.shape[0] if accuracy else 0,), dtype=torch.float32)
    losses, gradients = fused(
        x,
        weight,
        bias,
        targets,
        reduction,
        needed,
        options=options,
        accuracies=accuracies if accuracy else None,
    )
    return losses, *_or_empty(gradients, x), accuracies


def _fused_fake(x, weight, bias, classes, offsets, *options):
    reduction, accuracy, early = options[-3:]
    shape = (
        ()
        if reduction in SCALAR_REDUCTIONS
        else x.shape[:1]
        if reduction == "none"
        else (offsets.shape[0] - 1,)
    )
    loss = x.new_empty(shape, dtype=torch.float32)
    return (
        loss,
        *(
            x.new_empty(p.shape if is_needed else (0,))
            for p, is_needed in zip((x, weight, bias), early, strict=True)
        ),
        x.new_empty((x.shape[0] if accuracy else 0,), dtype=torch.float32),
    )


def _fused_backward_operator(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    max_logits: int,
    reduction: str,
    is_needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, needed = Targets(classes, offsets, ignored), NeededGradients(*is_needed)
    options = LossOptions(
        label_smoothing, softcap, z_loss, weight.shape[0], class_weights, max_logits
    )
    return _or_empty(_gradients(dloss, x, weight, bias, targets, reduction, needed, options), x)


def _fused_backward_fake(dloss, x, weight, bias, *arguments):
    return tuple(
        x.new_empty(p.shape if needed else (0,))
        for p, needed in zip((x, weight, bias), arguments[-1], strict=True)
    )


def _product_flops(x, weight):
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0]


_fused_backward_op = define_operator(
    "linear_cross_entropy_backward",
    _fused_backward_operator,
    _fused_backward_fake,
    # The logits are computed again.
    flops=lambda dloss, x, weight, *args: (1 + sum(args[-1][:2])) * _product_flops(x, weight),
)


def _save_fused(ctx, inputs, output):
    x, weight, bias, classes, offsets, ignored, class_weights, *options, _, early = inputs
    ctx.early, ctx.ignored, ctx.options = any(early), ignored, options
    arrays = output[1:4] if ctx.early else (x, weight, bias, classes, offsets, class_weights)
    ctx.save_for_backward(*arrays)


def _differentiate_fused(ctx, dloss, *_):
    is_needed = list(ctx.needs_input_grad[:3])
    if ctx.early:
        gradients = ((g.float() * dloss).to(g.dtype) for g in ctx.saved_tensors)
    else:
        *arrays, class_weights = ctx.saved_tensors
        constants = ctx.ignored, class_weights, *ctx.options, is_needed
        gradients = _fused_backward_op(dloss, *arrays, *constants)
    return tuple(g if needed else None for g, needed in zip(gradients, is_needed))


_fused_op = define_operator(
    "linear_cross_entropy",
    _fused_operator,
    _fused_fake,
    save=_save_fused,
    backward=_differentiate_fused,
    flops=lambda x, weight, *args: (1 + sum(args[-1][:2])) * _product_flops(x, weight),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `LinearCrossEntropyCall`; None if they do."""
    return cross_entropy.rejects(call)


def linear_cross_entropy(call: Any) -> Any:
    """Compute a `LinearCrossEntropyCall`."""
    x, weight, bias, targets = rowwise(call.values), call.weight, call.bias, targets_of(call)
    classes = weight.shape[0]
    options = options_of(call, classes)
    if call.max_logits is not None:
        options = options._replace(classes=classes, max_logits=call.max_logits)
    reduction = cross_entropy.kernel_reduction(call)
    needs_grad = torch.is_grad_enabled() and any(
        p is not None and p.requires_grad for p in (x, weight, bias)
    )
    accuracies = None
    if uses_operators(x, weight, bias):
        is_early = needs_grad and _computes_gradients_early(x, reduction)
        early = [is_early and p is not None and p.requires_grad for p in (x, weight, bias)]
        numbers = options.label_smoothing, options.softcap, options.z_loss, options.max_logits
        constants = options.class_weights, *numbers, reduction, call.return_accuracy, early
        out, _, _, _, accuracies = _fused_op(x, weight, bias, *targets, *constants)
    else:
        if call.return_accuracy:
            accuracies = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
        if needs_grad:
            out = _differentiable_fused(x, weight, bias, targets, reduction, options, accuracies)
        else:
            out = fused(
                x, weight, bias, targets, reduction, options=options, accuracies=accuracies
            )[0]
    if reduction != call.reduction:
        return cross_entropy.with_accuracy(
            call, cross_entropy.reduce_with_weights(call, out, options), accuracies
        )
    return cross_entropy.with_accuracy(call, call.result(out), accuracies)
