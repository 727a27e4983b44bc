"""Reductions of the losses of tokens to one sum or mean or to a mean per row, and their gradients.

Every CTA that computes losses writes their partial sum. One kernel adds the partial sums in a fixed
order, so equal inputs give equal bits.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

import scree

from ..runtime.device import device_info
from ..runtime.launch import Launch, Number, Pointer, Written, launch_args, launch_on_device

#: Reductions to one number.
SCALAR_REDUCTIONS = ("mean", "sum")
#: Numbers before the weights in `LossOptions.class_weights`. The weights keep their alignment.
HEADER = 16


class Targets(NamedTuple):
    """Target classes (total,), the offsets of the rows or None, and the ignored class."""

    classes: torch.Tensor
    offsets: torch.Tensor | None
    ignored: int

    @property
    def rows(self) -> tuple[torch.Tensor, int]:
        """The offsets argument of a kernel, and the number of rows."""
        return (
            (self.classes, 0) if self.offsets is None else (self.offsets, self.offsets.shape[0] - 1)
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Dtypes of the classes and of the offsets."""
        return self.classes.dtype, None if self.offsets is None else self.offsets.dtype


class LossOptions(NamedTuple):
    """Options of the loss of a token, see `cross_entropy_kernels`.

    Attributes
    ----------
    label_smoothing, softcap, z_loss
        Numbers; 0 for none.
    classes
        The number of classes.
    class_weights
        (HEADER + classes,) float32: the sum of the weights, the factor of the z-loss, the weight of
        one loss in a mean, and from HEADER on the weights. None without class weights.
    max_logits
        See `scree.linear_cross_entropy`; 0 for the default.
    """

    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    classes: int = 0
    class_weights: torch.Tensor | None = None
    max_logits: int = 0


PLAIN = LossOptions()


def options_of(call: Any, classes: int) -> LossOptions:
    """Return the options of a call as the kernels take them; `PLAIN` without any."""
    if not call.has_options:
        return PLAIN
    weights = None if call.class_weights is None else _weights_with_header(call, classes)
    return LossOptions(call.label_smoothing, call.softcap or 0.0, call.z_loss, classes, weights)


def _weights_with_header(call: Any, classes: int) -> torch.Tensor:
    """Return the class weights of a call as the kernels take them, see `LossOptions`."""
    weights = call.class_weights.detach().float()
    z_loss_factor = loss_weight = weights.new_ones(())
    if call.reduction == "mean":
        # The kernels sum one loss per token, so the z-loss is multiplied by the mean weight.
        total, count = target_weights(call).sum(), call.counted.sum()
        loss_weight = torch.where(total != 0, 1 / total, 0.0)
        z_loss_factor = torch.where(count > 0, total / count, 0.0)
    header = torch.stack([weights.sum(), z_loss_factor, loss_weight])
    return torch.cat([header, weights.new_zeros(HEADER - 3), weights])


def target_weights(call: Any) -> torch.Tensor:
    """Return (total,) the class weights of the targets; 0 for tokens that do not count."""
    weights = call.class_weights.detach().float()
    labels = call.labels.clamp(0, weights.shape[0] - 1)
    return torch.where(call.counted, weights[labels], 0.0)


def reduce_weighted(
    losses: dict[str, torch.Tensor], reduction: str, options: LossOptions
) -> torch.Tensor:
    """Return the "none", "sum" or "mean" of the `token_losses` of a call with class weights.

    The z-loss is multiplied as in the kernels.
    """
    loss = losses["loss"]
    if "z_loss" in losses:
        loss = loss + losses["z_loss"] * options.class_weights[1]
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return weighted_mean(loss.sum(), options.class_weights)


def weighted_mean(total: torch.Tensor, class_weights: torch.Tensor) -> torch.Tensor:
    """Return the mean from the sum of all losses and the weights of `LossOptions`."""
    loss_weight = class_weights[2]
    return torch.where(loss_weight != 0, total * loss_weight, float("nan"))


