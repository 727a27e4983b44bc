"""Gradients through parts of the keys add up to the gradients of attention to all keys."""

import pytest
import torch

import scree
from scree.dispatch.operation import OPERATIONS, KernelUnavailableError
from scree.ops.attention import AttentionCall
from scree.providers.torch_attention_gradient import AttentionGradientCall
from scree_triton.attention import interface
from scree_triton.attention.interface import make_spec
from scree_triton.attention.launch_configs import get_launch_config
from scree_triton.attention.metadata import VarlenLayout
from scree_triton.runtime import fallback
from scree_triton.runtime.launch import UnalignedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kernel", ["triton", "standard"])
@pytest.mark.parametrize("dim", [16, 32])
def test_gradients_of_two_parts_add_up(kernel, dim):
    lengths, earlier_lengths = [5, 17, 1], [20, 3, 9]  # own keys, and keys before them
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    q, k, v = (random(sum(lengths), heads, dim) for heads in (4, 2, 2))
    earlier_k, earlier_v = (random(sum(earlier_lengths), 2, dim) for _ in range(2))
    dout, dlse = random(sum(lengths), 4, dim), random(sum(lengths), 4)

    # All keys of a row: the earlier keys, then its own keys.
    leaves = [x.clone().requires_grad_() for x in (q, k, v, earlier_k, earlier_v)]
    joined = [
        torch.cat(
            [part for pair in zip(a.split(earlier_lengths), b.split(lengths)) for part in pair]
        )
        for a, b in ((leaves[3], leaves[1]), (leaves[4], leaves[2]))
    ]
    keys = scree.from_lengths(joined[0], [a + b for a, b in zip(earlier_lengths, lengths)])
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

    own_grads = gradients(k, v, lengths, True)
    earlier_grads = gradients(earlier_k, earlier_v, earlier_lengths, False)
    actual = (
        own_grads[0] + earlier_grads[0],
        own_grads[1],
        own_grads[2],
        earlier_grads[1],
        earlier_grads[2],
    )
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["triton", "standard"])
def test_gradients_of_rows_without_keys_or_without_queries_are_zero(kernel):
    # Row 1 has no keys, and row 2 has no queries.
    query_lengths, key_lengths = [5, 17, 0, 3], [5, 0, 17, 9]
    generator = torch.Generator().manual_seed(0)
    q, k, v, out, dout = (
        torch.randn(n, 2, 16, generator=generator).to(DEVICE) for n in (25, 31, 31, 25, 25)
    )
    lse, dlse = (torch.randn(25, 2, generator=generator).to(DEVICE) for _ in range(2))
    queries, keys = scree.from_lengths(q, query_lengths), scree.from_lengths(k, key_lengths)
    rows = [slice(0, 5), slice(22, 25)], [slice(0, 5), slice(22, 31)]
    expected = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for q_row, k_row in zip(*rows):
        leaves = [x.double().requires_grad_() for x in (q[q_row], k[k_row], v[k_row])]
        scores = torch.einsum("ihd,jhd->hij", *leaves[:2]) / 4
        offset = scores.shape[2] - scores.shape[1]
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(offset + 1).bool(), -torch.inf)
        result = torch.einsum("hij,jhd->ihd", scores.softmax(-1), leaves[2])
        log_sums = scores.logsumexp(-1).t()
        out[q_row], lse[q_row] = result.detach().float(), log_sums.detach().float()
        loss = (result * dout[q_row]).sum() + (log_sums * dlse[q_row]).sum()
        for target, row, x in zip(
            expected, (q_row, k_row, k_row), torch.autograd.grad(loss, leaves)
        ):
            target[row] = x.float()
    attention = AttentionCall(queries, keys, keys.with_values(v), causal=True)
    call = AttentionGradientCall(attention, out, lse, dout, dlse)
    actual = OPERATIONS["attention_gradient"].run_call(call, kernel)
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_attention_backward_prepares_the_launches_of_a_layout_once(monkeypatch):
    cu = torch.tensor([0, 4, 21], dtype=torch.int32, device=DEVICE)
    q, k, v, dout = (torch.randn(21, 2, 16, device=DEVICE) for _ in range(4))
    spec, prepared, prepare = (
        make_spec(True, None, None, 0.2, None),
        [],
        interface._prepare_backward,
    )

    def count(*args):
        prepared.append(args)
        return prepare(*args)

    monkeypatch.setattr(interface, "_prepare_backward", count)
    for cache, expected in (({}, 1), (None, 2)):
        layout = VarlenLayout(cu, cu, cache, 17)
        out, lse = interface.attention_forward(q, k, v, layout, spec)
        grads = [interface.attention_backward(dout, q, k, v, out, lse, layout, spec) for _ in "ab"]
        assert all(map(torch.equal, *grads))
        assert len(prepared) == expected
        prepared.clear()


