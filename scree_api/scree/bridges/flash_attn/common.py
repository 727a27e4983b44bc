"""The parts that the functions of all FlashAttention versions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...array import Array
from ...backends import backend
from ...indexing.getitem import select
from ...layout import Layout
from ...ops.attention import attention

Window = Sequence[int | None]


@dataclass(frozen=True)
class Options:
    """The options of a call, as `attention` takes them.

    Attributes
    ----------
    window
        (left, right); None is unbounded, and a causal call has right = 0.
    scale, softcap, alibi_slopes, sinks
        As in `attention`.
    dropout, seed
        The probability of dropout, and its seed, an int64 tensor of one element, or None.
    deterministic
        Whether gradients too must have the same bits each time.
    chunk
        Keys per chunk, or None. A query sees only the keys of its own chunk.
    """

    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    seed: torch.Tensor | None = None
    deterministic: bool = False
    chunk: int | None = None

    @property
    def is_local(self) -> bool:
        """True if a query does not see all keys."""
        return self.window != (None, None) or self.chunk is not None


def make_options(
    *,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Window = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    dropout_p: Any = 0.0,
    device: torch.device | None = None,
    deterministic: Any = False,
    attention_chunk: Any = 0,
) -> Options:
    """Return the options of a call; numbers may be tensors with one element, and flags integers.

    The seed of dropout is drawn from PyTorch's generator of `device`, as FlashAttention draws it.
    """
    dropout = float(as_number(dropout_p))
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {dropout}")
    left, right = window_bounds(window_size)
    softcap, chunk = as_number(softcap), as_number(attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: expected 0 or a positive number, got {chunk}")
    return Options(
        window=(left, 0 if as_number(causal) else right),
        scale=None if softmax_scale is None else float(as_number(softmax_scale)),
        softcap=float(softcap) if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        sinks=learnable_sink,
        dropout=dropout,
        seed=torch.randint(2**63 - 1, (1,), device=device) if dropout else None,
        deterministic=bool(as_number(deterministic)),
        chunk=int(chunk) or None,
    )


def as_number(x: Any) -> Any:
    """Return the number in a tensor with one element; anything else as it is."""
    return x.item() if isinstance(x, torch.Tensor | np.ndarray | np.generic) else x


def window_bounds(window_size: Window) -> tuple[int | None, int | None]:
    """Return the window with None for a negative side, which FlashAttention takes as unbounded."""
    if len(window_size) != 2:
        raise ValueError(f"window_size: expected (left, right), got {window_size!r}")
    bounds = [as_number(bound) for bound in window_size]
    left, right = (None if bound is None or bound < 0 else int(bound) for bound in bounds)
    return left, right


def ragged_array(values: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any) -> Array:
    """Return the ragged array of values and offsets.

    Calls with the same `cu_seqlens` tensor share one layout unless the tensor was written to.
    """
    max_seqlen = as_number(max_seqlen)
    if torch.compiler.is_compiling():
        return Array(values, cu_seqlens, max_length=max_seqlen)
    # A cached layout would miss a write: in inference mode a tensor has no version counter.
    if cu_seqlens.is_inference():
        return Array.from_layout(values, _make_layout(cu_seqlens, values.shape[0], max_seqlen))
    layout = _cached_layout(cu_seqlens, cu_seqlens._version, values.shape[0], max_seqlen)
    return Array.from_layout(values, layout)


@lru_cache(maxsize=8)
def _cached_layout(
    cu_seqlens: torch.Tensor, version: int, total: int, max_seqlen: int | None
) -> Layout:
    """Return the layout of the offsets.

    Every layer of a model then uses the same tiles and kernel schedules.
    """
    return _make_layout(cu_seqlens, total, max_seqlen)


def _make_layout(cu_seqlens: torch.Tensor, total: int, max_seqlen: int | None) -> Layout:
    """Return a layout whose last tokens may belong to no row, which `Array` refuses on the CPU."""
    host = backend(cu_seqlens).peek(cu_seqlens)
    used = total
    if host is not None and host.ndim == 1 and host.size and 0 <= host[-1] < total:
        used = int(host[-1])
    values = cu_seqlens.new_empty(()).expand(used)
    layout = Array(values, cu_seqlens, max_length=max_seqlen).layout
    return layout if used == total else Layout(layout.backend, cu_seqlens, total, max_seqlen)


def padded_array(name: str, x: torch.Tensor) -> Array:
    """Return the ragged array of a (batch, seqlen, num_heads, head_dim) tensor, without a copy."""
    check_ndim(name, x, 4, "(batch, seqlen, num_heads, head_dim)")
    batch, length = x.shape[:2]
    return Array.from_layout(x.reshape(-1, *x.shape[2:]), equal_rows(batch, length, x))


def equal_rows(batch: int, length: int, like: torch.Tensor) -> Layout:
    """Return the layout of `batch` rows of `length` tokens on the device of `like`."""
    key = backend(like).stream_key
    if torch.compiler.is_compiling() or type(like) is not torch.Tensor:
        return _equal_rows(batch, length, like.device)
    identify = None if key is None else key(like)
    return _cached_equal_rows(batch, length, like.device, identify and identify())


@lru_cache(maxsize=64)
def _cached_equal_rows(batch: int, length: int, device: torch.device, stream: Any) -> Layout:
    """Return a layout for one stream or capture, as another stream could read the offsets early."""
    # An inference tensor could not be saved for a backward pass.
    with torch.inference_mode(False):
        return _equal_rows(batch, length, device)


def _equal_rows(batch: int, length: int, device: torch.device) -> Layout:
    total = batch * length
    dtype = torch.int32 if total < 2**31 else torch.int64
    offsets = torch.arange(batch + 1, dtype=dtype, device=device) * length
    host = None if torch.compiler.is_compiling() else np.arange(batch + 1) * length
    return Layout(backend(offsets), offsets, total, length, host, has_no_tail=True)


def keep_used(
    name: str, arr: Array, used: torch.Tensor, first: torch.Tensor | None = None
) -> Array:
    """Return the tokens from ``first[i]`` to ``used[i]`` of each row i, without reading the device.

    `first` is 0 by default.
    """
    layout, starts = arr.layout, arr.offsets[:-1]
    check_shape(name, used, (arr.batch_size,), "one length per row")
    lengths = torch.minimum(used.to(layout.offsets.dtype), layout.lengths)
    if first is not None:
        check_shape("leftpad_k", first, (arr.batch_size,), "one position per row")
        first = first.to(layout.offsets.dtype)
        lengths, starts = (lengths - first).clamp(min=0), starts + first
    kept = layout.with_lengths(lengths, layout.total, layout.max_length)
    return select(arr, kept, starts)


def restore_unused(part: Array, layout: Layout, fill: float) -> torch.Tensor:
    """Return values on `layout`: in each row the tokens of `part`, and then `fill`."""
    whole = select(part, layout, part.offsets[:-1])
    is_used = layout.positions < layout.per_token(part.layout.lengths)
    mask = layout.token_mask
    is_used = is_used if mask is None else is_used & mask
    is_used = is_used.reshape(-1, *(1,) * (whole.values.ndim - 1))
    return torch.where(is_used, whole.values, torch.full_like(whole.values, fill))


def split_chunks(q: Array, k: Array, chunk: int) -> tuple[Array, Layout]:
    """Return the queries, and the layout of the keys, with one row per chunk of keys.

    The first row of each sequence has the queries before the first key, and no keys.
    """
    max_k = max(k.layout.max_length_bound, 1)
    ends = torch.arange(-(-max_k // chunk) + 1, device=k.values.device) * chunk
    len_q, len_k = (x.layout.lengths.to(torch.int64)[:, None] for x in (q, k))
    key_ends = torch.minimum(ends, len_k)
    query_ends = torch.minimum((ends - (len_k - len_q)).clamp(min=0), len_q)
    bounds = (q.layout.max_length_bound, min(chunk, max_k))
    layouts = [
        Layout(
            x.layout.backend,
            torch.cat([x.offsets[:1], (x.offsets[:-1, None] + at).reshape(-1).to(x.offsets.dtype)]),
            x.layout.total,
            bound,
        )
        for x, at, bound in zip((q, k), (query_ends, key_ends), bounds, strict=True)
    ]
    return Array.from_layout(q.values, layouts[0]), layouts[1]


def attend(
    q: Array, k: Array, v: torch.Tensor, options: Options, return_lse: bool = False
) -> tuple[torch.Tensor, Any]:
    """Return (total_q, num_heads, value_dim) attention, and (total_q, num_heads) lse or None."""
    if options.chunk is not None:
        q, layout = split_chunks(q, k, options.chunk)
        k = Array.from_layout(k.values, layout)
    out = attention(
        q,
        k,
        k.with_values(v),
        window=options.window,
        scale=options.scale,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        dropout=options.dropout,
        seed=options.seed,
        deterministic=options.deterministic,
        return_lse=return_lse,
        kernel="triton" if options.deterministic and q.values.is_cuda else None,
    )
    return (out[0].values, out[1].values) if return_lse else (out.values, None)


def attend_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, return_lse: Any = False
) -> tuple[torch.Tensor, Any]:
    """Return (batch, seqlen_q, num_heads, value_dim), and (batch, num_heads, seqlen_q) or None."""
    queries, keys = padded_array("q", q), padded_array("k", k)
    check_ndim("v", v, 4, "(batch, seqlen, num_heads, head_dim)")
    check_shape("v", v, (*k.shape[:3], v.shape[3]), "as k")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected {q.shape[0]} sequences as q, got {k.shape[0]}")
    out, lse = attend(queries, keys, v.reshape(-1, *v.shape[2:]), options, bool(return_lse))
    return pad_result(out, lse, q)


def pad_result(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the result of (batch, seqlen, num_heads, head_dim) queries in their form.

    The log-sum-exp has shape (batch, num_heads, seqlen).
    """
    out = out.reshape(*q.shape[:3], out.shape[-1])
    return out, None if lse is None else lse.reshape(q.shape[:3]).transpose(1, 2)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None,
    max_k: int | None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return attention of (total, num_heads, head_dim) tensors, and its log-sum-exp or None.

    The log-sum-exp has shape (total_q, num_heads); it is None unless `return_lse` is set.
    """
    keys = ragged_array(k, cu_k, max_k)
    queries, values = ragged_array(q, cu_q, max_q), keys.with_values(v)
    if not return_lse:
        return attention(queries, keys, values, **options).values, None
    out, lse = attention(queries, keys, values, return_lse=True, **options)
    return out.values, lse.values


def check_ndim(name: str, x: Any, ndim: int, form: str) -> None:
    """Raise unless a tensor has `ndim` axes."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"{name}: expected a tensor {form}, got shape {tuple(x.shape)}")


def check_shape(name: str, x: torch.Tensor, shape: Sequence[int], reason: str) -> None:
    """Raise unless a tensor has the given shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, {reason}, got {tuple(x.shape)}")


def check_unsupported(function: str, remedy: str = "", **arguments: Any) -> None:
    """Raise `NotImplementedError`, with the remedy, for the first argument that is not None."""
    for name, x in arguments.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: {function} of scree does not support it, expected its default, "
                f"got {x!r:.80}" + (f"; {remedy}" if remedy else "")
            )
