"""PyTorch's operators of flash attention on scree's kernels, by PyTorch's own switch.

Without a GPU the operators are registered for the CPU and run in Triton's interpreter.
"""

import inspect
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

import scree.bridges.torch  # noqa: F401  # offers "scree" to PyTorch
from scree_triton.attention import flash_backend
from scree_triton.runtime.launch import INTERPRETED

attention = torch.nn.attention
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
BOUND = 1e-5 if INTERPRETED else 3e-2
aten = torch.ops.aten
HAS_SPLITS = "num_splits" in str(aten._flash_attention_forward.default._schema)  # since torch 2.13


@pytest.fixture(autouse=True)
def switch(kernels):
    """Activate scree for a test, and restore PyTorch's kernels after it."""
    attention.activate_flash_attention_impl("scree")
    assert attention.current_flash_attention_impl() == "scree"
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE).requires_grad_()


def as_float64(x):
    return x.detach().cpu().double().numpy()


def attend_row(q, k, v, dout, scale, left=np.inf, right=np.inf):
    """Return the output, the log-sum-exp and the gradients of one head in float64."""
    position = np.arange(len(k))[None] - (np.arange(len(q))[:, None] + len(k) - len(q))
    visible = (position >= -left) & (position <= right)
    scores = np.where(visible, q @ k.T * scale, -np.inf)
    top = np.max(scores, 1, initial=-1e30)[:, None]
    weights = np.exp(scores - top)
    total = weights.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[:, 0]
        p = np.where(total > 0, weights / total, 0.0)
    out = p @ v
    dp = dout @ v.T
    ds = p * (dp - (dout * out).sum(1, keepdims=True)) * scale
    return out, lse, ds @ k, ds.T @ q, p.T @ dout


def reference(q, k, v, dout, cu_q, cu_k, **options):
    """Return the results of packed tensors by one loop over rows and heads."""
    q, k, v, dout = (as_float64(x) for x in (q, k, v, dout))
    group, scale = q.shape[1] // k.shape[1], options.pop("scale", q.shape[2] ** -0.5)
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.full(q.shape[1::-1], -np.inf)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        for h in range(q.shape[1]):
            row, keys = np.s_[q0:q1, h], np.s_[k0:k1, h // group]
            out[row], lse[h, q0:q1], dq[row], dk_row, dv_row = attend_row(
                q[row], k[keys], v[keys], dout[row], scale, **options
            )
            dk[keys] += dk_row
            dv[keys] += dv_row
    return out, lse, dq, dk, dv


def check(actual, expected):
    for x, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(as_float64(x), exact, atol=BOUND, rtol=BOUND)


VARLEN = {
    "full": (dict(is_causal=False), {}),
    "causal": (dict(is_causal=True), dict(right=0)),
    "window": (
        dict(is_causal=False, window_size_left=4, window_size_right=2),
        dict(left=4, right=2),
    ),
    "causal window, scale": (
        dict(is_causal=True, window_size_left=6, window_size_right=-1, scale=0.3),
        dict(left=6, right=0, scale=0.3),
    ),
}
if HAS_SPLITS:
    VARLEN["one split"] = dict(is_causal=True, num_splits=1), dict(right=0)


@pytest.mark.parametrize(
    "lengths", [((5, 0, 18, 1), (9, 3, 18, 0)), ((), ()), ((0,), (2,))], ids=str
)
@pytest.mark.parametrize("case", VARLEN)
def test_flash_attention_forward_packed_matches_float64(case, lengths):
    options, expected = VARLEN[case]
    offsets = [np.cumsum([0, *x]) for x in lengths]
    q, k, v = draw(offsets[0][-1], 4, 16), *(draw(offsets[1][-1], 2, 16, seed=i) for i in (1, 2))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in offsets)
    bounds = [max(x, default=0) for x in lengths]
    options = dict(options)
    causal = options.pop("is_causal")
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, *bounds, 0.0, causal, False, **options
    )
    assert lse.is_contiguous() and lse.dtype == torch.float32
    dout = draw(*out.shape, seed=3).detach()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    check((out, lse, *gradients), reference(q, k, v, dout, *offsets, **expected))
    again = torch.autograd.grad(
        aten._flash_attention_forward(q, k, v, cu_q, cu_k, *bounds, 0.0, causal, False, **options)[
            0
        ],
        (q, k, v),
        dout,
    )
    assert all(torch.equal(x, y) for x, y in zip(gradients, again, strict=True))


