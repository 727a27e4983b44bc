"""Lower the operations of test_jax_operations for CUDA without a GPU, and test them on the CPU.

The kernels are compiled for compute capability 9.0, but do not run. On the CPU the same functions run
the standard implementations, from the arrays that the backward kernels read.
"""

import re
import warnings
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from lower_for_jax import check_parameters
from test_jax_operations import CASES, arrays_of, offsets_of, xp

import scree
import scree_triton.jax
from scree_triton.jax import devices, operations
from scree_triton.runtime.device import Device, describe_meta

#: Case -> kernels of its gradient.
KERNELS = {
    "rms_norm": ["norm_forward_kernel", "norm_backward_kernel", "norm_add_kernel"],
    "rope, queries and keys": ["rope_kernel"] * 2,
    "softmax": ["segment_wide_partition_kernel"] * 2,
    "sum of scalars": ["segment_partition_kernel"] * 2,
    "max": ["segment_wide_partition_kernel"] * 2,
    "sum of scalars, many rows": ["segment_partition_kernel"] * 2,
    "softmax, a row that one CTA processes alone": ["segment_partition_kernel"] * 2,
    "softmax, a row cut into parts": ["segment_rows_kernel"] * 2,
    "product of groups": [
        "grouped_product_sm90_kernel", "grouped_product_sm90_kernel", "grouped_weight_sm90_kernel",
    ],
    "cross_entropy, mean of each row": [
        "cross_entropy_tokens_kernel", "loss_rows_kernel", "loss_rows_kernel",
        "cross_entropy_tokens_kernel",
    ],
}  # fmt: skip
#: Cases whose lowered functions contain nothing besides launches and the memory of results.
ONLY_LAUNCHES = ("rms_norm", "swiglu", "rope", "softmax", "max", "logsumexp")
#: Cases whose gradients the standard implementation computes from fewer arrays.
ON_CPU = ("layer_norm of a sum, one bias", "log_softmax", "mean", "rope")


def gradient_of(case):
    """Return a function of offsets and arrays: gradients of a sum of sines of the result."""

    def loss(offsets, x, *others):
        rows = scree.Array(x, offsets, max_length=max(case.lengths))
        y = jnp.asarray(case.run(rows, *others), jnp.float32)
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0)))

    return lambda offsets, *inputs: jax.grad(loss, tuple(range(1, 1 + len(inputs))))(
        offsets, *inputs
    )


def inputs_of(case, dtype=None):
    arrays = [jnp.asarray(x, dtype or case.dtype) for x in arrays_of(case)]
    return offsets_of(case.lengths), *arrays


