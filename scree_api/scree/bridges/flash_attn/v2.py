"""The functions of FlashAttention 2."""

from __future__ import annotations

from typing import Any

import torch

from .common import check_ndim, make_options, pad_result
from .forward import equal_forward, varlen_forward
from .kvcache import attention_with_kvcache, make_cache, split_size

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of equal length, as FlashAttention 2 does.

    It runs on any device and in any floating-point dtype, with gradients.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) tensor.
    k, v
        (batch, seqlen_k, num_kv_heads, head_dim) tensors.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        As in `flash_attn_varlen_func`.
    return_attn_probs
        Whether to return the log-sum-exp of the scores too, and the weights as
        `flash_attn_varlen_func` does.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        (batch, seqlen_q, num_heads, head_dim) output, (batch, num_heads, seqlen_q) float32
        log-sum-exp, and None or the weights.

    Raises
    ------
    ValueError
        If shapes do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_func
    >>> x = torch.ones(2, 5, 4, 8)
    >>> flash_attn_func(x, x, x, causal=True).shape
    torch.Size([2, 5, 4, 8])
    """
    check_ndim("q", q, 4, "(batch, seqlen, num_heads, head_dim)")
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        device=q.device,
        deterministic=deterministic,
    )
    probs = return_attn_probs
    results = equal_forward(q, k, v, options, return_lse=probs, return_weights=probs)
    return results if return_attn_probs else results[0]


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of equal length, with keys and values in one tensor.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) tensor.
    kv
        (batch, seqlen_k, 2, num_kv_heads, head_dim) tensor.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        As `flash_attn_func` returns them.

    Raises
    ------
    ValueError
        If shapes do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.ones(2, 5, 4, 8), torch.ones(2, 7, 2, 4, 8)).shape
    torch.Size([2, 5, 4, 8])
    """
    k, v = unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of equal length, with all inputs in one tensor.

    Parameters
    ----------
    qkv
        (batch, seqlen, 3, num_heads, head_dim) tensor.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        As `flash_attn_func` returns them.

    Raises
    ------
    ValueError
        If shapes do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.ones(2, 5, 3, 4, 8)).shape
    torch.Size([2, 5, 4, 8])
    """
    q, k, v = unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute attention of sequences of different lengths, as FlashAttention 2 does.

    It runs on any device and in any floating-point dtype, with gradients. Numbers may be tensors
    with one element, as in FlashAttention; on a device, reading one waits.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor.
    k, v
        (total_k, num_kv_heads, head_dim) tensors; with `block_table` (num_blocks, page_block_size,
        num_kv_heads, head_dim) caches.
    cu_seqlens_q, cu_seqlens_k
        (n + 1,) int32 or int64 offsets of the sequences. Tokens after the last offset belong to no
        sequence.
    max_seqlen_q, max_seqlen_k
        Bounds on the longest sequence of the queries and of the keys.
    softmax_scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    causal
        Whether a query attends to keys up to its own position only. The last query and the last
        key are aligned.
    window_size
        (left, right): a query attends to ``left`` keys before and ``right`` keys after its
        position; -1 is unbounded.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    alibi_slopes
        (num_heads,) slopes, or (n, num_heads) with one slope per sequence and head: the score
        decreases by the slope times the distance of query and key.
    deterministic
        Whether equal inputs must give equal bits, gradients included. On CUDA only the Triton
        kernels guarantee that, so a call that they reject raises. No effect with `block_table`.
    return_attn_probs
        Whether to return the log-sum-exp of the scores too, and the weights of the softmax. These
        are None without dropout. With it they take memory for all pairs of tokens, and are meant
        for tests: (n, num_heads, max_seqlen_q, max_seqlen_k), relative to the largest weight of the
        query, and negative where dropped.
    block_table
        (n, max_num_blocks) pages of each sequence in the caches, in order. Entries after the pages
        in use may have any value.
    dropout_p
        Probability in [0, 1) with which a weight of the softmax is set to 0; the other weights are
        divided by ``1 - dropout_p``. Each call draws a seed from PyTorch's generator of the device
        of `q`. FlashAttention draws other numbers. Not with `block_table`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        (total_q, num_heads, head_dim) output, (num_heads, total_q) float32 log-sum-exp, and None or
        the weights.

    Raises
    ------
    NotImplementedError
        If an argument is not supported.
    ValueError
        If the offsets, the bounds or the slopes do not fit the tensors.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_varlen_func
    >>> x, cu_seqlens = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
    torch.Size([5, 4, 8])
    """
    check_ndim("q", q, 3, "(total_q, num_heads, head_dim)")
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        device=q.device,
        deterministic=deterministic,
    )
    results = varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options,
        return_lse=return_attn_probs,
        return_weights=return_attn_probs,
        block_table=block_table,
    )
    return results if return_attn_probs else results[0]


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of different lengths, with keys and values in one tensor.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor.
    kv
        (total_k, 2, num_kv_heads, head_dim) tensor.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        As `flash_attn_varlen_func` returns them.

    Raises
    ------
    ValueError
        If shapes, offsets or bounds do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_varlen_kvpacked_func
    >>> q, kv = torch.ones(5, 4, 8), torch.ones(5, 2, 4, 8)
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 3, 3).shape
    torch.Size([5, 4, 8])
    """
    k, v = unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of sequences of different lengths, with all inputs in one tensor.

    Parameters
    ----------
    qkv
        (total, 3, num_heads, head_dim) tensor.
    cu_seqlens
        (n + 1,) int32 or int64 offsets of the sequences.
    max_seqlen
        Bound on the longest sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        As `flash_attn_varlen_func` returns them.

    Raises
    ------
    ValueError
        If shapes, offsets or the bound do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.ones(5, 3, 4, 8), cu_seqlens, 3).shape
    torch.Size([5, 4, 8])
    """
    q, k, v = unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append keys and values to a cache in place, and compute attention of queries to the cache.

    There are no gradients, as in FlashAttention.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) queries, the last tokens of their sequences.
    k_cache, v_cache
        (batch_cache, seqlen_cache, num_kv_heads, head_dim) caches; with `block_table` (num_blocks,
        page_block_size, num_kv_heads, head_dim), with pages of any size.
    k, v
        (batch, seqlen_new, num_kv_heads, head_dim) new tokens, written from position
        `cache_seqlens` on, or None.
    rotary_cos, rotary_sin
        (seqlen_rotary, rotary_dim / 2) tables, only with `k`. The new keys are rotated by their
        positions. So are the queries of causal calls and calls with a window; the queries of other
        calls are all rotated by position `cache_seqlens`.
    cache_seqlens
        Tokens in the cache before the call, a number or (batch,) integers; the whole cache by
        default.
    cache_batch_idx
        (batch,) integers: the sequence of the cache that belongs to each query sequence.
    cache_leftpad
        (batch,) integers: the position of the first token of each sequence in its cache.
    block_table
        (batch, max_num_blocks) pages of each sequence, in order.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_varlen_func`.
    rotary_interleaved
        Pair elements (2i, 2i + 1) of a head instead of (i, i + rotary_dim / 2).
    num_splits
        With 1 the bits of a sequence do not depend on the other sequences. Other numbers have no
        effect.
    return_softmax_lse
        Whether to return the log-sum-exp of the scores too.

    Returns
    -------
    out or (out, softmax_lse)
        (batch, seqlen_q, num_heads, head_dim) output, and (batch, num_heads, seqlen_q) float32
        log-sum-exp.

    Raises
    ------
    ValueError
        If shapes do not fit or arguments exclude each other.
    RuntimeError
        If a sequence is longer than its cache or its pages, as FlashAttention raises it. The check
        needs lengths that the host knows: a number, or a tensor on the CPU. In other calls the
        sequence ends with its pages.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 4, 8)
    >>> new, lengths = torch.ones(2, 1, 4, 8), torch.tensor([3, 0], dtype=torch.int32)
    >>> out = flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=lengths)
    >>> out.shape, k_cache[0, :5, 0, 0]
    (torch.Size([2, 1, 4, 8]), tensor([0., 0., 0., 1., 0.]))
    """
    check_ndim("q", q, 4, "(batch, seqlen_q, num_heads, head_dim)")
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    cache = make_cache(
        k_cache,
        v_cache,
        q.shape[0],
        cache_seqlens,
        table_name="block_table",
        table=block_table,
        batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
    )
    out, lse = attention_with_kvcache(
        q,
        k,
        v,
        cache,
        options,
        table_name="block_table",
        has_lengths=cache_seqlens is not None,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        split_size=split_size(num_splits),
    )
    out, lse = pad_result(out, lse, q)
    return (out, lse) if return_softmax_lse else out


def unpack(name: str, x: torch.Tensor, ndim: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors that are packed along the third axis from the end."""
    form = f"(..., {count}, num_heads, head_dim)"
    check_ndim(name, x, ndim, form)
    if x.shape[-3] != count:
        raise ValueError(f"{name}: expected shape {form}, got {tuple(x.shape)}")
    parts: tuple[torch.Tensor, ...] = x.unbind(-3)
    return parts