def heads_major(batch, heads, length, seed):
    return draw(batch, heads, length, 16, seed=seed)


def tokens_major(batch, heads, length, seed):
    return draw(batch, length, heads, 16, seed=seed).detach().transpose(1, 2).requires_grad_()


def sliced(batch, heads, length, seed):
    """Return one of three tensors that a projection wrote side by side."""
    packed = draw(batch, length, 3, heads, 16, seed=seed).detach()
    return packed[:, :, 1].transpose(1, 2).requires_grad_()


def check_dense(run, q, k, v, **expected):
    """Compare SDPA of (batch, heads, seqlen, head_dim) with the loop over rows and heads."""
    batch, _, length_q, _ = q.shape
    out, lse = run(q, k, v)
    dout = draw(*out.shape, seed=3).detach()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    packed = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v, dout)]
    offsets = [np.arange(batch + 1) * x.shape[2] for x in (q, k)]
    exact = list(reference(*packed, *offsets, **expected))
    for i, like in ((0, q), (2, q), (3, k), (4, v)):
        shape = batch, like.shape[2], like.shape[1], like.shape[3]
        exact[i] = exact[i].reshape(shape).transpose(0, 2, 1, 3)
    exact[1] = exact[1].reshape(q.shape[1], batch, length_q).transpose(1, 0, 2)
    if lse is None:  # the result of a program
        del exact[1]
        check((out, *gradients), exact)
        return
    check((out, lse, *gradients), exact)
    for x, like in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.stride() == torch.empty_like(like).stride()