def check_launches(name, expected):
    case = CASES[name]
    traced = jax.jit(gradient_of(case)).trace(*inputs_of(case, jnp.bfloat16))
    names = check_parameters(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert names == expected, (name, names)


def check_only_launches(name):
    """Arrays are not copied, converted or transposed around a launch."""
    case = CASES[name]

    def run(offsets, x, *others):
        return case.run(scree.Array(x, offsets, max_length=max(case.lengths)), *others)

    text = jax.jit(run).trace(*inputs_of(case, jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    operations = set(re.findall(r"= stablehlo\.(\w+)", text.as_text()))
    assert operations == {"custom_call"}, (name, operations)


def check_decoding():
    """Append a token per row to a cache of 8-bit keys, and attend to it."""
    kinds = jax.ShapeDtypeStruct
    pages = kinds((20, 16, 2, 64), jnp.bfloat16)
    tokens, offsets = kinds((3, 2, 64), jnp.bfloat16), kinds((4,), jnp.int32)
    table, lengths = kinds((3, 5), jnp.int32), kinds((3,), jnp.int32)

    def step(k_pages, v_pages, q, k, table, offsets, lengths):
        rows = scree.Array(k, offsets, max_length=1)
        k_pages, v_pages = scree.append_paged(k_pages, v_pages, rows, rows, table, lengths)
        caches = k_pages.astype(jnp.float8_e4m3fn), v_pages.astype(jnp.float8_e4m3fn)
        return scree.paged_attention(rows.with_values(q), *caches, table, lengths).values

    queries = kinds((3, 8, 64), jnp.bfloat16)
    traced = jax.jit(step).trace(pages, pages, queries, tokens, table, offsets, lengths)
    names = check_parameters(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert names == ["append_paged_kernel", "decode_kernel", "combine_kernel"], names


def check_prefill():
    """Attend to a cache with many queries per row, through TMA descriptors."""
    kinds = jax.ShapeDtypeStruct
    pages, queries = kinds((20, 16, 2, 128), jnp.bfloat16), kinds((90, 8, 128), jnp.bfloat16)
    table, offsets, lengths = (kinds(shape, jnp.int32) for shape in ((3, 5), (4,), (3,)))

    def attend(k_pages, v_pages, q, table, offsets, lengths):
        rows = scree.Array(q, offsets, max_length=50)
        return scree.paged_attention(rows, k_pages, v_pages, table, lengths).values

    traced = jax.jit(attend).trace(pages, pages, queries, table, offsets, lengths)
    names = check_parameters(traced.lower(lowering_platforms=("cuda",)).as_text())
    prefill = ["paged_prefill_sm90_kernel", "combine_prefill_kernel"]
    assert names == [*prefill, "decode_kernel", "combine_kernel"], names


def check_gradient_on_cpu(name):
    """Compare the gradients of the primitives with those of the standard implementation."""
    case = CASES[name]
    gradient, arguments = jax.jit(gradient_of(case)), inputs_of(case)
    actual = gradient(*arguments)
    assert "scree_kernels" in str(gradient.trace(*arguments).jaxpr)
    with scree.dispatch.registry.isolated(standard_only=True):
        expected = jax.jit(gradient_of(case))(*arguments)
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(a, np.float64)[: sum(case.lengths)] for a in (x, y))
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max(), err_msg=name)


def rms_norm_loss(x, w, offsets, kernel="triton_jax"):
    rows = scree.Array(x, offsets, max_length=130)
    y = scree.softmax(scree.rms_norm(rows, w, kernel=kernel), kernel=kernel)
    return jnp.sum(jnp.sin(y.values))


def check_transforms():
    case = CASES["rms_norm"]
    offsets, x, w = inputs_of(case)
    x = x[: sum(case.lengths)]
    gradient = jax.grad(rms_norm_loss, (0, 1))
    expected = jax.jit(gradient)(x, w, offsets)
    compare = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))
    compare(jax.grad(jax.checkpoint(rms_norm_loss), (0, 1))(x, w, offsets), expected)

    compiled = jax.jit(gradient)
    for lengths in (case.lengths, case.lengths[::-1]):
        compiled(x, w, offsets_of(lengths))
    assert compiled._cache_size() == 1, "new offsets compiled the function again"

    # Second derivatives are those of the standard implementation.
    actual = jax.jit(jax.hessian(rms_norm_loss, 1))(x, w, offsets)
    with scree.dispatch.registry.isolated(standard_only=True):
        hessian = jax.jit(jax.hessian(partial(rms_norm_loss, kernel=None), 1))(x, w, offsets)
    np.testing.assert_allclose(actual, hessian, atol=1e-5)

    # A function that is compiled already runs the standard implementation under vmap.
    batch = jax.vmap(jax.jit(gradient), (None, 0, None))(x, jnp.stack([w, 2 * w]), offsets)
    compare(jax.tree.map(lambda a: a[0], batch), expected)
    compare(jax.tree.map(lambda a: a[1], batch), jax.jit(gradient)(x, 2 * w, offsets))
    for function, sentence in (
        (lambda: jax.vmap(lambda w: rms_norm_loss(x, w, offsets))(w[None]), "no jax.vmap"),
        (lambda: jax.jvp(lambda w: rms_norm_loss(x, w, offsets), (w,), (w,)), "forward-mode"),
    ):
        try:
            function()
        except (TypeError, ValueError) as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"not refused: {sentence}")


def gradients_of_halves():
    offsets, x, w = inputs_of(CASES["rms_norm"])
    return [jax.jit(jax.grad(rms_norm_loss, (0, 1)))(y, w, offsets) for y in (x, 2 * x)]


