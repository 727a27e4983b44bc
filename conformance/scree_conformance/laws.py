"""Laws of every operation: rows are isolated, empty rows have values, equal rows act as dense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import scree

from .backends import EPS, HALF
from .bench import FACTOR, Bench
from .layouts import EMPTY, Layout, lengths_of
from .table import DTYPES, Absent, operation

# --------------------------------------------------------------------------------------- empty rows
#: Reduction -> its value for an empty row of floating-point numbers.
NOTHING: dict[str, Any] = {
    "sum": 0, "prod": 1, "all": True, "any": False, "max": -math.inf, "min": math.inf,
    "mean": math.nan, "var": math.nan,
    "std": math.nan, "count_nonzero": 0,
}  # fmt: skip


@operation("law: empty rows", EMPTY, ("float32", "int32", "float16", "bfloat16", "int8", "uint8"))
def empty_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """The values of empty rows are equal to the table of the design on every library."""
    x = bench.ragged(layout, (3,), dtype, "natural")
    empty = np.asarray(lengths_of(layout)) == 0
    for name, value in NOTHING.items():
        if dtype not in DTYPES and name in ("max", "min"):
            info = np.iinfo(dtype)
            value = info.min if name == "max" else info.max
        for keepdims in (False, True):
            got = bench.read(getattr(bench.xp, name)(x.x, axis=1, keepdims=keepdims))
            np.testing.assert_array_equal(
                got[empty], np.full((int(empty.sum()), *got.shape[1:]), value), err_msg=name
            )
    if dtype not in DTYPES:
        return
    lse = bench.read(bench.xp.ragged.logsumexp(x.x))
    np.testing.assert_array_equal(lse[empty], np.full((int(empty.sum()), 3), -math.inf))
    assert bench.xp.ragged.softmax(x.x).shape == x.x.shape
    q = bench.ragged([2] * len(empty), (2, 4), dtype)
    k = bench.ragged(layout, (2, 4), dtype)
    out, logs = bench.xp.ragged.attention(q.x, k.x, k.x, return_lse=True)
    for i in np.flatnonzero(empty):
        assert (bench.rows(out)[i] == 0).all(), "attention to an empty row is not 0"
        assert (bench.rows(logs)[i] == -math.inf).all(), "its log-sum-exp is not -inf"


@operation("law: nothing at all", ("all_empty", "no_rows"), ("float32",))
def nothing(bench: Bench, layout: Layout, dtype: str) -> None:
    """A full reduction of an array without tokens has the value of an empty row."""
    x = bench.ragged(layout, (3,), dtype)
    for name, value in NOTHING.items():
        np.testing.assert_array_equal(bench.read(getattr(bench.xp, name)(x.x)), value, err_msg=name)
        got = bench.read(getattr(bench.xp, name)(x.x, axis=(0, 1)))
        np.testing.assert_array_equal(got, np.full(3, value), err_msg=name)


# ---------------------------------------------------------------------------------------- isolation
def _attention(options: dict[str, Any]) -> Callable[[Any, scree.Array], Any]:
    return lambda xp, x: xp.ragged.attention(x, x, x, return_lse=True, **options)


ISOLATED: dict[str, Callable[[Any, scree.Array], Any]] = {
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
def isolated(bench: Bench, layout: Layout, dtype: str) -> None:
    """NaN and infinity in one row leave every other row unchanged, bit for bit."""
    lengths = lengths_of(layout)
    x = bench.ragged(layout, (2, 4), dtype)
    whole = np.concatenate(x.exact)
    ends = np.cumsum(lengths)
    filled = [i for i, length in enumerate(lengths) if length]
    for name, call in ISOLATED.items():
        clean = [bench.read(part) for part in _parts(call(bench.xp, x.x))]
        for poison, bad in (
            (math.nan, filled[len(filled) // 2]),
            (math.inf, filled[0]),
            (-math.inf, filled[-1]),
        ):
            values = whole.copy()
            values[ends[bad] - lengths[bad] : ends[bad]] = poison
            y = bench.of(bench.lib.make(values, dtype), lengths)
            for part, result in zip(clean, _parts(call(bench.xp, y.x)), strict=True):
                for i, (a, b) in enumerate(zip(part, bench.read(result), strict=True)):
                    if i != bad:
                        np.testing.assert_array_equal(
                            b, a, err_msg=f"{name}: {poison} in row {bad} reached row {i}"
                        )


def _parts(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


@operation("law: NaN is not lost", ("empty_between", "blocks"), DTYPES)
def not_lost(bench: Bench, layout: Layout, dtype: str) -> None:
    """NaN in one token reaches every result that depends on the whole row."""
    lengths = lengths_of(layout)
    bad = int(np.argmax(lengths))
    whole = np.concatenate(bench.ragged(layout, (2, 4), dtype).exact)
    whole[int(np.sum(lengths[:bad])) + 1] = math.nan
    x = bench.of(bench.lib.make(whole, dtype), lengths).x
    for name in ("sum", "max", "mean", "std", "softmax", "log_softmax", "logsumexp", "attention"):
        for result in _parts(ISOLATED[name](bench.xp, x)):
            assert np.isnan(bench.read(result)[bad]).all(), (
                f"{name}: the row of a NaN gives {bench.read(result)[bad]}"
            )


#: Indices that mean the same on a ragged array of equal rows and on the dense one.
INDICES: list[Any] = [
    np.s_[1, ...], np.s_[1:, ...], np.s_[:, 1, ...], np.s_[:, -1, ...], np.s_[:, 1:3, ...],
    np.s_[..., 0], np.s_[1:, 1:, :1],
    np.s_[:, :, 1], np.s_[:, None], np.s_[..., None], np.s_[2, 1:, 0],
]  # fmt: skip


@operation("law: equal rows are indexed as a dense array", ("plain",), ("float32",))
def equal_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """Indexing and transposing equal rows gives the same numbers as on the dense array."""
    dense = bench.dense((4, 3, 2), dtype)
    x = bench.of(bench.lib.make(dense.exact.reshape(12, 2), dtype), [3] * 4).x
    for key in INDICES:
        actual, expected = bench.read(x[key]), dense.exact[key]
        np.testing.assert_array_equal(
            np.stack(actual) if isinstance(actual, list) else actual, expected, err_msg=f"x[{key}]"
        )
    np.testing.assert_array_equal(np.stack(bench.read(x.mT)), dense.exact.swapaxes(1, 2))


# ---------------------------------------------------------------------------------------- gradients
@operation("law: gradients of nothing are 0", ("empty_between", "ones"), ("float32",))
def no_slope(bench: Bench, layout: Layout, dtype: str) -> None:
    """Gradients of roots and quotients are 0 in rows that are constant, empty or of one token."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    x, xp = bench.ragged(layout, (2,), dtype).x, bench.xp

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
    """Sums of a million numbers near 1,000 are as exact as the library's sum of each row.

    They are also as exact as NumPy's pairwise sum.
    """
    lengths = [0, 1, 250_000, 3, 0, 500_000, 33, 249_963]
    numbers = bench.rng.uniform(999, 1001, sum(lengths))
    x = bench.of(bench.lib.make(numbers, dtype), lengths)
    for name in ("sum", "mean"):
        f, plain = getattr(bench.xp, name), getattr(np, name)
        for axis, rows in ((1, list(x.exact)), (None, [np.concatenate(x.exact)])):
            got = np.atleast_1d(bench.lib.read(f(x.x, axis=axis)))
            for actual, row in zip(got, rows, strict=True):
                if row.size:
                    expected, single = plain(row), row.astype(np.float32)
                    off = max(
                        abs(plain(single) - expected),
                        abs(bench.lib.read(f(bench.lib.make(row, dtype))) - expected),
                    )
                    allowed = FACTOR * max(off, EPS[dtype] * expected)
                    assert abs(actual - expected) <= allowed, (
                        f"{name} of {row.size}: {actual}, expected {expected} +- {allowed:.3g}"
                    )


