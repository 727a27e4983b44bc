"""Cases of `xp.ragged`, compiled and differentiated.

Compiled calls must equal the oracle. Gradients must match finite differences of the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import scree

from . import oracle
from .backends import EPS
from .bench import Bench, Input
from .layouts import Layout
from .oracle import Rows
from .table import Absent, operation

Shapes = tuple[tuple[int, ...], ...]
#: Step of the central differences. Their truncation error is about its square.
STEP = 1e-4
LAYOUTS = ("empty_between", "blocks")

#: Function -> (token shapes of the ragged arguments, shapes of the dense arguments, call, oracle).
TRACED: dict[str, tuple[Shapes, Shapes, Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (
        ((3,),),
        (),
        lambda r, x: r.softmax(x) + r.softmax(x, axis=-1),
        lambda x: [a + b for a, b in zip(oracle.softmax(x), oracle.softmax(x, -1), strict=True)],
    ),
    "log_softmax": (
        ((3,),),
        (),
        lambda r, x: r.log_softmax(x) + r.log_softmax(x, axis=-1),
        lambda x: [
            a + b for a, b in zip(oracle.log_softmax(x), oracle.log_softmax(x, -1), strict=True)
        ],
    ),
    "logsumexp": (
        ((3,),),
        (),
        lambda r, x: r.logsumexp(r.logsumexp(x, axis=-1)),
        lambda x: oracle.logsumexp(
            Rows([oracle.logsumexp(Rows([row], row), -1)[0] for row in x], x.template[:, 0])
        ),
    ),
    "topk": (((3,),), (), lambda r, x: r.topk(x, 2)[0], lambda x: oracle.topk(x, 2)[0]),
    "shift": (
        ((3,),),
        (),
        lambda r, x: r.shift(x, 2) * x + r.shift(x, -1, fill_value=2.0),
        lambda x: [
            a * row + b
            for a, row, b in zip(oracle.shift(x, 2), x, oracle.shift(x, -1, 2.0), strict=True)
        ],
    ),
    "broadcast_rows": (
        ((3,),),
        (),
        lambda r, x: r.broadcast_rows(x.__array_namespace__().sum(x, axis=1), x) * x,
        lambda x: [np.sum(row, axis=0) * row for row in x],
    ),
    "conv1d": (
        ((4,),),
        ((4, 1, 3), (6, 2, 2), (6,)),
        lambda r, x, w, v, b: r.conv1d(
            r.conv1d(x, w, groups=4, dilation=2), v, b, groups=2, padding="same"
        ),
        lambda x, w, v, b: oracle.conv1d(
            Rows(oracle.conv1d(x, w, groups=4, dilation=2), x.template),
            v,
            b,
            groups=2,
            padding="same",
        ),
    ),
    "rms_norm": (((4,),), ((4,),), lambda r, x, w: r.rms_norm(x, w), oracle.rms_norm),
    "layer_norm": (
        ((4,),),
        ((4,), (4,)),
        lambda r, x, w, b: r.layer_norm(x, w, b),
        oracle.layer_norm,
    ),
    "cross_entropy": (
        ((5,),),
        (),
        lambda r, x: r.cross_entropy(x, _classes(r, x, 5), reduction="none"),
        lambda x: oracle.cross_entropy(x, _exact_classes(x, 5), reduction="none"),
    ),
    "linear_cross_entropy": (
        ((4,),),
        ((6, 4), (6,)),
        lambda r, x, w, b: r.linear_cross_entropy(x, w, _classes(r, x, 6), b),
        lambda x, w, b: oracle.linear_cross_entropy(x, w, _exact_classes(x, 6), b),
    ),
    "swiglu": (((4,),), (), lambda r, x: r.swiglu(x), oracle.swiglu),
    **{
        name: (
            ((3,),),
            (),
            lambda r, x, name=name: getattr(r, name)(x),
            lambda x, name=name: [oracle.ACTIVATIONS[name](row) for row in x],
        )
        for name in ("relu", "silu", "erf")
    },
    "gelu": (
        ((3,),),
        (),
        lambda r, x: r.gelu(x) - 2 * r.gelu(x, approximate="tanh"),
        lambda x: [
            oracle.ACTIVATIONS["gelu"](row) - 2 * oracle.ACTIVATIONS["gelu"](row, "tanh")
            for row in x
        ],
    ),
    "split": (((4,),), (), lambda r, x: r.split(x, (1, 3))[1], lambda x: [row[:, 1:] for row in x]),
    "rope": (((2, 4),), (), lambda r, x: r.rope(x), oracle.rope),
    "attention": (
        ((4, 4), (2, 4), (2, 3)),
        (),
        lambda r, q, k, v: r.attention(q, k, v, causal=True),
        lambda q, k, v: oracle.attention(q, k, v, causal=True)[0],
    ),
    "paged_attention": (
        ((4, 4),),
        ((450, 3, 2, 4), (450, 3, 2, 3)),
        lambda r, q, k, v: r.paged_attention(q, k, v, _page_table(q), q.lengths),
        lambda q, k, v: oracle.attention(q, _cached(q, k), _cached(q, v), causal=True)[0],
    ),
    "append_paged": (
        ((2, 4),),
        (),
        lambda r, x: r.append_paged(*_empty_caches(x), x, x, _page_table(x), x.lengths)[1],
        lambda x: _appended(x),
    ),
    "merge_attention": (
        ((4, 3), (4, 3), (4,), (4,)),
        (),
        lambda r, a, b, x, y: r.merge_attention([a, b], [x, y])[0],
        lambda a, b, x, y: [
            (np.exp(q)[..., None] * m + np.exp(p)[..., None] * n)
            / (np.exp(q) + np.exp(p))[..., None]
            for m, n, q, p in zip(a, b, x, y, strict=True)
        ],
    ),
    "gather": (
        ((3,),),
        (),
        lambda r, x: r.gather(x, _zero_index(x)),
        lambda x: [np.broadcast_to(x.concatenate()[:1], row.shape) for row in x],
    ),
    "scatter": (
        ((3,),),
        (),
        lambda r, x: r.scatter(x, _reversed_index(x), x.total_length),
        lambda x: x.concatenate()[::-1],
    ),
    "scatter_add": (
        ((3,),),
        (),
        lambda r, x: r.scatter_add(x, _zero_index(x), 2),
        lambda x: np.stack([x.concatenate().sum(0), x.template.sum(0)]),
    ),
    "group": (
        ((3,),),
        (),
        lambda r, x: r.group(x, _reversed_index(x).values % 2, 2)[0],
        lambda x: [x.concatenate()[np.arange(len(x.concatenate()))[::-1] % 2 == g] for g in (0, 1)],
    ),
    "to_padded": (
        ((3,),),
        (),
        lambda r, x: r.to_padded(x, length=130)[0],
        lambda x: x.stack(
            lambda row: np.concatenate([row, np.zeros((130 - len(row), 3), row.dtype)])
        ),
    ),
    "align": (
        ((3,), (3,)),
        (),
        lambda r, x, y: r.align(y, like=x) * x,
        lambda x, y: [p * q for p, q in zip(x, y, strict=True)],
    ),
    "from_offsets": (
        ((3,),),
        (),
        lambda r, x: r.from_offsets(x.values * 2, x.offsets),
        lambda x: [row * 2 for row in x],
    ),
    "from_cu_seqlens": (
        ((3,),),
        (),
        lambda r, x: r.from_cu_seqlens(x.values * 2, x.offsets),
        lambda x: [row * 2 for row in x],
    ),
    "from_lengths": (
        ((3,),),
        (),
        lambda r, x: r.from_lengths(x.values * 2, x.lengths),
        lambda x: [row * 2 for row in x],
    ),
    "from_segment_ids": (
        ((3,),),
        (),
        lambda r, x: r.from_segment_ids(x.values * 2, r.segment_ids(x), x.batch_size),
        lambda x: [row * 2 for row in x],
    ),
    "segment_ids": (
        ((),),
        (),
        lambda r, x: x.with_values(x.values * r.segment_ids(x)),
        lambda x: [row * i for i, row in enumerate(x)],
    ),
    "positions": (
        ((),),
        (),
        lambda r, x: x.with_values(x.values * r.positions(x)),
        lambda x: [row * np.arange(len(row)) for row in x],
    ),
    "unpack": (
        ((3,),),
        (),
        lambda r, x: x.__array_namespace__().concat(r.unpack(x), axis=0),
        Rows.concatenate,
    ),
    "pack": (((3,),), (), lambda r, x: r.pack(r.unpack(x)), list),
    "from_padded": (
        ((3,),),
        (),
        lambda r, x: r.from_padded(*r.to_padded(x, length=130), total=x.total_length),
        list,
    ),
}
#: Function -> why it cannot be compiled.
UNTRACED = {
    "validate_pages": "it reads the pages and raises",
    "pack": "the lengths come from a Python list",
    "unpack": "the sizes of the rows depend on the offsets",
    "topk": "the lengths of the result depend on the offsets",
    "same_layout": "it answers with a Python bool",
    "dropout": "the state of a generator is no array",
}  # fmt: skip
#: Function -> why it cannot be differentiated.
UNDIFFERENTIATED = {
    "append_paged": "caches take no gradient",
    "same_layout": "it answers with a Python bool",
    "validate_pages": "it reads the pages and raises",
}


def _classes(r: Any, x: scree.Array, count: int) -> scree.Array:
    """Return one class per token by its position; every third token is ignored."""
    positions, xp = r.positions(x), x.__array_namespace__()
    return x.with_values(xp.where(positions % 3 == 1, -100, positions % count), ragged_dim=0)


def _exact_classes(rows: Rows, count: int) -> list[np.ndarray]:
    """Return the classes of `_classes` in NumPy."""
    positions = (np.arange(len(row)) for row in rows)
    return [np.where(p % 3 == 1, -100, p % count) for p in positions]


def _zero_index(x: scree.Array) -> scree.Array:
    """Return the number 0 for every token."""
    return x.with_values(x.__array_namespace__().zeros_like(scree.segment_ids(x)), ragged_dim=0)


def _reversed_index(x: scree.Array) -> scree.Array:
    """Return the token numbers in reverse order."""
    ids = scree.segment_ids(x)
    xp = x.__array_namespace__()
    return x.with_values(
        x.total_length - 1 - xp.arange(x.total_length, dtype=ids.dtype, device=x.device),
        ragged_dim=0,
    )


#: Tokens per page, and pages per row: enough for every row of `LAYOUTS`.
PAGE_SIZE, PAGES_PER_ROW = 3, 44


def _page_table(x: scree.Array) -> Any:
    """Return a dense page table in which no row shares a page with another."""
    xp, n = x.__array_namespace__(), x.batch_size
    pages = xp.arange(n * PAGES_PER_ROW, dtype=x.offsets.dtype, device=x.device)
    return xp.reshape(pages, (n, PAGES_PER_ROW))


def _cached(rows: Rows, cache: np.ndarray) -> Rows:
    """Return the tokens of a cache that the rows select."""
    tokens, per_row = cache.reshape(-1, *cache.shape[2:]), PAGES_PER_ROW * PAGE_SIZE
    return Rows(
        (tokens[i * per_row : i * per_row + len(row)] for i, row in enumerate(rows)), tokens[:0]
    )


def _empty_caches(x: scree.Array) -> tuple[Any, Any]:
    xp, shape = x.__array_namespace__(), (450, PAGE_SIZE, *x.element_shape)
    return tuple(xp.zeros(shape, dtype=x.dtype, device=x.device) for _ in "kv")


def _appended(rows: Rows) -> np.ndarray:
    """Return the cache that holds the rows, and 0 elsewhere."""
    cache = np.zeros((450, PAGE_SIZE, *rows.template.shape[1:]), rows.template.dtype)
    for i, row in enumerate(rows):
        for j, token in enumerate(row):
            cache[i * PAGES_PER_ROW + j // PAGE_SIZE, j % PAGE_SIZE] = token
    return cache


def _inputs(bench: Bench, layout: Layout, name: str) -> list[Input]:
    tokens, dense, *_ = TRACED[name]
    first = bench.ragged(layout, tokens[0], "float32")
    return [
        first,
        *(bench.like(first, token) for token in tokens[1:]),
        *(bench.dense(shape, "float32") for shape in dense),
    ]


def _dense_function(bench: Bench, name: str, inputs: list[Input]) -> Callable[..., Any]:
    """Return the call as a function of dense arrays: values, dense arguments and offsets."""
    tokens, _, call, _ = TRACED[name]
    max_length = inputs[0].array.max_length

    def run(*arrays: Any) -> Any:
        *values, offsets = arrays
        first, *others = (
            scree.from_offsets(x, offsets, max_length=max_length) for x in values[: len(tokens)]
        )
        if name != "align":
            others = [scree.align(x, like=first) for x in others]
        result = call(bench.xp.ragged, first, *others, *values[len(tokens) :])
        return (result.values, result.offsets) if isinstance(result, scree.Array) else (result,)

    return run


def _values_of(inputs: list[Input]) -> list[Any]:
    return [x.array.values if isinstance(x.array, scree.Array) else x.array for x in inputs]


def check_jitted(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Compare the compiled call, which takes the offsets as an argument, with the oracle."""
    if bench.lib.jit is None:
        raise Absent("the library compiles nothing")
    inputs = _inputs(bench, layout, name)
    compiled = bench.lib.jit(_dense_function(bench, name, inputs))

    def call(*_: Any) -> Any:
        result = compiled(*_values_of(inputs), inputs[0].array.offsets)
        return scree.from_offsets(*result) if len(result) == 2 else result[0]

    bench.check(call, TRACED[name][3], *inputs, transcendental=True)


