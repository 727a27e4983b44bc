"""Paged key-value caches for `scree-bench decode`, and the calls that attend and append to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np

import scree

from . import vllm_checkout
from .formulas import softmax
from .libraries import MeasuredLibrary
from .measure import Thunk, require

#: Factor of all cached keys and values of an 8-bit cache.
FP8_SCALE = 0.75
#: Rows whose results are compared with float64.
CHECKED_ROWS = 8
#: Bytes of the buffer that FlashInfer uses for its plan and its partial results.
WORKSPACE_BYTES = 256 << 20
#: Programs up to which vLLM's backend cuts rows, and the parts of a row.
VLLM_PROGRAMS, VLLM_SEGMENTS = 128, 16


@dataclass(frozen=True)
class Batch:
    """Sizes of a batch.

    Attributes
    ----------
    name
        The case in the tables.
    lengths
        Cached tokens per row.
    page_size
        Tokens per page.
    queries
        Queries per row; empty for one query per row.
    heads, kv_heads, dim
        Heads of the queries and of the cache, and their size.
    seed
        Seed of the random numbers and of the page table.
    """

    name: str
    lengths: tuple[int, ...]
    page_size: int = 16
    queries: tuple[int, ...] = ()
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    seed: int = 0

    @property
    def query_counts(self) -> tuple[int, ...]:
        """Queries per row."""
        return self.queries or (1,) * len(self.lengths)

    @property
    def page_counts(self) -> np.ndarray:
        """Pages per row."""
        return -(-np.asarray(self.lengths) // self.page_size)

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one cached token: its keys and values."""
        return 2 * self.kv_heads * self.dim * itemsize

    def traffic(self, itemsize: int) -> float:
        """Return the bytes that a decode step has to read: the keys and values of all rows."""
        return float(sum(self.lengths) * self.token_bytes(itemsize))

    def case(self, kind: str, lib: MeasuredLibrary, dtype: str) -> dict[str, Any]:
        """Return the case of a result row."""
        return {
            "kind": kind,
            "case": self.name,
            "backend": lib.name,
            "rows": len(self.lengths),
            "tokens": sum(self.lengths),
            "page_size": self.page_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "dim": self.dim,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class Cache:
    """The arrays of a batch: queries, caches, and the page table in several forms.

    Attributes
    ----------
    lib, batch
        The library and the sizes.
    q
        Queries, ragged (n, None, heads, dim).
    k_pages, v_pages
        The caches (num_pages, page_size, kv_heads, dim).
    pages
        Page numbers of all rows, one after the other, in host memory.
    is_fp8
        Whether the caches have 8-bit numbers, which `FP8_SCALE` scales.
    """

    lib: MeasuredLibrary
    batch: Batch
    q: scree.Array
    k_pages: Any
    v_pages: Any
    pages: np.ndarray
    is_fp8: bool = False

    @cached_property
    def table(self) -> scree.Array:
        """The page table, ragged (n, None)."""
        return scree.from_lengths(self.lib.make(self.pages, "int32"), self.batch.page_counts)

    @cached_property
    def kv_lengths(self) -> Any:
        """Cached tokens per row, (n,)."""
        return self.lib.make(np.asarray(self.batch.lengths), "int32")

    @cached_property
    def block_table(self) -> np.ndarray:
        """The page table, dense (n, width), in host memory; 0 after the pages of a row."""
        counts = self.batch.page_counts
        table = np.zeros((len(counts), counts.max()), np.int32)
        table[np.arange(counts.max()) < counts[:, None]] = self.pages
        return table

    @cached_property
    def last_slots(self) -> tuple[Any, Any]:
        """The page of the last token of each row, and its place in the page."""
        last = np.asarray(self.batch.lengths) - 1
        size = self.batch.page_size
        pages = self.block_table[np.arange(len(last)), last // size]
        return self.lib.make(pages, "int64"), self.lib.make(last % size, "int64")

    def select(self, rows: slice) -> Cache:
        """Return the same caches with some of the rows of the batch."""
        batch = self.batch
        page_offsets = np.concatenate([[0], np.cumsum(batch.page_counts)])
        chosen = range(len(batch.lengths))[rows]
        part = replace(batch, lengths=batch.lengths[rows], queries=batch.query_counts[rows])
        query_offsets = np.concatenate([[0], np.cumsum(batch.query_counts)])
        q = self.q.values[int(query_offsets[chosen.start]) : int(query_offsets[chosen.stop])]
        return replace(
            self,
            batch=part,
            q=scree.from_lengths(q, part.query_counts, max_length=self.q.max_length),
            pages=self.pages[page_offsets[chosen.start] : page_offsets[chosen.stop]],
        )

    def share(self, num_pages: int) -> Cache:
        """Return the same caches with the first pages of row 0 in every row."""
        table = self.block_table.copy()
        table[:, :num_pages] = table[0, :num_pages]
        counts = self.batch.page_counts
        return replace(self, pages=table[np.arange(table.shape[1]) < counts[:, None]])


def make_cache(lib: MeasuredLibrary, batch: Batch, dtype: str, *, is_fp8: bool = False) -> Cache:
    """Return random arrays, with the pages of all rows in random order."""
    num_pages = int(batch.page_counts.sum())
    shape = (num_pages, batch.page_size, batch.kv_heads, batch.dim)
    itemsize = {"float32": 4}.get(dtype, 2)
    # Float32 numbers are rounded to 8 bits.
    require(num_pages * batch.page_size * batch.token_bytes(4 if is_fp8 else itemsize), lib.device)
    normal = lib.normal(batch.seed, dtype)

    def make_pages() -> Any:
        if is_fp8:
            import torch

            return normal(*shape).to(torch.float8_e4m3fn)
        if lib.device == "cuda" and lib.name == "torch":
            import torch

            # `normal` would need three times the memory.
            return torch.empty(shape, dtype=lib.arrays.dtypes[dtype], device="cuda").normal_()
        return normal(*shape)

    counts = batch.query_counts
    # Under `jax.jit` nothing else says that a row has few queries.
    longest = int(max(counts))
    q = scree.from_lengths(normal(sum(counts), batch.heads, batch.dim), counts, max_length=longest)
    pages = np.random.default_rng(batch.seed).permutation(num_pages).astype(np.int32)
    return Cache(lib, batch, q, make_pages(), make_pages(), pages, is_fp8)


# --- attention ---
def scree_paged(cache: Cache, **options: Any) -> Thunk:
    """Build `scree.paged_attention`."""
    if cache.is_fp8:
        scales = cache.lib.make(np.full(cache.batch.kv_heads, FP8_SCALE))
        options |= {"k_scale": scales, "v_scale": scales}
    args = cache.q, cache.k_pages, cache.v_pages, cache.table, cache.kv_lengths
    attend = cache.lib.compiled(lambda *args: scree.paged_attention(*args, **options).values)
    return lambda: attend(*args)


def standard_paged(cache: Cache) -> Thunk:
    """Build `scree.paged_attention` without kernels."""
    return scree_paged(cache, kernel="standard")


def scree_contiguous(cache: Cache) -> Thunk:
    """Build `scree.attention` on the same tokens in packed rows, without pages."""
    batch = cache.batch
    rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = np.concatenate([np.arange(n) for n in batch.lengths])
    size = batch.page_size
    slots = cache.block_table[rows, positions // size].astype(np.int64) * size + positions % size
    index = cache.lib.make(slots, "int32")
    tokens = [x.reshape(-1, *x.shape[2:])[index] for x in (cache.k_pages, cache.v_pages)]
    k = scree.from_lengths(tokens[0], batch.lengths, max_length=int(max(batch.lengths)))

    def attend(q: scree.Array, k: scree.Array, v: Any) -> Any:
        return scree.attention(q, k, k.with_values(v), causal=True).values

    compiled = cache.lib.compiled(attend)
    return lambda: compiled(cache.q, k, tokens[1])


def loads_only(cache: Cache) -> Thunk:
    """Build a call that reads the pages of all rows and does nothing else: a limit."""
    from .decode_limits import sum_pages

    return sum_pages(cache.k_pages, cache.v_pages, cache.lib.make(cache.pages, "int32"))


def padded_sdpa(cache: Cache) -> Thunk:
    """Build the usual form without paged kernels: gather the pages, mask, and attend.

    The query heads of one key head are the rows of its matrix product, so that no key is repeated.
    """
    lib, batch, xp = cache.lib, cache.batch, cache.lib.xp
    table, n = lib.make(cache.block_table, "int32"), len(batch.lengths)
    width = cache.block_table.shape[1] * batch.page_size
    bias = np.where(np.arange(width) < np.asarray(batch.lengths)[:, None], 0, -np.inf)
    mask = lib.make(bias[:, None, None, :], lib.arrays.dtype_name(cache.q.values))
    shape = (n, batch.kv_heads, batch.heads // batch.kv_heads, batch.dim)
    scale = batch.dim**-0.5

    def gather(pages: Any) -> Any:
        rows = pages[table].reshape(n, width, batch.kv_heads, batch.dim)
        return xp.permute_dims(rows, (0, 2, 1, 3))

    def run(q: Any, k_pages: Any, v_pages: Any) -> Any:
        q, k, v = q.reshape(shape), gather(k_pages), gather(v_pages)
        if lib.name == "torch":
            import torch

            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(q, k, v, attn_mask=mask, scale=scale)
        scores = q @ xp.permute_dims(k, (0, 1, 3, 2)) * np.float32(scale) + mask
        return softmax(xp, scores) @ v

    compiled = lib.compiled(run)
    return lambda: compiled(cache.q.values, cache.k_pages, cache.v_pages)


def fa3_contiguous(cache: Cache) -> Thunk:
    """Build FlashAttention-3 on a contiguous padded cache (n, longest, kv_heads, dim)."""
    import torch

    run, batch = import_module("fa3_fwd_interface").flash_attn_with_kvcache, cache.batch
    width = cache.block_table.shape[1] * batch.page_size
    n, itemsize = len(batch.lengths), cache.k_pages.element_size()
    require(2.0 * n * width * batch.token_bytes(itemsize), cache.lib.device)
    table = cache.lib.make(cache.block_table, "int64")

    def gather(pages: Any) -> Any:
        rows = torch.index_select(pages, 0, table.reshape(-1))
        return rows.reshape(n, width, batch.kv_heads, batch.dim)

    k, v, lengths = gather(cache.k_pages), gather(cache.v_pages), cache.kv_lengths
    q = cache.q.values[:, None]

    def attend() -> Any:
        out = run(q, k, v, cache_seqlens=lengths, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return attend


def fa4_paged(cache: Cache) -> Thunk:
    """Build FlashAttention-4 with a dense block table."""
    run, lib, batch = (
        import_module("flash_attn.cute").flash_attn_varlen_func,
        cache.lib,
        cache.batch,
    )
    table, lengths = lib.make(cache.block_table, "int32"), cache.kv_lengths
    cu_seqlens = lib.make(np.arange(len(batch.lengths) + 1), "int32")

    def attend() -> Any:
        out = run(
            cache.q.values,
            cache.k_pages,
            cache.v_pages,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=1,
            seqused_k=lengths,
            page_table=table,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return attend


def vllm_attend(cache: Cache) -> Thunk:
    """Build vLLM's Triton attention with a dense block table, with the sizes that its backend uses."""
    import torch

    run, batch = import_module(vllm_checkout.MODULE).unified_attention, cache.batch
    lib, q = cache.lib, cache.q.values
    out, table = torch.empty_like(q), lib.make(cache.block_table, "int32")
    cu_seqlens = lib.make(np.concatenate([[0], np.cumsum(batch.query_counts)]), "int32")
    # Beyond so many rows no row is cut.
    max_rows = max(1, VLLM_PROGRAMS // batch.kv_heads)
    shape = max_rows, batch.heads, VLLM_SEGMENTS
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    partial = torch.empty((*shape, batch.dim), dtype=torch.float32, device=q.device)

    def attend() -> Any:
        run(
            q,
            cache.k_pages,
            cache.v_pages,
            out,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max(batch.query_counts),
            seqused_k=cache.kv_lengths,
            max_seqlen_k=max(batch.lengths),
            softmax_scale=batch.dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=max_rows,
            num_par_softmax_segments=VLLM_SEGMENTS,
            softmax_segm_output=partial,
            softmax_segm_max=maxima,
            softmax_segm_expsum=sums,
        )
        return out

    return attend


class FlashInfer:
    """FlashInfer's decode on tensor cores, whose plan is a call of its own."""

    _workspace: Any = None

    def __init__(self, cache: Cache) -> None:
        import torch

        module: Any = import_module("flashinfer")
        if FlashInfer._workspace is None:
            FlashInfer._workspace = torch.empty(
                WORKSPACE_BYTES, dtype=torch.uint8, device=cache.lib.device
            )
        self.cache = cache
        self.indptr, self.pages, self.last_page_lengths = flashinfer_table(cache)
        self.wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            FlashInfer._workspace, "NHD", use_tensor_cores=True
        )

    def plan(self) -> None:
        """Plan for the lengths of the batch, as an engine does before every step."""
        batch = self.cache.batch
        self.wrapper.plan(
            self.indptr,
            self.pages,
            self.last_page_lengths,
            batch.heads,
            batch.kv_heads,
            batch.dim,
            batch.page_size,
            q_data_type=self.cache.q.values.dtype,
            kv_data_type=self.cache.k_pages.dtype,
        )

    def attend(self) -> Any:
        """Run the planned step."""
        cache = self.cache
        scales = {"k_scale": FP8_SCALE, "v_scale": FP8_SCALE} if cache.is_fp8 else {}
        return self.wrapper.run(cache.q.values, (cache.k_pages, cache.v_pages), **scales)


def flashinfer_attend(cache: Cache) -> Thunk:
    """Build FlashInfer's decode, planned already."""
    decode = FlashInfer(cache)
    decode.plan()
    return decode.attend


def flashinfer_plan(cache: Cache) -> Thunk:
    """Build FlashInfer's plan."""
    return FlashInfer(cache).plan


def flashinfer_table(cache: Cache) -> tuple[Any, Any, Any]:
    """Return FlashInfer's page table: offsets, page numbers, and tokens in the last pages."""
    batch, make = cache.batch, cache.lib.make
    indptr = np.concatenate([[0], np.cumsum(batch.page_counts)])
    last_page_lengths = (np.asarray(batch.lengths) - 1) % batch.page_size + 1
    return make(indptr, "int32"), make(cache.pages, "int32"), make(last_page_lengths, "int32")


# --- appending ---
def new_tokens(cache: Cache) -> tuple[scree.Array, scree.Array]:
    """Return keys and values of one new token per row."""
    lib, batch = cache.lib, cache.batch
    normal = lib.normal(batch.seed + 1, lib.arrays.dtype_name(cache.q.values))
    shape = len(batch.lengths), batch.kv_heads, batch.dim
    k, v = (cache.q.with_values(normal(*shape)) for _ in range(2))
    return k, v


def scree_append(cache: Cache, **options: Any) -> Thunk:
    """Build `scree.append_paged`."""
    (k, v), table, kv_lengths = new_tokens(cache), cache.table, cache.kv_lengths
    return lambda: scree.append_paged(
        cache.k_pages, cache.v_pages, k, v, table, kv_lengths, **options
    )


def donated_append(cache: Cache) -> Thunk:
    """Build `scree.append_paged` under `jax.jit` that updates caches in place."""
    import jax

    k, v = new_tokens(cache)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(k_pages: Any, v_pages: Any, k: scree.Array, v: Any, *pages: Any) -> Any:
        return scree.append_paged(k_pages, v_pages, k, k.with_values(v), *pages)

    # JAX deletes donated arrays, and the arrays of `cache` have other readers.
    state = [x.copy() for x in (cache.k_pages, cache.v_pages)]

    def append() -> Any:
        state[:] = run(*state, k, v.values, cache.table, cache.kv_lengths)
        return state

    return append


def scree_append_rope(cache: Cache) -> Thunk:
    """Build `scree.append_paged` that also rotates the keys and the queries."""
    return scree_append(cache, q=cache.q, rope={"theta": 10000.0})


def indexed_append(cache: Cache) -> Thunk:
    """Build the assignment to given pages and places, one per cache."""
    (k, v), (pages, places) = new_tokens(cache), cache.last_slots

    def append() -> None:
        cache.k_pages[pages, places] = k.values
        cache.v_pages[pages, places] = v.values

    return append


def flashinfer_append(cache: Cache) -> Thunk:
    """Build FlashInfer's append to given positions."""
    run = import_module("flashinfer").append_paged_kv_cache
    (k, v), (indptr, pages, last_page_lengths) = new_tokens(cache), flashinfer_table(cache)
    rows = cache.lib.make(np.arange(len(cache.batch.lengths)), "int32")
    positions = cache.lib.make(np.asarray(cache.batch.lengths) - 1, "int32")
    return lambda: run(
        k.values,
        v.values,
        rows,
        positions,
        (cache.k_pages, cache.v_pages),
        pages,
        indptr,
        last_page_lengths,
    )


def empty_call(cache: Cache) -> Thunk:
    """Build a call that writes one number: the floor of a launch."""
    number = cache.lib.make(np.zeros(1))

    def write() -> None:
        number[:] = 0

    return write


# --- the reference ---
def reference(cache: Cache) -> Any:
    """Return the attention of the first `CHECKED_ROWS` rows in float64, in a loop over rows."""
    lib, batch = cache.lib, cache.batch
    xp = scree.namespace(lib.as_float64(cache.kv_lengths))
    group = batch.heads // batch.kv_heads
    scale, start, outs = FP8_SCALE if cache.is_fp8 else 1.0, 0, []
    for i, (length, count) in enumerate(
        zip(batch.lengths[:CHECKED_ROWS], batch.query_counts, strict=False)
    ):
        pages = lib.make(cache.block_table[i, : int(batch.page_counts[i])], "int32")

        def tokens(
            cached: Any, pages: Any = pages, length: int = length
        ) -> Any:  # (kv_heads, 1, length, dim)
            x = lib.as_float64(cached[pages]).reshape(-1, batch.kv_heads, batch.dim)[:length]
            return xp.permute_dims(x, (1, 0, 2))[:, None] * scale

        q = lib.as_float64(cache.q.values[start : start + count])
        q = xp.permute_dims(q.reshape(count, batch.kv_heads, group, batch.dim), (1, 2, 0, 3))
        scores = q @ xp.permute_dims(tokens(cache.k_pages), (0, 1, 3, 2)) * batch.dim**-0.5
        is_later = np.arange(length) > np.arange(length - count, length)[:, None]
        scores = scores + lib.as_float64(lib.make(np.where(is_later, -np.inf, 0.0)))
        out = softmax(xp, scores) @ tokens(cache.v_pages)
        outs.append(xp.permute_dims(out, (2, 0, 1, 3)).reshape(count, batch.heads, batch.dim))
        start += count
    return xp.concat(outs, axis=0)


def relative_error(cache: Cache, out: Any, expected: Any) -> float:
    """Return the largest difference from `reference`, relative to its largest number."""
    shape = (-1, cache.batch.heads, cache.batch.dim)
    result = cache.lib.as_float64(out).reshape(shape)[: expected.shape[0]]
    return float(abs(result - expected).max() / abs(expected).max())


#: Builds the timed call of a contender from the arrays.
Make = Callable[[Cache], Thunk]
