"""Rows of wide tokens reduced, and what comes of that spread back over their tokens, one block of columns a program.

Rows and tokens together form one list: row b comes right before its tokens, at place ``offsets[b] + b``. The list is cut
into shares of equal length (Merrill and Garland, Merge-based parallel sparse matrix-vector multiplication, 2016), so that
neither one long row nor a million empty ones keep a program busy alone. A program has a share and a block of columns. G lanes
of it walk over tokens, U at a time, and keep what they have seen in registers, one number a lane and column: beside each other
over G short rows, or all over one long row, to be put together at its end.

A row that reaches beyond its share comes in parts. The program that finishes the last of them puts them together in the
order of the row, whoever it is: equal inputs give equal bits. Where tokens are mapped by it, the programs of the second half
of a launch wait for that, and go over the tokens again. They come after those that they wait for, and close behind, one group
of columns after the other, so that the tokens are still in the cache.

Values have the shape (total, C). Tokens behind the last row are written as 0.
"""
import triton
import triton.language as tl

from .shares import (ALL, ANY, ARGMAX, ARGMIN, DOT, EQUAL, LSE, MAX, MIN, NONE, PROD, RUNNING, RUNNING_BACK, SUM_Y,
                     _begin_before, _finite, _greater, _key, _less, _made, _result, _times)

READY = tl.constexpr(1 << 30)


@triton.jit
def _nothing(G: tl.constexpr, BC: tl.constexpr, IDENTITY: tl.constexpr, KEPT: tl.constexpr):
    """What no tokens reduce to."""
    return tl.full([G, BC], IDENTITY, KEPT), tl.zeros([G, BC], KEPT)


@triton.jit
def _fold(u, v, OP: tl.constexpr):
    """What numbers reduce to along the first axis."""
    if OP == LSE:
        m = tl.max(u, 0)
        v = tl.sum(v * tl.exp(u - _finite(m)[None]), 0)
        u = m
    elif OP == PROD:
        u = tl.reduce(u, 0, _times)
        v = u
    elif OP == MAX:
        u = tl.reduce(u, 0, _greater)
        v = u
    elif OP == MIN:
        u = tl.reduce(u, 0, _less)
        v = u
    elif (OP == ARGMAX) | (OP == ARGMIN) | (OP == ANY):
        u = tl.max(u, 0)
        v = u
    elif OP == ALL:
        u = tl.min(u, 0)
        v = u
    else:
        u = tl.sum(u, 0)
        v = u
    return u, v


@triton.jit
def _join(u, v, us, vs, OP: tl.constexpr):
    """What two numbers reduce to."""
    if OP == LSE:
        m = tl.maximum(u, us)
        low = _finite(m)
        v = v * tl.exp(u - low) + vs * tl.exp(us - low)
        u = m
    elif OP == PROD:
        u = u * us
    elif OP == MAX:
        u = _greater(u, us)
    elif OP == MIN:
        u = _less(u, us)
    elif (OP == ARGMAX) | (OP == ARGMIN) | (OP == ANY):
        u = tl.maximum(u, us)
    elif OP == ALL:
        u = tl.minimum(u, us)
    else:
        u = u + us
    return u, v


@triton.jit
def _alone(x, y, a, valid, place, OP: tl.constexpr, IDENTITY: tl.constexpr, ACC: tl.constexpr, KEPT: tl.constexpr):
    """What each token reduces to alone; those that do not exist were read as 0."""
    if OP == ANY:
        x = (x != 0).to(KEPT)
    elif OP == ALL:
        x = (~valid | (x != 0)).to(KEPT)
    elif (OP == ARGMAX) | (OP == ARGMIN):
        x = tl.where(valid, _key(x.to(ACC), place, OP), IDENTITY)
    elif OP == DOT:
        x = x.to(ACC) * y.to(ACC)
    elif OP == SUM_Y:
        x = y.to(ACC)
    elif OP == EQUAL:
        x = (valid & (x.to(ACC) == a)).to(KEPT)
    elif IDENTITY == 0:
        x = x.to(ACC)
    else:
        x = tl.where(valid, x.to(ACC), IDENTITY)
    return x


@triton.jit
def _steps(w, steps, lengths, P, Q, G: tl.constexpr, U: tl.constexpr):
    """(U, G, 1) where in their rows the lanes are at the steps from w on, and whether there is a token."""
    step = w + tl.arange(0, U)[:, None]
    at = step * P + tl.arange(0, G)[None, :] * Q
    return at[:, :, None], ((step < steps) & (at < lengths))[:, :, None]


