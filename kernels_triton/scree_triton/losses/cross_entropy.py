"""Cross-entropy over large vocabularies, forward and backward.

The losses take one pass over the logits and their gradient another, see `cross_entropy_kernels`.
The module `reductions` reduces the losses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import scree
from scree.ops.cross_entropy import CrossEntropyCall, reduce_losses, token_losses

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from .cross_entropy_kernels import rowwise, visit_logits
from .reductions import (
    HEADER,
    PLAIN,
    SCALAR_REDUCTIONS,
    LossOptions,
    Targets,
    loss_gradients,
    on_rows,
    options_of,
    reduce_partial_sums,
    reduce_weighted,
    row_means,
    target_weights,
    targets_of,
    weighted_mean,
)


def forward(
    x: torch.Tensor,
    targets: Targets,
    reduction: str = "none",
    save: bool = True,
    options: LossOptions = PLAIN,
    accuracies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the reduced losses of logits x (total, classes), the statistics, and the weight of one
    loss.

    The statistics (2, total) are what the backward needs per token; None without `save`. The weight
    of one loss is None unless the reduction is "sum" or "mean". The accuracies (total,) are written
    if present.
    """
    x, total = rowwise(x), x.shape[:1]
    stats = torch.empty((2, *total), dtype=torch.float32, device=x.device) if save else None
    if reduction in SCALAR_REDUCTIONS:
        parts: list[torch.Tensor] = []
        visit_logits(x, targets, parts=parts, stats=stats, accuracies=accuracies, options=options)
        loss, share = reduce_partial_sums(parts, reduction, options.class_weights)
        return loss, stats, share
    losses = torch.empty(total, dtype=torch.float32, device=x.device)
    visit_logits(x, targets, losses=losses, stats=stats, accuracies=accuracies, options=options)
    return row_means(losses, targets) if reduction == "row_mean" else losses, stats, None


def backward(
    dlosses: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    targets: Targets,
    share: torch.Tensor | None = None,
    options: LossOptions = PLAIN,
) -> torch.Tensor:
    """Return the gradient of the logits from the gradient of the losses, (total,), times `share`."""
    x = rowwise(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    visit_logits(x, targets, stats=stats, out=out, dlosses=dlosses, share=share, options=options)
    return out


def _record_cross_entropy(ctx, x, targets, reduction, options, accuracies):
    loss, stats, share = forward(x, targets, reduction, True, options, accuracies)
    ctx.save_for_backward(x, stats, share, targets.classes, targets.offsets)
    ctx.ignored, ctx.reduction, ctx.options = targets.ignored, reduction, options
    return loss


def _standard(
    targets: Targets, reduction: str, options: LossOptions, x: torch.Tensor
) -> torch.Tensor:
    tokens, labels = on_rows(targets, x), on_rows(targets, targets.classes)
    keywords = standard_options(targets, options)
    if options.class_weights is None:
        losses = scree.cross_entropy(
            tokens, labels, reduction=reduction, kernel="standard", **keywords
        )
        return losses if isinstance(losses, torch.Tensor) else losses.values
    call = CrossEntropyCall(tokens, labels, **keywords)
    return reduce_weighted(_standard_token_losses(call), reduction, options)


def standard_options(targets: Targets, options: LossOptions) -> dict[str, Any]:
    """Return the arguments of the standard implementation for these options."""
    weights = options.class_weights
    return {
        "class_weights": None if weights is None else weights[HEADER:],
        "ignore_index": targets.ignored,
        "label_smoothing": options.label_smoothing,
        "softcap": options.softcap or None,
        "z_loss": options.z_loss,
    }


def _standard_token_losses(call: CrossEntropyCall) -> dict[str, torch.Tensor]:
    return token_losses(call, call.values, call.labels, call.counted, call.class_weights)


def _standard_backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    share: torch.Tensor | None,
    targets: Targets,
    reduction: str,
    options: LossOptions,
) -> torch.Tensor:
    standard = partial(_standard, targets, reduction, options)
    return gradients(standard, (x,), dloss)[0]


@falls_back_to(_standard_backward)
def _backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    share: torch.Tensor | None,
    targets: Targets,
    reduction: str,
    options: LossOptions,
) -> torch.Tensor:
    """Return the gradient of the logits from the gradient of the reduced losses."""
    dlosses = loss_gradients(dloss, targets, reduction)
    return backward(dlosses, x, stats, targets, share, options)


def _cross_entropy_gradient(ctx, dloss):
    x, stats, share, classes, offsets = ctx.saved_tensors
    targets = Targets(classes, offsets, ctx.ignored)
    dx = _backward(dloss, x, stats, share, targets, ctx.reduction, ctx.options)
    return dx, None, None, None, None


_differentiable_cross_entropy = differentiable(
    "CrossEntropy", _record_cross_entropy, _cross_entropy_gradient
)


