"""Attention on the CPU by PyTorch's fused kernel: rows of similar length together, each bucket padded by a quarter at most."""

from typing import Any

import array_api_compat.torch as xp
import torch

from ..array import Array
from ..layout import same
from ..ops.attention import AttentionCall
from ..registry import register_kernel


def rejects(call: AttentionCall) -> str | None:
    """Why PyTorch's fused CPU kernel cannot take the call."""
    if call.q.layout.backend.xp is not xp:
        return "the fused kernel takes torch tensors only"
    if call.q.values.device.type != "cpu":
        return "length buckets are for the CPU, where the lengths are read for free"
    if call.q.layout.host is None or not same(call.q.layout, call.k.layout):
        return "length buckets need q and k with the same rows, known on the host"
    if call.return_lse or call.softcap is not None:
        return "the fused kernel has no softcap and gives no log-sum-exp"
    if call.window != (None, 0 if call.causal else None):
        return "the fused kernel has no window"
    if call.v.values.shape[2] != call.head_dim:
        return f"the fused kernel needs value_dim {call.v.values.shape[2]} to be head_dim {call.head_dim}"
    return None


@register_kernel("attention", provider="sdpa", rejects=rejects)
def sdpa(call: AttentionCall) -> Array:
    """`torch.nn.functional.scaled_dot_product_attention` of each bucket."""
    if not call.q.total_length:
        return call.q
    plan, groups = call.q.layout.buckets(), call.num_heads // call.num_kv_heads

    def padded(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.index_select(x, 0, tokens.reshape(-1)).reshape(*tokens.shape, *x.shape[1:]).transpose(1, 2)
        return x if x.shape[1] == call.num_heads else x.repeat_interleave(groups, dim=1)

    outs: list[Any] = []
    for tokens, real in plan.parts:
        mask = None if call.causal or real is None else real[:, None, None, :]  # a causal query sees no padding behind it
        q, k, v = (padded(x.values, tokens) for x in (call.q, call.k, call.v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=call.causal, scale=call.scale
        )
        outs.append(out.transpose(1, 2).reshape(-1, call.num_heads, call.head_dim))
    return call.q.with_values(torch.index_select(torch.cat(outs), 0, plan.slots))
