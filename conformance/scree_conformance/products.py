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
from .bench import Bench
from .layouts import ALL, EMPTY, SHORT, Layout, lengths_of
from .oracle import Rows
from .table import DTYPES, operation


def _low_precision(dtype: str, reference: Callable[..., Any]) -> Any:
    return oracle.with_rounded_result(reference, dtype) if dtype in HALF else None


@operation("matmul linalg.matmul: one matrix per row", ALL)
def one_matrix_per_row(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every row times its own matrix; every token times a vector."""
    n = len(lengths_of(layout))
    x = bench.ragged(layout, (4,), dtype)
    calls = [*bench.functions("matmul"), lambda a, b: a @ b]
    for shape in ((n, 4, 3), (4,)):
        reference = oracle.map_rows(lambda row, m: row @ m)
        for f in calls:
            bench.check(
                f,
                reference,
                x,
                bench.dense(shape, dtype),
                low_precision=_low_precision(dtype, reference),
                note=f"{shape}: ",
            )


@operation("vecdot linalg.vecdot", ALL, (*DTYPES, "int32"))
def vecdot(bench: Bench, layout: Layout, dtype: str) -> None:
    """Within rows and along elements, with ragged and dense vectors on either side."""
    draw = "integer" if dtype == "int32" else "any"
    functions = bench.functions("vecdot")
    result_dtype = bench.lib.dtype_name(bench.xp.vecdot(*[bench.lib.make(np.ones(2), dtype)] * 2))
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, draw, ragged_dim)
        y = bench.like(x, (3,), dtype, draw)

        def along_tokens(a: Rows, b: Rows) -> np.ndarray:
            products = Rows(oracle.map_rows(np.multiply)(a, b), a.template * b.template)
            return products.stack(lambda row: row.sum(ragged_dim))

        along_elements = oracle.map_rows(lambda a, b: (a * b).sum(1 - ragged_dim))
        for f in functions:
            for axis, reference in (
                (-1 - ragged_dim, along_elements),
                (ragged_dim - 2, along_tokens),
            ):
                bench.check(
                    lambda a, b: f(a, b, axis=axis),
                    reference,
                    x,
                    y,
                    dtype=result_dtype,
                    low_precision=_low_precision(dtype, reference),
                    note=f"ragged_dim={ragged_dim}, axis={axis}: ",
                )
    x, vector = bench.ragged(layout, (3,), dtype, draw), bench.dense((3,), dtype, draw)
    products = oracle.map_rows(lambda a, b: np.sum(a * b, axis=-1))
    for operands, note in (((x, vector), "dense second: "), ((vector, x), "dense first: ")):
        bench.check(
            bench.xp.vecdot,
            products,
            *operands,
            dtype=result_dtype,
            low_precision=_low_precision(dtype, products),
            note=note,
        )
    if dtype == "float32" and "complex64" in bench.lib.dtypes:
        z = bench.ragged(layout, (3,), "complex64", "complex")
        w = bench.like(z, (3,), "complex64", "complex")
        products = oracle.map_rows(lambda a, b: np.sum(np.conj(a) * b, axis=1))
        bench.check(
            bench.xp.vecdot,
            products,
            z,
            w,
            # The oracle has no complex64; this allows a relative error of about 1e-6.
            low_precision=lambda a, b: [row * (1 + 1e-6) for row in products(a, b)],
        )


@operation("tensordot linalg.tensordot", ALL)
def tensordot(bench: Bench, layout: Layout, dtype: str) -> None:
    """The last element axes against the first axes of a dense array."""
    x = bench.ragged(layout, (2, 3), dtype)
    functions = bench.functions("tensordot")
    for axes, shape in ((1, (3, 4)), (2, (2, 3, 4)), (2, (2, 3)), (0, (2,))):
        reference = oracle.map_rows(lambda row, m: np.tensordot(row, m, axes=axes))
        for f in functions:
            bench.check(
                lambda a, m: f(a, m, axes=axes),
                reference,
                x,
                bench.dense(shape, dtype),
                low_precision=_low_precision(dtype, reference),
                note=f"axes={axes}, {shape}: ",
            )


@operation("linalg.vector_norm", ALL)
def norms(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every order, along tokens, elements and both."""
    f = bench.xp.linalg.vector_norm
    has_empty_row = 0 in (lengths_of(layout) or [0])
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim)
        token_axis, element_axis = ragged_dim + 1, 2 - ragged_dim
        for axis, keepdims in (
            (token_axis, False),
            (token_axis, True),
            (element_axis, False),
            (element_axis, True),
            ((1, 2), False),
            (None, False),
        ):
            axes = (0, 1, 2) if axis is None else tuple(np.atleast_1d(axis).tolist())
            all_orders = axis == token_axis and not keepdims
            for order in (2, 1, np.inf, -np.inf, 0, 3) if all_orders else (2, np.inf):
                # `norm_of_nothing` checks the maximum norm of empty rows.
                if order == np.inf and token_axis in axes and has_empty_row:
                    continue
                row_axes = tuple(a - 1 for a in axes if a)

                def norm_of_row(row: np.ndarray) -> np.ndarray:
                    return _norm(row, order, row_axes, keepdims)

                def reference(rows: Rows) -> Any:
                    if axis is None:
                        return norm_of_row(rows.concatenate(ragged_dim))
                    return (
                        rows.stack(norm_of_row)
                        if token_axis in axes
                        else list(map(norm_of_row, rows))
                    )

                bench.check(
                    lambda a: f(a, axis=axis, keepdims=keepdims, ord=order),
                    reference,
                    x,
                    low_precision=_low_precision(dtype, reference),
                    token_orders=32 if token_axis in axes and dtype not in HALF else 1,
                    note=f"{ragged_dim}, axis={axis}, keepdims={keepdims}, ord={order}: ",
                )


