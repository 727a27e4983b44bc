"""Attention to the tokens of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..array import Array
from ..broadcasting import check_ragged
from ..dispatch import call_cache
from ..dispatch.operation import OBSERVERS, KernelUnavailableError, define_operation
from ..dtypes import accumulation_dtype
from ..layout import Layout
from ..records import record
from .attention import (
    Window,
    apply_sinks,
    attention,
    check_heads,
    check_per_head,
    check_slopes,
    normalize_window,
)
from .merge_attention import merge_attention
from .pages import as_page_table, check_cache, check_pages_if_free, gather_pages, token_layout

__all__ = ["paged_attention"]

#: Bound once, because a class method is bound anew at every call.
_from_layout = Array.from_layout
#: Types of `groups` and `ends` whose numbers are a key of the call cache.
_READABLE = (list, tuple, np.ndarray)


@record
class PagedAttentionCall:
    """A validated call of `paged_attention`, without sinks and shared pages.

    Attributes
    ----------
    q, k_pages, v_pages, kv_lengths
        See `paged_attention`.
    page_table
        (n, None) ragged page numbers.
    window, scale, softcap, alibi_slopes
        See `AttentionCall`.
    k_scale, v_scale
        None, a number, or (num_kv_heads,).
    split_size
        Tokens per part of a row, or None.
    return_lse
        Whether the log-sum-exp is returned too.
    """

    q: Array
    k_pages: Any
    v_pages: Any
    page_table: Any
    kv_lengths: Any
    causal: bool = True
    window: Any = None  # the constructor makes it (left, right)
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    k_scale: Any = None
    v_scale: Any = None
    split_size: int | None = None
    return_lse: bool = False

    def __post_init__(self) -> None:
        check_heads("q", self.q)
        q, k, v = self.q.values, self.k_pages, self.v_pages
        checks.check_floating("q", q)
        for name, pages in (("k_pages", k), ("v_pages", v)):
            check_cache(name, pages, q)
            is_8_bit = "float8" in str(pages.dtype)
            if pages.dtype != q.dtype and not is_8_bit:
                raise TypeError(
                    f"{name}: expected the dtype of q, {q.dtype}, or an 8-bit floating-point dtype, got {pages.dtype}"
                )
        if tuple(v.shape[:3]) != tuple(k.shape[:3]):
            raise ValueError(
                f"v_pages: expected shape {tuple(k.shape[:3])} and head_dim, as k_pages, got {tuple(v.shape)}"
            )
        num_pages, page_size, kv_heads, head_dim = (int(n) for n in k.shape)
        if int(q.shape[2]) != head_dim:
            raise ValueError(f"k_pages: expected head_dim {q.shape[2]} as q, got {head_dim}")
        if q.shape[1] % kv_heads or not q.shape[1]:
            raise ValueError(
                f"q: expected a positive multiple of the {kv_heads} heads of k_pages, got {q.shape[1]}"
            )
        table = as_page_table(self.page_table, self.kv_lengths)
        checks.check_dense("page_table", table.values, q)
        if table.batch_size != self.q.batch_size:
            raise ValueError(
                f"page_table: expected {self.q.batch_size} rows as q, got {table.batch_size}"
            )
        causal = checks.check_flag("causal", self.causal)
        lengths = check_pages_if_free(table, self.kv_lengths, num_pages, page_size)
        if causal and lengths is not None and self.q.layout.host_offsets is not None:
            long = np.flatnonzero(np.diff(self.q.layout.host_offsets) > lengths)
            if long.size:
                raise ValueError(
                    f"kv_lengths: expected at least the queries of each row, as they are its last tokens, got {lengths[long[0]]} "
                    f"for row {long[0]}; append their keys first"
                )
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is not None and not isinstance(scale, checks.NUMBERS):
                checks.check_dense(name, scale, q)
                checks.check_shape(name, scale, (kv_heads,), "one number per head of the cache")
        if self.alibi_slopes is not None:
            check_slopes(self.alibi_slopes, self.q)
        if self.split_size is not None:
            checks.check_integer("split_size", self.split_size, 1)
        checks.check_flag("return_lse", self.return_lse)
        object.__setattr__(self, "page_table", table)
        object.__setattr__(self, "window", normalize_window(self.window, causal))


def paged_attention(
    q: Array,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    shared_pages: Sequence[tuple[Any, Any]] | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute attention of queries to the tokens of a paged key-value cache.

    A row of `q` has one token in decoding and many in a prefill; one call may hold both. The
    queries are the last tokens of their row, so append their keys and values first, with
    `append_paged`.

    Parameters
    ----------
    q
        Queries (n, None, num_heads, head_dim).
    k_pages, v_pages
        Caches (num_pages, page_size, num_kv_heads, head_dim) and (num_pages, page_size,
        num_kv_heads, value_dim), with any strides, in the dtype of `q` or an 8-bit floating-point
        dtype. num_heads is a multiple of num_kv_heads.
    page_table
        Pages of each row in order: (n, None) ragged or (n, width) dense integers. Entries after the
        pages in use are never read and may have any value.
    kv_lengths
        (n,) integers: cached tokens per row, the tokens of `q` included. A row without tokens gives 0.
    causal, window, scale, softcap, alibi_slopes, sinks, return_lse
        As in `attention`. The last query and the last key are aligned.
    k_scale, v_scale
        Factors of the cached keys and values: a number, or (num_kv_heads,) numbers.
    shared_pages
        Leading pages that rows have in common, so that a kernel reads them once for all rows: a
        list of levels ``(groups, ends)``, outermost first. The groups of a level are consecutive
        rows, given by (m + 1,) offsets. All rows of group j have equal pages up to ``ends[j]``,
        which their first query follows. Not with `window` or `alibi_slopes`. The numbers are the
        same as without it, up to rounding. Reads `groups` and `ends`.
    split_size
        Tokens of the parts into which a kernel cuts long rows. Then the bits of a row do not depend
        on the other rows. By default a kernel chooses parts that fill the device.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    out or (out, lse)
        (n, None, num_heads, value_dim) on the layout of `q`; and (n, None, num_heads).

    Raises
    ------
    TypeError
        If `q` is not a ragged array, or dtypes do not fit.
    ValueError
        If shapes do not fit. Where reading is free, also if a page does not exist, a row has too
        few pages, or more queries than cached tokens; elsewhere see `validate_pages`.

    Notes
    -----
    The standard implementation copies the pages in use, and calls `attention`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> pages = np.arange(8.0).reshape(4, 2, 1, 1)  # 4 pages of 2 tokens
    >>> table = scree.from_lists([[3, 0], [1]])
    >>> q = scree.from_lengths(np.zeros((2, 1, 1)), [1, 1])
    >>> scree.paged_attention(q, pages, pages, table, np.asarray([3, 2])).values.ravel()  # means
    array([4.33333333, 2.5       ])
    """
    key: tuple[Any, ...] | None = None
    # Most layers of a model take this path; see `attention`.
    if (
        type(q) is Array
        and alibi_slopes is sinks is shared_pages is None
        and not q.ragged_dim
        and (causal is True or causal is False)
        and (window is None or type(window) is int)
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (split_size is None or type(split_size) is int)
        and (return_lse is False or return_lse is True)
        and (kernel is None or type(kernel) is str)
    ):
        numbers, second = page_table, None
        if type(page_table) is Array and not page_table.ragged_dim:
            numbers, second = page_table.values, page_table.layout
        if second is not q.layout:
            key = "paged_attention", causal, window, scale, softcap, split_size, return_lse, kernel
            values: tuple[Any, ...] = q.values, k_pages, v_pages, numbers, kv_lengths
            if k_scale is not None or v_scale is not None:
                # A number is a part of the key, as the kernels are prepared for it.
                for x in (k_scale, v_scale):
                    if x is None or type(x) is float or type(x) is int:
                        key += (x,)
                    else:
                        key += ("array",)
                        values += (x,)
            entry = _paged_attention.recall(values, q.layout, key, second)
            if entry is not None:
                try:
                    if entry.run_dense is not None:
                        out = entry.run_dense(*values)
                        if not return_lse:
                            return _from_layout(out, q.layout)
                        out, lse = out
                        return _from_layout(out, q.layout), _from_layout(lse, q.layout)
                    return entry.run(
                        q=q,
                        k_pages=k_pages,
                        v_pages=v_pages,
                        page_table=page_table,
                        kv_lengths=kv_lengths,
                        alibi_slopes=None,
                        k_scale=k_scale,
                        v_scale=v_scale,
                    )
                except KernelUnavailableError:
                    pass  # the validation selects a kernel again
    arrays = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "kv_lengths": kv_lengths,
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if type(return_lse) is not bool:
        checks.check_flag("return_lse", return_lse)
    if sinks is not None:
        check_heads("q", q)
        check_per_head("sinks", sinks, q)
    needs_lse = return_lse or sinks is not None or shared_pages is not None
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "split_size": split_size,
        "return_lse": needs_lse,
    }
    if shared_pages is not None:
        out, lse = _run_shared(arrays, options, shared_pages, kernel)
    elif needs_lse:
        out, lse = _paged_attention.run(arrays, options, kernel, key)
    else:
        return _paged_attention.run(arrays, options, kernel, key)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


