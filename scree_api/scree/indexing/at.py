"""`at(arr)[...]`: functional updates, on every library, immutable arrays included."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array, At
from ..broadcasting import (
    accumulation_dtype,
    as_values,
    broadcast_operand,
    check_ragged,
    check_shared_layout,
    is_broadcastable,
)
from ..layout import Layout, index_dtype
from ..ops.segment import segment_reduce, sort_by_id
from .getitem import getitem


def at(arr: Array) -> At:
    """Select entries of a ragged array to update: ``scree.at(arr)[key].set(value)``.

    `arr` itself does not change.

    `key` is any index of `arr`. The updates are ``set``, ``add``, ``multiply``, ``min`` and
    ``max``. An entry that is selected more than once receives all its values; `set` keeps the last.
    Where the offsets are not read for free, a row that is too short for ``[:, i]`` stays unchanged.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    At
        Takes the index; see `Update`.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.asarray([1.0, -2.0, 3.0]), [1, 2])
    >>> scree.at(arr)[arr < 0].set(0.0).values
    array([1., 0., 3.])
    >>> scree.at(arr)[:, 0].add(np.asarray([10.0, 20.0])).values
    array([11., 18.,  3.])
    """
    return check_ragged("arr", arr).at


def update(arr: Array, key: Any, op: str, value: Any) -> Array:
    """Return the array with the selected entries combined with `value`."""
    layout = arr.layout
    xp, size = layout.xp, arr.size
    # The index selects from the numbers of all entries; `size` marks a row that is too short.
    dtype = index_dtype(xp, size, layout.offsets)
    numbers = xp.reshape(xp.arange(size, dtype=dtype, device=layout.device), arr.values.shape)
    selected = getitem(arr.with_values(numbers), key, fill_value=size)
    index = as_values(selected)
    value = _check_value(arr, value, selected)
    value = xp.reshape(xp.broadcast_to(value, index.shape), (-1,))
    if 0 in (size, value.shape[0]):
        return arr
    flat = xp.reshape(arr.values, (-1,))
    order, bounds = sort_by_id(xp, xp.reshape(index, (-1,)), size, layout.device)
    # Row i holds the values for entry i.
    updates = Layout(layout.backend, bounds, int(value.shape[0]))
    value = xp.take(value, order)
    if op == "set":
        last = xp.take(value, updates.clip(bounds[1:] - 1))
        flat = xp.where(updates.nonempty, last, flat)
    else:
        wide = accumulation_dtype(xp, arr.dtype)
        combined = segment_reduce(op, value, updates, dtype=wide)
        combined = getattr(xp, COMBINE[op])(xp.astype(flat, wide, copy=False), combined)
        # An entry without a value stays: -0.0 + 0.0 is 0.0.
        flat = xp.where(updates.nonempty, xp.astype(combined, arr.dtype, copy=False), flat)
    return arr.with_values(xp.reshape(flat, arr.values.shape))


def _check_value(arr: Array, value: Any, selected: Any) -> Any:
    """Return the value as a dense array that broadcasts to the selected entries."""
    xp, shape = arr.layout.xp, tuple(as_values(selected).shape)
    if isinstance(value, Array):
        if not isinstance(selected, Array):
            raise ValueError(
                f"value: expected a dense array for entries of shape {shape}, got {value.shape}"
            )
        check_shared_layout("value", (selected, value))
    if isinstance(selected, Array):
        value = broadcast_operand("value", value, selected)
    if isinstance(value, checks.NUMBERS):
        value = checks.check_scalar("value", value, arr.values)
        value = xp.full((), value, dtype=arr.dtype, device=arr.layout.device)
    else:
        checks.check_dense("value", value, arr.values)
    checks.check_same_dtype("value", value, arr, "the array")
    if not is_broadcastable(tuple(value.shape), shape):
        raise ValueError(
            f"value: expected it to fit the entries of shape {shape}, got {tuple(value.shape)}"
        )
    return value


#: Reduction of the values of an entry -> the standard's function of the result and the old entry.
COMBINE = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
