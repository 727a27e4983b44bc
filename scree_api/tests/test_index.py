"""Indexing and updates by the rules of Python and NumPy.

The oracle is a plain list of rows, for keys of every form.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import NAMES, load

import scree

quick = settings(max_examples=150, derandomize=True, deadline=None, database=None)
FULL = slice(None)


@st.composite
def arrays(draw: Any, max_dim: int = 2) -> scree.Array:
    """A ragged array whose elements are all different."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=5))
    dim = draw(st.integers(0, max_dim))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(dim, 2)))]
    shape.insert(dim, sum(lengths))
    return scree.from_lengths(
        np.arange(np.prod(shape, dtype=int)).reshape(shape), lengths, ragged_dim=dim
    )


def slices(size: int) -> st.SearchStrategy[slice]:
    """Of an axis of this size and beyond, forwards and backwards."""
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, bound, bound, st.sampled_from([None, 1, 1, 2, 3, -1, -2]))


def numbers(size: int) -> st.SearchStrategy[int]:
    """From either end; nothing where there is nothing."""
    return st.integers(-size, size - 1) if size else st.nothing()


def several(size: int) -> st.SearchStrategy[Any]:
    """Arrays and lists of numbers, masks."""
    chosen = st.lists(numbers(size), max_size=5) if size else st.just([])
    mask = st.lists(st.booleans(), min_size=size, max_size=size)
    return chosen.map(lambda x: np.asarray(x, np.int32)) | mask.map(lambda x: np.asarray(x, bool))


@st.composite
def keys(draw: Any, arr: scree.Array) -> tuple[Any, ...]:
    """An index for each axis, or shorter, or with an ellipsis."""
    n, rows = arr.batch_size, scree.unpack(arr)
    batch = draw(slices(n) | numbers(n) | several(n) | several(n).map(np.ndarray.tolist))
    left = [rows[batch]] if isinstance(batch, int) else pick(rows, batch)
    shortest = min((row.shape[arr.ragged_dim] for row in left), default=0)
    inner: list[Any] = [
        draw(st.just(FULL) | slices(size) | numbers(size)) for size in arr.values.shape
    ]
    inner[arr.ragged_dim] = draw(st.just(FULL) | slices(4) | numbers(shortest))
    free = [axis for axis in range(len(inner)) if axis != arr.ragged_dim]
    if free and not isinstance(batch, int) and draw(st.booleans()):
        inner = [
            FULL if isinstance(k, int) else k for k in inner
        ]  # beside which NumPy would move the axis of an array
        axis = draw(st.sampled_from(free))
        inner[axis] = draw(several(arr.values.shape[axis]))
    key = [batch, *inner]
    whole = [isinstance(k, slice) and k == FULL for k in key]
    form = draw(st.sampled_from(["whole", "short", "dots"]))
    if form == "short":
        key = key[: max(i + 1 for i, k in enumerate(whole) if i == 0 or not k)]
    if form == "dots":
        stop = start = draw(st.integers(0, len(key)))
        while stop < len(key) and whole[stop]:
            stop += 1
        key[start:stop] = [...]
    return tuple(key)


def pick(rows: list[Any], key: Any) -> list[Any]:
    """The rows that the first entry of a key names."""
    if isinstance(key, slice):
        return rows[key]
    key = np.asarray(key)
    return [rows[i] for i in (np.flatnonzero(key) if key.dtype == bool else key.astype(int))]


def plain(arr: scree.Array, rows: list[np.ndarray], key: tuple[Any, ...]) -> Any:
    """The same index on the rows: an array for one row or one token a row, else a list of rows."""
    dots = next((i for i, k in enumerate(key) if k is ...), len(key))
    used = sum(k is not None and k is not ... for k in key)
    key = key[:dots] + (FULL,) * (arr.ndim - used) + key[dots + 1 :]
    batch, inner = key[0], key[1:]
    if isinstance(batch, int):
        return rows[batch][inner]
    found = [row[inner] for row in pick(rows, batch)]
    axes = [k for k in inner if k is not None]
    if isinstance(axes[arr.ragged_dim], int):
        shape = [
            2 if axis == arr.ragged_dim else size for axis, size in enumerate(arr.values.shape)
        ]
        of_none = np.zeros(shape, int)[tuple(0 if k is axes[arr.ragged_dim] else k for k in inner)]
        return np.stack(found) if found else of_none[None][:0]
    return found


