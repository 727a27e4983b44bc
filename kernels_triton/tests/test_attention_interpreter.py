"""The portable attention kernels on a small fixed set; without a GPU in Triton's interpreter.

The kernels for Hopper are written in Gluon, which has no interpreter. This file tests which calls
they serve; `test_attention_gpu` tests their results on a Hopper GPU.
"""

import heapq
import importlib
import inspect
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_reference import Case, check_public_call, distance, offsets, problem, reference

import scree
import scree_triton
from scree_triton.attention import (
    arguments,
    autotune,
    interface,
    launch_configs,
    portable_config,
    sm90_configs,
    tile_configs,
    tile_scheduler,
)
from scree_triton.attention.base_config import count_heads_in_l2, raise_head_count
from scree_triton.attention.dkdv_splits import KeyTileWork, choose_splits, estimate_work
from scree_triton.attention.interface import attention
from scree_triton.attention.launch_configs import get_launch_config
from scree_triton.attention.metadata import (
    OTHER_ROWS,
    SHORT_ROWS,
    AttentionSpec,
    HeadLayout,
    VarlenLayout,
)
from scree_triton.attention.sum_splits import attention_sum_splits_kernel
from scree_triton.attention.tile_scheduler import UNBOUNDED, max_tiles, schedule_tiles
from scree_triton.runtime.device import Device
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

f16, f32 = torch.float16, torch.float32
DEVICE = "cpu" if INTERPRETED else "cuda"
# Three TF32 products keep about 21 bits; the interpreter multiplies in float32.
BOUND = {f32: 2e-6 if INTERPRETED else 1e-5, f16: 2e-3}
CASES = [
    Case(f32, 16, 16, 2, 1, (5, 0, 33, 70), causal=True),
    Case(f32, 24, 16, 2, 2, (5, 3, 33, 0), (7, 0, 90, 4)),
    Case(f16, 16, 32, 4, 2, (40, 1, 0, 9), (30, 8, 4, 40), causal=True, softcap=20.0),
    Case(f16, 16, 16, 2, 1, (40, 1, 0, 100), (30, 8, 4, 99), window=(10, 5)),
    Case(f32, 16, 16, 2, 1, (150, 2), (150, 40), causal=True, window=(17, None), softcap=5.0),
    Case(f32, 16, 16, 2, 2, (30, 0, 21), causal=True, packed=True),
    Case(f32, 16, 16, 1, 1, (30, 12), causal=True, slack=70),
    Case(f32, 16, 16, 2, 1, (40, 3), (33, 50), causal=True, alibi=True),
    Case(f32, 16, 16, 2, 2, (50, 0, 7), window=(9, 4), softcap=5.0, alibi=True),
    Case(f16, 16, 16, 1, 1, (0, 0), (3, 0)),
    Case(f32, 16, 16, 1, 1, (), (), causal=True),
]


DROPOUT_OPTIONS = [dict(), dict(causal=True, softcap=3.0, deterministic=True), dict(window=(9, 4))]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention_matches_float64(case):
    p = problem(case, DEVICE)
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
    )
    grads = torch.autograd.grad([out, lse], [q, k, v], [p.dout, p.dlse])
    assert out.is_contiguous() and lse.shape == out.shape[:2] and lse.dtype == torch.float32
    for name, x, exact in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), reference(case, p, torch.float64)
    ):
        assert distance(x, exact) < BOUND[case.dtype], name


@pytest.mark.parametrize(
    "options", [dict(window=(4, 6)), dict(causal=True, softcap=3.0, deterministic=True)], ids=str
)
def test_public_call_matches_standard_path(options):
    """The call has slopes and sinks, and gradients of the sinks and of the log-sum-exp."""
    check_public_call(DEVICE, f32, 16, options, BOUND[f32])


def test_attention_negative_slopes_matches_float64():
    """Weights then grow with the distance, but not where a tile ends after its row."""
    case = Case(f32, 16, 16, 2, 1, (40, 3), (33, 50), alibi=True)
    p = problem(case, DEVICE)
    p = p._replace(slopes=torch.full_like(p.slopes, -4))
    q, k, v = (x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    out, lse = attention(q, k, v, p.cu_q, p.cu_k, scale=0.25, alibi_slopes=p.slopes)
    grads = torch.autograd.grad([out, lse], [q, k, v], [p.dout, p.dlse])
    for name, x, exact in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), reference(case, p, torch.float64)
    ):
        assert distance(x, exact) < 4 * 50 * 2**-23, name  # scores are that large


@pytest.mark.parametrize("seed", [5, (1 << 40) + 3])
@pytest.mark.parametrize("options", DROPOUT_OPTIONS, ids=str)
def test_dropout_matches_standard_path(options, seed):
    """The kernels drop the same pairs as the standard path in float64, forward and backward."""
    check_public_call(DEVICE, f32, 16, dict(dropout=0.3, seed=seed, **options), BOUND[f32])


@pytest.mark.parametrize("options", DROPOUT_OPTIONS, ids=str)
def test_slopes_per_row_match_standard_path(options):
    check_public_call(DEVICE, f32, 16, options, BOUND[f32], slopes_per_row=True)


def test_dropout_operators_match_eager(monkeypatch):
    """The operators of compiled programs drop the same pairs, with slopes per row."""
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    q, k, v = (
        torch.randn((41, 2, 16), generator=generator, device=DEVICE, requires_grad=True)
        for _ in range(3)
    )
    cu, slopes = offsets((0, 33, 8), DEVICE), torch.rand((3, 2), generator=generator, device=DEVICE)

    def run():
        x = scree.from_cu_seqlens(q, cu, max_length=33)
        k_rows, v_rows = x.with_values(k), x.with_values(v)
        options = dict(causal=True, alibi_slopes=slopes, dropout=0.4, seed=7, kernel="triton")
        out = scree.attention(x, k_rows, v_rows, **options).values
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    eager = run()
    monkeypatch.setattr(interface, "uses_operators", lambda *values: True)
    assert all(map(torch.equal, run(), eager))


