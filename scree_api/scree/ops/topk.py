"""The largest or smallest tokens of each row."""

from __future__ import annotations

from .. import checks
from ..array import Array
from ..broadcasting import check_ragged
from ..dispatch.operation import define_operation
from ..indexing.getitem import select
from ..layout import Layout
from ..records import record

__all__ = ["topk"]


@record
class TopkCall:
    """A validated call of `topk`.

    Attributes
    ----------
    x, k, largest
        See `topk`.
    """

    x: Array
    k: int
    largest: bool = True

    def __post_init__(self) -> None:
        x = check_ragged("x", self.x)
        checks.check_real_dtype("topk", x.layout.xp, x.dtype)
        checks.check_integer("k", self.k, 0)
        checks.check_flag("largest", self.largest)


def topk(
    x: Array, k: int, /, *, largest: bool = True, kernel: str | None = None
) -> tuple[Array, Array]:
    """Return the k largest or smallest tokens of each row, in sorted order, and their positions.

    Reads the offsets.

    Parameters
    ----------
    x
        (n, None, ...) ragged array of real numbers. Elements are compared one by one.
    k
        Number of tokens per row, at least 0. A row with fewer tokens keeps all of them.
    largest
        Whether the largest tokens are returned, in descending order; otherwise the smallest, in
        ascending order. NaN counts as the largest.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    values, positions
        (n, None, ...) with ``min(length, k)`` tokens per row: the tokens, and their positions in
        the rows of `x`, on one layout. Of equal tokens the first come first.

    Raises
    ------
    TypeError
        If `x` is not a ragged array of real numbers, or under a trace, which cannot read the
        offsets.
    ValueError
        If `k` is negative.

    Examples
    --------
    >>> import numpy as np, scree
    >>> values, positions = scree.topk(scree.from_lengths(np.asarray([3, 9, 4, 7]), [3, 1]), 2)
    >>> values.values, positions.values, values.lengths
    (array([9, 4, 7]), array([1, 2, 0]), array([2, 1], dtype=int32))
    """
    return _topk.run({"x": x}, {"k": k, "largest": largest}, kernel)


@define_operation("topk", TopkCall)
def _topk(call: TopkCall) -> tuple[Array, Array]:
    x, layout, xp = call.x, call.x.layout, call.x.__array_namespace__()
    order = xp.argsort(x, axis=x.ragged_dim + 1, descending=call.largest, stable=True)
    offsets = layout.read_offsets()
    lengths = (offsets[1:] - offsets[:-1]).clip(max=call.k)
    new = Layout.from_host_lengths(layout.backend, lengths, like=x.offsets)
    positions = select(order, new, layout.offsets[:-1], distinct=True)
    return xp.take_along_axis(x, positions, axis=x.ragged_dim + 1), positions
