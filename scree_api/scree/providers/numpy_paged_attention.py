"""Decoding from a paged cache by NumPy's matrix products."""

from typing import Any

import numpy as np

from ..backends.numpy import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.paged_attention import PagedAttentionCall
from .paged_parts import BUFFER_BYTES, chunks, decode_parts, rejects_decode


def rejects(call: PagedAttentionCall) -> str | None:
    """Return why the kernel does not take the call."""
    if reason := rejects_decode(call, BACKEND):
        return reason
    if call.q.dtype not in (np.float32, np.float64):
        return f"NumPy has fast matrix products of float32 and float64 only, not {call.q.dtype}"
    return None


@register_kernel("paged_attention", provider="matmul", rejects=rejects)
@np.errstate(invalid="ignore")  # infinite scores give NaN, as in `attention`
def matmul(call: PagedAttentionCall) -> Any:
    """Attend to a few parts of rows at a time, and merge the parts of each row."""
    q, (_, size, kv_heads, dim) = call.q.values, call.k_pages.shape
    group, value_dim = q.shape[1] // kv_heads, call.v_pages.shape[3]
    out = np.zeros((*q.shape[:2], value_dim), q.dtype)
    lse = np.full(q.shape[:2], -np.inf, q.dtype)
    parts = decode_parts(call, BACKEND)
    if parts.rows.size:
        queries = np.asarray(call.q.layout.host_offsets)[parts.rows]
        scale = q.dtype.type(dim**-0.5 if call.scale is None else call.scale)
        grouped = q[queries].reshape(-1, kv_heads, group, dim) * scale
        page_bytes = size * kv_heads * max(dim, value_dim) * q.itemsize
        # The first part is the longest.
        longest = -(-int(parts.tokens[0]) // size)
        most = min(parts.rows.size * longest, max(longest, BUFFER_BYTES // page_bytes))
        caches = (call.k_pages, call.v_pages)
        buffers = [np.empty((most, *x.shape[1:]), x.dtype) for x in caches]
        values = np.empty((*grouped.shape[:3], value_dim), q.dtype)
        total, maximum = (np.empty((*grouped.shape[:3], 1), q.dtype) for _ in range(2))
        for chunk in chunks(parts, np.asarray(call.page_table.values), size, page_bytes):
            part, count = chunk.parts, chunk.parts.stop - chunk.parts.start
            k, v = (
                # The pages are checked; with mode="raise" NumPy would copy the buffer.
                np.take(cache, chunk.pages, axis=0, out=buffer[: chunk.pages.size], mode="clip")
                for cache, buffer in zip(caches, buffers)
            )
            k = k.reshape(count, -1, kv_heads, dim)
            v = v.reshape(count, -1, kv_heads, value_dim)
            if chunk.is_token is not None:
                k[~chunk.is_token], v[~chunk.is_token] = 0, 0
            score = grouped[part] @ k.transpose(0, 2, 3, 1)
            if chunk.is_token is not None:
                score = np.where(chunk.is_token[:, None, None, :], score, -np.inf)
            maximum[part] = score.max(axis=3, keepdims=True)
            # A part may have scores of -inf only, and no weight.
            base = np.where(maximum[part] == -np.inf, 0, maximum[part])
            weights = np.exp(score - base)
            total[part] = weights.sum(axis=3, keepdims=True)
            values[part] = weights @ v.transpose(0, 2, 1, 3)
        # The parts of a row, one after the other.
        order = np.argsort(parts.rows, kind="stable")
        starts = np.flatnonzero(np.diff(parts.rows[order], prepend=-1))
        counts = np.diff([*starts, order.size])
        values, total, maximum = (x[order] for x in (values, total, maximum))
        row_maximum = np.maximum.reduceat(maximum, starts)
        # Scores of -inf only give NaN here.
        weights = np.exp(maximum - np.repeat(row_maximum, counts, axis=0))
        row_total = np.add.reduceat(total * weights, starts)
        row_values = np.add.reduceat(values * weights, starts) / row_total
        row_lse = row_maximum + np.log(row_total)
        rows = queries[order][starts]
        out[rows] = row_values.reshape(len(rows), -1, value_dim)
        lse[rows] = row_lse.reshape(len(rows), -1)
    result = call.q.with_values(out)
    return (result, call.q.with_values(lse)) if call.return_lse else result
