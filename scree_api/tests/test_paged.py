"""Paged caches: bad input, shared pages, strides, 8-bit caches, traces, and the page pool.

The conformance suite compares the numbers with a loop over rows.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from libraries import NAMES, load

import scree

PAGE_SIZE = 4


def make_cache(lengths: list[int], seed: int = 0) -> tuple[Any, ...]:
    """Return k_pages, v_pages, a ragged page table and lengths, on NumPy."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    shape = (sum(counts) + 3, PAGE_SIZE, 2, 8)
    table = scree.from_lengths(rng.permutation(shape[0])[: sum(counts)].astype(np.int32), counts)
    pages = (rng.standard_normal(shape).astype(np.float32) for _ in "kv")
    return *pages, table, np.asarray(lengths, np.int32)


def make_queries(lengths: list[int], heads: int = 4) -> scree.Array:
    rng = np.random.default_rng(1)
    return scree.from_lengths(
        rng.standard_normal((sum(lengths), heads, 8)).astype(np.float32), lengths
    )


def to(name: str, x: Any) -> Any:
    """Return an array of NumPy, ragged or dense, in another library."""
    return x.to_backend(name) if isinstance(x, scree.Array) else load(name).make(x)


ERRORS = {
    "page that does not exist": (
        {"page_table": scree.from_lists([[99, 0], [1]])},
        r"page_table: expected pages in \[0, 6\), got 99 as page 0 of row 0",
    ),
    "negative page": (
        {"page_table": np.asarray([[0, -1], [1, -1]])},
        r"page_table: expected pages in \[0, 6\), got -1 as page 1 of row 0",
    ),
    "too few pages": (
        {"page_table": scree.from_lists([[0], [1]])},
        "page_table: expected 2 pages of 4 tokens for the 5 tokens of row 0, got 1",
    ),
    "too few rows": (
        {"page_table": scree.from_lists([[0, 1]]), "kv_lengths": np.asarray([5])},
        "page_table: expected 2 rows",
    ),
    "negative length": (
        {"kv_lengths": np.asarray([5, -1])},
        "kv_lengths: expected lengths of at least 0, got -1",
    ),
    "more queries than keys": ({"kv_lengths": np.asarray([5, 0])}, "kv_lengths: expected .* row 1"),
    "lengths of other rows": ({"kv_lengths": np.asarray([5])}, "kv_lengths: expected shape"),
    "table of numbers": ({"page_table": np.zeros((2, 2))}, "page_table: expected integers"),
    "cache with three axes": (
        {"k_pages": np.zeros((6, 4, 8), np.float32)},
        "k_pages: expected a cache",
    ),
    "caches of different sizes": (
        {"v_pages": np.zeros((5, 4, 2, 8), np.float32)},
        "v_pages: expected",
    ),
    "cache of another dtype": ({"k_pages": np.zeros((6, 4, 2, 8))}, "expected the dtype of"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("function", ["paged_attention", "append_paged"])
def test_bad_input_raises_before_anything_is_written(function: str, case: str) -> None:
    changes, message = ERRORS[case]
    k_pages, v_pages, table, lengths = make_cache([5, 3])
    q = make_queries([1, 1], heads=2)
    arguments = {
        "k_pages": k_pages, "v_pages": v_pages, "page_table": table, "kv_lengths": lengths, **changes,
    }  # fmt: skip
    before = k_pages.copy()
    if function == "append_paged":
        arguments |= {"k": q, "v": q}
    else:
        arguments["q"] = q
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(scree, function)(**arguments)
    np.testing.assert_array_equal(k_pages, before)


def test_validate_pages_names_the_row() -> None:
    with pytest.raises(ValueError, match=re.escape("got 7 as page 1 of row 1")):
        scree.validate_pages(np.asarray([[0, 9], [1, 7]]), np.asarray([4, 8]), 3, 4)


@pytest.mark.parametrize("name", NAMES)
def test_shared_pages_give_the_numbers_of_separate_rows(name: str) -> None:
    k_pages, v_pages, _, _ = make_cache([40])
    # Rows 0 to 2 share pages 5 and 3; rows 1 and 2 share page 7 too; row 3 shares nothing.
    table = scree.from_lists([[5, 3, 0], [5, 3, 7, 1], [5, 3, 7, 2, 4], [6]])
    table = table.with_values(table.values.astype(np.int32))
    lengths = np.asarray([10, 16, 17, 2], np.int32)
    q = make_queries([1, 2, 3, 1])
    arrays = [to(name, x) for x in (q, k_pages, v_pages, table, lengths)]
    sinks = to(name, np.asarray([0.5, -1.0, 0.0, 2.0], np.float32))
    levels = [(np.asarray([0, 3, 4]), np.asarray([2, 0])),
              (np.asarray([0, 1, 3, 4]), np.asarray([2, 3, 0]))]  # fmt: skip
    for causal in (True, False):
        options = {"sinks": sinks, "return_lse": True, "causal": causal}
        expected = scree.paged_attention(*arrays, **options)
        got = scree.paged_attention(*arrays, **options, shared_pages=levels)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(
                a.to_numpy().values, b.to_numpy().values, rtol=2e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    "levels, message",
    [
        ([(np.asarray([0, 1]), np.asarray([1]))], "expected groups from 0 to 2"),
        ([(np.asarray([0, 0, 2]), np.asarray([0, 0]))], "groups of at least one row"),
    ],
)
def test_shared_pages_of_wrong_groups_raise(levels: Any, message: str) -> None:
    k_pages, v_pages, table, lengths = make_cache([5, 5])
    with pytest.raises(ValueError, match=message):
        scree.paged_attention(
            make_queries([1, 1]), k_pages, v_pages, table, lengths, shared_pages=levels
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("numpy", "torch")])
def test_append_writes_in_place_into_caches_of_any_strides(name: str) -> None:
    k_pages, v_pages, table, lengths = make_cache([5, 3])
    both = to(name, np.stack([k_pages, v_pages], axis=2))  # K and V interleaved, as in engines
    k_view, v_view = both[:, :, 0], both[:, :, 1]
    new = to(name, make_queries([2, 1], heads=2))
    got = scree.append_paged(k_view, v_view, new, new, to(name, table), to(name, lengths))
    assert got[0] is k_view and got[1] is v_view
    page = int(table.values[1])
    np.testing.assert_array_equal(both[page, 0, 0], new.values[1])
    q = to(name, make_queries([2, 1]))
    strided = scree.paged_attention(q, k_view, v_view, to(name, table), to(name, lengths))
    arrays = (to(name, np.ascontiguousarray(x)) for x in (k_view, v_view))
    whole = scree.paged_attention(q, *arrays, to(name, table), to(name, lengths))
    np.testing.assert_array_equal(strided.to_numpy().values, whole.to_numpy().values)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("jax", "mlx")])