def test_dropout_of_repeated_call_depends_on_seed_alone():
    """Equal seeds give equal bits, also if the second call is prepared; other seeds do not."""
    scree_triton.register()
    x = scree.from_lengths(torch.randn((90, 2, 16), device=DEVICE), [50, 40])
    seeds = [torch.tensor([seed], device=DEVICE) for seed in (1, 1, 2)]
    a, b, c = (scree.attention(x, x, x, dropout=0.5, seed=s, kernel="triton").values for s in seeds)
    assert torch.equal(a, b) and not torch.equal(a, c)


CAUSAL = dict(
    has_left=False,
    has_right=True,
    causal=True,
    softcap=False,
    alibi=0,
    dropout=False,
    tma_aligned=True,
    same_offsets=True,
    tf32=False,
    batch_kind="usual",
    many_short_rows=False,
)


def test_sm90_tiles_few_large_tiles_keep_the_forward_of_narrow_parts():
    """Other heads take the tiles of few tiles."""
    large, medium, few, usual = (
        [tile_configs.sm90_tiles(2, x, x, kind) for x in (64, 96, 128)]
        for kind in ("few large tiles", "few medium tiles", "few tiles", "usual")
    )
    assert large[::2] == medium[::2] == few[::2]
    assert (large[1].forward, large[1].dq) == (usual[1].forward, few[1].dq)
    assert (medium[1].forward.block_m, medium[1].dq) == (128, few[1].dq)


def test_sm90_tiles_unaligned_heads_have_wide_parts():
    """TMA loads narrow parts of heads slowly that are no multiple of 32 bytes."""
    for kind in ("usual", "medium rows", "long rows", "few tiles", "few large tiles", "short rows"):
        assert tile_configs.sm90_tiles(2, 152, 152, kind).forward.wide_parts, kind
        assert tile_configs.sm90_tiles(2, 72, 72, kind).forward.wide_parts, kind
        aligned = tile_configs.sm90_tiles(2, 160, 160, kind).forward
        assert aligned.wide_parts == (kind == "medium rows"), kind
    assert not tile_configs.sm90_tiles(2, 80, 80, "few tiles").forward.wide_parts


def test_sm90_tiles_unaligned_heads_of_values_have_wide_parts():
    assert tile_configs.sm90_tiles(2, 160, 152).forward.wide_parts


@pytest.mark.parametrize(
    "block, parts, dim, expected",
    [
        (64, 1, 40, [64]),
        (32, 3, 72, [64, 16]),
        (32, 3, 96, [64, 32]),
        (64, 2, 80, [64, 16]),
        (64, 2, 88, [64, 32]),
        (32, 5, 144, [128, 16]),
        (64, 3, 136, [128, 16]),
        (64, 3, 160, [128, 32]),
        (64, 3, 192, [64, 64, 64]),
        (128, 2, 200, [128, 128]),
    ],
)
def test_product_widths_cover_the_head(block, parts, dim, expected):
    pipeline = importlib.import_module("scree_triton.sm90.pipeline")
    assert pipeline.product_widths(block, parts, dim) == expected


@pytest.mark.parametrize(
    "dim, change, expected",
    [
        (64, dict(same_offsets=False), True),
        (128, dict(same_offsets=False), True),
        (64, dict(), False),
        (64, dict(same_offsets=False, causal=False), False),
        (64, dict(same_offsets=False, has_left=True), False),
        (64, dict(same_offsets=False, batch_kind="long rows"), False),
        (128, dict(same_offsets=False, batch_kind="two long rows"), False),
        (80, dict(same_offsets=False, batch_kind="long rows"), True),
    ],
)
def test_select_config_on_hopper_skips_tiles_before_the_first_key(
    dim, change, expected, monkeypatch
):
    """Only causal rows whose queries and keys differ have tiles without keys."""
    hopper = Device("nvidia", (9, 0), 132, 232448, 50 << 20, (3, 6))
    for module in (launch_configs, portable_config, sm90_configs):
        monkeypatch.setattr(module, "device_info", lambda device: hopper)
    layouts = (HeadLayout(2, dim, 2 * dim, dim),) * 3
    config = launch_configs.select_config(
        torch.device("cuda", 0), torch.bfloat16, layouts, **{**CAUSAL, **change}
    )
    assert config.forward_launch.constants["SKIP_EMPTY"] == expected


@pytest.mark.parametrize(
    "head_dim, head_dim_v, expected",
    [(72, 72, True), (96, 96, True), (128, 96, False), (192, 192, True), (256, 256, False)],
)
def test_has_registers_for_queries_leaves_24_registers(head_dim, head_dim_v, expected):
    tile = tile_configs.sm90_tiles(2, head_dim, head_dim_v).forward
    assert tile_configs.has_registers_for_queries(tile, head_dim, head_dim_v) == expected


def test_sm90_forward_tiles_have_a_multiple_of_64_keys():
    """In causal rows, the kernel masks the last block of 64 queries only."""
    batches = [x for kinds in tile_configs.SM90_BATCH_TILES.values() for x in kinds.values()]
    usual = [tiles for (itemsize, *_), tiles in tile_configs.SM90_TILES.items() if itemsize == 2]
    assert {x.forward.block_n % 64 for x in (*usual, *batches)} == {0}


