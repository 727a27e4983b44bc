"""Test inputs in a library's precision, and the comparison of results with the oracle.

The tolerance follows from the data. The reference is the oracle, run in the precision in which the
result is computed (float32 for half precision). Its error relative to float64 is measured on the
same input, and counts as at least one rounding. A result may be off by `FACTOR` times that error,
plus one rounding of its own dtype.
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
    """The kernel provider under test rejects a call, and gives the reason."""


@dataclass(frozen=True, slots=True)
class Data:
    """One input: `x` is the argument of scree, `exact` its numbers in NumPy (rows or dense)."""

    x: Any
    exact: Any


def _in_precision(exact: Any, dtype: Any) -> Any:
    kind = (exact.template if isinstance(exact, Rows) else np.asarray(exact)).dtype.kind
    if kind != "f" or not isinstance(exact, Rows | np.ndarray):
        return exact
    return exact.astype(dtype)


#: Name -> random numbers from a domain.
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
    "ties": lambda rng, shape: rng.integers(-2, 3, shape),
    "gaps": lambda rng, shape: rng.choice(
        [-math.inf, math.inf, math.nan, math.nan, 0.0, -0.0, 1.5, 2.0], shape
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
    """Inputs and comparisons for one library.

    `kernel` is the provider that must run the operations that have kernels.
    """

    def __init__(self, lib: Library, kernel: str | None = None) -> None:
        self.lib = lib
        self.kernel = kernel
        self.rng, self.turn = np.random.default_rng(0), 0
        one = self.of(lib.make(np.zeros(1), "float32"), [1]).x
        self.xp: Any = scree.namespace(one)
        # The library's namespace, without ragged arrays.
        self.library_xp: Any = one.layout.backend.xp

    def start(self, case: str) -> None:
        """Seed the random numbers by the case, so that its inputs do not depend on other cases."""
        self.turn = crc32(case.encode())
        self.rng = np.random.default_rng(self.turn)

    def some(self, variants: Iterable[Any]) -> list[Any]:
        """Return all variants, or every third variant where the library compiles every shape.

        The seed of the case chooses which third, so that other cases cover the rest.
        """
        chosen = list(variants)
        return chosen[self.turn % min(3, len(chosen)) :: 3] if self.lib.compiles else chosen

    # --------------------------------------------------------------------------------------- inputs
    def dense(self, shape: tuple[int, ...], dtype: str, draw: str = "any") -> Data:
        """Return a dense array of random numbers."""
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
        """Return a ragged array with a given layout.

        `shape` is the shape of one token, `dim` the ragged axis of the values.
        """
        lengths = lengths_of(layout)
        values = DRAWS[draw](self.rng, (*shape[:dim], sum(lengths), *shape[dim:]))
        return self.of(self.lib.make(values, dtype), lengths, dim)

    def of(self, values: Any, lengths: list[int], dim: int = 0) -> Data:
        """Return a ragged array with the given values, an array of the library."""
        offsets = self.lib.make(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), "int32")
        x = scree.from_offsets(values, offsets, ragged_dim=dim, max_length=max(lengths, default=0))
        return Data(x, self.rows(x))

    def like(
        self, other: Data, shape: tuple[int, ...] = (), dtype: str = "float32", draw: str = "any"
    ) -> Data:
        """Return another ragged array with the same layout object."""
        dim = other.x.ragged_dim
        values = DRAWS[draw](self.rng, (*shape[:dim], other.x.total_length, *shape[dim:]))
        x = other.x.with_values(self.lib.make(values, dtype))
        return Data(x, self.rows(x))

    def rows(self, x: scree.Array) -> Rows:
        """Return the rows of a ragged array, split by NumPy."""
        values, offsets = self.lib.read(x.values), self.lib.read(x.offsets)
        axis = x.ragged_dim
        cut = np.split(values, offsets[1:-1], axis=axis) if len(offsets) > 1 else []
        return Rows(cut, np.take(values, np.zeros(0, np.int64), axis=axis))

    # ----------------------------------------------------------------------------------- comparison
    def read(self, x: Any) -> Any:
        """Convert a result of scree to NumPy: rows or a dense array."""
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
        """Run `call` on the inputs, and compare its result with the oracle `truth`.

        Both get the same numbers. `rough` replaces the oracle as the reference in this precision.
        `dtype` is the expected dtype, by default the dtype of the first input. `curved` says that
        the function computes exp, sin or tanh.

        Where the result is one number, the errors of the reference can cancel by chance. `orders`
        is the number of token orders in which the reference runs; the largest error counts.
        """
        got = call(*(a.x if isinstance(a, Data) else a for a in args))
        exact = [a.exact if isinstance(a, Data) else a for a in args]
        first = next(a.x for a in args if isinstance(a, Data))
        scale, near_to = 1.0, exact
        if rough is None and self.lib.dtype_name(first) == "float64":
            # The reference runs in float32, whose error is 2**29 times the error of float64.
            scale = 1.0 if curved and self.lib.rough_float64 else EPS["float64"] / EPS["float32"]
            # NumPy rounds exp and sin correctly in float32, but not in float64.
            scale *= 4 if curved else 1
            near_to = [_in_precision(_single(x), np.float64) for x in exact]
        with np.errstate(all="ignore"):
            exact_result = truth(*exact)
            near = exact_result if near_to is exact else truth(*near_to)
            low = truth(*map(_single, exact)) if rough is None else rough(*exact)
            for _ in range(orders - 1):
                other = truth(*(self._shuffled(_single(x), first.ragged_dim) for x in exact))
                low = np.where(np.abs(other - near) > np.abs(low - near), other, low)
        expected = self.lib.dtype_name(first) if dtype is None else dtype
        for part, (g, r, n, w) in enumerate(
            zip(*map(_parts, (got, exact_result, near, low)), strict=True)
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
        """Compare one result with the oracle.

        Without a reference in lower precision, the result must be exact up to one rounding.
        """
        name = self.lib.dtype_name(got)
        assert dtype is None or name == dtype, f"{note}expected dtype {dtype}, got {name}"
        ragged = isinstance(got, scree.Array)
        assert ragged == isinstance(truth, list), (
            f"{note}expected a {'ragged' if not ragged else 'dense'} result, got {got!r}"
        )
        actual = self.read(got)
        if not ragged:
            actual, truth = [actual], [truth]
            near, rough = [near], None if rough is None else [rough]
        assert len(actual) == len(truth), f"{note}expected {len(truth)} rows, got {len(actual)}"
        error = 0.0 if rough is None else _reference_error(near, rough, relative) * scale * FACTOR
        for i, (f, t) in enumerate(zip(actual, truth, strict=True)):
            t = np.asarray(t)
            assert f.shape == t.shape, (
                f"{note}{f'row {i}: ' if ragged else ''}expected shape {t.shape}, got {f.shape}"
            )
            self._compare(f, t, name, error, relative, f"{note}row {i}: " if ragged else note)

    def _compare(
        self,
        actual: np.ndarray,
        truth: np.ndarray,
        dtype: str,
        error: float,
        relative: bool,
        note: str,
    ) -> None:
        if dtype not in EPS:
            if dtype.startswith("complex"):
                part = "float32" if dtype == "complex64" else "float64"
                self._compare(actual.real, truth.real, part, error, relative, note)
                self._compare(actual.imag, truth.imag, part, error, relative, note)
            else:
                np.testing.assert_array_equal(actual, truth, err_msg=note)
            return
        truth = truth.astype(np.float64)
        with np.errstate(all="ignore"):
            if dtype in HALF or dtype == "float32":  # overflow of the dtype is correct
                limit = {"float16": 65520.0, "bfloat16": 3.396e38, "float32": 3.4028236e38}[dtype]
                truth = np.where(np.abs(truth) >= limit, np.sign(truth) * np.inf, truth)
            size = np.abs(truth)
            allowed = (error * size if relative else error) + EPS[dtype] * size + TINY[dtype]
            same = (actual == truth) | (np.isnan(actual) & np.isnan(truth))
            wrong = ~(same | (np.isfinite(actual) & (np.abs(actual - truth) <= allowed)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{note}{int(wrong.sum())} of {truth.size} numbers are off; "
                f"at {at} expected {truth[at]!r}, got {actual[at]!r}, "
                f"allowed is {np.broadcast_to(allowed, truth.shape)[at]:.3g}"
            )

    # -------------------------------------------------------------------------------------- kernels
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
    """Return the largest error of the reference on the same numbers, at least one rounding."""
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
