"""Losses of the next token from hidden states, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..gpt import IGNORED

#: ``head(hidden, weight, labels)`` gives the mean loss over the labels that are not ignored.
Head = Callable[[Any, Any, Any], Any]
#: Logits that the chunked loss holds at once.
MAX_LOGITS = 1 << 28


def chunked() -> Head:
    """Return a loss of chunks of tokens, with the gradients in the same pass."""
    import torch

    class ChunkedCrossEntropy(torch.autograd.Function):
        """The loss and its gradients, chunk by chunk of the tokens, in the forward pass."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, labels: Any, size: int) -> Any:
            count = (labels != IGNORED).sum()
            loss = torch.zeros((), device=x.device)
            dweight = torch.zeros(weight.shape, device=x.device)
            dx = []
            for chunk, targets in zip(x.split(size), labels.split(size), strict=True):
                is_target = (targets != IGNORED)[:, None]
                index = targets.clamp(min=0)[:, None]
                logits = (chunk @ weight.T).float()
                lse = logits.logsumexp(1, keepdim=True)
                loss = loss + ((lse - logits.gather(1, index)) * is_target).sum()
                classes = torch.arange(weight.shape[0], device=x.device)
                slope = (logits - lse).exp() - (classes == index).float()
                slope = (slope * (is_target / count)).to(x.dtype)
                dx.append(slope @ weight)
                dweight = dweight + slope.T @ chunk
            ctx.save_for_backward(torch.cat(dx), dweight.to(weight.dtype))
            return loss / count

        @staticmethod
        def backward(ctx: Any, dloss: Any) -> Any:
            dx, dweight = ctx.saved_tensors
            return dx * dloss.to(dx.dtype), dweight * dloss.to(dweight.dtype), None, None

    def loss(x: Any, weight: Any, labels: Any) -> Any:
        size = 1 << ((MAX_LOGITS // weight.shape[0]).bit_length() - 1)
        return ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, labels.flatten(), size)

    return loss


def full() -> Head:
    """Return the loss from all logits at once."""
    import torch.nn.functional as F  # noqa: N812

    def loss(x: Any, weight: Any, labels: Any) -> Any:
        logits = (x @ weight.T).float().flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)

    return loss


def liger() -> Head:
    """Return Liger's fused linear cross-entropy."""
    import torch
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    # Its loop over chunks reads the number of tokens, which would end the graph anyway.
    run = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED))
    return lambda x, weight, labels: run(weight, x.flatten(0, -2), labels.flatten())


HEADS: dict[str, Callable[[], Head]] = {"liger": liger, "chunked": chunked, "full": full}


def choose(name: str, device: str) -> str:
    """Return the name of a head: for "auto" Liger's, where it is importable, or else chunks."""
    if name != "auto":
        return name
    return "liger" if device == "cuda" and find_spec("liger_kernel") else "chunked"
