"""`xp.ragged` compiled and differentiated.

Compiled calls give the same results. Gradients match finite differences of the oracle.
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
from .bench import Bench, Data
from .layouts import Layout
from .oracle import Rows
from .table import Absent, operation

Shapes = tuple[tuple[int, ...], ...]
STEP = 1e-4  # of the central differences; their error is about its square
WHERE = ("empty_between", "blocks")

#: Function -> (token shapes of the ragged arguments, shapes of the dense arguments, call, oracle).
TRACED: dict[str, tuple[Shapes, Shapes, Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (((3,),), (), lambda r, x: r.softmax(x), oracle.softmax),
    "log_softmax": (((3,),), (), lambda r, x: r.log_softmax(x), oracle.log_softmax),
    "logsumexp": (((3,),), (), lambda r, x: r.logsumexp(x), oracle.logsumexp),
    "topk": (((3,),), (), lambda r, x: r.topk(x, 2)[0], lambda x: oracle.topk(x, 2)[0]),
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
        lambda x: oracle.cross_entropy(x, _some(x, 5), reduction="none"),
    ),
    "linear_cross_entropy": (
        ((4,),),
        ((6, 4), (6,)),
        lambda r, x, w, b: r.linear_cross_entropy(x, w, _classes(r, x, 6), b),
        lambda x, w, b: oracle.linear_cross_entropy(x, w, _some(x, 6), b),
    ),
    "swiglu": (((4,),), (), lambda r, x: r.swiglu(x), oracle.swiglu),
    "split": (((4,),), (), lambda r, x: r.split(x, (1, 3))[1], lambda x: [row[:, 1:] for row in x]),
    "rope": (((2, 4),), (), lambda r, x: r.rope(x), oracle.rope),
    "attention": (
        ((4, 4), (2, 4), (2, 3)),
        (),
        lambda r, q, k, v: r.attention(q, k, v, causal=True),
        lambda q, k, v: oracle.attention(q, k, v, causal=True)[0],
    ),
    "gather": (
        ((3,),),
        (),
        lambda r, x: r.gather(x, _first(x)),
        lambda x: [np.broadcast_to(_all(x)[:1], row.shape) for row in x],
    ),
    "scatter": (
        ((3,),),
        (),
        lambda r, x: r.scatter(x, _reversed(x), x.total_length),
        lambda x: _all(x)[::-1],
    ),
    "scatter_add": (
        ((3,),),
        (),
        lambda r, x: r.scatter_add(x, _first(x), 2),
        lambda x: np.stack([_all(x).sum(0), x.template.sum(0)]),
    ),
    "group": (
        ((3,),),
        (),
        lambda r, x: r.group(x, _reversed(x).values % 2, 2)[0],
        lambda x: [_all(x)[np.arange(len(_all(x)))[::-1] % 2 == g] for g in (0, 1)],
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
        lambda x: _all(x),
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
    "pack": "the lengths come from a Python list",
    "unpack": "the sizes of the rows depend on the offsets",
    "topk": "the lengths of the result depend on the offsets",
    "same_layout": "it answers with a Python bool",
    "dropout": "the state of a generator is no array",
}  # fmt: skip


def _classes(r: Any, x: scree.Array, count: int) -> scree.Array:
    """Return one class per token by its position; every third token is ignored."""
    at, xp = r.positions(x), x.__array_namespace__()
    return x.with_values(xp.where(at % 3 == 1, -100, at % count), ragged_dim=0)


def _some(rows: Rows, count: int) -> list[np.ndarray]:
    return [
        np.where(np.arange(len(row)) % 3 == 1, -100, np.arange(len(row)) % count) for row in rows
    ]


def _first(x: scree.Array) -> scree.Array:
    """Return the number 0 for every token."""
    return x.with_values(x.__array_namespace__().zeros_like(scree.segment_ids(x)), ragged_dim=0)


def _reversed(x: scree.Array) -> scree.Array:
    """Return the token numbers in reverse order."""
    ids = scree.segment_ids(x)
    xp = x.__array_namespace__()
    return x.with_values(
        x.total_length - 1 - xp.arange(x.total_length, dtype=ids.dtype, device=x.device),
        ragged_dim=0,
    )


def _all(rows: Rows) -> np.ndarray:
    return np.concatenate([rows.template, *rows])


def _inputs(bench: Bench, layout: Layout, name: str) -> list[Data]:
    tokens, dense, *_ = TRACED[name]
    first = bench.ragged(layout, tokens[0], "float32")
    return [
        first,
        *(bench.like(first, token) for token in tokens[1:]),
        *(bench.dense(shape, "float32") for shape in dense),
    ]


def _function(bench: Bench, name: str, inputs: list[Data]) -> Callable[..., Any]:
    """Return the call on dense arrays: ragged values, dense arguments, and the offsets last."""
    tokens, _, call, _ = TRACED[name]
    longest = inputs[0].x.max_length

    def run(*arrays: Any) -> Any:
        *values, offsets = arrays
        ragged = [scree.from_offsets(x, offsets, max_length=longest) for x in values[: len(tokens)]]
        ragged = [
            ragged[0],
            *(x if name == "align" else scree.align(x, like=ragged[0]) for x in ragged[1:]),
        ]
        result = call(bench.xp.ragged, *ragged, *values[len(tokens) :])
        return (result.values, result.offsets) if isinstance(result, scree.Array) else (result,)

    return run


def _plain(inputs: list[Data]) -> list[Any]:
    return [x.x.values if isinstance(x.x, scree.Array) else x.x for x in inputs]


def jitted(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Compiled, with the offsets as an argument: the result of the oracle."""
    if bench.lib.jit is None:
        raise Absent("the library compiles nothing")
    inputs = _inputs(bench, layout, name)
    compiled = bench.lib.jit(_function(bench, name, inputs))

    def call(*_: Any) -> Any:
        result = compiled(*_plain(inputs), inputs[0].x.offsets)
        return scree.from_offsets(*result) if len(result) == 2 else result[0]

    bench.check(call, TRACED[name][3], *inputs, curved=True)


