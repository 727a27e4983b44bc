"""Under the transforms of JAX.

Traced once for all offsets, differentiated, mapped, scanned, sharded, donated.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transforms import (
    INDEX,
    LENGTHS,
    LONGEST,
    OPERATIONS,
    OTHER,
    STANDARD,
    TOTAL,
    WIDTH,
    apply,
    expected,
    judged,
    loss,
    slope,
    standard,
    values,
    weights,
)

import scree


def tokens(lengths: list[int] = LENGTHS) -> scree.Array:
    return scree.from_lengths(jnp.asarray(values()), lengths, max_length=LONGEST)


def counted(f: Callable[..., Any]) -> tuple[Callable[..., Any], list[None]]:
    """The function, and a list that grows with every trace of it."""
    traces: list[None] = []

    def call(*args: Any) -> Any:
        traces.append(None)
        return f(*args)

    return call, traces


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_trace_serves_all_offsets_of_a_shape(name: str) -> None:
    """Values and gradients, along one direction, of two batches.

    The first is not known when the function is compiled.
    """
    w, index = jnp.asarray(weights()), jnp.asarray(INDEX)

    def both(x: scree.Array, w: Any) -> Any:
        found = apply(name, x, w, index)
        return judged(jnp, found), found

    function, traces = counted(jax.value_and_grad(both, (0, 1), has_aux=True, allow_int=True))
    compiled = jax.jit(function)
    for lengths in (LENGTHS, OTHER):
        (_, found), (of_x, of_w) = compiled(tokens(lengths), w)
        np.testing.assert_allclose(
            found, expected(name, values(), weights(), lengths), rtol=1e-4, atol=1e-5
        )
        assert isinstance(of_x, scree.Array)
        dx, dw, want = slope(name, lengths)
        assert abs(np.vdot(of_x.values, dx) + np.vdot(of_w, dw) - want) < 1e-5 * max(
            1, np.linalg.norm(dx)
        )
    assert len(traces) == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_over_parameters(name: str) -> None:
    x, index, seeds = tokens(), jnp.asarray(INDEX), (1, 5)
    w = jnp.stack([jnp.asarray(weights(seed)) for seed in seeds])
    found = jax.jit(jax.vmap(lambda w: apply(name, x, w, index)))(w)
    for one, seed in zip(found, seeds):
        np.testing.assert_allclose(
            one, expected(name, values(), weights(seed), LENGTHS), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", STANDARD)
def test_the_functions_of_the_standard_compile(name: str) -> None:
    args = jnp.asarray(values()), jnp.asarray(INDEX), tokens().offsets
    for found, right in zip(
        jax.jit(partial(standard, name))(*args), standard(name, *args), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_vmap_of_gradients() -> None:
    x, index = tokens(), jnp.asarray(INDEX)
    w = jnp.stack([jnp.asarray(weights(seed)) for seed in (1, 5)])
    gradient = jax.grad(partial(loss, "attention"), 1)
    found, single = jax.jit(jax.vmap(lambda w: gradient(x, w, index)))(w), jax.jit(gradient)
    for one, w_i in zip(found, w):
        np.testing.assert_allclose(one, single(x, w_i, index), rtol=1e-4, atol=1e-6)


def test_gradients_outside_of_a_trace() -> None:
    x, w, index = tokens(), jnp.asarray(weights()), jnp.asarray(INDEX)
    both = jax.value_and_grad(partial(loss, "attention"), 1)
    for one, other in zip(both(x, w, index), jax.jit(both)(x, w, index)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_rows_of_a_batch_with_a_tail() -> None:
    """Tokens behind the last row belong to none: they change nothing, and no gradient reaches them."""
    w, spare = jnp.asarray(weights()), 5
    x = scree.from_lengths(jnp.asarray(values()), LENGTHS, max_length=LONGEST)

    def of(values: Any, offsets: Any) -> Any:
        x = scree.from_cu_seqlens(values, offsets, max_length=LONGEST)
        return jnp.sum(
            scree.attention(*[x.with_values((values @ w)[:, None, :])] * 3, causal=True).values[
                :TOTAL
            ]
            ** 2
        )

    more = jnp.concatenate([x.values, jnp.full((spare, WIDTH), 1e3, jnp.float32)])
    (plain, g), (padded, h) = (
        jax.jit(jax.value_and_grad(of))(v, x.offsets) for v in (x.values, more)
    )
    np.testing.assert_allclose(padded, plain, rtol=1e-5)
    np.testing.assert_allclose(h[:TOTAL], g, rtol=1e-4, atol=1e-5)
    assert not np.any(h[TOTAL:])


@pytest.mark.parametrize("axis", [0, 1])
def test_concat_of_batches_with_tails(axis: int) -> None:
    """Rows stay whole where tokens to spare lie between them."""
    parts = (
        [np.arange(8.0), np.asarray([0, 2, 5], np.int32)],
        [np.arange(10.0, 15.0), np.asarray([0, 0, 3], np.int32)],
    )

    @jax.jit
    def f(parts: Any) -> Any:
        arrays = [scree.from_cu_seqlens(*part, max_length=3) for part in parts]
        found = scree.namespace(*arrays).concat(arrays, axis=axis)
        return found.values, found.offsets

    tokens, offsets = map(np.asarray, f(parts))
    rows = [[0, 1], [2, 3, 4], [], [10, 11, 12]] if axis == 0 else [[0, 1], [2, 3, 4, 10, 11, 12]]
    assert [tokens[a:b].tolist() for a, b in zip(offsets, offsets[1:])] == rows


@pytest.mark.parametrize(
    "name", "sum prod max min mean var std any all count_nonzero argmax argmin".split()
)
def test_full_reductions_exclude_the_tail(name: str) -> None:
    of_rows = np.asarray([[3.0, 1], [2, 5], [4, 7], [-2, 6]], np.float32)
    spare = np.asarray([[100.0, -100], [0, 50]], np.float32)

    @jax.jit
    def f(values: Any) -> Any:
        x = scree.from_cu_seqlens(values, jnp.asarray([0, 1, 1, 4], dtype=jnp.int32), max_length=3)
        return getattr(scree.namespace(x), name)(x)

    expected = getattr(np, name)(of_rows)
    np.testing.assert_allclose(f(np.concatenate([of_rows, spare])), expected, rtol=1e-6)
    np.testing.assert_allclose(f(of_rows), expected, rtol=1e-6)


def layer(x: scree.Array, w: Any) -> scree.Array:
    """What a model repeats."""
    xp = scree.namespace(x)
    y = xp.ragged.rms_norm(x) @ w
    q = y.with_values(xp.reshape(y.values, (y.total_length, 2, -1)))
    out = xp.ragged.attention(xp.ragged.rope(q), q, q, causal=True)
    return x + xp.ragged.softmax(y) + out.with_values(xp.reshape(out.values, x.values.shape))


def model(w: Any, x: scree.Array) -> Any:
    """Layers one by one, and the sum of squares."""
    for i in range(w.shape[0]):
        x = layer(x, w[i])
    return jnp.sum(scree.namespace(x).sum(x * x, axis=1))


LAYERS = np.stack([weights(seed) for seed in (1, 2)])


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """The model and its gradient, layer by layer."""
    return jax.jit(jax.value_and_grad(model))(jnp.asarray(LAYERS), tokens())


def agrees(found: Any, plain: Any) -> None:
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()))


def test_scan_over_layers_with_checkpoints(plain: Any) -> None:
    def scanned(w: Any, x: scree.Array) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)
        return model(w[:0], x)

    agrees(jax.jit(jax.value_and_grad(scanned))(jnp.asarray(LAYERS), tokens()), plain)


def test_donated_batch_and_shapes_without_arrays() -> None:
    x, w = tokens(), jnp.asarray(LAYERS)
    shape = jax.eval_shape(layer, x, w[0])
    assert isinstance(shape, scree.Array)
    assert shape.shape == x.shape and shape.max_length == LONGEST
    donating = jax.jit(lambda x, w: x.with_values((layer(x, w[0])).values), donate_argnums=0)
    kept = np.asarray(jax.jit(layer)(x, w[0]).values)
    np.testing.assert_allclose(donating(x, w).values, kept, rtol=1e-5, atol=1e-6)
    assert x.values.is_deleted()


def sharded() -> None:
    """In a process of its own with two devices: rows split over them, weights on both.

    And rows that nobody has placed.
    """
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.asarray(jax.devices()), ("rows",))
    halves = [LENGTHS[:3], LENGTHS[3:]]
    size = max(
        map(sum, halves)
    )  # each device has room for as many tokens, of which some belong to no row
    parts = np.split(values(), [sum(halves[0])])
    padded = np.concatenate(
        [np.pad(part, ((0, size - len(part)), (0, 0)), constant_values=9.0) for part in parts]
    )
    offsets = np.concatenate([np.cumsum([0, *half]) for half in halves]).astype(np.int32)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("rows"), P("rows")), out_specs=P())
    def both(w: Any, values: Any, offsets: Any) -> Any:
        x = scree.from_cu_seqlens(values, offsets, max_length=LONGEST)
        return jax.lax.psum(model(w, x), "rows")

    found = jax.value_and_grad(both)(
        jnp.asarray(LAYERS[:1]), jnp.asarray(padded), jnp.asarray(offsets)
    )
    agrees(found, jax.jit(jax.value_and_grad(model))(jnp.asarray(LAYERS[:1]), tokens()))

    w, rows = weights(), np.split(values(), np.cumsum(LENGTHS)[:-1])
    split = jax.device_put(w, NamedSharding(mesh, P(None, "rows")))
    right = [row.sum(0) @ w for row in rows]
    for x in (tokens(), scree.pack([jnp.asarray(row) for row in rows]), tokens()[::-1][::-1]):
        for f in (
            lambda x, w: scree.namespace(x).sum(x @ w, axis=1),
            jax.jit(lambda x, w: scree.namespace(x).sum(x @ w, axis=1)),
        ):
            np.testing.assert_allclose(
                f(x, split), right, rtol=1e-4, atol=1e-4
            )  # JAX moves them to the weights
    second = scree.pack([jax.device_put(row, jax.devices()[1]) for row in rows])
    assert second.device == second.offsets.device == (second * 2).device == jax.devices()[1]
    print("agreed on", len(jax.devices()), "devices")


def test_rows_split_over_devices() -> None:
    here = os.path.dirname(__file__)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": here
    }  # fmt: skip
    code = "import test_transforms_jax as t; t.sharded()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "agreed on 2 devices" in done.stdout


def test_attention_memory_is_bounded_by_tokens_and_tiles() -> None:
    """By XLA's own account of the compiled function, forward and backward.

    One long row among short ones is no square.
    """
    lengths, heads, dim = [4096] + [16] * 127, 4, 32
    total = sum(lengths)

    def gradients(q: Any, k: Any, v: Any, offsets: Any) -> Any:
        q, k, v = (scree.from_cu_seqlens(x, offsets, max_length=4096) for x in (q, k, v))
        return jnp.sum(scree.attention(q, k, v, causal=True).values ** 2)

    shapes = [jax.ShapeDtypeStruct((total, heads, dim), jnp.float32)] * 3
    offsets = jax.ShapeDtypeStruct((len(lengths) + 1,), jnp.int32)
    used = (
        jax.jit(jax.grad(gradients, (0, 1, 2)))
        .lower(*shapes, offsets)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    slots = total + len(lengths) * 128  # every token, and a tile for the end of every row
    assert used < 40 * slots * heads * dim * 4
    assert used < 0.05 * len(lengths) * 4096**2 * heads * 4


def test_sizes_that_depend_on_the_offsets_raise() -> None:
    with pytest.raises(TypeError, match="depends on the offsets"):
        jax.jit(lambda x: x[:, 1:3].values)(tokens())
    bare = scree.Array(jnp.asarray(values()[:, None, :]), tokens().offsets)
    with pytest.raises(ValueError, match=r"with max_length=, or call q\.validate"):
        jax.jit(lambda x: scree.attention(x, x, x, kernel="standard").values)(bare)


def test_second_derivatives_and_forward_mode_by_the_standard_path() -> None:
    x = scree.from_lengths(jnp.asarray(values()[:9, None, :4]), [2, 0, 7], max_length=7)

    def energy(v: Any) -> Any:
        y = x.with_values(v)
        return jnp.sum(scree.attention(y, y, y, kernel="standard").values ** 2)

    direction = jnp.ones_like(x.values)
    gradient, second = jax.jit(lambda v: jax.jvp(jax.grad(energy), (v,), (direction,)))(x.values)
    _, forward = jax.jit(lambda v: jax.jvp(energy, (v,), (direction,)))(x.values)
    np.testing.assert_allclose(forward, jnp.vdot(gradient, direction), rtol=1e-4)
    step = 1e-2
    up, down = (jax.jit(jax.grad(energy))(x.values + s * direction) for s in (step, -step))
    np.testing.assert_allclose(second, (up - down) / (2 * step), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_softmax_gradient_on_accelerator_equals_loop_over_rows(on_accelerator, monkeypatch):
    # On accelerators a gather of one entry per row goes through tiles, and steps are larger.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if on_accelerator else "cpu")
    lengths, tail = [40, 0, 70, 1], 5
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.standard_normal((sum(lengths) + tail, 3))) for _ in "xw")
    offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)

    def loss_of_rows(x: Any) -> Any:
        parts = np.cumsum([0, *lengths])
        rows = [(x[a:b], weight[a:b]) for a, b in zip(parts, parts[1:])]
        return sum(jnp.sum(jax.nn.softmax(a, axis=0) * b) for a, b in rows)

    def ragged(x: Any, offsets: Any) -> Any:
        rows = scree.Array(x, offsets, max_length=max(lengths))
        weighted = scree.softmax(rows) * rows.with_values(weight)
        return jnp.sum(scree.namespace(rows).sum(weighted, axis=1))

    got, want = jax.jit(jax.grad(ragged))(x, offsets), jax.grad(loss_of_rows)(x)
    np.testing.assert_allclose(got, want, atol=1e-6)

    @jax.jit
    def forward_mode(x: Any, tangent: Any, offsets: Any) -> Any:
        return jax.jvp(partial(ragged, offsets=offsets), (x,), (tangent,))[1]

    tangent = forward_mode(x, weight, offsets)
    np.testing.assert_allclose(tangent, jnp.sum(want * weight), rtol=1e-5)
