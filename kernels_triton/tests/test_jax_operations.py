"""Operations for JAX by the Triton kernels, against a loop over rows in float64.

Without a GPU the recorded launches run in Triton's interpreter.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import interpreted_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import scree
import scree_triton.jax
from scree_triton.jax import attention, linear_cross_entropy, operations, primitive
from scree_triton.runtime.device import Device, describe_meta
from scree_triton.runtime.launch import INTERPRETED
from scree_triton.segments import interface

pytestmark = [] if INTERPRETED else pytest.mark.gpu
LENGTHS = [40, 0, 130, 7]
TAIL = 3


@pytest.fixture(autouse=True)
def kernels_for_jax(monkeypatch, isolated_registry):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    if INTERPRETED:
        describe_meta(Device("cpu", (8, 0), 3, 0, 0))
        interpreted_calls.interpret(monkeypatch)
        scree_triton.jax.register_operations()
        scree.register_kernel("attention", provider="triton_jax", rejects=attention.rejects)(
            attention.attention
        )
    else:
        scree.namespace(jnp.zeros(1))
        scree_triton.jax.register()
    monkeypatch.setattr(operations, "UNAVAILABLE", {})
    monkeypatch.setattr(primitive, "UNAVAILABLE", operations.UNAVAILABLE)
    # Products of XLA, which GPUs round to TF32 by default.
    with jax.default_matmul_precision("highest"):
        yield


class Case(NamedTuple):
    """An operation on rows, and the same in PyTorch on one row."""

    run: Callable[..., Any]
    """Function of a ragged array and the other arrays; returns values (total, ...) or (n, ...)."""
    row: Callable[..., torch.Tensor]
    """Function of the tokens of one row and the other arrays."""
    token: tuple[int, ...] = (24,)
    others: tuple[tuple[int, ...], ...] = ()
    lengths: list[int] = LENGTHS
    per_row: bool = False
    dtype: Any = jnp.float32
    others_per_row: bool = False
    """Whether the other arrays have one entry per row."""


def rms_norm(x, *weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], *weight, eps=1e-6)


def layer_norm(x, *parameters):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], *parameters, eps=1e-5)


def reduction(name):
    def row(x):
        if name in ("amax", "amin") and len(x) == 0:
            return x.new_full(x.shape[1:], -np.inf if name == "amax" else np.inf)
        return getattr(torch, name)(x, 0)

    return row


def rotate(x, start=0, half=4):
    angle = (start + torch.arange(len(x)).double())[:, None, None] * 10000.0 ** -(
        torch.arange(half).double() / half
    )
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def losses(x):
    targets = torch.arange(len(x)) % x.shape[1]
    return torch.nn.functional.cross_entropy(x, targets, reduction="none")


def targets(x):
    positions = xp(x).ragged.positions(x)
    return x.with_values((positions % x.values.shape[1]).astype(jnp.int32))


def norm_and_sum(norm, x, *parameters):
    y, total = norm(x, *parameters, residual=x)
    return y.values * total.values


CASES = {
    "rms_norm": Case(lambda x, w: scree.rms_norm(x, w).values, rms_norm, others=((24,),)),
    "rms_norm of dense values": Case(lambda x: scree.rms_norm(x.values), rms_norm),
    "rms_norm of a sum": Case(
        partial(norm_and_sum, scree.rms_norm), lambda x, w: rms_norm(2 * x, w) * 2 * x,
        others=((24,),),
    ),
    "rms_norm, float16": Case(
        lambda x, w: scree.rms_norm(x, w).values, rms_norm, others=((24,),), dtype=jnp.float16
    ),
    "layer_norm": Case(
        lambda x, w, b: scree.layer_norm(x, w, b).values, layer_norm, others=((24,), (24,))
    ),
    "layer_norm of a sum, one bias": Case(
        lambda x, b: norm_and_sum(partial(scree.layer_norm, bias=b), x),
        lambda x, b: layer_norm(2 * x, None, b) * 2 * x, (3, 16), ((16,),),
    ),
    "swiglu": Case(
        lambda x: scree.swiglu(x).values,
        lambda x: torch.nn.functional.silu(x[:, :12]) * x[:, 12:],
    ),
    "rope": Case(lambda x: scree.rope(x, rotary_dim=8).values, rotate, (3, 10)),
    "rope, queries and keys": Case(
        lambda x: jnp.add(*(y.values for y in scree.rope(x, x * 2, start=jnp.full(4, 9)))),
        lambda x: 3 * rotate(x, 9), (2, 8),
    ),
    "softmax": Case(lambda x: scree.softmax(x).values, lambda x: torch.softmax(x, 0)),
    "softmax of scalars": Case(
        lambda x: scree.softmax(x).values, lambda x: torch.softmax(x, 0), ()
    ),
    "log_softmax": Case(
        lambda x: scree.log_softmax(x).values, lambda x: torch.log_softmax(x, 0), (2, 3)
    ),
    "logsumexp": Case(scree.logsumexp, lambda x: torch.logsumexp(x, 0), per_row=True),
    "sum": Case(lambda x: xp(x).sum(x, axis=1), reduction("sum"), per_row=True),
    "sum of scalars": Case(lambda x: xp(x).sum(x, axis=1), reduction("sum"), (), per_row=True),
    "sum of scalars, many rows": Case(
        lambda x: xp(x).sum(x, axis=1), reduction("sum"), (), lengths=[5, 0, 4] * 90, per_row=True
    ),
    "mean": Case(lambda x: xp(x).mean(x, axis=1), reduction("mean"), (3,), per_row=True),
    "max": Case(lambda x: xp(x).max(x, axis=1), reduction("amax"), per_row=True),
    "min of scalars": Case(lambda x: xp(x).min(x, axis=1), reduction("amin"), (), per_row=True),
    "prod": Case(lambda x: xp(x).prod(x, axis=1), reduction("prod"), (2,), per_row=True),
    "cumulative_sum": Case(
        lambda x: xp(x).cumulative_sum(x, axis=1).values, lambda x: torch.cumsum(x, 0), (3,)
    ),
    "cross_entropy": Case(
        lambda x: scree.cross_entropy(x, targets(x), reduction="none").values, losses
    ),
    "cross_entropy, mean of each row": Case(
        lambda x: scree.cross_entropy(x, targets(x), reduction="row_mean"),
        lambda x: losses(x).mean(0), per_row=True,
    ),
    "linear_cross_entropy": Case(
        lambda x, w: scree.linear_cross_entropy(x, w, targets(x), reduction="none").values,
        lambda x, w: losses(x @ w.T), others=((24, 24),),
    ),
    "product of groups": Case(
        lambda x, w: xp(x).matmul(x, w).values, torch.matmul, (32,), ((4, 32, 16),),
        others_per_row=True,
    ),
    "softmax, a row that one CTA processes alone": Case(
        lambda x: scree.softmax(x).values, lambda x: torch.softmax(x, 0), (), lengths=[17, 9000]
    ),
    "softmax, a row cut into parts": Case(
        lambda x: scree.softmax(x).values, lambda x: torch.softmax(x, 0), (),
        lengths=[3] * 300 + [40_000, 0, 17],
    ),
    "max of scalars, a row cut into parts": Case(
        lambda x: xp(x).max(x, axis=1), reduction("amax"), (), lengths=[3] * 300 + [40_000, 1, 17],
        per_row=True,
    ),
    "cumulative sum of scalars, a row cut into parts": Case(
        lambda x: xp(x).cumulative_sum(x, axis=1).values, lambda x: torch.cumsum(x, 0), (),
        lengths=[2, 0] * 150 + [40_000, 0, 17],
    ),
    "logsumexp of scalars, a row that one CTA processes alone": Case(
        scree.logsumexp, lambda x: torch.logsumexp(x, 0), (), lengths=[5] * 300 + [9000, 1],
        per_row=True,
    ),
    "sum, a row cut into parts": Case(
        lambda x: xp(x).sum(x, axis=1), reduction("sum"), (4,), lengths=[3, 9000], per_row=True
    ),
}  # fmt: skip


def xp(x):
    return scree.namespace(x)


def split(x, lengths):
    return torch.split(x[: sum(lengths)], lengths)


def arrays_of(case, seed=0):
    random = np.random.default_rng(seed)
    shapes = (sum(case.lengths) + TAIL, *case.token), *case.others
    arrays = [random.standard_normal(shape).astype(np.float64) for shape in shapes]
    return [np.asarray(jnp.asarray(x, case.dtype)).astype(np.float64) for x in arrays]


def offsets_of(lengths):
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def expected(case, arrays):
    """Return the result, and the gradients of all arrays for random gradients of the result."""
    x, *others = (torch.tensor(a, requires_grad=True) for a in arrays)
    rows = [
        case.row(row, *(y[i] if case.others_per_row else y for y in others))
        for i, row in enumerate(split(x, case.lengths))
    ]
    out = torch.stack(rows) if case.per_row else torch.cat(rows)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    grads = torch.autograd.grad(out, (x, *others), torch.tensor(dout))
    return out.detach().numpy(), dout, [g.numpy() for g in grads]


@pytest.mark.parametrize("name", CASES)
def test_operation_and_gradient_match_a_loop_over_rows(name):
    case = CASES[name]
    arrays = arrays_of(case)
    out, dout, grads = expected(case, arrays)
    total = sum(case.lengths)
    inputs = [jnp.asarray(x, case.dtype) for x in arrays]

    @jax.jit
    def run(offsets, *inputs):
        def values(x, *others):
            rows = scree.Array(x, offsets, max_length=max(case.lengths))
            y = case.run(rows, *others)
            return y if case.per_row else y[:total]

        y, pull = jax.vjp(values, *inputs)
        return y, pull(jnp.asarray(dout, y.dtype))

    arguments = offsets_of(case.lengths), *inputs
    assert "scree_kernels_gradient" in str(run.trace(*arguments).jaxpr)
    actual, actual_grads = run(*arguments)
    tolerance = 2e-3 if case.dtype == jnp.float16 else 2e-5
    compare(actual, out, tolerance)
    for x, y in zip(actual_grads, grads, strict=True):
        compare(x, y, tolerance)


def compare(actual, expected, tolerance):
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    scale = np.abs(expected[finite]).max()
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("sampled_rows", [2, 16, 256])
@pytest.mark.parametrize("longest", [40, 33_000])
def test_rows_of_scalars_are_found_in_several_rounds(sampled_rows, longest, monkeypatch):
    monkeypatch.setattr(interface, "_SAMPLED_ROWS", sampled_rows)
    random = np.random.default_rng(sampled_rows)
    # The launch configs of this number of rows are not cached with another number of sampled rows.
    lengths = random.integers(0, 9, 600 + sampled_rows)
    lengths[random.integers(0, len(lengths), 50)] = 0
    lengths[[70, 400]] = 40, longest
    x = random.standard_normal(lengths.sum() + TAIL)
    ends = np.cumsum(lengths)
    rows = np.split(x, ends)[:-1]
    sums = np.array([row.sum() for row in rows])
    weights = np.concatenate([np.exp(row) / np.exp(row).sum() for row in rows] + [np.zeros(TAIL)])

    @jax.jit
    def run(x, offsets):
        rows = scree.Array(x, offsets, max_length=longest)
        return xp(rows).sum(rows, axis=1), scree.softmax(rows, kernel="triton_jax").values

    actual = run(jnp.asarray(x, jnp.float32), offsets_of(lengths))
    compare(actual[0], sums, 2e-5)
    compare(actual[1], weights, 2e-5)


@pytest.mark.parametrize("longest", [9000, 40_000])
def test_argmax_of_cut_rows_is_the_first_maximum(longest):
    """The maximum occurs in several parts of the row."""
    lengths = [2] * 290 + [longest, 1, longest // 2]
    x = np.random.default_rng(0).integers(0, 50, sum(lengths) + TAIL).astype(np.float32)
    expected = [row.argmax() for row in np.split(x, np.cumsum(lengths))[:-1]]
    x[sum(lengths) :] = np.nan

    @jax.jit
    def run(x, offsets):
        rows = scree.Array(x, offsets, max_length=longest)
        return xp(rows).argmax(rows, axis=1)

    np.testing.assert_array_equal(run(jnp.asarray(x), offsets_of(lengths)), expected)


@pytest.mark.parametrize("lengths", [[1] * 300, [0, 2, 1] * 200, [3, 500] * 130, [9000, 1] * 40])
def test_sums_of_integers_are_exact(lengths):
    x = np.random.default_rng(0).integers(-(1 << 20), 1 << 20, sum(lengths) + TAIL, dtype=np.int32)
    expected = [row.sum() for row in np.split(x, np.cumsum(lengths))[:-1]]

    @jax.jit
    def run(x, offsets):
        rows = scree.Array(x, offsets)
        return xp(rows).sum(rows, axis=1), xp(rows).cumulative_sum(rows, axis=1).values

    sums, cumulative = run(jnp.asarray(x), offsets_of(lengths))
    np.testing.assert_array_equal(sums, expected)
    ends = np.cumsum(lengths)[np.asarray(lengths) > 0] - 1
    np.testing.assert_array_equal(cumulative[ends], np.asarray(expected)[np.asarray(lengths) > 0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("parts", "classes", "many", "dtype"),
    [
        (1, 24, 1024, jnp.float32),
        (3, 21, 1024, jnp.float32),
        (3, 24, 1024, jnp.float16),
        (3, 21, 1024, jnp.float16),
        (3, 21, 21, jnp.float16),
    ],
)
def test_linear_cross_entropy_matches_a_loop_over_tokens(
    reduction, has_bias, parts, classes, many, dtype, monkeypatch
):
    monkeypatch.setattr(linear_cross_entropy, "MANY_CLASSES", many)
    monkeypatch.setattr(linear_cross_entropy, "MIN_TOKENS", 8)
    monkeypatch.setattr(linear_cross_entropy, "MAX_PARTS", parts)
    case = CASES["linear_cross_entropy"]
    arrays, total = arrays_of(case), sum(case.lengths)
    arrays[0][total:] = np.nan
    arrays[1] = arrays[1][:classes]
    if has_bias:
        arrays.append(np.random.default_rng(3).standard_normal(classes))
    arrays = [np.asarray(a, dtype).astype(np.float32) for a in arrays]
    x, w, *bias = leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    labels = np.random.default_rng(2).integers(0, classes, total + TAIL)
    labels[5:9] = -100
    target = torch.tensor(labels[:total])
    logits = torch.nn.functional.linear(x[:total], w, *bias)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    grads = torch.autograd.grad(2 * loss, leaves)

    @jax.jit
    def run(offsets, targets, *inputs):
        def twice(x, w, bias=None):
            rows = scree.Array(x, offsets, max_length=max(case.lengths))
            options = dict(bias=bias, reduction=reduction, kernel="triton_jax")
            return 2 * scree.linear_cross_entropy(rows, w, rows.with_values(targets), **options)

        return twice(*inputs), jax.grad(twice, (*range(len(inputs)),))(*inputs)

    inputs = [jnp.asarray(a, dtype) for a in arrays]
    arguments = offsets_of(case.lengths), jnp.asarray(labels, jnp.int32), *inputs
    assert "scree_kernels_gradient" in str(run.trace(*arguments).jaxpr)
    value, actual_grads = run(*arguments)
    tolerance = 2e-3 if dtype == jnp.float16 else 2e-5
    compare(value, np.asarray(2 * loss.item()), tolerance / 10)
    for actual, exact in zip(actual_grads, grads, strict=True):
        compare(actual, exact.numpy(), tolerance)


@pytest.mark.parametrize(
    ("max_logits", "parts", "size"),
    [
        (None, 12, 1368),
        (1 << 40, 1, 16384),
        (7 * 1000, 2341, 7),
        (2000 * 1000, 9, 1824),
        (1, 16384, 1),
    ],
)
def test_linear_cross_entropy_has_at_most_max_logits(max_logits, parts, size):
    kinds = jax.ShapeDtypeStruct

    def loss(x, weight, targets):
        return scree.linear_cross_entropy(
            x, weight, targets, max_logits=max_logits, kernel="triton_jax"
        )

    arguments = kinds((16384, 8), jnp.float32), kinds((1000, 8), jnp.float32)
    targets = kinds((16384,), jnp.int32)
    traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments, targets))
    assert f"f32[{parts},{size},8]" in traced
    # The transposed weight has 8 rows. All other arrays of this width are logits.
    assert {*re.findall(r"f32\[(\d+),1000\]", traced)} == {str(size), "8"}


@pytest.mark.parametrize(("label", "ignore_index"), [(22, -100), (23, -1), (-2, -1), (24, 24)])
def test_linear_cross_entropy_of_a_label_that_is_no_class_is_nan(label, ignore_index):
    """Products in float16 have 24 classes here, of which the weight has 21."""
    x, w = jnp.ones((8, 8), jnp.float16), jnp.ones((21, 8), jnp.float16)

    def loss(x, w, targets):
        options = dict(ignore_index=ignore_index, kernel="triton_jax")
        return scree.linear_cross_entropy(x, w, targets, **options)

    def run(targets):
        run = jax.jit(jax.value_and_grad(loss, (0, 1)))
        values = jax.jit(loss)(x, w, targets), *jax.tree.leaves(run(x, w, targets))
        return [bool(jnp.isnan(value).any()) for value in values]

    assert run(jnp.full(8, 3).at[5].set(label)) == [label != ignore_index] * 4
    assert run(jnp.full(8, 3).at[5].set(ignore_index)) == [False] * 4


def test_linear_cross_entropy_of_no_token_has_no_gradient():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 4))

    def loss(x, w):
        targets = jnp.full(3, -100, jnp.int32)
        return scree.linear_cross_entropy(x, w, targets, kernel="triton_jax")

    assert np.isnan(loss(x, w))
    assert all((np.asarray(g) == 0).all() for g in jax.grad(loss, (0, 1))(x, w))


def cache_problem(q_lengths, kv_lengths, page_size=4):
    """Return queries, pages, the page table and the lengths of a cache of random tokens."""
    random = np.random.default_rng(0)
    counts = [-(-n // page_size) for n in kv_lengths]
    numbers = random.permutation(sum(counts) + 2)
    table = np.full((len(counts), max(counts) + 1), -1)
    for row, count in enumerate(counts):
        table[row, :count], numbers = numbers[:count], numbers[count:]
    pages = [random.standard_normal((sum(counts) + 2, page_size, 2, 16)) for _ in range(2)]
    q = random.standard_normal((sum(q_lengths), 4, 16))
    return q, pages, table, np.asarray(kv_lengths)


def attend_to_pages(q, pages, table, q_lengths, kv_lengths):
    """Compute causal attention of each row to its pages, in float64."""
    out, start = [], 0
    for row, (m, n) in enumerate(zip(q_lengths, kv_lengths)):
        k, v = (p[table[row]].reshape(-1, 2, 16)[:n].repeat(2, axis=1) for p in pages)
        scores = np.einsum("ihd,jhd->hij", q[start : start + m], k) / 4
        scores[:, np.arange(n) > np.arange(m)[:, None] + n - m] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v))
        start += m
    return np.concatenate(out)


def check_tail(out, lse):
    """Compare the tail of the results of attention with 0 and -inf."""
    assert out.shape[0] == TAIL
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    if lse is not None:
        np.testing.assert_array_equal(lse, np.full(out.shape[:2], -np.inf))


@pytest.mark.parametrize("q_lengths", [[1, 1, 1], [1, 40, 2]], ids=["decode", "prefill too"])
def test_paged_attention_matches_a_loop_over_rows(q_lengths):
    kv_lengths, total = [9, 41, 2], sum(q_lengths)
    q, pages, table, lengths = cache_problem(q_lengths, kv_lengths)
    padded_q = np.concatenate([q, np.full((TAIL, *q.shape[1:]), np.nan)])

    @jax.jit
    def run(q, k_pages, v_pages, table, offsets, lengths):
        rows = scree.Array(q, offsets, max_length=max(q_lengths))
        out, lse = scree.paged_attention(
            rows, k_pages, v_pages, table, lengths, return_lse=True, kernel="triton_jax"
        )
        assert lse.values.shape == q.shape[:2]
        return out.values, lse.values

    floats = (jnp.asarray(x, jnp.float32) for x in (padded_q, *pages))
    integers = (jnp.asarray(x, jnp.int32) for x in (table, np.cumsum([0, *q_lengths]), lengths))
    actual, lse = run(*floats, *integers)
    compare(actual[:total], attend_to_pages(q, pages, table, q_lengths, kv_lengths), 2e-5)
    check_tail(actual[total:], lse[total:])


def attend_to_rows(q, k, v, q_lengths, k_lengths):
    """Return causal attention and its log-sum-exp, by a loop over rows; queries are the last tokens."""
    outs, lses, start, k_start = [], [], 0, 0
    for m, n in zip(q_lengths, k_lengths):
        keys, values = (x[k_start : k_start + n].repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->ihj", q[start : start + m], keys) / 4
        future = torch.arange(n) > torch.arange(m)[:, None] + n - m
        scores = scores.masked_fill(future[:, None], -torch.inf)
        outs.append(torch.einsum("ihj,jhd->ihd", torch.softmax(scores, -1), values))
        lses.append(torch.logsumexp(scores, -1))
        start, k_start = start + m, k_start + n
    return torch.cat(outs), torch.cat(lses)


def test_attention_of_few_queries_decodes_unless_it_is_differentiated():
    q_lengths, k_lengths = [1, 2, 0, 1], [300, 9, 4, 65]
    random = np.random.default_rng(0)
    shapes = (sum(q_lengths), 4, 16), (sum(k_lengths), 2, 16), (sum(k_lengths), 2, 24)
    arrays = [random.standard_normal(shape) for shape in shapes]
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    out, lse = attend_to_rows(*leaves, q_lengths, k_lengths)
    grads = torch.autograd.grad(torch.sin(out).sum() + torch.sin(lse).sum(), leaves)

    def attend(return_lse, q, k, v):
        queries = scree.Array(q, offsets_of(q_lengths), max_length=2)
        keys = scree.Array(k, offsets_of(k_lengths), max_length=300)
        options = dict(causal=True, kernel="triton_jax", return_lse=return_lse)
        result = scree.attention(queries, keys, keys.with_values(v), **options)
        return [x.values for x in (result if return_lse else (result,))]

    def loss(*inputs):
        return sum(jnp.sum(jnp.sin(x)) for x in attend(True, *inputs))

    inputs, total = [jnp.asarray(x, jnp.float32) for x in arrays], sum(q_lengths)
    tail = jnp.full((TAIL, 4, 16), jnp.nan)
    padded_inputs = jnp.concatenate([inputs[0], tail]), *inputs[1:]
    for return_lse in (True, False):
        run = jax.jit(partial(attend, return_lse))
        assert "max_queries=2" in str(run.trace(*inputs).jaxpr)
        for arguments in (inputs, padded_inputs):
            actual = run(*arguments)
            for x, exact in zip(actual, (out, lse)):
                compare(x[:total], exact.detach().numpy(), 2e-5)
        check_tail(*(x[total:] for x in actual), *([] if return_lse else [None]))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    assert "max_queries=0" in str(gradient.trace(*inputs).jaxpr)
    for x, exact in zip(gradient(*inputs), grads, strict=True):
        compare(x, exact.numpy(), 5e-5)


def test_append_paged_writes_tokens_and_keeps_its_arguments():
    lengths, new = [9, 41, 2], [2, 1, 0]
    x, (k_pages, v_pages), table, _ = cache_problem(new, lengths)
    before = jnp.asarray(k_pages, jnp.float32)
    x, pages = jnp.asarray(x[:, :2], jnp.float32), (before, jnp.asarray(v_pages, jnp.float32))
    table, kv_lengths = jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)

    @jax.jit
    def run(pages, x, offsets):
        rows = scree.Array(x, offsets, max_length=2)
        options = dict(q=rows, rope={"theta": 100.0}, kernel="triton_jax")
        return scree.append_paged(*pages, rows, rows * 2, table, kv_lengths, **options)

    k_out, v_out, q_out = run(pages, x, offsets_of(new))
    np.testing.assert_array_equal(before, np.asarray(k_pages, np.float32))
    starts = jnp.asarray([7, 40, 2], jnp.int32)
    rows = scree.Array(x, offsets_of(new))
    rotated = scree.rope(rows, theta=100.0, start=starts, kernel="standard").values
    compare(q_out.values, np.asarray(rotated, np.float64), 2e-6)
    for out, tokens, original in ((k_out, rotated, before), (v_out, 2 * x, pages[1])):
        expected = np.array(original)
        for token, (row, position) in enumerate([(0, 7), (0, 8), (1, 40)]):
            expected[table[row, position // 4], position % 4] = tokens[token]
        compare(out, expected.astype(np.float64), 2e-6)


def test_error_of_a_recording_selects_the_standard_path_once(monkeypatch):
    recordings = Mock(side_effect=RuntimeError("no such tile"))
    monkeypatch.setattr(operations, "record", recordings)
    rows = scree.Array(jnp.ones((9, 5)), offsets_of([4, 5]), max_length=5)
    with pytest.warns(RuntimeWarning, match="softmax: .* cannot run .* no such tile"):
        first = scree.softmax(rows).values
    count = recordings.call_count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(scree.softmax(rows).values, first)
    assert recordings.call_count == count
    compare(first, np.repeat([0.25, 0.2], [4, 5])[:, None].repeat(5, 1), 1e-6)
    assert "no such tile" in scree.explain("softmax", rows).rejected["triton_jax"]


def test_arrays_of_torch_are_rejected_with_a_sentence():
    offsets = torch.as_tensor([0, 2, 3], dtype=torch.int32)
    rows = scree.Array(torch.ones(3, 4), offsets)
    for name, *arguments in (("softmax", rows), ("rms_norm", rows.values), ("sum", rows)):
        options = dict(axis=1) if name == "sum" else {}
        rejected = scree.explain(name, *arguments, **options).rejected["triton_jax"]
        assert rejected == "the Triton kernels for JAX take arrays of JAX"
    assert xp(rows).sum(rows, axis=1).tolist() == [[2.0] * 4, [1.0] * 4]
