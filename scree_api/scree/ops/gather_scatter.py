"""Moving tokens and rows: gather, scatter, and the grouping of tokens that mixture-of-experts layers route by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import Array
from ..backends import backend
from ..broadcasting import accumulator, difference, ragged, values_of
from ..checks import integer, integers
from ..dispatch import call_cache
from ..dispatch.registry import declare, run
from ..indexing.getitem import row_numbers, take_rows
from ..layout import Layout, counter, same
from .segment import segment_reduce, spread


def gather(x: Any, index: Any, *, axis: int = 1, kernel: str | None = None) -> Array:
    """Tokens or rows by their numbers.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    index
        For tokens (axis 1) a ragged integer array (n, None): numbers in [0, total), counted through all rows of `x`. For
        rows (axis 0) a dense integer array of row numbers, which is read.
    axis
        1 for tokens, 0 for rows.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array
        The tokens on the layout of `index`, or the rows in the order of `index`.

    Raises
    ------
    TypeError
        If the index holds no integers.
    ValueError
        If a number is out of bounds, where that is seen for free.
    IndexError
        If there is no such row.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.asarray([10, 11, 12]), [1, 2])
    >>> scree.gather(arr, scree.from_lengths(np.asarray([2, 0, 2, 1]), [3, 1])).values
    array([12, 10, 12, 11])
    """
    if _axis(axis) == 0:
        integers("index", index, ragged("x", x).values)
        return take_rows(x, row_numbers(index, x.batch_size), kernel)
    found = call_cache.run("gather", {"index": index, "x": x}, {}, kernel)
    return Array._of(found, index.layout)


@dataclass(frozen=True, slots=True)
class GatherCall:
    """The tokens of `x`, (tokens, ...), whose numbers, in [0, tokens), `index` holds, (count,); they come out, (count, ...).

    `distinct` says that no number comes twice.
    """

    x: Any
    index: Any
    distinct: bool = False

    @classmethod
    def make(cls, x: Any, index: Any) -> GatherCall:
        """Check the arguments of `gather` and bring them into one form."""
        values, places = _tokens(x), ragged("index", index)
        if places.ndim != 2:
            raise ValueError(
                f"index: expected a ragged array of one number a token, (n, None), got {places.shape}"
            )
        numbers = integers("index", places.values, values)
        _in_bounds(places.layout.backend.peek(numbers), "index", values.shape[0])
        return cls(values, numbers)


@declare("gather", GatherCall.make)
def _take(call: GatherCall) -> Any:
    return backend(call.x).xp.take(call.x, call.index, axis=0)


@dataclass(frozen=True, slots=True)
class ScatterCall:
    """Put the tokens of `x`, (tokens, ...), at `index`, (tokens,), of `size` places; add those that meet, or keep the last.

    An index of `size` is no place: that of a token behind the last row.
    """

    x: Any
    index: Any
    size: int
    add: bool

    @classmethod
    def make(cls, x: Any, index: Any, size: int, *, add: bool = False) -> ScatterCall:
        """Check the arguments of `scatter` and bring them into one form."""
        values, size = _tokens(x), integer("size", size, 0)
        if (
            isinstance(x, Array)
            and isinstance(index, Array)
            and same(x.layout, index.layout) is False
        ):
            raise ValueError(f"index: expected the rows of x, got {difference(x, index)}")
        return cls(values, _numbers("index", x, index, size), size, add)


def scatter(x: Any, index: Any, size: int, *, axis: int = 1, kernel: str | None = None) -> Any:
    """Put tokens or rows at numbered places; the inverse of `gather`. Of tokens that meet, the last one stays.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    index
        The place of each token (ragged like `x`, or dense (tokens,)), or of each row (axis 0), in [0, size).
    size
        Number of places; those that nothing comes to are 0, or empty rows.
    axis
        1 for tokens, 0 for rows.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    dense array or Array
        (size, ...) tokens, or a ragged array of `size` rows.

    Raises
    ------
    TypeError
        If the index holds no integers.
    ValueError
        If there is not one place for each token or row, if a place is out of bounds (where that is seen for free), or if two rows
        meet.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.scatter(np.asarray([5, 6]), np.asarray([3, 0]), 4)
    array([6, 0, 0, 5])
    """
    if _axis(axis) == 0:
        if kernel is not None:
            raise ValueError(
                f"kernel: expected None for rows (axis=0), which no kernel moves, got {kernel!r}"
            )
        return _scatter_rows(ragged("x", x), index, integer("size", size, 0))
    return call_cache.run("scatter", {"x": x, "index": index}, {"size": size}, kernel)


def scatter_add(x: Any, index: Any, size: int, *, kernel: str | None = None) -> Any:
    """Add tokens up at numbered places; half precision adds in float32.

    Parameters
    ----------
    x, index, size, kernel
        See `scatter`.

    Returns
    -------
    dense array
        (size, ...), 0 where nothing came to.

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
    return call_cache.run("scatter", {"x": x, "index": index}, {"size": size, "add": True}, kernel)


