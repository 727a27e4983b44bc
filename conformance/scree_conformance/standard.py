"""Cases of the standard's functions on ragged arrays, against NumPy's functions on each row."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import oracle
from .backends import HALF
from .bench import Bench, Data
from .layouts import ALL, SHORT, Layout, lengths_of
from .oracle import Rows
from .table import DTYPES, operation

# -------------------------------------------------------------------------------------- elementwise
#: Domain -> (domains of the arguments, dtypes); function -> domain. The reference is the library's
#: own function on the same numbers without rows: scree may lose the precision that it loses.
DOMAINS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "any": (("any",), DTYPES),
    "unit": (("unit",), DTYPES),
    "above1": (("above1",), DTYPES),
    "positive": (("positive",), DTYPES),
    "special": (("special",), DTYPES),
    "number": (("any",), (*DTYPES, "int32", "int8")),
    "bits": (("integer",), ("int32", "uint8", "bool")),
    "bool": (("bool",), ("bool",)),
    "complex": (("complex",), ("complex64",)),
    "any2": (("any", "any"), DTYPES),
    "positive2": (("positive", "positive"), DTYPES),
    "number2": (("any", "any"), (*DTYPES, "int32", "int8")),
    "quotient": (("any", "positive"), DTYPES),
    "division": (("natural", "divisor"), (*DTYPES, "int32", "uint8")),
    "bits2": (("integer", "integer"), ("int32", "uint8", "bool")),
    "shift": (("natural", "natural"), ("int32", "uint8")),
    "bool2": (("bool", "bool"), ("bool",)),
    "where": (("bool", "any", "any"), DTYPES),
    "clip": (("any", "unit", "above1"), (*DTYPES, "int32")),
}  # fmt: skip

ELEMENTWISE: dict[str, str] = {
    **dict.fromkeys("asinh atan cos cosh exp expm1 sin sinh tanh reciprocal".split(), "any"),
    **dict.fromkeys("abs ceil floor negative positive round sign square trunc".split(), "number"),
    **dict.fromkeys("acos asin atanh tan".split(), "unit"),
    **dict.fromkeys("log log10 log1p log2 sqrt".split(), "positive"),
    **dict.fromkeys("isfinite isinf isnan signbit".split(), "special"),
    **dict.fromkeys("conj imag real".split(), "complex"),
    **dict.fromkeys("atan2 copysign hypot logaddexp nextafter".split(), "any2"),
    **dict.fromkeys(("add", "equal", "greater", "greater_equal", "less", "less_equal", "maximum",
                     "minimum", "multiply", "not_equal", "subtract"),
                    "number2"),
    **dict.fromkeys("logical_and logical_or logical_xor".split(), "bool2"),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor".split(), "bits2"),
    **dict.fromkeys("bitwise_left_shift bitwise_right_shift".split(), "shift"),
    **dict.fromkeys("floor_divide remainder".split(), "division"),
    "acosh": "above1", "bitwise_invert": "bits", "clip": "clip", "divide": "quotient",
    "logical_not": "bool",
    "pow": "positive2", "where": "where",
}  # fmt: skip

#: Form of the other operand -> (shape of a token, shape of the operand for n rows). The second is
#: None for a ragged operand.
FORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    "ragged": ((2,), None),
    "scalar": ((2,), "scalar"),
    "0-d": ((2,), lambda n: ()),
    "(D,)": ((2,), lambda n: (2,)),
    "(1, D)": ((2,), lambda n: (1, 2)),
    "(n, 1)": ((), lambda n: (n, 1)),
    "(n, 1, D)": ((2,), lambda n: (n, 1, 2)),
    "(n, 1, 1)": ((2,), lambda n: (n, 1, 1)),
}


def by_library(bench: Bench, f: Callable[..., Any], args: list[Any]) -> Any:
    """Return the library's own function on the tokens of all rows.

    NumPy broadcasts every operand to the tokens.
    """
    first = next(a for a in args if isinstance(a, Data) and isinstance(a.exact, Rows))
    dense = []
    for a in args:
        if not isinstance(a, Data):
            dense.append(a)
            continue
        spread = oracle.each(lambda row, x: np.broadcast_to(x, row.shape))(first.exact, a.exact)
        template = a.exact.template if isinstance(a.exact, Rows) else a.exact
        whole = np.concatenate([np.empty_like(first.exact.template, dtype=template.dtype), *spread])
        dense.append(bench.lib.make(whole, bench.lib.dtype_name(a.x)))
    return f(*dense)


def elementwise(
    bench: Bench, layout: Layout, dtype: str, *, name: str, domains: tuple[str, ...]
) -> None:
    """One function, with every form of the second operand on either side."""
    f, plain = getattr(bench.xp, name), getattr(np, name)
    forms = FORMS if len(domains) > 1 else {"ragged": FORMS["ragged"]}
    # Broadcasting of the other operand does not depend on the function.
    if bench.lib.compiles and name != "add":
        forms = {form: FORMS[form] for form in ("ragged", "(n, 1)") if form in forms}
    for form, (token, shape) in forms.items():
        first = bench.ragged(layout, token, _dtype(dtype, domains[0]), domains[0])
        rest = [_operand(bench, first, token, shape, dtype, draw) for draw in domains[1:]]
        orders = [[first, *rest]]
        if form != "ragged" and len(domains) == 2:
            orders.append(
                [
                    _operand(bench, first, token, shape, dtype, domains[0]),
                    bench.like(first, token, _dtype(dtype, domains[1]), domains[1]),
                ]
            )
        for args in orders:
            try:
                reference = by_library(bench, f, args)
            except TypeError:
                assert form == "scalar", f"{name} is not in the library"
                continue  # the library accepts no scalars here, such as array-api-strict in `where`
            got = f(*(a.x if isinstance(a, Data) else a for a in args))
            note = f"{form}, {'ragged first' if args[0] is first else 'ragged second'}: "
            bench.close(
                got,
                *_truth(bench, name, plain, args, reference, first),
                dtype=bench.lib.dtype_name(reference),
                relative=True,
                note=note,
            )


def _dtype(dtype: str, draw: str) -> str:
    return "bool" if draw == "bool" else dtype


def _operand(
    bench: Bench, first: Data, token: tuple[int, ...], shape: Any, dtype: str, draw: str
) -> Any:
    if shape is None:
        return bench.like(first, token, _dtype(dtype, draw), draw)
    if shape == "scalar":
        scalar = bench.dense((), _dtype(dtype, draw), draw).exact
        return scalar.item()
    return bench.dense(shape(first.x.batch_size), _dtype(dtype, draw), draw)


#: Functions whose result depends on the precision: the library's own result is the reference.
OWN = ("nextafter", "floor_divide", "remainder")


def _truth(
    bench: Bench, name: str, plain: Callable[..., Any], args: list[Any], reference: Any, first: Data
) -> tuple[Any, Any, Any]:
    lengths = np.cumsum([row.shape[0] for row in first.exact])[:-1]
    library = np.split(bench.lib.read(reference), lengths) if first.exact else []
    if name in OWN:
        return library, library, library
    with np.errstate(all="ignore"):
        expected = oracle.each(plain)(*(a.exact if isinstance(a, Data) else a for a in args))
    return expected, expected, library


for _name, _domain in ELEMENTWISE.items():
    _domains, _dtypes = DOMAINS[_domain]
    operation(_name, SHORT, _dtypes)(partial(elementwise, name=_name, domains=_domains))


#: Python's operators: also reflected, with scalars and dense arrays on the left.
OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("add sub mul eq ne lt le gt ge".split(), ("any", "any")),
    **dict.fromkeys("truediv pow".split(), ("positive", "positive")),
    **dict.fromkeys("floordiv mod".split(), ("natural", "divisor")),
    **dict.fromkeys("and_ or_ xor lshift rshift".split(), ("natural", "natural")),
    **dict.fromkeys("neg pos abs".split(), ("any",)),
    "invert": ("integer",),
}


@operation("operators", SHORT, ("float32", "int32"))
def operators(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every operator of the standard, ragged with ragged, and with a scalar on either side."""
    for name, draws in OPERATORS.items():
        if dtype == "float32" and name in ("and_", "or_", "xor", "lshift", "rshift", "invert"):
            continue
        if dtype == "int32" and name in ("truediv", "pow"):
            continue
        f = getattr(operator, name)
        first = bench.ragged(layout, (2,), dtype, draws[0])
        orders: list[list[Any]] = [[first]]
        if len(draws) == 2:
            scalar = bench.dense((), dtype, draws[1]).exact.item()
            orders = [
                [first, bench.like(first, (2,), dtype, draws[1])],
                [first, scalar],
                [abs(scalar) + 1, first],
            ]
            if name in ("floordiv", "mod"):
                orders[2] = [scalar, bench.like(first, (2,), dtype, draws[1])]
        for args in orders:
            try:
                reference = by_library(bench, f, args)
            except TypeError:
                assert args[0] is not first, f"{name} is not in the library"
                continue  # the library accepts no scalar on the left
            plain = (
                f
                if name not in ("floordiv", "mod")
                else {"floordiv": np.floor_divide, "mod": np.remainder}[name]
            )
            got = f(*(a.x if isinstance(a, Data) else a for a in args))
            bench.close(
                got,
                *_truth(bench, name, plain, args, reference, first),
                dtype=bench.lib.dtype_name(reference),
                relative=True,
                note=f"{name}: ",
            )


