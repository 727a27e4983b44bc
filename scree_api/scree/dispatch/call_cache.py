"""Calls like an earlier one, which are neither checked nor offered to the kernels again.

Whether a call is valid and who runs it follows from its options and from what the host knows of its arrays (`Backend.alike`).
So the answer is kept with the rows, in the memo of their layout, and goes with them: of the layers of a model the first asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..array import Array
from ..backends import backend
from ..layout import Layout
from . import registry

MOST = 4096  # entries of a memo; options that never come twice shall not fill it
KINDS = 8  # of arrays that are remembered for the same options, the last ones


class _Seen(NamedTuple):
    """A call, and what it came to."""

    kernels: list[registry.Kernel]  # all of the operation, a new list after each change
    alike: Callable[..., bool]  # whether arrays are like those of the call
    run: Callable[..., Any]  # runs calls alike


def run(
    operation: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None = None
) -> Any:
    """Run an operation whose call has the fields `arrays`, each an array or None, and `options`.

    The first of the arrays is ragged, or it is the layout of the others; where it is dense nothing is kept.
    """
    kernels = registry._KERNELS[operation]
    values: list[Any] = []
    kept = _kept(operation, arrays, options, kernel, values) if kernels[0].prepare else None
    for seen in kept or ():
        if seen.kernels is kernels and seen.alike(*values):
            return seen.run(**arrays)
    call = registry._DESCRIBE[operation](**arrays, **options)
    chosen, rejected = registry._select(operation, call, kernel)
    again = None if kept is None or chosen.prepare is None or rejected else chosen.prepare(call)
    if kept is None or again is None:
        return chosen.run(call)
    kept[:] = *kept[1 - KINDS :], _Seen(kernels, backend(values[0]).alike(values), again)  # type: ignore[misc]  # it is there
    return again(**arrays)


def _kept(
    operation: str,
    arrays: dict[str, Any],
    options: dict[str, Any],
    kernel: str | None,
    values: list[Any],
) -> list[_Seen] | None:
    """The calls that are remembered for such options and arrays on such layouts, or None where none can be; fills `values`."""
    rows: Layout | None = None
    other: Layout | None = None  # a second one
    places: list[Any] = []  # of each array: on which layout, and its ragged axis
    for x in arrays.values():
        kind = type(x)
        if kind is Array:
            own = x.layout
            if rows is None:
                rows = own
            if own is rows:
                places.append(x.ragged_dim)
            elif other is None or own is other:
                other = own
                places.append(~x.ragged_dim)
            else:
                return None
            values.append(x.values)
        elif x is None:
            places.append(None)
        elif rows is not None:
            places.append("dense")
            values.append(x)
        elif kind is Layout:
            rows = x
        else:
            return None
    if rows is None or rows.backend.alike is None or rows.backend.compiling():
        return None
    given = (*options.values(),)
    types: tuple[Any, ...] = (*map(type, given),)  # 1 == 1.0 == True
    if tuple in types:
        types = *types, *((*map(type, x),) for x in given if type(x) is tuple)
    memo, key = (
        rows.memo if other is None else rows.beside(other),
        (operation, kernel, given, types, *places),
    )
    try:
        found: list[_Seen] | None = memo.get(key)
    except TypeError:  # an option that is no plain value, which the check will name
        return None
    if found is None and len(memo) < MOST:
        found = memo[key] = []
    return found
