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
    if layout.backend.split is not None and not layout.backend.is_compiling():
        index_bytes = (x.total_length + layout.num_rows) * INDEX_BYTES
        if x.size * element_bytes + index_bytes > MAX_BYTES:
            bounds = _row_bounds(x, element_bytes)
            if bounds is not None:
                return _join_chunks(f, x, bounds, per_token)
    return f(x)


def _row_bounds(x: Array, element_bytes: int) -> np.ndarray | None:
    """Return the first row of each range, and the number of rows; None for one range of all rows."""
    layout = x.layout
    host = layout.host_offsets
    if host is None or layout.num_rows < 2:
        return None
    per_token = x.size * element_bytes // max(layout.total, 1) + INDEX_BYTES
    costs = host.astype(np.int64) * per_token + np.arange(host.size) * INDEX_BYTES
    count = min(MAX_CHUNKS, -(-int(costs[-1]) // MAX_BYTES))
    targets = costs[-1] * np.arange(1, count) // max(count, 1)
    bounds = np.unique([0, *np.searchsorted(costs, targets)])
    # Every range has tokens; empty rows at the end belong to the last range.
    bounds = bounds[host[bounds] < host[-1]]
    bounds = bounds[np.diff(host[bounds], append=host[-1]) > 0]
    return np.concatenate([[0], bounds[1:], [layout.num_rows]]) if bounds.size > 1 else None


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
    layout, split = x.layout, x.layout.backend.split
    assert layout.host_offsets is not None and split is not None
    ends = layout.host_offsets[bounds].astype(np.int64)
    sizes = [*np.diff(ends).tolist(), layout.total - int(ends[-1])]
    layouts = [slice_rows(layout, a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
    parts = split(x.values, sizes, x.ragged_dim)[:-1]
    return [
        Array.from_layout(values, part, x.ragged_dim)
        for values, part in zip(parts, layouts, strict=True)
    ]


def append_tail(x: Array, parts: list[Any]) -> list[Any]:
    """Return the values of all rows in parts, with a tail of 0 as long as the tail of `x`."""
    layout, xp, dim = x.layout, x.layout.xp, x.ragged_dim
    assert layout.host_offsets is not None
    tail = layout.total - int(layout.host_offsets[-1])
    if not tail:
        return parts
    shape = tuple(tail if axis == dim else n for axis, n in enumerate(parts[0].shape))
    return [*parts, xp.zeros(shape, dtype=parts[0].dtype, device=layout.device)]


def _join_chunks(f: Callable[[Array], Any], x: Array, bounds: np.ndarray, per_token: bool) -> Any:
    parts = [f(part) for part in split_rows(x, bounds)]
    if not per_token:
        return x.layout.xp.concat(parts, axis=0)
    return x.layout.xp.concat(append_tail(x, parts), axis=x.ragged_dim)
