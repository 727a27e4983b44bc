"""Every attention kernel on a GPU: features x dtypes x head_dims x hard layouts against float64.

On Hopper most cases run in Gluon. head_dim 16, and float32 above head_dim 64, run in the portable
kernels on all devices.
"""

import itertools
import math

import pytest
import torch
from attention_reference import Case, check_public_call, distance, offsets, problem, reference

pytestmark = pytest.mark.gpu

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
MIXED = (1, 63, 64, 65, 0, 127, 128, 129, 300, 5, 191, 193)
LONGER = (64, 0, 70, 65, 9, 300, 128, 64, 500, 5, 1, 400)
SHORT = (1, 39, 0, 20, 5, 33, 64, 2, 0, 0, 63, 17, 300, 12, 130, 9, *(7,) * 30, 64, 1, 40)
LONG = (900, 1, 1, 640, 2, 1000)
FEW = (2100, 1, 999)
LONGEST = (40, 4999, 0, 300, 1)
# Most causal queries precede the first key. Every CTA gets several such tiles, and others between them.
BEFORE, FEW_KEYS = (2000, 30, 1, 700, 1500, 0, 64), (40, 2000, 1, 900, 3, 5, 0)
MASKS = [
    dict(),
    dict(causal=True),
    dict(causal=True, window=(70, None)),
    dict(window=(33, 20)),
    dict(window=(None, 5)),
    dict(causal=True, softcap=15.0),
    dict(causal=True, window=(100, None), softcap=30.0),
]
CASES = [
    # Every head_dim and dtype, by mask and heads; q and k with equal and with different lengths.
    *(
        Case(dtype, dim, dim, heads, k_heads, MIXED, k_lengths, **mask)
        for dtype, dim, (heads, k_heads), k_lengths, mask in itertools.product(
            (f16, bf16), (32, 64, 128), ((4, 4), (4, 1)), (None, LONGER), MASKS
        )
    ),
    *(
        Case(dtype, dim, dim_v, 2, 1, MIXED, k_lengths, **mask)
        for dtype, (dim, dim_v), k_lengths, mask in itertools.product(
            (f16, bf16, f32),
            ((16, 16), (80, 80), (96, 96), (192, 128), (64, 128), (40, 24), (256, 256)),
            (None, LONGER),
            (MASKS[1], MASKS[3]),
        )
    ),
    *(
        Case(f32, dim, dim, 4, 2, MIXED, k_lengths, **mask)
        for dim, k_lengths, mask in itertools.product((32, 64, 128), (None, LONGER), MASKS)
    ),
    # Layouts.
    *(
        Case(dtype, dim, dim, 2, 1, lengths, causal=causal)
        for dtype, dim, lengths, causal in itertools.product(
            (f16, f32),
            (64, 128),
            (LONG, (1,), (0, 0, 7), (5,) * 1000, (4000, *(17,) * 50)),
            (False, True),
        )
    ),
    *(
        Case(dtype, dim, dim, 4, 2, LONG, causal=True, packed=True)
        for dtype in (f16, f32)
        for dim in (64, 80, 128)
    ),
    *(
        Case(dtype, dim, dim, 4, 2, MIXED, causal=causal, slack=slack)
        for dtype in (bf16, f32)
        for dim in (64, 80, 128)
        for causal in (False, True)
        for slack in (1, 300)
    ),
    *(
        Case(dtype, dim, dim, 4, 2, MIXED, k_lengths, alibi=True, **mask)
        for dtype, dim, k_lengths, mask in itertools.product(
            (f16, bf16, f32), (64, 128), (None, LONGER), MASKS[:4] + MASKS[5:]
        )
    ),
    # Heads that TMA pads to the width of their parts.
    *(
        Case(dtype, dim, dim, 4, 2, MIXED, k_lengths, **mask)
        for (dtype, dim), k_lengths, mask in itertools.product(
            (
                (f16, 24),
                (bf16, 40),
                (f16, 48),
                (bf16, 72),
                (f16, 88),
                (f16, 112),
                (bf16, 136),
                (f16, 152),
            ),
            (None, LONGER),
            (MASKS[0], MASKS[1], MASKS[6]),
        )
    ),
    *(
        Case(dtype, dim, dim, 4, 2, LONG, packed=packed, alibi=not packed, **mask)
        for (dtype, dim), packed, mask in itertools.product(
            ((f16, 96), (bf16, 80)), (False, True), (MASKS[1], MASKS[3])
        )
    ),
    # Heads of several parts, and v with another head_dim.
    *(
        Case(dtype, dim, dim_v, 4, 2, MIXED, k_lengths, **mask)
        for (dtype, dim, dim_v), k_lengths, mask in itertools.product(
            (
                (bf16, 192, 128),
                (f16, 128, 192),
                (bf16, 160, 160),
                (f16, 192, 192),
                (bf16, 256, 256),
                (f16, 128, 64),
            ),
            (None, LONGER),
            (MASKS[0], MASKS[6], dict(causal=True, alibi=True)),
        )
    ),
    *(
        Case(dtype, dim, dim_v, 4, 1, LONG, causal=True, slack=slack)
        for dtype, dim, dim_v in (
            (bf16, 192, 128),
            (f16, 136, 200),
            (bf16, 256, 256),
            (f16, 64, 128),
        )
        for slack in (0, 70)
    ),
    *(
        Case(f16, dim, dim, 4, 2, LONG, k_lengths, causal=right is None, window=(left, right))
        for dim in (64, 128)
        for k_lengths in (None, LONG[::-1])
        for left, right in (
            (0, None),
            (127, None),
            (128, None),
            (300, None),
            (0, 0),
            (200, 130),
            (None, 64),
        )
    ),
    *(
        Case(dtype, dim, dim, 4, 2, FEW, k_lengths, alibi=alibi, **mask)
        for (dtype, dim), k_lengths, (alibi, mask) in itertools.product(
            ((f16, 64), (bf16, 48)),
            (None, FEW[::-1]),
            ((False, MASKS[0]), (False, MASKS[1]), (False, MASKS[3]), (True, MASKS[6])),
        )
    ),
    *(
        Case(dtype, dim, dim, 16, 16, LONG, causal=True)
        for dtype in (f16, bf16)
        for dim in (64, 128)
    ),
    # Key heads whose query heads are summed in splits.
    *(
        Case(dtype, dim, dim, 16, k_heads, LONG, k_lengths, slack=slack, **mask)
        for (dtype, dim), k_heads, (k_lengths, slack), mask in itertools.product(
            ((f16, 64), (bf16, 96), (bf16, 128), (f16, 160), (bf16, 256)),
            (1, 2),
            ((None, 0), (LONG[::-1], 70)),
            (MASKS[0], MASKS[1]),
        )
    ),
    *(
        Case(dtype, dim, dim, 16, 4, BEFORE, FEW_KEYS, slack=slack, causal=True, window=window)
        for dtype, dim in ((f16, 32), (bf16, 64), (bf16, 80), (f16, 128), (f16, 160), (bf16, 192))
        for slack, window in ((0, (None, None)), (70, (150, None)))
    ),
    *(
        Case(dtype, dim, dim, 6, 3, LONG, LONG[::-1], causal=True)
        for dtype in (f16, bf16)
        for dim in (64, 128)
    ),
]


