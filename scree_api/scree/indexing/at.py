"""`at(arr)[...]`: functional updates, on every library, immutable arrays included."""

from __future__ import annotations

import math
from typing import Any

from .. import checks
from ..array import Array, At
from ..backends import is_array
from ..broadcasting import (
    as_values,
    broadcast_operand,
    check_ragged,
    check_shared_layout,
    is_broadcastable,
    mask_tail,
    with_values_like,
)
from ..dtypes import accumulation_dtype
from ..layout import Layout, index_dtype
from ..ops.segment import append_axes, segment_reduce, sort_by_id
from .getitem import check_mask, getitem


def at(arr: Array) -> At:
    """Select entries of a ragged array to update: ``scree.at(arr)[key].set(value)``.

    `arr` itself does not change.

    `key` is any index of `arr`. The updates are ``set``, ``add``, ``multiply``, ``min`` and
    ``max``. An entry that is selected more than once receives all its values; `set` keeps the last.
    An update of masked entries with one number reads nothing, so it works under every trace. Where
    the offsets are not read for free, a row that is too short for ``[:, i]`` stays unchanged.

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
    layout, shape = arr.layout, arr.values.shape
    xp = layout.xp
    if isinstance(key, Array) and xp.isdtype(key.dtype, "bool") and _is_scalar(value):
        return _update_masked(arr, key, op, value)
    # The index selects from the numbers of all tokens or entries; `size` marks a row that is too
    # short.
    axes = 1 if _selects_tokens(arr, key) else len(shape)
    size, element = math.prod(shape[:axes]), shape[axes:]
    dtype = index_dtype(xp, size, layout.offsets)
    numbers = xp.reshape(xp.arange(size, dtype=dtype, device=layout.device), shape[:axes])
    selected = getitem(arr.with_values(numbers), key, fill_value=size)
    index = as_values(selected)
    entries = append_axes(xp, index, index.ndim + len(element))
    entries = xp.broadcast_to(entries, (*index.shape, *element))
    value = _check_value(arr, value, with_values_like(selected, entries))
    count = math.prod(index.shape)
    value = xp.reshape(xp.broadcast_to(value, entries.shape), (count, *element))
    if 0 in (*shape, *value.shape):
        return arr
    old = xp.reshape(arr.values, (size, *element))
    order, bounds = sort_by_id(xp, xp.reshape(index, (-1,)), size, layout.device)
    # Row i holds the values for token or entry i.
    updates = Layout(layout.backend, bounds, count)
    value = xp.take(value, order, axis=0)
    if op == "set":
        new = xp.take(value, updates.clip(bounds[1:] - 1), axis=0)
    else:
        reduced = segment_reduce(op, value, updates, dtype=accumulation_dtype(xp, arr.dtype))
        new = _combine(xp, op, old, reduced)
    # An entry without a value stays: -0.0 + 0.0 is 0.0.
    new = xp.where(append_axes(xp, updates.nonempty, old.ndim), new, old)
    return arr.with_values(xp.reshape(new, shape))


def _selects_tokens(arr: Array, key: Any) -> bool:
    """Return whether an index has keys for the rows and the tokens alone, not for elements."""
    if isinstance(key, Array):
        return key.ndim == 2
    keys = key if isinstance(key, tuple) else (key,)
    return not arr.ragged_dim and len(keys) <= 2 and not any(k is None or k is ... for k in keys)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, checks.NUMBERS) or (is_array(value) and value.ndim == 0)


def _update_masked(arr: Array, mask: Array, op: str, value: Any) -> Array:
    """Return the array with one number combined with the entries where the mask is True."""
    check_mask(arr, mask)
    xp, value = arr.layout.xp, _check_value(arr, value, arr)
    new = value if op == "set" else _combine(xp, op, arr.values, value)
    is_selected = append_axes(xp, mask_tail(mask, mask.values, False), arr.values.ndim)
    return arr.with_values(xp.where(is_selected, new, arr.values))


def _combine(xp: Any, op: str, old: Any, value: Any) -> Any:
    wide = accumulation_dtype(xp, old.dtype)
    old_wide, value = (xp.astype(x, wide, copy=False) for x in (old, value))
    return xp.astype(getattr(xp, COMBINE[op])(old_wide, value), old.dtype, copy=False)


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
