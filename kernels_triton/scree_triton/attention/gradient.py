"""Gradients of attention through a part of the keys, by the backward kernels of attention."""

import torch

# This import also defines the operation, if no torch array has loaded scree's providers yet.
from scree.providers.torch_attention_gradient import AttentionGradientCall

from . import interface
from .metadata import VarlenLayout


def rejects(call: AttentionGradientCall) -> str | None:
    """Return why the kernels cannot serve an `AttentionGradientCall`; None if they can."""
    attention = call.attention
    if attention.dropout or attention.alibi_slopes is not None:
        return "the Triton kernels compute gradients of parts without dropout and ALiBi slopes"
    return interface.rejects(attention)


def attention_gradient(
    call: AttentionGradientCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v of a call for which `rejects` returns None."""
    q, k, v = (x.values for x in (call.attention.q, call.attention.k, call.attention.v))
    q_layout, k_layout = call.attention.q.layout, call.attention.k.layout
    longest = max(q_layout.max_length_bound, k_layout.max_length_bound)
    cache = q_layout.pair_cache(k_layout)
    layout = VarlenLayout(q_layout.offsets, k_layout.offsets, cache, longest)
    spec = interface.call_spec(call.attention)
    lse = call.lse.t().contiguous()
    dlse = None if call.dlse is None else call.dlse.t()
    return interface.attention_backward(call.dout, q, k, v, call.out, lse, layout, spec, dlse)