def test_append_leaves_arrays_that_cannot_be_written(name: str) -> None:
    k_pages, v_pages, table, lengths = make_cache([5, 3])
    arrays = [to(name, x) for x in (k_pages, v_pages)]
    new = to(name, make_queries([1, 1], heads=2))
    got, _ = scree.append_paged(*arrays, new, new, to(name, table), to(name, lengths))
    np.testing.assert_array_equal(np.asarray(arrays[0]), k_pages)
    assert (np.asarray(got) != k_pages).any()


@pytest.mark.needs("torch")
def test_a_cache_with_gradient_is_refused() -> None:
    k_pages, v_pages, table, lengths = (to("torch", x) for x in make_cache([5, 3]))
    new = to("torch", make_queries([1, 1], heads=2))
    with pytest.raises(ValueError, match="k_pages: expected a cache without gradient"):
        scree.append_paged(k_pages.requires_grad_(), v_pages, new, new, table, lengths)


@pytest.mark.needs("torch")
def test_caches_of_8_bits_with_scales_per_head() -> None:
    import torch

    k_pages, v_pages, table, lengths = (to("torch", x) for x in make_cache([9, 30]))
    k_scale, v_scale = torch.tensor([0.5, 2.0]), 4.0
    narrow = [(x / s).to(torch.float8_e4m3fn)
              for x, s in ((k_pages, k_scale[:, None]), (v_pages, v_scale))]  # fmt: skip
    wide = [x.float() * s for x, s in zip(narrow, (k_scale[:, None], v_scale), strict=True)]
    q = to("torch", make_queries([1, 4]))
    got = scree.paged_attention(q, *narrow, table, lengths, k_scale=k_scale, v_scale=v_scale)
    expected = scree.paged_attention(q, *wide, table, lengths)
    torch.testing.assert_close(got.values, expected.values)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax")])
