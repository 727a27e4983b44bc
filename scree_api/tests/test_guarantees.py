"""Guarantees about rows: no row touches another row or the tail, in results and in gradients."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from libraries import NAMES, load

import scree

GRADIENTS = [name for name in NAMES if name in ("torch", "jax", "mlx")]
#: Libraries whose eager arrays may have a tail.
WITH_TAIL = [name for name in NAMES if name in ("torch", "mlx")]
REDUCTIONS = "sum prod mean max min var std".split()


def with_tail(name: str, values: np.ndarray, lengths: list[int]) -> scree.Array:
    arrays = load(name)
    offsets = arrays.i(np.cumsum([0, *lengths]))
    return scree.Array.unchecked(arrays.make(values), offsets, 0, max(lengths))


@pytest.mark.parametrize("name", WITH_TAIL)
def test_mask_true_in_the_tail_selects_no_token(name: str) -> None:
    arrays = load(name)
    x = with_tail(name, np.arange(6, dtype=np.float32), [2, 0, 1])
    mask = x.with_values(arrays.b([True, False, True, True, True, True]))
    assert arrays.library.read(x[mask].values).tolist() == [0.0, 2.0]
    updated = scree.at(x)[mask].set(9.0)
    assert arrays.library.read(updated.values)[:3].tolist() == [9.0, 1.0, 9.0]
    xp = arrays.xp
    assert int(xp.count_nonzero(mask)) == 2
    assert arrays.library.read(xp.count_nonzero(mask, axis=1)).tolist() == [1, 0, 1]
    assert arrays.library.read(xp.any(mask, axis=1)).tolist() == [True, False, True]
    assert not bool(xp.all(mask))
    assert [len(index) for index in xp.nonzero(mask)] == [2, 2]


@pytest.mark.parametrize("name", NAMES)
def test_reduction_nan_in_another_row_has_no_influence(name: str) -> None:
    arrays, xp = load(name), load(name).xp
    lengths = [1, 40, 2, 0, 70, 1, 1, 3]
    rng = np.random.default_rng(0)
    values = np.exp(rng.standard_normal((sum(lengths), 3)) / 9).astype(np.float32)
    x = scree.from_lengths(arrays.make(values), lengths)
    ends = np.cumsum(lengths)
    for bad_row in (1, 5):
        changed = values.copy()
        changed[ends[bad_row] - 1] = np.nan
        changed[ends[bad_row] - lengths[bad_row]] = np.inf
        y = scree.from_lengths(arrays.make(changed), lengths)
        others = [i for i in range(len(lengths)) if i != bad_row]
        is_other = np.repeat([i != bad_row for i in range(len(lengths))], lengths)
        for function in REDUCTIONS:
            a, b = (arrays.library.read(getattr(xp, function)(z, axis=1)) for z in (x, y))
            np.testing.assert_array_equal(a[others], b[others], err_msg=function)
        for call in (xp.cumulative_sum, xp.cumulative_prod, xp.sort):
            a, b = (arrays.library.read(call(z, axis=1).values) for z in (x, y))
            np.testing.assert_array_equal(a[is_other], b[is_other])
        for call in (scree.softmax, lambda z: z @ arrays.f(len(lengths), 3, 2)):
            a, b = (arrays.library.read(call(z).values) for z in (x, y))
            np.testing.assert_array_equal(a[is_other], b[is_other])


@pytest.mark.parametrize("name", WITH_TAIL)
def test_grouped_matmul_of_a_tail_alone_is_zero(name: str) -> None:
    x = with_tail(name, np.full((3, 2), np.nan, np.float32), [0, 0])
    assert not load(name).library.read((x @ load(name).f(2, 2, 4)).values).any()


@pytest.mark.parametrize("function", ["softmax", "attention"])
@pytest.mark.parametrize("lengths", [[2, 3, 0], [0, 0], [5, 1]])
@pytest.mark.parametrize("name", WITH_TAIL)
def test_gradient_nan_in_the_tail_has_no_influence(
    name: str, lengths: list[int], function: str
) -> None:
    arrays = load(name)
    total = sum(lengths)
    values = np.ones((total + 4, 1, 2), np.float32)
    values[total:] = np.nan
    x = with_tail(name, values, lengths)
    weight = arrays.make((np.arange(total + 4) < total).astype(np.float32)[:, None, None])

    def loss(values: Any) -> Any:
        a = scree.Array.unchecked(values, x.offsets, 0, max(lengths))
        if function == "softmax":
            out = scree.softmax(a).values
        else:
            out = scree.attention(a, a, a, causal=True, window=2, kernel="standard").values
        xp = scree.namespace(out)
        return xp.sum(xp.where(weight > 0, out, xp.zeros_like(out)))

    (grad,) = arrays.library.grad(loss, x.values)
    grad = arrays.library.read(grad)
    assert np.isfinite(grad[:total]).all() and not grad[total:].any()


@pytest.mark.parametrize("name", GRADIENTS)
def test_attention_gradient_nan_query_of_the_next_row_has_no_influence(name: str) -> None:
    arrays = load(name)
    values = np.ones((9, 1, 2), np.float32)
    values[3:] = np.nan
    weight = arrays.make((np.arange(9) < 3).astype(np.float32)[:, None, None])

    def loss(values: Any) -> Any:
        x = scree.from_lengths(values, [3, 6], max_length=6)
        out = scree.attention(x, x, x, causal=True, window=2).values
        xp = scree.namespace(out)
        return xp.sum(xp.where(weight > 0, out, xp.zeros_like(out)))

    (grad,) = arrays.library.grad(loss, arrays.make(values))
    assert np.isfinite(arrays.library.read(grad)[:3]).all()


@pytest.mark.parametrize("fill", [0.0, 1.0, float("nan"), 3e38])
@pytest.mark.parametrize("name", [name for name in GRADIENTS if name == "mlx"])
def test_gradients_beside_a_tail_and_empty_rows_are_finite(name: str, fill: float) -> None:
    """The tail has no gradient, and a trailing empty row has no influence."""
    arrays, xp = load(name), load(name).xp
    values = np.full((5, 3), fill, np.float32)
    values[:3] = np.arange(9.0).reshape(3, 3) / 7
    offsets = arrays.i([0, 2, 3, 3])
    calls = [lambda x, f=f: getattr(xp, f)(x, axis=1) for f in (*REDUCTIONS, "cumulative_sum")]
    calls += [scree.softmax, scree.log_softmax, scree.logsumexp, lambda x: xp.sort(x, axis=1)]
    for call in calls:

        def loss(values: Any, call: Any = call) -> Any:
            out = call(scree.Array(values, offsets, max_length=2))
            out = out.values[:3, ...] if isinstance(out, scree.Array) else out[:2, ...]
            return xp.sum(xp.square(out))

        (grad,) = arrays.library.grad(loss, arrays.make(values))
        grad = arrays.library.read(grad)
        assert np.isfinite(grad[:3]).all()
        assert (grad[3:] == 0).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_of_an_empty_batch_is_empty(name: str, lengths: list[int]) -> None:
    arrays, xp = load(name), load(name).xp
    calls = [lambda x, f=f: getattr(xp, f)(x, axis=1) for f in (*REDUCTIONS, "cumulative_sum")]
    calls += [scree.softmax, scree.log_softmax, scree.logsumexp, lambda x: xp.sort(x, axis=1)]
    calls += [lambda x: scree.attention(x, x, x, causal=True)]
    calls += [lambda x, axis=axis: xp.concat([x, x], axis=axis) for axis in (0, 1, 2)]
    calls += [lambda x: xp.tile(x, (1, 2, 1, 1)), lambda x: xp.repeat(x, 2, axis=1)]
    calls += [lambda x: xp.flip(x, axis=1), lambda x: xp.roll(x, 1, axis=1), lambda x: x[:, 1:]]
    calls += [lambda x: xp.diff(x, axis=1), lambda x: scree.to_padded(x, length=2)[0]]
    for call in calls:

        def loss(values: Any, call: Any = call) -> Any:
            x = scree.from_lengths(values, lengths, max_length=0)
            out = call(x)
            out = out.values if isinstance(out, scree.Array) else out
            return xp.sum(xp.where(xp.isfinite(out), out, xp.zeros_like(out)))

        (grad,) = arrays.library.grad(loss, arrays.f(0, 2, 3))
        assert tuple(grad.shape) == (0, 2, 3)


@pytest.mark.parametrize("token", [(0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_functions_of_elements_of_size_0_return_their_shape(
    name: str, token: tuple[int, ...]
) -> None:
    arrays, xp, lengths = load(name), load(name).xp, [2, 0, 40]
    x = scree.from_lengths(arrays.f(42, *token), lengths)
    for function in (*REDUCTIONS, "any", "all", "argmax"):
        assert tuple(getattr(xp, function)(x, axis=1).shape) == (3, *token), function
    for call in (xp.cumulative_sum, xp.sort, xp.argsort, xp.flip):
        assert call(x, axis=1).shape == (3, None, *token)
    assert scree.softmax(x).shape == (3, None, *token)
    assert tuple(scree.logsumexp(x).shape) == (3, *token)
    assert tuple(scree.to_padded(x)[0].shape) == (3, 40, *token)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mlx"])
def test_threads_that_share_a_layout_get_the_same_results(name: str) -> None:
    arrays, xp = load(name), load(name).xp
    rng = np.random.default_rng(0)
    for _ in range(3 if name == "jax" else 20):
        lengths = [1, 50, 3, 0, 7]
        values = rng.standard_normal((sum(lengths), 1, 4)).astype(np.float32)
        x = scree.from_lengths(arrays.make(values), lengths)
        fresh = scree.from_lengths(arrays.make(values), lengths)
        calls = [
            lambda a: xp.cumulative_sum(a, axis=1).values,
            lambda a: xp.prod(a, axis=1),
            lambda a: xp.sort(a, axis=1).values,
            lambda a: scree.softmax(a).values,
            lambda a: scree.attention(a, a, a, causal=True).values,
        ]
        expected = [arrays.library.read(call(fresh)) for call in calls]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda call, x=x: call(x), calls * 4))
        for got, want in zip(results, expected * 4, strict=True):
            np.testing.assert_array_equal(arrays.library.read(got), want)


@pytest.mark.parametrize("name", NAMES)
def test_namespace_is_built_once_when_many_threads_are_first(name: str) -> None:
    module = {"mlx": "mlx.core", "jax": "jax.numpy"}.get(name, name)
    code = f"""
import sys, threading, scree, {module} as library
x = library.{"array" if name == "mlx" else "asarray"}([1.0, 2.0])
sys.setswitchinterval(1e-6)
barrier, found = threading.Barrier(16), []
def look():
    barrier.wait()
    found.append(scree.namespace(x))
threads = [threading.Thread(target=look) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), len({{id(xp) for xp in found}}))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16", "1"], done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_layouts_used_together_both_ways_are_freed_at_once(name: str) -> None:
    """A cycle of two layouts would live until a garbage collection."""
    arrays, xp = load(name), load(name).xp
    gc.collect()
    gc.disable()
    try:
        for call in (
            lambda a, b: xp.concat([a, b], axis=0),
            lambda a, b: xp.concat([a, b], axis=1),
            lambda a, b: scree.attention(a, b, b),
        ):
            a, b = (scree.from_lengths(arrays.f(5, 1, 2), [2, 3], max_length=3) for _ in range(2))
            layouts = weakref.ref(a.layout), weakref.ref(b.layout)
            call(a, b)
            call(b, a)
            del a, b
            assert [layout() for layout in layouts] == [None, None]
    finally:
        gc.enable()
