"""Parts of the elements of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import values_of
from ..checks import integer
from ..dispatch import call_cache
from ..dispatch.registry import declare


@dataclass(frozen=True, slots=True)
class SplitCall:
    """`x` in parts of `sizes` along an axis of its elements."""

    x: Any
    sizes: Sequence[int]
    axis: int = -1

    def __post_init__(self) -> None:
        x, values = self.x, self.values
        backend(values, "x")
        integer("axis", self.axis, -len(x.shape), len(x.shape))
        if isinstance(x, Array) and self.place in (-1, x.ragged_dim):
            raise ValueError(
                f"axis: expected an axis of the elements, got {self.axis} for shape {tuple(x.shape)}"
            )
        if not isinstance(self.sizes, Sequence):
            raise TypeError(f"sizes: expected the size of each part, got {self.sizes!r}")
        for size in self.sizes:
            integer("sizes", size, 0)
        if sum(self.sizes) != values.shape[self.place]:
            raise ValueError(
                f"sizes: expected a sum of {values.shape[self.place]}, axis {self.axis} of x, got {tuple(self.sizes)}"
            )

    @property
    def values(self) -> Any:
        """The dense array under `x`."""
        return values_of(self.x)

    @property
    def place(self) -> int:
        """The axis of the values."""
        return self.axis % len(self.x.shape) - isinstance(self.x, Array)


def split(
    x: Any, sizes: Sequence[int], *, axis: int = -1, kernel: str | None = None
) -> tuple[Any, ...]:
    """Parts of `x` along one axis of its elements, for instance queries, keys and values that came out of one product.

    It is what slices give, but all parts together: their gradients come back in one copy, where those of slices are each
    filled up with zeros and added.

    Parameters
    ----------
    x
        (n, None, ...) ragged or dense array.
    sizes
        The size of each part; they add up to the axis.
    axis
        Which one: of a ragged array neither the batch nor the ragged axis.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    tuple
        Arrays like `x`, views where the library has them.

    Raises
    ------
    ValueError
        If the sizes do not add up, or the axis is none of the elements.

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
    parts = call_cache.run("split", {"x": x}, {"sizes": sizes, "axis": axis}, kernel)
    return tuple(
        [Array._of(part, x.layout, x.ragged_dim) for part in parts]
        if isinstance(x, Array)
        else parts
    )


@declare("split", SplitCall)
def _split(call: SplitCall) -> list[Any]:
    parts, end = [], 0
    for size in call.sizes:
        start, end = end, end + size
        parts.append(call.values[(slice(None),) * call.place + (slice(start, end), ...)])
    return parts