@pytest.fixture(autouse=True)
def poison():
    """Fill free memory with NaN, which reveals what a kernel does not write."""
    blocks = [
        torch.full((n,), math.nan, device="cuda")
        for n in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
    ]
    torch.cuda.synchronize()
    del blocks


@pytest.fixture
def share_tiles(monkeypatch):
    """Let short rows share tiles in small batches too."""
    from scree_triton.attention import launch_configs

    monkeypatch.setattr(launch_configs, "MANY_ROWS", 1)
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})


@pytest.fixture
def no_few_tiles(monkeypatch):
    """Let small batches take the tiles of large batches."""
    from scree_triton.attention import launch_configs

    monkeypatch.setattr(launch_configs, "FEW_QUERIES", 0)
    monkeypatch.setattr(launch_configs, "SMALL_TILE_COST", 20)
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})


@pytest.fixture
def cut_tiles(monkeypatch):
    """Cut the tiles of all batches with a bound on the longest row; return the cut schedules."""
    from scree_triton.attention import launch_configs, metadata, sm90_configs

    cut = []

    def cut_and_record(tiles, spec):
        items = metadata_cut_tiles(tiles, spec)
        cut.append((items, spec))
        return items

    metadata_cut_tiles = metadata.cut_tiles
    monkeypatch.setattr(metadata, "cut_tiles", cut_and_record)
    monkeypatch.setattr(sm90_configs, "gains_by_chunks", lambda *args: True)
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    return cut


