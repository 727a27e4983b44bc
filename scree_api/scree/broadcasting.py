"""How arguments fit together: shared layouts, broadcasting of dense operands, axes, and the dtype to add up in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import checks
from . import layout as rows_of
from .array import Array
from .backends import constant, is_array

Function = Callable[..., Any]

_ACCUMULATORS: dict[Any, Any] = {}
_SCALARS = *checks.NUMBERS, np.generic


def ragged(name: str, x: Any) -> Array:
    """`x`; raises unless it is a ragged array."""
    if not isinstance(x, Array):
        raise TypeError(
            f"{name}: expected a ragged array, got {type(x).__name__}; see scree.pack and scree.from_cu_seqlens"
        )
    return x


def values_of(x: Any) -> Any:
    """The dense array under `x`; what is not ragged is that itself."""
    return x.values if isinstance(x, Array) else x


def like(x: Any, values: Any) -> Any:
    """`values` on the rows of `x`, if it has rows."""
    return x.with_values(values) if isinstance(x, Array) else values


def shared_layout(name: str, arrays: Iterable[Array]) -> Array:
    """The first of the arrays, after a check that all have its layout."""
    first, *others = arrays
    for other in others:
        if other.ragged_dim != first.ragged_dim or other.values.ndim != first.values.ndim:
            raise ValueError(
                f"{name}: expected ragged arrays with the same axes, got shapes {first.shape} and {other.shape}; add axes to "
                "the values of one (arr.with_values(arr.values[:, None]))"
            )
        equal_rows(name, first, other)
    return first


def equal_rows(name: str, first: Array, other: Array) -> None:
    """Raise unless both arrays have the same rows, or where that cannot be told without waiting for a device."""
    if other.layout is first.layout:
        return
    checks.dense(name, other.offsets, first.offsets)
    same = rows_of.same(first.layout, other.layout)
    if same is None:
        raise ValueError(
            f"{name}: two layouts whose offsets are not read for free cannot be compared; make one from the other with "
            "with_values, or declare it with scree.align(a, like=b)"
        )
    if not same:
        raise ValueError(f"{name}: expected rows of equal lengths, got {difference(first, other)}")


def difference(a: Array, b: Array) -> str:
    """How the rows of two arrays differ, for an error."""
    if a.batch_size != b.batch_size:
        return f"{a.batch_size} and {b.batch_size} rows (shapes {a.shape} and {b.shape})"
    x, y = (None if one.layout.host is None else np.diff(one.layout.host) for one in (a, b))
    if (
        x is None or y is None or np.array_equal(x, y)
    ):  # rows alike, and room for more tokens behind them in one
        return f"{a.total_length} and {b.total_length} tokens"
    i = int(np.flatnonzero(x != y)[0])
    return f"{x[i]} and {y[i]} tokens in row {i} (shapes {a.shape} and {b.shape})"


def moved(xp: Any, values: Any, source: int, destination: int) -> Any:
    """The values with one axis at another place; not by `moveaxis`, which `torch.vmap` does not know."""
    if source == destination:
        return values
    order = [axis for axis in range(values.ndim) if axis != source]
    order.insert(destination, source)
    return xp.permute_dims(values, tuple(order))


def stretches(shape: tuple[Any, ...], target: tuple[Any, ...], both: bool = False) -> bool:
    """Whether an array of `shape`, aligned right, stretches to `target`, or `both` to one another up to missing axes."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(
        a == 1 or a == b or (both and b == 1) for a, b in pairs
    )


def against(name: str, x: Any, like: Array) -> Any:
    """The dense operand `x`, shaped so that it broadcasts against the values of the ragged array `like`; None stays None."""
    if x is None or isinstance(x, _SCALARS):
        return x
    if not is_array(x):
        raise TypeError(
            f"{name}: expected an array or a Python scalar, got {type(x).__name__}; convert it with asarray"
        )
    if type(x) is not type(like.values):
        checks.dense(name, x, like.values)
    if x.ndim == 0:
        return x
    shape, target = tuple(x.shape), like.shape
    if not stretches(shape, target, both=True):
        new = ", None" * (like.ndim - 1)
        hint = f"; v[:{new}] has one entry a row" if shape == (like.batch_size,) else ""
        raise ValueError(
            f"{name}: shape {shape} does not broadcast, aligned right, against {target}{hint}"
        )
    if len(shape) < len(target):
        return x
    xp, dim = like.layout.xp, like.ragged_dim
    if shape[0] == 1:
        return xp.squeeze(x, axis=0)
    if shape[0] != like.batch_size:  # a batch of one row does not stretch
        raise ValueError(
            f"{name}: shape {shape} does not broadcast against {target}: expected {like.batch_size} rows"
        )
    per_row = xp.take(xp.squeeze(x, axis=dim + 1), like.layout.rows, axis=0)
    return moved(xp, per_row, 0, dim)


