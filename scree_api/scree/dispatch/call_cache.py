"""The call cache: prepared kernels for calls with the same options and the same kind of arrays.

A kernel with `prepare` promises that whether it takes a call follows from the options and from the
host-visible metadata of the arrays (`Backend.make_guard`). The prepared kernel is stored in the cache of the
layout and lives as long as the layout. So in a model, only the first layer validates its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..array import Array
from ..backends import backend
from ..layout import Layout

MAX_KEYS = 4096  # per layout; bounds the cache when options never repeat
MAX_GUARDS = 8  # per key; the oldest entry is dropped
#: Types of options without elements. Two such options are the same if they and their types are equal.
PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
#: Types of numbers that a call may have in place of an array. They are a part of its key.
_NUMBER_TYPES = frozenset({int, float})


class Entry:
    """A decision about one kind of call; its slots are read faster than fields of a named tuple.

    Attributes
    ----------
    kernels
        The operation's kernels at that time; a new list after each change.
    guard
        Checks whether arrays have the metadata of that call.
    run
        The prepared kernel.
    run_dense
        The attribute of this name of the prepared kernel, or None. It takes and returns dense arrays.
        So a public function can make the ragged result itself, without a function between.
    """

    __slots__ = "guard", "kernels", "run", "run_dense"

    def __init__(
        self, kernels: list[Any], guard: Callable[..., bool], run: Callable[..., Any]
    ) -> None:
        self.kernels, self.guard, self.run = kernels, guard, run
        self.run_dense: Callable[..., Any] | None = getattr(run, "run_dense", None)


def lookup(
    operation: str,
    arrays: dict[str, Any],
    options: dict[str, Any],
    kernel: str | None,
    short_key: tuple[Any, ...] | None = None,
) -> tuple[list[Entry] | None, list[Any]]:
    """Return the entries for an operation, options, a provider and layouts, and their dense arrays.

    The guards of the entries check the dense arrays. The entries are None if the call cannot be
    cached. A layout comes first in `arrays`, followed by dense arrays and numbers. The entries are
    also kept under `short_key`, for `Operation.recall`.
    """
    values: list[Any] = []
    layout: Layout | None = None
    second: Layout | None = None
    axes: list[Any] = []  # per array: the layout it is on, and its ragged axis; or the number
    # Every call of an operation runs this loop, so the common cases come first.
    for x in arrays.values():
        if x is None:
            axes.append(None)
        elif (cls := type(x)) is Array:
            x_layout = x.layout
            values.append(x.values)
            if x_layout is layout:
                axes.append(x.ragged_dim)
            elif layout is None:
                layout = x_layout
                axes.append(x.ragged_dim)
            elif second is None or x_layout is second:
                second = x_layout
                axes.append(~x.ragged_dim)  # negative: on the second layout
            else:
                return None, values
        elif layout is not None:
            if cls in _NUMBER_TYPES:  # instead of an array
                axes.append((cls, x))
            else:
                axes.append("dense")
                values.append(x)
        elif cls is Layout:
            layout = x
        else:
            return None, values
    if layout is None:
        return None, values
    lib = layout.backend
    if lib.make_guard is None or lib.is_compiling() or lib.intercepts_calls():
        return None, values
    cache = layout.eager_cache() if second is None else layout.eager_pair_cache(second)
    settings = (*options.values(),)
    types: tuple[Any, ...] = (*map(type, settings),)
    if not PLAIN_TYPES.issuperset(types):
        types = option_types(settings)
    key = operation, kernel, settings, types, (*axes,)
    try:
        entries: list[Entry] | None = cache.get(key)
    except TypeError:  # an unhashable option, which the validation will name
        return None, values
    if entries is None and len(cache) < MAX_KEYS:
        entries = cache[key] = []
    if short_key is not None and entries is not None:
        cache[short_key] = entries
    return entries, values


def option_types(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the types of options and of the elements of tuples, because 1 == 1.0 == True.

    Where all options have `PLAIN_TYPES`, callers build the types themselves, which takes less time.
    """
    types: tuple[Any, ...] = (*map(type, settings),)
    for x in settings:
        if isinstance(x, tuple):
            types += (*map(type, x),)
    return types


def make_guard(values: list[Any]) -> Callable[..., bool] | None:
    """Return a guard for calls on arrays like `values`; None if they must not be cached."""
    build = backend(values[0]).make_guard
    return None if build is None else build(values)


def store(entries: list[Entry], entry: Entry) -> None:
    """Remember a decision in place of the oldest one."""
    entries[:] = *entries[1 - MAX_GUARDS :], entry
