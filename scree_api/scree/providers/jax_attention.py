"""Attention in JAX, with loops whose number of steps is read at run time.

Forward and backward follow FlashAttention-2 (Dao, 2023). Each tile of queries runs a loop over tiles
of keys of its row, from the first to the last key that its queries see. The gradients of keys and
values come from the same loop with queries and keys exchanged. Only the inputs, the output and the
log-sum-exp are saved for the backward pass.

The work is proportional to the number of visible tiles, under a trace too. No bound on the lengths of
the rows is needed. One compiled function serves all offsets of one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.jax import BACKEND
from ..dispatch.registry import register_kernel
from ..dtypes import accumulation_dtype
from ..layout import Layout
from ..ops.attention import AttentionCall

TILE = 128  # tokens per tile; fewer where a bound on the lengths is lower

Window = tuple[int | None, int | None]


class Blocking(NamedTuple):
    """The division of the work into steps.

    On a CPU, steps that fit into its caches are fast. On an accelerator, few steps with large
    products are fast, because each step starts several kernels and waits for the host.
    """

    step: int
    """Largest number of tokens of the inner loop per step; a multiple of `TILE`."""
    max_scores: int
    """Scores of all heads in memory at a time."""
    narrow: bool
    """True if products take operands in half precision, and only their sums are float32."""


CPU_BLOCKING = Blocking(TILE, 1 << 18, False)
ACCELERATOR_BLOCKING = Blocking(4 * TILE, 1 << 25, True)


class Options(NamedTuple):
    """The static part of a call: JAX compiles one function per value."""

    window: Window
    scale: float
    softcap: float | None
    tile_size: int
    blocking: Blocking = CPU_BLOCKING

    @property
    def step_size(self) -> int:
        """Tokens of the inner loop per step."""
        return self.blocking.step // TILE * self.tile_size


class Operand(NamedTuple):
    """Queries or keys: their layout and the tensors with an entry per token.

    The tensors are (kv_heads, total, groups, dim): the query heads of each key head form a group.
    Keys have groups of one.
    """

    layout: Layout
    tensors: tuple[Any, ...]


def _loop_over_tiles(
    options: Options,
    outer: Operand,
    inner: Operand,
    window: Window,
    init: Callable[..., Any],
    step: Callable[..., Any],
) -> Any:
    """Return the state of each token of `outer` after a loop over the `inner` tokens that it sees.

    The state is a tree of (kv_heads, total, groups, dim) tensors. In `init` and `step` the tensors
    are cut into tiles: (kv_heads, tiles, tile_size, groups, dim).

    Parameters
    ----------
    options
        The sizes of tiles and steps.
    outer, inner
        Queries and keys, or keys and queries.
    window
        (left, right): number of `inner` tokens that are visible before and after a token of
        `outer`. None is unbounded.
    init
        ``init(*outer_tensors)`` returns the initial state.
    step
        ``step(state, visible, outer_tensors, inner_tensors)`` returns the next state. `visible` is
        (tiles, outer tokens, inner tokens).
    """
    tile_size, step_size = options.tile_size, options.step_size
    tiles = outer.layout.tiles(tile_size)
    num_tiles = tiles.rows.shape[0]
    num_heads = max(x.shape[0] * x.shape[2] for x in (*outer.tensors, *inner.tensors))
    max_tiles = max(1, options.blocking.max_scores // (num_heads * tile_size * step_size))
    num_chunks = -(-num_tiles // max_tiles)
    chunk_size = -(-num_tiles // num_chunks)
    row_starts, row_lengths = inner.layout.offsets[:-1], inner.layout.lengths
    shifts = row_lengths - outer.layout.lengths  # the last tokens of both rows are aligned
    in_tile, in_step = jnp.arange(tile_size), jnp.arange(step_size)

    starts, lengths = row_starts[tiles.rows][:, None], row_lengths[tiles.rows][:, None]
    outer_positions = (tiles.starts + shifts[tiles.rows])[:, None] + in_tile
    first, last = _visible_bounds(outer_positions, lengths, window)
    last = jnp.where(tiles.valid, last, -1)
    num_steps = -(-(jnp.max(last, axis=1) + 1 - first[:, 0]) // step_size)
    # All tiles of a chunk run the number of steps that its longest tile needs, so tiles are sorted.
    # Where the last chunk has too few tiles, it repeats the last one.
    order = jnp.argsort(-num_steps)
    rank = jnp.argsort(order)

    def run_chunk(chunk: Any) -> Any:
        tile = order[jnp.minimum(chunk, num_tiles - 1)]
        chunk_first, chunk_last, length, start = (x[tile] for x in (first, last, lengths, starts))
        outer_tensors = [jnp.take(x, tiles.tokens[tile], axis=1) for x in outer.tensors]

        def run_step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            index, state = carry
            positions = chunk_first[:, :1] + index * step_size + in_step
            visible = positions[:, None, :] >= chunk_first[:, :, None]
            visible &= positions[:, None, :] <= chunk_last[:, :, None]
            tokens = inner.layout.clip(start + positions)
            # Tokens after the end of the row have the weight 0, but 0 * NaN is NaN.
            in_row = (positions < length)[..., None, None]
            inner_tensors = [
                jnp.where(in_row, jnp.take(x, tokens, axis=1), 0) for x in inner.tensors
            ]
            return index + 1, step(state, visible, outer_tensors, inner_tensors)

        longest = num_steps[tile[0]]
        carry = jnp.zeros_like(longest), init(*outer_tensors)
        return lax.while_loop(lambda carry: carry[0] < longest, run_step, carry)[1]

    states = lax.map(run_chunk, jnp.arange(num_chunks * chunk_size).reshape(num_chunks, chunk_size))
    slots = outer.layout.tile_slots(tile_size)
    slots = jnp.take(rank, slots // tile_size) * tile_size + slots % tile_size

    def to_tokens(x: Any) -> Any:
        x = jnp.moveaxis(x, 1, 0)
        return jnp.take(x.reshape(x.shape[0], -1, *x.shape[4:]), slots, axis=1)

    return jax.tree.map(to_tokens, states)


def _visible_bounds(positions: Any, length: Any, window: Window) -> tuple[Any, Any]:
    """Return the positions of the first and the last visible token, for tokens at `positions`.

    `length` is the length of the row of the visible tokens.
    """
    left, right = window
    first = jnp.zeros_like(positions)
    first = first if left is None else jnp.maximum(positions - left, first)
    last = length - 1 if right is None else jnp.minimum(positions + right, length - 1)
    return first, last


def _merge_groups(x: Any) -> Any:
    """Reshape (kv_heads, tiles, tokens, groups, dim) to (kv_heads, tiles, tokens * groups, dim)."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _product(x: Any, y: Any) -> Any:
    """Return ``x @ y`` in the accumulation dtype, with operands in the dtype of `y`."""
    wide = accumulation_dtype(jnp, y.dtype)
    return jnp.matmul(x.astype(y.dtype), y, preferred_element_type=wide)


