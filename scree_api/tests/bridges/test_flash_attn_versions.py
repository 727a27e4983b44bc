"""The functions of FlashAttention 2, 3 and 4 against float64 loops over sequences."""

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scree.bridges import flash_attn
from scree.bridges.flash_attn import bert_padding, installation, v2, v3, v4

F64 = torch.float64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def integers(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    left: float = torch.inf,
    right: float = torch.inf,
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one sequence, (length, heads, dim), and its lse (heads, length)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))[None, :]
    if slopes is not None:
        score = score - slopes[:, None, None] * (key - at).abs()
    hidden = (key < at - left) | (key > at + right)
    if chunk:
        hidden |= key // chunk != torch.div(at, chunk, rounding_mode="floor")
    score = score.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks[:, None, None].expand(-1, len(q), 1)
        weight = torch.softmax(torch.cat([score, extra], -1), -1)[..., :-1]
        lse = torch.logsumexp(torch.cat([score, extra], -1), -1)
    else:
        weight, lse = torch.nan_to_num(torch.softmax(score, -1)), torch.logsumexp(score, -1)
    return torch.einsum("hqk,khd->qhd", weight, v), lse


def attend_batch(
    q: Any, k: Any, v: Any, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outs, lses = zip(
        *(attend(a, b, c, **options) for a, b, c in zip(q, k, v, strict=True)), strict=True
    )
    return list(outs), list(lses)


def check_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal is 1": ({"causal": 1}, {"right": 0}),
    "window": ({"window_size": (3, 1)}, {"left": 3, "right": 1}),
    "window of a tensor": ({"window_size": torch.tensor([2, -1])}, {"left": 2}),
    "scale of a tensor": ({"softmax_scale": torch.tensor(0.3, dtype=F64)}, {"scale": 0.3}),
    "softcap": ({"softcap": 1.5, "causal": True}, {"softcap": 1.5, "right": 0}),
}