def group(x: Any, ids: Any, num_groups: int) -> tuple[Array, Array]:
    """Sort tokens into groups, for instance by the expert that each is routed to.

    Parameters
    ----------
    x
        Ragged array, or a dense one (tokens, ...).
    ids
        (tokens,) group of each token, in [0, num_groups). Where a token goes to k groups, repeat it:
        ``group(xp.repeat(tokens, k, axis=0), xp.reshape(ids, (-1,)), num_groups)``.
    num_groups
        Number of groups.

    Returns
    -------
    grouped, index
        The tokens as a ragged array (num_groups, None, ...), in their order within each group; and, on the same layout, the
        number that each had in `x`, which `scatter` and `scatter_add` put them back with.

    Raises
    ------
    TypeError
        If the ids are no integers.
    ValueError
        If there is not one id for each token, or one is out of bounds, where that is seen for free.

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
    values, num_groups = _tokens(x), integer("num_groups", num_groups, 0)
    lib, total = backend(values), int(values.shape[0])
    order, offsets = _sorted(
        lib.xp, _numbers("ids", x, ids, num_groups), num_groups, lib.device(values)
    )
    full = all(one.layout.full for one in (x, ids) if isinstance(one, Array))
    groups = Layout(lib, lib.xp.astype(offsets, counter(lib.xp, total)), total, full=full)
    grouped = Array._of(run("gather", GatherCall(values, order, distinct=True)), groups)
    return grouped, grouped.with_values(order)


def _sorted(xp: Any, ids: Any, size: int, device: Any) -> tuple[Any, Any]:
    """The stable order of the ids, and where each id begins in it, (size + 1,)."""
    order = xp.argsort(ids, stable=True)
    bounds = xp.arange(size + 1, dtype=ids.dtype, device=device)
    return order, xp.searchsorted(xp.take(ids, order, axis=0), bounds)


def _axis(axis: int) -> int:
    if axis not in (0, 1):
        raise ValueError(f"axis: expected 1 for tokens or 0 for rows, got {axis!r}")
    return axis


def _tokens(x: Any) -> Any:
    if isinstance(x, Array) and x.ragged_dim:
        raise ValueError(
            f"x: expected the ragged axis in front, got ragged_dim {x.ragged_dim}; use xp.moveaxis"
        )
    values = values_of(x)
    backend(values, "x")
    if values.ndim == 0:
        raise ValueError("x: expected an axis of tokens, got a 0-d array")
    return values


def _numbers(name: str, x: Any, numbers: Any, size: int) -> Any:
    """The number in [0, size) of each token of `x`; `size` for tokens behind the last row of `x` or of the numbers."""
    values = values_of(x)
    rows = next((one.layout for one in (x, numbers) if isinstance(one, Array)), None)
    if (
        isinstance(x, Array)
        and isinstance(numbers, Array)
        and same(x.layout, numbers.layout) is False
    ):
        raise ValueError(f"{name}: expected the rows of x, got {difference(x, numbers)}")
    numbers = integers(name, values_of(numbers), values)
    if tuple(numbers.shape) != (values.shape[0],):
        raise ValueError(
            f"{name}: expected a number for each of {values.shape[0]} tokens, got shape {tuple(numbers.shape)}"
        )
    lib, real = backend(values), None if rows is None else rows.real
    seen = lib.peek(numbers)
    if rows is not None and real is not None:
        seen = None if seen is None or rows.host is None else seen[: rows.host[-1]]
        numbers = lib.xp.where(
            real, lib.xp.astype(numbers, counter(lib.xp, size, numbers), copy=False), size
        )
    _in_bounds(seen, name, size)
    return numbers


def _in_bounds(host: np.ndarray | None, name: str, size: int) -> None:
    if host is not None and host.size and (host.min() < 0 or host.max() >= size):
        raise ValueError(
            f"{name}: expected numbers in [0, {size}), got {host.min()} to {host.max()}"
        )


@declare("scatter", ScatterCall.make)
def _standard(call: ScatterCall) -> Any:
    """Sort by place; then a place is a row of tokens, of which the sum or the last one is taken."""
    lib = backend(call.x)
    xp, values, device = lib.xp, call.x, lib.device(call.x)
    if values.shape[0] == 0 or call.size == 0:
        return xp.zeros((call.size, *values.shape[1:]), dtype=values.dtype, device=device)
    order, offsets = _sorted(xp, call.index, call.size, device)
    places = Layout(lib, offsets, values.shape[0])
    if call.add:
        wide = xp.astype(xp.take(values, order, axis=0), accumulator(xp, values.dtype), copy=False)
        return xp.astype(segment_reduce("sum", wide, places), values.dtype, copy=False)
    last = xp.take(order, places.clip(offsets[1:] - 1), axis=0)
    found = xp.take(values, last, axis=0)
    return xp.where(
        spread(xp, places.filled, found.ndim),
        found,
        xp.zeros((), dtype=values.dtype, device=device),
    )


def _scatter_rows(x: Array, index: Any, size: int) -> Array:
    integers("index", index, x.values)
    places = backend(index).read(index)
    if places.shape != (x.batch_size,):
        raise ValueError(
            f"index: expected one place for each of {x.batch_size} rows, got shape {places.shape}"
        )
    _in_bounds(places, "index", size)
    if np.unique(places).size < places.size:
        raise ValueError("index: expected every row at a place of its own")
    source = np.full(size, -1)
    source[places] = np.arange(places.size)
    filled = take_rows(x, source[source >= 0])
    lengths = np.zeros(size, np.int64)
    lengths[source >= 0] = np.diff(filled.layout.read())
    return Array._of(
        filled.values, Layout.from_host(x.layout.backend, lengths, like=x.offsets), x.ragged_dim
    )
