"""The two functions of FlashAttention 2 that engines call, computed by other libraries.

`fa4` runs the package FlashAttention 4. `torch` runs the kernels of FlashAttention 2 in PyTorch. These
take no pages, so the pages are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def peer_functions(peer: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `flash_attn_varlen_func` and `flash_attn_with_kvcache` of "fa4" or "torch"."""
    attend = {"fa4": attend_by_fa4, "torch": attend_by_torch}[peer]

    def varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any = (-1, -1),
        block_table: Any = None, **unused: Any,
    ) -> Any:  # fmt: skip
        used = None if block_table is None else cu_seqlens_k.diff()
        return attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, used,
            softmax_scale, window_size[0],
        )  # fmt: skip

    def kvcache(
        q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, *, cache_seqlens: Any,
        block_table: Any, softmax_scale: float, causal: bool, window_size: Any = (-1, -1),
        **unused: Any,
    ) -> Any:  # fmt: skip
        size = k_cache.shape[1]
        if k is not None:
            position = cache_seqlens.clamp(min=0).long()
            page = block_table.gather(1, (position // size)[:, None])[:, 0].long()
            for pages, new in ((k_cache, k), (v_cache, v)):
                pages.index_put_((page, position % size), new[:, 0])  # page -1 is never read
            cache_seqlens = cache_seqlens + 1
        out = attend(
            q[:, 0], k_cache, v_cache, offsets(q.shape[0], 1, q.device), None, 1,
            block_table.shape[1] * size, block_table, cache_seqlens, softmax_scale, window_size[0],
        )  # fmt: skip
        return out[:, None]

    return varlen, kvcache


def offsets(batch: int, length: int, device: Any) -> Any:
    """Return the offsets of rows of equal length."""
    import torch

    # An array that is allocated in a CUDA graph must not be cached: the graph reuses its memory.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _offsets.__wrapped__(batch, length, device)
    return _offsets(batch, length, device)


@cache
def _offsets(batch: int, length: int, device: Any) -> Any:
    import torch

    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def attend_by_fa4(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, table: Any, used: Any,
    scale: float, left: int,
) -> Any:  # fmt: skip
    """Compute causal attention with FlashAttention 4; with a table, `k` and `v` are pages."""
    from flash_attn.cute import flash_attn_varlen_func

    keys: dict[str, Any] = {"cu_seqlens_k": cu_k, "max_seqlen_k": max_k}
    if table is not None:
        keys = {"page_table": table.clamp(min=0), "seqused_k": used.int()}
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, max_seqlen_q=max_q, softmax_scale=scale, causal=True,
        window_size=(None, None) if left < 0 else (left, 0), **keys,
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def attend_by_torch(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, table: Any, used: Any,
    scale: float, left: int,
) -> Any:  # fmt: skip
    """Compute causal attention with PyTorch's operators, which have no pages: copy them first."""
    import torch

    if table is not None:
        max_k = table.shape[1] * k.shape[1]
        cu_k = offsets(table.shape[0], max_k, q.device)
        k, v = (x[table.clamp(min=0)].reshape(-1, *x.shape[2:]) for x in (k, v))
    if q.is_cuda:
        used = None if used is None else used.int()
        window = {} if left < 0 else {"window_size_left": left, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale, seqused_k=used,
            **window,
        )[0]  # fmt: skip
    rows = []
    for i, (begin, end) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist())):
        length = int(cu_k[i + 1] - cu_k[i]) if used is None else int(used[i])
        row_k, row_v = (x[int(cu_k[i]) : int(cu_k[i]) + length] for x in (k, v))
        positions = torch.arange(length - (end - begin), length)[:, None]
        distance = positions - torch.arange(length)
        mask = (distance >= 0) & ((distance <= left) | (left < 0))
        row = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q[begin:end], row_k, row_v)),
            attn_mask=mask, scale=scale, enable_gqa=True,
        )  # fmt: skip
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)
