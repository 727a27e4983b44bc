"""The entrance to attention: what is taken, and how autograd and torch.compile see it.

Eager calls go through one `torch.autograd.Function` and launch compiled kernels directly; while torch.compile or
torch.export trace, the same plans run behind custom operators.
"""
from typing import Any

import torch

from .launch import INTERPRETED
from .plans import Rows, Spec, plan
from .tiles import UNBOUNDED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_ROWS = 1 << 24
_MOST_TOKENS = 1 << 26


def rejects(call: Any) -> str | None:
    """Why this package does not take `call`, from host metadata only; None if it does."""
    q, k, v = call.q.values, call.k.values, call.v.values
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        return "the Triton kernels take torch tensors"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"the Triton kernels run on CUDA devices, not on {q.device.type!r}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the Triton kernels need compute capability 8.0 (Ampere) or later"
    if q.dtype not in _DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, not {q.dtype}"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    if not q.dtype == k.dtype == v.dtype:
        return f"the Triton kernels take q, k and v of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
    if not q.ndim == k.ndim == v.ndim == 3:
        return "the Triton kernels take values of shape (total, num_heads, head_dim)"
    if not all(16 <= x.shape[2] <= 256 for x in (q, v)):
        return f"the Triton kernels take head_dim 16 to 256, not {q.shape[2]} (q, k) and {v.shape[2]} (v)"
    if not all(x.stride(2) == 1 for x in (q, k, v)):
        return "the Triton kernels need the last axis of q, k and v to be contiguous"
    if call.alibi_slopes is not None and (call.alibi_slopes.device != q.device or call.alibi_slopes.requires_grad):
        return f"the Triton kernels take ALiBi slopes on {q.device} that need no gradient"
    if not call.scale > 0:
        return f"the Triton kernels need a positive scale, not {call.scale}"
    if call.q.offsets.shape[0] > _MOST_ROWS or max(q.shape[0], k.shape[0]) > _MOST_TOKENS:
        return f"the Triton kernels take up to {_MOST_ROWS - 1} rows and {_MOST_TOKENS} tokens"
    return None


def run(call: Any) -> Any:
    """Run a call that `rejects` does not reject.

    Returns
    -------
    Array or tuple of Array
        The output, and with ``call.return_lse`` also the natural log-sum-exp, float32, one number a query and head.
    """
    slopes = call.alibi_slopes
    out, lse = attention(
        call.q.values, call.k.values, call.v.values, call.q.offsets, call.k.offsets, causal=call.causal,
        window=call.window, scale=call.scale, softcap=call.softcap,
        alibi_slopes=None if slopes is None else slopes.to(torch.float32).contiguous(), memo=_memo(call.q))
    if call.return_lse:
        return call.q.with_values(out), call.q.with_values(lse)
    return call.q.with_values(out)


def _memo(array: Any) -> dict | None:
    return getattr(getattr(array, "layout", None), "memo", None)


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
        A dict that lives as long as the rows do; the tile maps are kept in it.

    Returns
    -------
    out, lse
        The output, contiguous, and the float32 log-sum-exp of shape ``(total, num_heads)``. A query without a valid key
        has output 0 and log-sum-exp -inf.
    """
    left, right = (UNBOUNDED if side is None else min(side, UNBOUNDED) for side in window)
    spec = Spec(left, min(right, 0) if causal else right, float(scale), float(softcap or 0.0))
    if torch.compiler.is_compiling():
        out, lse = _forward_op(q, k, v, alibi_slopes, cu_q, cu_k, *spec)
        return out, lse.t()
    rows = Rows(cu_q, cu_k, memo)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, alibi_slopes, rows, spec)
    out, lse = plan(q, k, v, rows, spec, alibi_slopes is not None).forward(q, k, v, alibi_slopes, rows, spec)
    return out, lse.t()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, rows, spec):
        ctx.plan = plan(q, k, v, rows, spec, slopes is not None)
        out, lse = ctx.plan.forward(q, k, v, slopes, rows, spec)
        ctx.save_for_backward(q, k, v, slopes, out, lse)
        ctx.rows, ctx.spec = rows, spec
        ctx.set_materialize_grads(False)
        return out, lse.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        return *ctx.plan.backward(*ctx.saved_tensors, dout, dlse, ctx.rows, ctx.spec), None, None, None


def _rows(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Rows:
    """An operator's arguments lose their identity, so the same offsets are told by their memory."""
    same = cu_q.data_ptr() == cu_k.data_ptr() and cu_q.dtype == cu_k.dtype and cu_q.shape == cu_k.shape
    return Rows(cu_q, cu_q if same else cu_k, None)


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
    dlse = None if dlse is None else dlse.t()
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
