"""Checks and conversions of several arguments together.

They serve shared layouts, broadcasting of dense operands, and axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from . import checks
from .array import Array
from .backends import backend, is_array
from .layout import has_same_rows

SCALARS = *checks.NUMBERS, np.generic


def check_ragged(name: str, x: Any, *, shards: bool = False) -> Array:
    """Return `x`; raise unless it is a ragged array, of whole rows unless `shards` are allowed."""
    if not isinstance(x, Array):
        raise TypeError(
            f"{name}: expected a ragged array, got {type(x).__name__}; see scree.pack and scree.from_cu_seqlens"
        )
    if not shards:
        checks.check_whole(name, x.layout)
    return x


def check_ragged_axis_first(name: str, x: Array) -> None:
    """Raise unless the tokens are the first axis of the values."""
    if x.ragged_dim:
        raise ValueError(
            f"{name}: expected the ragged axis in front, got shape {x.shape}; use xp.moveaxis"
        )


def as_values(x: Any) -> Any:
    """Return the values of a ragged array, or anything else unchanged."""
    return x.values if isinstance(x, Array) else x


def check_array(name: str, x: Any) -> Any:
    """Return the values of a ragged array, or a dense array unchanged; raise for anything else."""
    values = as_values(x)
    backend(values, name)
    if isinstance(x, Array):
        checks.check_whole(name, x.layout)
    return values


def with_values_like(x: Any, values: Any) -> Any:
    """Return `values` on the layout of `x` if it is ragged, else `values`."""
    return x.with_values(values) if isinstance(x, Array) else values


def check_shared_layout(name: str, arrays: Iterable[Array]) -> Array:
    """Return the first array; raise unless all arrays have its axes and its rows."""
    first, *others = arrays
    for other in others:
        if other.ragged_dim != first.ragged_dim or other.values.ndim != first.values.ndim:
            raise ValueError(
                f"{name}: expected ragged arrays with the same axes, got shapes {first.shape} and {other.shape}; "
                "add axes to the values of one (arr.with_values(arr.values[:, None]))"
            )
        check_same_rows(name, first, other)
    return first


def check_same_rows(name: str, first: Array, other: Array) -> None:
    """Raise unless both arrays are known, without waiting for a device, to have the same rows."""
    if other.layout is first.layout:
        return
    checks.check_dense(name, other.offsets, first.offsets)
    same = has_same_rows(first.layout, other.layout)
    if same is None:
        raise ValueError(
            f"{name}: two layouts whose offsets are not read for free cannot be compared; make one from the other with "
            "with_values, or declare it with scree.align(a, like=b)"
        )
    if not same:
        raise ValueError(
            f"{name}: expected rows of equal lengths, got {describe_difference(first, other)}"
        )


def describe_difference(a: Array, b: Array) -> str:
    """Return how the rows of two arrays differ, for an error message."""
    if a.batch_size != b.batch_size:
        return f"{a.batch_size} and {b.batch_size} rows (shapes {a.shape} and {b.shape})"
    x, y = (
        None if one.layout.host_offsets is None else np.diff(one.layout.host_offsets)
        for one in (a, b)
    )
    if x is None or y is None or np.array_equal(x, y):  # the tails differ
        return f"{a.total_length} and {b.total_length} tokens"
    i = int(np.flatnonzero(x != y)[0])
    return f"{x[i]} and {y[i]} tokens in row {i} (shapes {a.shape} and {b.shape})"


def moveaxis(xp: Any, values: Any, source: int, destination: int) -> Any:
    """Move one axis; by `permute_dims`, as `torch.vmap` does not support `moveaxis`."""
    if source == destination:
        return values
    order = [axis for axis in range(values.ndim) if axis != source]
    order.insert(destination, source)
    return xp.permute_dims(values, tuple(order))


def is_broadcastable(shape: tuple[Any, ...], target: tuple[Any, ...], both: bool = False) -> bool:
    """Return whether `shape`, aligned right, broadcasts to `target`.

    With `both`, axes of size 1 in `target` may be broadcast too. `shape` still must not have more
    axes.
    """
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(
        a == 1 or a == b or (both and b == 1) for a, b in pairs
    )


def broadcast_operand(name: str, x: Any, like: Array) -> Any:
    """Return an operand in a shape that broadcasts with the values of the ragged array `like`.

    Ragged operands are on the layout of `like`.

    An operand with one entry per row is expanded to one per token. None stays None.
    """
    if isinstance(x, Array):
        return x.values
    if x is None or isinstance(x, SCALARS):
        return x
    if not is_array(x):
        raise TypeError(
            f"{name}: expected an array or a Python scalar, got {type(x).__name__}; convert it with asarray"
        )
    if type(x) is not type(like.values):
        checks.check_dense(name, x, like.values)
    if x.ndim == 0:
        return x
    shape, target = tuple(x.shape), like.shape
    if not is_broadcastable(shape, target, both=True):
        new = ", None" * (like.ndim - 1)
        hint = f"; v[:{new}] has one entry per row" if shape == (like.batch_size,) else ""
        raise ValueError(
            f"{name}: shape {shape} does not broadcast, aligned right, with {target}{hint}"
        )
    if len(shape) < len(target):
        return x
    xp, dim = like.layout.xp, like.ragged_dim
    if shape[0] == 1:
        return xp.squeeze(x, axis=0)
    # `both` lets a batch of one row pass; rows are never broadcast.
    if shape[0] != like.batch_size:
        raise ValueError(
            f"{name}: shape {shape} does not broadcast with {target}: expected {like.batch_size} rows"
        )
    return moveaxis(xp, like.layout.per_token(xp.squeeze(x, axis=dim + 1)), 0, dim)


def expand_to_tokens(x: Array, per_token: Any) -> Any:
    """Reshape `per_token`, (total,), to broadcast with the values of `x`."""
    shape = tuple(-1 if a == x.ragged_dim else 1 for a in range(x.values.ndim))
    return x.layout.xp.reshape(per_token, shape)


def mask_tail(x: Array, values: Any, fill_value: Any = 0) -> Any:
    """Replace the tail of `values`, which are on the layout of `x`.

    The tail may hold NaN, whose product with a gradient of 0 is NaN.
    """
    mask = x.layout.token_mask
    if mask is None:
        return values
    return x.layout.xp.where(expand_to_tokens(x, mask), values, fill_value)


def peek_tokens(x: Any, per_token: Any) -> np.ndarray | None:
    """Return integers, one per token of `x`, in host memory and without its tail.

    The result is None if reading them, or the offsets that tell the tail, is not free.
    """
    host = backend(per_token).peek(per_token)
    if host is None or not isinstance(x, Array) or x.layout.has_no_tail:
        return host
    offsets = x.layout.host_offsets
    return None if offsets is None else host[: offsets[-1]]


def normalize_axes(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Return axes as sorted numbers >= 0; all axes for None."""
    if axis is None:
        return tuple(range(ndim))
    if type(axis) is int and 0 <= axis < ndim:
        return (axis,)
    requested = axis if isinstance(axis, tuple) else (axis,)
    for a in requested:
        if isinstance(a, bool) or not isinstance(a, checks.INTEGERS) or not -ndim <= a < ndim:
            raise ValueError(f"axis: expected {name} along axes in [-{ndim}, {ndim}), got {axis!r}")
    axes = sorted(int(a) % ndim for a in requested)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis: expected every axis once, got {axis}")
    return tuple(axes)


def normalize_axis(name: str, axis: Any, ndim: int, allow_batch: bool = False) -> int:
    """Return one axis as a number >= 0; axis 0 only for functions that allow the batch axis."""
    axes = () if axis is None else normalize_axes(name, axis, ndim)
    if len(axes) != 1:
        raise ValueError(f"axis: expected one axis for {name} of a ragged array, got {axis}")
    if axes[0] == 0 and not allow_batch:
        raise ValueError(
            f"axis: {name} works within each row or along element axes, not along the batch; got axis 0"
        )
    return axes[0]
