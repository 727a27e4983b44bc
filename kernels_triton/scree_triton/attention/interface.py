"""Attention calls: rejection of unsupported calls, autograd and torch.compile.

Eager calls use one `torch.autograd.Function` and launch compiled kernels directly. While
torch.compile or torch.export traces, custom operators run the same launch configs.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy as np
import torch

import scree
from scree.dispatch.operation import KernelUnavailableError
from scree.ops.philox import RESOLUTION, threshold

from ..runtime.autograd import differentiable, needs_gradient
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import INTERPRETED, device_info
from ..runtime.fallback import falls_back_to, gradients, record_replacement, run_standard
from ..runtime.launch import UnalignedError
from .base_config import LaunchConfig
from .launch_configs import (
    get_launch_config,
    has_sm90_kernels,
    replace_by_portable_config,
    usual_tile_sizes,
)
from .metadata import (
    AttentionSpec,
    HeadLayout,
    VarlenLayout,
    allows_tf32,
    is_tma_addressable,
    is_tma_aligned,
    slope_axes,
)
from .paged import is_decoding, prepare_decoding
from .portable_config import PortableConfig
from .tile_configs import SHORT_SEQLEN
from .tile_scheduler import FIELDS, UNBOUNDED, max_tiles, schedule_tiles

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Bound once, because a class method is bound anew at every call.
_from_layout = scree.Array.from_layout
_MAX_ROWS = 1 << 24
_MAX_TOKENS = 1 << 26


def rejects(call: Any) -> str | None:
    """Return why the kernels cannot serve `call`, from host metadata only; None if they can."""
    q, k, v = call.q.values, call.k.values, call.v.values
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        return "the Triton kernels take torch tensors"
    if not q.ndim == k.ndim == v.ndim == 3:
        return "the Triton kernels take values of shape (total, num_heads, head_dim)"
    dtypes, head_dims = (q.dtype, k.dtype, v.dtype), (q.shape[2], v.shape[2])
    sizes = q.shape[0], k.shape[0], call.q.offsets.shape[0] - 1
    if reason := rejects_kind(dtypes, head_dims, sizes):
        return reason
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        return "the Triton kernels need the last axis of q, k and v to be contiguous"
    slopes = call.alibi_slopes
    if slopes is not None and (slopes.device != q.device or slopes.requires_grad):
        return f"the Triton kernels take ALiBi slopes on {q.device} that need no gradient"
    if not call.scale > 0:
        return f"the Triton kernels need a positive scale, not {call.scale}"
    return None


def rejects_kind(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    sizes: tuple[int, int, int],
) -> str | None:
    """Return why the kernels have no variant for a kind of call; None if they have one.

    Parameters
    ----------
    dtypes
        Of q, k and v.
    head_dims
        Of q and k, and of v.
    sizes
        The numbers of queries, of keys and of rows.
    """
    dtype, (dim, dim_v), (total, total_k, num_rows) = dtypes[0], head_dims, sizes
    if dtype not in _DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, not {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    if len({*dtypes}) > 1:
        names = "{}, {} and {}".format(*dtypes)
        return f"the Triton kernels take q, k and v of one dtype, not {names}"
    if not (16 <= dim <= 256 and 16 <= dim_v <= 256):
        return f"the Triton kernels take head_dim 16 to 256, not {dim} (q, k) and {dim_v} (v)"
    if num_rows >= _MAX_ROWS or total > _MAX_TOKENS or total_k > _MAX_TOKENS:
        return f"the Triton kernels take up to {_MAX_ROWS - 1} rows and {_MAX_TOKENS} tokens"
    return None


def note(call: Any) -> str | None:
    """Return why no kernel for Hopper runs on a Hopper GPU; None if one does."""
    q, k, v = call.q.values, call.k.values, call.v.values
    device, prefix = device_info(q.device), "the faster kernels for Hopper take"
    if not device.is_hopper or device.note:
        return device.note
    if call.dropout:
        return f"{prefix} no dropout"
    if slope_axes(call.alibi_slopes) == 2:
        return f"{prefix} ALiBi slopes per head, not per row and head"
    if allows_tf32(q.dtype):
        return f"{prefix} float32 only with torch.set_float32_matmul_precision('highest')"
    if not has_sm90_kernels(q.device, q.dtype, q.shape[2], v.shape[2]):
        supported = "32 or 64" if q.dtype == torch.float32 else "multiples of 8 from 24 to 256"
        return f"{prefix} head_dim {supported} here, not {q.shape[2]} (q, k) and {v.shape[2]} (v)"
    if not (is_tma_aligned(q, k, v) and all(map(is_tma_addressable, (q, k, v)))):
        return f"{prefix} q, k and v at addresses and with strides that are multiples of 16 bytes"
    return None


def run(call: Any) -> Any:
    """Run a call that `rejects` accepts.

    Returns
    -------
    Array or tuple of Array
        The output, and with ``call.return_lse`` also the natural log-sum-exp, float32, one number
        per query and head.
    """
    q, k, v = call.q, call.k, call.v
    if not uses_operators(q.values, k.values, v.values):
        arrays = dict(q=q, k=k, v=v, alibi_slopes=call.alibi_slopes)
        if call.seed is not None:
            arrays["seed"] = call.seed
        try:
            return prepare_run(call)(**arrays)
        except KernelUnavailableError as error:
            values = q.values, k.values, v.values
            max_seqlen = max(q.layout.max_length_bound, k.layout.max_length_bound)
            rows = VarlenLayout(q.offsets, k.offsets, None, max_seqlen)
            alibi = slope_axes(call.alibi_slopes)
            if not replace_by_portable_config(*values, rows, call_spec(call), alibi):
                raise
            record_replacement(__name__, {q.dtype}, str(error))
        return prepare_run(call)(**arrays)
    out, lse = _traced(
        q.values,
        k.values,
        v.values,
        q.offsets,
        k.offsets,
        call_spec(call),
        _kernel_slopes(call.alibi_slopes, q.layout),
        call.seed,
        q.layout.max_length_bound if k.layout is q.layout else k.layout.max_length_bound,
    )
    return (q.with_values(out), q.with_values(lse.t())) if call.return_lse else q.with_values(out)


def prepare_run(call: Any) -> Callable[..., Any]:
    """Return a function that runs calls with the same metadata as this one."""
    spec, alibi, return_lse = call_spec(call), slope_axes(call.alibi_slopes), call.return_lse
    needs_grad = any(x.values.requires_grad for x in (call.q, call.k, call.v))
    if not needs_grad and is_decoding(call):
        return prepare_decoding(call, spec)
    is_float32 = call.q.values.dtype == torch.float32
    # Alignment and precision setting -> function that runs forward, and constants of `_apply_in_c`.
    prepared: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def prepare(
        q: Any, k: Any, values: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        key: Any = is_tma_aligned(*values)
        if is_float32:
            key = key, allows_tf32(torch.float32)
        if key in prepared:
            return prepared[key]
        max_seqlen = max(q.layout.max_length_bound, k.layout.max_length_bound)
        layout = VarlenLayout(q.offsets, k.offsets, q.layout.pair_cache(k.layout), max_seqlen)
        config = get_launch_config(*values, layout, spec, alibi)
        total_q, total_k = values[0].shape[0], values[1].shape[0]
        forward = config.prepare_forward(layout, total_q, total_k, spec)
        backward = _prepare_backward(config, layout, total_q, total_k, spec) if needs_grad else None
        constants = forward, backward, None, None, return_lse
        prepared[key] = forward, constants
        # Aligned calls of which nothing but the dense arrays can differ. Without gradients the recorded
        # function gives the same result.
        if key is True and needs_grad and not return_lse:
            run_prepared.run_dense = partial(_apply_in_c, constants)  # type: ignore[attr-defined]
        return prepared[key]

    def run_prepared(
        q: Any,
        k: Any,
        v: Any,
        alibi_slopes: torch.Tensor | None,
        seed: torch.Tensor | None = None,
        is_aligned: bool = True,
    ) -> Any:
        q_values, k_values, v_values, layout = q.values, k.values, v.values, q.layout
        key: Any = is_aligned
        if is_float32:
            key = key, allows_tf32(torch.float32)
        forward, constants = prepared.get(key) or prepare(q, k, (q_values, k_values, v_values))
        slopes = None
        if alibi_slopes is not None or seed is not None:
            slopes = _kernel_slopes(alibi_slopes, layout)
            constants = *constants[:2], slopes, seed, return_lse
        try:
            if needs_grad and _is_grad_enabled():
                # No transform of `torch.func` is active: `rejects` and the guards of the call cache
                # reject such calls.
                out = _apply_in_c(constants, q_values, k_values, v_values)
                if not return_lse:
                    return _from_layout(out, layout)
                out, lse = out
            else:
                out, lse = forward(q_values, k_values, v_values, slopes, seed)
        # Few calls are unaligned. Reading the addresses before the launch would take host time.
        except UnalignedError:
            if not is_aligned:
                raise
            return run_prepared(q, k, v, alibi_slopes, seed, is_aligned=False)
        if return_lse:
            return _from_layout(out, layout), _from_layout(lse.t(), layout)
        return _from_layout(out, layout)

    return run_prepared


def _kernel_slopes(slopes: torch.Tensor | None, layout: Any) -> torch.Tensor | None:
    """Return slopes (heads,), or per query (total_q, heads), in float32; None for None."""
    if slopes is None:
        return None
    slopes = slopes.to(torch.float32).contiguous()
    return layout.per_token(slopes) if slopes.ndim == 2 else slopes  # type: ignore[no-any-return]


def call_spec(call: Any) -> AttentionSpec:
    """Return the `AttentionSpec` of an `AttentionCall`."""
    return make_spec(call.causal, *call.window, call.scale, call.softcap, call.dropout)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    memo: dict | None = None,
    max_length: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged attention on packed tensors.

    Parameters
    ----------
    q, k, v
        Values of shape ``(total, num_heads, head_dim)``. k and v may have fewer heads, v another
        head_dim.
    cu_q, cu_k
        Offsets of the rows, int32 or int64.
    causal
        Whether a query attends only keys up to its own position; both rows are aligned at their
        ends.
    window
        The number of keys that a query attends before and after its own position; None for all.
    scale, softcap
        Scores are ``q @ k * scale``, and with a softcap ``softcap * tanh(scores / softcap)``.
    alibi_slopes
        float32, shape ``(num_heads,)``, or ``(total, num_heads)`` with equal slopes in all queries
        of a row. The slope times the distance between query and key is subtracted from each score,
        after the softcap. Not differentiated.
    dropout, seed
        The probability of dropout, and an int64 tensor of one element.
    memo
        A dict that belongs to the rows of q and lives as long as they do. It caches tile schedules.
    max_length
        A bound on the longest row of q and k, if known. A few short rows take smaller tiles.

    Returns
    -------
    out, lse
        The output, contiguous, and the float32 log-sum-exp of shape ``(total, num_heads)``. A query
        without a valid key has output 0 and log-sum-exp -inf.
    """
    spec = make_spec(causal, *window, scale, softcap, dropout)
    seed = seed if spec.dropout else None
    longest = UNBOUNDED if max_length is None else max_length
    if uses_operators(q, k, v):
        out, lse = _traced(q, k, v, cu_q, cu_k, spec, alibi_slopes, seed, longest)
        return out, lse.t()
    layout = VarlenLayout(cu_q, cu_k, memo, longest)
    config = get_launch_config(q, k, v, layout, spec, slope_axes(alibi_slopes))
    forward = config.prepare_forward(layout, q.shape[0], k.shape[0], spec)
    if needs_gradient(q, k, v):
        backward = _prepare_backward(config, layout, q.shape[0], k.shape[0], spec)
        constants = forward, backward, alibi_slopes, seed, True
        out, lse = _differentiable_attention(constants, q, k, v)
    else:
        out, lse = forward(q, k, v, alibi_slopes, seed)
    return out, lse.t()


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: VarlenLayout,
    spec: AttentionSpec,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, contiguous, for a caller that keeps the results itself.

    Parameters
    ----------
    dout
        Gradient of `out`.
    q, k, v
        As in `attention`.
    out, lse
        Results of the forward pass; `lse` is contiguous and has shape ``(num_heads, total)``.
    layout, spec
        Rows and options of the call, see `make_spec`.
    dlse
        (num_heads, total) gradient of `lse`, or None.

    Returns
    -------
    tuple
        The gradients, with the shapes and dtypes of q, k and v.
    """
    config = get_launch_config(q, k, v, layout, spec, 0)
    cache = {} if layout.cache is None else layout.cache
    # Preparing launches takes longer than the launches. The prepared functions hold the offsets of the
    # keys, so that no other object gets their id.
    key = "backward", config, id(layout.cu_seqlens_k), q.shape[0], k.shape[0], spec
    if key not in cache:
        cache[key] = _prepare_backward(config, layout, q.shape[0], k.shape[0], spec)
    run, other = cache[key]
    args = q, k, v, None, out, lse, dout, dlse
    try:
        return run(*args)  # type: ignore[no-any-return]
    except KernelUnavailableError as error:
        return run_standard(other, args, error, __name__)  # type: ignore[no-any-return]


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: VarlenLayout, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp (num_heads, total), without gradients.

    With `layout.max_seqlen` = `UNBOUNDED` the bits of a row do not depend on the other rows.
    """
    config = get_launch_config(q, k, v, layout, spec, 0)
    rows = layout._replace(cache=None)

    @falls_back_to(lambda *args: _other_forward(config, rows, spec, *args))
    def run(*args: Any) -> Any:
        return config.forward(*args, layout, spec)

    return run(q, k, v, None)  # type: ignore[no-any-return]


