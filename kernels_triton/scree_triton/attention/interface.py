"""The entrance to attention: what is taken, and how autograd and torch.compile see it.

Eager calls go through one `torch.autograd.Function` and launch compiled kernels directly; while torch.compile or
torch.export trace, the same plans run behind custom operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.autograd import differentiable, needs_gradient
from ..runtime.compile import define_operator
from ..runtime.launch import INTERPRETED
from .launch_configs import Rows, Spec, aligned, capturing, plan, tf32
from .tile_scheduler import UNBOUNDED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_ROWS = 1 << 24
_MOST_TOKENS = 1 << 26
_UNFIT: dict[torch.device, str] = {}  # why no kernel runs on a device; empty for those that do


def rejects(call: Any) -> str | None:
    """Why this package does not take `call`, from host metadata only; None if it does."""
    q, k, v = call.q.values, call.k.values, call.v.values
    dtype, slopes = q.dtype, call.alibi_slopes
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        return "the Triton kernels take torch tensors"
    unfit = _unfit(q.device)
    if unfit:
        return unfit
    if dtype not in _DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, not {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    if not dtype == k.dtype == v.dtype:
        return (
            f"the Triton kernels take q, k and v of one dtype, not {dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.ndim == k.ndim == v.ndim == 3:
        return "the Triton kernels take values of shape (total, num_heads, head_dim)"
    total, _, dim = q.shape
    total_k, _, dim_v = v.shape
    if not (16 <= dim <= 256 and 16 <= dim_v <= 256):
        return f"the Triton kernels take head_dim 16 to 256, not {dim} (q, k) and {dim_v} (v)"
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        return "the Triton kernels need the last axis of q, k and v to be contiguous"
    if slopes is not None and (slopes.device != q.device or slopes.requires_grad):
        return f"the Triton kernels take ALiBi slopes on {q.device} that need no gradient"
    if not call.scale > 0:
        return f"the Triton kernels need a positive scale, not {call.scale}"
    if call.q.offsets.shape[0] > _MOST_ROWS or total > _MOST_TOKENS or total_k > _MOST_TOKENS:
        return f"the Triton kernels take up to {_MOST_ROWS - 1} rows and {_MOST_TOKENS} tokens"
    return None


def _unfit(device: torch.device) -> str:
    if device not in _UNFIT:
        if device.type != "cuda" and not INTERPRETED:
            _UNFIT[device] = f"the Triton kernels run on CUDA devices, not on {device.type!r}"
        elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            _UNFIT[device] = "the Triton kernels need compute capability 8.0 (Ampere) or later"
        else:
            _UNFIT[device] = ""
    return _UNFIT[device]


def run(call: Any) -> Any:
    """Run a call that `rejects` does not reject.

    Returns
    -------
    Array or tuple of Array
        The output, and with ``call.return_lse`` also the natural log-sum-exp, float32, one number a query and head.
    """
    if not torch.compiler.is_compiling():
        return prepare_run(call)(call.q, call.k, call.v, call.alibi_slopes)
    q, k, v = call.q, call.k, call.v
    out, lse = _traced(
        q.values,
        k.values,
        v.values,
        q.offsets,
        k.offsets,
        _spec(call),
        None if call.alibi_slopes is None else _float(call.alibi_slopes),
    )
    return (q.with_values(out), q.with_values(lse.t())) if call.return_lse else q.with_values(out)


def prepare_run(call: Any) -> Callable[..., Any]:
    """What runs calls that differ from this one in the contents of their arrays alone."""
    spec, alibi, return_lse = _spec(call), call.alibi_slopes is not None, call.return_lse
    wanted = any(x.values.requires_grad for x in (call.q, call.k, call.v))
    found: dict[Any, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}

    def ways(
        q: Any, k: Any, arrays: tuple[torch.Tensor, ...], key: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        rows = Rows(
            q.offsets, k.offsets, q.layout.beside(k.layout), max(q.layout.bound, k.layout.bound)
        )
        way, tokens = plan(*arrays, rows, spec, alibi), (arrays[0].shape[0], arrays[1].shape[0])
        made = (
            way.forward_on(rows, *tokens, spec),
            way.backward_on(rows, *tokens, spec) if wanted else None,
        )
        if not capturing(arrays[0]):
            found[key] = made
        return made

    def attend(q: Any, k: Any, v: Any, alibi_slopes: torch.Tensor | None) -> Any:
        arrays, slopes = (
            (q.values, k.values, v.values),
            None if alibi_slopes is None else _float(alibi_slopes),
        )
        key = aligned(*arrays), tf32(arrays[0].dtype)
        forward, backward = found.get(key) or ways(q, k, arrays, key)
        if not (wanted and torch.is_grad_enabled()):
            out, lse = forward(*arrays, slopes)
        elif return_lse:
            out, lse = _differentiable_attention(*arrays, (forward, backward, slopes, True))
        else:
            return q._of(
                _differentiable_attention(*arrays, (forward, backward, slopes, False)), q.layout
            )
        return (
            (q._of(out, q.layout), q._of(lse.t(), q.layout)) if return_lse else q._of(out, q.layout)
        )

    return attend


def _float(slopes: torch.Tensor) -> torch.Tensor:
    return slopes.to(torch.float32).contiguous()


def _spec(call: Any) -> Spec:
    return spec_of(call.causal, *call.window, call.scale, call.softcap)


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
    memo: dict | None = None,
    max_length: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged attention on packed tensors.

    Parameters
    ----------
    q, k, v
        Values of shape ``(total, num_heads, head_dim)``. The heads of k and v may be fewer, the head_dim of v other.
    cu_q, cu_k
        Offsets of the rows, int32 or int64.
    causal
        Query ``i`` attends keys up to its own position, both rows aligned at their ends.
    window
        How many keys before and after its own position a query attends, None for all.
    scale, softcap
        Scores are ``q @ k * scale``, and with a softcap ``softcap * tanh(scores / softcap)``.
    alibi_slopes
        float32, shape ``(num_heads,)``: a slope times the distance of query and key is taken off each score, after the
        softcap. Not differentiated.
    memo
        A dict that belongs to the rows of q and lives as long as they do; the tile maps are kept in it.
    max_length
        A bound on the longest row of q and k, where one is known: few short rows take smaller tiles.

    Returns
    -------
    out, lse
        The output, contiguous, and the float32 log-sum-exp of shape ``(total, num_heads)``. A query without a valid key
        has output 0 and log-sum-exp -inf.
    """
    spec = spec_of(causal, *window, scale, softcap)
    if torch.compiler.is_compiling():
        out, lse = _traced(q, k, v, cu_q, cu_k, spec, alibi_slopes)
        return out, lse.t()
    rows = Rows(cu_q, cu_k, memo, UNBOUNDED if max_length is None else max_length)
    way, on = (
        plan(q, k, v, rows, spec, alibi_slopes is not None),
        (rows, q.shape[0], k.shape[0], spec),
    )
    forward = way.forward_on(*on)
    if needs_gradient(q, k, v):
        out, lse = _differentiable_attention(
            q, k, v, (forward, way.backward_on(*on), alibi_slopes, True)
        )
    else:
        out, lse = forward(q, k, v, alibi_slopes)
    return out, lse.t()