# ---------------------------------------------------------------- dense
@pytest.mark.parametrize("module", [v2, v3], ids=["v2", "v3"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("len_q, len_k, kv_heads", [(5, 9, 2), (9, 5, 4), (1, 70, 1), (3, 0, 4)])
def test_flash_attn_func_agrees_with_loop(
    module: Any, case: str, len_q: int, len_k: int, kv_heads: int
) -> None:
    arguments, options = CASES[case]
    q, k, v = (
        draw(3, len_q, 4, 8),
        draw(3, len_k, kv_heads, 8, seed=1),
        draw(3, len_k, kv_heads, 8, seed=2),
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected, lses = (torch.stack(x) for x in attend_batch(q, k, v, **options))
    out, lse, *rest = module.flash_attn_func(q, k, v, **arguments, return_attn_probs=True)
    check_equal(out, expected)
    check_equal(lse, lses)
    assert rest == ([None] if module is v2 else [])
    weight = draw(*out.shape, seed=3)
    check = (torch.autograd.grad((x * weight).sum(), inputs) for x in (out, expected))
    for actual, peer in zip(*check, strict=True):
        check_equal(actual, peer)
    check_equal(module.flash_attn_func(q, k, v, **arguments), expected)


def test_flash_attn_func_empty_batch_returns_empty() -> None:
    q = draw(0, 5, 4, 8)
    assert v2.flash_attn_func(q, q, q).shape == (0, 5, 4, 8)
    out, lse, _ = v2.flash_attn_func(
        draw(2, 0, 4, 8), *[draw(2, 3, 4, 8)] * 2, return_attn_probs=True
    )
    assert (out.shape, lse.shape) == ((2, 0, 4, 8), (2, 4, 0))


def test_packed_functions_agree_with_unpacked() -> None:
    qkv, cu = draw(2, 6, 3, 4, 8), integers(0, 4, 4, 12)
    q, k, v = qkv.unbind(2)
    expected = v2.flash_attn_func(q, k, v, causal=True)
    check_equal(v2.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    check_equal(v2.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    check_equal(v3.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    mixed = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    check_equal(
        v3.flash_attn_qkvpacked_func(mixed, num_heads_q=4),
        v2.flash_attn_func(q, k[:, :, :2], v[:, :, :2]),
    )
    flat = qkv.flatten(0, 1)
    q, k, v = flat.unbind(1)
    expected = torch.cat(attend_batch(*(x.split([4, 0, 8]) for x in (q, k, v)))[0])
    check_equal(v2.flash_attn_varlen_qkvpacked_func(flat, cu, 8), expected)
    check_equal(v2.flash_attn_varlen_kvpacked_func(q, flat[:, 1:], cu, cu, 8, 8), expected)


def test_packed_functions_wrong_shape_raises() -> None:
    with pytest.raises(ValueError, match=r"^qkv: expected shape \(\.\.\., 3,"):
        v2.flash_attn_qkvpacked_func(draw(2, 6, 2, 4, 8))
    with pytest.raises(ValueError, match=r"^kv: expected a tensor"):
        v2.flash_attn_kvpacked_func(draw(2, 6, 4, 8), draw(2, 6, 4, 8))
    with pytest.raises(ValueError, match=r"^num_heads_q: expected to leave"):
        v3.flash_attn_qkvpacked_func(draw(2, 6, 7, 8), num_heads_q=4)
    with pytest.raises(ValueError, match=r"^num_heads_q: expected a number"):
        v3.flash_attn_qkvpacked_func(draw(2, 6, 7, 8))
    with pytest.raises(ValueError, match=r"^q: expected a tensor"):
        v2.flash_attn_func(*[draw(6, 4, 8)] * 3)
    with pytest.raises(ValueError, match=r"^k: expected 2 sequences as q"):
        v2.flash_attn_func(draw(2, 6, 4, 8), *[draw(3, 6, 4, 8)] * 2)
    with pytest.raises(ValueError, match=r"^v: expected shape"):
        v2.flash_attn_func(draw(2, 6, 4, 8), draw(2, 6, 4, 8), draw(2, 5, 4, 8))
    with pytest.raises(ValueError, match=r"^window_size: expected"):
        v2.flash_attn_func(*[draw(2, 6, 4, 8)] * 3, window_size=(1, 2, 3))


# ---------------------------------------------------------------- sequences of different lengths
def test_varlen_tail_and_zero_dimensional_bounds_are_accepted() -> None:
    q, cu, longest = draw(9, 4, 8), integers(0, 4, 4, 7), torch.tensor(4)
    expected = torch.cat(attend_batch(*[q[:7].split([4, 0, 3])] * 3, right=0)[0])
    for module in (v2, v3):
        out = module.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True)
        check_equal(out[:7], expected)
        assert out.shape == q.shape


@pytest.mark.parametrize("case", CASES)
def test_varlen_block_table_agrees_with_loop(case: str) -> None:
    arguments, options = CASES[case]
    lengths_q, lengths_k = [3, 0, 1, 4], [7, 5, 0, 4]
    pages, table = make_pages(lengths_k, width=2, size=4)
    k, v = pages
    q = draw(8, 4, 8)
    cu_q, cu_k = integers(0, 3, 3, 4, 8), integers(0, 7, 12, 12, 16)
    out, lse, _ = v2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 4, 7, **arguments, block_table=table, return_attn_probs=True
    )
    keys, values = (tokens(x, table, lengths_k) for x in (k, v))
    outs, lses = attend_batch(q.split(lengths_q), keys, values, **options)
    check_equal(out, torch.cat(outs))
    check_equal(lse, torch.cat(lses, 1))


@pytest.mark.parametrize("used_q", [None, [2, 0, 3]])
@pytest.mark.parametrize("used_k", [None, [5, 1, 0]])
@pytest.mark.parametrize("module", [v3, v4], ids=["v3", "v4"])
def test_seqused_agrees_with_loop(
    module: Any, used_q: list[int] | None, used_k: list[int] | None
) -> None:
    lengths_q, lengths_k = [3, 0, 4], [6, 3, 2]
    q, k, v = draw(8, 4, 8), draw(11, 2, 8, seed=1), draw(11, 2, 8, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = integers(0, 3, 3, 7), integers(0, 6, 9, 11)
    names = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 4, "max_seqlen_k": 6}
    used = {
        name: None if x is None else integers(*x)
        for name, x in (("seqused_q", used_q), ("seqused_k", used_k))
    }
    flag = {"return_attn_probs": True} if module is v3 else {"return_lse": True}
    out, lse = module.flash_attn_varlen_func(q, k, v, causal=True, **names, **used, **flag)
    expected, sums = torch.zeros(8, 4, 8, dtype=F64), torch.full((4, 8), -torch.inf, dtype=F64)
    for i in range(3):
        n_q = lengths_q[i] if used_q is None else min(used_q[i], lengths_q[i])
        n_k = lengths_k[i] if used_k is None else used_k[i]
        rows, keys = slice(cu_q[i], cu_q[i] + n_q), slice(cu_k[i], cu_k[i] + n_k)
        expected[rows], sums[:, rows] = attend(q[rows], k[keys], v[keys], right=0)
    check_equal(out[:7], expected[:7])
    check_equal(lse[:, :7], sums[:, :7])
    weight = draw(7, 4, 8, seed=3)
    check = (torch.autograd.grad((x[:7] * weight).sum(), inputs) for x in (out, expected))
    for actual, peer in zip(*check, strict=True):
        check_equal(actual, peer)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_chunk_agrees_with_loop(chunk: int, causal: bool) -> None:
    lengths_q, lengths_k = [3, 0, 6, 9, 2], [10, 3, 2, 9, 0]
    q, k, v = draw(20, 4, 8), draw(24, 2, 8, seed=1), draw(24, 2, 8, seed=2)
    cu_q, cu_k = integers(0, 3, 3, 9, 18, 20), integers(0, 10, 13, 15, 24, 24)
    out, lse = v3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 10, causal=causal, attention_chunk=chunk, return_attn_probs=True
    )
    parts = q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
    outs, lses = attend_batch(*parts, chunk=chunk, right=0 if causal else torch.inf)
    check_equal(out, torch.cat(outs))
    check_equal(lse, torch.cat(lses, 1))


def test_attention_chunk_negative_raises() -> None:
    with pytest.raises(ValueError, match=r"^attention_chunk: expected 0 or"):
        v3.flash_attn_func(*[draw(1, 2, 4, 8)] * 3, attention_chunk=-1)


def test_qv_is_added_to_the_scores() -> None:
    q, k, v, qv = (
        draw(2, 5, 4, 8),
        draw(2, 7, 2, 8, seed=1),
        draw(2, 7, 2, 6, seed=2),
        draw(2, 5, 4, 6),
    )
    both = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    expected = torch.stack(attend_batch(*both, v, scale=14**-0.5)[0])
    check_equal(v3.flash_attn_func(q, k, v, qv=qv), expected)
    check_equal(v4.flash_attn_func(q, k, v, qv)[0], expected)
    with pytest.raises(ValueError, match=r"^qv: expected shape"):
        v3.flash_attn_func(q, k, v, qv=q)


def test_descale_multiplies_eight_bit_inputs() -> None:
    q, k, v = draw(2, 5, 4, 16), draw(2, 7, 2, 16, seed=1), draw(2, 7, 2, 16, seed=2)
    narrow = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    scales = [torch.tensor([[0.5, 2.0], [1.0, 0.25]]) * s for s in (1, 2, 3)]
    out = v3.flash_attn_func(*narrow, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert out.dtype == torch.bfloat16
    wide = [x.to(F64) for x in narrow]
    wide[0] = wide[0] * scales[0].repeat_interleave(2, 1)[:, None, :, None]
    wide[1], wide[2] = (x * s[:, None, :, None] for x, s in zip(wide[1:], scales[1:], strict=True))
    expected = torch.stack(attend_batch(*wide)[0])
    torch.testing.assert_close(out.to(F64), expected, atol=0.06, rtol=0.03)
    with pytest.raises(ValueError, match=r"^k_descale: expected shape"):
        v3.flash_attn_func(*narrow, k_descale=torch.ones(2, 3))


def test_combine_of_split_keys_is_attention_to_all() -> None:
    q, k, v = draw(2, 5, 4, 8), draw(2, 7, 4, 8, seed=1), draw(2, 7, 4, 8, seed=2)
    ranges = (slice(0, 3), slice(3, 7))
    parts = [v3.flash_attn_func(q, k[:, i], v[:, i], return_attn_probs=True) for i in ranges]
    outs, lses = (
        torch.stack([x for x, _ in parts]),
        torch.stack([x.transpose(1, 2) for _, x in parts]),
    )
    expected, sums = (torch.stack(x) for x in attend_batch(q, k, v))
    out, lse = v3.flash_attn_combine(outs, lses)
    check_equal(out, expected)
    check_equal(lse, sums.transpose(1, 2))
    target = torch.empty(2, 5, 4, 8)
    assert v3.flash_attn_combine(outs, lses, target, torch.float32)[0] is target
    torch.testing.assert_close(target, expected.float())
    with pytest.raises(TypeError, match=r"^out: expected dtype"):
        v3.flash_attn_combine(outs, lses, target)
    with pytest.raises(ValueError, match=r"^lse_partial: expected shape"):
        v3.flash_attn_combine(outs, lses[:1])
    with pytest.raises(ValueError, match=r"^out_partial: expected shape"):
        v3.flash_attn_combine(outs[:0], lses[:0])


def test_learnable_sink_agrees_with_loop() -> None:
    q, k, v = draw(2, 5, 4, 8), draw(2, 3, 2, 8, seed=1), draw(2, 3, 2, 8, seed=2)
    sinks = draw(4, seed=3).requires_grad_()
    out, lse = v4.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks, return_lse=True)
    expected, sums = (torch.stack(x) for x in attend_batch(q, k, v, right=0, sinks=sinks))
    check_equal(out, expected)
    check_equal(lse, sums)
    actual, peer = (torch.autograd.grad((x * q).sum(), sinks)[0] for x in (out, expected))
    check_equal(actual, peer)
    assert v4.flash_attn_func(q, k, v)[1] is None


def test_v4_page_table_agrees_with_loop() -> None:
    lengths = [7, 0, 3]
    (k, v), table = make_pages(lengths, width=2, size=4)
    q = draw(3, 2, 4, 8)
    out, _ = v4.flash_attn_varlen_func(
        q, k, v, seqused_k=integers(*lengths), page_table=table, window_size=(4, 0)
    )
    keys, values = (tokens(x, table, lengths) for x in (k, v))
    check_equal(out, torch.stack(attend_batch(q, keys, values, left=4, right=0)[0]))
    with pytest.raises(ValueError, match=r"^seqused_k: expected"):
        v4.flash_attn_varlen_func(q, k, v, page_table=table)


@pytest.mark.parametrize(
    "name",
    [
        "score_mod",
        "mask_mod",
        "block_sparse_tensors",
        "gather_kv_indices",
        "block_sparse_tensors_bwd",
    ],
)
def test_v4_unsupported_argument_raises(name: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=f"^{name.removesuffix('_bwd')}: FlashAttention 4 .*flex_attention$",
    ):
        v4.flash_attn_func(*[draw(1, 2, 4, 8)] * 3, **{name: object()})


# ---------------------------------------------------------------- caches
def make_pages(
    lengths: list[int], width: int, size: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return caches of unsorted pages and a table whose unused entries are invalid."""
    order = torch.randperm(len(lengths) * width + 2, generator=torch.Generator().manual_seed(5))
    table = order[: len(lengths) * width].reshape(len(lengths), width).to(torch.int32)
    for row, n in zip(table, lengths, strict=True):
        row[-(-n // size) :] = -1
    return [draw(len(order), size, 2, 8, seed=s) for s in (6, 7)], table


def tokens(pages: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Return the cached tokens of each sequence."""
    size = pages.shape[1]
    return [
        torch.stack([pages[table[i, j // size], j % size] for j in range(n)])
        if n
        else pages.new_zeros(0, *pages.shape[2:])
        for i, n in enumerate(lengths)
    ]


def turn(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate one head with complex numbers: pair i by ``angle[i]``."""
    n = 2 * len(angle)
    a, b = (x[..., :n:2], x[..., 1:n:2]) if interleaved else (x[..., : n // 2], x[..., n // 2 : n])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.cat([torch.stack([z.real, z.imag], -1).flatten(-2), x[..., n:]], -1)
    return torch.cat([z.real, z.imag, x[..., n:]], -1)


@pytest.mark.parametrize("kind", ["plain", "batch_idx", "leftpad", "pages"])
@pytest.mark.parametrize("case", ["full", "causal is 1", "window", "softcap"])
@pytest.mark.parametrize(
    "new, interleaved", [(None, False), (3, None), (2, False), (3, True)], ids=str
)
@pytest.mark.parametrize("module", [v2, v3], ids=["v2", "v3"])
def test_kvcache_agrees_with_loop(
    module: Any, kind: str, case: str, new: int | None, interleaved: bool | None
) -> None:
    arguments, options = CASES[case]
    lengths, batch, capacity, len_q = [6, 0, 9], 3, 12, 3
    ends = [n + (new or 0) for n in lengths]
    table = batch_idx = leftpad = None
    if kind == "pages":
        (k_cache, v_cache), table = make_pages(ends, width=3, size=4)
    else:
        k_cache, v_cache = draw(5, capacity, 2, 8, seed=6), draw(5, capacity, 2, 8, seed=7)
    if kind == "batch_idx":
        batch_idx = integers(4, 0, 2)
    if kind == "leftpad":
        leftpad = integers(2, 0, 5)
    q = draw(batch, len_q, 4, 8)
    k = None if new is None else draw(batch, new, 2, 8, seed=1)
    v = None if new is None else draw(batch, new, 2, 8, seed=2)
    angle = draw(capacity, 3, seed=3)
    rotary = {}
    if interleaved is not None and new:
        rotary = {
            "rotary_cos": angle.cos(),
            "rotary_sin": angle.sin(),
            "rotary_interleaved": interleaved,
        }
    caches = [x.clone() for x in (k_cache, v_cache)]

    # The reference appends and rotates token by token.
    rows = [0, 1, 2] if batch_idx is None else [4, 0, 2]
    queries = q.clone()
    for i, n in enumerate(lengths):
        for j in range(new or 0):
            at = (rows[i], n + j) if table is None else (table[i, (n + j) // 4], (n + j) % 4)
            caches[0][at] = turn(k[i, j], angle[n + j], interleaved) if rotary else k[i, j]
            caches[1][at] = v[i, j]
        if rotary:
            is_local = bool(options.keys() & {"left", "right"})
            for j in range(len_q):
                queries[i, j] = turn(q[i, j], angle[n + j if is_local else n], interleaved)
    if table is None:
        keys, values = ([x[r, :n] for r, n in zip(rows, ends, strict=True)] for x in caches)
    else:
        keys, values = (tokens(x, table, ends) for x in caches)
    if leftpad is not None:
        keys, values = ([x[p:] for x, p in zip(y, leftpad, strict=True)] for y in (keys, values))
    expected, sums = (torch.stack(x) for x in attend_batch(queries, keys, values, **options))

    out, lse, *rest = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        **rotary,
        cache_seqlens=integers(*lengths),
        cache_batch_idx=batch_idx,
        cache_leftpad=leftpad,
        **{"block_table" if module is v2 else "page_table": table},
        **arguments,
        return_softmax_lse=True,
    )
    check_equal(out, expected)
    check_equal(lse, sums)
    check_equal(k_cache, caches[0])
    check_equal(v_cache, caches[1])
    assert rest == ([] if module is v2 else [None, None])


def test_kvcache_number_of_tokens_and_whole_cache() -> None:
    q, cache = draw(2, 1, 4, 8), draw(2, 6, 2, 8, seed=1)
    for length in (4, torch.tensor(4)):
        out = v2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
        check_equal(out, torch.stack(attend_batch(q, cache[:, :4], cache[:, :4])[0]))
    out = v2.flash_attn_with_kvcache(q, cache, cache)
    check_equal(out, torch.stack(attend_batch(q, cache, cache)[0]))


def test_kvcache_strided_cache_is_written_in_place() -> None:
    both = torch.zeros(2, 2, 6, 8, 2, dtype=F64)
    k_cache, v_cache = both.permute(0, 1, 2, 4, 3).unbind(1)
    new = draw(2, 1, 2, 8)
    v2.flash_attn_with_kvcache(draw(2, 1, 4, 8), k_cache, v_cache, new, new, cache_seqlens=2)
    assert torch.equal(both[:, 0, 2], new[:, 0].mT)
    assert both[:, :, 3:].abs().sum() == 0


@pytest.mark.parametrize("chunk", [0, 4])
def test_kvcache_packed_queries_and_new_keys(chunk: int) -> None:
    lengths, news, lengths_q = [6, 0, 9], [2, 1, 0], [2, 1, 0]
    ends = [a + b for a, b in zip(lengths, news, strict=True)]
    (k_cache, v_cache), table = make_pages(ends, width=3, size=4)
    q, k, v, cu = draw(3, 4, 8), draw(3, 2, 8, seed=1), draw(3, 2, 8, seed=2), integers(0, 2, 3, 3)
    out, lse, *_ = v3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=integers(*lengths),
        page_table=table,
        cu_seqlens_q=cu,
        cu_seqlens_k_new=cu,
        max_seqlen_q=2,
        causal=True,
        attention_chunk=chunk,
        return_softmax_lse=True,
    )
    for i, part in enumerate(k.split(news)):
        stored = tokens(k_cache, table, ends)[i]
        assert torch.equal(stored[lengths[i] :], part)
    keys, values = (tokens(x, table, ends) for x in (k_cache, v_cache))
    outs, lses = attend_batch(q.split(lengths_q), keys, values, right=0, chunk=chunk)
    check_equal(out, torch.cat(outs))
    check_equal(lse, torch.cat(lses, 1))


def test_kvcache_rotary_seqlens_shifts_the_positions() -> None:
    q, new, cache = draw(1, 1, 2, 8), draw(1, 1, 2, 8, seed=1), draw(1, 6, 2, 8, seed=2)
    angle = draw(9, 4, seed=3)
    k_cache, v_cache = cache.clone(), cache.clone()
    out = v3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        new,
        new,
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        cache_seqlens=3,
        rotary_seqlens=integers(7),
        rotary_interleaved=False,
        causal=True,
    )
    keys = torch.cat([cache[0, :3], turn(new[0], angle[7], False)])
    values = torch.cat([cache[0, :3], new[0]])
    check_equal(out[0], attend(turn(q[0], angle[7], False), keys, values)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotary_of_one_new_token(causal: bool, interleaved: bool) -> None:
    """A single query is at the position of the new key, with and without a mask."""
    lengths, angle = [3, 0, 5], draw(9, 3, seed=3).requires_grad_()  # partial: 6 of 8 elements
    q, new, cache = draw(3, 1, 4, 8), draw(3, 1, 2, 8, seed=1), draw(3, 6, 2, 8, seed=2)
    k_cache, v_cache = cache.clone(), cache.clone()
    out = v2.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, new, new, angle.cos(), angle.sin(), integers(*lengths)),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    for i, n in enumerate(lengths):
        turned_q, turned_k = (turn(x[i, 0], angle[n].detach(), interleaved) for x in (q, new))
        keys, values = torch.cat([cache[i, :n], turned_k[None]]), torch.cat([cache[i, :n], new[i]])
        check_equal(k_cache[i, n], turned_k)
        check_equal(out[i], attend(turned_q[None], keys, values)[0])


def test_kvcache_wrong_arguments_raise() -> None:
    q, cache, new = draw(2, 1, 4, 8), draw(2, 6, 2, 8), draw(2, 1, 2, 8)
    table, angle = torch.zeros(2, 1, dtype=torch.int32), draw(3, 4)
    call = v2.flash_attn_with_kvcache

    def check(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            call(q, cache.clone(), cache.clone(), *args, **kwargs)

    check("^cache_seqlens: expected lengths with new keys", new, new)
    check("^v: expected new values", new, cache_seqlens=1)
    check("^k: expected new keys with rotary_cos", rotary_cos=angle, rotary_sin=angle)
    check("^rotary_sin: expected both", new, new, rotary_cos=angle, cache_seqlens=1)
    check("^rotary_cos: expected at least 4 rows", new, new, angle, angle, cache_seqlens=3)
    check("^rotary_cos: expected 1 to 4 columns", new, new, draw(9, 5), draw(9, 5), 3)
    check("^cache_seqlens: expected shape", cache_seqlens=integers(1, 2, 3))
    check(
        "^cache_batch_idx: expected None with block_table",
        cache_batch_idx=table[:, 0],
        block_table=table,
    )
    check("^block_table: expected shape", block_table=table[:1])
    check("^cache_leftpad: expected shape", cache_leftpad=integers(0))
    with pytest.raises(ValueError, match=r"^k_cache: expected at least 2 sequences"):
        call(q, cache[:1], cache[:1])
    with pytest.raises(ValueError, match=r"^v_cache: expected shape"):
        call(q, cache, cache[:, :5])


@pytest.mark.parametrize("module, table_name", [(v2, "block_table"), (v3, "page_table")])
@pytest.mark.parametrize("lengths", [7, integers(2, 7)], ids=str)
@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("is_paged", [False, True])
def test_kvcache_sequence_longer_than_its_pages_raises(
    module: Any, table_name: str, lengths: Any, has_new: bool, is_paged: bool
) -> None:
    q, cache, new = draw(2, 1, 4, 8), draw(2, 6, 2, 8), draw(2, 1, 2, 8)
    options: dict[str, Any] = {"cache_seqlens": lengths - int(has_new)}
    if has_new:
        options |= {"k": new, "v": new}
    if is_paged:
        options[table_name] = torch.tensor([[0], [1]], dtype=torch.int32)
    before = cache.clone()
    match = rf"^cache_seqlens: expected at most 6 tokens .* {table_name}, got 7 for sequence [01]"
    with pytest.raises(RuntimeError, match=match):
        module.flash_attn_with_kvcache(q, cache, cache, **options)
    assert torch.equal(cache, before)


def test_kvcache_has_no_gradient() -> None:
    q, cache = draw(2, 1, 4, 8).requires_grad_(), draw(2, 6, 2, 8).requires_grad_()
    assert not v2.flash_attn_with_kvcache(q, cache, cache).requires_grad


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_dense_and_cache_functions_compile_without_graph_breaks(window: tuple[int, int]) -> None:
    q, cache, lengths = draw(2, 3, 4, 8), draw(2, 6, 2, 8), integers(3, 2)

    def run(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        new, k_cache, v_cache = q[:, :, :2], cache.clone(), cache.clone()
        first = v2.flash_attn_func(q, cache, cache, window_size=window)
        return first + v2.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=lengths, window_size=window
        )

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    check_equal(compiled(q, cache, lengths), run(q, cache, lengths))


def test_get_scheduler_metadata_is_accepted() -> None:
    q, cache, lengths = draw(2, 1, 4, 8), draw(2, 6, 2, 8), integers(3, 4)
    metadata = v3.get_scheduler_metadata(2, 1, 6, 4, 2, 8, lengths)
    call = v3.flash_attn_with_kvcache
    out = call(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata, num_splits=2)
    assert torch.equal(out, call(q, cache, cache, cache_seqlens=lengths))


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_emb_agrees_with_complex_numbers(interleaved: bool) -> None:
    x, angle = draw(2, 3, 4, 8), draw(9, 3, seed=1)
    tables = angle.cos(), angle.sin()
    expected = torch.stack(
        [
            torch.stack([turn(x[i, j], angle[4 * i + j], interleaved) for j in range(3)])
            for i in range(2)
        ]
    )
    emb = flash_attn.apply_rotary_emb
    check_equal(emb(x, *tables, interleaved, seqlen_offsets=integers(0, 4)), expected)
    packed = emb(x.flatten(0, 1), *tables, interleaved, False, integers(0, 4), integers(0, 3, 6), 3)
    check_equal(packed, expected.flatten(0, 1))
    first = x.clone()
    assert emb(first, *tables, interleaved, True, integers(0, 4)) is first
    check_equal(first, expected)


@pytest.mark.parametrize("kind", ["parameter", "unbind", "result"])
def test_apply_rotary_emb_inplace_has_the_gradient_of_the_copy(kind: str) -> None:
    angle, weight, results = draw(5, 4), draw(2, 5, 3, 8, seed=1), []
    for inplace in (False, True):
        leaf = draw(2, 2, 5, 3, 8, seed=2)
        leaf = (leaf[0] if kind == "parameter" else leaf).requires_grad_()
        x = leaf if kind == "parameter" else (leaf * 1).unbind()[0]
        x = x * 1 if kind == "result" else x
        out = flash_attn.apply_rotary_emb(x, angle.cos(), angle.sin(), inplace=inplace)
        assert (out.data_ptr() == x.data_ptr()) == inplace
        (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
        results.append((out.detach(), gradient))
    assert all(map(torch.equal, *results))


# ---------------------------------------------------------------- bert_padding
def test_unpad_input_and_pad_input_are_inverse() -> None:
    x = draw(3, 4, 2).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    packed, indices, cu, longest, used = flash_attn.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 8]
    assert (cu.tolist(), cu.dtype, longest, used.tolist()) == (
        [0, 3, 3, 4],
        torch.int32,
        3,
        [2, 0, 1],
    )
    padded = flash_attn.pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * (mask + unused)[..., None])
    (gradient,) = torch.autograd.grad((padded * 2).sum(), x)
    assert torch.equal(gradient, 2.0 * (mask + unused)[..., None].expand_as(x))
    packed, indices, cu, longest, used = flash_attn.unpad_input(x[:0], mask[:0])
    assert (len(packed), cu.tolist(), longest) == (0, [0], 0)


def test_bert_padding_wrong_shapes_raise() -> None:
    x, mask = draw(3, 4, 2), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"^attention_mask: expected shape"):
        flash_attn.unpad_input(x, mask[:, :3])
    with pytest.raises(ValueError, match=r"^unused_mask: expected shape"):
        flash_attn.unpad_input(x, mask, mask[:2])
    with pytest.raises(ValueError, match=r"^hidden_states: expected shape"):
        flash_attn.unpad_input(x[0, 0], mask)
    with pytest.raises(ValueError, match=r"^indices: expected shape"):
        flash_attn.pad_input(x, integers(0), 3, 4)
    with pytest.raises(ValueError, match=r"^input: expected at least two axes"):
        flash_attn.index_first_axis(x[0, 0], integers(0))
    with pytest.raises(ValueError, match=r"^indices: expected one axis"):
        flash_attn.index_first_axis(x, integers(0)[None])
    with pytest.raises(ValueError, match=r"^values: expected at least two axes"):
        bert_padding.index_put_first_axis(x[0, 0], integers(0), 3)


# ---------------------------------------------------------------- installation
@pytest.fixture
def no_installation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    saved = {name: x for name, x in sys.modules.items() if name.startswith("flash_attn")}
    for name in saved:
        del sys.modules[name]
    monkeypatch.setattr(installation, "_installed", {})
    yield
    for name in [x for x in sys.modules if x.startswith("flash_attn")]:
        del sys.modules[name]
    sys.modules.update(saved)


@pytest.mark.usefixtures("no_installation")
def test_install_makes_modules_importable() -> None:
    flash_attn.install(force=True)
    installed = sys.modules["flash_attn"]
    import flash_attn as package
    import flash_attn_interface
    from flash_attn.bert_padding import unpad_input
    from flash_attn.cute import flash_attn_func as func_4
    from flash_attn.flash_attn_interface import flash_attn_with_kvcache
    from flash_attn.layers.rotary import apply_rotary_emb

    assert package.flash_attn_func is v2.flash_attn_func
    assert package.__version__.startswith("2.")
    assert flash_attn_interface.flash_attn_func is v3.flash_attn_func
    assert func_4 is v4.flash_attn_func
    assert flash_attn_with_kvcache is v2.flash_attn_with_kvcache
    assert unpad_input is bert_padding.unpad_input
    assert apply_rotary_emb is flash_attn.apply_rotary_emb
    assert importlib.util.find_spec("flash_attn") is not None
    flash_attn.install()
    assert sys.modules["flash_attn"] is installed


@pytest.mark.usefixtures("no_installation")
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
def test_install_beside_the_original_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(sys)(name)
    monkeypatch.setitem(sys.modules, name, original)
    with pytest.raises(ImportError, match=f"^force: expected True to replace {name}"):
        flash_attn.install()
    assert sys.modules[name] is original
    flash_attn.install(force=True)
    assert sys.modules[name] is not original
