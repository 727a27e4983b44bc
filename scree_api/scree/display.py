"""Representation of a ragged array: text in a terminal, an HTML table in a notebook.

Neither waits for a device, and neither raises.
"""

from __future__ import annotations

from typing import Any

from .array import Array

MAX_ROWS = 6  # rows shown, half of them from either end
MAX_WIDTH = 88  # characters per row


def _row_texts(arr: Array) -> list[tuple[str, str, str]]:
    """Return (index, length, content) of the rows to show; none if the offsets are not on the host.

    The content of rows on a device is their length alone.
    """
    offsets, lib = arr.layout.host_offsets, arr.layout.backend
    if offsets is None:
        return []
    # The values are on the device of the offsets.
    values_on_host = lib.peek(arr.offsets) is not None
    n, half = arr.batch_size, MAX_ROWS // 2
    shown = list(range(n)) if n <= MAX_ROWS else [*range(half), -1, *range(n - half, n)]
    before = (slice(None),) * arr.ragged_dim
    texts = []
    for i in shown:
        if i < 0:
            texts.append(("...", "", ""))
            continue
        start, stop = int(offsets[i]), int(offsets[i + 1])
        content = (
            _one_line(arr.values[(*before, slice(start, stop), ...)])
            if values_on_host
            else f"{stop - start} tokens"
        )
        texts.append((str(i), str(stop - start), content))
    return texts


def _one_line(row: Any) -> str:
    """Return the text of a row on one line, cut to `MAX_WIDTH` characters."""
    line = " ".join(str(row).split())
    return line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 4] + " ..."


def _summary(arr: Array) -> str:
    """Return the shape, the dtype, the library and the lengths on one line."""
    parts = [f"shape={arr.shape}", f"dtype={arr.dtype}", arr.layout.backend.name]
    if arr.ragged_dim:
        parts.append(f"ragged_dim={arr.ragged_dim}")
    if (host := arr.layout.host_offsets) is not None and arr.batch_size:
        lengths = host[1:] - host[:-1]
        parts.append(f"lengths {lengths.min()} to {lengths.max()}, total {arr.total_length}")
    return ", ".join(parts)


def text(arr: Array) -> str:
    """Return a summary and the first and last rows as text, for ``repr``."""
    # Inside a transform, values and offsets may be objects of any type.
    if not hasattr(arr.offsets, "shape"):
        return f"scree.Array(values={arr.values!r}, offsets={arr.offsets!r})"
    return "\n".join(
        [f"scree.Array({_summary(arr)})"]
        + [f"  {i:>4}: {content}".rstrip() for i, _, content in _row_texts(arr)]
    )


def html(arr: Array) -> str:
    """Return a summary and the first and last rows as an HTML table, for notebooks."""
    from html import escape  # not at the top, because it would slow down `import scree`

    body = "".join(
        f"<tr><th>{i}</th><td>{length}</td><td><code>{escape(content)}</code></td></tr>"
        for i, length, content in _row_texts(arr)
    )
    head = "<tr><th>row</th><th>length</th><th>values</th></tr>" if body else ""
    return f"<div><b>scree.Array</b> {escape(_summary(arr))}<table>{head}{body}</table></div>"


for method, function in {"__repr__": text, "_repr_html_": html}.items():
    setattr(Array, method, function)
