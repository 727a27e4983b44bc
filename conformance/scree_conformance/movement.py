"""The functions of the standard that look for, sort, move and multiply tokens: NumPy's own on each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import scree

from . import oracle
from .bench import Bench
from .layouts import ALL, Layout, lengths_of
from .oracle import Rows
from .table import DTYPES, operation

Rule = tuple[Callable[[Any, Any], Any], Callable[[np.ndarray], np.ndarray]]


def _best(name: str) -> Callable[[np.ndarray], np.ndarray]:
    f = getattr(np, name)
    return lambda row: f(row, axis=0) if row.shape[0] else np.full(row.shape[1:], -1)


def _sort(row: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    return np.take_along_axis(row, _argsort(row, axis, descending), axis=axis)


def _argsort(row: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    if descending:
        last = row.shape[axis] - 1
        return np.flip(last - np.argsort(np.flip(row, axis), axis=axis, kind="stable"), axis)
    return np.argsort(row, axis=axis, kind="stable")


#: Operation -> rules; each says the call on a ragged array (n, None, 3), and the same on one row (length, 3).
EACH: dict[str, list[Rule]] = {
    "sort": [
        (lambda xp, x, a=a, d=d: xp.sort(x, axis=a + 1, descending=d), lambda row, a=a, d=d: _sort(row, a, d))
        for a in (0, 1) for d in (False, True)
    ],
    "argsort": [
        (lambda xp, x, a=a, d=d: xp.argsort(x, axis=a + 1, descending=d), lambda row, a=a, d=d: _argsort(row, a, d))
        for a in (0, 1) for d in (False, True)
    ],
    "argmax": [(lambda xp, x: xp.argmax(x, axis=2), lambda row: np.argmax(row, axis=1)),
               (lambda xp, x: xp.argmax(x, axis=-1, keepdims=True), lambda row: np.argmax(row, axis=1, keepdims=True))],
    "argmin": [(lambda xp, x: xp.argmin(x, axis=2), lambda row: np.argmin(row, axis=1))],
    "flip": [(lambda xp, x: xp.flip(x, axis=1), lambda row: row[::-1]),
             (lambda xp, x: xp.flip(x, axis=2), lambda row: row[:, ::-1]),
             (lambda xp, x: xp.flip(x, axis=(1, 2)), lambda row: row[::-1, ::-1])],
    "roll": [(lambda xp, x, s=s: xp.roll(x, s, axis=1), lambda row, s=s: np.roll(row, s, axis=0)) for s in (1, -2, 70)]
            + [(lambda xp, x: xp.roll(x, 1, axis=2), lambda row: np.roll(row, 1, axis=1)),
               (lambda xp, x: xp.roll(x, (1, 2), axis=(1, 2)), lambda row: np.roll(row, (1, 2), axis=(0, 1)))],
    "repeat": [(lambda xp, x: xp.repeat(x, 2, axis=1), lambda row: np.repeat(row, 2, axis=0)),
               (lambda xp, x: xp.repeat(x, 2, axis=2), lambda row: np.repeat(row, 2, axis=1))],
    "tile": [(lambda xp, x: xp.tile(x, (1, 2, 1)), lambda row: np.tile(row, (2, 1))),
             (lambda xp, x: xp.tile(x, (2,)), lambda row: np.tile(row, (1, 2)))],
    "diff": [(lambda xp, x, n=n: xp.diff(x, axis=1, n=n), lambda row, n=n: np.diff(row, axis=0, n=n) if len(row) else row)
             for n in (1, 2)] + [(lambda xp, x: xp.diff(x, axis=2), lambda row: np.diff(row, axis=1))],
    "expand_dims squeeze": [
        (lambda xp, x: xp.expand_dims(x, axis=1), lambda row: row[None]),
        (lambda xp, x: xp.expand_dims(x, axis=2), lambda row: row[:, None]),
        (lambda xp, x: xp.expand_dims(x, axis=-1), lambda row: row[..., None]),
        (lambda xp, x: xp.squeeze(xp.expand_dims(x, axis=2), axis=2), lambda row: row),
    ],
    "permute_dims moveaxis matrix_transpose": [
        (lambda xp, x: xp.permute_dims(x, (0, 2, 1)), lambda row: row.T),
        (lambda xp, x: xp.moveaxis(x, 1, 2), lambda row: row.T),
        (lambda xp, x: xp.matrix_transpose(x), lambda row: row.T),
    ],
    "reshape": [
        (lambda xp, x: xp.reshape(x, (x.batch_size, None, 3, 1)), lambda row: row.reshape(-1, 3, 1)),
        (lambda xp, x: xp.reshape(xp.reshape(x, (-1, None, 1, 3)), (-1, None, 3)), lambda row: row),
    ],
    "broadcast_to broadcast_arrays": [
        (lambda xp, x: xp.broadcast_to(x[..., :1], (x.batch_size, None, 4)), lambda row: np.broadcast_to(row[:, :1], (len(row), 4))),
        (lambda xp, x: xp.broadcast_arrays(x, x[..., :1])[1], lambda row: np.broadcast_to(row[:, :1], row.shape)),
    ],
    "isin": [(lambda xp, x: xp.isin(x, xp.astype(xp.asarray([0, 2, 5]), x.dtype)), lambda row: np.isin(row, [0, 2, 5]))],
    "searchsorted": [(lambda xp, x: xp.searchsorted(xp.astype(xp.asarray([0, 2, 5]), x.dtype), x, side="right"),
                      lambda row: np.searchsorted([0, 2, 5], row, side="right"))],
    "unstack": [(lambda xp, x: xp.unstack(x, axis=2)[1], lambda row: row[:, 1])],
    "tril triu": [
        (lambda xp, x: xp.tril(xp.expand_dims(x, axis=2)), lambda row: np.tril(row[:, None])),
        (lambda xp, x: xp.triu(xp.expand_dims(x, axis=3), k=-1), lambda row: np.triu(row[..., None], k=-1)),
    ],
}  # fmt: skip


def moving(rules: list[Rule]) -> Callable[[Bench, str, str], None]:
    """The check of functions that make no rounding errors."""

    def check(bench: Bench, layout: Layout, dtype: str) -> None:
        for i, (call, row) in enumerate(rules):
            x = bench.ragged(layout, (3,), dtype, "natural")
            got = call(bench.xp, x.x)
            bench.close(got, [row(one) for one in x.exact], note=f"rule {i}: ")

    return check


for _name, _rules in EACH.items():
    operation(_name, ALL, ("int32", "float32"))(moving(_rules))


@operation("argmax argmin", ALL, ("int32", "float32", "bfloat16"))
def best(bench: Bench, layout: Layout, dtype: str) -> None:
    """The position in the row of the first best token, -1 for an empty row; NaN comes first."""
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", dim)
        rows = Rows((np.moveaxis(row, dim, 0) for row in x.exact), np.moveaxis(x.exact.template, dim, 0))
        for name in ("argmax", "argmin"):
            bench.close(getattr(bench.xp, name)(x.x, axis=dim + 1), rows.stack(_best(name)), note=f"{name}, ragged_dim={dim}: ")
    if dtype == "float32":
        x = bench.ragged(layout, (), dtype, "special")
        bench.close(bench.xp.argmax(x.x, axis=1), x.exact.stack(_best("argmax")), note="argmax of NaN and infinity: ")


@operation("rows: flip roll repeat tile unstack", ALL, ("float32",))
def whole_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """Axis 0 moves whole rows."""
    x, xp = bench.ragged(layout, (3,), dtype), bench.xp
    rows, n = list(x.exact), len(lengths_of(layout))
    bench.close(xp.flip(x.x, axis=0), rows[::-1])
    bench.close(xp.flip(x.x), [row[::-1, ::-1] for row in rows[::-1]])
    bench.close(xp.roll(x.x, 1, axis=0), [rows[i - 1] for i in range(n)])
    bench.close(xp.repeat(x.x, 2, axis=0), [row for row in rows for _ in range(2)])
    bench.close(xp.tile(x.x, (2, 1, 1)), rows + rows)
    for got, row in zip(xp.unstack(x.x), rows, strict=True):
        bench.close(got, row)
    counts = [i % 3 for i in range(n)]
    times = bench.lib.make(np.asarray(counts, np.int32), "int32")
    bench.close(xp.repeat(x.x, times, axis=0), [row for row, c in zip(rows, counts, strict=True) for _ in range(c)])
    each = bench.like(x, (), "int32", "natural")
    bench.close(xp.repeat(x.x, each.x, axis=1), [np.repeat(row, c, axis=0) for row, c in zip(rows, each.exact, strict=True)])
    end = bench.ragged([1] * n, (3,), dtype)
    bench.check(lambda a, b: xp.diff(a, axis=1, prepend=b), lambda a, b: [
        np.diff(row, axis=0, prepend=one) for row, one in zip(a, b, strict=True)], x, end)


@operation("take_along_axis", ALL, ("float32", "int32"))
def along(bench: Bench, layout: Layout, dtype: str) -> None:
    """Positions within the row; with sort's own positions it sorts."""
    x = bench.ragged(layout, (3,), dtype)
    order = bench.xp.argsort(x.x, axis=1)
    bench.close(bench.xp.take_along_axis(x.x, order, axis=1), [np.sort(row, axis=0) for row in x.exact])
    last = x.x.with_values(bench.xp.zeros_like(order.values) - 1)
    bench.close(bench.xp.take_along_axis(x.x, last, axis=1), [np.repeat(row[-1:], len(row), axis=0) for row in x.exact])


