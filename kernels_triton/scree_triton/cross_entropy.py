"""Cross-entropy over large vocabularies, forward and backward, alone and fused with the product that makes the logits.

One kernel does the work. A program takes one token after another. `LOSS` is one pass over the logits of a token: each lane keeps a
maximum and a sum of its own (Milakov and Gimelshein, 2018), and only at the end do lanes meet. `GRADIENT` is a second pass, which
finds the logits in the cache if it follows the first at once, and may write where it reads. A token that does not count is not
read at all.

Alone, the forward reads the logits once, and the backward reads and writes once. Fused, the logits of a few thousand tokens exist
at a time: the product writes them, the kernel turns them into their own gradient, and two more products make of that the
gradients of hidden states and weight. That can be done in the forward pass where the gradient of the losses will be one number
for all; where it will not, and for float16, whose loss is scaled against underflow, the backward pass does it all again.
"""
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .host import multiprocessors, refuses, start
from .launch import INTERPRETED, Launch

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _read(X, at, lead, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr):
    """(DEEP, LANES) logits from column ``at - lead`` on in float32, -inf where there is none; and the columns.

    KEEP asks the cache to keep them.
    """
    place = at + tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    column = place - lead
    POLICY: tl.constexpr = "evict_last" if KEEP else "evict_first"
    if MASKED:
        x = tl.load(X + place, mask=(column >= 0) & (column < V), other=-float("inf"), eviction_policy=POLICY)
    else:
        x = tl.load(X + place, eviction_policy=POLICY)
    return x.to(tl.float32), column


@triton.jit
def _add(x, top, total):
    """The maximum and the sum of exponentials of each lane, with (DEEP, LANES) more logits."""
    new = tl.maximum(top, tl.max(x, 0))
    base = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp2((top - base) * _LOG2E) + tl.sum(tl.exp2((x - base[None, :]) * _LOG2E), 0)


@triton.jit
def _write(OUT, X, at, lead, target, top, factor, share, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr,
           MASKED: tl.constexpr):
    """The gradient of some logits: `factor` times (softmax - 1 at the target), where `share` is the factor over the sum."""
    x, column = _read(X, at, lead, V, LANES, DEEP, MASKED, False)
    y = tl.exp2((x - top) * _LOG2E) * share
    y = tl.where(column == target, y - factor, y).to(OUT.dtype.element_ty)
    if MASKED:
        tl.store(OUT + (column + lead), y, mask=(column >= 0) & (column < V), eviction_policy="evict_first")
    else:
        tl.store(OUT + (column + lead), y, eviction_policy="evict_first")


@triton.jit
def _clear(OUT, at, lead, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr):
    column = at + tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :] - lead
    tl.store(OUT + (column + lead), tl.zeros([DEEP, LANES], OUT.dtype.element_ty), mask=(column >= 0) & (column < V))


