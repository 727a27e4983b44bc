"""The host side of attention: what is taken, what is allocated, which kernel runs with which tiles.

Eager calls go through one `torch.autograd.Function` and launch compiled kernels directly; while torch.compile or
torch.export trace, the same two functions run behind custom operators.
"""
import functools
from typing import Any, NamedTuple

import torch
import triton

from . import portable
from .launch import INTERPRETED, Launch, ragged
from .tiles import UNBOUNDED, tile_bound, tile_map
from .tuned import GLUON, GluonTiles, Tile, Tiles, portable_tiles

LOG2E = 1.4426950408889634
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
    out, lse = attention(
        call.q.values, call.k.values, call.v.values, call.q.offsets, call.k.offsets, causal=call.causal,
        window=call.window, scale=call.scale, softcap=call.softcap, memo=_memo(call.q))
    if call.return_lse:
        return call.q.with_values(out), call.q.with_values(lse)
    return call.q.with_values(out)


def _memo(array: Any) -> dict | None:
    return getattr(getattr(array, "layout", None), "memo", None)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *,
              causal: bool = False, window: tuple[int | None, int | None] = (None, None), scale: float,
              softcap: float | None = None, memo: dict | None = None) -> tuple[torch.Tensor, torch.Tensor]:
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
        out, lse = _forward_op(q, k, v, cu_q, cu_k, *spec)
        return out, lse.t()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, cu_q, cu_k, spec, memo)
    out, lse = _forward(q, k, v, cu_q, cu_k, spec, memo)
    return out, lse.t()


class Spec(NamedTuple):
    """What is computed, in plain numbers: UNBOUNDED for an open side of the window, softcap 0 for none."""

    left: int
    right: int
    scale: float
    softcap: float


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, spec, memo):
        out, lse = _forward(q, k, v, cu_q, cu_k, spec, memo)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.spec, ctx.memo = spec, memo
        ctx.set_materialize_grads(False)
        return out, lse.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        return *_backward(q, k, v, out, lse, dout, dlse, cu_q, cu_k, ctx.spec, ctx.memo), None, None, None, None


def _tiles(memo: dict | None, offsets: torch.Tensor, other: torch.Tensor, total: int, block: int, before: int,
           after: int) -> torch.Tensor:
    if memo is None:
        return tile_map(offsets, other, total, block, before, after)
    key = ("triton", "tiles", id(offsets), id(other), block, before, after)
    found = memo.get(key)
    if found is None:  # the offsets are kept beside the map, so that their ids stay theirs
        found = memo[key] = tile_map(offsets, other, total, block, before, after), offsets, other
    return found[0]


class _Kernels(NamedTuple):
    """The portable kernels for one set of static facts."""

    tiles: Tiles
    q_group: int
    k_group: int
    forward: Launch
    dq: Launch
    dq_dlse: Launch
    dkdv: Launch


@functools.lru_cache(maxsize=None)
def _portable(device: torch.device, dtype: torch.dtype, dim: int, dim_v: int, heads: int, k_heads: int, left: bool,
              right: bool, softcap: bool) -> _Kernels:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    block_d, block_dv = (triton.next_power_of_2(x) for x in (dim, dim_v))
    tiles = portable_tiles(capability, dtype.itemsize, max(block_d, block_dv))
    q_group, k_group = _head_group(heads, block_d), _head_group(k_heads, block_d)

    def launch(kernel: Any, tile: Tile, group: int, **more: Any) -> Launch:
        return Launch(kernel, dict(DIM=dim, DIM_V=dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=tile.m,
                                   BLOCK_N=tile.n, GROUP=group, LEFT=left, RIGHT=right, SOFTCAP=softcap, **more),
                      dict(num_warps=tile.warps, num_stages=tile.stages))

    return _Kernels(tiles, q_group, k_group, launch(portable.forward_kernel, tiles.forward, q_group),
                    launch(portable.dq_kernel, tiles.dq, q_group, HAS_DLSE=False),
                    launch(portable.dq_kernel, tiles.dq, q_group, HAS_DLSE=True),
                    launch(portable.dkdv_kernel, tiles.dkdv, k_group))


class _GluonKernels(NamedTuple):
    """The Gluon kernels for one set of static facts."""

    tiles: GluonTiles
    programs: int
    forward: Launch
    dq: Launch
    dq_dlse: Launch
    dkdv: Launch


