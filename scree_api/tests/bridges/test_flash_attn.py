"""Drop-in functions of FlashAttention and PyTorch against a float64 loop over sequences."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from ragged_cases import assert_as_accurate
from torch.nn.attention.varlen import AuxRequest

import scree
from scree.bridges import flash_attn
from scree.bridges.flash_attn import flash_attn_varlen_func
from scree.bridges.varlen import varlen_attn, varlen_attn_out

SLOPES = 0.5 ** torch.arange(1.0, 5.0, dtype=torch.float64)
Q, K = [5, 0, 3, 70, 1], [9, 4, 3, 70, 0]
ROW_SLOPES = SLOPES * torch.arange(1.0, len(Q) + 1, dtype=SLOPES.dtype)[:, None]


def make_inputs(
    heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(total: int, heads: int) -> torch.Tensor:
        return torch.randn(total, heads, 16, generator=generator, dtype=dtype).requires_grad_()

    cu = [torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32) for lengths in (Q, K)]
    return draw(sum(Q), heads), draw(sum(K), kv_heads), draw(sum(K), kv_heads), *cu, max(Q), max(K)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float = 0.25,
    left: float = np.inf,
    right: float = np.inf,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    k_lengths: list[int] = K,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with a loop over sequences and full score matrices."""
    outs, sums = [], []
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    parts = zip(q.split(Q), k.split(k_lengths), v.split(k_lengths), strict=True)
    for row, (a, b, c) in enumerate(parts):
        score = torch.einsum("qhd,khd->hqk", a, b) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        position = torch.arange(max(len(a), len(b)), device=a.device)
        distance = position[None, : len(b)] - position[: len(a), None] - (len(b) - len(a))
        if slopes is not None:
            slope = slopes if slopes.ndim == 1 else slopes[row]
            score = score - slope[:, None, None] * distance.abs()
        score = score.masked_fill((distance < -left) | (distance > right), -torch.inf)
        sums.append(torch.logsumexp(score, -1).T)
        outs.append(torch.einsum("hqk,khd->qhd", torch.nan_to_num(torch.softmax(score, -1)), c))
    return torch.cat(outs), torch.cat(sums)


CASES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"right": 0}),
    "scale": ({"softmax_scale": 0.1}, {"scale": 0.1}),
    "window": ({"window_size": (3, 2)}, {"left": 3, "right": 2}),
    "causal window": ({"causal": True, "window_size": (6, 4)}, {"left": 6, "right": 0}),
    "left": ({"window_size": (6, -1)}, {"left": 6}),
    "softcap": ({"softcap": 2.0, "causal": True}, {"softcap": 2.0, "right": 0}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "right": 0}),
    "alibi per sequence": ({"alibi_slopes": ROW_SLOPES}, {"slopes": ROW_SLOPES}),
    "deterministic": ({"deterministic": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_flash_attn_agrees_with_the_reference(case: str, kv_heads: int) -> None:
    arguments, reference_options = CASES[case]
    q, k, v, *rest = make_inputs(kv_heads=kv_heads)
    out, lse, probabilities = flash_attn_varlen_func(
        q, k, v, *rest, **arguments, return_attn_probs=True
    )
    expected, sums = reference_attention(q, k, v, **reference_options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums.T)
    assert probabilities is None
    torch.testing.assert_close(flash_attn_varlen_func(q, k, v, *rest, **arguments), expected)
    weight = torch.rand_like(out)
    actual = torch.autograd.grad((out * weight).sum(), (q, k, v))
    peer = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    torch.testing.assert_close(actual, peer)


@pytest.mark.parametrize(
    "window, reference_options",
    [((-1, -1), {}), ((-1, 0), {"right": 0}), ((5, 0), {"left": 5, "right": 0})],
)
def test_varlen_attn_agrees_with_the_reference(
    window: tuple[int, int], reference_options: dict[str, float]
) -> None:
    q, k, v, *rest = make_inputs(kv_heads=2)
    out, lse = varlen_attn(
        q,
        k,
        v,
        *rest,
        window_size=window,
        scale=0.3,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    expected, sums = reference_attention(q, k, v, scale=0.3, **reference_options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    is_finite = torch.isfinite(sums)
    actual = torch.autograd.grad(lse[is_finite].sum(), (q, k))  # PyTorch itself lacks this gradient
    peer = torch.autograd.grad(sums[is_finite].sum(), (q, k))
    torch.testing.assert_close(actual, peer)


def test_varlen_attn_without_cu_seq_k_uses_cu_seq_q() -> None:
    q, _, _, cu, _, longest, _ = make_inputs()
    assert torch.equal(
        varlen_attn(q, q, q, cu, None, longest, longest),
        varlen_attn(q, q, q, cu, cu, longest, longest),
    )


def test_layout_is_cached_until_cu_seqlens_changes() -> None:
    q, k, v, cu_q, cu_k, *longest = make_inputs()
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)
    layout = flash_attn.ragged_array(q, cu_q, longest[0]).layout
    assert layout.cache
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)
    assert flash_attn.ragged_array(q, cu_q, longest[0]).layout is layout
    cu_q[1] = 0
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu_q.clone(), cu_k, *longest))
    with torch.inference_mode():
        assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu_q.clone(), cu_k, *longest))


