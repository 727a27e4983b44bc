"""New tokens written to a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..array import Array
from ..broadcasting import check_same_rows
from ..dispatch.call_cache import PLAIN_TYPES
from ..dispatch.operation import KernelUnavailableError, define_operation
from ..records import record
from .attention import check_heads
from .gather_scatter import scatter
from .pages import as_page_table, check_cache, check_pages_if_free
from .rope import DEFAULT_THETA, Tables, check_positions, resolve_rotation
from .rope import rope as apply_rope
from .rope_scaling import as_rope_scaling
from .segment import append_axes

__all__ = ["append_paged"]


class RopeOptions(NamedTuple):
    """Options of `rope` for the keys and queries of `append_paged`, without the arrays."""

    theta: float = DEFAULT_THETA
    interleaved: bool = False
    rotary_dim: int | None = None
    scaling: Any = None


@record
class AppendPagedCall:
    """A validated call of `append_paged`.

    Attributes
    ----------
    k_pages, v_pages, k, v, kv_lengths, q
        See `append_paged`.
    page_table
        (n, None) ragged page numbers.
    rope
        None, or `RopeOptions`; `rotary_dim` and `scaling` are as in `RopeCall`.
    inv_freq, cos, sin
        Arrays of the rotation, or None; see `rope`.
    """

    k_pages: Any
    v_pages: Any
    k: Array
    v: Array
    page_table: Any
    kv_lengths: Any
    q: Array | None = None
    rope: RopeOptions | None = None
    inv_freq: Any = None
    cos: Any = None
    sin: Any = None

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        check_heads("k", k)
        check_heads("v", v)
        check_same_rows("v", k, v)
        for name, pages, x in (("k_pages", self.k_pages, k), ("v_pages", self.v_pages, v)):
            check_cache(name, pages, x.values)
            checks.check_same_dtype(name[0], x, pages, name)
            if tuple(pages.shape[2:]) != tuple(x.values.shape[1:]):
                raise ValueError(
                    f"{name[0]}: expected tokens of shape {tuple(pages.shape[2:])} as {name}, got {tuple(x.values.shape[1:])}"
                )
            if getattr(pages, "requires_grad", False):
                raise ValueError(
                    f"{name}: expected a cache without gradient, as it is written in place; use {name}.detach()"
                )
        if tuple(self.v_pages.shape[:2]) != tuple(self.k_pages.shape[:2]):
            raise ValueError(
                f"v_pages: expected {tuple(self.k_pages.shape[:2])} pages and tokens as k_pages, "
                f"got {tuple(self.v_pages.shape[:2])}"
            )
        table = as_page_table(self.page_table, self.kv_lengths)
        checks.check_dense("page_table", table.values, k.values)
        if table.batch_size != k.batch_size:
            raise ValueError(
                f"page_table: expected {k.batch_size} rows as k, got {table.batch_size}"
            )
        num_pages, size = (int(n) for n in self.k_pages.shape[:2])
        lengths = check_pages_if_free(table, self.kv_lengths, num_pages, size)
        host = k.layout.host_offsets
        new_lengths = None if host is None else np.diff(host)
        if lengths is not None and new_lengths is not None:
            long = np.flatnonzero(new_lengths > lengths)
            if long.size:
                raise ValueError(
                    f"kv_lengths: expected lengths that count the new tokens, got {lengths[long[0]]} for row {long[0]}"
                )
        if self.rope is None and self.q is not None:
            raise TypeError("q: expected None without rope, which rotates q; got an array")
        if self.q is not None:
            check_heads("q", self.q)
            check_same_rows("q", k, self.q)
            if self.q.values.shape[2] != k.values.shape[2]:
                raise ValueError(
                    f"q: expected head_dim {k.values.shape[2]} as k, got {self.q.values.shape[2]}"
                )
            checks.check_same_dtype("q", self.q, k, "k")
        if self.rope is not None:
            checks.check_flag("interleaved", self.rope.interleaved)
            rotary_dim, scaling = resolve_rotation(
                "k", k.values, self.rope.theta, self.rope.rotary_dim, self.rope.scaling, self.tables
            )
            rope = self.rope._replace(rotary_dim=rotary_dim, scaling=scaling)
            object.__setattr__(self, "rope", rope)
            if self.cos is not None and lengths is not None and new_lengths is not None:
                check_positions("cos", self.cos, new_lengths, lengths - new_lengths)
        object.__setattr__(self, "page_table", table)

    @property
    def tables(self) -> Tables:
        """The arrays of the rotation."""
        return Tables(self.inv_freq, self.cos, self.sin)


def append_paged(
    k_pages: Any,
    v_pages: Any,
    k: Array,
    v: Array,
    page_table: Any,
    kv_lengths: Any,
    *,
    q: Array | None = None,
    rope: Mapping[str, Any] | None = None,
    kernel: str | None = None,
) -> tuple[Any, ...]:
    """Write new keys and values to the ends of the rows of a paged cache.

    Row i of `k` and `v` goes to the positions ``kv_lengths[i] - length`` to ``kv_lengths[i] - 1``.
    Pass the same `kv_lengths` to the `paged_attention` that follows. Use the returned caches: they
    are the same memory, written in place, on NumPy and PyTorch, and new arrays elsewhere.

    Parameters
    ----------
    k_pages, v_pages
        Caches (num_pages, page_size, num_kv_heads, head_dim) and (num_pages, page_size,
        num_kv_heads, value_dim), with any strides.
    k, v
        New tokens (n, None, num_kv_heads, head_dim) and (n, None, num_kv_heads, value_dim), on one
        layout, in the dtype of the caches.
    page_table
        Pages of each row in order: (n, None) ragged or (n, width) dense integers. No two positions
        of the batch may share a place that is written; see `PagePool` for sharing.
    kv_lengths
        (n,) integers: tokens per row after this call.
    q
        Queries with the rows of `k`, rotated together with the keys; only with `rope`.
    rope
        None, or options of `rope`, for example ``{"theta": 10000.0, "interleaved": False}``: the
        keys, and `q`, are rotated by their positions in the cache. It takes all options except
        `start`.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    k_pages, v_pages or k_pages, v_pages, q
        The caches, and the rotated queries if `q` was given.

    Raises
    ------
    TypeError
        If `k` or `v` is not a ragged array, or dtypes do not fit.
    ValueError
        If shapes do not fit, or a cache requires a gradient. Where reading is free, also if a page
        does not exist or a row has too few pages. Nothing is written then.

    Examples
    --------
    >>> import numpy as np, scree
    >>> k_pages, v_pages = np.zeros((4, 2, 1, 1)), np.zeros((4, 2, 1, 1))
    >>> new = scree.from_lengths(np.asarray([1.0, 2.0, 3.0]).reshape(3, 1, 1), [2, 1])
    >>> table = scree.from_lists([[3, 0], [1]])
    >>> k_pages, v_pages = scree.append_paged(k_pages, v_pages, new, new, table, np.asarray([3, 1]))
    >>> k_pages[:, :, 0, 0]  # row 0 had one token before
    array([[2., 0.],
           [3., 0.],
           [0., 0.],
           [0., 1.]])
    """
    key = None
    # Most layers of a model take this path; see `attention`.
    if (
        type(k) is type(v) is Array
        and k.layout is v.layout
        and not (k.ragged_dim or v.ragged_dim)
        and (q is None or (type(q) is Array and q.layout is k.layout and not q.ragged_dim))
        and (
            rope is None
            or (type(rope) is dict and PLAIN_TYPES.issuperset(map(type, rope.values())))
        )
        and (kernel is None or type(kernel) is str)
    ):
        numbers, second = page_table, None
        if type(page_table) is Array and not page_table.ragged_dim:
            numbers, second = page_table.values, page_table.layout
        if second is not k.layout:
            options_key = None if rope is None else (*rope.items(), *map(type, rope.values()))
            key = "append_paged", q is None, options_key, kernel
            tokens = (k.values, v.values) if q is None else (k.values, v.values, q.values)
            values = *tokens, k_pages, v_pages, numbers, kv_lengths
            entry = _append_paged.recall(values, k.layout, key, second)
            if entry is not None:
                try:
                    results: tuple[Any, ...] = entry.run(
                        k=k,
                        v=v,
                        q=q,
                        k_pages=k_pages,
                        v_pages=v_pages,
                        page_table=page_table,
                        kv_lengths=kv_lengths,
                    )
                    return results
                except KernelUnavailableError:
                    pass  # the validation selects a kernel again
    arrays = {
        "k": k,
        "v": v,
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "kv_lengths": kv_lengths,
    }
    options: dict[str, Any] = {"rope": None}
    if rope is not None:
        options["rope"], tables = _rope_options(rope)
        if any(x is not None for x in tables):
            arrays |= tables._asdict()
    return _append_paged.run(arrays, options, kernel, key)


def _rope_options(rope: Any) -> tuple[RopeOptions, Tables]:
    names = RopeOptions._fields + Tables._fields
    if not isinstance(rope, Mapping) or not {*rope} <= {*names}:
        raise TypeError(f"rope: expected a dictionary with some of the keys {names}, got {rope!r}")
    options = RopeOptions(**{name: x for name, x in rope.items() if name in RopeOptions._fields})
    if options.scaling is not None:
        options = options._replace(scaling=as_rope_scaling(options.scaling))
    return options, Tables(*(rope.get(name) for name in Tables._fields))


@define_operation("append_paged", AppendPagedCall)
def _append_paged(call: AppendPagedCall) -> tuple[Any, ...]:
    k, layout, table = call.k, call.k.layout, call.page_table
    xp, size = layout.xp, int(call.k_pages.shape[1])
    start = xp.astype(call.kv_lengths, layout.offsets.dtype, copy=False) - layout.lengths
    q = call.q
    if call.rope is not None:
        options = call.rope._asdict() | call.tables._asdict()
        if q is None:
            k = apply_rope(k, start=start, **options)
        else:
            q, k = apply_rope(q, k, start=start, **options)
    if 0 not in (layout.total, table.total_length):
        positions = layout.positions + layout.per_token(start)
        entries = layout.per_token(table.offsets[:-1]) + positions // size
        pages = xp.take(table.values, table.layout.clip(entries), axis=0)
        caches = ((call.k_pages, k.values), (call.v_pages, call.v.values))
        k_pages, v_pages = (_write(call, x, pages, positions % size, new) for x, new in caches)
    else:
        k_pages, v_pages = call.k_pages, call.v_pages
    return (k_pages, v_pages) if q is None else (k_pages, v_pages, q)


def _write(call: AppendPagedCall, cache: Any, pages: Any, page_slots: Any, new: Any) -> Any:
    """Return the cache with the new tokens at their pages and at their slots within the pages."""
    layout, mask = call.k.layout, call.k.layout.token_mask
    xp, write = layout.xp, layout.backend.write
    if mask is not None and write is not None:
        # The tail writes the last token again, or, without tokens, what is there already.
        token = xp.clip(layout.arange(layout.total), 0, xp.clip(layout.offsets[-1] - 1, 0, None))
        pages, page_slots, new = (xp.take(x, token, axis=0) for x in (pages, page_slots, new))
        pages = xp.where(layout.offsets[-1] > 0, pages, 0)
        old = cache[pages, page_slots]
        new = xp.where(layout.offsets[-1] > 0, new, old)
    if write is not None:
        return write(cache, (pages, page_slots), new)
    num_pages, size = (int(n) for n in cache.shape[:2])
    slots = call.k.with_values(pages * size + page_slots)
    tokens = scatter(call.k.with_values(new), slots, size=num_pages * size)
    ones = call.k.with_values(xp.ones((layout.total,), dtype=xp.int32, device=layout.device))
    is_written = scatter(ones, slots, size=num_pages * size) > 0
    flat = xp.reshape(cache, tuple(tokens.shape))
    flat = xp.where(append_axes(xp, is_written, flat.ndim), tokens, flat)
    return xp.reshape(flat, tuple(cache.shape))
