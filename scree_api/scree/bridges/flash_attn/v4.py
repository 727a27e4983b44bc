"""The functions of FlashAttention 4, whose module is `flash_attn.cute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...array import Array
from .common import (
    check_ndim,
    check_shape,
    check_unsupported,
    make_options,
    pad_result,
    padded_array,
    ragged_array,
)
from .kvcache import attend_to_cache, make_cache, split_size
from .v3 import attend_used, flash_attn_combine

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of sequences of equal length, as FlashAttention 4 does.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) tensor.
    k, v
        (batch, seqlen_k, num_kv_heads, head_dim) tensors; `v` may have another head_dim.
    qv, gather_kv_indices, softmax_scale, causal, window_size, learnable_sink, softcap, \
num_splits, pack_gqa, deterministic, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, \
block_sparse_tensors, block_sparse_tensors_bwd, return_lse
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out, lse
        (batch, seqlen_q, num_heads, head_dim) output, and (batch, num_heads, seqlen_q) float32
        log-sum-exp or None.

    Raises
    ------
    NotImplementedError
        If an argument is not supported.
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v4 import flash_attn_func
    >>> x = torch.ones(2, 5, 4, 8)
    >>> out, lse = flash_attn_func(x, x, x, learnable_sink=torch.zeros(4))
    >>> out.shape, lse
    (torch.Size([2, 5, 4, 8]), None)
    """
    return flash_attn_varlen_func(
        q,
        k,
        v,
        qv,
        gather_kv_indices=gather_kv_indices,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        deterministic=deterministic,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=(
            block_sparse_tensors_bwd if block_sparse_tensors is None else block_sparse_tensors
        ),
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        return_lse=return_lse,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of sequences of different lengths, as FlashAttention 4 does.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor with `cu_seqlens_q`, else (batch, seqlen_q, num_heads,
        head_dim).
    k, v
        (total_k, num_kv_heads, head_dim) tensors with `cu_seqlens_k`, else (batch, seqlen_k,
        num_kv_heads, head_dim); with `page_table` (num_pages, page_size, num_kv_heads, head_dim).
    qv
        Queries like `q`, with the head_dim of `v`, whose product with `v` is added to the scores.
    cu_seqlens_q, cu_seqlens_k
        (batch + 1,) offsets of the sequences, or None for sequences of equal length.
    max_seqlen_q, max_seqlen_k
        Bounds on the longest sequence, or None for none.
    seqused_q, seqused_k
        (batch,) integers: the first tokens of each sequence that are in use; all by default. The
        output of the other queries is 0. `page_table` needs `seqused_k`.
    page_table
        (batch, max_num_pages) pages of each sequence, in order.
    softmax_scale, causal, softcap, deterministic
        As in `scree.bridges.flash_attn.v3.flash_attn_varlen_func`.
    window_size
        (left, right): a query attends to ``left`` keys before and ``right`` keys after its
        position; None is unbounded.
    learnable_sink
        (num_heads,): an extra key per head with this score and the value 0. It has a gradient.
    return_lse
        Whether to return the log-sum-exp of the scores too.
    num_splits
        With 1 and a `page_table` the bits of a sequence do not depend on the other sequences.
        Other numbers have no effect.
    min_seqlen_k, pack_gqa, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata
        Hints for the kernels of FlashAttention. No effect.
    gather_kv_indices, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, aux_tensors, \
aux_scalars
        Not supported; must be None. Use ``torch.nn.attention.flex_attention`` for them.

    Returns
    -------
    out, lse
        Output like `q`, and float32 log-sum-exp (num_heads, total_q) or (batch, num_heads,
        seqlen_q), or None.

    Raises
    ------
    NotImplementedError
        If an argument is not supported.
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn.v4 import flash_attn_varlen_func
    >>> x, cu = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(x, x, x, None, cu, cu, 3, 3, causal=True)[0].shape
    torch.Size([5, 4, 8])
    """
    check_unsupported(
        "FlashAttention 4",
        "use torch.nn.attention.flex_attention",
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors or None,
        aux_scalars=aux_scalars or None,
    )
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        learnable_sink=learnable_sink,
        deterministic=deterministic,
    )
    queries = _as_array("q", q, cu_seqlens_q, max_seqlen_q)
    if page_table is None:
        keys = _as_array("k", k, cu_seqlens_k, max_seqlen_k)
        check_shape("v", v, (*k.shape[:-1], v.shape[-1]), "as k")
        values = v.reshape(-1, *v.shape[-2:])
        no_descales = None, None, None
        arguments = (queries, keys, values, options, seqused_q, seqused_k, qv, no_descales)
        out, lse = attend_used(*arguments, bool(return_lse))
    else:
        check_unsupported("FlashAttention 4 with page_table", seqused_q=seqused_q)
        if seqused_k is None:
            raise ValueError("seqused_k: expected (batch,) lengths with page_table, got None")
        batch = queries.batch_size
        cache = make_cache(k, v, batch, seqused_k, table_name="page_table", table=page_table)
        out, lse = attend_to_cache(queries, cache, options, qv, split_size=split_size(num_splits))
    if cu_seqlens_q is None:
        return pad_result(out, lse if return_lse else None, q)
    return out, lse.T if return_lse else None


def _as_array(name: str, x: torch.Tensor, cu_seqlens: Any, max_seqlen: Any) -> Array:
    if cu_seqlens is None:
        return padded_array(name, x)
    check_ndim(name, x, 3, "(total, num_heads, head_dim)")
    return ragged_array(x, cu_seqlens, max_seqlen)
