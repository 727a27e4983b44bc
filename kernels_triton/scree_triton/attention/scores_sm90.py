"""Scores of a tile on Hopper: block ranges, masks, softcap, ALiBi and row sums.

Constants select what a kernel computes.

CAUSAL
    A query attends keys up to its own position; both rows are aligned at their ends.
WINDOW
    A query attends `window_left` keys before and `window_right` keys after its own position.
ALIBI
    The head's slope times the distance between query and key is subtracted from each score.
SOFTCAP
    Scores are softcap * tanh(scores / softcap). Then `scale` makes the argument of the tanh, and
    `softcap` includes the factor log2(e); otherwise `scale` includes that factor.

MERGED
    A tile holds one or more adjacent rows of self-attention in full. Each query attends keys of its
    own row only, and no number that is not finite reaches another row.

Without WINDOW, the loops over blocks are split by whether a block needs a mask. With WINDOW, one
loop tests each block, which takes fewer registers. ALIBI and SOFTCAP are compiled only together
with WINDOW, to compile fewer variants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ..sm90.pipeline import as_matrix, as_wide_matrix, columns_layout, wait_mma
from .constants import LN2, LOG2E


# --- Block ranges
@gluon.jit
def get_n_block_max(
    start_m,
    seqlen_q,
    seqlen_k,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return the end of a query tile's key blocks.

    It is at least 1, so that a tile without valid keys takes the common path.
    """
    end = seqlen_k
    if CAUSAL or WINDOW:
        end = gl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q + window_right)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def get_n_block_min(
    start_m,
    seqlen_q,
    seqlen_k,
    window_left,
    n_block_max,
    BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return the first key block that a query tile attends: 0 without a window."""
    if WINDOW:
        return gl.minimum(
            gl.maximum(start_m + seqlen_k - seqlen_q - window_left, 0) // BLOCK_N, n_block_max - 1
        )
    else:
        return 0


@gluon.jit
def get_key_limits(
    first_diagonal,
    diagonal,
    seqlen_k,
    window_right,
    max_blocks,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return the last key of each query, and the number of key blocks that need no causal mask.

    `diagonal` holds the key position aligned with each query, `first_diagonal` the one of the first
    query. The unmasked blocks, at most `max_blocks`, end before the last key of the first query.
    """
    if CAUSAL or WINDOW:
        return gl.minimum(diagonal + window_right, seqlen_k - 1), gl.minimum(
            gl.maximum(gl.minimum(first_diagonal + window_right + 1, seqlen_k), 0) // BLOCK_N,
            max_blocks,
        )
    else:
        return diagonal * 0 + (seqlen_k - 1), gl.minimum(seqlen_k // BLOCK_N, max_blocks)


@gluon.jit
def get_m_block_min_max(
    start_n,
    seqlen_k,
    seqlen_q,
    window_left,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return the range of query blocks that attend the keys of a tile from `start_n` on."""
    m_block_min = 0
    end = seqlen_q
    if CAUSAL or WINDOW:
        m_block_min = gl.maximum(start_n + seqlen_q - seqlen_k - window_right, 0) // BLOCK_M
    if WINDOW:
        end = gl.minimum(seqlen_q, start_n + BLOCK_N + seqlen_q - seqlen_k + window_left)
    return m_block_min, gl.maximum(gl.cdiv(end, BLOCK_M), m_block_min)


# --- Scores
@gluon.jit
def mask_scores(scores, last_key, diagonal, window_left, offs_n, WINDOW: gl.constexpr):
    """Set scores to -inf after each query's last key and, with a window, before its first key."""
    scores = gl.where(last_key[:, None] >= offs_n[None, :], scores, -float("inf"))
    if WINDOW:
        scores = gl.where(
            (diagonal - window_left)[:, None] <= offs_n[None, :], scores, -float("inf")
        )
    return scores


@gluon.jit
def apply_softcap(scores, scale, softcap, SOFTCAP: gl.constexpr, EXACT: gl.constexpr = False):
    """Return the scores, or with SOFTCAP their tanh, and the factor that makes them exp2 arguments.

    Unless EXACT, the tanh is the hardware's, with an error of 2^-11: the error of a score in half
    precision.
    """
    if not SOFTCAP:
        return scores, scale
    elif EXACT:
        return 1.0 - 2.0 / (gl.exp2(scores * (scale * (2.0 * LOG2E))) + 1.0), softcap
    else:
        return gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [scores * scale], gl.float32, True, 1
        ), softcap


@gluon.jit
def apply_alibi(scores, factor, slope, diagonal, offs, ALIBI: gl.constexpr):
    """Subtract slope times the distance of the rows' and columns' tokens.

    Returns the scores, and the factor that remains to be applied to them.
    """
    if ALIBI:
        distance = gl.abs(diagonal.to(gl.float32)[:, None] - offs.to(gl.float32)[None, :])
        return scores * factor - slope * distance, 1.0
    else:
        return scores, factor


@gluon.jit
def score_derivative(scale, softcap, SOFTCAP: gl.constexpr):
    """Return d(exp2 argument)/d(q·k) * ln(2), excluding the derivative of the tanh."""
    if SOFTCAP:
        return scale * softcap * LN2
    else:
        return scale * LN2


@gluon.jit
def partial_row_sums(p):
    """Sum rows, but not over the eight columns of a quad of threads, so loops need no shuffles."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


# --- Tiles of several rows
@gluon.jit
def is_between(offs, first, end):
    """Return a matrix of which tokens `offs` are in the range of each row."""
    return (offs[None, :] >= first[:, None]) & (offs[None, :] < end[:, None])


@gluon.jit
def find_infinite_tokens(ring, slot, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Return 1 for the tokens in a slot of a ring that have a number that is not finite, else 0."""
    LAYOUT_RING: gl.constexpr = columns_layout(ring.shape[len(ring.shape) - 1])
    TOKENS: gl.constexpr = ring.shape[3]
    found = gl.zeros([TOKENS], gl.int32, gl.SliceLayout(1, LAYOUT_RING))
    for n in gl.static_range(PARTS):
        x = as_matrix(ring.index(slot * PARTS + n)).load(LAYOUT_RING)
        is_finite = gl.abs(x.to(gl.float32)) < float("inf")
        found = gl.maximum(found, gl.max(gl.where(is_finite, 0, 1), 1))
    return gl.convert_layout(found, LAYOUT)


@gluon.jit
def zero_tokens(ring, slot, is_zeroed, PARTS: gl.constexpr):
    """Set tokens in a slot of a ring to 0."""
    LAYOUT: gl.constexpr = columns_layout(ring.shape[len(ring.shape) - 1])
    is_zeroed = gl.convert_layout(is_zeroed, gl.SliceLayout(1, LAYOUT))[:, None] > 0
    for n in gl.static_range(PARTS):
        tile = as_matrix(ring.index(slot * PARTS + n))
        x = tile.load(LAYOUT)
        tile.store(gl.where(is_zeroed, 0.0, x).to(x.dtype))
    fence_async_shared()


@gluon.jit
def _recompute(acc, keeps, weights, ring, part):
    """Return the rows of acc with `keeps`, and the other rows of weights @ b."""
    LAYOUT: gl.constexpr = acc.type.layout
    zeros = gl.zeros(acc.shape, gl.float32, LAYOUT)
    b = as_wide_matrix(ring, part, acc.shape[1])
    finite = wait_mma(0, (warpgroup_mma(weights, b, zeros, is_async=True),), weights)
    is_kept = gl.convert_layout(keeps, gl.SliceLayout(1, LAYOUT))[:, None] > 0
    return gl.where(is_kept, acc, finite[0])


@gluon.jit
def isolate_rows(acc, weights, ring, slot, first, end, offs, PARTS: gl.constexpr):
    """Recompute weights @ b where a number of b that is not finite reached the results of other rows.

    b is in a slot of a ring, and is changed there. A weight of 0 does not suffice, as 0 * inf is
    NaN. Rows that have such a number themselves keep their results.
    """
    nan_count = 0
    for n in gl.static_range(len(acc)):
        nan_count += gl.max(gl.max((acc[n] != acc[n]).to(gl.int32), 1), 0)
    if nan_count > 0:
        LAYOUT_OFFS: gl.constexpr = offs.type.layout
        not_finite = find_infinite_tokens(ring, slot, LAYOUT_OFFS, PARTS)
        zero_tokens(ring, slot, not_finite, PARTS)
        keeps = gl.max(gl.where(is_between(offs, first, end), not_finite[None, :], 0), 1)
        STEP: gl.constexpr = acc[0].shape[1] // ring.shape[len(ring.shape) - 1]
        selected = ()
        for n in gl.static_range(len(acc)):
            selected += (_recompute(acc[n], keeps, weights, ring, slot * PARTS + n * STEP),)
        acc = selected
    return acc
