"""Loops of the threads of a CTA over rows of wide tokens, for `wide_features`.

A CTA has a block of BC columns. Its G thread groups read U tokens at a time and keep one state per
group and column: each group for a short row of its own, or all groups for one long row, combined at
its end. Tensors have the shape (U, G, BC), or length 1 where one number serves all.
"""

import triton
import triton.language as tl

from .merge_path import (
    ALL,
    ANY,
    ARGMAX,
    ARGMIN,
    DOT,
    EQUAL,
    FACTORS,
    LOG_SOFTMAX,
    LSE,
    MEAN_BACKWARD,
    NONE,
    NOWHERE,
    PROD,
    RUNNING,
    RUNNING_BACK,
    SUM,
    SUM_Y,
    WEIGHTED,
    add_tokens,
    combine,
    fast_exp,
    finish_reduction,
    finite_or_zero,
    first_along,
    map_values,
    pack_search_key,
    reduce_axis,
)


@triton.jit
def identity_state(G: tl.constexpr, BC: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr):
    """Return the reduction of no tokens."""
    return tl.full([1, G, BC], IDENTITY, KEPT), tl.zeros([1, G, BC], KEPT)


@triton.jit
def reduce_threads(us, vs, OP: tl.constexpr):
    """Combine the states of all thread groups."""
    u = reduce_axis(us, 1, OP)
    v = u
    if OP == LSE:
        v = reduce_axis(vs * fast_exp(us - finite_or_zero(u)), 1, SUM)
    elif OP == FACTORS:
        v = reduce_axis(vs, 1, SUM)
    return u, v


@triton.jit
def count_rows_before(u, AXIS: tl.constexpr, OP: tl.constexpr):
    """The running sums or products along an axis."""
    if OP == PROD:
        u = tl.cumprod(u, AXIS)
    else:
        u = tl.cumsum(u, AXIS)
    return u


@triton.jit
def _alone(x, y, a, valid, OP: tl.constexpr, ACC: tl.constexpr, KEPT: tl.constexpr):
    """Reduce each token alone; masked tokens were loaded as the reduction of no tokens, or as 0."""
    if OP == DOT:
        x = x.to(ACC) * y.to(ACC)
    elif OP == SUM_Y:
        x = y.to(ACC)
    elif OP == EQUAL:
        x = ((x.to(ACC) == a) & valid).to(KEPT)
    elif (OP == ANY) | (OP == ALL):
        x = (x.to(ACC) != 0).to(KEPT)
    else:
        x = x.to(ACC)
    return x


@triton.jit
def _further(best, place, x, positions, OP: tl.constexpr):
    """Combine the first extremum of each thread group and its position, 32 bits each, with later
    tokens (U, G, BC).
    """
    m, position = first_along(x, positions, 0, OP)
    better = (m > best) if OP == ARGMAX else (m < best)
    better = better | (place == NOWHERE) | ((m != m) & (best == best))
    return tl.where(better, m, best), tl.where(better, position, place)


@triton.jit
def _elements(tokens, columns, C: tl.constexpr, BC: tl.constexpr):
    """(U, G, BC) where elements are. The hint is for the layout: threads spread over lanes, and
    each has all U of its tokens.
    """
    return tl.max_contiguous(tokens * C + columns, [1, 2, BC])


@triton.jit
def thread_strides(length, shift, G: tl.constexpr, MAP: tl.constexpr):
    """Return per thread group of a row: its first token, its stride, its number of steps, and the
    maximum number of steps.

    In scans a group has a contiguous part of the row, shifted by `shift` groups.
    """
    each = tl.arange(0, G)[None, :, None]
    steps = tl.cdiv(length, G)
    first = each
    hop = G
    counts = (length - each + (G - 1)) // G
    if (MAP == RUNNING) | (MAP == RUNNING_BACK):
        before = (each - shift) * steps
        first = before
        hop = 1
        counts = tl.where(before >= 0, tl.minimum(length - before, steps), 0)
        if MAP == RUNNING_BACK:
            first = length - 1 - before
            hop = -1
    return first, hop, counts, steps