@pytest.mark.parametrize(
    "dtype, dims, change, expected",
    [
        *(
            (torch.float16, (dim, dim), {}, "Sm90Config")
            for dim in (24, 32, 64, 80, 96, 128, 136, 192, 256)
        ),
        *(
            (torch.float16, (dim, dim), dict(batch_kind="long rows"), "Sm90Config")
            for dim in (64, 128)
        ),
        *(
            (torch.bfloat16, dims, {}, "Sm90Config")
            for dims in ((192, 128), (128, 192), (64, 128), (40, 24), (256, 64))
        ),
        *(
            (torch.bfloat16, (64, 64), change, "Sm90Config")
            for change in (
                dict(has_right=False, causal=False),
                dict(has_left=True),
                dict(has_left=True, causal=False),
                dict(has_left=True, has_right=False, causal=False),
                dict(causal=False),
                dict(softcap=True),
                dict(alibi=1),
                dict(has_left=True, softcap=True, alibi=1),
                dict(same_offsets=False),
            )
        ),
        (torch.bfloat16, (96, 96), dict(many_short_rows=True), "Sm90MixedConfig"),
        *(
            (torch.float16, dims, {}, "PortableConfig")
            for dims in ((16, 16), (64, 16), (16, 64), (28, 28))
        ),
        (torch.float16, (64, 64), dict(tma_aligned=False), "PortableConfig"),
        *((dtype, (64, 64), dict(dropout=True), "PortableConfig") for dtype in (f16, f32)),
        *((dtype, (64, 64), dict(alibi=2), "PortableConfig") for dtype in (f16, f32)),
        *((f32, (dim, dim), {}, "Bf16x3Config") for dim in (32, 64)),
        *((f32, (dim, dim), {}, "PortableConfig") for dim in (16, 48, 128)),
        *(
            (f32, (64, 64), change, "Bf16x3Config")
            for change in (dict(has_left=True), dict(causal=False), dict(softcap=True, alibi=1))
        ),
        (f32, (64, 64), dict(tf32=True), "PortableConfig"),
    ],
    ids=str,
)
def test_select_config_on_hopper_returns_documented_kernels(
    dtype, dims, change, expected, monkeypatch
):
    """The documentation has the same table."""
    hopper = Device("nvidia", (9, 0), 132, 232448, 50 << 20, (3, 6))
    for module in (launch_configs, portable_config, sm90_configs):
        monkeypatch.setattr(module, "device_info", lambda device: hopper)
    layouts = tuple(HeadLayout(2, dim, 2 * dim, dim) for dim in (dims[0], *dims))
    config = launch_configs.select_config(
        torch.device("cuda", 0), dtype, layouts, **{**CAUSAL, **change}
    )
    assert type(config).__name__ == expected


@pytest.mark.parametrize(
    "lengths, others, heads, max_seqlen, cuts_queries, cuts_keys",
    [
        ((300,) * 200, None, (8, 8), 300, False, False),
        ((5000, *(30,) * 20), None, (1, 1), 5000, True, True),
        ((5000, *(30,) * 20), None, (1, 1), UNBOUNDED, False, False),
        ((8000, *(200,) * 40), (*(200,) * 40, 8000), (4, 2), 8000, True, True),
        ((4000, *(5,) * 900), None, (10, 1), 4000, False, True),
        ((0, 0), None, (1, 1), 10, False, False),
    ],
)
def test_sm90_config_cuts_tiles_of_uneven_rows(
    lengths, others, heads, max_seqlen, cuts_queries, cuts_keys, monkeypatch
):
    """Tiles are cut where the longest tile takes longer than the mean work, if the longest row is known."""
    hopper = Device("nvidia", (9, 0), 132, 232448, 50 << 20, (3, 6))
    for module in (launch_configs, portable_config, sm90_configs):
        monkeypatch.setattr(module, "device_info", lambda device: hopper)
    layouts = tuple(HeadLayout(x, 128, x * 128, 128) for x in (heads[0], heads[1], heads[1]))
    is_mixed = len(lengths) > 100 and lengths[1] < 64
    config = launch_configs.select_config(
        torch.device("cuda", 0),
        torch.bfloat16,
        layouts,
        **{**CAUSAL, "causal": False, "many_short_rows": is_mixed},
    )
    config = config.other if is_mixed else config
    cu = offsets(lengths, DEVICE)
    layout = VarlenLayout(cu, cu if others is None else offsets(others, DEVICE), None, max_seqlen)
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    totals = sum(lengths), sum(others or lengths)
    queries, keys = config._chunk_specs(layout, *totals, spec, 1)
    assert (queries is not None, keys is not None) == (cuts_queries, cuts_keys)


GROUPS = {
    "portable.attention_forward_kernel": "PortableForwardArgs PortableForwardStrides ForwardNumbers DropoutNumbers",
    "portable.attention_dq_kernel": "PortableDqArgs PortableDqStrides DqNumbers DropoutNumbers",
    "portable.attention_dkdv_kernel": "PortableDkdvArgs PortableDkdvStrides BackwardNumbers DropoutNumbers",
    "forward_sm90.attention_forward_sm90_kernel": "ForwardArgs ForwardStrides ForwardNumbers",
    "dq_sm90.attention_dq_sm90_kernel": "DqArgs DqStrides DqNumbers",
    "dkdv_sm90.attention_dkdv_sm90_kernel": "DkdvArgs DkdvStrides DkdvNumbers",
    "sum_splits.attention_sum_splits_kernel": "SumSplitsArgs",
    "sum_splits.attention_sum_chunks_kernel": "SumChunksArgs",
    "float32_sm90.attention_forward_float32_sm90_kernel": "Float32ForwardArgs Float32ForwardStrides ForwardNumbers",
    "float32_sm90.attention_dq_float32_sm90_kernel": "Float32DqArgs BackwardNumbers",
    "float32_sm90.attention_dkdv_float32_sm90_kernel": "Float32DkdvArgs BackwardNumbers",
    "bf16x3.attention_split_kernel": "SplitArgs",
    "bf16x3.attention_split_dout_kernel": "SplitDoutArgs",
}


