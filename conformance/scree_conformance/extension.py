"""Cases of `xp.ragged`: each operation against its definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

import scree

from . import oracle
from .backends import EPS, HALF
from .bench import Bench, Input
from .layouts import ALL, Layout, lengths_of
from .table import DTYPES, operation

LARGE = ("float16", "bfloat16")


# ------------------------------------------------------------------------------------------ softmax
def softmax(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Along the ragged axis, for every position of that axis in the values."""
    for token, ragged_dim, draw in (
        ((), 0, "any"),
        ((2, 3), 0, "any"),
        ((3,), 1, "any"),
        ((3,), 0, "large"),
    ):
        x = bench.ragged(layout, token, dtype, draw, ragged_dim)
        bench.check(
            lambda a: bench.run(getattr(bench.xp.ragged, name), a),
            partial(getattr(oracle, name), axis=ragged_dim),
            x,
            transcendental=True,
            note=f"token {token}, ragged_dim={ragged_dim}, {draw}: ",
        )


def softmax_of_elements(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Along element axes before and after the ragged axis, of size 0 too."""

    def reference(rows: oracle.Rows, axis: int) -> list[np.ndarray]:
        compute = getattr(oracle, name)
        return [compute(oracle.Rows([row], row), axis=axis)[0] for row in rows]

    for token, ragged_dim, axis, draw in bench.select(
        (
            ((3,), 0, -1, "any"),
            ((2, 3), 0, 2, "any"),
            ((3, 2), 1, 1, "any"),
            ((3,), 0, 2, "large"),
            ((2, 0), 0, 3, "any"),
        )
    ):
        x = bench.ragged(layout, token, dtype, draw, ragged_dim)
        bench.check(
            lambda a: getattr(bench.xp.ragged, name)(a, axis=axis),
            partial(reference, axis=axis if axis < 0 else axis - 1),
            x,
            transcendental=True,
            note=f"token {token}, ragged_dim={ragged_dim}, axis={axis}, {draw}: ",
        )


for _name in ("softmax", "log_softmax", "logsumexp"):
    operation(f"ragged.{_name}", kernel=_name)(partial(softmax, name=_name))
    operation(f"ragged.{_name}: element axes")(partial(softmax_of_elements, name=_name))


# --------------------------------------------------------------------------------------------- topk
@operation("ragged.topk", ALL, (*DTYPES, "int32", "uint8"), kernel="topk")
def topk(bench: Bench, layout: Layout, dtype: str) -> None:
    """Values and positions, largest and smallest, for k = 0, small k, and k above the row length.

    The draws contain equal tokens, and NaN and infinity where the dtype has them.
    """
    draws = ("any", "ties", "gaps") if dtype in DTYPES else ("natural",)
    for token, ragged_dim in (((), 0), ((2, 3), 0), ((3,), 1)):
        for draw in draws:
            x = bench.ragged(layout, token, dtype, draw, ragged_dim)
            for k, largest in bench.select(
                ((0, True), (1, True), (3, True), (3, False), (600, False))
            ):
                note = f"token {token}, ragged_dim={ragged_dim}, {draw}, k={k}, largest={largest}: "
                values, positions = bench.check(
                    lambda a: bench.run(bench.xp.ragged.topk, a, k, largest=largest),
                    partial(oracle.topk, k=k, largest=largest, axis=ragged_dim),
                    x,
                    note=note,
                )
                assert scree.same_layout(values, positions), f"{note}expected one layout"


# ------------------------------------------------------------------------------------ shift, repeat
@operation("ragged.shift", ALL, (*DTYPES, "int32", "uint8"))
def shift(bench: Bench, layout: Layout, dtype: str) -> None:
    """Both directions, beyond the length of every row, with fill values, for every ragged axis."""
    for token, ragged_dim, n, fill_value in bench.select(
        (
            ((), 0, 1, 0),
            ((2, 3), 0, -1, 7),
            ((3,), 1, 2, 0),
            ((), 0, -700, 3),
            ((3,), 0, 10**12, 0),
            ((0,), 0, -3, 0),
            ((), 0, 0, 7),
        )
    ):
        draw = "special" if dtype in DTYPES else "natural"
        x = bench.ragged(layout, token, dtype, draw, ragged_dim)
        bench.check(
            lambda a: bench.xp.ragged.shift(a, n, fill_value=fill_value),
            partial(oracle.shift, n=n, fill_value=fill_value, axis=ragged_dim),
            x,
            note=f"token {token}, ragged_dim={ragged_dim}, n={n}: ",
        )


@operation("ragged.broadcast_rows", ALL, (*DTYPES, "int32", "uint8"))
def broadcast_rows(bench: Bench, layout: Layout, dtype: str) -> None:
    """Entries with and without axes, on layouts of arrays with other axes and dtypes."""
    draw = "special" if dtype in DTYPES else "natural"
    for token, ragged_dim in bench.select((((), 0), ((2, 3), 0), ((3,), 1), ((0,), 0))):
        like = bench.ragged(layout, token, "float32", "any", ragged_dim)
        per_row = bench.dense((len(lengths_of(layout)), *token), dtype, draw)
        bench.check(
            lambda a: bench.xp.ragged.broadcast_rows(a, like.array),
            lambda a: [np.repeat(entry[None], n, 0) for entry, n in zip(a, lengths_of(layout))],
            per_row,
            note=f"token {token}, ragged_dim={ragged_dim}: ",
        )


# -------------------------------------------------------------------------------------- convolution
@operation("ragged.conv1d", kernel="conv1d")
def conv1d(bench: Bench, layout: Layout, dtype: str) -> None:
    """Dense, grouped and depthwise kernels of several widths and dilations, beyond the rows too."""
    for shape, groups, padding, dilation, has_bias in bench.select(
        (
            ((4, 1, 4), 4, "causal", 1, True),
            ((5, 4, 3), 1, "same", 1, True),
            ((6, 2, 2), 2, "same", 1, False),
            ((8, 1, 3), 4, "causal", 2, False),
            ((4, 1, 3), 4, "same", 700, False),
            ((2, 4, 1), 1, "causal", 1, False),
        )
    ):
        x = bench.ragged(layout, (4,), dtype)
        weight = bench.dense(shape, dtype)
        bias = [bench.dense(shape[:1], dtype)] if has_bias else []
        options = {"padding": padding, "groups": groups, "dilation": dilation}
        bench.check(
            lambda a, w, *b: bench.run(bench.xp.ragged.conv1d, a, w, *b, **options),
            partial(oracle.conv1d, **options),
            x,
            weight,
            *bias,
            note=f"{shape}, {options}: ",
        )


# -------------------------------------------------------------------------------------------- norms
def _with_residual(norm: Any, dtype: str) -> Any:
    """Return a reference for `norm` with a residual: the norm of the sum, and the sum itself.

    The sum is rounded to `dtype` after the norm.
    """
    round_to_dtype = oracle.round_to(dtype) if dtype in HALF else lambda x: x

    def reference(rows: Any, residual: Any) -> Any:
        sums = [a + b for a, b in zip(rows, residual, strict=True)]
        return norm(oracle.Rows(sums, rows.template)), [round_to_dtype(x) for x in sums]

    return reference


@operation("ragged.rms_norm", kernel="rms_norm")
def rms_norm(bench: Bench, layout: Layout, dtype: str) -> None:
    """Check calls with and without weight and residual, on ragged and dense arrays.

    One draw has ``x ** 2`` above the range of half precision.
    """
    norm = partial(bench.run, bench.xp.ragged.rms_norm)
    weight = bench.dense((4,), dtype, "positive")
    for token, draw in (((4,), "any"), ((2, 4), "any"), ((4,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        residual = bench.like(x, token, dtype)
        note = f"{token}, {draw}: "
        bench.check(norm, oracle.rms_norm, x, note=note)
        bench.check(norm, oracle.rms_norm, x, weight, note=note)
        bench.check(partial(norm, eps=0.5), partial(oracle.rms_norm, eps=0.5), x, note=note)
        bench.check(
            lambda a, r: norm(a, residual=r),
            _with_residual(oracle.rms_norm, dtype),
            x,
            residual,
            note=note,
        )
    dense = bench.dense((3, 4), dtype)
    bench.check(norm, lambda a, w: oracle.rms_norm([a], w)[0], dense, weight)


@operation("ragged.layer_norm", kernel="layer_norm")
def layer_norm(bench: Bench, layout: Layout, dtype: str) -> None:
    """Check calls with and without weight and bias, on ragged and dense arrays.

    One draw has a variance above the range of half precision.
    """
    norm = partial(bench.run, bench.xp.ragged.layer_norm)
    weight, bias = bench.dense((4,), dtype, "positive"), bench.dense((4,), dtype)
    for token, draw in (((4,), "any"), ((2, 4), "any"), ((4,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        residual = bench.like(x, token, dtype)
        note = f"{token}, {draw}: "
        bench.check(norm, oracle.layer_norm, x, note=note)
        bench.check(norm, oracle.layer_norm, x, weight, note=note)
        bench.check(
            partial(norm, eps=0.5), partial(oracle.layer_norm, eps=0.5), x, weight, bias, note=note
        )
        bench.check(
            lambda a, r: norm(a, residual=r),
            _with_residual(oracle.layer_norm, dtype),
            x,
            residual,
            note=note,
        )
    dense = bench.dense((3, 4), dtype)
    bench.check(norm, lambda a, w, b: oracle.layer_norm([a], w, b)[0], dense, weight, bias)


@operation("ragged.swiglu", kernel="swiglu")
def swiglu(bench: Bench, layout: Layout, dtype: str) -> None:
    """Ragged and dense arrays, also gates whose exponential exceeds the range of the dtype."""
    run = partial(bench.run, bench.xp.ragged.swiglu)
    for token, draw in (((6,), "any"), ((2, 4), "any"), ((6,), "large")):
        x = bench.ragged(layout, token, dtype, draw)
        bench.check(run, oracle.swiglu, x, transcendental=True, note=f"{token}, {draw}: ")
    dense = bench.dense((3, 4), dtype)
    bench.check(run, lambda a: oracle.swiglu([a])[0], dense, transcendental=True)


def activation(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Ragged and dense arrays, large magnitudes, zeros, infinities and NaN."""
    compute = oracle.ACTIVATIONS[name]
    for token, ragged_dim, draw in (
        ((), 0, "any"),
        ((2, 3), 0, "special"),
        ((3,), 1, "any"),
        ((3,), 0, "large"),
    ):
        x = bench.ragged(layout, token, dtype, draw, ragged_dim)
        for options in ({}, {"approximate": "tanh"}) if name == "gelu" else ({},):
            bench.check(
                lambda a: getattr(bench.xp.ragged, name)(a, **options),
                lambda rows: [compute(row, **options) for row in rows],
                x,
                transcendental=True,
                note=f"token {token}, ragged_dim={ragged_dim}, {draw}, {options}: ",
            )
    dense = bench.dense((3, 4), dtype)
    bench.check(getattr(bench.xp.ragged, name), compute, dense, transcendental=True)


for _name in oracle.ACTIVATIONS:
    operation(f"ragged.{_name}")(partial(activation, name=_name))


@operation("ragged.split", kernel="split")
def split(bench: Bench, layout: Layout, dtype: str) -> None:
    """Along every axis of the tokens, before and after a ragged axis, and on dense arrays.

    One part is empty.
    """
    for token, ragged_dim, axis in (((5,), 0, 2), ((5, 2), 0, 2), ((2, 5), 0, -1), ((5,), 1, 1)):
        x = bench.ragged(layout, token, dtype, "any", ragged_dim)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.split, a, (2, 0, 3), axis=axis),
            partial(oracle.split, sizes=(2, 0, 3), axis=axis - 1 if axis > 0 else axis),
            x,
            note=f"{token}, {ragged_dim}, {axis}: ",
        )
    bench.check(
        lambda a: bench.run(bench.xp.ragged.split, a, (1, 3)),
        lambda a: (a[:, :1], a[:, 1:]),
        bench.dense((3, 4), dtype),
    )


