"""Paged caches of serving engines. A table of pages is itself a ragged array: (n, None) numbers of pages, a row a sequence.

What the engines call ``indptr``, ``cu_seqlens`` or ``query_start_loc`` is `arr.offsets`, and ``seq_lens`` is `arr.lengths`:
`scree.from_offsets` takes them as they are. The functions here make the rest. The cache itself never passes through scree.
"""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..backends import backend
from ..checks import integer, integers
from ..padded import from_padded, to_padded
from .dlpack import widest_integer


def from_block_table(block_table: Any, seq_lens: Any, page_size: int) -> Array:
    """The pages in use, of vLLM's or FlashAttention's block table.

    Parameters
    ----------
    block_table
        (n, width) numbers of pages, of which row i uses the first ``ceil(seq_lens[i] / page_size)``.
    seq_lens
        (n,) tokens of each sequence in the cache. Read.
    page_size
        Tokens of a page.

    Returns
    -------
    Array
        (n, None) pages.

    Examples
    --------
    >>> import numpy as np, scree
    >>> table = np.asarray([[7, 3, 0], [4, 0, 0]], dtype=np.int32)
    >>> scree.bridges.from_block_table(table, np.asarray([20, 16]), 16).values
    array([7, 3, 4], dtype=int32)
    """
    integer("page_size", page_size, 1)
    backend(seq_lens, "seq_lens")
    return from_padded(block_table, lengths=-(-integers("seq_lens", seq_lens, seq_lens) // page_size))


def to_block_table(pages: Array, *, width: int | None = None, fill_value: int = 0) -> Any:
    """(n, width) block table of vLLM and FlashAttention; `fill_value` stands where a sequence has no page."""
    return to_padded(pages, length=width, fill_value=fill_value)[0]


def from_flashinfer(kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, page_size: int) -> tuple[Array, Any]:
    """The pages (n, None), which shares the memory, and the (n,) tokens of each sequence in the cache."""
    integer("page_size", page_size, 1)
    pages = Array(kv_indices, kv_indptr)
    lengths = (pages.lengths - 1) * page_size + kv_last_page_len
    return pages, pages.layout.xp.where(pages.lengths > 0, lengths, 0)


def to_flashinfer(pages: Array, seq_lens: Any, page_size: int) -> tuple[Any, Any, Any]:
    """FlashInfer's ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``; the first two share the memory.

    Parameters
    ----------
    pages
        (n, None) int32 numbers of pages.
    seq_lens
        (n,) tokens of each sequence in the cache.
    page_size
        Tokens of a page.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = scree.from_lengths(np.asarray([7, 3, 4], dtype=np.int32), [2, 1])
    >>> scree.bridges.to_flashinfer(pages, np.asarray([20, 16], dtype=np.int32), 16)[2]
    array([ 4, 16], dtype=int32)
    """
    integer("page_size", page_size, 1)
    return pages.offsets, pages.values, (seq_lens - 1) % page_size + 1


def slot_mapping(pages: Array, tokens: Array, page_size: int, *, start: Any = 0) -> Array:
    """Where each token of a batch stands in the cache: vLLM's ``slot_mapping``, SGLang's ``kv_indices``.

    Parameters
    ----------
    pages
        (n, None) numbers of pages.
    tokens
        Any array on the rows of the tokens in question; only its layout matters.
    page_size
        Tokens of a page.
    start
        (n,) position of the first of these tokens in each sequence: 0 for whole sequences, the tokens that were there before
        for new ones.

    Returns
    -------
    Array
        (n, None) ``page * page_size + position % page_size`` on the rows of `tokens`, int64 (int32 where there is none).

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = scree.from_lengths(np.asarray([7, 3, 4], dtype=np.int32), [2, 1])
    >>> new = scree.from_lengths(np.zeros(3), [2, 1])      # two new tokens and one
    >>> scree.bridges.slot_mapping(pages, new, 16, start=np.asarray([15, 0])).values
    array([127,  48,  64])
    """
    integer("page_size", page_size, 1)
    rows, xp = tokens.layout, tokens.layout.xp
    if pages.batch_size != tokens.batch_size or pages.ndim != 2:
        raise ValueError(f"pages: expected shape ({tokens.batch_size}, None), got {pages.shape}")
    wide = widest_integer(xp)
    position = xp.astype(rows.positions, wide)
    if not isinstance(start, int):
        start = xp.astype(integers("start", start, rows.offsets), wide)
        if tuple(start.shape) != (tokens.batch_size,):
            raise ValueError(f"start: expected shape ({tokens.batch_size},), a position a row, got {tuple(start.shape)}")
        start = xp.take(start, rows.rows, axis=0)
    position = position + start
    page: Array = pages[Array._of(position // page_size, rows)]
    return page.with_values(xp.astype(page.values, wide) * page_size + position % page_size)
