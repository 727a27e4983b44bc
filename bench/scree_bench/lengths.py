"""Row lengths: log-normal, like the lengths of texts, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer

#: `SEED`: lengths of sixteen rows on which the attention kernels of several projects were timed.
#: `LONG` and `SHORT`: log-normal lengths, drawn once.
SEED = (512, 1024, 768, 256, 2048, 384, 896, 640, 1536, 320, 1152, 480, 704, 192, 832, 416)
LONG = (4065, 4480, 1954, 1187, 975, 1913, 1017, 793)
SHORT = (1038, 172, 324, 279, 422, 110, 199, 163, 134, 154, 188, 215, 148, 329, 184, 37)


def lognormal(count: int, median: float, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Return (count,) log-normal lengths, at least 1.

    Their logarithms are normally distributed around ``log(median)``.
    """
    return np.maximum(1, rng.lognormal(np.log(median), sigma, count)).astype(np.int64)


def lognormal_with_total(
    count: int, total: int, rng: np.random.Generator, sigma: float = 0.7
) -> np.ndarray:
    """Return (count,) log-normal lengths whose sum is about `total`."""
    x = rng.lognormal(0, sigma, count)
    return np.maximum(1, np.round(x / x.sum() * total)).astype(np.int64)


def read(path: Path) -> np.ndarray:
    """Read lengths from a file.

    The file is a JSON list, or whole numbers separated by spaces, commas or line ends.

    Raises
    ------
    typer.BadParameter
        If the file contains anything else, or no length.
    """
    text = path.read_text(encoding="utf-8")
    try:
        entries = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(x) for x in text.replace(",", " ").split()]
        )
        lengths = np.asarray(entries, dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(
            f"--lengths: expected whole numbers in {path}, got {error}"
        ) from error
    if lengths.ndim != 1 or not lengths.size or lengths.min() < 0:
        raise typer.BadParameter(
            f"--lengths: expected at least one length >= 0 in {path}, got {text[:40]!r}"
        )
    return lengths


def batches(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut lengths into batches of `size` rows, in order. A remainder is dropped."""
    whole = max(1, len(lengths) // size)
    return [lengths[i * size : (i + 1) * size] for i in range(whole)]