def _offered(call: Callable[[], Any]) -> bool:
    """Whether the library has the function for its own dense arrays: shapes that depend on data are optional."""
    try:
        call()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@operation("nonzero unique_values unique_counts unique_inverse unique_all", ALL, ("int32", "float32"))
def sets(bench: Bench, layout: Layout, dtype: str) -> None:
    """Indices by row, position and element; distinct values of all rows together."""
    xp, x = bench.xp, bench.ragged(layout, (3,), dtype, "natural")
    dense = bench.dense((4,), dtype).x
    if _offered(lambda: xp.nonzero(dense)):
        places = [(i, *place) for i, row in enumerate(x.exact) for place in np.argwhere(row).tolist()]
        found = np.stack([bench.read(part) for part in xp.nonzero(x.x)], axis=-1)
        np.testing.assert_array_equal(found, np.asarray(places, int).reshape(-1, 3))
    if not _offered(lambda: xp.unique_values(dense)):
        return
    numbers = np.concatenate([x.exact.template, *x.exact]).ravel()
    values, counts = np.unique(numbers, return_counts=True)
    np.testing.assert_array_equal(np.sort(bench.read(xp.unique_values(x.x))), values)
    got = xp.unique_counts(x.x)
    order = np.argsort(bench.read(got.values))
    np.testing.assert_array_equal(bench.read(got.values)[order], values)
    np.testing.assert_array_equal(bench.read(got.counts)[order], counts)
    for got in (xp.unique_inverse(x.x), xp.unique_all(x.x)):
        assert isinstance(got.inverse_indices, scree.Array)
        own = bench.read(got.values)
        bench.close(got.inverse_indices, [np.argmax(own == row[..., None], axis=-1) if own.size else row for row in x.exact])