@pytest.mark.parametrize("name", GROUPS)
def test_arguments_match_kernel_parameters(name):
    """Arguments, and the tuples of strides and numbers, are in the order of the parameters."""
    module, kernel = name.split(".")
    kernel = getattr(importlib.import_module(f"scree_triton.attention.{module}"), kernel)
    args, *groups = (getattr(arguments, group) for group in GROUPS[name].split())
    assert args.fields == tuple(kernel.arg_names[: len(args.fields)])
    parameters = list(inspect.signature(kernel.fn).parameters.values())
    assert "constexpr" in str(parameters[len(args.fields)].annotation)
    last = [field for group in groups for field in group._fields]
    assert args.fields[len(args.fields) - len(last) :] == tuple(last)


def test_get_launch_config_short_rows_selects_tiles(monkeypatch):
    """A known bound on the longest row selects tiles; many short rows share tiles."""
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(launch_configs, "select_config", lambda *args: args[-2:])
    monkeypatch.setattr(launch_configs, "MERGED_MEAN_SEQLEN", 20)
    monkeypatch.setattr(launch_configs, "MANY_ROWS", 100)
    spec = AttentionSpec(UNBOUNDED, 0, 0.25, 0.0)
    for heads, head_dim, rows, tokens, max_seqlen, expected in (
        (1, 16, 1, 40, 40, ("few tiles", False)),
        (1, 16, 1, 40, UNBOUNDED, ("usual", False)),
        (1, 16, 1, 40, 1601, ("usual", False)),
        (1, 16, 1, 40, 1602, ("few tiles", False)),
        (844, 16, 1, 40, 1602, ("few tiles", False)),
        (845, 16, 1, 40, 1602, ("usual", False)),
        (1, 136, 1, 40, 1602, ("medium rows", False)),
        (1, 160, 1, 40, 2048, ("medium rows", False)),
        (1, 160, 1, 40, 2049, ("usual", False)),
        (1, 168, 1, 40, 1602, ("usual", False)),
        (2000, 16, 1, 40, 192, ("short rows", False)),
        (2000, 16, 1, 40, 193, ("usual", False)),
        (2000, 16, 1, 129, 192, ("usual", False)),
        (50, 16, 2, 40, 40, ("few tiles", True)),
        (50, 16, 2, 40, UNBOUNDED, ("usual", False)),
        (50, 16, 2, 41, 41, ("few tiles", False)),
        (49, 64, 2, 40, 40, ("few tiles", False)),
        (17, 72, 2, 40, 40, ("few tiles", True)),
        (16, 72, 2, 40, 40, ("few tiles", False)),
        (7, 248, 2, 40, 40, ("few tiles", True)),
        (6, 248, 2, 40, 40, ("few tiles", False)),
        (2000, 16, 2, 40, 193, ("usual", True)),
    ):
        cu = offsets((tokens, *(0,) * (rows - 1)), DEVICE)
        layout = VarlenLayout(cu, cu, None, max_seqlen)
        x = torch.randn((tokens, 1, head_dim), device=DEVICE)
        values = [x.expand(tokens, heads, head_dim)] * 3
        assert get_launch_config(*values, layout, spec, False) == expected


def test_key_tiles_of_short_rows_are_query_tiles():
    """Queries and keys of the same rows share one schedule."""
    cu, spec = offsets((3, 5), DEVICE), AttentionSpec(4, 2, 0.25, 0.0)
    layout = VarlenLayout(cu, cu, {})
    for rows, is_shared in ((SHORT_ROWS, True), (OTHER_ROWS, False)):
        keys, queries = (f(8, 64, spec, rows) for f in (layout.key_tiles, layout.query_tiles))
        assert (keys is queries) == is_shared


@pytest.mark.parametrize(
    "lengths, max_seqlen, window_left, expected",
    [
        ((5000,), 5000, UNBOUNDED, True),
        ((5000,), UNBOUNDED, UNBOUNDED, False),
        ((5000,), 5000, 4000, False),
        ((4000,) * 3, 4000, UNBOUNDED, False),
        ((6000, *(31,) * 20), 6000, UNBOUNDED, True),
        ((6000, *(2000,) * 6), 6000, UNBOUNDED, False),
    ],
)
def test_get_launch_config_long_rows_selects_their_tiles(
    lengths, max_seqlen, window_left, expected, monkeypatch
):
    """The row of a mean pair of query and key must be known to have 4096 tokens."""
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(launch_configs, "select_config", lambda *args: args[-2])
    cu = offsets(lengths, DEVICE)
    values = [torch.empty((sum(lengths), 16, 16), device=DEVICE)] * 3
    spec = AttentionSpec(window_left, 0, 0.25, 0.0)
    layout = VarlenLayout(cu, cu, None, max_seqlen)
    expected_kind = "long rows" if expected else "usual"
    assert get_launch_config(*values, layout, spec, False) == expected_kind


