"""Arrays of each library, for tests that run on all of them.

``SCREE_BACKENDS`` picks some, as in the conformance suite.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

import scree

MODULES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax.numpy",
    "mlx": "mlx.core",
    "array_api_strict": "array_api_strict",
}
NAMES = [
    name
    for name in os.environ.get("SCREE_BACKENDS", ",".join(MODULES)).split(",")
    if name in MODULES
]


@dataclass(frozen=True)
class Library:
    """One library; `make` turns a NumPy array into its own."""

    name: str
    make: Callable[[np.ndarray], Any]

    def f(self, *shape: int) -> Any:
        """Small float32 numbers."""
        return self.make(
            (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(np.float32)
        )

    def i(self, numbers: Any, dtype: str = "int32") -> Any:
        """These integers."""
        return self.make(np.asarray(numbers, dtype=dtype))

    def b(self, truths: Any) -> Any:
        """These booleans."""
        return self.make(np.asarray(truths, dtype=bool))

    def r(self, lengths: list[int], *token: int, dtype: str = "float32") -> scree.Array:
        """A ragged array of small numbers, rows [0, 1, ...] of these lengths."""
        values = (np.arange(np.prod((sum(lengths), *token), dtype=int)) % 7).reshape(
            sum(lengths), *token
        )
        return scree.from_lengths(self.make(values.astype(dtype)), lengths)

    @property
    def xp(self) -> Any:
        """The namespace."""
        return scree.namespace(self.f(1))

    @property
    def other(self) -> Library:
        """A library that this one is not."""
        return load("array_api_strict" if self.name == "numpy" else "numpy")


def load(name: str) -> Library:
    """The library of this name; `ImportError` where it is not installed."""
    module = import_module(MODULES[name])
    return Library(
        name,
        module.from_numpy if name == "torch" else getattr(module, "array", None) or module.asarray,
    )
