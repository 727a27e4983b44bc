"""Test inputs in a library's precision, and the comparison of results with the oracle.

The tolerance follows from the data. The oracle runs in float64, and again in the precision of the
computation (float32 for half precision). The difference is the error of a plain implementation; it
counts as at least one rounding. A result may be off by `FACTOR` times that error, plus one rounding
of its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

import scree

from .backends import EPS, TINY, Library
from .layouts import Layout, lengths_of
from .oracle import Rows

FACTOR = 4.0
#: Smallest magnitude that rounds to infinity, for dtypes narrower than the oracle's float64.
OVERFLOW = {"float16": 65520.0, "bfloat16": 3.396e38, "float32": 3.4028236e38}


class Rejected(Exception):
    """A call that the kernel provider under test rejects, with the provider's reason."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input: the argument of scree, and the same numbers in NumPy (rows or dense)."""

    array: Any
    exact: Any


def _cast_floats(exact: Any, dtype: Any) -> Any:
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
        self.rng, self.case_seed = np.random.default_rng(0), 0
        sample = self.of(lib.make(np.zeros(1), "float32"), [1]).array
        self.xp: Any = scree.namespace(sample)
        # The library's namespace, without ragged arrays.
        self.library_xp: Any = sample.layout.backend.xp

    def start(self, case: str) -> None:
        """Seed the random numbers by the case, so that its inputs do not depend on other cases."""
        self.case_seed = crc32(case.encode())
        self.rng = np.random.default_rng(self.case_seed)

    def select(self, variants: Iterable[Any]) -> list[Any]:
        """Return all variants, or every third variant where the library compiles every shape.

        The seed of the case chooses which third, so that other cases cover the rest.
        """
        cases = list(variants)
        return cases[self.case_seed % min(3, len(cases)) :: 3] if self.lib.compiles else cases

    def functions(self, name: str) -> list[Callable[..., Any]]:
        """Return the function of this name, and its alias in `linalg` if the library has one."""
        modules = [self.xp, self.xp.linalg] if hasattr(self.xp, "linalg") else [self.xp]
        return [getattr(module, name) for module in modules]

    # --------------------------------------------------------------------------------------- inputs
    def dense(self, shape: tuple[int, ...], dtype: str, draw: str = "any") -> Input:
        """Return a dense array of random numbers."""
        x = self.lib.make(DRAWS[draw](self.rng, shape), dtype)
        return Input(x, self.lib.read(x))

    def ragged(
        self,
        layout: Layout,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
        draw: str = "any",
        ragged_dim: int = 0,
    ) -> Input:
        """Return a ragged array with a given layout.

        `shape` is the shape of one token, `dim` the ragged axis of the values.
        """
        lengths = lengths_of(layout)
        values = DRAWS[draw](self.rng, (*shape[:ragged_dim], sum(lengths), *shape[ragged_dim:]))
        return self.of(self.lib.make(values, dtype), lengths, ragged_dim)

    def of(self, values: Any, lengths: list[int], ragged_dim: int = 0) -> Input:
        """Return a ragged array with the given values, an array of the library."""
        offsets = self.lib.make(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), "int32")
        x = scree.from_offsets(
            values, offsets, ragged_dim=ragged_dim, max_length=max(lengths, default=0)
        )
        return Input(x, self.rows(x))

    def like(
        self, other: Input, shape: tuple[int, ...] = (), dtype: str = "float32", draw: str = "any"
    ) -> Input:
        """Return another ragged array with the same layout object."""
        ragged_dim = other.array.ragged_dim
        values = DRAWS[draw](
            self.rng, (*shape[:ragged_dim], other.array.total_length, *shape[ragged_dim:])
        )
        x = other.array.with_values(self.lib.make(values, dtype))
        return Input(x, self.rows(x))

    def rows(self, x: scree.Array) -> Rows:
        """Return the rows of a ragged array, split by NumPy."""
        values, offsets = self.lib.read(x.values), self.lib.read(x.offsets)
        axis = x.ragged_dim
        split_rows = np.split(values, offsets[1:-1], axis=axis) if len(offsets) > 1 else []
        return Rows(split_rows, np.take(values, np.zeros(0, np.int64), axis=axis))

    # ----------------------------------------------------------------------------------- comparison
    def read(self, x: Any) -> Any:
        """Convert a result of scree to NumPy: rows or a dense array."""
        return self.rows(x) if isinstance(x, scree.Array) else self.lib.read(x)

    def check(
        self,
        call: Callable[..., Any],
        reference: Callable[..., Any],
        *args: Any,
        dtype: str | None = None,
        low_precision: Callable[..., Any] | None = None,
        transcendental: bool = False,
        token_orders: int = 1,
        note: str = "",
    ) -> Any:
        """Run `call` on the inputs, and compare its result with `reference` in float64.

        Both get the same numbers. The tolerance is the error of `low_precision`, by default
        `reference` in float32. `dtype` is the expected dtype, by default the dtype of the first
        input. `transcendental` says that the function computes exp, sin or tanh.

        Where the result is one number, rounding errors can cancel by chance. `token_orders` is the
        number of token orders in which the reference runs; the largest error counts.
        """
        got = call(*(a.array if isinstance(a, Input) else a for a in args))
        exact = [a.exact if isinstance(a, Input) else a for a in args]
        first = next(a.array for a in args if isinstance(a, Input))
        scale, precise_inputs = 1.0, exact
        if low_precision is None and self.lib.dtype_name(first) == "float64":
            # The error is measured in float32, where it is 2**29 times the error of float64.
            scale = EPS["float64"] / EPS["float32"]
            if transcendental and self.lib.float32_transcendentals:
                scale = 1.0
            # NumPy rounds exp and sin correctly in float32, but not in float64.
            scale *= 4 if transcendental else 1
            precise_inputs = [_cast_floats(_as_float32(x), np.float64) for x in exact]
        elif low_precision is None and transcendental and self.lib.is_cuda:
            # In float32, exp on CUDA is off by up to 2 units in the last place, and sin by 1.5, of all
            # inputs (https://docs.jax.dev/en/latest/accuracy.html, on an H100). NumPy is off by half a unit, and
            # `FACTOR` allows four times as much: one such function, but not two in a row.
            scale = 2.0
        with np.errstate(all="ignore"):
            expected = reference(*exact)
            precise = expected if precise_inputs is exact else reference(*precise_inputs)
            if low_precision is None:
                inexact = reference(*map(_as_float32, exact))
            else:
                inexact = low_precision(*exact)
            for _ in range(token_orders - 1):
                permuted_inputs = (
                    self._permute_tokens(_as_float32(x), first.ragged_dim) for x in exact
                )
                permuted = reference(*permuted_inputs)
                has_larger_error = np.abs(permuted - precise) > np.abs(inexact - precise)
                inexact = np.where(has_larger_error, permuted, inexact)
        expected_dtype = self.lib.dtype_name(first) if dtype is None else dtype
        parts = zip(*map(as_tuple, (got, expected, precise, inexact)), strict=True)
        for i, part in enumerate(parts):
            # Further results of a tuple have dtypes of their own.
            self.close(*part, dtype=None if i else expected_dtype, scale=scale, note=note)
        return got

    def _permute_tokens(self, x: Any, axis: int) -> Any:
        return (
            Rows((self.rng.permutation(row, axis=axis) for row in x), x.template)
            if isinstance(x, Rows)
            else x
        )

    def close(
        self,
        got: Any,
        expected: Any,
        precise: Any = None,
        low_precision: Any = None,
        *,
        dtype: str | None = None,
        scale: float = 1.0,
        relative: bool = False,
        note: str = "",
    ) -> None:
        """Compare one result with the expected numbers.

        The tolerance is the difference of `precise` and `low_precision`. Without them, the result
        must be exact up to one rounding.
        """
        name = self.lib.dtype_name(got)
        assert dtype is None or name == dtype, f"{note}expected dtype {dtype}, got {name}"
        ragged = isinstance(got, scree.Array)
        assert ragged == isinstance(expected, list), (
            f"{note}expected a {'ragged' if not ragged else 'dense'} result, got {got!r}"
        )
        actual = self.read(got)
        if not ragged:
            actual, expected = [actual], [expected]
            precise, low_precision = [precise], None if low_precision is None else [low_precision]
        assert len(actual) == len(expected), (
            f"{note}expected {len(expected)} rows, got {len(actual)}"
        )
        error = 0.0
        if low_precision is not None:
            error = _reference_error(precise, low_precision, relative) * scale * FACTOR
        for i, (actual_row, expected_row) in enumerate(zip(actual, expected, strict=True)):
            expected_row = np.asarray(expected_row)
            row_note = f"{note}row {i}: " if ragged else note
            assert actual_row.shape == expected_row.shape, (
                f"{row_note}expected shape {expected_row.shape}, got {actual_row.shape}"
            )
            self._compare(actual_row, expected_row, name, error, relative, row_note)

    def _compare(
        self,
        actual: np.ndarray,
        expected: np.ndarray,
        dtype: str,
        error: float,
        relative: bool,
        note: str,
    ) -> None:
        if dtype not in EPS:
            if dtype.startswith("complex"):
                part_dtype = "float32" if dtype == "complex64" else "float64"
                self._compare(actual.real, expected.real, part_dtype, error, relative, note)
                self._compare(actual.imag, expected.imag, part_dtype, error, relative, note)
            else:
                np.testing.assert_array_equal(actual, expected, err_msg=note)
            return
        expected = expected.astype(np.float64)
        with np.errstate(all="ignore"):
            # Overflow of the dtype is correct.
            overflows = np.abs(expected) >= OVERFLOW.get(dtype, math.inf)
            expected = np.where(overflows, np.sign(expected) * np.inf, expected)
            magnitude = np.abs(expected)
            allowed = (
                (error * magnitude if relative else error) + EPS[dtype] * magnitude + TINY[dtype]
            )
            is_equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
            is_wrong = ~(is_equal | (np.isfinite(actual) & (np.abs(actual - expected) <= allowed)))
        if is_wrong.any():
            index = tuple(int(i) for i in np.argwhere(is_wrong)[0])
            raise AssertionError(
                f"{note}{int(is_wrong.sum())} of {expected.size} numbers are off; "
                f"at {index} expected {expected[index]!r}, got {actual[index]!r}, "
                f"allowed is {np.broadcast_to(allowed, expected.shape)[index]:.3g}"
            )

    # -------------------------------------------------------------------------------------- kernels
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that has kernels, on the provider under test."""
        if self.kernel is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs, kernel=self.kernel)
        except ValueError as error:
            message = str(error)
            is_rejection = "rejects this call" in message
            if is_rejection or message.startswith("kernel: expected one of"):
                raise Rejected(message) from error
            raise


def _as_float32(x: Any) -> Any:
    return _cast_floats(x, np.float32)


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _reference_error(precise: Any, low_precision: Any, relative: bool) -> float:
    """Return the largest error of the low precision, at least one rounding."""
    largest = 0.0
    for precise_row, low_precision_row in zip(precise, low_precision, strict=True):
        precise_row, low_precision_row = np.asarray(precise_row), np.asarray(low_precision_row)
        if precise_row.dtype.kind not in "fc":
            continue
        with np.errstate(all="ignore"):
            magnitude = np.abs(precise_row)
            error = np.maximum(
                np.abs(precise_row - low_precision_row), EPS["float32"] / 2 * magnitude
            ) / (np.maximum(magnitude, TINY["float32"]) if relative else 1)
        largest = max(largest, float(np.max(error[np.isfinite(error)], initial=0)))
    return largest
