"""Attention for JAX by the Triton kernels of PyTorch, launched by custom calls.

The launch configs of PyTorch choose kernels, tiles and grids. While JAX lowers a function for CUDA,
they run on tensors without data, and their launches are recorded. Shapes and options of a call are
static. The offsets are not, so one compiled function serves all offsets of one shape.

The two primitives, forward and backward, have a lowering for CUDA. Another lowering, for all other
platforms, runs the loops of `scree.providers.jax_attention`.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from scree.providers import jax_attention as loops

from ..attention.interface import make_spec, rejects_kind
from ..attention.launch_configs import get_launch_config
from ..attention.metadata import AttentionSpec, VarlenLayout
from ..attention.paged import is_decoding, prepare_contiguous_decoding
from ..attention.tile_scheduler import UNBOUNDED
from ..runtime.device import device_info
from ..runtime.recording import record
from .devices import capability, rejects_arrays, rejects_partitioning
from .primitive import UNAVAILABLE, define_primitive
from .triton_call import TORCH_DTYPES, meta, run_recording

_VMAP = (
    "the Triton kernels for JAX run under no jax.vmap: a ragged array is a batch already; "
    "concatenate the batches, or pass kernel='loops'"
)


class Static(NamedTuple):
    """The static part of a call: JAX compiles one function per value."""

    spec: AttentionSpec
    same_offsets: bool
    """True if queries and keys have the same offsets, which are then passed once."""
    max_seqlen: int
    return_lse: bool
    """True if the log-sum-exp is a result, so it may have a gradient."""
    loops: loops.Options
    max_queries: int = 0
    """A bound on the queries per row if the decode kernel runs, which has no gradient; otherwise 0."""


def rejects(call: Any) -> str | None:
    """Return why the kernels cannot serve `call`, from host metadata only; None if they can."""
    arrays = q, k, v = call.q.values, call.k.values, call.v.values
    if reason := rejects_arrays(*arrays, call.q.offsets, call.k.offsets):
        return reason
    if not q.ndim == k.ndim == v.ndim == 3:
        return "the Triton kernels take values of shape (total, num_heads, head_dim)"
    for x in arrays:
        if np.dtype(x.dtype) not in TORCH_DTYPES:
            return f"the Triton kernels take float16, bfloat16 and float32, not {x.dtype}"
    dtypes: Any = tuple(TORCH_DTYPES[np.dtype(x.dtype)] for x in arrays)
    sizes = q.shape[0], k.shape[0], call.q.offsets.shape[0] - 1
    if 0 in sizes:
        return "the Triton kernels for JAX need at least one token and one row"
    if reason := rejects_kind(dtypes, (q.shape[2], v.shape[2]), sizes):
        return reason
    if call.alibi_slopes is not None:
        return "the Triton kernels for JAX have no ALiBi"
    if call.dropout:
        return "the Triton kernels for JAX have no dropout"
    if reason := rejects_partitioning(*arrays, call.q.offsets, call.k.offsets):
        return reason
    if not call.scale > 0:
        return f"the Triton kernels need a positive scale, not {call.scale}"
    if UNAVAILABLE:
        return UNAVAILABLE.get(_kind_of(*arrays, static=_spec_of(call)))
    return None


def _spec_of(call: Any) -> AttentionSpec:
    return make_spec(call.causal, *call.window, call.scale, call.softcap)


def _kind_of(q: Any, k: Any, v: Any, *_: Any, static: "Static | AttentionSpec") -> Hashable:
    """Return what the kernels of a call are compiled for."""
    is_decoded = isinstance(static, Static) and static.max_queries > 0
    spec = static.spec if isinstance(static, Static) else static
    dtypes = tuple(np.dtype(x.dtype).name for x in (q, k, v))
    name = "decoding" if is_decoded else "attention"
    return name, spec, dtypes, q.shape[1:], k.shape[1:], v.shape[1:]


def attention(call: Any) -> Any:
    """Compute attention of a call for which `rejects` returns None."""
    q, k = call.q, call.k
    spec = _spec_of(call)
    bound = max(x.layout.max_length_bound for x in (q, k))
    # Rounded up to eighths of a power of two, so that slightly longer rows reuse the compiled
    # function. A power of two would choose other tiles than PyTorch for many batches.
    eighth = max(1, (1 << max(bound - 1, 0).bit_length()) // 8)
    max_seqlen = min(-(-bound // eighth) * eighth, UNBOUNDED)
    static = Static(
        spec, k.offsets is q.offsets, max_seqlen, call.return_lse, loops.make_options(call)
    )
    if is_decoding(call):
        decoding = static._replace(max_queries=q.layout.max_length_bound)
        if _kind_of(q.values, k.values, call.v.values, static=decoding) not in UNAVAILABLE:
            static = decoding
    out, lse = _attend(static, q.values, k.values, call.v.values, q.offsets, k.offsets)
    return (q.with_values(out), q.with_values(lse)) if call.return_lse else q.with_values(out)


def _offsets(static: Static, q_offsets: Any, k_offsets: Any) -> tuple[Any, ...]:
    return (q_offsets,) if static.same_offsets else (q_offsets, k_offsets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Static, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any
) -> tuple[Any, Any]:
    """Return the output (total, heads, value_dim) and the log-sum-exp (total, heads)."""
    offsets = _offsets(static, q_offsets, k_offsets)
    out, lse = _forward_primitive.bind(q, k, v, *offsets, static=static)
    return out, lse.T


def _attend_forward(
    static: Static, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any
) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    static, offsets = static._replace(max_queries=0), _offsets(static, q_offsets, k_offsets)
    out, lse = _forward_primitive.bind(q, k, v, *offsets, static=static)
    return (out, lse.T), (q, k, v, *offsets, out, lse)


def _attend_backward(static: Static, residuals: tuple[Any, ...], grads: tuple[Any, Any]) -> Any:
    static = static._replace(max_queries=0)
    *_, out, _ = residuals
    out_grad, lse_grad = grads
    result_grads = [out_grad.astype(out.dtype), *([lse_grad.T] if static.return_lse else [])]
    input_grads = _backward_primitive.bind(*residuals, *result_grads, static=static)
    return *input_grads, None, None


_attend.defvjp(_attend_forward, jax.jit(_attend_backward, static_argnums=0))
_attend = jax.jit(_attend, static_argnums=0)


# --- The launches
def _layout(static: Static, offsets: list[torch.Tensor]) -> VarlenLayout:
    return VarlenLayout(offsets[0], offsets[-1], None, static.max_seqlen)


def _forward_kernels(q: Any, k: Any, v: Any, *offsets: Any, static: Static) -> list[Any]:
    arrays = q, k, v, *offsets
    tensors = [meta(x) for x in arrays]
    if static.max_queries:
        return _decode(static, arrays, tensors)
    with record() as recording:
        layout = _layout(static, tensors[3:])
        config = get_launch_config(*tensors[:3], layout, static.spec, 0)
        out, lse = config.forward(*tensors[:3], None, layout, static.spec)
    return run_recording(recording, capability(), list(zip(tensors, arrays)), (out, lse))


def _decode(static: Static, arrays: tuple[Any, ...], tensors: list[torch.Tensor]) -> list[Any]:
    rows = *tensors[:4], tensors[-1]
    with record() as recording:
        run = prepare_contiguous_decoding(*rows, static.spec, static.max_queries, static.return_lse)
        result = run(*rows)
    results = result if static.return_lse else (result,)
    out, *lse = run_recording(recording, capability(), list(zip(tensors, arrays)), results)
    # Without `return_lse` no operation reads the log-sum-exp, so XLA removes it.
    return [out, lse[0].T if lse else jnp.zeros((out.shape[1], out.shape[0]), jnp.float32)]


def _backward_kernels(*arrays: Any, static: Static) -> list[Any]:
    tensors = [meta(x) for x in arrays]
    q, k, v, offsets, out, lse, out_grad, lse_grad = _split(static, tensors)
    with record() as recording:
        layout = _layout(static, offsets)
        config = get_launch_config(q, k, v, layout, static.spec, 0)
        grads = config.backward(q, k, v, None, out, lse, out_grad, lse_grad, layout, static.spec)
    return run_recording(recording, capability(), list(zip(tensors, arrays)), grads)


def _split(static: Static, arrays: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of the backward pass, the offsets as a list.

    `lse_grad` is None where the log-sum-exp has no gradient.
    """
    q, k, v, *others = arrays
    lse_grad = others.pop() if static.return_lse else None
    *offsets, out, lse, out_grad = others
    return q, k, v, offsets, out, lse, out_grad, lse_grad


