"""Cases of products and norms: tokens times matrices, and functions of one matrix per token.

The matrix is shared by all rows, or there is one per row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import oracle
from .backends import HALF
from .bench import Bench, Data
from .layouts import ALL, EMPTY, SHORT, Layout, lengths_of
from .table import DTYPES, operation


def _rough(bench: Bench, dtype: str, truth: Callable[..., Any]) -> Any:
    """Return a reference that rounds the result.

    Some libraries round products of half precision once, some round partial products too.
    """
    if dtype not in HALF:
        return None

    def rough(*args: Any) -> Any:
        result = truth(*args)
        rounded = oracle.rounded(dtype)
        return (
            [rounded(np.asarray(row)) for row in result]
            if isinstance(result, list)
            else rounded(np.asarray(result))
        )

    return rough


@operation("matmul linalg.matmul: one matrix a row", ALL)
def grouped(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every row times its own matrix; every token times a vector."""
    n = len(lengths_of(layout))
    x = bench.ragged(layout, (4,), dtype)
    calls = [bench.xp.matmul, bench.xp.linalg.matmul, lambda a, b: a @ b]
    for shape in ((n, 4, 3), (4,)):
        truth = oracle.each(lambda row, m: row @ m)
        for f in calls:
            bench.check(
                f,
                truth,
                x,
                bench.dense(shape, dtype),
                rough=_rough(bench, dtype, truth),
                note=f"{shape}: ",
            )


@operation("vecdot linalg.vecdot", ALL, (*DTYPES, "int32"))
def vecdot(bench: Bench, layout: Layout, dtype: str) -> None:
    """Within rows and along elements, with ragged and dense vectors on either side."""
    draw = "integer" if dtype == "int32" else "any"
    functions = [bench.xp.vecdot, bench.xp.linalg.vecdot]
    out = bench.lib.dtype_name(bench.xp.vecdot(*[bench.lib.make(np.ones(2), dtype)] * 2))
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, draw, dim)
        y = bench.like(x, (3,), dtype, draw)
        for f in functions:

            def inner(a: Any, b: Any) -> list[np.ndarray]:
                return [(p * q).sum(1 - dim) for p, q in zip(a, b, strict=True)]

            bench.check(
                lambda a, b: f(a, b, axis=1 - dim - 2),
                inner,
                x,
                y,
                dtype=out,
                rough=_rough(bench, dtype, inner),
                note=f"{dim}, elements: ",
            )
            token = np.zeros((0, 3) if not dim else (3, 0))
            along = lambda a, b: (  # noqa: E731
                np.stack([(p * q).sum(dim) for p, q in zip(a, b, strict=True)])
                if len(a)
                else np.zeros((0, *token.sum(dim).shape))
            )
            bench.check(
                lambda a, b: f(a, b, axis=dim - 2),
                along,
                x,
                y,
                dtype=out,
                orders=1,
                rough=_rough(bench, dtype, along),
                note=f"{dim}, tokens: ",
            )
    x, v = bench.ragged(layout, (3,), dtype, draw), bench.dense((3,), dtype, draw)
    token_by_vector, left = oracle.each(lambda row, v: row @ v), lambda v, a: [row @ v for row in a]
    bench.check(
        bench.xp.vecdot,
        token_by_vector,
        x,
        v,
        dtype=out,
        rough=_rough(bench, dtype, token_by_vector),
        note="dense second: ",
    )
    bench.check(
        bench.xp.vecdot,
        left,
        v,
        x,
        dtype=out,
        rough=_rough(bench, dtype, left),
        note="dense first: ",
    )
    if dtype == "float32":
        z, w = (bench.ragged(layout, (3,), "complex64", "complex") for _ in "ab")
        w = Data(z.x.with_values(w.x.values), w.exact)
        bench.check(
            bench.xp.vecdot,
            lambda a, b: [np.sum(np.conj(p) * q, axis=1) for p, q in zip(a, b, strict=True)],
            z,
            w,
            rough=lambda a, b: [
                np.sum(np.conj(p) * q, axis=1) * (1 + 1e-6) for p, q in zip(a, b, strict=True)
            ],
        )


