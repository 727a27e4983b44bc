"""Attention to a cache of keys and values, which the versions 2 and 3 of FlashAttention share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...array import Array
from ...backends import backend
from ...ops.append_paged import append_paged
from ...ops.paged_attention import paged_attention
from ...ops.pages import as_page_table, gather_pages, token_layout
from .common import Options, as_number, attend, check_ndim, check_shape, padded_array, ragged_array
from .rotary import rope_options, rotate

#: Tokens per part of a cached sequence in calls whose bits must not depend on other sequences.
SPLIT_SIZE = 2048


@dataclass(frozen=True)
class Cache:
    """A cache of keys and values, and the tokens of each sequence in it.

    Attributes
    ----------
    k, v
        (num_pages, page_size, num_kv_heads, head_dim) pages. A contiguous cache has one page per
        sequence.
    table
        (batch, width) pages of each sequence, or the ragged array of them.
    lengths
        (batch,) tokens of each sequence, including those before its first key.
    leftpad
        (batch,) position of the first key, or None.
    length
        The number of tokens of every sequence, if the caller gave a number.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: Any
    lengths: torch.Tensor
    leftpad: torch.Tensor | None = None
    length: int | None = None


def make_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: int,
    cache_seqlens: Any,
    *,
    table_name: str,
    table: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
) -> Cache:
    """Return the cache of a call; `table_name` is the caller's name of the page table."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_ndim(name, x, 4, "(batch or pages, tokens, num_kv_heads, head_dim)")
    check_shape("v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]), "as k_cache")
    device = k_cache.device
    if table is None:
        if batch_idx is None:
            if k_cache.shape[0] < batch:
                raise ValueError(
                    f"k_cache: expected at least {batch} sequences as q, got {k_cache.shape[0]}"
                )
            batch_idx = torch.arange(batch, dtype=torch.int32, device=device)
        check_shape("cache_batch_idx", batch_idx, (batch,), "one index per sequence")
        table = batch_idx[:, None]
    elif batch_idx is not None:
        raise ValueError(f"cache_batch_idx: expected None with {table_name}, got a tensor")
    check_ndim(table_name, table, 2, "(batch, max_num_pages)")
    check_shape(table_name, table, (batch, table.shape[1]), "one row per sequence")
    capacity = table.shape[1] * k_cache.shape[1]
    cache_seqlens = capacity if cache_seqlens is None else cache_seqlens
    length = None
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.ndim:
        check_shape("cache_seqlens", cache_seqlens, (batch,), "one length per sequence")
    else:
        length = as_number(cache_seqlens)
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=device)
    if leftpad is not None:
        check_shape("cache_leftpad", leftpad, (batch,), "one position per sequence")
    return Cache(k_cache.detach(), v_cache.detach(), table, cache_seqlens, leftpad, length)


def split_size(num_splits: Any) -> int | None:
    """Return the tokens per part of a cached sequence, or None for a choice of the kernel.

    With ``num_splits=1`` the bits of a sequence must not depend on the other sequences. The parts
    then have a constant size. All other numbers are hints, which have no effect.
    """
    return SPLIT_SIZE if num_splits is not None and as_number(num_splits) == 1 else None


def as_cache(k: Array, v: torch.Tensor, lengths: torch.Tensor | None = None) -> Cache:
    """Return packed keys and values as a cache with pages of one token, without a copy.

    `lengths` are the tokens in use of each sequence; all by default.
    """
    layout = k.layout
    tokens = torch.arange(layout.total, dtype=torch.int32, device=k.values.device)
    table = Array.from_layout(tokens, layout)
    k_pages, v_pages = (x[:, None].detach() for x in (k.values, v))
    return Cache(k_pages, v_pages, table, layout.lengths if lengths is None else lengths)


def check_capacity(cache: Cache, new: Array | None, table_name: str) -> None:
    """Raise if the tokens of a sequence and new ones exceed its pages, as far as the host knows."""
    lengths = backend(cache.lengths).peek(cache.lengths)
    if lengths is None:
        if cache.length is None or torch.compiler.is_compiling():
            return
        lengths = np.full(cache.lengths.shape, cache.length)
    if new is not None and new.layout.host_offsets is not None:
        lengths = lengths + np.diff(new.layout.host_offsets)
    capacity = cache.table.shape[1] * cache.k.shape[1]
    if lengths.max(initial=0) > capacity:
        row = int(lengths.argmax())
        # The type of FlashAttention's error.
        raise RuntimeError(
            f"cache_seqlens: expected at most {capacity} tokens with the new ones, the capacity of "
            f"k_cache and {table_name}, got {lengths[row]} for sequence {row}"
        )


def attention_with_kvcache(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: Cache,
    options: Options,
    *,
    table_name: str,
    has_lengths: bool,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: Any = True,
    rotary_seqlens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: Any = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    split_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append new keys to a cache, attend to it, and return the output and the log-sum-exp.

    The result has the tokens of all sequences in one axis.
    """
    with torch.no_grad():
        queries = _as_array("q", q, cu_seqlens_q, max_seqlen_q)
        if (k is None) != (v is None):
            raise ValueError("v: expected new values together with new keys, got only one of k, v")
        if (rotary_cos is None) != (rotary_sin is None):
            raise ValueError("rotary_sin: expected both tables or none, got only one")
        if rotary_cos is not None and k is None:
            raise ValueError("k: expected new keys with rotary_cos, got None")
        if k is not None and v is not None:
            if not has_lengths:
                raise ValueError("cache_seqlens: expected lengths with new keys, got None")
            new = _as_array("k", k, cu_seqlens_k_new, None)
            values = new.with_values(v.reshape(-1, *v.shape[-2:]))
            lengths = cache.lengths + new.layout.lengths.to(cache.lengths.dtype)
            check_capacity(cache, new, table_name)
            appended: dict[str, Any] = {}
            if rotary_cos is not None and rotary_sin is not None:
                start = cache.lengths if rotary_seqlens is None else rotary_seqlens
                tables = rotary_cos, rotary_sin
                rotation = rope_options(*tables, rotary_interleaved, new, start)
                if rotary_seqlens is None:  # the positions in the cache
                    appended["rope"] = rotation
                else:
                    new = new.with_values(rotate(new, *tables, start, rotary_interleaved))
                # A single query is at the first position in both cases.
                by_position = options.is_local or queries.layout.max_length == 1
                if appended and by_position and _rotates_together(queries, new):
                    appended["q"] = queries
                else:
                    turned = rotate(queries, *tables, start, rotary_interleaved, options.is_local)
                    queries = queries.with_values(turned)
            cache = replace(cache, lengths=lengths)
            arrays = cache.k, cache.v, new, values, cache.table, lengths
            _, _, *turned_queries = append_paged(*arrays, **appended)
            queries = turned_queries[0] if turned_queries else queries
        else:
            check_capacity(cache, None, table_name)
        return attend_to_cache(queries, cache, options, qv, descales, split_size)


