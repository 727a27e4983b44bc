"""Laws of every operation: rows are isolated, empty rows have values, equal rows act as dense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import scree

from .backends import EPS, HALF
from .bench import FACTOR, Bench, as_tuple
from .layouts import EMPTY, Layout, lengths_of
from .table import DTYPES, Absent, operation

# --------------------------------------------------------------------------------------- empty rows
#: Reduction -> its value for an empty row of floating-point numbers.
EMPTY_ROW_VALUES: dict[str, Any] = {
    "sum": 0, "prod": 1, "all": True, "any": False, "max": -math.inf, "min": math.inf,
    "mean": math.nan, "var": math.nan,
    "std": math.nan, "count_nonzero": 0,
}  # fmt: skip


@operation("law: empty rows", EMPTY, ("float32", "int32", "float16", "bfloat16", "int8", "uint8"))
def empty_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """The defined values of empty rows, which are equal on every library."""
    x = bench.ragged(layout, (3,), dtype, "natural")
    is_empty = np.asarray(lengths_of(layout)) == 0
    for name, value in EMPTY_ROW_VALUES.items():
        if dtype not in DTYPES and name in ("max", "min"):
            info = np.iinfo(dtype)
            value = info.min if name == "max" else info.max
        for keepdims in (False, True):
            got = bench.read(getattr(bench.xp, name)(x.array, axis=1, keepdims=keepdims))
            np.testing.assert_array_equal(
                got[is_empty], np.full((int(is_empty.sum()), *got.shape[1:]), value), err_msg=name
            )
    if dtype not in DTYPES:
        return
    lse = bench.read(bench.xp.ragged.logsumexp(x.array))
    np.testing.assert_array_equal(lse[is_empty], np.full((int(is_empty.sum()), 3), -math.inf))
    assert bench.xp.ragged.softmax(x.array).shape == x.array.shape
    q = bench.ragged([2] * len(is_empty), (2, 4), dtype)
    k = bench.ragged(layout, (2, 4), dtype)
    out, attention_lse = bench.xp.ragged.attention(q.array, k.array, k.array, return_lse=True)
    for i in np.flatnonzero(is_empty):
        assert (bench.rows(out)[i] == 0).all(), "attention to an empty row is not 0"
        assert (bench.rows(attention_lse)[i] == -math.inf).all(), (
            "the log-sum-exp of attention to an empty row is not -inf"
        )


@operation("law: nothing at all", ("all_empty", "no_rows"), ("float32",))
def no_tokens(bench: Bench, layout: Layout, dtype: str) -> None:
    """A full reduction of an array without tokens has the value of an empty row."""
    x = bench.ragged(layout, (3,), dtype)
    for name, value in EMPTY_ROW_VALUES.items():
        np.testing.assert_array_equal(
            bench.read(getattr(bench.xp, name)(x.array)), value, err_msg=name
        )
        got = bench.read(getattr(bench.xp, name)(x.array, axis=(0, 1)))
        np.testing.assert_array_equal(got, np.full(3, value), err_msg=name)


# ---------------------------------------------------------------------------------------- isolation
def _attention(options: dict[str, Any]) -> Callable[[Any, scree.Array], Any]:
    return lambda xp, x: xp.ragged.attention(x, x, x, return_lse=True, **options)


#: Name -> call whose result for a row depends on this row only.
CALLS: dict[str, Callable[[Any, scree.Array], Any]] = {
    **{name: (lambda xp, x, name=name: getattr(xp, name)(x, axis=1))
       for name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all",
                    "cumulative_sum", "cumulative_prod")},
    "sum of elements": lambda xp, x: xp.sum(x, axis=-1),
    "softmax": lambda xp, x: xp.ragged.softmax(x),
    "log_softmax": lambda xp, x: xp.ragged.log_softmax(x),
    "logsumexp": lambda xp, x: xp.ragged.logsumexp(x),
    "rms_norm": lambda xp, x: xp.ragged.rms_norm(x),
    "layer_norm": lambda xp, x: xp.ragged.layer_norm(x),
    "swiglu": lambda xp, x: xp.ragged.swiglu(x),
    "rope": lambda xp, x: xp.ragged.rope(x),
    "shift": lambda xp, x: xp.ragged.shift(x, 1),
    "conv1d": lambda xp, x: xp.ragged.conv1d(
        x[:, :, 0], xp.ones((4, 1, 3), dtype=x.dtype), groups=4, padding="same"),
    "attention": _attention({}),
    "attention causal": _attention({"causal": True}),
    "attention window": _attention({"window": (2, 2)}),
    "concat": lambda xp, x: xp.concat([x, x], axis=1),
    "scan with initial": lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True),
}  # fmt: skip


@operation(
    "law: rows are isolated",
    ("blocks", "one_long", "empty_between"),
    ("float32", "float16", "bfloat16"),
)
def isolated_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """NaN or infinity in one row, which leaves every other row unchanged, bit for bit."""
    lengths = lengths_of(layout)
    x = bench.ragged(layout, (2, 4), dtype)
    tokens = np.concatenate(x.exact)
    ends = np.cumsum(lengths)
    nonempty = [i for i, length in enumerate(lengths) if length]
    for name, call in CALLS.items():
        clean_results = [bench.read(result) for result in as_tuple(call(bench.xp, x.array))]
        for poison, poisoned_row in (
            (math.nan, nonempty[len(nonempty) // 2]),
            (math.inf, nonempty[0]),
            (-math.inf, nonempty[-1]),
        ):
            poisoned_tokens = tokens.copy()
            end = ends[poisoned_row]
            poisoned_tokens[end - lengths[poisoned_row] : end] = poison
            poisoned = bench.of(bench.lib.make(poisoned_tokens, dtype), lengths)
            results = as_tuple(call(bench.xp, poisoned.array))
            for clean, result in zip(clean_results, map(bench.read, results), strict=True):
                for i, (clean_row, row) in enumerate(zip(clean, result, strict=True)):
                    if i != poisoned_row:
                        note = f"{name}: {poison} in row {poisoned_row} reached row {i}"
                        np.testing.assert_array_equal(row, clean_row, err_msg=note)


@operation("law: NaN is not lost", ("empty_between", "blocks"), DTYPES)
def nan_propagates(bench: Bench, layout: Layout, dtype: str) -> None:
    """NaN in one token, which reaches every result that depends on the whole row."""
    lengths = lengths_of(layout)
    longest = int(np.argmax(lengths))
    tokens = np.concatenate(bench.ragged(layout, (2, 4), dtype).exact)
    tokens[int(np.sum(lengths[:longest])) + 1] = math.nan
    x = bench.of(bench.lib.make(tokens, dtype), lengths).array
    for name in ("sum", "max", "mean", "std", "softmax", "log_softmax", "logsumexp", "attention"):
        for result in as_tuple(CALLS[name](bench.xp, x)):
            assert np.isnan(bench.read(result)[longest]).all(), (
                f"{name}: the row of a NaN gives {bench.read(result)[longest]}"
            )


#: Indices with the same meaning for a ragged array of equal rows and for the dense array.
INDICES: list[Any] = [
    np.s_[1, ...], np.s_[1:, ...], np.s_[:, 1, ...], np.s_[:, -1, ...], np.s_[:, 1:3, ...],
    np.s_[..., 0], np.s_[1:, 1:, :1],
    np.s_[:, :, 1], np.s_[:, None], np.s_[..., None], np.s_[2, 1:, 0],
]  # fmt: skip


@operation("law: equal rows are indexed as a dense array", ("plain",), ("float32",))
def equal_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """Indexing and transposing equal rows gives the same numbers as on the dense array."""
    dense = bench.dense((4, 3, 2), dtype)
    x = bench.of(bench.lib.make(dense.exact.reshape(12, 2), dtype), [3] * 4).array
    for key in INDICES:
        actual, expected = bench.read(x[key]), dense.exact[key]
        np.testing.assert_array_equal(
            np.stack(actual) if isinstance(actual, list) else actual, expected, err_msg=f"x[{key}]"
        )
    np.testing.assert_array_equal(np.stack(bench.read(x.mT)), dense.exact.swapaxes(1, 2))


# ---------------------------------------------------------------------------------------- gradients
@operation("law: gradients of nothing are 0", ("empty_between", "ones"), ("float32",))
def degenerate_gradients(bench: Bench, layout: Layout, dtype: str) -> None:
    """Gradients of roots and quotients, which are 0 in constant, empty and one-token rows."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    x, xp = bench.ragged(layout, (2,), dtype).array, bench.xp

    def finite_sum(x: Any) -> Any:
        return xp.sum(xp.where(xp.isfinite(x), x, xp.zeros_like(x)))

    calls: dict[str, Callable[[scree.Array], Any]] = {
        "mean": lambda a: xp.mean(a * 0.0, axis=1), "var": lambda a: xp.var(a * 0.0 + 3.0, axis=1),
        "std": lambda a: xp.std(a * 0.0 + 3.0, axis=1),
        "norm": lambda a: xp.linalg.vector_norm(a * 0.0, axis=1),
    }  # fmt: skip
    for name, call in calls.items():
        (gradient,) = bench.lib.grad(
            lambda values, call=call: finite_sum(call(x.with_values(values))), x.values
        )
        np.testing.assert_array_equal(
            bench.lib.read(gradient), np.zeros(x.values.shape), err_msg=name
        )


