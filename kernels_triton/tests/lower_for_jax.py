"""Lower attention in JAX for CUDA without a GPU, and compare the launches with the kernels.

Usage: lower_for_jax.py hopper|portable. The kernels are compiled for compute capability 9.0, but do
not run. On the CPU the same functions run the loops of JAX. Their results are compared with a plain
loop per row.
"""

import re
import struct
import sys
import warnings
import zlib
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import scree
from scree_triton.jax import attention as kernels
from scree_triton.jax import devices, triton_call
from scree_triton.runtime.device import Device, describe_meta

LENGTHS = [40, 0, 130, 7]


def arrays(heads, dim, dtype, seed=0):
    random = np.random.default_rng(seed)
    return [
        jnp.asarray(random.standard_normal((sum(LENGTHS), n, dim)), dtype) for n in (heads, 2, 2)
    ]


def offsets(lengths):
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def attend(q, k, v, offsets, **options):
    rows = scree.Array(q, offsets, max_length=max(LENGTHS))
    keys_and_values = rows.with_values(k), rows.with_values(v)
    return scree.attention(rows, *keys_and_values, kernel="triton_jax", **options)


def expected(q, k, v, lengths):
    """Return causal attention of each row in float64."""
    out, start = [], 0
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    for n in lengths:
        x, y, z = (a[start : start + n] for a in (q, k, v))
        scores = np.einsum("ihd,jhd->hij", x, y) / np.sqrt(q.shape[2])
        scores[:, ~np.tri(n, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True)) if n else scores
        weights /= weights.sum(-1, keepdims=True)
        out.append(np.einsum("hij,jhd->ihd", weights, z))
        start += n
    return np.concatenate(out)


