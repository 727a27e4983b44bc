"""Checks of arguments.

Every error message names the argument, the expected and the received value, and the fix.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .backends import backend, is_array

# A tuple for `isinstance`: the union `bool | int | float | complex` would be rebuilt in each call.
NUMBERS = (bool, int, float, complex)
INTEGERS = int, np.integer


def integer(
    name: str, x: Any, low: int | None = None, high: int | None = None, of: str = ""
) -> int:
    """Return `x` as a Python integer; raise unless it is one in [low, high).

    `of` is added to the message to explain the bounds.
    """
    if isinstance(x, bool) or not isinstance(x, INTEGERS):
        hint = "; use int(...), which reads the array" if is_array(x) else ""
        raise TypeError(f"{name}: expected a Python integer, got {x!r}{hint}")
    if (low is not None and x < low) or (high is not None and x >= high):
        expected = f"at least {low}" if high is None else f"{low} <= {name} < {high}"
        raise ValueError(f"{name}: expected {expected}{of}, got {x}")
    return int(x)


def dense(name: str, x: Any, like: Any) -> None:
    """Raise unless `x` is a dense array of the library and on the device of the array `like`."""
    lib = backend(like)
    if type(x) is not type(like) and (not is_array(x) or backend(x) is not lib):
        came = f"one of {backend(x).name}" if is_array(x) else type(x).__name__
        raise TypeError(
            f"{name}: expected a dense array of {lib.name}, got {came}; convert it with asarray"
        )
    if lib.apart(x, like):
        raise ValueError(
            f"{name}: expected device {lib.device(like)}, got {lib.device(x)}; move one of them"
        )


def integers(name: str, x: Any, like: Any) -> Any:
    """Return the integer array `x` as int32 or int64.

    `like` has the expected library and device. Narrower integers are widened: int8 cannot count
    more than 127 entries.
    """
    dense(name, x, like)
    xp = backend(like).xp
    if x.dtype == xp.int32 or x.dtype == xp.int64:
        return x
    if not xp.isdtype(x.dtype, "integral"):
        raise TypeError(f"{name}: expected integers, got {x.dtype}; convert them with astype")
    return xp.astype(x, xp.int64 if x.dtype == xp.uint32 or x.dtype == xp.uint64 else xp.int32)


def floating(name: str, x: Any) -> None:
    """Raise unless the dense array `x` holds real floating-point numbers."""
    if not backend(x).xp.isdtype(x.dtype, "real floating"):
        raise TypeError(
            f"{name}: expected a real floating-point dtype, got {x.dtype}; "
            "convert it with xp.astype"
        )


def real(function: str, xp: Any, dtype: Any) -> None:
    """Raise if the dtype is complex, as complex numbers have no order."""
    if xp.isdtype(dtype, "complex floating"):
        raise TypeError(
            f"x: expected real numbers for {function}, got {dtype}; see xp.abs, xp.real and xp.imag"
        )


def flag(name: str, x: Any) -> bool:
    """Return `x` as a Python boolean; raise unless it is True or False."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {x!r}")
    return bool(x)


def scalar(name: str, x: Any, like: Any) -> Any:
    """Return `x` as a Python scalar; raise unless the dtype of `like` can represent it."""
    x, xp, dtype = x.item() if isinstance(x, np.generic) else x, backend(like).xp, like.dtype
    if not isinstance(x, NUMBERS):
        raise TypeError(f"{name}: expected a scalar, got {type(x).__name__}")
    if isinstance(x, int) and 0 <= x <= 1:  # every dtype represents 0 and 1
        return x
    if xp.isdtype(dtype, ("real floating", "complex floating")):
        fits = xp.isdtype(dtype, "complex floating") or not isinstance(x, complex)
    else:
        fits = (
            isinstance(x, int)
            and not xp.isdtype(dtype, "bool")
            and xp.iinfo(dtype).min <= x <= xp.iinfo(dtype).max
        )
    if not fits:
        raise TypeError(
            f"{name}: expected a number that {dtype} holds, got {x!r}; see xp.astype for the array"
        )
    return x


def number(name: str, x: Any, low: float = -math.inf, above: float = -math.inf) -> float:
    """Return `x` as a float; raise unless it is finite, at least `low` and more than `above`."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.number):
        raise TypeError(f"{name}: expected a Python number, got {x!r}")
    if not (-math.inf < x < math.inf and x >= low and x > above):  # math.isfinite does not compile
        bound = f" > {above}" if above > -math.inf else f" >= {low}" if low > -math.inf else ""
        raise ValueError(f"{name}: expected a finite number{bound}, got {x}")
    return float(x)


def peeked(name: str, x: Any) -> np.ndarray | None:
    """Return a list or array of integers as a NumPy array if reading it is free, else None."""
    return backend(x).peek(x) if is_array(x) else _listed(name, x)


def read(name: str, x: Any) -> np.ndarray:
    """Return a list or array of integers as a NumPy array; waits for a device if necessary."""
    return backend(x).read(x) if is_array(x) else _listed(name, x)


def _listed(name: str, x: Any) -> np.ndarray:
    """Return a list of numbers as a NumPy array."""
    if not isinstance(x, Sequence) or isinstance(x, str):
        raise TypeError(f"{name}: expected an array or a list of numbers, got {type(x).__name__}")
    try:
        return np.asarray(x, dtype=None if len(x) else np.int64)  # an empty list holds integers
    except ValueError as error:
        raise TypeError(
            f"{name}: expected a list of numbers, got one of lists of different lengths"
        ) from error
