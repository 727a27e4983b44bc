"""Random rows: every operation on any layout and dtype, functions with axes on any shape."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from scree_conformance import oracle
from scree_conformance.backends import LIBRARIES, load
from scree_conformance.bench import Bench
from scree_conformance.ordering import order
from scree_conformance.suite import OPERATIONS
from scree_conformance.table import DTYPES, Absent, Case, Operation

BACKENDS = [
    name for name in os.environ.get("SCREE_BACKENDS", ",".join(LIBRARIES)).split(",") if name
]
bench = cache(lambda name: Bench(load(name)))

#: Rows of any length, many of them empty or of one token.
LENGTHS = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=7)


def drawn(name: str, examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the settings of a library.

    A library that compiles every shape gets few examples, the same ones in every run.
    """
    few = 1 if name == "jax" else examples
    return settings(
        max_examples=few,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


# --------------------------------------------------------------------- every operation of the table
#: Operations that run on any layout; the others need a particular layout.
ANYWHERE = [
    op
    for op in OPERATIONS
    if op.functions and len(op.layouts) > 1 and op.variant not in ("jitted", "differentiated")
]


@pytest.mark.parametrize(("name", "operation"), [
    pytest.param(name, op, id=f"{name}-{op.name}")
    for name in BACKENDS for op in ANYWHERE[:: 12 if name == "jax" else 1]
])  # fmt: skip
def test_operations_on_drawn_rows(name: str, operation: Operation) -> None:
    on = bench(name)

    @drawn(name, 3)
    @given(
        LENGTHS,
        st.sampled_from(
            [dtype for dtype in operation.dtypes if dtype in on.lib.dtypes] or ["float32"]
        ),
    )
    def run(lengths: list[int], dtype: str) -> None:
        # Absent is a gap in the library's table, as in test_conformance.
        with warnings.catch_warnings(), suppress(Absent):
            warnings.simplefilter("ignore")
            Case(operation, lengths, dtype).run(on)

    run()


# --------------------------------------------------------------------------- functions with an axis
def axis_of(data: st.DataObject, ndim: int, first: int = 1) -> int:
    """Draw an axis after the batch axis, counted from either end."""
    return data.draw(
        st.integers(first, ndim - 1).flatmap(lambda a: st.sampled_from((a, a - ndim))), "axis"
    )


def reduction(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw any set of axes, except the batch axis without the ragged axis."""
    ragged, axes = (
        x.ragged_dim + 1,
        st.lists(st.integers(0, x.ndim - 1), min_size=1, unique=True).map(tuple),
    )
    axis = data.draw(st.one_of(st.none(), axes), "axis")
    keepdims = data.draw(st.booleans(), "keepdims")
    assume(axis is None or 0 not in axis or ragged in axis)
    return (
        lambda a: getattr(xp, name)(a, axis=axis, keepdims=keepdims),
        lambda rows: oracle.reduce(name, rows, axis, keepdims=keepdims, ragged=ragged),
    )


def scan(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Running sums and products along any axis after the batch axis."""
    axis, initial = axis_of(data, x.ndim), data.draw(st.booleans(), "include_initial")
    return (
        lambda a: getattr(xp, name)(a, axis=axis, include_initial=initial),
        lambda rows: oracle.scan(name, rows, axis % x.ndim - 1, initial=initial),
    )


def sorting(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Sorting along any axis after the batch axis, ascending or descending."""
    axis, down = axis_of(data, x.ndim), data.draw(st.booleans(), "descending")
    at = axis % x.ndim - 1
    places = partial(order, axis=at, descending=down)

    def one(row: np.ndarray) -> np.ndarray:
        return places(row) if name == "argsort" else np.take_along_axis(row, places(row), at)

    return lambda a: getattr(xp, name)(a, axis=axis, descending=down), lambda rows: list(
        map(one, rows)
    )


def each(
    plain: Callable[..., Any], options: Callable[[st.DataObject], tuple[Any, ...]] = lambda data: ()
) -> Any:
    """Return a check of a function of a row and one of its axes."""

    def rule(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
        axis, more = axis_of(data, x.ndim), options(data)
        return (
            lambda a: getattr(xp, name)(a, *more, axis=axis),
            lambda rows: [plain(row, *more, axis=axis % x.ndim - 1) for row in rows],
        )

    return rule


def expanded(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """A new axis anywhere after the batch axis."""
    axis = axis_of(data, x.ndim + 1)
    return (
        lambda a: xp.squeeze(xp.expand_dims(xp.expand_dims(a, axis=axis), axis=axis), axis=axis),
        lambda rows: [np.expand_dims(row, axis % (x.ndim + 1) - 1) for row in rows],
    )


def permuted(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """The axes after the batch axis in any order."""
    axes = tuple(data.draw(st.permutations(range(1, x.ndim)), "axes"))
    return lambda a: xp.permute_dims(a, (0, *axes)), lambda rows: [
        row.transpose([i - 1 for i in axes]) for row in rows
    ]


def joined(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """The array concatenated with itself, along any axis."""
    axis = axis_of(data, x.ndim, 0)
    if axis % x.ndim == 0:
        return lambda a: xp.concat([a, a], axis=axis), lambda rows: [*rows, *rows]
    return lambda a: xp.concat([a, a], axis=axis), lambda rows: [
        np.concatenate([row, row], axis % x.ndim - 1) for row in rows
    ]


def along(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Return a check of a function of `xp.ragged` along the ragged axis, at every position."""
    return getattr(xp.ragged, name), partial(getattr(oracle, name), axis=x.ragged_dim)


#: Function -> (call and oracle for an array, draw of the numbers, dtypes).
RULES: dict[str, tuple[Callable[..., tuple[Any, Any]], str, tuple[str, ...]]] = {
    **dict.fromkeys(("sum", "max", "min", "mean"), (reduction, "any", DTYPES)),
    **dict.fromkeys(("prod",), (reduction, "near1", DTYPES)),
    **dict.fromkeys(("std", "var"), (reduction, "any", DTYPES)),
    **dict.fromkeys(("all", "any"), (reduction, "bool", ("bool",))),
    "count_nonzero": (reduction, "natural", ("int32", "float32")),
    "cumulative_sum": (scan, "any", DTYPES), "cumulative_prod": (scan, "near1", DTYPES),
    **dict.fromkeys(("sort", "argsort"), (sorting, "ties", ("float32", "int32", "bfloat16"))),
    "flip": (each(np.flip), "any", DTYPES),
    "roll": (each(np.roll, lambda data: (data.draw(st.integers(-80, 80)),)), "any",
             ("float32", "bool")),
    "repeat": (each(np.repeat, lambda data: (data.draw(st.integers(0, 3)),)), "any",
               ("float32", "int32")),
    "expand_dims": (expanded, "any", ("float32", "int32")),
    "permute_dims": (permuted, "any", ("float32", "int32")),
    "concat": (joined, "any", ("float32", "int32")),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (along, "any", DTYPES)),
}  # fmt: skip
#: Results whose dtype differs from the dtype of the input.
DTYPE = {"all": "bool", "any": "bool"}


@pytest.mark.parametrize("function", RULES)
@pytest.mark.parametrize("name", BACKENDS)
def test_functions_on_drawn_shapes(name: str, function: str) -> None:
    on = bench(name)
    rule, draw, dtypes = RULES[function]

    @drawn(name, 12)
    @given(
        st.data(),
        LENGTHS,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(dtypes),
        st.integers(0, 2**20),
    )
    def run(
        data: st.DataObject, lengths: list[int], token: tuple[int, ...], dtype: str, seed: int
    ) -> None:
        assume(dtype in on.lib.dtypes)
        dim = data.draw(st.integers(0, len(token)), "ragged_dim")
        with on.lib.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            on.start(str(seed))
            x = on.ragged(lengths, token, dtype, draw, dim)
            call, truth = rule(on.xp, x.x, data, function)
            # The standard does not define the maximum of no elements.
            assume(math.prod(token) or function not in ("max", "min"))
            out = None if function in ("argsort", "count_nonzero") else DTYPE.get(function, dtype)
            close(on, x, call, truth, out, function)

    run()


def close(
    on: Bench,
    x: Any,
    call: Callable[..., Any],
    truth: Callable[..., Any],
    out: str | None,
    function: str,
) -> None:
    """Run `Bench.check`, which also compares the dtype where one is expected."""
    expected = out or on.lib.dtype_name(call(x.x))
    # One number from many: errors of the reference can cancel by chance.
    one = not isinstance(truth(x.exact), list)
    on.check(
        call,
        truth,
        x,
        dtype=expected,
        orders=8 if one and function in ("mean", "std", "var", "sum", "prod") else 1,
        curved=function in ("softmax", "log_softmax", "logsumexp"),
    )
