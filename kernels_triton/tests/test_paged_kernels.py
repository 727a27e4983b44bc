"""Kernels of paged caches compared with loops over rows and heads in float64."""

import gc
import warnings
import weakref
from itertools import product

import numpy as np
import pytest
import torch

import scree
from scree.ops.append_paged import AppendPagedCall, RopeOptions
from scree.ops.paged_attention import PagedAttentionCall
from scree_triton.attention import append_paged, paged
from scree_triton.runtime.device import INTERPRETED, device_info

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16, torch.float32] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}

#: Name -> queries and keys per row, heads, key heads, head_dim, value_dim, page size, options.
CASES = {
    "decoding": ((1, 1, 1), (5, 200, 70), 4, 2, 16, 16, 16, {}),
    "empty rows": ((1, 0, 1), (0, 200, 70), 4, 2, 16, 16, 4, {"causal": False}),
    "grouped heads and odd widths": ((1,) * 4, (300, 2, 1, 1), 6, 2, 24, 40, 16, {}),
    "decoding and prefill": ((1, 7, 200, 1), (300, 7, 264, 9), 4, 2, 16, 16, 32, {}),
    "prefill of three heads per key head": ((50, 90), (60, 90), 6, 2, 16, 16, 16, {}),
    "pages of one token": ((3, 2), (90, 20), 4, 4, 16, 16, 1, {}),
    "pages of 24 tokens": ((1, 2), (90, 20), 4, 4, 16, 16, 24, {}),
    "window": ((1, 7, 30), (300, 7, 64), 4, 2, 16, 16, 16, {"window": 20, "softcap": 5.0}),
    "window of decoding": ((1, 1), (300, 64), 4, 2, 16, 16, 16, {"window": 20}),
    "not causal": ((1, 30), (300, 64), 4, 2, 16, 16, 64, {"causal": False}),
    "slopes": ((1, 30), (300, 64), 4, 2, 16, 16, 64, {"alibi_slopes": (0.1, 0.2, 0.3, 0.4)}),
    "parts": ((1, 1, 3), (300, 70, 64), 4, 2, 16, 16, 16, {"split_size": 64}),
    "window in parts": ((1, 30), (300, 64), 4, 2, 16, 16, 16, {"split_size": 128, "window": 90}),
    "scales": ((1, 30), (90, 64), 4, 2, 16, 16, 16, {"k_scale": (0.5, 2.0), "v_scale": 3.0}),
    "one key head": ((40, 33), (300, 70), 32, 1, 32, 16, 8, {}),
    "many rows in parts": ((1, 0, *(1,) * 7, 2), (300, 9, 0, 70, 500, 1, 16, 0, 64, 90), 8, 4, 16, 24, 16, {"causal": False}),
    "some rows": ((1,) * 40, tuple(range(1, 41)), 4, 2, 16, 16, 16, {}),
}  # fmt: skip


