"""Gradients of attention to some of the keys, relative to the log-sum-exp of all keys, on PyTorch.

Attention to several parts of the keys, on several devices, merges the outputs of the parts. Its
backward pass runs per part, with the output and the log-sum-exp of all parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..array import Array
from ..dispatch.operation import OPERATIONS, define_operation
from ..ops.attention import AttentionCall


@dataclass(frozen=True, slots=True)
class AttentionGradientCall:
    """A call without dropout.

    Attributes
    ----------
    attention
        Attention to a part of the keys.
    out, lse
        (total_q, num_heads, value_dim) output and (total_q, num_heads) log-sum-exp of all keys.
    dout, dlse
        Gradients of `out` and of `lse`; the second may be None.
    """

    attention: AttentionCall
    out: Any
    lse: Any
    dout: Any
    dlse: Any


@define_operation("attention_gradient", AttentionGradientCall, internal=True)
def _attention_gradient(call: AttentionGradientCall) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v.

    Let o and l be the output and the log-sum-exp of the part alone, and ``w = exp(l - lse)``. The
    weight of a key among all keys is w times its weight in the part. So the part has the same
    gradients, if o gets the gradient ``w * dout``, and l gets
    ``w * ((dout * o - dout * out).sum() + dlse)``.
    """
    attention = call.attention
    arrays = attention.q, attention.k, attention.v
    leaves = [x.values.detach().requires_grad_() for x in arrays]
    with torch.enable_grad():
        q, k, v = (
            Array.from_layout(leaf, x.layout) for leaf, x in zip(leaves, arrays, strict=True)
        )
        part = replace(attention, q=q, k=k, v=v, return_lse=True)
        out, lse = (x.values for x in OPERATIONS["attention"].run_call(part))
    wide = lse.dtype
    weight = torch.exp(lse.detach() - call.lse.to(wide))
    weight = torch.where(lse.detach() == -math.inf, 0, weight)
    dout = call.dout.to(wide)
    dpart = (dout * weight[..., None]).to(out.dtype)
    sums = (dout * call.out.to(wide)).sum(-1)
    if call.dlse is not None:
        sums = sums - call.dlse.to(wide)
    dlse = (dpart.to(wide) * out.detach().to(wide)).sum(-1) - weight * sums
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dpart, dlse))
    return dq, dk, dv


def attention_gradient(
    attention: AttentionCall, out: Any, lse: Any, dout: Any, dlse: Any = None
) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v; see `AttentionGradientCall`."""
    call = AttentionGradientCall(attention, out, lse, dout, dlse)
    gradients: tuple[Any, Any, Any] = _attention_gradient.run_call(call)
    return gradients
