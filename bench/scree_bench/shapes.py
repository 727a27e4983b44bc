"""Shapes of attention: drawn at random, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer

from .work import BACKWARD, Work

#: Head dimensions that models use. One shape in four has any other multiple of 8.
HEAD_DIMS = (32, 64, 72, 80, 96, 112, 128, 160, 192, 256)
MAX_HEADS, MAX_GROUP, MAX_ROWS = 64, 16, 20_000
#: Draws of a shape, of which all but the last exceed a limit.
MAX_DRAWS = 200


class Limits(NamedTuple):
    """Limits of the shapes of a device.

    Attributes
    ----------
    tokens
        Fewest and most tokens of a batch.
    flops
        Most floating-point operations of the forward and the backward pass together.
    bytes
        Most bytes of the arrays of a call with its gradients.
    dtypes
        Names of the data types.
    """

    tokens: tuple[int, int]
    flops: float
    bytes: float
    dtypes: tuple[str, ...]


CUDA = Limits((1_000, 500_000), 200e12, 20e9, ("float16", "bfloat16"))
CPU = Limits((100, 4_000), 2e10, 1e9, ("float32",))
TINY = Limits((10, 200), 1e8, 1e8, ("float32",))


class Shape(NamedTuple):
    """A problem with its name and the name of the distribution of its lengths."""

    name: str
    lengths: str
    work: Work

    @property
    def case(self) -> dict[str, Any]:
        """The entries of the shape in a row of the results."""
        work = self.work
        return {
            "shape": self.name,
            "lengths": self.lengths,
            "rows": len(work.lengths),
            "tokens": work.total,
            "longest": work.max_length,
            "keys": sum(work.keys),
            "heads": work.heads,
            "kv_heads": work.kv_heads,
            "dim": work.dim,
            "dtype": work.dtype,
            "causal": work.causal,
            "window": "" if work.window is None else "{}, {}".format(*work.window),
        }


# --- distributions of lengths: (rows, total, generator) -> lengths whose sum is about the total ---
def _scaled(weights: np.ndarray, total: int) -> np.ndarray:
    return np.maximum(1, np.round(weights / weights.sum() * total)).astype(np.int64)


def _lognormal(rows: int, total: int, rng: np.random.Generator) -> np.ndarray:
    return _scaled(rng.lognormal(0, rng.uniform(0.3, 1.3), rows), total)


def _zipf(rows: int, total: int, rng: np.random.Generator) -> np.ndarray:
    return _scaled(rng.permutation(np.arange(1, rows + 1) ** -rng.uniform(0.7, 1.5)), total)


def _uniform(rows: int, total: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, max(2, 2 * total // rows), rows)


def _constant(rows: int, total: int, rng: np.random.Generator) -> np.ndarray:
    return np.full(rows, max(1, total // rows))


def _one_long(rows: int, total: int, rng: np.random.Generator) -> np.ndarray:
    lengths = _uniform(rows, max(rows, int(total * rng.uniform(0.05, 0.5))), rng)
    longest = rng.integers(rows)
    lengths[longest] = max(1, total - int(lengths.sum() - lengths[longest]))
    return lengths


DISTRIBUTIONS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "log-normal": _lognormal,
    "zipf": _zipf,
    "uniform": _uniform,
    "constant": _constant,
    "one long": _one_long,
}


def bytes_needed(work: Work) -> float:
    """Estimate the bytes of the arrays of a forward and backward pass.

    Each pass has q, k, v, the result, its gradient, and their gradients. FlashAttention adds a
    float32 gradient of q, and gradients of k and v for every query head.
    """
    itemsize = 4 if work.dtype == "float32" else 2
    queries, keys = work.total * work.heads, sum(work.keys) * work.kv_heads
    expanded = sum(work.keys) * work.heads
    return float(work.dim) * (queries * (4 * itemsize + 4) + (4 * keys + 2 * expanded) * itemsize)


def _log_integer(rng: np.random.Generator, low: float, high: float) -> int:
    """Return a random integer whose logarithm is uniformly distributed."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def draw(seed: int, index: int, limits: Limits) -> Shape:
    """Draw a shape. It depends on the arguments only, and not on shapes drawn before.

    A draw that exceeds a limit is repeated.
    """
    rng = np.random.default_rng((seed, index))
    for _ in range(MAX_DRAWS):
        rows, total = _log_integer(rng, 1, MAX_ROWS), _log_integer(rng, *limits.tokens)
        name = str(rng.choice(list(DISTRIBUTIONS)))
        group = _log_integer(rng, 1, MAX_GROUP)
        kv_heads = _log_integer(rng, 1, MAX_HEADS // group)
        dim = int(rng.choice(HEAD_DIMS))
        if rng.random() < 0.25:
            dim = 8 * int(rng.integers(HEAD_DIMS[0] // 8, HEAD_DIMS[-1] // 8 + 1))
        dtype, causal = str(rng.choice(limits.dtypes)), bool(rng.random() < 0.6)
        window = None
        if rng.random() < 0.25:
            left = _log_integer(rng, 16, 4096)
            window = (left, 0 if causal else _log_integer(rng, 1, left))
        kind = str(rng.choice(["equal", "equal", "equal", "longer", "other"]))
        if rows > total:
            continue
        lengths = DISTRIBUTIONS[name](rows, total, rng)
        keys = None
        if kind == "longer":
            keys = lengths + rng.integers(0, 2 * total // rows + 1, rows)
        elif kind == "other":
            keys = DISTRIBUTIONS[name](rows, total, rng)
        if max(lengths.sum(), 0 if keys is None else keys.sum()) > limits.tokens[1]:
            continue
        work = Work(
            tuple(lengths.tolist()),
            group * kv_heads,
            kv_heads,
            dim,
            dtype,
            causal,
            seed=index,
            window=window,
            key_lengths=None if keys is None else tuple(keys.tolist()),
        )
        if bytes_needed(work) > limits.bytes or work.flops * (1 + BACKWARD) > limits.flops:
            continue
        return Shape(str(index), name, work)
    raise ValueError(f"limits: expected limits that a shape can meet, got {limits}")


def read(path: Path) -> list[Shape]:
    """Read shapes from a file.

    The file is a JSON list of objects. Each has `lengths`, `heads` and `dim`, and optionally
    `name`, `kv_heads`, `dtype`, `causal`, `window` and `key_lengths`, as in `Work`. An entry of
    the lengths is an integer, or ``[length, rows]`` for several equal rows.

    Raises
    ------
    typer.BadParameter
        If the file contains anything else.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_shape(entry, i) for i, entry in enumerate(entries)]
    except (ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(
            f"--shapes: expected a list of objects with lengths, heads and dim in {path}, "
            f"got {type(error).__name__}: {error}"
        ) from error


def _shape(entry: dict[str, Any], index: int) -> Shape:
    options = dict(entry)
    name, kind = str(options.pop("name", index)), str(options.pop("kind", "given"))
    for field in ("lengths", "key_lengths"):
        if options.get(field) is not None:
            options[field] = _expand(options[field])
    if options.get("window") is not None:
        left, right = options["window"]
        options["window"] = (int(left), int(right))
    options.setdefault("kv_heads", options["heads"])
    work = Work(**{"dtype": "bfloat16", "seed": index, **options})
    if work.heads % work.kv_heads or (work.key_lengths and len(work.keys) != len(work.lengths)):
        raise ValueError(f"{name}: heads or key_lengths do not fit")
    return Shape(name, kind, work)


def _expand(lengths: list[Any]) -> tuple[int, ...]:
    pairs = ([int(x), 1] if isinstance(x, int) else x for x in lengths)
    return tuple(int(length) for length, count in pairs for _ in range(int(count)))