def _norm(row: np.ndarray, order: float, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    magnitude = np.abs(row)
    with np.errstate(all="ignore"):
        if order == np.inf:
            return np.max(magnitude, axis=axis, keepdims=keepdims, initial=0)
        if order == -np.inf:
            return np.min(magnitude, axis=axis, keepdims=keepdims, initial=np.inf)
        if order == 0:
            return np.sum(magnitude != 0, axis=axis, keepdims=keepdims).astype(row.dtype)
        # The expected values use pairwise summation, which is more precise.
        if row.dtype == np.float64:
            total = np.sum(magnitude**order, axis=axis, keepdims=keepdims)
        else:
            total = oracle.reduce_array("sum", magnitude**order, axis, keepdims)
        return np.asarray(total ** (1 / row.dtype.type(order)))


@operation("linalg.vector_norm: nothing", EMPTY, ("float32",))
def norm_of_nothing(bench: Bench, layout: Layout, dtype: str) -> None:
    """The norm of a vector without entries is 0 in every order except -inf."""
    x = bench.ragged(layout, (3,), dtype)
    empty = np.asarray(lengths_of(layout), int) == 0
    for order in (1, 2, 3, 0, np.inf):
        for axis in (1, (1, 2)):
            got = bench.lib.read(bench.xp.linalg.vector_norm(x.array, axis=axis, ord=order))
            np.testing.assert_array_equal(
                got[empty], np.zeros_like(got[empty]), err_msg=f"ord={order}, axis={axis}"
            )


# ----------------------------------------------------------------------------------------- matrices
def _positive_definite(m: np.ndarray) -> np.ndarray:
    return m @ m.swapaxes(-1, -2) + 4 * np.eye(m.shape[-1])


#: Function of a matrix -> NumPy's function.
MATRICES: dict[str, Callable[..., Any]] = {
    **{name: getattr(np.linalg, name) for name in (
        "cholesky", "det", "diagonal", "eigvalsh", "inv", "matrix_norm", "matrix_rank", "pinv",
        "slogdet", "svdvals", "trace")},
    "tril": np.tril, "triu": np.triu,
}  # fmt: skip
#: Function whose factors are not unique -> product of the factors, which is the matrix.
FACTORS: dict[str, Callable[..., Any]] = {
    "eig": lambda xp, w, v: xp.matmul(
        xp.real(v) * xp.real(w)[..., None, :], xp.matrix_transpose(xp.real(v))
    ),
    "eigh": lambda xp, w, v: xp.matmul(v * w[..., None, :], xp.matrix_transpose(v)),
    "qr": lambda xp, q, r: xp.matmul(q, r),
    "svd": lambda xp, u, s, v: xp.matmul(u, s[..., None] * v),
}
#: Function with other arguments or an undefined order -> (call on a ragged array, call on a row).
OTHER_CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eigvals": (lambda xp, x: xp.sort(xp.real(xp.linalg.eigvals(x)), axis=-1), np.linalg.eigvalsh),
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
    namespace = bench.xp if name in ("tril", "triu") else bench.xp.linalg
    random = bench.ragged(layout, (3, 3), dtype)
    matrices = _positive_definite(random.exact.concatenate())
    x = bench.of(bench.lib.make(matrices, dtype), lengths_of(layout))
    if name in FACTORS:
        factors = getattr(namespace, name)(x.array)
        product = FACTORS[name](bench.xp, *(factor.values for factor in factors))
        got, expected = x.array.with_values(product), list(x.exact)
    elif name in OTHER_CALLS:
        call, call_row = OTHER_CALLS[name]
        got, expected = call(bench.xp, x.array), list(map(call_row, x.exact))
    else:
        got = getattr(namespace, name)(x.array)
        expected = list(map(MATRICES[name], x.exact))
    if isinstance(got, tuple):
        parts = [(part, [row[i] for row in expected]) for i, part in enumerate(got)]
    else:
        parts = [(got, expected)]
    tolerance = 1e-3 if dtype == "float32" else 1e-9
    for part, expected_rows in parts:
        part_dtype = bench.lib.dtype_name(part)
        assert part_dtype in (dtype, bench.lib.default_integer), f"dtype {part_dtype}"
        for actual, row in zip(bench.rows(part), expected_rows, strict=True):
            assert actual.shape == np.shape(row), (
                f"expected shape {np.shape(row)}, got {actual.shape}"
            )
            np.testing.assert_allclose(actual, row, rtol=tolerance, atol=tolerance)


for _name in (*MATRICES, *FACTORS, *OTHER_CALLS):
    _qualified = _name if _name in ("tril", "triu") else f"linalg.{_name}"
    operation(_qualified, SHORT, ("float32", "float64"))(partial(of_matrices, name=_name))
