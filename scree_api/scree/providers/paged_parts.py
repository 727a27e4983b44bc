"""Parts of the rows of a paged cache, for kernels on the CPU that decode one query per row.

The rows are cut into parts of a few pages. A kernel copies a few parts at a time into one small
buffer, which stays in the processor's cache, attends to them, and merges the parts of each row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..backends import Backend
from ..ops.paged_attention import PagedAttentionCall

#: Tokens of a part of a row, rounded up to whole pages.
PART_TOKENS = 256
#: Bytes of the buffer of keys, and of the buffer of values; one part always fits.
BUFFER_BYTES = 4 << 20


class Parts(NamedTuple):
    """The parts of all rows with a query and with cached tokens, longest first.

    Attributes
    ----------
    rows
        The row of each part.
    first_page
        Its first entry in the page table.
    tokens
        Its number of tokens.
    """

    rows: np.ndarray
    first_page: np.ndarray
    tokens: np.ndarray


class Chunk(NamedTuple):
    """Parts that fill a buffer.

    Attributes
    ----------
    parts
        Which parts.
    pages
        (parts * num_pages,) page numbers, the same number of pages for each part.
    is_token
        (parts, num_pages * page_size), or None if every place holds a token of the part. The other
        places hold any numbers, which may be NaN.
    """

    parts: slice
    pages: np.ndarray
    is_token: np.ndarray | None


def rejects_decode(call: PagedAttentionCall, library: Backend) -> str | None:
    """Return why a kernel that decodes in parts does not take the call."""
    q, table = call.q, call.page_table
    if q.layout.backend is not library:
        return f"the kernel takes arrays of {library.name} only"
    offsets = q.layout.host_offsets
    host = table.layout.host_offsets, library.peek(table.values), library.peek(call.kv_lengths)
    if offsets is None or any(x is None for x in host):
        return "the kernel needs lengths and pages known on the host"
    if np.diff(offsets).max(initial=0) > 1:
        return "the kernel takes at most one query per row"
    if {call.k_pages.dtype, call.v_pages.dtype} != {q.dtype}:
        return "the kernel takes caches in the dtype of q"
    if (call.k_scale, call.v_scale) != (None, None):
        return "the kernel has no k_scale and no v_scale"
    if call.softcap is not None or call.alibi_slopes is not None:
        return "the kernel has no softcap and no ALiBi"
    if call.window not in ((None, None), (None, 0)):
        return "the kernel has no window"
    return None


def decode_parts(call: PagedAttentionCall, library: Backend) -> Parts:
    """Cut the rows of a call that `rejects_decode` accepts."""
    size = int(call.k_pages.shape[1])
    lengths = np.asarray(library.peek(call.kv_lengths), np.int64)
    q_offsets = np.asarray(call.q.layout.host_offsets, np.int64)
    lengths = np.where(np.diff(q_offsets) > 0, lengths, 0)
    step = -(-PART_TOKENS // size) * size
    counts = -(-lengths // step)
    rows = np.repeat(np.arange(lengths.size), counts)
    start = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    tokens = np.minimum(lengths[rows] - start, step)
    first_page = np.asarray(call.page_table.layout.host_offsets, np.int64)[rows] + start // size
    order = np.argsort(-tokens, kind="stable")
    return Parts(rows[order], first_page[order], tokens[order])


def chunks(parts: Parts, table: np.ndarray, size: int, page_bytes: int) -> Iterator[Chunk]:
    """Yield chunks of at most `BUFFER_BYTES`; none is larger than the first."""
    i = 0
    while i < parts.tokens.size:
        num_pages = -(-int(parts.tokens[i]) // size)

        count = min(parts.tokens.size - i, max(1, BUFFER_BYTES // (num_pages * page_bytes)))
        chosen = slice(i, i + count)
        tokens = parts.tokens[chosen, None]
        page = np.arange(num_pages)
        # Places after the last page of a part take its first page.
        entries = parts.first_page[chosen, None] + np.where(page * size < tokens, page, 0)
        is_token = np.arange(num_pages * size) < tokens
        pages = np.asarray(table[entries], np.int64).reshape(-1)
        yield Chunk(chosen, pages, None if is_token.all() else is_token)
        i += count
