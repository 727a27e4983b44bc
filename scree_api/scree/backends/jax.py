"""JAX: pytree registration, `repeat` with a static length, one compiled function for what is many operations."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as xp
import numpy as np

from ..array import Array
from ..construct import PackCall
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.segment import LONGEST, SegmentCall, segment_reduce
from . import UNREADABLE, Backend


def _peek(x: Any) -> np.ndarray | None:
    if isinstance(x, jax.core.Tracer) or x.platform() != "cpu" or len(x.devices()) != 1:
        return None
    return np.asarray(x)


def _read(x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(UNREADABLE)
    return np.asarray(x)


def _row_ids(repeats: Any, total: int) -> Any:
    known = _peek(repeats)
    if known is not None:
        return jax.device_put(
            np.repeat(np.arange(known.size, dtype=known.dtype), known), _device(repeats)
        )
    return xp.repeat(xp.arange(repeats.shape[0]), repeats, total_repeat_length=total)


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    if not isinstance(key, jax.Array):
        raise TypeError(f"key: expected a key of jax.random, got {type(key).__name__}")
    return jax.random.uniform(key, shape)


def _device(x: Any) -> Any:
    """None where a trace hides it, and where JAX itself finds the place: for arrays that nobody has committed to one device."""
    if isinstance(x, jax.core.Tracer) or not x.committed or len(x.devices()) > 1:
        return None
    return x.device


def _outside(offsets: Any) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(offsets, jax.core.Tracer) else jax.ensure_compile_time_eval()


BACKEND = Backend(
    "jax",
    xp,
    _peek,
    _read,
    row_ids=_row_ids,
    device=_device,
    to_device=jax.device_put,
    uniform=_uniform,
    outside=_outside,
    checkpoint=jax.checkpoint,
    place=lambda host, dtype, device: jax.device_put(
        np.asarray(host, dtype=dtype), device
    ),  # asarray compiles for every shape
)

jax.tree_util.register_pytree_with_keys(
    Array,
    lambda x: ((("values", x.values), ("offsets", x.offsets)), (x.ragged_dim, x.max_length)),
    lambda static, children: Array._restore(*children, *static),
)


def _rejects(call: PackCall) -> str | None:
    if not isinstance(call.arrays[0], jax.Array):
        return "only JAX arrays are joined on the host"
    if any(isinstance(x, jax.core.Tracer) or x.platform() != "cpu" for x in call.arrays):
        return "a traced array, or one on a device, is joined by JAX"
    if len(set().union(*(x.devices() for x in call.arrays))) > 1:
        return "arrays on several devices are joined by JAX"
    return None


@register_kernel("pack", provider="host", rejects=_rejects)
def pack(call: PackCall) -> Any:
    """Join on the host: JAX compiles a concatenation anew for every list of shapes, which takes seconds."""
    return jax.device_put(
        np.concatenate([np.asarray(x) for x in call.arrays], axis=call.ragged_dim),
        _device(call.arrays[0]),
    )


def _reduces(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "only JAX arrays are reduced in one compiled function"
    if isinstance(call.values, jax.core.Tracer) or isinstance(call.layout.offsets, jax.core.Tracer):
        return "a traced function is compiled as a whole"
    return None


@register_kernel("segment_reduce", provider="jit", rejects=_reduces)
def compiled(call: SegmentCall) -> Any:
    """The standard path as one compiled function: outside of a trace JAX compiles every operation for every shape."""
    bound = (
        1 << max(call.layout.bound - 1, 0).bit_length()
    )  # so that rows a little longer find it compiled
    return _compiled(call.op, call.values, call.layout.offsets, bound, call.dtype)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _compiled(op: str, values: Any, offsets: Any, bound: int, dtype: Any) -> Any:
    return segment_reduce(
        op, values, Layout(BACKEND, offsets, int(values.shape[0]), bound), "standard", dtype
    )


def _rejects_op(call: SegmentCall) -> str | None:
    reason = _reduces(call)
    if reason is not None:
        return reason
    if call.op in ("any", "all") or not jax.numpy.issubdtype(call.dtype, jax.numpy.number):
        return f"jax.ops has no {call.op} of {call.dtype}"
    if call.op in ("sum", "prod") and call.layout.bound > LONGEST:
        return f"jax.ops takes one number after the other, which is less exact than a tree in rows beyond {LONGEST}"
    return None


@register_kernel("segment_reduce", provider="jax.ops", rejects=_rejects_op)
def by_row(call: SegmentCall) -> Any:
    """`jax.ops.segment_sum` and the like."""
    return _by_row(call.op, call.values, call.layout.segment_ids, call.layout.num_rows, call.wide)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _by_row(op: str, values: Any, rows: Any, count: int, dtype: Any) -> Any:
    return getattr(jax.ops, f"segment_{op}")(
        values.astype(dtype), rows, count, indices_are_sorted=True
    )


from ..providers import jax_attention, jax_cross_entropy  # noqa: E402, F401 (register their kernels)