# ------------------------------------------------------------------------------------ cross-entropy
def _classes(bench: Bench, x: Input, count: int, ignored: int = -100) -> Input:
    """Return one class per token; a third of the tokens are ignored."""
    total_length = x.array.total_length
    classes = np.where(
        bench.rng.random(total_length) < 0.3, ignored, bench.rng.integers(0, count, total_length)
    )
    targets = x.array.with_values(bench.lib.make(classes.astype(np.int32), "int32"), ragged_dim=0)
    return Input(targets, bench.rows(targets))


def _accumulator_dtype(dtype: str) -> str:
    return "float32" if dtype in HALF else dtype


def _sum_of_errors(
    reference: Any, dtype: str, options: dict[str, Any], rounded_reference: Any = None
) -> Any:
    """Return a low-precision reference for a reduction to one number.

    Rounding errors of a sum can cancel by chance. This reference adds the magnitudes of the errors
    of all tokens, and the error of a running sum.
    """
    reduction = options.get("reduction", "mean")
    if reduction in ("none", "row_mean") or dtype == "float64":
        return rounded_reference and partial(rounded_reference, **options)

    def token_losses(f: Callable[..., Any], inputs: Iterable[Any]) -> np.ndarray:
        return np.concatenate([[], *f(*inputs, **{**options, "reduction": "none"})])

    def low_precision(*exact: Any) -> np.ndarray:
        precise = token_losses(reference, exact)
        rounded = token_losses(
            rounded_reference or reference, [x.astype(np.float32) for x in exact]
        )
        rounding = EPS["float32"] / 2 * np.abs(precise)
        sum_of_losses = np.sum(precise)
        error = np.sum(np.maximum(np.abs(precise - rounded), rounding))
        permutations = (
            np.random.default_rng(seed).permutation(precise.astype(np.float32)) for seed in range(8)
        )
        error += max(
            abs(np.add.accumulate([0, *losses], dtype=np.float32)[-1] - sum_of_losses)
            for losses in permutations
        )
        if "class_weights" in options and reduction == "mean":
            # The mean also divides by a running sum of weights, whose rounding errors partly cancel.
            error += EPS["float32"] / 2 * precise.size**0.5 * abs(sum_of_losses)
        result = reference(*exact, **options)
        # The mean divides the error of the sum by the number of counted tokens.
        return np.asarray(
            result + error * (1 if reduction == "sum" else result / (sum_of_losses or 1))
        )

    return low_precision


