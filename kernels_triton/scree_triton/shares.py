"""Rows reduced, and what comes of that spread back over their tokens, in time that does not depend on how rows are skewed.

Rows and tokens together form one list: row b comes right before its tokens, at place ``offsets[b] + b``. The list is cut
into shares of equal length, one a program (Merrill and Garland, Merge-based parallel sparse matrix-vector multiplication,
2016), so that neither one long row nor a million empty ones keep a program busy alone. A row no longer than a share is done
as a whole by the program in whose share it begins, its second reading from the cache. Longer rows are done in parts: each
program reduces the tokens in its share, a second kernel adds the parts up in a fixed order, and a third launch of the first
kernel goes over the tokens again. Nothing is added with atomics: equal inputs give equal bits.

Values have the shape (total, C). Tokens behind the last row count as one more row, n, whose tokens are written as 0.
"""
import triton
import triton.language as tl

# What is reduced over the tokens of a row; x and y are the values, a an operand with one entry a row.
NONE = tl.constexpr(0)
SUM = tl.constexpr(1)
PROD = tl.constexpr(2)
MAX = tl.constexpr(3)
MIN = tl.constexpr(4)
ANY = tl.constexpr(5)
ALL = tl.constexpr(6)
LSE = tl.constexpr(7)  # two numbers: the maximum m and sum(exp(x - m))
DOT = tl.constexpr(8)  # sum(x * y)
SUM_Y = tl.constexpr(9)  # sum(y)
EQUAL = tl.constexpr(10)  # how many x are a
ARGMAX = tl.constexpr(11)  # where the first maximum is, or the first NaN; the number that is kept orders x and place
ARGMIN = tl.constexpr(12)

# What each token becomes; u, v are what its row reduced to, a and b operands with one entry a row.
COPY = tl.constexpr(1)  # a
SOFTMAX = tl.constexpr(2)  # exp(x - u) / v
LOG_SOFTMAX = tl.constexpr(3)  # x - u - log(v)
WEIGHTED = tl.constexpr(4)  # exp(x - u) / v * a
SOFTMAX_BACKWARD = tl.constexpr(5)  # x * (y - u)
LOG_SOFTMAX_BACKWARD = tl.constexpr(6)  # y - exp(x) * u
PICK = tl.constexpr(7)  # b / u where x is a, else 0
RUNNING = tl.constexpr(8)  # the SUM or PROD of the tokens up to it
RUNNING_BACK = tl.constexpr(9)  # the SUM of it and the tokens behind it

_WIDE = tl.constexpr(512)
WIDE = 512


@triton.jit
def _begin_before(OFFSETS, d0, d1, n, stride):
    """How many rows begin before the places d0 and d1, by a search among 512 places at a time."""
    each = tl.arange(0, _WIDE) + 1
    low0 = d0 * 0
    low1 = d0 * 0
    while stride > 0:
        row0 = low0 + each * stride - 1
        row1 = low1 + each * stride - 1
        place0 = tl.load(OFFSETS + row0, mask=row0 <= n, other=0) + row0
        place1 = tl.load(OFFSETS + row1, mask=row1 <= n, other=0) + row1
        low0 += tl.sum(((row0 <= n) & (place0 < d0)).to(tl.int32), 0) * stride
        low1 += tl.sum(((row1 <= n) & (place1 < d1)).to(tl.int32), 0) * stride
        stride = stride // _WIDE
    return low0, low1


@triton.jit
def _bounds(OFFSETS, row, n, total):
    start = tl.load(OFFSETS + row).to(tl.int64)
    end = tl.load(OFFSETS + row + 1, mask=row < n, other=total).to(tl.int64)
    return start, end


@triton.jit
def _read(X, tokens, valid, columns, C: tl.constexpr, BC: tl.constexpr):
    """(G, BC, W) elements at tokens (G, W)."""
    pointers = X + (tokens[:, None, :] * C + columns[None, :, None])
    if C % BC == 0:
        return tl.load(pointers, mask=valid[:, None, :], other=0)
    return tl.load(pointers, mask=valid[:, None, :] & (columns < C)[None, :, None], other=0)


