"""Cases of paged caches and of merged attention, against loops over rows without pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import scree

from . import oracle
from .backends import HALF
from .bench import Bench, Input
from .extension import rope_arrays
from .layouts import ALL, Layout, lengths_of
from .table import DTYPES, operation

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 6
#: Name -> page size, options of the call.
PAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "paged_attention": (3, {}),
    "paged_attention: pages of one token": (1, {"softcap": 5.0}),
    "paged_attention: large pages": (16, {"scale": 0.2, "sinks": (0.5, -1.0, 2.0, 0.0)}),
    "paged_attention: window": (4, {"window": 5}),
    "paged_attention: not causal": (4, {"causal": False}),
    "paged_attention: slopes": (4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
    "paged_attention: slopes per row": (4, {"slopes_per_row": True, "window": 20}),
}
#: Name -> options of the rotation; frequencies and tables are given by their number of pairs.
ROPE: dict[str, dict[str, Any]] = {
    "rope": {"theta": 100.0, "interleaved": True},
    "partial rope": {"rotary_dim": 4},
    "rope with inv_freq": {"inv_freq": 3, "interleaved": True},
    "rope with cos and sin": {"cos": 2},
    "rope with scaling": {"scaling": {"rope_type": "linear", "factor": 4.0}},
}


class Cache:
    """Pages in random order that hold the tokens of ragged keys or values, and NaN elsewhere."""

    def __init__(self, bench: Bench, lengths: list[int], page_size: int) -> None:
        used = [-(-n // page_size) for n in lengths]
        self.bench, self.lengths, self.page_size = bench, lengths, page_size
        self.num_pages = sum(used) + 2
        numbers = bench.rng.permutation(self.num_pages).tolist()
        self.pages = [[numbers.pop() for _ in range(n)] for n in used]
        self.kv_lengths = bench.lib.make(np.asarray(lengths), "int32")

    def table(self, *, is_ragged: bool) -> Any:
        """Return the page table; a dense one has unused entries of -1."""
        if is_ragged:
            numbers = np.asarray([page for row in self.pages for page in row], np.int32)
            return self.bench.of(
                self.bench.lib.make(numbers, "int32"), list(map(len, self.pages))
            ).array
        width = max(map(len, self.pages), default=0) + 1
        rows = [row + [-1] * (width - len(row)) for row in self.pages]
        numbers = np.asarray(rows, np.int32).reshape(len(rows), width)
        return self.bench.lib.make(numbers, "int32")

    def fill(self, rows: list[np.ndarray], token: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return the cache, in float64, with the leading tokens of each row that are given."""
        cache = np.full((self.num_pages, self.page_size, *token), np.nan)
        for pages, row in zip(self.pages, rows, strict=True):
            for i, entry in enumerate(row):
                cache[pages[i // self.page_size], i % self.page_size] = entry
        return cache


def last_tokens(lengths: list[int]) -> list[int]:
    """Return numbers of queries: none, one or many, at most the tokens of the row."""
    return [min(n, (1, 0, 5, n)[i % 4]) for i, n in enumerate(lengths)]


def paged_attention(
    bench: Bench, layout: Layout, dtype: str, *, page_size: int, options: dict[str, Any]
) -> None:
    """Output and log-sum-exp of decoding and prefill rows, with ragged and dense page tables."""
    lengths, options = lengths_of(layout), dict(options)
    cache = Cache(bench, lengths, page_size)
    q = bench.ragged(last_tokens(lengths), (HEADS, HEAD_DIM), dtype)
    k = bench.ragged(lengths, (KV_HEADS, HEAD_DIM), dtype)
    v = bench.like(k, (KV_HEADS, VALUE_DIM), dtype)
    k_pages, v_pages = (
        bench.lib.make(cache.fill(x.exact, x.exact.template.shape[1:], dtype), dtype)
        for x in (k, v)
    )
    arrays = {
        name: bench.lib.make(np.asarray(x), "float32") if isinstance(x, tuple) else x
        for name, x in options.items()
    }
    if options.pop("slopes_per_row", False):
        exponents = (np.arange(len(lengths))[:, None] + np.arange(HEADS)) % 4 + 1
        slopes = (0.5**exponents).astype(np.float32)
        options["alibi_slopes"] = slopes
        arrays = {**options, "alibi_slopes": bench.lib.make(slopes, "float32")}
    reference = partial(oracle.attention, **{"causal": True, **options})
    low_precision = None
    provider = scree.explain("attention", q.array, k.array, v.array).provider
    if (bench.kernel or provider) != "standard" and dtype in HALF:
        low_precision = partial(reference, rounding=oracle.round_to(dtype))
    for is_ragged in bench.select((True, False)):
        table = cache.table(is_ragged=is_ragged)

        def attend(q: Any, k: Any, v: Any, table: Any = table) -> Any:
            return bench.run(
                bench.xp.ragged.paged_attention,
                *(q, k_pages, v_pages, table, cache.kv_lengths),
                return_lse=True,
                **arrays,
            )

        bench.check(
            attend,
            reference,
            *(q, k, v),
            low_precision=low_precision,
            transcendental=True,
            note=f"{'ragged' if is_ragged else 'dense'} table: ",
        )


for _name, (_page_size, _options) in PAGED.items():
    _cases = (ALL, DTYPES) if _name == "paged_attention" else ((ALL[0], "blocks"), ("float32",))
    operation(f"ragged.{_name}", *_cases, kernel="paged_attention")(
        partial(paged_attention, page_size=_page_size, options=_options)
    )


@operation("ragged.append_paged", ALL, kernel="append_paged")
def append_paged(bench: Bench, layout: Layout, dtype: str) -> None:
    """The caches, bit by bit, and queries rotated with the keys by their positions."""
    lengths = lengths_of(layout)
    new = last_tokens(lengths)
    for page_size, is_ragged in bench.select(((3, True), (1, False), (16, False))):
        cache = Cache(bench, lengths, page_size)
        k = bench.ragged(new, (KV_HEADS, HEAD_DIM), dtype)
        v = bench.like(k, (KV_HEADS, VALUE_DIM), dtype)
        old = [bench.rng.standard_normal((n, KV_HEADS, HEAD_DIM)) for n in lengths]
        before = [
            bench.lib.read(bench.lib.make(cache.fill(rows, rows_token, dtype), dtype))
            for rows, rows_token in (
                (old, (KV_HEADS, HEAD_DIM)),
                ([row[..., :VALUE_DIM] for row in old], (KV_HEADS, VALUE_DIM)),
            )
        ]
        got = bench.run(
            bench.xp.ragged.append_paged,
            *(bench.lib.make(x, dtype) for x in before),
            *(k.array, v.array, cache.table(is_ragged=is_ragged), cache.kv_lengths),
        )
        for pages, expected, x in zip(got, before, (k, v), strict=True):
            expected = expected.copy()
            for numbers, row, n in zip(cache.pages, x.exact, lengths, strict=True):
                for i, entry in enumerate(row, n - len(row)):
                    expected[numbers[i // page_size], i % page_size] = entry
            np.testing.assert_array_equal(bench.lib.read(pages), expected)


def append_paged_with_rope(
    bench: Bench, layout: Layout, dtype: str, *, options: dict[str, Any]
) -> None:
    """The queries and keys are rotated as by `rope` with the positions in the cache."""
    lengths = lengths_of(layout)
    new = last_tokens(lengths)
    cache = Cache(bench, lengths, 4)
    q = bench.ragged(new, (HEADS, HEAD_DIM), dtype)
    k = bench.like(q, (KV_HEADS, HEAD_DIM), dtype)
    empty = [np.zeros((0, KV_HEADS, HEAD_DIM))] * len(lengths)
    pages = [bench.lib.make(cache.fill(empty, (KV_HEADS, HEAD_DIM), dtype), dtype) for _ in "kv"]
    options, _ = rope_arrays(bench, options)
    table = cache.table(is_ragged=True)
    k_pages, _, rotated = bench.run(
        bench.xp.ragged.append_paged,
        *(*pages, k.array, k.array, table, cache.kv_lengths),
        q=q.array,
        rope=options,
    )
    start = bench.lib.make(np.asarray(lengths) - np.asarray(new, np.int64), "int32")
    expected_q, expected_k = bench.xp.ragged.rope(q.array, k.array, start=start, **options)
    np.testing.assert_array_equal(bench.lib.read(rotated.values), bench.lib.read(expected_q.values))
    written, rows = bench.lib.read(k_pages), bench.rows(expected_k)
    for numbers, row, n in zip(cache.pages, rows, lengths, strict=True):
        for i, entry in enumerate(row, n - len(row)):
            np.testing.assert_array_equal(written[numbers[i // 4], i % 4], entry)


for _name, _options in ROPE.items():
    operation(f"ragged.append_paged: {_name}", ("plain", "blocks"), kernel="append_paged")(
        partial(append_paged_with_rope, options=_options)
    )


@operation("ragged.validate_pages", ALL, ("float32",))
def validate_pages(bench: Bench, layout: Layout, dtype: str) -> None:
    """Valid tables pass; a page that does not exist and a missing page raise."""
    lengths = lengths_of(layout)
    cache = Cache(bench, lengths, 3)
    for is_ragged in (True, False):
        table = cache.table(is_ragged=is_ragged)
        check = partial(bench.xp.ragged.validate_pages, table, page_size=3)
        check(cache.kv_lengths, num_pages=cache.num_pages)
        longer = bench.lib.make(np.asarray(lengths) + 6, "int32")
        for wrong_lengths, num_pages in ((longer, cache.num_pages), (cache.kv_lengths, 0)):
            is_wrong = bool(lengths) if num_pages else any(lengths)
            try:
                check(wrong_lengths, num_pages=num_pages)
            except ValueError as error:
                assert is_wrong and "page_table: expected" in str(error)
            else:
                assert not is_wrong


def _merge(
    outputs: list[oracle.Rows], lses: list[oracle.Rows]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the merged output and log-sum-exp of each row."""
    outs, sums = [], []
    for row_outputs, row_lses in zip(zip(*outputs), zip(*lses)):
        maximum = np.max(row_lses, axis=0)
        weights = np.exp(np.stack(row_lses) - np.where(np.isfinite(maximum), maximum, 0))
        total = weights.sum(axis=0)
        factors = weights / np.where(total > 0, total, 1)
        outs.append(np.sum(factors[..., None] * np.stack(row_outputs), axis=0))
        sums.append(np.where(total > 0, maximum + np.log(np.where(total > 0, total, 1)), -np.inf))
    return outs, sums


@operation("ragged.merge_attention", ALL, DTYPES, kernel="merge_attention")
def merge_attention(bench: Bench, layout: Layout, dtype: str) -> None:
    """Two and three parts, of which some saw no key."""
    wide = "float64" if dtype == "float64" else "float32"
    first = bench.ragged(layout, (HEADS, VALUE_DIM), dtype)
    for count in bench.select((2, 3)):
        outputs = [first] + [bench.like(first, (HEADS, VALUE_DIM), dtype) for _ in range(count - 1)]
        lses = []
        for i in range(count):
            values = bench.rng.standard_normal((first.array.total_length, HEADS))
            values[i::3] = -np.inf
            values[5::6] = -np.inf  # queries without any key
            x = first.array.with_values(bench.lib.make(values, wide))
            lses.append(Input(x, bench.rows(x)))
        bench.check(
            lambda *x: bench.run(
                bench.xp.ragged.merge_attention, list(x[: len(x) // 2]), list(x[len(x) // 2 :])
            ),
            lambda *x: _merge(list(x[: len(x) // 2]), list(x[len(x) // 2 :])),
            *(*outputs, *lses),
            transcendental=True,
            note=f"{count} parts: ",
        )
