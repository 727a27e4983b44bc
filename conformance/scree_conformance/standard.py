"""Cases of the standard's functions on ragged arrays, against NumPy's functions on each row."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import oracle
from .backends import HALF
from .bench import Bench, Input
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

#: Form of the second operand -> (shape of a token, shape of the operand for n rows). The second is
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

#: Functions whose result depends on the precision. Their expected result is the library's own.
PRECISION_DEPENDENT = ("nextafter", "floor_divide", "remainder")


def call_on_tokens(bench: Bench, f: Callable[..., Any], args: list[Any]) -> Any:
    """Return the result of the library's own function on the tokens of all rows.

    NumPy broadcasts every operand to the tokens.
    """
    ragged = next(arg for arg in args if isinstance(arg, Input) and isinstance(arg.exact, Rows))
    broadcast = oracle.map_rows(lambda row, operand: np.broadcast_to(operand, row.shape))
    dense = []
    for arg in args:
        if isinstance(arg, Input):
            dtype = (arg.exact.template if isinstance(arg.exact, Rows) else arg.exact).dtype
            no_tokens = np.empty_like(ragged.exact.template, dtype=dtype)
            tokens = np.concatenate([no_tokens, *broadcast(ragged.exact, arg.exact)])
            dense.append(bench.lib.make(tokens, bench.lib.dtype_name(arg.array)))
        else:
            dense.append(arg)
    return f(*dense)


def check_against_library(
    bench: Bench,
    f: Callable[..., Any],
    numpy_function: Callable[..., Any],
    args: list[Any],
    *,
    is_precision_dependent: bool,
    accepts_type_error: bool,
    note: str,
) -> None:
    """Compare a call with NumPy; the tolerance is the error of the library's own function.

    `accepts_type_error`: the library's own function may refuse these arguments.
    """
    try:
        library_result = call_on_tokens(bench, f, args)
    except TypeError:
        assert accepts_type_error, f"{note}the library refuses the call"
        return
    exact = [arg.exact if isinstance(arg, Input) else arg for arg in args]
    ragged = next(x for x in exact if isinstance(x, Rows))
    boundaries = np.cumsum([row.shape[0] for row in ragged])[:-1]
    library_rows = np.split(bench.lib.read(library_result), boundaries) if ragged else []
    expected = library_rows
    if not is_precision_dependent:
        with np.errstate(all="ignore"):
            expected = oracle.map_rows(numpy_function)(*exact)
    bench.close(
        f(*(arg.array if isinstance(arg, Input) else arg for arg in args)),
        expected,
        expected,
        library_rows,
        dtype=bench.lib.dtype_name(library_result),
        relative=True,
        note=note,
    )


def elementwise(
    bench: Bench, layout: Layout, dtype: str, *, name: str, domains: tuple[str, ...]
) -> None:
    """One function, with every form of the second operand on either side."""
    f, numpy_function = getattr(bench.xp, name), getattr(np, name)
    forms = FORMS if len(domains) > 1 else {"ragged": FORMS["ragged"]}
    # Broadcasting of the second operand does not depend on the function.
    if bench.lib.compiles and name != "add":
        forms = {form: FORMS[form] for form in ("ragged", "(n, 1)") if form in forms}
    for form, (token, shape) in forms.items():
        first = bench.ragged(layout, token, _dtype(dtype, domains[0]), domains[0])
        operands = [_operand(bench, first, token, shape, dtype, draw) for draw in domains[1:]]
        argument_lists = [[first, *operands]]
        if form != "ragged" and len(domains) == 2:
            argument_lists.append(
                [
                    _operand(bench, first, token, shape, dtype, domains[0]),
                    bench.like(first, token, _dtype(dtype, domains[1]), domains[1]),
                ]
            )
        for args in argument_lists:
            check_against_library(
                bench,
                f,
                numpy_function,
                args,
                is_precision_dependent=name in PRECISION_DEPENDENT,
                # Some functions of a library take no Python scalars, such as `where` in
                # array-api-strict.
                accepts_type_error=form == "scalar",
                note=f"{form}, {'ragged first' if args[0] is first else 'ragged second'}: ",
            )


def _dtype(dtype: str, draw: str) -> str:
    return "bool" if draw == "bool" else dtype


def _operand(
    bench: Bench, first: Input, token: tuple[int, ...], shape: Any, dtype: str, draw: str
) -> Any:
    if shape is None:
        return bench.like(first, token, _dtype(dtype, draw), draw)
    if shape == "scalar":
        scalar = bench.dense((), _dtype(dtype, draw), draw).exact
        return scalar.item()
    return bench.dense(shape(first.array.batch_size), _dtype(dtype, draw), draw)


for _name, _domain in ELEMENTWISE.items():
    _domains, _dtypes = DOMAINS[_domain]
    operation(_name, SHORT, _dtypes)(partial(elementwise, name=_name, domains=_domains))


#: Python's operator -> domains of its operands.
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
        argument_lists: list[list[Any]] = [[first]]
        if len(draws) == 2:
            scalar = bench.dense((), dtype, draws[1]).exact.item()
            argument_lists = [
                [first, bench.like(first, (2,), dtype, draws[1])],
                [first, scalar],
                [abs(scalar) + 1, first],
            ]
            if name in ("floordiv", "mod"):
                argument_lists[2] = [scalar, bench.like(first, (2,), dtype, draws[1])]
        numpy_function = {"floordiv": np.floor_divide, "mod": np.remainder}.get(name, f)
        for args in argument_lists:
            check_against_library(
                bench,
                f,
                numpy_function,
                args,
                is_precision_dependent=False,
                # Some libraries accept no Python scalar as the left operand.
                accepts_type_error=args[0] is not first,
                note=f"{name}: ",
            )


# --------------------------------------------------------------------------------------- reductions
#: (ragged_dim, axis, keepdims): the ragged axis, element axes, all axes, with and without the batch
#: axis.
AXES = [
    (0, 1, False), (0, 1, True), (0, 2, False), (0, -1, True), (0, -2, False), (0, None, False),
    (0, (0, 1), True),
    (0, (1, 2), False), (0, (2, 1), True), (0, (0, 1, 2), False), (1, 2, False), (1, 2, True),
    (1, 1, False), (1, None, False),
    (1, (0, 2), False), (1, (1, 2), False),
]  # fmt: skip
#: The reduction of tokens that are single numbers.
SCALAR_TOKENS = (0, 1, False)
#: Reduction -> draw of its floating-point numbers.
DRAWS = {"all": "truth", "any": "truth", "count_nonzero": "truth", "prod": "near1"}
NUMBERS = (*DTYPES, "int32", "int8", "uint8")
REDUCTIONS = {
    **dict.fromkeys("max min mean prod std sum var".split(), NUMBERS),
    **dict.fromkeys("all any".split(), ("bool", "float32", "int32", "complex64")),
    "count_nonzero": ("int32", "float32", "bool", "complex64"),
}


def reduction(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """One reduction over every kind of axis."""
    f = getattr(bench.xp, name)
    is_not_float = dtype not in DTYPES
    draw = DRAWS.get(name, "natural" if is_not_float else "any")
    if draw == "truth" and is_not_float:
        draw = {"bool": "bool", "complex64": "truth"}.get(dtype, "natural")
    if name == "prod" and is_not_float:
        draw = "twos" if dtype == "uint8" else "sign"
    for token, (ragged_dim, axis, keepdims) in [
        *(((3,), axes) for axes in bench.select(AXES)),
        ((), SCALAR_TOKENS),
    ]:
        reduces_tokens = ragged_dim + 1 in (
            (0, 1, 2) if axis is None else [a % 3 for a in np.atleast_1d(axis).tolist()]
        )
        x = bench.ragged(layout, token, dtype, draw, ragged_dim)
        if name in ("mean", "std", "var"):
            result_dtype = bench.lib.default_float if is_not_float else dtype
            x = Input(x.array, x.exact.astype(np.float64)) if is_not_float else x
        else:
            result_dtype = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
        for correction in (0, 1) if name in ("std", "var") and axis == 1 else (0,):
            keywords: dict[str, Any] = {"correction": correction} if correction else {}
            bench.check(
                lambda a: f(a, axis=axis, keepdims=keepdims, **keywords),
                lambda a: oracle.reduce(
                    name,
                    a,
                    axis,
                    keepdims=keepdims,
                    correction=correction,
                    ragged_axis=ragged_dim + 1,
                ),
                x,
                dtype=result_dtype,
                token_orders=8 if reduces_tokens and name not in ("any", "all") else 1,
                note=f"{token}, ragged_dim={ragged_dim}, axis={axis}, keepdims={keepdims}, "
                f"{keywords}: ",
            )


for _name, _dtypes in REDUCTIONS.items():
    operation(_name, ALL, _dtypes)(partial(reduction, name=_name))


@operation("all any max mean min prod sum: elements of size 0", SHORT, ("float32", "int32"))
def of_no_elements(bench: Bench, layout: Layout, dtype: str) -> None:
    """Reductions of tokens without elements, which give the values of empty rows."""
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (0,), dtype, "natural", ragged_dim)
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
            result_dtype = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
            for axis, keepdims in (
                ((1, 2), False),
                ((1, 2), True),
                (None, False),
                ((0, ragged_dim + 1), False),
            ):
                bench.check(
                    lambda a: f(a, axis=axis, keepdims=keepdims),
                    lambda a: oracle.reduce(
                        name, a, axis, keepdims=keepdims, ragged_axis=ragged_dim + 1
                    ),
                    x,
                    dtype=result_dtype,
                    note=f"{name}, ragged_dim={ragged_dim}, axis={axis}, keepdims={keepdims}: ",
                )


@operation("sum cumulative_sum: dtype=", SHORT, ("float16", "bfloat16", "int8", "uint8"))
def with_dtype(bench: Bench, layout: Layout, dtype: str) -> None:
    """The keyword `dtype`: the dtype of the result and of the accumulation."""
    wide_dtype = "float32" if dtype in HALF else "int32"
    x = bench.ragged(layout, (3,), dtype, "natural" if wide_dtype == "int32" else "any")
    for axis in (1, 2, None, (0, 1), (1, 2)):
        bench.check(
            lambda a: bench.xp.sum(a, axis=axis, dtype=bench.lib.dtypes[wide_dtype]),
            lambda a: oracle.reduce("sum", a, axis),
            x,
            dtype=wide_dtype,
            note=f"sum, axis={axis}: ",
        )
    for axis in (1, 2):
        bench.check(
            lambda a: bench.xp.cumulative_sum(a, axis=axis, dtype=bench.lib.dtypes[wide_dtype]),
            lambda a: oracle.scan("cumulative_sum", a, axis - 1),
            x,
            dtype=wide_dtype,
            note=f"scan, axis={axis}: ",
        )


def scanning(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """A cumulative sum or product within the rows, or along an element axis."""
    f = getattr(bench.xp, name)
    draw = "any"
    if name == "cumulative_prod":
        draw = "near1" if dtype in DTYPES else "sign"
    result_dtype = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))
    for ragged_dim, axis in bench.select(((0, 1), (0, 2), (0, -2), (1, 2), (1, 1))):
        for initial in (False, True):
            x = bench.ragged(layout, (3,), dtype, draw, ragged_dim)
            bench.check(
                lambda a: f(a, axis=axis, include_initial=initial),
                lambda a: oracle.scan(name, a, axis % 3 - 1, initial=initial),
                x,
                dtype=result_dtype,
                note=f"ragged_dim={ragged_dim}, axis={axis}, include_initial={initial}: ",
            )


for _name in ("cumulative_sum", "cumulative_prod"):
    operation(_name, ALL, (*DTYPES, "int32", "int8"))(partial(scanning, name=_name))


# -------------------------------------------------------------------------------------- other kinds
@operation("astype", SHORT, ("float32", "int32", "bool", "float16"))
def astype(bench: Bench, layout: Layout, dtype: str) -> None:
    """Casts to every other dtype that is not complex."""
    for target in bench.lib.dtypes:
        if target.startswith("complex") or target == dtype:
            continue
        x = bench.ragged(layout, (2,), dtype, "natural")
        bench.close(
            bench.xp.astype(x.array, bench.lib.dtypes[target]),
            [row != 0 if target == "bool" else row for row in x.exact],
            dtype=target,
        )
    unchanged = bench.ragged(layout, (2,), dtype, "natural").array
    assert bench.xp.astype(unchanged, unchanged.dtype, copy=False).values is unchanged.values, (
        "astype(copy=False) copied"
    )


@operation("asarray", SHORT, ("float32", "int32"))
def asarray(bench: Bench, layout: Layout, dtype: str) -> None:
    """The array itself; with another dtype, another device or a copy the layout stays."""
    x = bench.ragged(layout, (2,), dtype, "natural")
    for options in ({}, {"copy": False}, {"dtype": x.array.dtype}, {"device": x.array.device}):
        assert bench.xp.asarray(x.array, **options) is x.array, f"asarray({options}) copied"
    copied = bench.xp.asarray(x.array, copy=True)
    bench.close(copied, list(x.exact), dtype=dtype)
    assert copied.values is not x.array.values, "asarray(copy=True) did not copy"
    assert copied.offsets is x.array.offsets, "asarray lost the layout"
    cast = bench.xp.asarray(x.array, dtype=bench.lib.dtypes["int8"])
    bench.close(cast, list(x.exact), dtype="int8")
    try:
        bench.xp.asarray(x.array, dtype=bench.lib.dtypes["int8"], copy=False)
    except ValueError as error:
        assert "copy" in str(error), f"expected 'copy' in the message, got {error}"
    else:
        raise AssertionError("asarray(copy=False) with another dtype did not raise")


@operation("zeros_like ones_like full_like empty_like", SHORT, ("float32", "int32"))
def filled(bench: Bench, layout: Layout, dtype: str) -> None:
    """Arrays with the layout of another, in the same and in another dtype."""
    x = bench.ragged(layout, (2,), dtype, "natural").array
    for options, result_dtype in (({}, dtype), ({"dtype": bench.lib.dtypes["int8"]}, "int8")):
        for name, args, value in (
            ("zeros_like", (), 0),
            ("ones_like", (), 1),
            ("full_like", (5,), 5),
        ):
            got = getattr(bench.xp, name)(x, *args, **options)
            bench.close(
                got,
                [np.full_like(row, value) for row in bench.rows(x)],
                dtype=result_dtype,
                note=f"{name}: ",
            )
            assert got.offsets is x.offsets, f"{name} lost the layout"
        empty = bench.xp.empty_like(x, **options)
        assert empty.shape == x.shape and bench.lib.dtype_name(empty) == result_dtype


@operation("matmul")
def matmul(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens times a matrix, also with a head axis before the last axis."""
    b = bench.dense((4, 3), dtype)
    for token in ((4,), (2, 4)):
        x = bench.ragged(layout, token, dtype)
        reference = oracle.map_rows(lambda row, matrix: row @ matrix)
        low_precision = oracle.with_rounded_result(reference, dtype) if dtype in HALF else None
        bench.check(bench.xp.matmul, reference, x, b, low_precision=low_precision)
        bench.check(operator.matmul, reference, x, b, low_precision=low_precision)


