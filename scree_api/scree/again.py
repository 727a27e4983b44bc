"""Calls like an earlier one, which are neither checked nor offered to the kernels again.

Whether a call is valid and who runs it follows from its options and from what the host knows of its arrays (`Backend.alike`).
So the answer is kept with the rows, in the memo of their layout, and goes with them: of the layers of a model the first asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import registry
from .array import Array
from .layout import Layout

MOST = 4096  # entries of a memo; options that never come twice shall not fill it
KINDS = 8  # of arrays that are remembered for the same options, the last ones


class _Seen(NamedTuple):
    """A call, and what it came to."""

    kernels: list[registry.Kernel]  # all of the operation, a new list after each change
    alike: Callable[..., bool]  # whether arrays are like those of the call
    run: Callable[..., Any]  # runs calls alike


def run(operation: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None = None) -> Any:
    """Run an operation whose call has the fields `arrays`, each an array or None, and `options`.

    The first of the arrays is ragged, or it is the layout of the others; where it is dense nothing is kept.
    """
    first = next(iter(arrays.values()))
    rows = first.layout if type(first) is Array else first if type(first) is Layout else None
    alike = None if rows is None else rows.backend.alike
    kernels, kept = registry._KERNELS[operation], None
    values: list[Any] = []
    if rows is not None and alike is not None and kernels[0].again and not rows.backend.compiling():
        given = *options.values(),
        types: tuple[Any, ...] = *map(type, given),  # 1 == 1.0 == True
        if tuple in types:
            types = *types, *((*map(type, x),) for x in given if type(x) is tuple)
        kept = _kept(rows, (operation, kernel, given, types), arrays, values)
        for seen in kept or ():
            if seen.kernels is kernels and seen.alike(*values):
                return seen.run(**arrays)
    call = registry._DESCRIBE[operation](**arrays, **options)
    chosen, rejected = registry._select(operation, call, kernel)
    if kept is None or alike is None or chosen.again is None or rejected:
        return chosen.run(call)
    again = chosen.again(call)
    if again is None:
        return chosen.run(call)
    kept[:] = *kept[1 - KINDS :], _Seen(kernels, alike(values), again)
    return again(**arrays)


def _kept(rows: Layout, key: tuple[Any, ...], arrays: dict[str, Any], values: list[Any]) -> list[_Seen] | None:
    """The calls that are remembered for `key` and arrays on such layouts, or None where none can be; fills `values`."""
    other = rows
    places: list[Any] = []  # of each array: on which layout, and its ragged axis
    for x in arrays.values():
        if type(x) is Array:
            own = x.layout
            if own is rows:
                places.append(x.ragged_dim)
            elif other is rows or own is other:
                other = own
                places.append(~x.ragged_dim)
            else:
                return None
            values.append(x.values)
        elif x is None or x is rows:
            places.append(None)
        else:
            places.append("dense")
            values.append(x)
    memo, key = rows.memo if other is rows else rows.beside(other), (*key, *places)
    try:
        found: list[_Seen] | None = memo.get(key)
    except TypeError:  # an option that is no plain value, which the check will name
        return None
    if found is None and len(memo) < MOST:
        found = memo[key] = []
    return found