# ---------------------------------------------------------------------------------------- precision
@operation("law: long sums are exact", ("plain",), ("float32",))
def long_sums(bench: Bench, layout: Layout, dtype: str) -> None:
    """Sums of a million numbers near 1,000.

    They are as precise as the less precise of the library's own sum of each row and NumPy's pairwise
    sum in float32.
    """
    lengths = [0, 1, 250_000, 3, 0, 500_000, 33, 249_963]
    numbers = bench.rng.uniform(999, 1001, sum(lengths))
    x = bench.of(bench.lib.make(numbers, dtype), lengths)
    for name in ("sum", "mean"):
        f, numpy_function = getattr(bench.xp, name), getattr(np, name)
        for axis, rows in ((1, list(x.exact)), (None, [np.concatenate(x.exact)])):
            got = np.atleast_1d(bench.lib.read(f(x.array, axis=axis)))
            for actual, row in zip(got, rows, strict=True):
                if row.size:
                    expected, row_float32 = numpy_function(row), row.astype(np.float32)
                    error = max(
                        abs(numpy_function(row_float32) - expected),
                        abs(bench.lib.read(f(bench.lib.make(row, dtype))) - expected),
                    )
                    allowed = FACTOR * max(error, EPS[dtype] * expected)
                    assert abs(actual - expected) <= allowed, (
                        f"{name} of {row.size}: {actual}, expected {expected} +- {allowed:.3g}"
                    )


