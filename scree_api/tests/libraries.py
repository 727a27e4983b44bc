"""Small arrays of each library, for tests that run on all of them.

``SCREE_BACKENDS`` picks some, as in the conformance suite, whose libraries these are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

import scree
from scree_conformance import backends

LIBRARIES = [name for name in backends.LIBRARIES if name != "strict_minimal"]
_SELECTED = [
    name for name in os.environ.get("SCREE_BACKENDS", ",".join(LIBRARIES)).split(",") if name
]
if unknown := set(_SELECTED) - set(backends.LIBRARIES):
    raise ValueError(
        f"SCREE_BACKENDS: expected some of {', '.join(backends.LIBRARIES)}, got {sorted(unknown)}"
    )
NAMES = [name for name in _SELECTED if name in LIBRARIES]


@dataclass(frozen=True)
class SmallArrays:
    """Small arrays of one library."""

    library: backends.Library

    @property
    def name(self) -> str:
        """The name of the library."""
        return self.library.name

    def make(self, x: np.ndarray) -> Any:
        """Convert a NumPy array to an array of the library, with the same dtype."""
        return self.library.make(x, x.dtype.name)

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
    def other(self) -> SmallArrays:
        """Arrays of a library that this one is not."""
        return load("array_api_strict" if self.name == "numpy" else "numpy")


def load(name: str) -> SmallArrays:
    """Return the arrays of the library of this name; `ImportError` where it is not installed."""
    return SmallArrays(backends.load(name))
