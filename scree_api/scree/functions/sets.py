"""Set functions: distinct values and membership."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import as_values, expand_to_tokens, with_values_like
from ..indexing.getitem import drop_tail
from .binding import Standard, implements


@implements("isin", ragged="either")
def isin(x1: Any, x2: Any, /, *, invert: bool = False, std: Standard) -> Any:
    """Return whether each element is among the values of `x2`."""
    xp, values = std.xp, as_values(x2)
    if isinstance(x1, Array) and not isinstance(values, checks.NUMBERS):
        checks.check_dense("x2", values, x1.values)
    mask = x2.layout.token_mask if isinstance(x2, Array) else None
    if mask is None or 0 in values.shape:
        return with_values_like(x1, std.function(as_values(x1), values, invert=invert))
    # The first token replaces the tail; it belongs to a row if any token does.
    first = values[(slice(None),) * x2.ragged_dim + (slice(0, 1), ...)]
    values = xp.where(expand_to_tokens(x2, mask), values, first)
    is_member = std.function(as_values(x1), values) & (x2.offsets[-1] > 0)
    return with_values_like(x1, xp.logical_not(is_member) if invert else is_member)


@implements("unique_values", "unique_counts")
def unique_values(x: Array, /, *, std: Standard) -> Any:
    """Return the distinct values of all rows together, a dense array."""
    return std.function(drop_tail(x).values)


@implements("unique_inverse", "unique_all")
def unique_inverse(x: Array, /, *, std: Standard) -> Any:
    """Return the distinct values of all rows, and the index of each element among them.

    The index is a ragged array.
    """
    x = drop_tail(x)
    result = std.function(x.values)
    return result._replace(inverse_indices=x.with_values(result.inverse_indices))
