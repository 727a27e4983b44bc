"""Two laws about dense arrays.

For dense arrays, the namespace calls the library's own functions. A ragged array of equal rows gives
the same results as the dense array. Both laws try every function of the table on the same list of
calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

import scree
from scree.functions import EXTENSIONS, KINDS, Kind

from .backends import EPS
from .bench import DRAWS, Bench
from .layouts import Layout
from .table import DTYPES, operation

NAMES: dict[str, Kind] = {
    **KINDS,
    **{f"{e}.{name}": kind for e, kinds in EXTENSIONS.items() for name, kind in kinds.items()},
}
N, LENGTH, WIDTH = 4, 5, 2


class Arrays:
    """Arguments of the calls, created on access.

    An argument has three axes. With `equal_rows`, the second axis is ragged.
    """

    def __init__(self, bench: Bench, dtype: str, *, equal_rows: bool) -> None:
        self._bench, self._dtype = bench, dtype
        # All ragged arguments share the layout of this array.
        self._ragged = (
            bench.of(bench.lib.make(np.zeros(N * LENGTH), "float32"), [LENGTH] * N).array
            if equal_rows
            else None
        )

    def __getattr__(self, name: str) -> Any:
        # Some calls write into their arguments: every access makes an array of the same numbers.
        draw, shape, dtype = ARGUMENTS[name]
        lib = self._bench.lib
        names = {
            "dtype": self._dtype,
            "dtype of a solver": self._dtype if self._dtype == "float64" else "float32",
            "default integer": lib.default_integer,
        }
        array = lib.make(_numbers(name, draw, shape), names.get(dtype, dtype))
        if name in ALWAYS_DENSE or self._ragged is None:
            return array
        return self._ragged.with_values(self._bench.xp.reshape(array, (-1, *array.shape[2:])))

    def shape(self, *shape: int) -> tuple[int | None, ...]:
        """Return a shape for these arrays."""
        is_ragged = self._ragged is not None
        return tuple(None if is_ragged and axis == 1 else n for axis, n in enumerate(shape))


@cache
def _numbers(name: str, draw: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of an argument, which depend on its name only."""
    rng = np.random.default_rng(crc32(name.encode()))
    if draw in FIXED:
        return np.asarray(FIXED[draw])
    if draw == "invertible":
        return rng.uniform(0.1, 0.3, shape) + 2 * np.eye(WIDTH)
    return DRAWS[draw](rng, shape)


FIXED = {"sorted": [0, 1, 2, 3], "indices": [1, 0, 0]}
#: Argument -> the domain of its numbers, its shape, and its dtype: a name, ``"default integer"``, or
#: ``"dtype"``, the dtype of the case. A solver takes float32, unless the dtype of the case is float64.
ARGUMENTS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "x": ("twos", (N, LENGTH, WIDTH), "dtype"),
    "y": ("twos", (N, LENGTH, WIDTH), "dtype"),
    "integers": ("twos", (N, LENGTH, WIDTH), "int32"),
    "positions": ("bool", (N, LENGTH, WIDTH), "default integer"),
    "booleans": ("bool", (N, LENGTH, WIDTH), "bool"),
    "complex": ("complex", (N, LENGTH, WIDTH), "complex64"),
    "matrix": ("invertible", (N, LENGTH, WIDTH, WIDTH), "dtype of a solver"),
    "vector": ("twos", (WIDTH,), "dtype"),
    "per_row": ("twos", (N, 1, WIDTH), "dtype"),
    "weight": ("twos", (WIDTH, 3), "dtype"),
    "weights": ("twos", (N, WIDTH, 3), "dtype"),
    "sorted": ("sorted", (4,), "dtype"),
    "indices": ("indices", (3,), "default integer"),
}
ALWAYS_DENSE = ("vector", "per_row", "weight", "weights", "sorted", "indices")


