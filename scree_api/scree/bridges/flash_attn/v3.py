"""The functions of FlashAttention 3, whose module is `flash_attn_interface`."""

from __future__ import annotations

from typing import Any

import torch

from ...array import Array
from ...ops.merge_attention import merge_attention
from .common import (
    Options,
    attend,
    check_ndim,
    check_shape,
    keep_used,
    make_options,
    pad_result,
    padded_array,
    ragged_array,
    restore_unused,
)
from .kvcache import attend_extended, attention_with_kvcache, make_cache, split_size
from .v2 import unpack

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of equal length, as FlashAttention 3 does.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) tensor.
    k, v
        (batch, seqlen_k, num_kv_heads, head_dim) tensors; `v` may have another head_dim.
    softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, \
softcap, num_splits, pack_gqa, deterministic, sm_margin
        As in `flash_attn_varlen_func`.
    return_attn_probs
        Whether to return the log-sum-exp of the scores too.

    Returns
    -------
    out or (out, softmax_lse)
        (batch, seqlen_q, num_heads, head_dim) output, and (batch, num_heads, seqlen_q) float32
        log-sum-exp.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import flash_attn_func
    >>> x = torch.ones(2, 5, 4, 8)
    >>> flash_attn_func(x, x, x, causal=True, attention_chunk=2).shape
    torch.Size([2, 5, 4, 8])
    """
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
    )
    queries, keys = padded_array("q", q), padded_array("k", k)
    check_ndim("v", v, 4, "(batch, seqlen_k, num_kv_heads, head_dim)")
    check_shape("v", v, (*k.shape[:3], v.shape[3]), "as k")
    descales = q_descale, k_descale, v_descale
    values = v.reshape(-1, *v.shape[2:])
    out, lse = _attend(queries, keys, values, options, qv, descales, bool(return_attn_probs))
    out, lse = pad_result(out, lse, q)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of equal length, with all inputs in one tensor.

    Parameters
    ----------
    qkv
        (batch, seqlen, 3, num_heads, head_dim) tensor, or with `num_heads_q` (batch, seqlen,
        num_heads_q + 2 num_kv_heads, head_dim).
    num_heads_q
        Heads of the queries in a tensor with four axes.
    softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, \
softcap, deterministic, sm_margin, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out or (out, softmax_lse)
        As `flash_attn_func` returns them.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.ones(2, 5, 8, 16), num_heads_q=4).shape
    torch.Size([2, 5, 4, 16])
    """
    if qkv.ndim == 5:
        q, k, v = unpack("qkv", qkv, 5, 3)
    else:
        check_ndim("qkv", qkv, 4, "(batch, seqlen, heads, head_dim)")
        if num_heads_q is None:
            raise ValueError("num_heads_q: expected a number for a qkv with four axes, got None")
        rest = qkv.shape[2] - num_heads_q
        if rest < 2 or rest % 2:
            raise ValueError(
                f"num_heads_q: expected to leave an even number of the {qkv.shape[2]} heads, "
                f"got {num_heads_q}"
            )
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of different lengths, as FlashAttention 3 does.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor.
    k, v
        (total_k, num_kv_heads, head_dim) tensors; `v` may have another head_dim.
    cu_seqlens_q, cu_seqlens_k
        (n + 1,) int32 or int64 offsets of the sequences.
    max_seqlen_q, max_seqlen_k
        Bounds on the longest sequence of the queries and of the keys.
    seqused_q, seqused_k
        (n,) integers: the first tokens of each sequence that are in use; all by default. The
        output of the other queries is 0. The tokens in use are copied.
    softmax_scale
        Factor of the scores; by default ``1 / sqrt(head_dim)``, with `qv` of both dimensions.
    causal
        Whether a query attends to keys up to its own position only. The last query and the last
        key are aligned.
    qv
        (total_q, num_heads, head_dim of v) queries whose product with `v` is added to the scores.
    q_descale, k_descale, v_descale
        (n, num_kv_heads) factors of 8-bit inputs. They are applied in bfloat16, which is also the
        dtype of the result. No effect for other dtypes.
    window_size
        (left, right): a query attends to ``left`` keys before and ``right`` keys after its
        position; -1 is unbounded.
    attention_chunk
        Keys per chunk: a query attends only to keys of its own chunk; 0 for none.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    num_splits, pack_gqa, sm_margin
        Hints for the kernels of FlashAttention. No effect.
    deterministic
        As in `scree.bridges.flash_attn.flash_attn_varlen_func`.
    return_attn_probs
        Whether to return the log-sum-exp of the scores too.

    Returns
    -------
    out or (out, softmax_lse)
        (total_q, num_heads, head_dim) output, and (num_heads, total_q) float32 log-sum-exp.

    Raises
    ------
    ValueError
        If the offsets, the bounds or the shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import flash_attn_varlen_func
    >>> x, cu = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> used = torch.tensor([2, 1], dtype=torch.int32)
    >>> flash_attn_varlen_func(x, x, x, cu, cu, 3, 3, seqused_q=used, seqused_k=used)[:, 0, 0]
    tensor([1., 1., 1., 0., 0.])
    """
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
    )
    check_ndim("q", q, 3, "(total_q, num_heads, head_dim)")
    check_ndim("k", k, 3, "(total_k, num_kv_heads, head_dim)")
    check_ndim("v", v, 3, "(total_k, num_kv_heads, head_dim)")
    queries = ragged_array(q, cu_seqlens_q, max_seqlen_q)
    keys = ragged_array(k, cu_seqlens_k, max_seqlen_k)
    out, lse = attend_used(
        queries,
        keys,
        v,
        options,
        seqused_q,
        seqused_k,
        qv,
        (q_descale, k_descale, v_descale),
        bool(return_attn_probs),
    )
    return (out, lse.T) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append keys and values to a cache in place, and compute attention of queries to the cache.

    There are no gradients, as in FlashAttention.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) queries, or (total_q, num_heads, head_dim) with
        `cu_seqlens_q`.
    k, v
        (batch, seqlen_new, num_kv_heads, head_dim) new tokens, or (total_new, num_kv_heads,
        head_dim) with `cu_seqlens_k_new`, or None.
    page_table
        (batch, max_num_pages) pages of each sequence, in order.
    cu_seqlens_q, cu_seqlens_k_new
        (batch + 1,) offsets of the queries and of the new keys.
    max_seqlen_q
        Bound on the longest sequence of queries; with `cu_seqlens_q`.
    rotary_seqlens
        (batch,) position of the first new token in the rotary tables; `cache_seqlens` by default.
    k_cache, v_cache, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, \
rotary_interleaved
        As in `scree.bridges.flash_attn.flash_attn_with_kvcache`.
    qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, \
softcap
        As in `flash_attn_varlen_func`. With `qv`, `attention_chunk` or an 8-bit dtype the tokens of
        the cache are copied.
    num_splits
        With 1 the bits of a sequence do not depend on the other sequences. Other numbers have no
        effect.
    scheduler_metadata, pack_gqa, sm_margin
        Hints for the kernels of FlashAttention. No effect.
    return_softmax_lse
        Whether to return the log-sum-exp of the scores too.

    Returns
    -------
    out or (out, softmax_lse, None, None)
        Output like `q`, and float32 log-sum-exp (batch, num_heads, seqlen_q), or (num_heads,
        total_q) with `cu_seqlens_q`. The last two are partial results, which scree does not keep.

    Raises
    ------
    ValueError
        If shapes do not fit or arguments exclude each other.
    RuntimeError
        If a sequence is longer than its cache or its pages, where the host knows its length.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import flash_attn_with_kvcache
    >>> pages, table = torch.ones(4, 16, 4, 8), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    >>> lengths = torch.tensor([20, 7], dtype=torch.int32)
    >>> q = torch.ones(2, 1, 4, 8)
    >>> flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, page_table=table).shape
    torch.Size([2, 1, 4, 8])
    """
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attention_chunk=attention_chunk,
    )
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache = make_cache(
        k_cache,
        v_cache,
        batch,
        cache_seqlens,
        table_name="page_table",
        table=page_table,
        batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
    )
    out, lse = attention_with_kvcache(
        q,
        k,
        v,
        cache,
        options,
        table_name="page_table",
        has_lengths=cache_seqlens is not None,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        qv=qv,
        descales=(q_descale, k_descale, v_descale),
        split_size=split_size(num_splits),
    )
    out, lse = pad_result(out, lse, q) if cu_seqlens_q is None else (out, lse.T)
    return (out, lse, None, None) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys into attention over all of them.

    Parameters
    ----------
    out_partial
        (num_splits, ..., num_heads, head_dim) outputs.
    lse_partial
        (num_splits, ..., num_heads) log-sum-exp of each.
    out
        Tensor for the result, or None.
    out_dtype
        Dtype of the result; by default the dtype of `out_partial`.

    Returns
    -------
    out, softmax_lse
        (..., num_heads, head_dim) and (..., num_heads).

    Raises
    ------
    ValueError
        If shapes do not fit or there are no parts.
    TypeError
        If `out` does not have `out_dtype`.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import flash_attn_combine
    >>> parts = torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1, 1)
    >>> out, lse = flash_attn_combine(parts, torch.zeros(2, 1, 1, 1))
    >>> out.item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    if out_partial.ndim < 2 or not out_partial.shape[0]:
        shape = tuple(out_partial.shape)
        raise ValueError(f"out_partial: expected shape (num_splits, ..., head_dim), got {shape}")
    check_shape("lse_partial", lse_partial, out_partial.shape[:-1], "one number per head")
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    result, lse = merge_attention(out_partial.unbind(), lse_partial.unbind())
    if out is None:
        return result.to(dtype), lse
    if out.dtype != dtype:
        raise TypeError(f"out: expected dtype {dtype}, got {out.dtype}")
    check_shape("out", out, result.shape, "as one part")
    return out.copy_(result), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return an empty tensor, as the kernels of scree need no metadata.

    Parameters
    ----------
    cache_seqlens
        (batch_size,) tokens in the cache.
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, qkv_dtype, \
headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal, \
window_size, attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin
        As in FlashAttention 3. No effect.

    Returns
    -------
    Tensor
        (0,) int32 tensor on the device of `cache_seqlens`, for `scheduler_metadata`.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v3 import get_scheduler_metadata
    >>> get_scheduler_metadata(2, 1, 32, 8, 8, 64, torch.tensor([20, 7])).shape
    torch.Size([0])
    """
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def attend_used(
    q: Array,
    k: Array,
    v: torch.Tensor,
    options: Options,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    qv: torch.Tensor | None,
    descales: tuple[Any, Any, Any],
    return_lse: bool,
) -> tuple[torch.Tensor, Any]:
    """Return attention of the tokens in use; the output of other queries is 0, their lse -inf."""
    layout = q.layout
    if seqused_q is not None:
        if qv is not None:
            qv = keep_used(
                "seqused_q", q.with_values(qv.reshape(-1, *qv.shape[-2:])), seqused_q
            ).values
        q = keep_used("seqused_q", q, seqused_q)
    if seqused_k is not None:
        v = keep_used("seqused_k", k.with_values(v), seqused_k).values
        k = keep_used("seqused_k", k, seqused_k)
    out, lse = _attend(q, k, v, options, qv, descales, return_lse)
    if seqused_q is None:
        return out, lse
    lse = None if lse is None else restore_unused(q.with_values(lse), layout, -torch.inf)
    return restore_unused(q.with_values(out), layout, 0.0), lse


def _attend(
    q: Array,
    k: Array,
    v: torch.Tensor,
    options: Options,
    qv: torch.Tensor | None,
    descales: tuple[Any, Any, Any],
    return_lse: bool,
) -> tuple[torch.Tensor, Any]:
    if qv is None and q.dtype.itemsize > 1:
        return attend(q, k, v, options, return_lse)
    return attend_extended(q, k, v, options, qv, descales, return_lse)