@triton.jit
def _write(OUT, y, tokens, valid, columns, C: tl.constexpr, BC: tl.constexpr):
    pointers = OUT + (tokens[:, None, :] * C + columns[None, :, None])
    if C % BC == 0:
        tl.store(pointers, y.to(OUT.dtype.element_ty), mask=valid[:, None, :])
    else:
        tl.store(pointers, y.to(OUT.dtype.element_ty), mask=valid[:, None, :] & (columns < C)[None, :, None])


@triton.jit
def _operand(A, rows, inside, columns, C: tl.constexpr, ACC: tl.constexpr):
    """(G, BC, 1) the entries of some rows."""
    pointers = A + (rows.to(tl.int64)[:, None, None] * C + columns[None, :, None])
    return tl.load(pointers, mask=inside[:, None, None] & (columns < C)[None, :, None], other=0).to(ACC)


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
def _finite(m):
    """A maximum that may be subtracted: 0 where it is infinite."""
    return tl.where((m == float("inf")) | (m == -float("inf")), 0.0, m)


@triton.jit
def _nothing(G: tl.constexpr, BC: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr):
    """What no tokens reduce to, (G, BC, 1)."""
    return tl.full([G, BC, 1], IDENTITY, KEPT), tl.zeros([G, BC, 1], KEPT)


