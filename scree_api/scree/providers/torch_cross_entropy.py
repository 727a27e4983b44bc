"""Cross-entropy on the CPU by PyTorch's own, where the targets have been looked at: it does not survive wrong ones elsewhere."""

from functools import partial

import torch

from ..array import Array
from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.cross_entropy import CrossEntropyCall, given


def rejects(call: CrossEntropyCall) -> str | None:
    """Why PyTorch's own cannot take the call."""
    if not isinstance(call.values, torch.Tensor):
        return "PyTorch's cross-entropy takes torch tensors only"
    if (
        BACKEND.compiling()
        or BACKEND.peek(call.labels) is None
        or (isinstance(call.x, Array) and call.x.layout.host is None)
    ):
        return "PyTorch's cross-entropy needs targets that are known to be classes, on the CPU"
    return None


@register_kernel("cross_entropy", provider="torch", rejects=rejects)
def cross_entropy(call: CrossEntropyCall) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`, in float32 at least."""
    known, x = call.known, call.values
    labels = call.labels.to(torch.int64)
    if not known.all():
        x, labels = torch.where(known[:, None], x, 0), torch.where(known, labels, call.ignore_index)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    losses = partial(torch.nn.functional.cross_entropy, x, labels, ignore_index=call.ignore_index)
    if call.reduction == "row_mean":
        return given(call, losses(reduction="none"))
    return losses(reduction=call.reduction)
