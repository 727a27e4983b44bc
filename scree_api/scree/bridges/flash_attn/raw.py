"""The functions of FlashAttention 2.8 that take the log-sum-exp explicitly.

Libraries of ring attention import them from ``flash_attn.flash_attn_interface``. A forward pass
returns the log-sum-exp, and a backward pass takes the output and the log-sum-exp of all keys. So a
program can attend to one block of keys after the other, on several devices.

They are plain functions with the signatures of FlashAttention, not operators. The names begin with
an underscore as there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...array import Array
from .common import (
    Options,
    attend,
    check_ndim,
    check_shape,
    make_options,
    padded_array,
    ragged_array,
)
from .forward import equal_forward, packed_keys, varlen_forward

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]

#: FlashAttention rounds the length of a sequence in `softmax_d` up to a multiple of this number.
TILE = 128


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of sequences of equal length, without gradients.

    Parameters
    ----------
    q
        (batch, seqlen_q, num_heads, head_dim) tensor.
    k, v
        (batch, seqlen_k, num_kv_heads, head_dim) tensors.
    dropout_p, softmax_scale, causal, softcap, alibi_slopes
        As in `flash_attn_varlen_func`.
    window_size_left, window_size_right
        Keys that a query sees on each side of its own position; -1 is unbounded.
    return_softmax
        Whether to return the weights, with dropout only.

    Returns
    -------
    out, softmax_lse, S_dmask, rng_state
        (batch, seqlen_q, num_heads, head_dim) output, (batch, num_heads, seqlen_q) float32
        log-sum-exp, the weights of `flash_attn_func` or an empty tensor, and (2,) int64 with the
        seed of dropout.

    Raises
    ------
    ValueError
        If shapes do not fit, or `dropout_p` is not in [0, 1).

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import raw
    >>> x = torch.ones(2, 5, 4, 16)
    >>> raw._flash_attn_forward(x, x, x, 0.0, 0.25, True, -1, -1, 0.0, None, False)[1].shape
    torch.Size([2, 4, 5])
    """
    options = _make_options(
        q, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes,
    )  # fmt: skip
    with torch.no_grad():
        results = equal_forward(q, k, v, options, return_lse=True, return_weights=return_softmax)
    return _forward_results(q, options, *results)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of sequences of different lengths, without gradients.

    Parameters
    ----------
    q
        (total_q, num_heads, head_dim) tensor.
    k, v
        (total_k, num_kv_heads, head_dim) tensors, or with `block_table` pages as in
        `flash_attn_varlen_func`.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table
        As in `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, \
return_softmax
        As in `_flash_attn_forward`.
    leftpad_k
        (n,) integers: the position of the first key of each sequence. Not with `block_table`.
    seqused_k
        (n,) keys in use of each sequence, its first ones, counted with `leftpad_k`; all by default.
    zero_tensors
        Has no effect: the results have no unwritten elements.
    num_splits
        0 or 1. With 1 and `block_table` the bits of a sequence do not depend on the other
        sequences.

    Returns
    -------
    out, softmax_lse, S_dmask, rng_state
        As `_flash_attn_forward` returns them, with (num_heads, total_q) log-sum-exp.

    Raises
    ------
    ValueError
        If shapes, offsets or bounds do not fit, or `dropout_p` is not in [0, 1).
    NotImplementedError
        For `leftpad_k` or dropout with `block_table`.
    RuntimeError
        If `num_splits` is larger than 1, with `block_table`.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import raw
    >>> x, cu_seqlens = torch.ones(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> out, lse, _, _ = raw._flash_attn_varlen_forward(
    ...     x, x, x, cu_seqlens, cu_seqlens, 3, 3, 0.0, 0.25, True
    ... )
    >>> lse.shape
    torch.Size([4, 5])
    """
    if block_table is not None and num_splits > 1:  # the type of FlashAttention's error
        raise RuntimeError(
            "num_splits: num_splits > 1 is not supported with block_table, expected 0 or 1, "
            f"got {num_splits}"
        )
    options = _make_options(
        q, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes,
    )  # fmt: skip
    with torch.no_grad():
        results = varlen_forward(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            options,
            return_lse=True,
            return_weights=return_softmax,
            block_table=block_table,
            num_splits=num_splits,
            leftpad_k=leftpad_k,
            seqused_k=seqused_k,
        )
    return _forward_results(q, options, *results)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the gradients of `_flash_attn_forward`, and write them into `dq`, `dk` and `dv`.

    The pass computes the scores with a forward pass of its own. The weights are relative to
    `softmax_lse`, which may count more keys than `k` has.

    Parameters
    ----------
    dout
        (batch, seqlen_q, num_heads, head_dim) gradient of the output.
    q, k, v
        As in `_flash_attn_forward`.
    out, softmax_lse
        (batch, seqlen_q, num_heads, head_dim) output, and (batch, num_heads, seqlen_q) log-sum-exp.
    dq, dk, dv
        Tensors with the shapes of `q`, `k` and `v`, of any strides, or None.
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
        As in `_flash_attn_forward`.
    deterministic
        Whether equal inputs must give equal bits.
    rng_state
        The last result of the forward pass, only with dropout.

    Returns
    -------
    softmax_d
        (batch, num_heads, seqlen_q rounded up to a multiple of 128) float32 sums of ``dout * out``.

    Raises
    ------
    ValueError
        If shapes do not fit, or `rng_state` is missing in a call with dropout.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import raw
    >>> x, options = torch.ones(2, 5, 4, 16), (0.0, 0.25, True, -1, -1, 0.0, None)
    >>> out, lse, _, _ = raw._flash_attn_forward(x, x, x, *options, False)
    >>> dq, dk, dv = (torch.empty_like(x) for _ in range(3))
    >>> raw._flash_attn_backward(out, x, x, x, out, lse, dq, dk, dv, *options, False).shape
    torch.Size([2, 4, 128])
    >>> dv.sum().round()
    tensor(640.)
    """
    options = _make_options(
        q, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    _check_state(dropout_p, rng_state)
    queries, keys, values = (padded_array(name, x) for name, x in zip("qkv", (q, k, v)))
    for name, x in (("dout", dout), ("out", out)):
        check_shape(name, x, (*q.shape[:3], v.shape[3]), "as the output")
    batch, length, heads = q.shape[:3]
    check_shape("softmax_lse", softmax_lse, (batch, heads, length), "(batch, num_heads, seqlen_q)")
    dout, out, lse = (x.reshape(-1, *x.shape[2:]) for x in (dout, out, softmax_lse.mT))
    gradients, sums = _gradients(queries, keys, values.values, dout, out, lse, options)
    _write(gradients, (dq, dk, dv), (q, k, v))
    softmax_d = sums.new_zeros((batch, heads, -(-length // TILE) * TILE))
    softmax_d[:, :, :length] = sums.reshape(batch, length, heads).transpose(1, 2)
    return softmax_d


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Compute the gradients of `_flash_attn_varlen_forward`, and write them into the tensors given.

    Parameters
    ----------
    dout, out
        (total_q, num_heads, head_dim) gradient of the output, and the output.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `_flash_attn_varlen_forward`, without pages.
    softmax_lse
        (num_heads, total_q) log-sum-exp.
    dq, dk, dv
        Tensors with the shapes of `q`, `k` and `v`, of any strides, or None.
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, \
deterministic, rng_state
        As in `_flash_attn_backward`.
    zero_tensors
        Has no effect.

    Returns
    -------
    softmax_d
        (num_heads, total_q + 128 n) float32 sums of ``dout * out``. Sequence i begins at
        ``cu_seqlens_q[i] + 128 i``.

    Raises
    ------
    ValueError
        If shapes, offsets or bounds do not fit, or `rng_state` is missing in a call with dropout.

    Examples
    --------
    >>> import torch
    >>> from scree.bridges.flash_attn import raw
    >>> x, cu_seqlens = torch.ones(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> rows, options = (cu_seqlens, cu_seqlens, 3, 3), (0.0, 0.25, True, -1, -1, 0.0, None)
    >>> out, lse, _, _ = raw._flash_attn_varlen_forward(x, x, x, *rows, *options)
    >>> dv = torch.empty_like(x)
    >>> arrays = out, x, x, x, out, lse, None, None, dv
    >>> raw._flash_attn_varlen_backward(*arrays, *rows, *options, False).shape
    torch.Size([4, 261])
    >>> dv.sum().round()
    tensor(320.)
    """
    check_ndim("q", q, 3, "(total_q, num_heads, head_dim)")
    options = _make_options(
        q, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    _check_state(dropout_p, rng_state)
    queries = ragged_array(q, cu_seqlens_q, max_seqlen_q)
    keys, values = packed_keys(k, v, cu_seqlens_k, max_seqlen_k)
    for name, x in (("dout", dout), ("out", out)):
        check_shape(name, x, (*q.shape[:2], v.shape[2]), "as the output")
    heads, total = q.shape[1], q.shape[0]
    check_shape("softmax_lse", softmax_lse, (heads, total), "(num_heads, total_q)")
    gradients, sums = _gradients(queries, keys, values.values, dout, out, softmax_lse.T, options)
    _write(gradients, (dq, dk, dv), (q, k, v))
    layout = queries.layout
    softmax_d = sums.new_zeros((heads, total + TILE * layout.num_rows))
    token = torch.arange(total, device=q.device) + TILE * layout.clipped_segment_ids
    softmax_d[:, token] = sums.T
    return softmax_d


def _make_options(
    q: torch.Tensor,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: tuple[Any, Any],
    softcap: Any,
    alibi_slopes: torch.Tensor | None,
    deterministic: Any = False,
    rng_state: torch.Tensor | None = None,
) -> Options:
    """Return the options. The seed of dropout is from `rng_state`; without it, a new one."""
    options = make_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=0.0 if rng_state is not None else dropout_p,
        device=q.device,
        deterministic=deterministic,
    )
    if rng_state is None or not dropout_p:
        return options
    check_shape("rng_state", rng_state, (2,), "as the forward pass returns it")
    return replace(options, dropout=float(dropout_p), seed=rng_state[:1])


def _check_state(dropout_p: Any, rng_state: torch.Tensor | None) -> None:
    if dropout_p and rng_state is None:
        raise ValueError("rng_state: expected the last result of the forward pass, got None")


def _forward_results(
    q: torch.Tensor,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of a forward pass and the state of the random generator, as tensors."""
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options.seed is not None:
        rng_state[:1] = options.seed
    return out, lse.contiguous(), q.new_empty(0) if weights is None else weights, rng_state


def _gradients(
    q: Array,
    k: Array,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the gradients of q, k and v, and the sums of ``dout * out`` (total_q, num_heads).

    `out` and `lse`, (total_q, num_heads), may be results for more keys than these. Let o and l be the
    output and the log-sum-exp of these keys alone, and ``w = exp(l - lse)``. The weight of a key
    among all keys is w times its weight among these. So attention to these keys has the same
    gradients, if o gets the gradient ``w * dout`` and l gets ``w * (dout * o - dout * out).sum()``.
    """
    leaves = [x.detach().requires_grad_() for x in (q.values, k.values, v)]
    with torch.enable_grad():
        queries, keys = q.with_values(leaves[0]), k.with_values(leaves[1])
        part, part_lse = attend(queries, keys, leaves[2], options, True)
    wide = part_lse.dtype
    weight = torch.exp(part_lse.detach() - lse.to(wide))
    weight = torch.where(part_lse.detach() == -torch.inf, 0, weight)
    sums = (dout.to(wide) * out.to(wide)).sum(-1)
    dpart = (dout.to(wide) * weight[..., None]).to(part.dtype)
    dlse = (dpart.to(wide) * part.detach().to(wide)).sum(-1) - weight * sums
    return torch.autograd.grad((part, part_lse), leaves, (dpart, dlse)), sums


def _write(
    gradients: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor | None, ...],
    like: tuple[torch.Tensor, ...],
) -> None:
    for name, gradient, target, x in zip(("dq", "dk", "dv"), gradients, targets, like, strict=True):
        if target is not None:
            check_shape(name, target, x.shape, f"as {name[1]}")
            target.copy_(gradient.reshape(x.shape))
