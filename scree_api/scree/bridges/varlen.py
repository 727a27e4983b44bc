"""PyTorch's own function for sequences of different lengths, under its own name: change the import and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from .flash_attn import attend, bounds, refuse


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
    """`torch.nn.attention.varlen.varlen_attn` by `scree.attention`: on any device, with gradients through the log-sum-exp too.

    Parameters
    ----------
    query
        (total_q, num_heads, head_dim).
    key, value
        (total_k, num_kv_heads, head_dim); other heads than `query` only with `enable_gqa`.
    cu_seq_q, cu_seq_k
        (n + 1,) int32 or int64: where the sequences begin and end; None for those of the queries.
    max_q, max_k
        Bounds on the longest sequence of either.
    return_aux
        `AuxRequest`; with ``lse=True`` the log-sum-exp of the scores is returned too.
    scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    window_size
        (left, right), -1 is unbounded; (-1, 0) is causal. The last query and the last key are aligned.
    enable_gqa
        Whether heads of the queries may share heads of the keys.
    seqused_k, block_table, num_splits
        Not supported; only None is taken.

    Returns
    -------
    out or (out, lse)
        (total_q, num_heads, head_dim), and (total_q, num_heads) float32.

    Raises
    ------
    NotImplementedError
        For what is not supported.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.varlen import varlen_attn
    >>> x, cu_seq = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3, window_size=(-1, 0)).shape
    torch.Size([5, 4, 8])
    """
    refuse("varlen_attn", seqused_k=seqused_k, block_table=block_table, num_splits=num_splits)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"key: expected {query.shape[1]} heads as query, got {key.shape[1]}; or give enable_gqa=True"
        )
    lse = return_aux is not None and return_aux.lse
    cu_seq_k = cu_seq_q if cu_seq_k is None else cu_seq_k
    found = attend(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        window=bounds(window_size),
        scale=scale,
        return_lse=lse,
    )
    return found if lse else found[0]
