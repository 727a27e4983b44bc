"""The backend of NumPy."""

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from . import Backend


def _as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)


def _row_ids(repeats: np.ndarray, total: int) -> np.ndarray:
    return np.repeat(np.arange(repeats.shape[0]), repeats)


def _uniform(key: np.random.Generator, shape: tuple[int, ...], like: Any) -> np.ndarray:
    if not isinstance(key, np.random.Generator):
        raise TypeError(f"key: expected a numpy.random.Generator, got {type(key).__name__}")
    return key.random(shape, dtype=np.float32)


def _to_device(x: np.ndarray, device: Any) -> np.ndarray:
    if device != "cpu":
        raise ValueError(f"device: expected 'cpu', NumPy's only device, got {device!r}")
    return x


def _split(x: np.ndarray, sizes: list[int], axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes[:-1]), axis=axis)


def _write(x: np.ndarray, index: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    x[index] = values
    return x


BACKEND = Backend(
    "numpy",
    xp,
    peek=_as_numpy,
    read=_as_numpy,
    row_ids=_row_ids,
    device=lambda x: "cpu",
    uniform=_uniform,
    to_device=_to_device,
    split=_split,
    write=_write,
)
