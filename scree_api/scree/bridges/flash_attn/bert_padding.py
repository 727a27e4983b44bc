"""The functions of `flash_attn.bert_padding`: conversions between padded and packed batches."""

from __future__ import annotations

from typing import Any

import torch

from .common import check_shape

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor at the given indices, with a gradient.

    Parameters
    ----------
    input
        (size, ...) tensor with at least two axes.
    indices
        (count,) integers.

    Returns
    -------
    Tensor
        (count, ...).

    Raises
    ------
    ValueError
        If `input` has fewer than two axes or `indices` not one.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import index_first_axis
    >>> index_first_axis(torch.eye(3), torch.tensor([2, 0]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if input.ndim < 2:
        raise ValueError(f"input: expected at least two axes, got shape {tuple(input.shape)}")
    if indices.ndim != 1:
        raise ValueError(f"indices: expected one axis, got shape {tuple(indices.shape)}")
    return input.index_select(0, indices)


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Return a tensor of zeros with the given rows at the given indices, with a gradient.

    Parameters
    ----------
    values
        (count, ...) tensor with at least two axes.
    indices
        (count,) integers, each at most once.
    first_axis_dim
        Rows of the result.

    Returns
    -------
    Tensor
        (first_axis_dim, ...).

    Raises
    ------
    ValueError
        If `values` has fewer than two axes or the shape of `indices` does not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import index_put_first_axis
    >>> index_put_first_axis(torch.ones(1, 2), torch.tensor([1]), 3)
    tensor([[0., 0.],
            [1., 1.],
            [0., 0.]])
    """
    if values.ndim < 2:
        raise ValueError(f"values: expected at least two axes, got shape {tuple(values.shape)}")
    check_shape("indices", indices, values.shape[:1], "one index per row of values")
    out = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return out.index_copy(0, indices, values)


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the tokens of a padded batch that the masks select, and their layout.

    The number of tokens depends on the mask, so the function waits for the device.

    Parameters
    ----------
    hidden_states
        (batch, seqlen, ...) tensor.
    attention_mask
        (batch, seqlen) booleans or integers, nonzero for tokens.
    unused_mask
        (batch, seqlen) mask of places that are kept too but hold no tokens, or None. The places
        of a row follow its tokens.

    Returns
    -------
    hidden_states
        (total, ...) tokens.
    indices
        (total,) position of each token in the flattened batch.
    cu_seqlens
        (batch + 1,) int32 offsets of the sequences.
    max_seqlen
        Length of the longest sequence, a Python integer.
    seqused
        (batch,) int32 tokens per sequence, without the unused places.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import unpad_input
    >>> x, mask = torch.arange(6.0).reshape(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    >>> tokens[:, 0], indices, max_seqlen
    (tensor([0., 1., 3.]), tensor([0, 1, 3]), 2)
    >>> cu_seqlens.tolist(), seqused.tolist()
    ([0, 2, 3], [2, 1])
    """
    if hidden_states.ndim < 2:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states: expected shape (batch, seqlen, ...), got {shape}")
    check_shape("attention_mask", attention_mask, hidden_states.shape[:2], "as hidden_states")
    kept = attention_mask
    if unused_mask is not None:
        check_shape("unused_mask", unused_mask, hidden_states.shape[:2], "as hidden_states")
        kept = attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, longest, used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return a padded batch with the given tokens at the given positions, and 0 elsewhere.

    Parameters
    ----------
    hidden_states
        (total, ...) tokens.
    indices
        (total,) position of each token in the flattened batch, as `unpad_input` returns them.
    batch, seqlen
        The first two sizes of the result.

    Returns
    -------
    Tensor
        (batch, seqlen, ...).

    Raises
    ------
    ValueError
        If the shape of `indices` does not fit.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import pad_input
    >>> pad_input(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3]), 2, 3)[..., 0]
    tensor([[1., 2., 0.],
            [3., 0., 0.]])
    """
    check_shape("indices", indices, hidden_states.shape[:1], "one index per token")
    out: Any = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded: torch.Tensor = out.index_copy(0, indices, hidden_states)
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])
