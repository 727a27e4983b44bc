"""Reduction of rows of wide tokens, and maps of the result over their tokens, one block of columns
per CTA.

Rows and tokens form one list: row b comes right before its tokens, at position ``offsets[b] + b``.
The list is cut into partitions of equal length (Merrill and Garland, Merge-based parallel sparse
matrix-vector multiplication, 2016). So neither one long row nor a million empty rows keep one CTA
busy alone. A CTA has a partition and a block of columns; `threads_per_row` has the loops of its
threads.

A row that reaches beyond its partition comes in parts. The CTA that finishes the last part combines
all parts in the order of the row: equal inputs give equal bits. Where tokens are mapped, the CTAs
of the second half wait for that and read the tokens again. They have higher numbers than the CTAs
they wait for, and a device starts CTAs in the order of their numbers, so the awaited CTAs are
running already.

Rows of many tokens that all fit one SM need none of that: a CTA has one row and a narrow block of
columns, and reads the row for the second time from the cache.

Values have the shape (total, C). The tail is written as 0.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.device import device_info
from ..runtime.launch import (
    INTERPRETED,
    Launch,
    Number,
    Pointer,
    bind_args,
    contiguous,
    current_stream,
    empty,
    launch_args,
)
from . import merge_path
from .merge_path import (
    ARGMAX,
    ARGMIN,
    FACTORS,
    LSE,
    NONE,
    RUNNING,
    RUNNING_BACK,
    combine,
    reduce_axis,
)
from .threads_per_row import (
    clear_tail,
    column_block,
    count_rows_before,
    identity_state,
    load_operands,
    map_row_tokens,
    process_row,
    reduce_short_rows,
    reduce_threads,
    reduce_tokens,
    store_result,
    thread_strides,
)

LEAST = 2  # elements of a token that is wide
_WARPS = 4  # of a program
_BYTES = 16  # that a thread reads of a token
_STEPS = 8  # tokens that a thread reads at once
_STEPS_OF_SEARCHES = 4  # which read ahead
_COLUMNS = 128  # of a program
_ROW_TOKENS = (
    128,
    512,
    2048,
)  # of a row, on average: from, with more warps from, and to, where a program has a row for itself
_ROW_SHAPES = (4, 8), (16, 4)  # warps of such a program, tokens that a thread reads at once
_ROW_PAIRS = (
    (4, 8),
    (16, 8),
)  # the same where it reduces two arrays: so fewer rows are in work, and more of them in the cache
_ROW_FACTORS = (4, 8), (16, 2)  # and where it divides products, which takes registers
_ROW_SEARCHES = (
    (4, 8),
    (8, 4),
)  # and where it searches: 81 registers of 16 warps would leave room for one program
_ROW_BYTES = 64  # that it reads of a token
_PROGRAMS = 4  # a multiprocessor
_SHORTEST = 32  # minimum number of steps of a partition
_LONGEST = 1 << 30  # maximum number of elements of a partition: their positions fit 32 bits
_OVERHANG = 4  # ratio of a partition to the longest row from which no row is cut
_PARTS = 4096  # elements that are put together at once
_FEWEST_COUNTS = 1 << 14
_COUNTS: dict[tuple[torch.device, int], torch.Tensor] = {}  # of each stream
SPREAD = (
    merge_path.COPY.value,
    merge_path.MEAN_BACKWARD.value,
)  # what tokens become that are not looked at
_SCANS = (merge_path.RUNNING.value, merge_path.RUNNING_BACK.value)
_TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_WIDE = tl.constexpr(512)
READY = tl.constexpr(1 << 30)  # is added to the number of parts when they have been put together


@triton.jit
def _begin_before(OFFSETS, d0, d1, n, stride):
    """Return the number of rows that begin before the positions d0 and d1, by a search among 512 at
    a time.
    """
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


@triton.jit(do_not_specialize=("n", "total"))
def rows_kernel(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    n,
    total,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
):
    """A row and a block of columns: OUT is (n, C), or with MAP the tokens (total, C)."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    row = tl.program_id(0) // BLOCKS
    columns, inside = column_block(tl.program_id(0) % BLOCKS, C, BC)
    start = tl.load(OFFSETS + row).to(tl.int64)
    length = (tl.load(OFFSETS + row + 1).to(tl.int64) - start).to(tl.int32)
    process_row(
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
    if MAP != NONE:  # each its part of the tokens behind the last row
        end = tl.load(OFFSETS + n).to(tl.int64)
        part = tl.cdiv(total - end, n)
        clear_tail(
            OUT,
            end + row * part,
            tl.minimum(end + (row + 1) * part, total),
            columns,
            inside,
            C,
            BC,
            G,
            U,
        )


@triton.jit
def _part(PARTS, p, part, SIZE: tl.constexpr):
    """Return the address of a part of the row that begins in partition p: parts of earlier rows
    come first.
    """
    return PARTS + tl.where(part == 0, 2 * p + 1, 2 * (p + part)).to(tl.int64) * SIZE


@triton.jit
def _put_together(
    PARTS,
    OUT,
    row,
    length,
    p,
    count,
    columns,
    inside,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    F: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Combine the parts of a row of this length that begins in partition p, into OUT or the slot of
    the first part.

    For scans write to the slot of each part the combination of all parts up to it.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    TWO: tl.constexpr = (OP == LSE) | (OP == FACTORS)
    u, v = identity_state(1 if RUN else F, BC, IDENTITY, KEPT)
    for k in range(0, count, F):
        part = k + tl.arange(0, F)[None, :, None]
        exists = (part < count) & inside
        if MAP == RUNNING_BACK:
            part = count - 1 - part
        pointers = _part(PARTS, p, part, SIZE) + columns
        us = tl.load(pointers, mask=exists, other=IDENTITY)
        vs = us
        if RUN:
            upto, _ = combine(u, v, count_rows_before(us, 1, OP), v, OP)
            tl.store(pointers, upto, mask=exists)
            us = reduce_axis(us, 1, OP)
            vs = us
        elif TWO:
            vs = tl.load(pointers + C, mask=exists, other=0)
        u, v = combine(u, v, us, vs, OP)
    if not RUN:
        us, vs = reduce_threads(u, v, OP)
        if MAP == NONE:
            store_result(OUT, us, vs, row, length, inside, columns, OP, IDENTITY, C)
        else:
            pointers = _part(PARTS, p, 0, SIZE) + columns
            tl.store(pointers, us, mask=inside)
            if TWO:
                tl.store(pointers + C, vs, mask=inside)


@triton.jit(do_not_specialize=("n", "total", "partition", "partitions", "stride"))
def columns_kernel(
    X,
    Y,
    A,
    B,
    OUT,
    PARTS,
    COUNTS,
    OFFSETS,
    n,
    total,
    partition,
    partitions,
    stride,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    C: tl.constexpr,
    READS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    ACC: tl.constexpr,
    KEPT: tl.constexpr,
    CUT: tl.constexpr,
    BC: tl.constexpr,
    G: tl.constexpr,
    U: tl.constexpr,
    F: tl.constexpr,
):
    """Process the rows of one partition and block of columns: OUT is (n, C), or with MAP the tokens
    (total, C).

    Tokens are read as ACC and reduced in KEPT. With CUT, rows end where their partition ends.
    Otherwise the partition in which a row begins finishes it. PARTS (partitions, 2, ...) holds the
    reductions of a partition's end of an earlier row (0) and of its beginning of a later row (1).
    COUNTS (partitions, blocks) counts the finished parts of the row that crosses the end of a
    partition. It is zero before and after.
    """
    RUN: tl.constexpr = (MAP == RUNNING) | (MAP == RUNNING_BACK)
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    TWO: tl.constexpr = (OP == LSE) | (OP == FACTORS)
    SIZE: tl.constexpr = (G if RUN else 2 if TWO else 1) * C
    pid = tl.program_id(0)
    p = pid // BLOCKS
    block = pid % BLOCKS
    is_second = False
    if CUT and OP != NONE and MAP != NONE:
        is_second = p >= partitions
        p = p % partitions
    columns, inside = column_block(block, C, BC)
    d0 = p.to(tl.int64) * partition
    d1 = d0 + partition
    first, last = _begin_before(OFFSETS, d0, d1, n, stride)

    if CUT:
        for side in range(2):  # the row that began before the partition, its last row
            row = tl.where(side == 0, first, last) - 1
            has = tl.where(side == 0, first > 0, last > first)
            if has & (row < n):
                start = tl.load(OFFSETS + row).to(tl.int64)
                end = tl.load(OFFSETS + row + 1).to(tl.int64)
                begin = ((start + row) // partition).to(tl.int32)
                final = ((end + row) // partition).to(tl.int32)
                if final >= p + side:
                    t0 = tl.where(side == 0, d0 - row - 1, start)
                    length = (tl.minimum(end, d1 - row - 1) - t0).to(tl.int32)
                    a, b = load_operands(
                        A, B, row, end - start, inside, columns, MAP, C, HAS_A, HAS_B, ACC
                    )
                    x = X + t0 * C
                    y = Y + t0 * C
                    part = _part(PARTS, begin, p - begin, SIZE)
                    walk, hop, counts, steps = thread_strides(length, 0, G, MAP)
                    counter = COUNTS + (begin * BLOCKS + block)
                    if OP == NONE:
                        map_row_tokens(
                            x,
                            y,
                            OUT + t0 * C,
                            a,
                            a,
                            a,
                            b,
                            walk,
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
                    elif is_second:
                        while tl.atomic_add(counter, 0, sem="acquire") < READY:
                            pass
                        if (
                            tl.atomic_add(counter, 1, sem="acq_rel")
                            == 2 * (final - begin) + 1 + READY
                        ):  # all have seen it
                            tl.store(counter, 0)
                        tl.debug_barrier()
                        u, v = identity_state(1, BC, IDENTITY, KEPT)
                        if RUN:
                            if p != (begin if MAP == RUNNING else final):
                                neighbor = p - 1 if MAP == RUNNING else p + 1
                                u = tl.load(
                                    _part(PARTS, begin, neighbor - begin, SIZE) + columns,
                                    mask=inside,
                                    other=IDENTITY,
                                )
                            group = tl.arange(0, G)[None, :, None]
                            state = tl.load(
                                part + (group * C + columns),
                                mask=(group > 0) & inside,
                                other=IDENTITY,
                            )
                            u, v = combine(u, v, state, state, OP)
                        else:
                            whole = _part(PARTS, begin, 0, SIZE) + columns
                            u = tl.load(whole, mask=inside, other=0)
                            if TWO:
                                v = tl.load(whole + C, mask=inside, other=0)
                        if MAP != NONE:
                            map_row_tokens(
                                x,
                                y,
                                OUT + t0 * C,
                                u,
                                v,
                                a,
                                b,
                                walk,
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
                    else:
                        us, vs = reduce_tokens(
                            x,
                            y,
                            a,
                            walk,
                            hop,
                            counts,
                            steps,
                            (start - t0).to(tl.int32),
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
                        if RUN:  # the carry of each group; the state of all groups comes first
                            group = (tl.arange(0, G)[None, :, None] + 1) % G
                            tl.store(
                                part + (group * C + columns),
                                count_rows_before(us, 1, OP),
                                mask=inside,
                            )
                        else:
                            us, vs = reduce_threads(us, vs, OP)
                            tl.store(part + columns, us, mask=inside)
                            if TWO:
                                tl.store(part + C + columns, vs, mask=inside)
                        tl.debug_barrier()
                        if tl.atomic_add(counter, 1, sem="acq_rel") == final - begin:
                            tl.debug_barrier()
                            _put_together(
                                PARTS,
                                OUT,
                                row,
                                end - start,
                                begin,
                                final - begin + 1,
                                columns,
                                inside,
                                OP,
                                MAP,
                                IDENTITY,
                                C,
                                BC,
                                F,
                                SIZE,
                                KEPT,
                            )
                            tl.debug_barrier()
                            if MAP == NONE:
                                tl.store(counter, 0)
                            else:
                                tl.atomic_add(counter, READY, sem="release")

    if not is_second:
        if MAP != NONE:  # tokens behind the last row
            end = tl.load(OFFSETS + n).to(tl.int64)
            clear_tail(
                OUT,
                tl.maximum(end, d0 - n - 1),
                tl.minimum(total, d1 - n - 1),
                columns,
                inside,
                C,
                BC,
                G,
                U,
            )
        last = tl.minimum(last, n)
        if CUT & (last > first):  # without the row that crosses the end of the partition
            last -= (tl.load(OFFSETS + last).to(tl.int64) + last - 1 >= d1).to(tl.int32)
        for row in range(first, last, G):
            reduce_short_rows(
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


@launch_args
class RowsArgs:
    """Arguments of `rows_kernel`."""

    X: Pointer
    Y: Pointer
    A: Pointer
    B: Pointer
    OUT: Pointer
    OFFSETS: Pointer
    n: Number
    total: Number


@launch_args
class ColumnsArgs:
    """Arguments of `columns_kernel`."""

    X: Pointer
    Y: Pointer
    A: Pointer
    B: Pointer
    OUT: Pointer
    PARTS: Pointer
    COUNTS: Pointer
    OFFSETS: Pointer
    n: Number
    total: Number
    partition: Number
    partitions: Number
    stride: Number


def run(
    config: "LaunchConfig",
    x: torch.Tensor,
    y: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    out: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Fill `out` as `interface.over_rows` says, on the device of the arrays."""
    x, out = (p.view(torch.uint8) if p.dtype == torch.bool else p for p in (x, out))
    y, a, b = x if y is None else y, x if a is None else a, x if b is None else b
    if config.partitions:
        parts = counts = offsets
        if config.parts:
            parts = empty(x.device.type)(*config.parts)
            counts = counters(x.device, config.partitions)
        args = config.args(X=x, Y=y, A=a, B=b, OUT=out, PARTS=parts, COUNTS=counts, OFFSETS=offsets)
    else:
        args = config.args(X=x, Y=y, A=a, B=b, OUT=out, OFFSETS=offsets)
    config.launch(config.programs, args)


def counters(device: torch.device, number: int) -> torch.Tensor:
    """Return zeros, which the kernels leave as zeros.

    Calls on one stream share them; a captured graph has its own.
    """
    if INTERPRETED or torch.cuda.is_current_stream_capturing():
        return torch.zeros((number,), dtype=torch.int32, device=device)
    key = device, current_stream(device.index)
    counts = _COUNTS.get(key)
    if counts is None or counts.shape[0] < number:
        counts = _COUNTS[key] = torch.zeros(
            (max(number, _FEWEST_COUNTS),), dtype=torch.int32, device=device
        )
    return counts


class LaunchConfig(NamedTuple):
    """The launch of a call, as far as the host metadata determines it."""

    launch: Launch
    programs: int
    args: Callable[..., Any]  # `RowsArgs` or `ColumnsArgs` of the tensors
    partitions: int  # and blocks of columns; 0 where a program has a row
    parts: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = (
        None  # None where no row is put together from parts
    )


def make_config(
    device: torch.device,
    dtypes: tuple[Any, ...],
    op: int,
    map: int,
    acc: torch.dtype,
    state_dtype: torch.dtype,
    identity: float,
    shape: tuple[int, ...],
    n: int,
    max_length: int | None,
) -> LaunchConfig:
    """Return the launch config for x of this shape.

    `dtypes` are the dtypes of x, a, b, out and offsets. Its second entry says whether there is a y.
    Tokens are read as `acc`, and reduced in `state_dtype` from `identity` on.
    """
    total, width, size = shape[0], math.prod(shape[1:]), dtypes[0].itemsize
    most, search = triton.next_power_of_2(width), op in (ARGMAX.value, ARGMIN.value)
    same = dict(
        OP=op,
        MAP=map,
        IDENTITY=identity,
        C=width,
        READS=2 if dtypes[1] else int(map not in SPREAD),
        HAS_A=dtypes[2] is not None,
        HAS_B=dtypes[3] is not None,
        ACC=_TYPES[acc],
        KEPT=_TYPES[state_dtype],
    )
    columns = min(most, _ROW_BYTES // size)
    blocks = -(-width // columns)
    longest = total if max_length is None else max_length
    fewest, many, most_tokens = (tokens * n for tokens in _ROW_TOKENS)
    fits = longest * device_info(device).sm_count <= total * blocks and longest * width <= _LONGEST
    if op and n and fewest <= total <= most_tokens and fits:
        shapes = {
            merge_path.DOT.value: _ROW_PAIRS,
            FACTORS.value: _ROW_FACTORS,
            ARGMAX.value: _ROW_SEARCHES,
            ARGMIN.value: _ROW_SEARCHES,
        }
        warps, steps = shapes.get(op, _ROW_SHAPES)[total >= many]
        tiles = dict(BC=columns, G=_group_count(warps, columns, size), U=steps)
        launch = _launch(device, dtypes, rows_kernel, RowsArgs, warps, **same, **tiles)
        return LaunchConfig(launch, n * blocks, bind_args(RowsArgs, n=n, total=total), 0)
    columns = min(most, _COLUMNS)
    blocks = -(-width // columns)
    groups = _group_count(_WARPS, columns, size)
    items = total + n + 1
    partition = max(
        -(-items * blocks // (device_info(device).sm_count * _PROGRAMS)), _SHORTEST * groups
    )
    partition = max(min(partition, _LONGEST // (blocks * columns)), 1)
    count = -(-items // partition)
    cut = count > 1 and (max_length is None or _OVERHANG * max_length > partition)
    programs = count * blocks * (2 if cut and op and map else 1)
    stride = 1
    while stride * _WIDE.value < n + 1:
        stride *= _WIDE.value
    states = groups if map in _SCANS else 2
    parts = (*contiguous((count, 2, states, width)), state_dtype) if cut and op else None
    tiles = dict(
        CUT=cut,
        BC=columns,
        G=groups,
        U=_STEPS_OF_SEARCHES if search else _STEPS,
        F=max(_PARTS // columns, 2),
    )
    launch = _launch(device, dtypes, columns_kernel, ColumnsArgs, _WARPS, **same, **tiles)
    args = bind_args(
        ColumnsArgs, n=n, total=total, partition=partition, partitions=count, stride=stride
    )
    return LaunchConfig(launch, programs, args, count * blocks, parts)


def _group_count(warps: int, columns: int, size: int) -> int:
    """Return the thread groups of a program, for elements of `size` bytes."""
    return 32 * warps * min(_BYTES // size, columns) // columns


@cache
def _launch(
    device: torch.device,
    dtypes: tuple[Any, ...],
    kernel: Any,
    args: Any,
    warps: int,
    **constants: Any,
) -> Launch:
    return Launch(kernel, constants, dict(num_warps=warps), args=args)