@operation("vecdot tensordot vector_norm")
def products(bench: Bench, layout: Layout, dtype: str) -> None:
    """Products along the ragged axis and element axes; norms of rows and tokens."""
    xp = bench.xp
    x = bench.ragged(layout, (3,), dtype)
    y = bench.like(x, (3,), dtype)
    half = oracle.rounded(dtype) if dtype in ("float16", "bfloat16") else None

    def add(row: np.ndarray, axis: int) -> np.ndarray:
        return np.sum(row, axis=axis)

    bench.check(lambda a, b: xp.vecdot(a, b, axis=1), lambda a, b: Rows(
        (half(p * q) if half and p.dtype == np.float32 else p * q for p, q in zip(a, b, strict=True)), a.template,
    ).stack(lambda row: add(row, 0)), x, y, note="vecdot of rows: ")
    bench.check(lambda a, b: xp.vecdot(a, b), lambda a, b: [
        (half(half(p * q).sum(-1)) if half and p.dtype == np.float32 else add(p * q, -1)) for p, q in zip(a, b, strict=True)
    ], x, y, note="vecdot of tokens: ")
    matrix = bench.dense((3, 4), dtype)
    bench.check(lambda a, b: xp.tensordot(a, b, axes=1), lambda a, b: [
        half(row @ b) if half and row.dtype == np.float32 else row @ b for row in a], x, matrix, note="tensordot: ")
    for order in (2, 1, math.inf):
        bench.check(lambda a: xp.linalg.vector_norm(a, axis=1, ord=order), lambda a: a.stack(
            lambda row: np.linalg.norm(row, axis=0, ord=order) if len(row) else np.full(
                row.shape[1:], -math.inf if order == math.inf else 0, row.dtype)), x, note=f"norm of rows, ord={order}: ")
        bench.check(lambda a: xp.linalg.vector_norm(a, axis=2, ord=order),
                    lambda a: [np.linalg.norm(row, axis=1, ord=order) for row in a], x, note=f"norm of tokens, ord={order}: ")


@operation("grouped matmul", ALL)
def grouped(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every row times its own matrix."""
    x, n = bench.ragged(layout, (3,), dtype), len(lengths_of(layout))
    weight = bench.dense((n, 3, 2), dtype)
    rough = None
    if dtype in ("float16", "bfloat16"):
        rounded = oracle.rounded(dtype)
        rough = lambda a, w: [rounded(row @ m) for row, m in zip(a, w, strict=True)]  # noqa: E731
    bench.check(lambda a, w: a @ w, lambda a, w: [row @ m for row, m in zip(a, w, strict=True)], x, weight, rough=rough)


_ = DTYPES