@triton.jit(do_not_specialize=("n", "first", "count", "size", "ignored", "d_stride"))
def loss_kernel(X, TARGETS, OFFSETS, LOSSES, STATS, DLOSSES, OUT, x_stride, out_stride, n, first, count, size, ignored,
                d_stride, V: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr, ALIGN: tl.constexpr,
                ROWS: tl.constexpr, LOSS: tl.constexpr, SAVE: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr):
    """LOSSES and STATS (2, size), the maximum and the sum of exponentials; OUT, the gradient of the logits.

    It is about the tokens [first, first + count) of `size`: X and OUT begin at the first of them. Where rows of X are not
    aligned, they are read from the multiple of ALIGN elements before them on.
    """
    STEP: tl.constexpr = LANES * DEEP
    end = size
    if ROWS:
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        token = first + i
        target = tl.load(TARGETS + token)
        known = (token < end) & (target != ignored)
        exists = (target >= 0) & (target < V)
        target = tl.where(exists, target, -1).to(tl.int32)
        x_start = tl.cast(i, tl.int64) * x_stride
        out_start = tl.cast(i, tl.int64) * out_stride
        lead = 0
        begin = 0
        stop = V // STEP * STEP
        if ALIGN > 1:
            lead = (x_start % ALIGN).to(tl.int32)
            begin = STEP
            stop = tl.maximum((V + lead) // STEP * STEP, begin)
            x_start = tl.multiple_of(x_start // ALIGN * ALIGN, ALIGN)
            out_start = tl.multiple_of(out_start // ALIGN * ALIGN, ALIGN)
        x = X + x_start
        out = OUT + out_start
        if known:
            if LOSS:
                lanes = tl.full([LANES], -float("inf"), tl.float32)
                totals = tl.zeros([LANES], tl.float32)
                right = tl.load(x + lead + target, mask=exists, other=0.0).to(tl.float32)
                if ALIGN > 1:
                    lanes, totals = _add(_read(x, 0, lead, V, LANES, DEEP, True, GRADIENT)[0], lanes, totals)
                for at in range(begin, stop, STEP):
                    lanes, totals = _add(_read(x, at, lead, V, LANES, DEEP, False, GRADIENT)[0], lanes, totals)
                if (ALIGN > 1) | (V % STEP > 0):
                    lanes, totals = _add(_read(x, stop, lead, V, LANES, DEEP, True, GRADIENT)[0], lanes, totals)
                top = tl.max(lanes, 0)
                base = tl.where(lanes == -float("inf"), top, lanes)  # lanes without a number add nothing
                total = tl.sum(totals * tl.exp2((base - top) * _LOG2E), 0)
                total = tl.where(exists, total, float("nan"))
                tl.store(LOSSES + token, tl.log(total) + (top - right))
                if SAVE:
                    tl.store(STATS + token, top)
                    tl.store(STATS + size + token, total)
            else:
                top = tl.load(STATS + token)
                total = tl.load(STATS + size + token)
            if GRADIENT:
                factor = 1.0
                if SCALED:
                    factor = tl.load(DLOSSES + token * d_stride).to(tl.float32)
                share = factor / total
                if ALIGN > 1:
                    _write(out, x, 0, lead, target, top, factor, share, V, LANES, DEEP, True)
                for at in range(begin, stop, STEP):
                    _write(out, x, at, lead, target, top, factor, share, V, LANES, DEEP, False)
                if (ALIGN > 1) | (V % STEP > 0):
                    _write(out, x, stop, lead, target, top, factor, share, V, LANES, DEEP, True)
        else:
            if LOSS:
                tl.store(LOSSES + token, 0.0)
            if GRADIENT:
                for at in range(0, V + lead, STEP):
                    _clear(out, at, lead, V, LANES, DEEP)


@triton.jit(do_not_specialize=("n", "size", "ignored"))
def sum_kernel(LOSSES, TARGETS, OFFSETS, TOTAL, SHARE, n, size, ignored, ROWS: tl.constexpr, MEAN: tl.constexpr,
               BLOCK: tl.constexpr):
    """TOTAL, the sum or mean of LOSSES (size,), and SHARE, the part that a token has in it; one program."""
    end = size
    if ROWS:
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    totals = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(0, size, BLOCK):
        token = at + tl.arange(0, BLOCK)
        totals += tl.load(LOSSES + token, mask=token < size, other=0.0)
        target = tl.load(TARGETS + token, mask=token < end, other=ignored)
        counts += (target != ignored).to(tl.int32)
    total = tl.sum(totals, 0)
    share = 1.0
    if MEAN:
        count = tl.sum(counts, 0)
        share = tl.where(count > 0, 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0)
        total = tl.where(count > 0, total * share, float("nan"))
    tl.store(TOTAL, total)
    tl.store(SHARE, share)


class _Tile(NamedTuple):
    """Lanes of a program and logits that each reads at a time, warps, and programs for each multiprocessor."""

    lanes: int
    deep: int
    warps: int
    programs: int


#: By what is written: losses alone, a gradient alone, both.
TILES = {(True, False): _Tile(2048, 4, 8, 4), (False, True): _Tile(4096, 2, 16, 4), (True, True): _Tile(8192, 4, 32, 1)}
SUMMED = ("mean", "sum")
CHUNK = 1 << 28  # logits that exist at a time, fused
LEAST = 1024  # or those of so many tokens, for products that are worth their weight
PARTS = 4  # or a fourth of them
ROUNDED = 8  # parts of a gradient that are added up in half precision; more are in float32


@cache
def _launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], classes: int, align: int, write: tuple[bool, bool],
            save: bool) -> tuple[Launch, int]:
    lanes, deep, warps, programs = TILES[write]
    if INTERPRETED:
        lanes, warps = 16, 1
    lanes = min(lanes, max(triton.next_power_of_2(classes) // deep, 16))
    *_, offsets, dlosses = dtypes
    constants = dict(V=classes, LANES=lanes, DEEP=deep, ALIGN=align, ROWS=offsets is not None, LOSS=write[0], SAVE=save,
                     GRADIENT=write[1], SCALED=dlosses is not None)
    return Launch(loss_kernel, constants, dict(num_warps=warps)), programs


@cache
def _sum_launch(device: torch.device, classes: torch.dtype, offsets: torch.dtype | None, mean: bool) -> Launch:
    constants = dict(ROWS=offsets is not None, MEAN=mean, BLOCK=4096)
    return Launch(sum_kernel, constants, dict(num_warps=16))


class Targets(NamedTuple):
    """What the tokens are held against: classes (total,), offsets where they are rows, and what does not count."""

    classes: torch.Tensor
    offsets: torch.Tensor | None
    ignored: int

    def known(self) -> torch.Tensor:
        """(total,) which tokens count."""
        known = self.classes != self.ignored
        if self.offsets is not None:
            known &= torch.arange(known.shape[0], device=known.device) < self.offsets[-1]
        return known


def visit(x: torch.Tensor, targets: Targets, first: int = 0, *, losses: torch.Tensor | None = None,
          stats: torch.Tensor | None = None, out: torch.Tensor | None = None, dlosses: torch.Tensor | None = None) -> None:
    """Run the kernel on x (count, classes), the logits of the tokens from `first` on.

    Parameters
    ----------
    losses
        (total,) float32, written where given.
    stats
        (2, total) float32: written with the losses, or read where they are not given.
    out
        (count, classes) the gradient, written where given; may be x.
    dlosses
        (total,) the gradient of the losses; 1 by default.
    """
    count, classes = x.shape
    if count == 0:
        return
    align = 16 // x.element_size()
    if (x.stride(0) | (0 if out is None else out.stride(0))) % align == 0 or (out is not None and out.stride(0) != x.stride(0)):
        align = 1
    offsets = targets.offsets
    dtypes = (x.dtype, targets.classes.dtype, *(None if p is None else p.dtype for p in (offsets, dlosses)))
    write = losses is not None, out is not None
    launch, programs = _launch(x.device, dtypes, classes, align, write, write[0] and stats is not None)
    start(launch, min(count, programs * multiprocessors(x.device)),
          (x, targets.classes, targets.classes if offsets is None else offsets, x if losses is None else losses,
           x if stats is None else stats, x if dlosses is None else dlosses, x if out is None else out),
          (x.stride(0), x.stride(0) if out is None else out.stride(0)),
          (0 if offsets is None else offsets.shape[0] - 1, first, count, targets.classes.shape[0], targets.ignored,
           0 if dlosses is None else dlosses.stride(0)))


def one_number(losses: torch.Tensor, targets: Targets, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The "sum" or "mean" of the losses (total,), and the part that each has in it; 0-d."""
    classes, offsets, ignored = targets
    total, share = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    launch = _sum_launch(losses.device, classes.dtype, None if offsets is None else offsets.dtype, reduction == "mean")
    start(launch, 1, (losses, classes, classes if offsets is None else offsets, total, share), (),
          (0 if offsets is None else offsets.shape[0] - 1, losses.shape[0], ignored))
    return total, share


def _mean(total: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The mean that belongs to a sum, by functions that a compiler sees through."""
    count = targets.known().sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    """x, (total, size), with the elements of a token side by side."""
    return x if (x.stride(1) == 1 or x.shape[1] == 1) and x.stride(0) >= x.shape[1] else x.contiguous()


# ---------------------------------------------------------------------------------------------------------------- alone
def forward(x: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses (total,) of logits x (total, classes), and what the backward needs to know of each token, (2, total)."""
    losses, stats = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (x.shape[:1], (2, x.shape[0])))
    visit(_rowwise(x), targets, losses=losses, stats=stats)
    return losses, stats


def backward(dlosses: torch.Tensor, x: torch.Tensor, stats: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The gradient of the logits."""
    x = _rowwise(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    visit(x, targets, stats=stats, out=out, dlosses=dlosses)
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, targets, reduction):
        found, stats = forward(x, targets)
        share = None
        if reduction in SUMMED:
            found, share = one_number(found, targets, reduction)
        ctx.save_for_backward(x, stats, share, targets.classes, targets.offsets)
        ctx.ignored = targets.ignored
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        x, stats, share, classes, offsets = ctx.saved_tensors
        dlosses = dloss if share is None else (dloss * share).expand(x.shape[0])
        return backward(dlosses, x, stats, Targets(classes, offsets, ctx.ignored)), None, None


@torch.library.custom_op("scree_triton::cross_entropy", mutates_args=())
def _op(x: torch.Tensor, classes: torch.Tensor, offsets: torch.Tensor | None, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(x, Targets(classes, offsets, ignored))


@_op.register_fake
def _(x, classes, offsets, ignored):
    return x.new_empty(x.shape[:1], dtype=torch.float32), x.new_empty((2, x.shape[0]), dtype=torch.float32)


@torch.library.custom_op("scree_triton::cross_entropy_backward", mutates_args=())
def _backward_op(dlosses: torch.Tensor, x: torch.Tensor, stats: torch.Tensor, classes: torch.Tensor,
                 offsets: torch.Tensor | None, ignored: int) -> torch.Tensor:
    return backward(dlosses, x, stats, Targets(classes, offsets, ignored))


@_backward_op.register_fake
def _(dlosses, x, stats, classes, offsets, ignored):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    x, classes, offsets, ctx.ignored = inputs
    ctx.save_for_backward(x, output[1], classes, offsets)


_op.register_autograd(lambda ctx, dlosses, _: (_backward_op(dlosses, *ctx.saved_tensors, ctx.ignored), None, None, None),
                      setup_context=_save)


def rejects(call: Any) -> str | None:
    """Why the kernels do not take a `CrossEntropyCall` or `LinearCrossEntropyCall`; None if they do."""
    if abs(call.ignore_index) >= 1 << 31:
        return f"the Triton kernels take an ignore_index of 32 bits, not {call.ignore_index}"
    return refuses(call.values)


def cross_entropy(call: Any) -> torch.Tensor:
    """Run a `CrossEntropyCall`."""
    x, targets = call.values, _targets(call)
    if torch.compiler.is_compiling():
        losses = _op(x, *targets)[0]
        return losses if not call.summed else losses.sum() if call.reduction == "sum" else _mean(losses.sum(), targets)
    if x.requires_grad and torch.is_grad_enabled():
        return _CrossEntropy.apply(x, targets, call.reduction)
    losses = forward(x, targets)[0]
    return one_number(losses, targets, call.reduction)[0] if call.summed else losses


def _targets(call: Any) -> Targets:
    offsets = None if call.x is call.values else call.x.offsets.contiguous()
    return Targets(call.labels.contiguous(), offsets, call.ignore_index)


# ---------------------------------------------------------------------------------------------------------------- fused
@triton.jit(do_not_specialize=("unused",))
def scale_kernel(X, FACTOR, OUT, count, unused, SAME: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = X * FACTOR in float32: PyTorch would round the factor to the dtype of X. Where OUT is X, 1 changes nothing."""
    factor = tl.load(FACTOR).to(tl.float32)
    if SAME & (factor == 1.0):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(OUT + at, (tl.load(X + at, mask=mask).to(tl.float32) * factor).to(OUT.dtype.element_ty), mask=mask)


_BLOCK = 8192


@cache
def _scale_launch(device: torch.device, dtype: torch.dtype, out: torch.dtype, factor: torch.dtype) -> Launch:
    return Launch(scale_kernel, dict(SAME=dtype == out, BLOCK=_BLOCK), dict(num_warps=8))


class Wanted(NamedTuple):
    """Which gradients a caller wants."""

    x: bool
    weight: bool
    bias: bool


NONE = Wanted(False, False, False)
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets, wanted: Wanted = NONE,
          dlosses: torch.Tensor | None = None) -> tuple[torch.Tensor, Gradients]:
    """The losses of x (total, width) by weight (classes, width), and the gradients that are wanted.

    Where there are many chunks, those of weight and bias are added up, and come, in float32.
    """
    (total, width), classes = x.shape, weight.shape[0]
    losses = torch.empty((total,), dtype=torch.float32, device=x.device)
    chunk = max(min(total, max(LEAST, min(CHUNK // classes, -(-total // PARTS)))), 1)
    stride = -(-classes // 16) * 16  # so that rows are aligned
    buffer = torch.empty((chunk, stride), dtype=x.dtype, device=x.device)[:, :classes]
    sums = torch.float32 if total > chunk * ROUNDED else x.dtype
    make = torch.empty if total else torch.zeros
    dx = torch.empty((total, width), dtype=x.dtype, device=x.device) if wanted.x else None
    dweight = make((classes, width), dtype=sums, device=x.device) if wanted.weight else None
    dbias = torch.zeros((classes,), dtype=torch.float32, device=x.device) if wanted.bias else None
    known = targets.known()[:, None] if wanted.weight else None
    for first in range(0, total, chunk):
        some = slice(first, min(first + chunk, total))
        part, logits = x[some], buffer[: some.stop - first]
        if bias is None:
            torch.mm(part, weight.mT, out=logits)
        else:
            torch.addmm(bias, part, weight.mT, out=logits)
        visit(logits, targets, first, losses=losses, out=logits if any(wanted) else None, dlosses=dlosses)
        if dx is not None:
            torch.mm(logits, weight, out=dx[some])
        if dweight is not None:
            _add_product(dweight, logits.mT, torch.where(known[some], part, 0), first > 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    return losses, (dx, dweight, dbias)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, more: bool) -> None:
    """Write the product of a and b to `out`, or add it; in float32 where that is the dtype of `out`."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(more), out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(more), out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(more), out=out)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, targets, reduction):
        early = Wanted(*ctx.needs_input_grad[:3]) if _early(x, reduction) else NONE
        found, gradients = fused(x, weight, bias, targets, early)
        share = None
        if reduction in SUMMED:
            found, share = one_number(found, targets, reduction)
        ctx.save_for_backward(x, weight, bias, share, targets.classes, targets.offsets)
        ctx.ignored, ctx.gradients = targets.ignored, gradients if any(early) else None
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        x, weight, bias, share, classes, offsets = ctx.saved_tensors
        dloss = dloss if share is None else dloss * share
        # Those of the forward pass are given away; who wants them once more waits for others.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            dlosses = dloss.expand(x.shape[0])
            targets, wanted = Targets(classes, offsets, ctx.ignored), Wanted(*ctx.needs_input_grad[:3])
            gradients, dloss = fused(x, weight, bias, targets, wanted, dlosses)[1], None
        return *(_finished(g, dloss, x.dtype) for g in gradients), None, None


def _early(x: torch.Tensor, reduction: str) -> bool:
    """Whether gradients are computed in the forward pass."""
    return reduction in SUMMED and x.dtype != torch.float16


def _finished(gradient: torch.Tensor | None, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A gradient times a number, in the dtype of the inputs, on its own memory where it has that dtype."""
    if gradient is None or (factor is None and gradient.dtype == dtype):
        return gradient
    out = gradient if gradient.dtype == dtype else torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    if factor is None:
        return out.copy_(gradient)
    if out.numel():
        launch = _scale_launch(out.device, gradient.dtype, dtype, factor.dtype)
        start(launch, -(-out.numel() // _BLOCK), (gradient, factor, out), (out.numel(),), (0,))
    return out


def _or_empty(gradients: Gradients, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(like.new_empty((0,)) if g is None else g.to(like.dtype) for g in gradients)


@torch.library.custom_op("scree_triton::linear_cross_entropy", mutates_args=())
def _fused_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, classes: torch.Tensor,
              offsets: torch.Tensor | None, ignored: int, summed: bool, early: bool) -> tuple[
                  torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = Wanted(early, early, early and bias is not None)
    losses, gradients = fused(x, weight, bias, Targets(classes, offsets, ignored), wanted)
    return losses.sum() if summed else losses, *_or_empty(gradients, x)


@_fused_op.register_fake
def _(x, weight, bias, classes, offsets, ignored, summed, early):
    loss = x.new_empty(() if summed else x.shape[:1], dtype=torch.float32)
    return loss, *(x.new_empty((0,) if p is None or not early else p.shape) for p in (x, weight, bias))


@torch.library.custom_op("scree_triton::linear_cross_entropy_backward", mutates_args=())
def _fused_backward_op(dlosses: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                       classes: torch.Tensor, offsets: torch.Tensor | None,
                       ignored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = Wanted(True, True, bias is not None)
    return _or_empty(fused(x, weight, bias, Targets(classes, offsets, ignored), wanted, dlosses)[1], x)


@_fused_backward_op.register_fake
def _(dlosses, x, weight, bias, classes, offsets, ignored):
    return tuple(x.new_empty((0,) if p is None else p.shape) for p in (x, weight, bias))


def _save_fused(ctx, inputs, output):
    x, weight, bias, classes, offsets, ctx.ignored, ctx.summed, ctx.early = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(*(output[1:] if ctx.early else (x, weight, bias, classes, offsets)))


def _differentiate_fused(ctx, dloss, *_):
    if ctx.early:
        dx, dweight, dbias = ((g.float() * dloss).to(g.dtype) for g in ctx.saved_tensors)
    else:
        dlosses = dloss.expand(ctx.saved_tensors[0].shape[0]) if ctx.summed else dloss
        dx, dweight, dbias = _fused_backward_op(dlosses, *ctx.saved_tensors, ctx.ignored)
    return dx, dweight, dbias if ctx.biased else None, None, None, None, None, None


_fused_op.register_autograd(_differentiate_fused, setup_context=_save_fused)


def linear_cross_entropy(call: Any) -> torch.Tensor:
    """Run a `LinearCrossEntropyCall`."""
    x, weight, bias, targets = _rowwise(call.values), call.weight, call.bias, _targets(call)
    wants = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, weight, bias))
    if torch.compiler.is_compiling():
        found = _fused_op(x, weight, bias, *targets, call.summed, wants and _early(x, call.reduction))[0]
        return _mean(found, targets) if call.reduction == "mean" else found
    if wants:
        return _Fused.apply(x, weight, bias, targets, call.reduction)
    losses = fused(x, weight, bias, targets)[0]
    return one_number(losses, targets, call.reduction)[0] if call.summed else losses
