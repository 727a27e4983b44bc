"""Making ragged arrays: what the conformance suite cannot see, which runs on every library."""

from __future__ import annotations

import numpy as np
import pytest
from libraries import NAMES, load

import scree


def test_creation_keeps_values_and_strides_without_a_copy() -> None:
    buffer = np.arange(20.0).reshape(10, 2)
    values = buffer[::-2, 1:]
    for arr in (
        scree.from_lengths(values, [2, 3]),
        scree.from_segment_ids(values, np.asarray([0, 0, 1, 1, 1])),
        scree.from_offsets(values, np.asarray([0, 2, 5])),
    ):
        assert arr.values is values
        assert [row.tolist() for row in arr] == [[[19.0], [15.0]], [[11.0], [7.0], [3.0]]]


def test_pack_and_to_padded_leave_their_input_unchanged() -> None:
    rows = [np.ones(2), np.ones(0), np.ones(3)]
    packed = scree.pack(rows)
    packed.values[:] = 7
    padded, mask = scree.to_padded(packed)
    padded[:] = 0
    assert all((row == 1).all() for row in rows) and (packed.values == 7).all() and mask.sum() == 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_segment_ids_of_a_narrow_dtype_do_not_overflow(name: str, dtype: str) -> None:
    lib, top = load(name), np.iinfo(dtype).max
    ids = lib.i([0, 3, 3, top], dtype)
    for count in (top + 1, 300):
        expected = np.bincount([0, 3, 3, top], minlength=count)
        grouped, index = scree.group(lib.f(4), ids, count)
        for arr in (scree.from_segment_ids(lib.f(4), ids, count), grouped):
            assert [row.shape[0] for row in scree.unpack(arr)] == expected.tolist()
        back = scree.scatter_add(grouped, index, 4)
        assert [float(x) for x in back] == [0.0, 1.0, 2.0, 3.0]
        placed = scree.scatter(lib.f(4), ids, count)
        assert (placed.shape, float(placed[top]), float(placed[3])) == ((count,), 3.0, 2.0)


def test_offsets_are_wide_from_two_billion_tokens_on() -> None:
    values = np.broadcast_to(np.int8(5), (2**31 + 3,))  # takes no memory
    arr = scree.from_lengths(values, [2**31 - 1, 0, 4])
    assert arr.offsets.dtype == np.int64 and arr.offsets.tolist() == [
        0,
        2**31 - 1,
        2**31 - 1,
        2**31 + 3,
    ]
    assert arr[2].tolist() == [5] * 4 and arr[1:].total_length == 4
    assert scree.from_lengths(values[:-4], [2**31 - 1]).offsets.dtype == np.int32


@pytest.mark.parametrize(
    "lengths",
    [[2, 0, 3], (2, 0, 3), range(1, 3), np.asarray([2, 0, 3], np.uint8), [np.int64(5)], []],
)
def test_lengths_come_in_many_forms(lengths: object) -> None:
    expected = [int(n) for n in lengths]
    arr = scree.from_lengths(np.zeros((sum(expected), 2)), lengths)
    assert arr.lengths.tolist() == expected and arr.offsets.dtype == np.int32
    padded = scree.from_padded(np.zeros((len(expected), 5, 2)), lengths=lengths)
    assert padded.lengths.tolist() == expected and padded.shape == arr.shape


def test_max_length_is_kept_by_operations() -> None:
    arr = scree.from_lengths(np.zeros((5, 4)), [2, 3], max_length=8)
    assert arr.max_length == 8 and (arr + 1).max_length == 8
    assert scree.to_padded(arr)[0].shape == (2, 3, 4)
    assert scree.pack([np.zeros(2), np.zeros(3)]).max_length == 3