def differentiated(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The gradient of a weighted sum of the finite results, along random directions."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    inputs, xp, make = _inputs(bench, layout, name), bench.xp, bench.lib.make
    run, offsets = _function(bench, name, inputs), inputs[0].x.offsets
    weights = bench.rng.standard_normal(bench.lib.read(run(*_plain(inputs), offsets)[0]).shape)
    dense = make(weights, dtype)

    def loss(*arrays: Any) -> Any:
        result = run(*arrays, offsets)[0]
        return xp.sum(xp.where(xp.isfinite(result), result, xp.zeros_like(result)) * dense)

    def truth(exact: list[Any]) -> float:
        with np.errstate(all="ignore"):
            result = TRACED[name][3](*exact)
            whole = (
                np.concatenate([np.zeros((0, *weights.shape[1:])), *result])
                if isinstance(result, list)
                else result
            )
        return float(np.sum(np.where(np.isfinite(whole), whole, 0) * weights))

    gradients = [bench.lib.read(g) for g in bench.lib.grad(loss, *_plain(inputs))]
    for i, gradient in enumerate(gradients):
        direction = bench.rng.standard_normal(gradient.shape)
        up, down = (
            truth(
                [
                    _moved(x.exact, direction * by) if j == i else x.exact
                    for j, x in enumerate(inputs)
                ]
            )
            for by in (STEP, -STEP)
        )
        expected, size = (up - down) / (2 * STEP), float(np.sum(np.abs(gradient * direction)))
        allowed = 64 * EPS["float32"] * size + STEP * STEP * max(size, 1)
        slope = float(np.sum(gradient * direction))
        assert math.isfinite(slope) and abs(slope - expected) <= allowed, (
            f"argument {i}: {slope}, expected {expected} +- {allowed:.3g}"
        )


def _moved(exact: Any, by: np.ndarray) -> Any:
    if not isinstance(exact, Rows):
        return exact + by
    if not exact:
        return exact
    ends = np.cumsum([len(row) for row in exact])[:-1]
    return Rows(
        (row + part for row, part in zip(exact, np.split(by, ends), strict=True)), exact.template
    )


def never(bench: Bench, layout: Layout, dtype: str, *, why: str) -> None:
    """Report a function that cannot be compiled."""
    raise Absent(why)


@operation("ragged.dropout: differentiated", WHERE, ("float32",))
def dropped(bench: Bench, layout: Layout, dtype: str) -> None:
    """The gradient is 0 where the result is 0, and the scale factor elsewhere."""
    if bench.lib.grad is None:
        raise Absent("the library has no gradients")
    x, generator = bench.ragged(layout, (4,), dtype, "positive").x, bench.lib.generator
    assert generator is not None

    def drop(values: Any) -> Any:
        return bench.xp.ragged.dropout(x.with_values(values), 0.25, generator(1)).values

    (gradient,) = bench.lib.grad(lambda values: bench.xp.sum(drop(values)), x.values)
    bench.close(gradient, np.where(bench.lib.read(drop(x.values)) == 0, 0, 1 / 0.75), dtype=dtype)


operation("ragged.same_layout: differentiated", ("plain",), ("float32",))(
    partial(never, why=UNTRACED["same_layout"])
)
for _name in TRACED:
    if _name not in UNTRACED:
        operation(f"ragged.{_name}: jitted", WHERE, ("float32",))(partial(jitted, name=_name))
    operation(f"ragged.{_name}: differentiated", WHERE, ("float32",))(
        partial(differentiated, name=_name)
    )
for _name, _why in UNTRACED.items():
    operation(f"ragged.{_name}: jitted", ("plain",), ("float32",))(partial(never, why=_why))
