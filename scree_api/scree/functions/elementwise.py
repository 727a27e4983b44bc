"""Elementwise functions, casts, arrays like another array, and functions of dtypes."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import broadcast_operand, check_shared_layout
from .binding import Standard, check_library, implements

#: The elementwise functions of the standard with keywords.
KEYWORDS = {"clip": ("min", "max")}


@implements("elementwise", ragged="all")
def elementwise(*args: Any, std: Standard, **kwargs: Any) -> Any:
    """Apply the library's function to the values; dense operands broadcast."""
    ragged = [x for x in args if isinstance(x, Array)]
    if kwargs:
        ragged += [x for x in kwargs.values() if isinstance(x, Array)]
        if ragged:
            checks.check_keywords(std.name, kwargs, KEYWORDS.get(std.name, ()))
    if not ragged:
        return std.function(*args, **kwargs)
    first = ragged[0] if len(ragged) == 1 else check_shared_layout(std.name, ragged)
    if first.layout.backend is not std.backend:
        check_library(std, first)
    is_plain = not kwargs and len(ragged) == len(args) <= 2 and std.name != "where"
    if is_plain and ragged[-1].layout is first.layout:
        out = std.function(*[x.values for x in ragged])
        return Array.from_layout(out, first.layout, first.ragged_dim)
    operands = [broadcast_operand(std.name, x, first) for x in args]
    named = {key: broadcast_operand(std.name, x, first) for key, x in kwargs.items()}
    return first.with_values(std.function(*operands, **named))


@implements("same_rows")
def same_rows(x: Array, /, *args: Any, device: Any = None, std: Standard, **kwargs: Any) -> Array:
    """Apply the library's function to the values; the layout stays."""
    x = x if device is None or device == x.device else x.to_device(device)
    return x.with_values(std.function(x.values, *args, **kwargs))


@implements("dtypes", ragged="all")
def dtypes(*args: Any, std: Standard) -> Any:
    """Call the library's function with the dtypes of ragged arrays."""
    return std.function(*(x.dtype if isinstance(x, Array) else x for x in args))