def test_attention_backward_that_cannot_be_prepared_is_replaced(monkeypatch):
    cu = torch.tensor([0, 4, 21], dtype=torch.int32, device=DEVICE)
    q, k, v, dout = (torch.randn(21, 2, 16, device=DEVICE) for _ in range(4))
    spec, layout = make_spec(True, None, None, 0.2, None), VarlenLayout(cu, cu, {}, 17)
    out, lse = interface.attention_forward(q, k, v, layout, spec)
    expected = interface.attention_backward(dout, q, k, v, out, lse, layout, spec)
    config, tried = type(get_launch_config(q, k, v, layout, spec, 0)), []

    def fail(*args):
        tried.append(args)
        raise KernelUnavailableError("a kernel does not compile")

    monkeypatch.setattr(fallback, "_UNAVAILABLE", {})
    monkeypatch.setattr(config, "prepare_backward", fail)
    layout = layout._replace(cache={})
    with pytest.warns(RuntimeWarning, match="a kernel does not compile"):
        grads = interface.attention_backward(dout, q, k, v, out, lse, layout, spec)
    repeated = interface.attention_backward(dout, q, k, v, out, lse, layout, spec)
    for results in (grads, repeated):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)
    assert len(tried) == 1


def test_attention_backward_other_keys_in_one_cache_have_launches_of_their_own():
    """A cache belongs to the rows of the queries, see `VarlenLayout`."""
    cu = torch.tensor([0, 4, 21], dtype=torch.int32, device=DEVICE)
    q, k, v, dout = (torch.randn(21, 2, 16, device=DEVICE) for _ in range(4))
    spec, cache = make_spec(False, None, None, 0.2, None), {}
    for middle in (17, 5):
        other = torch.tensor([0, middle, 21], dtype=torch.int32, device=DEVICE)
        grads = []
        for kept in (cache, None):
            layout = VarlenLayout(cu, other, kept, 17)
            out, lse = interface.attention_forward(q, k, v, layout._replace(cache=None), spec)
            grads.append(interface.attention_backward(dout, q, k, v, out, lse, layout, spec))
        assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("keys", [[4, 40, 4], [9, 70, 30]])