def _standard_operator(
    x: torch.Tensor,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    accuracy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = Targets(classes, offsets, ignored)
    options = LossOptions(label_smoothing, softcap, z_loss, x.shape[1], class_weights)
    losses = _standard(targets, "none", options, x)
    # The statistics that the backward kernel reads; see `cross_entropy_kernels.SAVE`.
    logits = x.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    maximum = logits.amax(1)
    total = torch.exp(logits - maximum[:, None]).sum(1)
    is_class = (classes >= 0) & (classes < x.shape[1])
    total = torch.where(is_class, total, float("nan"))
    counted = classes != ignored
    if offsets is not None:
        counted &= torch.arange(x.shape[0], device=x.device) < offsets[-1]
    accuracies = x.new_empty((0,), dtype=torch.float32)
    if accuracy:
        labels = on_rows(targets, classes)
        keywords = standard_options(targets, options)
        call = CrossEntropyCall(on_rows(targets, x), labels, return_accuracy=True, **keywords)
        accuracies = _standard_token_losses(call)["accuracy"]
    return losses, torch.stack([maximum, torch.where(counted, total, -1.0)]), accuracies


@falls_back_to(_standard_operator)
def _run_operator(
    x: torch.Tensor,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    accuracy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = LossOptions(label_smoothing, softcap, z_loss, x.shape[1], class_weights)
    accuracies = x.new_empty((x.shape[0] if accuracy else 0,), dtype=torch.float32)
    losses, stats, _ = forward(
        x,
        Targets(classes, offsets, ignored),
        options=options,
        accuracies=accuracies if accuracy else None,
    )
    return losses, stats, accuracies


def _fake(x, classes, offsets, ignored, class_weights, label_smoothing, softcap, z_loss, accuracy):
    return (
        x.new_empty(x.shape[:1], dtype=torch.float32),
        x.new_empty((2, x.shape[0]), dtype=torch.float32),
        x.new_empty((x.shape[0] if accuracy else 0,), dtype=torch.float32),
    )


def _backward_operator(
    dlosses: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    ignored: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
) -> torch.Tensor:
    targets = Targets(classes, offsets, ignored)
    options = LossOptions(label_smoothing, softcap, z_loss, x.shape[1], class_weights)
    return _backward(dlosses, x, stats, None, targets, "none", options)


def _backward_fake(dlosses, x, *_):
    return x.new_empty(x.shape)


_backward_op = define_operator("cross_entropy_backward", _backward_operator, _backward_fake)


def _save(ctx, inputs, output):
    x, classes, offsets, ignored, class_weights, *numbers, _ = inputs
    ctx.constants = ignored, *numbers
    ctx.save_for_backward(x, output[1], classes, offsets, class_weights)


_op = define_operator(
    "cross_entropy",
    _run_operator,
    _fake,
    save=_save,
    backward=lambda ctx, dlosses, *_: (_backward_op(dlosses, *ctx.saved_tensors, *ctx.constants),),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `CrossEntropyCall`; None if they do."""
    if abs(call.ignore_index) >= 1 << 31:
        return f"the Triton kernels take an ignore_index of 32 bits, not {call.ignore_index}"
    if call.class_weights is not None:
        if call.class_weights.requires_grad:
            return "the Triton kernels have no gradient of class_weights"
        if call.z_loss and call.reduction == "row_mean":
            return "the Triton kernels take class_weights without z_loss for reduction='row_mean'"
    return unsupported_dtype(call.values)


def cross_entropy(call: Any) -> Any:
    """Compute a `CrossEntropyCall`."""
    x, targets = call.values, targets_of(call)
    options = options_of(call, x.shape[1])
    accuracies = None
    if uses_operators(x):
        losses, _, accuracies = _op(
            x,
            *targets,
            options.class_weights,
            options.label_smoothing,
            options.softcap,
            options.z_loss,
            call.return_accuracy,
        )
        return with_accuracy(call, reduce_with_weights(call, losses, options), accuracies)
    if call.return_accuracy:
        accuracies = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    reduction = kernel_reduction(call)
    losses = _reduced(x, targets, reduction, x.requires_grad, options, accuracies)
    if reduction != call.reduction:
        return with_accuracy(call, reduce_with_weights(call, losses, options), accuracies)
    return with_accuracy(call, call.result(losses), accuracies)


def kernel_reduction(call: Any) -> str:
    """Return the reduction that the kernels compute: they do not compute weighted means per row."""
    if call.reduction == "row_mean" and call.class_weights is not None:
        return "none"
    return call.reduction


def reduce_with_weights(call: Any, losses: torch.Tensor, options: LossOptions) -> Any:
    """Return the result of a call from the losses of its tokens."""
    if options.class_weights is None:
        return reduce_losses(call, losses)
    if call.reduction == "mean":
        return weighted_mean(losses.sum(), options.class_weights)
    return reduce_losses(call, losses, target_weights(call))


def with_accuracy(call: Any, loss: Any, accuracies: Any) -> Any:
    """Return the loss, and if the call returns it, the accuracy."""
    if not call.return_accuracy:
        return loss
    # Autograd takes every result of an operator as differentiable.
    return loss, reduce_losses(call, accuracies.detach())


def _reduced(
    x: torch.Tensor,
    targets: Targets,
    reduction: str,
    wanted: bool,
    options: LossOptions = PLAIN,
    accuracies: torch.Tensor | None = None,
) -> torch.Tensor:
    if wanted and torch.is_grad_enabled():
        return _differentiable_cross_entropy(x, targets, reduction, options, accuracies)
    return forward(x, targets, reduction, False, options, accuracies)[0]


def prepare_cross_entropy(call: Any) -> Callable[..., torch.Tensor] | None:
    """Return a function for calls on ragged arrays with the same metadata.

    Return None on the CPU, where scree checks the values of the targets at every call, and for
    calls whose result depends on more than the losses.
    """
    if call.class_weights is not None or call.return_accuracy:
        return None
    if call.logits.layout.backend.peek(call.labels) is not None:
        return None
    ignored, reduction, kind, wanted = (
        call.ignore_index,
        call.reduction,
        call.labels.dtype,
        call.values.requires_grad,
    )
    options = options_of(call, call.values.shape[1])

    def losses(logits: Any, targets: Any, class_weights: None) -> Any:
        classes = targets.values.to(kind).contiguous()
        classes = Targets(classes, logits.offsets.contiguous(), ignored)
        out = _reduced(logits.values, classes, reduction, wanted, options)
        return logits.with_values(out) if reduction == "none" else out

    return losses
