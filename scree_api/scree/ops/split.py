"""Split of the elements of each token into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import check_array, with_values_like
from ..dispatch.operation import define_operation
from ..records import record

__all__ = ["split"]


@record
class SplitCall:
    """A validated call of `split`.

    Attributes
    ----------
    x
        Ragged or dense array.
    sizes
        The size of each part.
    axis
        An axis of the elements.
    values, values_axis
        The values of `x`, dense, and the axis to split them along.
    """

    x: Any
    sizes: Sequence[int]
    axis: int = -1
    values: Any = field(init=False)
    values_axis: int = field(init=False)

    def __post_init__(self) -> None:
        x, values = self.x, check_array("x", self.x)
        ndim = len(x.shape)
        axis = checks.check_integer("axis", self.axis, -ndim, ndim) % ndim - isinstance(x, Array)
        if isinstance(x, Array) and axis in (-1, x.ragged_dim):
            raise ValueError(
                f"axis: expected an axis of the elements, got {self.axis} for shape {tuple(x.shape)}"
            )
        if not isinstance(self.sizes, Sequence):
            raise TypeError(f"sizes: expected the size of each part, got {self.sizes!r}")
        for part in self.sizes:
            checks.check_integer("sizes", part, 0)
        size = values.shape[axis]
        if sum(self.sizes) != size:
            raise ValueError(
                f"sizes: expected a sum of {size}, axis {self.axis} of x, got {tuple(self.sizes)}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "values_axis", axis)


def split(
    x: Any, sizes: Sequence[int], *, axis: int = -1, kernel: str | None = None
) -> tuple[Any, ...]:
    """Split `x` along one axis of its elements, for instance into queries, keys and values.

    Slices give the same parts. Here the gradients of all parts are concatenated in one copy, where
    the gradients of slices are each padded with zeros and added.

    Parameters
    ----------
    x
        (n, None, ...) ragged or dense array.
    sizes
        The size of each part; their sum is the size of the axis.
    axis
        The axis to split; of a ragged array neither the batch nor the ragged axis.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    tuple
        Arrays like `x`, views where the library has them.

    Raises
    ------
    ValueError
        If the sizes do not add up, or the axis is not an axis of the elements.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.arange(8).reshape(2, 4), [1, 1])
    >>> q, kv = scree.split(x, [1, 3])
    >>> q.values, kv.values
    (array([[0],
           [4]]), array([[1, 2, 3],
           [5, 6, 7]]))
    """
    sizes = tuple(sizes) if isinstance(sizes, list) else sizes
    return _split.run({"x": x}, {"sizes": sizes, "axis": axis}, kernel)


@define_operation("split", SplitCall)
def _split(call: SplitCall) -> tuple[Any, ...]:
    parts, end, before = [], 0, (slice(None),) * call.values_axis
    for size in call.sizes:
        start, end = end, end + size
        parts.append(with_values_like(call.x, call.values[(*before, slice(start, end), ...)]))
    return tuple(parts)
