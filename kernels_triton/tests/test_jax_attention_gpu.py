"""Attention kernels under the transforms of JAX on a GPU, against a loop over rows in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

import scree
import scree_triton.jax

pytestmark = pytest.mark.gpu
LENGTHS = [200, 0, 1, 77, 130, 64]
TARGET = "triton_kernel_call_ffi"


@pytest.fixture(autouse=True)
def kernels_for_jax(isolated_registry):
    scree.namespace(jnp.zeros(1))
    scree_triton.jax.register()
    with jax.default_matmul_precision("highest"):
        yield


def attend(q, k, v, offsets):
    rows = scree.Array(q, offsets, max_length=max(LENGTHS))
    options = dict(causal=True, kernel="triton_jax")
    return scree.attention(rows, rows.with_values(k), rows.with_values(v), **options).values


def loss(q, k, v, offsets):
    return jnp.sum(jnp.sin(attend(q, k, v, offsets).astype(jnp.float32)))


def gradient(q, k, v, offsets):
    return jax.grad(loss, (0, 1, 2))(q, k, v, offsets)


def offsets_of(lengths):
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


@cache
def arrays(dtype):
    random = np.random.default_rng(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 2, 2)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def expected(dtype, lengths):
    """Return causal attention and the gradients of `loss`, in float64."""
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in arrays(dtype)]
    rows = []
    for q, k, v in zip(*(torch.split(x, lengths) for x in leaves)):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / 8
        mask = torch.ones(len(q), len(q)).triu(1).bool()
        weights = torch.softmax(scores.masked_fill(mask, -torch.inf), -1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v))
    out = torch.cat(rows)
    return out.detach(), torch.autograd.grad(torch.sin(out).sum(), leaves)


def compare(actual, exact, dtype):
    actual, exact = np.asarray(actual, np.float64), exact.numpy()
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_attention_and_its_gradient_serve_new_offsets_without_compilation(dtype):
    # Functions of their own: programs of one function are counted together, whatever the dtype.
    run, compiled = (jax.jit(lambda *x, f=f: f(*x)) for f in (attend, gradient))
    for lengths in (LENGTHS, LENGTHS[::-1]):
        out, grads = expected(dtype, lengths)
        offsets = offsets_of(lengths)
        compare(run(*arrays(dtype), offsets), out, dtype)
        for actual, exact in zip(compiled(*arrays(dtype), offsets), grads, strict=True):
            compare(actual, exact, dtype)
    assert run._cache_size() == compiled._cache_size() == 1


def test_checkpoint_runs_the_forward_kernels_twice_and_computes_the_same_gradients():
    inputs = *arrays(jnp.bfloat16), offsets_of(LENGTHS)
    plain, checkpointed = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (loss, jax.checkpoint(loss))
    )
    counts = [f.lower(*inputs).as_text().count(TARGET) for f in (plain, checkpointed)]
    assert counts[1] > counts[0]
    for x, y in zip(checkpointed(*inputs)[1], plain(*inputs)[1], strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_exported_program_computes_the_same_gradients():
    inputs = *arrays(jnp.bfloat16), offsets_of(LENGTHS)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = jax.export.export(jax.jit(gradient), disabled_checks=allowed)(*inputs)
    run = jax.jit(jax.export.deserialize(exported.serialize()).call)
    for lengths in (LENGTHS, LENGTHS[::-1]):
        inputs = *inputs[:3], offsets_of(lengths)
        for x, y in zip(run(*inputs), jax.jit(gradient)(*inputs), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_shard_map_over_heads_computes_the_same_gradients():
    inputs = *arrays(jnp.bfloat16), offsets_of(LENGTHS)
    devices = jax.local_devices()[:2]
    mesh, heads = Mesh(np.array(devices), "heads"), PartitionSpec(None, "heads")
    specs = (heads, heads, heads, PartitionSpec())
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)

    def sharded_loss(*inputs):
        return jnp.sum(jnp.sin(sharded(*inputs).astype(jnp.float32)))

    grads = jax.jit(jax.grad(sharded_loss, (0, 1, 2)))(*inputs)
    for actual, exact in zip(grads, expected(jnp.bfloat16, LENGTHS)[1], strict=True):
        compare(actual, exact, jnp.bfloat16)


def test_scan_over_layers_with_checkpoint_matches_the_loops():
    q, _, _ = arrays(jnp.float32)
    offsets = offsets_of(LENGTHS)

    def model(q, kernel):
        @jax.checkpoint
        def layer(x, _):
            rows = scree.Array(x, offsets, max_length=max(LENGTHS))
            y = scree.attention(rows, rows, rows, causal=True, kernel=kernel).values
            return scree.rms_norm(x + y), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, length=3)[0]))

    actual, exact = (
        jax.jit(jax.grad(lambda q, k=k: model(q, k)))(q) for k in ("triton_jax", "loops")
    )
    np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-4 * float(jnp.abs(exact).max()))
