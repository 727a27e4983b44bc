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
    keyword_operands = {key: broadcast_operand(std.name, x, first) for key, x in kwargs.items()}
    return first.with_values(std.function(*operands, **keyword_operands))


@implements("same_rows")
def same_rows(x: Array, /, *args: Any, device: Any = None, std: Standard, **kwargs: Any) -> Array:
    """Apply the library's function to the values; the layout stays."""
    if any(isinstance(value, Array) for value in (*args, *kwargs.values())):
        raise TypeError(
            "fill_value: expected a Python number, got a ragged array; "
            "to copy the numbers of an array, use the array itself"
        )
    x = x if device is None or device == x.device else x.to_device(device)
    return x.with_values(std.function(x.values, *args, **kwargs))


@implements("asarray")
def asarray(
    obj: Array, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None, std: Standard
) -> Array:
    """Return the array itself, or with values of another dtype, on another device, or copied."""
    xp = std.xp
    is_moved = device is not None and device != obj.device
    if copy is False:
        # A dtype has several names, which only an array compares reliably.
        is_cast = dtype is not None and xp.empty((0,), dtype=dtype).dtype != obj.dtype
        if is_moved or is_cast:
            change = f"device {device}" if is_moved else f"dtype {dtype}"
            raise ValueError(
                f"copy: expected None or True, as {change} needs a copy of {obj.dtype} on "
                f"{obj.device}, got False"
            )
    x = obj.to_device(device) if is_moved else obj
    is_copy = copy is True and not is_moved
    if dtype is None and not is_copy:
        return x
    values = xp.astype(x.values, x.dtype if dtype is None else dtype, copy=is_copy)
    return x if values is x.values else x.with_values(values)


@implements("dtypes", ragged="all")
def dtypes(*args: Any, std: Standard) -> Any:
    """Call the library's function with the dtypes of ragged arrays."""
    return std.function(*(x.dtype if isinstance(x, Array) else x for x in args))