def run(case, p, max_length=None):
    from scree_triton.attention.interface import attention

    q, k, v = (x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    out, lse = attention(
        q,
        k,
        v,
        p.cu_q,
        p.cu_k,
        causal=case.causal,
        window=case.window,
        scale=case.dim**-0.5,
        softcap=case.softcap,
        alibi_slopes=p.slopes,
        max_length=max_length,
    )
    return out, lse, *torch.autograd.grad([out, lse], [q, k, v], [p.dout, p.dlse])


def check(case, max_length=None):
    """Check that results are reproducible, and as near to float64 as PyTorch in this precision."""
    p = problem(case, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run(case, p, max_length)
        repeated = run(case, p, max_length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = reference(case, p, torch.float64)
    eager = reference(case, p, case.dtype)
    for name, x, y, e, other in zip(
        ("out", "lse", "dq", "dk", "dv"), results, repeated, exact, eager
    ):
        # Three TF32 products keep about 21 bits, and the backward subtracts two sums of them.
        floor = (
            {f16: 2e-4, bf16: 1.6e-3, f32: 2e-6 if name == "out" else 1e-5}[case.dtype]
            if name != "lse"
            else 5e-7
        )
        assert distance(x, e) < 2 * distance(other, e) + floor, name
        assert torch.equal(x, y), f"{name}: two runs differ"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_error(case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(dtype, dim, dim_v, 4, 2, MIXED, k_lengths, slack=slack, **mask)
            for (dtype, dim, dim_v), (k_lengths, slack), mask in itertools.product(
                ((f16, 32, 32), (bf16, 64, 64), (f16, 128, 128), (bf16, 80, 128)),
                ((None, 0), (LONGER, 0), (None, 70)),
                (MASKS[1], MASKS[3], MASKS[6]),
            )
        ),
        *(
            Case(dtype, dim, dim, 4, 2, MIXED, k_lengths, slack=70, **mask)
            for (dtype, dim), (k_lengths, mask) in itertools.product(
                ((f16, 88), (f16, 152), (bf16, 160), (f16, 192)),
                ((None, MASKS[1]), (LONGER, MASKS[6])),
            )
        ),
    ],
    ids=lambda c: c.name,
)
def test_few_short_rows(case):
    """Few rows with a known short bound take smaller tiles."""
    check(case, max_length=500)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype, dim, dim, 4, 2, lengths, slack=slack, **mask)
        for (dtype, dim), (lengths, slack), mask in itertools.product(
            ((f16, 64), (bf16, 72), (f16, 96), (bf16, 128), (bf16, 152), (f16, 160)),
            (((1, 63, 64, 65, 0, 192, 127, 5, 191), 0), ((128, 99, 0, 129), 70)),
            (MASKS[0], MASKS[1]),
        )
    ],
    ids=lambda c: c.name,
)
def test_short_rows(case, no_few_tiles):
    """Many rows of at most 192 tokens take tiles of their own."""
    check(case, max_length=192)


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(dtype, dim, dim, 4, 2, SHORT, slack=slack, **mask)
            for (dtype, dim), slack, mask in itertools.product(
                ((f16, 32), (bf16, 64), (f16, 96), (bf16, 128), (f16, 192), (bf16, 256)),
                (0, 70),
                (MASKS[0], MASKS[1], MASKS[3], MASKS[6]),
            )
        ),
        *(
            Case(dtype, dim, dim_v, 4, 1, SHORT, alibi=True, **mask)
            for (dtype, dim, dim_v), mask in itertools.product(
                ((f16, 64, 64), (bf16, 80, 128), (bf16, 192, 128)), (MASKS[1], MASKS[3])
            )
        ),
        *(
            Case(f16, 64, 64, 2, 2, lengths, causal=causal)
            for lengths, causal in itertools.product(
                ((1,) * 5000, (0, 0, 7), (1000, *(3,) * 50)), (False, True)
            )
        ),
        *(
            Case(dtype, dim, dim, 4, 1, lengths, lengths[::-1], slack=slack, alibi=alibi, **mask)
            for (dtype, dim), (lengths, slack), (alibi, mask) in itertools.product(
                ((f16, 64), (bf16, 128)),
                ((SHORT, 70), ((5, 0, 3, 0, 20, 9, 0), 0)),
                ((False, MASKS[0]), (False, MASKS[1]), (True, MASKS[3]), (False, MASKS[6])),
            )
        ),
    ],
    ids=lambda c: c.name,
)
def test_rows_share_tiles(case, share_tiles):
    """Adjacent rows share a tile if the rows are short on average and a bound is known."""
    check(case, max_length=1000)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype, dim, dim, heads, k_heads, LONGEST, k_lengths, slack=slack, **mask)
        for (dtype, dim), (heads, k_heads), (k_lengths, slack), mask in itertools.product(
            ((f16, 32), (bf16, 64), (f16, 64), (bf16, 80), (bf16, 128), (f16, 192)),
            ((2, 2), (4, 1)),
            ((None, 0), (LONGEST[::-1], 0), (None, 70)),
            (MASKS[0], MASKS[1]),
        )
    ],
    ids=lambda c: c.name,
)
def test_long_rows(case, no_few_tiles):
    """Rows that are known to be long take larger tiles, also if few queries attend to many keys."""
    check(case, max_length=max(LONGEST))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="only the kernels for Hopper cut tiles",
)
@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(dtype, dim, dim, heads, 1, LONGEST, k_lengths, slack=slack, **mask)
            for (dtype, dim), (heads, k_lengths, slack), mask in itertools.product(
                ((bf16, 64), (f16, 96), (bf16, 128), (bf16, 192)),
                ((1, None, 70), (4, LONGEST[::-1], 0)),
                (MASKS[0], MASKS[1]),
            )
        ),
        *(
            Case(dtype, dim, dim, 2, 1, FEW, **mask)
            for (dtype, dim), mask in itertools.product(
                ((f16, 32), (bf16, 72), (f16, 160), (bf16, 256)), (MASKS[0], MASKS[1])
            )
        ),
        *(Case(bf16, 64, 64, 4, 2, FEW, **mask) for mask in MASKS[2:]),
        *(Case(f16, 128, 128, 4, 2, FEW, FEW[::-1], **mask) for mask in MASKS[2:5]),
        Case(bf16, 192, 128, 2, 2, LONGEST, causal=True),
        Case(f16, 64, 64, 4, 2, FEW, alibi=True, causal=True),
    ],
    ids=lambda c: c.name,
)
def test_chunks_of_tiles(case, cut_tiles):
    """Gradients of cut tiles are added up in float32, in a fixed order."""
    check(case, max_length=max(*case.q_lengths, *(case.k_lengths or ())))
    assert {spec.min_blocks for _, spec in cut_tiles} == {0, 1}
    if case.window == (None, None):
        assert all(int(items[0, 3]) > 0 for items, _ in cut_tiles)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="only the kernels for Hopper cut tiles",
)
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype, dim, dim, 4, 2, (*(20,) * 30, 2500, *(15,) * 40), causal=causal)
        for dtype, dim, causal in ((bf16, 64, True), (f16, 128, False), (bf16, 192, True))
    ],
    ids=lambda c: c.name,
)
def test_chunks_of_tiles_beside_shared_tiles(case, cut_tiles, share_tiles):
    """Only the tiles of longer rows are cut where short rows share tiles."""
    check(case, max_length=2500)
    assert all(int(items[0, 3]) > 0 for items, _ in cut_tiles)
    assert cut_tiles


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="elsewhere float32 is multiplied as three TF32 products",
)
@pytest.mark.parametrize(
    "case",
    [
        case
        for dim in (32, 64)
        for case in (
            Case(f32, dim, dim, 4, 2, LONG, causal=True),
            Case(f32, dim, dim, 4, 1, LONGER, MIXED, causal=True),
            Case(f32, dim, dim, 4, 4, MIXED, LONGER),
            Case(f32, dim, dim, 2, 2, (4000, 17)),
        )
    ],
    ids=lambda c: c.name,
)
def test_float32_products(case):
    """Six bfloat16 products on Hopper are as precise as float32 itself."""
    p = problem(case, "cuda")
    exact, eager = reference(case, p, torch.float64), reference(case, p, f32)
    for name, x, e, other in zip(("out", "lse", "dq", "dk", "dv"), run(case, p), exact, eager):
        assert distance(x, e) < 2 * distance(other, e), name