def by_token(x: Array, numbers: Any) -> Any:
    """`numbers`, (total,) one a token, with the axes of the values of `x`."""
    return x.layout.xp.reshape(
        numbers, tuple(-1 if a == x.ragged_dim else 1 for a in range(x.values.ndim))
    )


def in_rows(x: Array, values: Any, spare: Any = 0) -> Any:
    """`values`, on the rows of `x`, with `spare` for tokens behind the last row: a gradient of 0 times their NaN would be NaN."""
    real = x.layout.real
    return values if real is None else x.layout.xp.where(by_token(x, real), values, spare)


def axes_of(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes as sorted numbers >= 0; all of them for None."""
    if axis is None:
        return tuple(range(ndim))
    if type(axis) is int and 0 <= axis < ndim:
        return (axis,)
    given = axis if isinstance(axis, tuple) else (axis,)
    for a in given:
        if isinstance(a, bool) or not isinstance(a, checks.INTEGERS) or not -ndim <= a < ndim:
            raise ValueError(f"axis: expected {name} along axes in [-{ndim}, {ndim}), got {axis!r}")
    axes = sorted(int(a) % ndim for a in given)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis: expected every axis once, got {axis}")
    return tuple(axes)


def axis_of(name: str, axis: Any, ndim: int, batch: bool = False) -> int:
    """One axis as a number >= 0; that of the batch only where a function can run over it."""
    found = () if axis is None else axes_of(name, axis, ndim)
    if len(found) != 1:
        raise ValueError(f"axis: expected one axis for {name} of a ragged array, got {axis}")
    if found[0] == 0 and not batch:
        raise ValueError(f"axis: {name} runs over rows or elements, not over the batch; got axis 0")
    return found[0]


@constant
def accumulator(xp: Any, dtype: Any) -> Any:
    """The dtype to add up in: float32 for half precision, else the dtype itself."""
    if (xp, dtype) not in _ACCUMULATORS:
        half = xp.isdtype(dtype, "real floating") and xp.finfo(dtype).bits < 32
        _ACCUMULATORS[xp, dtype] = xp.float32 if half else dtype
    return _ACCUMULATORS[xp, dtype]


def by_dtype(make: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    """``make(dtype, options)``, asked once for each dtype and the options that come with it."""
    known: dict[Any, Any] = {}

    @constant
    def found(dtype: Any, options: dict[str, Any]) -> Any:
        key = (dtype, *options.values())
        if key not in known:
            known[key] = make(dtype, options)
        return known[key]

    return found


def truth(xp: Any, values: Any) -> Any:
    """Which of the values are not 0; by comparison, as the standard casts no complex number to a boolean."""
    return values if xp.isdtype(values.dtype, "bool") else values != 0


def real_of(xp: Any, dtype: Any) -> Any:
    """The dtype of the real part."""
    if not xp.isdtype(dtype, "complex floating"):
        return dtype
    return xp.float32 if dtype == xp.complex64 else xp.float64


def _call_it_as(f: Function, ragged: Function) -> None:
    """Give `ragged` the name that Python calls it by where its arguments do not fit."""
    ragged.__qualname__ = getattr(f, "__name__", ragged.__qualname__)


def unless_ragged(f: Function, ragged: Function) -> Function:
    """A function that passes its arguments to `ragged` if the first is a ragged array, and else to the library's `f`."""
    _call_it_as(f, ragged)

    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return ragged(x, *args, **kwargs) if isinstance(x, Array) else f(x, *args, **kwargs)

    return call


def unless_either_ragged(f: Function, ragged: Function) -> Function:
    """The same for functions of two arrays: to `ragged` if either is one."""
    _call_it_as(f, ragged)

    def call(x1: Any, x2: Any, /, *args: Any, **kwargs: Any) -> Any:
        either = isinstance(x1, Array) or isinstance(x2, Array)
        return ragged(x1, x2, *args, **kwargs) if either else f(x1, x2, *args, **kwargs)

    return call


def unless_ragged_among(f: Function, ragged: Function) -> Function:
    """The same for functions of a list of arrays: to `ragged` if one of them is."""
    _call_it_as(f, ragged)

    def call(arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        among = isinstance(arrays, list | tuple) and any(isinstance(x, Array) for x in arrays)
        return ragged(arrays, *args, **kwargs) if among else f(arrays, *args, **kwargs)

    return call
