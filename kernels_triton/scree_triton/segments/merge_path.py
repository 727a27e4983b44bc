"""Merge-path reduction of rows of single numbers, and maps of the result over their tokens, for any
skew.

Rows and tokens form one list: row b comes right before its tokens, at position ``offsets[b] + b``.
The list is cut into partitions of equal length, one per CTA (Merrill and Garland, Merge-based
parallel sparse matrix-vector multiplication, 2016). So neither one long row nor a million empty
rows keep one CTA busy alone. A row belongs to the CTA of the partition in which it begins, which
reads it once. Short rows are next to each other in a tile of G rows and W tokens; the threads of a
warp share few rows, so most of a reduction stays inside a thread. A row longer than W is read in
several steps, and again from the cache where its tokens are mapped. Rows too long for one CTA are
cut into parts. The parts are reduced, combined in a fixed order and visited again, in one launch:
the CTAs of second visits have higher numbers than the CTAs that they wait for. Equal inputs give
equal bits.

Values have the shape (total,). The tail is written as 0.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.launch import Number, Pointer, launch_args

# What is reduced over the tokens of a row; x and y are the values, a an operand with one entry a
# row.
NONE = tl.constexpr(0)
SUM = tl.constexpr(1)
PROD = tl.constexpr(2)
MAX = tl.constexpr(3)
MIN = tl.constexpr(4)
LSE = tl.constexpr(5)  # two numbers: the maximum m and sum(exp(x - m))
DOT = tl.constexpr(6)  # sum(x * y)
SUM_Y = tl.constexpr(7)  # sum(y)
EQUAL = tl.constexpr(8)  # how many x are a
ARGMAX = tl.constexpr(
    9
)  # where the first maximum is, or the first NaN; the number that is kept orders x and place
ARGMIN = tl.constexpr(10)
MEAN = tl.constexpr(11)
ANY = tl.constexpr(12)  # how many x are not 0, which is kept as whether there is one
ALL = tl.constexpr(13)  # the same, kept as whether that is all of them
FACTORS = tl.constexpr(14)  # two numbers: the PROD of the x that are not 0, and how many are

# What each token becomes; u, v are what its row reduced to, a and b operands with one entry a row.
COPY = tl.constexpr(1)  # a
SOFTMAX = tl.constexpr(2)  # exp(x - u) / v
LOG_SOFTMAX = tl.constexpr(3)  # x - u - log(v)
WEIGHTED = tl.constexpr(4)  # exp(x - u) / v * a
SOFTMAX_BACKWARD = tl.constexpr(5)  # x * (y - u)
LOG_SOFTMAX_BACKWARD = tl.constexpr(6)  # y - exp(x) * u
PICK = tl.constexpr(7)  # b / u where x is a, else 0
RUNNING = tl.constexpr(8)  # the SUM or PROD of the tokens up to it
RUNNING_BACK = tl.constexpr(9)  # that of it and the tokens behind it
MEAN_BACKWARD = tl.constexpr(10)  # a divided by the number of tokens
PROD_BACKWARD = tl.constexpr(11)  # a times the product of the others

NOWHERE = tl.constexpr(0x7FFFFFFF)  # no place in a row


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _less(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_or_zero(m):
    """A maximum that may be subtracted: 0 where it is infinite."""
    return tl.where((m == float("inf")) | (m == -float("inf")), 0.0, m)


@triton.jit
def fast_exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def pack_search_key(x, place, OP: tl.constexpr):
    """One 64-bit number for x and its place in the row: the greatest is the first extremum."""
    if x.dtype.is_floating():
        bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        order = x
    if OP == ARGMIN:
        order = ~order
    if x.dtype.is_floating():
        order = tl.where(x != x, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))


@triton.jit
def reduce_axis(x, AXIS: tl.constexpr, OP: tl.constexpr):
    """Reduce one axis to length 1."""
    if (OP == PROD) | (OP == FACTORS):
        x = tl.reduce(x, AXIS, _times, keep_dims=True)
    elif OP == MAX:
        x = tl.reduce(x, AXIS, _greater, keep_dims=True)
    elif OP == MIN:
        x = tl.reduce(x, AXIS, _less, keep_dims=True)
    elif (OP == LSE) | (OP == ARGMAX) | (OP == ARGMIN):
        x = tl.max(x, AXIS, keep_dims=True)
    else:
        x = tl.sum(x, AXIS, keep_dims=True)
    return x


@triton.jit
def _gather(us, vs, OP: tl.constexpr):
    """Reduce many results, (K, G, L), to one, (1, G, 1); a result of LSE or FACTORS has two
    numbers.
    """
    u = reduce_axis(reduce_axis(us, 0, OP), 2, OP)
    v = tl.zeros_like(u)
    if OP == LSE:
        v = reduce_axis(reduce_axis(vs * fast_exp(us - finite_or_zero(u)), 0, SUM), 2, SUM)
    elif OP == FACTORS:
        v = reduce_axis(reduce_axis(vs, 0, SUM), 2, SUM)
    return u, v


@triton.jit
def combine(u0, v0, u, v, OP: tl.constexpr):
    """One result of two."""
    if OP == LSE:
        m = tl.maximum(u0, u)
        low = finite_or_zero(m)
        v = v0 * fast_exp(u0 - low) + v * fast_exp(u - low)
        u = m
    elif OP == PROD:
        u *= u0
    elif OP == FACTORS:
        u *= u0
        v += v0
    elif OP == MAX:
        u = _greater(u0, u)
    elif OP == MIN:
        u = _less(u0, u)
    elif (OP == ARGMAX) | (OP == ARGMIN):
        u = tl.maximum(u0, u)
    else:
        u += u0
    return u, v


@triton.jit
def first_along(x, positions, AXIS: tl.constexpr, OP: tl.constexpr):
    """Return the extremum along an axis, or NaN if there is one, and its first position."""
    m = reduce_axis(x, AXIS, MAX if OP == ARGMAX else MIN)
    return m, tl.min(tl.where((x == m) | (x != x), positions, NOWHERE), AXIS, keep_dims=True)


@triton.jit
def _alone(x, y, a, valid, at, step, OP: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr):
    """Reduce each token alone; searches reduce the tokens of a thread, `step` tokens after position
    `at` of their rows.
    """
    if (OP == ARGMAX) | (OP == ARGMIN):
        m, offset = first_along(x, tl.where(valid, step, NOWHERE), 0, OP)
        x = tl.where(offset == NOWHERE, IDENTITY, pack_search_key(m, at + offset, OP))
    elif OP == DOT:
        x *= y
    elif OP == SUM_Y:
        x = y
    elif OP == EQUAL:
        x = (valid & (x == a)).to(KEPT)
    elif (OP == ANY) | (OP == ALL):
        x = (x != 0).to(KEPT)
    return x


@triton.jit
def _numbers(x, OP: tl.constexpr):
    """The two numbers of one token, of LSE and FACTORS."""
    v = 1.0
    if OP == FACTORS:
        v = tl.where(x == 0, 1.0, 0.0).to(x.dtype)
        x = tl.where(x == 0, 1.0, x)
    return x, v


@triton.jit
def add_tokens(u, v, x, OP: tl.constexpr):
    """Combine the state of threads with more of their tokens along the first axis."""
    if OP == LSE:
        m = tl.maximum(u, tl.max(x, 0, keep_dims=True))
        low = finite_or_zero(m)
        v = v * fast_exp(u - low) + tl.sum(fast_exp(x - low), 0, keep_dims=True)
        u = m
    elif OP == FACTORS:
        x, zeros = _numbers(x, OP)
        u, v = combine(u, v, reduce_axis(x, 0, OP), reduce_axis(zeros, 0, SUM), OP)
    else:
        u, v = combine(u, v, reduce_axis(x, 0, OP), v, OP)
    return u, v


@triton.jit
def map_values(x, y, u, v, a, b, MAP: tl.constexpr):
    """Map tokens by the result of their row."""
    if MAP == SOFTMAX:
        y = fast_exp(x - u) * (1.0 / v)
    elif MAP == LOG_SOFTMAX:
        y = x - u - tl.log(tl.where(v == 0.0, 1.0, v))
    elif MAP == WEIGHTED:
        y = fast_exp(x - u) * (a / v)
    elif MAP == SOFTMAX_BACKWARD:
        y = x * (y - u)
    elif MAP == LOG_SOFTMAX_BACKWARD:
        y = y - fast_exp(x) * u
    elif MAP == PICK:
        y = tl.where(x == a, b / u, 0.0)
    elif MAP == PROD_BACKWARD:
        y = tl.where(x == 0, tl.where(v == 1, u * a, 0.0), tl.where(v == 0, u * a, 0.0) / x)
    else:
        y = a + tl.zeros_like(x)
    return y


@triton.jit
def _run(x, u, MAP: tl.constexpr, OP: tl.constexpr):
    """Scan tokens (1, G, L) from the carry u, (1, G, 1); return them and the next carry."""
    if OP == PROD:
        return tl.cumprod(x, 2, reverse=MAP == RUNNING_BACK) * u, reduce_axis(x, 2, OP) * u
    return tl.cumsum(x, 2, reverse=MAP == RUNNING_BACK) + u, reduce_axis(x, 2, OP) + u


@triton.jit
def finish_reduction(u, v, lengths, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """The number that a reduction of so many tokens gives."""
    if OP == MEAN:
        u /= lengths.to(u.dtype)
    elif OP == ANY:
        u = u != 0
    elif OP == ALL:
        u = u == tl.cast(lengths, u.dtype)  # modulo 2^32, as the count
    if (OP == ARGMAX) | (OP == ARGMIN):
        u = tl.where(u == IDENTITY, -1, 0xFFFFFFFF - (u & 0xFFFFFFFF))
    if OP == LSE:
        u = tl.where(
            v == 0.0, -float("inf"), finite_or_zero(u) + tl.log(tl.where(v == 0.0, 1.0, v))
        )
    return u


@triton.jit
def identity_state(G: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr):
    """Return the reduction of no tokens, (1, G, 1)."""
    return tl.full([1, G, 1], IDENTITY, KEPT), tl.zeros([1, G, 1], KEPT)


@triton.jit
def _bounds(OFFSETS, row):
    return tl.load(OFFSETS + row).to(tl.int64), tl.load(OFFSETS + row + 1).to(tl.int64)


@triton.jit
def load_operands(
    A,
    B,
    rows,
    lengths,
    inside,
    MAP: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
):
    """(1, G, 1) the entries of rows (G,) of these lengths."""
    a = tl.zeros([1, 1, 1], ACC)
    b = tl.zeros([1, 1, 1], ACC)
    if HAS_A:
        a = tl.load(A + rows, mask=inside, other=0).to(ACC)[None, :, None]
    if HAS_B:
        b = tl.load(B + rows, mask=inside, other=0).to(ACC)[None, :, None]
    if MAP == MEAN_BACKWARD:
        a /= lengths.to(ACC)[None, :, None]
    return a, b


@triton.jit
def _read(X, Y, line, step, valid, READS: tl.constexpr, OTHER: tl.constexpr, ACC: tl.constexpr):
    """The tokens (K, G, L) at `line`, (1, G, L), + `step`, (K, 1, 1); what changes no result where
    they are not valid.
    """
    if READS == 0:
        x = tl.zeros(valid.shape, ACC)
    else:
        x = tl.load(X + line + step, mask=valid, other=OTHER).to(ACC)
    y = x
    if READS == 2:
        y = tl.load(Y + line + step, mask=valid, other=0).to(ACC)
    return x, y


@triton.jit
def _lines(K: tl.constexpr, L: tl.constexpr):
    """Return (1, 1, L) and (K, 1, 1), which together count K * L tokens: first along the threads,
    then within each thread.
    """
    return tl.arange(0, L)[None, None, :], (tl.arange(0, K) * L)[:, None, None]


@triton.jit
def _chunk(
    X,
    Y,
    at,
    t0,
    t1,
    F: tl.constexpr,
    L: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Tokens [at, at + F) as (F / L, 1, L), and which are in [t0, t1)."""
    line, step = _lines(F // L, L)
    valid = (line + step >= tl.maximum(t0 - at, 0).to(tl.int32)) & (
        line + step < tl.minimum(t1 - at, F).to(tl.int32)
    )
    if VECTOR and READS > 0:
        if (at >= t0) & (at + F <= t1):  # without a mask a thread loads 16 bytes at once
            x = tl.load(X + at + line + step, eviction_policy=KEEP).to(ACC)
            y = tl.load((Y if READS == 2 else X) + at + line + step, eviction_policy=KEEP).to(ACC)
        else:
            x, y = _read(X + at, Y + at, line, step, valid, READS, OTHER, ACC)
    else:
        x, y = _read(X + at, Y + at, line, step, valid, READS, OTHER, ACC)
    return x, y, valid


@triton.jit
def _reduce_tokens(
    X,
    Y,
    a,
    start,
    t0,
    t1,
    OP: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    IDENTITY: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Reduce the tokens [t0, t1) of one row, which begins at `start`."""
    u = tl.full([1, 1, L], IDENTITY, KEPT)  # one state per thread, combined at the end
    v = tl.zeros([1, 1, L], KEPT)
    line, step = _lines(F // L, L)
    # Not t0 // 32 * 32: if Triton sees the alignment, a masked load takes one token of every four.
    begin = t0 - t0 % 32
    for done in range(0, t1 - begin, F):
        at = begin + done
        if VECTOR:
            at = tl.multiple_of(at, 32)
        x, y, valid = _chunk(X, Y, at, t0, t1, F, L, VECTOR, READS, OTHER, ACC, "")
        u, v = add_tokens(
            u, v, _alone(x, y, a, valid, at - start, line + step, OP, IDENTITY, KEPT), OP
        )
    return _gather(u, v, OP)


@triton.jit
def _map_tokens(
    X,
    Y,
    OUT,
    u,
    v,
    a,
    b,
    t0,
    t1,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write what the tokens [t0, t1) of one row become. What is read for the last time makes room
    in the cache first.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    THREADS: tl.constexpr = F if RUN else L
    line, step = _lines(F // THREADS, THREADS)
    begin = t0 - t0 % 32
    for done in range(0, t1 - begin, F):
        at = begin + done
        if MAP != RUNNING:  # backwards: what was read last is still in the cache
            at = begin + (t1 - begin - 1) // F * F - done
        if VECTOR:
            at = tl.multiple_of(at, 32)
        x, y, valid = _chunk(X, Y, at, t0, t1, F, THREADS, VECTOR, READS, OTHER, ACC, "evict_first")
        if RUN:
            mapped, u = _run(x, u, MAP, OP)
        else:
            mapped = map_values(x, y, u, v, a, b, MAP)
        mapped = mapped.to(OUT.dtype.element_ty)
        if VECTOR:
            if (at >= t0) & (at + F <= t1):
                tl.store(OUT + at + line + step, mapped, cache_modifier=".cs")
            else:
                tl.store(OUT + at + line + step, mapped, mask=valid)
        else:
            tl.store(OUT + at + line + step, mapped, mask=valid)


@triton.jit
def store_result(OUT, u, v, rows, lengths, inside, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """Write what rows (G,) of these lengths reduce to."""
    result = finish_reduction(u, v, lengths[None, :, None], OP, IDENTITY)
    tl.store(OUT + rows[None, :, None], result.to(OUT.dtype.element_ty), mask=inside[None, :, None])


@triton.jit
def process_row(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    row,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One whole row, F tokens at a time."""
    start, end = _bounds(OFFSETS, row)
    one = row + tl.zeros([1], tl.int32)
    length = (end - start) + tl.zeros([1], tl.int64)
    a, b = load_operands(A, B, one, length, one >= 0, MAP, HAS_A, HAS_B, ACC)
    if (OP == NONE) | (MAP == RUNNING) | (MAP == RUNNING_BACK):
        u, v = identity_state(1, IDENTITY, KEPT)
    else:
        u, v = _reduce_tokens(
            X, Y, a, start, start, end, OP, F, L, VECTOR, READS, IDENTITY, OTHER, ACC, KEPT
        )
    if MAP == NONE:
        store_result(OUT, u, v, one, length, one >= 0, OP, IDENTITY)
    else:
        if OP == LSE:
            u = finite_or_zero(u)
        _map_tokens(X, Y, OUT, u, v, a, b, start, end, OP, MAP, F, L, VECTOR, READS, OTHER, ACC)


@triton.jit
def clear_tail(OUT, OFFSETS, token, n, total, partition, F: tl.constexpr):
    """Write 0 to the tail within the tokens [token, token + partition)."""
    end = tl.minimum(total, token + partition)
    for at in range(tl.maximum(tl.load(OFFSETS + n).to(tl.int64), token), end, F):
        tokens = at + tl.arange(0, F)
        tl.store(OUT + tokens, tl.zeros([F], OUT.dtype.element_ty), mask=tokens < end)


@triton.jit(do_not_specialize=("n", "count", "partition", "bisections"))
def first_kernel(OFFSETS, FIRST, n, count, partition, bisections, BLOCK: tl.constexpr):
    """Compute FIRST (count + 1,), the number of rows that begin before each partition, and before
    the end of the last one.
    """
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + n
    for _ in range(bisections):
        middle = (low + high) // 2
        before = (low < high) & (
            tl.load(OFFSETS + middle).to(tl.int64) + middle < p.to(tl.int64) * partition
        )
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    tl.store(FIRST + p, low, mask=p <= count)


@triton.jit(do_not_specialize=("n", "total", "partition", "most", "longest"))
def share_kernel(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    FIRST,
    n,
    total,
    partition,
    most,
    longest,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    FL: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    """Process the rows of up to `most` tokens that begin in one partition: OUT (n,), or with MAP
    the tokens OUT (total,).

    Tokens are read as ACC and reduced in KEPT. A row has L threads in a tile of several rows, and
    FL threads if it has the CTA alone. With EVEN, n rows of the `longest` length would have all
    tokens: OFFSETS are not read unless there is a tail.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    THREADS: tl.constexpr = W if RUN else L
    if FOLLOWED:
        gdc_launch_dependents()
    p = tl.program_id(0)
    first = tl.load(FIRST + p)
    last = tl.load(FIRST + p + 1)
    even = EVEN
    if EVEN:
        even = tl.load(OFFSETS + n) == total
    if MAP != NONE:
        clear_tail(OUT, OFFSETS, p.to(tl.int64) * partition - n, n, total, partition, G * W)
    each = tl.arange(0, G)
    line, step = _lines(W // THREADS, THREADS)
    for group in range(first, last, G):
        rows = group + each
        asked = (rows < last) & ~even if EVEN else rows < last
        base = tl.load(OFFSETS + group, mask=not EVEN or not even, other=0).to(tl.int64)
        starts = (tl.load(OFFSETS + rows, mask=asked, other=0) - base).to(tl.int32)
        ends = tl.load(OFFSETS + rows + 1, mask=asked, other=0) - base
        lengths = tl.minimum(ends - starts, most + 1).to(tl.int32)
        if EVEN:
            base = tl.where(even, tl.cast(group, tl.int64) * longest, base)
            starts = tl.where(even, each * longest, starts)
            lengths = tl.where(even, longest, lengths)
        short = (rows < last) & (lengths <= W)
        valid = line + step < tl.where(short, lengths, 0)[None, :, None]
        at = starts[None, :, None] + line
        x, y = _read(X + base, Y + base, at, step, valid, READS, OTHER, ACC)
        # Otherwise the assembler saves registers: it compares each token before it reads the next.
        if OP == EQUAL:
            tl.debug_barrier()
        a, b = load_operands(A, B, rows, lengths, rows < last, MAP, HAS_A, HAS_B, ACC)
        u, v = identity_state(G, IDENTITY, KEPT)
        if RUN:
            mapped, u = _run(x, u, MAP, OP)
        elif OP != NONE:
            us, vs = _numbers(_alone(x, y, a, valid, 0, line + step, OP, IDENTITY, KEPT), OP)
            u, v = _gather(us, vs, OP)
        if MAP == NONE:
            store_result(OUT, u, v, rows, lengths, short, OP, IDENTITY)
        else:
            if OP == LSE:
                u = finite_or_zero(u)
            if not RUN:
                mapped = map_values(x, y, u, v, a, b, MAP)
            tl.store(OUT + base + at + step, mapped.to(OUT.dtype.element_ty), mask=valid)
        longer = tl.where((rows < last) & (lengths > W) & (lengths <= most), 1, 0)
        for _ in range(tl.sum(longer, 0)):
            i = tl.argmax(longer, 0)
            longer = tl.where(each == i, 0, longer)
            process_row(
                X,
                Y,
                A,
                B,
                OUT,
                OFFSETS,
                group + i,
                OP,
                MAP,
                G * W,
                FL,
                VECTOR,
                READS,
                HAS_A,
                HAS_B,
                IDENTITY,
                OTHER,
                ACC,
                KEPT,
            )


@triton.jit
def visit(slot, count, lag):
    """Return which of `count` parts the program in this slot visits, and if it is the second visit.

    The first `lag` slots are first visits. Then first and second visits alternate: the second visit
    of a part is `lag` parts after the first, while its tokens are still in the cache. The last
    slots are second visits.
    """
    early = tl.minimum(slot, lag)
    paired = tl.minimum(slot - early, 2 * (count - lag))
    is_second = (slot >= lag) & ((paired % 2 == 1) | (paired == 2 * (count - lag)))
    return tl.where(is_second, slot - early - paired + paired // 2, early + paired // 2), is_second


@triton.jit
def _put_together(
    PARTS, begin, first, stop, OP: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr
):
    """Combine the parts [first, stop) of a row that begins in part `begin`."""
    u, v = identity_state(1, IDENTITY, KEPT)
    for q in range(first, stop, 1024):
        parts = q + tl.arange(0, 1024)[None, None, :]
        here = PARTS + (parts * 2 + (parts == begin)) * 2
        us = tl.load(here, mask=parts < stop, other=IDENTITY)
        vs = tl.load(here + 1, mask=parts < stop, other=0)
        more_u, more_v = _gather(us, vs, OP)
        u, v = combine(u, v, more_u, more_v, OP)
    return u, v


@triton.jit(do_not_specialize=("part", "most", "parts", "lag"))
def part_kernel(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    FIRST,
    PARTS,
    COUNTS,
    part,
    most,
    parts,
    lag,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    OTHER: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Rows of more than `most` tokens, cut into parts of up to `part` tokens, which is no more than
    `most`.

    The first visit writes to PARTS (parts, 2, 2) the results of the part's end of an earlier row
    (0) and of its beginning of a later row (1), and counts them in COUNTS (parts,), at the part
    where the row begins. Once all parts of the row are there, the last CTA combines them, or the
    CTAs of the second visit do, and read the tokens again. COUNTS is zero before and after. With
    FOLLOWS the kernel runs at the same time as the kernel of the other rows, and ends after it.
    """
    TWICE: tl.constexpr = OP != NONE and MAP != NONE
    p = tl.program_id(0)
    is_second = OP == NONE
    if TWICE:
        p, is_second = visit(p, parts, lag)
    first = tl.load(FIRST + p)
    last = tl.load(FIRST + p + 1)
    for side in tl.static_range(2):
        row = first - 1 if side == 0 else last - 1
        if first > 0 if side == 0 else last > first:
            start, end = _bounds(OFFSETS, row)
            begin = ((start + row) // part).to(tl.int32)
            final = ((end + row) // part).to(tl.int32)
            if (end - start > most) & (p <= final):
                t0 = p.to(tl.int64) * part - row - 1 if side == 0 else start
                t1 = tl.minimum(end, (p.to(tl.int64) + 1) * part - row - 1)
                one = row + tl.zeros([1], tl.int32)
                length = (end - start) + tl.zeros([1], tl.int64)
                a, b = load_operands(A, B, one, length, one >= 0, MAP, HAS_A, HAS_B, ACC)
                counter = COUNTS + begin
                u, v = identity_state(1, IDENTITY, KEPT)
                if not is_second:
                    u, v = _reduce_tokens(
                        X, Y, a, start, t0, t1, OP, F, L, True, READS, IDENTITY, OTHER, ACC, KEPT
                    )
                    here = PARTS + (p.to(tl.int64) * 2 + side) * 2 + tl.zeros([1, 1, 1], tl.int32)
                    tl.store(here, u)
                    tl.store(here + 1, v)
                    tl.debug_barrier()
                    full = tl.atomic_add(counter, 1, sem="acq_rel") == final - begin
                    if MAP == NONE and full:
                        tl.debug_barrier()
                        u, v = _put_together(PARTS, begin, begin, final + 1, OP, IDENTITY, KEPT)
                        store_result(OUT, u, v, one, length, one >= 0, OP, IDENTITY)
                        tl.store(counter, 0)
                else:
                    if TWICE:
                        while tl.atomic_add(counter, 0, sem="acquire") <= final - begin:
                            pass
                        tl.debug_barrier()
                        u, v = _put_together(
                            PARTS,
                            begin,
                            p + 1 if MAP == RUNNING_BACK else begin,
                            p if MAP == RUNNING else final + 1,
                            OP,
                            IDENTITY,
                            KEPT,
                        )
                    if OP == LSE:
                        u = finite_or_zero(u)
                    _map_tokens(
                        X, Y, OUT, u, v, a, b, t0, t1, OP, MAP, F, L, True, READS, OTHER, ACC
                    )
                    if (
                        TWICE
                        and tl.atomic_add(counter, 1, sem="acq_rel") == 2 * (final - begin) + 1
                    ):  # all have seen them
                        tl.store(counter, 0)
    if FOLLOWS and tl.program_id(0) == 0:
        gdc_wait()


@launch_args
class FirstArgs:
    """Arguments of `first_kernel`."""

    OFFSETS: Pointer
    FIRST: Pointer
    n: Number
    count: Number
    partition: Number
    bisections: Number


@launch_args
class ShareArgs:
    """Arguments of `share_kernel`."""

    X: Pointer
    Y: Pointer
    A: Pointer
    B: Pointer
    OUT: Pointer
    OFFSETS: Pointer
    FIRST: Pointer
    n: Number
    total: Number
    partition: Number
    most: Number
    longest: Number


@launch_args
class PartArgs:
    """Arguments of `part_kernel`."""

    X: Pointer
    Y: Pointer
    A: Pointer
    B: Pointer
    OUT: Pointer
    OFFSETS: Pointer
    FIRST: Pointer
    PARTS: Pointer
    COUNTS: Pointer
    part: Number
    most: Number
    parts: Number
    lag: Number