@pytest.mark.parametrize(
    "dtype, dim, options, bound",
    [
        (f32, 64, dict(window=(4, 6)), 1e-5),
        (bf16, 128, dict(causal=True, deterministic=True), 2e-2),
    ],
)
def test_public_call(dtype, dim, options, bound):
    check_public_call("cuda", dtype, dim, options, bound)


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(40, 90), softcap=5.0)])
@pytest.mark.parametrize(
    "dtype, dim, bound",
    [*((bf16, dim, 2e-2) for dim in (32, 64, 128, 256)), (f16, 128, 4e-3), (f32, 64, 1e-5)],
)
def test_dropout_matches_standard_path(dtype, dim, bound, options):
    """The kernels drop the pairs that the standard path in float64 drops."""
    options = dict(dropout=0.2, seed=(1 << 35) + dim, **options)
    check_public_call("cuda", dtype, dim, options, bound, slopes_per_row=dim == 64, factor=11)


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(40, 90), softcap=5.0)])
@pytest.mark.parametrize(
    "dtype, dim, bound", [(bf16, 64, 2e-2), (bf16, 128, 2e-2), (f32, 64, 1e-5)]
)
def test_slopes_per_row_match_standard_path(dtype, dim, bound, options):
    check_public_call("cuda", dtype, dim, options, bound, slopes_per_row=True, factor=11)


