"""The raw functions of FlashAttention 2.8 against float64 loops, and against one block of keys."""

import inspect
import sys
from typing import Any

import numpy as np
import pytest
import torch

from scree.bridges import flash_attn
from scree.bridges.flash_attn import installation, raw, v2

F64 = torch.float64
Q, K = [5, 0, 3, 70, 1], [9, 4, 3, 70, 0]
SLOPES = 0.5 ** torch.arange(1.0, 5.0, dtype=F64)

#: Name -> (softmax_scale, causal, left, right, softcap, alibi_slopes).
CASES: dict[str, tuple[Any, ...]] = {
    "full": (0.25, False, -1, -1, 0.0, None),
    "causal": (0.25, True, -1, -1, 0.0, None),
    "window": (0.3, False, 3, 2, 0.0, None),
    "softcap": (0.25, True, -1, -1, 1.5, None),
    "slopes": (0.25, False, -1, -1, 0.0, SLOPES),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of one sequence and its log-sum-exp (heads, length), in float64."""
    scale, causal, left, right, softcap, slopes = options
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    if slopes is not None:
        score = score - slopes[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if causal or right >= 0:
        hidden |= distance > (0 if causal else right)
    score = score.masked_fill(hidden, -torch.inf)
    weight = torch.nan_to_num(torch.softmax(score, -1))
    return torch.einsum("hqk,khd->qhd", weight, v), torch.logsumexp(score, -1)


def flags(options: tuple[Any, ...], dropout: float = 0.0) -> tuple[Any, ...]:
    return dropout, *options


@pytest.mark.parametrize("case", CASES)
def test_dense_functions_agree_with_loop(case: str) -> None:
    options = CASES[case]
    q, k, v = draw(2, 7, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)
    out, lse, weights, state = raw._flash_attn_forward(q, k, v, *flags(options), False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    results = [attend(*row, options) for row in zip(*leaves, strict=True)]
    expected, sums = (torch.stack(x) for x in zip(*results, strict=True))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    assert not weights.numel() and state.shape == (2,) and not state.any()
    dout = draw(*out.shape, seed=3)
    packed = torch.full((2, 9, 2, 2, 8), torch.nan, dtype=F64)  # dk and dv are strided views
    dq = torch.full_like(q, torch.nan)
    arrays = dout, q, k, v, out, lse, dq, packed[:, :, 0], packed[:, :, 1]
    softmax_d = raw._flash_attn_backward(*arrays, *flags(options), False)
    peer = torch.autograd.grad(expected, leaves, dout)
    for gradient, other in zip((dq, packed[:, :, 0], packed[:, :, 1]), peer, strict=True):
        torch.testing.assert_close(gradient, other)
    assert softmax_d.shape == (2, 4, 128) and not softmax_d[:, :, 7:].any()
    torch.testing.assert_close(softmax_d[:, :, :7], (dout * expected).sum(-1).transpose(1, 2))


@pytest.mark.parametrize("case", CASES)
def test_varlen_functions_agree_with_loop(case: str) -> None:
    options = CASES[case]
    q, k, v = draw(sum(Q), 4, 8), draw(sum(K), 2, 8, seed=1), draw(sum(K), 2, 8, seed=2)
    rows = offsets(Q), offsets(K), max(Q), max(K)
    out, lse, _, _ = raw._flash_attn_varlen_forward(q, k, v, *rows, *flags(options))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    split = zip(*(x.split(n) for x, n in zip(leaves, (Q, K, K), strict=True)), strict=True)
    outs, sums = zip(*(attend(*row, options) for row in split), strict=True)
    expected = torch.cat(outs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.cat(sums, 1))
    dout = draw(*out.shape, seed=3)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    arrays = dout, q, k, v, out, lse, *gradients
    softmax_d = raw._flash_attn_varlen_backward(*arrays, *rows, *flags(options), False)
    peer = torch.autograd.grad(expected, leaves, dout)
    for gradient, other in zip(gradients, peer, strict=True):
        torch.testing.assert_close(gradient, other)
    products = (dout * expected).sum(-1).T.split(Q, 1)
    assert softmax_d.shape == (4, sum(Q) + 128 * len(Q))
    for i, (start, length) in enumerate(zip(np.cumsum([0, *Q[:-1]]), Q, strict=True)):
        start += 128 * i
        torch.testing.assert_close(softmax_d[:, start : start + length], products[i])
        assert not softmax_d[:, start + length : start + length + 128].any()


@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_blocks_of_keys_adds_up(causal: bool) -> None:
    """The pass of each block takes the output and the log-sum-exp of all keys: ring attention."""
    q, k, v = (draw(2, 12, 4, 8, seed=i) for i in range(3))
    whole = flags((0.25, causal, -1, -1, 0.0, None))
    out, lse, _, _ = raw._flash_attn_forward(q, k, v, *whole, False)
    dout, dq = draw(*out.shape, seed=3), torch.zeros_like(q)
    dk, dv, part = torch.zeros_like(k), torch.zeros_like(v), torch.empty_like(q)
    for block in range(3):
        keys = slice(4 * block, 4 * block + 4)
        # With a causal mask, a block of keys is diagonal for its own queries, and whole for later ones.
        queries = [keys, slice(4 * block + 4, 12)] if causal else [slice(0, 12)]
        for i, tokens in enumerate(queries):
            if tokens.start == tokens.stop:
                continue
            options = flags((0.25, causal and i == 0, -1, -1, 0.0, None))
            parts = [torch.empty_like(k[:, keys]) for _ in range(2)]
            arrays = dout[:, tokens], q[:, tokens], k[:, keys], v[:, keys], out[:, tokens]
            targets = lse[:, :, tokens], part[:, tokens], *parts
            raw._flash_attn_backward(*arrays, *targets, *options, False)
            dq[:, tokens] += part[:, tokens]
            dk[:, keys] += parts[0]
            dv[:, keys] += parts[1]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = [attend(*row, whole[1:])[0] for row in zip(*leaves, strict=True)]
    peer = torch.autograd.grad(torch.stack(rows), leaves, dout)
    for gradient, other in zip((dq, dk, dv), peer, strict=True):
        torch.testing.assert_close(gradient, other)


def test_dropout_repeats_the_seed_of_the_forward_pass() -> None:
    q, k, v = (draw(2, 30, 4, 8, seed=i).requires_grad_() for i in range(3))
    options = flags((8**-0.5, True, -1, -1, 0.0, None), 0.4)
    torch.manual_seed(5)
    out, lse, weights, state = raw._flash_attn_forward(q, k, v, *options, True)
    torch.manual_seed(5)
    peer, _, peer_weights = v2.flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, peer)
    torch.testing.assert_close(weights, peer_weights)
    assert state[0] and not out.requires_grad
    dout = draw(*out.shape, seed=3)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    arrays = dout, q, k, v, out, lse, *gradients
    raw._flash_attn_backward(*arrays, *options, False, rng_state=state)
    for gradient, other in zip(gradients, torch.autograd.grad(peer, (q, k, v), dout), strict=True):
        torch.testing.assert_close(gradient, other)
    with pytest.raises(ValueError, match="rng_state: expected the last result"):
        raw._flash_attn_backward(*arrays, *options, False)


def test_varlen_forward_seqused_and_leftpad_agree_with_loop() -> None:
    used, first = [7, 4, 3, 41, 0], [2, 0, 3, 5, 0]
    q, k, v = draw(sum(Q), 4, 8), draw(sum(K), 2, 8, seed=1), draw(sum(K), 2, 8, seed=2)
    options = CASES["causal"]
    out, lse, _, _ = raw._flash_attn_varlen_forward(
        *(q, k, v, offsets(Q), offsets(K), max(Q), max(K)),
        *flags(options),
        seqused_k=torch.tensor(used, dtype=torch.int32),
        leftpad_k=torch.tensor(first, dtype=torch.int32),
    )
    parts = zip(q.split(Q), k.split(K), v.split(K), first, used, strict=True)
    results = [attend(a, b[i:j], c[i:j], options) for a, b, c, i, j in parts]
    torch.testing.assert_close(out, torch.cat([x for x, _ in results]))
    torch.testing.assert_close(lse, torch.cat([x for _, x in results], 1))


def test_varlen_forward_block_table_agrees_with_packed_keys() -> None:
    q, k, v = draw(8, 4, 8), draw(2, 12, 2, 8, seed=1), draw(2, 12, 2, 8, seed=2)
    rows, used = offsets([3, 5]), torch.tensor([12, 9], dtype=torch.int32)
    table = torch.tensor([[3, 0, 5], [1, 2, 4]], dtype=torch.int32)
    pages = torch.empty(2, 6, 4, 2, 8, dtype=F64)
    pages[:, table] = torch.stack([k, v]).reshape(2, 2, 3, 4, 2, 8)
    options = flags(CASES["causal"])
    arguments = q, *pages, rows, offsets([12, 9]), 5, 12, *options
    packed = (torch.cat([x[0], x[1, :9]]) for x in (k, v))
    peer = raw._flash_attn_varlen_forward(q, *packed, rows, offsets([12, 9]), 5, 12, *options)
    for splits in (0, 1):
        for lengths in (None, used):
            got = raw._flash_attn_varlen_forward(
                *arguments, block_table=table, seqused_k=lengths, num_splits=splits
            )
            torch.testing.assert_close(got[:2], peer[:2])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        raw._flash_attn_varlen_forward(*arguments, block_table=table, num_splits=2)
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        raw._flash_attn_varlen_forward(*arguments, block_table=table, leftpad_k=used)


def test_wrong_shapes_raise() -> None:
    x, lse, options = draw(2, 5, 4, 8), draw(2, 4, 5), flags(CASES["full"])
    for name, arrays in {
        "dout": (x[:, :3], x, x, x, x, lse, None, None, None),
        "softmax_lse": (x, x, x, x, x, lse.mT, None, None, None),
        "dk": (x, x, x, x, x, lse, None, x[:1], None),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected shape"):
            raw._flash_attn_backward(*arrays, *options, False)


#: The parameters of FlashAttention 2.8.4, by function: those before the first default, and others.
SIGNATURES = {
    "_flash_attn_forward": (
        "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
        "alibi_slopes return_softmax",
        {},
    ),
    "_flash_attn_varlen_forward": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal",
        {
            "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
            "return_softmax": False, "block_table": None, "leftpad_k": None, "seqused_k": None,
            "zero_tensors": False, "num_splits": 0,
        },
    ),
    "_flash_attn_backward": (
        "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes deterministic",
        {"rng_state": None},
    ),
    "_flash_attn_varlen_backward": (
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
        "deterministic",
        {"rng_state": None, "zero_tensors": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attention(name: str) -> None:
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(raw, name)).parameters
    empty = inspect.Parameter.empty
    assert list(parameters) == [*required.split(), *defaults]
    actual = {x: p.default for x, p in parameters.items() if p.default is not empty}
    assert actual == defaults


def test_install_offers_the_raw_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_installed", {})
    saved = {name: x for name, x in sys.modules.items() if name.startswith("flash_attn")}
    try:
        flash_attn.install(force=True)
        from flash_attn import flash_attn_interface

        for name in raw.__all__:
            assert getattr(flash_attn_interface, name) is getattr(raw, name)
    finally:
        for name in [x for x in sys.modules if x.startswith("flash_attn")]:
            del sys.modules[name]
        sys.modules.update(saved)


# ---------------------------------------------------------------- on a device
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_backward_of_two_blocks_on_a_device_is_accurate(causal: bool, dtype: torch.dtype) -> None:
    """The last queries of a causal call see all keys of the first block."""
    q, k, v = (draw(2, 256, 4, 64, seed=i).to("cuda", dtype) for i in range(3))
    options, half = flags((0.125, causal, -1, -1, 0.0, None)), slice(128, 256)
    out, lse, _, _ = raw._flash_attn_forward(q, k, v, *options, False)
    dout = draw(*out.shape, seed=3).to("cuda", dtype)
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    rows = [attend(*row, options[1:])[0] for row in zip(*leaves, strict=True)]
    expected = torch.stack(rows)
    peer = torch.autograd.grad(expected, leaves, dout.double().cpu())
    tolerance = 4e-3 if dtype == torch.float16 else 3e-2
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=0)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    raw._flash_attn_backward(dout, q, k, v, out, lse, *gradients, *options, False)
    for gradient, other in zip(gradients, peer, strict=True):
        torch.testing.assert_close(gradient.double().cpu(), other, atol=4 * tolerance, rtol=0)
    # The keys of the second block, of which the output and the log-sum-exp count the first.
    arrays = dout[:, half], q[:, half], k[:, half], v[:, half], out[:, half], lse[:, :, half]
    parts = [torch.empty_like(x[:, half]) for x in (q, k, v)]
    raw._flash_attn_backward(*arrays, *parts, *options, False)
    if causal:  # no earlier query sees them
        for gradient, other in zip(parts[1:], peer[1:], strict=True):
            expected = other[:, half]
            torch.testing.assert_close(
                gradient.double().cpu(), expected, atol=4 * tolerance, rtol=0
            )