class _SharedLevel(NamedTuple):
    """The keys that the rows of each group share, derived from one level of `shared_pages`.

    Attributes
    ----------
    queries
        The layout in which the rows of every group are one row.
    pages, first
        The layout of the pages, and the index of the first one; see `_later_pages`.
    lengths
        Tokens per group.
    """

    queries: Layout
    pages: Layout
    first: int
    lengths: Any


def _run_shared(
    arrays: dict[str, Any], options: dict[str, Any], levels: Any, kernel: str | None
) -> tuple[Any, Any]:
    """Attend to the shared pages of each level once per group, then to the other pages.

    On a device only the first of several calls with the same metadata validates its arguments.
    """
    kernels, is_cached = _paged_attention.kernels, not OBSERVERS
    if is_cached and all(isinstance(x, _READABLE) for level in levels for x in level):
        key = tuple(tuple(np.asarray(x).tolist()) for level in levels for x in level)
        entries, values = call_cache.lookup(
            "shared_pages", arrays, {**options, "levels": key}, kernel
        )
        for entry in entries or ():
            if entry.kernels is kernels and entry.guard(*values):
                results: tuple[Any, Any] = entry.run(**arrays)
                return results
    else:
        entries, values = None, []
    call = PagedAttentionCall(**arrays, **options)
    attend = _prepare_shared(call, options, levels, kernel)
    # Page numbers and lengths that the host can read are checked at every call.
    if entries is not None and call.q.layout.backend.peek(call.kv_lengths) is None:
        guard = call_cache.make_guard(values)
        if guard is not None:
            call_cache.store(entries, call_cache.Entry(kernels, guard, attend))
    return attend(**arrays)