def draw(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_cache(kv_lengths, page_size, heads, widths, dtype, spare=2):
    """Return caches, a ragged page table in random order, and the lengths; NaN in unused places."""
    counts = [-(-n // page_size) for n in kv_lengths]
    numbers = np.random.default_rng(0).permutation(sum(counts) + spare)[: sum(counts)]
    table = scree.from_lengths(torch.tensor(numbers.astype(np.int32), device=DEVICE), counts)
    pages = [torch.full((sum(counts) + spare, page_size, heads, w), np.nan) for w in widths]
    rows = [[] for _ in widths]
    for row, n in zip(np.split(numbers, np.cumsum(counts))[:-1], kv_lengths):
        for i, width in enumerate(widths):
            tokens = draw(n, heads, width, dtype=dtype, seed=n + i).cpu()
            rows[i].append(tokens.double().numpy())
            for j in range(n):
                pages[i][row[j // page_size], j % page_size] = tokens[j].float()
    lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=DEVICE)
    return [x.to(DEVICE, dtype) for x in pages], table, lengths, rows


def expected(queries, keys, values, *, causal=True, window=None, softcap=None, alibi_slopes=None,
             k_scale=1.0, v_scale=1.0, split_size=None):  # fmt: skip
    """Return output and log-sum-exp of one row, (q, heads, width) and (q, heads)."""
    count, heads, dim = queries.shape
    length, kv_heads, width = values.shape
    out, lse = np.zeros((count, heads, width)), np.full((count, heads), -np.inf)
    for i in range(count):
        position = length - count + i
        last = position + 1 if causal else length
        first = max(position + 1 - window, 0) if window else 0
        for h in range(heads):
            g = h // (heads // kv_heads)
            factor = np.broadcast_to(k_scale, kv_heads)[g] * dim**-0.5
            scores = keys[first:last, g] @ queries[i, h] * factor
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[h] * np.abs(position - np.arange(first, last))
            if scores.size:
                weights = np.exp(scores - scores.max())
                out[i, h] = weights @ values[first:last, g] / weights.sum()
                out[i, h] *= np.broadcast_to(v_scale, kv_heads)[g]
                lse[i, h] = scores.max() + np.log(weights.sum())
    return out, lse


def check(got, queries, keys, values, dtype, options):
    out, lse = (x.values.double().cpu().numpy() for x in got)
    results = [expected(*row, **options) for row in zip(queries, keys, values)]
    tolerance = TOLERANCES[dtype] * max(1.0, *np.ravel(options.get("v_scale", 1.0)))
    np.testing.assert_allclose(out, np.concatenate([r[0] for r in results]), atol=tolerance)
    np.testing.assert_allclose(lse, np.concatenate([r[1] for r in results]), atol=tolerance)


def as_tensors(options):
    return {
        k: torch.tensor(v, device=DEVICE) if isinstance(v, tuple) else v for k, v in options.items()
    }


def make_queries(lengths, heads, dim, dtype):
    q = scree.from_lengths(draw(sum(lengths), heads, dim, dtype=dtype, seed=9), list(lengths))
    return q, np.split(q.values.double().cpu().numpy(), np.cumsum(lengths))[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_paged_attention(name, dtype):
    q_lengths, kv_lengths, heads, kv_heads, dim, dim_v, page_size, options = CASES[name]
    caches, table, lengths, rows = make_cache(kv_lengths, page_size, kv_heads, (dim, dim_v), dtype)
    q, queries = make_queries(q_lengths, heads, dim, dtype)
    arrays = q, *caches, table, lengths
    got = scree.paged_attention(*arrays, return_lse=True, kernel="triton", **as_tensors(options))
    check(got, queries, *rows, dtype, options)


@pytest.mark.parametrize("starts", [(1, 0), (0, 1)])
def test_paged_attention_strided_pages_at_any_address(starts):
    """Calls with page numbers of equal strides are cached together, aligned or not."""
    caches, table, lengths, rows = make_cache((300, 70), 16, 2, (16, 16), torch.float32)
    q, queries = make_queries((1, 30), 4, 16, torch.float32)
    for start in starts:
        numbers = torch.zeros(2 * len(table.values) + 1, dtype=torch.int32, device=DEVICE)
        strided = numbers[start::2][: len(table.values)]
        strided.copy_(table.values)
        pages = table.with_values(strided)
        got = scree.paged_attention(q, *caches, pages, lengths, return_lse=True, kernel="triton")
        check(got, queries, *rows, torch.float32, {})


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_cached_decoding_with_arrays_at_any_address(is_dense, return_lse):
    """A cached call that only decodes runs on its dense arrays, with caches at any address."""
    caches, table, lengths, rows = make_cache((40, 40), 16, 2, (16, 16), torch.float16)
    q, queries = make_queries((1, 1), 4, 16, torch.float16)
    wanted = [np.concatenate(x) for x in zip(*(expected(*row) for row in zip(queries, *rows)))]
    for start in (0, 1, 0, 1):
        moved = [torch.cat([x.flatten()[:start], x.flatten()]) for x in (*caches, table.values)]
        k_pages, v_pages, numbers = (
            x[start:].view_as(y) for x, y in zip(moved, (*caches, table.values))
        )
        pages = numbers.view(2, -1) if is_dense else table.with_values(numbers)
        options = dict(return_lse=return_lse, kernel="triton")
        got = scree.paged_attention(q, k_pages, v_pages, pages, lengths, **options)
        for x, y in zip(got if return_lse else (got,), wanted):
            out = x.values.double().cpu().numpy()
            np.testing.assert_allclose(out, y, atol=TOLERANCES[torch.float16])


@pytest.mark.parametrize(
    ("dtype", "q_lengths", "return_lse", "has_run_dense"),
    [
        (torch.float16, (1, 1), False, True),
        (torch.float16, (1, 1), True, True),
        (torch.float16, (1, 40), False, False),
        (torch.float32, (1, 1), False, False),
    ],
)
def test_run_dense_serves_calls_in_which_only_dense_arrays_differ(
    dtype, q_lengths, return_lse, has_run_dense
):
    """The precision of float32 products, and the address of caches in prefill, can differ too."""
    caches, table, lengths, _ = make_cache((40, 40), 16, 2, (16, 16), dtype)
    q, _ = make_queries(q_lengths, 4, 16, dtype)
    attend = paged.prepare_paged_attention(
        PagedAttentionCall(q, *caches, table, lengths, return_lse=return_lse)
    )
    result = attend(q, *caches, table, lengths, None, None, None)
    run_dense = getattr(attend, "run_dense", None)
    assert (run_dense is not None) == has_run_dense
    if run_dense is not None:
        results = run_dense(q.values, *caches, table.values, lengths), result
        if return_lse:
            pairs = zip(*results)
        else:
            pairs = [results]
        assert all(torch.equal(dense, ragged.values) for dense, ragged in pairs)


def test_lengths_of_many_rows_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(paged, "_ROWS_AT_A_TIME", (16,))
    test_paged_attention("some rows", torch.float32)


@pytest.fixture
def cut_prefill(monkeypatch):
    """Cut the keys of every tile of a prefill into four parts of at least 64 keys."""
    monkeypatch.setattr(paged, "_MIN_PREFILL_PART", 64)
    monkeypatch.setattr(paged._LaunchConfig, "prefill_parts", lambda self, programs: 4)
    paged._launch_config.cache_clear()
    yield
    paged._launch_config.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 90}, {"causal": False}, {"softcap": 5.0}])
def test_prefill_cuts_long_keys(options, dtype, cut_prefill):
    """Rows without keys, with one part, with several, and rows that are decoded."""
    q_lengths, kv_lengths = (40, 1, 70, 0, 200, 33), (300, 200, 70, 3, 420, 90)
    caches, table, lengths, rows = make_cache(kv_lengths, 16, 2, (16, 24), dtype)
    q, queries = make_queries(q_lengths, 4, 16, dtype)
    got = scree.paged_attention(
        q, *caches, table, lengths, return_lse=True, kernel="triton", **options
    )
    check(got, queries, *rows, dtype, options)


@pytest.mark.parametrize(
    "shape, expected",
    [((3, 16, 2, 128), True), ((0, 16, 2, 128), False), ((3, 12, 2, 128), False),
     ((3, 4, 2, 128), False), ((3, 16, 2, 96), False)],
)  # fmt: skip
def test_is_tma_addressable_depends_on_the_pages(shape, expected):
    cache = torch.empty(shape, dtype=torch.float16)
    assert paged._is_tma_addressable(cache) is expected
    assert not paged._is_tma_addressable(cache[:, :, :1].expand(-1, -1, 2, -1))


#: Page size, heads, key heads, head_dim, value_dim, dtype, options of the kernel for Hopper.
HOPPER_CASES = [
    (8, 4, 4, 128, 128, torch.float16, {}),
    (16, 8, 2, 128, 128, torch.bfloat16, {"causal": False}),
    (16, 8, 2, 128, 128, torch.bfloat16, {"scale": 0.05}),
    (32, 6, 2, 64, 64, torch.float16, {"window": 90}),
    (64, 3, 1, 64, 128, torch.bfloat16, {"softcap": 5.0, "v_scale": 2.0}),
    (128, 4, 2, 128, 64, torch.bfloat16, {"window": 20, "softcap": 5.0}),
    (256, 8, 1, 128, 128, torch.bfloat16, {}),
]


@pytest.fixture
def hopper_prefill(monkeypatch):
    """Select the kernel for Hopper also for head_dims where it was not timed."""
    tile = paged._Sm90Tile(128, 128, 2)
    for dims in product((64, 128), repeat=2):
        monkeypatch.setitem(paged._SM90_PREFILL_TILES, dims, tile)
    paged._launch_config.cache_clear()
    yield
    paged._launch_config.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
@pytest.mark.usefixtures("hopper_prefill")
def test_prefill_of_half_precision_through_pages(case, is_dense):
    """Rows without keys, rows that are decoded, several tiles per row, and keys in parts."""
    page_size, heads, kv_heads, dim, dim_v, dtype, options = case
    q_lengths, kv_lengths = (40, 1, 70, 0, 130), (1300, 200, 70, 3, 420)
    caches, table, lengths, rows = make_cache(kv_lengths, page_size, kv_heads, (dim, dim_v), dtype)
    if page_size == 32:
        caches = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in caches]
    page_table = scree.to_padded(table, fill_value=-1)[0] if is_dense else table
    q, queries = make_queries(q_lengths, heads, dim, dtype)
    arrays = q, *caches, page_table, lengths
    if device_info(q.values.device).supports_sm90_gluon:
        assert scree.explain("paged_attention", *arrays, **options).note is None
    got = scree.paged_attention(*arrays, return_lse=True, kernel="triton", **options)
    scale = options.get("scale", dim**-0.5) * dim**0.5
    others = {k: v for k, v in options.items() if k != "scale"}
    check(got, queries, *rows, dtype, others | {"k_scale": scale})


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_prefill")
def test_prefill_of_lengths_that_change_in_a_graph():
    caches, table, lengths, rows = make_cache((600, 700), 16, 2, (128, 128), torch.bfloat16)
    q, queries = make_queries((100, 150), 8, 128, torch.bfloat16)

    def attend():
        return scree.paged_attention(
            q, *caches, table, lengths, return_lse=True, causal=False, kernel="triton"
        )

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend()
    for shorter in ((600, 700), (1, 0), (513, 128)):
        lengths.copy_(torch.tensor(shorter))
        graph.replay()
        cut = [[row[:n] for row, n in zip(part, shorter)] for part in rows]
        check(got, queries, *cut, torch.bfloat16, {"causal": False})


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(
    "dtype, widths, size",
    [
        *((dtype, widths, 1.0) for dtype in DTYPES for widths in ((32, 64), (32, 33), (16, 16))),
        *(
            (x, (32, 64), size)
            for x in DTYPES
            if x != torch.float16
            for size in (2.0**30, 2.0**-30)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
def test_8_bit_caches(dtype, cache_dtype, widths, size):
    """Numbers are loaded in pairs where the widths are even and above 16; queries may exceed float16."""
    kv_lengths, q_lengths = (300, 2, 64, 90), (1, 1, 7 if INTERPRETED else 40, 0)
    caches, table, lengths, rows = make_cache(kv_lengths, 16, 2, widths, cache_dtype)
    q, _ = make_queries(q_lengths, 4, widths[0], dtype)
    q = q.with_values(q.values * size)
    queries = np.split(q.values.double().cpu().numpy(), np.cumsum(q_lengths))[:-1]
    options = {"scale": widths[0] ** -0.5 / size}
    arrays = q, *caches, table, lengths
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a kernel that does not compile
        got = scree.paged_attention(*arrays, return_lse=True, kernel="triton", **options)
    check(got, [row / size for row in queries], *rows, dtype, {})


def test_8_bit_caches_at_any_address_load_pairs_from_even_ones(monkeypatch):
    """Calls with caches of equal strides are cached together."""
    caches, table, lengths, rows = make_cache((90, 64), 16, 2, (32, 32), FLOAT8[0])
    q, queries = make_queries((1, 1), 4, 32, torch.float16)
    select, has_pairs = paged._select, []

    def record(*args):
        config = select(*args)
        has_pairs.append(config.shape.has_pairs)
        return config

    monkeypatch.setattr(paged, "_select", record)
    for start in (2, 1, 4):
        moved = []
        for cache in caches:
            memory = torch.zeros(cache.numel() + start, dtype=torch.uint8, device=DEVICE)
            memory[start:] = cache.view(torch.uint8).flatten()
            moved.append(memory[start:].view(cache.dtype).view(cache.shape))
        got = scree.paged_attention(q, *moved, table, lengths, return_lse=True, kernel="triton")
        check(got, queries, *rows, torch.float16, {})
    assert has_pairs == [True, False, True]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_shared_pages_give_the_numbers_of_separate_pages(first, is_dense):
    """The pages after the shared ones begin at any alignment."""
    dtype, lengths = torch.float32, (90, 80, 100, 70)
    caches, table, kv_lengths, rows = make_cache(lengths, 16, 2, (16, 16), dtype)
    numbers = [
        row.tolist() for row in np.split(table.values.cpu().numpy(), table.offsets[1:-1].cpu())
    ]
    for row in numbers[1:]:
        row[:first] = numbers[0][:first]
    for part in rows:
        for row in part[1:]:
            row[: 16 * first] = part[0][: 16 * first]
    counts = [len(row) for row in numbers]
    flat = torch.tensor(np.concatenate(numbers), dtype=torch.int32, device=DEVICE)
    table = scree.from_lengths(flat, counts)
    if is_dense:
        table = scree.to_padded(table, fill_value=-1)[0]
    q, queries = make_queries((1, 3, 1, 2), 4, 16, dtype)
    levels = [([0, 4], [first])]
    got = scree.paged_attention(
        q, *caches, table, kv_lengths, shared_pages=levels, return_lse=True, kernel="triton"
    )
    check(got, queries, *rows, dtype, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(3, 0, 2), (0,), ()], ids=str)
def test_merge_attention(lengths, dtype):
    total = sum(lengths)
    like = scree.from_lengths(draw(total, 3, 20, dtype=dtype, seed=0), list(lengths))
    outputs = [like, like.with_values(draw(total, 3, 20, dtype=dtype, seed=1))]
    lses = [like.with_values(draw(total, 3, dtype=torch.float32, seed=i) * 5) for i in (2, 3)]
    if total:
        for x, lse in zip(outputs, lses):
            lse.values[0] = lse.values[1, 0] = -torch.inf
            x.values[0, 0] = torch.nan  # not seen
    got = scree.merge_attention(outputs, lses, kernel="triton")
    (a, b), (x, y) = (
        [z.values.double().cpu().numpy() for z in arrays] for arrays in (lses, outputs)
    )
    lse = np.logaddexp(a, b)
    with np.errstate(invalid="ignore"):
        weights = [np.nan_to_num(np.exp(z - lse))[..., None] for z in (a, b)]
    expected_out = sum(w * np.nan_to_num(z) for w, z in zip(weights, (x, y)))
    np.testing.assert_allclose(got[1].values.cpu().numpy(), lse, rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(
        got[0].values.double().cpu().numpy(), expected_out, rtol=tolerance, atol=tolerance
    )
    dense = scree.merge_attention(
        [x.values for x in outputs], [x.values for x in lses], kernel="triton"
    )
    assert torch.equal(dense[0], got[0].values)


def test_dense_table_and_repeated_calls_give_the_same_bits():
    caches, table, lengths, _ = make_cache((90, 3, 40), 16, 2, (16, 16), torch.float32)
    q, _ = make_queries((1, 1, 1), 4, 16, torch.float32)
    dense = scree.to_padded(table, fill_value=-1)[0]
    first = scree.paged_attention(q, *caches, table, lengths, kernel="triton").values
    for page_table in (table, dense, dense.t().contiguous().t(), dense.long()):
        for _ in range(2):
            again = scree.paged_attention(q, *caches, page_table, lengths, kernel="triton").values
            assert torch.equal(first, again)


def test_cached_call_keeps_no_array_of_the_first_call():
    caches, table, lengths, _ = make_cache((20, 9), 16, 2, (16, 16), torch.float16)
    q, _ = make_queries((1, 1), 4, 16, torch.float16)
    layouts = q.layout, table.layout
    scree.paged_attention(q, *caches, table, lengths, kernel="triton")
    kept = [weakref.ref(x) for x in (q.values, *caches, table.values, lengths)]
    del q, caches, table, lengths
    gc.collect()
    assert layouts and [x() for x in kept] == [None] * 5


def test_every_combination_of_dtypes_has_kernels_of_its_own():
    (k, v), table, lengths, rows = make_cache((20, 9), 16, 2, (16, 16), torch.float16)
    narrow = [[x.to(dtype) for dtype in FLOAT8] for x in (k, v)]
    q, queries = make_queries((1, 9), 4, 16, torch.float16)
    wide = scree.Array(q.values, q.offsets.long())
    for a, b in ((q, lengths), (wide, lengths), (q, lengths.long()), (wide, lengths.long())):
        got = scree.paged_attention(a, k, v, table, b, return_lse=True, kernel="triton")
        check(got, queries, *rows, torch.float16, {})
        for k8, v8 in (
            product(*narrow) if a is q and b is lengths else [(narrow[0][0], narrow[1][1])]
        ):
            arguments = a, k8, v8, table, b
            got, expected = (
                scree.paged_attention(*arguments, kernel=kernel)
                for kernel in ("triton", "standard")
            )
            torch.testing.assert_close(got.values, expected.values, rtol=0, atol=2e-3)


def test_lengths_are_read_on_the_device():
    caches, table, lengths, rows = make_cache((90, 33, 40), 16, 2, (16, 16), torch.float32)
    q, queries = make_queries((1, 1, 1), 4, 16, torch.float32)
    for shorter in ((90, 33, 40), (1, 33, 17), (16, 32, 2)):
        lengths.copy_(torch.tensor(shorter))
        got = scree.paged_attention(q, *caches, table, lengths, return_lse=True, kernel="triton")
        cut = [[row[:n] for row, n in zip(part, shorter)] for part in rows]
        check(got, queries, *cut, torch.float32, {})


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("page_size, options", [(4, {}), (16, {"window": 90}), (256, {})], ids=str)
def test_one_row_of_changing_length_reads_only_pages_in_use(page_size, options, is_dense):
    """Its pages are loaded before its length is known, and again if the length cuts it elsewhere."""
    caches, table, lengths, rows = make_cache((500,), page_size, 2, (16, 16), torch.float32)
    unused = torch.full((40,), 1 << 30, dtype=torch.int32, device=DEVICE)
    numbers = torch.cat([table.values, unused])
    page_table = numbers[None] if is_dense else scree.from_lengths(numbers, [len(numbers)])
    q, queries = make_queries((1,), 4, 16, torch.float32)
    for length in (500, 499, 300, 64, 1, 0):
        lengths.fill_(length)
        got = scree.paged_attention(
            q, *caches, page_table, lengths, return_lse=True, kernel="triton", **options
        )
        check(got, queries, *([row[0][:length]] for row in rows), torch.float32, options)
    # Without unused pages the first pages are the right ones.
    lengths.fill_(500)
    got = scree.paged_attention(
        q, *caches, table, lengths, return_lse=True, kernel="triton", **options
    )
    check(got, queries, *rows, torch.float32, options)


@pytest.mark.parametrize("others", [0, 1, 30])
def test_split_size_makes_the_bits_of_a_row_independent_of_others(others):
    kv_lengths = (300, *(20,) * others)
    caches, table, lengths, _ = make_cache(kv_lengths, 16, 2, (16, 16), torch.float16)
    q, _ = make_queries((1,) * len(kv_lengths), 4, 16, torch.float16)
    alone = scree.from_lengths(q.values[:1], [1])
    first = scree.from_lengths(table.values[:19], [19])
    options = {"split_size": 64, "kernel": "triton"}
    a = scree.paged_attention(alone, *caches, first, lengths[:1], **options)
    b = scree.paged_attention(q, *caches, table, lengths, **options)
    assert torch.equal(a.values[0], b.values[0])


def beside_unused_pages(caches, table, is_dense):
    """Return a page table in memory that names a page of NaN after each row."""
    counts = table.lengths.cpu().tolist()
    nan_page = int(np.setdiff1d(np.arange(len(caches[0])), table.values.cpu().numpy())[0])
    if is_dense:
        buffer = scree.to_padded(table, fill_value=nan_page, length=max(counts) + 3)[0]
        return buffer[:, : max(counts)]
    values = torch.cat([table.values, torch.full_like(table.values[:1], nan_page).expand(8)])
    return scree.Array(values[: table.values.shape[0]], table.offsets)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(
    "q_lengths, options",
    [((1, 1), {}), ((1, 1), {"split_size": 64}), ((1, 40), {"causal": False})],
    ids=str,
)
def test_paged_attention_length_beyond_the_pages_ends_with_them(q_lengths, is_dense, options):
    """The host cannot check lengths on a device, and the kernel reads no entry of another row."""
    kv_lengths = (64, 80) if not is_dense else (80, 80)
    caches, table, lengths, rows = make_cache(kv_lengths, 16, 2, (16, 16), torch.float32)
    page_table = beside_unused_pages(caches, table, is_dense)
    q, queries = make_queries(q_lengths, 4, 16, torch.float32)
    call = PagedAttentionCall(q, *caches, page_table, lengths, return_lse=True, **options)
    attend = paged.prepare_paged_attention(call)
    lengths += torch.tensor([100, 5000], device=DEVICE)
    got = attend(q, *caches, page_table, lengths, None, None, None)
    check(got, queries, *rows, torch.float32, options)


@pytest.mark.usefixtures("cut_prefill")
def test_prefill_in_parts_of_length_beyond_the_pages_ends_with_them():
    test_paged_attention_length_beyond_the_pages_ends_with_them((1, 70), True, {})


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("rope", [None, RopeOptions(rotary_dim=16)])
def test_append_paged_token_beyond_the_pages_is_not_written(is_dense, rope):
    caches, table, lengths, _ = make_cache((8, 8), 4, 2, (16, 16), torch.float32)
    page_table = beside_unused_pages(caches, table, is_dense)
    k = scree.from_lengths(draw(4, 2, 16, dtype=torch.float32, seed=1), [2, 2])
    q = None if rope is None else k
    call = AppendPagedCall(*caches, k, k, page_table, lengths, q=q, rope=rope)
    append = append_paged.prepare_append_paged(call)
    lengths.copy_(torch.tensor([9, 1]))  # the positions are 7 and 8, and -1 and 0
    before = [x.clone() for x in caches]
    append(k, k, q, *caches, page_table, lengths)
    written = [(x != y) & ~x.isnan() for x, y in zip(caches, before)]
    pages = table.values.cpu().tolist()
    places = [(pages[1], 3), (pages[2], 0)]  # position 7 of row 0, and position 0 of row 1
    for x in written:
        assert sorted({(i, j) for i, j, *_ in x.nonzero().tolist()}) == sorted(places)


@pytest.mark.parametrize("argument", ["q", "k_pages", "v_pages"])
def test_paged_attention_after_the_same_call_without_gradients_has_gradients(argument):
    """The kernel serves such arrays under `no_grad`, and no guard of the call cache sees this mode."""
    caches, table, lengths, _ = make_cache((9, 16), 16, 2, (16, 16), torch.float32)
    caches = [x.nan_to_num() for x in caches]
    q, _ = make_queries((1, 1), 4, 16, torch.float32)
    arrays = {"q": q.values, "k_pages": caches[0], "v_pages": caches[1]}
    array = arrays[argument].requires_grad_()

    def attend():
        k_pages, v_pages = arrays["k_pages"], arrays["v_pages"]
        return scree.paged_attention(
            q.with_values(arrays["q"]), k_pages, v_pages, table, lengths
        ).values

    (expected_grad,) = torch.autograd.grad(attend().sum(), array)
    with torch.no_grad():
        outputs = [attend() for _ in range(2)]
    assert not any(out.requires_grad for out in outputs)
    (grad,) = torch.autograd.grad(attend().sum(), array)
    torch.testing.assert_close(grad, expected_grad)


def test_append_paged_after_the_same_call_without_gradients_has_gradients():
    caches, table, lengths, _ = make_cache((8, 8), 4, 2, (16, 16), torch.float32)
    k = scree.from_lengths(draw(2, 2, 16, dtype=torch.float32, seed=1), [1, 1])
    q = k.with_values(draw(2, 4, 16, dtype=torch.float32, seed=2).requires_grad_())

    def rotate():
        return scree.append_paged(*caches, k, k, table, lengths, q=q, rope={})[2].values

    (expected_grad,) = torch.autograd.grad(rotate().sum(), q.values)
    with torch.no_grad():
        outputs = [rotate() for _ in range(2)]
    assert not any(out.requires_grad for out in outputs)
    (grad,) = torch.autograd.grad(rotate().sum(), q.values)
    torch.testing.assert_close(grad, expected_grad)


def test_strided_caches_and_heads_in_front():
    dtype = torch.float32
    (k, v), table, lengths, rows = make_cache((50, 20), 16, 2, (16, 16), dtype)
    q, queries = make_queries((1, 1), 4, 16, dtype)
    wide = torch.stack([k, v], 1)  # as vLLM keeps keys and values
    heads_first = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in (k, v)]
    for caches in ((wide[:, 0], wide[:, 1]), heads_first):
        got = scree.paged_attention(q, *caches, table, lengths, return_lse=True, kernel="triton")
        check(got, queries, *rows, dtype, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "q_lengths, kv_lengths, options",
    [
        ((1, 1, 1), (300, 2, 64), {}),
        ((1, 0, 1), (300, 20, 0), {"causal": False}),
        ((3, 1, 0, 2), (300, 20, 5, 100), {"window": 20, "softcap": 3.0}),
        ((3, 1), (300, 20), {"alibi_slopes": (0.1, 0.2, 0.3, 0.4)}),
    ],
)
def test_attention_of_few_queries_to_contiguous_keys(q_lengths, kv_lengths, options, dtype):
    q, queries = make_queries(q_lengths, 4, 16, dtype)
    k = scree.from_lengths(draw(sum(kv_lengths), 2, 16, dtype=dtype, seed=1), list(kv_lengths))
    v = k.with_values(draw(sum(kv_lengths), 2, 24, dtype=dtype, seed=2))
    options = {"causal": True, **options}
    assert paged.is_decoding(
        scree.ops.attention.AttentionCall(
            q, k, v, window=options.get("window"), causal=options["causal"]
        )
    )
    got = scree.attention(q, k, v, return_lse=True, kernel="triton", **as_tensors(options))
    keys, values = (
        np.split(x.values.double().cpu().numpy(), np.cumsum(kv_lengths))[:-1] for x in (k, v)
    )
    check(got, queries, keys, values, dtype, options)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("rope", [None, {}, {"theta": 5e5, "interleaved": True}])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 0, 7, 1)], ids=str)
