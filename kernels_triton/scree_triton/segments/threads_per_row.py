"""Loops of the threads of a CTA over rows of wide tokens, for `wide_features`.

A CTA processes a block of columns. Its thread groups load UNROLL tokens at a time and keep one
state per group and column. Each group reduces a short row of its own, or all groups reduce one long
row and combine their states at its end.

Tensors have the shape (UNROLL, GROUPS, BLOCK_COLUMNS), or length 1 where all entries are equal. The
names of `merge_path` have the same meaning here. The helpers also have these parameters:

============================  ======================================================================
name                          meaning
============================  ======================================================================
NUM_COLUMNS                   elements of a token
BLOCK_COLUMNS                 columns of a CTA
columns, column_mask          columns of the CTA, and whether they exist (1, 1, BLOCK_COLUMNS)
GROUPS                        thread groups of the CTA
UNROLL                        tokens that a thread group loads at once
first_token, token_step       first token of each thread group, and the step to its next token
num_tokens, num_steps         number of tokens of each thread group, and the maximum over the groups
============================  ======================================================================
"""

import triton
import triton.language as tl

from .reductions import (
    ALL,
    ANY,
    ARGMAX,
    ARGMIN,
    COUNT_EQUAL,
    CUMULATIVE,
    CUMULATIVE_REVERSE,
    DOT,
    LOG_SOFTMAX,
    LOGSUMEXP_BACKWARD,
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
    map_values,
    pack_search_key,
    reduce_axis,
)