@triton.jit
def _read(X, at, valid, columns, C: tl.constexpr, BC: tl.constexpr):
    pointers = X + (at * C + columns[None, None, :])
    if C % BC == 0:
        return tl.load(pointers, mask=valid, other=0)
    return tl.load(pointers, mask=valid & (columns < C)[None, None, :], other=0)


@triton.jit
def _write(OUT, y, at, valid, columns, C: tl.constexpr, BC: tl.constexpr):
    pointers = OUT + (at * C + columns[None, None, :])
    if C % BC == 0:
        tl.store(pointers, y.to(OUT.dtype.element_ty), mask=valid)
    else:
        tl.store(pointers, y.to(OUT.dtype.element_ty), mask=valid & (columns < C)[None, None, :])


@triton.jit
def _reduce(X, Y, a, begins, lengths, steps, P, Q, place, columns, OP: tl.constexpr, DIR: tl.constexpr, IDENTITY: tl.constexpr,
            C: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, U: tl.constexpr, READS: tl.constexpr, ACC: tl.constexpr,
            KEPT: tl.constexpr):
    """What each lane reduces to, (G, BC)."""
    u, v = _nothing(G, BC, IDENTITY, KEPT)
    for w in range(0, steps, U):
        at, valid = _steps(w, steps, lengths, P, Q, G, U)
        x = _read(X, begins + DIR * at, valid, columns, C, BC)
        y = x
        if READS == 2:
            y = _read(Y, begins + DIR * at, valid, columns, C, BC)
        x = _alone(x, y, a[None], valid, place + at, OP, IDENTITY, ACC, KEPT)
        us, vs = _fold(x, 1.0, OP)
        u, v = _join(u, v, us, vs, OP)
    return u, v


@triton.jit
def _map(X, Y, OUT, u, v, a, b, begins, lengths, steps, P, Q, columns, OP: tl.constexpr, MAP: tl.constexpr, DIR: tl.constexpr,
         IDENTITY: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, U: tl.constexpr, READS: tl.constexpr,
         ACC: tl.constexpr):
    """Write what the tokens become. What lanes run on from is u."""
    for w in range(0, steps, U):
        at, valid = _steps(w, steps, lengths, P, Q, G, U)
        x = tl.zeros([U, G, BC], ACC)
        if READS > 0:
            x = _read(X, begins + DIR * at, valid, columns, C, BC).to(ACC)
        y = x
        if READS == 2:
            y = _read(Y, begins + DIR * at, valid, columns, C, BC).to(ACC)
        if (MAP == RUNNING) | (MAP == RUNNING_BACK):
            if OP == PROD:
                x = tl.where(valid, x, 1)
                y = tl.cumprod(x, 0) * u[None]
                u = u * tl.reduce(x, 0, _times)
            else:
                y = tl.cumsum(x, 0) + u[None]
                u = u + tl.sum(x, 0)
        else:
            y = _made(x, y, u[None], v[None], a[None], b[None], MAP)
        _write(OUT, y, begins + DIR * at, valid, columns, C, BC)


@triton.jit
def _operands(A, B, rows, inside, columns, C: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr):
    """The entries of rows (G,), or zeros."""
    pointers = rows.to(tl.int64)[:, None] * C + columns[None, :]
    inside = inside[:, None] & (columns < C)[None, :]
    a = tl.zeros([1, 1], ACC)
    b = tl.zeros([1, 1], ACC)
    if HAS_A:
        a = tl.load(A + pointers, mask=inside, other=0).to(ACC)
    if HAS_B:
        b = tl.load(B + pointers, mask=inside, other=0).to(ACC)
    return a, b


@triton.jit
def _keep(ROWS, u, v, rows, inside, columns, OP: tl.constexpr, IDENTITY: tl.constexpr, C: tl.constexpr):
    pointers = ROWS + (rows.to(tl.int64)[:, None] * C + columns[None, :])
    tl.store(pointers, _result(u, v, OP, IDENTITY).to(ROWS.dtype.element_ty), mask=inside[:, None] & (columns < C)[None, :])


@triton.jit
def _lanes(length, G: tl.constexpr, RUN: tl.constexpr):
    """How G lanes walk over one row together: with scans each has a stretch of it."""
    steps = tl.cdiv(length, G)
    if RUN:
        return steps, 1, steps
    return steps, G, 1


@triton.jit
def _sum_up(u, v, OP: tl.constexpr, G: tl.constexpr):
    """(1, BC) of (G, BC)."""
    if G > 1:
        u, v = _fold(u, v, OP)
        u = u[None]
        v = v[None]
    return u, v


