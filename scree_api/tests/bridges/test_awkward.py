"""Round trips of Awkward arrays and arrays of `ragged`, on shared memory."""

from typing import Any

import awkward as ak
import numpy as np
import pytest
import ragged
from hypothesis import given
from ragged_cases import INSTALLED, arrays, assert_same, few_examples, make_values

import scree
from scree.bridges import from_awkward, from_ragged, to_awkward, to_ragged
from scree.bridges.dlpack import on_host

PAIRS = {"awkward": (to_awkward, from_awkward), "ragged": (to_ragged, from_ragged)}


@pytest.mark.parametrize("name", PAIRS)
@few_examples
@given(arr=arrays(dtypes=("bool", "int64", "float32", "float16")))
def test_round_trip_shares_memory(name: str, arr: scree.Array) -> None:
    if name == "ragged" and arr.dtype == np.float16:
        arr = arr.with_values(arr.values.astype(np.float64))  # `ragged` has no float16
    to_other, from_other = PAIRS[name]
    expected = on_host(arr)
    result = from_other(to_other(arr))
    assert to_other(arr).tolist() == [row.tolist() for row in expected]
    assert result.offsets.dtype == arr.offsets.dtype
    assert_same(result, scree.Array(expected.values, expected.offsets))
    assert np.shares_memory(result.values, arr.values) or not arr.size
    assert np.shares_memory(result.offsets, arr.offsets)


@pytest.mark.parametrize("library", INSTALLED)
def test_to_awkward_of_every_library(library: str) -> None:
    arr = scree.from_lengths(make_values((6, 2), "float32"), [3, 0, 2, 1])
    assert to_awkward(arr.to_backend(library)).tolist() == [row.tolist() for row in arr]


WHOLE = ak.Array([[1, 2, 3], [], [4], [5, 6]])
LAYOUTS = {
    "slice": WHOLE[1:],
    "rows in another order": WHOLE[[2, 0, 3]],
    "a mask of rows": WHOLE[[True, False, True, True]],
    "parts of rows": WHOLE[:, :2],
    "equal rows": ak.to_regular(ak.Array([[1, 2], [3, 4]])),
    "an option without any missing": ak.Array([[1], None, [2]])[[0, 2]],
    "no rows": WHOLE[:0],
    "regular elements": ak.Array([[[1, 2], [3, 4]], [], [[5, 6]]]),
}


@pytest.mark.parametrize("form", LAYOUTS)
def test_from_awkward_of_every_layout(form: str) -> None:
    array = ak.to_regular(LAYOUTS[form], axis=2) if form == "regular elements" else LAYOUTS[form]
    arr = from_awkward(array)
    arr.validate()
    assert [row.tolist() for row in arr] == array.tolist()


@pytest.mark.parametrize(
    "array, error, message",
    [
        (ak.Array([[1], None]), ValueError, "no missing rows"),
        (ak.Array([[1, None]]), TypeError, "missing elements"),
        (ak.Array([[[1], [2, 3]]]), TypeError, "one ragged axis"),
        (ak.Array([1, 2]), TypeError, "expected rows of numbers"),
        (ak.Array([["a"]]), TypeError, "expected rows of numbers|one ragged axis"),
        (ak.Array([[{"x": 1}]]), TypeError, "numbers|one ragged axis"),
    ],
)
def test_from_awkward_unsupported_array_raises(
    array: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"array: .*({message})"):
        from_awkward(array)


def test_from_ragged_of_an_array_of_ragged() -> None:
    assert from_ragged(ragged.array([[1.5], [], [2.0, 3.0]])).lengths.tolist() == [1, 0, 2]


@pytest.mark.parametrize("rows", [["ab", "c"], [["ab"], ["c"]], [b"ab", b"c"]])
def test_from_awkward_strings_raise(rows: Any) -> None:
    with pytest.raises(TypeError, match="array: expected rows of numbers"):
        scree.bridges.from_awkward(ak.Array(rows))
