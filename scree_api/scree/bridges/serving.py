"""Paged caches of serving engines. A table of pages is itself a ragged array: (n, None) numbers of pages, a row a sequence.

What the engines call ``indptr``, ``cu_seqlens`` or ``query_start_loc`` is `arr.offsets`, and ``seq_lens`` is `arr.lengths`:
`scree.from_offsets` takes them as they are. The functions here make the rest. The cache itself never passes through scree.
"""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import check_ragged
from ..checks import check_integer, check_integers
from ..ops.padding import from_padded, to_padded
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
    check_integer("page_size", page_size, 1)
    backend(seq_lens, "seq_lens")
    return from_padded(
        block_table, lengths=-(-check_integers("seq_lens", seq_lens, seq_lens) // page_size)
    )


def to_block_table(pages: Array, *, width: int | None = None, fill_value: int = 0) -> Any:
    """The block table of vLLM and FlashAttention.

    Parameters
    ----------
    pages
        (n, None) numbers of pages.
    width
        Pages of the longest sequence that the table has room for; by default of the longest in it, which reads the offsets.
    fill_value
        What stands where a sequence has no page.

    Returns
    -------
    dense array
        (n, width) numbers of pages.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = scree.from_lengths(np.asarray([7, 3, 4], dtype=np.int32), [2, 1])
    >>> scree.bridges.to_block_table(pages, width=3, fill_value=-1)
    array([[ 7,  3, -1],
           [ 4, -1, -1]], dtype=int32)
    """
    return to_padded(check_ragged("pages", pages), length=width, fill_value=fill_value)[0]


def from_flashinfer(
    kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, page_size: int
) -> tuple[Array, Any]:
    """The pages of FlashInfer's page table.

    Parameters
    ----------
    kv_indptr, kv_indices
        (n + 1,) offsets and (pages,) numbers of pages; both are shared.
    kv_last_page_len
        (n,) tokens of the last page of each sequence.
    page_size
        Tokens of a page.

    Returns
    -------
    pages, seq_lens
        (n, None) pages, and (n,) tokens of each sequence in the cache, 0 where it has no page.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages, seq_lens = scree.bridges.from_flashinfer(np.asarray([0, 2, 3]), np.asarray([7, 3, 4]), np.asarray([4, 16]), 16)
    >>> pages.lengths, seq_lens
    (array([2, 1]), array([20, 16]))
    """
    check_integer("page_size", page_size, 1)
    pages = Array(kv_indices, kv_indptr)
    kv_last_page_len = _one_a_row("kv_last_page_len", kv_last_page_len, pages)
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
    check_integer("page_size", page_size, 1)
    seq_lens = _one_a_row("seq_lens", seq_lens, check_ragged("pages", pages))
    return pages.offsets, pages.values, (seq_lens - 1) % page_size + 1


def _one_a_row(name: str, x: Any, rows: Array) -> Any:
    """`x` as int32 or int64; raises unless it has one integer for each row."""
    x = check_integers(name, x, rows.offsets)
    if tuple(x.shape) != (rows.batch_size,):
        raise ValueError(
            f"{name}: expected shape ({rows.batch_size},), a number a row, got {tuple(x.shape)}"
        )
    return x


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
    check_integer("page_size", page_size, 1)
    rows = check_ragged("tokens", tokens).layout
    xp = rows.xp
    if check_ragged("pages", pages).batch_size != tokens.batch_size or pages.ndim != 2:
        raise ValueError(f"pages: expected shape ({tokens.batch_size}, None), got {pages.shape}")
    wide = widest_integer(xp)
    position = xp.astype(rows.positions, wide)
    if isinstance(start, int):
        check_integer("start", start, 0)
    else:
        start = xp.take(xp.astype(_one_a_row("start", start, tokens), wide), rows.rows, axis=0)
    position = position + start
    page: Array = pages[Array.from_layout(position // page_size, rows)]
    return page.with_values(xp.astype(page.values, wide) * page_size + position % page_size)
