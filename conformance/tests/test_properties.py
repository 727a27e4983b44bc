"""Property tests: operations on random layouts and dtypes, functions with axes on random shapes."""

from __future__ import annotations

import math
import os
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
from scree_conformance.suite import OPERATIONS
from scree_conformance.table import DTYPES, Absent, Case, Operation

BACKENDS = [
    name for name in os.environ.get("SCREE_BACKENDS", ",".join(LIBRARIES)).split(",") if name
]
bench_of = cache(lambda name: Bench(load(name)))

#: Rows of any length, many of them empty or of one token.
LENGTHS = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=7)


def example_settings(
    name: str, examples: int
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return hypothesis settings, with one example for a library that compiles every shape."""
    count = 1 if name == "jax" else examples
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


# --------------------------------------------------------------------- every operation of the table
#: Operations that run on any layout; the others need a particular layout.
ANY_LAYOUT = [
    op
    for op in OPERATIONS
    if op.functions and len(op.layouts) > 1 and op.variant not in ("jitted", "differentiated")
]


@pytest.mark.parametrize(("name", "operation"), [
    pytest.param(name, op, id=f"{name}-{op.name}")
    for name in BACKENDS for op in ANY_LAYOUT[:: 12 if name == "jax" else 1]
])  # fmt: skip
def test_operations_on_drawn_rows(name: str, operation: Operation) -> None:
    bench = bench_of(name)

    @example_settings(name, 3)
    @given(
        LENGTHS,
        st.sampled_from(
            [dtype for dtype in operation.dtypes if dtype in bench.lib.dtypes] or ["float32"]
        ),
    )
    def run(lengths: list[int], dtype: str) -> None:
        # Absent is a gap in the library's table, as in test_conformance.
        with suppress(Absent):
            Case(operation, lengths, dtype).run(bench)

    run()


# --------------------------------------------------------------------------- functions with an axis
def axis_of(data: st.DataObject, ndim: int, first_axis: int = 1) -> int:
    """Draw an axis after the batch axis, counted from either end."""
    return data.draw(
        st.integers(first_axis, ndim - 1).flatmap(lambda a: st.sampled_from((a, a - ndim))), "axis"
    )


def reduction(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw any set of axes, except sets with the batch axis and without the ragged axis."""
    ragged_axis = x.ragged_dim + 1
    axes = st.lists(st.integers(0, x.ndim - 1), min_size=1, unique=True).map(tuple)
    axis = data.draw(st.one_of(st.none(), axes), "axis")
    keepdims = data.draw(st.booleans(), "keepdims")
    assume(axis is None or 0 not in axis or ragged_axis in axis)
    return (
        lambda a: getattr(xp, name)(a, axis=axis, keepdims=keepdims),
        lambda rows: oracle.reduce(name, rows, axis, keepdims=keepdims, ragged_axis=ragged_axis),
    )


def scan(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw an axis of a cumulative sum or product."""
    axis, initial = axis_of(data, x.ndim), data.draw(st.booleans(), "include_initial")
    return (
        lambda a: getattr(xp, name)(a, axis=axis, include_initial=initial),
        lambda rows: oracle.scan(name, rows, axis % x.ndim - 1, initial=initial),
    )


def sorting(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw the axis and the direction of a sort."""
    axis, descending = axis_of(data, x.ndim), data.draw(st.booleans(), "descending")
    row_axis = axis % x.ndim - 1
    argsort = partial(oracle.stable_argsort, axis=row_axis, descending=descending)

    def reference_row(row: np.ndarray) -> np.ndarray:
        order = argsort(row)
        return order if name == "argsort" else np.take_along_axis(row, order, row_axis)

    return (
        lambda a: getattr(xp, name)(a, axis=axis, descending=descending),
        oracle.map_rows(reference_row),
    )


def along_axis(
    numpy_function: Callable[..., Any],
    draw_arguments: Callable[[st.DataObject], tuple[Any, ...]] = lambda data: (),
) -> Any:
    """Return a rule for a function with the keyword `axis`, which NumPy applies to each row."""

    def rule(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
        axis, arguments = axis_of(data, x.ndim), draw_arguments(data)
        return (
            lambda a: getattr(xp, name)(a, *arguments, axis=axis),
            lambda rows: [numpy_function(row, *arguments, axis=axis % x.ndim - 1) for row in rows],
        )

    return rule


def new_axis(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw the position of a new axis."""
    axis = axis_of(data, x.ndim + 1)
    return (
        lambda a: xp.squeeze(xp.expand_dims(xp.expand_dims(a, axis=axis), axis=axis), axis=axis),
        lambda rows: [np.expand_dims(row, axis % (x.ndim + 1) - 1) for row in rows],
    )


def permutation(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw an order of the axes after the batch axis."""
    axes = tuple(data.draw(st.permutations(range(1, x.ndim)), "axes"))
    return lambda a: xp.permute_dims(a, (0, *axes)), lambda rows: [
        row.transpose([i - 1 for i in axes]) for row in rows
    ]


def concatenation(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Draw the axis along which the array is concatenated with itself."""
    axis = axis_of(data, x.ndim, 0)
    if axis % x.ndim == 0:
        return lambda a: xp.concat([a, a], axis=axis), lambda rows: [*rows, *rows]
    return lambda a: xp.concat([a, a], axis=axis), lambda rows: [
        np.concatenate([row, row], axis % x.ndim - 1) for row in rows
    ]


def along_ragged_axis(xp: Any, x: Any, data: st.DataObject, name: str) -> tuple[Any, Any]:
    """Return the function of `xp.ragged` and its oracle along the ragged axis."""
    return getattr(xp.ragged, name), partial(getattr(oracle, name), axis=x.ragged_dim)


#: Function -> (rule that draws a call and its oracle, draw of the numbers, dtypes).
RULES: dict[str, tuple[Callable[..., tuple[Any, Any]], str, tuple[str, ...]]] = {
    **dict.fromkeys(("sum", "max", "min", "mean"), (reduction, "any", DTYPES)),
    **dict.fromkeys(("prod",), (reduction, "near1", DTYPES)),
    **dict.fromkeys(("std", "var"), (reduction, "any", DTYPES)),
    **dict.fromkeys(("all", "any"), (reduction, "bool", ("bool",))),
    "count_nonzero": (reduction, "natural", ("int32", "float32")),
    "cumulative_sum": (scan, "any", DTYPES), "cumulative_prod": (scan, "near1", DTYPES),
    **dict.fromkeys(("sort", "argsort"), (sorting, "ties", ("float32", "int32", "bfloat16"))),
    "flip": (along_axis(np.flip), "any", DTYPES),
    "roll": (along_axis(np.roll, lambda data: (data.draw(st.integers(-80, 80)),)), "any",
             ("float32", "bool")),
    "repeat": (along_axis(np.repeat, lambda data: (data.draw(st.integers(0, 3)),)), "any",
               ("float32", "int32")),
    "expand_dims": (new_axis, "any", ("float32", "int32")),
    "permute_dims": (permutation, "any", ("float32", "int32")),
    "concat": (concatenation, "any", ("float32", "int32")),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (along_ragged_axis, "any", DTYPES)),
}  # fmt: skip
#: Results whose dtype differs from the dtype of the input.
RESULT_DTYPES = {"all": "bool", "any": "bool"}


@pytest.mark.parametrize("function", RULES)
@pytest.mark.parametrize("name", BACKENDS)
def test_functions_on_drawn_shapes(name: str, function: str) -> None:
    bench = bench_of(name)
    rule, draw, dtypes = RULES[function]

    @example_settings(name, 12)
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
        assume(dtype in bench.lib.dtypes)
        ragged_dim = data.draw(st.integers(0, len(token)), "ragged_dim")
        with bench.lib.context():
            bench.start(str(seed))
            x = bench.ragged(lengths, token, dtype, draw, ragged_dim)
            call, reference = rule(bench.xp, x.array, data, function)
            # The standard does not define the maximum of no elements.
            assume(math.prod(token) or function not in ("max", "min"))
            expected_dtype = (
                None
                if function in ("argsort", "count_nonzero")
                else RESULT_DTYPES.get(function, dtype)
            )
            check_call(bench, x, call, reference, expected_dtype, function)

    run()


def check_call(
    bench: Bench,
    x: Any,
    call: Callable[..., Any],
    reference: Callable[..., Any],
    expected_dtype: str | None,
    function: str,
) -> None:
    """Run `Bench.check`; without an expected dtype, accept the dtype of the result."""
    expected = expected_dtype or bench.lib.dtype_name(call(x.array))
    # Rounding errors of a reduction to one number can cancel by chance.
    is_single_number = not isinstance(reference(x.exact), list)
    bench.check(
        call,
        reference,
        x,
        dtype=expected,
        token_orders=8
        if is_single_number and function in ("mean", "std", "var", "sum", "prod")
        else 1,
        transcendental=function in ("softmax", "log_softmax", "logsumexp"),
    )
