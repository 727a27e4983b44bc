"""What holds for every operation: rows never touch each other, empty rows have values, equal rows are a dense array."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import scree

from .backends import HALF
from .bench import Bench
from .layouts import EMPTY, Layout, lengths_of
from .table import DTYPES, operation

# ------------------------------------------------------------------------------------------------- empty rows
#: Reduction -> its value for an empty row of floating-point numbers.
NOTHING: dict[str, Any] = {
    "sum": 0, "prod": 1, "all": True, "any": False, "max": -math.inf, "min": math.inf, "mean": math.nan, "var": math.nan,
    "std": math.nan, "count_nonzero": 0,
}  # fmt: skip


@operation("law: empty rows", EMPTY, ("float32", "int32", "float16", "bfloat16", "int8", "uint8"))
def empty_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """The table of the design, the same on every library."""
    x = bench.ragged(layout, (3,), dtype, "natural")
    empty = np.asarray(lengths_of(layout)) == 0
    for name, value in NOTHING.items():
        if dtype not in DTYPES and name in ("max", "min"):
            info = np.iinfo(dtype)
            value = info.min if name == "max" else info.max
        for keepdims in (False, True):
            got = bench.read(getattr(bench.xp, name)(x.x, axis=1, keepdims=keepdims))
            np.testing.assert_array_equal(got[empty], np.full((int(empty.sum()), *got.shape[1:]), value), err_msg=name)
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
    """A reduction over the whole of an array without tokens has the values of an empty row."""
    x = bench.ragged(layout, (3,), dtype)
    for name, value in NOTHING.items():
        np.testing.assert_array_equal(bench.read(getattr(bench.xp, name)(x.x)), value, err_msg=name)
        got = bench.read(getattr(bench.xp, name)(x.x, axis=(0, 1)))
        np.testing.assert_array_equal(got, np.full(3, value), err_msg=name)


# ------------------------------------------------------------------------------------------------- isolation
def _attention(options: dict[str, Any]) -> Callable[[Any, scree.Array], Any]:
    return lambda xp, x: xp.ragged.attention(x, x, x, return_lse=True, **options)


ISOLATED: dict[str, Callable[[Any, scree.Array], Any]] = {
    **{name: (lambda xp, x, name=name: getattr(xp, name)(x, axis=1))
       for name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "cumulative_sum", "cumulative_prod")},
    "sum of elements": lambda xp, x: xp.sum(x, axis=-1),
    "softmax": lambda xp, x: xp.ragged.softmax(x),
    "log_softmax": lambda xp, x: xp.ragged.log_softmax(x),
    "logsumexp": lambda xp, x: xp.ragged.logsumexp(x),
    "rms_norm": lambda xp, x: xp.ragged.rms_norm(x),
    "layer_norm": lambda xp, x: xp.ragged.layer_norm(x),
    "rope": lambda xp, x: xp.ragged.rope(x),
    "attention": _attention({}),
    "attention causal": _attention({"causal": True}),
    "attention window": _attention({"window": (2, 2)}),
    "concat": lambda xp, x: xp.concat([x, x], axis=1),
    "scan with initial": lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True),
}  # fmt: skip


@operation("law: rows are isolated", ("blocks", "one_long", "empty_between"), ("float32", "float16", "bfloat16"))
def isolated(bench: Bench, layout: Layout, dtype: str) -> None:
    """NaN and infinity in one row leave every other row as it was, to the bit."""
    lengths = lengths_of(layout)
    x = bench.ragged(layout, (2, 4), dtype)
    whole = np.concatenate(x.exact)
    ends = np.cumsum(lengths)
    filled = [i for i, length in enumerate(lengths) if length]
    for name, call in ISOLATED.items():
        clean = [bench.read(part) for part in _parts(call(bench.xp, x.x))]
        for poison, bad in ((math.nan, filled[len(filled) // 2]), (math.inf, filled[0]), (-math.inf, filled[-1])):
            values = whole.copy()
            values[ends[bad] - lengths[bad] : ends[bad]] = poison
            y = bench.of(bench.lib.make(values, dtype), lengths)
            for part, found in zip(clean, _parts(call(bench.xp, y.x)), strict=True):
                for i, (a, b) in enumerate(zip(part, bench.read(found), strict=True)):
                    if i != bad:
                        np.testing.assert_array_equal(b, a, err_msg=f"{name}: {poison} in row {bad} reached row {i}")


def _parts(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


# ------------------------------------------------------------------------------------------------ equal rows
N, LENGTH, WIDTH = 4, 4, 2

#: Calls that mean the same on a ragged array of equal rows (4, 4, 2) and on the dense one; `other` is another such array.
EQUAL: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{f"{name} {axis} {keep}": (
        lambda xp, x, other, name=name, axis=axis, keep=keep: getattr(xp, name)(x, axis=axis, keepdims=keep))
       for name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "count_nonzero")
       for axis in (1, 2, -1, None, (0, 1), (1, 2), (0, 1, 2)) for keep in (False, True)},
    **{f"{name} {axis} {initial}": (
        lambda xp, x, other, name=name, axis=axis, initial=initial: getattr(xp, name)(x, axis=axis, include_initial=initial))
       for name in ("cumulative_sum", "cumulative_prod") for axis in (1, 2, -2) for initial in (False, True)},
    **{f"var {c}": (lambda xp, x, other, c=c: xp.var(x, axis=1, correction=c)) for c in (1, 2.0)},
    **{f"concat {axis}": (lambda xp, x, other, axis=axis: xp.concat([x, other], axis=axis)) for axis in (0, 1, 2, -1, -2)},
    **{f"stack {axis}": (lambda xp, x, other, axis=axis: xp.stack([x, other], axis=axis)) for axis in (1, 2, 3, -1)},
    "add": lambda xp, x, other: x + other,
    "where": lambda xp, x, other: xp.where(x > other, x, other),
    "maximum": lambda xp, x, other: xp.maximum(x, other),
    "clip": lambda xp, x, other: xp.clip(x, -1, 2),
    "astype": lambda xp, x, other: xp.astype(x, xp.int32),
    "zeros_like": lambda xp, x, other: xp.zeros_like(x),
    "full_like": lambda xp, x, other: xp.full_like(x, 3),
    "mT": lambda xp, x, other: x.mT,
    "x[1]": lambda xp, x, other: x[1, ...],
    "x[1:]": lambda xp, x, other: x[1:, ...],
    "x[::-1]": lambda xp, x, other: x[::-1, ...],
    "x[:, 1]": lambda xp, x, other: x[:, 1, ...],
    "x[:, -1]": lambda xp, x, other: x[:, -1, ...],
    "x[:, 1:3]": lambda xp, x, other: x[:, 1:3, ...],
    "x[..., 0]": lambda xp, x, other: x[..., 0],
    "x[1:, 1:, :1]": lambda xp, x, other: x[1:, 1:, :1],
}  # fmt: skip
#: What the standard has for some dtypes only.
FLOATING = ("mean", "var", "std")
SQUARED = ("var", "std")  # dense libraries may square in half precision, or update a mean as they go


@operation("law: equal rows are a dense array", ("plain",), (*DTYPES, "int32", "int8"))
def equal_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """The same result with the same dtype, to the bit: sums and means of these numbers are exact."""
    numbers = bench.rng.integers(-3, 4, (2, N, LENGTH, WIDTH))
    dense, more = (bench.lib.make(x, dtype) for x in numbers)
    first = bench.of(bench.lib.make(numbers[0].reshape(N * LENGTH, WIDTH), dtype), [LENGTH] * N)
    second = first.x.with_values(bench.lib.make(numbers[1].reshape(N * LENGTH, WIDTH), dtype))
    for name, call in EQUAL.items():
        if dtype not in DTYPES and name.startswith(FLOATING):
            continue
        try:
            right = call(bench.xp, dense, more)
        except ValueError:
            assert name == "x[::-1]", name  # torch takes no negative steps
            continue
        got = call(bench.xp, first.x, second)
        assert got.dtype == right.dtype, f"{name}: expected dtype {right.dtype}, got {got.dtype}"
        found, truth = bench.read(got), bench.read(right)
        if isinstance(got, scree.Array):
            assert got.ndim == right.ndim, f"{name}: expected {right.ndim} axes, got shape {got.shape}"
            found = np.stack(found)
        assert found.shape == truth.shape, f"{name}: expected shape {truth.shape}, got {found.shape}"
        if not name.startswith(SQUARED):
            np.testing.assert_array_equal(found, truth, err_msg=name)


@operation("law: dtypes", ("plain",), ("int32", "int8", "uint8", "float16", "bfloat16"))
def dtype_rules(bench: Bench, layout: Layout, dtype: str) -> None:
    """The mean of integers has the default floating-point dtype; half precision keeps its own everywhere."""
    x = bench.ragged(layout, (4,), dtype, "natural").x
    for name in ("mean", "var", "std"):
        for axis in (1, 2, None):
            got = bench.lib.dtype_name(getattr(bench.xp, name)(x, axis=axis))
            expected = dtype if dtype in HALF else bench.lib.default_float
            assert got == expected, f"{name}, axis={axis}: expected {expected}, got {got}"
    if dtype in HALF:
        q = bench.ragged(layout, (2, 4), dtype).x
        for f in (bench.xp.exp, bench.xp.ragged.softmax, bench.xp.ragged.logsumexp, bench.xp.ragged.rms_norm, bench.xp.ragged.rope,
                  lambda a: bench.xp.ragged.attention(a, a, a), lambda a: bench.xp.cumulative_sum(a, axis=1)):
            assert bench.lib.dtype_name(f(q)) == dtype


@operation("law: half precision does not overflow", ("one_long",), HALF)
def no_overflow(bench: Bench, layout: Layout, dtype: str) -> None:
    """|x| is near 300: squares and sums are beyond float16, means, deviations, norms and attention are not."""
    x = bench.ragged(layout, (4,), dtype, "large").x
    xp = bench.xp
    magnitude = xp.abs(x)
    calls: dict[str, Any] = {
        "mean": xp.mean(magnitude, axis=1), "mean of all": xp.mean(magnitude), "mean of elements": xp.mean(magnitude, axis=2),
        "std": xp.std(x, axis=1), "std of all": xp.std(x), "std of elements": xp.std(x, axis=2),
        "softmax": xp.ragged.softmax(x), "log_softmax": xp.ragged.log_softmax(x), "logsumexp": xp.ragged.logsumexp(x),
        "rms_norm": xp.ragged.rms_norm(x), "layer_norm": xp.ragged.layer_norm(x), "rope": xp.ragged.rope(x),
    }  # fmt: skip
    q = x.with_values(xp.expand_dims(x.values, axis=1))
    calls["attention"] = xp.ragged.attention(q, q, q)
    filled = np.asarray(lengths_of(layout)) > 0
    for name, got in calls.items():
        found = bench.lib.read(got.values if isinstance(got, scree.Array) else got)
        found = found[filled] if found.shape[:1] == filled.shape else found
        assert np.isfinite(found).all(), f"{name} overflows"
