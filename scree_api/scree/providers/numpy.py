"""NumPy: row reductions, softmax and argmax by `ufunc.reduceat`."""

from itertools import pairwise

import numpy as np

from ..array import Array
from ..backends.numpy import BACKEND
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.row_chunks import map_rows
from ..ops.segment import SegmentCall, identity
from ..ops.softmax import SoftmaxCall

CHUNK = 1 << 18  # tokens that fit into the cache
UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def rejects(call: SegmentCall) -> str | None:
    """Return why `reduceat` does not take a reduction."""
    return None if call.layout.backend is BACKEND else "reduceat takes NumPy arrays only"


@register_kernel("segment_reduce", provider="reduceat", rejects=rejects)
def segment_reduce(call: SegmentCall) -> np.ndarray:
    """Reduce rows by `ufunc.reduceat`."""
    return reduce_rows(call.op, call.converted, call.layout)


def reduce_rows(op: str, values: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the reduction of each row, (n, ...).

    `reduceat` has no empty rows. They get the identity of the operation.
    """
    offsets, ufunc = layout.offsets, UFUNCS[op]
    starts, nonempty = offsets[:-1], offsets[1:] > offsets[:-1]
    values = values[: offsets[-1]]
    if nonempty.size and nonempty.all():
        return ufunc.reduceat(values, starts, axis=0, dtype=values.dtype)
    empty = identity(BACKEND.xp, op, values.dtype)
    out = np.full((nonempty.shape[0], *values.shape[1:]), empty, dtype=values.dtype)
    if nonempty.any():
        out[nonempty] = ufunc.reduceat(values, starts[nonempty], axis=0, dtype=values.dtype)
    return out


def rejects_softmax(call: SoftmaxCall) -> str | None:
    """Return why `reduceat` does not take a softmax."""
    if call.x.layout.backend is not BACKEND:
        return "reduceat takes NumPy arrays only"
    return None if call.is_along_rows else "reduceat runs along rows, not along element axes"


def _exponentials(x: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the shifted values, their exponentials, and the maximum and the sum of each row.

    The ragged axis is the first axis. The values have no tail. The sum is the sum of exponentials.
    """
    values, layout = x.values, x.layout
    values = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    values = np.moveaxis(values, x.ragged_dim, 0)[: layout.offsets[-1]]
    maximum = reduce_rows("max", values, layout)
    # Rows that are empty or contain an infinity are not shifted.
    maximum = np.where(np.isfinite(maximum), maximum, 0).astype(values.dtype, copy=False)
    shifted = values - np.repeat(maximum, layout.lengths, axis=0)
    weights = np.exp(shifted)
    return shifted, weights, maximum, reduce_rows("sum", weights, layout)


def _restore_shape(x: Array, values: np.ndarray) -> np.ndarray:
    """Return `values` with the tail, the axes and the dtype of `x`; tokens of the tail are 0."""
    tail = x.values.shape[x.ragged_dim] - values.shape[0]
    if tail:
        values = np.concatenate([values, np.zeros((tail, *values.shape[1:]), values.dtype)])
    return np.moveaxis(values.astype(x.values.dtype, copy=False), 0, x.ragged_dim)


def _softmax_of_rows(x: Array) -> np.ndarray:
    _, weights, _, total = _exponentials(x)
    return _restore_shape(x, weights / np.repeat(total, x.layout.lengths, axis=0))


def _log_softmax_of_rows(x: Array) -> np.ndarray:
    shifted, _, _, total = _exponentials(x)
    log_total = np.log(np.where(total != 0, total, 1)).astype(shifted.dtype, copy=False)
    return _restore_shape(x, shifted - np.repeat(log_total, x.layout.lengths, axis=0))


def _logsumexp_of_rows(x: Array) -> np.ndarray:
    _, _, maximum, total = _exponentials(x)
    with np.errstate(divide="ignore"):
        return (maximum + np.log(total)).astype(x.values.dtype, copy=False)


@register_kernel("softmax", provider="reduceat", rejects=rejects_softmax)
def softmax(call: SoftmaxCall) -> Array:
    """Compute the softmax of rows by `reduceat`."""
    return call.x.with_values(map_rows(_softmax_of_rows, call.x, per_token=True))


@register_kernel("log_softmax", provider="reduceat", rejects=rejects_softmax)
def log_softmax(call: SoftmaxCall) -> Array:
    """Compute the log-softmax of rows by `reduceat`."""
    return call.x.with_values(map_rows(_log_softmax_of_rows, call.x, per_token=True))


@register_kernel("logsumexp", provider="reduceat", rejects=rejects_softmax)
def logsumexp(call: SoftmaxCall) -> np.ndarray:
    """Compute the log-sum-exp of rows by `reduceat`."""
    out: np.ndarray = map_rows(_logsumexp_of_rows, call.x)
    return out


def rejects_arg(call: SegmentCall) -> str | None:
    """Return why `reduceat` does not take an argmax."""
    if call.values.ndim != 1:
        return "reduceat finds positions of single numbers only, not of elements with axes"
    return rejects(call)


@register_kernel("segment_arg", provider="reduceat", rejects=rejects_arg)
def segment_arg(call: SegmentCall) -> np.ndarray:
    """Return the position of the first extremum of each row, -1 for empty rows.

    Rows are searched in chunks that fit into the cache.
    """
    values, offsets, lengths = call.values, call.layout.offsets, call.layout.lengths
    out, nonempty = np.full(lengths.shape[0], -1), np.flatnonzero(lengths)
    starts = offsets[nonempty]
    bounds = np.searchsorted(starts, np.arange(0, values.shape[0], CHUNK))
    for low, high in pairwise(np.unique([*bounds, nonempty.size])):
        rows, chunk_start = nonempty[low:high], starts[low]
        chunk = values[chunk_start : offsets[rows[-1] + 1]]
        row_starts = starts[low:high] - chunk_start
        extremum = UFUNCS[call.op].reduceat(chunk, row_starts)
        is_extremum = chunk == np.repeat(extremum, lengths[rows])
        if chunk.dtype.kind == "f" and np.isnan(extremum).any():
            is_extremum |= np.isnan(chunk)
        tokens = np.flatnonzero(is_extremum)
        if tokens.size > rows.size:  # some rows have several
            tokens = tokens[np.searchsorted(tokens, row_starts)]
        out[rows] = tokens - row_starts
    return out