def fields(message):
    """Yield the numbered fields of a message of protocol buffers."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
        elif kind == 2:
            length = varint()
            yield tag >> 3, message[at : at + length]
            at += length
        else:
            size = {1: 8, 5: 4}[kind]
            yield tag >> 3, message[at : at + size]
            at += size


def launches(text):
    """Yield the number of arrays, the kernel and the parameters of each call in a lowered module."""
    call_pattern = r"custom_call @triton_kernel_call_ffi\((.*?)\).*?opaque = \"(.*?)\"\}.*?-> (.*)"
    for operands, opaque, types in re.findall(call_pattern, text):
        data = re.sub(
            rb'\\([0-9A-F]{2}|["\\])',
            lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1],
            opaque.encode(),
        )
        message = dict(fields(zlib.decompress(data)))
        call = list(fields(message[1]))
        kernel = dict(fields(dict(call)[1]))
        buffers = operands.count("%") + types.count("tensor")
        yield buffers, kernel, [x for field, x in call if field == 5]


def ptx_of(kernel):
    """Return the PTX of the kernel with this machine code."""
    code = dict(fields(kernel[11]))[1]
    assert code[:4] == b"\x7fELF"
    (ptx,) = {x.asm["ptx"] for x, _ in triton_call.COMPILED.values() if x.asm["cubin"] == code}
    return ptx


def check_parameters(text):
    """Compare the parameters of each launch with the entry point of its kernel."""
    names = []
    for buffers, kernel, parameters in launches(text):
        name, ptx = kernel[1].decode(), ptx_of(kernel)
        names.append(name)
        entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        assert entry[1] == name
        declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", entry[2])
        passed = []
        for parameter in parameters:
            ((field, value),) = fields(parameter)
            passed.append({1: "u64", 3: "u32", 5: "u64", 7: "f32", 9: "b8"}[field])
            if field == 7:
                assert np.isfinite(struct.unpack("<f", value)[0])
        declared = ["u32" if x == "b32" else x for x in declared]
        # The last two parameters of a kernel are scratch memory and the profiler's memory.
        assert declared == [*passed, "u64", "u64"], (name, declared, passed)
        assert buffers >= sum(field in (1, 9) for x in parameters for field, _ in fields(x))
    return names


def check_launches(hopper, dim, dtype):
    q, k, v = arrays(4, dim, dtype)

    def loss(q, k, v, offsets):
        out, lse = attend(q, k, v, offsets, causal=True, return_lse=True)
        finite = jnp.where(jnp.isfinite(lse.values), lse.values, 0)
        return jnp.sum(out.values.astype(jnp.float32)) + jnp.sum(finite)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    lowered = gradient.trace(q, k, v, offsets(LENGTHS)).lower(lowering_platforms=("cuda",))
    names = check_parameters(lowered.as_text())
    for kernel in ("forward", "dq", "dkdv"):
        suffix = ("_float32_sm90" if dtype == jnp.float32 else "_sm90") if hopper else ""
        assert f"attention_{kernel}{suffix}_kernel" in names, names


def check_launches_of_chunks():
    """One long row has few tiles, so both kernels of the backward cut them into chunks."""
    length = 3000
    q, k, v = (jnp.zeros((length, 1, 64), jnp.bfloat16) for _ in range(3))

    def loss(q, k, v, offsets):
        rows = scree.Array(q, offsets, max_length=length)
        keys_and_values = rows.with_values(k), rows.with_values(v)
        out = scree.attention(rows, *keys_and_values, kernel="triton_jax")
        return jnp.sum(out.values.astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    lowered = gradient.trace(q, k, v, offsets([length])).lower(lowering_platforms=("cuda",))
    names = check_parameters(lowered.as_text())
    assert names.count("attention_chunk_kernel") == 2, names
    assert names[-2:] == ["attention_sum_chunks_kernel"] * 2, names


def check_other_platforms():
    q, k, v = arrays(4, 32, jnp.float32)
    attend_values = jax.jit(lambda *x: attend(*x, causal=True).values)
    for lengths in (LENGTHS, LENGTHS[::-1]):
        actual = attend_values(q, k, v, offsets(lengths))
        np.testing.assert_allclose(actual, expected(q, k, v, lengths), rtol=1e-5, atol=1e-5)
    assert attend_values._cache_size() == 1, "new offsets compiled the function again"

    def loss(q, k, v, kernel, checkpoint=False):
        def run(q, k, v):
            rows = scree.Array(q, offsets(LENGTHS), max_length=max(LENGTHS))
            keys_and_values = rows.with_values(k), rows.with_values(v)
            return scree.attention(rows, *keys_and_values, causal=True, kernel=kernel).values

        return jnp.sum(jnp.sin((jax.checkpoint(run) if checkpoint else run)(q, k, v)))

    grads, expected_grads, checkpointed_grads = (
        jax.grad(partial(loss, **options), argnums=(0, 1, 2))(q, k, v)
        for options in (
            {"kernel": "triton_jax"},
            {"kernel": "loops"},
            {"kernel": "triton_jax", "checkpoint": True},
        )
    )
    for x, y, z in zip(grads, expected_grads, checkpointed_grads, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(x, z, rtol=1e-5, atol=1e-5)


def check_sort():
    """Compare the sort of int64 keys as pairs of int32, for schedules of many tiles, with NumPy."""
    keys = np.random.default_rng(0).integers(0, 1 << 62, 1000) >> np.arange(1000) % 40
    pairs = triton_call.sort_descending(jnp.asarray(keys.view(np.int32).reshape(-1, 2)))
    np.testing.assert_array_equal(np.asarray(pairs).view(np.int64)[:, 0], np.sort(keys)[::-1])


def check_shard_map():
    mesh = Mesh(np.array(jax.devices()), "heads")
    random = np.random.default_rng(0)
    inputs = jnp.asarray(random.standard_normal((3, sum(LENGTHS), 2, 32)), jnp.float32)
    spec = PartitionSpec(None, "heads")

    def run(q, k, v):
        rows = scree.Array(q, offsets(LENGTHS), max_length=max(LENGTHS))
        return scree.attention(rows, rows.with_values(k), rows.with_values(v), causal=True).values

    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    grads, expected_grads = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(*x)))))(inputs) for f in (sharded, run)
    )
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-5, atol=1e-5)


def check_automatic_partitioning():
    """Programs on one of several devices launch kernels; programs on all of them do not."""
    q, k, v = arrays(4, 32, jnp.float32)
    heads = jax.NamedSharding(Mesh(np.array(jax.devices()), "heads"), PartitionSpec(None, "heads"))
    for x, has_kernels in ((q, True), (jax.device_put(q, heads), False)):
        traced = jax.jit(lambda *x: attend(*x).values).trace(x, k, v, offsets(LENGTHS))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("triton_kernel_call_ffi" in text) is has_kernels
        assert any("XLA cannot split" in str(x.message) for x in caught) is not has_kernels


def check_kernel_that_does_not_compile():
    """The loops run on CUDA too, with one warning, and later calls name the reason."""
    q, k, v = arrays(4, 48, jnp.float32)

    def loss(q, k, v, offsets):
        return jnp.sum(attend(q, k, v, offsets, causal=True).values)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    error = RuntimeError("a register is missing")
    with (
        patch.object(kernels, "run_recording", side_effect=error),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        traced = gradient.trace(q, k, v, offsets(LENGTHS))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call_ffi" not in text and "while" in text
    assert sum("a register is missing" in str(x.message) for x in caught) == 1
    rows = scree.Array(q, offsets(LENGTHS), max_length=max(LENGTHS))
    qkv = rows, rows.with_values(k), rows.with_values(v)
    reason = scree.explain("attention", *qkv, causal=True).rejected["triton_jax"]
    assert "cannot run this kind of call: RuntimeError: a register is missing" in reason, reason
    assert "triton_jax" not in scree.explain("attention", *qkv).rejected


def check_vmap_is_refused():
    q, k, v = arrays(4, 32, jnp.float32)
    batch = jnp.stack([q, q])
    run = jax.jit(lambda q: attend(q, k, v, offsets(LENGTHS)).values)
    for function in (run, lambda q: attend(q, k, v, offsets(LENGTHS)).values):
        try:
            jax.vmap(function)(batch)
        except (NotImplementedError, ValueError) as error:
            assert "vmap" in str(error)
        else:
            raise AssertionError("vmap was not refused")


def main():
    hopper = sys.argv[1] == "hopper"
    describe_meta(Device("nvidia", (9, 0), 132, 227 << 10, 50 << 20, has_descriptors=hopper))
    scree.register_kernel("attention", provider="triton_jax", rejects=kernels.rejects)(
        kernels.attention
    )
    devices.PLATFORMS = ("cpu",)
    with patch.object(jax, "device_count", lambda: 1):
        check_launches(hopper, 64, jnp.bfloat16)
        check_launches(hopper, 64, jnp.float32)
        if hopper:
            check_launches_of_chunks()
        if not hopper:
            check_other_platforms()
            check_sort()
            check_vmap_is_refused()
            check_kernel_that_does_not_compile()
    if not hopper:
        check_shard_map()
        check_automatic_partitioning()
    print("passed")


if __name__ == "__main__":
    main()
