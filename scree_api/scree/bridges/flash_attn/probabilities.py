"""The dense weights that FlashAttention 2 returns with dropout, for tests."""

from __future__ import annotations

import torch

from ...array import Array
from ...ops.padding import to_padded
from ...ops.philox import KEY_SPAN, kept_pairs
from .common import Options


def block_size_n(
    device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Return the number of keys that share a maximum in `signed_weights`: more than any row has.

    The tests of FlashAttention import it as ``flash_attn.flash_attn_interface._get_block_size_n``.
    """
    return 1 << 30


def signed_weights(q: Array, k: Array, options: Options) -> torch.Tensor:
    """Return the weights of the softmax before their division by the sum, negative where dropped.

    The result has shape (n, num_heads, max_seqlen_q, max_seqlen_k) and the dtype of `q`. Weights of
    pairs that a query does not see are 0. It takes memory for all pairs of tokens, so it is for
    tests that compare dropout with a reference.
    """
    layout, heads = q.layout, q.values.shape[1]
    max_q, max_k = (max(x.layout.max_length_bound, 1) for x in (q, k))
    wide = torch.promote_types(q.values.dtype, torch.float32)
    queries, _ = to_padded(q.with_values(q.values.detach().to(wide)), length=max_q)
    keys, _ = to_padded(k.with_values(k.values.detach().to(wide)), length=max_k)
    keys = keys.repeat_interleave(heads // keys.shape[2], dim=2)
    scale = queries.shape[3] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("bihd,bjhd->bhij", queries * scale, keys)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    len_q, len_k = (x.layout.lengths[:, None, None].long() for x in (q, k))
    in_row, position = (torch.arange(n, device=scores.device) for n in (max_q, max_k))
    diagonal = in_row[None, :, None] + (len_k - len_q)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(wide).reshape(-1, heads, 1, 1)
        scores -= slopes * (diagonal - position).abs()[:, None]
    visible = (position < len_k) & (in_row[None, :, None] < len_q)
    left, right = options.window
    if left is not None:
        visible &= position >= diagonal - left
    if right is not None:
        visible &= position <= diagonal + right
    scores.masked_fill_(~visible[:, None], float("-inf"))
    maximum = scores.amax(dim=3, keepdim=True)
    weights = torch.exp(scores - maximum.masked_fill(maximum == float("-inf"), 0))
    # A weight of 0 has no sign that a comparison sees.
    weights = weights.to(q.values.dtype).clamp(min=torch.finfo(q.values.dtype).smallest_normal)
    kept = kept_pairs(
        layout,
        options.seed,
        options.dropout,
        in_row.expand(layout.num_rows, max_q),
        torch.zeros_like(layout.offsets[:-1]),
        layout.offsets[:-1],
        heads,
        -(-max_k // KEY_SPAN) * KEY_SPAN,
    )
    kept = kept[:, :, :max_k].transpose(2, 3)
    return torch.where(kept, weights, -weights).masked_fill(~visible[:, None], 0)