def _matmul(x: Any, y: Any) -> Any:
    """Return ``x @ y`` per key head and tile, with the tokens and groups of `x`."""
    return _product(_merge_groups(x), _merge_groups(y)).reshape(*x.shape[:4], -1)


def _matmul_transposed(x: Any, y: Any) -> Any:
    """Return ``x @ y^T`` per key head and tile, with the tokens and groups of `x`."""
    y = jnp.swapaxes(_merge_groups(y), 2, 3)
    return _product(_merge_groups(x), y).reshape(*x.shape[:4], -1)


def _transposed_matmul(x: Any, y: Any) -> Any:
    """Return ``x^T @ y`` per key head and tile, with groups of one."""
    x = jnp.swapaxes(_merge_groups(x), 2, 3)
    return _product(x, _merge_groups(y))[..., None, :]


def _without_nan(x: Any) -> Any:
    """Return `x` with 0 for NaN.

    A pair that is not visible has the gradient 0, but 0 * NaN is NaN. Visible pairs keep their NaN,
    because their score is NaN.
    """
    return jnp.where(jnp.isnan(x), 0.0, x)


def _weighted_sum(weights: Any, v: Any, visible: Any, is_finite: bool) -> Any:
    """Return ``weights @ v``, where infinite and NaN values reach only queries that see their key.

    `is_finite` is True if all values are finite.
    """
    if is_finite:
        return _matmul(weights, v)
    shown = jnp.broadcast_to(visible[:, :, None, :], weights.shape).astype(v.dtype)

    def sees_any(is_special: Any) -> Any:
        return _matmul(shown, is_special.astype(v.dtype)) > 0

    total = _matmul(weights, jnp.where(jnp.isfinite(v), v, 0.0))
    total += jnp.where(sees_any(v == jnp.inf), jnp.inf, 0.0)
    total += jnp.where(sees_any(v == -jnp.inf), -jnp.inf, 0.0)
    return jnp.where(sees_any(jnp.isnan(v)), jnp.nan, total)


def _scores(options: Options, q: Any, k: Any) -> Any:
    """Return the scores (kv_heads, tiles, queries, groups, keys) before the mask."""
    scores = _matmul_transposed(q, k) * options.scale
    softcap = options.softcap
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


class _OnlineSoftmax(NamedTuple):
    """The softmax over the keys so far."""

    values: Any  # sum of the values, weighted by exp(score - maximum)
    total: Any  # sum of the weights
    maximum: Any  # maximum of the scores