@pytest.mark.parametrize("function", [flash_attn_varlen_func, varlen_attn])
def test_functions_compile_without_graph_breaks(function: Any) -> None:
    arguments = make_inputs(dtype=torch.float32)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), function(*arguments))


DROPOUT_CASES = {
    name: CASES[name] for name in ("causal", "window", "softcap", "alibi per sequence")
}


def with_weights(case: str, dropout: float) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, output, log-sum-exp and signed weights of a call with dropout."""
    inputs = make_inputs(kv_heads=2)
    arguments, _ = DROPOUT_CASES[case]
    torch.manual_seed(3)
    return inputs, *flash_attn_varlen_func(
        *inputs, dropout_p=dropout, **arguments, return_attn_probs=True
    )


@pytest.mark.parametrize("case", DROPOUT_CASES)
def test_flash_attn_dropout_agrees_with_its_weights(case: str) -> None:
    """The output is the product of the values and the weights that are not negative."""
    (q, k, v, *_), out, lse, weights = with_weights(case, 0.3)
    _, sums = reference_attention(q, k, v, **DROPOUT_CASES[case][1])
    torch.testing.assert_close(lse, sums.T)
    start = start_k = 0
    for row, (a, b) in enumerate(zip(Q, K, strict=True)):
        values = v[start_k : start_k + b].repeat_interleave(2, 1)
        signed = weights[row, :, :a, :b]
        total = signed.abs().sum(-1, keepdim=True).clamp(min=1e-300)
        # The probability of dropout is rounded to a multiple of 2**-16.
        kept = signed.clamp(min=0) / total / (1 - round(0.3 * 2**16) / 2**16)
        expected = torch.einsum("hqk,khd->qhd", kept, values)
        torch.testing.assert_close(out[start : start + a], expected)
        start, start_k = start + a, start_k + b
    seen = weights[weights != 0]
    assert abs(float((seen < 0).double().mean()) - 0.3) < 4 * (0.21 / len(seen)) ** 0.5
    assert not weights[:, :, max(Q) :].any() and not weights[1].any()


def test_flash_attn_dropout_draws_from_the_generator_of_pytorch() -> None:
    (_, first, *_), (_, second, *_) = (with_weights("causal", 0.3) for _ in range(2))
    q, k, v, *rest = make_inputs(kv_heads=2)
    other = flash_attn_varlen_func(q, k, v, *rest, dropout_p=0.3, causal=True)
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("packed", ["qkv", "kv", "none"])
def test_flash_attn_dense_dropout_agrees_with_varlen(packed: str) -> None:
    q, k, v = (torch.randn(2, 30, 4, 16, dtype=torch.float64) for _ in range(3))
    cu = torch.tensor([0, 30, 60], dtype=torch.int32)
    torch.manual_seed(3)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    expected = flash_attn_varlen_func(*flat, cu, cu, 30, 30, 0.2, return_attn_probs=True)
    torch.manual_seed(3)
    if packed == "qkv":
        qkv = torch.stack((q, k, v), 2)
        out = flash_attn.flash_attn_qkvpacked_func(qkv, 0.2, return_attn_probs=True)
    elif packed == "kv":
        kv = torch.stack((k, v), 2)
        out = flash_attn.flash_attn_kvpacked_func(q, kv, 0.2, return_attn_probs=True)
    else:
        out = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
    torch.testing.assert_close(out[0].flatten(0, 1), expected[0])
    torch.testing.assert_close(out[2], expected[2])


def test_flash_attn_dropout_compiles_without_graph_breaks() -> None:
    inputs = make_inputs(dtype=torch.float32)
    compiled = torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)
    results = []
    for function in (flash_attn_varlen_func, compiled):
        torch.manual_seed(1)
        results.append(function(*inputs, dropout_p=0.5, causal=True))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dropout", [1.0, -0.1, 2.0])
def test_flash_attn_invalid_dropout_raises(dropout: float) -> None:
    with pytest.raises(ValueError, match=r"dropout_p: expected a probability in \[0, 1\)"):
        flash_attn_varlen_func(*make_inputs(), dropout_p=dropout)


def test_flash_attn_dropout_with_a_paged_cache_raises() -> None:
    q, _, _, cu, *_ = make_inputs()
    cache, table = torch.zeros(4, 16, 4, 16, dtype=q.dtype), torch.zeros(5, 8, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="dropout_p: attention with block_table"):
        flash_attn_varlen_func(
            q, cache, cache, cu, cu, max(Q), max(Q), dropout_p=0.1, block_table=table
        )


def test_varlen_attn_invalid_arguments_raise() -> None:
    q, k, v, cu_q, cu_k, *longest = make_inputs()
    table, used = torch.zeros((5, 1), dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    pages = k[None].detach()
    with pytest.raises(ValueError, match="key: expected 4 heads"):
        varlen_attn(*make_inputs(kv_heads=2))
    with pytest.raises(ValueError, match=r"seqused_k: expected .* with block_table, got None"):
        varlen_attn(q.detach(), pages, pages, cu_q, None, *longest, block_table=table)
    with pytest.raises(ValueError, match="block_table: expected tensors that need no gradient"):
        varlen_attn(q, pages, pages, cu_q, None, *longest, block_table=table, seqused_k=used)
    with pytest.raises(ValueError, match=r"seqused_k: expected shape \(5,\)"):
        varlen_attn(q, k, v, cu_q, cu_k, *longest, seqused_k=used[:4])
    with pytest.raises(ValueError, match="out: expected shape"):
        varlen_attn_out(q[:3], q, k, v, cu_q, cu_k, *longest)
    with pytest.raises(TypeError, match=r"out: expected dtype torch\.float64 as query"):
        varlen_attn_out(torch.empty(q.shape), q, k, v, cu_q, cu_k, *longest)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("used", [None, [7, 0, 3, 41, 0]])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_varlen_attn_seqused_k_and_num_splits_agree_with_loop(
    num_splits: int | None, used: list[int] | None, needs_grad: bool
) -> None:
    q, k, v, cu_q, cu_k, *longest = make_inputs(kv_heads=2)
    if not needs_grad:
        q, k, v = (x.detach() for x in (q, k, v))
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32)
    options = {"enable_gqa": True, "window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
    options |= {"seqused_k": lengths, "num_splits": num_splits}
    out, lse = varlen_attn(q, k, v, cu_q, cu_k, *longest, **options)
    kept = [torch.arange(n) < m for n, m in zip(K, used or K, strict=True)]
    keys, values = (x[torch.cat(kept)] for x in (k, v))
    expected, sums = reference_attention(q, keys, values, right=0, k_lengths=used or K)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    if needs_grad:
        actual = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(actual, torch.autograd.grad(expected.sum(), (q, k, v)))


@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_attn_out_of_pages_agrees_with_loop(num_splits: int | None) -> None:
    q, k, v, cu_q, cu_k, *longest = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in make_inputs(kv_heads=2)
    )
    size, width = 4, 18
    order = torch.randperm(5 * width, generator=torch.Generator().manual_seed(1))
    table = order.reshape(5, width).to(torch.int32)
    pages = torch.full((2, 5 * width, size, 2, 16), torch.nan, dtype=torch.float64)
    for row, (start, length) in enumerate(zip(cu_k.tolist(), K, strict=False)):
        for i in range(length):
            for side, x in zip(pages, (k, v), strict=True):
                side[table[row, i // size], i % size] = x[start + i]
    arguments = {"seqused_k": cu_k.diff(), "block_table": table, "num_splits": num_splits}
    out = torch.empty_like(q)
    result, lse = varlen_attn_out(
        *(out, q, *pages, cu_q, None, *longest),
        **arguments,
        enable_gqa=True,
        window_size=(5, 0),
        return_aux=AuxRequest(lse=True),
    )
    expected, sums = reference_attention(q, k, v, left=5, right=0)
    assert result is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    alone = varlen_attn(
        *(q, *pages, cu_q, None, *longest), **arguments, enable_gqa=True, window_size=(5, 0)
    )
    assert torch.equal(alone, out)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_attn_empty_batch_returns_no_tokens(num_splits: int | None) -> None:
    q, cu = torch.ones(0, 2, 8), torch.zeros(1, dtype=torch.int32)
    out, lse = varlen_attn(
        q, q, q, cu, cu, 0, 0, num_splits=num_splits, return_aux=AuxRequest(lse=True)
    )
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


def test_flash_attn_invalid_offsets_raise() -> None:
    q, k, v, cu_q, cu_k, *longest = make_inputs()
    with pytest.raises(ValueError, match="offsets"):
        flash_attn_varlen_func(q, k, v, cu_q - 1, cu_k, *longest)
    with pytest.raises(ValueError, match="max_length: expected at least 70"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 70)
    slopes = SLOPES.repeat(len(Q) + 1, 1)
    with pytest.raises(ValueError, match=rf"alibi_slopes: expected shape \({len(Q)}, 4\)"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, alibi_slopes=slopes)
    with pytest.raises(ValueError, match=r"alibi_slopes: expected shape \(4,\)"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, alibi_slopes=SLOPES[:3])


@pytest.mark.parametrize("function", [varlen_attn, varlen_attn_out])
def test_varlen_attn_has_the_signature_of_torch(function: Any) -> None:
    from torch.nn.attention import varlen

    original = getattr(varlen, function.__name__, varlen.varlen_attn)
    actual, peer = (inspect.signature(x).parameters for x in (function, original))
    for name, parameter in peer.items():  # an older torch has fewer parameters
        assert (actual[name].kind, actual[name].default) == (parameter.kind, parameter.default)
    assert [name for name in actual if name in peer] == list(peer)


# ---------------------------------------------------------------- on a device
def on_device(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor on CUDA with a head_dim of 64, rounded to `dtype`."""
    return x.detach().repeat(1, 1, 4).to("cuda", dtype).requires_grad_()