@operation("take", ALL, ("float32", "int32"))
def take(bench: Bench, layout: Layout, dtype: str) -> None:
    """A table by ragged indices, rows of a ragged array, entries of its element axes."""
    table = bench.dense((7, 2), dtype)
    index = bench.ragged(layout, (), "int32", "natural")
    bench.check(
        lambda values, i: bench.xp.take(values, i, axis=0),
        lambda values, i: [values[row] for row in i],
        table,
        index,
    )
    flat = bench.dense((7,), dtype)
    bench.check(bench.xp.take, lambda values, i: [values[row] for row in i], flat, index)
    lengths = lengths_of(layout)
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim)
        positions = [2, 0, 0]
        element_index = bench.lib.make(positions, "int32")
        element = 2 - ragged_dim
        bench.check(
            lambda a: bench.xp.take(a, element_index, axis=element),
            lambda a: [np.take(row, positions, axis=element - 1) for row in a],
            x,
        )
        row_positions = [len(lengths) - 1, 0, 0] if lengths else []
        row_index = bench.lib.make(np.asarray(row_positions, np.int32), "int32")
        bench.check(
            lambda a: bench.xp.take(a, row_index, axis=0),
            lambda a: [a[i] for i in row_positions],
            x,
        )


@operation("concat", ALL, ("float32", "int32"))
def concat(bench: Bench, layout: Layout, dtype: str) -> None:
    """Batches, rows, and element axes concatenated."""
    lengths = lengths_of(layout)
    for ragged_dim in (0, 1):
        a, b = (
            bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim),
            bench.ragged(lengths[::-1], (3,), dtype, ragged_dim=ragged_dim),
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
            lambda *x: bench.xp.concat(x, axis=ragged_dim + 1),
            lambda *x: [np.concatenate(rows, axis=ragged_dim) for rows in zip(*x, strict=True)],
            a,
            b,
            c,
            note="rows: ",
        )
        for axis in (2 - ragged_dim, -1 - ragged_dim):
            bench.check(
                lambda *x: bench.xp.concat(x, axis=axis),
                lambda *x: [
                    np.concatenate(rows, axis=1 - ragged_dim) for rows in zip(*x, strict=True)
                ],
                a,
                c,
                a,
            )