def agree(got: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert isinstance(got, scree.Array)
        got.validate()
        assert [row.tolist() for row in scree.unpack(got)] == [row.tolist() for row in expected]
        assert all(row.shape == e.shape for row, e in zip(got, expected, strict=True))
    else:
        assert isinstance(got, np.ndarray | np.generic)
        assert got.shape == expected.shape and np.array_equal(got, expected)


@quick
@given(st.data())
def test_keys_of_every_form(data: st.DataObject) -> None:
    arr = data.draw(arrays())
    key = data.draw(keys(arr))
    key = key[0] if len(key) == 1 and data.draw(st.booleans()) else key
    agree(arr[key], plain(arr, scree.unpack(arr), key if isinstance(key, tuple) else (key,)))


@quick
@given(st.data())
def test_new_axes(data: st.DataObject) -> None:
    arr = data.draw(arrays())
    key = [
        data.draw(slices(arr.batch_size)),
        *(data.draw(st.just(FULL) | slices(3)) for _ in arr.values.shape),
    ]
    for _ in range(data.draw(st.integers(1, 2))):
        key.insert(data.draw(st.integers(1, len(key))), None)
    agree(arr[tuple(key)], plain(arr, scree.unpack(arr), tuple(key)))


@quick
@given(st.data())
def test_ragged_masks(data: st.DataObject) -> None:
    arr = data.draw(arrays(max_dim=0))
    axes = data.draw(st.integers(1, arr.values.ndim))
    count = int(np.prod(arr.values.shape[:axes], dtype=int))
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    mask = arr.with_values(np.asarray(mask, bool).reshape(arr.values.shape[:axes]))
    agree(arr[mask], [row[real] for row, real in zip(arr, mask, strict=True)])


@quick
@given(st.data())
def test_ragged_positions(data: st.DataObject) -> None:
    arr = data.draw(arrays())
    dim, rows = arr.ragged_dim, scree.unpack(arr)
    wanted = [
        data.draw(st.lists(numbers(row.shape[dim]), max_size=4) if row.shape[dim] else st.just([]))
        for row in rows
    ]
    index = scree.from_lengths(
        np.asarray([i for row in wanted for i in row], np.int64), [len(row) for row in wanted]
    )
    agree(
        arr[index],
        [np.take(row, np.asarray(i, int), axis=dim) for row, i in zip(rows, wanted, strict=True)],
    )


UPDATES = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}


@quick
@given(st.data(), st.sampled_from(["set", *UPDATES]), st.booleans())
def test_updates(data: st.DataObject, op: str, scalar: bool) -> None:
    arr = data.draw(arrays())
    key, value = data.draw(keys(arr)), 7
    places = plain(arr, scree.unpack(arr), key)  # each element is its own number
    flat = (
        np.concatenate([x.ravel() for x in places] or [np.zeros(0, int)])
        if isinstance(places, list)
        else places.ravel()
    )
    if not scalar and not isinstance(places, list):
        value = np.arange(100, 100 + places.size).reshape(places.shape)
    expected = arr.values.ravel().copy()
    if op == "set":
        expected[flat] = np.ravel(value)
    else:
        UPDATES[op].at(expected, flat, np.ravel(value))
    before = arr.values.copy()
    got = getattr(scree.at(arr)[key], op)(value)
    assert np.array_equal(arr.values, before), "the array itself stays as it is"
    assert (
        got.layout is arr.layout and got.values.shape == arr.values.shape and got.dtype == arr.dtype
    )
    assert np.array_equal(got.values.ravel(), expected)