# ------------------------------------------------------------------------------------------- dtypes
@operation("law: dtypes", ("plain",), ("int32", "int8", "uint8", "float16", "bfloat16"))
def dtype_rules(bench: Bench, layout: Layout, dtype: str) -> None:
    """The dtype of results: the default floating-point dtype for means of integers.

    Half precision keeps its dtype.
    """
    x = bench.ragged(layout, (4,), dtype, "natural").array
    for name in ("mean", "var", "std"):
        for axis in (1, 2, None):
            got = bench.lib.dtype_name(getattr(bench.xp, name)(x, axis=axis))
            expected = dtype if dtype in HALF else bench.lib.default_float
            assert got == expected, f"{name}, axis={axis}: expected {expected}, got {got}"
    if dtype in HALF:
        q = bench.ragged(layout, (2, 4), dtype).array
        for f in (
            bench.xp.exp,
            bench.xp.ragged.softmax,
            bench.xp.ragged.logsumexp,
            bench.xp.ragged.rms_norm,
            bench.xp.ragged.rope,
            lambda a: bench.xp.ragged.attention(a, a, a),
            lambda a: bench.xp.cumulative_sum(a, axis=1),
        ):
            assert bench.lib.dtype_name(f(q)) == dtype


@operation("law: half precision does not overflow", ("one_long",), HALF)
def no_overflow(bench: Bench, layout: Layout, dtype: str) -> None:
    """Finite means, deviations, norms and attention for ``|x|`` near 300.

    Squares and sums of these numbers exceed the range of float16.
    """
    x = bench.ragged(layout, (4,), dtype, "large").array
    xp = bench.xp
    magnitude = xp.abs(x)
    calls: dict[str, Any] = {
        "mean": xp.mean(magnitude, axis=1), "mean of all": xp.mean(magnitude),
        "mean of elements": xp.mean(magnitude, axis=2),
        "std": xp.std(x, axis=1), "std of all": xp.std(x), "std of elements": xp.std(x, axis=2),
        "softmax": xp.ragged.softmax(x), "log_softmax": xp.ragged.log_softmax(x),
        "logsumexp": xp.ragged.logsumexp(x),
        "rms_norm": xp.ragged.rms_norm(x), "layer_norm": xp.ragged.layer_norm(x),
        "rope": xp.ragged.rope(x),
    }  # fmt: skip
    # The products cancel: every result is 0.
    doubled = xp.concat([x, x], axis=1)
    cancelling = scree.align(xp.concat([x, -x], axis=1), like=doubled)
    calls["vecdot"] = xp.vecdot(doubled, cancelling, axis=1)
    q = x.with_values(xp.expand_dims(x.values, axis=1))
    calls["attention"] = xp.ragged.attention(q, q, q)
    is_nonempty = np.asarray(lengths_of(layout)) > 0
    for name, got in calls.items():
        actual = bench.lib.read(got.values if isinstance(got, scree.Array) else got)
        actual = actual[is_nonempty] if actual.shape[:1] == is_nonempty.shape else actual
        assert np.isfinite(actual).all(), f"{name} overflows"