@operation("stack", SHORT, ("float32", "int32"))
def stack(bench: Bench, layout: Layout, dtype: str) -> None:
    """A new element axis, before or after the ragged axis."""
    for ragged_dim in (0, 1):
        a = bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim)
        b = bench.like(a, (3,), dtype)
        for axis in (1, 2, 3, -1):
            bench.check(
                lambda *x: bench.xp.stack(x, axis=axis),
                lambda *x: [np.stack(rows, axis=axis % 4 - 1) for rows in zip(*x, strict=True)],
                a,
                b,
                note=f"ragged_dim={ragged_dim}, axis={axis}: ",
            )


@operation("result_type can_cast", ("plain",), ("float32",))
def dtypes(bench: Bench, layout: Layout, dtype: str) -> None:
    """Functions of dtypes with a ragged array."""
    x = bench.ragged(layout, (), dtype).array
    for name in ("float32", "float16", "float64", "int32"):
        if name in bench.lib.dtypes and (
            name != "int32" or bench.lib.name in ("numpy", "torch", "jax", "mlx")
        ):
            other_dtype = bench.lib.dtypes[name]
            assert bench.xp.result_type(x, other_dtype) == bench.xp.result_type(
                x.values, other_dtype
            )
            assert bench.xp.can_cast(x, other_dtype) == bench.xp.can_cast(x.dtype, other_dtype)
