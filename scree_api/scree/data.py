"""Batches: from samples to ragged arrays, by token count, over ranks, in windows, and of several modalities."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array import Array
from .backends import is_array
from .bridges.dlpack import to_backend
from .bridges.lists import from_lists
from .create import pack
from .index import select
from .layout import Layout

__all__ = ["Interleaved", "TokenBudgetSampler", "chunk", "collate", "interleave", "split_balanced", "truncate"]


def collate(samples: Sequence[Any], library: Any = None) -> Any:
    """The samples of a batch as ragged arrays; ``collate_fn`` of a DataLoader.

    Parameters
    ----------
    samples
        Arrays or lists of numbers whose first axes differ; or mappings of names to such, the same names in each. A number
        instead of an array makes a dense array, one entry a sample.
    library
        The library of the result; by default that of the samples, and NumPy for lists and numbers.

    Returns
    -------
    Array or dict
        A ragged array, or one for each name. Fields of equal lengths are on one layout.

    Raises
    ------
    ValueError
        If there are no samples, or their names differ.
    TypeError
        If a field is not arrays or numbers of one dtype; nothing is promoted.

    Examples
    --------
    >>> import scree.data
    >>> batch = scree.data.collate([{"ids": [5, 6, 7], "label": 1}, {"ids": [8], "label": 0}])
    >>> batch["ids"].lengths, batch["label"]
    (array([3, 1], dtype=int32), array([1, 0]))
    """
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    if not isinstance(samples[0], Mapping):
        return _field("samples", samples, library)
    names = set(samples[0])
    for i, sample in enumerate(samples):
        if set(sample) != names:
            raise ValueError(f"samples[{i}]: expected the names {sorted(names)}, got {sorted(sample)}")
    batch: dict[str, Any] = {}
    layouts: dict[tuple[Any, ...], Array] = {}
    for name in samples[0]:
        found = _field(name, [sample[name] for sample in samples], library)
        if isinstance(found, Array):
            lib, lengths = found.layout.backend, found.layout.read()
            like = layouts.setdefault((lib.name, str(found.device), lengths.tobytes()), found)
            found = like.with_values(found.values)
        batch[name] = found
    return batch


def _field(name: str, parts: Sequence[Any], library: Any) -> Any:
    if all(isinstance(x, bool | int | float | np.generic) or getattr(x, "ndim", None) == 0 for x in parts):
        dense = from_lists([[x.item() if hasattr(x, "item") else x] for x in parts])
        like = next((x for x in parts if is_array(x)), None)
        target = library if library is not None else like.__array_namespace__() if like is not None else "numpy"
        return to_backend(dense, target).values
    try:
        found = pack(list(parts)) if is_array(parts[0]) else from_lists(parts)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return found if library is None else to_backend(found, library)