def _prepare_shared(
    call: PagedAttentionCall, options: dict[str, Any], levels: Any, kernel: str | None
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes calls with the metadata of a validated one."""
    if (call.window[0], call.alibi_slopes) != (None, None):
        raise ValueError("shared_pages: expected no window and no alibi_slopes, got one of them")
    q_layout, table, size = call.q.layout, call.page_table.layout, int(call.k_pages.shape[1])
    xp, is_causal = q_layout.xp, call.window[1] == 0
    levels = _read_levels(levels, call.q.batch_size)
    key = "shared_pages", size, tuple(tuple(x) for level in levels for x in level)
    shared, pages, first, covered = table.cached(
        key, lambda: _derive_levels(table, q_layout, levels, size), pair=q_layout
    )
    covered = xp.astype(covered, call.kv_lengths.dtype, copy=False)
    options = {**options, "window": None}

    def attend(
        q: Array, page_table: Any, kv_lengths: Any, alibi_slopes: None, **arrays: Any
    ) -> tuple[Any, Any]:
        is_ragged = isinstance(page_table, Array)
        numbers = page_table.values if is_ragged else xp.reshape(page_table, (-1,))

        def run(queries: Array, numbers: Any, pages: Layout, lengths: Any, causal: bool) -> Any:
            result = _paged_attention.run(
                {
                    "q": queries,
                    **arrays,
                    "page_table": Array.from_layout(numbers, pages),
                    "kv_lengths": lengths,
                    "alibi_slopes": None,
                },
                {**options, "causal": causal},
                kernel,
            )
            return [x.values for x in result]

        if not q.batch_size:
            out, lse = run(q, numbers, table, kv_lengths, True)
            return q.with_values(out), q.with_values(lse)
        parts = [
            run(
                Array.from_layout(q.values, level.queries),
                numbers[level.first :],
                level.pages,
                level.lengths,
                False,
            )
            for level in shared
        ]
        parts.append(run(q, numbers[first:], pages, kv_lengths - covered, is_causal))
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = merge_attention(*zip((out, lse), part))
        return q.with_values(out), q.with_values(lse)

    return attend


def _read_levels(levels: Any, n: int) -> list[tuple[list[int], list[int]]]:
    """Return the groups and ends of each level, checked."""
    checked: list[tuple[list[int], list[int]]] = []
    start = np.zeros(n, np.int64)  # pages of each row that the levels before cover
    for groups, ends in levels:
        groups, ends = (
            checks.read_integers(f"shared_pages: {name}", x).astype(np.int64)
            for name, x in (("groups", groups), ("ends", ends))
        )
        if groups.shape != (ends.size + 1,) or groups[0] or groups[-1] != n:
            raise ValueError(
                f"shared_pages: expected groups from 0 to {n}, one more than ends, got {groups} and {ends}"
            )
        sizes = np.diff(groups)
        if sizes.min(initial=1) < 1:
            raise ValueError(f"shared_pages: expected groups of at least one row, got {groups}")
        if (ends - np.maximum.reduceat(start, groups[:-1])).min(initial=0) < 0:
            raise ValueError(f"shared_pages: expected ends that do not fall, got {ends}")
        start = np.repeat(ends, sizes)
        checked.append((groups.tolist(), ends.tolist()))
    return checked


def _derive_levels(
    table: Layout, q: Layout, levels: list[tuple[list[int], list[int]]], size: int
) -> tuple[list[_SharedLevel], Layout, int, Any]:
    """Return the levels, the layout and the first index of the other pages, and their first tokens."""
    counts = np.diff(table.read_offsets())
    start = np.zeros(counts.size, np.int64)
    shared = []
    for groups, ends in levels:
        rows = np.asarray(groups[:-1])
        end = np.repeat(ends, np.diff(groups))
        short = np.flatnonzero(end > counts)
        if short.size:
            i = short[0]
            raise ValueError(
                f"shared_pages: expected ends within the pages of each row, got {end[i]} for row {i} of {counts[i]} pages"
            )
        tokens = table.to_index((np.asarray(ends) - start[rows]) * size)
        pages = _later_pages(table, rows, start[rows])
        shared.append(_SharedLevel(_join_rows(q, np.asarray(groups)), *pages, tokens))
        start = end
    rest = _later_pages(table, np.arange(counts.size), start)
    return shared, *rest, table.to_index(start * size)


def _later_pages(table: Layout, rows: np.ndarray, start: np.ndarray) -> tuple[Layout, int]:
    """Return the layout of the pages of `rows` from page `start` on, and the index of the first one.

    Nothing is copied: a row also holds the entries up to the first page of the next row, which are
    after its pages in use.
    """
    offsets = table.read_offsets()
    starts = np.append(offsets[rows] + start, offsets[-1])
    first = int(starts[0])
    return Layout.from_host_lengths(table.backend, np.diff(starts), like=table.offsets), first


def _join_rows(layout: Layout, groups: np.ndarray) -> Layout:
    """Return the layout in which the rows of every group are one row."""
    host = layout.host_offsets
    offsets = layout.xp.take(layout.offsets, layout.to_index(groups), axis=0)
    bound = layout.max_length_bound * int(np.diff(groups).max())
    joined = None if host is None else host[groups]
    return Layout(layout.backend, offsets, layout.total, bound, joined)


@define_operation("paged_attention", PagedAttentionCall)
def _paged_attention(call: PagedAttentionCall) -> Any:
    q, xp = call.q, call.q.layout.xp
    layout = token_layout(call.page_table, call.kv_lengths, int(call.k_pages.shape[1]))
    is_scaled = (call.k_scale, call.v_scale) != (None, None)
    is_narrow = call.k_pages.dtype != q.dtype or call.v_pages.dtype != q.dtype
    wide = accumulation_dtype(xp, q.dtype) if is_scaled or is_narrow else q.dtype

    def cached(pages: Any, scale: Any) -> Any:
        values = xp.astype(gather_pages(pages, call.page_table, layout), wide, copy=False)
        if scale is None:
            return values
        if isinstance(scale, checks.NUMBERS):
            return values * scale
        return values * xp.astype(scale, wide, copy=False)[:, None]

    k = Array.from_layout(cached(call.k_pages, call.k_scale), layout)
    out = attention(
        check_ragged("q", q.with_values(xp.astype(q.values, wide, copy=False))),
        k,
        k.with_values(cached(call.v_pages, call.v_scale)),
        window=call.window,
        scale=call.scale,
        softcap=call.softcap,
        alibi_slopes=call.alibi_slopes,
        return_lse=call.return_lse,
    )
    if wide == q.dtype:
        return out
    if not call.return_lse:
        return out.with_values(xp.astype(out.values, q.dtype))
    return out[0].with_values(xp.astype(out[0].values, q.dtype)), out[1]
