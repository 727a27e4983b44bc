"""NumPy: `reduceat` for segment reductions, `repeat` for row ids."""

from itertools import pairwise
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from ..dispatch.registry import register_kernel
from ..ops.segment import SegmentCall, identity
from . import Backend


def _itself(x: Any) -> np.ndarray:
    return np.asarray(x)


def _row_ids(repeats: np.ndarray, total: int) -> np.ndarray:
    return np.repeat(np.arange(repeats.shape[0]), repeats)


def _uniform(key: np.random.Generator, shape: tuple[int, ...], like: Any) -> np.ndarray:
    if not isinstance(key, np.random.Generator):
        raise TypeError(f"key: expected a numpy.random.Generator, got {type(key).__name__}")
    return key.random(shape, dtype=np.float32)


def _to_device(x: np.ndarray, device: Any) -> np.ndarray:
    if device != "cpu":
        raise ValueError(f"device: expected 'cpu', the only one of NumPy, got {device!r}")
    return x


BACKEND = Backend(
    "numpy",
    xp,
    peek=_itself,
    read=_itself,
    row_ids=_row_ids,
    device=lambda x: "cpu",
    uniform=_uniform,
    to_device=_to_device,
)

CHUNK = 1 << 18  # tokens that pass the cache together
UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def _rejects(call: SegmentCall) -> str | None:
    return None if call.layout.backend is BACKEND else "reduceat takes NumPy arrays only"


@register_kernel("segment_reduce", provider="reduceat", rejects=_rejects)
def reduceat(call: SegmentCall) -> np.ndarray:
    """Row reductions by `ufunc.reduceat`, which knows no empty rows: those are left out and filled in."""
    values, offsets = call.converted, call.layout.offsets
    filled, ufunc = offsets[1:] > offsets[:-1], UFUNCS[call.op]
    if filled.size and filled.all():
        return ufunc.reduceat(values[: offsets[-1]], offsets[:-1], axis=0, dtype=values.dtype)
    out = np.full(
        (filled.shape[0], *values.shape[1:]),
        identity(xp, call.op, values.dtype),
        dtype=values.dtype,
    )
    if filled.any():
        out[filled] = ufunc.reduceat(
            values[: offsets[-1]], offsets[:-1][filled], axis=0, dtype=values.dtype
        )
    return out


def _rejects_arg(call: SegmentCall) -> str | None:
    return _rejects(call) or (
        None if call.values.ndim == 1 else "it looks at single numbers, not at elements with axes"
    )


@register_kernel("segment_arg", provider="reduceat", rejects=_rejects_arg)
def first_of_the_best(call: SegmentCall) -> np.ndarray:
    """The first token of each row that is as good as the row's best, by as many rows at a time as the cache holds."""
    values, offsets, lengths = call.values, call.layout.offsets, call.layout.lengths
    out, filled = np.full(lengths.shape[0], -1), np.flatnonzero(lengths)
    starts = offsets[filled]
    cuts = np.unique([*np.searchsorted(starts, np.arange(0, values.shape[0], CHUNK)), filled.size])
    for low, high in pairwise(cuts):
        rows, begin = filled[low:high], starts[low]
        part, places = values[begin : offsets[rows[-1] + 1]], starts[low:high] - begin
        top = UFUNCS[call.op].reduceat(part, places)
        best = part == np.repeat(top, lengths[rows])
        if part.dtype.kind == "f" and np.isnan(top).any():
            best |= np.isnan(part)
        found = np.flatnonzero(best)
        if found.size > rows.size:  # some are as good as one another
            found = found[np.searchsorted(found, places)]
        out[rows] = found - places
    return out
