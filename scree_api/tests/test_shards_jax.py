"""Shards on 8 virtual devices of JAX have the results and the gradients of whole rows."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("jax")

#: Lengths of rows, and (causal, window) of each call; some devices have no token.
CASES: list[tuple[list[int], list[Any]]] = [
    ([17, 3, 0, 9, 45], [(True, 5), (False, None)]),
    ([1, 0, 30], [(True, None)]),
]


def check() -> None:
    """Run all comparisons; the process has 8 devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    import scree
    from scree.distributed import shard, unshard

    mesh = jax.make_mesh((8,), ("cp",))
    spec = PartitionSpec("cp")
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def compare(body: Any, leaves: list[Any], lengths: list[int]) -> None:
        base = scree.from_lengths(leaves[0], lengths)
        shards = [shard(base.with_values(x), mesh, cost=(10, 1)) for x in leaves]
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)

        def run(*values: Any) -> Any:
            return body(*(base.with_values(x) for x in values)).values

        cotangent = random(*jax.eval_shape(run, *leaves).shape)

        @jax.jit
        def on_shards(*values: Any) -> Any:
            def loss(*values: Any) -> Any:
                out = mapped(*(x.with_values(y) for x, y in zip(shards, values, strict=True)))
                whole = unshard(out).values
                return jnp.sum(whole * cotangent), whole

            return jax.value_and_grad(loss, range(len(leaves)), has_aux=True)(*values)

        def on_rows(*values: Any) -> Any:
            out = run(*values)
            return jnp.sum(out * cotangent), out

        (_, actual), grads = on_shards(*(x.values for x in shards))
        reference = jax.jit(jax.value_and_grad(on_rows, range(len(leaves)), has_aux=True))
        (_, expected), rows = reference(*leaves)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
        for part, x, y in zip(grads, rows, shards, strict=True):
            whole = unshard(y.with_values(part)).values
            np.testing.assert_allclose(whole, x, rtol=1e-4, atol=1e-4)

    for lengths, masks in CASES:
        total = sum(lengths)
        heads = [random(total, n, 8) for n in (4, 2, 2)]
        for causal, window in masks:

            def attend(q: Any, k: Any, v: Any, causal: bool = causal, window: Any = window) -> Any:
                q, k = scree.rope(scree.rms_norm(q), k)
                return scree.attention(q, k, v, causal=causal, window=window) * 2

            compare(attend, heads, lengths)
        if len(masks) == 1:
            continue
        compare(lambda x: scree.softmax(x), [random(total, 3)], lengths)
        # Losses and reductions of rows do not count tokens of no row.
        logits = scree.from_lengths(random(total, 7), lengths)
        ids = jnp.asarray(rng.integers(0, 7, total))
        targets = logits.with_values(jnp.where(ids == 3, -100, ids))
        parts = shard(logits, mesh), shard(targets, mesh)

        def losses(x: Any, y: Any) -> Any:
            xp = scree.namespace(x)
            values = [scree.cross_entropy(x, y, reduction=r)[None] for r in ("sum", "mean")]
            sums = xp.sum(x, axis=1)
            return jax.lax.psum(jnp.concatenate(values), "cp"), jax.lax.pmean(sums, "cp")

        mapped = jax.shard_map(losses, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
        actual, sums = jax.jit(mapped)(*parts)
        for value, reduction in zip(actual, ("sum", "mean"), strict=True):
            expected = scree.cross_entropy(logits, targets, reduction=reduction)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        rows = scree.namespace(logits).sum(logits, axis=1)
        np.testing.assert_allclose(sums, rows, rtol=1e-4, atol=1e-5)
    x = scree.from_lengths(random(20, 1, 4), [20])
    with pytest.raises(TypeError, match=r"mesh: expected a jax\.sharding\.Mesh"):
        shard(x, 3)
    with pytest.raises(ValueError, match="exchange: expected 'keys' or None"):
        shard(x, mesh, exchange="heads")
    with pytest.raises(ValueError, match="arr: expected the ragged axis after the batch"):
        shard(scree.from_lengths(random(4, 20), [20], ragged_dim=1), mesh)
    part = shard(x, mesh)
    for body, error, message in (
        (
            lambda y: scree.attention(y, y, y, window=(3, 3)),
            ValueError,
            "window: expected no bound",
        ),
        (lambda y: scree.shift(y, 1), TypeError, "expected whole rows, got a shard"),
    ):
        with pytest.raises(error, match=message):
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(part)

    # `dataclasses.replace` keeps the cut, outside and inside of `jax.shard_map`.
    assert dataclasses.replace(part, values=part.values * 2).layout is part.layout

    def double(y: Any) -> Any:
        z = dataclasses.replace(y * 2, values=y.values * 2)
        assert z.layout.cut is not None
        return jax.lax.pmean(scree.namespace(z).sum(z, axis=1), "cp")

    mapped = jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    np.testing.assert_allclose(mapped(part)[0], 2 * jnp.sum(x.values, 0), rtol=1e-4)

    # One cut of the device serves all operations of a trace; results of a trace have the cut of all.
    cuts = set()

    def layers(y: Any) -> Any:
        for _ in range(2):
            y = scree.attention(scree.rms_norm(y), y, y, causal=True) + y
            cuts.add(id(y.layout.cut))
        return y

    out = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=spec, out_specs=spec))(part)
    assert out.layout is part.layout and len(cuts) == 1
    print("all equal")


def test_shards_have_the_results_and_gradients_of_whole_rows() -> None:
    # JAX reads the number of devices when it starts, so the comparisons have their own process.
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # halves the time of compilation
    run = subprocess.run(
        [sys.executable, str(Path(__file__))], env=environment, capture_output=True, text=True
    )
    assert "all equal" in run.stdout, run.stderr


if __name__ == "__main__":
    check()