@triton.jit
def _key(x, place, OP: tl.constexpr):
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
def _step(u, v, x, y, a, valid, place, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """Reduce tokens (G, BC, W), at these places in their rows, (G, W), into what the rows have so far, (G, BC, 1)."""
    valid = valid[:, None, :]
    if OP == LSE:
        x = tl.where(valid, x, -float("inf"))
        m = tl.maximum(u, tl.max(x, 2, keep_dims=True))
        low = _finite(m)
        v = v * tl.where(u == -float("inf"), 1.0, tl.exp(_finite(u) - low)) + tl.sum(tl.exp(x - low), 2, keep_dims=True)
        u = m
    elif (OP == ARGMAX) | (OP == ARGMIN):
        u = tl.maximum(u, tl.max(tl.where(valid, _key(x, place[:, None, :], OP), IDENTITY), 2, keep_dims=True))
    elif OP == PROD:
        u *= tl.reduce(tl.where(valid, x, IDENTITY), 2, _times, keep_dims=True)
    elif OP == MAX:
        u = _greater(u, tl.reduce(tl.where(valid, x, IDENTITY), 2, _greater, keep_dims=True))
    elif OP == MIN:
        u = _less(u, tl.reduce(tl.where(valid, x, IDENTITY), 2, _less, keep_dims=True))
    elif OP == ANY:
        u = tl.maximum(u, tl.max((valid & (x != 0)).to(u.dtype), 2, keep_dims=True))
    elif OP == ALL:
        u = tl.minimum(u, tl.min((~valid | (x != 0)).to(u.dtype), 2, keep_dims=True))
    elif OP == DOT:
        u += tl.sum(tl.where(valid, x * y, 0.0), 2, keep_dims=True)
    elif OP == SUM_Y:
        u += tl.sum(tl.where(valid, y, 0.0), 2, keep_dims=True)
    elif OP == EQUAL:
        u += tl.sum((valid & (x == a)).to(u.dtype), 2, keep_dims=True)
    else:
        u += tl.sum(tl.where(valid, x, 0), 2, keep_dims=True)
    return u, v


@triton.jit
def _made(x, y, u, v, a, b, MAP: tl.constexpr):
    """What tokens become."""
    if MAP == SOFTMAX:
        y = tl.exp(x - u) / v
    elif MAP == LOG_SOFTMAX:
        y = x - u - tl.log(tl.where(v == 0.0, 1.0, v))
    elif MAP == WEIGHTED:
        y = tl.exp(x - u) / v * a
    elif MAP == SOFTMAX_BACKWARD:
        y = x * (y - u)
    elif MAP == LOG_SOFTMAX_BACKWARD:
        y = y - tl.exp(x) * u
    elif MAP == PICK:
        y = tl.where(x == a, b / u, 0.0)
    else:
        y = a + tl.zeros_like(x)
    return y


@triton.jit
def _run(x, u, valid, MAP: tl.constexpr, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """What tokens (G, BC, W) become that run on from u, (G, BC, 1), and what the tokens after them run on from."""
    x = tl.where(valid[:, None, :], x, IDENTITY)
    if OP == PROD:
        return tl.cumprod(x, 2) * u, tl.reduce(x, 2, _times, keep_dims=True) * u
    return tl.cumsum(x, 2, reverse=MAP == RUNNING_BACK) + u, tl.sum(x, 2, keep_dims=True) + u


@triton.jit
def _result(u, v, OP: tl.constexpr, IDENTITY: tl.constexpr):
    """The number that a reduction gives."""
    if (OP == ARGMAX) | (OP == ARGMIN):
        u = tl.where(u == IDENTITY, -1, 0xFFFFFFFF - (u & 0xFFFFFFFF))
    if OP == LSE:
        u = tl.where(v == 0.0, -float("inf"), _finite(u) + tl.log(tl.where(v == 0.0, 1.0, v)))
    return u


@triton.jit
def _pair(X, Y, tokens, valid, columns, C: tl.constexpr, BC: tl.constexpr, READS: tl.constexpr, ACC: tl.constexpr):
    if READS == 0:
        x = tl.zeros([tokens.shape[0], BC, tokens.shape[1]], ACC)
    else:
        x = _read(X, tokens, valid, columns, C, BC).to(ACC)
    if READS == 2:
        y = _read(Y, tokens, valid, columns, C, BC).to(ACC)
    else:
        y = x
    return x, y


@triton.jit
def _chunk(X, Y, at, t0, t1, columns, C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr, READS: tl.constexpr,
           ACC: tl.constexpr):
    """Tokens [at, at + F) as a (1, BC, F) tile, and which are in [t0, t1). `at` is a multiple of 16 for single columns."""
    each = tl.arange(0, F)[None, :]
    valid = (each >= tl.maximum(t0 - at, 0).to(tl.int32)) & (each < tl.minimum(t1 - at, F).to(tl.int32))
    if (C == 1) & (READS > 0):  # without a mask the copy is of 16 bytes a thread
        at = tl.multiple_of(at, 16)
        line = tl.arange(0, F)[None, None, :]
        if (at >= t0) & (at + F <= t1):
            x = tl.load(X + at + line).to(ACC)
            y = tl.load((Y if READS == 2 else X) + at + line).to(ACC)
        else:
            x = tl.load(X + at + line, mask=valid[:, None, :], other=0).to(ACC)
            y = tl.load((Y if READS == 2 else X) + at + line, mask=valid[:, None, :], other=0).to(ACC)
    else:
        x, y = _pair(X + at * C, Y + at * C, each, valid, columns, C, BC, READS, ACC)
    return x, y, valid


@triton.jit
def _reduce_flat(X, Y, a, start, t0, t1, columns, OP: tl.constexpr, IDENTITY: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
                 F: tl.constexpr, READS: tl.constexpr, ACC: tl.constexpr, KEPT: tl.constexpr):
    """Reduce the tokens [t0, t1) of one row, which begins at `start`."""
    u, v = _nothing(1, BC, IDENTITY, KEPT)
    for at in range(t0 // 16 * 16 if C == 1 else t0, t1, F):
        x, y, valid = _chunk(X, Y, at, t0, t1, columns, C, BC, F, READS, ACC)
        u, v = _step(u, v, x, y, a, valid, at - start + tl.arange(0, F)[None, :], OP, IDENTITY)
    return u, v


@triton.jit
def _map_flat(X, Y, OUT, u, v, a, b, real, t0, t1, columns, OP: tl.constexpr, MAP: tl.constexpr, IDENTITY: tl.constexpr,
              C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr, READS: tl.constexpr, ACC: tl.constexpr):
    """Write what the tokens [t0, t1) of one row become."""
    begin = t0 // 16 * 16 if C == 1 else t0
    for done in range(0, t1 - begin, F):
        at = begin + done
        if MAP == RUNNING_BACK:
            at = begin + (t1 - begin - 1) // F * F - done
        x, y, valid = _chunk(X, Y, at, t0, t1, columns, C, BC, F, READS, ACC)
        if (MAP == RUNNING) | (MAP == RUNNING_BACK):
            made, u = _run(x, u, valid, MAP, OP, IDENTITY)
        else:
            made = _made(x, y, u, v, a, b, MAP)
        made = tl.where(real, made, 0)
        each = tl.arange(0, F)[None, :]
        if C == 1:
            at = tl.multiple_of(at, 16)
            line = tl.arange(0, F)[None, None, :]
            made = made.to(OUT.dtype.element_ty)
            if (at >= t0) & (at + F <= t1):
                tl.store(OUT + at + line, made)
            else:
                tl.store(OUT + at + line, made, mask=valid[:, None, :])
        else:
            _write(OUT + at * C, made, each, valid, columns, C, BC)


@triton.jit
def _clear(OUT, t0, t1, columns, C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr):
    """Write 0 to the tokens [t0, t1)."""
    for at in range(t0, t1, F):
        tokens = at + tl.arange(0, F)[None, :]
        _write(OUT, tl.zeros([1, BC, F], OUT.dtype.element_ty), tokens, tokens < t1, columns, C, BC)


@triton.jit
def _row(X, Y, A, B, ROWS, OUT, row, start, end, n, columns, OP: tl.constexpr, MAP: tl.constexpr, IDENTITY: tl.constexpr,
         C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr, READS: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr,
         ACC: tl.constexpr, KEPT: tl.constexpr):
    """One whole row."""
    one = row + tl.zeros([1], tl.int32)
    a, b = _operands(A, B, one, n, columns, C, HAS_A, HAS_B, ACC)
    if (OP == NONE) | (MAP == RUNNING) | (MAP == RUNNING_BACK):
        u, v = _nothing(1, BC, IDENTITY, KEPT)
    else:
        u, v = _reduce_flat(X, Y, a, start, start, end, columns, OP, IDENTITY, C, BC, F, READS, ACC, KEPT)
    if MAP == NONE:
        _keep(ROWS, _result(u, v, OP, IDENTITY), one, one < n, columns, C)
    else:
        if OP == LSE:
            u = _finite(u)
        _map_flat(X, Y, OUT, u, v, a, b, row < n, start, end, columns, OP, MAP, IDENTITY, C, BC, F, READS, ACC)


@triton.jit
def _operands(A, B, rows, n, columns, C: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr):
    inside = rows < n
    a = tl.zeros([1, 1, 1], ACC)
    b = tl.zeros([1, 1, 1], ACC)
    if HAS_A:
        a = _operand(A, rows, inside, columns, C, ACC)
    if HAS_B:
        b = _operand(B, rows, inside, columns, C, ACC)
    return a, b


@triton.jit
def _keep(ROWS, u, rows, inside, columns, C: tl.constexpr):
    pointers = ROWS + (rows.to(tl.int64)[:, None, None] * C + columns[None, :, None])
    tl.store(pointers, u.to(ROWS.dtype.element_ty), mask=inside[:, None, None] & (columns < C)[None, :, None])


@triton.jit(do_not_specialize=("n", "total", "share", "stride"))
def share_kernel(X, Y, A, B, ROWS, OUT, PARTS, LONG, OFFSETS, n, total, share, stride, OP: tl.constexpr, MAP: tl.constexpr,
                 CUT: tl.constexpr, AGAIN: tl.constexpr, IDENTITY: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
                 G: tl.constexpr, W: tl.constexpr, READS: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr,
                 ACC: tl.constexpr, KEPT: tl.constexpr):
    """The rows of one share: ROWS (n, C), or with MAP the tokens OUT (total, C). Tokens are read as ACC and reduced in KEPT.

    With CUT rows may be longer than a share: PARTS (shares, 2, 2, C) holds what the share's end of an earlier row (0) and its
    beginning of a later one (1) reduce to, LONG (shares, 2) these rows or -1. AGAIN is the second visit, which maps the tokens
    of long rows by what `add_kernel` has left in ROWS (2, n, C), or runs on from what `before_kernel` has left in PARTS.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    F: tl.constexpr = G * W
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    if AGAIN:  # backwards: what was read last is still in the cache
        program = tl.num_programs(0) - 1 - program
    p = program // BLOCKS
    columns = (program % BLOCKS) * BC + tl.arange(0, BC)
    d0 = p.to(tl.int64) * share
    d1 = d0 + share
    if not AGAIN:
        first, last = _begin_before(OFFSETS, d0, d1, n, stride)

    if CUT:
        for side in tl.static_range(2):  # the end of a long row that began earlier, the beginning of one that goes on
            if AGAIN:
                row = tl.load(LONG + p * 2 + side).to(tl.int64)
                has = row >= 0
            else:
                row = first - 1 if side == 0 else last - 1
                has = first > 0 if side == 0 else last > first
            found = -1
            if has:
                start, end = _bounds(OFFSETS, row, n, total)
                t0 = d0 - row - 1 if side == 0 else start
                t1 = tl.minimum(end, d1 - row - 1)
                if (end - start > share) & (t0 <= t1):
                    found = row.to(tl.int32)
                    one = row + tl.zeros([1], tl.int64)
                    a, b = _operands(A, B, one, n, columns, C, HAS_A, HAS_B, ACC)
                    part = PARTS + (p.to(tl.int64) * 2 + side) * 2 * C + columns[None, :, None]
                    if AGAIN or OP == NONE:
                        u, v = _nothing(1, BC, IDENTITY, KEPT)
                        if AGAIN and RUN:
                            u = tl.load(part + C, mask=(columns < C)[None, :, None], other=0)
                        elif AGAIN:
                            u = _operand(ROWS, one, one < n, columns, C, ACC)
                            v = _operand(ROWS + n.to(tl.int64) * C, one, one < n, columns, C, ACC)
                        _map_flat(X, Y, OUT, u, v, a, b, row < n, t0, t1, columns, OP, MAP, IDENTITY, C, BC, F, READS, ACC)
                    else:
                        u, v = _reduce_flat(X, Y, a, start, t0, t1, columns, OP, IDENTITY, C, BC, F, READS, ACC, KEPT)
                        tl.store(part, u, mask=(columns < C)[None, :, None])
                        tl.store(part + C, v, mask=(columns < C)[None, :, None])
            if OP != NONE and not AGAIN:
                tl.store(LONG + p * 2 + side, found)
    elif MAP != NONE:  # no row is so long, but there may be as many tokens behind the last one
        behind = tl.load(OFFSETS + n).to(tl.int64)
        _clear(OUT, tl.maximum(behind, d0 - n - 1), tl.minimum(total, d1 - n - 1), columns, C, BC, F)

    if not AGAIN:
        if G == 1:
            for row in range(first, last):
                start, end = _bounds(OFFSETS, row, n, total)
                if end - start <= share:
                    _row(X, Y, A, B, ROWS, OUT, row, start, end, n, columns, OP, MAP, IDENTITY, C, BC, F, READS, HAS_A, HAS_B,
                         ACC, KEPT)
        else:
            each = tl.arange(0, G)
            within = tl.arange(0, W)[None, :]
            for group in range(first, last, G):
                rows = group + each
                base = tl.load(OFFSETS + group).to(tl.int64)
                starts = (tl.load(OFFSETS + rows, mask=rows < last, other=0) - base).to(tl.int32)
                ends = tl.load(OFFSETS + rows + 1, mask=(rows < last) & (rows < n), other=total) - base
                ends = tl.minimum(ends, starts + (share + 1)).to(tl.int32)
                whole = (rows < last) & (ends - starts <= share)
                lengths = tl.where(whole, ends - starts, 0)
                longest = tl.max(lengths, 0)
                a, b = _operands(A, B, rows, n, columns, C, HAS_A, HAS_B, ACC)
                u, v = _nothing(G, BC, IDENTITY, KEPT)
                real = (rows < n)[:, None, None]
                if longest <= W:  # every row is read once
                    at = tl.where(whole, starts, 0)[:, None] + within
                    valid = within < lengths[:, None]
                    x, y = _pair(X + base * C, Y + base * C, at, valid, columns, C, BC, READS, ACC)
                    if RUN:
                        made, u = _run(x, u, valid, MAP, OP, IDENTITY)
                    elif OP != NONE:
                        u, v = _step(u, v, x, y, a, valid, within + tl.zeros_like(at), OP, IDENTITY)
                    if MAP == NONE:
                        _keep(ROWS, _result(u, v, OP, IDENTITY), rows, whole & (rows < n), columns, C)
                    else:
                        if OP == LSE:
                            u = _finite(u)
                        if not RUN:
                            made = _made(x, y, u, v, a, b, MAP)
                        _write(OUT + base * C, tl.where(real, made, 0), at, valid, columns, C, BC)
                else:
                    little = whole & (lengths <= 2 * W)
                    some = tl.where(little, lengths, 0)
                    begin = tl.where(little, starts, 0)[:, None]
                    if (OP != NONE) & (not RUN):
                        for i in range(0, tl.minimum(longest, 2 * W), W):
                            exists = i + within < some[:, None]
                            x_i, y_i = _pair(X + base * C, Y + base * C, begin + i + within, exists, columns, C, BC, READS, ACC)
                            u, v = _step(u, v, x_i, y_i, a, exists, i + within + tl.zeros_like(begin), OP, IDENTITY)
                    if MAP == NONE:
                        _keep(ROWS, _result(u, v, OP, IDENTITY), rows, little & (rows < n), columns, C)
                    else:
                        if OP == LSE:
                            u = _finite(u)
                        for j in range(0, tl.minimum(longest, 2 * W), W):
                            i = (tl.minimum(longest, 2 * W) - 1) // W * W - j if MAP == RUNNING_BACK else j
                            exists = i + within < some[:, None]
                            x_i, y_i = _pair(X + base * C, Y + base * C, begin + i + within, exists, columns, C, BC, READS, ACC)
                            if RUN:
                                value, u = _run(x_i, u, exists, MAP, OP, IDENTITY)
                            else:
                                value = _made(x_i, y_i, u, v, a, b, MAP)
                            _write(OUT + base * C, tl.where(real, value, 0), begin + i + within, exists, columns, C, BC)
                    more = tl.where(little, 0, lengths)  # rows too long to stand beside the others, one at a time
                    for _ in range(tl.sum((more > 0).to(tl.int32), 0)):
                        i = tl.argmax(more, 0)
                        start, end = _bounds(OFFSETS, group + i, n, total)
                        _row(X, Y, A, B, ROWS, OUT, group + i, start, end, n, columns, OP, MAP, IDENTITY, C, BC, F, READS,
                             HAS_A, HAS_B, ACC, KEPT)
                        more = tl.where(each == i, 0, more)


@triton.jit(do_not_specialize=("n", "total", "share"))
def add_kernel(PARTS, LONG, ROWS, OFFSETS, n, total, share, OP: tl.constexpr, MAP: tl.constexpr, IDENTITY: tl.constexpr,
               C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr):
    """Each long row from its parts, by the program of the share in which it begins: ROWS (n, C), with MAP (2, n, C)."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    p = tl.program_id(0) // BLOCKS
    row = tl.load(LONG + p * 2 + 1)
    if (row < 0) | (row >= n):
        return
    columns = (tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC)
    inside = (columns < C)[None, :, None]
    _, end = _bounds(OFFSETS, row, n, total)
    part = PARTS + columns[None, :, None]
    u = tl.load(part + (p.to(tl.int64) * 2 + 1) * 2 * C, mask=inside, other=0)
    v = tl.load(part + (p.to(tl.int64) * 2 + 1) * 2 * C + C, mask=inside, other=0)
    stop = (end + row) // share + 1
    for q in range(p.to(tl.int64) + 1, stop, F):
        parts = q + tl.arange(0, F)[None, None, :]
        valid = (parts < stop) & inside
        us = tl.load(part + parts * 4 * C, mask=valid, other=IDENTITY)
        vs = tl.load(part + parts * 4 * C + C, mask=valid, other=0)
        if OP == LSE:
            m = tl.maximum(u, tl.max(us, 2, keep_dims=True))
            low = _finite(m)
            v = v * tl.where(u == -float("inf"), 1.0, tl.exp(_finite(u) - low))
            v += tl.sum(vs * tl.where(us == -float("inf"), 1.0, tl.exp(_finite(us) - low)), 2, keep_dims=True)
            u = m
        elif OP == PROD:
            u *= tl.reduce(us, 2, _times, keep_dims=True)
        elif (OP == ARGMAX) | (OP == ARGMIN):
            u = tl.maximum(u, tl.max(us, 2, keep_dims=True))
        elif (OP == MAX) | (OP == ANY):
            u = _greater(u, tl.reduce(us, 2, _greater, keep_dims=True))
        elif (OP == MIN) | (OP == ALL):
            u = _less(u, tl.reduce(us, 2, _less, keep_dims=True))
        else:
            u += tl.sum(us, 2, keep_dims=True)
    out = ROWS + row.to(tl.int64) * C + columns[None, :, None]
    if MAP == NONE:
        tl.store(out, _result(u, v, OP, IDENTITY).to(ROWS.dtype.element_ty), mask=inside)
    else:
        if OP == LSE:
            u = _finite(u)
        tl.store(out, u, mask=inside)
        tl.store(out + n.to(tl.int64) * C, v, mask=inside)


@triton.jit(do_not_specialize=("n", "total", "share"))
def before_kernel(PARTS, LONG, OFFSETS, n, total, share, OP: tl.constexpr, MAP: tl.constexpr, IDENTITY: tl.constexpr,
                  C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr):
    """What each part of a long row runs on from: the SUM or PROD of those before it, with RUNNING_BACK of those behind it."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    p = tl.program_id(0).to(tl.int64) // BLOCKS
    row = tl.load(LONG + p * 2 + 1)
    if (row < 0) | (row >= n):
        return
    columns = (tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC)
    inside = (columns < C)[None, :, None]
    _, end = _bounds(OFFSETS, row, n, total)
    part = PARTS + columns[None, :, None]
    stop = (end + row) // share + 1
    u, _ = _nothing(1, BC, IDENTITY, PARTS.dtype.element_ty)
    if MAP == RUNNING:
        tl.store(part + (p * 4 + 2) * C + C, u, mask=inside)
    for done in range(0, stop - p - 1, F):
        q = p + 1 + done
        if MAP == RUNNING_BACK:
            q = p + 1 + (stop - p - 2) // F * F - done
        parts = q + tl.arange(0, F)[None, None, :]
        other = parts + 1 if MAP == RUNNING_BACK else parts - 1  # a part runs on from its neighbor
        there = (parts < stop) & (other < stop)
        x = tl.load(part + (other * 4 + tl.where(other == p, 2, 0)) * C, mask=there & inside, other=IDENTITY)
        x, u = _run(x, u, tl.reshape(there, [1, F]), MAP, OP, IDENTITY)
        tl.store(part + parts * 4 * C + C, x, mask=(parts < stop) & inside)
    if MAP == RUNNING_BACK:
        first = tl.load(part + (p + 1) * 4 * C, mask=inside, other=IDENTITY)
        tl.store(part + (p * 4 + 2) * C + C, u + first, mask=inside)
