"""Few shapes for many batches: compilers make one program a shape."""

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


def bucket(arr: Array, *, growth: float = 2, fill_value: Any = 0) -> tuple[Array, Any]:
    """Pad a batch to one of few shapes, so that a stream of batches compiles few times. Reads the offsets.

    The number of tokens, the number of rows and the bound on their length each go up to the next power of `growth`. What is
    added to the tokens stands in rows of its own behind the others, none of them longer than the bound, and the number of these
    rows follows from the shape. Batches whose sizes vary by a factor f come in about ``log(f) / log(growth) + 1`` sizes each.

    Parameters
    ----------
    arr
        (n, None, ...) ragged array.
    growth
        Ratio of one size to the one below it, greater than 1. The smaller it is, the less is padded and the more is compiled.
    fill_value
        What the added tokens hold, a scalar of the array's dtype.

    Returns
    -------
    padded, real
        (m, None, ...) the batch and its padding, with `max_length` set; and (m,) booleans, which rows are those of `arr`. They
        come first, in their order.

    Raises
    ------
    TypeError
        If `arr` is no ragged array, its dtype does not hold `fill_value`, or under a trace, which cannot read the offsets.
    ValueError
        If `growth` is not greater than 1.

    Examples
    --------
    >>> import numpy as np, scree
    >>> padded, real = scree.bucket(scree.from_lengths(np.arange(1, 6), [2, 0, 3]))
    >>> padded.values, padded.lengths, padded.max_length
    (array([1, 2, 3, 4, 5, 0, 0, 0]), array([2, 0, 3, 0, 3], dtype=int32), 4)
    >>> real
    array([ True,  True,  True, False, False])
    """
    arr, fill_value = (
        drop_tail(check_ragged("arr", arr)),
        check_scalar("fill_value", fill_value, arr.values),
    )
    rows, lengths, growth = (
        arr.layout,
        np.diff(arr.layout.read()),
        check_number("growth", growth, above=1),
    )
    total, longest = _size(rows.total, growth), _size(int(lengths.max(initial=0)), growth)
    padding, added = total - rows.total, math.ceil(total * (1 - 1 / growth) / longest)
    count = _size(rows.num_rows, growth) + added
    filler = np.zeros(count - rows.num_rows, np.int64)
    filler[len(filler) - added :] = padding // added + (np.arange(added) < padding % added)
    new = Layout.from_host(rows.backend, np.concatenate([lengths, filler]), like=arr.offsets)
    new.max_length = longest
    shape = (*arr.values.shape[: arr.ragged_dim], padding, *arr.values.shape[arr.ragged_dim + 1 :])
    fill = rows.backend.from_host(np.full(shape, fill_value), arr.dtype, rows.device)
    values = pack([arr.values, fill], ragged_dim=arr.ragged_dim).values
    real = rows.backend.from_host(np.arange(count) < rows.num_rows, rows.xp.bool, rows.device)
    return Array.from_layout(values, new, arr.ragged_dim), real


def _size(n: int, growth: float) -> int:
    """The least power of `growth` that is at least n, rounded up."""
    size = 1.0
    while math.ceil(size) < n:
        size *= growth
    return math.ceil(size)
