"""Reduce rows of scalars, and optionally map the result over the tokens, balanced by merge path for
rows of any length.

Rows and tokens form one list: row b precedes its tokens, at position ``offsets[b] + b``, and its
token i has position ``i + b + 1``. The list is cut into partitions of equal length, one per CTA
(Merrill and Garland, Merge-based parallel sparse matrix-vector multiplication, 2016). So neither a
very long row nor many empty rows unbalance the CTAs. The CTA of the partition in which a row begins
processes the whole row.

============================  ======================================================================
length of a row               how it is processed
============================  ======================================================================
up to WIDTH                   with other rows in a tile of ROWS rows and WIDTH tokens per row
up to `max_uncut_length`      by the whole CTA, ROWS * WIDTH tokens per step
more than `max_uncut_length`  by `segment_part_kernel`: cut into parts, one per CTA and pass
============================  ======================================================================

The states of the parts of a row are combined in a fixed order, so equal inputs give equal bits.

A cache holds the rows of the partitions. Where launches are recorded there is no cache: then
`segment_rows_kernel` processes all rows of a small batch, and each CTA searches its rows in OFFSETS.

Values have the shape (total,). The tail is written as 0. `OP` is the reduction and `MAP` the map, see
`reductions`.
The kernels and their helpers have these parameters and names:

=================================  =================================================================
name                               meaning
=================================  =================================================================
X, Y                               values (total,); NUM_INPUTS of them are read: 0, 1 (X) or 2
ROW_A, ROW_B                       operands (n,), one entry per row; read if HAS_A, HAS_B
OUT                                result (n,), or with MAP the mapped tokens (total,)
OFFSETS                            offsets of the rows (n + 1,)
FIRST_ROWS                         number of rows that begin before each partition, or part
n, total                           number of rows, number of tokens including the tail
max_uncut_length                   rows longer than this are cut into parts
row_a, row_b                       entries of ROW_A and ROW_B of the rows in the tile
state, state2                      reduction state of each row; `state2` exists only for LSE (sum of
                                   exp) and PROD_AND_ZEROS (number of zeros)
ROWS, WIDTH                        rows and tokens per row in a tile
STEP                               tokens per iteration of a row that has the CTA to itself
THREADS_PER_ROW                    threads per row in a tile of several rows
THREADS_PER_LONG_ROW               threads of a row that has the CTA to itself
VECTOR                             whether full steps are loaded without a mask, 16 bytes per thread
IDENTITY                           state of a reduction of no tokens
FILL                               value of a masked load of X
COMPUTE_DTYPE, STATE_DTYPE         dtype of loaded tokens, dtype of states
EVICTION                           eviction policy of loads
LONG_STEP                          tokens per step of rows of more than half as many tokens, or 0: such
                                   rows are processed like the others
SAMPLED_ROWS, SAMPLE_ROUNDS        rows that a CTA compares at once to search its rows, and the rounds of
                                   the search; with 0 rounds FIRST_ROWS is read
LAUNCH_DEPENDENTS                  whether the next kernel may start before this kernel ends
WAIT_FOR_PREVIOUS                  whether the kernel started before the previous kernel ended
                                   (programmatic dependent launch)
=================================  =================================================================

Tensors of tokens have the shape (tokens per thread, ROWS, THREADS_PER_ROW), tensors of rows the
shape (1, ROWS, 1). Dimensions may have length 1 where all entries are equal.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.launch import Number, Pointer, Written, launch_args
from .reductions import (
    ALL,
    ANY,
    ARGMAX,
    ARGMIN,
    COUNT_EQUAL,
    CUMULATIVE,
    CUMULATIVE_REVERSE,
    DOT,
    LSE,
    MEAN_BACKWARD,
    NO_POSITION,
    NONE,
    PROD,
    PROD_AND_ZEROS,
    SUM,
    SUM_Y,
    add_tokens,
    combine,
    fast_exp,
    finish_reduction,
    finite_or_zero,
    first_extremum,
    initial_states,
    map_values,
    pack_search_key,
    reduce_axis,
)


@triton.jit
def _reduce_states(states, states2, OP: tl.constexpr):
    """Reduce the states of the threads of each row to one state per row."""
    state = reduce_axis(reduce_axis(states, 0, OP), 2, OP)
    state2 = tl.zeros_like(state)
    if OP == LSE:
        scaled = states2 * fast_exp(states - finite_or_zero(state))
        state2 = reduce_axis(reduce_axis(scaled, 0, SUM), 2, SUM)
    elif OP == PROD_AND_ZEROS:
        state2 = reduce_axis(reduce_axis(states2, 0, SUM), 2, SUM)
    return state, state2


@triton.jit
def _to_state(
    x,
    y,
    row_a,
    valid,
    step_position,
    index_in_step,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Return the state of each token; for searches the state of each thread.

    A token has the position `step_position + index_in_step` in its row.
    """
    if (OP == ARGMAX) | (OP == ARGMIN):
        m, index = first_extremum(x, tl.where(valid, index_in_step, NO_POSITION), OP)
        has_no_token = index == NO_POSITION
        x = tl.where(has_no_token, IDENTITY, pack_search_key(m, step_position + index, OP))
    elif OP == DOT:
        x *= y
    elif OP == SUM_Y:
        x = y
    elif OP == COUNT_EQUAL:
        x = (valid & (x == row_a)).to(STATE_DTYPE)
    elif (OP == ANY) | (OP == ALL):
        x = (x != 0).to(STATE_DTYPE)
    return x


