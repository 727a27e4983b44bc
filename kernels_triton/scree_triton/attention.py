"""The entrance to attention: what is taken, and how autograd and torch.compile see it.

Eager calls go through one `torch.autograd.Function` and launch compiled kernels directly; while torch.compile or
torch.export trace, the same plans run behind custom operators.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .host import Function, once_differentiable
from .launch import INTERPRETED
from .plans import Rows, Spec, plan
from .tiles import UNBOUNDED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_ROWS = 1 << 24
_MOST_TOKENS = 1 << 26
_UNFIT: dict[torch.device, str] = {}  # why no kernel runs on a device; empty for those that do


def rejects(call: Any) -> str | None:
    """Why this package does not take `call`, from host metadata only; None if it does."""
    q, k, v = call.q.values, call.k.values, call.v.values
    dtype, slopes = q.dtype, call.alibi_slopes
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return "the Triton kernels take torch tensors"
    unfit = _unfit(q.device)
    if unfit:
        return unfit
    if dtype not in _DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, not {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    if not dtype == k.dtype == v.dtype:
        return f"the Triton kernels take q, k and v of one dtype, not {dtype}, {k.dtype} and {v.dtype}"
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
    return run_again(call)(call.q, call.k, call.v, call.alibi_slopes)


def run_again(call: Any) -> Callable[..., Any]:
    """What runs calls that differ from this one in the contents of their arrays alone."""
    spec, return_lse = _spec(call.causal, *call.window, call.scale, call.softcap), call.return_lse
    plans: dict[Any, Any] = {}

    def attend(q: Any, k: Any, v: Any, alibi_slopes: torch.Tensor | None) -> Any:
        slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
        rows, other = q.layout, k.layout
        memo = rows.memo if other is rows or torch.compiler.is_compiling() else rows.beside(other)
        out, lse = _attend(q.values, k.values, v.values, q.offsets, k.offsets, spec, slopes, memo, plans)
        return (q.with_values(out), q.with_values(lse.t())) if return_lse else q.with_values(out)

    return attend


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *,
              causal: bool = False, window: tuple[int | None, int | None] = (None, None), scale: float,
              softcap: float | None = None, alibi_slopes: torch.Tensor | None = None,
              memo: dict | None = None) -> tuple[torch.Tensor, torch.Tensor]:
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

    Returns
    -------
    out, lse
        The output, contiguous, and the float32 log-sum-exp of shape ``(total, num_heads)``. A query without a valid key
        has output 0 and log-sum-exp -inf.
    """
    out, lse = _attend(q, k, v, cu_q, cu_k, _spec(causal, *window, scale, softcap), alibi_slopes, memo)
    return out, lse.t()


def _spec(causal: bool, left: int | None, right: int | None, scale: float, softcap: float | None) -> Spec:
    left, right = UNBOUNDED if left is None else min(left, UNBOUNDED), UNBOUNDED if right is None else min(right, UNBOUNDED)
    return Spec(left, min(right, 0) if causal else right, float(scale), float(softcap or 0.0))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, spec: Spec,
            slopes: torch.Tensor | None, memo: dict | None,
            plans: dict | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp as the kernels lay it out, (num_heads, total)."""
    if torch.compiler.is_compiling():
        rows_q = _rows_op(cu_q)
        return _forward_op(q, k, v, slopes, rows_q, rows_q if cu_k is cu_q else _rows_op(cu_k), *spec)
    rows = Rows(cu_q, cu_k, memo)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, slopes, rows, spec, plans)
    return plan(q, k, v, rows, spec, slopes is not None, plans).forward(q, k, v, slopes, rows, spec)


class _Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, rows, spec, plans):
        way = plan(q, k, v, rows, spec, slopes is not None, plans)
        out, lse = way.forward(q, k, v, slopes, rows, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.constants = way, slopes, rows, spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        way, slopes, rows, spec = ctx.constants
        return *way.backward(q, k, v, slopes, out, lse, dout, dlse, rows, spec), None, None, None, None


#: Offsets that `_rows_op` made in a compiled function -> their tile maps.
_MEMOS: Any = WeakIdKeyDictionary()


@torch.library.custom_op("scree_triton::rows", mutates_args=())
def _rows_op(offsets: torch.Tensor) -> torch.Tensor:
    """A copy of offsets that nobody else holds, so that tile maps can be kept for it.

    What a compiler hands to an operator may be memory that it uses anew. Compilers merge equal calls, so all layers of a
    model share one copy, and with it the maps.
    """
    rows = offsets.clone()
    _MEMOS[rows] = {}
    return rows


@_rows_op.register_fake
def _(offsets):
    return torch.empty_like(offsets)


def _rows(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Rows:
    """An operator's arguments lose their identity, so the same offsets are told by their memory."""
    same = cu_q.data_ptr() == cu_k.data_ptr() and cu_q.dtype == cu_k.dtype and cu_q.shape == cu_k.shape
    return Rows(cu_q, cu_q if same else cu_k, _MEMOS.get(cu_q))


@torch.library.custom_op("scree_triton::attention", mutates_args=())
def _forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, cu_q: torch.Tensor,
                cu_k: torch.Tensor, left: int, right: int, scale: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, spec = _rows(cu_q, cu_k), Spec(left, right, scale, softcap)
    return plan(q, k, v, rows, spec, slopes is not None).forward(q, k, v, slopes, rows, spec)


@_forward_op.register_fake
def _(q, k, v, slopes, cu_q, cu_k, left, right, scale, softcap):
    total, heads, _ = q.shape
    return q.new_empty((total, heads, v.shape[2])), q.new_empty((heads, total), dtype=torch.float32)


@torch.library.custom_op("scree_triton::attention_backward", mutates_args=())
def _backward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, out: torch.Tensor,
                 lse: torch.Tensor, dout: torch.Tensor | None, dlse: torch.Tensor | None, cu_q: torch.Tensor,
                 cu_k: torch.Tensor, left: int, right: int, scale: float,
                 softcap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, spec = _rows(cu_q, cu_k), Spec(left, right, scale, softcap)
    return plan(q, k, v, rows, spec, slopes is not None).backward(q, k, v, slopes, out, lse, dout, dlse, rows, spec)


@_backward_op.register_fake
def _(q, k, v, slopes, out, lse, dout, dlse, cu_q, cu_k, left, right, scale, softcap):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, slopes, cu_q, cu_k, *ctx.spec = inputs
    ctx.save_for_backward(q, k, v, slopes, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, slopes, out, lse, cu_q, cu_k = ctx.saved_tensors
    return *_backward_op(q, k, v, slopes, out, lse, dout, dlse, cu_q, cu_k, *ctx.spec), *(None,) * 7


_forward_op.register_autograd(_differentiate, setup_context=_save)
