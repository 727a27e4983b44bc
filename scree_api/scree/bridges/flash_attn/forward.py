"""The forward passes of FlashAttention 2, shared by its public functions and the functions in `raw`.

They return the output, the log-sum-exp or None, and the attention weights or None. Only calls with
dropout have weights.
"""

from __future__ import annotations

from typing import Any

import torch

from ...array import Array
from .common import (
    Options,
    attend,
    attend_padded,
    check_ndim,
    check_shape,
    check_unsupported,
    keep_used,
    padded_array,
    ragged_array,
)
from .kvcache import attend_to_cache, make_cache, split_size
from .probabilities import signed_weights

Results = tuple[torch.Tensor, Any, torch.Tensor | None]


def equal_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    return_lse: Any,
    return_weights: Any,
) -> Results:
    """Compute attention of sequences of equal length.

    q is (batch, seqlen_q, num_heads, head_dim). k and v are (batch, seqlen_k, num_kv_heads,
    head_dim). The output has the shape of q, and the log-sum-exp is (batch, num_heads, seqlen_q).
    """
    out, lse = attend_padded(q, k, v, options, return_lse)
    weights = None
    if return_weights and options.dropout:
        weights = signed_weights(padded_array("q", q), padded_array("k", k), options)
    return out, lse, weights


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    options: Options,
    *,
    return_lse: Any,
    return_weights: Any,
    block_table: torch.Tensor | None = None,
    num_splits: int = 0,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> Results:
    """Compute attention of sequences of different lengths, to packed keys or to pages.

    q is (total_q, num_heads, head_dim). k and v are (total_k, num_kv_heads, head_dim), or with
    `block_table` (num_pages, page_size, num_kv_heads, head_dim). The output has the shape of q, and
    the log-sum-exp is (num_heads, total_q).
    """
    check_ndim("q", q, 3, "(total_q, num_heads, head_dim)")
    queries = ragged_array(q, cu_seqlens_q, max_seqlen_q)
    weights = None
    if block_table is not None:
        check_unsupported(
            "attention with block_table", leftpad_k=leftpad_k, dropout_p=options.dropout or None
        )
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        cache = make_cache(
            k, v, queries.batch_size, lengths, table_name="block_table", table=block_table
        )
        out, lse = attend_to_cache(queries, cache, options, split_size=split_size(num_splits))
    else:
        keys, values = packed_keys(k, v, cu_seqlens_k, max_seqlen_k)
        if seqused_k is not None or leftpad_k is not None:
            used = keys.layout.lengths if seqused_k is None else seqused_k
            keys, values = (keep_used("seqused_k", x, used, leftpad_k) for x in (keys, values))
        out, lse = attend(queries, keys, values.values, options, bool(return_lse))
        if return_weights and options.dropout:
            weights = signed_weights(queries, keys, options)
    return out, None if lse is None else lse.T, weights


def packed_keys(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: Any
) -> tuple[Array, Array]:
    """Return the ragged arrays of (total_k, num_kv_heads, head_dim) keys and values."""
    for name, x in (("k", k), ("v", v)):
        check_ndim(name, x, 3, "(total_k, num_kv_heads, head_dim)")
    check_shape("v", v, (*k.shape[:2], v.shape[2]), "as k")
    keys = ragged_array(k, cu_seqlens_k, max_seqlen_k)
    return keys, keys.with_values(v)