@triton.jit
def _scan(x, carry, MAP: tl.constexpr, OP: tl.constexpr):
    """Scan tokens (1, ROWS, THREADS) from the carry (1, ROWS, 1).

    Return the scanned tokens and the next carry.
    """
    REVERSE: tl.constexpr = MAP == CUMULATIVE_REVERSE
    if OP == PROD:
        return tl.cumprod(x, 2, reverse=REVERSE) * carry, reduce_axis(x, 2, OP) * carry
    return tl.cumsum(x, 2, reverse=REVERSE) + carry, reduce_axis(x, 2, OP) + carry


@triton.jit
def _identity_state(ROWS: tl.constexpr, IDENTITY: tl.constexpr, STATE_DTYPE: tl.constexpr):
    """Return the states of rows without tokens; shape (1, ROWS, 1)."""
    return tl.full([1, ROWS, 1], IDENTITY, STATE_DTYPE), tl.zeros([1, ROWS, 1], STATE_DTYPE)


@triton.jit
def _row_bounds(OFFSETS, row):
    """Return the first token of a row and the token after its last."""
    return tl.load(OFFSETS + row).to(tl.int64), tl.load(OFFSETS + row + 1).to(tl.int64)


@triton.jit
def _load_operands(
    ROW_A,
    ROW_B,
    rows,
    lengths,
    row_mask,
    MAP: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):
    """Load the per-row operands of the given rows; shape (1, ROWS, 1).

    For MEAN_BACKWARD divide `row_a` by the lengths of the rows.
    """
    row_a = tl.zeros([1, 1, 1], COMPUTE_DTYPE)
    row_b = tl.zeros([1, 1, 1], COMPUTE_DTYPE)
    if HAS_A:
        row_a = tl.load(ROW_A + rows, mask=row_mask, other=0).to(COMPUTE_DTYPE)[None, :, None]
    if HAS_B:
        row_b = tl.load(ROW_B + rows, mask=row_mask, other=0).to(COMPUTE_DTYPE)[None, :, None]
    if MAP == MEAN_BACKWARD:
        row_a /= lengths.to(COMPUTE_DTYPE)[None, :, None]
    return row_a, row_b


@triton.jit
def _load_tokens(
    X,
    Y,
    thread_token,
    stride,
    valid,
    NUM_INPUTS: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):
    """Load the tokens `thread_token + stride` of X and Y that are `valid`.

    The others become FILL in x and 0 in y, which changes no result.
    """
    if NUM_INPUTS == 0:
        x = tl.zeros(valid.shape, COMPUTE_DTYPE)
    else:
        x = tl.load(X + thread_token + stride, mask=valid, other=FILL).to(COMPUTE_DTYPE)
    y = x
    if NUM_INPUTS == 2:
        y = tl.load(Y + thread_token + stride, mask=valid, other=0).to(COMPUTE_DTYPE)
    return x, y


@triton.jit
def _token_indices(TOKENS_PER_THREAD: tl.constexpr, THREADS: tl.constexpr):
    """Return the index of each thread's first token (1, 1, THREADS) and the steps between its
    tokens (TOKENS_PER_THREAD, 1, 1).
    """
    thread_token = tl.arange(0, THREADS)[None, None, :]
    return thread_token, (tl.arange(0, TOKENS_PER_THREAD) * THREADS)[:, None, None]


