"""JAX: registration of ragged arrays as pytrees, packing on the host, and row reductions.

A row reduction is one compiled function, or a function of `jax.ops`.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from ..array import Array
from ..backends.jax import BACKEND, device
from ..construct import PackCall
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.segment import MAX_SEQUENTIAL, SegmentCall, segment_reduce


def _flatten(x: Array) -> tuple[Any, Any]:
    """Return the leaves and the static part of an array; the layout of a shard is static."""
    layout = x.shard_layout
    if layout is not None:
        return (("values", x.values),), (x.ragged_dim, layout)
    return (("values", x.values), ("offsets", x.offsets)), (x.ragged_dim, x.max_length)


def _unflatten(static: Any, children: Any) -> Array:
    if isinstance(static[1], Layout):
        (values,) = children
        return Array.from_layout(values, static[1], static[0])
    return Array.unchecked(*children, *static)


jax.tree_util.register_pytree_with_keys(Array, _flatten, _unflatten)


def _rejects_pack(call: PackCall) -> str | None:
    if not isinstance(call.arrays[0], jax.Array):
        return "only JAX arrays are packed on the host"
    if any(isinstance(x, jax.core.Tracer) or x.platform() != "cpu" for x in call.arrays):
        return "JAX packs traced arrays and arrays on a device"
    if len(set().union(*(x.devices() for x in call.arrays))) > 1:
        return "JAX packs arrays on several devices"
    return None


@register_kernel("pack", provider="host", rejects=_rejects_pack)
def pack(call: PackCall) -> Array:
    """Concatenate on the host.

    JAX compiles a concatenation for every list of shapes, which takes seconds.
    """
    joined = np.concatenate([np.asarray(x) for x in call.arrays], axis=call.ragged_dim)
    values = jax.device_put(joined, device(call.arrays[0]))
    return Array.from_layout(values, call.layout, call.ragged_dim)


def _rejects_jit(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "only JAX arrays are reduced in one compiled function"
    if isinstance(call.values, jax.core.Tracer) or isinstance(call.layout.offsets, jax.core.Tracer):
        return "a traced function is compiled as a whole"
    return None


@register_kernel("segment_reduce", provider="jit", rejects=_rejects_jit)
def reduce_compiled(call: SegmentCall) -> Any:
    """Run the standard implementation as one compiled function.

    Eager JAX compiles every operation for every shape.
    """
    # The bound is a power of two, so that slightly longer rows reuse the compiled function.
    bound = 1 << max(call.layout.max_length_bound - 1, 0).bit_length()
    return _reduce_compiled(call.op, call.values, call.layout.offsets, bound, call.dtype)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _reduce_compiled(op: str, values: Any, offsets: Any, bound: int, dtype: Any) -> Any:
    layout = Layout(BACKEND, offsets, int(values.shape[0]), bound)
    return segment_reduce(op, values, layout, "standard", dtype)


def _rejects_jax_ops(call: SegmentCall) -> str | None:
    reason = _rejects_jit(call)
    if reason is not None:
        return reason
    if call.op in ("any", "all") or not jax.numpy.issubdtype(call.dtype, jax.numpy.number):
        return f"jax.ops has no {call.op} of {call.dtype}"
    if call.op in ("sum", "prod") and call.layout.max_length_bound > MAX_SEQUENTIAL:
        return f"jax.ops takes one number after the other, which is less exact than a tree in rows beyond {MAX_SEQUENTIAL}"
    return None


@register_kernel("segment_reduce", provider="jax.ops", rejects=_rejects_jax_ops)
def reduce_by_segment(call: SegmentCall) -> Any:
    """Reduce rows by `jax.ops.segment_sum`, `segment_prod`, `segment_max` or `segment_min`."""
    layout = call.layout
    return _reduce_by_segment(
        call.op, call.values, layout.segment_ids, layout.num_rows, call.accumulation_dtype
    )


@partial(jax.jit, static_argnums=(0, 3, 4))
def _reduce_by_segment(op: str, values: Any, segment_ids: Any, num_rows: int, dtype: Any) -> Any:
    reduce = getattr(jax.ops, f"segment_{op}")
    return reduce(values.astype(dtype), segment_ids, num_rows, indices_are_sorted=True)
