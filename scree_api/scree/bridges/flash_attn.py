"""Drop-in replacement for `flash_attn.flash_attn_varlen_func`: change the import and nothing else.

The tensors are used in place; nothing is copied. The layout of a ``cu_seqlens`` tensor is cached,
so that all layers of a model share it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..array import Array
from ..layout import Layout
from ..ops.attention import attention


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
    """Compute attention of sequences of different lengths, as FlashAttention does.

    It runs on any device and in any floating-point dtype, with gradients.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor.
    k, v
        (total_k, num_kv_heads, head_dim) tensors.
    cu_seqlens_q, cu_seqlens_k
        (n + 1,) int32 or int64 offsets of the sequences.
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
        (num_heads,) slopes: the score decreases by the slope times the distance of query and key.
        Slopes of shape (n, num_heads), which FlashAttention accepts too, raise.
    deterministic
        Whether equal inputs must give equal bits, gradients included. On CUDA only the Triton
        kernels guarantee that, so a call that they reject raises.
    return_attn_probs
        Whether to return the log-sum-exp of the scores too, and None for the probabilities, which
        are never computed.
    dropout_p, block_table
        Not supported; must have their defaults.

    Returns
    -------
    out or (out, softmax_lse, None)
        (total_q, num_heads, head_dim) output, and (num_heads, total_q) float32 log-sum-exp.

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
    check_unsupported(
        "flash_attn_varlen_func", dropout_p=dropout_p or None, block_table=block_table
    )
    out, lse = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        window=window_bounds(window_size),
        scale=softmax_scale,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        kernel="triton" if deterministic and q.is_cuda else None,
    )
    return (out, lse.T, None) if return_attn_probs else out


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None,
    max_k: int | None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return attention of (total, num_heads, head_dim) tensors, and its log-sum-exp or None.

    The log-sum-exp has shape (total_q, num_heads); it is None unless `return_lse` is set.
    """
    keys = ragged_array(k, cu_k, max_k)
    queries, values = ragged_array(q, cu_q, max_q), keys.with_values(v)
    if not return_lse:
        return attention(queries, keys, values, **options).values, None
    out, lse = attention(queries, keys, values, return_lse=True, **options)
    return out.values, lse.values


def window_bounds(window_size: tuple[int, int]) -> tuple[int | None, ...]:
    """Return the window with None for -1, which FlashAttention writes for an unbounded side."""
    return tuple(None if bound == -1 else bound for bound in window_size)


def ragged_array(values: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | None) -> Array:
    """Return the ragged array of values and offsets.

    Calls with the same `cu_seqlens` tensor share one layout unless the tensor was written to.
    """
    # A cached layout would miss a write: under a compiler and in inference mode a tensor has no
    # version counter.
    if torch.compiler.is_compiling() or cu_seqlens.is_inference():
        return Array(values, cu_seqlens, max_length=max_seqlen)
    layout = _cached_layout(cu_seqlens, cu_seqlens._version, values.shape[0], max_seqlen)
    return Array.from_layout(values, layout)


@lru_cache(maxsize=8)
def _cached_layout(
    cu_seqlens: torch.Tensor, version: int, total: int, max_seqlen: int | None
) -> Layout:
    """Return the layout of the offsets.

    Every layer of a model then uses the same tiles and kernel schedules.
    """
    return Array(cu_seqlens.new_empty(()).expand(total), cu_seqlens, max_length=max_seqlen).layout


def check_unsupported(function: str, **arguments: Any) -> None:
    """Raise `NotImplementedError` for the first argument that is not None."""
    for name, x in arguments.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: {function} of scree does not support it, expected its default, "
                f"got {x!r:.80}"
            )