@triton.jit
def _load_step(
    X,
    Y,
    step_start,
    begin,
    end,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Load the tokens [step_start, step_start + STEP) as (STEP / THREADS, 1, THREADS).

    Return x, y, and the mask of the tokens in [begin, end).
    """
    thread_token, stride = _token_indices(STEP // THREADS, THREADS)
    valid = (thread_token + stride >= tl.maximum(begin - step_start, 0).to(tl.int32)) & (
        thread_token + stride < tl.minimum(end - step_start, STEP).to(tl.int32)
    )
    if VECTOR and NUM_INPUTS > 0:
        # Without a mask a thread loads 16 bytes at once.
        if (step_start >= begin) & (step_start + STEP <= end):
            x = tl.load(X + step_start + thread_token + stride, eviction_policy=EVICTION).to(
                COMPUTE_DTYPE
            )
            y = tl.load(
                (Y if NUM_INPUTS == 2 else X) + step_start + thread_token + stride,
                eviction_policy=EVICTION,
            ).to(COMPUTE_DTYPE)
        else:
            x, y = _load_tokens(
                X + step_start,
                Y + step_start,
                thread_token,
                stride,
                valid,
                NUM_INPUTS,
                FILL,
                COMPUTE_DTYPE,
            )
    else:
        x, y = _load_tokens(
            X + step_start,
            Y + step_start,
            thread_token,
            stride,
            valid,
            NUM_INPUTS,
            FILL,
            COMPUTE_DTYPE,
        )
    return x, y, valid


@triton.jit
def _reduce_tokens(
    X,
    Y,
    row_a,
    row_start,
    begin,
    end,
    OP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reduce the tokens [begin, end) of one row, whose first token is `row_start`."""
    # One state per thread; combined only at the end.
    state = tl.full([1, 1, THREADS], IDENTITY, STATE_DTYPE)
    state2 = tl.zeros([1, 1, THREADS], STATE_DTYPE)
    thread_token, stride = _token_indices(STEP // THREADS, THREADS)
    # Written so that Triton does not infer alignment; with it, masked loads read one token in four.
    aligned_begin = begin - begin % 32
    for done in range(0, end - aligned_begin, STEP):
        step_start = aligned_begin + done
        if VECTOR:
            step_start = tl.multiple_of(step_start, 32)
        x, y, valid = _load_step(
            X,
            Y,
            step_start,
            begin,
            end,
            STEP,
            THREADS,
            VECTOR,
            NUM_INPUTS,
            FILL,
            COMPUTE_DTYPE,
            EVICTION="",
        )
        x = _to_state(
            x,
            y,
            row_a,
            valid,
            step_start - row_start,
            thread_token + stride,
            OP,
            IDENTITY,
            STATE_DTYPE,
        )
        state, state2 = add_tokens(state, state2, x, OP)
    return _reduce_states(state, state2, OP)


@triton.jit
def _map_tokens(
    X,
    Y,
    OUT,
    state,
    state2,
    row_a,
    row_b,
    begin,
    end,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):
    """Write the mapped tokens [begin, end) of one row; scans continue from `state`."""
    SCAN: tl.constexpr = (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE)
    THREADS: tl.constexpr = STEP if SCAN else THREADS_PER_LONG_ROW
    thread_token, stride = _token_indices(STEP // THREADS, THREADS)
    aligned_begin = begin - begin % 32
    for done in range(0, end - aligned_begin, STEP):
        step_start = aligned_begin + done
        # From the last step to the first: CUMULATIVE_REVERSE needs this order for its carry; other
        # maps profit from the cache.
        if MAP != CUMULATIVE:
            step_start = aligned_begin + (end - aligned_begin - 1) // STEP * STEP - done
        if VECTOR:
            step_start = tl.multiple_of(step_start, 32)
        # Loads use evict_first, because each token is read for the last time.
        x, y, valid = _load_step(
            X,
            Y,
            step_start,
            begin,
            end,
            STEP,
            THREADS,
            VECTOR,
            NUM_INPUTS,
            FILL,
            COMPUTE_DTYPE,
            EVICTION="evict_first",
        )
        if SCAN:
            mapped, state = _scan(x, state, MAP, OP)
        else:
            mapped = map_values(x, y, state, state2, row_a, row_b, MAP)
        mapped = mapped.to(OUT.dtype.element_ty)
        if VECTOR:
            if (step_start >= begin) & (step_start + STEP <= end):
                tl.store(OUT + step_start + thread_token + stride, mapped, cache_modifier=".cs")
            else:
                tl.store(OUT + step_start + thread_token + stride, mapped, mask=valid)
        else:
            tl.store(OUT + step_start + thread_token + stride, mapped, mask=valid)


@triton.jit
def _store_result(
    OUT, state, state2, rows, lengths, row_mask, OP: tl.constexpr, IDENTITY: tl.constexpr
):
    """Write the results of the given rows, which have these lengths."""
    result = finish_reduction(state, state2, lengths[None, :, None], OP, IDENTITY)
    tl.store(
        OUT + rows[None, :, None], result.to(OUT.dtype.element_ty), mask=row_mask[None, :, None]
    )


@triton.jit
def _process_row(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    row,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Process one whole row, STEP tokens at a time."""
    start, end = _row_bounds(OFFSETS, row)
    rows = row + tl.zeros([1], tl.int32)
    length = (end - start) + tl.zeros([1], tl.int64)
    row_a, row_b = _load_operands(
        ROW_A, ROW_B, rows, length, rows >= 0, MAP, HAS_A, HAS_B, COMPUTE_DTYPE
    )
    if (OP == NONE) | (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE):
        state, state2 = _identity_state(1, IDENTITY, STATE_DTYPE)
    else:
        state, state2 = _reduce_tokens(
            X,
            Y,
            row_a,
            start,
            start,
            end,
            OP,
            STEP,
            THREADS,
            VECTOR,
            NUM_INPUTS,
            IDENTITY,
            FILL,
            COMPUTE_DTYPE,
            STATE_DTYPE,
        )
    if MAP == NONE:
        _store_result(OUT, state, state2, rows, length, rows >= 0, OP, IDENTITY)
    else:
        if OP == LSE:
            state = finite_or_zero(state)
        _map_tokens(
            X,
            Y,
            OUT,
            state,
            state2,
            row_a,
            row_b,
            start,
            end,
            OP,
            MAP,
            STEP,
            THREADS,
            VECTOR,
            NUM_INPUTS,
            FILL,
            COMPUTE_DTYPE,
        )


@triton.jit
def _clear_tail(OUT, OFFSETS, first_token, n, total, partition_size, STEP: tl.constexpr):
    """Write 0 to the tokens of the tail in [first_token, first_token + partition_size).

    After the n row entries of the merge-path list, position d is token d - n, so a partition covers
    the tail from token `partition * partition_size - n`. This is negative for the first partitions.
    """
    end = tl.minimum(total, first_token + partition_size)
    for step_start in range(tl.maximum(tl.load(OFFSETS + n).to(tl.int64), first_token), end, STEP):
        tokens = step_start + tl.arange(0, STEP)
        tl.store(OUT + tokens, tl.zeros([STEP], OUT.dtype.element_ty), mask=tokens < end)


@triton.jit
def _count_rows_before(
    OFFSETS, n, position, SAMPLED_ROWS: tl.constexpr, SAMPLE_ROUNDS: tl.constexpr
):
    """Return the number of rows that begin before a position of the merge-path list.

    Each round compares SAMPLED_ROWS rows at equal distances, all at once, and continues between two of
    them. So the loads of the offsets wait for each other SAMPLE_ROUNDS times.
    """
    low = tl.zeros([], tl.int32)
    size = low + n
    for _ in tl.static_range(SAMPLE_ROUNDS):
        step = (size + SAMPLED_ROWS - 1) // SAMPLED_ROWS
        index = tl.arange(0, SAMPLED_ROWS) * step
        rows = low + index
        is_row = index < size
        begins = tl.load(OFFSETS + rows, mask=is_row, other=0).to(tl.int64) + rows
        count = tl.sum((is_row & (begins < position)).to(tl.int32), 0)
        # The last sample that begins before `position` is counted too.
        end = low + size
        next_low = tl.where(count > 0, low + (count - 1) * step + 1, low)
        size = tl.where(count > 0, tl.minimum(step - 1, end - next_low), 0)
        low = next_low
    return low


@triton.jit(do_not_specialize=("n", "num_partitions", "partition_size", "bisections"))
def segment_partition_starts_kernel(
    OFFSETS, FIRST_ROWS, n, num_partitions, partition_size, bisections, BLOCK: tl.constexpr
):
    """Write FIRST_ROWS (num_partitions + 1,): entry p is the number of rows that begin before
    partition p.
    """
    partition = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + n
    for _ in range(bisections):
        middle = (low + high) // 2
        begins_before = (low < high) & (
            tl.load(OFFSETS + middle).to(tl.int64) + middle
            < partition.to(tl.int64) * partition_size
        )
        low = tl.where(begins_before, middle + 1, low)
        high = tl.where(begins_before, high, middle)
    tl.store(FIRST_ROWS + partition, low, mask=partition <= num_partitions)


@triton.jit
def _process_partition(
    partition,
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    FIRST_ROWS,
    n,
    total,
    partition_size,
    max_uncut_length,
    max_length,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    THREADS_PER_ROW: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    LONG_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr,
    SAMPLE_ROUNDS: tl.constexpr,
):
    """Process the rows of up to `max_uncut_length` tokens that begin in one partition.

    EVEN means `n * max_length == total`. Then all rows have length `max_length`, unless there is a
    tail. Without a tail, OFFSETS is not loaded, except for its last entry.
    """
    SCAN: tl.constexpr = (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE)
    THREADS: tl.constexpr = WIDTH if SCAN else THREADS_PER_ROW
    if SAMPLE_ROUNDS == 0:
        first_row = tl.load(FIRST_ROWS + partition)
        end_row = tl.load(FIRST_ROWS + partition + 1)
    all_rows_equal = EVEN
    if EVEN:
        all_rows_equal = tl.load(OFFSETS + n) == total
    if SAMPLE_ROUNDS > 0:
        partition_start = partition.to(tl.int64) * partition_size
        partition_end = partition_start + partition_size
        # A row and its tokens take max_length + 1 positions.
        first_row = tl.minimum(tl.cdiv(partition_start, max_length + 1), n).to(tl.int32)
        end_row = tl.minimum(tl.cdiv(partition_end, max_length + 1), n).to(tl.int32)
        if not all_rows_equal:
            first_row = _count_rows_before(OFFSETS, n, partition_start, SAMPLED_ROWS, SAMPLE_ROUNDS)
            end_row = _count_rows_before(OFFSETS, n, partition_end, SAMPLED_ROWS, SAMPLE_ROUNDS)
    if MAP != NONE:
        _clear_tail(
            OUT,
            OFFSETS,
            partition.to(tl.int64) * partition_size - n,
            n,
            total,
            partition_size,
            ROWS * WIDTH,
        )
    row_in_tile = tl.arange(0, ROWS)
    thread_token, stride = _token_indices(WIDTH // THREADS, THREADS)
    for tile_row in range(first_row, end_row, ROWS):
        rows = tile_row + row_in_tile
        must_load = (rows < end_row) & ~all_rows_equal if EVEN else rows < end_row
        # Offsets relative to the first token of the tile fit 32 bits for all rows in the tile.
        tile_start = tl.load(OFFSETS + tile_row, mask=not EVEN or not all_rows_equal, other=0).to(
            tl.int64
        )
        starts = (tl.load(OFFSETS + rows, mask=must_load, other=0) - tile_start).to(tl.int32)
        ends = tl.load(OFFSETS + rows + 1, mask=must_load, other=0) - tile_start
        lengths = tl.minimum(ends - starts, max_uncut_length + 1).to(tl.int32)
        if EVEN:
            tile_start = tl.where(
                all_rows_equal, tl.cast(tile_row, tl.int64) * max_length, tile_start
            )
            starts = tl.where(all_rows_equal, row_in_tile * max_length, starts)
            lengths = tl.where(all_rows_equal, max_length, lengths)

        # Process the rows of up to WIDTH tokens as one tile.
        is_short = (rows < end_row) & (lengths <= WIDTH)
        valid = thread_token + stride < tl.where(is_short, lengths, 0)[None, :, None]
        first_tokens = starts[None, :, None] + thread_token
        x, y = _load_tokens(
            X + tile_start,
            Y + tile_start,
            first_tokens,
            stride,
            valid,
            NUM_INPUTS,
            FILL,
            COMPUTE_DTYPE,
        )
        # Without the barrier the compiler serializes load and compare.
        if OP == COUNT_EQUAL:
            tl.debug_barrier()
        row_a, row_b = _load_operands(
            ROW_A, ROW_B, rows, lengths, rows < end_row, MAP, HAS_A, HAS_B, COMPUTE_DTYPE
        )
        state, state2 = _identity_state(ROWS, IDENTITY, STATE_DTYPE)
        if SCAN:
            mapped, state = _scan(x, state, MAP, OP)
        elif OP != NONE:
            states = _to_state(
                x, y, row_a, valid, 0, thread_token + stride, OP, IDENTITY, STATE_DTYPE
            )
            states, states2 = initial_states(states, OP)
            state, state2 = _reduce_states(states, states2, OP)
        if MAP == NONE:
            _store_result(OUT, state, state2, rows, lengths, is_short, OP, IDENTITY)
        else:
            if OP == LSE:
                state = finite_or_zero(state)
            if not SCAN:
                mapped = map_values(x, y, state, state2, row_a, row_b, MAP)
            tl.store(
                OUT + tile_start + first_tokens + stride,
                mapped.to(OUT.dtype.element_ty),
                mask=valid,
            )

        # Process longer rows with the whole CTA. Triton cannot iterate over a mask; take the rows
        # out one by one.
        longer = tl.where(
            (rows < end_row) & (lengths > WIDTH) & (lengths <= max_uncut_length), 1, 0
        )
        for _ in range(tl.sum(longer, 0)):
            i = tl.argmax(longer, 0)
            longer = tl.where(row_in_tile == i, 0, longer)
            is_long = False
            if LONG_STEP > 0:
                is_long = tl.max(tl.where(row_in_tile == i, lengths, 0), 0) > LONG_STEP // 2
                if is_long:
                    _process_row(
                        X,
                        Y,
                        ROW_A,
                        ROW_B,
                        OUT,
                        OFFSETS,
                        tile_row + i,
                        OP,
                        MAP,
                        LONG_STEP,
                        LONG_STEP // 8,
                        True,
                        NUM_INPUTS,
                        HAS_A,
                        HAS_B,
                        IDENTITY,
                        FILL,
                        COMPUTE_DTYPE,
                        STATE_DTYPE,
                    )
            if not is_long:
                _process_row(
                    X,
                    Y,
                    ROW_A,
                    ROW_B,
                    OUT,
                    OFFSETS,
                    tile_row + i,
                    OP,
                    MAP,
                    ROWS * WIDTH,
                    THREADS_PER_LONG_ROW,
                    VECTOR,
                    NUM_INPUTS,
                    HAS_A,
                    HAS_B,
                    IDENTITY,
                    FILL,
                    COMPUTE_DTYPE,
                    STATE_DTYPE,
                )


@triton.jit(do_not_specialize=("n", "total", "partition_size", "max_uncut_length", "max_length"))
def segment_partition_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    FIRST_ROWS,
    n,
    total,
    partition_size,
    max_uncut_length,
    max_length,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    THREADS_PER_ROW: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    LONG_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    LAUNCH_DEPENDENTS: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr,
    SAMPLE_ROUNDS: tl.constexpr,
):
    """Process the rows of up to `max_uncut_length` tokens that begin in one partition."""
    if LAUNCH_DEPENDENTS:
        gdc_launch_dependents()
    _process_partition(
        tl.program_id(0),
        X,
        Y,
        ROW_A,
        ROW_B,
        OUT,
        OFFSETS,
        FIRST_ROWS,
        n,
        total,
        partition_size,
        max_uncut_length,
        max_length,
        OP,
        MAP,
        ROWS,
        WIDTH,
        THREADS_PER_ROW,
        THREADS_PER_LONG_ROW,
        LONG_STEP,
        VECTOR,
        EVEN,
        NUM_INPUTS,
        HAS_A,
        HAS_B,
        IDENTITY,
        FILL,
        COMPUTE_DTYPE,
        STATE_DTYPE,
        SAMPLED_ROWS,
        SAMPLE_ROUNDS,
    )


@triton.jit
def pass_of_slot(slot, num_parts, lag):
    """Return the part that the CTA in this slot processes, and whether it is the second pass.

    ================================  ==========================================================
    slots                             passes
    ================================  ==========================================================
    [0, lag)                          first pass
    [lag, 2 * num_parts - lag)        alternate; the second pass of a part is `lag` parts after
                                      the first, while its tokens are still in the cache
    [2 * num_parts - lag, ...)        second pass
    ================================  ==========================================================
    """
    leading = tl.minimum(slot, lag)
    alternating = tl.minimum(slot - leading, 2 * (num_parts - lag))
    is_second_pass = (slot >= lag) & (
        (alternating % 2 == 1) | (alternating == 2 * (num_parts - lag))
    )
    return tl.where(
        is_second_pass, slot - leading - alternating + alternating // 2, leading + alternating // 2
    ), is_second_pass


@triton.jit
def _combine_parts(
    PARTS,
    row_first_part,
    first_part,
    end_part,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Combine the states in the parts [first_part, end_part) of a row that begins in
    `row_first_part`.
    """
    state, state2 = _identity_state(1, IDENTITY, STATE_DTYPE)
    for chunk in range(first_part, end_part, 1024):
        parts = chunk + tl.arange(0, 1024)[None, None, :]
        # The row is on side 1 of the part in which it begins, and on side 0 of the others.
        pointers = PARTS + (parts * 2 + (parts == row_first_part)) * 2
        states = tl.load(pointers, mask=parts < end_part, other=IDENTITY)
        states2 = tl.load(pointers + 1, mask=parts < end_part, other=0)
        chunk_state, chunk_state2 = _reduce_states(states, states2, OP)
        state, state2 = combine(state, state2, chunk_state, chunk_state2, OP)
    return state, state2


@triton.jit
def _reduce_piece(
    X,
    Y,
    OUT,
    PARTS,
    counter,
    row_a,
    rows,
    length,
    row_start,
    begin,
    end,
    part,
    side,
    first_part,
    last_part,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reduce the tokens [begin, end) of a row, which are its piece in a part, and count the piece.

    Without MAP, the CTA that counts the last piece of the row writes the result of the row.
    """
    state, state2 = _reduce_tokens(
        X,
        Y,
        row_a,
        row_start,
        begin,
        end,
        OP,
        STEP,
        THREADS,
        True,
        NUM_INPUTS,
        IDENTITY,
        FILL,
        COMPUTE_DTYPE,
        STATE_DTYPE,
    )
    pointers = PARTS + (part.to(tl.int64) * 2 + side) * 2 + tl.zeros([1, 1, 1], tl.int32)
    tl.store(pointers, state)
    tl.store(pointers + 1, state2)
    tl.debug_barrier()
    # The row has last_part - first_part + 1 pieces, and the atomic returns the previous count.
    is_complete = tl.atomic_add(counter, 1, sem="acq_rel") == last_part - first_part
    if MAP == NONE and is_complete:
        tl.debug_barrier()
        state, state2 = _combine_parts(
            PARTS, first_part, first_part, last_part + 1, OP, IDENTITY, STATE_DTYPE
        )
        _store_result(OUT, state, state2, rows, length, rows >= 0, OP, IDENTITY)
        tl.store(counter, 0)


@triton.jit
def _map_piece(
    X,
    Y,
    OUT,
    PARTS,
    counter,
    row_a,
    row_b,
    begin,
    end,
    part,
    first_part,
    last_part,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Map the tokens [begin, end) of a row, which are its piece in a part.

    With OP, wait until all pieces of the row are reduced, and combine their states.
    """
    state, state2 = _identity_state(1, IDENTITY, STATE_DTYPE)
    if OP != NONE:
        # Spin until the count is last_part - first_part + 1, the number of pieces of the row.
        while tl.atomic_add(counter, 0, sem="acquire") <= last_part - first_part:
            pass
        tl.debug_barrier()
        # Scans need only the pieces before this piece, or after it.
        state, state2 = _combine_parts(
            PARTS,
            first_part,
            part + 1 if MAP == CUMULATIVE_REVERSE else first_part,
            part if MAP == CUMULATIVE else last_part + 1,
            OP,
            IDENTITY,
            STATE_DTYPE,
        )
    if OP == LSE:
        state = finite_or_zero(state)
    _map_tokens(
        X,
        Y,
        OUT,
        state,
        state2,
        row_a,
        row_b,
        begin,
        end,
        OP,
        MAP,
        STEP,
        THREADS,
        True,
        NUM_INPUTS,
        FILL,
        COMPUTE_DTYPE,
    )
    if OP != NONE:
        # Each piece was counted twice after the last CTA of the row, which resets the counter.
        previous = tl.atomic_add(counter, 1, sem="acq_rel")
        if previous == 2 * (last_part - first_part) + 1:
            tl.store(counter, 0)


@triton.jit
def _process_part(
    slot,
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    FIRST_ROWS,
    PARTS,
    COUNTS,
    n,
    part_size,
    max_uncut_length,
    num_parts,
    lag,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr,
    SAMPLE_ROUNDS: tl.constexpr,
):
    """Reduce or map the pieces of long rows in the part of a slot; see `segment_part_kernel`."""
    HAS_TWO_PASSES: tl.constexpr = OP != NONE and MAP != NONE
    part = slot
    is_second_pass = OP == NONE
    if HAS_TWO_PASSES:
        part, is_second_pass = pass_of_slot(slot, num_parts, lag)
    if SAMPLE_ROUNDS == 0:
        first_row = tl.load(FIRST_ROWS + part)
        end_row = tl.load(FIRST_ROWS + part + 1)
    else:
        part_start = part.to(tl.int64) * part_size
        first_row = _count_rows_before(OFFSETS, n, part_start, SAMPLED_ROWS, SAMPLE_ROUNDS)
        end_row = _count_rows_before(
            OFFSETS, n, part_start + part_size, SAMPLED_ROWS, SAMPLE_ROUNDS
        )
    for side in tl.static_range(2):
        row = first_row - 1 if side == 0 else end_row - 1
        has_row = first_row > 0 if side == 0 else end_row > first_row
        if has_row:
            start, end = _row_bounds(OFFSETS, row)
            first_part = ((start + row) // part_size).to(tl.int32)
            last_part = ((end + row) // part_size).to(tl.int32)
            if (end - start > max_uncut_length) & (part <= last_part):
                piece_start = part.to(tl.int64) * part_size - row - 1 if side == 0 else start
                piece_end = tl.minimum(end, (part.to(tl.int64) + 1) * part_size - row - 1)
                rows = row + tl.zeros([1], tl.int32)
                length = (end - start) + tl.zeros([1], tl.int64)
                row_a, row_b = _load_operands(
                    ROW_A, ROW_B, rows, length, rows >= 0, MAP, HAS_A, HAS_B, COMPUTE_DTYPE
                )
                counter = COUNTS + first_part
                if not is_second_pass:
                    _reduce_piece(
                        X,
                        Y,
                        OUT,
                        PARTS,
                        counter,
                        row_a,
                        rows,
                        length,
                        start,
                        piece_start,
                        piece_end,
                        part,
                        side,
                        first_part,
                        last_part,
                        OP,
                        MAP,
                        STEP,
                        THREADS_PER_LONG_ROW,
                        NUM_INPUTS,
                        IDENTITY,
                        FILL,
                        COMPUTE_DTYPE,
                        STATE_DTYPE,
                    )
                else:
                    _map_piece(
                        X,
                        Y,
                        OUT,
                        PARTS,
                        counter,
                        row_a,
                        row_b,
                        piece_start,
                        piece_end,
                        part,
                        first_part,
                        last_part,
                        OP,
                        MAP,
                        STEP,
                        THREADS_PER_LONG_ROW,
                        NUM_INPUTS,
                        IDENTITY,
                        FILL,
                        COMPUTE_DTYPE,
                        STATE_DTYPE,
                    )


@triton.jit(do_not_specialize=("part_size", "max_uncut_length", "num_parts", "lag"))
def segment_part_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    FIRST_ROWS,
    PARTS,
    COUNTS,
    part_size,
    max_uncut_length,
    num_parts,
    lag,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    WAIT_FOR_PREVIOUS: tl.constexpr,
):
    """Reduce or map the rows of more than `max_uncut_length` tokens, which are cut into parts.

    A part is `part_size` positions of the merge-path list. It can contain the end (or the middle)
    of one long row, side 0, and the beginning of another, side 1. There is never a second
    beginning: a cut row has more than `max_uncut_length >= part_size` tokens. The tokens of a row
    in one part are a piece of the row.

    Pass 1 writes the state of each piece to PARTS[part, side], an array (num_parts, 2, 2), and adds
    1 to COUNTS[part in which the row begins]. A row that spans p parts is complete when its counter
    reaches p. Without MAP, the CTA that completes the row combines the states and writes the
    result. With MAP, the CTAs of pass 2 wait for p, combine the states, map their tokens and add 1.
    The CTA that reaches 2p resets the counter to 0. Maps with OP == NONE have only pass 2, which
    waits for nothing.

    `lag` must be at least the number of parts that any row spans. Otherwise a second pass waits for
    a CTA that was not launched yet. If such CTAs fill the device, the kernel never ends.

    The host derives `lag` from `max_length`, so a row longer than `max_length` can cause the same
    deadlock. If `max_length <= max_uncut_length`, this kernel is not launched. Then the results of
    rows of more than `max_uncut_length` tokens are never written.

    With WAIT_FOR_PREVIOUS the kernel runs at the same time as the kernel of the other rows.
    """
    _process_part(
        tl.program_id(0),
        X,
        Y,
        ROW_A,
        ROW_B,
        OUT,
        OFFSETS,
        FIRST_ROWS,
        PARTS,
        COUNTS,
        0,
        part_size,
        max_uncut_length,
        num_parts,
        lag,
        OP,
        MAP,
        STEP,
        THREADS_PER_LONG_ROW,
        NUM_INPUTS,
        HAS_A,
        HAS_B,
        IDENTITY,
        FILL,
        COMPUTE_DTYPE,
        STATE_DTYPE,
        SAMPLED_ROWS=0,
        SAMPLE_ROUNDS=0,
    )
    # End after the other kernel, so that the next launch sees the results of both.
    if WAIT_FOR_PREVIOUS and tl.program_id(0) == 0:
        gdc_wait()


@triton.jit(
    do_not_specialize=(
        "n",
        "total",
        "partition_size",
        "max_uncut_length",
        "max_length",
        "part_size",
        "num_parts",
        "lag",
    )
)
def segment_rows_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    PARTS,
    COUNTS,
    n,
    total,
    partition_size,
    max_uncut_length,
    max_length,
    part_size,
    num_parts,
    lag,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    THREADS_PER_ROW: tl.constexpr,
    THREADS_PER_LONG_ROW: tl.constexpr,
    LONG_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    PART_STEP: tl.constexpr,
    THREADS_PER_PART: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    IDENTITY: tl.constexpr,
    FILL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr,
    SAMPLE_ROUNDS: tl.constexpr,
):
    """Process all rows: the first CTAs as `segment_part_kernel`, the others as
    `segment_partition_kernel`.

    COUNTS must be 0. Each CTA searches its rows in OFFSETS.
    """
    num_slots = num_parts * (2 if OP != NONE and MAP != NONE else 1)
    if tl.program_id(0) < num_slots:
        _process_part(
            tl.program_id(0),
            X,
            Y,
            ROW_A,
            ROW_B,
            OUT,
            OFFSETS,
            OFFSETS,
            PARTS,
            COUNTS,
            n,
            part_size,
            max_uncut_length,
            num_parts,
            lag,
            OP,
            MAP,
            PART_STEP,
            THREADS_PER_PART,
            NUM_INPUTS,
            HAS_A,
            HAS_B,
            IDENTITY,
            FILL,
            COMPUTE_DTYPE,
            STATE_DTYPE,
            SAMPLED_ROWS,
            SAMPLE_ROUNDS,
        )
    else:
        _process_partition(
            tl.program_id(0) - num_slots,
            X,
            Y,
            ROW_A,
            ROW_B,
            OUT,
            OFFSETS,
            OFFSETS,
            n,
            total,
            partition_size,
            max_uncut_length,
            max_length,
            OP,
            MAP,
            ROWS,
            WIDTH,
            THREADS_PER_ROW,
            THREADS_PER_LONG_ROW,
            LONG_STEP,
            VECTOR,
            EVEN,
            NUM_INPUTS,
            HAS_A,
            HAS_B,
            IDENTITY,
            FILL,
            COMPUTE_DTYPE,
            STATE_DTYPE,
            SAMPLED_ROWS,
            SAMPLE_ROUNDS,
        )


@launch_args
class PartitionStartsArgs:
    """Arguments of `segment_partition_starts_kernel`."""

    OFFSETS: Pointer
    FIRST_ROWS: Written
    n: Number
    num_partitions: Number
    partition_size: Number
    bisections: Number


@launch_args
class PartitionArgs:
    """Arguments of `segment_partition_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Written
    OFFSETS: Pointer
    FIRST_ROWS: Pointer
    n: Number
    total: Number
    partition_size: Number
    max_uncut_length: Number
    max_length: Number


@launch_args
class PartArgs:
    """Arguments of `segment_part_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Written
    OFFSETS: Pointer
    FIRST_ROWS: Pointer
    PARTS: Written
    COUNTS: Written
    part_size: Number
    max_uncut_length: Number
    num_parts: Number
    lag: Number


@launch_args
class RowsArgs:
    """Arguments of `segment_rows_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Written
    OFFSETS: Pointer
    PARTS: Written
    COUNTS: Written
    n: Number
    total: Number
    partition_size: Number
    max_uncut_length: Number
    max_length: Number
    part_size: Number
    num_parts: Number
    lag: Number