def check_shard_map(expected):
    """Norm weights are the same on all devices, and their gradients are sums over the devices."""
    offsets, x, w = inputs_of(CASES["rms_norm"])
    mesh, spec = Mesh(np.array(jax.devices()), "batch"), PartitionSpec("batch")
    batch, all_offsets = jnp.concatenate([x, 2 * x]), jnp.concatenate([offsets, offsets])

    def sharded_loss(x, w, offsets):
        return jax.lax.psum(rms_norm_loss(x, w, offsets), "batch")

    loss = jax.shard_map(
        sharded_loss, mesh=mesh, in_specs=(spec, PartitionSpec(), spec), out_specs=PartitionSpec()
    )
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    dx, dw = gradient(batch, w, all_offsets)
    (dx0, dw0), (dx1, dw1) = expected
    np.testing.assert_allclose(dx, jnp.concatenate([dx0, dx1]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, dw0 + dw1, rtol=1e-5, atol=1e-6)


def check_automatic_partitioning():
    """Programs on one of several devices launch kernels; programs on all of them do not."""
    _, x, _ = inputs_of(CASES["rms_norm"])
    x = x[: x.shape[0] // 2 * 2]
    split = jax.NamedSharding(Mesh(np.array(jax.devices()), "tokens"), PartitionSpec("tokens"))
    for y, has_kernels in ((x, True), (jax.device_put(x, split), False)):
        traced = jax.jit(lambda x: scree.rms_norm(x, kernel="triton_jax")).trace(y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("triton_kernel_call_ffi" in text) is has_kernels
        assert any("XLA cannot split" in str(x.message) for x in caught) is not has_kernels
    rejected = scree.explain("rms_norm", jax.device_put(x, split)).rejected["triton_jax"]
    assert rejected == "the Triton kernels take arrays on one device"


def check_kernels_that_do_not_compile():
    """Forward and backward pass fall back to the standard path on CUDA, with one warning."""
    offsets, x, w = inputs_of(CASES["rms_norm"])
    x, w = x[: sum(CASES["rms_norm"].lengths), :20], w[:20]
    error = RuntimeError("a register is missing")
    with (
        patch.object(operations, "run_recording", side_effect=error),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        traced = jax.jit(jax.grad(partial(rms_norm_loss, kernel=None), (0, 1))).trace(x, w, offsets)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call_ffi" not in text
    assert sum("a register is missing" in str(x.message) for x in caught) == 1
    # Calls with another number of tokens are not tried again.
    fewer = scree.Array(x[:-7], offsets[:-1], max_length=130)
    for name, *arguments in (("rms_norm", fewer, w), ("softmax", fewer)):
        reason = scree.explain(name, *arguments).rejected["triton_jax"]
        assert "RuntimeError: a register is missing" in reason, reason


def check_refusals():
    """Calls that need functions of PyTorch besides kernels are refused before they are lowered."""
    offsets, x = inputs_of(CASES["cross_entropy"])
    rows = scree.Array(x[: int(offsets[-1])], offsets)
    targets = rows.with_values(jnp.zeros(rows.total_length, jnp.int32))
    options = dict(class_weights=jnp.ones(x.shape[1]))
    refused = scree.explain("cross_entropy", rows, targets, **options).rejected["triton_jax"]
    assert "PyTorch" in refused or "class_weights" in refused, refused
    table = jnp.ones((200, 12))

    def rotated(cos):
        return jnp.sum(scree.rope(rows, cos=cos, sin=table, kernel="triton_jax").values)

    try:
        jax.grad(rotated)(table)
    except NotImplementedError as error:
        assert "stop_gradient" in str(error)
    else:
        raise AssertionError("a gradient without kernels was not refused")
    counts = rows.with_values(jnp.ones(rows.total_length, bool))
    np.testing.assert_array_equal(
        jax.jit(lambda counts: xp(counts).any(counts, axis=1))(counts), [True, False, True, True]
    )


def main():
    describe_meta(Device("nvidia", (9, 0), 132, 227 << 10, 50 << 20))
    devices.PLATFORMS = ("cpu",)
    scree.namespace(jnp.zeros(1))
    scree_triton.jax.register_operations()
    with patch.object(jax, "device_count", lambda: 1):
        for name, kernels in KERNELS.items():
            check_launches(name, kernels)
        for name in ONLY_LAUNCHES:
            check_only_launches(name)
        check_decoding()
        check_prefill()
        for name in ON_CPU:
            check_gradient_on_cpu(name)
        check_transforms()
        check_refusals()
        check_kernels_that_do_not_compile()
        expected = gradients_of_halves()
    check_shard_map(expected)
    check_automatic_partitioning()
    print("passed")


if __name__ == "__main__":
    main()
