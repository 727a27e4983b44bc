"""Lengths of rows: log-normal, as lengths of texts are, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer

#: Lengths of sixteen rows on which the attention kernels of several projects have been timed; and log-normal ones drawn once.
SEED = (512, 1024, 768, 256, 2048, 384, 896, 640, 1536, 320, 1152, 480, 704, 192, 832, 416)
LONG = (4065, 4480, 1954, 1187, 975, 1913, 1017, 793)
SHORT = (1038, 172, 324, 279, 422, 110, 199, 163, 134, 154, 188, 215, 148, 329, 184, 37)


def lognormal(count: int, median: float, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """(count,) lengths whose logarithms are normal around that of `median`; at least 1."""
    return np.maximum(1, rng.lognormal(np.log(median), sigma, count)).astype(np.int64)


def adding_up(count: int, total: int, rng: np.random.Generator, sigma: float = 0.7) -> np.ndarray:
    """(count,) log-normal lengths that add up to about `total`."""
    x = rng.lognormal(0, sigma, count)
    return np.maximum(1, np.round(x / x.sum() * total)).astype(np.int64)


def read(path: Path) -> np.ndarray:
    """Lengths from a file: a JSON list, or whole numbers with spaces, commas or line ends between them.

    Raises
    ------
    typer.BadParameter
        If the file holds anything else, or no length at all.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(x) for x in text.replace(",", " ").split()]
        )
        lengths = np.asarray(found, dtype=np.int64)
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
    """Lengths cut into batches of `size` rows, in order; what is left over is dropped."""
    whole = max(1, len(lengths) // size)
    return [lengths[i * size : (i + 1) * size] for i in range(whole)]
