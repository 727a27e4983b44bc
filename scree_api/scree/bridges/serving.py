"""Page tables of the paged key-value caches of vLLM, FlashInfer and SGLang.

A page table is a ragged array of shape (n, None): one row of page indices per sequence.
FlashInfer's page table shares its memory; a block table is copied. The cache itself never passes
through scree.

The ``indptr``, ``cu_seqlens`` or ``query_start_loc`` of an engine is `arr.offsets`, and its
``seq_lens`` is `arr.lengths`: `scree.from_offsets` accepts them as they are.
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
    """Return the used pages of a block table of vLLM or FlashAttention.

    Parameters
    ----------
    block_table
        (n, width) page indices. Row i uses the first ``ceil(seq_lens[i] / page_size)`` of them.
    seq_lens
        (n,) number of cached tokens per sequence; read on the host.
    page_size
        Number of tokens per page.

    Returns
    -------
    Array
        (n, None) page indices, a copy.

    Raises
    ------
    ValueError
        If `page_size` is less than 1, or the lengths do not fit the table.
    TypeError
        If `seq_lens` does not contain integers.

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
    """Return the block table of vLLM and FlashAttention; copies the page indices.

    Parameters
    ----------
    pages
        (n, None) page indices.
    width
        Number of columns. By default the largest number of pages of a sequence, which reads the
        offsets.
    fill_value
        Entry of the unused columns of a row.

    Returns
    -------
    dense array
        (n, width) page indices.

    Raises
    ------
    TypeError
        If `pages` is not a ragged array.
    ValueError
        If a sequence has more than `width` pages.

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
    """Return the pages and the sequence lengths of FlashInfer's page table.

    Parameters
    ----------
    kv_indptr, kv_indices
        (n + 1,) offsets and (num_pages,) page indices; the result shares their memory.
    kv_last_page_len
        (n,) number of tokens in the last page of each sequence.
    page_size
        Number of tokens per page.

    Returns
    -------
    pages, seq_lens
        (n, None) page indices, and (n,) number of cached tokens per sequence, 0 if it has no page.

    Raises
    ------
    ValueError
        If `page_size` is less than 1, or `kv_last_page_len` has another shape.
    TypeError
        If `kv_last_page_len` does not contain integers.

    Examples
    --------
    >>> import numpy as np, scree
    >>> indptr, indices, last_page_len = np.asarray([0, 2, 3]), np.asarray([7, 3, 4]), [4, 16]
    >>> pages, seq_lens = scree.bridges.from_flashinfer(
    ...     indptr, indices, np.asarray(last_page_len), page_size=16
    ... )
    >>> pages.lengths, seq_lens
    (array([2, 1]), array([20, 16]))
    """
    check_integer("page_size", page_size, 1)
    pages = Array(kv_indices, kv_indptr)
    kv_last_page_len = _check_one_per_row("kv_last_page_len", kv_last_page_len, pages)
    lengths = (pages.lengths - 1) * page_size + kv_last_page_len
    return pages, pages.layout.xp.where(pages.lengths > 0, lengths, 0)


def to_flashinfer(pages: Array, seq_lens: Any, page_size: int) -> tuple[Any, Any, Any]:
    """Return FlashInfer's page table.

    Parameters
    ----------
    pages
        (n, None) int32 page indices.
    seq_lens
        (n,) number of cached tokens per sequence.
    page_size
        Number of tokens per page.

    Returns
    -------
    kv_indptr, kv_indices, kv_last_page_len
        (n + 1,) offsets and (num_pages,) page indices, which share the memory of `pages`. The last
        array, (n,), is the number of tokens in the last page of each sequence.

    Raises
    ------
    TypeError
        If `pages` is not a ragged array, or `seq_lens` does not contain integers.
    ValueError
        If `page_size` is less than 1, or `seq_lens` has another shape.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = scree.from_lengths(np.asarray([7, 3, 4], dtype=np.int32), [2, 1])
    >>> scree.bridges.to_flashinfer(pages, np.asarray([20, 16], dtype=np.int32), 16)[2]
    array([ 4, 16], dtype=int32)
    """
    check_integer("page_size", page_size, 1)
    seq_lens = _check_one_per_row("seq_lens", seq_lens, check_ragged("pages", pages))
    return pages.offsets, pages.values, (seq_lens - 1) % page_size + 1


def _check_one_per_row(name: str, x: Any, arr: Array) -> Any:
    """Return `x` as int32 or int64; raise unless it has one integer per row of `arr`."""
    x = check_integers(name, x, arr.offsets)
    if tuple(x.shape) != (arr.batch_size,):
        raise ValueError(
            f"{name}: expected shape ({arr.batch_size},), one number per row, got {tuple(x.shape)}"
        )
    return x


def slot_mapping(pages: Array, tokens: Array, page_size: int, *, start: Any = 0) -> Array:
    """Return the cache slot of each token: vLLM's ``slot_mapping``, SGLang's ``kv_indices``.

    Parameters
    ----------
    pages
        (n, None) page indices.
    tokens
        Ragged array of the tokens to place; only its layout is used.
    page_size
        Number of tokens per page.
    start
        (n,) position of the first of these tokens in its sequence. 0 for whole sequences; the
        number of tokens already in the cache for new tokens.

    Returns
    -------
    Array
        (n, None) ``page * page_size + position % page_size`` on the rows of `tokens`; int64, or
        int32 in a library without int64.

    Raises
    ------
    TypeError
        If `pages` or `tokens` is not a ragged array, or `start` does not contain integers.
    ValueError
        If `pages` has another shape, or `start` has another shape or is a negative number.
    IndexError
        If a token is after the last page of its sequence, and reading the offsets is free.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = scree.from_lengths(np.asarray([7, 3, 4], dtype=np.int32), [2, 1])
    >>> new = scree.from_lengths(np.zeros(3), [2, 1])  # two new tokens, and one
    >>> scree.bridges.slot_mapping(pages, new, 16, start=np.asarray([15, 0])).values
    array([127,  48,  64])
    """
    check_integer("page_size", page_size, 1)
    layout = check_ragged("tokens", tokens).layout
    xp = layout.xp
    if check_ragged("pages", pages).batch_size != tokens.batch_size or pages.ndim != 2:
        raise ValueError(f"pages: expected shape ({tokens.batch_size}, None), got {pages.shape}")
    dtype = widest_integer(xp)
    positions = xp.astype(layout.positions, dtype)
    if isinstance(start, int):
        check_integer("start", start, 0)
    else:
        start = _check_one_per_row("start", start, tokens)
        start = xp.take(xp.astype(start, dtype), layout.clipped_segment_ids, axis=0)
    positions = positions + start
    page: Array = pages[Array.from_layout(positions // page_size, layout)]
    return page.with_values(xp.astype(page.values, dtype) * page_size + positions % page_size)
