"""The reductions and maps of rows, and how the states of a reduction are combined.

Every kernel of rows uses these constants and functions. A reduction (`OP`) has a state per row, and
LSE and PROD_AND_ZEROS have a second one, `state2`: the sum of exp, or the number of zeros. A map
(`MAP`) turns each token into a number by the state and the operands of its row.
"""

import triton
import triton.language as tl

# Reductions (OP) of the tokens x, y of a row.
NONE = tl.constexpr(0)
SUM = tl.constexpr(1)
PROD = tl.constexpr(2)
MAX = tl.constexpr(3)
MIN = tl.constexpr(4)
# The states are the maximum m and sum(exp(x - m)).
LSE = tl.constexpr(5)
# sum(x * y)
DOT = tl.constexpr(6)
# sum(y)
SUM_Y = tl.constexpr(7)
# Number of tokens equal to row_a.
COUNT_EQUAL = tl.constexpr(8)
# Position of the first maximum or first NaN; the state is the 64-bit search key.
ARGMAX = tl.constexpr(9)
ARGMIN = tl.constexpr(10)
MEAN = tl.constexpr(11)
# Number of nonzero tokens; the result is `count != 0`.
ANY = tl.constexpr(12)
# The same count; the result is `count == length`.
ALL = tl.constexpr(13)
# The states are the product of the nonzero tokens, and the number of zeros.
PROD_AND_ZEROS = tl.constexpr(14)

# Maps (MAP) of each token x, y. The comment gives the mapped token.
# row_a
BROADCAST = tl.constexpr(1)
# exp(x - state) / state2
SOFTMAX = tl.constexpr(2)
# x - state - log(state2)
LOG_SOFTMAX = tl.constexpr(3)
# exp(x - state) / state2 * row_a
LOGSUMEXP_BACKWARD = tl.constexpr(4)
# x * (y - state)
SOFTMAX_BACKWARD = tl.constexpr(5)
# y - exp(x) * state
LOG_SOFTMAX_BACKWARD = tl.constexpr(6)
# row_b / state if x == row_a else 0
EXTREMUM_BACKWARD = tl.constexpr(7)
# SUM or PROD of the row's tokens up to and including this token.
CUMULATIVE = tl.constexpr(8)
# SUM or PROD of this token and the row's tokens after it.
CUMULATIVE_REVERSE = tl.constexpr(9)
# row_a / length of the row
MEAN_BACKWARD = tl.constexpr(10)
# row_a * product of the row's other tokens
PROD_BACKWARD = tl.constexpr(11)

NO_POSITION = tl.constexpr(0x7FFFFFFF)
# 1 / ln(2)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_or_zero(m):
    """Return m, or 0 if m is infinite, so that x - m is never inf - inf."""
    return tl.where((m == float("inf")) | (m == -float("inf")), 0.0, m)