# --- The primitives
def _forward_loops(q: Any, k: Any, v: Any, *offsets: Any, static: Static) -> list[Any]:
    (out, lse), _ = loops.forward(static.loops, q, k, v, offsets[0], offsets[-1])
    return [out, lse.T]


def _backward_loops(*arrays: Any, static: Static) -> list[Any]:
    q, k, v, offsets, out, lse, out_grad, lse_grad = _split(static, list(arrays))
    lse_grad = jnp.zeros_like(lse) if lse_grad is None else lse_grad
    residuals = q, k, v, offsets[0], offsets[-1], out, lse.T[..., None]
    return list(loops.backward(static.loops, residuals, (out_grad, lse_grad.T))[:3])


def _forward_types(q: Any, k: Any, v: Any, *_: Any, static: Static) -> list[Any]:
    total, heads, _ = q.shape
    # Under shard_map the results must vary over the same axes of a mesh as q.
    out = q.update(shape=(total, heads, v.shape[2]), weak_type=False)
    sharding = NamedSharding(q.sharding.mesh, PartitionSpec(None, None))
    return [out, out.update(shape=(heads, total), dtype=np.dtype("float32"), sharding=sharding)]


def _backward_types(q: Any, k: Any, v: Any, *_: Any, static: Static) -> list[Any]:
    return [q, k, v]


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "the attention kernels for JAX have no second derivative; pass kernel='standard'"
    )


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(_VMAP)


_RULES = _refuse_vmap, _refuse_derivative, _kind_of
_forward_primitive = define_primitive(
    "scree_attention_forward", _forward_types, _forward_kernels, _forward_loops, *_RULES
)
_backward_primitive = define_primitive(
    "scree_attention_backward", _backward_types, _backward_kernels, _backward_loops, *_RULES
)
#: Primitive -> its function on CUDA.
PRIMITIVES = {_forward_primitive: _forward_kernels, _backward_primitive: _backward_kernels}


def note(call: Any) -> str | None:
    """Return why the portable kernels run on a Hopper GPU; None if the kernels for Hopper run."""
    return device_info(torch.device("meta")).note