def spec_of(
    causal: bool, left: int | None, right: int | None, scale: float, softcap: float | None
) -> Spec:
    """What is computed, in the plain numbers of `Spec`."""
    left, right = (
        UNBOUNDED if left is None else min(left, UNBOUNDED),
        UNBOUNDED if right is None else min(right, UNBOUNDED),
    )
    return Spec(left, min(right, 0) if causal else right, float(scale), float(softcap or 0.0))


def _record_attention(ctx, q, k, v, constants):
    run, ctx.run_back, ctx.slopes, return_lse = constants
    out, lse = run(q, k, v, ctx.slopes)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.set_materialize_grads(False)
    return (out, lse) if return_lse else out


def _attention_gradient(ctx, dout, dlse=None):
    q, k, v, out, lse = ctx.saved_tensors
    return *ctx.run_back(q, k, v, ctx.slopes, out, lse, dout, dlse), None


_differentiable_attention = differentiable("Attention", _record_attention, _attention_gradient)


def _traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    spec: Spec,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp as the kernels lay it out, (num_heads, total), as a compiler shall see it."""
    rows_q = _rows_op(cu_q)
    return _forward_op(q, k, v, slopes, rows_q, rows_q if cu_k is cu_q else _rows_op(cu_k), *spec)


#: Offsets that `_rows_op` made in a compiled function -> their tile maps.
_MEMOS: Any = WeakIdKeyDictionary()


def _rows_operator(offsets: torch.Tensor) -> torch.Tensor:
    """A copy of offsets that nobody else holds, so that tile maps can be kept for it.

    What a compiler hands to an operator may be memory that it uses anew. Compilers merge equal calls, so all layers of a
    model share one copy, and with it the maps.
    """
    rows = offsets.clone()
    _MEMOS[rows] = {}
    return rows


def _rows_fake(offsets):
    return torch.empty_like(offsets)


_rows_op = define_operator("rows", _rows_operator, _rows_fake)


def _rows(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Rows:
    """An operator's arguments lose their identity, so the same offsets are told by their memory."""
    same = (
        cu_q.data_ptr() == cu_k.data_ptr() and cu_q.dtype == cu_k.dtype and cu_q.shape == cu_k.shape
    )
    return Rows(cu_q, cu_q if same else cu_k, _MEMOS.get(cu_q))


def _forward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, spec = _rows(cu_q, cu_k), Spec(left, right, scale, softcap)
    return plan(q, k, v, rows, spec, slopes is not None).forward(q, k, v, slopes, rows, spec)


def _forward_fake(q, k, v, slopes, cu_q, cu_k, left, right, scale, softcap):
    total, heads, _ = q.shape
    return q.new_empty((total, heads, v.shape[2])), q.new_empty((heads, total), dtype=torch.float32)


def _backward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, spec = _rows(cu_q, cu_k), Spec(left, right, scale, softcap)
    return plan(q, k, v, rows, spec, slopes is not None).backward(
        q, k, v, slopes, out, lse, dout, dlse, rows, spec
    )


def _backward_fake(q, k, v, slopes, out, lse, dout, dlse, cu_q, cu_k, left, right, scale, softcap):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_backward_op = define_operator("attention_backward", _backward_operator, _backward_fake)


def _save(ctx, inputs, output):
    q, k, v, slopes, cu_q, cu_k, *ctx.spec = inputs
    ctx.save_for_backward(q, k, v, slopes, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, slopes, out, lse, cu_q, cu_k = ctx.saved_tensors
    return *_backward_op(q, k, v, slopes, out, lse, dout, dlse, cu_q, cu_k, *ctx.spec), *(None,) * 7


_forward_op = define_operator(
    "attention", _forward_operator, _forward_fake, save=_save, backward=_differentiate
)
