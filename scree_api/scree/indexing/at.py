"""`at(arr)[...]`: arrays with some entries replaced, on every library, those included whose arrays never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..broadcasting import accumulator, against, ragged, shared_layout, stretches, values_of
from ..checks import NUMBERS, dense, scalar
from ..layout import Layout, counter
from ..ops.segment import segment_reduce
from .getitem import getitem


def at(arr: Array) -> At:
    """Name entries of a ragged array to update: ``scree.at(arr)[key].set(value)``; `arr` itself stays as it is.

    `key` is any index that `arr` takes. The updates are ``set``, ``add``, ``multiply``, ``min`` and ``max``; entries that are
    named more than once meet all their values, and `set` keeps the last. Where the offsets are not read for free, nothing happens
    to a row that is too short for ``[:, i]``.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    At
        What takes the index; see `Update`.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.asarray([1.0, -2.0, 3.0]), [1, 2])
    >>> scree.at(arr)[arr < 0].set(0.0).values
    array([1., 0., 3.])
    >>> scree.at(arr)[:, 0].add(np.asarray([10.0, 20.0])).values
    array([11., 18.,  3.])
    """
    return At(ragged("arr", arr))


@dataclass(frozen=True, slots=True)
class At:
    """A ragged array that waits for the index of what to update."""

    array: Array

    def __getitem__(self, key: Any) -> Update:
        return Update(self.array, key)


@dataclass(frozen=True, slots=True)
class Update:
    """Some entries of a ragged array, and what to do with them; every method returns a new array."""

    array: Array
    key: Any

    def set(self, value: Any) -> Array:
        """The array with `value` there."""
        return self._apply("set", value)

    def add(self, value: Any) -> Array:
        """The array with `value` added there."""
        return self._apply("sum", value)

    def multiply(self, value: Any) -> Array:
        """The array multiplied by `value` there."""
        return self._apply("prod", value)

    def min(self, value: Any) -> Array:
        """The lesser of the array and `value` there."""
        return self._apply("min", value)

    def max(self, value: Any) -> Array:
        """The greater of the array and `value` there."""
        return self._apply("max", value)

    def _apply(self, op: str, value: Any) -> Array:
        arr, layout = self.array, self.array.layout
        xp, device = layout.xp, layout.device
        numbers = xp.reshape(
            xp.arange(arr.size, dtype=counter(xp, arr.size, layout.offsets), device=device),
            arr.values.shape,
        )
        chosen = getitem(
            arr.with_values(numbers), self.key, missing=arr.size
        )  # a number beyond all entries
        places = values_of(chosen)
        if isinstance(value, Array):
            if not isinstance(chosen, Array):
                raise ValueError(
                    f"value: expected a dense array for entries of shape {places.shape}, got {value.shape}"
                )
            shared_layout("value", (chosen, value))
            value = value.values
        elif isinstance(chosen, Array):
            value = against("value", value, chosen)
        if isinstance(value, NUMBERS):
            value = xp.full((), scalar("value", value, arr.values), dtype=arr.dtype, device=device)
        else:
            dense("value", value, arr.values)
        if value.dtype != arr.dtype:
            raise TypeError(
                f"value: expected dtype {arr.dtype} as the array, got {value.dtype}; convert it with xp.astype"
            )
        shape, given = tuple(places.shape), tuple(value.shape)
        if not stretches(given, shape):
            raise ValueError(f"value: expected it to fit the entries of shape {shape}, got {given}")
        size, value = arr.size, xp.reshape(xp.broadcast_to(value, places.shape), (-1,))
        if 0 in (size, value.shape[0]):
            return arr
        places, flat = xp.reshape(places, (-1,)), xp.reshape(arr.values, (-1,))
        order = xp.argsort(places, stable=True)
        bounds = xp.searchsorted(
            xp.take(places, order), xp.arange(size + 1, dtype=places.dtype, device=device)
        )
        met = Layout(
            layout.backend, bounds, int(value.shape[0])
        )  # entry -> the values that it meets
        value = xp.take(value, order)
        if op == "set":
            flat = xp.where(met.filled, xp.take(value, met.clip(bounds[1:] - 1)), flat)
        else:
            wide = accumulator(xp, arr.dtype)
            found = COMBINE[op](
                xp, xp.astype(flat, wide, copy=False), segment_reduce(op, value, met, dtype=wide)
            )
            flat = xp.astype(found, arr.dtype, copy=False)
        return arr.with_values(xp.reshape(flat, arr.values.shape))


COMBINE = {
    "sum": lambda xp, a, b: a + b,
    "prod": lambda xp, a, b: a * b,
    "min": lambda xp, a, b: xp.minimum(a, b),
    "max": lambda xp, a, b: xp.maximum(a, b),
}
