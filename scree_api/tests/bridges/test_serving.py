"""Page tables of paged caches, compared with a loop over sequences and tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import INSTALLED, assert_same, few_examples

import scree
from scree.bridges import (
    from_block_table,
    from_flashinfer,
    slot_mapping,
    to_block_table,
    to_flashinfer,
    to_numpy,
)


def make_pages(lengths: list[int], page_size: int) -> scree.Array:
    """Return pages for sequences of these lengths, in random order."""
    counts = [-(-n // page_size) for n in lengths]
    pages = np.random.default_rng(0).permutation(sum(counts) + 3)[: sum(counts)].astype(np.int32)
    return scree.from_lengths(pages, counts)


@few_examples
@given(
    lengths=st.lists(st.integers(0, 20), max_size=5),
    page_size=st.integers(1, 6),
    cached=st.booleans(),
)
def test_page_tables_agree_with_a_loop(lengths: list[int], page_size: int, cached: bool) -> None:
    pages, seq_lens = make_pages(lengths, page_size), np.asarray(lengths, dtype=np.int32)
    table = to_block_table(pages, width=25)
    assert table.shape == (len(lengths), 25)
    for counts in (seq_lens, seq_lens.astype(np.uint8)):
        assert_same(from_block_table(table, counts, page_size), pages)
    indptr, indices, last = to_flashinfer(pages, seq_lens, page_size)
    assert indptr is pages.offsets
    assert indices is pages.values
    assert all(1 <= n <= page_size for n in last)
    back, tokens = from_flashinfer(indptr, indices, last, page_size)
    assert_same(back, pages)
    assert tokens.tolist() == lengths

    start = [n // 2 if cached else 0 for n in lengths]
    new = scree.from_lengths(
        np.zeros(sum(lengths) - sum(start)), [n - s for n, s in zip(lengths, start, strict=True)]
    )
    slots = slot_mapping(
        pages, new, page_size, start=np.asarray(start, dtype=np.int32) if cached else 0
    )
    assert slots.dtype == np.int64
    assert slots.layout is new.layout
    expected = [
        pages[i][p // page_size] * page_size + p % page_size
        for i, n in enumerate(lengths)
        for p in range(start[i], n)
    ]
    assert slots.values.tolist() == expected


@pytest.mark.parametrize("library", INSTALLED)
def test_page_tables_on_every_library(library: str) -> None:
    pages = make_pages([7, 0, 12], 4)
    tokens = scree.from_lengths(np.zeros(19, np.float32), [7, 0, 12])
    slots = slot_mapping(pages.to_backend(library), tokens.to_backend(library), 4)
    np.testing.assert_array_equal(to_numpy(slots).values, slot_mapping(pages, tokens, 4).values)
    pages, lengths = pages.to_backend(library), tokens.to_backend(library).lengths
    assert_same(from_block_table(to_block_table(pages), lengths, 4).to_numpy(), pages.to_numpy())
    back, seq_lens = from_flashinfer(*to_flashinfer(pages, lengths, 4), 4)
    assert back.values is pages.values
    assert [int(n) for n in seq_lens] == [7, 0, 12]


def test_invalid_argument_raises() -> None:
    pages = make_pages([7, 9], 4)
    with pytest.raises(ValueError, match="page_size: expected at least 1, got 0"):
        to_flashinfer(pages, np.asarray([7, 9]), 0)
    with pytest.raises(ValueError, match=r"pages: expected shape \(3, None\)"):
        slot_mapping(pages, make_pages([1, 2, 3], 4), 4)
    with pytest.raises(
        ValueError, match=r"start: expected shape \(2,\), one number per row, got \(3,\)"
    ):
        slot_mapping(pages, pages, 4, start=np.asarray([0, 1, 2]))
    with pytest.raises(ValueError, match="start: expected at least 0, got -1"):
        slot_mapping(pages, pages, 4, start=-1)
    with pytest.raises(
        ValueError, match=r"seq_lens: expected shape \(2,\), one number per row, got \(3,\)"
    ):
        to_flashinfer(pages, np.asarray([7, 9, 1]), 4)
    with pytest.raises(
        ValueError, match=r"kv_last_page_len: expected shape \(2,\), one number per row, got \(1,\)"
    ):
        from_flashinfer(pages.offsets, pages.values, np.asarray([1]), 4)
    for name, call in {
        "pages": lambda: to_block_table(pages.values),
        "seq_lens": lambda: to_flashinfer(pages, [7, 9], 4),
        "tokens": lambda: slot_mapping(pages, pages.values, 4),
    }.items():
        with pytest.raises(TypeError, match=f"{name}: expected a (ragged|dense) array"):
            call()
    with pytest.raises(IndexError, match="expected positions within the rows"):
        slot_mapping(pages, scree.from_lengths(np.zeros(18), [9, 9]), 4)