@quick
@given(st.data(), st.sampled_from(["set", *UPDATES]), st.booleans())
def test_updates_of_masked_entries_leave_the_others(
    data: st.DataObject, op: str, per_token: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=4))
    arr = scree.from_lengths(np.arange(sum(lengths) * 2).reshape(-1, 2), lengths)
    shape = arr.values.shape[: 1 if per_token else 2]
    size = math.prod(shape)
    mask = np.asarray(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    mask = mask.reshape(shape)
    got = getattr(scree.at(arr)[arr.with_values(mask)], op)(7)
    expected = arr.values.copy()
    expected[mask] = 7 if op == "set" else UPDATES[op](expected[mask], 7)
    np.testing.assert_array_equal(got.values, expected)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax")])
def test_updates_of_masked_entries_compile(name: str) -> None:
    lib = load(name)

    def step(values: Any, offsets: Any) -> Any:
        x = scree.from_offsets(values, offsets)
        return scree.at(x)[x < 2].set(9.0).values

    if name == "torch":
        step = importlib.import_module("torch").compile(step, backend="eager", fullgraph=True)
    else:
        step = importlib.import_module("jax").jit(step)
    assert np.asarray(step(lib.f(4), lib.i([0, 1, 4]))).tolist() == [9, 9, 2, 3]


def test_updates_take_ragged_values() -> None:
    arr = scree.from_lengths(np.arange(6), [1, 3, 2])
    got = scree.at(arr)[1:, ::-1].set(arr[1:] * 10)
    assert [row.tolist() for row in got] == [[0], [30, 20, 10], [50, 40]]
    assert [row.tolist() for row in scree.at(arr)[arr > 3].add(arr[arr > 3])] == [
        [0],
        [1, 2, 3],
        [8, 10],
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax", "mlx")])
def test_updates_of_tokens_read_nothing(name: str) -> None:
    """Where the offsets are not known, nothing happens to a row that has no such token."""
    lib = load(name)

    def step(values: Any, offsets: Any, numbers: Any) -> list[Any]:
        x = scree.from_offsets(values, offsets)
        return [scree.at(x)[:, i].add(numbers).values for i in (0, -2, 5)] + [
            scree.at(x)[:, 1].set(0.0).values
        ]

    if name == "torch":
        step = importlib.import_module("torch").compile(step, backend="eager", fullgraph=True)
    elif name == "jax":
        step = importlib.import_module("jax").jit(step)
    found = step(
        lib.f(6), lib.i([0, 3, 3, 4, 6]), lib.make(np.asarray([10.0, 20.0, 30.0, 40.0], np.float32))
    )
    assert [np.asarray(x).tolist() for x in found] == [
        [10, 1, 2, 33, 44, 5], [0, 11, 2, 3, 44, 5], [0, 1, 2, 3, 4, 5], [0, 0, 2, 3, 4, 0],
    ]  # fmt: skip


def test_index_of_short_rows_raises_and_names_them() -> None:
    arr = scree.from_lengths(np.arange(6), [1, 3, 2])
    assert arr[:, 0].tolist() == [0, 1, 4] and arr[:, -1].tolist() == [0, 3, 5]
    with pytest.raises(
        IndexError, match=r"rows of at least 2 tokens for \[:, 1\], got shorter rows: 0"
    ):
        arr[:, 1]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_positions_of_every_integer_dtype(dtype: str) -> None:
    arr = scree.from_lengths(np.arange(5.0), [2, 3])
    places = scree.from_lengths(np.asarray([1, 0, 2], dtype), [1, 2])
    for found in (arr[places], scree.namespace(arr).take_along_axis(arr, places, axis=1)):
        assert [row.tolist() for row in found] == [[1.0], [2.0, 4.0]]


def test_updates_in_half_precision_add_up_in_single() -> None:
    arr = scree.from_lengths(np.zeros(2, np.float16), [1, 1])
    many = scree.from_lengths(np.zeros(5000, np.int64), [5000, 0])
    assert scree.at(arr)[many].add(0.1).values.tolist() == [
        np.float16(5000 * float(np.float16(0.1))),
        0.0,
    ]


@pytest.mark.parametrize(
    "key", [slice(None, 2**40), slice(1, 2**70), slice(-(2**70), None), slice(2**70, None, -1)]
)
def test_slices_beyond_every_integer_dtype_follow_python(key: slice) -> None:
    arr = scree.from_lengths(np.arange(5), [2, 3])
    expected = [row.tolist()[key] for row in scree.unpack(arr)]
    assert [row.tolist() for row in scree.unpack(arr[:, key])] == expected


def test_sink_of_minus_infinity_and_no_key_gives_zero() -> None:
    q, k = (scree.from_lengths(np.ones((2, 1, 4)), lengths) for lengths in ([2, 0], [0, 2]))
    out, lse = scree.attention(q, k, k, sinks=np.full(1, -np.inf), return_lse=True)
    assert not np.any(out.values) and np.all(lse.values == -np.inf)


@pytest.mark.parametrize("op", ["add", "multiply", "min", "max"])
def test_update_keeps_the_sign_of_zeros_that_it_does_not_select(op: str) -> None:
    arr = scree.from_lengths(np.full(4, -0.0), [1, 3])
    updated = getattr(scree.at(arr)[0], op)(1.0)
    assert np.signbit(updated.values[1:]).all()
