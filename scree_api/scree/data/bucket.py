"""Padding of batches to few shapes, because compilers compile one program per shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..array import Array
from ..broadcasting import check_ragged
from ..checks import check_number, check_scalar
from ..construct import pack
from ..indexing.getitem import drop_tail
from ..layout import Layout

#: With a smaller ratio, neighbouring sizes below 100 would all differ.
MIN_GROWTH = 1.01


def bucket(arr: Array, *, growth: float = 2, fill_value: Any = 0) -> tuple[Array, Any]:
    """Pad a batch to one of few shapes, so that a stream of batches is compiled few times.

    The function reads the offsets. It rounds three sizes up to the next power of `growth`: the
    number of tokens, the number of rows and the bound on the row length. The added tokens form
    additional rows after the rows of `arr`. These rows are not longer than the bound, and the shape
    determines their number. If a size varies by a factor f over the batches, it takes about
    ``log(f) / log(growth) + 1`` values.

    Parameters
    ----------
    arr
        (n, None, ...) ragged array.
    growth
        Ratio of one size to the next smaller one, at least 1.01. A smaller ratio pads less and
        compiles more often.
    fill_value
        Value of the added tokens, a scalar of the dtype of `arr`.

    Returns
    -------
    padded, is_row
        (m, None, ...) ragged array, with `max_length` set; and (m,) booleans, True for the rows of
        `arr`. These rows come first, in order.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array, or its dtype cannot represent `fill_value`. Also under a
        trace, where the offsets cannot be read.
    ValueError
        If `growth` is less than `MIN_GROWTH`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> padded, is_row = scree.bucket(scree.from_lengths(np.arange(1, 6), [2, 0, 3]))
    >>> padded.values, padded.lengths, padded.max_length
    (array([1, 2, 3, 4, 5, 0, 0, 0]), array([2, 0, 3, 0, 3], dtype=int32), 4)
    >>> is_row
    array([ True,  True,  True, False, False])
    """
    arr = drop_tail(check_ragged("arr", arr))
    fill_value = check_scalar("fill_value", fill_value, arr.values)
    layout, lengths = arr.layout, np.diff(arr.layout.read_offsets())
    growth = check_number("growth", growth, above=1)
    if not MIN_GROWTH <= growth < math.inf:
        raise ValueError(
            f"growth: expected a finite number of at least {MIN_GROWTH}, got {growth}; "
            "smaller ratios give nearly every size a shape of its own"
        )
    total = _round_up(layout.total, growth)
    max_length = _round_up(int(lengths.max(initial=0)), growth)
    num_fill_tokens = total - layout.total
    # Enough rows for the largest padding of this shape, so that their number depends on it alone.
    num_fill_rows = math.ceil(total * (1 - 1 / growth) / max_length)
    num_rows = _round_up(layout.num_rows, growth) + num_fill_rows
    fill_lengths = np.full(num_fill_rows, num_fill_tokens // num_fill_rows)
    fill_lengths[: num_fill_tokens % num_fill_rows] += 1
    num_empty_rows = num_rows - layout.num_rows - num_fill_rows
    padded_lengths = np.concatenate([lengths, np.zeros(num_empty_rows, np.int64), fill_lengths])
    lib, device = layout.backend, layout.device
    padded_layout = Layout.from_host_lengths(lib, padded_lengths, like=arr.offsets)
    padded_layout.max_length = max_length
    fill_shape = list(arr.values.shape)
    fill_shape[arr.ragged_dim] = num_fill_tokens
    fill = lib.from_host(np.full(fill_shape, fill_value), arr.dtype, device)
    values = pack([arr.values, fill], ragged_dim=arr.ragged_dim).values
    is_row = lib.from_host(np.arange(num_rows) < layout.num_rows, lib.xp.bool, device)
    return Array.from_layout(values, padded_layout, arr.ragged_dim), is_row


def _round_up(n: int, growth: float) -> int:
    """Return the smallest power of `growth` that is at least `n`, rounded up to an integer."""
    size = 1.0
    while math.ceil(size) < n:
        size *= growth
    return math.ceil(size)
