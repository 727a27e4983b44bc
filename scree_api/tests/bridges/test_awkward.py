"""Awkward arrays and those of `ragged`, there and back, on the same memory."""

from typing import Any

import awkward as ak
import numpy as np
import pytest
import ragged
from hypothesis import given
from ragged_cases import INSTALLED, arrays, assert_same, few, filled

import scree
from scree.bridges import from_awkward, from_ragged, to_awkward, to_ragged
from scree.bridges.dlpack import on_host

PAIRS = {"awkward": (to_awkward, from_awkward), "ragged": (to_ragged, from_ragged)}


@pytest.mark.parametrize("name", PAIRS)
@few
@given(arr=arrays(dtypes=("bool", "int64", "float32", "float16")))
def test_there_and_back_on_the_same_memory(name: str, arr: scree.Array) -> None:
    if name == "ragged" and arr.dtype == np.float16:
        arr = arr.with_values(arr.values.astype(np.float64))  # which it does not have
    there, back = PAIRS[name]
    first = on_host(arr)
    found = back(there(arr))
    assert there(arr).tolist() == [row.tolist() for row in first]
    assert found.offsets.dtype == arr.offsets.dtype
    assert_same(found, scree.Array(first.values, first.offsets))
    assert np.shares_memory(found.values, arr.values) or not arr.size
    assert np.shares_memory(found.offsets, arr.offsets)


@pytest.mark.parametrize("library", INSTALLED)
def test_every_library_goes_out(library: str) -> None:
    arr = scree.from_lengths(filled((6, 2), "float32"), [3, 0, 2, 1])
    assert to_awkward(arr.to_backend(library)).tolist() == [row.tolist() for row in arr]


WHOLE = ak.Array([[1, 2, 3], [], [4], [5, 6]])
FORMS = {
    "slice": WHOLE[1:],
    "rows in another order": WHOLE[[2, 0, 3]],
    "a mask of rows": WHOLE[[True, False, True, True]],
    "parts of rows": WHOLE[:, :2],
    "equal rows": ak.to_regular(ak.Array([[1, 2], [3, 4]])),
    "an option without any missing": ak.Array([[1], None, [2]])[[0, 2]],
    "no rows": WHOLE[:0],
    "regular elements": ak.Array([[[1, 2], [3, 4]], [], [[5, 6]]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rows_comes_in(form: str) -> None:
    array = ak.to_regular(FORMS[form], axis=2) if form == "regular elements" else FORMS[form]
    arr = from_awkward(array)
    arr.validate()
    assert [row.tolist() for row in arr] == array.tolist()


@pytest.mark.parametrize(
    "array, error, words",
    [
        (ak.Array([[1], None]), ValueError, "no missing rows"),
        (ak.Array([[1, None]]), TypeError, "missing elements"),
        (ak.Array([[[1], [2, 3]]]), TypeError, "one ragged axis"),
        (ak.Array([1, 2]), TypeError, "expected rows of numbers"),
        (ak.Array([["a"]]), TypeError, "expected rows of numbers|one ragged axis"),
        (ak.Array([[{"x": 1}]]), TypeError, "numbers|one ragged axis"),
    ],
)
def test_what_has_no_form_raises(array: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"array: .*({words})"):
        from_awkward(array)


def test_numbers_made_by_ragged_come_in() -> None:
    assert from_ragged(ragged.array([[1.5], [], [2.0, 3.0]])).lengths.tolist() == [1, 0, 2]
