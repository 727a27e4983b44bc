"""Drop-in replacement for `torch.nn.attention.varlen`: change the import and nothing else.

The tensors are used in place; nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from .flash_attn.common import (
    Options,
    attend,
    check_ndim,
    check_shape,
    keep_used,
    ragged_array,
    window_bounds,
)
from .flash_attn.kvcache import as_cache, attend_to_cache, make_cache, split_size

__all__ = ["varlen_attn", "varlen_attn_out"]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Compute attention of sequences of different lengths, as `varlen_attn` of PyTorch does.

    It runs on any device, and gradients flow through the log-sum-exp too.

    Parameters
    ----------
    query
        (total_q, num_heads, head_dim) tensor.
    key, value
        (total_k, num_kv_heads, head_dim) tensors; with `block_table` (num_pages, page_size,
        num_kv_heads, head_dim), with pages of any size. The number of heads may differ from `query`
        only with `enable_gqa`.
    cu_seq_q, cu_seq_k
        (n + 1,) int32 or int64 offsets of the sequences. None for `cu_seq_k` means `cu_seq_q`. With
        `block_table` only `cu_seq_q` is used.
    max_q, max_k
        Bounds on the longest sequence of the queries and of the keys.
    return_aux
        `AuxRequest`; with ``lse=True`` the log-sum-exp of the scores is returned too.
    scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    window_size
        (left, right); -1 is unbounded, and (-1, 0) is causal. The last query and the last key are
        aligned.
    enable_gqa
        Whether several query heads may share one key head.
    seqused_k
        (n,) keys in use of each sequence, its first ones; all by default.
    block_table
        (n, max_num_pages) pages of each sequence, in order. It needs `seqused_k`, and no tensor may
        need a gradient.
    num_splits
        With 1 and no gradients the bits of a sequence do not depend on the other sequences. Other
        numbers have no effect.

    Returns
    -------
    out or (out, lse)
        (total_q, num_heads, head_dim) output, and (total_q, num_heads) float32 log-sum-exp.

    Raises
    ------
    ValueError
        If the numbers of heads differ without `enable_gqa`, shapes or offsets do not fit, or
        `block_table` comes without `seqused_k` or with a tensor that needs a gradient.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.varlen import varlen_attn
    >>> x, cu_seq = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3, window_size=(-1, 0)).shape
    torch.Size([5, 4, 8])
    """
    head_axis = 1 if block_table is None else 2
    form = "(total, num_heads, head_dim)"
    paged_form = "(num_pages, page_size, num_kv_heads, head_dim)"
    check_ndim("query", query, 3, form)
    for name, x in (("key", key), ("value", value)):
        check_ndim(name, x, head_axis + 2, form if block_table is None else paged_form)
    if query.shape[1] != key.shape[head_axis] and not enable_gqa:
        raise ValueError(
            f"key: expected {query.shape[1]} heads as query, got {key.shape[head_axis]}; "
            "or pass enable_gqa=True"
        )
    options = Options(window=window_bounds(window_size), scale=scale)
    queries = ragged_array(query, cu_seq_q, max_q)
    return_lse = return_aux is not None and return_aux.lse
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("seqused_k: expected (n,) lengths with block_table, got None")
        if needs_grad:
            raise ValueError(
                "block_table: expected tensors that need no gradient, as the pages get none; "
                "use torch.no_grad() or packed keys"
            )
        size = queries.batch_size
        cache = make_cache(key, value, size, seqused_k, table_name="block_table", table=block_table)
        out, lse = attend_to_cache(queries, cache, options, split_size=split_size(num_splits))
        return (out, lse) if return_lse else out
    cu_seq_k, max_k = (cu_seq_q, max_q) if cu_seq_k is None else (cu_seq_k, max_k)
    keys = ragged_array(key, cu_seq_k, max_k)
    check_shape("value", value, (*key.shape[:2], value.shape[2]), "as key")
    if seqused_k is not None:
        check_shape("seqused_k", seqused_k, (keys.batch_size,), "one length per sequence")
    if not needs_grad and (seqused_k is not None or split_size(num_splits) is not None):
        cache = as_cache(keys, value, seqused_k)
        out, lse = attend_to_cache(queries, cache, options, split_size=split_size(num_splits))
    else:
        values = keys.with_values(value)
        if seqused_k is not None:
            keys, values = (keep_used("seqused_k", x, seqused_k) for x in (keys, values))
        out, lse = attend(queries, keys, values.values, options, return_lse)
    return (out, lse) if return_lse else out


def varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Compute `varlen_attn` and write its output into `out`, without gradients.

    Parameters
    ----------
    out
        (total_q, num_heads, head_dim) tensor for the output.
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, enable_gqa, \
seqused_k, block_table, num_splits
        As in `varlen_attn`.

    Returns
    -------
    out or (out, lse)
        `out` itself, and (total_q, num_heads) float32 log-sum-exp.

    Raises
    ------
    ValueError
        If `out` does not have the shape of the output, and as in `varlen_attn`.
    TypeError
        If `out` does not have the dtype of `query`.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.varlen import varlen_attn_out
    >>> x, cu_seq = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> out = torch.empty(5, 4, 8)
    >>> varlen_attn_out(out, x, x, x, cu_seq, cu_seq, 3, 3) is out
    True
    """
    check_ndim("query", query, 3, "(total, num_heads, head_dim)")
    check_shape("out", out, (*query.shape[:2], value.shape[-1]), "as the output")
    if out.dtype != query.dtype:
        raise TypeError(f"out: expected dtype {query.dtype} as query, got {out.dtype}")
    with torch.no_grad():
        result, lse = varlen_attn(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            return_aux=_WithLse,
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
        )
        out.copy_(result)
    return (out, lse) if return_aux is not None and return_aux.lse else out


class _WithLse:
    """The `AuxRequest` of a call that needs the log-sum-exp."""

    lse = True