def targets_of(call: Any) -> Targets:
    offsets = None if call.tokens is call.values else call.tokens.offsets.contiguous()
    return Targets(call.labels.contiguous(), offsets, call.ignore_index)


def on_rows(targets: Targets, x: torch.Tensor) -> Any:
    """Return x, (total, ...), on the rows of the targets; x itself if they have none."""
    return x if targets.offsets is None else scree.Array.unchecked(x, targets.offsets, 0, None)


@triton.jit
def _loss_weight(count, MEAN: tl.constexpr):
    """Return the weight of one loss in the result."""
    return tl.where(count > 0, 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0) if MEAN else 1.0


@triton.jit(do_not_specialize=("parts",))
def loss_sum_kernel(
    PARTS, TOTAL, SHARE, parts, MEAN: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Compute TOTAL, the sum or mean of all losses, from PARTS (2, parts); one CTA.

    SHARE is the weight of one loss in it.
    """
    # With programmatic dependent launch, the losses are still being computed.
    if CHAINED:
        gdc_wait()
    totals = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(0, parts, BLOCK):
        part = at + tl.arange(0, BLOCK)
        totals += tl.load(PARTS + part, mask=part < parts, other=0.0)
        counts += tl.load(PARTS + parts + part, mask=part < parts, other=0.0).to(tl.int32)
    total = tl.sum(totals, 0)
    count = tl.sum(counts, 0)
    share = _loss_weight(count, MEAN)
    if MEAN:
        total = tl.where(count > 0, total * share, float("nan"))
    tl.store(TOTAL, total)
    tl.store(SHARE, share)


@triton.jit(do_not_specialize=("n", "size", "ignored"))
def loss_share_kernel(
    TARGETS, OFFSETS, SHARE, n, size, ignored, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute SHARE, the weight of one loss in the mean, before the losses; one CTA."""
    end = size
    if ROWS:
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(0, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        counts += (tl.load(TARGETS + token, mask=token < end, other=ignored) != ignored).to(
            tl.int32
        )
    tl.store(SHARE, _loss_weight(tl.sum(counts, 0), True))


@triton.jit(do_not_specialize=("ignored", "stride"))
def loss_rows_kernel(
    LOSSES, TARGETS, OFFSETS, MEANS, ignored, stride, BLOCK: tl.constexpr, BACKWARD: tl.constexpr
):
    """Compute MEANS (n,) of the LOSSES (total,) per row, without ignored tokens.

    With BACKWARD, compute the gradient LOSSES from the gradient MEANS.
    """
    row = tl.program_id(0)
    start = tl.load(OFFSETS + row)
    end = tl.load(OFFSETS + row + 1)
    totals = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        counts += (tl.load(TARGETS + token, mask=token < end, other=ignored) != ignored).to(
            tl.int32
        )
        if not BACKWARD:
            totals += tl.load(LOSSES + token, mask=token < end, other=0.0)
    count = tl.sum(counts, 0)
    share = _loss_weight(count, True)
    if BACKWARD:
        gradient = tl.load(MEANS + row * stride).to(tl.float32) * share
        for at in range(start, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            tl.store(LOSSES + token, tl.zeros([BLOCK], tl.float32) + gradient, mask=token < end)
    else:
        tl.store(MEANS + row, tl.where(count > 0, tl.sum(totals, 0) * share, float("nan")))


@launch_args
class SumArgs:
    """Arguments of `loss_sum_kernel`."""

    PARTS: Pointer
    TOTAL: Written
    SHARE: Written
    parts: Number


@launch_args
class ShareArgs:
    """Arguments of `loss_share_kernel`."""

    TARGETS: Pointer
    OFFSETS: Pointer
    SHARE: Written
    n: Number
    size: Number
    ignored: Number


@launch_args
class RowMeansArgs:
    """Arguments of `loss_rows_kernel`."""

    LOSSES: Written
    TARGETS: Pointer
    OFFSETS: Pointer
    MEANS: Written
    ignored: Number
    stride: Number


@cache
def _sum_launch(device: torch.device, mean: bool) -> Launch:
    chained = device_info(device).supports_pdl
    return Launch(
        loss_sum_kernel,
        dict(MEAN=mean, BLOCK=4096, CHAINED=chained),
        dict(num_warps=32, launch_pdl=chained),
        args=SumArgs,
    )


@cache
def _share_launch(
    device: torch.device, classes: torch.dtype, offsets: torch.dtype | None
) -> Launch:
    return Launch(
        loss_share_kernel,
        dict(ROWS=offsets is not None, BLOCK=4096),
        dict(num_warps=16),
        args=ShareArgs,
    )


def reduce_partial_sums(
    parts: list[torch.Tensor], reduction: str, class_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the "sum" or "mean" of all losses, and the weight of one loss in it; 0-d.

    `class_weights` are the weights of `LossOptions`.
    """
    if class_weights is not None and reduction == "mean":
        total, _ = reduce_partial_sums(parts, "sum")
        return weighted_mean(total, class_weights), class_weights[2]
    values = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    total, share = (torch.empty((), dtype=torch.float32, device=values.device) for _ in range(2))
    launch_on_device(
        _sum_launch(values.device, reduction == "mean"),
        1,
        SumArgs(PARTS=values, TOTAL=total, SHARE=share, parts=values.shape[1]),
    )
    return total, share


@cache
def _rows_launch(
    device: torch.device,
    classes: torch.dtype,
    offsets: torch.dtype | None,
    dtype_of_gradient: torch.dtype | None,
) -> Launch:
    return Launch(
        loss_rows_kernel,
        dict(BLOCK=1024, BACKWARD=dtype_of_gradient is not None),
        dict(num_warps=4),
        args=RowMeansArgs,
        unwritten=("LOSSES",) if dtype_of_gradient is None else ("MEANS",),
    )


def row_means(losses: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return (n,) the mean loss per row, without ignored tokens; NaN if no token is left."""
    offsets, n = targets.rows
    means = torch.empty((n,), dtype=torch.float32, device=losses.device)
    if n:
        launch_on_device(
            _rows_launch(means.device, *targets.dtypes, None),
            n,
            RowMeansArgs(
                LOSSES=losses,
                TARGETS=targets.classes,
                OFFSETS=offsets,
                MEANS=means,
                ignored=targets.ignored,
                stride=1,
            ),
        )
    return means


def loss_gradients(dloss: torch.Tensor, targets: Targets, reduction: str) -> torch.Tensor:
    """Return (total,) the gradient of the losses from the gradient of their reduction.

    It excludes the weight of one loss in a mean over all tokens.
    """
    total = targets.classes.shape[0]
    if reduction != "row_mean":
        return dloss.expand(total)
    offsets, n = targets.rows
    dlosses = torch.empty((total,), dtype=torch.float32, device=dloss.device)
    if n:
        launch_on_device(
            _rows_launch(dloss.device, *targets.dtypes, dloss.dtype),
            n,
            RowMeansArgs(
                LOSSES=dlosses,
                TARGETS=targets.classes,
                OFFSETS=offsets,
                MEANS=dloss,
                ignored=targets.ignored,
                stride=dloss.stride(0),
            ),
        )
    return dlosses


def mean_loss_weight(targets: Targets) -> torch.Tensor:
    """Return the weight of one loss in the mean, before the losses are computed; 0-d."""
    offsets, n = targets.rows
    share = torch.empty((), dtype=torch.float32, device=offsets.device)
    launch_on_device(
        _share_launch(share.device, *targets.dtypes),
        1,
        ShareArgs(
            TARGETS=targets.classes,
            OFFSETS=offsets,
            SHARE=share,
            n=n,
            size=targets.classes.shape[0],
            ignored=targets.ignored,
        ),
    )
    return share