def forward_and_gradients(
    out: torch.Tensor, inputs: list[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out, inputs, weight.to(out.dtype))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kv_heads", [(torch.float16, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("case", ["full", "causal", "scale", "window", "causal window", "left"])
def test_flash_attn_is_as_accurate_as_aten(case: str, dtype: torch.dtype, kv_heads: int) -> None:
    arguments, reference_options = CASES[case]
    causal, scale, (left, right) = (
        arguments.get("causal", False),
        arguments.get("softmax_scale", 0.125),
        arguments.get("window_size", (-1, -1)),
    )
    *qkv, cu_q, cu_k, longest_q, longest_k = make_inputs(kv_heads=kv_heads)
    q, k, v = (on_device(x, dtype) for x in qkv)
    cu_q, cu_k = cu_q.cuda(), cu_k.cuda()
    actual, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q,
        cu_k,
        longest_q,
        longest_k,
        **{"softmax_scale": scale, **arguments},
        return_attn_probs=True,
    )
    groups = q.shape[1] // kv_heads
    peer, peer_lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k.repeat_interleave(groups, 1),
        v.repeat_interleave(groups, 1),
        cu_q,
        cu_k,
        longest_q,
        longest_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else right,
    )
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, sums = reference_attention(*exact_inputs, **{"scale": scale, **reference_options})
    weight = torch.randn_like(exact)
    results = [
        forward_and_gradients(*x, weight)
        for x in ((actual, [q, k, v]), (peer, [q, k, v]), (exact, exact_inputs))
    ]
    for actual, peer, exact in zip(*results, strict=True):
        assert_as_accurate(actual, peer, exact)
    is_finite = torch.isfinite(sums.T)
    assert lse.shape == peer_lse.shape
    assert torch.equal(torch.isfinite(lse), is_finite)
    assert_as_accurate(lse[is_finite], peer_lse[is_finite], sums.T[is_finite])
    arrays = (scree.Array(x, cu, max_length=70) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
    assert scree.explain("attention", *arrays).provider == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
def test_varlen_attn_is_as_accurate_as_torch(window: tuple[int, int]) -> None:
    from torch.nn.attention import varlen

    *qkv, cu_q, cu_k, longest_q, longest_k = make_inputs()
    inputs = [on_device(x, torch.bfloat16) for x in qkv]
    rest = cu_q.cuda(), cu_k.cuda(), longest_q, longest_k
    aux = varlen.AuxRequest(lse=True)
    actual, lse = varlen_attn(*inputs, *rest, window_size=window, scale=0.2, return_aux=aux)
    peer, peer_lse = varlen.varlen_attn(
        *inputs, *rest, window_size=window, scale=0.2, return_aux=aux
    )
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact, sums = reference_attention(
        *exact_inputs,
        scale=0.2,
        left=np.inf if window[0] < 0 else window[0],
        right=np.inf if window[1] < 0 else window[1],
    )
    weight = torch.randn_like(exact)
    results = [
        forward_and_gradients(*x, weight)
        for x in ((actual, inputs), (peer, inputs), (exact, exact_inputs))
    ]
    for actual, peer, exact in zip(*results, strict=True):
        assert_as_accurate(actual, peer, exact)
    is_finite = torch.isfinite(sums)
    assert_as_accurate(
        lse[is_finite],
        (peer_lse if peer_lse.shape == lse.shape else peer_lse.T)[is_finite],
        sums[is_finite],
    )