def test_append_paged(lengths, rope, is_dense):
    kv_lengths = [n + 13 * i for i, n in enumerate(lengths)]
    caches, table, kv, _ = make_cache(kv_lengths, 4, 2, (16, 24), torch.float32)
    page_table = scree.to_padded(table, fill_value=-1)[0] if is_dense else table
    k = scree.from_lengths(draw(sum(lengths), 2, 16, dtype=torch.float32, seed=1), list(lengths))
    v = k.with_values(draw(sum(lengths), 2, 24, dtype=torch.float32, seed=2))
    q = k.with_values(draw(sum(lengths), 6, 16, dtype=torch.float32, seed=3))
    before = [x.clone() for x in caches]
    options = {} if rope is None else {"rope": rope, "q": q}
    result = scree.append_paged(*caches, k, v, page_table, kv, kernel="triton", **options)
    assert result[0] is caches[0] and result[1] is caches[1]
    start = torch.tensor([n - m for n, m in zip(kv_lengths, lengths)], device=DEVICE)
    keys, queries = k, q
    if rope is not None:
        keys, queries = (scree.rope(x, start=start, kernel="standard", **rope) for x in (k, q))
        torch.testing.assert_close(result[2].values, queries.values, rtol=0, atol=2e-5)
    pages, token = np.split(table.values.cpu().numpy(), table.offsets[1:-1].cpu().numpy()), 0
    for row, (n, m) in enumerate(zip(kv_lengths, lengths)):
        for position in range(n - m, n):
            page, place = pages[row][position // 4], position % 4
            before[0][page, place], before[1][page, place] = keys.values[token], v.values[token]
            token += 1
    for got, wanted in zip(caches, before):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5, equal_nan=True)