def make_spec(
    causal: bool,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    dropout: float = 0.0,
) -> AttentionSpec:
    """Return the spec of a call, with `UNBOUNDED` for None and the causal mask in the window."""
    left = UNBOUNDED if left is None else min(left, UNBOUNDED)
    right = UNBOUNDED if right is None else min(right, UNBOUNDED)
    right = min(right, 0) if causal else right
    return AttentionSpec(left, right, float(scale), float(softcap or 0.0), threshold(dropout))


def _standard(
    layout: VarlenLayout,
    spec: AttentionSpec,
    slopes: torch.Tensor | None,
    seed: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp (heads, total) by the standard implementation."""
    max_lengths = (min(layout.max_seqlen, x.shape[0]) for x in (q, k))
    offsets = layout.cu_seqlens_q, layout.cu_seqlens_k
    rows, attended = (
        scree.Array.unchecked(x, cu, 0, n).layout
        for x, cu, n in zip((q, k), offsets, max_lengths, strict=True)
    )
    if slopes is not None and slopes.ndim == 2:  # a table (total_q, heads)
        starts = layout.cu_seqlens_q[:-1].clamp(max=slopes.shape[0] - 1)
        slopes = slopes.index_select(0, starts)
    sides = tuple(None if side >= UNBOUNDED else side for side in spec[:2])
    out, lse = scree.attention(
        *(scree.Array.from_layout(x, on) for x, on in ((q, rows), (k, attended), (v, attended))),
        window=sides,
        scale=spec.scale,
        softcap=spec.softcap or None,
        alibi_slopes=slopes,
        dropout=spec.dropout / RESOLUTION,
        seed=seed,
        return_lse=True,
        kernel="standard",
    )
    return out.values, lse.values.t()


@lru_cache(1024)
def _portable_config(
    device: torch.device,
    dtype: torch.dtype,
    layouts: tuple[HeadLayout, ...],
    spec: AttentionSpec,
    alibi: int,
    tf32: bool,
) -> PortableConfig:
    left, right, _, softcap, dropout = spec
    bounded = left < UNBOUNDED, right < UNBOUNDED
    return PortableConfig(device, dtype, layouts, *bounded, softcap > 0, alibi, dropout > 0, tf32)


def _portable(
    config: LaunchConfig, spec: AttentionSpec, slopes: torch.Tensor | None
) -> PortableConfig:
    """Return the launch config of the portable kernels; raise if `config` is one itself."""
    if isinstance(config, PortableConfig):
        raise KernelUnavailableError("the portable kernels are unavailable")
    layouts = config.q, config.k, config.v
    tf32 = allows_tf32(config.dtype)
    return _portable_config(config.device, config.dtype, layouts, spec, slope_axes(slopes), tf32)


def _other_forward(config, layout, spec, q, k, v, slopes, seed=None):
    """Return the results of a forward kernel that does not compile, by another implementation."""
    try:
        return _portable(config, spec, slopes).forward(q, k, v, slopes, layout, spec, seed)
    except KernelUnavailableError:
        return _standard(layout, spec, slopes, seed, q, k, v)


def _other_backward(config, layout, spec, q, k, v, slopes, out, lse, dout, dlse, seed=None):
    """Return the gradients of backward kernels that do not compile, by another implementation."""
    arguments = q, k, v, slopes, out, lse, dout, dlse
    try:
        return _portable(config, spec, slopes).backward(*arguments, layout, spec, seed)
    except KernelUnavailableError:
        grads = tuple(
            torch.zeros_like(x) if grad is None else grad for x, grad in ((out, dout), (lse, dlse))
        )
        return gradients(partial(_standard, layout, spec, slopes, seed), (q, k, v), grads)


def _prepare_backward(
    config: LaunchConfig, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function of `LaunchConfig.prepare_backward`, and the function that replaces it."""
    # The functions can be in the cache of the layout, so they must not hold the cache.
    other = partial(_other_backward, config, layout._replace(cache=None), spec)
    try:
        return config.prepare_backward(layout, total_q, total_k, spec), other
    except KernelUnavailableError as error:  # a kernel that cuts tiles does not compile
        return partial(_raise_unavailable, str(error)), other


def _raise_unavailable(reason: str, *args: Any) -> NoReturn:
    raise KernelUnavailableError(reason)


def _record_attention(ctx, constants, q, k, v):
    # The constants are one tuple, because every argument of an autograd function costs time.
    run, ctx.functions, slopes, seed, return_lse = constants
    out, lse = run(q, k, v, slopes, seed)
    # Saving None would cost host time.
    if slopes is None and seed is None:
        ctx.save_for_backward(q, k, v, out, lse)
    else:
        ctx.save_for_backward(q, k, v, out, lse, slopes, seed)
    if return_lse:
        ctx.set_materialize_grads(False)
        return out, lse
    return out


def _attention_gradient(ctx, dout, dlse=None):
    # Decorators around this function, such as `falls_back_to`, would take host time at every call.
    if _is_grad_enabled():
        return _gradient_without_derivative(ctx, dout, dlse)
    saved, (run, other) = ctx.saved_tensors, ctx.functions
    if len(saved) == 5:
        (q, k, v, out, lse), slopes, seed = saved, None, None
    else:
        q, k, v, out, lse, slopes, seed = saved
    try:
        dq, dk, dv = run(q, k, v, slopes, out, lse, dout, dlse, seed)
    except KernelUnavailableError as error:
        args = q, k, v, slopes, out, lse, dout, dlse, seed
        dq, dk, dv = run_standard(other, args, error, __name__)
    return None, dq, dk, dv


_gradient_without_derivative = torch.autograd.function.once_differentiable(_attention_gradient)
_differentiable_attention = differentiable(
    "Attention", _record_attention, _attention_gradient, second_derivative="own"
)
_apply_in_c = _differentiable_attention.apply_in_c
_is_grad_enabled = torch.is_grad_enabled


def _traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    spec: AttentionSpec,
    slopes: torch.Tensor | None,
    seed: torch.Tensor | None,
    max_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp (num_heads, total) through operators."""
    tiles = schedule_op(cu_q, cu_k, q.shape[0], *_tile_kind(q, v), _FORWARD, spec[0], spec[1])
    return attention_op(q, k, v, slopes, seed, cu_q, cu_k, tiles, max_length, *spec)


# Kernels that take a schedule; fields of `TileSizes`.
_FORWARD, _DQ, _DKDV = range(3)


def _tile_kind(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.dtype, int, int]:
    """Return the arguments of `usual_tile_sizes` after the device."""
    return q.dtype, q.shape[2], v.shape[2]


def _schedule_operator(
    cu: torch.Tensor,
    attended_cu: torch.Tensor,
    total: int,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    kernel: int,
    left: int,
    right: int,
) -> torch.Tensor:
    """Return the schedule of one kernel.

    The arguments are equal in all layers of a model, so a compiler merges the calls of all layers.
    """
    tile_size = usual_tile_sizes(cu.device, dtype, head_dim, head_dim_v)[kernel]
    return schedule_tiles(cu, attended_cu, total, tile_size, left, right)


def _schedule_fake(cu, attended_cu, total, dtype, head_dim, head_dim_v, kernel, left, right):
    # A dynamic size is a SymInt, which no table of launch configurations has as a key.
    tile_size = usual_tile_sizes(cu.device, dtype, int(head_dim), int(head_dim_v))[kernel]
    slots = max_tiles(total, cu.shape[0] - 1, tile_size)
    return cu.new_empty((slots + 1, FIELDS), dtype=torch.int32)


schedule_op = define_operator("attention_schedule", _schedule_operator, _schedule_fake)


def _layout(cu_q: torch.Tensor, cu_k: torch.Tensor, max_length: int) -> VarlenLayout:
    """Return the layout of an operator's arguments.

    They lose their identity, so equal memory identifies the same offsets. The cache lives as long
    as the call. A kernel whose tile size is not the usual one makes its own schedule. For a few
    short rows that would take longer than smaller tiles save, so their bound is raised.
    """
    same = (
        cu_q.data_ptr() == cu_k.data_ptr() and cu_q.dtype == cu_k.dtype and cu_q.shape == cu_k.shape
    )
    return VarlenLayout(cu_q, cu_q if same else cu_k, {}, max(max_length, SHORT_SEQLEN + 1))


def _forward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    seed: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    tiles: torch.Tensor,
    max_length: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    dropout: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = _layout(cu_q, cu_k, max_length)
    spec = AttentionSpec(left, right, scale, softcap, dropout)
    sizes = usual_tile_sizes(q.device, *_tile_kind(q, v))
    layout.cache[layout.schedule_key(q.shape[0], sizes.forward, spec)] = tiles, None
    config = get_launch_config(q, k, v, layout, spec, slope_axes(slopes))

    @falls_back_to(lambda *args: _other_forward(config, layout, spec, *args))
    def run(*args: Any) -> Any:
        return config.forward(*args[:4], layout, spec, *args[4:])

    return run(q, k, v, slopes, seed)  # type: ignore[no-any-return]


def _forward_fake(q, k, v, slopes, seed, cu_q, cu_k, tiles, *constants):
    total, heads, _ = q.shape
    return q.new_empty((total, heads, v.shape[2])), q.new_empty((heads, total), dtype=torch.float32)


def _backward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    seed: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    query_tiles: torch.Tensor,
    key_tiles: torch.Tensor,
    max_length: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    dropout: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = _layout(cu_q, cu_k, max_length)
    spec = AttentionSpec(left, right, scale, softcap, dropout)
    sizes = usual_tile_sizes(q.device, *_tile_kind(q, v))
    layout.cache[layout.schedule_key(q.shape[0], sizes.dq, spec)] = query_tiles, None
    key = layout.schedule_key(k.shape[0], sizes.dkdv, spec, is_of_keys=True)
    layout.cache[key] = key_tiles, None
    config = get_launch_config(q, k, v, layout, spec, slope_axes(slopes))

    @falls_back_to(lambda *args: _other_backward(config, layout, spec, *args))
    def run(*args: Any) -> Any:
        return config.backward(*args[:8], layout, spec, *args[8:])

    return run(q, k, v, slopes, out, lse, dout, dlse, seed)  # type: ignore[no-any-return]


def _backward_fake(
    q, k, v, slopes, seed, out, lse, dout, dlse, cu_q, cu_k, query_tiles, key_tiles, *constants
):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _count_pairs(
    cu_q: torch.Tensor, cu_k: torch.Tensor, total_q: int, max_length: int, left: int, right: int
) -> int:
    """Return the number of pairs of a query and a key that it attends.

    Where the offsets cannot be read, as on fake tensors, return a bound.
    """
    if type(cu_q) is not torch.Tensor or cu_q.device.type == "meta":
        return total_q * min(max_length, left + right + 1)
    starts_q, starts_k = (cu.numpy(force=True).astype(np.int64) for cu in (cu_q, cu_k))
    lengths_q, lengths_k = np.diff(starts_q), np.diff(starts_k)
    position = np.arange(starts_q[-1]) - np.repeat(starts_q[:-1], lengths_q)
    last_key = np.repeat(lengths_k, lengths_q) - 1
    diagonal = position + np.repeat(lengths_k - lengths_q, lengths_q)
    first, last = np.maximum(diagonal - left, 0), np.minimum(diagonal + right, last_key)
    return int(np.maximum(last - first + 1, 0).sum())


def _forward_flops(q, k, v, slopes, seed, cu_q, cu_k, tiles, max_length, left, right, *_):
    """Count q @ k and p @ v."""
    pairs = _count_pairs(cu_q, cu_k, q.shape[0], min(max_length, k.shape[0]), left, right)
    return 2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])


def _backward_flops(
    q, k, v, slopes, seed, out, lse, dout, dlse, cu_q, cu_k, query_tiles, key_tiles, *constants
):
    """Count q @ k again, the products for dP and dV with v's head_dim, and for dQ and dK."""
    max_length, left, right, *_ = constants
    pairs = _count_pairs(cu_q, cu_k, q.shape[0], min(max_length, k.shape[0]), left, right)
    return 2 * pairs * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


_backward_op = define_operator(
    "attention_backward", _backward_operator, _backward_fake, flops=_backward_flops
)


def _save(ctx, inputs, output):
    q, k, v, slopes, seed, cu_q, cu_k, _, ctx.max_length, *ctx.spec = inputs
    ctx.save_for_backward(q, k, v, slopes, seed, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, slopes, seed, out, lse, cu_q, cu_k = ctx.saved_tensors
    kind, (left, right, *_) = _tile_kind(q, v), ctx.spec
    query_tiles = schedule_op(cu_q, cu_k, q.shape[0], *kind, _DQ, left, right)
    key_tiles = schedule_op(cu_k, cu_q, k.shape[0], *kind, _DKDV, right, left)
    return _backward_op(
        *(q, k, v, slopes, seed, out, lse, dout, dlse),
        *(cu_q, cu_k, query_tiles, key_tiles, ctx.max_length, *ctx.spec),
    )


attention_op = define_operator(
    "attention",
    _forward_operator,
    _forward_fake,
    save=_save,
    backward=_differentiate,
    flops=_forward_flops,
)
