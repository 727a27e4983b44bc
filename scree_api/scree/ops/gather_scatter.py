"""Gather and scatter of tokens and rows, and the grouping of tokens for mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend
from ..broadcasting import (
    as_values,
    check_array,
    check_ragged,
    check_ragged_axis_first,
    describe_difference,
    peek_tokens,
)
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..indexing.getitem import read_row_index, take_rows
from ..layout import Layout, has_same_rows, index_dtype, widen_index
from ..records import record
from .segment import append_axes, segment_reduce, sort_by_id

__all__ = ["gather", "group", "scatter", "scatter_add"]


@record
class GatherCall:
    """A validated call of `gather` for tokens (``axis=1``).

    Attributes
    ----------
    x
        Ragged array, or a dense array (tokens, ...).
    index
        (n, None) ragged integers in [0, tokens).
    distinct
        Whether the caller knows that no index occurs twice.
    values, indices
        (tokens, ...) the values of `x`, and (count,) the indices, dense, int32 or int64.
    """

    x: Any
    index: Array
    distinct: bool = False
    values: Any = field(init=False)
    indices: Any = field(init=False)

    def __post_init__(self) -> None:
        values, index = _check_tokens(self.x), check_ragged("index", self.index)
        if index.ndim != 2:
            raise ValueError(
                f"index: expected a ragged array of one number per token, (n, None), got {index.shape}"
            )
        indices = checks.check_integers("index", index.values, values)
        checks.check_index_bounds("index", index.layout.backend.peek(indices), values.shape[0])
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)


def gather(x: Any, index: Any, *, axis: int = 1, kernel: str | None = None) -> Array:
    """Gather tokens or rows by index.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    index
        For tokens (axis 1) a ragged integer array (n, None) of indices in [0, total) into the
        values of `x`. For rows (axis 0) a dense integer array of row indices, which is read.
    axis
        1 for tokens, 0 for rows.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array
        The tokens on the layout of `index`, or the rows in the order of `index`.

    Raises
    ------
    TypeError
        If the index does not hold integers.
    ValueError
        If an index is out of bounds, where reading it is free.
    IndexError
        If a row does not exist.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.asarray([10, 11, 12]), [1, 2])
    >>> scree.gather(arr, scree.from_lengths(np.asarray([2, 0, 2, 1]), [3, 1])).values
    array([12, 10, 12, 11])
    """
    if _check_axis(axis) == 0:
        checks.check_integers("index", index, check_ragged("x", x).values)
        return take_rows(x, read_row_index(index, x.batch_size), kernel)
    return _gather.run({"index": index, "x": x}, {}, kernel)


@define_operation("gather", GatherCall)
def _gather(call: GatherCall) -> Array:
    taken = backend(call.values).xp.take(call.values, call.indices, axis=0)
    return Array.from_layout(taken, call.index.layout)


@record
class ScatterCall:
    """A validated call of `scatter` for tokens (``axis=1``), or of `scatter_add`.

    Attributes
    ----------
    x
        Ragged array, or a dense array (tokens, ...).
    index
        Ragged like `x`, or dense (tokens,) integers in [0, size).
    size
        Size of the result.
    add
        Whether tokens with equal indices are added; otherwise the last token wins.
    values, indices
        (tokens, ...) the values of `x`, and (tokens,) their indices, dense, int32 or int64; `size`
        for tokens of the tail.
    """

    x: Any
    index: Any
    size: int
    add: bool = False
    values: Any = field(init=False)
    indices: Any = field(init=False)

    def __post_init__(self) -> None:
        values, size = _check_tokens(self.x), checks.check_integer("size", self.size, 0)
        checks.check_flag("add", self.add)
        indices = _token_indices("index", self.x, self.index, size)
        for name, value in (("size", size), ("values", values), ("indices", indices)):
            object.__setattr__(self, name, value)


def scatter(x: Any, index: Any, size: int, *, axis: int = 1, kernel: str | None = None) -> Any:
    """Scatter tokens or rows to indices; the inverse of `gather`.

    The last of tokens with equal indices wins.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    index
        The index of each token in the result (ragged like `x`, or dense (tokens,)), or of each row
        (axis 0), in [0, size).
    size
        Size of the result; entries that no token or row is scattered to are 0, or empty rows.
    axis
        1 for tokens, 0 for rows.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    dense array or Array
        (size, ...) tokens, or a ragged array of `size` rows.

    Raises
    ------
    TypeError
        If the index does not hold integers.
    ValueError
        If there is not one index per token or row, an index is out of bounds (where reading it is
        free), or two rows have the same index.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.scatter(np.asarray([5, 6]), np.asarray([3, 0]), 4)
    array([6, 0, 0, 5])
    """
    if _check_axis(axis) == 0:
        if kernel is not None:
            raise ValueError(
                f"kernel: expected None for rows (axis=0), which no kernel scatters, got {kernel!r}"
            )
        return _scatter_rows(check_ragged("x", x), index, checks.check_integer("size", size, 0))
    return _scatter.run({"x": x, "index": index}, {"size": size}, kernel)


def scatter_add(x: Any, index: Any, size: int, *, kernel: str | None = None) -> Any:
    """Add tokens into a dense array by index; half precision accumulates in float32.

    Parameters
    ----------
    x, index, size, kernel
        See `scatter`.

    Returns
    -------
    dense array
        (size, ...), 0 where no token is added.

    Raises
    ------
    TypeError, ValueError
        See `scatter`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.scatter_add(np.asarray([5, 6, 7]), np.asarray([3, 0, 3]), 4)
    array([ 6,  0,  0, 12])
    """
    return _scatter.run({"x": x, "index": index}, {"size": size, "add": True}, kernel)


@define_operation("scatter", ScatterCall)
def _scatter(call: ScatterCall) -> Any:
    """Sort by index, then reduce.

    The tokens of an index become a row, of which the sum or the last token is taken.
    """
    lib, values, indices = backend(call.values), call.values, call.indices
    xp, device = lib.xp, lib.device(values)
    if values.shape[0] == 0 or call.size == 0:
        return xp.zeros((call.size, *values.shape[1:]), dtype=values.dtype, device=device)
    order, offsets = sort_by_id(xp, indices, call.size, device)
    layout = Layout(lib, offsets, values.shape[0])
    if call.add:
        wide = accumulation_dtype(xp, values.dtype)
        ordered = xp.astype(xp.take(values, order, axis=0), wide, copy=False)
        return xp.astype(segment_reduce("sum", ordered, layout), values.dtype, copy=False)
    last = xp.take(values, xp.take(order, layout.clip(offsets[1:] - 1), axis=0), axis=0)
    zero = xp.zeros((), dtype=values.dtype, device=device)
    return xp.where(append_axes(xp, layout.nonempty, last.ndim), last, zero)


def group(x: Any, ids: Any, num_groups: int) -> tuple[Array, Array]:
    """Sort tokens into groups, for instance by the expert that each token is routed to.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    ids
        (tokens,) group of each token, in [0, num_groups). To put a token into k groups, repeat it:
        ``group(xp.repeat(tokens, k, axis=0), xp.reshape(ids, (-1,)), num_groups)``.
    num_groups
        Number of groups.

    Returns
    -------
    grouped, index
        The tokens as a ragged array (num_groups, None, ...), in their order within each group; and,
        on the same layout, the index of each token in `x`, for `scatter` and `scatter_add`.

    Raises
    ------
    TypeError
        If the ids are not integers.
    ValueError
        If there is not one id per token, or an id is out of bounds, where reading it is free.

    Examples
    --------
    >>> import numpy as np, scree
    >>> tokens, experts = np.asarray([10, 11, 12, 13]), np.asarray([1, 0, 1, 2])
    >>> grouped, index = scree.group(tokens, experts, 3)
    >>> scree.unpack(grouped)
    [array([11]), array([10, 12]), array([13])]
    >>> scree.scatter(grouped, index, 4)
    array([10, 11, 12, 13])
    """
    values, num_groups = _check_tokens(x), checks.check_integer("num_groups", num_groups, 0)
    lib, total = backend(values), int(values.shape[0])
    indices = _token_indices("ids", x, ids, num_groups)
    order, offsets = sort_by_id(lib.xp, indices, num_groups, lib.device(values))
    has_no_tail = all(one.layout.has_no_tail for one in (x, ids) if isinstance(one, Array))
    offsets = lib.xp.astype(offsets, index_dtype(lib.xp, total))
    index = Array.from_layout(order, Layout(lib, offsets, total, has_no_tail=has_no_tail))
    return _gather.run_call(GatherCall(values, index, distinct=True)), index


def _check_axis(axis: int) -> int:
    if axis not in (0, 1):
        raise ValueError(f"axis: expected 1 for tokens or 0 for rows, got {axis!r}")
    return axis


def _check_tokens(x: Any) -> Any:
    """Return the values of `x`; raise unless tokens are its first axis."""
    if isinstance(x, Array):
        check_ragged_axis_first("x", x)
    values = check_array("x", x)
    if values.ndim == 0:
        raise ValueError("x: expected an axis of tokens, got a 0-d array")
    return values


def _token_indices(name: str, x: Any, index: Any, size: int) -> Any:
    """Return (tokens,) the index of each token; `size` for tokens of the tail.

    Raise unless there is one index in [0, size) per token of `x`; the tail is not checked.
    """
    values = as_values(x)
    are_ragged = isinstance(x, Array) and isinstance(index, Array)
    if are_ragged and has_same_rows(x.layout, index.layout) is False:
        raise ValueError(f"{name}: expected the rows of x, got {describe_difference(x, index)}")
    indices = checks.check_integers(name, as_values(index), values)
    checks.check_shape(name, indices, (values.shape[0],), "one number per token")
    tokens = x if isinstance(x, Array) else index
    checks.check_index_bounds(name, peek_tokens(tokens, indices), size)
    mask = tokens.layout.token_mask if isinstance(tokens, Array) else None
    if mask is None:
        return indices
    xp = backend(values).xp
    return xp.where(mask, widen_index(xp, indices, size), size)


def _scatter_rows(x: Array, index: Any, size: int) -> Array:
    checks.check_integers("index", index, x.values)
    indices = backend(index).read(index)
    checks.check_shape("index", indices, (x.batch_size,), "one index per row")
    checks.check_index_bounds("index", indices, size)
    if np.unique(indices).size < indices.size:
        raise ValueError("index: expected a different index for every row")
    lengths = np.zeros(size, np.int64)
    lengths[indices] = np.diff(x.layout.read_offsets())
    layout = Layout.from_host_lengths(x.layout.backend, lengths, like=x.offsets)
    values = take_rows(x, np.argsort(indices)).values
    return Array.from_layout(values, layout, x.ragged_dim)
