"""Decoding from a paged cache on the CPU by PyTorch's fused attention kernel."""

from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.paged_attention import PagedAttentionCall
from .paged_parts import BUFFER_BYTES, Parts, chunks, decode_parts, rejects_decode


def rejects(call: PagedAttentionCall) -> str | None:
    """Return why PyTorch's fused CPU kernel does not take the call."""
    if call.q.layout.backend is BACKEND and call.q.values.device.type != "cpu":
        return "the fused kernel runs on the CPU only"
    if reason := rejects_decode(call, BACKEND):
        return reason
    head_dim, value_dim = call.k_pages.shape[3], call.v_pages.shape[3]
    if value_dim != head_dim:
        return f"the fused kernel needs value_dim {value_dim} to be head_dim {head_dim}"
    tensors = call.q.values, call.k_pages, call.v_pages
    if any(is_functorch_wrapped_tensor(x) for x in tensors):
        return "the kernel copies into buffers, which torch.func cannot transform"
    if BACKEND.is_forward_mode():
        return "the fused kernel has no derivative in forward mode"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "the kernel copies into buffers, which have no gradient"
    return None


@register_kernel("paged_attention", provider="sdpa", rejects=rejects)
def sdpa(call: PagedAttentionCall) -> Any:
    """Attend to a few parts of rows at a time, and merge the parts of each row."""
    q, kv_heads = call.q.values, call.k_pages.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -float("inf"), dtype=wide)
    parts = decode_parts(call, BACKEND)
    if parts.rows.size:
        queries = torch.from_numpy(np.asarray(call.q.layout.host_offsets, np.int64)[parts.rows])
        grouped = q[queries].unflatten(1, (kv_heads, -1))
        _merge(out, lse, queries, *_attend(call, grouped, parts))
    result = call.q.with_values(out)
    return (result, call.q.with_values(lse)) if call.return_lse else result


def _attend(
    call: PagedAttentionCall, q: torch.Tensor, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the log-sum-exps of the parts, (parts, num_heads, ...)."""
    table = BACKEND.peek(call.page_table.values)
    assert table is not None
    _, size, kv_heads, dim = call.k_pages.shape
    scale = dim**-0.5 if call.scale is None else call.scale
    page_bytes = size * kv_heads * dim * q.element_size()
    # The first part is the longest.
    longest = -(-int(parts.tokens[0]) // size)
    most = min(parts.rows.size * longest, max(longest, BUFFER_BYTES // page_bytes))
    caches = (call.k_pages, call.v_pages)
    buffers = [x.new_empty((most, *x.shape[1:])) for x in caches]
    outs, lses = [], []
    for chunk in chunks(parts, table, size, page_bytes):
        queries = q[chunk.parts]
        pages, mask, keys_and_values = torch.from_numpy(chunk.pages), None, []
        for cache, buffer in zip(caches, buffers):
            tokens = torch.index_select(cache, 0, pages, out=buffer[: pages.numel()])
            if chunk.is_token is not None:
                no_token = torch.from_numpy(np.flatnonzero(~chunk.is_token))
                tokens.view(-1, kv_heads, dim).index_fill_(0, no_token, 0.0)
            keys_and_values.append(tokens.view(len(queries), -1, kv_heads, dim).transpose(1, 2))
        if chunk.is_token is not None:
            bias = np.where(chunk.is_token, 0.0, -np.inf)[:, None, None, :]
            mask = torch.from_numpy(bias).to(q.dtype).expand(-1, 1, q.shape[2], -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, *keys_and_values, 0.0, False, attn_mask=mask, scale=scale
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs).flatten(1, 2), torch.cat(lses).flatten(1, 2)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    part_outs: torch.Tensor,
    part_lses: torch.Tensor,
) -> None:
    """Write the parts of each query, weighted by their sums of exponentials."""
    part_lses = part_lses.to(lse.dtype)
    index = queries[:, None].expand(part_lses.shape)
    maximum = lse.scatter_reduce(0, index, part_lses, "amax")
    # Scores of -inf only give NaN here, as in `attention`.
    weights = torch.exp(part_lses - maximum[queries])
    total = torch.zeros_like(lse).index_add_(0, queries, weights)
    weights = weights / total[queries]
    values = torch.zeros(out.shape, dtype=lse.dtype)
    out.copy_(values.index_add_(0, queries, part_outs.to(lse.dtype) * weights[..., None]))
    lse.copy_(maximum + torch.log(total))