def test_dropout_of_compiled_function_matches_eager():
    import scree

    q, k, v = (torch.randn((700, 4, 64), device="cuda", dtype=bf16) for _ in range(3))
    cu, seed = offsets((300, 0, 400), "cuda"), torch.tensor([7], device="cuda")

    def loss(q, k, v, seed):
        x = scree.from_cu_seqlens(q, cu, max_length=400)
        options = dict(causal=True, dropout=0.3, seed=seed, kernel="triton")
        return scree.attention(x, x.with_values(k), x.with_values(v), **options).values

    results = []
    for f in (loss, torch.compile(loss, fullgraph=True)):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = f(*inputs, seed)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(map(torch.equal, *results))


def test_graph_draws_another_mask_at_each_replay():
    """A seed on the device is drawn again by each replay, and replays of one seed are equal."""
    import scree

    x = scree.from_lengths(torch.randn((500, 4, 64), device="cuda", dtype=bf16), [200, 300])
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")

    def attend():
        return scree.attention(x, x, x, causal=True, dropout=0.3, seed=seed, kernel="triton").values

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    results = []
    for number in (1, 2, 1):
        seed.fill_(number)
        graph.replay()
        results.append(captured.clone())
        assert torch.equal(captured, attend())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def check_isolation(case, poisoned_names, rows, max_length=None):
    """Check that NaN and infinity in a row change no bit of the other rows."""
    p = problem(case, "cuda")
    clean = run(case, p, max_length)
    start = p.cu_q.tolist()
    for row, number in zip(rows, (math.nan, math.inf)):
        poisoned = p._replace(**{name: getattr(p, name).clone() for name in poisoned_names})
        for name in poisoned_names:
            getattr(poisoned, name)[start[row] : start[row + 1]] = number
        results = run(case, poisoned, max_length)
        for x, y in zip(clean, results):
            assert torch.equal(x[: start[row]], y[: start[row]]) and torch.equal(
                x[start[row + 1] :], y[start[row + 1] :]
            )
        assert not all(x[start[row] : start[row + 1]].isfinite().all() for x in results)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128, 160, 256])
@pytest.mark.parametrize("dtype", [f16, f32])
def test_rows_do_not_leak(dtype, dim, causal):
    case = Case(dtype, dim, dim, 2, 1, MIXED, causal=causal)
    check_isolation(case, ("q", "k", "v", "dout", "dlse"), (3, 8))


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("names", ["q", "k", "v", "dout", "dlse", "q k v dout dlse"])
def test_rows_that_share_a_tile_do_not_leak(names, dim, softcap, share_tiles):
    case = Case(bf16, dim, dim, 2, 1, SHORT, causal=dim != 64, softcap=softcap)
    check_isolation(case, names.split(), (3, 11), max_length=1000)


