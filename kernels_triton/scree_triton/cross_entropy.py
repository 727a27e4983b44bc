"""Cross-entropy over large vocabularies, forward and backward, alone and fused with the product that makes the logits.

One kernel does it all. A program takes one token after another. `LOSS` is one pass over the logits of a token: each lane keeps a
maximum and a sum of its own (Milakov and Gimelshein, 2018), and only at the end do lanes meet. `GRADIENT` is a second pass, which
finds the logits in the cache if it follows the first at once, and may write where it reads. A token that does not count is not
read at all.

Alone, the forward reads the logits once, and the backward reads and writes once. Fused, the logits of a few thousand tokens exist
at a time: the product writes them, the kernel turns them into their own gradient, and two more products make of that the
gradients of hidden states and weight. That can be done in the forward pass where the gradient of the losses will be one number
for all; where it will not, and for float16, whose loss is scaled against underflow, the backward pass does it all again.
"""
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .host import multiprocessors, refuses, start
from .launch import INTERPRETED, Launch

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _read(X, at, lead, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr, MASKED: tl.constexpr):
    """(DEEP, LANES) logits from column ``at - lead`` on in float32, -inf where there is none; and the columns."""
    place = at + tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    column = place - lead
    if MASKED:
        x = tl.load(X + place, mask=(column >= 0) & (column < V), other=-float("inf"))
    else:
        x = tl.load(X + place)
    return x.to(tl.float32), column


@triton.jit
def _add(x, top, total):
    """The maximum and the sum of exponentials of each lane, with (DEEP, LANES) more logits."""
    new = tl.maximum(top, tl.max(x, 0))
    base = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp2((top - base) * _LOG2E) + tl.sum(tl.exp2((x - base[None, :]) * _LOG2E), 0)


@triton.jit
def _write(OUT, X, at, lead, target, top, factor, share, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr,
           MASKED: tl.constexpr):
    """The gradient of some logits: `factor` times (softmax - 1 at the target), where ``share = factor / total``."""
    x, column = _read(X, at, lead, V, LANES, DEEP, MASKED)
    y = tl.exp2((x - top) * _LOG2E) * share
    y = tl.where(column == target, y - factor, y).to(OUT.dtype.element_ty)
    out = OUT + (column + lead)
    if MASKED:
        tl.store(out, y, mask=(column >= 0) & (column < V))
    else:
        tl.store(out, y)


@triton.jit(do_not_specialize=("n", "first", "count", "ignored", "d_stride"))
def loss_kernel(X, TARGETS, OFFSETS, LOSSES, STATS, DLOSSES, OUT, x_stride, out_stride, n, first, count, ignored, d_stride,
                V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
                LOSS: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr):
    """The tokens [first, first + count): LOSSES, and STATS (2, count), the maximum and the sum of exponentials; OUT.

    X and OUT begin at token `first`, the others at token 0. Rows of X need not be aligned: they are read from the multiple of
    ALIGN elements before them on.
    """
    STEP: tl.constexpr = LANES * DEEP
    end = first + count
    if ROWS:
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        token = first + i
        target = tl.load(TARGETS + token)
        known = (token < end) & (target != ignored)
        start = i.to(tl.int64) * x_stride
        lead = 0
        begin = 0
        if ALIGN > 1:
            lead = (start % ALIGN).to(tl.int32)
            start = tl.multiple_of(start // ALIGN * ALIGN, ALIGN)
            begin = STEP
        stop = tl.maximum((V + lead) // STEP * STEP, begin)
        x = X + start
        if LOSS:
            if known:
                top = tl.full([LANES], -float("inf"), tl.float32)
                total = tl.zeros([LANES], tl.float32)
                exists = (target >= 0) & (target < V)
                right = tl.load(x + lead + target, mask=exists, other=0.0).to(tl.float32)
                if ALIGN > 1:
                    top, total = _add(_read(x, 0, lead, V, LANES, DEEP, True)[0], top, total)
                for at in range(begin, stop, STEP):
                    top, total = _add(_read(x, at, lead, V, LANES, DEEP, False)[0], top, total)
                if (ALIGN > 1) | (V % STEP > 0):
                    top, total = _add(_read(x, stop, lead, V, LANES, DEEP, True)[0], top, total)
                most = tl.max(top, 0)
                base = tl.where(most == -float("inf"), 0.0, most)
                whole = tl.sum(total * tl.exp2((top - base) * _LOG2E), 0)
                whole = tl.where(exists, whole, float("nan"))
                tl.store(LOSSES + token, tl.log(whole) + (most - right))
                tl.store(STATS + token, most)
                tl.store(STATS + end + token, whole)
            else:
                tl.store(LOSSES + token, 0.0)
