"""Cases of `xp.ragged`: each operation against its definition."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

import scree

from . import oracle
from .backends import EPS, HALF
from .bench import Bench, Data
from .layouts import ALL, Layout, lengths_of
from .table import DTYPES, operation

LARGE = ("float16", "bfloat16")


# ------------------------------------------------------------------------------------------ softmax
def softmax(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Along the ragged axis, for every position of that axis in the values."""
    for token, dim, draw in (
        ((), 0, "any"),
        ((2, 3), 0, "any"),
        ((3,), 1, "any"),
        ((3,), 0, "large"),
    ):
        x = bench.ragged(layout, token, dtype, draw, dim)
        bench.check(
            lambda a: bench.run(getattr(bench.xp.ragged, name), a),
            partial(getattr(oracle, name), axis=dim),
            x,
            curved=True,
            note=f"token {token}, ragged_dim={dim}, {draw}: ",
        )


for _name in ("softmax", "log_softmax", "logsumexp"):
    operation(f"ragged.{_name}", kernel=_name)(partial(softmax, name=_name))


# --------------------------------------------------------------------------------------------- topk
@operation("ragged.topk", ALL, (*DTYPES, "int32", "uint8"), kernel="topk")
def topk(bench: Bench, layout: Layout, dtype: str) -> None:
    """Values and positions, largest and smallest, for k of 0, few, and more than a row has.

    The draws contain equal tokens, and NaN and infinity where the dtype has them.
    """
    draws = ("any", "ties", "gaps") if dtype in DTYPES else ("natural",)
    for token, dim in (((), 0), ((2, 3), 0), ((3,), 1)):
        for draw in draws:
            x = bench.ragged(layout, token, dtype, draw, dim)
            for k, largest in bench.some(
                ((0, True), (1, True), (3, True), (3, False), (600, False))
            ):
                note = f"token {token}, ragged_dim={dim}, {draw}, k={k}, largest={largest}: "
                values, positions = bench.check(
                    lambda a: bench.run(bench.xp.ragged.topk, a, k, largest=largest),
                    partial(oracle.topk, k=k, largest=largest, axis=dim),
                    x,
                    note=note,
                )
                assert scree.same_layout(values, positions), f"{note}expected one layout"


# -------------------------------------------------------------------------------------------- norms
def _of_sum(norm: Any, dtype: str) -> Any:
    """Return the norm of the sum of two arrays, the sum rounded to `dtype`, and that sum."""
    stage = oracle.rounded(dtype) if dtype in HALF else lambda x: x

    def truth(rows: Any, residual: Any) -> Any:
        total = oracle.Rows(
            [stage(a + b) for a, b in zip(rows, residual, strict=True)], rows.template
        )
        return norm(total), list(total)

    return truth