@pytest.mark.parametrize("names", ["q", "dout", "q dout dlse"])
def test_queries_without_keys_do_not_leak(names, share_tiles):
    """In each row some queries attend to no key: they have an output of 0 and no gradient."""
    case = Case(f16, 64, 64, 2, 1, (9, 20, 30, 5), (4, 0, 20, 5), causal=True)
    p = problem(case, "cuda")
    clean = run(case, p, 100)
    start = p.cu_q.tolist()
    for row, number in ((0, math.inf), (1, math.nan), (2, -math.inf)):
        poisoned = p._replace(**{name: getattr(p, name).clone() for name in names.split()})
        for name in names.split():
            getattr(poisoned, name)[start[row]] = number
        for x, y in zip(clean, run(case, poisoned, 100)):
            before, after = (start if len(x) == len(p.q) else p.cu_k.tolist())[row : row + 2]
            assert torch.equal(x[:before], y[:before]) and torch.equal(x[after:], y[after:])


@pytest.mark.parametrize("dtype, dim", [(bf16, 64), (f16, 128), (f16, 96), (bf16, 192), (f32, 64)])
def test_negative_slopes(dtype, dim):
    """Weights then grow with the distance, but not where a tile ends after its row."""
    case = Case(dtype, dim, dim, 4, 2, MIXED, LONGER, causal=True, alibi=True)
    p = problem(case, "cuda")
    p = p._replace(slopes=torch.full_like(p.slopes, -0.5))
    exact, eager = reference(case, p, torch.float64), reference(case, p, dtype)
    for name, x, e, other in zip(("out", "lse", "dq", "dk", "dv"), run(case, p), exact, eager):
        assert (
            distance(x, e) < 2 * distance(other, e) + {f16: 2e-4, bf16: 1.6e-3, f32: 1e-5}[dtype]
        ), name


@pytest.mark.parametrize(
    "lengths", [(7,) * 10000, (131072, *(64,) * 255)], ids=["10000 rows", "one long row"]
)
def test_large_layouts(lengths):
    """Compare with the same rows computed alone."""
    from scree_triton.attention.interface import attention

    case = Case(bf16, 64, 64, 1, 1, lengths, causal=True)
    p = problem(case, "cuda")
    results = run(case, p)
    tail = Case(bf16, 64, 64, 1, 1, lengths[-40:], causal=True)
    n = sum(tail.q_lengths)
    part = p._replace(
        **{x: getattr(p, x)[-n:] for x in ("q", "k", "v", "dout", "dlse")},
        cu_q=offsets(tail.q_lengths, "cuda"),
        cu_k=offsets(tail.q_lengths, "cuda"),
    )
    for x, e in zip(results, reference(tail, part, torch.float64)):
        assert not x.isnan().any()
        assert distance(x[-n:], e) < 5e-3
    if len(lengths) < 1000:  # the long row's last queries
        q, k, v = (x[: lengths[0]] for x in (p.q, p.k, p.v))
        cu = offsets((64,), "cuda"), offsets((lengths[0],), "cuda")
        out, _ = attention(q[-64:], k, v, *cu, causal=True, scale=0.125)
        assert distance(results[0][: lengths[0]][-64:], out.double()) < 5e-3


@pytest.mark.parametrize("dtype, dim", [(f16, 64), (f16, 80), (f16, 160)])
def test_more_than_2_31_elements(dtype, dim):
    from scree_triton.attention.interface import attention

    length, heads = 1000, 128
    n = (1 << 31) // (heads * dim * length) + 2
    q = torch.empty((n * length, heads, dim), dtype=dtype, device="cuda").uniform_(-1, 1)
    cu = offsets((length,) * n, "cuda")
    out, lse = attention(
        q,
        q[:, :1],
        q[:, 1:2],
        cu,
        cu,
        causal=True,
        window=(50, None) if dim == 80 else (None, None),
        scale=0.125,
    )
    one = offsets((length,), "cuda")
    last = q[-length:]
    again, lse_again = attention(
        last,
        last[:, :1],
        last[:, 1:2],
        one,
        one,
        causal=True,
        window=(50, None) if dim == 80 else (None, None),
        scale=0.125,
    )
    assert torch.equal(out[-length:], again) and torch.equal(lse[-length:], lse_again)