@functools.lru_cache(maxsize=None)
def _hopper(device: torch.device, dim: int, heads: int, k_heads: int, causal: bool) -> _GluonKernels:
    from . import hopper

    tiles = GLUON[dim]
    m, n, stages = tiles.forward
    q_group, k_group = _head_group(heads, dim), _head_group(k_heads, dim)
    options = dict(num_warps=4, maxnreg=168)
    forward = Launch(hopper.forward_kernel, dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, GROUP=q_group,
                                                 CAUSAL=causal), options, (m // 2, n, n))
    m, n, stages, own_stages = tiles.dq
    constants = dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, Q_STAGES=own_stages, GROUP=q_group, CAUSAL=causal)
    dq, dq_dlse = (Launch(hopper.dq_kernel, dict(constants, HAS_DLSE=has), options, (m // 2, n, n, m // 2))
                   for has in (False, True))
    m, n, stages, own_stages = tiles.dkdv
    dkdv = Launch(hopper.dkdv_kernel, dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, K_STAGES=own_stages,
                                           GROUP=k_group, CAUSAL=causal), options, (m, n // 2, n // 2, m))
    return _GluonKernels(tiles, torch.cuda.get_device_properties(device).multi_processor_count, forward, dq, dq_dlse,
                         dkdv)


def _on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> bool:
    """Whether the Gluon kernels take the call; they leave windows, softcap and odd strides to the portable ones."""
    dim = q.shape[2]
    return (dim in (64, 128) and v.shape[2] == dim and q.dtype != torch.float32 and spec.left == UNBOUNDED
            and spec.right in (0, UNBOUNDED) and spec.softcap == 0 and q.shape[0] > 0 and k.shape[0] > 0
            and _is_hopper(q.device) and _aligned(q) and _aligned(k) and _aligned(v))


def _aligned(x: torch.Tensor) -> bool:
    """Whether the copy engine can address `x`: multiples of 16 bytes, in reach of its coordinates."""
    stride, head, _ = x.stride()
    return (x.data_ptr() % 16 == 0 and stride % 8 == 0 and head % 8 == 0 and 0 < stride < 1 << 31
            and 0 < x.shape[1] * head < 1 << 31)


@functools.lru_cache(maxsize=None)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _head_group(heads: int, block_d: int) -> int:
    """Heads that run side by side. Wide heads fill the L2 cache, so few at a time; narrow ones all at once."""
    if block_d < 128:
        return heads
    return next(g for g in (8, 4, 6, 5, 7, 3, 2, 1) if heads % g == 0)


def _kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> _Kernels:
    return _portable(q.device, q.dtype, q.shape[2], v.shape[2], q.shape[1], k.shape[1], spec.left < UNBOUNDED,
                     spec.right < UNBOUNDED, spec.softcap > 0)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, spec: Spec,
             memo: dict | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (total, num_heads, head_dim of v) and the log-sum-exp (num_heads, total)."""
    total, heads, _ = q.shape
    dim_v = v.shape[2]
    out = q.new_empty((total, heads, dim_v))
    lse = q.new_empty((heads, total), dtype=torch.float32)
    if total == 0:
        return out, lse
    left, right, scale, softcap = spec
    if _on_hopper(q, k, v, spec):
        from . import hopper

        gluon = _hopper(q.device, dim_v, heads, k.shape[1], right == 0)
        block = gluon.tiles.forward[0]
        tiles = _tiles(memo, cu_q, cu_k, total, block, left, right)
        gluon.forward(min(gluon.programs, tile_bound(total, cu_q.shape[0] - 1, block) * heads),
                      (out, lse, tiles, hopper.counter(q.device)), (q.stride(1), k.stride(1), v.stride(1), heads * dim_v),
                      (total, heads, heads // k.shape[1], scale * LOG2E), (ragged(q), ragged(k), ragged(v)))
        return out, lse
    kernels = _kernels(q, k, v, spec)
    block = kernels.tiles.forward.m
    tiles = _tiles(memo, cu_q, cu_k, total, block, left, right)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], heads * dim_v)
    kernels.forward(tile_bound(total, cu_q.shape[0] - 1, block) * heads, (q, k, v, out, lse, tiles), strides,
                    (total, heads, heads // k.shape[1], left, right, scale, softcap))
    return out, lse


def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
              dout: torch.Tensor | None, dlse: torch.Tensor | None, cu_q: torch.Tensor, cu_k: torch.Tensor, spec: Spec,
              memo: dict | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, contiguous."""
    (total, heads, dim), (total_k, k_heads, dim_v) = q.shape, v.shape
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(2) != 1:
        dout = dout.contiguous()
    dq = q.new_empty((total, heads, dim))
    dk = q.new_empty((total_k, k_heads, dim))
    dv = q.new_empty((total_k, k_heads, dim_v))
    left, right, scale, softcap = spec
    stats = q.new_empty((2, heads, total), dtype=torch.float32)
    plane = heads * total
    if _on_hopper(q, k, v, spec):
        from . import hopper

        if not _aligned(dout):
            dout = dout.contiguous()
        gluon = _hopper(q.device, dim, heads, k_heads, right == 0)
        descriptors = ragged(q), ragged(k), ragged(v), ragged(dout)
        columns = q.stride(1), k.stride(1), v.stride(1), dout.stride(1)
        counts = total, plane, heads, heads // k_heads, scale * LOG2E
        rows = cu_q.shape[0] - 1
        launch, slope = (gluon.dq, lse) if dlse is None else (gluon.dq_dlse, dlse)
        block = gluon.tiles.dq[0]
        tiles = _tiles(memo, cu_q, cu_k, total, block, left, right)
        launch(min(gluon.programs, tile_bound(total, rows, block) * heads),
               (out, lse, slope, stats, dq, tiles, hopper.counter(q.device)),
               (*columns, heads * dim, heads * dim), (*slope.stride(), *counts), descriptors)
        block = gluon.tiles.dkdv[1]
        tiles = _tiles(memo, cu_k, cu_q, total_k, block, right, left)
        gluon.dkdv(min(gluon.programs, tile_bound(total_k, rows, block) * k_heads),
                   (stats, dk, dv, tiles, hopper.counter(q.device)), (*columns, k_heads * dim), counts, descriptors)
        return dq, dk, dv
    kernels = _kernels(q, k, v, spec)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    counts = (total, plane, heads, heads // k_heads, left, right, scale, softcap)
    rows = cu_q.shape[0] - 1
    if total > 0:
        launch, slope = (kernels.dq, lse) if dlse is None else (kernels.dq_dlse, dlse)
        block = kernels.tiles.dq.m
        tiles = _tiles(memo, cu_q, cu_k, total, block, left, right)
        launch(tile_bound(total, rows, block) * heads, (q, k, v, out, lse, dout, slope, stats, dq, tiles),
               (*strides, heads * dim_v, *dout.stride()[:2], heads * dim), (*slope.stride(), *counts))
    if total_k > 0:
        block = kernels.tiles.dkdv.n
        tiles = _tiles(memo, cu_k, cu_q, total_k, block, right, left)
        kernels.dkdv(tile_bound(total_k, rows, block) * k_heads, (q, k, v, dout, stats, dk, dv, tiles),
                     (*strides, *dout.stride()[:2], k_heads * dim, k_heads * dim_v), counts)
    return dq, dk, dv


@torch.library.custom_op("scree_triton::attention", mutates_args=())
def _forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, left: int,
                right: int, scale: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(q, k, v, cu_q, cu_k, Spec(left, right, scale, softcap), None)


@_forward_op.register_fake
def _(q, k, v, cu_q, cu_k, left, right, scale, softcap):
    total, heads, _ = q.shape
    return q.new_empty((total, heads, v.shape[2])), q.new_empty((heads, total), dtype=torch.float32)


@torch.library.custom_op("scree_triton::attention_backward", mutates_args=())
def _backward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                 dout: torch.Tensor | None, dlse: torch.Tensor | None, cu_q: torch.Tensor, cu_k: torch.Tensor,
                 left: int, right: int, scale: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dlse = None if dlse is None else dlse.t()
    return _backward(q, k, v, out, lse, dout, dlse, cu_q, cu_k, Spec(left, right, scale, softcap), None)


@_backward_op.register_fake
def _(q, k, v, out, lse, dout, dlse, cu_q, cu_k, left, right, scale, softcap):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, cu_q, cu_k, *ctx.spec = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    return *_backward_op(q, k, v, out, lse, dout, dlse, cu_q, cu_k, *ctx.spec), *(None,) * 6


_forward_op.register_autograd(_differentiate, setup_context=_save)
