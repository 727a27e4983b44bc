"""The typed namespace: signatures, documentation, and the messages for names that are missing."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import pytest
from libraries import NAMES, load

import scree
from scree.backends import generic, override
from scree.functions import EXTENSIONS, KINDS

FUNCTIONS = [
    (extension, name)
    for extension, table in {"": KINDS, **EXTENSIONS}.items()
    for name, kind in table.items()
    if kind.name != "plain"
]


def namespace(name: str) -> Any:
    return scree.namespace(load(name).f(1))


@pytest.mark.parametrize("library", NAMES)
def test_functions_have_the_signatures_of_the_standard_and_our_documentation(library: str) -> None:
    xp = namespace(library)
    for extension, name in FUNCTIONS:
        own = getattr(xp, extension, None) if extension else xp
        if not hasattr(own, name):
            continue  # a gap of the library
        function = getattr(own, name)
        oracle = getattr(array_api_strict, extension) if extension else array_api_strict
        ours = inspect.signature(function).parameters
        theirs = inspect.signature(getattr(oracle, name)).parameters
        assert [*ours] == [*theirs], name
        for parameter, expected in theirs.items():
            got = ours[parameter]
            assert got.kind is expected.kind, (name, parameter)
            if type(expected.default).__name__ != "Undef":  # not given, which is None here
                assert got.default == expected.default, (name, parameter)
        assert (function.__name__, function.__module__) == (name, own.__name__)
        documentation = pydoc.plain(pydoc.render_doc(function))
        assert "agged" in documentation, name
        if KINDS.get(name) and KINDS[name].name != "unsupported":
            assert ">>> " in documentation, name


@pytest.mark.parametrize("library", NAMES)
def test_dir_and_help_list_public_functions(library: str) -> None:
    xp = namespace(library)
    names = dir(xp)
    assert {"sum", "float32", "linalg", "ragged"} <= {*names} == {*xp.__all__}
    assert not [name for name in names if name.startswith("_")]
    assert "sum(x" in pydoc.plain(pydoc.render_doc(xp))
    assert dir(xp.ragged) == sorted(scree.ragged.__all__)
    assert {*dir(scree)} - {"__version__"} == {*scree.__all__}
    assert all(hasattr(scree, name) for name in dir(scree))


MISSING = {
    "sum": "use xp.sum(arr, ...), with xp = scree.namespace(arr)",
    "reshape": "use xp.reshape(arr, ...)",
    "T": "use arr.mT or xp.permute_dims",
    "softmax": "use xp.ragged.softmax(arr, ...)",
    "relu": "use xp.ragged.relu(arr, ...)",
    "repeat_interleave": "xp.ragged.broadcast_rows for one entry per row, with xp = scree.namespace(arr)",
    "cumsum": "use xp.cumulative_sum",
    "lengthss": "did you mean arr.lengths?",
    "numpy": "use arr.to_numpy()",
}


@pytest.mark.parametrize("library", NAMES)
@pytest.mark.parametrize("name", MISSING)
def test_missing_attribute_of_an_array_says_what_to_write(library: str, name: str) -> None:
    arr = load(library).r([2, 1])
    with pytest.raises(AttributeError) as error:
        getattr(arr, name)
    assert str(error.value).startswith(f"a ragged array has no attribute {name!r}")
    assert MISSING[name] in str(error.value)
    assert not hasattr(arr, "__array_interface__")


@pytest.mark.parametrize("library", NAMES)
def test_missing_attribute_that_the_values_have_names_them(library: str) -> None:
    arr = load(library).r([2, 1])
    name = {
        "numpy": "tobytes",
        "torch": "detach",
        "jax": "addressable_shards",
        "mlx": "itemsize",
    }.get(library)
    if name is not None:
        assert hasattr(arr.values, name)
        with pytest.raises(AttributeError, match=f"arr.values.{name}"):
            getattr(arr, name)


@pytest.mark.parametrize("library", NAMES)
def test_missing_function_says_what_to_write(library: str) -> None:
    xp = namespace(library)
    for owner, name, advice in (
        (xp, "cumsum", "use xp.cumulative_sum"),
        (xp, "softmax", "use xp.ragged.softmax"),
        (xp, "summ", "did you mean xp.sum?"),
        (xp.ragged, "sofmax", "did you mean xp.ragged.softmax?"),
        (xp.linalg, "vector_nrom", "did you mean"),
    ):
        with pytest.raises(AttributeError) as error:
            getattr(owner, name)
        assert advice in str(error.value)
        assert not hasattr(xp, "__wrapped__")


def test_tolist_and_from_lists() -> None:
    rows = [[[1, 2]], [], [[3, 4], [5, 6]]]
    arr = scree.from_lists(rows)
    assert arr.tolist() == rows
    assert arr.dtype == np.int64
    with pytest.raises(TypeError, match=r"scree\.from_lists"):
        scree.pack([[1, 2], [3]])


def test_at_of_an_array_updates_it() -> None:
    arr = scree.from_lists([[1, 2], [3]])
    assert arr.at[:, 0].add(10).tolist() == scree.at(arr)[:, 0].add(10).tolist() == [[11, 2], [13]]


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda xp, x, y: xp.sum(y, axis=1),
    "exp": lambda xp, x, y: xp.exp(y),
    "add": lambda xp, x, y: xp.add(x, y),
    "where": lambda xp, x, y: xp.where(x > 0, x, y),
    "clip": lambda xp, x, y: xp.clip(x, min=y),
    "concat": lambda xp, x, y: xp.concat([y, y], axis=0),
    "sort": lambda xp, x, y: xp.sort(y, axis=1),
    "astype": lambda xp, x, y: xp.astype(y, xp.float32),
    "take": lambda xp, x, y: xp.take(x.values, y),
    "reshape": lambda xp, x, y: xp.reshape(y, (2, None, 1)),
    "isin": lambda xp, x, y: xp.isin(x, y),
    "isin dense": lambda xp, x, y: xp.isin(x, y.values),
    "cumulative_sum": lambda xp, x, y: xp.cumulative_sum(y, axis=1),
    "broadcast_arrays": lambda xp, x, y: xp.broadcast_arrays(y),
    "unique_values": lambda xp, x, y: xp.unique_values(y),
    "vector_norm": lambda xp, x, y: xp.linalg.vector_norm(y, axis=1),
    "operator": lambda xp, x, y: x + y,
    "at": lambda xp, x, y: x.at[0].set(y.values),
    "attention": lambda xp, x, y: xp.ragged.attention(
        *(a.with_values(a.values[:, None, None]) for a in (x, y, y))
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("library", NAMES)
def test_array_of_another_library_raises_our_error(library: str, call: str) -> None:
    x = load(library).r([2, 1])
    for other in NAMES:
        if other != library:
            y = load(other).r([2, 1])
            with pytest.raises(TypeError, match=r"expected .*got") as error:
                CALLS[call](scree.namespace(x), x, y)
            assert load(other).r([1]).layout.backend.name in str(error.value)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize(("axis", "keepdims"), [(None, False), (0, False), (1, True), (-1, False)])
def test_first_nan_is_the_extremum_of_a_library_that_returns_any_nan(
    name: str, axis: int | None, keepdims: bool
) -> None:
    def any_nan(x: np.ndarray, *, axis: int | None, keepdims: bool) -> np.ndarray:
        """Return the last NaN, or the extremum."""
        reverse = np.flip(x, axis)
        last = (x.size if axis is None else x.shape[axis]) - 1
        position = last - np.argmax(np.isnan(reverse), axis=axis, keepdims=keepdims)
        extremum = getattr(np, name)(x, axis=axis, keepdims=keepdims)
        return np.where(np.isnan(x).any(axis=axis, keepdims=keepdims), position, extremum)

    function = generic.first_nan(override(np, **{name: any_nan}), name)
    values = np.asarray([[1.0, np.nan, np.nan], [3.0, -2.0, 0.5], [np.nan, 7.0, np.nan]])
    for x in (values, values[1:2], values.astype(np.float32)):
        expected = getattr(np, name)(x, axis=axis, keepdims=keepdims)
        np.testing.assert_array_equal(function(x, axis=axis, keepdims=keepdims), expected)
    whole = np.asarray([[3, 1, 3]])
    np.testing.assert_array_equal(generic.first_nan(np, name)(whole), getattr(np, name)(whole))