def test_a_decoding_step_compiles_once_for_all_lengths(name: str) -> None:
    lib, traces = load(name), []

    def step(q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any, offsets: Any) -> Any:
        new = scree.from_cu_seqlens(q, offsets, max_length=1)
        caches = scree.append_paged(
            k_pages, v_pages, new, new, table, lengths, rope={"theta": 100.0}
        )
        return scree.paged_attention(new, *caches, table, lengths).values

    if name == "torch":
        import torch
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        compiled = torch.compile(step, backend=counter, fullgraph=True)
    else:
        import jax

        compiled = jax.jit(lambda *arrays: traces.append(1) or step(*arrays))
    table = np.asarray([[5, 0, 3], [2, 4, 1]], np.int32)
    for lengths in ([1, 1], [5, 3], [12, 8]):
        k_pages, v_pages, _, _ = make_cache([20])
        arrays = (make_queries([1, 1], heads=2).values, k_pages, v_pages, table,
                  np.asarray(lengths, np.int32), np.arange(3, dtype=np.int32))  # fmt: skip
        expected, got = (f(*map(lib.make, arrays)) for f in (step, compiled))
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5)
    assert (counter.frame_count if name == "torch" else len(traces)) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax")])
def test_traced_length_beyond_the_pages_ends_with_them(name: str) -> None:
    lib = load(name)

    def attend(q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any, offsets: Any) -> Any:
        queries = scree.from_cu_seqlens(q, offsets, max_length=1)
        return scree.paged_attention(queries, k_pages, v_pages, table, lengths).values

    compiled = importlib.import_module(name)
    compiled = compiled.jit(attend) if name == "jax" else compiled.compile(attend, backend="eager")
    k_pages, v_pages, _, _ = make_cache([20])
    table = np.asarray([[5, 0, 3], [2, 4, 1]], np.int32)
    capacity = table.shape[1] * k_pages.shape[1]
    results = []
    for lengths in ([capacity, 5], [capacity + 30, 5]):
        arrays = (make_queries([1, 1], heads=2).values, k_pages, v_pages, table,
                  np.asarray(lengths, np.int32), np.arange(3, dtype=np.int32))  # fmt: skip
        results.append(np.asarray(compiled(*map(lib.make, arrays))))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax")])
def test_merged_attention_has_the_gradient_of_attention(name: str) -> None:
    q, k = make_queries([2, 0, 3], heads=2), make_queries([4, 2, 7], heads=2)
    lib, lengths = load(name), [1, 1, 3]

    def merged(q: Any, k: Any) -> Any:
        queries, keys = (scree.from_lengths(x, n) for x, n in ((q, [2, 0, 3]), (k, [4, 2, 7])))
        starts = np.asarray([0, 4, 6])
        first = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
        rest = np.setdiff1d(np.arange(13), first)
        parts = []
        for index, counts in ((first, lengths), (rest, [3, 1, 4])):
            part = scree.gather(keys, scree.from_lengths(lib.make(index.astype(np.int32)), counts))
            parts.append(scree.attention(queries, part, part, return_lse=True))
        out, lse = scree.merge_attention(*zip(*parts, strict=True))
        return (out.values**2).sum() + lse.values.sum()

    def whole(q: Any, k: Any) -> Any:
        queries, keys = (scree.from_lengths(x, n) for x, n in ((q, [2, 0, 3]), (k, [4, 2, 7])))
        out, lse = scree.attention(queries, keys, keys, return_lse=True)
        return (out.values**2).sum() + lse.values.sum()

    arrays = [lib.make(x.values) for x in (q, k)]
    gradients = []
    for f in (merged, whole):
        if name == "torch":
            import torch

            leaves = [x.clone().requires_grad_() for x in arrays]
            gradients.append(torch.autograd.grad(f(*leaves), leaves))
        else:
            import jax

            gradients.append(jax.grad(f, argnums=(0, 1))(*arrays))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