@triton.jit
def _row(X, Y, A, B, OUT, row, start, length, columns, OP: tl.constexpr, MAP: tl.constexpr, DIR: tl.constexpr,
         IDENTITY: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, U: tl.constexpr, READS: tl.constexpr,
         HAS_A: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr, KEPT: tl.constexpr):
    """One whole row."""
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    one = row + tl.zeros([1], tl.int32)
    a, b = _operands(A, B, one, one >= 0, columns, C, HAS_A, HAS_B, ACC)
    steps, P, Q = _lanes(length, G, RUN)
    begin = tl.where(DIR < 0, length - 1, 0)
    x = X + start * C
    y = Y + start * C
    u, v = _nothing(1, BC, IDENTITY, KEPT)
    if RUN and G > 1:  # a lane runs on from what those before it reduce to: it reduces the stretch of its neighbor
        u, v = _nothing(G, BC, IDENTITY, KEPT)
        for w in range(0, steps, U):
            at, valid = _steps(w, steps, length + steps, P, Q, G, U)
            at -= steps
            valid &= at >= 0
            us, vs = _fold(_alone(_read(x, begin + DIR * at, valid, columns, C, BC), 0.0, a, valid, at, OP, IDENTITY, ACC, KEPT),
                           1.0, OP)
            u, v = _join(u, v, us, vs, OP)
        if OP == PROD:
            u = tl.cumprod(u, 0)
        else:
            u = tl.cumsum(u, 0)
    elif (OP != NONE) & (not RUN):
        u, v = _reduce(x, y, a, begin, length, steps, P, Q, 0, columns, OP, DIR, IDENTITY, C, BC, G, U, READS, ACC, KEPT)
        u, v = _sum_up(u, v, OP, G)
    if MAP == NONE:
        _keep(OUT, u, v, one, one >= 0, columns, OP, IDENTITY, C)
    else:
        if OP == LSE:
            u = _finite(u)
        _map(x, y, OUT + start * C, u, v, a, b, begin, length, steps, P, Q, columns, OP, MAP, DIR, IDENTITY, C, BC, G, U, READS,
             ACC)


@triton.jit
def _slot(p, part):
    """Where a part stands of the row that begins in share p: parts that end earlier rows come before one that begins a row."""
    return tl.where(part == 0, 2 * p + 1, 2 * (p + part)).to(tl.int64)


@triton.jit
def _put_together(PARTS, OUT, row, p, count, columns, OP: tl.constexpr, MAP: tl.constexpr, IDENTITY: tl.constexpr,
                  C: tl.constexpr, BC: tl.constexpr, F: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr):
    """What the `count` parts of a row that begins in share p reduce to, into OUT, or where the first one stood.

    With scans what each part and all before it reduce to, where this one stood.
    """
    inside = (columns < C)[None, :]
    u, v = _nothing(F, BC, IDENTITY, KEPT)
    if (MAP == RUNNING) | (MAP == RUNNING_BACK):
        u, v = _nothing(1, BC, IDENTITY, KEPT)
    for k in range(0, count, F):
        part = k + tl.arange(0, F)
        exists = (part < count)[:, None] & inside
        if MAP == RUNNING_BACK:
            part = count - 1 - part
        pointers = PARTS + (_slot(p, part)[:, None] * (SIZE * C) + columns[None, :])
        us = tl.load(pointers, mask=exists, other=IDENTITY)
        if (MAP == RUNNING) | (MAP == RUNNING_BACK):
            if OP == PROD:
                tl.store(pointers, tl.cumprod(us, 0) * u, mask=exists)
            else:
                tl.store(pointers, tl.cumsum(us, 0) + u, mask=exists)
            us, _ = _fold(us, 1.0, OP)
            u, v = _join(u, v, us[None], v, OP)
        else:
            vs = us
            if OP == LSE:
                vs = tl.load(pointers + C, mask=exists, other=0)
            u, v = _join(u, v, us, vs, OP)
    if (MAP != RUNNING) & (MAP != RUNNING_BACK):
        u, v = _sum_up(u, v, OP, F)
        if MAP == NONE:
            one = row + tl.zeros([1], tl.int32)
            _keep(OUT, u, v, one, one >= 0, columns, OP, IDENTITY, C)
        else:
            pointers = PARTS + (_slot(p, 0) * (SIZE * C) + columns[None, :])
            tl.store(pointers, u, mask=inside)
            if OP == LSE:
                tl.store(pointers + C, v, mask=inside)


