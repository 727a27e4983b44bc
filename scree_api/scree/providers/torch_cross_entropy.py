"""PyTorch's own cross-entropy on the CPU, where the targets were validated.

Elsewhere an invalid target crashes PyTorch.
"""

from functools import partial

import torch

from ..array import Array
from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.cross_entropy import CrossEntropyCall, reduce_losses


def rejects(call: CrossEntropyCall) -> str | None:
    """Return why PyTorch's own function does not take the call."""
    if not isinstance(call.values, torch.Tensor):
        return "PyTorch's cross-entropy takes torch tensors only"
    if call.has_options:
        return "PyTorch's cross-entropy is used without options of the loss"
    if (
        BACKEND.is_compiling()
        or BACKEND.peek(call.labels) is None
        or (isinstance(call.logits, Array) and call.logits.layout.host_offsets is None)
    ):
        return "PyTorch's cross-entropy needs targets that are known to be classes, on the CPU"
    return None


@register_kernel("cross_entropy", provider="torch", rejects=rejects)
def cross_entropy(call: CrossEntropyCall) -> torch.Tensor:
    """Call `torch.nn.functional.cross_entropy`, in float32 at least."""
    counted, x = call.counted, call.values
    labels = call.labels.to(torch.int64)
    if not counted.all():
        x = torch.where(counted[:, None], x, 0)
        labels = torch.where(counted, labels, call.ignore_index)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    losses = partial(torch.nn.functional.cross_entropy, x, labels, ignore_index=call.ignore_index)
    if call.reduction in ("row_mean", "none"):
        return reduce_losses(call, losses(reduction="none"))
    return losses(reduction=call.reduction)
