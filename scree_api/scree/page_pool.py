"""`PagePool`: which pages of a paged cache belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import checks
from .array import Array
from .backends import backend
from .layout import Layout


class PagePool:
    """Pages of a paged key-value cache, and the sequences that use them.

    The pool holds page numbers and lengths in host memory. It holds no keys and values, and decides
    nothing about requests: that is the task of a serving engine. Sequences may share pages
    (`fork`). `extend` copies a shared page before it is written.

    Parameters
    ----------
    num_pages, page_size
        The first two sizes of the caches.

    Attributes
    ----------
    num_pages, page_size
        See above.

    Examples
    --------
    >>> import scree
    >>> pool = scree.PagePool(num_pages=8, page_size=4)
    >>> prompt = pool.add(6)
    >>> pool.page_table([prompt]).tolist(), pool.num_free
    ([[0, 1]], 6)
    >>> beam = pool.fork(prompt)  # shares both pages
    >>> pool.extend([prompt, beam], 1)  # (sources, targets): copy these pages in the caches
    (array([1]), array([2]))
    >>> pool.page_table([prompt, beam]).tolist(), pool.lengths([prompt, beam])
    ([[0, 2], [0, 1]], array([7, 7], dtype=int32))
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = checks.check_integer("num_pages", num_pages, 0)
        self.page_size = checks.check_integer("page_size", page_size, 1)
        self._free = list(range(num_pages))[::-1]
        self._uses = np.zeros(num_pages, np.int64)  # sequences per page
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    def __repr__(self) -> str:
        return (
            f"PagePool(num_pages={self.num_pages}, page_size={self.page_size}, "
            f"{len(self._pages)} sequences, {self.num_free} pages free)"
        )

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        """All sequences, oldest first."""
        return list(self._pages)

    def add(self, length: int = 0) -> int:
        """Return a new sequence with pages for `length` tokens.

        Parameters
        ----------
        length
            Number of tokens, at least 0.

        Returns
        -------
        int
            The sequence: a number that no other sequence of the pool ever has.

        Raises
        ------
        MemoryError
            If too few pages are free. Then nothing changes.
        """
        checks.check_integer("length", length, 0)
        count = -(-length // self.page_size)
        self._check_free(count)
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence] = [self._take() for _ in range(count)]
        self._lengths[sequence] = length
        return sequence

    def extend(
        self, sequences: Sequence[int], counts: int | Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make room for new tokens at the end of sequences.

        A page that would be written and that other sequences use too is replaced by a free page.
        Copy its contents in every cache, before the tokens are appended:
        ``k_pages[targets] = k_pages[sources]``.

        Parameters
        ----------
        sequences
            Distinct sequences.
        counts
            New tokens of each sequence, at least 0: one number, or one per sequence.

        Returns
        -------
        sources, targets
            Page numbers, int64 arrays of one length: the contents of ``sources[i]`` belong into
            ``targets[i]``. Often empty.

        Raises
        ------
        KeyError
            If there is no such sequence.
        MemoryError
            If too few pages are free. Then nothing changes.
        """
        numbers = [counts] * len(sequences) if isinstance(counts, int) else list(counts)
        if len(numbers) != len(sequences) or len({*sequences}) != len(sequences):
            raise ValueError(
                f"sequences: expected distinct sequences and one count for each, got {len(sequences)} and {len(numbers)}"
            )
        uses, needed, shared = self._uses.copy(), 0, []
        for sequence, count in zip(sequences, numbers):
            checks.check_integer("counts", count, 0)
            length, pages = self._lengths[self._check(sequence)], self._pages[sequence]
            if count and length % self.page_size and uses[pages[-1]] > 1:
                uses[pages[-1]] -= 1
                shared.append(sequence)
            needed += -(-(length + count) // self.page_size) - len(pages)
        self._check_free(needed + len(shared))
        sources, targets = [], []
        for sequence in shared:
            pages = self._pages[sequence]
            sources.append(pages[-1])
            self._uses[pages[-1]] -= 1
            pages[-1] = self._take()
            targets.append(pages[-1])
        for sequence, count in zip(sequences, numbers):
            self._lengths[sequence] += count
            pages = self._pages[sequence]
            missing = -(-self._lengths[sequence] // self.page_size) - len(pages)
            pages.extend(self._take() for _ in range(missing))
        return np.asarray(sources, np.int64), np.asarray(targets, np.int64)

    def fork(self, sequence: int) -> int:
        """Return a new sequence with the tokens of another one, on the same pages.

        Parameters
        ----------
        sequence
            The sequence to share.

        Returns
        -------
        int
            The new sequence.

        Raises
        ------
        KeyError
            If there is no such sequence.
        """
        pages = list(self._pages[self._check(sequence)])
        forked, self._next = self._next, self._next + 1
        self._pages[forked], self._lengths[forked] = pages, self._lengths[sequence]
        self._uses[pages] += 1
        return forked

    def free(self, sequence: int) -> None:
        """Remove a sequence; its pages become free unless other sequences use them.

        Parameters
        ----------
        sequence
            The sequence to remove.

        Raises
        ------
        KeyError
            If there is no such sequence.
        """
        pages = self._pages.pop(self._check(sequence))
        del self._lengths[sequence]
        self._uses[pages] -= 1
        self._free.extend(page for page in reversed(pages) if not self._uses[page])

    def defragment(self) -> tuple[np.ndarray, np.ndarray]:
        """Renumber the pages, so that those in use are the first and every sequence is in order.

        Returns
        -------
        sources, targets
            Page numbers, as for `extend`: copy all pages at once, ``k_pages[targets] =
            k_pages[sources]`` with an index that makes a copy, as sources and targets may overlap.
        """
        new: dict[int, int] = {}
        for pages in self._pages.values():
            for page in pages:
                new.setdefault(page, len(new))
        self._pages = {s: [new[page] for page in pages] for s, pages in self._pages.items()}
        uses = self._uses[list(new)]
        self._uses = np.zeros(self.num_pages, np.int64)
        self._uses[: len(new)] = uses
        self._free = list(range(len(new), self.num_pages))[::-1]
        moved = [(source, target) for source, target in new.items() if source != target]
        sources, targets = np.asarray(moved, np.int64).reshape(-1, 2).T
        return sources, targets

    def page_table(self, sequences: Sequence[int]) -> Array:
        """Return the pages of sequences, (n, None) int32, on NumPy.

        Parameters
        ----------
        sequences
            The rows of the table.

        Returns
        -------
        Array
            For `paged_attention` and `append_paged`; `Array.to_backend` converts it.
        """
        rows = [self._pages[self._check(sequence)] for sequence in sequences]
        values = np.asarray([page for row in rows for page in row], np.int32)
        lengths = np.asarray([len(row) for row in rows], np.int64)
        return Array.from_layout(values, Layout.from_host_lengths(backend(values), lengths))

    def lengths(self, sequences: Sequence[int]) -> np.ndarray:
        """Return the numbers of tokens of sequences, (n,) int32: the `kv_lengths` of a call.

        Parameters
        ----------
        sequences
            The rows.

        Returns
        -------
        numpy.ndarray
            One length per sequence.
        """
        return np.asarray([self._lengths[self._check(s)] for s in sequences], np.int32)

    def _check(self, sequence: int) -> int:
        if sequence not in self._pages:
            raise KeyError(
                f"sequence: expected one of this pool, got {sequence!r}; it may be freed"
            )
        return sequence

    def _check_free(self, count: int) -> None:
        if count > len(self._free):
            raise MemoryError(
                f"PagePool: expected {count} free pages, got {len(self._free)} of {self.num_pages}; free a sequence first"
            )

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page
