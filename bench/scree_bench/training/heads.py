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


def chunked(compiles: bool = False) -> Head:
    """Return a loss of chunks of tokens, with the gradients in the same pass.

    With `compiles`, the functions of each chunk's logits are compiled, for any number of tokens.
    """
    import torch

    def differentiate(logits: Any, targets: Any, count: Any) -> tuple[Any, Any]:
        """Return the sum of the losses of a chunk, and the gradient of its logits."""
        dtype, logits = logits.dtype, logits.float()
        is_target = (targets != IGNORED)[:, None]
        index = targets.clamp(min=0)[:, None]
        lse = logits.logsumexp(1, keepdim=True)
        loss = ((lse - logits.gather(1, index)) * is_target).sum()
        classes = torch.arange(logits.shape[1], device=logits.device)
        slope = (logits - lse).exp() - (classes == index).float()
        return loss, (slope * (is_target / count)).to(dtype)

    if compiles:
        differentiate = torch.compile(differentiate)

    class ChunkedCrossEntropy(torch.autograd.Function):
        """The loss and its gradients, chunk by chunk of the tokens, in the forward pass."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, labels: Any, size: int) -> Any:
            count = (labels != IGNORED).sum()
            loss = torch.zeros((), device=x.device)
            dweight = torch.zeros(weight.shape, device=x.device)
            dx = []
            for chunk, targets in zip(x.split(size), labels.split(size), strict=True):
                logits = chunk @ weight.T
                if compiles:
                    torch._dynamo.maybe_mark_dynamic(logits, 0)
                    torch._dynamo.maybe_mark_dynamic(targets, 0)
                chunk_loss, slope = differentiate(logits, targets, count)
                loss = loss + chunk_loss
                dx.append(slope @ weight)
                dweight += slope.T @ chunk
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


def full(compiles: bool = False) -> Head:
    """Return the loss from all logits at once."""
    import torch
    import torch.nn.functional as F

    def loss(x: Any, weight: Any, labels: Any) -> Any:
        logits = (x @ weight.T).float().flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)

    return torch.compile(loss, dynamic=True) if compiles else loss


def liger(compiles: bool = False) -> Head:
    """Return Liger's fused linear cross-entropy, which is never compiled."""
    import torch
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    # Its loop over chunks reads the number of tokens, which would end the graph anyway.
    run = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED))
    return lambda x, weight, labels: run(weight, x.flatten(0, -2), labels.flatten())


HEADS: dict[str, Callable[..., Head]] = {"liger": liger, "chunked": chunked, "full": full}


def choose(name: str, device: str) -> str:
    """Return the name of a head: for "auto" Liger's, where it is importable, or else chunks."""
    if name != "auto":
        return name
    return "liger" if device == "cuda" and find_spec("liger_kernel") else "chunked"
