"""The same code under the transforms of each library: traced, compiled, differentiated."""

import warnings

import numpy as np
import pytest

import scree

LENGTHS = [4, 0, 2, 70, 1, 33]
OTHER = [33, 1, 70, 2, 0, 4]


def block(q: scree.Array, k: scree.Array, v: scree.Array) -> object:
    """Attention, softmax, norm, reductions and a scan, to one number."""
    k, v = scree.align(k, like=q), scree.align(v, like=q)
    xp = scree.namespace(q)
    out = xp.ragged.attention(q, k, v, causal=True)
    out = xp.ragged.softmax(out) + xp.ragged.rms_norm(out)
    return xp.sum(xp.cumulative_sum(out, axis=1)) + xp.sum(xp.sum(out, axis=1))


def tensors(heads: int) -> np.ndarray:
    return np.random.default_rng(heads).standard_normal((sum(LENGTHS), heads, 8)).astype(np.float32)


def jax_arrays(lengths: list[int]) -> list[scree.Array]:
    import jax.numpy as jnp

    return [scree.from_lengths(jnp.asarray(tensors(heads)), lengths, max_length=70) for heads in (4, 2, 2)]


def test_jax_jit_gives_the_same_and_never_recompiles() -> None:
    import jax

    traces = []

    def traced(q: scree.Array, k: scree.Array, v: scree.Array) -> object:
        traces.append(q.shape)
        return block(q, k, v)

    compiled = jax.jit(traced)
    for lengths in (LENGTHS, OTHER):
        arrays = jax_arrays(lengths)
        np.testing.assert_allclose(compiled(*arrays), block(*arrays), rtol=1e-5)
    assert len(traces) == 1


def test_jax_gradients_are_the_same_traced_and_not() -> None:
    import jax

    arrays = jax_arrays(LENGTHS)
    gradient = jax.grad(block, allow_int=True)
    eager, traced = gradient(*arrays), jax.jit(gradient)(*arrays)
    assert isinstance(eager, scree.Array)
    np.testing.assert_allclose(eager.values, traced.values, atol=1e-4)


def test_attention_under_a_trace_asks_for_a_bound() -> None:
    import jax

    q, k, v = (scree.Array(x.values, x.offsets) for x in jax_arrays(LENGTHS))
    with pytest.raises(ValueError, match="give max_length=, or call q.validate"):
        jax.jit(block)(q, k, v)


def test_sizes_that_depend_on_the_offsets_raise_under_a_trace() -> None:
    import jax

    (q, *_) = jax_arrays(LENGTHS)
    with pytest.raises(TypeError, match="depends on the offsets"):
        jax.jit(lambda x: x[:, 1:3].values)(q)


@pytest.mark.parametrize("backward", [False, True])
def test_torch_compiles_without_a_break(backward: bool) -> None:
    import torch

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return block(*(scree.from_cu_seqlens(x, offsets, max_length=70) for x in (q, k, v)))

    values = [torch.from_numpy(tensors(heads)).requires_grad_(backward) for heads in (4, 2, 2)]
    offsets = scree.from_lengths(values[0].detach(), LENGTHS).offsets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own, about the caches of array_api_compat
        compiled = torch.compile(dense, backend="aot_eager", fullgraph=True)(*values, offsets)
    plain = dense(*values, offsets)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-3)
    if backward:
        one, other = (torch.autograd.grad(x, values) for x in (compiled, plain))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
