"""Drop-in replacement for `torch.nn.attention.varlen`: change the import and nothing else.

The tensors are used in place; nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from .flash_attn import check_unsupported, varlen_attention, window_bounds


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
        (total_k, num_kv_heads, head_dim) tensors. The number of heads may differ from `query` only
        with `enable_gqa`.
    cu_seq_q, cu_seq_k
        (n + 1,) int32 or int64 offsets of the sequences. None for `cu_seq_k` means `cu_seq_q`.
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
    seqused_k, block_table, num_splits
        Not supported; must be None.

    Returns
    -------
    out or (out, lse)
        (total_q, num_heads, head_dim) output, and (total_q, num_heads) float32 log-sum-exp.

    Raises
    ------
    NotImplementedError
        If an argument is not supported.
    ValueError
        If the numbers of heads differ without `enable_gqa`, or the offsets do not fit the tensors.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.varlen import varlen_attn
    >>> x, cu_seq = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3, window_size=(-1, 0)).shape
    torch.Size([5, 4, 8])
    """
    check_unsupported(
        "varlen_attn", seqused_k=seqused_k, block_table=block_table, num_splits=num_splits
    )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"key: expected {query.shape[1]} heads as query, got {key.shape[1]}; "
            "or pass enable_gqa=True"
        )
    return_lse = return_aux is not None and return_aux.lse
    cu_seq_k = cu_seq_q if cu_seq_k is None else cu_seq_k
    out, lse = varlen_attention(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        window=window_bounds(window_size),
        scale=scale,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out