def _attend_tiles(options: Options, queries: Operand, keys: Operand) -> tuple[Any, Any]:
    """Return the output and the log-sum-exp, (kv_heads, total, groups, value_dim) and (..., 1).

    The tensors of `queries` are q; the tensors of `keys` are k and v.
    """
    attend = partial(_attend_values, options, queries, keys)
    is_finite = jnp.all(jnp.isfinite(keys.tensors[1]))
    # One condition around all loops, because on a GPU each condition waits for the host.
    return lax.cond(is_finite, partial(attend, True), partial(attend, False))


def _attend_values(
    options: Options, queries: Operand, keys: Operand, is_finite: bool
) -> tuple[Any, Any]:
    # New layouts, because a layout caches traced arrays, which must not leave this branch.
    queries, keys = (
        Operand(Layout(BACKEND, x.layout.offsets, x.layout.total), x.tensors)
        for x in (queries, keys)
    )
    value_dim = keys.tensors[1].shape[-1]

    def init(q: Any) -> _OnlineSoftmax:
        zeros = jnp.zeros_like(q[..., :1], dtype=accumulation_dtype(jnp, q.dtype))
        values = jnp.broadcast_to(zeros, (*zeros.shape[:-1], value_dim))
        return _OnlineSoftmax(values, zeros, jnp.full_like(zeros, -jnp.inf))

    def step(state: _OnlineSoftmax, visible: Any, outer: Any, inner: Any) -> _OnlineSoftmax:
        (q,), (k, v) = outer, inner
        scores = jnp.where(visible[:, :, None, :], _scores(options, q, k), -jnp.inf)
        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1, keepdims=True))
        # A query that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        base = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        weights, rescale = jnp.exp(scores - base), jnp.exp(state.maximum - base)
        values = state.values * rescale + _weighted_sum(weights, v, visible, is_finite)
        total = state.total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return _OnlineSoftmax(values, total, maximum)

    state = _loop_over_tiles(options, queries, keys, options.window, init, step)
    nonzero = state.total != 0  # True for NaN, which must reach the result
    divisor = jnp.where(nonzero, state.total, 1.0)
    out = jnp.where(nonzero, state.values / divisor, 0.0)
    return out, jnp.where(nonzero, state.maximum + jnp.log(divisor), -jnp.inf)


def _gradients_of_tiles(options: Options, queries: Operand, keys: Operand) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v.

    The tensors of `queries` are q, a finite log-sum-exp, delta and the gradient of the output. The
    tensors of `keys` are k and v. Delta is ``sum(dout * out) - dlse``, as in FlashAttention-2.
    """

    def weights_and_score_grads(visible: Any, outer: Any, inner: Any) -> tuple[Any, Any]:
        """Return both as (kv_heads, tiles, queries, groups, keys)."""
        (q, lse, delta, grad), (k, v) = outer, inner
        scores = _scores(options, q, k)
        weights = jnp.where(visible[:, :, None, :], jnp.exp(scores - lse), 0.0)
        score_grads = weights * (_matmul_transposed(grad, v) - delta)
        # A weight of 0 times NaN is NaN.
        score_grads = jnp.where(visible[:, :, None, :], score_grads, 0.0)
        if options.softcap is not None:
            score_grads = score_grads * (1 - jnp.square(scores / options.softcap))
        return weights, score_grads * options.scale

    def step_of_queries(dq: Any, visible: Any, outer: Any, inner: Any) -> Any:
        _, score_grads = weights_and_score_grads(visible, outer, inner)
        return dq + _matmul(score_grads, _without_nan(inner[0]))

    def step_of_keys(state: Any, visible: Any, outer: Any, inner: Any) -> Any:
        (dk, dv), (q, _, _, grad) = state, inner
        weights, score_grads = weights_and_score_grads(jnp.swapaxes(visible, 1, 2), inner, outer)
        dk = dk + _transposed_matmul(score_grads, _without_nan(q))
        return dk, dv + _transposed_matmul(weights, grad)

    def zeros_like(x: Any) -> Any:
        return jnp.zeros_like(x, dtype=accumulation_dtype(jnp, x.dtype))

    def zeros_like_q(q: Any, *_: Any) -> Any:
        return zeros_like(q)

    def zeros_like_k_and_v(k: Any, v: Any) -> tuple[Any, Any]:
        return zeros_like(k), zeros_like(v)

    left, right = options.window
    dq = _loop_over_tiles(options, queries, keys, (left, right), zeros_like_q, step_of_queries)
    dk, dv = _loop_over_tiles(
        options, keys, queries, (right, left), zeros_like_k_and_v, step_of_keys
    )
    return dq, dk, dv


def _group_heads(x: Any, kv_heads: int, dtype: Any) -> Any:
    """Rearrange (total, heads, dim) to (kv_heads, total, groups, dim)."""
    return jnp.swapaxes(x.astype(dtype).reshape(x.shape[0], kv_heads, -1, x.shape[-1]), 0, 1)


def _ungroup_heads(x: Any, dtype: Any) -> Any:
    """Rearrange (kv_heads, total, groups, dim) to (total, heads, dim)."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1]).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: Options, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any
) -> tuple[Any, Any]:
    """Return the output (total, heads, value_dim) and the log-sum-exp (total, heads)."""
    return forward(options, q, k, v, q_offsets, k_offsets)[0]


