"""JAX: pytree registration, `repeat` with a static length."""

from typing import Any

import jax
import jax.numpy as xp
import numpy as np

from ..array import Array
from ..create import PackCall
from ..registry import register_kernel
from . import Backend


def _peek(x: Any) -> np.ndarray | None:
    if isinstance(x, jax.core.Tracer) or x.platform() != "cpu" or len(x.devices()) != 1:
        return None
    return np.asarray(x)


def _read(x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise TypeError("the size of this result depends on the offsets, which a traced function cannot read")
    return np.asarray(x)


def _row_ids(repeats: Any, total: int) -> Any:
    return xp.repeat(xp.arange(repeats.shape[0]), repeats, total_repeat_length=total)


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    return jax.random.uniform(key, shape)


def _device(x: Any) -> Any:
    return None if isinstance(x, jax.core.Tracer) else x.device


BACKEND = Backend(
    "jax", xp, _peek, _read, row_ids=_row_ids, device=_device, to_device=jax.device_put, uniform=_uniform
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
    return None


@register_kernel("pack", provider="host", rejects=_rejects)
def pack(call: PackCall) -> Any:
    """Join on the host: JAX compiles a concatenation anew for every list of shapes, which takes seconds."""
    return xp.asarray(np.concatenate([np.asarray(x) for x in call.arrays], axis=call.axis))


from . import jax_attention  # noqa: E402, F401 (registers its kernel)
