"""FlashAttention's function for sequences of different lengths, under its own name: change the import and nothing else."""

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
    """`flash_attn.flash_attn_varlen_func` by `scree.attention`: on any device, in any floating-point dtype, with gradients.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim).
    k, v
        (total_k, num_kv_heads, head_dim).
    cu_seqlens_q, cu_seqlens_k
        (n + 1,) int32 or int64: where the sequences begin and end.
    max_seqlen_q, max_seqlen_k
        Bounds on the longest sequence of either.
    softmax_scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    causal
        A query sees the keys up to its own position; the last query and the last key are aligned.
    window_size
        (left, right): the keys from ``left`` before to ``right`` behind the query's position; -1 is unbounded.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    alibi_slopes
        (num_heads,): what each position between query and key takes off the score. One slope a head; one for each sequence and
        head, which FlashAttention takes too, raises.
    deterministic
        Equal inputs give equal bits, gradients too. On CUDA only the Triton kernels can, so a call that they reject raises.
    return_attn_probs
        Also return the log-sum-exp of the scores, and None for the probabilities, which are never there.
    dropout_p, block_table
        Not supported; only the defaults are taken.

    Returns
    -------
    out or (out, softmax_lse, None)
        (total_q, num_heads, head_dim), and (num_heads, total_q) float32.

    Raises
    ------
    NotImplementedError
        For what is not supported.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import flash_attn_varlen_func
    >>> x, cu_seqlens = torch.ones(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
    torch.Size([5, 4, 8])
    """
    refuse("flash_attn_varlen_func", dropout_p=dropout_p or None, block_table=block_table)
    out, lse = attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        window=bounds(window_size),
        scale=softmax_scale,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        kernel="triton" if deterministic and q.is_cuda else None,
    )
    return (out, lse.T, None) if return_attn_probs else out


def attend(
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
    """Attention of tensors (total, num_heads, head_dim), and if asked for its log-sum-exp (total_q, num_heads), else None."""
    k_rows = rows_of(k, cu_k, max_k)
    found = attention(
        rows_of(q, cu_q, max_q), k_rows, k_rows.with_values(v), return_lse=return_lse, **options
    )
    return (found[0].values, found[1].values) if return_lse else (found.values, None)


def bounds(window_size: tuple[int, int]) -> tuple[int | None, ...]:
    """A window, for which others write -1 where it has no bound."""
    return tuple(None if bound == -1 else bound for bound in window_size)


def rows_of(values: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | None) -> Array:
    """The array of values and boundaries; the same layout as last time if it is the same tensor, not written to since."""
    if torch.compiler.is_compiling() or cu_seqlens.is_inference():  # no version to tell it by
        return Array(values, cu_seqlens, max_length=max_seqlen)
    return Array.from_layout(
        values, _layout(cu_seqlens, cu_seqlens._version, values.shape[0], max_seqlen)
    )


@lru_cache(maxsize=8)
def _layout(cu_seqlens: torch.Tensor, version: int, total: int, max_seqlen: int | None) -> Layout:
    """What is derived from the boundaries (tiles, the schedule of a kernel) serves every layer of a model."""
    return Array(cu_seqlens.new_empty(()).expand(total), cu_seqlens, max_length=max_seqlen).layout


def refuse(function: str, **given: Any) -> None:
    """Raise for an argument that is not None."""
    for name, x in given.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: {function} of scree does not support it, expected its default, got {x!r:.80}"
            )