Call = Callable[[Any, Any, Arrays], Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: The only calls of functions that index. With arguments other than positions, these functions could
#: read out of bounds.
INDEX_CALLS: list[Call] = [
    *(lambda xp, f, a, axis=axis: f(a.x, a.indices, axis=axis) for axis in (0, 2)),
    *(lambda xp, f, a, axis=axis: f(a.x, a.positions, axis=axis) for axis in (1, 2)),
]
#: Every function accepts at least one of these calls, and refuses some.
CALLS: list[Call] = [
    *INDEX_CALLS,
    *(lambda xp, f, a, axis=axis: f(a.x, axis=axis) for axis in (1, 2, -1, -2, (1, 2), (0, 1),
                                                                 (0, 1, 2), None, 0, 5)),
    *(lambda xp, f, a, axis=axis: f(a.x, axis=axis, keepdims=True) for axis in (1, 2, (0, 1),
                                                                                None)),
    *(lambda xp, f, a, axis=axis: f([a.x, a.y], axis=axis) for axis in (0, 1, 2, -1)),
    *(lambda xp, f, a, axis=axis: f(a.x, 2, axis=axis) for axis in (0, 1, 2)),
    *(lambda xp, f, a, axis=axis: f(a.booleans, axis=axis) for axis in (1, 2)),
    *(lambda xp, f, a, order=order: f(a.x, axis=1, ord=order) for order in (1, float("inf"))),
    lambda xp, f, a: f(a.x),
    lambda xp, f, a: f(a.x, a.y),
    lambda xp, f, a: f(a.x, a.y, axis=1),
    lambda xp, f, a: f(a.x, 2),
    lambda xp, f, a: f(2, a.x),
    lambda xp, f, a: f(a.x, 1, 2),
    lambda xp, f, a: f(a.x, a.vector),
    lambda xp, f, a: f(a.vector, a.x),
    lambda xp, f, a: f(a.x, a.per_row),
    lambda xp, f, a: f(a.x, a.weight),
    lambda xp, f, a: f(a.x, a.weight, axes=1),
    lambda xp, f, a: f(a.x, a.weights),
    lambda xp, f, a: f(a.sorted, a.x),
    lambda xp, f, a: f(a.integers),
    lambda xp, f, a: f(a.integers, a.integers),
    lambda xp, f, a: f(a.integers, a.indices),
    lambda xp, f, a: f(a.booleans),
    lambda xp, f, a: f(a.booleans, a.booleans),
    lambda xp, f, a: f(a.booleans, a.x, a.y),
    lambda xp, f, a: f(a.complex),
    lambda xp, f, a: f(a.matrix),
    lambda xp, f, a: f(a.matrix, a.matrix),
    lambda xp, f, a: f(a.matrix, 3),
    lambda xp, f, a: f(a.x, xp.int32),
    lambda xp, f, a: f(a.x, 7, dtype=xp.float32),
    lambda xp, f, a: f(a.x, a.shape(N, LENGTH, 1, WIDTH)),
    lambda xp, f, a: f(xp.expand_dims(a.x, axis=2), a.shape(N, LENGTH, 3, WIDTH)),
    lambda xp, f, a: f(xp.expand_dims(a.x, axis=2), axis=2),
    lambda xp, f, a: f(a.x, (0, 2, 1)),
    lambda xp, f, a: f(a.x, (1, 2, 1)),
    lambda xp, f, a: f(a.x, 1, 2),
    lambda xp, f, a: f(a.vector),
    lambda xp, f, a: f(a.vector, a.vector),
    lambda xp, f, a: f(xp.ones((3,)), xp.ones((3,))),
    lambda xp, f, a: f((2, 3)),
    lambda xp, f, a: f((2, 3), 5.0),
    lambda xp, f, a: f((2, 3), (3,)),
    lambda xp, f, a: f(3),
    lambda xp, f, a: f(0.0, 1.0, 5),
    lambda xp, f, a: f(xp.float32),
    lambda xp, f, a: f(xp.int32),
    lambda xp, f, a: f(xp.float32, "real floating"),
    lambda xp, f, a: f(xp.int32, xp.int64),
    lambda xp, f, a: f(),
]  # fmt: skip


# ----------------------------------------------------------------------------------------- refusals
def _has_axis(*axes: Any) -> Callable[[Args, Kwargs], bool]:
    return lambda args, kwargs: "axis" in kwargs and kwargs["axis"] in axes


def _has_keyword(name: str) -> Callable[[Args, Kwargs], bool]:
    return lambda args, kwargs: name in kwargs


def _has_more_than(count: int) -> Callable[[Args, Kwargs], bool]:
    return lambda args, kwargs: len(args) > count


def _has_second(check: Callable[[Any], bool]) -> Callable[[Args, Kwargs], bool]:
    return lambda args, kwargs: len(args) > 1 and check(args[1])


def _is_complex(args: Args, kwargs: Kwargs) -> bool:
    return "complex" in str(getattr(args[0], "dtype", ""))


def _is_sequence(args: Args, kwargs: Kwargs) -> bool:
    return isinstance(args[0], list)


def _always(args: Args, kwargs: Kwargs) -> bool:
    return True


_REDUCTIONS = "all any count_nonzero max mean min prod std sum var"
_ORDERED = "argmax argmin argsort max min sort std var"
_OPERANDS = (
    "add atan2 clip copysign divide floor_divide hypot logaddexp maximum minimum multiply "
    "nextafter pow remainder subtract"
)
_ELEMENTWISE = " ".join(name for name, kind in KINDS.items() if kind.name == "elementwise")
_MATRICES = (
    "tril triu linalg.diagonal linalg.matrix_norm linalg.matrix_rank linalg.pinv linalg.qr "
    "linalg.svd linalg.svdvals linalg.trace"
)


class Refusal(NamedTuple):
    """Calls that a dense array accepts and a ragged array of equal rows refuses."""

    functions: str
    condition: Callable[[Args, Kwargs], bool]
    #: Regular expression of the error message.
    message: str
    reason: str


#: The only calls in which the law "equal rows" accepts an error.
REFUSALS = [
    # ---------------------------------------------- the batch axis, and axes that rows do not share
    Refusal(_REDUCTIONS, _has_axis(0), "over the batch alone would combine unrelated positions",
            "Rows of different lengths have no columns to reduce."),
    Refusal("linalg.vector_norm", _has_axis(0), "a norm over the batch alone",
            "Rows of different lengths have no columns to reduce."),
    Refusal("argmax argmin argsort sort diff cumulative_sum cumulative_prod", _has_axis(0),
            "works within each row or along element axes, not along the batch",
            "Rows of different lengths have no columns."),
    Refusal("expand_dims", _has_axis(0, (0, 1), (0, 1, 2)), "cannot move the batch axis",
            "The batch is axis 0 of a ragged array."),
    Refusal("squeeze", _has_axis(None), "cannot move the batch axis",
            "The batch is axis 0 of a ragged array."),
    Refusal("stack", _has_axis(0), "the batch is axis 0", "The batch is axis 0 of a ragged array."),
    Refusal("unstack", _has_axis(1, -2), "no common number of entries",
            "Rows differ in their number of tokens."),
    Refusal("argsort sort", _has_axis(None), "expected one axis",
            "The standard takes an integer axis."),
    Refusal("repeat roll", lambda args, kwargs: "axis" not in kwargs and len(args) == 2,
            "axis: expected one axis|shift: expected one for each axis|"
            "shift: expected a Python integer",
            "A flattened ragged array has no rows."),
    # -------------------------------------------------------------------------- dtypes and operands
    Refusal(_ORDERED, _is_complex, "expected real numbers", "Complex numbers have no order."),
    Refusal("diff", lambda args, kwargs: "bool" in str(getattr(args[0], "dtype", "")),
            "[Ss]ubtract",
            "Booleans have no difference."),
    Refusal("roll", _has_second(lambda x: hasattr(x, "shape")), "shift: expected a Python integer",
            "The standard takes Python integers; an array would have to be read."),
    Refusal("roll",
            lambda args, kwargs: (
                not isinstance(args[0], scree.Array)
                and len(args) > 1
                and isinstance(args[1], scree.Array)
            ),
            "not a NumPy array",
            "The standard takes Python integers; CuPy takes an array of shifts."),
    Refusal("tile", _has_second(lambda x: not isinstance(x, tuple)),
            "repetitions: expected a tuple",
            "The standard takes a tuple."),
    Refusal("tile", _has_second(lambda x: isinstance(x, tuple) and None in x),
            "expected a Python integer, got None",
            "A shape with None is no number of repetitions; the dense call has a number here."),
    Refusal("take", _has_second(lambda x: isinstance(x, scree.Array)),
            "indices: expected a dense array",
            "The standard takes one-dimensional indices; xp.ragged.gather takes ragged ones."),
    Refusal("full_like", _has_second(lambda x: not isinstance(x, int | float)),
            "fill_value: expected a Python number|broadcast|Invalid type|requires ndarray or scalar",
            "The standard takes a Python scalar as fill value."),
    Refusal("searchsorted", lambda args, kwargs: isinstance(args[0], scree.Array),
            "expected a dense sorted x1",
            "One sorted array serves all tokens."),
    Refusal("matmul linalg.matmul",
            lambda args, kwargs: all(isinstance(x, scree.Array) for x in args),
            "expected a ragged array .* and a dense",
            "The product over the ragged axis has no common length."),
    Refusal(_MATRICES, lambda args, kwargs: args[0].ndim == 3, "expected a matrix for each token",
            "The matrix would have the ragged axis as one of its two axes."),
    # ------------------------------ calls beyond the standard that a library's own function accepts
    Refusal("argmax argmin", lambda args, kwargs: isinstance(kwargs.get("axis"), tuple),
            "expected one axis",
            "The standard takes an integer axis; CuPy also takes a tuple."),
    Refusal(f"argmax argmin argsort diff expand_dims flip linalg.vector_norm sort {_REDUCTIONS}",
            _is_sequence,
            "not a NumPy array",
            "The standard takes an array; NumPy also converts a list of arrays."),
    Refusal(f"argmax argmin diff expand_dims flip {_REDUCTIONS}", _has_more_than(1),
            "positional argument",
            "The standard takes only the array by position."),
    Refusal(f"{_ELEMENTWISE} {_REDUCTIONS}", lambda args, kwargs: bool(kwargs),
            "expected (no such keyword|only .*) for .* of a ragged array",
            "The standard has no such keyword."),
    Refusal("isin", _has_second(lambda x: isinstance(x, type | tuple)), "x2: expected a dense array",
            "Neither is an array; NumPy converts any object."),
    Refusal("isin repeat roll", _has_more_than(2), "positional argument",
            "The standard takes only two arguments by position."),
    Refusal("squeeze", lambda args, kwargs: len(args) == 1 and not kwargs, "missing 1 required",
            "The standard requires `axis`."),
    Refusal("permute_dims", lambda args, kwargs: len(args) == 1 and not kwargs,
            "missing 1 required",
            "The standard requires `axes`."),
    Refusal("where", _has_more_than(0), "expected a dense array .*, got tuple",
            "The standard requires three arguments; NumPy takes one as nonzero."),
    Refusal("clip", _has_keyword("axis"), "expected an array or a Python scalar",
            "The standard has no `axis` here."),
    Refusal("broadcast_arrays",
            lambda args, kwargs: any(isinstance(x, type | tuple) for x in args),
            "expected an array or a Python scalar",
            "The standard takes arrays; NumPy converts any object, and CuPy returns it as it is."),
    Refusal("broadcast_arrays",
            lambda args, kwargs: any(isinstance(x, int | float) for x in args),
            "values: expected a dense array of cupy",
            "A scalar is no array; CuPy returns it as it is."),
    Refusal(_OPERANDS, _has_keyword("dtype"), "expected an array or a Python scalar",
            "The standard has no `dtype` here."),
    Refusal("all any", _has_keyword("ord"), "invalid combination",
            "The standard has no `ord` here."),
]  # fmt: skip


def is_expected_refusal(name: str, args: Args, kwargs: Kwargs, error: Exception) -> bool:
    """Return whether the table lists the refusal of this call."""
    return isinstance(error, TypeError | ValueError | RuntimeError) and any(
        name in refusal.functions.split()
        and refusal.condition(args, kwargs)
        and re.search(refusal.message, str(error), re.DOTALL)
        for refusal in REFUSALS
    )


#: Number of valid calls per function, if the library compiles each call.
MAX_COMPILED_CALLS = 2


def _has_enough(bench: Bench, valid_calls: int) -> bool:
    return bench.lib.compiles and valid_calls >= MAX_COMPILED_CALLS


def _calls(name: str) -> list[Call]:
    return INDEX_CALLS if name.startswith("take") else CALLS


def _outcome(bench: Bench, f: Any, call: Call, dtype: str, *, equal_rows: bool = False) -> Any:
    """Return the result of a call in a comparable form, or the error."""
    arrays = Arrays(bench, dtype, equal_rows=equal_rows)
    try:
        return _comparable(bench, call(bench.xp if equal_rows else bench.library_xp, f, arrays))
    # The law compares errors too.
    except Exception as error:
        return error


def _comparable(bench: Bench, result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [_comparable(bench, x) for x in result]
    if isinstance(result, scree.Array):
        rows = bench.rows(result)
        return str(result.dtype), np.stack(rows) if len({row.shape for row in rows}) == 1 else rows
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        return str(result.dtype), bench.lib.read(result)
    return result if isinstance(result, bool | int | float) else str(type(result))


def _function(xp: Any, name: str) -> Any:
    for part in name.split("."):
        xp = getattr(xp, part)
    return xp


# ------------------------------------------------------------------------------------- dense arrays
def check_same_function(bench: Bench, name: str, dtype: str) -> None:
    """Compare a function of the namespace with the library's own function, on every call."""
    ours, library_function = _function(bench.xp, name), _function(bench.library_xp, name)
    if not callable(library_function) or isinstance(library_function, type):
        is_nan = ours != ours
        assert ours is library_function or ours == library_function or is_nan, (
            f"{name}: expected {library_function!r}, got {ours!r}"
        )
        return
    valid_calls = 0
    for i, call in enumerate(_calls(name)):
        if _has_enough(bench, valid_calls):
            break
        expected, got = (_outcome(bench, f, call, dtype) for f in (library_function, ours))
        valid_calls += not isinstance(expected, Exception)
        if isinstance(expected, Exception):
            assert type(got) is type(expected), (
                f"{name}, call {i}: expected {type(expected).__name__}, got {got!r}"
            )
        # A result of the library that changes between runs is uninitialized memory.
        elif not _equal(got, expected) and not name.startswith("empty"):
            repeated = _outcome(bench, library_function, call, dtype)
            assert not _equal(repeated, expected), (
                f"{name}, call {i}: expected {expected}, got {got!r}"
            )
    assert valid_calls, f"{name}: accepts none of the calls"


def _equal(a: Any, b: Any) -> bool:
    try:
        np.testing.assert_equal(a, b)
    except AssertionError:
        return False
    return True


@operation("law: dense arrays get the library's own functions", ("plain",), ("float32",))
def dense_arrays(bench: Bench, layout: Layout, dtype: str) -> None:
    """Check that the results, dtypes and errors equal the library's own."""
    for name in NAMES:
        if name not in bench.lib.gaps:
            check_same_function(bench, name, dtype)


def check_library_function(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Check that a function or constant without ragged arguments is the library's own."""
    check_same_function(bench, name, dtype)


def check_refusal(bench: Bench, layout: Layout, dtype: str, *, name: str, why: str) -> None:
    """Check that every argument refuses a ragged array, with the reason of the table.

    Dense arrays are accepted.
    """
    check_same_function(bench, name, dtype)
    f = _function(bench.xp, name)
    x, dense = bench.ragged(layout, (3,), dtype).array, bench.dense((3,), dtype).array
    for args in ((x,), (x, x), (dense, x)):
        try:
            f(*args)
        except TypeError as error:
            assert str(error) == f"{name.split('.')[-1]} does not take ragged arrays: {why}", (
                f"{name}: {error}"
            )
        else:
            raise AssertionError(f"{name} took a ragged array")


for _name, _kind in NAMES.items():
    if _kind.name == "plain":
        operation(_name, ("plain",), ("float32",))(partial(check_library_function, name=_name))
    elif _kind.name == "unsupported":
        operation(_name, ("plain",), ("float32",))(
            partial(check_refusal, name=_name, why=_kind.why)
        )


# --------------------------------------------------------------------------------------- equal rows
@operation("law: equal rows are a dense array", ("plain",), (*DTYPES, "int32", "int8"))
def equal_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """Check that every function of ragged arrays gives the values and dtype of the dense call.

    A refusal must be in the table.
    """
    for name, kind in NAMES.items():
        if (
            kind.name in ("plain", "unsupported", "dtypes")
            or name in bench.lib.gaps
            or name.startswith("empty")
        ):
            continue
        # The standard defines these functions for floating-point numbers.
        if dtype not in DTYPES and name.startswith("linalg."):
            continue
        f, valid_calls = _function(bench.xp, name), 0
        for i, call in enumerate(_calls(name)):
            if _has_enough(bench, valid_calls):
                break
            expected = _outcome(bench, f, call, dtype)
            if isinstance(expected, Exception):
                continue
            calls: list[tuple[Args, Kwargs]] = []

            def record_call(*args: Any, f: Any = f, calls: Any = calls, **kwargs: Any) -> Any:
                calls.append((args, kwargs))
                return f(*args, **kwargs)

            got = _outcome(bench, record_call, call, dtype, equal_rows=True)
            note = f"{name}, call {i}: "
            if isinstance(got, Exception):
                is_listed = len(calls) == 1 and is_expected_refusal(name, *calls[0], got)
                assert is_listed, f"{note}not in the table of refusals: {got!r}"
                continue
            valid_calls += 1
            _assert_same_result(got, expected, note)
        assert valid_calls or dtype not in DTYPES, f"{name}: accepts none of the calls"


def _assert_same_result(got: Any, expected: Any, note: str) -> None:
    if isinstance(expected, list):
        for got_part, expected_part in zip(got, expected, strict=True):
            _assert_same_result(got_part, expected_part, note)
        return
    if not isinstance(expected, tuple):
        assert got == expected, f"{note}expected {expected}, got {got}"
        return
    (actual_dtype, actual), (expected_dtype, expected_values) = got, expected
    assert actual_dtype == expected_dtype, (
        f"{note}expected dtype {expected_dtype}, got {actual_dtype}"
    )
    # A batch without rows has no defined row length.
    if np.size(actual) == 0 and expected_values.shape[:1] == (0,):
        return
    eps = next(
        (eps for name, eps in EPS.items() if actual_dtype.endswith(name)),
        EPS["float64" if "128" in actual_dtype else "float32"],
    )
    assert np.shape(actual) == expected_values.shape, (
        f"{note}expected shape {expected_values.shape}, got {np.shape(actual)}"
    )
    if expected_values.dtype.kind in "fc":
        np.testing.assert_allclose(
            actual, expected_values, rtol=16 * eps, atol=16 * eps, err_msg=note
        )
    else:
        np.testing.assert_array_equal(actual, expected_values, err_msg=note)