@operation("ragged.rms_norm", kernel="rms_norm")
def rms_norm(bench: Bench, layout: Layout, dtype: str) -> None:
    """With and without weight, on ragged and dense arrays.

    One draw has ``x ** 2`` above the range of half precision.
    """
    weight = bench.dense((4,), dtype, "positive")
    for token, draw in (((4,), "any"), ((2, 4), "any"), ((4,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.rms_norm, a),
            oracle.rms_norm,
            x,
            note=f"{token}, {draw}: ",
        )
        bench.check(
            lambda a, w: bench.run(bench.xp.ragged.rms_norm, a, w), oracle.rms_norm, x, weight
        )
        bench.check(
            lambda a: bench.run(bench.xp.ragged.rms_norm, a, eps=0.5),
            partial(oracle.rms_norm, eps=0.5),
            x,
        )
        bench.check(
            lambda a, r: bench.run(bench.xp.ragged.rms_norm, a, residual=r),
            _of_sum(oracle.rms_norm, dtype),
            x,
            bench.like(x, token, dtype),
        )
    dense = bench.dense((3, 4), dtype)
    bench.check(
        lambda a, w: bench.run(bench.xp.ragged.rms_norm, a, w),
        lambda a, w: oracle.rms_norm([a], w)[0],
        dense,
        weight,
    )  # type: ignore[arg-type]


@operation("ragged.layer_norm", kernel="layer_norm")
def layer_norm(bench: Bench, layout: Layout, dtype: str) -> None:
    """With and without weight and bias, on ragged and dense arrays.

    One draw has a variance above the range of half precision.
    """
    weight, bias = bench.dense((4,), dtype, "positive"), bench.dense((4,), dtype)
    for token, draw in (((4,), "any"), ((2, 4), "any"), ((4,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.layer_norm, a),
            oracle.layer_norm,
            x,
            note=f"{token}, {draw}: ",
        )
        bench.check(
            lambda a, w: bench.run(bench.xp.ragged.layer_norm, a, w), oracle.layer_norm, x, weight
        )
        bench.check(
            lambda a, w, b: bench.run(bench.xp.ragged.layer_norm, a, w, b, eps=0.5),
            partial(oracle.layer_norm, eps=0.5),
            x,
            weight,
            bias,
        )
        bench.check(
            lambda a, r: bench.run(bench.xp.ragged.layer_norm, a, residual=r),
            _of_sum(oracle.layer_norm, dtype),
            x,
            bench.like(x, token, dtype),
        )
    dense = bench.dense((3, 4), dtype)
    bench.check(
        lambda a, w, b: bench.run(bench.xp.ragged.layer_norm, a, w, b),
        lambda a, w, b: oracle.layer_norm([a], w, b)[0],
        dense,
        weight,
        bias,
    )  # type: ignore[arg-type]


@operation("ragged.swiglu", kernel="swiglu")
def swiglu(bench: Bench, layout: Layout, dtype: str) -> None:
    """Ragged and dense arrays, also gates whose exponential exceeds the range of the dtype."""
    for token, draw in (((6,), "any"), ((2, 4), "any"), ((6,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.swiglu, a),
            oracle.swiglu,
            x,
            curved=True,
            note=f"{token}, {draw}: ",
        )
    dense = bench.dense((3, 4), dtype)
    bench.check(
        lambda a: bench.run(bench.xp.ragged.swiglu, a),
        lambda a: oracle.swiglu([a])[0],
        dense,  # type: ignore[arg-type]
        curved=True,
    )


@operation("ragged.split", kernel="split")
def split(bench: Bench, layout: Layout, dtype: str) -> None:
    """Along every axis of the tokens, before and after a ragged axis, and on dense arrays.

    One part is empty.
    """
    for token, dim, axis in (((5,), 0, 2), ((5, 2), 0, 2), ((2, 5), 0, -1), ((5,), 1, 1)):
        x = bench.ragged(layout, token, dtype, "any", dim)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.split, a, (2, 0, 3), axis=axis),
            partial(oracle.split, sizes=(2, 0, 3), axis=axis - 1 if axis > 0 else axis),
            x,
            note=f"{token}, {dim}, {axis}: ",
        )
    bench.check(
        lambda a: bench.run(bench.xp.ragged.split, a, (1, 3)),
        lambda a: (a[:, :1], a[:, 1:]),
        bench.dense((3, 4), dtype),
    )


# ------------------------------------------------------------------------------------ cross-entropy
def _classes(bench: Bench, x: Data, count: int, ignored: int = -100) -> Data:
    """Return one class per token; a third of the tokens are ignored."""
    total = x.x.total_length
    numbers = np.where(bench.rng.random(total) < 0.3, ignored, bench.rng.integers(0, count, total))
    targets = x.x.with_values(bench.lib.make(numbers.astype(np.int32), "int32"), ragged_dim=0)
    return Data(targets, bench.rows(targets))


def _wide(dtype: str) -> str:
    return "float32" if dtype in HALF else dtype


def _worst(truth: Any, dtype: str, options: dict[str, Any], low: Any = None) -> Any:
    """Return a reference for a reduction to one number, whose errors do not cancel by chance.

    It adds the errors of the tokens and the error of a running sum.
    """
    reduction = options.get("reduction", "mean")
    if reduction in ("none", "row_mean") or dtype == "float64":
        return low and partial(low, **options)

    def rough(*exact: Any) -> np.ndarray:
        near, rounded = (
            np.concatenate([[], *f(*x, **{**options, "reduction": "none"})])
            for f, x in ((truth, exact), (low or truth, [x.astype(np.float32) for x in exact]))
        )
        error = np.sum(np.maximum(np.abs(near - rounded), EPS["float32"] / 2 * np.abs(near)))
        orders = [np.random.default_rng(i).permutation(near.astype(np.float32)) for i in range(8)]
        error += max(
            abs(np.add.accumulate([0, *x], dtype=np.float32)[-1] - np.sum(near)) for x in orders
        )
        exact_result = truth(*exact, **options)
        return np.asarray(
            exact_result + error * (1 if reduction == "sum" else exact_result / (np.sum(near) or 1))
        )

    return rough


@operation("ragged.cross_entropy", kernel="cross_entropy")
def cross_entropy(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every reduction, large logits, two classes, another `ignore_index`, and dense arrays."""
    for classes, draw, options in bench.some(
        (
            (5, "any", {"reduction": "row_mean"}),
            (5, "any", {"reduction": "none"}),
            (5, "any", {"reduction": "sum"}),
            (5, "any", {}),
            (2, "any", {"reduction": "none"}),
            (5, "any", {"ignore_index": 2}),
            (33, "large", {"reduction": "none"}),
        )
    ):
        x = bench.ragged(layout, (classes,), dtype, draw)
        targets = _classes(bench, x, classes, options.get("ignore_index", -100))
        truth = partial(oracle.cross_entropy, targets=targets.exact)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.cross_entropy, a, targets.x, **options),
            partial(truth, **options),
            x,
            rough=_worst(truth, dtype, options),
            dtype=_wide(dtype),
            curved=True,
            note=f"{classes}, {draw}, {options}: ",
        )
    dense = Data(x.x.values, bench.lib.read(x.x.values))
    bench.check(
        lambda a: bench.run(bench.xp.ragged.cross_entropy, a, targets.x.values, reduction="none"),
        lambda a: np.concatenate(
            [np.zeros(0, a.dtype), *truth(x.exact.astype(a.dtype), reduction="none")]
        ),
        dense,
        dtype=_wide(dtype),
        curved=True,
        note="dense: ",
    )


@operation("ragged.linear_cross_entropy", kernel="linear_cross_entropy")
def linear_cross_entropy(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every reduction, with and without bias."""
    weight, bias = bench.dense((6, 4), dtype), bench.dense((6,), dtype)
    for options in bench.some(
        ({"reduction": "none"}, {"reduction": "row_mean"}, {"reduction": "sum"}, {})
    ):
        x = bench.ragged(layout, (4,), dtype)
        targets = _classes(bench, x, 6)
        for parameters in ((weight,), (weight, bias)):

            def truth(a: Any, w: Any, *b: Any, **more: Any) -> Any:
                return oracle.linear_cross_entropy(a, w, targets.exact, *b, **more)

            low = partial(truth, stage=oracle.rounded(dtype)) if dtype in HALF else None
            bench.check(
                lambda a, w, *b: bench.run(
                    bench.xp.ragged.linear_cross_entropy, a, w, targets.x, *b, **options
                ),
                partial(truth, **options),
                x,
                *parameters,
                rough=_worst(truth, dtype, options, low),
                dtype=_wide(dtype),
                curved=True,
                note=f"{options}: ",
            )


@operation(
    "ragged.linear_cross_entropy: in parts",
    ("empty_between",),
    ("float32", "float64"),
    kernel="linear_cross_entropy",
)
def in_parts(bench: Bench, layout: Layout, dtype: str) -> None:
    """So many classes that the logits of only a few tokens exist at a time.

    Gradients are checked where the library has them.
    """
    x, weight = bench.ragged(layout, (2,), dtype), bench.dense((1 << 20, 2), dtype)
    targets = _classes(bench, x, len(weight.exact))

    def run(values: Any, w: Any) -> Any:
        return bench.run(
            bench.xp.ragged.linear_cross_entropy,
            x.x.with_values(values),
            w,
            targets.x,
            reduction="sum",
        )

    def truth(a: Any, w: Any, **options: Any) -> Any:
        return oracle.linear_cross_entropy(a, w, targets.exact, **options)

    def slopes(a: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of the sum with respect to the tokens and to the weight."""
        tokens, classes = (
            np.concatenate([a.template, *a]),
            np.concatenate([np.zeros(0, np.int64), *targets.exact]),
        )
        surplus = np.zeros((len(tokens), len(w)), tokens.dtype)
        for i in np.flatnonzero(classes >= 0):
            surplus[i] = np.exp(w @ tokens[i])
            surplus[i] /= np.add.accumulate(surplus[i])[-1]
            surplus[i, classes[i]] -= 1
        return surplus @ w, surplus.T @ tokens

    bench.check(
        lambda a, w: run(a.values, w),
        partial(truth, reduction="sum"),
        x,
        weight,
        curved=True,
        rough=_worst(truth, dtype, {"reduction": "sum"}),
    )
    if bench.lib.grad is not None:
        exact, low = (
            (x.exact, weight.exact),
            (x.exact.astype(np.float32), weight.exact.astype(np.float32)),
        )
        for got, expected, rough in zip(
            bench.lib.grad(run, x.x.values, weight.x), slopes(*exact), slopes(*low), strict=True
        ):
            bench.close(got, expected, expected, rough, dtype=dtype)


# --------------------------------------------------------------------------------------------- rope
@operation("ragged.rope", kernel="rope")
def rope(bench: Bench, layout: Layout, dtype: str) -> None:
    """Both pairings, another base, and rows that continue; queries and keys together."""
    starts = [3 * i for i in range(len(lengths_of(layout)))]
    start = bench.lib.make(np.asarray(starts, np.int32), "int32")
    for token in ((8,), (2, 8)):
        x = bench.ragged(layout, token, dtype)
        for options in ({}, {"interleaved": True}, {"theta": 500.0}):
            bench.check(
                lambda a: bench.run(bench.xp.ragged.rope, a, **options),
                partial(oracle.rope, **options),
                x,
                curved=True,
                note=f"{token}, {options}: ",
            )
        bench.check(
            lambda a: bench.run(bench.xp.ragged.rope, a, start=start),
            partial(oracle.rope, start=starts),
            x,
            curved=True,
        )
        bench.check(
            lambda q, k: bench.run(bench.xp.ragged.rope, q, k),
            lambda q, k: (oracle.rope(q), oracle.rope(k)),
            x,
            bench.like(x, (*(1,) * (len(token) - 1), 8), dtype),
            curved=True,
        )


# ------------------------------------------------------------------------------------------ routing
def _places(bench: Bench, layout: Layout, size: int, distinct: bool) -> Data:
    total = sum(lengths_of(layout))
    numbers = (
        bench.rng.permutation(size)[:total] if distinct else bench.rng.integers(0, size, total)
    )
    return bench.of(bench.lib.make(numbers.astype(np.int32), "int32"), lengths_of(layout))


@operation("ragged.gather", kernel="gather")
def gather(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens of ragged and dense arrays by a ragged index; rows by a dense index."""
    source = bench.ragged([2, 0, 3], (2,), dtype)
    index = _places(bench, layout, 5, distinct=False)
    bench.check(
        lambda a, i: bench.run(bench.xp.ragged.gather, a, i),
        lambda a, i: [np.concatenate(a)[row] for row in i],
        source,
        index,
    )
    bench.check(
        lambda a, i: bench.run(bench.xp.ragged.gather, a, i),
        lambda a, i: [a[row] for row in i],
        bench.dense((5, 2), dtype),
        index,
    )
    rows = bench.lib.make(np.asarray([2, 0, 0]), "int32")
    bench.check(
        lambda a: bench.xp.ragged.gather(a, rows, axis=0), lambda a: [a[2], a[0], a[0]], source
    )


@operation("ragged.scatter", kernel="scatter")
def scatter(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens to distinct positions and to equal ones, where the last token wins.

    Also rows to positions.
    """
    x, total = bench.ragged(layout, (2,), dtype), sum(lengths_of(layout))
    for distinct in (True, False):
        size = total + 3
        index = _places(bench, layout, size, distinct)

        def truth(a: Any, i: Any) -> np.ndarray:
            out = np.zeros((size, 2), a.template.dtype)
            for row, places in zip(a, i, strict=True):
                for token, place in zip(row, places, strict=True):
                    out[place] = token
            return out

        bench.check(lambda a, i: bench.run(bench.xp.ragged.scatter, a, i, size), truth, x, index)
    if bench.kernel is None:
        n = len(lengths_of(layout))
        places = bench.rng.permutation(n + 2)[:n]
        rows: list[Any] = [x.exact.template] * (n + 2)
        for row, place in zip(x.exact, places.tolist(), strict=True):
            rows[place] = row
        where = bench.lib.make(places.astype(np.int32), "int32")
        bench.check(lambda a: bench.xp.ragged.scatter(a, where, n + 2, axis=0), lambda a: rows, x)


@operation("ragged.scatter_add", dtypes=(*DTYPES, "int32"), kernel="scatter")
def scatter_add(bench: Bench, layout: Layout, dtype: str) -> None:
    """Sums of tokens with equal positions; many tokens share few positions."""
    for size in (3, sum(lengths_of(layout)) + 3):
        x, index = bench.ragged(layout, (2,), dtype), _places(bench, layout, size, distinct=False)

        def truth(a: Any, i: Any) -> np.ndarray:
            out = np.zeros((size, 2), a.template.dtype)
            for row, places in zip(a, i, strict=True):
                for token, place in zip(row, places, strict=True):
                    out[place] += token
            return out

        bench.check(
            lambda a, i: bench.run(bench.xp.ragged.scatter_add, a, i, size), truth, x, index
        )
        flat = bench.of(index.x.values, lengths_of(layout))
        bench.check(
            lambda a: bench.run(bench.xp.ragged.scatter_add, a, flat.x.values, size),
            lambda a: truth(a, index.exact),
            x,
        )


@operation("ragged.group")
def group(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens sorted into groups and scattered back, as in a mixture of experts."""
    x, total = bench.ragged(layout, (2,), dtype), sum(lengths_of(layout))
    for groups in (1, 4):
        ids = bench.rng.integers(0, groups, total).astype(np.int32)
        grouped, index = bench.xp.ragged.group(x.x, bench.lib.make(ids, "int32"), groups)
        tokens = np.concatenate([x.exact.template, *x.exact])
        bench.close(grouped, [tokens[ids == g] for g in range(groups)], dtype=dtype)
        bench.close(index, [np.flatnonzero(ids == g) for g in range(groups)])
        bench.close(bench.xp.ragged.scatter(grouped, index, total), tokens, dtype=dtype)


# ------------------------------------------------------------------------------------------ dropout
@operation("ragged.dropout", ALL)
def dropout(bench: Bench, layout: Layout, dtype: str) -> None:
    """Zeros at the given rate, the other values scaled; the same key gives the same zeros.

    A library without a generator must refuse the call clearly.
    """
    x, generator = bench.ragged(layout, (4,), dtype, "positive"), bench.lib.generator
    if generator is None:
        try:
            bench.xp.ragged.dropout(x.x, 0.25, 0)
        except TypeError as error:
            assert "random numbers" in str(error)
            return
        raise AssertionError(f"dropout found random numbers in {bench.lib.name}")
    got, again, other = (bench.xp.ragged.dropout(x.x, 0.25, generator(seed)) for seed in (1, 1, 2))
    rows = bench.rows(got)
    bench.close(
        got,
        [np.where(g == 0, 0, row / 0.75) for g, row in zip(rows, x.exact, strict=True)],
        dtype=dtype,
    )
    np.testing.assert_array_equal(bench.read(got.values), bench.read(again.values))
    count = 4 * sum(lengths_of(layout))
    if count > 1000:
        zeros = sum(int(np.sum(row == 0)) for row in rows)
        assert abs(zeros - count / 4) < 5 * math.sqrt(count * 0.25 * 0.75), (
            f"{zeros} zeros in {count} numbers at rate 0.25"
        )
        assert (bench.read(other.values) != bench.read(got.values)).any()
    bench.close(bench.xp.ragged.dropout(x.x, 0.0, generator(1)), list(x.exact), dtype=dtype)


# ---------------------------------------------------------------------------------------- attention
#: Case -> ((heads, kv_heads, head_dim, value_dim), options).
ATTENTION: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "attention": ((2, 2, 8, 8), {}),
    "attention: causal": ((2, 2, 8, 8), {"causal": True}),
    "attention: causal window": ((2, 2, 8, 8), {"causal": True, "window": 3}),
    "attention: causal window=1": ((2, 2, 8, 8), {"causal": True, "window": 1}),
    "attention: causal (5, 0)": ((2, 2, 8, 8), {"causal": True, "window": (5, 0)}),
    "attention: (2, 1)": ((2, 2, 8, 8), {"window": (2, 1)}),
    "attention: (0, 0)": ((2, 2, 8, 8), {"window": (0, 0)}),
    "attention: (40, None)": ((2, 2, 8, 8), {"window": (40, None)}),
    "attention: (None, 2)": ((2, 2, 8, 8), {"window": (None, 2)}),
    "attention: scale": ((2, 2, 8, 8), {"scale": 0.2}),
    "attention: softcap": ((2, 2, 8, 8), {"softcap": 1.5, "causal": True}),
    "attention: grouped heads": ((4, 2, 8, 8), {"causal": True}),
    "attention: one key head": ((3, 1, 8, 8), {}),
    "attention: value_dim": ((2, 2, 8, 5), {"causal": True}),
    "attention: everything": (
        (4, 2, 8, 5),
        {"causal": True, "window": 33, "softcap": 3.0, "scale": 0.4},
    ),
}


def attention(
    bench: Bench,
    layout: Layout,
    dtype: str,
    *,
    sizes: tuple[int, int, int, int],
    options: dict[str, Any],
    cross: bool = False,
    draw: str = "any",
) -> None:
    """Output and log-sum-exp; with `cross`, the keys have another layout with empty rows."""
    heads, kv_heads, dim, value_dim = sizes
    lengths = lengths_of(layout)
    keys = [*lengths[2:], *lengths[:2]] if cross else lengths
    q = bench.ragged(layout, (heads, dim), dtype, draw)
    if cross:
        k = bench.ragged(keys, (kv_heads, dim), dtype, draw)
        v = bench.like(k, (kv_heads, value_dim), dtype, draw)
    else:
        k, v = (
            bench.like(q, (kv_heads, dim), dtype, draw),
            bench.like(q, (kv_heads, value_dim), dtype, draw),
        )
    rough, runs = None, scree.explain("attention", q.x, k.x, v.x, **options).provider
    # Kernels may round what eager code of this dtype rounds.
    if (bench.kernel or runs) != "standard" and dtype in HALF:
        rough = partial(oracle.attention, stage=oracle.rounded(dtype), **options)

    def both(*x: Any) -> Any:
        return bench.run(bench.xp.ragged.attention, *x, return_lse=True, **options)

    def alone(*x: Any) -> Any:
        return bench.run(bench.xp.ragged.attention, *x, **options)

    _, lse = bench.check(
        both, partial(oracle.attention, **options), q, k, v, rough=rough, curved=True
    )
    expected = "float64" if dtype == "float64" else "float32"
    assert bench.lib.dtype_name(lse) == expected, (
        f"lse: expected {expected}, got {bench.lib.dtype_name(lse)}"
    )
    bench.check(
        alone,
        lambda *x: oracle.attention(*x, **options)[0],
        q,
        k,
        v,
        rough=rough and (lambda *x: rough(*x)[0]),
        curved=True,
        note="without lse: ",
    )


for _name, (_sizes, _options) in ATTENTION.items():
    _where = ALL if _name in ("attention", "attention: causal") else (ALL[0], "blocks", "all_empty")
    operation(f"ragged.{_name}", _where, kernel="attention")(
        partial(attention, sizes=_sizes, options=_options)
    )
for _name in (
    "attention",
    "attention: causal",
    "attention: causal window",
    "attention: (2, 1)",
    "attention: everything",
):
    _sizes, _options = ATTENTION[_name]
    _where = ALL if _name == "attention: causal" else (ALL[0], "blocks")
    operation(
        f"ragged.attention: cross{_name.removeprefix('attention').replace(':', '')}",
        _where,
        kernel="attention",
    )(partial(attention, sizes=_sizes, options=_options, cross=True))
operation("ragged.attention: large numbers", (ALL[0],), (*LARGE, "float32"), kernel="attention")(
    partial(attention, sizes=(2, 2, 8, 8), options={"causal": True, "scale": 1e-4}, draw="large")
)


@operation("ragged.attention: ALiBi and sinks", (ALL[0], "blocks", "all_empty"), kernel="attention")
def biases(bench: Bench, layout: Layout, dtype: str) -> None:
    """ALiBi slopes and sinks per head, alone and with options that change the scores."""
    slopes, sinks = np.asarray([0.5, 0.125, 0.0, 1.0]), np.asarray([0.0, 2.0, -1.0, 0.5])
    lengths = lengths_of(layout)
    q = bench.ragged(lengths, (4, 8), dtype)
    k = bench.ragged([*lengths[2:], *lengths[:2]], (2, 8), dtype)
    for parameters, options in (
        ({"alibi_slopes": slopes}, {}),
        ({"alibi_slopes": slopes}, {"causal": True, "window": 9, "softcap": 2.0}),
        ({"sinks": sinks}, {"causal": True}),
        ({"alibi_slopes": slopes, "sinks": sinks}, {"window": (5, 2), "deterministic": True}),
    ):
        arrays = {
            name: bench.lib.make(x, "float64" if dtype == "float64" else "float32")
            for name, x in parameters.items()
        }
        oracle_options = {name: x for name, x in options.items() if name != "deterministic"}
        rough = (
            partial(oracle.attention, stage=oracle.rounded(dtype), **parameters, **oracle_options)
            if dtype in HALF
            else None
        )
        bench.check(
            lambda *x, arrays=arrays, options=options: bench.run(
                bench.xp.ragged.attention, *x, return_lse=True, **arrays, **options
            ),
            partial(oracle.attention, **parameters, **oracle_options),
            q,
            k,
            k,
            rough=rough,
            curved=True,
            note=f"{[*parameters]}, {options}: ",
        )


@operation("ragged.attention: is O(total)", ("one_long",), ("float32",))
def memory(bench: Bench, layout: Layout, dtype: str) -> None:
    """One long row among many short rows must not allocate scores of n x longest^2.

    The result exists within the memory of a test.
    """
    lengths = [2048] + [16] * 300  # 301 x 2048^2 scores would be 5 GB
    q = bench.ragged(lengths, (1, 4), dtype)
    out = bench.xp.ragged.attention(q.x, q.x, q.x, causal=True)
    picks = (1, 150, 300)
    few = [bench.rows(out)[i] for i in picks]
    rows = [q.exact[i] for i in picks]
    expected, _ = oracle.attention(rows, rows, rows, causal=True)  # type: ignore[arg-type]
    rough, _ = oracle.attention(
        *([row.astype(np.float32) for row in rows] for _ in range(3)), causal=True
    )  # type: ignore[arg-type]
    part = bench.of(bench.lib.make(np.concatenate(few), dtype), [16] * 3)
    bench.close(part.x, expected, expected, rough)
    assert isinstance(out, scree.Array)