def test_keys_before_a_cut_have_a_window_without_right_bound(keys):
    """Query i sees the keys from i on: the first queries after a cut see keys before the cut."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_at_any_address_and_with_any_strides_on_a_gpu(dtype, monkeypatch):
    check_gradients_of_the_output(dtype, monkeypatch)


def test_gradients_at_any_address_and_with_any_strides(monkeypatch):
    check_gradients_of_the_output(torch.float32, monkeypatch)


def check_gradients_of_the_output(dtype, monkeypatch):
    """One of a sum is expanded; a part of another array can be contiguous but not aligned."""
    cu = torch.tensor([0, 4, 21], dtype=torch.int32, device=DEVICE)
    q, k, v, dout = (torch.randn(21, 2, 32, device=DEVICE, dtype=dtype) for _ in range(4))
    layout, spec = VarlenLayout(cu, cu, None, 17), make_spec(True, None, None, 0.2, None, 0.0)
    config = get_launch_config(q, k, v, layout, spec, 0)
    prepared, prepare_all = [], config._backward

    def count(*args):
        prepare = prepare_all(*args)
        return lambda *strides: prepared.append(strides) or prepare(*strides)

    monkeypatch.setattr(config, "_backward", count)
    out, lse = config.prepare_forward(layout, 21, 21, spec)(q, k, v, None)
    run = config.prepare_backward(layout, 21, 21, spec)

    def gradients(dout):
        return run(q, k, v, None, out, lse, dout, None)

    unaligned = torch.cat([dout.flatten()[:1], dout.flatten()])[1:].view_as(dout)
    expanded = torch.ones((), device=DEVICE, dtype=dtype).expand_as(dout)
    for given, copy in ((unaligned, dout), (expanded, expanded.contiguous())):
        assert all(map(torch.equal, gradients(given), gradients(copy)))
    before = len(prepared)
    gradients(expanded)
    assert len(prepared) == before


@pytest.mark.parametrize(
    ("dtype", "is_differentiated"),
    [(torch.float32, True), (torch.float32, False), (torch.float16, True), (torch.float16, False)],
)
def test_unaligned_call_after_aligned_ones_takes_another_config(
    monkeypatch, dtype, is_differentiated
):
    """The config of aligned calls raises `UnalignedError`, as the kernels for Hopper do."""
    addresses = []

    class AlignedConfig:
        def __init__(self, config):
            self.config, self.prepare_backward = config, config.prepare_backward

        def prepare_forward(self, *args):
            forward = self.config.prepare_forward(*args)

            def run(q, k, v, *others):
                addresses.append(v.data_ptr() % 16)
                if addresses[-1]:
                    raise UnalignedError
                return forward(q, k, v, *others)

            return run

    def choose(q, k, v, *args):
        config = get_launch_config(q, k, v, *args)
        return config if v.data_ptr() % 16 else AlignedConfig(config)

    monkeypatch.setattr(interface, "get_launch_config", choose)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(7, 1, 16, generator=generator).to(DEVICE, dtype) for _ in range(3)]
    q, k, v = (x.requires_grad_(is_differentiated) for x in values)
    unaligned = torch.cat([v.detach().flatten()[:1], v.detach().flatten()])[1:].view_as(v)
    unaligned.requires_grad_(is_differentiated)
    rows, results = scree.from_lengths(q, [3, 4]), []
    for x in (v, unaligned, unaligned, v):
        arrays = map(rows.with_values, (q, k, x))
        out = scree.attention(*arrays, causal=True, kernel="triton").values
        results.append(
            (out, *(torch.autograd.grad(out.sum(), (q, k, x)) if is_differentiated else ()))
        )
    assert set(addresses) == {0, v.element_size()} and addresses[-1] == 0
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    for others in results[1:]:
        for x, y in zip(results[0], others):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "is_differentiated", "return_lse", "has_run_dense"),
    [
        (torch.float16, True, False, True),
        (torch.float16, True, True, False),
        (torch.float16, False, False, False),
        (torch.float32, True, False, False),
    ],
)
def test_run_dense_serves_aligned_calls_in_which_only_dense_arrays_differ(
    dtype, is_differentiated, return_lse, has_run_dense
):
    """The precision of float32 products can differ too; a log-sum-exp is transposed after the call."""
    x = torch.randn(7, 1, 16).to(DEVICE, dtype).requires_grad_(is_differentiated)
    q = scree.from_lengths(x, [3, 4])
    run = interface.prepare_run(AttentionCall(q, q, q, return_lse=return_lse))
    result = run(q, q, q, None)
    run_dense = getattr(run, "run_dense", None)
    assert (run_dense is not None) == has_run_dense
    if run_dense is not None:
        out = run_dense(x, x, x)
        assert out.requires_grad and torch.equal(out, result.values)
        with torch.no_grad():
            out = run_dense(x, x, x)
        assert not out.requires_grad and torch.equal(out, result.values)
