"""Functions of other libraries on ragged arrays: they work or raise, and none is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import array_api_clients as clients
import array_api_compat
import array_api_extra as xpx
import numpy as np
import pytest
from libraries import NAMES, load

import scree

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SCIPY = tuple(map(int, version("scipy").split(".")[:2]))


# ----------------------------------------------------------------------------------- array-api-extra
def one_hot(rows: np.ndarray) -> np.ndarray:
    """Return the rows of an identity matrix."""
    return np.eye(40, dtype=np.float32)[rows]


#: Function of array-api-extra -> the call, and the same on a NumPy row. None has no value to compare.
Pair = tuple[Callable[[Any], Any], Callable[[np.ndarray], Any]]
FLOATS: dict[str, Pair] = {
    "angle": (xpx.angle, np.angle),
    "atleast_nd": (lambda x: xpx.atleast_nd(x, ndim=2), lambda row: row),
    "deg2rad": (xpx.deg2rad, np.deg2rad),
    "expand_dims": (lambda x: xpx.expand_dims(x, axis=-1), lambda row: row[:, None]),
    "nan_to_num": (xpx.nan_to_num, np.nan_to_num),
    "nanmax": (lambda x: xpx.nanmax(x, axis=1), lambda row: np.nanmax(row) if len(row) else None),
    "nanmean": (lambda x: xpx.nanmean(x, axis=1), lambda row: row.mean() if len(row) else np.nan),
    "nanmin": (lambda x: xpx.nanmin(x, axis=1), lambda row: np.nanmin(row) if len(row) else None),
    "nansum": (lambda x: xpx.nansum(x, axis=1), np.nansum),
    "rad2deg": (xpx.rad2deg, np.rad2deg),
    "sinc": (xpx.sinc, np.sinc),
}
INTEGERS: dict[str, Pair] = {
    "one_hot": (lambda x: xpx.one_hot(x, 40), one_hot),
    "unravel_index": (lambda x: xpx.unravel_index(x, (8, 5))[1], lambda row: row % 5),
}
#: Functions of all tokens, whose order is not defined.
WHOLE: dict[str, Pair] = {
    "nunique": (xpx.nunique, lambda values: len(np.unique(values))),
    "setdiff1d": (lambda x: xpx.setdiff1d(x, x + 3), lambda v: np.setdiff1d(v, v + 3)),
    "union1d": (lambda x: xpx.union1d(x, x + 3), lambda v: np.union1d(v, v + 3)),
}
WORKS = sorted({*FLOATS, *INTEGERS, *WHOLE})
#: Functions that assign to elements of a copy where arrays of the library can change, which a ragged
#: array refuses. On JAX and MLX they select instead.
ASSIGNS: dict[str, Pair] = {
    "apply_where": (
        lambda x: xpx.apply_where(x > 3, x, lambda y: y * 2, lambda y: -y),
        lambda row: np.where(row > 3, row * 2, -row),
    ),
    "isclose": (lambda x: xpx.isclose(x, 2.0), lambda row: np.isclose(row, 2.0)),
}
SELECTS = ("jax", "mlx")
IMMUTABLE = "a ragged array does not change"
UNKNOWN_LENGTH = "Unsupported lazy shape"
OWN_NAMESPACE = "Multiple namespaces for array inputs"
#: Functions that raise on every library, with the message.
RAISES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "argpartition": (lambda x: xpx.argpartition(x, 1, axis=1), UNKNOWN_LENGTH),
    "at": (lambda x: xpx.at(x)[x > 3].set(0.0), IMMUTABLE),
    "cov": (xpx.cov, UNKNOWN_LENGTH),
    "create_diagonal": (xpx.create_diagonal, UNKNOWN_LENGTH),
    "isin": (
        lambda x: xpx.isin(x, scree.namespace(x).asarray([2.0, 3.0], dtype=x.dtype)),
        OWN_NAMESPACE,
    ),
    "kron": (lambda x: xpx.kron(x, x), UNKNOWN_LENGTH),
    "lazy_apply": (
        lambda x: xpx.lazy_apply(np.sin, x, as_numpy=True),
        "a ragged array is not a NumPy array",
    ),
    "pad": (lambda x: xpx.pad(x, 1), UNKNOWN_LENGTH),
    "partition": (lambda x: xpx.partition(x, 1, axis=1), UNKNOWN_LENGTH),
    "searchsorted": (
        lambda x: xpx.searchsorted(scree.namespace(x).asarray([2.0, 3.0], dtype=x.dtype), x),
        OWN_NAMESPACE,
    ),
}
#: Functions that take no array.
WITHOUT_ARRAYS = set(
    "broadcast_shapes default_dtype diag_indices tril_indices triu_indices".split()
)
#: MLX's arrays have no attribute `device`, which these functions read from dense results.
GAPS = {("mlx", "nunique"), ("mlx", "setdiff1d")}


def make(library: str, lengths: list[int], dtype: str) -> tuple[Any, list[np.ndarray], Any]:
    """Return a ragged array of a library, its rows, and the conversion of results to NumPy."""
    lib = load(library)
    host, rows = clients.make(lengths, dtype)
    return scree.from_lengths(lib.make(host.values), lengths), rows, lib.library.read


@pytest.mark.parametrize("lengths", [clients.LENGTHS, clients.EMPTY_BATCH], ids=["rows", "empty"])
@pytest.mark.parametrize("name", sorted({*FLOATS, *INTEGERS, *ASSIGNS}))
@pytest.mark.parametrize("library", NAMES)
def test_array_api_extra_function_gives_the_results_of_rows(
    library: str, name: str, lengths: list[int]
) -> None:
    call, oracle = (FLOATS | INTEGERS | ASSIGNS)[name]
    x, rows, read = make(library, lengths, "int32" if name in INTEGERS else "float32")
    if name in ASSIGNS and library not in SELECTS:
        with pytest.raises(TypeError, match=IMMUTABLE):
            call(x)
        return
    assert clients.compare(call(x), [oracle(row) for row in rows], read) is None


@pytest.mark.parametrize("lengths", [clients.LENGTHS, clients.EMPTY_BATCH], ids=["rows", "empty"])
@pytest.mark.parametrize("name", RAISES)
@pytest.mark.parametrize("library", NAMES)
def test_array_api_extra_function_of_dense_arrays_raises(
    library: str, name: str, lengths: list[int]
) -> None:
    call, message = RAISES[name]
    x, _, _ = make(library, lengths, "float32")
    with pytest.raises(TypeError, match=message):
        call(x)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("library", NAMES)
def test_array_api_extra_set_functions_use_all_tokens(library: str, name: str) -> None:
    call, oracle = WHOLE[name]
    x, rows, read = make(library, clients.LENGTHS, "int32")
    if (library, name) in GAPS:
        with pytest.raises(AttributeError, match="device"):
            call(x)
        return
    np.testing.assert_array_equal(np.sort(read(call(x)), axis=None), oracle(np.concatenate(rows)))


def test_array_api_extra_has_no_function_without_a_case() -> None:
    functions = {name for name in xpx.__all__ if callable(getattr(xpx, name))}
    assert functions <= {*WORKS, *ASSIGNS, *RAISES, *WITHOUT_ARRAYS}


# ---------------------------------------------------------------------------------- array-api-compat
@pytest.mark.parametrize("library", NAMES)
def test_array_api_compat_takes_ragged_arrays(library: str) -> None:
    x, rows, read = make(library, clients.LENGTHS, "float32")
    assert array_api_compat.is_array_api_obj(x)
    assert array_api_compat.array_namespace(x) is scree.namespace(x)
    moved = array_api_compat.to_device(x, array_api_compat.device(x))
    assert clients.compare(moved, rows, read) is None
    xp = scree.namespace(x)
    np.testing.assert_array_equal(read(xp.reshape(x, (-1,))), np.concatenate(rows))
    assert xp.asarray(x) is x


# --------------------------------------------------------------------------------------------- SciPy
@pytest.fixture(scope="module")
def scipy_outcomes() -> dict[str, list[tuple[str, str]]]:
    """Return the outcomes of a process in which SciPy takes arrays of the standard."""
    return json.loads(
        subprocess.run(
            [sys.executable, clients.__file__],
            env={**os.environ, "SCIPY_ARRAY_API": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.parametrize("name", [*clients.SCIPY_WORKS, *clients.SCIPY_RAISES])
def test_scipy_works_or_raises(name: str, scipy_outcomes: dict[str, list[tuple[str, str]]]) -> None:
    expected = "works" if name in clients.SCIPY_WORKS else "raises"
    if SCIPY >= (1, 17):
        for kind, message in scipy_outcomes[name]:
            assert kind == expected, message
    # Older versions have fewer functions, which take fewer arrays.
    else:
        for kind, message in scipy_outcomes.get(name, []):
            assert kind in ("raises", expected), message


# ------------------------------------------------------------------------------------- documentation
def test_page_lists_the_functions() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Functions of other libraries")[1]
    section = section.split("\n## ")[0]
    listed = {
        (line.split("|")[1].strip(), line.split("|")[2].strip()): {
            *re.findall(r"`([\w.]+)`", line.split("|")[3])
        }
        for line in section.splitlines()
        if line.count("|") == 4 and "`" in line
    }
    assert listed["array-api-extra", "works"] == {*WORKS}
    assert listed["array-api-extra", "raises"] == {*ASSIGNS, *RAISES}
    assert listed["SciPy", "works"] == {*clients.SCIPY_WORKS}
    assert listed["SciPy", "raises"] == {*clients.SCIPY_RAISES}