@triton.jit
def reduce_tokens(
    X,
    Y,
    a,
    first,
    hop,
    counts,
    steps,
    zero,
    columns,
    inside,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
    READS: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Reduce the tokens of each thread group, whose rows begin at token `zero`."""
    u, v = identity_state(G, BC, IDENTITY, KEPT)
    SEARCH: tl.constexpr = (OP == ARGMAX) | (OP == ARGMIN)
    # The next tokens are loaded before the current ones are compared. After the last token, loads
    # give `worst`, which no comparison prefers.
    if SEARCH:
        worst = -float("inf") if X.dtype.element_ty.is_floating() else -(1 << 31)
        if OP == ARGMIN:
            worst = float("inf") if X.dtype.element_ty.is_floating() else (1 << 31) - 1
        best = tl.zeros([1, G, BC], ACC)
        place = tl.full([1, G, BC], NOWHERE, tl.int32)
        step = tl.arange(0, U)[:, None, None]
        ahead = tl.load(
            X + _elements(first + step * hop, columns, C, BC),
            mask=(step < counts) & inside,
            other=worst,
        )
    for w in range(0, steps, U):
        step = w + tl.arange(0, U)[:, None, None]
        valid = step < counts
        tokens = first + step * hop
        if SEARCH:
            x = ahead
            at = _elements(first + (step + U) * hop, columns, C, BC)
            ahead = tl.load(X + at, mask=(step + U < counts) & inside, other=worst)
        else:
            at = _elements(tokens, columns, C, BC)
            x = tl.load(X + at, mask=valid & inside, other=IDENTITY)
        y = x
        if READS == 2:
            y = tl.load(Y + at, mask=valid & inside, other=0)
        x = _alone(x, y, a, valid, OP, ACC, KEPT)
        if SEARCH:
            best, place = _further(best, place, x, tokens - zero, OP)
        else:
            u, v = add_tokens(u, v, x, OP)
    if SEARCH:
        u = tl.where(counts > 0, pack_search_key(best, place, OP), IDENTITY)
    return u, v


@triton.jit
def map_row_tokens(
    X,
    Y,
    OUT,
    u,
    v,
    a,
    b,
    first,
    hop,
    counts,
    steps,
    columns,
    inside,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
    READS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the mapped tokens of each thread group; scans continue from u.

    What is read for the last time, and what is written, makes room in the cache first. What was
    read last comes first: it is still there.
    """
    if OP == LSE:
        u = finite_or_zero(u)
        if MAP == LOG_SOFTMAX:
            v = tl.log(tl.where(v == 0.0, 1.0, v))
        elif MAP == WEIGHTED:
            v = a / v
        else:
            v = 1.0 / v
    for done in range(0, steps, U):
        w = done
        if (MAP != RUNNING) & (MAP != RUNNING_BACK):
            w = (steps - 1) // U * U - done
        step = w + tl.arange(0, U)[:, None, None]
        valid = (step < counts) & inside
        at = _elements(first + step * hop, columns, C, BC)
        x = tl.zeros([U, G, BC], ACC)
        if READS > 0:
            x = tl.load(X + at, mask=valid, other=0, eviction_policy="evict_first").to(ACC)
        y = x
        if READS == 2:
            y = tl.load(Y + at, mask=valid, other=0, eviction_policy="evict_first").to(ACC)
        if (MAP == RUNNING) | (MAP == RUNNING_BACK):
            if OP == PROD:
                x = tl.where(valid, x, 1)
            y, _ = combine(u, u, count_rows_before(x, 0, OP), u, OP)
            u, _ = combine(u, u, reduce_axis(x, 0, OP), u, OP)
        elif MAP == LOG_SOFTMAX:
            y = x - u - v
        elif OP == LSE:
            y = fast_exp(x - u) * v
        else:
            y = map_values(x, y, u, v, a, b, MAP)
        tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=valid, cache_modifier=".cs")


@triton.jit
def load_operands(
    A,
    B,
    rows,
    lengths,
    exists,
    columns,
    MAP: tl.constexpr,
    C: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
):
    """The entries of some rows, of these lengths, in a and b."""
    a = tl.zeros([1, 1, 1], ACC)
    b = tl.zeros([1, 1, 1], ACC)
    if HAS_A:
        a = tl.load(A + (tl.cast(rows, tl.int64) * C + columns), mask=exists, other=0).to(ACC)
    if HAS_B:
        b = tl.load(B + (tl.cast(rows, tl.int64) * C + columns), mask=exists, other=0).to(ACC)
    if MAP == MEAN_BACKWARD:
        a /= tl.cast(lengths, ACC)
    return a, b


@triton.jit
def store_result(
    OUT,
    u,
    v,
    rows,
    lengths,
    exists,
    columns,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
):
    result = finish_reduction(u, v, lengths, OP, IDENTITY).to(OUT.dtype.element_ty)
    tl.store(OUT + (tl.cast(rows, tl.int64) * C + columns), result, mask=exists)


