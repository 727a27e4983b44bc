"""Gradients of attention to parts of the keys add up to the gradients of attention to all keys."""

import pytest
import torch

import scree
from scree.dispatch.operation import OPERATIONS
from scree.ops.attention import AttentionCall
from scree.providers.torch_attention_gradient import AttentionGradientCall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kernel", ["triton", "standard"])
@pytest.mark.parametrize("dim", [16, 32])
def test_gradients_of_two_parts_add_up(kernel, dim):
    lengths, others = [5, 17, 1], [20, 3, 9]  # own tokens, and the keys before them
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    q, k, v = (random(sum(lengths), heads, dim) for heads in (4, 2, 2))
    more_k, more_v = (random(sum(others), 2, dim) for _ in range(2))
    dout, dlse = random(sum(lengths), 4, dim), random(sum(lengths), 4)

    # All keys of a row: the earlier ones, then its own.
    leaves = [x.clone().requires_grad_() for x in (q, k, v, more_k, more_v)]
    joined = [
        torch.cat([part for pair in zip(a.split(others), b.split(lengths)) for part in pair])
        for a, b in ((leaves[3], leaves[1]), (leaves[4], leaves[2]))
    ]
    keys = scree.from_lengths(joined[0], [a + b for a, b in zip(others, lengths)])
    queries = scree.from_lengths(leaves[0], lengths)
    out, lse = scree.attention(
        queries, keys, keys.with_values(joined[1]), causal=True, return_lse=True, kernel="standard"
    )
    loss = (out.values * dout).sum() + (lse.values * dlse).sum()
    expected = torch.autograd.grad(loss, leaves)

    def gradients(k, v, lengths_of_keys, causal):
        keys = scree.from_lengths(k.float(), lengths_of_keys)
        rows = scree.from_lengths(q.float(), lengths)
        attention = AttentionCall(rows, keys, keys.with_values(v.float()), causal=causal)
        arrays = (x.detach().float() for x in (out.values, lse.values, dout, dlse))
        call = AttentionGradientCall(attention, *arrays)
        return OPERATIONS["attention_gradient"].run_call(call, kernel)

    own = gradients(k, v, lengths, True)
    other = gradients(more_k, more_v, others, False)
    actual = (own[0] + other[0], own[1], own[2], other[1], other[2])
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", [[4, 40, 4], [9, 70, 30]])
def test_keys_before_a_cut_have_a_window_without_right_bound(keys):
    """Query i sees the keys from i on, as the first queries after a cut see the window before it."""
    lengths = [4, 40, 4]
    results = []
    for kernel, dtype in (("standard", torch.float64), ("triton", torch.float32)):
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn((n, heads, 16), generator=generator, dtype=torch.float64)
            .to(DEVICE, dtype)
            .requires_grad_()
            for n, heads in ((sum(lengths), 4), (sum(keys), 2), (sum(keys), 2), (sum(lengths), 4))
        )
        rows = scree.from_lengths(k, keys)
        out, lse = scree.attention(
            scree.from_lengths(q, lengths),
            rows,
            rows.with_values(v),
            window=(0, None),
            return_lse=True,
            kernel=kernel,
        )
        grads = torch.autograd.grad((out.values * dout).sum(), (q, k, v))
        results.append([x.float() for x in (out.values, lse.values, *grads)])
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
