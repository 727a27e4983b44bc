"""The workbench of a case: inputs in a library's precision, and the comparison of results with the truth.

How close is close enough follows from the data: the plain reference is the oracle, run in the precision that the result is
computed in (float32 for half precision). Its error against float64 is measured on the same input, and counts as one rounding
where it happens to be less; a result may be off by `FACTOR` times that, plus one rounding of its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

import scree

from .backends import EPS, HALF, TINY, Library
from .layouts import Layout, lengths_of
from .oracle import Rows

FACTOR = 4.0


class Rejected(Exception):
    """The kernel provider under test will not take a call, and says why."""


@dataclass(frozen=True, slots=True)
class Data:
    """One input: `x` is what scree gets, `exact` the same numbers as NumPy sees them (rows, or a dense array)."""

    x: Any
    exact: Any


def _in_precision(exact: Any, dtype: Any) -> Any:
    kind = (exact.template if isinstance(exact, Rows) else np.asarray(exact)).dtype.kind
    if kind != "f" or not isinstance(exact, Rows | np.ndarray):
        return exact
    return exact.astype(dtype)


#: Name -> random numbers of a domain.
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "any": lambda rng, shape: 2 * rng.standard_normal(shape),
    "unit": lambda rng, shape: rng.uniform(-0.9, 0.9, shape),
    "above1": lambda rng, shape: rng.uniform(1.01, 5, shape),
    "positive": lambda rng, shape: rng.uniform(0.2, 5, shape),
    "near1": lambda rng, shape: np.exp(0.05 * rng.standard_normal(shape)),
    "large": lambda rng, shape: rng.choice([-1, 1], shape) * rng.uniform(290, 310, shape),
    "special": lambda rng, shape: rng.choice(
        [-math.inf, math.inf, math.nan, 0.0, -0.0, 1.5], shape
    ),
    "integer": lambda rng, shape: rng.integers(-6, 7, shape),
    "natural": lambda rng, shape: rng.integers(0, 7, shape),
    "divisor": lambda rng, shape: rng.integers(1, 7, shape),
    "twos": lambda rng, shape: rng.choice([1, 1, 2], shape),
    "sign": lambda rng, shape: rng.choice([-1, 1, 1], shape),
    "bool": lambda rng, shape: rng.integers(0, 2, shape).astype(bool),
    "truth": lambda rng, shape: rng.choice([0.0, -0.0, 0.25, -0.5, 1e-6, 3.0, math.nan], shape),
    "complex": lambda rng, shape: rng.standard_normal(shape) + 1j * rng.standard_normal(shape),
}


class Bench:
    """Inputs and comparisons for one library; `kernel` is the provider that must run the operations that have one."""

    def __init__(self, lib: Library, kernel: str | None = None) -> None:
        self.lib = lib
        self.kernel = kernel
        self.rng, self.turn = np.random.default_rng(0), 0
        one = self.of(lib.make(np.zeros(1), "float32"), [1]).x
        self.xp: Any = scree.namespace(one)
        self.own: Any = one.layout.backend.xp  # the library's namespace that knows no ragged arrays

    def start(self, case: str) -> None:
        """Seed the random numbers by the case, so that each case runs alone as it runs among others."""
        self.turn = crc32(case.encode())
        self.rng = np.random.default_rng(self.turn)

    def some(self, variants: Iterable[Any]) -> list[Any]:
        """All variants; where each is compiled every third, in other cases the others."""
        found = list(variants)
        return found[self.turn % min(3, len(found)) :: 3] if self.lib.compiles else found

    # ------------------------------------------------------------------------------------------- inputs
    def dense(self, shape: tuple[int, ...], dtype: str, draw: str = "any") -> Data:
        """A dense array."""
        x = self.lib.make(DRAWS[draw](self.rng, shape), dtype)
        return Data(x, self.lib.read(x))

    def ragged(
        self,
        layout: Layout,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
        draw: str = "any",
        dim: int = 0,
    ) -> Data:
        """A ragged array of a layout; `shape` is that of one token, `dim` the ragged axis of the values."""
        lengths = lengths_of(layout)
        values = DRAWS[draw](self.rng, (*shape[:dim], sum(lengths), *shape[dim:]))
        return self.of(self.lib.make(values, dtype), lengths, dim)

    def of(self, values: Any, lengths: list[int], dim: int = 0) -> Data:
        """A ragged array of values of the library."""
        offsets = self.lib.make(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), "int32")
        x = scree.from_offsets(values, offsets, ragged_dim=dim, max_length=max(lengths, default=0))
        return Data(x, self.rows(x))

    def like(
        self, other: Data, shape: tuple[int, ...] = (), dtype: str = "float32", draw: str = "any"
    ) -> Data:
        """Another ragged array of the same layout object."""
        dim = other.x.ragged_dim
        values = DRAWS[draw](self.rng, (*shape[:dim], other.x.total_length, *shape[dim:]))
        x = other.x.with_values(self.lib.make(values, dtype))
        return Data(x, self.rows(x))

    def rows(self, x: scree.Array) -> Rows:
        """The rows of a ragged array, cut by NumPy."""
        values, offsets = self.lib.read(x.values), self.lib.read(x.offsets)
        axis = x.ragged_dim
        cut = np.split(values, offsets[1:-1], axis=axis) if len(offsets) > 1 else []
        return Rows(cut, np.take(values, np.zeros(0, np.int64), axis=axis))

    # ------------------------------------------------------------------------------------------- comparison
    def read(self, x: Any) -> Any:
        """A result of scree in NumPy: rows or a dense array."""
        return self.rows(x) if isinstance(x, scree.Array) else self.lib.read(x)

    def check(
        self,
        call: Callable[..., Any],
        truth: Callable[..., Any],
        *args: Any,
        dtype: str | None = None,
        rough: Callable[..., Any] | None = None,
        curved: bool = False,
        orders: int = 1,
        note: str = "",
    ) -> Any:
        """Run `call` on the inputs, and compare what comes out with the oracle `truth` on the same numbers.

        `rough` replaces the oracle as the reference of this precision, `dtype` is the dtype that must come out (that of the
        first input by default), `curved` says that exp, sin or tanh are in it. Where a result is one number, chance may spare
        the reference its error: `orders` runs it on the tokens in so many orders, and the worst counts.
        """
        got = call(*(a.x if isinstance(a, Data) else a for a in args))
        exact = [a.exact if isinstance(a, Data) else a for a in args]
        first = next(a.x for a in args if isinstance(a, Data))
        scale, near_to = 1.0, exact
        if (
            rough is None and self.lib.dtype_name(first) == "float64"
        ):  # float32 makes 2**29 times its error
            scale = 1.0 if curved and self.lib.rough_float64 else EPS["float64"] / EPS["float32"]
            scale *= (
                4 if curved else 1
            )  # NumPy's exp and sin of float32 are as good as rounded, those of float64 are not
            near_to = [_in_precision(_single(x), np.float64) for x in exact]
        with np.errstate(all="ignore"):
            right = truth(*exact)
            near = right if near_to is exact else truth(*near_to)
            low = truth(*map(_single, exact)) if rough is None else rough(*exact)
            for _ in range(orders - 1):
                other = truth(*(self._shuffled(_single(x), first.ragged_dim) for x in exact))
                low = np.where(np.abs(other - near) > np.abs(low - near), other, low)
        expected = self.lib.dtype_name(first) if dtype is None else dtype
        for part, (g, r, n, w) in enumerate(
            zip(*map(_parts, (got, right, near, low)), strict=True)
        ):
            kind = expected if part == 0 else None
            self.close(g, r, n, w, dtype=kind, scale=scale, note=note)
        return got

    def _shuffled(self, x: Any, axis: int) -> Any:
        return (
            Rows((self.rng.permutation(row, axis=axis) for row in x), x.template)
            if isinstance(x, Rows)
            else x
        )

    def close(
        self,
        got: Any,
        truth: Any,
        near: Any = None,
        rough: Any = None,
        *,
        dtype: str | None = None,
        scale: float = 1.0,
        relative: bool = False,
        note: str = "",
    ) -> None:
        """Compare one result; without a reference in lower precision it must be exact up to one rounding."""
        name = self.lib.dtype_name(got)
        assert dtype is None or name == dtype, f"{note}expected dtype {dtype}, got {name}"
        ragged = isinstance(got, scree.Array)
        assert ragged == isinstance(truth, list), (
            f"{note}expected a {'ragged' if not ragged else 'dense'} result, got {got!r}"
        )
        found = self.read(got)
        if not ragged:
            found, truth = [found], [truth]
            near, rough = [near], None if rough is None else [rough]
        assert len(found) == len(truth), f"{note}expected {len(truth)} rows, got {len(found)}"
        error = 0.0 if rough is None else _reference_error(near, rough, relative) * scale * FACTOR
        for i, (f, t) in enumerate(zip(found, truth, strict=True)):
            t = np.asarray(t)
            assert f.shape == t.shape, (
                f"{note}{f'row {i}: ' if ragged else ''}expected shape {t.shape}, got {f.shape}"
            )
            self._compare(f, t, name, error, relative, f"{note}row {i}: " if ragged else note)

    def _compare(
        self,
        found: np.ndarray,
        truth: np.ndarray,
        dtype: str,
        error: float,
        relative: bool,
        note: str,
    ) -> None:
        if dtype not in EPS:
            if dtype.startswith("complex"):
                part = "float32" if dtype == "complex64" else "float64"
                self._compare(found.real, truth.real, part, error, relative, note)
                self._compare(found.imag, truth.imag, part, error, relative, note)
            else:
                np.testing.assert_array_equal(found, truth, err_msg=note)
            return
        truth = truth.astype(np.float64)
        with np.errstate(all="ignore"):
            if dtype in HALF or dtype == "float32":  # overflow of the dtype itself is right
                limit = {"float16": 65520.0, "bfloat16": 3.396e38, "float32": 3.4028236e38}[dtype]
                truth = np.where(np.abs(truth) >= limit, np.sign(truth) * np.inf, truth)
            size = np.abs(truth)
            allowed = (error * size if relative else error) + EPS[dtype] * size + TINY[dtype]
            same = (found == truth) | (np.isnan(found) & np.isnan(truth))
            wrong = ~(same | (np.isfinite(found) & (np.abs(found - truth) <= allowed)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{note}{int(wrong.sum())} of {truth.size} numbers are off; at {at} expected {truth[at]!r}, got {found[at]!r}, "
                f"allowed is {np.broadcast_to(allowed, truth.shape)[at]:.3g}"
            )

    # ------------------------------------------------------------------------------------------- kernels
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that has kernels, on the provider under test."""
        if self.kernel is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs, kernel=self.kernel)
        except ValueError as error:
            if "rejects this call" in str(error) or str(error).startswith(
                "kernel: expected one of"
            ):
                raise Rejected(str(error)) from error
            raise


def _single(x: Any) -> Any:
    return _in_precision(x, np.float32)


def _parts(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _reference_error(near: Any, rough: Any, relative: bool) -> float:
    """The largest error of the reference against the truth on the same numbers, and at least one rounding."""
    worst = 0.0
    for a, b in zip(near, rough, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "fc":
            continue
        with np.errstate(all="ignore"):
            size = np.abs(a)
            off = np.maximum(np.abs(a - b), EPS["float32"] / 2 * size) / (
                np.maximum(size, TINY["float32"]) if relative else 1
            )
        worst = max(worst, float(np.max(off[np.isfinite(off)], initial=0)))
    return worst