@pytest.mark.parametrize(
    "lengths, heads, window, expected",
    [
        ((1773,), 18, (UNBOUNDED, 0), "few tiles"),
        ((1773,), 18, (UNBOUNDED, UNBOUNDED), "usual"),
        ((1773,), 32, (UNBOUNDED, 0), "usual"),
        ((8192,), 4, (UNBOUNDED, 0), "few tiles"),
        ((8192,), 5, (UNBOUNDED, 0), "long rows"),
        ((2645, *(8,) * 47), 10, (UNBOUNDED, 0), "few tiles"),
        ((2645, *(800,) * 47), 8, (UNBOUNDED, 0), "usual"),
        ((30129,), 12, (57, 0), "small window"),
        ((30129,), 12, (300, 82), "small window"),
        ((30129,), 12, (300, 83), "usual"),
        ((30129,), 12, (0, UNBOUNDED), "usual"),
        ((2300,), 4, (57, 0), "few tiles"),
        ((600, 180), 65, (UNBOUNDED, 0), "few large tiles"),
        ((600, 180), 32, (UNBOUNDED, 0), "few medium tiles"),  # 189 queries per SM
        ((600, 180), 21, (UNBOUNDED, 0), "few tiles"),  # 124 queries per SM
        ((600, *(100,) * 5), 40, (UNBOUNDED, 0), "few large tiles"),  # the mean row has 183 tokens
        ((600, *(30,) * 5), 40, (UNBOUNDED, 0), "few tiles"),  # the mean row has 125 tokens
    ],
)
def test_get_launch_config_few_tiles_depends_on_the_longest_tile(
    lengths, heads, window, expected, monkeypatch
):
    """A tile of the longest row takes longer than the work per SM."""
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(launch_configs, "select_config", lambda *args: args[-2])
    cu = offsets(lengths, DEVICE)
    values = [torch.empty((sum(lengths), 1, 16), device=DEVICE).expand(-1, heads, -1)] * 3
    layout, spec = VarlenLayout(cu, cu, None, max(lengths)), AttentionSpec(*window, 0.25, 0.0)
    assert get_launch_config(*values, layout, spec, False) == expected


def test_get_launch_config_two_long_rows_depends_on_the_offsets(monkeypatch):
    """One row has most queries and another one most keys, unless queries and keys share their rows."""
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(launch_configs, "select_config", lambda *args: args[-2])
    cu_q, cu_k = offsets((8000, 100, 100), DEVICE), offsets((100, 9000, 100), DEVICE)
    one_q, one_k = offsets((8000,), DEVICE), offsets((9000,), DEVICE)
    kinds = []
    for q_offsets, k_offsets, right in (
        (cu_q, cu_q, UNBOUNDED),
        (cu_q, cu_k, UNBOUNDED),
        (cu_q, cu_k, 0),
        (one_q, one_k, UNBOUNDED),
    ):
        q, k = (torch.empty((int(x[-1]), 1, 16), device=DEVICE) for x in (q_offsets, k_offsets))
        q, k = q.expand(-1, 12, -1), k.expand(-1, 12, -1)
        layout = VarlenLayout(q_offsets, k_offsets, None, 9000)
        spec = AttentionSpec(UNBOUNDED, right, 0.2, 0.0)
        kinds.append(get_launch_config(q, k, k, layout, spec, False))
    assert kinds == ["long rows", "two long rows", "long rows", "long rows"]


def test_sm90_tiles_two_long_rows_of_other_head_dims_are_long_rows():
    kinds = "long rows", "two long rows"
    assert len({tile_configs.sm90_tiles(2, 64, 64, kind) for kind in kinds}) == 1
    assert len({tile_configs.sm90_tiles(2, 128, 128, kind) for kind in kinds}) == 2


def test_count_short_rows_estimates_from_the_longest_row():
    assert tile_configs.count_short_rows(100, 3000, 39) == 100
    assert tile_configs.count_short_rows(37, 2994, 160) == pytest.approx(37 - (2994 - 1184) / 128)
    assert tile_configs.count_short_rows(1500, 117_000, 900) > 1400


