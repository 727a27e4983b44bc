"""The rotary position embedding with tables of cosines and sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...array import Array
from ...backends import backend
from ...ops.rope import check_positions, rope
from .common import as_number, check_ndim, check_shape, equal_rows, ragged_array

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first elements of each head by given cosines and sines.

    Parameters
    ----------
    x
        (batch, seqlen, num_heads, head_dim) tensor, or (total, num_heads, head_dim) with
        `cu_seqlens`.
    cos, sin
        (seqlen_rotary, rotary_dim / 2) tables; row i is for position i. Elements after rotary_dim
        stay as they are.
    interleaved
        Pair elements (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    inplace
        Whether to write the result to `x`. The gradient is right even if `x` is a parameter or a
        result of ``unbind``, which PyTorch's own operations refuse to write to.
    seqlen_offsets
        Position of the first token of each sequence: a number or (batch,) integers.
    cu_seqlens
        (batch + 1,) offsets of the sequences.
    max_seqlen
        Bound on the longest sequence; only with `cu_seqlens`.

    Returns
    -------
    out
        Like `x`, with `inplace` in its memory. Products are computed in at least float32. The tables
        have no gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import apply_rotary_emb
    >>> x, angle = torch.ones(1, 2, 1, 2), torch.tensor([[0.0], [torch.pi / 2]])
    >>> apply_rotary_emb(x, angle.cos(), angle.sin())[0, :, 0].round()
    tensor([[ 1.,  1.],
            [-1.,  1.]])
    """
    if cu_seqlens is None:
        check_ndim("x", x, 4, "(batch, seqlen, num_heads, head_dim)")
        layout = equal_rows(x.shape[0], x.shape[1], x)
    else:
        check_ndim("x", x, 3, "(total, num_heads, head_dim)")
        layout = ragged_array(x, cu_seqlens, max_seqlen).layout
    if isinstance(seqlen_offsets, torch.Tensor) and seqlen_offsets.ndim:
        check_shape("seqlen_offsets", seqlen_offsets, (layout.num_rows,), "one per sequence")
        start = seqlen_offsets
    else:
        start = torch.zeros_like(layout.lengths) + seqlen_offsets
    arr = Array.from_layout(x.reshape(-1, *x.shape[-2:]), layout)
    out = rotate(arr, cos, sin, start, interleaved).reshape(x.shape)
    return _write(out, x) if inplace else out


def _write(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `out` in the memory of `x`, with the gradient of `out`."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Write.apply(out, x)
    return x.copy_(out)


class _Write(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is Any here
    """Write a result to the memory of a tensor that autograd does not let an operation change.

    An operation that saved `x` before the write raises in its backward pass: the write counts as a
    change of `x`.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return a view of `x` with the values of `out`."""
        x.copy_(out)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of `out`; `x` has it already through `out`."""
        return grad, None


def rotate(
    arr: Array,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    interleaved: Any,
    by_position: bool = True,
) -> torch.Tensor:
    """Return (total, num_heads, head_dim) values rotated by their positions, from `start` on.

    Unless `by_position`, all tokens of a row are at its first position.
    """
    options = rope_options(cos, sin, interleaved, arr, start, by_position)
    if by_position:
        return rope(arr, start=start, **options).values
    layout, mask = arr.layout, arr.layout.token_mask
    first = layout.per_token(start)
    # Positions of the tail, which have no meaning, may be outside of the table.
    first = first if mask is None else torch.where(mask, first, 0)
    tokens = Array.from_layout(arr.values, equal_rows(layout.total, 1, arr.values))
    return rope(tokens, start=first, **options).values


def rope_options(
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: Any,
    arr: Array,
    start: torch.Tensor,
    by_position: bool = True,
) -> dict[str, Any]:
    """Return the options of `rope` for tables; raise unless they fit rows that begin at `start`."""
    check_ndim("rotary_cos", cos, 2, "(seqlen_rotary, rotary_dim / 2)")
    check_shape("rotary_sin", sin, cos.shape, "as rotary_cos")
    half, head_dim, host = cos.shape[1], arr.values.shape[-1], arr.layout.host_offsets
    if not 0 < 2 * half <= head_dim:
        raise ValueError(
            f"rotary_cos: expected 1 to {head_dim // 2} columns, half of head_dim, got {half}"
        )
    lengths = None if host is None else np.diff(host)
    if lengths is not None and not by_position:
        lengths = np.minimum(lengths, 1)
    check_positions("rotary_cos", cos, lengths, backend(start).peek(start))
    # FlashAttention gives the tables no gradient.
    tables = {"cos": cos.detach(), "sin": sin.detach()}
    return {**tables, "interleaved": bool(as_number(interleaved))}
