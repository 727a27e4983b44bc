"""Calls like an earlier one, which are neither checked nor offered to the kernels again.

Whether a call is valid and who runs it follows from its options and from what the host knows of its arrays: `Backend.traits`.
So the answer is kept with the rows, in the memo of their layout, and goes with them: of the layers of a model the first asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import registry
from .array import Array
from .layout import Layout

MOST = 4096  # entries of a memo; options that never come twice shall not fill it


class _Seen(NamedTuple):
    """What a call came to."""

    kernels: list[registry.Kernel]  # all of the operation, a new list after each change
    run: Callable[..., Any]  # runs calls alike


def run(operation: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None = None) -> Any:
    """Run an operation whose call has the fields `arrays`, each an array or None, and `options`.

    The first of the arrays is ragged, or it is the layout of the others; where it is dense nothing is kept.
    """
    first = next(iter(arrays.values()))
    rows = first.layout if type(first) is Array else first if type(first) is Layout else None
    key, seen, kernels = None, None, registry._KERNELS[operation]
    memo: dict[Any, Any] = {}
    if rows is not None and kernels[0].again and rows.backend.traits is not None and not rows.backend.compiling():
        try:
            other, key = _key(rows, rows.backend.traits, arrays, [operation, kernel, *options.values()])
            memo = rows.memo if other is rows else rows.beside(other)
            seen = memo.get(key)
        except (AttributeError, RuntimeError, TypeError):  # of an argument that is none, which the check will name
            key = None
    if seen is not None and seen.kernels is kernels:
        return seen.run(**arrays)
    call = registry._DESCRIBE[operation](**arrays, **options)
    chosen, rejected = registry._select(operation, call, kernel)
    if key is None or chosen.again is None or rejected or len(memo) >= MOST:
        return chosen.run(call)
    memo[key] = seen = _Seen(kernels, chosen.again(call))
    return seen.run(**arrays)


def _key(rows: Layout, traits: Callable[[Any], tuple[Any, ...]], arrays: dict[str, Any], facts: list[Any]) -> tuple[Layout, Any]:
    """The layout of the arrays that are not on `rows`, and all else that a call is told by: None where there are more of them."""
    other = rows
    types = [*map(type, facts)]  # 1 == 1.0 == True
    if tuple in types:
        types += [(*map(type, x),) for x in facts if type(x) is tuple]
    for x in arrays.values():
        if type(x) is Array:
            own = x.layout
            if own is not rows and own is not other:
                if other is not rows:
                    return rows, None
                other = own
            facts += own is rows, x.ragged_dim, traits(x.values)
        else:
            facts.append(None if x is None or x is rows else traits(x))
    return other, (*facts, *types)