def _rotates_together(q: Array, k: Array) -> bool:
    """Return whether `append_paged` can rotate the queries together with the keys."""
    is_alike = q.dtype == k.dtype and q.values.shape[2] == k.values.shape[2]
    return q.layout is k.layout and is_alike


def attend_to_cache(
    q: Array,
    cache: Cache,
    options: Options,
    qv: torch.Tensor | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    split_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (total_q, num_heads, value_dim) attention to a cache, and (total_q, num_heads) lse."""
    if cache.leftpad is not None:
        cache = _drop_leftpad(cache)
    is_plain = options.chunk is None and qv is None and q.dtype.itemsize > 1
    if is_plain:
        out, lse = paged_attention(
            q,
            cache.k,
            cache.v,
            cache.table,
            cache.lengths,
            causal=False,  # the window has it; a causal call refuses more queries than keys
            window=options.window,
            scale=options.scale,
            softcap=options.softcap,
            sinks=options.sinks,
            alibi_slopes=options.alibi_slopes,
            split_size=split_size,
            return_lse=True,
        )
        return out.values, lse.values
    table = as_page_table(cache.table, cache.lengths)
    layout = token_layout(table, cache.lengths, int(cache.k.shape[1]))
    k, v = (gather_pages(x, table, layout) for x in (cache.k, cache.v))
    keys = Array.from_layout(k, layout)
    return attend_extended(q, keys, v, options, qv, descales, True)


def attend_extended(
    q: Array,
    k: Array,
    v: torch.Tensor,
    options: Options,
    qv: torch.Tensor | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    return_lse: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Return attention with 8-bit inputs or with a second pair of queries and keys, `qv` and `v`."""
    if q.dtype.itemsize == 1:
        group = q.values.shape[1] // max(k.values.shape[1], 1)
        q_scale, k_scale, v_scale = descales
        q_scale = None if q_scale is None else q_scale.repeat_interleave(group, 1)
        v = _descale("v_descale", k.with_values(v), v_scale).values
        q, k = _descale("q_descale", q, q_scale), _descale("k_descale", k, k_scale)
        qv = None if qv is None else qv.to(q.dtype)
    if qv is not None:
        qv = qv.reshape(-1, *qv.shape[-2:])
        check_shape("qv", qv, (*q.values.shape[:2], v.shape[-1]), "as q, with the head_dim of v")
        q = q.with_values(torch.cat([q.values, qv], -1))
        k = k.with_values(torch.cat([k.values, v], -1))
    return attend(q, k, v, options, return_lse)


def _descale(name: str, x: Array, scale: torch.Tensor | None) -> Array:
    """Return 8-bit numbers times one factor per sequence and head, in bfloat16."""
    values = x.values.to(torch.float32)
    if scale is not None:
        check_shape(name, scale, (x.batch_size, values.shape[1]), "one per sequence and head")
        values = values * x.layout.per_token(scale.to(torch.float32))[..., None]
    return x.with_values(values.to(torch.bfloat16))


def _drop_leftpad(cache: Cache) -> Cache:
    """Return the cache with pages of one token, without the tokens before the first key."""
    assert cache.leftpad is not None
    width, (num_pages, size) = cache.table.shape[1], cache.k.shape[:2]
    table = cache.table.to(torch.int64)
    token = torch.arange(width * size, device=table.device) + cache.leftpad.to(torch.int64)[:, None]
    # Tokens after the last page are not in use.
    page = table.gather(1, (token // size).clamp(max=max(width - 1, 0)))
    slots = page * size + token % size
    slots = slots if num_pages * size >= 2**31 else slots.to(torch.int32)
    k, v = (x.reshape(num_pages * size, 1, *x.shape[2:]) for x in (cache.k, cache.v))
    lengths = (cache.lengths - cache.leftpad.to(cache.lengths.dtype)).clamp(min=0)
    return Cache(k, v, slots, lengths)


def _as_array(name: str, x: torch.Tensor, cu_seqlens: Any, max_seqlen: Any) -> Array:
    if cu_seqlens is None:
        return padded_array(name, x)
    check_ndim(name, x, 3, "(total, num_heads, head_dim)")
    return ragged_array(x, cu_seqlens, max_seqlen)