@operation("ragged.cross_entropy", kernel="cross_entropy")
def cross_entropy(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every reduction, large logits, two classes, another `ignore_index`, and dense arrays."""
    for classes, draw, options in bench.select(
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
        reference = partial(oracle.cross_entropy, targets=targets.exact)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.cross_entropy, a, targets.array, **options),
            partial(reference, **options),
            x,
            low_precision=_sum_of_errors(reference, dtype, options),
            dtype=_accumulator_dtype(dtype),
            transcendental=True,
            note=f"{classes}, {draw}, {options}: ",
        )
    dense = Input(x.array.values, bench.lib.read(x.array.values))
    bench.check(
        lambda a: bench.run(
            bench.xp.ragged.cross_entropy, a, targets.array.values, reduction="none"
        ),
        lambda a: np.concatenate(
            [np.zeros(0, a.dtype), *reference(x.exact.astype(a.dtype), reduction="none")]
        ),
        dense,
        dtype=_accumulator_dtype(dtype),
        transcendental=True,
        note="dense: ",
    )


#: Options of the losses; class weights are drawn.
_LOSS_OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1},
    {"softcap": 2.0},
    {"z_loss": 0.2},
    {"class_weights": True, "reduction": "none"},
    {"class_weights": True, "label_smoothing": 0.3},
    {"class_weights": True, "z_loss": 0.1, "reduction": "sum"},
    {"class_weights": True, "label_smoothing": 0.2, "softcap": 3.0, "z_loss": 0.1},
    {"class_weights": True, "label_smoothing": 1.0, "softcap": 3.0, "reduction": "row_mean"},
    {"label_smoothing": 0.2, "z_loss": 0.1, "reduction": "none"},
)


@operation("ragged.cross_entropy: options", kernel="cross_entropy")
def loss_options(bench: Bench, layout: Layout, dtype: str) -> None:
    """Label smoothing, softcap, z-loss, class weights, and the accuracy, alone and together."""
    weights = bench.dense((7,), _accumulator_dtype(dtype), "positive")
    for options in bench.select(_LOSS_OPTIONS):
        x = bench.ragged(layout, (7,), dtype)
        targets = _classes(bench, x, 7)
        arguments, exact_arguments = dict(options), dict(options)
        if "class_weights" in options:
            arguments["class_weights"] = weights.array
            exact_arguments["class_weights"] = weights.exact
        reference = partial(oracle.cross_entropy, targets=targets.exact)
        bench.check(
            lambda a: bench.run(bench.xp.ragged.cross_entropy, a, targets.array, **arguments),
            partial(reference, **exact_arguments),
            x,
            low_precision=_sum_of_errors(reference, dtype, exact_arguments),
            dtype=_accumulator_dtype(dtype),
            transcendental=True,
            note=f"{options}: ",
        )
    for reduction in ("mean", "sum", "row_mean", "none"):
        x = bench.ragged(layout, (3,), dtype)
        targets = _classes(bench, x, 3)
        bench.check(
            lambda a: bench.run(
                bench.xp.ragged.cross_entropy,
                a,
                targets.array,
                reduction=reduction,
                return_accuracy=True,
            )[1],
            partial(oracle.accuracy, targets=targets.exact, reduction=reduction),
            x,
            dtype=_accumulator_dtype(dtype),
            note=f"accuracy, {reduction}: ",
        )


@operation("ragged.linear_cross_entropy", kernel="linear_cross_entropy")
def linear_cross_entropy(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every reduction, with and without bias, and options of the loss."""
    weight, bias = bench.dense((6, 4), dtype), bench.dense((6,), dtype)
    for options in bench.select(
        (
            {"reduction": "none"},
            {"reduction": "row_mean"},
            {"reduction": "sum"},
            {},
            {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1},
        )
    ):
        x = bench.ragged(layout, (4,), dtype)
        targets = _classes(bench, x, 6)
        for parameters in ((weight,), (weight, bias)):

            def reference(a: Any, w: Any, *b: Any, **keywords: Any) -> Any:
                return oracle.linear_cross_entropy(a, w, targets.exact, *b, **keywords)

            rounded_reference = (
                partial(reference, rounding=oracle.round_to(dtype)) if dtype in HALF else None
            )
            bench.check(
                lambda a, w, *b: bench.run(
                    bench.xp.ragged.linear_cross_entropy, a, w, targets.array, *b, **options
                ),
                partial(reference, **options),
                x,
                *parameters,
                low_precision=_sum_of_errors(reference, dtype, options, rounded_reference),
                dtype=_accumulator_dtype(dtype),
                transcendental=True,
                note=f"{options}: ",
            )


@operation(
    "ragged.linear_cross_entropy: in parts",
    ("empty_between",),
    ("float32", "float64"),
    kernel="linear_cross_entropy",
)
def in_parts(bench: Bench, layout: Layout, dtype: str) -> None:
    """Results and gradients with so many classes that only a few tokens' logits exist at a time."""
    x, weight = bench.ragged(layout, (2,), dtype), bench.dense((1 << 20, 2), dtype)
    targets = _classes(bench, x, len(weight.exact))

    def run(values: Any, w: Any) -> Any:
        return bench.run(
            bench.xp.ragged.linear_cross_entropy,
            x.array.with_values(values),
            w,
            targets.array,
            reduction="sum",
        )

    def reference(a: Any, w: Any, **options: Any) -> Any:
        return oracle.linear_cross_entropy(a, w, targets.exact, **options)

    def gradients(a: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of the sum with respect to the tokens and to the weight."""
        tokens = np.concatenate([a.template, *a])
        classes = np.concatenate([np.zeros(0, np.int64), *targets.exact])
        dlogits = np.zeros((len(tokens), len(w)), tokens.dtype)
        for i in np.flatnonzero(classes >= 0):
            dlogits[i] = np.exp(w @ tokens[i])
            dlogits[i] /= np.add.accumulate(dlogits[i])[-1]
            dlogits[i, classes[i]] -= 1
        return dlogits @ w, dlogits.T @ tokens

    bench.check(
        lambda a, w: run(a.values, w),
        partial(reference, reduction="sum"),
        x,
        weight,
        transcendental=True,
        low_precision=_sum_of_errors(reference, dtype, {"reduction": "sum"}),
    )
    if bench.lib.grad is not None:
        for got, expected, low_precision in zip(
            bench.lib.grad(run, x.array.values, weight.array),
            gradients(x.exact, weight.exact),
            gradients(x.exact.astype(np.float32), weight.exact.astype(np.float32)),
            strict=True,
        ):
            bench.close(got, expected, expected, low_precision, dtype=dtype)


# --------------------------------------------------------------------------------------------- rope
@operation("ragged.rope", kernel="rope")
def rope(bench: Bench, layout: Layout, dtype: str) -> None:
    """Both pairings, another base, start positions, and queries and keys in one call."""
    starts = [3 * i for i in range(len(lengths_of(layout)))]
    start = bench.lib.make(np.asarray(starts, np.int32), "int32")
    for token in ((8,), (2, 8)):
        x = bench.ragged(layout, token, dtype)
        for options in ({}, {"interleaved": True}, {"theta": 500.0}):
            bench.check(
                lambda a: bench.run(bench.xp.ragged.rope, a, **options),
                partial(oracle.rope, **options),
                x,
                transcendental=True,
                note=f"{token}, {options}: ",
            )
        bench.check(
            lambda a: bench.run(bench.xp.ragged.rope, a, start=start),
            partial(oracle.rope, start=starts),
            x,
            transcendental=True,
        )
        bench.check(
            lambda q, k: bench.run(bench.xp.ragged.rope, q, k),
            lambda q, k: (oracle.rope(q), oracle.rope(k)),
            x,
            bench.like(x, (*(1,) * (len(token) - 1), 8), dtype),
            transcendental=True,
        )


#: Positions of the tables of cosines and sines, more than any row has.
POSITIONS = 600
#: Options of `rope`; frequencies and tables are given by their number of pairs.
ROPE: dict[str, list[dict[str, Any]]] = {
    "partial": [{"rotary_dim": 4}, {"rotary_dim": 2, "theta": 300.0, "interleaved": True}],
    "inv_freq": [{"inv_freq": 4}, {"inv_freq": 3, "interleaved": True}],
    "cos and sin": [{"cos": 4}, {"cos": 1, "interleaved": True}],
    "scaling": [
        {"scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "theta": 500.0,
            "scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "theta": 500.0,
            "rotary_dim": 6,
            "scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 300,
            },
        },
    ],
}


def rope_arrays(bench: Bench, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options with the numbers of frequencies and tables, as arrays and as NumPy arrays."""
    exact, rng = dict(options), np.random.default_rng(0)
    if "inv_freq" in options:
        exact["inv_freq"] = rng.uniform(-1, 1, options["inv_freq"]).astype(np.float32)
    if "cos" in options:
        tables = rng.standard_normal((2, POSITIONS, options["cos"])).astype(np.float32)
        exact["cos"], exact["sin"] = tables
    arrays = {
        name: bench.lib.make(x, "float32") if isinstance(x, np.ndarray) else x
        for name, x in exact.items()
    }
    return arrays, exact


def rope_options(bench: Bench, layout: Layout, dtype: str, *, cases: list[dict[str, Any]]) -> None:
    """Queries and keys with one option of `rope`, at positions from 0 and from a start on."""
    starts = [3 * (i % 5) for i in range(len(lengths_of(layout)))]
    start = bench.lib.make(np.asarray(starts, np.int32), "int32")
    x = bench.ragged(layout, (2, 8), dtype)
    for case in cases:
        arrays, exact = rope_arrays(bench, case)
        bench.check(
            lambda a, arrays=arrays: bench.run(bench.xp.ragged.rope, a, start=start, **arrays),
            partial(oracle.rope, start=starts, **exact),
            x,
            transcendental=True,
            note=f"{case}: ",
        )
        bench.check(
            lambda q, k, arrays=arrays: bench.run(bench.xp.ragged.rope, q, k, **arrays),
            lambda q, k, exact=exact: (oracle.rope(q, **exact), oracle.rope(k, **exact)),
            x,
            bench.like(x, (1, 8), dtype),
            transcendental=True,
            note=f"{case}: ",
        )


for _rope_name, _rope_cases in ROPE.items():
    operation(f"ragged.rope: {_rope_name}", kernel="rope")(partial(rope_options, cases=_rope_cases))


# ------------------------------------------------------------------------------- gather and scatter
def _random_index(bench: Bench, layout: Layout, size: int, distinct: bool) -> Input:
    total_length = sum(lengths_of(layout))
    positions = (
        bench.rng.permutation(size)[:total_length]
        if distinct
        else bench.rng.integers(0, size, total_length)
    )
    return bench.of(bench.lib.make(positions.astype(np.int32), "int32"), lengths_of(layout))


@operation("ragged.gather", kernel="gather")
def gather(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens of ragged and dense arrays by a ragged index; rows by a dense index."""
    source = bench.ragged([2, 0, 3], (2,), dtype)
    index = _random_index(bench, layout, 5, distinct=False)
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
    """Tokens to distinct and to equal positions, and rows to positions.

    Of tokens with equal positions, the last one is stored.
    """
    x, total_length = bench.ragged(layout, (2,), dtype), sum(lengths_of(layout))
    for distinct in (True, False):
        size = total_length + 3
        index = _random_index(bench, layout, size, distinct)

        def reference(a: Any, i: Any) -> np.ndarray:
            out = np.zeros((size, 2), a.template.dtype)
            for row, positions in zip(a, i, strict=True):
                for token, position in zip(row, positions, strict=True):
                    out[position] = token
            return out

        bench.check(
            lambda a, i: bench.run(bench.xp.ragged.scatter, a, i, size), reference, x, index
        )
    if bench.kernel is None:
        n = len(lengths_of(layout))
        positions = bench.rng.permutation(n + 2)[:n]
        rows: list[Any] = [x.exact.template] * (n + 2)
        for row, position in zip(x.exact, positions.tolist(), strict=True):
            rows[position] = row
        row_index = bench.lib.make(positions.astype(np.int32), "int32")
        bench.check(
            lambda a: bench.xp.ragged.scatter(a, row_index, n + 2, axis=0), lambda a: rows, x
        )


@operation("ragged.scatter_add", dtypes=(*DTYPES, "int32"), kernel="scatter")
def scatter_add(bench: Bench, layout: Layout, dtype: str) -> None:
    """Sums of tokens with equal positions; many tokens share few positions."""
    for size in (3, sum(lengths_of(layout)) + 3):
        x, index = (
            bench.ragged(layout, (2,), dtype),
            _random_index(bench, layout, size, distinct=False),
        )

        def reference(a: Any, i: Any) -> np.ndarray:
            out = np.zeros((size, 2), a.template.dtype)
            for row, positions in zip(a, i, strict=True):
                for token, position in zip(row, positions, strict=True):
                    out[position] += token
            return out

        bench.check(
            lambda a, i: bench.run(bench.xp.ragged.scatter_add, a, i, size), reference, x, index
        )
        bench.check(
            lambda a: bench.run(bench.xp.ragged.scatter_add, a, index.array.values, size),
            lambda a: reference(a, index.exact),
            x,
        )


@operation("ragged.group")
def group(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens sorted into groups and scattered back, as in a mixture of experts."""
    x, total_length = bench.ragged(layout, (2,), dtype), sum(lengths_of(layout))
    for groups in (1, 4):
        ids = bench.rng.integers(0, groups, total_length).astype(np.int32)
        grouped, index = bench.xp.ragged.group(x.array, bench.lib.make(ids, "int32"), groups)
        tokens = np.concatenate([x.exact.template, *x.exact])
        bench.close(grouped, [tokens[ids == g] for g in range(groups)], dtype=dtype)
        bench.close(index, [np.flatnonzero(ids == g) for g in range(groups)])
        bench.close(bench.xp.ragged.scatter(grouped, index, total_length), tokens, dtype=dtype)


# ------------------------------------------------------------------------------------------ dropout
@operation("ragged.dropout", ALL)
def dropout(bench: Bench, layout: Layout, dtype: str) -> None:
    """Zeros at the given rate, the remaining values scaled; the same key gives the same zeros.

    A library without a generator must raise an error that names the missing random numbers.
    """
    x, generator = bench.ragged(layout, (4,), dtype, "positive"), bench.lib.generator
    if generator is None:
        try:
            bench.xp.ragged.dropout(x.array, 0.25, 0)
        except TypeError as error:
            assert "random numbers" in str(error)
            return
        raise AssertionError(f"dropout did not raise in {bench.lib.name}, without random numbers")
    got, repeated, other_seed = (
        bench.xp.ragged.dropout(x.array, 0.25, generator(seed)) for seed in (1, 1, 2)
    )
    rows = bench.rows(got)
    bench.close(
        got,
        [np.where(dropped == 0, 0, row / 0.75) for dropped, row in zip(rows, x.exact, strict=True)],
        dtype=dtype,
    )
    np.testing.assert_array_equal(bench.read(got.values), bench.read(repeated.values))
    count = 4 * sum(lengths_of(layout))
    if count > 1000:
        zeros = sum(int(np.sum(row == 0)) for row in rows)
        assert abs(zeros - count / 4) < 5 * math.sqrt(count * 0.25 * 0.75), (
            f"{zeros} zeros in {count} numbers at rate 0.25"
        )
        assert (bench.read(other_seed.values) != bench.read(got.values)).any()
    bench.close(bench.xp.ragged.dropout(x.array, 0.0, generator(1)), list(x.exact), dtype=dtype)


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
    """Output and log-sum-exp; with `cross`, the keys have another layout than the queries."""
    heads, kv_heads, head_dim, value_dim = sizes
    lengths = lengths_of(layout)
    key_lengths = [*lengths[2:], *lengths[:2]] if cross else lengths
    q = bench.ragged(layout, (heads, head_dim), dtype, draw)
    if cross:
        k = bench.ragged(key_lengths, (kv_heads, head_dim), dtype, draw)
        v = bench.like(k, (kv_heads, value_dim), dtype, draw)
    else:
        k, v = (
            bench.like(q, (kv_heads, head_dim), dtype, draw),
            bench.like(q, (kv_heads, value_dim), dtype, draw),
        )
    low_precision = None
    provider = scree.explain("attention", q.array, k.array, v.array, **options).provider
    # Kernels may store scores and weights in half precision, as an eager implementation does.
    if (bench.kernel or provider) != "standard" and dtype in HALF:
        low_precision = partial(oracle.attention, rounding=oracle.round_to(dtype), **options)

    attend = partial(bench.run, bench.xp.ragged.attention, **options)
    _, lse = bench.check(
        partial(attend, return_lse=True),
        partial(oracle.attention, **options),
        q,
        k,
        v,
        low_precision=low_precision,
        transcendental=True,
    )
    expected = "float64" if dtype == "float64" else "float32"
    assert bench.lib.dtype_name(lse) == expected, (
        f"lse: expected {expected}, got {bench.lib.dtype_name(lse)}"
    )
    bench.check(
        attend,
        lambda *x: oracle.attention(*x, **options)[0],
        q,
        k,
        v,
        low_precision=low_precision and (lambda *x: low_precision(*x)[0]),
        transcendental=True,
        note="without lse: ",
    )


for _name, (_sizes, _options) in ATTENTION.items():
    _layouts = (
        ALL if _name in ("attention", "attention: causal") else (ALL[0], "blocks", "all_empty")
    )
    operation(f"ragged.{_name}", _layouts, kernel="attention")(
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
    _layouts = ALL if _name == "attention: causal" else (ALL[0], "blocks")
    operation(
        f"ragged.attention: cross{_name.removeprefix('attention').replace(':', '')}",
        _layouts,
        kernel="attention",
    )(partial(attention, sizes=_sizes, options=_options, cross=True))
operation("ragged.attention: large numbers", (ALL[0],), (*LARGE, "float32"), kernel="attention")(
    partial(attention, sizes=(2, 2, 8, 8), options={"causal": True, "scale": 1e-4}, draw="large")
)


@operation("ragged.attention: ALiBi and sinks", (ALL[0], "blocks", "all_empty"), kernel="attention")
def biases(bench: Bench, layout: Layout, dtype: str) -> None:
    """ALiBi slopes and sinks, alone and with options that change the scores."""
    slopes, sinks = np.asarray([0.5, 0.125, 0.0, 1.0]), np.asarray([0.0, 2.0, -1.0, 0.5])
    lengths = lengths_of(layout)
    per_row = slopes * (0.25 * np.arange(len(lengths)) % 2)[:, None]
    q = bench.ragged(lengths, (4, 8), dtype)
    k = bench.ragged([*lengths[2:], *lengths[:2]], (2, 8), dtype)
    # The cases of a library that compiles every shape select the second and the third option of each
    # group of three. They contain every parameter and option.
    variants: list[tuple[dict[str, np.ndarray], dict[str, Any]]] = [
        ({"alibi_slopes": slopes}, {}),
        ({"alibi_slopes": slopes}, {"causal": True, "window": 9, "softcap": 2.0}),
        ({"alibi_slopes": per_row}, {"causal": True}),
        ({"sinks": sinks}, {"causal": True}),
        ({"alibi_slopes": per_row, "sinks": sinks}, {"window": (70, 3), "softcap": 2.0}),
        ({"alibi_slopes": slopes, "sinks": sinks}, {"window": (5, 2), "deterministic": True}),
    ]
    for parameters, options in bench.select(variants):
        arrays = {
            name: bench.lib.make(x, "float64" if dtype == "float64" else "float32")
            for name, x in parameters.items()
        }
        oracle_options = {name: x for name, x in options.items() if name != "deterministic"}
        reference = partial(oracle.attention, **parameters, **oracle_options)
        low_precision = (
            partial(reference, rounding=oracle.round_to(dtype)) if dtype in HALF else None
        )
        bench.check(
            lambda *x, arrays=arrays, options=options: bench.run(
                bench.xp.ragged.attention, *x, return_lse=True, **arrays, **options
            ),
            reference,
            q,
            k,
            k,
            low_precision=low_precision,
            transcendental=True,
            note=f"{[*parameters]}, {options}: ",
        )


@operation("ragged.attention: dropout", (ALL[0], "blocks", "all_empty"), kernel="attention")
def attention_dropout(bench: Bench, layout: Layout, dtype: str) -> None:
    """Dropout by a number and by an array as seed, with sinks and without."""
    lengths = lengths_of(layout)
    q = bench.ragged(lengths, (4, 8), dtype)
    k = bench.ragged([*lengths[2:], *lengths[:2]], (2, 8), dtype)
    sinks = np.asarray([0.0, 2.0, -1.0, 0.5])
    wide = "float64" if dtype == "float64" else "float32"
    # Each is selected by one case of a library that compiles every shape.
    variants: list[tuple[float, int, bool, dict[str, Any]]] = [
        (0.5, (3 << 40) + 5, False, {}),
        (0.1, 12, True, {"causal": True, "sinks": sinks}),
        (0.9, 7, True, {"window": (70, 3), "softcap": 2.0}),
    ]
    for dropout, seed, is_array, options in bench.select(variants):
        arrays: dict[str, Any] = {
            "seed": bench.lib.make(np.asarray(seed), "int32") if is_array else seed
        }
        if "sinks" in options:
            arrays["sinks"] = bench.lib.make(sinks, wide)
        reference = partial(oracle.attention, dropout=dropout, seed=seed, **options)
        low_precision = (
            partial(reference, rounding=oracle.round_to(dtype)) if dtype in HALF else None
        )
        bench.check(
            lambda *x, arrays={**options, **arrays}, dropout=dropout: bench.run(
                bench.xp.ragged.attention, *x, return_lse=True, dropout=dropout, **arrays
            ),
            reference,
            q,
            k,
            k,
            low_precision=low_precision,
            transcendental=True,
            note=f"dropout {dropout}, {[*options]}: ",
        )


@operation("ragged.attention: is O(total)", ("one_long",), ("float32",))
def memory(bench: Bench, layout: Layout, dtype: str) -> None:
    """One long row among many short rows must not allocate n x max_length^2 scores."""
    # 301 x 2048^2 scores would need 5 GB, more than the memory of a test run.
    lengths = [2048] + [16] * 300
    q = bench.ragged(lengths, (1, 4), dtype)
    out = bench.xp.ragged.attention(q.array, q.array, q.array, causal=True)
    short_rows = (1, 150, 300)
    out_rows = [bench.rows(out)[i] for i in short_rows]
    rows = [q.exact[i] for i in short_rows]
    expected, _ = oracle.attention(rows, rows, rows, causal=True)
    low_precision, _ = oracle.attention(
        *([row.astype(np.float32) for row in rows] for _ in range(3)), causal=True
    )
    got = bench.of(bench.lib.make(np.concatenate(out_rows), dtype), [16] * 3)
    bench.close(got.array, expected, expected, low_precision)
    assert isinstance(out, scree.Array)
