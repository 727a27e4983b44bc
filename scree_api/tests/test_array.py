"""The array itself: sharing, copies, pickles, operators and display."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import operator
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import array_api_compat
import numpy as np
import pytest
from libraries import NAMES, load

import scree

#: Operator -> the standard's function for it.
UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "matmul": "matmul",
}  # fmt: skip
COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip

ROWS = [2, 0, 3]


@pytest.fixture
def arr() -> scree.Array:
    """Rows [1, 2], [] and [3, 4, 5]."""
    return scree.from_lengths(np.arange(1.0, 6.0), ROWS)


def same(a: scree.Array, b: scree.Array) -> bool:
    """Whether two arrays on NumPy have the same rows."""
    return (
        a.ragged_dim == b.ragged_dim
        and np.array_equal(a.offsets, b.offsets)
        and np.array_equal(a.values, b.values)
    )


# ------------------------------------------------------------------------------------------- what
# it is made of
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_from_cu_seqlens_keeps_values_and_offsets(dtype: str) -> None:
    values, cu = np.zeros((2, 5, 3), np.float32), np.asarray([0, 2, 2, 5], dtype)
    arr = scree.from_cu_seqlens(values, cu, ragged_dim=1, max_length=4)
    assert arr.values is values and arr.offsets is cu
    assert (arr.ragged_dim, arr.max_length, arr.batch_size, len(arr), arr.total_length) == (
        1,
        4,
        3,
        3,
        5,
    )
    assert (arr.shape, arr.ndim, arr.element_shape, arr.size) == ((3, 2, None, 3), 4, (2, 3), 30)
    assert (arr.dtype, arr.device, arr.nbytes) == (values.dtype, "cpu", values.nbytes + cu.nbytes)
    assert arr.lengths.tolist() == ROWS and arr.lengths.dtype == cu.dtype


def test_numpy_integers_are_integers() -> None:
    arr = scree.from_lengths(np.zeros((5, 2)), ROWS, ragged_dim=np.int64(0), max_length=np.int64(3))
    assert type(arr.max_length) is int and arr.shape == (3, None, 2)
    assert scree.to_padded(arr, length=np.int64(4), fill_value=np.float32(1))[0].shape == (3, 4, 2)


def test_views_share_memory(arr: scree.Array) -> None:
    values = arr.values
    for view in (
        arr[0],
        arr[1:].values,
        arr[-2:].values,
        arr[0:3].values,
        arr[...].values,
        *scree.unpack(arr),
        *arr,
    ):
        assert view.base is values or view is values
    assert arr[:2].offsets.base is arr.offsets  # from the first row on, even the offsets
    assert arr[:, :].values is values and arr[:].values is values
    other = arr.with_values(np.zeros((5, 2)))
    assert (
        other.offsets is arr.offsets
        and other.layout is arr.layout
        and (arr * 2).layout is arr.layout
    )
    cube = scree.from_lengths(np.zeros((4, 6)), ROWS + [1], ragged_dim=1)
    assert cube.mT.values.base is cube.values and cube.mT.shape == (4, None, 4)
    assert np.shares_memory(cube[1:3].values, cube.values) and np.shares_memory(
        cube[:, 1].values, cube.values
    )


def test_arrays_are_frozen_and_have_no_hash(arr: scree.Array) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        arr.values = np.zeros(5)
    with pytest.raises(TypeError, match=r"does not change: scree\.at"):
        arr[0] = 1.0
    with pytest.raises(TypeError, match="unhashable"):
        hash(arr)


def test_iteration_gives_the_rows(arr: scree.Array) -> None:
    assert [row.tolist() for row in arr] == [[1.0, 2.0], [], [3.0, 4.0, 5.0]]
    assert [row.tolist() for row in reversed(arr)] == [[3.0, 4.0, 5.0], [], [1.0, 2.0]]


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_and_pickles_keep_every_part(again: Callable[[scree.Array], scree.Array]) -> None:
    arr = scree.Array(np.arange(10).reshape(2, 5), np.asarray([0, 2, 5], np.int64), 1, 4)
    arr.layout.tiles(2)  # what the layout keeps stays behind
    new = again(arr)
    assert same(new, arr) and new.max_length == 4 and new.offsets.dtype == np.int64
    assert (new.values is arr.values) == (again is copy.copy)
    assert len(pickle.dumps(arr)) < 1000


@pytest.mark.parametrize("name", NAMES)
def test_copy_on_every_library_keeps_rows_and_layout(name: str) -> None:
    arr = load(name).r(ROWS, 2)
    shallow, deep = copy.copy(arr), copy.deepcopy(arr)
    for new in (shallow, deep):
        assert new.shape == arr.shape and new.dtype == arr.dtype
        np.testing.assert_array_equal(np.asarray(new.offsets), np.asarray(arr.offsets))
        np.testing.assert_array_equal(np.asarray(new.values), np.asarray(arr.values))
    assert shallow.values is arr.values and deep.values is not arr.values
    assert scree.same_layout(shallow, arr) is True
    # Equal offsets in two objects: MLX would have to evaluate them, so the answer is unknown there.
    assert scree.same_layout(deep, arr) is (None if name == "mlx" else True)


@pytest.mark.parametrize("name", NAMES)
def test_compat_finds_the_namespace(name: str) -> None:
    lib = load(name)
    arr = lib.r(ROWS)
    assert arr.__array_namespace__() is scree.namespace(arr) is scree.namespace(lib.f(1), 1.0, None)
    assert array_api_compat.array_namespace(arr) is scree.namespace(arr)


@pytest.mark.parametrize("convert", ["tensor", "as_tensor", "asarray", "from_dlpack"])
@pytest.mark.parametrize("name", NAMES)
def test_conversion_to_a_tensor_raises(name: str, convert: str) -> None:
    """With one token per row, PyTorch would take the rows for a sequence of numbers."""
    library = importlib.import_module("torch") if "torch" in NAMES else np
    function = getattr(library, convert, np.asarray)
    with pytest.raises(
        TypeError, match=r"a ragged array is not a (dense|NumPy) array: use arr\.values"
    ):
        function(load(name).r([1, 1, 1]))


def test_to_device_moves_both_parts(arr: scree.Array) -> None:
    assert same(arr.to_device("cpu"), arr)
    with pytest.raises(ValueError, match="device: expected 'cpu'"):
        arr.to_device("cuda")
    if "array_api_strict" in NAMES:
        import array_api_strict as xp

        moved = load("array_api_strict").r(ROWS).to_device(xp.Device("device1"))
        assert moved.device == moved.values.device == moved.offsets.device == xp.Device("device1")
        assert moved.lengths.to_device(xp.Device("CPU_DEVICE")).shape == (3,)


@pytest.mark.parametrize("name", NAMES)
def test_to_device_cpu_works_on_every_library(name: str) -> None:
    arr = load(name).r(ROWS, 2)
    moved = array_api_compat.to_device(arr, "cpu")
    assert moved.layout.backend is arr.layout.backend
    assert same(moved.to_numpy(), arr.to_numpy())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [ROWS, [0, 0], []])
def test_reshape_to_one_axis_gives_the_elements(name: str, rows: list[int]) -> None:
    lib = load(name)
    arr = lib.r(rows, 2)
    flat = lib.xp.reshape(arr, (-1,))
    assert flat.shape == (arr.size,)
    host = arr.layout.backend.read(flat)
    assert np.array_equal(host, arr.to_numpy().values.reshape(-1))


def test_reshape_to_one_axis_with_tail_raises() -> None:
    layout = scree.layout.Layout(
        scree.backends.backend(np.arange(3)), np.asarray([0, 2, 3]), total=5, max_length=2
    )
    arr = scree.Array.from_layout(np.arange(5.0), layout)
    with pytest.raises(ValueError, match=r"^shape: expected \(-1,\) only where every token"):
        scree.namespace(arr).reshape(arr, (-1,))
    inner = scree.Array(np.zeros((2, 5)), np.asarray([0, 2, 5]), ragged_dim=1)
    with pytest.raises(ValueError, match=r"^shape: expected \(-1,\) only where the ragged axis"):
        scree.namespace(inner).reshape(inner, (-1,))


# ------------------------------------------------------------------------------------------------------
# operators
OPERATORS = {
    f"__{name}__": getattr(operator, f"{name}_" if name in ("and", "or") else name)
    for name in (*UNARY, *BINARY, *COMPARISONS)
}
INTEGERS = ("and", "or", "xor", "lshift", "rshift", "invert")


@pytest.mark.parametrize("name", UNARY)
def test_unary_operators(name: str, arr: scree.Array) -> None:
    x = arr.with_values(arr.values.astype(int)) if name in INTEGERS else arr
    f = OPERATORS[f"__{name}__"]
    assert same(f(-x), x.with_values(f(-x.values)))


@pytest.mark.parametrize("name", [name for name in (*BINARY, *COMPARISONS) if name != "matmul"])
def test_binary_operators_from_either_side(name: str, arr: scree.Array) -> None:
    x = arr.with_values(arr.values.astype(int)) if name in INTEGERS else arr
    f, scalar, row = (
        OPERATORS[f"__{name}__"],
        x.values.dtype.type(2).item(),
        np.asarray([[1], [2], [3]], x.dtype),
    )
    spread = np.repeat(row[:, 0], ROWS)
    for other, dense in (
        (x, x.values),
        (scalar, scalar),
        (row, spread),
        (row[0, 0], 1),
        (row[:1, 0], 1),
    ):
        assert same(f(x, other), x.with_values(f(x.values, dense)))
        assert same(f(other, x), x.with_values(f(dense, x.values))), "reflected"


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("mlx", "array_api_strict")]
)  # these raise themselves
def test_operators_accept_dense_arrays_on_the_left(name: str) -> None:
    lib = load(name)
    arr = lib.r(ROWS, 2)
    for f in (operator.add, operator.sub, operator.mul, operator.lt, operator.eq):
        left, right = f(lib.f(3, 1, 2), arr), f(arr, lib.f(3, 1, 2))
        assert isinstance(left, scree.Array) and left.shape == right.shape == (3, None, 2)


def test_operators_on_unknown_types_raise_or_defer(arr: scree.Array) -> None:
    assert (arr == "text") is False and (arr != None) is True  # noqa: E711 (the operator is under test)
    for other in ("text", [1.0], None, object()):
        with pytest.raises(TypeError, match="unsupported operand"):
            arr + other

    class Other:
        def __radd__(self, other: Any) -> str:
            return "theirs"

    assert arr + Other() == "theirs"


def test_equality_is_by_element(arr: scree.Array) -> None:
    assert (arr == arr).values.all() and not (arr != arr).values.any()
    assert (arr == 3).values.tolist() == [False, False, True, False, False]
    assert not (arr.with_values(np.full(5, np.nan)) == np.nan).values.any()


def test_in_place_operators_make_new_arrays(arr: scree.Array) -> None:
    before = arr
    arr += 1
    assert arr is not before and before.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


# --------------------------------------------------------------------------------------------------------
# display
def test_repr_shows_rows(arr: scree.Array) -> None:
    assert repr(arr).splitlines() == [
        "scree.Array(shape=(3, None), dtype=float64, numpy, lengths 0 to 3, total 5)",
        "     0: [1. 2.]", "     1: []", "     2: [3. 4. 5.]",
    ]  # fmt: skip
    assert str(arr) == repr(arr)


def test_repr_cuts_long_rows_and_many_rows() -> None:
    text = repr(scree.from_lengths(np.arange(3000.0), [1] * 1000 + [2000])).splitlines()
    assert [line.split(":")[0].strip() for line in text[1:]] == [
        "0",
        "1",
        "2",
        "...",
        "998",
        "999",
        "1000",
    ]
    assert all(len(line) < 100 for line in text)
    assert repr(scree.from_lengths(np.arange(90), [90])).endswith(" ...")


def test_repr_without_rows_or_tokens() -> None:
    assert (
        repr(scree.from_lengths(np.zeros((0, 2)), []))
        == "scree.Array(shape=(0, None, 2), dtype=float64, numpy)"
    )
    assert "ragged_dim=1" in repr(scree.from_lengths(np.zeros((2, 0)), [0], ragged_dim=1))


def test_html_is_a_table(arr: scree.Array) -> None:
    html = arr._repr_html_()
    assert html.count("<tr>") == 4 and "<td>3</td><td><code>[3. 4. 5.]</code></td>" in html
    assert "&lt;" in scree.from_lengths(np.asarray(["<b>"], dtype=object), [1])._repr_html_()


@pytest.mark.parametrize("name", NAMES)
def test_repr_on_every_library(name: str) -> None:
    text = repr(load(name).r(ROWS, 2))
    assert text.startswith("scree.Array(shape=(3, None, 2)") and f", {name}" in text
    assert len(text.splitlines()) == 4


def test_repr_never_reads_from_a_device() -> None:
    if "torch" in NAMES:
        import torch

        away = torch.zeros(5, device="meta")  # whose values cannot be read at all
        known, unknown = (
            scree.from_lengths(away, ROWS),
            scree.Array(away, torch.zeros(4, dtype=torch.int32, device="meta")),
        )
        assert repr(known).splitlines()[1:] == [
            "     0: 2 tokens",
            "     1: 0 tokens",
            "     2: 3 tokens",
        ]
        assert "<td>2</td><td><code>2 tokens</code></td>" in known._repr_html_()
        assert repr(unknown) == "scree.Array(shape=(3, None), dtype=torch.float32, torch)"
        assert "<tr>" not in unknown._repr_html_()
    if "mlx" in NAMES:
        import mlx.core as mx

        lazy = scree.Array(mx.zeros((5,)) + 1, mx.array([0, 2, 2, 5]))
        assert len(repr(lazy).splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------
# layouts
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "jax"]
)  # whose kernel keeps nothing
def test_layout_drops_pair_caches_of_earlier_steps(name: str) -> None:
    lib = load(name)
    q = lib.r([1, 1], 2, 4)
    k = [lib.r([n, n], 2, 4) for n in range(1, 20)]
    layouts = [weakref.ref(x.layout) for x in k]
    while k:
        scree.attention(q, k[-1], k[-1])
        del k[-1]
    gc.collect()
    assert sum(layout() is not None for layout in layouts) <= 4


# -------------------------------------------------------------------------------------------------
# complex numbers
@pytest.mark.parametrize("name", NAMES)
def test_reductions_of_complex_numbers(name: str) -> None:
    lib = load(name)
    rows = [np.asarray(row, np.complex64) for row in ([1 + 1j, 2], [], [3, 4j, 5])]
    x = scree.pack([lib.make(row) for row in rows])
    for function, nothing in (("sum", 0), ("prod", 1), ("mean", np.nan)):
        f, plain = getattr(lib.xp, function), getattr(np, function)
        right = [plain(row) if row.size else nothing for row in rows]
        np.testing.assert_allclose(np.asarray(f(x, axis=1)), right, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(f(x)), plain(np.concatenate(rows)), rtol=1e-6)
    size = lib.xp.linalg.vector_norm(x, axis=1)
    np.testing.assert_allclose(np.asarray(size), [np.linalg.norm(row) for row in rows], rtol=1e-6)


def test_vector_norm_of_negative_integers_takes_their_sizes() -> None:
    x = scree.from_lengths(np.asarray([-1, 1, 2]), [2, 1])
    for ord in (1, 3):
        size = scree.namespace(x).linalg.vector_norm(x, axis=1, ord=ord)
        np.testing.assert_allclose(size, [np.linalg.norm([-1, 1], ord), 2])


@pytest.mark.parametrize("name", NAMES)
def test_loose_max_length_keeps_results(name: str) -> None:
    """Nothing walks or compares up to it.

    The rows themselves are better known, or at least the number of all tokens.
    """
    lib = load(name)
    x, y = (scree.Array(lib.f(5, 2, 4), lib.i([0, 2, 2, 5]), 0, bound) for bound in (10**9, 3))
    assert x.max_length == 10**9 and x.layout.max_length_bound == (5 if name == "mlx" else 3)
    for found, right in zip(
        (scree.attention(x, x, x), scree.softmax(x)), (scree.attention(y, y, y), scree.softmax(y))
    ):
        np.testing.assert_allclose(np.asarray(found.values), np.asarray(right.values), rtol=1e-6)


def test_concat_of_one_layout_with_many_others_in_threads() -> None:
    """The cache of pairs drops its oldest entries while other threads read it."""
    xp, x = scree.namespace(np.zeros(1)), scree.from_lengths(np.arange(3.0), [1, 2])

    def join(_: int) -> bool:
        others = [scree.from_lengths(np.arange(5.0), [2, 3]) for _ in range(20)]
        return all(xp.concat([x, y], axis=1).lengths.tolist() == [3, 5] for y in others)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(join, range(64)))
