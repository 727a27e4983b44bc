"""Page tables of paged caches: their checks, and the tokens that they select.

A cache is an array (num_pages, page_size, heads, head_dim). A page table is a ragged array (n,
None): row i lists the pages of sequence i, in order. A dense block table (n, width) is one too; its
entries after the pages in use are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import Backend, backend
from ..broadcasting import as_values
from ..layout import Layout

__all__ = ["validate_pages"]


def validate_pages(page_table: Any, kv_lengths: Any, num_pages: int, page_size: int) -> None:
    """Raise if a page table names pages that do not exist, or too few pages for its rows.

    `paged_attention` and `append_paged` check only what they can read without waiting for a device.
    This function reads both arrays.

    Parameters
    ----------
    page_table
        (n, None) ragged or (n, width) dense page numbers.
    kv_lengths
        (n,) number of tokens per row.
    num_pages, page_size
        The first two sizes of the cache.

    Raises
    ------
    TypeError
        If the arrays do not hold integers.
    ValueError
        If a page in use is not in [0, num_pages), a row has too few pages, or a length is negative.

    Examples
    --------
    >>> import numpy as np, scree
    >>> table = np.asarray([[3, 1, -1], [0, -1, -1]])
    >>> scree.validate_pages(table, np.asarray([20, 16]), num_pages=4, page_size=16)
    """
    checks.check_integer("num_pages", num_pages, 0)
    checks.check_integer("page_size", page_size, 1)
    table = as_page_table(page_table, kv_lengths)
    lengths = checks.read_integers("kv_lengths", kv_lengths)
    offsets = table.layout.read_offsets()
    pages = backend(table.values).read(table.values)
    check_pages(pages, offsets, lengths, num_pages, page_size)


def as_page_table(page_table: Any, kv_lengths: Any) -> Array:
    """Return a page table as a ragged array; raise unless it fits the lengths."""
    values = as_values(page_table)
    checks.check_integers("page_table", values, kv_lengths)
    lengths = checks.check_integers("kv_lengths", kv_lengths, values)
    if page_table.ndim != 2:
        raise ValueError(
            f"page_table: expected a ragged array (n, None) or a dense one (n, width), got {page_table.shape}"
        )
    if not isinstance(page_table, Array):
        n, width = (int(size) for size in page_table.shape)
        lib: Backend = backend(values)
        offsets = lib.xp.arange(n + 1, dtype=lib.xp.int32, device=lib.device(values)) * width
        host = None if lib.is_compiling() else np.arange(n + 1) * width
        layout = Layout(lib, offsets, n * width, width, host, has_no_tail=True)
        page_table = Array.from_layout(lib.xp.reshape(values, (-1,)), layout)
    table: Array = page_table
    checks.check_shape("kv_lengths", lengths, (table.batch_size,), "one length per row")
    return table


def check_pages(
    pages: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, num_pages: int, page_size: int
) -> None:
    """Raise unless a page table in host memory has enough pages, all of which exist."""
    if lengths.min(initial=0) < 0:
        raise ValueError(f"kv_lengths: expected lengths of at least 0, got {lengths.min()}")
    used, counts = -(-lengths.astype(np.int64) // page_size), np.diff(offsets)
    short = np.flatnonzero(used > counts)
    if short.size:
        i = int(short[0])
        raise ValueError(
            f"page_table: expected {used[i]} pages of {page_size} tokens for the {lengths[i]} tokens of row {i}, "
            f"got {counts[i]}"
        )
    is_used = np.arange(pages.size) - np.repeat(offsets[:-1], counts) < np.repeat(used, counts)
    wrong = np.flatnonzero(is_used & ((pages < 0) | (pages >= num_pages)))
    if wrong.size:
        i = int(wrong[0])
        row = int(np.searchsorted(offsets, i, side="right")) - 1
        raise ValueError(
            f"page_table: expected pages in [0, {num_pages}), got {pages[i]} as page {i - int(offsets[row])} of row {row}"
        )


def check_pages_if_free(
    table: Array, kv_lengths: Any, num_pages: int, page_size: int
) -> np.ndarray | None:
    """Check a page table as far as the host can read it; return the lengths if it can read them."""
    lib, offsets = table.layout.backend, table.layout.host_offsets
    pages, lengths = lib.peek(table.values), lib.peek(kv_lengths)
    if pages is not None and lengths is not None and offsets is not None:
        check_pages(pages[: offsets[-1]], offsets, lengths, num_pages, page_size)
    return lengths


def check_cache(name: str, pages: Any, like: Any) -> None:
    """Raise unless `pages` is a cache of the library and on the device of `like`."""
    checks.check_dense(name, pages, like)
    if pages.ndim != 4 or 0 in pages.shape[1:]:
        raise ValueError(
            f"{name}: expected a cache (num_pages, page_size, heads, head_dim), got shape {tuple(pages.shape)}"
        )


def token_layout(table: Array, kv_lengths: Any, page_size: int) -> Layout:
    """Return the layout of the cached tokens.

    A row ends with its pages if only a device knows its length, which `check_pages` then cannot check.
    """
    layout = table.layout
    host = layout.backend.peek(kv_lengths)
    if host is not None:
        return Layout.from_host_lengths(layout.backend, host, like=table.offsets)
    lengths = layout.xp.astype(kv_lengths, table.offsets.dtype, copy=False)
    lengths = layout.xp.minimum(lengths, layout.lengths * page_size)
    bound = layout.max_length_bound * page_size
    return layout.with_lengths(lengths, layout.total * page_size, bound)


def gather_pages(pages: Any, table: Array, layout: Layout) -> Any:
    """Return (total, heads, head_dim), the tokens of a cache in the order of `layout`."""
    xp, (num_pages, size, *token) = layout.xp, (int(n) for n in pages.shape)
    if 0 in (layout.total, table.layout.total, num_pages):
        return xp.zeros((layout.total, *token), dtype=pages.dtype, device=layout.device)
    used_lengths = (layout.lengths + (size - 1)) // size
    if layout.host_offsets is not None:
        host = -(-np.diff(layout.host_offsets) // size)
        used = Layout.from_host_lengths(layout.backend, host, like=layout.offsets)
    else:
        bound = table.layout.max_length_bound
        used = table.layout.with_lengths(used_lengths, table.layout.total, bound)
    entries = used.per_token(table.offsets[:-1]) + used.positions
    numbers = xp.take(table.values, table.layout.clip(entries), axis=0)
    # Entries after the last page of all rows may have any value.
    numbers = xp.clip(numbers, 0, num_pages - 1)
    tokens = xp.reshape(xp.take(pages, numbers, axis=0), (used.total * size, *token))
    if size == 1 and used.total == layout.total:
        return tokens
    index = layout.per_token(used.offsets_as_index(used.total * size)[:-1]) * size
    index = index + layout.positions
    return xp.take(tokens, xp.clip(index, 0, used.total * size - 1), axis=0)