@operation("tensordot linalg.tensordot", ALL)
def tensordot(bench: Bench, layout: Layout, dtype: str) -> None:
    """The last element axes against the first axes of a dense array."""
    x = bench.ragged(layout, (2, 3), dtype)
    functions = [bench.xp.tensordot, bench.xp.linalg.tensordot]
    for axes, shape in ((1, (3, 4)), (2, (2, 3, 4)), (2, (2, 3)), (0, (2,))):
        truth = oracle.each(lambda row, m: np.tensordot(row, m, axes=axes))
        only = lambda a, m: [np.tensordot(row, m, axes=axes) for row in a]  # noqa: E731
        for f in functions:
            bench.check(
                lambda a, m: f(a, m, axes=axes),
                only,
                x,
                bench.dense(shape, dtype),
                rough=_rough(bench, dtype, truth),
                note=f"axes={axes}, {shape}: ",
            )


@operation("linalg.vector_norm", ALL)
def norms(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every order, along tokens, elements and both."""
    f = bench.xp.linalg.vector_norm
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, dim=dim)
        ragged, element = dim + 1, 2 - dim
        for axis, keepdims in (
            (ragged, False),
            (ragged, True),
            (element, False),
            (element, True),
            ((1, 2), False),
            (None, False),
        ):
            for order in (
                (2, 1, np.inf, -np.inf, 0, 3) if axis == dim + 1 and not keepdims else (2, np.inf)
            ):
                axes = (0, 1, 2) if axis is None else tuple(np.atleast_1d(axis).tolist())
                if (
                    order == np.inf
                    and dim + 1 in axes
                    and 0 in lengths_of(layout) + ([0] if not lengths_of(layout) else [])
                ):
                    continue  # see the operation below
                inner = tuple(a - 1 for a in axes if a)

                def one(row: np.ndarray) -> np.ndarray:
                    return _norm(row, order, inner, keepdims)

                def truth(rows: Any) -> Any:
                    if axis is None:
                        return one(np.concatenate([rows.template, *rows], axis=dim))
                    return rows.stack(one) if dim + 1 in axes else [one(row) for row in rows]

                bench.check(
                    lambda a: f(a, axis=axis, keepdims=keepdims, ord=order),
                    truth,
                    x,
                    rough=_rough(bench, dtype, truth),
                    orders=32 if dim + 1 in axes and dtype not in HALF else 1,
                    note=f"{dim}, axis={axis}, keepdims={keepdims}, ord={order}: ",
                )


def _norm(row: np.ndarray, order: float, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    size = np.abs(row)
    with np.errstate(all="ignore"):
        if order == np.inf:
            return np.max(size, axis=axis, keepdims=keepdims, initial=0)
        if order == -np.inf:
            return np.min(size, axis=axis, keepdims=keepdims, initial=np.inf)
        if order == 0:
            return np.sum(size != 0, axis=axis, keepdims=keepdims).astype(row.dtype)
        if row.dtype == np.float64:  # the truth: pairwise, which is more exact
            total = np.sum(size**order, axis=axis, keepdims=keepdims)
        else:
            total = oracle.reduce_array("sum", size**order, axis, keepdims)
        return np.asarray(total ** (1 / row.dtype.type(order)))


@operation("linalg.vector_norm: nothing", EMPTY, ("float32",))
def norm_of_nothing(bench: Bench, layout: Layout, dtype: str) -> None:
    """A vector without entries has the norm 0 in every order, except infinity as a minimum."""
    x = bench.ragged(layout, (3,), dtype)
    empty = np.asarray(lengths_of(layout), int) == 0
    for order in (1, 2, 3, 0, np.inf):
        for axis in (1, (1, 2)):
            got = bench.lib.read(bench.xp.linalg.vector_norm(x.x, axis=axis, ord=order))
            np.testing.assert_array_equal(
                got[empty], np.zeros_like(got[empty]), err_msg=f"ord={order}, axis={axis}"
            )


# ----------------------------------------------------------------------------------------- matrices
def _spd(m: np.ndarray) -> np.ndarray:
    return m @ m.swapaxes(-1, -2) + 4 * np.eye(m.shape[-1])


#: Function of a matrix -> NumPy's.
MATRICES: dict[str, Callable[..., Any]] = {
    **{name: getattr(np.linalg, name) for name in (
        "cholesky", "det", "diagonal", "eigvalsh", "inv", "matrix_norm", "matrix_rank", "pinv",
        "slogdet", "svdvals", "trace")},
    "tril": np.tril, "triu": np.triu,
}  # fmt: skip
#: Function whose factors are not unique -> the matrix again, of the dense factors.
FACTORS: dict[str, Callable[..., Any]] = {
    "eig": lambda xp, w, v: xp.matmul(
        xp.real(v) * xp.real(w)[..., None, :], xp.matrix_transpose(xp.real(v))
    ),
    "eigh": lambda xp, w, v: xp.matmul(v * w[..., None, :], xp.matrix_transpose(v)),
    "qr": lambda xp, q, r: xp.matmul(q, r),
    "svd": lambda xp, u, s, v: xp.matmul(u, s[..., None] * v),
}
#: What is called another way: (of the namespace and a ragged array, of a row).
OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eigvals": (
        lambda xp, x: xp.sort(xp.real(xp.linalg.eigvals(x)), axis=-1),
        np.linalg.eigvalsh,
    ),  # eigenvalues have no defined order
    "matrix_power": (
        lambda xp, x: xp.linalg.matrix_power(x, 3),
        lambda m: np.linalg.matrix_power(m, 3),
    ),
    "solve": (
        lambda xp, x: xp.linalg.solve(x, x.with_values(xp.matmul(x.values, x.values))),
        lambda m: m,
    ),
}


def of_matrices(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The function of the matrix of each token, against NumPy's function on each row.

    The array is (n, None, 3, 3); its matrices are symmetric and positive definite.
    """
    home = bench.xp if name in ("tril", "triu") else bench.xp.linalg
    raw = bench.ragged(layout, (3, 3), dtype)
    exact = _spd(np.concatenate([raw.exact.template, *raw.exact]))
    x = bench.of(bench.lib.make(exact, dtype), lengths_of(layout))
    if name in FACTORS:
        factors = getattr(home, name)(x.x)
        got, expected = (
            x.x.with_values(FACTORS[name](bench.xp, *(part.values for part in factors))),
            list(x.exact),
        )
    else:
        call, plain = OTHERS.get(name) or (lambda xp, x: getattr(home, name)(x), MATRICES[name])
        got, expected = call(bench.xp, x.x), list(map(plain, x.exact))
    several = isinstance(got, tuple)
    parts, truths = (
        (got, [[row[i] for row in expected] for i in range(len(got))])
        if several
        else ((got,), [expected])
    )
    for part, truth in zip(parts, truths, strict=True):
        rows = bench.rows(part)
        assert len(rows) == len(truth)
        assert bench.lib.dtype_name(part) in (dtype, bench.lib.default_integer), (
            f"dtype {bench.lib.dtype_name(part)}"
        )
        for f, t in zip(rows, truth, strict=True):
            assert f.shape == np.shape(t), f"expected shape {np.shape(t)}, got {f.shape}"
            np.testing.assert_allclose(
                f,
                t,
                rtol=1e-3 if dtype == "float32" else 1e-9,
                atol=1e-3 if dtype == "float32" else 1e-9,
            )


for _name in (*MATRICES, *FACTORS, *OTHERS):
    _word = _name if _name in ("tril", "triu") else f"linalg.{_name}"
    operation(_word, SHORT, ("float32", "float64"))(partial(of_matrices, name=_name))