def test_rejections():
    caches, table, lengths, _ = make_cache((9,), 4, 2, (16, 16), torch.float32)
    q, _ = make_queries((1,), 4, 16, torch.float32)
    for change, message in (
        ({"q": q.with_values(q.values.clone().requires_grad_())}, "no gradients"),
        ({"k_pages": caches[0].mT.contiguous().mT}, "last axis"),
        ({"alibi_slopes": torch.ones(1, 4, device=DEVICE)}, "per head, not per row and head"),
    ):
        arguments = {"q": q, "k_pages": caches[0], "v_pages": caches[1], **change}
        with pytest.raises(ValueError, match=message):
            scree.paged_attention(
                **arguments, page_table=table, kv_lengths=lengths, kernel="triton"
            )


def test_tiles_fit_the_shared_memory():
    for key, tile in paged._DECODE_TILES.items():
        for shared_memory in (99 << 10, 163 << 10, 227 << 10):
            fitted = paged._shrink(tile, 2 * key[0] * key[1], shared_memory)
            used = fitted.columns * 2 * key[0] * key[1] * (fitted.num_stages - 1)
            assert used < shared_memory, (key, shared_memory)
    assert device_info(torch.device(DEVICE)).shared_memory >= 0


class Decoder(torch.nn.Module):
    """One step of generation: append the keys of a token per row, and attend to the cache."""

    def __init__(self, caches, table):
        super().__init__()
        for name, x in zip(("k_pages", "v_pages"), caches):
            self.register_buffer(name, x)
        self.register_buffer("table", table)

    def forward(self, q, k, v, lengths):
        offsets = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        q, k, v = (scree.Array(x, offsets, max_length=1) for x in (q, k, v))
        caches = scree.append_paged(self.k_pages, self.v_pages, k, v, self.table, lengths)
        return scree.paged_attention(q, *caches, self.table, lengths).values


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_have_the_bits_of_eager_steps(mode):
    """The lengths change between the steps. Nothing keeps Inductor from capturing a CUDA graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    kv_lengths, dtype = (90, 33, 40), torch.bfloat16
    caches, table, lengths, _ = make_cache(kv_lengths, 16, 2, (64, 64), dtype)
    table = scree.to_padded(table, fill_value=0)[0]
    eager = Decoder([x.clone() for x in caches], table)
    compiled = torch.compile(Decoder(caches, table), mode=mode, fullgraph=True)
    lengths -= 10
    with torch.no_grad():
        for i in range(8):
            arrays = [draw(3, h, 64, dtype=dtype, seed=10 * i + h) for h in (8, 2)]
            arrays = arrays[0], arrays[1], arrays[1] * 2, lengths
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*arrays), eager(*arrays)), i
            lengths += 1
    assert not counters["inductor"]["cudagraph_skips"]
    assert torch.equal(caches[0].nan_to_num(), eager.k_pages.nan_to_num())