@triton.jit(do_not_specialize=("n", "total", "share", "stride", "shares", "H"))
def columns_kernel(X, Y, A, B, OUT, PARTS, COUNTS, OFFSETS, n, total, share, stride, shares, H, OP: tl.constexpr, MAP: tl.constexpr,
                   CUT: tl.constexpr, IDENTITY: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, G: tl.constexpr,
                   U: tl.constexpr, F: tl.constexpr, READS: tl.constexpr, HAS_A: tl.constexpr,
                   HAS_B: tl.constexpr, ACC: tl.constexpr, KEPT: tl.constexpr):
    """The rows of one share and block of columns: OUT is (n, C), or with MAP the tokens (total, C).

    With CUT rows end where their share does: PARTS (shares, 2, ...) holds what its end of an earlier row (0) and its beginning
    of a later one (1) reduce to, COUNTS (shares, blocks) how many parts there are of the row that begins in it.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    DIR: tl.constexpr = -1 if MAP == RUNNING_BACK else 1
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    SIZE: tl.constexpr = G if RUN else 2 if OP == LSE else 1  # numbers a part
    pid = tl.program_id(0)
    again = False
    if CUT and OP != NONE and MAP != NONE:  # groups of H blocks: first 0, 1; then again 0, first 2; again 1, first 3; ...
        rounds = (BLOCKS + H - 1) // H
        turn = pid // (shares * H)
        again = ((turn % 2 == 0) & (turn > 0)) | (turn == 2 * rounds - 1)
        group = tl.where(again, turn - 1, turn + 1) // 2
        pid = pid % (shares * H)
        block = group * H + pid % H
        p = pid // H
    else:
        block = pid % BLOCKS
        p = pid // BLOCKS
    if block >= BLOCKS:
        return
    columns = block * BC + tl.arange(0, BC)
    d0 = p.to(tl.int64) * share
    d1 = d0 + share
    first, last = _begin_before(OFFSETS, d0, d1, n, stride)

    if CUT:
        for side in range(2):
            row = tl.where(side == 0, first, last) - 1
            has = tl.where(side == 0, first > 0, last > first)
            if has & (row < n):
                start = tl.load(OFFSETS + row).to(tl.int64)
                end = tl.load(OFFSETS + row + 1).to(tl.int64)
                final = ((end + row) // share).to(tl.int32)
                if final >= p + side:
                    t0 = tl.where(side == 0, d0 - row - 1, start)
                    length = (tl.minimum(end, d1 - row - 1) - t0).to(tl.int32)
                    begin = ((start + row) // share).to(tl.int32)
                    count = final - begin + 1
                    one = row + tl.zeros([1], tl.int32)
                    a, b = _operands(A, B, one, one >= 0, columns, C, HAS_A, HAS_B, ACC)
                    steps, P, Q = _lanes(length, G, RUN)
                    origin = tl.where(DIR < 0, length - 1, 0)
                    x = X + t0 * C
                    y = Y + t0 * C
                    counter = COUNTS + begin * BLOCKS + block
                    part = PARTS + (p * 2 + side).to(tl.int64) * (SIZE * C)
                    if OP == NONE:
                        _map(x, y, OUT + t0 * C, a, a, a, b, origin, length, steps, P, Q, columns, OP, MAP, DIR, IDENTITY, C, BC,
                             G, U, READS, ACC)
                    elif again:
                        while tl.atomic_add(counter, 0, sem="acquire") < READY:
                            pass
                        tl.debug_barrier()
                        u, v = _nothing(1, BC, IDENTITY, KEPT)
                        inside = (columns < C)[None, :]
                        if RUN:
                            if p != (begin if DIR > 0 else final):
                                u = tl.load(PARTS + (_slot(begin, p - begin - DIR) * (SIZE * C) + columns[None, :]), mask=inside,
                                            other=IDENTITY)
                            if G > 1:
                                each = tl.arange(0, G)[:, None]
                                own = part + (each * C + columns[None, :])
                                own = tl.load(own, mask=(each > 0) & inside, other=IDENTITY)
                                u, v = _join(u, v, own, v, OP)
                        else:
                            place = PARTS + (_slot(begin, 0) * (SIZE * C) + columns[None, :])
                            u = tl.load(place, mask=inside, other=0)
                            v = u
                            if OP == LSE:
                                u = _finite(u)
                                v = tl.load(place + C, mask=inside, other=0)
                        if MAP != NONE:
                            _map(x, y, OUT + t0 * C, u, v, a, b, origin, length, steps, P, Q, columns, OP, MAP, DIR, IDENTITY, C,
                                 BC, G, U, READS, ACC)
                    else:
                        r, s = _reduce(x, y, a, origin, length, steps, P, Q, (t0 - start).to(tl.int32), columns, OP, DIR, IDENTITY,
                                       C, BC, G, U, READS, ACC, KEPT)
                        inside = (columns < C)[None, :]
                        if RUN and G > 1:  # what all lanes up to each reduce to, the last one first
                            each = tl.arange(0, G)[:, None]
                            if OP == PROD:
                                r = tl.cumprod(r, 0)
                            else:
                                r = tl.cumsum(r, 0)
                            tl.store(part + ((each + 1) % G * C + columns[None, :]), r, mask=inside)
                        else:
                            r, s = _sum_up(r, s, OP, G)
                            tl.store(part + columns[None, :], r, mask=inside)
                            if OP == LSE:
                                tl.store(part + C + columns[None, :], s, mask=inside)
                        tl.debug_barrier()
                        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                            tl.debug_barrier()
                            _put_together(PARTS, OUT, row, begin, count, columns, OP, MAP, IDENTITY, C, BC, F, SIZE, KEPT)
                            tl.debug_barrier()
                            tl.atomic_add(counter, READY, sem="release")

    if not again:
        if MAP != NONE:  # tokens behind the last row
            behind = tl.load(OFFSETS + n).to(tl.int64)
            t0 = tl.maximum(behind, d0 - n - 1)
            length = (tl.minimum(total, d1 - n - 1) - t0).to(tl.int32)
            for w in range(0, tl.cdiv(length, G), U):
                at, valid = _steps(w, length, length, G, 1, G, U)
                _write(OUT + t0 * C, tl.zeros([U, G, BC], OUT.dtype.element_ty), at, valid, columns, C, BC)
        last = tl.minimum(last, n)
        if CUT:  # without the row that goes on behind the share
            if last > first:
                last -= (tl.load(OFFSETS + last) + last - 1 >= d1).to(tl.int32)
        LITTLE: tl.constexpr = 2 * U
        for beside in range(first, last, G):
            each = beside + tl.arange(0, G)
            exists = each < last
            base = tl.load(OFFSETS + beside).to(tl.int64)
            begins = (tl.load(OFFSETS + each, mask=exists, other=0) - base).to(tl.int32)
            lengths = (tl.load(OFFSETS + each + 1, mask=exists, other=0) - base).to(tl.int32) - begins
            lengths = tl.where(exists, lengths, 0)
            if G > 1:
                little = lengths <= LITTLE
                some = tl.where(little, lengths, 0)
                steps = tl.max(some, 0)
                a, b = _operands(A, B, each, exists & little, columns, C, HAS_A, HAS_B, ACC)
                u, v = _nothing(G, BC, IDENTITY, KEPT)
                x = X + base * C
                y = Y + base * C
                origins = begins
                if DIR < 0:
                    origins = begins + some - 1
                if OP != NONE and not RUN:
                    u, v = _reduce(x, y, a, origins[None, :, None], some[None, :], steps, 1, 0, 0, columns, OP, DIR, IDENTITY, C, BC,
                                   G, U, READS, ACC, KEPT)
                if MAP == NONE:
                    _keep(OUT, u, v, each, exists & little, columns, OP, IDENTITY, C)
                else:
                    if OP == LSE:
                        u = _finite(u)
                    _map(x, y, OUT + base * C, u, v, a, b, origins[None, :, None], some[None, :], steps, 1, 0, columns, OP, MAP, DIR,
                         IDENTITY, C, BC, G, U, READS, ACC)
                lengths = tl.where(little, 0, lengths)
                for _ in range(tl.sum((lengths > 0).to(tl.int32), 0)):  # one at a time
                    i = tl.argmax(lengths, 0)
                    row = beside + i
                    start = tl.load(OFFSETS + row).to(tl.int64)
                    _row(X, Y, A, B, OUT, row, start, tl.max(lengths, 0), columns, OP, MAP, DIR, IDENTITY, C, BC, G, U, READS,
                         HAS_A, HAS_B, ACC, KEPT)
                    lengths = tl.where(tl.arange(0, G) == i, 0, lengths)
            else:
                _row(X, Y, A, B, OUT, beside, base, tl.max(lengths, 0), columns, OP, MAP, DIR, IDENTITY, C, BC, G, U, READS,
                     HAS_A, HAS_B, ACC, KEPT)