@triton.jit
def process_row(
    X,
    Y,
    A,
    B,
    OUT,
    row,
    start,
    length,
    columns,
    inside,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Process one whole row with all thread groups."""
    a, b = load_operands(A, B, row, length, inside, columns, MAP, C, HAS_A, HAS_B, ACC)
    x = X + start * C
    y = Y + start * C
    if (MAP != RUNNING) & (MAP != RUNNING_BACK):
        u, v = identity_state(1, BC, IDENTITY, KEPT)
        if OP != NONE:
            first, hop, counts, steps = thread_strides(length, 0, G, MAP)
            us, vs = reduce_tokens(
                x,
                y,
                a,
                first,
                hop,
                counts,
                steps,
                0,
                columns,
                inside,
                OP,
                IDENTITY,
                C,
                BC,
                G,
                U,
                READS,
                ACC,
                KEPT,
            )
            u, v = reduce_threads(us, vs, OP)
    else:
        first, hop, counts, steps = thread_strides(
            length, 1, G, MAP
        )  # a thread group continues from the parts of the row before its part
        u, v = reduce_tokens(
            x,
            y,
            a,
            first,
            hop,
            counts,
            steps,
            0,
            columns,
            inside,
            OP,
            IDENTITY,
            C,
            BC,
            G,
            U,
            READS,
            ACC,
            KEPT,
        )
        u = count_rows_before(u, 1, OP)
    if MAP == NONE:
        store_result(OUT, u, v, row, length, inside, columns, OP, IDENTITY, C)
    else:
        first, hop, counts, steps = thread_strides(length, 0, G, MAP)
        map_row_tokens(
            x,
            y,
            OUT + start * C,
            u,
            v,
            a,
            b,
            first,
            hop,
            counts,
            steps,
            columns,
            inside,
            OP,
            MAP,
            C,
            BC,
            G,
            U,
            READS,
            ACC,
        )


@triton.jit
def reduce_short_rows(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    row,
    last,
    columns,
    inside,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The whole rows from `row` up to `last`, but at most G: the short ones beside each other, then
    the others one at a time.
    """
    each = row + tl.arange(0, G)
    base = tl.load(OFFSETS + row).to(tl.int64)
    begins = (tl.load(OFFSETS + each, mask=each < last, other=0) - base).to(tl.int32)
    lengths = (tl.load(OFFSETS + each + 1, mask=each < last, other=0) - base).to(tl.int32) - begins
    lengths = tl.where(each < last, lengths, 0)
    longest = tl.max(lengths, 0)
    steps = tl.minimum(longest, 2 * U)
    counts = tl.where(lengths <= 2 * U, lengths, 0)[None, :, None]
    begins = begins[None, :, None]
    rows = each[None, :, None]
    exists = ((each < last) & (lengths <= 2 * U))[None, :, None] & inside
    a, b = load_operands(A, B, rows, counts, exists, columns, MAP, C, HAS_A, HAS_B, ACC)
    x = X + base * C
    y = Y + base * C
    u, v = identity_state(G, BC, IDENTITY, KEPT)
    if (OP != NONE) & (MAP != RUNNING) & (MAP != RUNNING_BACK):
        u, v = reduce_tokens(
            x,
            y,
            a,
            begins,
            1,
            counts,
            steps,
            begins,
            columns,
            inside,
            OP,
            IDENTITY,
            C,
            BC,
            G,
            U,
            READS,
            ACC,
            KEPT,
        )
    if MAP == NONE:
        store_result(OUT, u, v, rows, counts, exists, columns, OP, IDENTITY, C)
    else:
        hop = 1
        first = begins
        if MAP == RUNNING_BACK:
            hop = -1
            first = begins + counts - 1
        map_row_tokens(
            x,
            y,
            OUT + base * C,
            u,
            v,
            a,
            b,
            first,
            hop,
            counts,
            steps,
            columns,
            inside,
            OP,
            MAP,
            C,
            BC,
            G,
            U,
            READS,
            ACC,
        )
    while longest > 2 * U:
        i = tl.argmax(lengths, 0)
        process_row(
            X,
            Y,
            A,
            B,
            OUT,
            row + i,
            tl.load(OFFSETS + row + i).to(tl.int64),
            longest,
            columns,
            inside,
            OP,
            MAP,
            IDENTITY,
            C,
            BC,
            G,
            U,
            READS,
            HAS_A,
            HAS_B,
            ACC,
            KEPT,
        )
        lengths = tl.where(tl.arange(0, G) == i, 0, lengths)
        longest = tl.max(lengths, 0)


@triton.jit
def clear_tail(
    OUT,
    t0,
    t1,
    columns,
    inside,
    C: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
):
    """Write 0 to the tokens [t0, t1)."""
    length = (t1 - t0).to(tl.int32)
    for w in range(0, tl.cdiv(length, G), U):
        tokens = (w + tl.arange(0, U)[:, None, None]) * G + tl.arange(0, G)[None, :, None]
        zeros = tl.zeros([U, G, BC], OUT.dtype.element_ty)
        tl.store(
            OUT + t0 * C + _elements(tokens, columns, C, BC), zeros, mask=(tokens < length) & inside
        )


@triton.jit
def column_block(block, C: tl.constexpr, BC: tl.constexpr):
    """(1, 1, BC) the columns of a block, and which of them exist."""
    columns = block * BC + tl.arange(0, BC)[None, None, :]
    inside = columns < C
    if C % BC == 0:
        inside = tl.full([1, 1, BC], 1, tl.int1)
    return columns, inside