@pytest.mark.parametrize("dim", [64, 80, 160])
def test_compiled(dim):
    from scree_triton.attention.interface import attention

    case = Case(bf16, dim, dim, 4, 2, LONG, causal=True)
    p = problem(case, "cuda")

    def loss(q, k, v, cu):
        out, lse = attention(q * 1.0, k, v, cu, cu, causal=True, scale=dim**-0.5)
        return (out * p.dout).sum() + (lse * p.dlse).sum()

    inputs = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    eager = torch.autograd.grad(loss(*inputs, p.cu_q), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs, p.cu_q), inputs)
    for x, y in zip(eager, compiled):
        assert distance(x, y.double()) < 1e-2


@pytest.mark.parametrize("lengths", [(20,) * 1000, (5000, 3), (5000,) + (20,) * 1000], ids=len)
def test_compiled_function_takes_the_tiles_of_eager_calls(lengths):
    """Short rows share tiles and long rows have their own, which differ in the last bits."""
    from scree_triton.attention.interface import attention

    case = Case(bf16, 64, 64, 4, 2, lengths, causal=True)
    p = problem(case, "cuda")

    def program(q, k, v):
        return attention(q, k, v, p.cu_q, p.cu_q, causal=True, scale=0.125, max_length=max(lengths))

    inputs = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    results = []
    for function in (program, torch.compile(program, fullgraph=True)):
        out = function(*inputs)
        results.append((*out, *torch.autograd.grad(out, inputs, (p.dout, p.dlse))))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dim", [64, 80])
def test_operator(dim):
    """The operators' fakes, autograd and schemas pass opcheck."""
    from scree_triton.attention.interface import attention_op, schedule_op
    from scree_triton.attention.tile_scheduler import UNBOUNDED

    p = problem(Case(f32 if dim == 80 else f16, dim, dim, 2, 1, (30, 0, 70)), "cuda")
    args = tuple(x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    kind = p.q.dtype, dim, dim
    tiles = schedule_op(p.cu_q, p.cu_k, p.q.shape[0], *kind, 0, UNBOUNDED, 0)
    constants = tiles, 70, UNBOUNDED, 0, 0.1, 0.0
    torch.library.opcheck(attention_op, (*args, None, None, p.cu_q, p.cu_k, *constants, 0))


@pytest.mark.parametrize("dim", [64, 80, 160])
def test_graph(dim):
    """Replay a captured graph on fresh inputs while eager calls run concurrently."""
    case = Case(bf16, dim, dim, 4, 2, LONG, causal=True)
    p = problem(case, "cuda")
    run(case, p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(case, p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(case, p)
    fresh = problem(case, "cuda", seed=1)
    for x, y in zip(p[:-1], fresh):
        x.copy_(y)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.replay()
    eager = run(case, fresh)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, eager))


@pytest.mark.parametrize("dim", [64, 160])
def test_graph_follows_offsets(dim):
    """A graph that makes its ragged array uses the offsets at the time of the replay."""
    import scree

    case = Case(f16, dim, dim, 2, 2, LONG, causal=True)
    p = problem(case, "cuda")

    def attend():
        q = scree.from_cu_seqlens(p.q, p.cu_q, max_length=sum(LONG))
        return scree.attention(
            q, q.with_values(p.k), q.with_values(p.v), causal=True, kernel="triton"
        ).values

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    p.cu_q.copy_(offsets(LONG[::-1], "cuda"))
    graph.replay()
    assert torch.equal(captured, attend())
    assert (
        distance(captured, reference(case._replace(q_lengths=LONG[::-1]), p, torch.float64)[0])
        < 1e-3
    )


def test_overlapping_launches():
    case = Case(bf16, 64, 64, 4, 2, LONG, causal=True)
    p = problem(case, "cuda")
    expected = run(case, p)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(run(case, p))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for result in results for x, y in zip(expected, result))