def _count_pairs(lengths, causal):
    lengths = np.array(lengths, np.int64)
    return int((lengths * (lengths + 1) // 2 if causal else lengths**2).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_seqlen", [768, UNBOUNDED])
def test_estimate_work_equal_rows_counts_pairs(max_seqlen, causal):
    lengths, spec = (768,) * 20, AttentionSpec(UNBOUNDED, 0 if causal else UNBOUNDED, 1.0, 0.0)
    total = sum(lengths)
    work = estimate_work(len(lengths), max_seqlen, total, total, 128, spec)
    exact = _count_pairs(lengths, causal)
    # Padding: up to one block of 64 queries per tile, and rows are assumed uneven if unknown.
    assert exact <= work.total <= (1.3 if max_seqlen == 768 else 2) * exact
    assert work.longest >= 128 * 768
    assert work.tiles >= 6 * 20


def test_estimate_work_window_limits_queries_of_a_tile():
    spec = AttentionSpec(100, 0, 1.0, 0.0)
    work = estimate_work(1, 100_000, 100_000, 100_000, 128, spec)
    assert work.longest <= 128 * (101 + 128 + 64)
    assert 100_000 * 101 <= work.total <= 2 * 100_000 * 101


UNEVEN = (4001, 3001, 2503, 1709, 1301, 1009, 701, 499, 401, 211, 208)


def _simulate(pairs, group, k_heads, splits, dims, causal=True):
    """Return the seconds until 132 CTAs, which take the longest tile first, have computed dK, dV.

    `pairs` holds the number of queries and of keys of each row.
    """
    seconds = 4 * dims * 64 * 128 / 4.5e12  # per block of queries
    blocks = sorted(
        (
            -(-(min(q, k - first) if causal else q) // 64)
            for q, k in pairs
            for first in range(0, k, 128)
        ),
        reverse=True,
    )
    ends = [0.0] * 132
    for n in blocks:
        for _ in range(k_heads * splits):
            heapq.heapreplace(ends, ends[0] + 3e-6 + n * seconds * group / splits)
    sums = 4 * splits * sum(k for _, k in pairs) * k_heads * dims / 2.5e12
    return max(ends) + (3e-6 + sums if splits > 1 else 0)


@pytest.mark.parametrize("max_seqlen_known", [True, False])
@pytest.mark.parametrize(
    "lengths, group, k_heads, dims",
    [
        (UNEVEN, 8, 2, 256),
        (UNEVEN, 16, 1, 128),
        (UNEVEN, 4, 8, 256),
        ((300,) * 200, 8, 2, 256),
        ((60_000, *(31,) * 500), 8, 2, 128),
        ((2048,) * 16, 8, 2, 256),
        ((700, 900, 400, 1200), 16, 1, 128),
        ((64,) * 10, 4, 1, 256),
    ],
)
def test_choose_splits_is_near_the_best_of_a_simulated_schedule(
    lengths, group, k_heads, dims, max_seqlen_known
):
    total, spec = sum(lengths), AttentionSpec(UNBOUNDED, 0, 1.0, 0.0)
    bound = max(lengths) if max_seqlen_known else UNBOUNDED
    work = estimate_work(len(lengths), bound, total, total, 128, spec)
    splits = choose_splits(group, k_heads, total, total, dims, [work], 132)
    assert group % splits == 0
    pairs = [(n, n) for n in lengths]
    seconds = {
        s: _simulate(pairs, group, k_heads, s, dims) for s in range(1, group + 1) if group % s == 0
    }
    assert seconds[splits] <= 1.1 * min(seconds.values())


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("group, k_heads", [(4, 3), (16, 1), (2, 8)])
def test_choose_splits_second_estimate_is_near_the_best_wherever_the_long_rows_are(
    group, k_heads, aligned
):
    others, longest = (400,) * 60, 60_000
    q_lengths = (longest, *others)
    k_lengths = q_lengths if aligned else (*others, longest)
    total, spec = sum(q_lengths), AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    works = [estimate_work(61, longest, total, total, 128, spec, x) for x in (True, False)]
    splits = choose_splits(group, k_heads, total, total, 256, works, 132)
    pairs = list(zip(q_lengths, k_lengths, strict=True))
    seconds = {
        s: _simulate(pairs, group, k_heads, s, 256, causal=False)
        for s in range(1, group + 1)
        if group % s == 0
    }
    assert seconds[splits] <= 1.1 * min(seconds.values())


def test_choose_splits_second_estimate_bounds_partial_sums_by_the_queries():
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    splits = {}
    for total_k in (80_000, 160_000):
        works = [estimate_work(61, 60_000, 80_000, total_k, 128, spec, x) for x in (True, False)]
        splits[total_k] = choose_splits(8, 2, 80_000, total_k, 256, works, 132)
    assert splits[80_000] == 8
    assert splits[160_000] == 4


@pytest.mark.parametrize(
    "heads, limit, group, expected",
    [(16, 4, 1, 4), (14, 4, 1, 2), (14, 4, 7, 7), (32, 8, 4, 8), (12, 4, 3, 3), (16, 4, 16, 16)],
)
def test_count_heads_in_l2_keeps_heads_of_a_key_head_together(heads, limit, group, expected):
    assert count_heads_in_l2(heads, limit, group) == expected


def _simulate_heads(tiles, heads, count):
    """Return the end of the last of 132 CTAs relative to the mean, for so many heads at a time."""
    ends = [0.0] * 132
    for _ in range(heads // count):
        for keys in sorted(tiles, reverse=True):
            for _ in range(count):
                heapq.heapreplace(ends, ends[0] + keys)
    return max(ends) * 132 / (sum(tiles) * heads)


@pytest.mark.parametrize(
    "pairs, heads", [([(3049, 1345), (1493, 3197)], 25), ([(3000, 3000)], 40), ([(9000, 500)], 13)]
)
def test_raise_head_count_ends_within_an_eighth_of_the_mean(pairs, heads):
    total_q, total_k = (sum(x) for x in zip(*pairs, strict=True))
    longest, spec = max(map(max, pairs)), AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    works = [
        estimate_work(len(pairs), longest, total_k, total_q, 128, spec, x) for x in (True, False)
    ]
    count = raise_head_count(heads, 1, works, 132, longest * 256)
    assert heads % count == 0
    tiles = [k + 128 for q, k in pairs for _ in range(0, q, 128)]
    assert _simulate_heads(tiles, heads, count) <= 1.125


@pytest.mark.parametrize("heads, group", [(12, 3), (40, 5), (48, 6)])
def test_raise_head_count_keeps_heads_of_a_key_head_together(heads, group):
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    for length in (1000, 3000, 9000, 20_000):
        works = [estimate_work(1, length, length, length, 128, spec)]
        count = raise_head_count(heads, group, works, 132, length * 256 // group, group)
        assert heads % count == 0 and count % group == 0


def test_raise_head_count_many_rows_returns_count():
    spec = AttentionSpec(UNBOUNDED, 0, 1.0, 0.0)
    works = [estimate_work(64, 2048, 64 * 2048, 64 * 2048, 128, spec)]
    assert raise_head_count(16, 4, works, 132, 2048 * 256) == 4


def test_raise_head_count_heads_beyond_the_l2_cache_returns_count():
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    works = [estimate_work(1, 9000, 9000, 9000, 128, spec)]
    assert raise_head_count(47, 1, works, 132, 9000 * 256) == 1


def test_raise_head_count_one_tile_with_most_work_runs_all_heads_beyond_the_l2_cache():
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    works = [estimate_work(68, 100_000, 110_000, 110_000, 192, spec, aligned=False)]
    assert raise_head_count(12, 4, works, 132, 100_000 * 256 // 4) == 12


@pytest.mark.parametrize(
    "total_q, total_k, expected",
    [(10_000, 100_000, 16), (10_000, 400_000, 4), (200_000, 400_000, 8), (500_000, 400_000, 16)],
)
def test_choose_splits_bounds_the_bytes_of_partial_sums(total_q, total_k, expected):
    """One tile takes longer than all others, so the most splits are fastest."""
    work = KeyTileWork(1e12, 1e12, 1.0)
    assert choose_splits(16, 1, total_q, total_k, 128, [work], 132) == expected


def test_choose_splits_one_query_head_per_key_head_returns_one():
    work = estimate_work(1, 9000, 9000, 9000, 128, AttentionSpec(UNBOUNDED, 0, 1.0, 0.0))
    assert choose_splits(1, 4, 9000, 9000, 256, [work], 132) == 1


@pytest.mark.parametrize("num_splits, dim, dim_v", [(2, 24, 40), (4, 96, 64), (3, 32, 32)])
def test_sum_splits_kernel_adds_in_order(num_splits, dim, dim_v):
    """The sum is in float32, always in the order of the splits, and rounded once."""
    generator, rows, block = torch.Generator(device=DEVICE).manual_seed(0), 37, 128

    def draw(width):
        return torch.randn((rows, num_splits, width), generator=generator, device=DEVICE)

    dk_splits, dv_splits = draw(dim), draw(dim_v)
    dk, dv = (torch.full((rows, x), torch.nan, dtype=f16, device=DEVICE) for x in (dim, dim_v))
    blocks = sum(-(-rows * x // block) for x in (dim, dim_v))
    attention_sum_splits_kernel[(blocks,)](
        dk_splits, dv_splits, dk, dv, rows, num_splits, dim, dim_v, block, DEPENDENT=False
    )
    for splits, result in ((dk_splits, dk), (dv_splits, dv)):
        total = splits[:, 0].clone()
        for i in range(1, num_splits):
            total += splits[:, i]
        assert torch.equal(result, total.to(f16))


def test_get_launch_config_distinguishes_tf32(monkeypatch):
    """The setting is part of the cache key; the default is full precision."""
    x, cu = torch.randn((40, 1, 16), device=DEVICE), offsets((40,), DEVICE)
    configs = []
    for precision in ("highest", "high"):
        monkeypatch.setattr(
            torch, "get_float32_matmul_precision", lambda precision=precision: precision
        )
        spec = AttentionSpec(UNBOUNDED, 0, 0.25, 0.0)
        configs.append(get_launch_config(x, x, x, VarlenLayout(cu, cu, None), spec, False))
    assert [c.forward_launch.constants["PRECISION"] for c in configs] == ["tf32x3", "tf32"]


def test_autotune_measures_each_kind_once(monkeypatch, capsys, tmp_path):
    """The fastest tiles are printed and used from then on, also by a second process."""
    case = Case(f32, 16, 16, 1, 1, (9, 0, 20), causal=True)
    p = problem(case, DEVICE)
    measured = []

    # The interpreter has no clock: more queries and fewer stages count as faster.
    def measure(call, config):
        measured.append(config.tiles)
        return sum(
            -t.block_m + abs(t.block_n - 32) + t.num_stages + t.num_warps / 100
            for t in config.tiles
        )

    monkeypatch.setattr(launch_configs, "AUTOTUNE", True)
    monkeypatch.setattr(autotune, "milliseconds", measure)
    monkeypatch.setattr(autotune, "RESULTS", {})
    monkeypatch.setattr(launch_configs, "CONFIG_CACHE", {})
    monkeypatch.setattr(autotune.knobs.cache, "dir", str(tmp_path))
    for is_new_process in (False, False, True):
        if is_new_process:
            autotune.RESULTS.clear()
        layout, spec = VarlenLayout(p.cu_q, p.cu_k, None), AttentionSpec(UNBOUNDED, 0, 0.25, 0.0)
        config = get_launch_config(p.q, p.k, p.v, layout, spec, False)
        assert all(tile[:3] == (128, 32, 4) and tile.num_stages == 1 for tile in config.tiles)
        count = len(measured)
        launch_configs.CONFIG_CACHE.clear()
        assert count == len(measured)
    assert (
        len(list(tmp_path.glob("scree/*.json"))) == 1
        and capsys.readouterr().out.count(f"(4, 32): {config.tiles!r},  # torch.float32, right")
        == 1
    )


PROCESS = """
import sys, time, torch
from triton import knobs
from scree_triton.attention import autotune, tile_configs
knobs.cache.dir = sys.argv[1]
tiles = tile_configs.portable_tiles((8, 0), 4, 32)
def measure(*args):
    time.sleep(1)
    return tiles._replace(dq=tiles.dq._replace(num_warps=int(sys.argv[2])))
autotune._measure = measure
x = torch.zeros(1)
print("tiles", autotune.autotune_tiles((4, 32), None, tiles, x, x, x, None, None, False))
"""


def test_autotune_in_two_processes_at_once_gives_one_choice(tmp_path):
    """As in the ranks of a program: one measures, the other waits and reads."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(warps)], stdout=subprocess.PIPE
        )
        for warps in (4, 8)
    ]
    outputs = [process.communicate()[0].decode() for process in processes]
    choices = {re.search("^tiles .*", output, re.MULTILINE)[0] for output in outputs}
    assert len(choices) == 1
    assert sum("measured on" in output for output in outputs) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(scale=-1.0), "positive scale"),
        (dict(alibi_slopes=torch.ones(2, device=DEVICE, requires_grad=True)), "slopes"),
        (dict(width=300), "head_dim 16 to 256"),
        (dict(dtype=torch.float64), "float16, bfloat16 and float32"),
        (dict(strided=True), "contiguous"),
    ],
)
def test_rejects_unsupported_call_returns_reason(change, reason):
    """Every rejection gives its reason, and the standard path serves the call."""
    change = dict(change)
    width, dtype = change.pop("width", 16), change.pop("dtype", f32)
    values = torch.zeros((5, 2, width), dtype=dtype, device=DEVICE)
    if change.pop("strided", False):
        values = torch.zeros((5, width, 2), device=DEVICE).transpose(1, 2)
    x = scree.from_lengths(values, [2, 3])
    scree_triton.register()
    assert reason in scree.explain("attention", x, x, x, **change).rejected["triton"]


@pytest.mark.parametrize(
    "lengths, slack", [((300, 0, 64, 1, 129), 0), ((1,) * 40, 7), ((), 0), ((0, 0), 65)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_counted", [2048, 0])
def test_schedule_tiles_covers_all_tokens_longest_first(
    lengths, slack, causal, max_counted, monkeypatch
):
    """The schedule is the same whether slots are counted or sorted."""
    monkeypatch.setattr("scree_triton.attention.tile_scheduler.MAX_COUNTED_SLOTS", max_counted)
    cu = offsets(lengths, DEVICE)
    total = sum(lengths) + slack
    tiles = schedule_tiles(cu, cu, total, 64, UNBOUNDED, 0 if causal else UNBOUNDED)
    count = int(tiles[0, 0])
    assert tiles.shape[0] == max_tiles(total, len(lengths), 64) + 1
    tail = (sum(lengths), slack)
    rows = [*zip(cu.tolist(), lengths), tail]
    expected = {(start, n, first) for start, n in rows for first in range(0, n, 64)}
    scheduled = [(start, n, first) for start, n, _, _, first, *_ in tiles[1 : count + 1].tolist()]
    assert len(scheduled) == count and set(scheduled) == expected
    assert all(
        other == (0 if (start, n) == tail and slack else n)
        for start, n, _, other, *_ in tiles[1 : count + 1].tolist()
    )
    work = [
        0 if (start, n) == tail else min(first + 64, n) if causal else n
        for start, n, first in scheduled
    ]
    assert all(a // 32 >= b // 32 for a, b in zip(work, work[1:]))


def merge_rows(rows):
    """Return the groups of rows that share a tile of 64 tokens and attended tokens, by a loop.

    `rows` holds offset, length, offset of the attended row and its length.
    """
    groups = []
    for i, (start, length, attended, attended_length) in enumerate(rows):
        if i % 64 > 0 and max(groups[-1][1] + length, groups[-1][3] + attended_length) <= 64:
            groups[-1][1] += length
            groups[-1][3] += attended_length
        else:
            groups.append([start, length, attended, attended_length])
    return [(*x,) for x in groups if x[1] > 0 and max(x[1], x[3]) <= 64]


@pytest.mark.parametrize(
    "lengths, slack",
    [
        ((300, 0, 64, 1, 129, 0, 0, 20, 44, 1), 0),
        ((1,) * 200, 7),
        ((0, 0), 65),
        (tuple(random.Random(1).choices(range(40), k=3000)), 3),
        ((0, 63, 1, 65, 64, 0, 64, 64), 0),
    ],
    ids=["mixed", "ones", "empty", "short", "limits"],
)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("max_counted", [2048, 0])
@pytest.mark.parametrize("kernels", [True, False])
def test_schedule_tiles_short_rows_share_tiles(
    lengths, slack, same, max_counted, kernels, monkeypatch
):
    """One schedule has the rows up to 64 tokens and the tail, the other one the longer rows."""
    monkeypatch.setattr(tile_scheduler, "MAX_COUNTED_SLOTS", max_counted)
    attended_lengths = lengths if same else lengths[::-1]
    cu, other, total = (
        offsets(lengths, DEVICE),
        offsets(attended_lengths, DEVICE),
        sum(lengths) + slack,
    )
    rows = [*zip(cu.tolist(), lengths, other.tolist(), attended_lengths)]
    short = merge_rows(rows) if kernels else [x for x in rows if x[1] > 0 and max(x[1], x[3]) <= 64]
    long = [x for x in rows if max(x[1], x[3]) > 64]
    tail = (sum(lengths), slack, 0, 0)
    schedule = schedule_tiles if kernels else tile_scheduler._schedule_by_rows
    merged = schedule(cu, other, total, 64, UNBOUNDED, 0, 0, True)
    for tiles, size, expected in (
        (merged, 64, [*short, tail]),
        (schedule(cu, other, total, 128, UNBOUNDED, 0, 65), 128, long),
    ):
        entries = [(*x, i) for x in expected for i in range(0, x[1], size)]
        count = int(tiles[0, 0])
        assert sorted((*x[:5],) for x in tiles[1 : count + 1].tolist()) == sorted(entries)
    attended = merged.flatten()[int(merged[0, 1]) :][: 3 * total].reshape(3, total).T
    assert [*map(tuple, attended.tolist())] == [
        (first, first + length, first + length - n + i)
        for _, n, first, length in (*rows, tail)
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "version, dtype, dim, expected",
    [
        ((3, 6), torch.float16, 64, None),
        ((3, 9), torch.float16, 64, None),
        (
            (3, 10),
            torch.float16,
            64,
            "tested with Triton 3.6 to 3.9, not 3.10; portable kernels run",
        ),
        ((3, 6), torch.float16, 20, "multiples of 8 from 24 to 256 here, not 20"),
        ((3, 6), torch.float32, 128, "head_dim 32 or 64 here, not 128"),
    ],
)
def test_explain_says_why_no_hopper_kernel_runs(version, dtype, dim, expected, monkeypatch):
    hopper = Device("nvidia", (9, 0), 132, 232448, 50 << 20, version)
    for module in (launch_configs, interface):
        monkeypatch.setattr(module, "device_info", lambda device: hopper)
    arr = scree.from_lengths(torch.zeros((3, 2, dim), dtype=dtype, device=DEVICE), [1, 2])
    explanation = scree.explain("attention", arr, arr, arr)
    assert explanation.provider == "triton"
    assert (explanation.note is None) if expected is None else expected in str(explanation)