def forward(options: Options, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any) -> Any:
    """Run the forward loops.

    Parameters
    ----------
    options
        The static part of the call.
    q, k, v
        (total_q, num_heads, head_dim), (total_k, num_kv_heads, head_dim) and (total_k, num_kv_heads,
        value_dim) floating-point arrays.
    q_offsets, k_offsets
        (n + 1,) integer offsets.

    Returns
    -------
    results
        (total_q, num_heads, value_dim) output in the dtype of q, and (total_q, num_heads)
        log-sum-exp in the accumulation dtype.
    residuals
        The second argument of `backward`.
    """
    queries, keys = _operands(options, q, k, v, q_offsets, k_offsets)
    out, lse = _attend_tiles(options, queries, keys)
    out, lse = _ungroup_heads(out, q.dtype), _ungroup_heads(lse, lse.dtype)
    return (out, lse[..., 0]), (q, k, v, q_offsets, k_offsets, out, lse)


def backward(options: Options, residuals: Any, grads: Any) -> Any:
    """Run the backward loops.

    Parameters
    ----------
    options
        The static part of the call.
    residuals
        (q, k, v, q_offsets, k_offsets, output, log-sum-exp), as `forward` returns them. This
        log-sum-exp is (total_q, num_heads, 1).
    grads
        Gradients of the output and of the log-sum-exp, with the shapes of the results.

    Returns
    -------
    tuple
        The gradients of q, k and v in the dtype of q, and None for both offsets.
    """
    q, k, v, q_offsets, k_offsets, out, lse = residuals
    kv_heads, wide = k.shape[1], lse.dtype
    out_grad, lse_grad = (x.astype(wide) for x in grads)
    delta = jnp.sum(out_grad * out.astype(wide), axis=-1, keepdims=True) - lse_grad[..., None]
    finite_lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    per_query = [_group_heads(x, kv_heads, wide) for x in (finite_lse, delta)]
    queries, keys = _operands(options, q, k, v, q_offsets, k_offsets)
    out_grad = _group_heads(out_grad, kv_heads, queries.tensors[0].dtype)
    queries = queries._replace(tensors=(*queries.tensors, *per_query, out_grad))
    dq, dk, dv = _gradients_of_tiles(options, queries, keys)
    dq, dk, dv = (_ungroup_heads(x, q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, None, None


_attend.defvjp(forward, backward)
_attend = jax.jit(_attend, static_argnums=0)


def _operands(
    options: Options, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any
) -> tuple[Operand, Operand]:
    """Return the operands with the tensors (q,) and (k, v), in the dtype of the products."""
    dtype = q.dtype if options.blocking.narrow else accumulation_dtype(jnp, q.dtype)
    q, k, v = (_group_heads(x, k.shape[1], dtype) for x in (q, k, v))
    q_layout = Layout(BACKEND, q_offsets, int(q.shape[1]))
    k_layout = Layout(BACKEND, k_offsets, int(k.shape[1]))
    return Operand(q_layout, (q,)), Operand(k_layout, (k, v))


def rejects(call: AttentionCall) -> str | None:
    """Return why the loops do not take the call."""
    if call.q.layout.backend is not BACKEND:
        return "the loops take JAX arrays only"
    if call.alibi_slopes is not None:
        return "the loops have no ALiBi"
    if call.dropout:
        return "the loops have no dropout"
    if 0 in (call.q.batch_size, call.q.total_length, call.k.total_length):
        return "the loops need at least one token"
    return None


def make_options(call: AttentionCall) -> Options:
    """Return the static part of a call."""
    bound = max(x.layout.max_length_bound for x in (call.q, call.k))
    # A power of two, so that slightly longer rows reuse the compiled function.
    size = min(TILE, 1 << max(bound - 1, 0).bit_length())
    blocking = CPU_BLOCKING if jax.default_backend() == "cpu" else ACCELERATOR_BLOCKING
    return Options(call.window, call.scale, call.softcap, size, blocking)


@register_kernel("attention", provider="loops", rejects=rejects)
def loops(call: AttentionCall) -> Any:
    """Compute attention with loops over the visible tiles of keys."""
    q, k, options = call.q, call.k, make_options(call)
    out, lse = _attend(options, q.values, k.values, call.v.values, q.offsets, k.offsets)
    return (q.with_values(out), q.with_values(lse)) if call.return_lse else q.with_values(out)