# --------------------------------------------------------------------------------------- reductions
#: (ragged_dim, axis, keepdims): the ragged axis, element axes, all axes, with and without the batch
#: axis. `NUMBERS_ALONE` is the ragged axis again, for tokens that are single numbers.
AXES = [
    (0, 1, False), (0, 1, True), (0, 2, False), (0, -1, True), (0, -2, False), (0, None, False),
    (0, (0, 1), True),
    (0, (1, 2), False), (0, (2, 1), True), (0, (0, 1, 2), False), (1, 2, False), (1, 2, True),
    (1, 1, False), (1, None, False),
    (1, (0, 2), False), (1, (1, 2), False),
]  # fmt: skip
NUMBERS_ALONE = (0, 1, False)
DRAW = {"all": "truth", "any": "truth", "count_nonzero": "truth", "prod": "near1"}
NUMBERS = (*DTYPES, "int32", "int8", "uint8")
REDUCTIONS = {
    **dict.fromkeys("max min mean prod std sum var".split(), NUMBERS),
    **dict.fromkeys("all any".split(), ("bool", "float32", "int32", "complex64")),
    "count_nonzero": ("int32", "float32", "bool", "complex64"),
}


def reduction(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """One reduction over every kind of axis."""
    f = getattr(bench.xp, name)
    integer = dtype not in DTYPES
    draw = DRAW.get(name, "natural" if integer else "any")
    if draw == "truth" and integer:
        draw = {"bool": "bool", "complex64": "truth"}.get(dtype, "natural")
    if name == "prod" and integer:
        draw = "twos" if dtype == "uint8" else "sign"
    for token, (dim, axis, keepdims) in [
        *(((3,), one) for one in bench.some(AXES)),
        ((), NUMBERS_ALONE),
    ]:
        ragged = dim + 1 in (
            (0, 1, 2) if axis is None else [a % 3 for a in np.atleast_1d(axis).tolist()]
        )
        x = bench.ragged(layout, token, dtype, draw, dim)
        if name in ("mean", "std", "var"):
            out = bench.lib.default_float if integer else dtype
            x = Data(x.x, x.exact.astype(np.float64)) if integer else x
        else:
            out = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
        for correction in (0, 1) if name in ("std", "var") and axis == 1 else (0,):
            more: dict[str, Any] = {"correction": correction} if correction else {}
            bench.check(
                lambda a: f(a, axis=axis, keepdims=keepdims, **more),
                lambda a: oracle.reduce(
                    name, a, axis, keepdims=keepdims, correction=correction, ragged=dim + 1
                ),
                x,
                dtype=out,
                orders=8 if ragged and name not in ("any", "all") else 1,
                note=f"{token}, ragged_dim={dim}, axis={axis}, keepdims={keepdims}, {more}: ",
            )


for _name, _dtypes in REDUCTIONS.items():
    operation(_name, ALL, _dtypes)(partial(reduction, name=_name))


@operation("all any max mean min prod sum: elements of size 0", SHORT, ("float32", "int32"))
def of_no_elements(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows and arrays whose tokens have no elements have the values of empty ones."""
    for dim in (0, 1):
        x = bench.ragged(layout, (0,), dtype, "natural", dim)
        for name in (
            "all",
            "any",
            "max",
            "min",
            "prod",
            "sum",
            *(["mean"] if dtype == "float32" else []),
        ):
            f = getattr(bench.xp, name)
            out = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
            for axis, keepdims in (
                ((1, 2), False),
                ((1, 2), True),
                (None, False),
                ((0, dim + 1), False),
            ):
                bench.check(
                    lambda a: f(a, axis=axis, keepdims=keepdims),
                    lambda a: oracle.reduce(name, a, axis, keepdims=keepdims, ragged=dim + 1),
                    x,
                    dtype=out,
                    note=f"{name}, ragged_dim={dim}, axis={axis}, keepdims={keepdims}: ",
                )


@operation("sum cumulative_sum: dtype=", SHORT, ("float16", "bfloat16", "int8", "uint8"))
def with_dtype(bench: Bench, layout: Layout, dtype: str) -> None:
    """`dtype` of sums, products and scans is the dtype of the result and of the accumulation."""
    wide = "float32" if dtype in HALF else "int32"
    x = bench.ragged(layout, (3,), dtype, "natural" if wide == "int32" else "any")
    for axis in (1, 2, None, (0, 1), (1, 2)):
        bench.check(
            lambda a: bench.xp.sum(a, axis=axis, dtype=bench.lib.dtypes[wide]),
            lambda a: oracle.reduce("sum", a, axis),
            x,
            dtype=wide,
            note=f"sum, axis={axis}: ",
        )
    for axis in (1, 2):
        bench.check(
            lambda a: bench.xp.cumulative_sum(a, axis=axis, dtype=bench.lib.dtypes[wide]),
            lambda a: oracle.scan("cumulative_sum", a, axis - 1),
            x,
            dtype=wide,
            note=f"scan, axis={axis}: ",
        )


def scanning(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """A running sum or product within the rows, or along an element axis."""
    f = getattr(bench.xp, name)
    draw = (
        ("sign" if dtype not in DTYPES else "near1")
        if name == "cumulative_prod"
        else "natural"
        if dtype[0] == "u"
        else "any"
    )
    out = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
    for dim, axis in bench.some(((0, 1), (0, 2), (0, -2), (1, 2), (1, 1))):
        for initial in (False, True):
            x = bench.ragged(layout, (3,), dtype, draw, dim)
            bench.check(
                lambda a: f(a, axis=axis, include_initial=initial),
                lambda a: oracle.scan(name, a, axis % 3 - 1, initial=initial),
                x,
                dtype=out,
                note=f"ragged_dim={dim}, axis={axis}, include_initial={initial}: ",
            )


for _name in ("cumulative_sum", "cumulative_prod"):
    operation(_name, ALL, (*DTYPES, "int32", "int8"))(partial(scanning, name=_name))


# -------------------------------------------------------------------------------------- other kinds
@operation("astype", SHORT, ("float32", "int32", "bool", "float16"))
def astype(bench: Bench, layout: Layout, dtype: str) -> None:
    """Casts between every two dtypes."""
    for to in bench.lib.dtypes:
        if to.startswith("complex") or to == dtype:
            continue
        x = bench.ragged(layout, (2,), dtype, "natural")
        bench.close(
            bench.xp.astype(x.x, bench.lib.dtypes[to]),
            [row != 0 if to == "bool" else row for row in x.exact],
            dtype=to,
        )
    same = bench.ragged(layout, (2,), dtype, "natural").x
    assert bench.xp.astype(same, same.dtype, copy=False).values is same.values, (
        "astype(copy=False) copied"
    )


@operation("zeros_like ones_like full_like empty_like", SHORT, ("float32", "int32"))
def filled(bench: Bench, layout: Layout, dtype: str) -> None:
    """Arrays like another, also with another dtype."""
    x = bench.ragged(layout, (2,), dtype, "natural").x
    for options, out in (({}, dtype), ({"dtype": bench.lib.dtypes["int8"]}, "int8")):
        for name, args, value in (
            ("zeros_like", (), 0),
            ("ones_like", (), 1),
            ("full_like", (5,), 5),
        ):
            got = getattr(bench.xp, name)(x, *args, **options)
            bench.close(
                got,
                [np.full_like(row, value) for row in bench.rows(x)],
                dtype=out,
                note=f"{name}: ",
            )
            assert got.offsets is x.offsets, f"{name} lost the layout"
        empty = bench.xp.empty_like(x, **options)
        assert empty.shape == x.shape and bench.lib.dtype_name(empty) == out


@operation("matmul")
def matmul(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens times a matrix, also with head axes between."""
    b = bench.dense((4, 3), dtype)
    for token in ((4,), (2, 4)):
        x = bench.ragged(layout, token, dtype)
        truth = oracle.each(lambda row, matrix: row @ matrix)
        # Libraries round a half-precision result once; some also round partial results.
        half = dtype in HALF
        rough = (lambda a, m: [oracle.rounded(dtype)(row @ m) for row in a]) if half else None
        bench.check(bench.xp.matmul, truth, x, b, rough=rough)
        bench.check(operator.matmul, truth, x, b, rough=rough)


@operation("take", ALL, ("float32", "int32"))
def take(bench: Bench, layout: Layout, dtype: str) -> None:
    """A table by ragged indices, rows of a ragged array, entries of its element axes."""
    table = bench.dense((7, 2), dtype)
    index = bench.ragged(layout, (), "int32", "natural")
    bench.check(
        lambda t, i: bench.xp.take(t, i, axis=0), lambda t, i: [t[row] for row in i], table, index
    )
    flat = bench.dense((7,), dtype)
    bench.check(bench.xp.take, lambda t, i: [t[row] for row in i], flat, index)
    lengths = lengths_of(layout)
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, dim=dim)
        places = [2, 0, 0]
        picks = bench.lib.make(places, "int32")
        element = 2 - dim
        bench.check(
            lambda a: bench.xp.take(a, picks, axis=element),
            lambda a: [np.take(row, places, axis=element - 1) for row in a],
            x,
        )
        rows = [len(lengths) - 1, 0, 0] if lengths else []
        numbers = bench.lib.make(np.asarray(rows, np.int32), "int32")
        bench.check(lambda a: bench.xp.take(a, numbers, axis=0), lambda a: [a[i] for i in rows], x)


@operation("concat", ALL, ("float32", "int32"))
def concat(bench: Bench, layout: Layout, dtype: str) -> None:
    """Batches, rows, and element axes concatenated."""
    lengths = lengths_of(layout)
    for dim in (0, 1):
        a, b = (
            bench.ragged(layout, (3,), dtype, dim=dim),
            bench.ragged(lengths[::-1], (3,), dtype, dim=dim),
        )
        c = bench.like(a, (3,), dtype)
        bench.check(
            lambda *x: bench.xp.concat(x, axis=0),
            lambda *x: [row for rows in x for row in rows],
            a,
            b,
            a,
        )
        bench.check(
            lambda *x: bench.xp.concat(x), lambda *x: [row for rows in x for row in rows], a, b
        )
        bench.check(
            lambda *x: bench.xp.concat(x, axis=dim + 1),
            lambda *x: [np.concatenate(rows, axis=dim) for rows in zip(*x, strict=True)],
            a,
            b,
            c,
            note="rows: ",
        )
        for axis in (2 - dim, -1 - dim):
            bench.check(
                lambda *x: bench.xp.concat(x, axis=axis),
                lambda *x: [np.concatenate(rows, axis=1 - dim) for rows in zip(*x, strict=True)],
                a,
                c,
                a,
            )


@operation("stack", SHORT, ("float32", "int32"))
def stack(bench: Bench, layout: Layout, dtype: str) -> None:
    """A new element axis, before or after the ragged axis."""
    for dim in (0, 1):
        a = bench.ragged(layout, (3,), dtype, dim=dim)
        b = bench.like(a, (3,), dtype)
        for axis in (1, 2, 3, -1):
            bench.check(
                lambda *x: bench.xp.stack(x, axis=axis),
                lambda *x: [np.stack(rows, axis=axis % 4 - 1) for rows in zip(*x, strict=True)],
                a,
                b,
                note=f"ragged_dim={dim}, axis={axis}: ",
            )


@operation("result_type can_cast", ("plain",), ("float32",))
def dtypes(bench: Bench, layout: Layout, dtype: str) -> None:
    """Functions of dtypes accept a ragged array."""
    x = bench.ragged(layout, (), dtype).x
    for other in ("float32", "float16", "float64", "int32"):
        if other in bench.lib.dtypes and (
            other != "int32" or bench.lib.name in ("numpy", "torch", "jax", "mlx")
        ):
            to = bench.lib.dtypes[other]
            assert bench.xp.result_type(x, to) == bench.xp.result_type(x.values, to)
            assert bench.xp.can_cast(x, to) == bench.xp.can_cast(x.dtype, to)