def check_gradients(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Compare gradients of a weighted sum of the finite results, along random directions."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    inputs, xp = _inputs(bench, layout, name), bench.xp
    run, offsets = _dense_function(bench, name, inputs), inputs[0].array.offsets
    weights = bench.rng.standard_normal(bench.lib.read(run(*_values_of(inputs), offsets)[0]).shape)
    library_weights = bench.lib.make(weights, dtype)

    def loss(*arrays: Any) -> Any:
        result = run(*arrays, offsets)[0]
        return xp.sum(
            xp.where(xp.isfinite(result), result, xp.zeros_like(result)) * library_weights
        )

    def reference(exact: list[Any]) -> float:
        with np.errstate(all="ignore"):
            result = TRACED[name][3](*exact)
            if isinstance(result, list):
                result = np.concatenate([np.zeros((0, *weights.shape[1:])), *result])
        return float(np.sum(np.where(np.isfinite(result), result, 0) * weights))

    gradients = [bench.lib.read(g) for g in bench.lib.grad(loss, *_values_of(inputs))]
    exact = [x.exact for x in inputs]
    for i, gradient in enumerate(gradients):
        direction = bench.rng.standard_normal(gradient.shape)
        above, below = (
            reference([*exact[:i], _add(exact[i], direction * step), *exact[i + 1 :]])
            for step in (STEP, -STEP)
        )
        expected = (above - below) / (2 * STEP)
        slope = float(np.sum(gradient * direction))
        magnitude = float(np.sum(np.abs(gradient * direction)))
        allowed = 64 * EPS["float32"] * magnitude + STEP * STEP * max(magnitude, 1)
        assert math.isfinite(slope) and abs(slope - expected) <= allowed, (
            f"argument {i}: {slope}, expected {expected} +- {allowed:.3g}"
        )


def _add(exact: Any, tokens: np.ndarray) -> Any:
    """Return the sum of an input and dense numbers; for rows, the numbers of all tokens."""
    if not isinstance(exact, Rows):
        return exact + tokens
    if not exact:
        return exact
    ends = np.cumsum([len(row) for row in exact])[:-1]
    sums = (row + part for row, part in zip(exact, np.split(tokens, ends), strict=True))
    return Rows(sums, exact.template)


def report_untraced(bench: Bench, layout: Layout, dtype: str, *, why: str) -> None:
    """Report a function that cannot be compiled."""
    raise Absent(why)


@operation("ragged.dropout: differentiated", LAYOUTS, ("float32",))
def dropout_gradients(bench: Bench, layout: Layout, dtype: str) -> None:
    """The gradient of dropout: 0 where the result is 0, and the scale factor elsewhere."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    x, generator = bench.ragged(layout, (4,), dtype, "positive").array, bench.lib.generator
    assert generator is not None

    def drop(values: Any) -> Any:
        return bench.xp.ragged.dropout(x.with_values(values), 0.25, generator(1)).values

    (gradient,) = bench.lib.grad(lambda values: bench.xp.sum(drop(values)), x.values)
    bench.close(gradient, np.where(bench.lib.read(drop(x.values)) == 0, 0, 1 / 0.75), dtype=dtype)


for _name in TRACED:
    if _name not in UNTRACED:
        operation(f"ragged.{_name}: jitted", LAYOUTS, ("float32",))(
            partial(check_jitted, name=_name)
        )
    if _name not in UNDIFFERENTIATED:
        operation(f"ragged.{_name}: differentiated", LAYOUTS, ("float32",))(
            partial(check_gradients, name=_name)
        )
for _variant, _reasons in (("jitted", UNTRACED), ("differentiated", UNDIFFERENTIATED)):
    for _name, _why in _reasons.items():
        operation(f"ragged.{_name}: {_variant}", ("plain",), ("float32",))(
            partial(report_untraced, why=_why)
        )