# ------------------------------------------------------------------------------------------- dtypes
@operation("law: dtypes", ("plain",), ("int32", "int8", "uint8", "float16", "bfloat16"))
def dtype_rules(bench: Bench, layout: Layout, dtype: str) -> None:
    """The mean of integers has the default floating-point dtype; half precision keeps its dtype."""
    x = bench.ragged(layout, (4,), dtype, "natural").x
    for name in ("mean", "var", "std"):
        for axis in (1, 2, None):
            got = bench.lib.dtype_name(getattr(bench.xp, name)(x, axis=axis))
            expected = dtype if dtype in HALF else bench.lib.default_float
            assert got == expected, f"{name}, axis={axis}: expected {expected}, got {got}"
    if dtype in HALF:
        q = bench.ragged(layout, (2, 4), dtype).x
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
    """Means, deviations, norms and attention stay finite where ``|x|`` is near 300.

    Squares and sums of these numbers exceed the range of float16.
    """
    x = bench.ragged(layout, (4,), dtype, "large").x
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
    twice = xp.concat([x, x], axis=1)
    # The products cancel: every result is 0.
    calls["vecdot"] = xp.vecdot(twice, scree.align(xp.concat([x, -x], axis=1), like=twice), axis=1)
    q = x.with_values(xp.expand_dims(x.values, axis=1))
    calls["attention"] = xp.ragged.attention(q, q, q)
    filled = np.asarray(lengths_of(layout)) > 0
    for name, got in calls.items():
        actual = bench.lib.read(got.values if isinstance(got, scree.Array) else got)
        actual = actual[filled] if actual.shape[:1] == filled.shape else actual
        assert np.isfinite(actual).all(), f"{name} overflows"
