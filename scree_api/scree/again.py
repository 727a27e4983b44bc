"""Calls like an earlier one, which are neither checked nor offered to the kernels again.

Whether a call is valid and who runs it follows from its options and from what the host knows of its arrays: `Backend.traits`.
So the answer is kept with the rows, in the memo of their layout, and goes with them: of the layers of a model the first asks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import registry
from .array import Array

MOST = 4096  # entries of a memo; options that never come twice shall not fill it


class _Seen(NamedTuple):
    """What a call came to."""

    kernels: list[registry.Kernel]  # all of the operation, a new list after each change
    run: Any  # of the kernel that took it
    cls: type
    fields: dict[str, Any]  # of the validated call, but for its arrays
    layouts: list[Any]  # whose identity is part of the key, kept so that it stays theirs


def run(operation: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None = None) -> Any:
    """Run an operation. Its call has the fields `arrays`, each an array or None; where the first is dense nothing is kept."""
    try:
        memo, key = _key(arrays, (operation, kernel, *options.values()))
        seen = memo.get(key)
    except (AttributeError, RuntimeError, TypeError):  # of an argument that is none, which the check will name
        memo, key, seen = {}, None, None
    kernels = registry._KERNELS[operation]
    if seen is not None and seen.kernels is kernels:
        call = object.__new__(seen.cls)
        call.__dict__.update(seen.fields, **arrays)
        return seen.run(call)
    call = registry._DESCRIBE[operation](**arrays, **options)
    chosen, rejected = registry._select(operation, call, kernel)
    if key is not None and chosen.static and not rejected and len(memo) < MOST:
        fields = {name: x for name, x in vars(call).items() if name not in arrays}
        others = [x.layout for x in arrays.values() if type(x) is Array and x.layout.memo is not memo]
        memo[key] = _Seen(kernels, chosen.run, type(call), fields, others)
    return chosen.run(call)


def _key(arrays: dict[str, Any], options: tuple[Any, ...]) -> tuple[dict[Any, Any], Any]:
    """The memo of the first array, and all that a call is told by; None instead where the host does not know it."""
    memo: dict[Any, Any] = {}
    traits = None
    facts: list[Any] = [options]
    for x in arrays.values():
        if type(x) is Array:
            rows = x.layout
            if traits is None:
                memo, traits = rows.memo, rows.backend.traits
                if traits is None or rows.backend.compiling():
                    return memo, None
            facts += id(rows), x.ragged_dim
            facts += traits(x.values)
        elif traits is None:
            return memo, None
        else:
            facts += (None,) if x is None else traits(x)
    return memo, tuple(facts)
