"""Gradients of attention through a part of the keys, given the results for all keys, on PyTorch.

Attention whose keys are in parts, for instance on several devices, merges the outputs of the parts.
Its backward pass runs once per part, with the merged output and log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..array import Array
from ..dispatch.operation import OPERATIONS, define_operation
from ..ops.attention import AttentionCall
from ..records import record


@record
class AttentionGradientCall:
    """Gradients of attention through a part of the keys; there is no dropout.

    Attributes
    ----------
    attention
        Attention to the part of the keys.
    out, lse
        (total_q, num_heads, value_dim) output and (total_q, num_heads) log-sum-exp for all keys.
    dout, dlse
        Gradients of `out` and of `lse`. `dlse` may be None.
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
    weight of a key among all keys is w times its weight in the part. So this function
    differentiates the part. It takes ``w * dout`` as the gradient of o, and
    ``w * ((dout * o - dout * out).sum() + dlse)`` as the gradient of l.
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
    """Return the gradients of q, k and v.

    Parameters
    ----------
    attention, out, lse, dout, dlse
        See `AttentionGradientCall`.

    Returns
    -------
    tuple
        The gradients, with the shapes and dtypes of the values of q, k and v.
    """
    call = AttentionGradientCall(attention, out, lse, dout, dlse)
    gradients: tuple[Any, Any, Any] = _attention_gradient.run_call(call)
    return gradients
