"""Reduce rows of wide tokens, and optionally map the result over the tokens, one block of columns
per CTA.

Rows and tokens form one list: row b precedes its tokens, at position ``offsets[b] + b``. The list
is cut into partitions of equal length (Merrill and Garland, Merge-based parallel sparse
matrix-vector multiplication, 2016). So neither a very long row nor many empty rows unbalance the
CTAs. A CTA processes one partition and one block of columns. `threads_per_row` has the loops of its
threads, and the meaning of the parameters.

A row that crosses the end of its partition is cut into parts. The CTA that reduces the last part
combines all parts in the order of the row, so equal inputs give equal bits. With a map, the CTAs of
a second pass wait for the combined state and read the tokens again. They have higher numbers than
the CTAs that they wait for. A device starts CTAs in the order of their numbers, so the awaited CTAs
are running already.

If all rows fit one SM and are long on average, each CTA processes one row and a narrow block of
columns instead, without partitions. It reads the row for the second time from the cache.

Values have the shape (total, NUM_COLUMNS). The tail is written as 0.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.device import device_info, persistent_zeros
from ..runtime.launch import (
    INTERPRETED,
    Launch,
    Number,
    Pointer,
    Written,
    bind_args,
    contiguous,
    current_stream,
    empty,
    launch_args,
)
from ..runtime.recording import recorded_zeros
from . import reductions
from .reductions import (
    ARGMAX,
    ARGMIN,
    CUMULATIVE,
    CUMULATIVE_REVERSE,
    LSE,
    NONE,
    PROD_AND_ZEROS,
    combine,
    reduce_axis,
)
from .threads_per_row import (
    clear_tokens,
    columns_of_block,
    group_tokens,
    load_wide_operands,
    map_tokens,
    process_wide_row,
    process_wide_rows,
    reduce_groups,
    reduce_tokens,
    scan_axis,
    store_wide_result,
    wide_identity_state,
)

# Tokens of at least this many elements are processed by these kernels.
MIN_ELEMENTS = 2
_NUM_WARPS = 4
# Bytes of one load of a thread.
_BYTES_PER_THREAD = 16
# Tokens that a thread group loads at once. Searches load one step ahead, which takes registers.
_UNROLL = 8
_UNROLL_OF_SEARCHES = 4
_MAX_BLOCK_COLUMNS = 128

# `segment_wide_row_kernel` runs if the mean length of the rows is in [_MIN_MEAN_LENGTH, _MAX_MEAN_LENGTH].
# From _LONG_MEAN_LENGTH on it uses the second pair of (warps, UNROLL).
_MIN_MEAN_LENGTH = 128
_LONG_MEAN_LENGTH = 512
_MAX_MEAN_LENGTH = 2048
_ROW_CONFIGS = (4, 8), (16, 4)
# DOT reads two arrays: the larger UNROLL keeps fewer rows in flight, and more of them in the cache.
_ROW_CONFIGS_OF_DOT = (4, 8), (16, 8)
# PROD_AND_ZEROS divides products, which takes registers.
_ROW_CONFIGS_OF_PROD_AND_ZEROS = (4, 8), (16, 2)
# Searches take 81 registers per thread: with 16 warps only one CTA would fit an SM.
_ROW_CONFIGS_OF_SEARCHES = (4, 8), (8, 4)
# Bytes of a token per CTA of `segment_wide_row_kernel`.
_ROW_BLOCK_BYTES = 64

# Target number of CTAs of `segment_wide_partition_kernel` per SM.
_CTAS_PER_SM = 4
# Minimum steps of the thread groups in a partition.
_MIN_PARTITION_STEPS = 32
# Maximum elements of a partition, so that their indices fit 32 bits.
_MAX_PARTITION_ELEMENTS = 1 << 30
# No row is cut if a partition is at least this many times as long as the longest row.
_UNCUT_RATIO = 4
# Elements of the parts that are combined at once.
_PART_ELEMENTS_PER_STEP = 4096

_MIN_COUNTERS = 1 << 14
# The counters of each device and stream.
_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}
# Maps that read no tokens.
MAPS_WITHOUT_INPUT = (reductions.BROADCAST.value, reductions.MEAN_BACKWARD.value)
_SCANS = (reductions.CUMULATIVE.value, reductions.CUMULATIVE_REVERSE.value)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_SEARCH_WIDTH = tl.constexpr(512)
# Added to the counter of a row when its parts are combined; larger than any number of parts.
READY = tl.constexpr(1 << 30)


@triton.jit
def _rows_before(OFFSETS, start_position, end_position, n, search_stride):
    """Return the number of rows that begin before each of two merge-path positions.

    The search compares _SEARCH_WIDTH rows at a time. `search_stride` is a power of _SEARCH_WIDTH
    with `search_stride * _SEARCH_WIDTH > n`.
    """
    candidate = tl.arange(0, _SEARCH_WIDTH) + 1
    count0 = start_position * 0
    count1 = start_position * 0
    while search_stride > 0:
        row0 = count0 + candidate * search_stride - 1
        row1 = count1 + candidate * search_stride - 1
        position0 = tl.load(OFFSETS + row0, mask=row0 <= n, other=0) + row0
        position1 = tl.load(OFFSETS + row1, mask=row1 <= n, other=0) + row1
        count0 += (
            tl.sum(((row0 <= n) & (position0 < start_position)).to(tl.int32), 0) * search_stride
        )
        count1 += tl.sum(((row1 <= n) & (position1 < end_position)).to(tl.int32), 0) * search_stride
        search_stride = search_stride // _SEARCH_WIDTH
    return count0, count1


@triton.jit(do_not_specialize=("n", "total"))
def segment_wide_row_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    n,
    total,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Process one row and one block of columns.

    OUT is the result (n, NUM_COLUMNS), or with MAP the mapped tokens (total, NUM_COLUMNS).
    """
    BLOCKS: tl.constexpr = (NUM_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row = tl.program_id(0) // BLOCKS
    columns, column_mask = columns_of_block(tl.program_id(0) % BLOCKS, NUM_COLUMNS, BLOCK_COLUMNS)
    start = tl.load(OFFSETS + row).to(tl.int64)
    length = (tl.load(OFFSETS + row + 1).to(tl.int64) - start).to(tl.int32)
    process_wide_row(
        X,
        Y,
        ROW_A,
        ROW_B,
        OUT,
        row,
        start,
        length,
        columns,
        column_mask,
        OP,
        MAP,
        IDENTITY,
        NUM_COLUMNS,
        BLOCK_COLUMNS,
        GROUPS,
        UNROLL,
        NUM_INPUTS,
        HAS_A,
        HAS_B,
        COMPUTE_DTYPE,
        STATE_DTYPE,
    )
    if MAP != NONE:
        # The CTA of each row clears an equal piece of the tail.
        end = tl.load(OFFSETS + n).to(tl.int64)
        piece = tl.cdiv(total - end, n)
        clear_tokens(
            OUT,
            end + row * piece,
            tl.minimum(end + (row + 1) * piece, total),
            columns,
            column_mask,
            NUM_COLUMNS,
            BLOCK_COLUMNS,
            GROUPS,
            UNROLL,
        )


@triton.jit
def _part_pointer(PARTS, first_partition, part, PART_ELEMENTS: tl.constexpr):
    """Return the address of the state of a row's part; the row begins in `first_partition`.

    Part 0 is on side 1 of the first partition. Later parts are on side 0 of their partitions.
    """
    slot = tl.where(part == 0, 2 * first_partition + 1, 2 * (first_partition + part))
    return PARTS + slot.to(tl.int64) * PART_ELEMENTS


@triton.jit
def _combine_parts(
    PARTS,
    OUT,
    row,
    length,
    first_partition,
    num_parts,
    columns,
    column_mask,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr,
    PART_ELEMENTS: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Combine the states of all parts of one row.

    Without MAP, write the result of the row, which has this length, to OUT. With MAP, replace the
    state of the first part by the state of the row. For scans, replace the state of each part by
    the combination of all parts up to and including it.
    """
    SCAN: tl.constexpr = (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE)
    HAS_STATE2: tl.constexpr = (OP == LSE) | (OP == PROD_AND_ZEROS)
    state, state2 = wide_identity_state(
        1 if SCAN else PARTS_PER_STEP, BLOCK_COLUMNS, IDENTITY, STATE_DTYPE
    )
    for done in range(0, num_parts, PARTS_PER_STEP):
        part = done + tl.arange(0, PARTS_PER_STEP)[None, :, None]
        mask = (part < num_parts) & column_mask
        if MAP == CUMULATIVE_REVERSE:
            part = num_parts - 1 - part
        pointers = _part_pointer(PARTS, first_partition, part, PART_ELEMENTS) + columns
        states = tl.load(pointers, mask=mask, other=IDENTITY)
        states2 = states
        if SCAN:
            cumulative, _ = combine(state, state2, scan_axis(states, 1, OP), state2, OP)
            tl.store(pointers, cumulative, mask=mask)
            states = reduce_axis(states, 1, OP)
            states2 = states
        elif HAS_STATE2:
            states2 = tl.load(pointers + NUM_COLUMNS, mask=mask, other=0)
        state, state2 = combine(state, state2, states, states2, OP)
    if not SCAN:
        states, states2 = reduce_groups(state, state2, OP)
        if MAP == NONE:
            store_wide_result(
                OUT, states, states2, row, length, column_mask, columns, OP, IDENTITY, NUM_COLUMNS
            )
        else:
            pointers = _part_pointer(PARTS, first_partition, 0, PART_ELEMENTS) + columns
            tl.store(pointers, states, mask=column_mask)
            if HAS_STATE2:
                tl.store(pointers + NUM_COLUMNS, states2, mask=column_mask)


@triton.jit(do_not_specialize=("n", "total", "partition_size", "num_partitions", "search_stride"))
def segment_wide_partition_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    PARTS,
    COUNTS,
    OFFSETS,
    n,
    total,
    partition_size,
    num_partitions,
    search_stride,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    CUT_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr,
):
    """Process the rows of one partition and one block of columns.

    OUT is the result (n, NUM_COLUMNS), or with MAP the mapped tokens (total, NUM_COLUMNS). Without
    CUT_ROWS the CTA of the partition in which a row begins processes the whole row.

    With CUT_ROWS a row that crosses the end of a partition comes in parts, one per partition. PARTS
    (num_partitions, 2, ...) holds the state of a partition's part of an earlier row (side 0) and of
    a row that begins in the partition (side 1). COUNTS[partition in which the row begins, block]
    counts the reduced parts of the row. The CTA that completes the row combines the parts. With
    MAP, it then adds READY. The CTAs of pass 2 wait for READY, add 1 and map their tokens; the last
    CTA resets the counter to 0. Maps with OP == NONE need only one pass.
    """
    SCAN: tl.constexpr = (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE)
    BLOCKS: tl.constexpr = (NUM_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    HAS_STATE2: tl.constexpr = (OP == LSE) | (OP == PROD_AND_ZEROS)
    PART_ELEMENTS: tl.constexpr = (GROUPS if SCAN else 2 if HAS_STATE2 else 1) * NUM_COLUMNS
    pid = tl.program_id(0)
    partition = pid // BLOCKS
    block = pid % BLOCKS
    is_second_pass = False
    if CUT_ROWS and OP != NONE and MAP != NONE:
        is_second_pass = partition >= num_partitions
        partition = partition % num_partitions
    columns, column_mask = columns_of_block(block, NUM_COLUMNS, BLOCK_COLUMNS)
    start_position = partition.to(tl.int64) * partition_size
    end_position = start_position + partition_size
    first_row, end_row = _rows_before(OFFSETS, start_position, end_position, n, search_stride)

    if CUT_ROWS:
        # Side 0 is the row that began before the partition, side 1 the last row that begins in it.
        for side in range(2):
            row = tl.where(side == 0, first_row, end_row) - 1
            has_row = tl.where(side == 0, first_row > 0, end_row > first_row)
            if has_row & (row < n):
                start = tl.load(OFFSETS + row).to(tl.int64)
                end = tl.load(OFFSETS + row + 1).to(tl.int64)
                first_partition = ((start + row) // partition_size).to(tl.int32)
                last_partition = ((end + row) // partition_size).to(tl.int32)
                if last_partition >= partition + side:
                    piece_start = tl.where(side == 0, start_position - row - 1, start)
                    length = (tl.minimum(end, end_position - row - 1) - piece_start).to(tl.int32)
                    row_a, row_b = load_wide_operands(
                        ROW_A,
                        ROW_B,
                        row,
                        end - start,
                        column_mask,
                        columns,
                        MAP,
                        NUM_COLUMNS,
                        HAS_A,
                        HAS_B,
                        COMPUTE_DTYPE,
                    )
                    piece_x = X + piece_start * NUM_COLUMNS
                    piece_y = Y + piece_start * NUM_COLUMNS
                    part_pointer = _part_pointer(
                        PARTS, first_partition, partition - first_partition, PART_ELEMENTS
                    )
                    first_token, token_step, num_tokens, num_steps = group_tokens(
                        length, 0, GROUPS, MAP
                    )
                    counter = COUNTS + (first_partition * BLOCKS + block)
                    if OP == NONE:
                        map_tokens(
                            piece_x,
                            piece_y,
                            OUT + piece_start * NUM_COLUMNS,
                            row_a,
                            row_a,
                            row_a,
                            row_b,
                            first_token,
                            token_step,
                            num_tokens,
                            num_steps,
                            columns,
                            column_mask,
                            OP,
                            MAP,
                            NUM_COLUMNS,
                            BLOCK_COLUMNS,
                            GROUPS,
                            UNROLL,
                            NUM_INPUTS,
                            COMPUTE_DTYPE,
                        )
                    elif is_second_pass:
                        # Spin until the first pass has reduced the row.
                        while tl.atomic_add(counter, 0, sem="acquire") < READY:
                            pass
                        # The last CTA that sees READY resets the counter.
                        previous = tl.atomic_add(counter, 1, sem="acq_rel")
                        if previous == 2 * (last_partition - first_partition) + 1 + READY:
                            tl.store(counter, 0)
                        tl.debug_barrier()
                        state, state2 = wide_identity_state(1, BLOCK_COLUMNS, IDENTITY, STATE_DTYPE)
                        if SCAN:
                            if partition != (
                                first_partition if MAP == CUMULATIVE else last_partition
                            ):
                                neighbor = partition - 1 if MAP == CUMULATIVE else partition + 1
                                state = tl.load(
                                    _part_pointer(
                                        PARTS,
                                        first_partition,
                                        neighbor - first_partition,
                                        PART_ELEMENTS,
                                    )
                                    + columns,
                                    mask=column_mask,
                                    other=IDENTITY,
                                )
                            group = tl.arange(0, GROUPS)[None, :, None]
                            group_carry = tl.load(
                                part_pointer + (group * NUM_COLUMNS + columns),
                                mask=(group > 0) & column_mask,
                                other=IDENTITY,
                            )
                            state, state2 = combine(state, state2, group_carry, group_carry, OP)
                        else:
                            row_state = (
                                _part_pointer(PARTS, first_partition, 0, PART_ELEMENTS) + columns
                            )
                            state = tl.load(row_state, mask=column_mask, other=0)
                            if HAS_STATE2:
                                state2 = tl.load(row_state + NUM_COLUMNS, mask=column_mask, other=0)
                        if MAP != NONE:
                            map_tokens(
                                piece_x,
                                piece_y,
                                OUT + piece_start * NUM_COLUMNS,
                                state,
                                state2,
                                row_a,
                                row_b,
                                first_token,
                                token_step,
                                num_tokens,
                                num_steps,
                                columns,
                                column_mask,
                                OP,
                                MAP,
                                NUM_COLUMNS,
                                BLOCK_COLUMNS,
                                GROUPS,
                                UNROLL,
                                NUM_INPUTS,
                                COMPUTE_DTYPE,
                            )
                    else:
                        states, states2 = reduce_tokens(
                            piece_x,
                            piece_y,
                            row_a,
                            first_token,
                            token_step,
                            num_tokens,
                            num_steps,
                            (start - piece_start).to(tl.int32),
                            columns,
                            column_mask,
                            OP,
                            IDENTITY,
                            NUM_COLUMNS,
                            BLOCK_COLUMNS,
                            GROUPS,
                            UNROLL,
                            NUM_INPUTS,
                            COMPUTE_DTYPE,
                            STATE_DTYPE,
                        )
                        if SCAN:
                            # Slot g > 0 gets the carry into group g, and slot 0 the state of the
                            # whole part.
                            group = (tl.arange(0, GROUPS)[None, :, None] + 1) % GROUPS
                            tl.store(
                                part_pointer + (group * NUM_COLUMNS + columns),
                                scan_axis(states, 1, OP),
                                mask=column_mask,
                            )
                        else:
                            states, states2 = reduce_groups(states, states2, OP)
                            tl.store(part_pointer + columns, states, mask=column_mask)
                            if HAS_STATE2:
                                tl.store(
                                    part_pointer + NUM_COLUMNS + columns, states2, mask=column_mask
                                )
                        tl.debug_barrier()
                        if (
                            tl.atomic_add(counter, 1, sem="acq_rel")
                            == last_partition - first_partition
                        ):
                            tl.debug_barrier()
                            _combine_parts(
                                PARTS,
                                OUT,
                                row,
                                end - start,
                                first_partition,
                                last_partition - first_partition + 1,
                                columns,
                                column_mask,
                                OP,
                                MAP,
                                IDENTITY,
                                NUM_COLUMNS,
                                BLOCK_COLUMNS,
                                PARTS_PER_STEP,
                                PART_ELEMENTS,
                                STATE_DTYPE,
                            )
                            tl.debug_barrier()
                            if MAP == NONE:
                                tl.store(counter, 0)
                            else:
                                tl.atomic_add(counter, READY, sem="release")

    if not is_second_pass:
        if MAP != NONE:
            end = tl.load(OFFSETS + n).to(tl.int64)
            clear_tokens(
                OUT,
                tl.maximum(end, start_position - n - 1),
                tl.minimum(total, end_position - n - 1),
                columns,
                column_mask,
                NUM_COLUMNS,
                BLOCK_COLUMNS,
                GROUPS,
                UNROLL,
            )
        end_row = tl.minimum(end_row, n)
        # Leave out the row that crosses the end of the partition: it is cut.
        if CUT_ROWS & (end_row > first_row):
            end_row -= (tl.load(OFFSETS + end_row).to(tl.int64) + end_row - 1 >= end_position).to(
                tl.int32
            )
        for row in range(first_row, end_row, GROUPS):
            process_wide_rows(
                X,
                Y,
                ROW_A,
                ROW_B,
                OUT,
                OFFSETS,
                row,
                end_row,
                columns,
                column_mask,
                OP,
                MAP,
                IDENTITY,
                NUM_COLUMNS,
                BLOCK_COLUMNS,
                GROUPS,
                UNROLL,
                NUM_INPUTS,
                HAS_A,
                HAS_B,
                COMPUTE_DTYPE,
                STATE_DTYPE,
            )


@launch_args
class WideRowArgs:
    """Arguments of `segment_wide_row_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Written
    OFFSETS: Pointer
    n: Number
    total: Number


@launch_args
class WidePartitionArgs:
    """Arguments of `segment_wide_partition_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Written
    PARTS: Written
    COUNTS: Written
    OFFSETS: Pointer
    n: Number
    total: Number
    partition_size: Number
    num_partitions: Number
    search_stride: Number


def run(config: "LaunchConfig", tensors: dict[str, torch.Tensor]) -> None:
    """Fill OUT as described in `interface.over_rows`; the tensors have the names of the arguments."""
    if config.num_counters:
        parts = counts = tensors["OFFSETS"]
        if config.parts:
            device = tensors["OUT"].device
            parts = empty(device.type)(*config.parts)
            counts = counters(device, config.num_counters)
        args = config.args(**tensors, PARTS=parts, COUNTS=counts)
    else:
        args = config.args(**tensors)
    config.launch(config.num_ctas, args)


def counters(device: torch.device, number: int) -> torch.Tensor:
    """Return zeros, which the kernels leave as zeros.

    Calls on one stream share them; a captured graph and a recorded call have their own.
    """
    if device.type == "meta":
        return recorded_zeros((number,), torch.int32)
    if INTERPRETED or torch.cuda.is_current_stream_capturing():
        return torch.zeros((number,), dtype=torch.int32, device=device)
    key = device, current_stream(device.index)
    counts = _COUNTERS.get(key)
    if counts is None or counts.shape[0] < number:
        counts = _COUNTERS[key] = persistent_zeros(
            (max(number, _MIN_COUNTERS),), torch.int32, device
        )
    return counts


class LaunchConfig(NamedTuple):
    """The launch of a call, as far as the host metadata determines it."""

    launch: Launch
    num_ctas: int
    #: Build `WideRowArgs` or `WidePartitionArgs` from the tensors.
    args: Callable[..., Any]
    #: One counter per partition and block of columns; 0 for `segment_wide_row_kernel`.
    num_counters: int
    #: Shape, strides and dtype of PARTS; None if no row is reduced in parts.
    parts: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None


def make_config(
    device: torch.device,
    dtypes: tuple[Any, ...],
    op: int,
    map: int,
    compute_dtype: torch.dtype,
    state_dtype: torch.dtype,
    identity: float,
    shape: tuple[int, ...],
    n: int,
    max_length: int | None,
) -> LaunchConfig:
    """Return the launch config for x of this shape.

    `dtypes` are the dtypes of x, row_a, row_b, out and offsets. Its second entry is True if there
    is a y. `identity` is the state of a reduction of no tokens.
    """
    total, width, itemsize = shape[0], math.prod(shape[1:]), dtypes[0].itemsize
    max_block_columns = triton.next_power_of_2(width)
    is_search = op in (ARGMAX.value, ARGMIN.value)
    constants = dict(
        OP=op,
        MAP=map,
        IDENTITY=identity,
        NUM_COLUMNS=width,
        NUM_INPUTS=2 if dtypes[1] else int(map not in MAPS_WITHOUT_INPUT),
        HAS_A=dtypes[2] is not None,
        HAS_B=dtypes[3] is not None,
        COMPUTE_DTYPE=_TRITON_DTYPES[compute_dtype],
        STATE_DTYPE=_TRITON_DTYPES[state_dtype],
    )

    # One row per CTA, if the rows are long on average and the longest row does not dominate.
    block_columns = min(max_block_columns, _ROW_BLOCK_BYTES // itemsize)
    num_blocks = -(-width // block_columns)
    longest = total if max_length is None else max_length
    rows_fit = (
        longest * device_info(device).sm_count <= total * num_blocks
        and longest * width <= _MAX_PARTITION_ELEMENTS
    )
    if op and n and _MIN_MEAN_LENGTH * n <= total <= _MAX_MEAN_LENGTH * n and rows_fit:
        row_configs = {
            reductions.DOT.value: _ROW_CONFIGS_OF_DOT,
            PROD_AND_ZEROS.value: _ROW_CONFIGS_OF_PROD_AND_ZEROS,
            ARGMAX.value: _ROW_CONFIGS_OF_SEARCHES,
            ARGMIN.value: _ROW_CONFIGS_OF_SEARCHES,
        }
        num_warps, unroll = row_configs.get(op, _ROW_CONFIGS)[total >= _LONG_MEAN_LENGTH * n]
        tiles = dict(
            BLOCK_COLUMNS=block_columns,
            GROUPS=_group_count(num_warps, block_columns, itemsize),
            UNROLL=unroll,
        )
        launch = _launch(
            device, dtypes, segment_wide_row_kernel, WideRowArgs, num_warps, **constants, **tiles
        )
        args = bind_args(WideRowArgs, n=n, total=total)
        return LaunchConfig(launch, n * num_blocks, args, 0)

    block_columns = min(max_block_columns, _MAX_BLOCK_COLUMNS)
    num_blocks = -(-width // block_columns)
    groups = _group_count(_NUM_WARPS, block_columns, itemsize)
    num_positions = total + n + 1
    partition_size = max(
        -(-num_positions * num_blocks // (device_info(device).sm_count * _CTAS_PER_SM)),
        _MIN_PARTITION_STEPS * groups,
    )
    partition_size = max(
        min(partition_size, _MAX_PARTITION_ELEMENTS // (num_blocks * block_columns)), 1
    )
    num_partitions = -(-num_positions // partition_size)
    cut_rows = num_partitions > 1 and (
        max_length is None or _UNCUT_RATIO * max_length > partition_size
    )
    num_passes = 2 if cut_rows and op and map else 1
    search_stride = 1
    while search_stride * _SEARCH_WIDTH.value < n + 1:
        search_stride *= _SEARCH_WIDTH.value
    states_per_part = groups if map in _SCANS else 2
    parts = None
    if cut_rows and op:
        parts = (*contiguous((num_partitions, 2, states_per_part, width)), state_dtype)
    tiles = dict(
        CUT_ROWS=cut_rows,
        BLOCK_COLUMNS=block_columns,
        GROUPS=groups,
        UNROLL=_UNROLL_OF_SEARCHES if is_search else _UNROLL,
        PARTS_PER_STEP=max(_PART_ELEMENTS_PER_STEP // block_columns, 2),
    )
    launch = _launch(
        device,
        dtypes,
        segment_wide_partition_kernel,
        WidePartitionArgs,
        _NUM_WARPS,
        () if parts else ("PARTS", "COUNTS"),
        **constants,
        **tiles,
    )
    args = bind_args(
        WidePartitionArgs,
        n=n,
        total=total,
        partition_size=partition_size,
        num_partitions=num_partitions,
        search_stride=search_stride,
    )
    num_counters = num_partitions * num_blocks
    return LaunchConfig(launch, num_counters * num_passes, args, num_counters, parts)


def _group_count(num_warps: int, block_columns: int, itemsize: int) -> int:
    """Return the number of thread groups of a CTA."""
    columns_per_thread = min(_BYTES_PER_THREAD // itemsize, block_columns)
    return 32 * num_warps * columns_per_thread // block_columns


@cache
def _launch(
    device: torch.device,
    dtypes: tuple[Any, ...],
    kernel: Any,
    args: Any,
    num_warps: int,
    unwritten: tuple[str, ...] = (),
    **constants: Any,
) -> Launch:
    """Return the launch of a kernel with these constants, one per device and dtypes."""
    return Launch(kernel, constants, dict(num_warps=num_warps), args=args, unwritten=unwritten)