@triton.jit
def fast_exp(x):
    """Compute exp(x) as one multiplication and the hardware's exp2."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def pack_search_key(x, position, OP: tl.constexpr):
    """Pack x and its position in the row into a 64-bit search key.

    The largest key belongs to the first extremum. NaN is larger than all numbers.
    """
    if x.dtype.is_floating():
        # -0.0 + 0.0 is 0.0, so both zeros have the same key.
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        order = x
    if OP == ARGMIN:
        order = ~order
    if x.dtype.is_floating():
        order = tl.where(x != x, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - position.to(tl.int64))


@triton.jit
def reduce_axis(x, AXIS: tl.constexpr, OP: tl.constexpr):
    """Reduce one axis to length 1."""
    if (OP == PROD) | (OP == PROD_AND_ZEROS):
        x = tl.reduce(x, AXIS, _multiply, keep_dims=True)
    elif OP == MAX:
        x = tl.reduce(x, AXIS, _maximum, keep_dims=True)
    elif OP == MIN:
        x = tl.reduce(x, AXIS, _minimum, keep_dims=True)
    elif (OP == LSE) | (OP == ARGMAX) | (OP == ARGMIN):
        # LSE needs no NaN propagation here: NaN reaches the second state through exp.
        x = tl.max(x, AXIS, keep_dims=True)
    else:
        x = tl.sum(x, AXIS, keep_dims=True)
    return x


@triton.jit
def combine(left, left2, state, state2, OP: tl.constexpr):
    """Combine two states."""
    if OP == LSE:
        m = tl.maximum(left, state)
        finite_max = finite_or_zero(m)
        state2 = left2 * fast_exp(left - finite_max) + state2 * fast_exp(state - finite_max)
        state = m
    elif OP == PROD:
        state *= left
    elif OP == PROD_AND_ZEROS:
        state *= left
        state2 += left2
    elif OP == MAX:
        state = _maximum(left, state)
    elif OP == MIN:
        state = _minimum(left, state)
    elif (OP == ARGMAX) | (OP == ARGMIN):
        state = tl.maximum(left, state)
    else:
        state += left
    return state, state2


@triton.jit
def first_extremum(x, positions, OP: tl.constexpr):
    """Return the extremum along the first axis, or NaN if there is one, and its first position."""
    m = reduce_axis(x, 0, MAX if OP == ARGMAX else MIN)
    return m, tl.min(tl.where((x == m) | (x != x), positions, NO_POSITION), 0, keep_dims=True)


@triton.jit
def initial_states(x, OP: tl.constexpr):
    """Return the two states of each token for LSE and PROD_AND_ZEROS."""
    state2 = 1.0
    if OP == PROD_AND_ZEROS:
        state2 = tl.where(x == 0, 1.0, 0.0).to(x.dtype)
        x = tl.where(x == 0, 1.0, x)
    return x, state2


@triton.jit
def add_tokens(state, state2, x, OP: tl.constexpr):
    """Combine the state of each thread with more of its tokens, along the first axis of x."""
    if OP == LSE:
        m = tl.maximum(state, tl.max(x, 0, keep_dims=True))
        finite_max = finite_or_zero(m)
        state2 = state2 * fast_exp(state - finite_max) + tl.sum(
            fast_exp(x - finite_max), 0, keep_dims=True
        )
        state = m
    elif OP == PROD_AND_ZEROS:
        x, zeros = initial_states(x, OP)
        state, state2 = combine(
            state, state2, reduce_axis(x, 0, OP), reduce_axis(zeros, 0, SUM), OP
        )
    else:
        state, state2 = combine(state, state2, reduce_axis(x, 0, OP), state2, OP)
    return state, state2


@triton.jit
def map_values(x, y, state, state2, row_a, row_b, MAP: tl.constexpr):
    """Map tokens by the state and the operands of their row; scans are not handled here."""
    if MAP == SOFTMAX:
        y = fast_exp(x - state) * (1.0 / state2)
    elif MAP == LOG_SOFTMAX:
        y = x - state - tl.log(tl.where(state2 == 0.0, 1.0, state2))
    elif MAP == LOGSUMEXP_BACKWARD:
        y = fast_exp(x - state) * (row_a / state2)
    elif MAP == SOFTMAX_BACKWARD:
        y = x * (y - state)
    elif MAP == LOG_SOFTMAX_BACKWARD:
        y = y - fast_exp(x) * state
    elif MAP == EXTREMUM_BACKWARD:
        y = tl.where(x == row_a, row_b / state, 0.0)
    elif MAP == PROD_BACKWARD:
        # With exactly one zero only the zero token has a gradient; with more, none.
        y = tl.where(
            x == 0,
            tl.where(state2 == 1, state * row_a, 0.0),
            tl.where(state2 == 0, state * row_a, 0.0) / x,
        )
    else:
        y = row_a + tl.zeros_like(x)
    return y


@triton.jit
def finish_reduction(state, state2, lengths, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """Turn the final state of rows with these lengths into the result."""
    if OP == MEAN:
        state /= lengths.to(state.dtype)
    elif OP == ANY:
        state = state != 0
    elif OP == ALL:
        # Both sides are modulo 2**32.
        state = state == tl.cast(lengths, state.dtype)
    if (OP == ARGMAX) | (OP == ARGMIN):
        state = tl.where(state == IDENTITY, -1, 0xFFFFFFFF - (state & 0xFFFFFFFF))
    if OP == LSE:
        state = tl.where(
            state2 == 0.0,
            -float("inf"),
            finite_or_zero(state) + tl.log(tl.where(state2 == 0.0, 1.0, state2)),
        )
    return state
