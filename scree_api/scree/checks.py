"""Checks of arguments.

Every message names the argument, what was expected, what was given, and a remedy.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .backends import backend, is_array

# Tuples for `isinstance`: a union such as `bool | int` would be built in each call.
NUMBERS = bool, int, float, complex
INTEGERS = int, np.integer


def check_keywords(function: str, keywords: Iterable[str], allowed: tuple[str, ...]) -> None:
    """Raise for a keyword that a function does not take on ragged arrays."""
    for keyword in keywords:
        if keyword not in allowed:
            expected = f"only {', '.join(allowed)}" if allowed else "no such keyword"
            raise TypeError(
                f"{keyword}: expected {expected} for {function} of a ragged array; see xp.where and arr.values"
            )


def check_integer(
    name: str, x: Any, low: int | None = None, high: int | None = None, of: str = ""
) -> int:
    """Return `x` as a Python integer; raise unless it is in [low, high), which `of` may explain."""
    if isinstance(x, bool) or not isinstance(x, INTEGERS):
        hint = "; use int(...), which reads the array" if is_array(x) else ""
        raise TypeError(f"{name}: expected a Python integer, got {x!r}{hint}")
    if (low is not None and x < low) or (high is not None and x >= high):
        expected = f"at least {low}" if high is None else f"{low} <= {name} < {high}"
        raise ValueError(f"{name}: expected {expected}{of}, got {x}")
    return int(x)


def check_whole(name: str, layout: Any) -> None:
    """Raise if rows of a layout are cut over processes."""
    if layout.cut is not None:
        raise TypeError(
            f"{name}: expected whole rows, got a shard, whose rows are cut over processes; this operation does not "
            "take shards: use scree.distributed.unshard(arr), or do it before scree.distributed.shard"
        )


def check_dense(name: str, x: Any, like: Any) -> None:
    """Raise unless `x` is a dense array of the library, and on the device, of the array `like`."""
    lib = backend(like)
    if type(x) is not type(like) and (not is_array(x) or backend(x) is not lib):
        actual = f"one of {backend(x).name}" if is_array(x) else type(x).__name__
        raise TypeError(
            f"{name}: expected a dense array of {lib.name}, got {actual}; convert it with asarray"
        )
    if lib.on_different_devices(x, like):
        raise ValueError(
            f"{name}: expected device {lib.device(like)}, got {lib.device(x)}; move one of them"
        )


def check_shape(name: str, x: Any, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless `x` has the given shape, which `meaning` explains."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, {meaning}, got {tuple(x.shape)}")


def check_same_dtype(name: str, x: Any, like: Any, argument: str = "x") -> None:
    """Raise unless `x` has the dtype of the array `like`, which is called `argument`."""
    if x.dtype != like.dtype:
        raise TypeError(
            f"{name}: expected the dtype of {argument}, {like.dtype}, got {x.dtype}; convert it with xp.astype"
        )


def check_integers(name: str, x: Any, like: Any) -> Any:
    """Return a dense array of integers as int32 or int64.

    Narrower dtypes cannot hold large indices.
    """
    check_dense(name, x, like)
    xp = backend(like).xp
    if x.dtype == xp.int32 or x.dtype == xp.int64:
        return x
    if not xp.isdtype(x.dtype, "integral"):
        raise TypeError(f"{name}: expected integers, got {x.dtype}; convert them with astype")
    return xp.astype(x, xp.int64 if x.dtype == xp.uint32 or x.dtype == xp.uint64 else xp.int32)


def check_floating(name: str, x: Any) -> None:
    """Raise unless the dense array `x` holds real floating-point numbers."""
    if not backend(x).xp.isdtype(x.dtype, "real floating"):
        raise TypeError(
            f"{name}: expected a real floating-point dtype, got {x.dtype}; convert it with xp.astype"
        )


def check_real_dtype(function: str, xp: Any, dtype: Any) -> None:
    """Raise for complex numbers, which have no order."""
    if xp.isdtype(dtype, "complex floating"):
        raise TypeError(
            f"x: expected real numbers for {function}, got {dtype}; see xp.abs, xp.real and xp.imag"
        )


def check_flag(name: str, x: Any) -> bool:
    """Return `x` as a Python boolean; raise unless it is True or False."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {x!r}")
    return bool(x)


def check_scalar(name: str, x: Any, like: Any) -> Any:
    """Return `x` as a Python scalar; raise unless the dtype of the array `like` can hold it."""
    x, xp, dtype = x.item() if isinstance(x, np.generic) else x, backend(like).xp, like.dtype
    if not isinstance(x, NUMBERS):
        raise TypeError(f"{name}: expected a scalar, got {type(x).__name__}")
    if isinstance(x, int) and 0 <= x <= 1:  # every dtype holds these
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


def check_number(name: str, x: Any, low: float = -math.inf, above: float = -math.inf) -> float:
    """Return `x` as a Python number.

    Raise unless it is finite, at least `low` and greater than `above`.
    """
    if isinstance(x, bool) or not isinstance(x, int | float | np.number):
        raise TypeError(f"{name}: expected a Python number, got {x!r}")
    if not (-math.inf < x < math.inf and x >= low and x > above):  # math.isfinite does not compile
        bound = f" > {above}" if above > -math.inf else f" >= {low}" if low > -math.inf else ""
        raise ValueError(f"{name}: expected a finite number{bound}, got {x}")
    return float(x)


def peek_integers(name: str, x: Any) -> np.ndarray | None:
    """Return a list or array of integers as NumPy where reading is free, else None."""
    return backend(x).peek(x) if is_array(x) else _listed(name, x)


def read_integers(name: str, x: Any) -> np.ndarray:
    """Return a list or array of integers as NumPy; waits for a device where it must."""
    return backend(x).read(x) if is_array(x) else _listed(name, x)


def check_index_bounds(
    name: str, indices: np.ndarray | None, size: int, where: str = "", from_end: bool = False
) -> None:
    """Raise unless all indices are in [0, size); `where` describes the axis.

    With `from_end` negative indices count from the end, and the error is an `IndexError`.
    """
    low, error = (-size, IndexError) if from_end else (0, ValueError)
    if indices is not None and indices.size and (indices.min() < low or indices.max() >= size):
        raise error(
            f"{name}: expected numbers in [{low}, {size}){where}, got {indices.min()} to {indices.max()}"
        )


def _listed(name: str, x: Any) -> np.ndarray:
    if not isinstance(x, Sequence) or isinstance(x, str):
        raise TypeError(f"{name}: expected an array or a list of numbers, got {type(x).__name__}")
    try:
        return np.asarray(x, dtype=None if len(x) else np.int64)  # an empty list is one of integers
    except ValueError as error:
        raise TypeError(
            f"{name}: expected a list of numbers, got one of lists of different lengths"
        ) from error
