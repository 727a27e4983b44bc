"""Random calls against the oracle: ``python -m scree_conformance fuzz --minutes 2 --seed 0``.

Each case draws a layout, a dtype, a function with its options, and its arguments. The number of a
case determines all of it; a failure prints the command that repeats the case. Where a library
accepts tokens after the last row (PyTorch and MLX), half of the cases have such a tail.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

import scree

from . import oracle
from .backends import LIBRARIES, load
from .bench import Bench, Input
from .oracle import Rows

FLOATS = ("float32", "float32", "float64", "float16", "bfloat16")
NUMBERS = (*FLOATS, "int32", "int64", "int8", "uint8")
#: Values of the tail, which no result may depend on.
TAIL_FILLS = (0, 1, float("nan"), float("inf"), -float("inf"), 3e38, 100)
WITH_TAIL = ("torch", "mlx")
MAX_FAILURES = 20
#: NumPy's warnings about the statistics of too few numbers, which random rows cause.
NO_TOKENS = "Degrees of freedom <= 0 for slice|Mean of empty slice"
FACTOR = 16.0  # on top of the factor of the conformance suite


class Case(Bench):
    """The random choices of one case, and the comparison of its result."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(load(name))
        self.rng = np.random.default_rng(number)
        self.lengths = self.draw_lengths()
        self.has_tail = name in WITH_TAIL and bool(self.lengths) and self.flag()
        self.log: list[str] = []

    # ------------------------------------------------------------------------------------- choices
    def integer(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        """Draw True or False."""
        return bool(self.rng.integers(2))

    def one_of(self, options: Iterable[Any]) -> Any:
        """Draw one of the options."""
        options = list(options)
        return options[self.integer(0, len(options) - 1)]

    def draw_lengths(self) -> list[int]:
        """Draw row lengths: any, many short ones, none, all empty, or one long row among others."""
        count = self.integer(0, 7)
        drawn = self.one_of(
            (
                [self.integer(0, 6) for _ in range(count)],
                [self.integer(0, 70) for _ in range(count)],
                [self.integer(0, 2) for _ in range(5 * count)],
                [0] * count,
                [*([1] * count), self.integer(30, 400), *([0] * count)],
            )
        )
        return [int(n) for n in drawn]

    def dtype(self, names: Iterable[str]) -> str:
        """Draw a dtype that the library has."""
        return self.one_of(name for name in names if name in self.lib.dtypes)

    # -------------------------------------------------------------------------------------- inputs
    def rows(self, x: scree.Array) -> Rows:
        """Return the rows of a ragged array, without the tail."""
        values, offsets = self.lib.read(x.values), self.lib.read(x.offsets)
        before = (slice(None),) * x.ragged_dim
        rows = [values[(*before, slice(int(a), int(b)))] for a, b in zip(offsets, offsets[1:])]
        return Rows(rows, values[(*before, slice(0, 0))])

    def array(
        self,
        dtype: str,
        token: tuple[int, ...] = (),
        draw: str = "any",
        ragged_dim: int = 0,
        like: scree.Array | None = None,
        lengths: list[int] | None = None,
    ) -> Input:
        """Draw a ragged array, with a tail if the case has one; on the layout of `like` if given."""
        lengths = self.lengths if lengths is None else lengths
        total = sum(lengths)
        tail = 0
        if like is not None:
            tail = like.total_length - total
        elif self.has_tail:
            tail = self.integer(1, 40)
        shape = (*token[:ragged_dim], total + tail, *token[ragged_dim:])
        values = self.numbers(shape, dtype, draw)
        values[(slice(None),) * ragged_dim + (slice(total, None),)] = self.fill(values)
        made = self.lib.make(values, dtype)
        self.log.append(f"{dtype} {token} ragged_dim={ragged_dim} {draw}")
        if like is not None:
            x = like.with_values(made, ragged_dim=ragged_dim)
            return Input(x, self.rows(x))
        offset_dtype = "int64" if "int64" in self.lib.dtypes and self.flag() else "int32"
        offsets = self.lib.make(np.cumsum([0, *lengths]), offset_dtype)
        bound = max(lengths, default=0) + self.integer(0, 3)
        longest = bound if self.has_tail or self.flag() else None
        if self.has_tail:
            x = scree.Array.unchecked(made, offsets, ragged_dim, longest)
        else:
            x = scree.from_offsets(made, offsets, ragged_dim=ragged_dim, max_length=longest)
        return Input(x, self.rows(x))

    def numbers(self, shape: tuple[int, ...], dtype: str, draw: str) -> np.ndarray:
        """Draw numbers that the dtype holds."""
        if dtype == "bool":
            return self.rng.integers(0, 2, shape).astype(bool)
        if "int" in dtype:
            return self.rng.integers(0 if dtype[0] == "u" else -6, 7, shape)
        values: np.ndarray = np.asarray(DRAWS[draw](self.rng, shape), np.float64)
        return values

    def fill(self, values: np.ndarray) -> Any:
        """Draw the value of the tail."""
        if values.dtype == bool:
            return self.flag()
        return self.integer(0, 100) if values.dtype.kind in "iu" else self.one_of(TAIL_FILLS)

    # ---------------------------------------------------------------------------------- comparison
    def close(
        self, got: Any, expected: Any, *args: Any, scale: float = 1.0, **options: Any
    ) -> None:
        """Compare as the suite does, with a larger tolerance; dtypes are checked there."""
        options["dtype"] = None
        super().close(got, expected, *args, scale=scale * FACTOR, **options)

    def compare(self, call: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> None:
        """Compare the call with the reference in float64."""
        self.check(call, reference, *args, token_orders=1, transcendental=True)


DRAWS: dict[str, Callable[[np.random.Generator, Any], np.ndarray]] = {
    "any": lambda rng, shape: 2 * rng.standard_normal(shape),
    "near1": lambda rng, shape: np.exp(0.05 * rng.standard_normal(shape)),
    "ties": lambda rng, shape: rng.integers(-2, 3, shape).astype(float),
    "special": lambda rng, shape: rng.choice([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.5, 2.0], shape),
    "some nan": lambda rng, shape: np.where(
        rng.random(shape) < 0.05, np.nan, rng.standard_normal(shape)
    ),
}


def token_shape(case: Case, most: int = 3) -> tuple[tuple[int, ...], int]:
    """Draw the shape of a token and the ragged axis; axes may be empty."""
    token = tuple(
        case.one_of((0, 1, 2, 3)) if case.integer(0, 9) == 0 else case.integer(1, 4)
        for _ in range(case.integer(0, most))
    )
    return token, case.integer(0, len(token))


# ----------------------------------------------------------------------------------- the functions
def reduction(case: Case) -> None:
    """Reduce any axes that include the ragged axis, element axes, or everything."""
    name = case.one_of("sum mean prod max min var std any all count_nonzero".split())
    names: tuple[str, ...] = NUMBERS
    if name in ("any", "all", "prod"):  # products of integers overflow
        names = ("bool", "float32", "int8") if name != "prod" else FLOATS
    token, dim = token_shape(case)
    special = (
        ("any", "some nan", "special")
        if name in ("max", "min", "sum", "any", "all")
        else ("any", "some nan")
    )
    draw = "near1" if name == "prod" else case.one_of(special)
    x = case.array(case.dtype(names), token, draw, dim)
    axes = [a for a in range(1, x.array.ndim) if case.flag()]
    axis = case.one_of((None, tuple(axes) or 1, dim + 1, dim + 1, (0, dim + 1)))
    keepdims = case.flag()
    if name in ("max", "min") and 0 in token:
        return
    case.log.append(f"{name} axis={axis} keepdims={keepdims}")
    function = getattr(case.xp, name)

    def reference(rows: Rows) -> Any:
        if name in ("mean", "var", "std") and rows.template.dtype.kind != "f":
            rows = rows.astype(np.float64)
        return oracle.reduce(name, rows, axis, keepdims=keepdims, ragged_axis=dim + 1)

    case.compare(lambda a: function(a, axis=axis, keepdims=keepdims), reference, x)


def scan(case: Case) -> None:
    """Compute running sums and products along any axis after the batch."""
    op, (token, dim) = case.one_of(("sum", "prod")), token_shape(case)
    draw = case.one_of(("any", "some nan")) if op == "sum" else "near1"
    x = case.array(case.dtype(FLOATS if op == "prod" else NUMBERS), token, draw, dim)
    axis, initial = case.one_of((dim + 1, case.integer(1, x.array.ndim - 1))), case.flag()
    name = f"cumulative_{op}"
    case.log.append(f"{name} axis={axis} include_initial={initial}")
    case.compare(
        lambda a: getattr(case.xp, name)(a, axis=axis, include_initial=initial),
        lambda rows: oracle.scan(name, rows, axis - 1, initial=initial),
        x,
    )


def sorting(case: Case) -> None:
    """Sort, and return the order, along any axis after the batch."""
    token, dim = token_shape(case)
    x = case.array(case.dtype(NUMBERS), token, case.one_of(("any", "ties", "special")), dim)
    axis, descending = case.one_of((dim + 1, case.integer(1, x.array.ndim - 1))), case.flag()
    name = case.one_of(("sort", "argsort"))
    case.log.append(f"{name} axis={axis} descending={descending}")

    def sorted_row(row: np.ndarray) -> np.ndarray:
        order = oracle.stable_argsort(row, axis - 1, descending=descending)
        return order if name == "argsort" else np.take_along_axis(row, order, axis - 1)

    function = getattr(case.xp, name)
    case.compare(
        lambda a: function(a, axis=axis, descending=descending), oracle.map_rows(sorted_row), x
    )


def extremum(case: Case) -> None:
    """Return the position of the largest or smallest token of each row."""
    token, dim = token_shape(case)
    x = case.array(case.dtype(NUMBERS), token, case.one_of(("any", "ties", "some nan")), dim)
    name = case.one_of(("argmax", "argmin"))
    case.log.append(name)

    def position(row: np.ndarray) -> np.ndarray:
        if row.shape[dim] == 0:
            return np.full((*row.shape[:dim], *row.shape[dim + 1 :]), -1)
        return np.asarray(getattr(np, name)(row, axis=dim))

    case.compare(
        lambda a: getattr(case.xp, name)(a, axis=dim + 1), lambda rows: rows.stack(position), x
    )


def movement(case: Case) -> None:
    """Flip, roll, repeat, tile, difference or concatenate."""
    token, dim = token_shape(case)
    x = case.array(case.dtype((*NUMBERS, "bool")), token, "special", dim)
    axis, xp = case.integer(1, x.array.ndim - 1), case.xp
    name = case.one_of(("flip", "roll", "repeat", "tile", "diff", "concat", "batch"))
    shift, count = case.one_of((1, -3, 80, 2**31, -(2**40))), case.integer(0, 3)
    case.log.append(f"{name} axis={axis} shift={shift} count={count}")
    repetitions = tuple(count if a == axis else 1 for a in range(1, x.array.ndim))
    calls: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "flip": (lambda a: xp.flip(a, axis=axis), oracle.map_rows(lambda r: np.flip(r, axis - 1))),
        "roll": (
            lambda a: xp.roll(a, shift, axis=axis),
            oracle.map_rows(lambda r: np.roll(r, shift % max(r.shape[axis - 1], 1), axis - 1)),
        ),
        "repeat": (
            lambda a: xp.repeat(a, count, axis=axis),
            oracle.map_rows(lambda r: np.repeat(r, count, axis - 1)),
        ),
        "tile": (
            lambda a: xp.tile(a, (1, *repetitions)),
            oracle.map_rows(lambda r: np.tile(r, repetitions)),
        ),
        "concat": (
            lambda a: xp.concat([a, a], axis=axis),
            oracle.map_rows(lambda r: np.concatenate([r, r], axis - 1)),
        ),
        "batch": (lambda a: xp.concat([a, a], axis=0), lambda rows: [*rows, *rows]),
    }
    if name == "diff":
        x = case.array(case.dtype(("float32", "int32")), token, "any", dim)
        calls["diff"] = (
            lambda a: xp.diff(a, axis=dim + 1, n=count),
            oracle.map_rows(lambda r: np.diff(r, n=count, axis=dim)),
        )
    case.compare(*calls[name], x)


def elementwise(case: Case) -> None:
    """Combine with a scalar, one number per element, one per row, or an array of the layout."""
    token, dim = token_shape(case, 2)
    dtype = case.dtype(("float32", "float64", "int32"))
    x = case.array(dtype, token, "some nan" if "float" in dtype else "any", dim)
    names = "add subtract multiply maximum minimum less equal where".split()
    name, kind = case.one_of(names), case.one_of(("row", "ragged", "scalar"))
    case.log.append(f"{name} {kind}")
    n, xp = len(case.lengths), case.xp
    if kind == "ragged":
        y = case.array(dtype, token, "any", dim, like=x.array)
    else:
        shape = (n, *(1 for _ in range(x.array.ndim - 1))) if kind == "row" else ()
        values = case.lib.make(case.numbers(shape, dtype, "any"), dtype)
        y = Input(values, case.lib.read(values))
    numpy_names = {"subtract": np.subtract, "where": lambda a, b: np.where(a > b, a, b)}
    function: Any = numpy_names.get(name) or getattr(np, name)

    def call(a: Any, b: Any) -> Any:
        if name == "where":
            return xp.where(a > b, a, b)
        return getattr(xp, name)(a, b) if case_flag else getattr(xp, name)(b, a)

    case_flag = case.flag() or name == "where"
    reference = function if case_flag else lambda a, b: function(b, a)
    case.compare(call, oracle.map_rows(lambda a, b: reference(a, b)), x, y)


def indexing(case: Case) -> None:
    """Index rows, tokens and elements, by integers, slices, arrays, masks and positions."""
    token, dim = token_shape(case, 2)
    x = case.array(case.dtype((*NUMBERS, "bool")), token, "special", dim)
    n = len(case.lengths)
    kind = case.one_of(("slices", "mask", "rows", "token", "elements", "update"))

    def a_slice() -> slice:
        bounds = (None, 0, 1, -1, 3, -3, 2**31, -(2**40))
        return slice(case.one_of(bounds), case.one_of(bounds), case.one_of((None, 1, 2, -1, -2)))

    case.log.append(kind)
    if kind == "slices":
        batch, *inner = (a_slice() if case.flag() else slice(None) for _ in range(x.array.ndim))
        case.log.append(f"{batch} {inner}")
        case.compare(lambda a: a[(batch, *inner)], lambda r: [q[tuple(inner)] for q in r[batch]], x)
    elif kind == "mask" and dim == 0:
        mask = case.array("bool", (), like=x.array if x.array.ragged_dim == 0 else None)
        masks = mask.exact
        case.compare(
            lambda a: a[mask.array], lambda r: [q[m] for q, m in zip(r, masks, strict=True)], x
        )
    elif kind == "rows" and n:
        dtype = case.dtype(("int8", "uint8", "int32", "int64"))
        low = 0 if dtype == "uint8" else -n
        index = case.rng.integers(low, n, case.integer(0, 6))
        key = case.lib.make(index, dtype)
        case.log.append(f"{dtype} {index}")
        case.compare(lambda a: a[key], lambda r: [r[int(i)] for i in index], x)
    elif kind == "token" and n and min(case.lengths):
        i = case.integer(-min(case.lengths), min(case.lengths) - 1)
        key = (slice(None),) * (dim + 1) + (i,)
        x.array.layout.read_offsets()
        case.compare(lambda a: a[key], lambda r: r.stack(lambda q: np.take(q, i, axis=dim)), x)
    elif kind == "elements" and dim == 0 and len(token) == 2 and 0 not in token:
        count = case.integer(1, 3)
        i, j = (case.rng.integers(-size, size, count) for size in token)
        keys = [case.lib.make(k, "int32") for k in (i, j)]
        case.compare(lambda a: a[:, :, keys[0], keys[1]], lambda r: [q[:, i, j] for q in r], x)
    elif kind == "update" and dim == 0:
        mask = case.array("bool", (), like=x.array)
        masks, value = mask.exact, 1
        fill = True if x.array.dtype == case.lib.dtypes["bool"] else value
        case.compare(
            lambda a: scree.at(a)[mask.array].set(fill),
            lambda r: [
                np.where(m.reshape(-1, *(1,) * (q.ndim - 1)), fill, q)
                for q, m in zip(r, masks, strict=True)
            ],
            x,
        )


def softmax(case: Case) -> None:
    """Compute softmax, log-softmax and log-sum-exp."""
    token, dim = token_shape(case)
    x = case.array(case.dtype(FLOATS), token, case.one_of(("any", "some nan")), dim)
    name = case.one_of(("softmax", "log_softmax", "logsumexp"))
    case.log.append(name)

    def reference(rows: Rows) -> Any:
        out = getattr(oracle, name)(rows, axis=dim)
        if name == "logsumexp":  # the oracle takes finite numbers and infinities
            out = np.where(rows.stack(lambda row: np.any(np.isnan(row), axis=dim)), np.nan, out)
        return out

    case.compare(getattr(scree, name), reference, x)


def topk(case: Case) -> None:
    """Return the largest or smallest tokens."""
    token, dim = token_shape(case, 2)
    x = case.array(case.dtype(NUMBERS), token, case.one_of(("any", "ties", "some nan")), dim)
    k, largest = case.one_of((0, 1, 3, 500)), case.flag()
    case.log.append(f"topk {k} {largest}")
    case.compare(
        lambda a: scree.topk(a, k, largest=largest),
        partial(oracle.topk, k=k, largest=largest, axis=dim),
        x,
    )


def norms(case: Case) -> None:
    """Compute layer norm, RMS norm, SwiGLU and rotary embeddings."""
    name = case.one_of(("layer_norm", "rms_norm", "swiglu", "rope"))
    x = case.array(case.dtype(FLOATS), (case.integer(1, 3), 2 * case.integer(1, 5)))
    case.log.append(name)
    case.compare(getattr(scree, name), getattr(oracle, name), x)


def products(case: Case) -> None:
    """Multiply tokens by one matrix or by one per row; dot products."""
    k, m, n = case.integer(0, 5), case.integer(0, 5), len(case.lengths)
    dtype = case.dtype(("float32", "float64"))
    draw = case.one_of(("any", "some nan"))
    x = case.array(dtype, (k,), draw)
    kind = case.one_of(("shared", "grouped", "vecdot"))
    case.log.append(f"{kind} {k} {m}")
    if kind == "vecdot":
        y = case.array(dtype, (k,), "any", like=x.array)
        case.compare(
            lambda a, b: case.xp.vecdot(a, b, axis=1),
            lambda a, b: (
                np.stack([np.sum(p * q, axis=0) for p, q in zip(a, b, strict=True)])
                if a
                else np.zeros((0, k))
            ),
            x,
            y,
        )
        return
    shape = (k, m) if kind == "shared" else (n, k, m)
    values = case.lib.make(case.numbers(shape, dtype, "any"), dtype)
    w = Input(values, case.lib.read(values))
    case.compare(
        lambda a, b: a @ b,
        lambda a, b: [row @ (b if b.ndim == 2 else b[i]) for i, row in enumerate(a)],
        x,
        w,
    )


def attention(case: Case) -> None:
    """Compute attention with any options; NaN in keys and values that some queries do not see."""
    heads, groups = case.integer(1, 2), case.integer(1, 2)
    dim, value_dim = case.integer(1, 9), case.integer(1, 9)
    value_dim = dim if case.flag() else value_dim
    dtype = case.dtype(("float32", "float64", "float16"))
    options: dict[str, Any] = {"causal": case.flag()}
    if case.flag():
        options["window"] = case.one_of(((3, 0), (None, 2), (0, None), (2, 2), (2**40, 1)))
    if case.flag():
        options["scale"] = case.one_of((0.0, -0.5, 1.0, 0.1))
    if case.integer(0, 3) == 0:
        options["softcap"] = 3.0
    case.log.append(str(options))
    q = case.array(dtype, (heads * groups, dim))
    k = case.array(dtype, (heads, dim), like=q.array)
    v = case.array(dtype, (heads, value_dim), case.one_of(("any", "some nan")), like=q.array)
    if case.lib.name == "mlx":  # no bound on the rows is known
        for x in (q, k, v):
            x.array.validate() if not case.has_tail else x.array.layout.read_offsets()
    fused = case.lib.name == "torch"  # PyTorch's own kernel multiplies NaN by 0
    kernel = "standard" if fused else None

    def reference(q: Any, k: Any, v: Any) -> Any:
        # NaN by query: each query is computed from the keys that it sees.
        sides = options.get("window")
        out = []
        for a, b, c in zip(q, k, v, strict=True):
            row = np.zeros((len(a), heads * groups, value_dim), a.dtype)
            mask = oracle.attention_mask(len(a), len(b), options["causal"], sides)
            scale = a.dtype.type(options.get("scale", dim**-0.5))
            for i, head in np.ndindex(len(a), heads * groups):
                seen = np.flatnonzero(mask[i])
                if seen.size:
                    scores = b[seen, head // groups] @ a[i, head] * scale
                    cap = options.get("softcap")
                    scores = scores if cap is None else np.tanh(scores / cap) * cap
                    weights = np.exp(scores - scores.max())
                    row[i, head] = weights / weights.sum() @ c[seen, head // groups]
            out.append(row)
        return out

    case.compare(
        lambda a, b, c: scree.attention(a, b, c, kernel=kernel, **options), reference, q, k, v
    )


def scattering(case: Case) -> None:
    """Gather tokens, add them to places, and group them."""
    if case.has_tail:
        return
    dtype, total = case.dtype(("float32", "int32", "float16")), sum(case.lengths)
    x = case.array(dtype, (case.integer(0, 3),))
    size = case.integer(1, 300)
    index_dtype = case.dtype(("int8", "uint8", "int32", "int64"))
    index = case.rng.integers(0, min(size, 127 if index_dtype == "int8" else 255), total)
    key, name = case.lib.make(index, index_dtype), case.one_of(("scatter_add", "scatter", "group"))
    case.log.append(f"{name} {size} {index_dtype}")

    def reference(rows: Rows) -> Any:
        values = rows.concatenate()
        if name == "group":
            return [values[index == i] for i in range(size)]
        out = np.zeros((size, *values.shape[1:]), values.dtype)
        if name == "scatter":
            for i, value in zip(index, values, strict=True):
                out[i] = value
        else:
            np.add.at(out, index, values)
        return out

    def call(a: Any) -> Any:
        out = getattr(scree, name)(a, key, size)
        return out[0] if name == "group" else out

    case.compare(call, reference, x)


def padding(case: Case) -> None:
    """Pad rows on either side, and unpad them again."""
    token, _ = token_shape(case, 2)
    x = case.array(case.dtype((*NUMBERS, "bool")), token, "special")
    side, longest = (
        case.one_of(("left", "right")),
        max(case.lengths, default=0) + case.integer(0, 2),
    )
    case.log.append(f"{side} {longest}")

    def round_trip(a: Any) -> Any:
        padded, mask = scree.to_padded(a, side=side, length=longest)
        return scree.from_padded(padded, mask)

    case.compare(round_trip, list, x)


def gradient(case: Case) -> None:
    """Compare a directional derivative with the difference of the oracle's results."""
    if case.lib.grad is None:
        return
    name = case.one_of(
        ("sum", "mean", "var", "cumulative_sum", "softmax", "logsumexp", "attention")
    )
    dtype = "float64" if "float64" in case.lib.dtypes else "float32"
    token = (2, 3) if name == "attention" else tuple(case.rng.integers(1, 4, case.integer(0, 2)))
    x = case.array(dtype, tuple(int(n) for n in token))
    case.log.append(f"gradient of {name}")
    if not case.lengths:
        return

    def reference(rows: Rows) -> Any:
        if name in ("sum", "mean", "var"):
            return oracle.reduce(name, rows, 1)
        if name == "cumulative_sum":
            return oracle.scan(name, rows, 0)
        if name == "attention":
            return oracle.attention(rows, rows, rows, causal=True)[0]
        return getattr(oracle, name)(rows)

    def apply(a: scree.Array) -> Any:
        if name == "attention":
            return scree.attention(a, a, a, causal=True)
        if name in ("softmax", "logsumexp"):
            return getattr(scree, name)(a)
        return getattr(case.xp, name)(a, axis=1)

    with np.errstate(all="ignore"):
        outputs = reference(x.exact)
    is_ragged = isinstance(outputs, list)
    weights = [case.rng.standard_normal(np.shape(row)) for row in outputs]
    weights = [np.where(np.isfinite(row), w, 0) for w, row in zip(weights, outputs, strict=True)]

    def loss(rows: Rows) -> float:
        with np.errstate(all="ignore"):
            parts = zip(reference(rows), weights, strict=True)
            return float(sum(np.sum(np.where(w != 0, out, 0) * w) for out, w in parts))

    total, array = sum(case.lengths), x.array
    dense = np.zeros((array.total_length, *array.values.shape[1:])) if is_ragged else None
    if dense is not None:
        if name == "attention" or dense.shape[1:] == weights[0].shape[1:]:
            dense[:total] = np.concatenate(weights) if weights else 0
    else:
        dense = np.asarray(weights)
    cotangent = case.lib.make(dense, dtype)

    def scalar(values: Any) -> Any:
        if case.has_tail:
            a = scree.Array.unchecked(values, array.offsets, 0, array.max_length)
        else:
            bound = max(case.lengths) if array.max_length is None else array.max_length
            a = scree.from_offsets(values, array.offsets, max_length=bound)
        out = apply(a)
        out = out.values if isinstance(out, scree.Array) else out
        return case.library_xp.sum(
            case.library_xp.where(cotangent != 0, out, case.library_xp.zeros_like(out)) * cotangent
        )

    (grad,) = case.lib.grad(scalar, array.values)
    grad = case.lib.read(grad)
    assert not np.any(grad[total:]), f"the gradient of the tail is not 0: {grad[total]}"
    step = 1e-5
    direction = [case.rng.standard_normal(row.shape) for row in x.exact]
    plus, minus = (
        loss(Rows([r + s * d for r, d in zip(x.exact, direction, strict=True)], x.exact.template))
        for s in (step, -step)
    )
    expected = (plus - minus) / (2 * step)
    split = np.split(grad[:total], np.cumsum(case.lengths)[:-1])
    products = [np.sum(g * d) for g, d in zip(split, direction, strict=True)]
    size = 1 + sum(float(np.sum(np.abs(g * d))) for g, d in zip(split, direction, strict=True))
    assert abs(sum(products) - expected) <= 1e-3 * size, (sum(products), expected)


FUNCTIONS = (
    reduction, reduction, scan, sorting, extremum, movement, elementwise, indexing, indexing, softmax,
    topk, norms, products, attention, attention, scattering, padding, gradient,
)  # fmt: skip


def run_case(backend: str, number: int) -> str | None:
    """Run one case; return its function and the traceback if it fails."""
    case = Case(backend, number)
    function = case.one_of(FUNCTIONS)
    try:
        with case.lib.context(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_TOKENS, RuntimeWarning)
            function(case)
    # A case may fail in any way; the other cases still run.
    except Exception:
        drawn = f"{function.__name__}: rows {case.lengths}, tail {case.has_tail}, {case.log}"
        return f"{drawn}\n{traceback.format_exc()}"
    return None


def main(arguments: Iterable[str] | None = None) -> int:
    """Run cases until the time is over; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m scree_conformance fuzz", description=__doc__)
    names = [name for name in LIBRARIES if name != "strict_minimal"]
    parser.add_argument("--backend", choices=names, action="append", help="default: all installed")
    parser.add_argument("--minutes", type=float, default=2.0, help="for all libraries together")
    parser.add_argument("--seed", type=int, default=0, help="the first case is seed * 10**6")
    parser.add_argument("--case", type=int, help="run this case alone")
    options = parser.parse_args(None if arguments is None else list(arguments))
    backends = options.backend or [name for name in names if _is_installed(name)]
    counts, failures = Counter[str](), 0
    for backend in backends:
        end = time.monotonic() + 60 * options.minutes / len(backends)
        first = options.seed * 10**6
        for number in count(first) if options.case is None else [options.case]:
            if options.case is None and (time.monotonic() >= end or failures >= MAX_FAILURES):
                break
            counts[backend] += 1
            failure = run_case(backend, number)
            if failure is not None:
                failures += 1
                print(f"python -m scree_conformance fuzz --backend {backend} --case {number}")
                print(failure, flush=True)
    total = ", ".join(f"{runs} on {name}" for name, runs in counts.items())
    print(f"{failures} of {counts.total()} cases failed: {total}")
    return 1 if failures else 0


def _is_installed(name: str) -> bool:
    try:
        load(name)
    # A missing library is left out, unless --backend names it.
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
