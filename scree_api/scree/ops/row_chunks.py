"""Row-wise operations on ranges of rows, which bound their temporary memory.

The result of a row depends on no other row. So an operation whose temporary arrays would be large
runs on one range of rows after the other. It needs row lengths that the host knows. Elsewhere the
operation runs on all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..array import Array
from ..layout import Layout

MAX_BYTES = 3 << 24  # estimated temporary memory of one range of rows
MAX_CHUNKS = 16
ELEMENT_BYTES = 24  # temporary memory per element
INDEX_BYTES = 64  # indices per token, and per row


def map_rows(f: Callable[[Array], Any], x: Array, per_token: bool = False, scale: int = 1) -> Any:
    """Return ``f(x)``, computed for ranges of rows if it needs more than `MAX_BYTES`.

    Parameters
    ----------
    f
        Function of a ragged array, in which no row depends on another row.
    x
        Ragged array.
    per_token
        Whether `f` returns values with the tokens along the ragged axis; otherwise it returns (n,
        ...), one entry per row.
    scale
        Temporary elements of `f` per element of `x`, where they are more than `x` has.
    """
    layout, element_bytes = x.layout, ELEMENT_BYTES * max(scale, 1)
    if layout.backend.split is None or layout.backend.is_compiling():
        return f(x)
    index_bytes = (x.total_length + layout.num_rows) * INDEX_BYTES
    is_small = x.size * element_bytes + index_bytes <= MAX_BYTES
    bounds = None if is_small else _row_bounds(x, element_bytes)
    if bounds is None:
        return f(x)
    parts = [f(part) for part in split_rows(x, bounds)]
    return join_rows(x, parts) if per_token else layout.xp.concat(parts, axis=0)


def _row_bounds(x: Array, element_bytes: int) -> np.ndarray | None:
    """Return the first row of each range, and the number of rows; None for one range of all rows."""
    layout = x.layout
    host = layout.host_offsets
    if host is None or layout.num_rows < 2:
        return None
    per_token = x.size * element_bytes // max(layout.total, 1) + INDEX_BYTES
    costs = host.astype(np.int64) * per_token + np.arange(host.size) * INDEX_BYTES
    bounds = equal_cost_bounds(costs, min(MAX_CHUNKS, -(-int(costs[-1]) // MAX_BYTES)))
    # Every range has tokens; empty rows at the end belong to the last range.
    bounds = bounds[host[bounds] < host[-1]]
    bounds = bounds[np.diff(host[bounds], append=host[-1]) > 0]
    return np.concatenate([[0], bounds[1:], [layout.num_rows]]) if bounds.size > 1 else None


def equal_cost_bounds(costs: np.ndarray, count: int) -> np.ndarray:
    """Return the first row of each of `count` ranges of about equal cost, at most one per row.

    ``costs[i]`` is the cost of all rows before row i.
    """
    targets = costs[-1] * np.arange(1, count) // max(count, 1)
    return np.unique([0, *np.searchsorted(costs, targets)])


def slice_rows(layout: Layout, start: int, stop: int) -> Layout:
    """Return the layout of a range of rows; the host knows the offsets."""
    host = layout.host_offsets
    assert host is not None
    part = host[start : stop + 1]
    offsets = layout.offsets[start : stop + 1]
    offsets = offsets - int(part[0]) if part[0] else offsets
    return Layout(layout.backend, offsets, int(part[-1] - part[0]), None, part - part[0])


def split_rows(x: Array, bounds: np.ndarray) -> list[Array]:
    """Return the ranges of rows between the bounds; a tail is dropped."""
    layout, split, dim = x.layout, x.layout.backend.split, x.ragged_dim
    assert layout.host_offsets is not None and split is not None
    ends = layout.host_offsets[bounds].astype(np.int64)
    sizes = [*np.diff(ends).tolist(), layout.total - int(ends[-1])]
    layouts = [slice_rows(layout, a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
    parts = zip(split(x.values, sizes, dim)[:-1], layouts, strict=True)
    return [Array.from_layout(values, part, dim) for values, part in parts]


def join_rows(x: Array, parts: list[Any]) -> Any:
    """Return the values of the ranges of rows of `x` together, with a tail of 0 as long as its tail."""
    layout, xp, dim = x.layout, x.layout.xp, x.ragged_dim
    assert layout.host_offsets is not None
    tail = layout.total - int(layout.host_offsets[-1])
    if tail:
        shape = tuple(tail if axis == dim else n for axis, n in enumerate(parts[0].shape))
        parts = [*parts, xp.zeros(shape, dtype=parts[0].dtype, device=layout.device)]
    return xp.concat(parts, axis=dim)
