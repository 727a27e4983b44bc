"""Padding of batches to few shapes, because compilers compile one program per shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..array import Array
from ..backends import Backend
from ..broadcasting import check_ragged, check_shared_layout
from ..checks import check_dense, check_number, check_scalar
from ..construct import pack
from ..indexing.getitem import drop_tail
from ..layout import Layout

#: With a smaller ratio, neighbouring sizes below 100 would all differ.
MIN_GROWTH = 1.01


def bucket(arr: Array, *others: Any, growth: float = 2, fill_value: Any = 0) -> tuple[Any, ...]:
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
    *others
        Labels and other arrays of the same rows, padded in the same way: ragged arrays with the
        rows of `arr`, or dense arrays (n, ...) with one entry per row.
    growth
        Ratio of one size to the next smaller one, at least 1.01. A smaller ratio pads less and
        compiles more often.
    fill_value
        Value of the added tokens and entries, a scalar of the dtype of the array; or a tuple with
        one value per array.

    Returns
    -------
    padded, *others, is_row
        (m, None, ...) ragged array, with `max_length` set; the other arrays, ragged ones on its
        layout; and (m,) booleans, True for the rows of `arr`. These rows come first, in order.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array, or its dtype cannot represent `fill_value`. Also under a
        trace, where the offsets cannot be read.
    ValueError
        If `growth` is less than 1.01, or another array has other rows.

    Examples
    --------
    >>> import numpy as np, scree
    >>> padded, is_row = scree.bucket(scree.from_lengths(np.arange(1, 6), [2, 0, 3]))
    >>> padded.values, padded.lengths, padded.max_length
    (array([1, 2, 3, 4, 5, 0, 0, 0]), array([2, 0, 3, 0, 3], dtype=int32), 4)
    >>> is_row
    array([ True,  True,  True, False, False])

    >>> tokens, labels = scree.from_lists([[1, 2], [3]]), np.asarray([0, 1])
    >>> tokens, labels, is_row = scree.bucket(tokens, labels, fill_value=(0, -1))
    >>> labels
    array([ 0,  1, -1])
    """
    arr = drop_tail(check_ragged("arr", arr))
    fill_values = fill_value if isinstance(fill_value, tuple) else (fill_value,) * (1 + len(others))
    if len(fill_values) != 1 + len(others):
        raise ValueError(
            f"fill_value: expected one value for each of {1 + len(others)} arrays, got {fill_value}"
        )
    check_scalar("fill_value", fill_values[0], arr.values)
    others = tuple(_check_other(f"others[{i}]", x, arr) for i, x in enumerate(others))
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
    padded = []
    for x, value in zip((arr, *others), fill_values, strict=True):
        if isinstance(x, Array):
            values = _append(lib, x.values, x.ragged_dim, num_fill_tokens, value)
            padded.append(Array.from_layout(values, padded_layout, x.ragged_dim))
        else:
            padded.append(_append(lib, x, 0, num_rows - layout.num_rows, value))
    is_row = lib.from_host(np.arange(num_rows) < layout.num_rows, lib.xp.bool, device)
    return *padded, is_row


def _check_other(name: str, x: Any, arr: Array) -> Any:
    """Return another array of the rows of `arr`, without its tail."""
    if isinstance(x, Array):
        x = drop_tail(x)
        check_shared_layout(name, (arr, x))
        return x
    check_dense(name, x, arr.values)
    if x.ndim == 0 or x.shape[0] != arr.batch_size:
        raise ValueError(
            f"{name}: expected one entry for each of {arr.batch_size} rows, got {tuple(x.shape)}"
        )
    return x


def _append(lib: Backend, x: Any, axis: int, count: int, value: Any) -> Any:
    """Return a dense array with `count` more entries of one value along an axis."""
    value = check_scalar("fill_value", value, x)
    shape = [*x.shape[:axis], count, *x.shape[axis + 1 :]]
    fill = lib.from_host(np.full(shape, value), x.dtype, lib.device(x))
    return pack([x, fill], ragged_dim=axis).values


def _round_up(n: int, growth: float) -> int:
    """Return the smallest power of `growth` that is at least `n`, rounded up to an integer."""
    size = 1.0
    while math.ceil(size) < n:
        size *= growth
    return math.ceil(size)
