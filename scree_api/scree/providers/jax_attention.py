"""Attention in JAX, with loops whose number of steps is read at run time.

Forward and backward follow FlashAttention-2 (Dao, 2023). Each tile of queries runs a loop over tiles
of keys of its row, from the first to the last key that its queries see. The gradients come from the
same loop with queries and keys exchanged: a tile of keys keeps the gradients of its keys and values,
and each step adds to the gradients of its queries. Only the inputs, the output and the log-sum-exp
are saved for the backward pass.

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

    On a CPU, steps that fit into its caches are fast. On an accelerator, each step starts about ten
    kernels and waits for the host, so it needs large products. But the scores of a step go through
    memory, so steps that compute many scores that are not visible are slow.
    """

    step: int
    """Largest number of tokens of the inner loop per step; a multiple of `TILE`."""
    min_scores: int
    """Scores of all heads per step, where the batch is small."""
    max_scores: int
    """Largest number of scores of all heads per step."""
    chunks: int
    """Number of chunks of tiles, where `min_scores` and `max_scores` permit it."""
    narrow: bool
    """True if products take operands in half precision, and only their sums are float32."""


CPU_BLOCKING = Blocking(TILE, 1 << 18, 1 << 18, 8, False)
ACCELERATOR_BLOCKING = Blocking(2 * TILE, 1 << 23, 1 << 25, 8, True)


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
    finish: Callable[..., Any],
    sums: tuple[Any, ...] = (),
) -> tuple[Any, tuple[Any, ...]]:
    """Loop over all pairs of a tile of `outer` and a step of `inner` tokens that it sees.

    Return the result of each token of `outer`, a tree of (total, kv_heads * groups, dim) tensors,
    and `sums` with the additions of all steps. Each tile has a state, a tree of tensors. In `step` the
    tensors of a chunk of tiles are (kv_heads, tiles, tile_size, groups, dim). In `init` and `finish`
    an axis of chunks is before them.

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
        ``step(state, visible, outer_tensors, inner_tensors)`` returns the next state, and one
        addition to each of `sums`: (kv_heads, tiles, inner tokens, groups, dim). `visible` is
        (tiles, outer tokens, inner tokens).
    finish
        ``finish(state)`` returns the result.
    sums
        (kv_heads, total, groups, dim) tensors with an entry per `inner` token.
    """
    tile_size, step_size = options.tile_size, options.step_size
    tiles = outer.layout.tiles(tile_size)
    num_tiles = tiles.rows.shape[0]
    num_heads = max(x.shape[0] * x.shape[2] for x in (*outer.tensors, *inner.tensors))
    scores_per_tile = num_heads * tile_size * step_size
    chunk_size = _chunk_size(options.blocking, num_tiles, outer.layout.num_rows, scores_per_tile)
    num_chunks = -(-num_tiles // chunk_size)
    row_starts, row_lengths = inner.layout.offsets[:-1], inner.layout.lengths
    shifts = row_lengths - outer.layout.lengths  # the last tokens of both rows are aligned
    in_tile, in_step = jnp.arange(tile_size), jnp.arange(step_size)

    starts, lengths = row_starts[tiles.rows][:, None], row_lengths[tiles.rows][:, None]
    outer_positions = (tiles.starts + shifts[tiles.rows])[:, None] + in_tile
    first, last = _visible_bounds(outer_positions, lengths, window)
    last = jnp.where(tiles.valid, last, -1)
    num_steps = -(-(jnp.max(last, axis=1) + 1 - first[:, 0]) // step_size)
    # All tiles of a chunk run the number of steps that its longest tile needs, so tiles are sorted.
    order = jnp.argsort(-num_steps)
    slot = jnp.arange(num_chunks * chunk_size)
    tile_of_slot = order[jnp.minimum(slot, num_tiles - 1)]
    steps_of_chunk = jnp.maximum(num_steps[tile_of_slot[::chunk_size]], 0)
    ends = jnp.cumsum(steps_of_chunk)

    def to_chunks(x: Any) -> Any:
        return x[tile_of_slot].reshape(num_chunks, chunk_size, *x.shape[1:])

    def take_tiles(x: Any) -> Any:
        taken = jnp.take(x, to_chunks(tiles.tokens), axis=1)
        return jnp.moveaxis(taken, 0, 1)

    # Slots without a tile see nothing.
    last = jnp.where(slot[:, None] < num_tiles, last[tile_of_slot], -1)
    last = last.reshape(num_chunks, chunk_size, tile_size)
    first, lengths, starts = map(to_chunks, (first, lengths, starts))
    outer_tensors = [take_tiles(x) for x in outer.tensors]

    # One loop over the steps of all chunks, because on a GPU each end of a loop waits for the host.
    def run_step(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, sums = carry
        chunk = jnp.sum(ends <= index)

        def at_chunk(x: Any) -> Any:
            return lax.dynamic_index_in_dim(x, chunk, keepdims=False)

        in_chunk = index - (at_chunk(ends) - at_chunk(steps_of_chunk))
        chunk_first, chunk_last, length, start = map(at_chunk, (first, last, lengths, starts))
        positions = chunk_first[:, :1] + in_chunk * step_size + in_step
        visible = positions[:, None, :] >= chunk_first[:, :, None]
        visible &= positions[:, None, :] <= chunk_last[:, :, None]
        tokens = inner.layout.clip(start + positions)
        # Tokens after the end of the row have the weight 0, but 0 * NaN is NaN.
        in_row = (positions < length)[..., None, None]
        inner_tensors = [jnp.where(in_row, jnp.take(x, tokens, axis=1), 0) for x in inner.tensors]
        chunk_outer = [at_chunk(x) for x in outer_tensors]
        chunk_state, additions = step(
            jax.tree.map(at_chunk, state), visible, chunk_outer, inner_tensors
        )
        state = jax.tree.map(
            lambda x, y: lax.dynamic_update_index_in_dim(x, y, chunk, 0), state, chunk_state
        )
        sums = tuple(
            x.at[jnp.arange(x.shape[0])[:, None, None], tokens].add(
                jnp.where(in_row, y, 0), mode="promise_in_bounds"
            )
            for x, y in zip(sums, additions, strict=True)
        )
        return state, sums

    carry = init(*outer_tensors), sums
    state, sums = lax.fori_loop(0, ends[-1], run_step, carry)
    rank = jnp.argsort(order)
    slots = outer.layout.tile_slots(tile_size)
    slots = jnp.take(rank, slots // tile_size) * tile_size + slots % tile_size

    def to_tokens(x: Any) -> Any:
        x = jnp.moveaxis(x, 1, 3).reshape(-1, x.shape[1] * x.shape[4], x.shape[5])
        return jnp.take(x, slots, axis=0)

    return jax.tree.map(to_tokens, finish(state)), sums


def _chunk_size(blocking: Blocking, num_tiles: int, num_rows: int, scores_per_tile: int) -> int:
    """Return the number of tiles per step.

    Few chunks waste work, because all tiles of a chunk run as many steps as its longest tile. Rows
    of one length have `num_rows` tiles per number of steps. So a chunk has a multiple of `num_rows`
    tiles, or `num_rows` is about a multiple of its tiles.
    """
    least, most = (max(1, x // scores_per_tile) for x in (blocking.min_scores, blocking.max_scores))
    size = min(max(-(-num_tiles // blocking.chunks), least), most)
    size = size // num_rows * num_rows if num_rows <= size else -(-num_rows // -(-num_rows // size))
    return min(size, num_tiles)


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


def _zero_nonfinite(x: Any) -> Any:
    """Return `x` with 0 for NaN and infinite numbers.

    A pair that is not visible has the gradient 0, but 0 * NaN and 0 * inf are NaN. Visible pairs with a
    score of NaN or +inf keep their NaN, because their weight is NaN.
    """
    return jnp.where(jnp.isfinite(x), x, 0.0)


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


def _attend_tiles(options: Options, queries: Operand, keys: Operand, dtype: Any) -> Any:
    """Return the output and the log-sum-exp, (total, heads, value_dim) and (total, heads, 1).

    The tensors of `queries` are q; the tensors of `keys` are k and v. The output has `dtype`.
    """
    attend = partial(_attend_values, options, queries, keys, dtype)
    is_finite = jnp.all(jnp.isfinite(keys.tensors[1]))
    # One condition around all loops, because on a GPU each condition waits for the host.
    return lax.cond(is_finite, partial(attend, True), partial(attend, False))


def _attend_values(
    options: Options, queries: Operand, keys: Operand, dtype: Any, is_finite: bool
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

    def step(
        state: _OnlineSoftmax, visible: Any, outer: Any, inner: Any
    ) -> tuple[_OnlineSoftmax, tuple[()]]:
        (q,), (k, v) = outer, inner
        scores = jnp.where(visible[:, :, None, :], _scores(options, q, k), -jnp.inf)
        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1, keepdims=True))
        # A query that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        base = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        weights, rescale = jnp.exp(scores - base), jnp.exp(state.maximum - base)
        values = state.values * rescale + _weighted_sum(weights, v, visible, is_finite)
        total = state.total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return _OnlineSoftmax(values, total, maximum), ()

    def finish(state: _OnlineSoftmax) -> tuple[Any, Any]:
        nonzero = state.total != 0  # True for NaN, which must reach the result
        divisor = jnp.where(nonzero, state.total, 1.0)
        out = jnp.where(nonzero, state.values / divisor, 0.0).astype(dtype)
        return out, jnp.where(nonzero, state.maximum + jnp.log(divisor), -jnp.inf)

    return _loop_over_tiles(options, queries, keys, options.window, init, step, finish)[0]


def _gradients_of_tiles(
    options: Options, queries: Operand, keys: Operand, dtype: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v, (total, heads, dim) with `dtype`.

    The tensors of `queries` are q, a finite log-sum-exp, delta and the gradient of the output. The
    tensors of `keys` are k and v. Delta is ``sum(dout * out) - dlse``, as in FlashAttention-2.
    """

    def zeros_like(x: Any) -> Any:
        return jnp.zeros_like(x, dtype=accumulation_dtype(jnp, x.dtype))

    def init(k: Any, v: Any) -> tuple[Any, Any]:
        return zeros_like(k), zeros_like(v)

    def step(state: Any, visible: Any, outer: Any, inner: Any) -> tuple[Any, tuple[Any]]:
        # Weights and gradients of the scores are (kv_heads, tiles, queries, groups, keys).
        (dk, dv), (k, v), (q, lse, delta, grad) = state, outer, inner
        visible = jnp.swapaxes(visible, 1, 2)[:, :, None, :]
        scores = _scores(options, q, k)
        weights = jnp.where(visible, jnp.exp(scores - lse), 0.0)
        score_grads = weights * (_matmul_transposed(grad, v) - delta)
        if options.softcap is not None:
            score_grads = score_grads * (1 - jnp.square(scores / options.softcap))
        # A weight of 0 times NaN is NaN, so the mask comes last.
        score_grads = jnp.where(visible, score_grads * options.scale, 0.0)
        dk = dk + _transposed_matmul(score_grads, _zero_nonfinite(q))
        dv = dv + _transposed_matmul(weights, grad)
        return (dk, dv), (_matmul(score_grads, _zero_nonfinite(k)),)

    def finish(state: tuple[Any, Any]) -> tuple[Any, Any]:
        return state[0].astype(dtype), state[1].astype(dtype)

    left, right = options.window
    dq = zeros_like(queries.tensors[0])
    (dk, dv), (dq,) = _loop_over_tiles(
        options, keys, queries, (right, left), init, step, finish, (dq,)
    )
    return _ungroup_heads(dq.astype(dtype)), dk, dv


def _group_heads(x: Any, kv_heads: int, dtype: Any) -> Any:
    """Rearrange (total, heads, dim) to (kv_heads, total, groups, dim)."""
    return jnp.swapaxes(x.astype(dtype).reshape(x.shape[0], kv_heads, -1, x.shape[-1]), 0, 1)


def _ungroup_heads(x: Any) -> Any:
    """Rearrange (kv_heads, total, groups, dim) to (total, heads, dim)."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1])


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
    out, lse = _attend_tiles(options, queries, keys, q.dtype)
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
    dq, dk, dv = _gradients_of_tiles(options, queries, keys, q.dtype)
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
    if call.deterministic and jax.default_backend() == "gpu":
        return "on GPUs the loops add up the gradients of q in no fixed order"
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
