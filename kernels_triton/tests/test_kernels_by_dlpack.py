"""The kernels on arrays of another library, against a loop over rows in float64.

Without a GPU the kernels run in Triton's interpreter, on arrays of NumPy. On a GPU they run on CuPy.
"""

import numpy as np
import pytest
import torch

import scree
from scree_triton import dlpack
from scree_triton.runtime.launch import INTERPRETED

ON_CUPY = not INTERPRETED
pytestmark = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.needs("cupy")]
LENGTHS = [5, 0, 33, 2]
OFFSETS = np.cumsum([0, *LENGTHS])


@pytest.fixture(autouse=True)
def kernels_by_dlpack(monkeypatch, isolated_registry):
    monkeypatch.setattr(dlpack, "_runs_here", lambda: True)
    if not ON_CUPY:
        monkeypatch.setattr(dlpack, "LIBRARIES", {"numpy"})
    scree.namespace(asarray(np.zeros(1)))
    dlpack.register()


def asarray(x):
    if not ON_CUPY:
        return x
    import cupy

    return cupy.asarray(x)


def to_numpy(x):
    return x.get() if ON_CUPY else np.asarray(x)


def rows_of(*token, seed=0):
    values = np.random.default_rng(seed).standard_normal((sum(LENGTHS), *token))
    values = values.astype(np.float32)
    offsets = asarray(OFFSETS.astype(np.int32))
    return values.astype(np.float64), scree.Array(asarray(values), offsets, max_length=40)


def split(x):
    return [x[a:b] for a, b in zip(OFFSETS, OFFSETS[1:])]


def softmax(x, axis=0):
    weights = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return weights / weights.sum(axis, keepdims=True)


def compare(actual, expected):
    assert type(actual) is type(asarray(np.zeros(1)))
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=2e-5, atol=2e-5)


def test_softmax_matches_a_loop_over_rows():
    x, rows = rows_of(6)
    out = scree.softmax(rows, kernel="triton_dlpack")
    compare(out.values, np.concatenate([softmax(row) for row in split(x)]))
    assert out.layout is rows.layout


def test_sum_and_argmax_of_rows_match_a_loop_over_rows():
    x, rows = rows_of(6)
    xp = scree.namespace(rows)
    assert scree.explain("sum", rows, axis=1).rejected == {}
    compare(xp.sum(rows, axis=1), np.stack([row.sum(0) for row in split(x)]))
    compare(xp.argmax(rows[2:], axis=1), np.stack([row.argmax(0) for row in split(x)[2:]]))


def test_norm_of_a_sum_matches_a_loop_over_rows():
    x, rows = rows_of(8)
    y, other = rows_of(8, seed=1)
    residual = rows.with_values(other.values)  # offsets on the GPU are not compared
    weight = np.linspace(1, 2, 8)
    options = dict(residual=residual, kernel="triton_dlpack")
    out, total = scree.rms_norm(rows, asarray(weight.astype(np.float32)), **options)
    norm = np.sqrt(((x + y) ** 2).mean(1, keepdims=True) + 1e-6)
    compare(out.values, (x + y) / norm * weight)
    compare(total.values, x + y)


def test_attention_matches_a_loop_over_rows():
    (q, queries), (k, keys), (v, values) = (rows_of(2, 16, seed=seed) for seed in range(3))
    keys, values = (queries.with_values(a.values) for a in (keys, values))
    options = dict(causal=True, return_lse=True, kernel="triton_dlpack")
    out, lse = scree.attention(queries, keys, values, **options)
    results = []
    for a, b, c in zip(split(q), split(k), split(v)):
        scores = np.einsum("ihd,jhd->hij", a, b) / 4
        scores[:, ~np.tri(len(a), dtype=bool)] = -np.inf
        results.append(np.einsum("hij,jhd->ihd", softmax(scores, 2), c))
    compare(out.values, np.concatenate(results))
    assert lse.values.shape == q.shape[:2] and lse.layout is queries.layout


@pytest.mark.parametrize("is_ragged", [False, True])
def test_cross_entropy_matches_a_loop_over_tokens(is_ragged):
    x, rows = rows_of(6)
    targets = np.arange(len(x)) % 6
    arguments = rows.values, asarray(targets)
    if is_ragged:
        arguments = rows, rows.with_values(arguments[1])
    loss = scree.cross_entropy(*arguments, kernel="triton_dlpack")
    expected = np.mean([np.log(np.exp(a).sum()) - a[i] for a, i in zip(x, targets)])
    compare(loss, expected)


def test_other_libraries_and_dtypes_are_rejected_with_a_sentence():
    tensors = scree.Array(torch.ones(3, 4), torch.as_tensor([0, 2, 3], dtype=torch.int32))
    rejected = scree.explain("softmax", tensors).rejected["triton_dlpack"]
    assert rejected.startswith("the Triton kernels by DLPack take arrays of ")
    _, rows = rows_of(4)
    complexes = rows.with_values(rows.values.astype(np.complex64))
    xp = scree.namespace(rows)
    assert scree.explain("sum", complexes, axis=1).rejected["triton_dlpack"]
    assert xp.sum(complexes, axis=1).shape == (4, 4)


def test_explain_and_calls_keep_no_arrays():
    _, rows = rows_of(6)
    scree.explain("softmax", rows)
    assert dlpack._accepted.call is dlpack._accepted.converted is None
    scree.softmax(rows, kernel="triton_dlpack")
    assert dlpack._accepted.call is dlpack._accepted.converted is None