@pytest.mark.parametrize("batch, length_q, length_k", [(2, 7, 7), (3, 1, 20), (0, 4, 4), (2, 3, 0)])
@pytest.mark.parametrize("heads, k_heads", [(4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("make", [heads_major, tokens_major, sliced])
def test_scaled_dot_product_matches_float64(make, heads, k_heads, batch, length_q, length_k):
    causal = length_q == length_k
    q = make(batch, heads, length_q, 0)
    k, v = (make(batch, k_heads, length_k, seed) for seed in (1, 2))

    def run(q, k, v):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        assert lse.is_contiguous()
        return out, lse

    check_dense(run, q, k, v, right=0 if causal else np.inf)


def test_flash_attention_forward_dense_matches_float64():
    q, k, v = (draw(2, 6, heads, 16, seed=i) for i, heads in enumerate((4, 2, 2)))

    def run(*arrays):
        arrays = [x.transpose(1, 2) for x in arrays]
        results = aten._flash_attention_forward(*arrays, None, None, 6, 6, 0.0, True, False)
        return results[0].transpose(1, 2), results[1]

    check_dense(run, *(x.transpose(1, 2) for x in (q, k, v)), right=0)


def check_matches_fake(run, *tensors):
    """Compare shapes, dtypes and strides with PyTorch's meta implementation."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        expected = run(*(mode.from_tensor(x) for x in tensors))
    for x, like in zip(run(*tensors), expected, strict=True):
        if isinstance(like, torch.Tensor):
            assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        else:
            assert x == like


@pytest.mark.parametrize("make", [heads_major, tokens_major, sliced])
def test_results_have_the_shapes_of_meta(make):
    tensors = [make(2, heads, 5, i).detach() for i, heads in enumerate((4, 2, 2))]
    check_matches_fake(aten._scaled_dot_product_flash_attention, *tensors)
    dense = [x.transpose(1, 2) for x in tensors]
    check_matches_fake(
        lambda *x: aten._flash_attention_forward(*x, None, None, 5, 5, 0.0, True, False), *dense
    )
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    packed = [x[0] for x in dense]
    check_matches_fake(
        lambda *x: aten._flash_attention_forward(*x, 3, 3, 0.0, True, False), *packed, cu, cu
    )


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch before 2.12")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_attn_seqused_k_matches_float64(num_splits, paged):
    q, k, v = draw(4, 4, 16), draw(20, 2, 16, seed=1), draw(20, 2, 16, seed=2)
    used, cu_q, cu_k = [9, 0, 5], [0, 2, 3, 4], [0, 10, 10, 20]
    kept = np.r_[0:9, 10:15]
    dout = torch.zeros_like(q)
    expected, *_ = reference(q, k[kept], v[kept], dout, cu_q, np.cumsum([0, *used]), right=0)
    cu_q, cu_k, used = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu_q, cu_k, used)
    )
    table = None
    q, k, v = (x.detach() for x in (q, k, v))
    if paged:
        k, v = (x.reshape(10, 2, 2, 16) for x in (k, v))
        table = torch.arange(10, dtype=torch.int32, device=DEVICE).reshape(2, 5)[[0, 1, 1]]
    arguments = dict(enable_gqa=True, seqused_k=used, block_table=table, num_splits=num_splits)
    out = varlen.varlen_attn(q, k, v, cu_q, cu_k, 2, 10, window_size=(-1, 0), **arguments)
    check([out], [expected])
    target = torch.empty_like(q)
    varlen.varlen_attn_out(target, q, k, v, cu_q, cu_k, 2, 10, window_size=(-1, 0), **arguments)
    assert torch.equal(target, out)


def test_compiled_program_runs_the_operators():
    q, k, v = (draw(2, 4, 5, 16, seed=i) for i in range(3))

    def program(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] * 2

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    check_dense(lambda *x: (compiled(*x) / 2, None), q, k, v, right=0)


@pytest.mark.parametrize(
    "head_dim, arguments, reason",
    [
        (16, (0.1,), "scree has no dropout"),
        (16, (0.0, False, True), "return_debug_mask"),
        (8, (), "head_dim 16 to 256"),
    ],
)
def test_unsupported_call_without_another_kernel_raises(head_dim, arguments, reason, monkeypatch):
    def get_kernel(name, key):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    attention.activate_flash_attention_impl("scree")
    x = torch.ones(1, 1, 2, head_dim, device=DEVICE, dtype=DTYPE)
    with pytest.raises(NotImplementedError, match=rf"{reason}.*restore_flash_attention_impl"):
        aten._scaled_dot_product_flash_attention(x, x, x, *arguments)


def test_unsupported_call_runs_the_kernel_before():
    """A kernel that was registered before runs the calls that scree refuses."""
    attention.restore_flash_attention_impl()
    calls = []

    def before(q, k, v, *rest, **options):
        calls.append(rest)
        return q, q[..., 0].float(), None, None, 1, 1, q, q, q

    library = torch.library.Library("aten", "IMPL", flash_backend.DISPATCH_KEY)
    library.impl("_scaled_dot_product_flash_attention", before, allow_override=True)
    attention.activate_flash_attention_impl("scree")
    x = draw(1, 1, 2, 16).detach()
    aten._scaled_dot_product_flash_attention(x, x, x, 0.1)
    assert calls == [(0.1,)]
    aten._scaled_dot_product_flash_attention(x, x, x)
    assert len(calls) == 1


def test_restore_removes_the_operators():
    x = draw(1, 2, 3, 16).detach()
    out = aten._scaled_dot_product_flash_attention(x, x, x)[0]
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    if INTERPRETED:
        with pytest.raises(NotImplementedError, match="CPU"):
            aten._scaled_dot_product_flash_attention(x, x, x)
    attention.activate_flash_attention_impl("scree")
    assert torch.equal(aten._scaled_dot_product_flash_attention(x, x, x)[0], out)


def count_calls(monkeypatch):
    """Return a list that grows with each call of the implementations."""
    calls = []
    for name, (run, rejects) in flash_backend.OPERATORS.items():

        def count(*args, run=run, name=name, **kwargs):
            calls.append(name)
            return run(*args, **kwargs)

        monkeypatch.setitem(flash_backend.OPERATORS, name, (count, rejects))
    attention.activate_flash_attention_impl("scree")
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [heads_major, tokens_major])
@pytest.mark.parametrize("k_heads", [4, 2])
def test_sdpa_runs_on_scree(make, k_heads, compiled, monkeypatch):
    calls = count_calls(monkeypatch)
    q = make(2, 4, 130, 0)
    k, v = (make(2, k_heads, 130, seed) for seed in (1, 2))
    options = {"is_causal": True, "enable_gqa": k_heads < 4}

    def program(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    run = torch.compile(program, fullgraph=True) if compiled else program
    check_dense(lambda *x: (run(*x), None), q, k, v, right=0)
    assert calls == [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ]
    attention.restore_flash_attention_impl()
    peer = program(q, k, v)
    assert len(calls) == 2
    attention.activate_flash_attention_impl("scree")
    torch.testing.assert_close(program(q, k, v), peer, atol=BOUND, rtol=BOUND)
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn_runs_on_scree(compiled, monkeypatch):
    calls = count_calls(monkeypatch)
    offsets = np.cumsum([0, 70, 0, 130])
    q, k, v = draw(200, 4, 64), draw(200, 2, 64, seed=1), draw(200, 2, 64, seed=2)
    cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    options = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # not in torch 2.11
        options["enable_gqa"] = True

    def program(q, k, v):
        return varlen.varlen_attn(q, k, v, cu, cu, 130, 130, **options)

    run = torch.compile(program, fullgraph=True) if compiled else program
    out = run(q, k, v)
    dout = draw(*out.shape, seed=3).detach()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact, _, *exact_gradients = reference(q, k, v, dout, offsets, offsets, right=0)
    check((out, *gradients), (exact, *exact_gradients))
    assert calls == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_sdpa_runs_on_scree(layout, monkeypatch):
    calls = count_calls(monkeypatch)
    lengths = [70, 3, 130]
    rows = [[draw(n, 4, 64, seed=10 * i + j) for j in range(3)] for i, n in enumerate(lengths)]
    q, k, v = (
        torch.nested.as_nested_tensor([row[j] for row in rows], layout=layout) for j in range(3)
    )
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2)
    parts = out.unbind()
    douts = [draw(n, 4, 64, seed=90 + n).detach() for n in lengths]
    packed = [torch.cat([row[j] for row in rows]) for j in range(3)]
    offsets = np.cumsum([0, *lengths])
    exact, _, *exact_gradients = reference(*packed, torch.cat(douts), offsets, offsets, right=0)
    check([torch.cat(list(parts))], [exact])
    assert calls == ["_flash_attention_forward"]
    if layout == torch.jagged:
        inputs = [row[j] for j in range(3) for row in rows]
        gradients = torch.autograd.grad(parts, inputs, douts)
        check([torch.cat(gradients[3 * j : 3 * j + 3]) for j in range(3)], exact_gradients)
        assert calls == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.gpu
def test_sdpa_dropout_runs_the_kernel_of_torch(monkeypatch):
    calls = count_calls(monkeypatch)
    q, k, v = (draw(2, 4, 64, 64, seed=i) for i in range(3))
    results = []
    for impl in ("scree", None):
        if impl is None:
            attention.restore_flash_attention_impl()
        torch.manual_seed(0)
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        results.append((out, *torch.autograd.grad(out.float().sum(), (q, k, v))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    assert calls == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_SPLITS, reason="this torch has no num_splits")
def test_varlen_attn_one_split_is_batch_invariant():
    q, k, v = (draw(900, 4, 128, seed=i).detach() for i in range(3))
    offsets = torch.tensor([0, 300, 301, 900], dtype=torch.int32, device=DEVICE)
    whole = varlen.varlen_attn(
        q, k, v, offsets, offsets, 599, 599, window_size=(-1, 0), num_splits=1
    )
    for start, end in pairwise(offsets.tolist()):
        cu = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        row = [x[start:end] for x in (q, k, v)]
        alone = varlen.varlen_attn(
            *row, cu, cu, end - start, end - start, window_size=(-1, 0), num_splits=1
        )
        assert torch.equal(alone, whole[start:end])