@triton.jit
def wide_identity_state(
    GROUPS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IDENTITY: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Return the states of a reduction of no tokens; shape (1, GROUPS, BLOCK_COLUMNS)."""
    state = tl.full([1, GROUPS, BLOCK_COLUMNS], IDENTITY, STATE_DTYPE)
    return state, tl.zeros([1, GROUPS, BLOCK_COLUMNS], STATE_DTYPE)


@triton.jit
def reduce_groups(states, states2, OP: tl.constexpr):
    """Reduce the states of all thread groups to one state per column."""
    state = reduce_axis(states, 1, OP)
    state2 = state
    if OP == LSE:
        state2 = reduce_axis(states2 * fast_exp(states - finite_or_zero(state)), 1, SUM)
    elif OP == PROD_AND_ZEROS:
        state2 = reduce_axis(states2, 1, SUM)
    return state, state2


@triton.jit
def scan_axis(x, AXIS: tl.constexpr, OP: tl.constexpr):
    """Compute the cumulative sums or products along one axis."""
    if OP == PROD:
        x = tl.cumprod(x, AXIS)
    else:
        x = tl.cumsum(x, AXIS)
    return x


@triton.jit
def _to_state(
    x, y, row_a, valid, OP: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr
):
    """Return the state of each token; for searches the token itself.

    Masked tokens were loaded as IDENTITY or 0.
    """
    if OP == DOT:
        x = x.to(COMPUTE_DTYPE) * y.to(COMPUTE_DTYPE)
    elif OP == SUM_Y:
        x = y.to(COMPUTE_DTYPE)
    elif OP == COUNT_EQUAL:
        x = ((x.to(COMPUTE_DTYPE) == row_a) & valid).to(STATE_DTYPE)
    elif (OP == ANY) | (OP == ALL):
        x = (x.to(COMPUTE_DTYPE) != 0).to(STATE_DTYPE)
    else:
        x = x.to(COMPUTE_DTYPE)
    return x


@triton.jit
def _update_extremum(best, best_position, x, positions, OP: tl.constexpr):
    """Combine the first extremum of each thread group and its position with later tokens x."""
    m, position = first_extremum(x, positions, OP)
    is_better = (m > best) if OP == ARGMAX else (m < best)
    is_better = is_better | (best_position == NO_POSITION) | ((m != m) & (best == best))
    return tl.where(is_better, m, best), tl.where(is_better, position, best_position)


@triton.jit
def _element_indices(tokens, columns, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the indices of the elements of tokens; shape (UNROLL, GROUPS, BLOCK_COLUMNS)."""
    # The hint selects the layout: the threads of a warp spread over groups and columns, and each
    # thread has all UNROLL tokens.
    return tl.max_contiguous(tokens * NUM_COLUMNS + columns, [1, 2, BLOCK_COLUMNS])


@triton.jit
def group_tokens(length, shift, GROUPS: tl.constexpr, MAP: tl.constexpr):
    """Return `first_token`, `token_step`, `num_tokens` and `num_steps` of the thread groups of one
    row.

    The groups take tokens in alternation. In scans group g has the contiguous chunk g - `shift` of
    the row instead, counted from the end for CUMULATIVE_REVERSE.
    """
    group = tl.arange(0, GROUPS)[None, :, None]
    num_steps = tl.cdiv(length, GROUPS)
    first_token = group
    token_step = GROUPS
    num_tokens = (length - group + (GROUPS - 1)) // GROUPS
    if (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE):
        chunk_start = (group - shift) * num_steps
        first_token = chunk_start
        token_step = 1
        num_tokens = tl.where(chunk_start >= 0, tl.minimum(length - chunk_start, num_steps), 0)
        if MAP == CUMULATIVE_REVERSE:
            first_token = length - 1 - chunk_start
            token_step = -1
    return first_token, token_step, num_tokens, num_steps


@triton.jit
def reduce_tokens(
    X,
    Y,
    row_a,
    first_token,
    token_step,
    num_tokens,
    num_steps,
    row_start,
    columns,
    column_mask,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reduce the tokens of each thread group, whose row begins at token `row_start`."""
    state, state2 = wide_identity_state(GROUPS, BLOCK_COLUMNS, IDENTITY, STATE_DTYPE)
    SEARCH: tl.constexpr = (OP == ARGMAX) | (OP == ARGMIN)
    # Searches load the next tokens before they compare the current tokens. After the last token,
    # loads give `worst`, which no comparison prefers.
    if SEARCH:
        worst = -float("inf") if X.dtype.element_ty.is_floating() else -(1 << 31)
        if OP == ARGMIN:
            worst = float("inf") if X.dtype.element_ty.is_floating() else (1 << 31) - 1
        best = tl.zeros([1, GROUPS, BLOCK_COLUMNS], COMPUTE_DTYPE)
        best_position = tl.full([1, GROUPS, BLOCK_COLUMNS], NO_POSITION, tl.int32)
        step = tl.arange(0, UNROLL)[:, None, None]
        next_x = tl.load(
            X
            + _element_indices(
                first_token + step * token_step, columns, NUM_COLUMNS, BLOCK_COLUMNS
            ),
            mask=(step < num_tokens) & column_mask,
            other=worst,
        )
    for done in range(0, num_steps, UNROLL):
        step = done + tl.arange(0, UNROLL)[:, None, None]
        valid = step < num_tokens
        tokens = first_token + step * token_step
        if SEARCH:
            x = next_x
            elements = _element_indices(
                first_token + (step + UNROLL) * token_step, columns, NUM_COLUMNS, BLOCK_COLUMNS
            )
            next_x = tl.load(
                X + elements, mask=(step + UNROLL < num_tokens) & column_mask, other=worst
            )
        else:
            elements = _element_indices(tokens, columns, NUM_COLUMNS, BLOCK_COLUMNS)
            x = tl.load(X + elements, mask=valid & column_mask, other=IDENTITY)
        y = x
        if NUM_INPUTS == 2:
            y = tl.load(Y + elements, mask=valid & column_mask, other=0)
        x = _to_state(x, y, row_a, valid, OP, COMPUTE_DTYPE, STATE_DTYPE)
        if SEARCH:
            best, best_position = _update_extremum(best, best_position, x, tokens - row_start, OP)
        else:
            state, state2 = add_tokens(state, state2, x, OP)
    if SEARCH:
        state = tl.where(num_tokens > 0, pack_search_key(best, best_position, OP), IDENTITY)
    return state, state2


@triton.jit
def map_tokens(
    X,
    Y,
    OUT,
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
    OP: tl.constexpr,
    MAP: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):
    """Write the mapped tokens of each thread group; scans continue from `state`."""
    if OP == LSE:
        state = finite_or_zero(state)
        if MAP == LOG_SOFTMAX:
            state2 = tl.log(tl.where(state2 == 0.0, 1.0, state2))
        elif MAP == LOGSUMEXP_BACKWARD:
            state2 = row_a / state2
        else:
            state2 = 1.0 / state2
    for done in range(0, num_steps, UNROLL):
        first_step = done
        # From the last tokens to the first: the last tokens are still in the cache.
        if (MAP != CUMULATIVE) & (MAP != CUMULATIVE_REVERSE):
            first_step = (num_steps - 1) // UNROLL * UNROLL - done
        step = first_step + tl.arange(0, UNROLL)[:, None, None]
        valid = (step < num_tokens) & column_mask
        elements = _element_indices(
            first_token + step * token_step, columns, NUM_COLUMNS, BLOCK_COLUMNS
        )
        x = tl.zeros([UNROLL, GROUPS, BLOCK_COLUMNS], COMPUTE_DTYPE)
        # Loads use evict_first, because each token is read for the last time.
        if NUM_INPUTS > 0:
            x = tl.load(X + elements, mask=valid, other=0, eviction_policy="evict_first").to(
                COMPUTE_DTYPE
            )
        y = x
        if NUM_INPUTS == 2:
            y = tl.load(Y + elements, mask=valid, other=0, eviction_policy="evict_first").to(
                COMPUTE_DTYPE
            )
        if (MAP == CUMULATIVE) | (MAP == CUMULATIVE_REVERSE):
            if OP == PROD:
                x = tl.where(valid, x, 1)
            y, _ = combine(state, state, scan_axis(x, 0, OP), state, OP)
            state, _ = combine(state, state, reduce_axis(x, 0, OP), state, OP)
        elif MAP == LOG_SOFTMAX:
            y = x - state - state2
        elif OP == LSE:
            y = fast_exp(x - state) * state2
        else:
            y = map_values(x, y, state, state2, row_a, row_b, MAP)
        tl.store(OUT + elements, y.to(OUT.dtype.element_ty), mask=valid, cache_modifier=".cs")


@triton.jit
def load_wide_operands(
    ROW_A,
    ROW_B,
    rows,
    lengths,
    mask,
    columns,
    MAP: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
):
    """Load the per-row operands of the given rows.

    For MEAN_BACKWARD divide `row_a` by the lengths of the rows.
    """
    row_a = tl.zeros([1, 1, 1], COMPUTE_DTYPE)
    row_b = tl.zeros([1, 1, 1], COMPUTE_DTYPE)
    if HAS_A:
        row_a = tl.load(
            ROW_A + (tl.cast(rows, tl.int64) * NUM_COLUMNS + columns), mask=mask, other=0
        ).to(COMPUTE_DTYPE)
    if HAS_B:
        row_b = tl.load(
            ROW_B + (tl.cast(rows, tl.int64) * NUM_COLUMNS + columns), mask=mask, other=0
        ).to(COMPUTE_DTYPE)
    if MAP == MEAN_BACKWARD:
        row_a /= tl.cast(lengths, COMPUTE_DTYPE)
    return row_a, row_b


@triton.jit
def store_wide_result(
    OUT,
    state,
    state2,
    rows,
    lengths,
    mask,
    columns,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """Write the results of the given rows, which have these lengths."""
    result = finish_reduction(state, state2, lengths, OP, IDENTITY).to(OUT.dtype.element_ty)
    tl.store(OUT + (tl.cast(rows, tl.int64) * NUM_COLUMNS + columns), result, mask=mask)


@triton.jit
def process_wide_row(
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
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Process one whole row with all thread groups."""
    row_a, row_b = load_wide_operands(
        ROW_A,
        ROW_B,
        row,
        length,
        column_mask,
        columns,
        MAP,
        NUM_COLUMNS,
        HAS_A,
        HAS_B,
        COMPUTE_DTYPE,
    )
    row_x = X + start * NUM_COLUMNS
    row_y = Y + start * NUM_COLUMNS
    if (MAP != CUMULATIVE) & (MAP != CUMULATIVE_REVERSE):
        state, state2 = wide_identity_state(1, BLOCK_COLUMNS, IDENTITY, STATE_DTYPE)
        if OP != NONE:
            first_token, token_step, num_tokens, num_steps = group_tokens(length, 0, GROUPS, MAP)
            states, states2 = reduce_tokens(
                row_x,
                row_y,
                row_a,
                first_token,
                token_step,
                num_tokens,
                num_steps,
                0,
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
            state, state2 = reduce_groups(states, states2, OP)
    else:
        # Shifted by 1, each group reduces the chunk before its own chunk. The scan over the groups
        # then gives the carry into each chunk.
        first_token, token_step, num_tokens, num_steps = group_tokens(length, 1, GROUPS, MAP)
        state, state2 = reduce_tokens(
            row_x,
            row_y,
            row_a,
            first_token,
            token_step,
            num_tokens,
            num_steps,
            0,
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
        state = scan_axis(state, 1, OP)
    if MAP == NONE:
        store_wide_result(
            OUT, state, state2, row, length, column_mask, columns, OP, IDENTITY, NUM_COLUMNS
        )
    else:
        first_token, token_step, num_tokens, num_steps = group_tokens(length, 0, GROUPS, MAP)
        map_tokens(
            row_x,
            row_y,
            OUT + start * NUM_COLUMNS,
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


@triton.jit
def process_wide_rows(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    first_row,
    end_row,
    columns,
    column_mask,
    OP: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Process the whole rows [first_row, end_row), but at most GROUPS of them.

    First each thread group processes one row of up to 2 * UNROLL tokens. Then all groups process
    the longer rows, one row at a time.
    """
    rows = first_row + tl.arange(0, GROUPS)
    base = tl.load(OFFSETS + first_row).to(tl.int64)
    starts = (tl.load(OFFSETS + rows, mask=rows < end_row, other=0) - base).to(tl.int32)
    lengths = (tl.load(OFFSETS + rows + 1, mask=rows < end_row, other=0) - base).to(
        tl.int32
    ) - starts
    lengths = tl.where(rows < end_row, lengths, 0)
    max_length = tl.max(lengths, 0)
    num_steps = tl.minimum(max_length, 2 * UNROLL)
    num_tokens = tl.where(lengths <= 2 * UNROLL, lengths, 0)[None, :, None]
    starts = starts[None, :, None]
    group_rows = rows[None, :, None]
    mask = ((rows < end_row) & (lengths <= 2 * UNROLL))[None, :, None] & column_mask
    row_a, row_b = load_wide_operands(
        ROW_A,
        ROW_B,
        group_rows,
        num_tokens,
        mask,
        columns,
        MAP,
        NUM_COLUMNS,
        HAS_A,
        HAS_B,
        COMPUTE_DTYPE,
    )
    base_x = X + base * NUM_COLUMNS
    base_y = Y + base * NUM_COLUMNS
    state, state2 = wide_identity_state(GROUPS, BLOCK_COLUMNS, IDENTITY, STATE_DTYPE)
    if (OP != NONE) & (MAP != CUMULATIVE) & (MAP != CUMULATIVE_REVERSE):
        state, state2 = reduce_tokens(
            base_x,
            base_y,
            row_a,
            starts,
            1,
            num_tokens,
            num_steps,
            starts,
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
    if MAP == NONE:
        store_wide_result(
            OUT, state, state2, group_rows, num_tokens, mask, columns, OP, IDENTITY, NUM_COLUMNS
        )
    else:
        token_step = 1
        first_token = starts
        if MAP == CUMULATIVE_REVERSE:
            token_step = -1
            first_token = starts + num_tokens - 1
        map_tokens(
            base_x,
            base_y,
            OUT + base * NUM_COLUMNS,
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
    # Triton cannot iterate over a mask; take the longer rows out one by one.
    while max_length > 2 * UNROLL:
        i = tl.argmax(lengths, 0)
        process_wide_row(
            X,
            Y,
            ROW_A,
            ROW_B,
            OUT,
            first_row + i,
            tl.load(OFFSETS + first_row + i).to(tl.int64),
            max_length,
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
        lengths = tl.where(tl.arange(0, GROUPS) == i, 0, lengths)
        max_length = tl.max(lengths, 0)


@triton.jit
def clear_tokens(
    OUT,
    begin,
    end,
    columns,
    column_mask,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write 0 to the tokens [begin, end)."""
    length = (end - begin).to(tl.int32)
    for done in range(0, tl.cdiv(length, GROUPS), UNROLL):
        step = done + tl.arange(0, UNROLL)[:, None, None]
        tokens = step * GROUPS + tl.arange(0, GROUPS)[None, :, None]
        zeros = tl.zeros([UNROLL, GROUPS, BLOCK_COLUMNS], OUT.dtype.element_ty)
        tl.store(
            OUT
            + begin * NUM_COLUMNS
            + _element_indices(tokens, columns, NUM_COLUMNS, BLOCK_COLUMNS),
            zeros,
            mask=(tokens < length) & column_mask,
        )


@triton.jit
def columns_of_block(block, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the columns of a block and whether they exist; shape (1, 1, BLOCK_COLUMNS)."""
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, None, :]
    column_mask = columns < NUM_COLUMNS
    if NUM_COLUMNS % BLOCK_COLUMNS == 0:
        column_mask = tl.full([1, 1, BLOCK_COLUMNS], 1, tl.int1)
    return columns, column_mask
