"""Cross-entropy over large vocabularies, forward and backward.

The losses take one pass over the logits and their gradient another, see `cross_entropy_kernels`.
The module `reductions` reduces the losses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import scree
from scree.ops.cross_entropy import reduce_losses

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from .cross_entropy_kernels import rowwise, visit_logits
from .reductions import (
    SCALAR_REDUCTIONS,
    Targets,
    loss_gradients,
    on_rows,
    reduce_partial_sums,
    row_means,
    targets_of,
)


def forward(
    x: torch.Tensor, targets: Targets, reduction: str = "none", save: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the reduced losses of logits x (total, classes), the statistics, and the weight of one
    loss.

    The statistics (2, total) are what the backward needs per token; None without `save`. The weight
    of one loss is None unless the reduction is "sum" or "mean".
    """
    x, total = rowwise(x), x.shape[:1]
    stats = torch.empty((2, *total), dtype=torch.float32, device=x.device) if save else None
    if reduction in SCALAR_REDUCTIONS:
        parts: list[torch.Tensor] = []
        visit_logits(x, targets, parts=parts, stats=stats)
        loss, share = reduce_partial_sums(parts, reduction)
        return loss, stats, share
    losses = torch.empty(total, dtype=torch.float32, device=x.device)
    visit_logits(x, targets, losses=losses, stats=stats)
    return row_means(losses, targets) if reduction == "row_mean" else losses, stats, None


def backward(
    dlosses: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    targets: Targets,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits from the gradient of the losses, (total,), times `share`."""
    x = rowwise(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    visit_logits(x, targets, stats=stats, out=out, dlosses=dlosses, share=share)
    return out


def _record_cross_entropy(ctx, x, targets, reduction):
    loss, stats, share = forward(x, targets, reduction)
    ctx.save_for_backward(x, stats, share, targets.classes, targets.offsets)
    ctx.ignored, ctx.reduction = targets.ignored, reduction
    return loss


def _standard(targets: Targets, reduction: str, x: torch.Tensor) -> torch.Tensor:
    tokens, labels = on_rows(targets, x), on_rows(targets, targets.classes)
    losses = scree.cross_entropy(
        tokens, labels, ignore_index=targets.ignored, reduction=reduction, kernel="standard"
    )
    return losses if isinstance(losses, torch.Tensor) else losses.values  # type: ignore[no-any-return]


def _standard_backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    share: torch.Tensor | None,
    targets: Targets,
    reduction: str,
) -> torch.Tensor:
    return gradients(partial(_standard, targets, reduction), (x,), dloss)[0]  # type: ignore[return-value]


@falls_back_to(_standard_backward)
def _backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    share: torch.Tensor | None,
    targets: Targets,
    reduction: str,
) -> torch.Tensor:
    """Return the gradient of the logits from the gradient of the reduced losses."""
    return backward(loss_gradients(dloss, targets, reduction), x, stats, targets, share)


def _cross_entropy_gradient(ctx, dloss):
    x, stats, share, classes, offsets = ctx.saved_tensors
    targets = Targets(classes, offsets, ctx.ignored)
    return _backward(dloss, x, stats, share, targets, ctx.reduction), None, None


_differentiable_cross_entropy = differentiable(
    "CrossEntropy", _record_cross_entropy, _cross_entropy_gradient
)


def _standard_operator(
    x: torch.Tensor, classes: torch.Tensor, offsets: torch.Tensor | None, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = _standard(Targets(classes, offsets, ignored), "none", x)
    # The statistics that the backward kernel reads; see `cross_entropy_kernels.SAVE`.
    maximum = x.amax(1).float()
    total = torch.exp(x.float() - maximum[:, None]).sum(1)
    is_class = (classes >= 0) & (classes < x.shape[1])
    total = torch.where(is_class, total, float("nan"))
    counted = classes != ignored
    if offsets is not None:
        counted &= torch.arange(x.shape[0], device=x.device) < offsets[-1]
    return losses, torch.stack([maximum, torch.where(counted, total, -1.0)])


@falls_back_to(_standard_operator)
def _run_operator(
    x: torch.Tensor, classes: torch.Tensor, offsets: torch.Tensor | None, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(x, Targets(classes, offsets, ignored))[:2]


def _fake(x, classes, offsets, ignored):
    return x.new_empty(x.shape[:1], dtype=torch.float32), x.new_empty(
        (2, x.shape[0]), dtype=torch.float32
    )


def _backward_operator(
    dlosses: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    classes: torch.Tensor,
    offsets: torch.Tensor | None,
    ignored: int,
) -> torch.Tensor:
    return _backward(dlosses, x, stats, None, Targets(classes, offsets, ignored), "none")  # type: ignore[no-any-return]


def _backward_fake(dlosses, x, stats, classes, offsets, ignored):
    return x.new_empty(x.shape)


_backward_op = define_operator("cross_entropy_backward", _backward_operator, _backward_fake)


def _save(ctx, inputs, output):
    x, classes, offsets, ctx.ignored = inputs
    ctx.save_for_backward(x, output[1], classes, offsets)


_op = define_operator(
    "cross_entropy",
    _run_operator,
    _fake,
    save=_save,
    backward=lambda ctx, dlosses, _: (
        _backward_op(dlosses, *ctx.saved_tensors, ctx.ignored),
        None,
        None,
        None,
    ),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `CrossEntropyCall`; None if they do."""
    if abs(call.ignore_index) >= 1 << 31:
        return f"the Triton kernels take an ignore_index of 32 bits, not {call.ignore_index}"
    return unsupported_dtype(call.values)


def cross_entropy(call: Any) -> Any:
    """Compute a `CrossEntropyCall`."""
    x, targets = call.values, targets_of(call)
    if uses_operators(x):
        return reduce_losses(call, _op(x, *targets)[0])
    return call.result(_reduced(x, targets, call.reduction, x.requires_grad))


def _reduced(x: torch.Tensor, targets: Targets, reduction: str, wanted: bool) -> torch.Tensor:
    if wanted and torch.is_grad_enabled():
        return _differentiable_cross_entropy(x, targets, reduction)
    return forward(x, targets, reduction, save=False)[0]


def prepare_cross_entropy(call: Any) -> Callable[..., torch.Tensor] | None:
    """Return a function for calls on ragged arrays with the same metadata.

    Return None on the CPU, where scree checks the values of the targets at every call.
    """
    if call.logits.layout.backend.peek(call.labels) is not None:
        return None
    ignored, reduction, kind, wanted = (
        call.ignore_index,
        call.reduction,
        call.labels.dtype,
        call.values.requires_grad,
    )

    def losses(logits: Any, targets: Any) -> Any:
        classes = targets.values.to(kind).contiguous()
        classes = Targets(classes, logits.offsets.contiguous(), ignored)
        out = _reduced(logits.values, classes, reduction, wanted)
        return logits.with_values(out) if reduction == "none" else out

    return losses