class Pool(RuleBasedStateMachine):
    """A pool beside a model of what each sequence's tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = scree.PagePool(12, 3)
        self.cache = np.full((12, 3), -1)
        self.tokens: dict[int, list[int]] = {}
        self.count = 0

    def write(self, sequence: int, n: int) -> None:
        """Write new tokens to the end of a sequence, as `append_paged` does."""
        pages = self.pool.page_table([sequence]).values
        for _ in range(n):
            position = len(self.tokens[sequence])
            self.cache[pages[position // 3], position % 3] = self.count
            self.tokens[sequence].append(self.count)
            self.count += 1

    @rule(length=st.integers(0, 8))
    def add(self, length: int) -> None:
        if -(-length // 3) > self.pool.num_free:
            with pytest.raises(MemoryError):
                self.pool.add(length)
            return
        sequence = self.pool.add(length)
        assert sequence not in self.tokens
        self.tokens[sequence] = []
        self.write(sequence, length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(0, 4))
    def extend(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True))
        before = self.pool.lengths(chosen).tolist(), self.pool.num_free
        try:
            sources, targets = self.pool.extend(chosen, count)
        except MemoryError:
            assert (self.pool.lengths(chosen).tolist(), self.pool.num_free) == before
            return
        self.cache[targets] = self.cache[sources]
        for sequence in chosen:
            self.write(sequence, count)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tokens[self.pool.fork(sequence)] = list(self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(KeyError):
            self.pool.fork(sequence)

    @rule()
    def defragment(self) -> None:
        sources, targets = self.pool.defragment()
        self.cache[targets] = self.cache[sources]
        used = self.pool.page_table(self.pool.sequences).values
        assert sorted({*used.tolist()}) == list(range(12 - self.pool.num_free))

    @invariant()
    def every_sequence_has_its_tokens(self) -> None:
        used = set()
        for sequence, tokens in self.tokens.items():
            pages = self.pool.page_table([sequence]).values
            assert len(pages) == -(-len(tokens) // 3) and len({*pages.tolist()}) == len(pages)
            assert self.cache[pages].ravel()[: len(tokens)].tolist() == tokens
            used |= {*pages.tolist()}
        assert len(used) + self.pool.num_free == 12, "no page is lost, and none is used twice"


TestPagePool = Pool.TestCase


DECODE_KERNELS = [
    ("numpy", "matmul"),
    pytest.param("torch", "sdpa", marks=pytest.mark.needs("torch")),
]
#: Several parts, one part, no token, no query, one token.
DECODE_LENGTHS, DECODE_QUERIES = [700, 3, 0, 300, 1], [1, 1, 1, 0, 1]


def decode_arguments(page_size: int, dim: int = 8) -> tuple[Any, ...]:
    """Return q, caches with NaN in the places without a token, the page table and lengths."""
    rng, counts = np.random.default_rng(5), [-(-n // page_size) for n in DECODE_LENGTHS]
    pages = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32)
    caches = [np.full((sum(counts) + 2, page_size, 2, dim), np.nan, np.float32) for _ in "kv"]
    table = np.full((len(counts), max(counts) + 1), -1, np.int32)
    for row, (count, length) in enumerate(zip(counts, DECODE_LENGTHS, strict=True)):
        table[row, :count] = pages[sum(counts[:row]) :][:count]
        for cache in caches:
            for t in range(length):
                slot = table[row, t // page_size], t % page_size
                cache[slot] = rng.standard_normal((2, dim)).astype(np.float32)
    q = scree.from_lengths(
        rng.standard_normal((sum(DECODE_QUERIES), 4, dim)).astype(np.float32), DECODE_QUERIES
    )
    return q, *caches, table, np.asarray(DECODE_LENGTHS, np.int32)


@pytest.mark.parametrize(("name", "kernel"), DECODE_KERNELS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 512])
def test_decode_kernel_equals_a_loop_over_heads(name: str, kernel: str, page_size: int) -> None:
    q, k_pages, v_pages, table, lengths = decode_arguments(page_size)
    arguments = [to(name, x) for x in (q, k_pages, v_pages, table, lengths)]
    # A causal call refuses a query in a row without tokens.
    options = {"scale": 0.3, "causal": False}
    out, lse = scree.paged_attention(*arguments, **options, return_lse=True, kernel=kernel)
    alone = scree.paged_attention(*arguments, **options)
    assert scree.explain("paged_attention", *arguments, **options).provider == kernel
    np.testing.assert_array_equal(np.asarray(alone.values), np.asarray(out.values))
    query = 0
    for row, length in enumerate(DECODE_LENGTHS):
        if not DECODE_QUERIES[row]:
            continue
        slots = [(table[row, t // page_size], t % page_size) for t in range(length)]
        for head in range(4):
            k, v = (
                np.asarray([x[slot][head // 2] for slot in slots], float).reshape(-1, 8)
                for x in (k_pages, v_pages)
            )
            weights = np.exp(0.3 * (k @ q.values[query, head].astype(float)))
            expected = weights @ v / weights.sum() if length else np.zeros(8)
            got = np.asarray(out.values[query, head])
            np.testing.assert_allclose(got, expected, atol=2e-6)
            log = np.log(weights.sum()) if length else -np.inf
            np.testing.assert_allclose(float(lse.values[query, head]), log, rtol=1e-5)
        query += 1


@pytest.mark.parametrize(("name", "kernel"), DECODE_KERNELS)
def test_decode_kernel_of_calls_it_does_not_take_says_why(name: str, kernel: str) -> None:
    q, *rest = decode_arguments(16)
    arguments = [to(name, x) for x in (q, *rest)]
    for options, why in (
        ({"causal": False, "softcap": 2.0}, "no softcap and no ALiBi"),
        ({"causal": False, "window": (3, None)}, "no window"),
        ({"causal": False, "k_scale": 2.0}, "no k_scale and no v_scale"),
    ):
        with pytest.raises(ValueError, match=f"kernel='{kernel}' rejects this call: .*{why}"):
            scree.paged_attention(*arguments, **options, kernel=kernel)
    many = to(name, make_queries([2, 3, 0, 1, 1]))
    with pytest.raises(ValueError, match="at most one query per row"):
        scree.paged_attention(many, *arguments[1:], kernel=kernel)


@pytest.mark.needs("torch")
def test_decode_with_gradients_of_queries_takes_the_standard_path() -> None:
    q, *rest = (to("torch", x) for x in decode_arguments(16))
    q.values.requires_grad_()
    arguments = q, *rest
    assert scree.explain("paged_attention", *arguments, causal=False).provider == "standard"
    scree.paged_attention(*arguments, causal=False).values.sum().backward()
    assert float(abs(q.values.grad).sum()) > 0


def test_decode_on_numpy_copies_a_few_pages_at_a_time() -> None:
    import tracemalloc

    shape = (4096, 16, 2, 32)  # 16.8 MB per cache
    k_pages, v_pages = (np.ones(shape, np.float32) for _ in "kv")
    table = np.arange(4096, dtype=np.int32).reshape(2, -1)
    q = scree.from_lengths(np.ones((2, 2, 32), np.float32), [1, 1])
    lengths = np.full(2, 2048 * 16, np.int32)
    scree.paged_attention(q, k_pages, v_pages, table, lengths)
    tracemalloc.start()
    scree.paged_attention(q, k_pages, v_pages, table, lengths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Two buffers of 4 MiB, scores and page numbers.
    assert peak < 12e6
