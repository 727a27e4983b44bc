"""Display of a ragged array: text in a terminal, a table in a notebook. Neither waits for a device nor fails.

Attaches `__repr__` and `_repr_html_` to `Array`.
"""

from __future__ import annotations

from typing import Any

from .array import Array

ROWS = 6  # rows shown, half from either end
WIDTH = 88  # characters of a row


def _rows(arr: Array) -> list[tuple[str, str, str]]:
    """(index, length, content) of the rows to show, where their lengths are known; lengths alone off the host."""
    host, lib = arr.layout.host, arr.layout.backend
    if host is None:
        return []
    free = lib.peek(arr.offsets) is not None  # the values lie where the offsets do
    n, half = arr.batch_size, ROWS // 2
    shown = list(range(n)) if n <= ROWS else [*range(half), -1, *range(n - half, n)]
    before = (slice(None),) * arr.ragged_dim
    rows = []
    for i in shown:
        if i < 0:
            rows.append(("...", "", ""))
            continue
        a, b = int(host[i]), int(host[i + 1])
        rows.append(
            (
                str(i),
                str(b - a),
                _content(arr.values[(*before, slice(a, b), ...)]) if free else f"{b - a} tokens",
            )
        )
    return rows


def _content(row: Any) -> str:
    text = " ".join(str(row).split())
    return text if len(text) <= WIDTH else text[: WIDTH - 4] + " ..."


def _head(arr: Array) -> str:
    parts = [f"shape={arr.shape}", f"dtype={arr.dtype}", arr.layout.backend.name]
    if arr.ragged_dim:
        parts.append(f"ragged_dim={arr.ragged_dim}")
    if (host := arr.layout.host) is not None and arr.batch_size:
        lengths = host[1:] - host[:-1]
        parts.append(f"lengths {lengths.min()} to {lengths.max()}, total {arr.total_length}")
    return ", ".join(parts)


def text(arr: Array) -> str:
    """The shape, dtype and library, and the first and last rows."""
    if not hasattr(arr.offsets, "shape"):  # inside a transform the parts may be anything
        return f"scree.Array(values={arr.values!r}, offsets={arr.offsets!r})"
    return "\n".join(
        [f"scree.Array({_head(arr)})"]
        + [f"  {i:>4}: {content}".rstrip() for i, _, content in _rows(arr)]
    )


def html(arr: Array) -> str:
    """The same as a table."""
    from html import escape  # slow to import

    body = "".join(
        f"<tr><th>{i}</th><td>{length}</td><td><code>{escape(content)}</code></td></tr>"
        for i, length, content in _rows(arr)
    )
    head = "<tr><th>row</th><th>length</th><th>values</th></tr>" if body else ""
    return f"<div><b>scree.Array</b> {escape(_head(arr))}<table>{head}{body}</table></div>"


Array.__repr__ = text  # type: ignore[method-assign,assignment]
Array._repr_html_ = html  # type: ignore[attr-defined]
