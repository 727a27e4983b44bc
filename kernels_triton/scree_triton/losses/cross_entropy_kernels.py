"""Cross-entropy kernels: losses, their partial sums and gradients from one pass over the logits.

Two kernels compute the same results. `cross_entropy_tokens_kernel` holds all logits of a few tokens.
`cross_entropy_classes_kernel`, for more classes, processes one token after another. Its losses take one pass over
the logits, in which each column of a block keeps its own maximum and sum (online softmax, Milakov and
Gimelshein, 2018); the columns are reduced at the end. The gradient takes a second pass, which finds
the logits in the cache if it comes directly after the first. Both kernels can write in place. An
ignored token is not read, except by `cross_entropy_tokens_kernel` for a gradient alone.

With s the softcapped logits, w the class weights, W their sum, e the label smoothing, y the target,
and lse = log(sum(exp(s))), the loss of a token of C classes is::

    (1 - e) * w[y] * (lse - s[y]) + e / C * sum(w * (lse - s)) + z_loss * lse**2

Its gradient with respect to s is ``a * softmax(s) - b * one_hot(y) - e / C * w``, where
``b = (1 - e) * w[y]`` and ``a = b + e / C * W + 2 * z_loss * lse``.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..runtime.device import INTERPRETED, device_info
from ..runtime.launch import Launch, Number, Pointer, Stride, Written, launch_args, launch_on_device
from .reductions import HEADER, PLAIN, LossOptions, Targets

_LOG2E = tl.constexpr(1.4426950408889634)
_NONE = tl.constexpr(-1.0)
#: Numbers before the class weights.
_HEADER = tl.constexpr(HEADER)


@triton.jit
def _load_logits(
    X,
    index,
    lead,
    counted,
    V: tl.constexpr,
    GRAIN: tl.constexpr,
    EDGES: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Load logits of a token, which begin at index `lead`, in float32; -inf outside the token.

    With EDGES a token begins or ends inside a group of GRAIN elements, which one load reads. Then
    the load includes the elements of the group before and after the token.
    """
    if not EDGES:
        return tl.load(
            X + index, mask=counted & (index < V), other=-float("inf"), eviction_policy=POLICY
        ).to(tl.float32)
    group = index // GRAIN * GRAIN
    has_logits = counted & (group + GRAIN > lead) & (group < lead + V)
    x = tl.load(X + index, mask=has_logits, other=-float("inf"), eviction_policy=POLICY).to(
        tl.float32
    )
    return tl.where((index >= lead) & (index < lead + V), x, -float("inf"))


@triton.jit
def _is_full_group(index, lead, V: tl.constexpr, GRAIN: tl.constexpr):
    """Return whether an index is in a group of GRAIN elements that all belong to the token."""
    group = index // GRAIN * GRAIN
    return (group >= lead) & (group + GRAIN <= lead + V)


@triton.jit
def _edge_indices(lead, V: tl.constexpr, GRAIN: tl.constexpr):
    """Return the GRAIN indices around the first and the last logit, and a mask of those outside
    `_whole`.
    """
    i = tl.arange(0, 2 * GRAIN)
    index = tl.where(i < GRAIN, lead // GRAIN * GRAIN + i, (lead + V) // GRAIN * GRAIN + i - GRAIN)
    return index, (index >= lead) & (index < lead + V) & ((i >= GRAIN) | (lead % GRAIN > 0))


@triton.jit
def _load_tile(
    X,
    at,
    lead,
    V: tl.constexpr,
    LANES: tl.constexpr,
    DEEP: tl.constexpr,
    GRAIN: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Load (DEEP, LANES) logits from index `at` on in float32; return them and their indices."""
    index = at + tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if MASKED:
        x = _load_logits(X, index, lead, True, V, GRAIN, GRAIN > 1, POLICY)
    else:
        x = tl.load(X + index, eviction_policy=POLICY).to(tl.float32)
    return x, index


@triton.jit
def _cap(x, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(x / softcap).

    With CAPPED 1 the absolute error is the same for all x, about the rounding error of the softcap.
    With CAPPED 2 the error is relative to the result.
    """
    y = softcap - 2.0 * softcap / (tl.exp2(x * (2.0 * _LOG2E / softcap)) + 1.0)
    if CAPPED == 2:
        # The difference above cancels for small x. The error of this polynomial is 2e-8.
        u = x / softcap
        z = u * u
        p = -0.3333314838 + z * (0.1332598730 + z * (-0.0530529514 + z * 0.01725699285))
        y = tl.where(tl.abs(u) < 0.5, x + x * (z * p), y)
    return y


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _update_softmax(x, maximum, total):
    """Update the maximum and the sum of exponentials of each column with (DEEP, LANES) more logits."""
    new_maximum = tl.maximum(maximum, tl.max(x, 0))
    finite_maximum = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    return new_maximum, total * tl.exp2((maximum - finite_maximum) * _LOG2E) + tl.sum(
        tl.exp2((x - finite_maximum[None, :]) * _LOG2E), 0
    )


@triton.jit
def _visit_tile(
    X,
    WEIGHTS,
    at,
    lead,
    target,
    target_logit,
    maxima,
    sums,
    differences,
    earlier_maxima,
    earlier,
    softcap,
    V: tl.constexpr,
    LANES: tl.constexpr,
    DEEP: tl.constexpr,
    GRAIN: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACCURACY: tl.constexpr,
):
    """Update the statistics of each column with (DEEP, LANES) more logits.

    They are the maximum, the sum of exponentials, and with SMOOTHED the sum of the weighted
    differences to the logit of the target. With ACCURACY they include the maximum of the tiles that
    end before the target, and the end of the last such tile.
    """
    x, index = _load_tile(X, at, lead, V, LANES, DEEP, GRAIN, MASKED, POLICY)
    is_logit = (index >= lead) & (index < lead + V)
    if CAPPED:
        x = _cap(x, softcap, CAPPED)
        if MASKED:
            x = tl.where(is_logit, x, -float("inf"))
    maxima, sums = _update_softmax(x, maxima, sums)
    if SMOOTHED:
        difference = _finite_or_zero(target_logit) - x
        if WEIGHTED:
            difference *= tl.load(WEIGHTS + (index - lead), mask=is_logit, other=0.0)
        if MASKED:
            difference = tl.where(is_logit, difference, 0.0)
        differences += tl.sum(difference, 0)
    if ACCURACY:
        is_earlier = at + LANES * DEEP <= lead + target
        earlier_maxima = tl.where(is_earlier, maxima, earlier_maxima)
        earlier = tl.where(is_earlier, at + LANES * DEEP, earlier)
    return maxima, sums, differences, earlier_maxima, earlier


@triton.jit
def _is_first_maximum(
    X,
    lead,
    target,
    target_logit,
    maximum,
    earlier_maximum,
    earlier,
    softcap,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Return whether the target is the first class with the largest logit.

    `earlier_maximum` is the largest logit before the index `earlier`. Logits from there to the
    target are read again, if they decide.
    """
    is_first = (target_logit == maximum) & (earlier_maximum < maximum)
    if is_first:
        lane_is_lower = tl.full([LANES], 1, tl.int32)
        for at in range(earlier, lead + target, LANES):
            index = at + tl.arange(0, LANES)
            mask = (index >= lead) & (index < lead + target)
            x = tl.load(X + index, mask=mask, other=-float("inf")).to(tl.float32)
            if CAPPED:
                x = _cap(x, softcap, CAPPED)
            lane_is_lower = tl.minimum(lane_is_lower, ((x < maximum) | (mask == 0)).to(tl.int32))
        is_first = tl.min(lane_is_lower, 0) == 1
    return is_first


@triton.jit
def _token_loss(
    log_sum,
    maximum,
    target_logit,
    target_weight,
    weight_sum,
    difference,
    smoothing,
    smoothing_per_class,
    z_loss,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
):
    """Return the loss of some tokens from their statistics.

    `difference` is the weighted sum of the differences of all logits to the logit of the target.
    """
    loss = log_sum + (maximum - target_logit)
    if WEIGHTED:
        loss *= target_weight
    if SMOOTHED:
        from_target = log_sum + (maximum - _finite_or_zero(target_logit))
        if WEIGHTED:
            smooth = (from_target * weight_sum + difference) * smoothing_per_class
        else:
            smooth = from_target * smoothing + difference * smoothing_per_class
        loss = loss * (1.0 - smoothing) + smooth
    if SQUARED:
        log_sum_exp = log_sum + maximum
        loss += z_loss * log_sum_exp * log_sum_exp
    return loss


@triton.jit
def _gradient_factors(
    factor,
    total,
    maximum,
    target_weight,
    weight_sum,
    smoothing,
    smoothing_per_class,
    z_loss,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
):
    """Return the factors of exponentials, of the target, and of all classes in the gradient.

    `factor` is the gradient of the loss of a token, and `total` its sum of exponentials.
    """
    of_target = factor
    if WEIGHTED:
        of_target *= target_weight
    of_softmax = of_target
    if SMOOTHED:
        if WEIGHTED:
            smooth = factor * smoothing_per_class * weight_sum
        else:
            smooth = factor * smoothing
        of_target *= 1.0 - smoothing
        of_softmax = of_target + smooth
    if SQUARED:
        of_softmax += factor * 2.0 * z_loss * (tl.log(total) + maximum)
    return of_softmax / total, of_target, factor * smoothing_per_class


@triton.jit
def _logit_gradient(
    x,
    index,
    lead,
    target_index,
    maximum,
    of_target,
    scale,
    of_class,
    WEIGHTS,
    softcap,
    V: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return the gradient of some logits, from the factors that `_gradient_factors` returns."""
    if CAPPED:
        x = _cap(x, softcap, CAPPED)
    y = tl.exp2((x - maximum) * _LOG2E) * scale
    y = tl.where(index == target_index, y - of_target, y)
    if SMOOTHED:
        if WEIGHTED:
            is_logit = (index >= lead) & (index < lead + V)
            y -= of_class * tl.load(WEIGHTS + (index - lead), mask=is_logit, other=0.0)
        else:
            y -= of_class
    if CAPPED:
        x /= softcap
        y *= 1.0 - x * x
    return y


@triton.jit
def _store_gradient(
    OUT,
    X,
    at,
    lead,
    target_index,
    maximum,
    of_target,
    scale,
    of_class,
    WEIGHTS,
    softcap,
    V: tl.constexpr,
    LANES: tl.constexpr,
    DEEP: tl.constexpr,
    GRAIN: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Store the gradient of (DEEP, LANES) logits; with MASKED except for the `_edges`."""
    index = at + tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    mask = _is_full_group(index, lead, V, GRAIN) if MASKED else None
    x = tl.load(X + index, mask=mask, eviction_policy=POLICY).to(tl.float32)
    y = _logit_gradient(
        x,
        index,
        lead,
        target_index,
        maximum,
        of_target,
        scale,
        of_class,
        WEIGHTS,
        softcap,
        V,
        CAPPED,
        SMOOTHED,
        WEIGHTED,
    ).to(OUT.dtype.element_ty)
    tl.store(OUT + index, y, mask=mask, eviction_policy=POLICY)


@triton.jit
def _factor(DLOSSES, SHARE, token, mask, d_stride, SCALED: tl.constexpr, SHARED: tl.constexpr):
    """Return the gradient of the losses of some tokens: one number each, or 1, times SHARE."""
    factor = mask.to(tl.float32)
    if SCALED:
        factor = tl.load(DLOSSES + token * d_stride, mask=mask, other=0.0).to(tl.float32)
    if SHARED:
        factor *= tl.load(SHARE)
    return factor


_NUMBERS = (
    "n",
    "first",
    "low",
    "count",
    "size",
    "ignored",
    "d_stride",
    "smoothing",
    "smoothing_per_class",
    "softcap",
    "z_loss",
)


@triton.jit(do_not_specialize=_NUMBERS)
def cross_entropy_tokens_kernel(
    X,
    TARGETS,
    OFFSETS,
    LOSSES,
    STATS,
    PARTS,
    DLOSSES,
    SHARE,
    OUT,
    CLASS_WEIGHTS,
    ACCURACIES,
    x_stride,
    out_stride,
    n,
    first,
    low,
    count,
    size,
    ignored,
    d_stride,
    smoothing,
    smoothing_per_class,
    softcap,
    z_loss,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    SUM: tl.constexpr,
    SAVE: tl.constexpr,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    ACCURACY: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SQUARED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute the same as `cross_entropy_classes_kernel`, with all logits of TOKENS tokens at once."""
    # The cache keeps what the next kernel reads: logits whose gradient is computed later, and a
    # gradient that is computed alone.
    READ: tl.constexpr = "" if SAVE else "evict_first"
    WRITE: tl.constexpr = "evict_first" if EACH | SUM else "evict_last"
    EDGES: tl.constexpr = V % GRAIN > 0
    end = size
    if ROWS and (EACH or SUM):
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    if CHAINED:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)[None, :]
    weights = CLASS_WEIGHTS + _HEADER + low
    weight_sum = 0.0
    if WEIGHTED:
        weight_sum = tl.load(CLASS_WEIGHTS)
        z_loss *= tl.load(CLASS_WEIGHTS + 1)
    losses = tl.zeros([TOKENS], tl.float32)
    counted_tokens = tl.zeros([TOKENS], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(count, TOKENS), tl.num_programs(0)):
        i = block * TOKENS + tl.arange(0, TOKENS)
        token = first + i
        target = tl.load(TARGETS + token, mask=i < count, other=ignored)
        if EACH | SUM:
            counted = (token < end) & (target != ignored) & (i < count)
        else:
            maximum = tl.load(STATS + token, mask=i < count, other=0.0)
            total = tl.load(STATS + size + token, mask=i < count, other=_NONE)
            counted = total != _NONE
        target_weight = 1.0
        if WEIGHTED:
            is_class = counted & (target >= 0)
            if EACH | SUM:
                is_class &= target < V
            else:
                # The sum is NaN for a target that is not a class.
                is_class &= total == total
            target_weight = tl.load(CLASS_WEIGHTS + _HEADER + target, mask=is_class, other=0.0)
        target -= low
        has_target = (target >= 0) & (target < V)
        target = tl.where(has_target, target, -1).to(tl.int32)
        x = X + i.to(tl.int64) * x_stride
        # A gradient alone reads all tokens: waiting for the mask of ignored tokens takes longer.
        read_mask = counted if EACH | SUM else i < count
        logits = _load_logits(x[:, None], column, 0, read_mask[:, None], V, GRAIN, EDGES, READ)
        if CAPPED:
            logits = tl.where(column < V, _cap(logits, softcap, CAPPED), -float("inf"))
        if EACH | SUM:
            target_logit = tl.load(x + target, mask=counted & has_target, other=0.0).to(tl.float32)
            difference = 0.0
            if CAPPED:
                target_logit = _cap(target_logit, softcap, CAPPED)
            if SMOOTHED:
                differences = _finite_or_zero(target_logit)[:, None] - logits
                if WEIGHTED:
                    differences *= tl.load(weights + column, mask=column < V, other=0.0)
                difference = tl.sum(tl.where(column < V, differences, 0.0), 1)
            if ACCURACY:
                is_lower = (logits < target_logit[:, None]) | (
                    (logits == target_logit[:, None]) & (column >= target[:, None])
                )
                is_first = tl.min((is_lower | (column >= V)).to(tl.int32), 1)
                is_correct = counted & has_target & (is_first == 1)
                tl.store(ACCURACIES + token, is_correct.to(tl.float32), mask=i < count)
            maximum = tl.max(logits, 1)
            finite_maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
            exponentials = tl.exp2((logits - finite_maximum[:, None]) * _LOG2E)
            total = tl.where(has_target, tl.sum(exponentials, 1), float("nan"))
            loss = _token_loss(
                tl.log(total),
                maximum,
                target_logit,
                target_weight,
                weight_sum,
                difference,
                smoothing,
                smoothing_per_class,
                z_loss,
                SMOOTHED,
                WEIGHTED,
                SQUARED,
            )
            loss = tl.where(counted, loss, 0.0)
            losses += loss
            counted_tokens += counted.to(tl.int32)
            if EACH:
                tl.store(LOSSES + token, loss, mask=i < count)
            if SAVE:
                tl.store(STATS + token, maximum, mask=i < count)
                tl.store(STATS + size + token, tl.where(counted, total, _NONE), mask=i < count)
        else:
            exponentials = tl.exp2((logits - maximum[:, None]) * _LOG2E)
        if GRADIENT:
            factor = _factor(DLOSSES, SHARE, token, i < count, d_stride, SCALED, SHARED)
            scale, of_target, of_class = _gradient_factors(
                factor,
                total,
                maximum,
                target_weight,
                weight_sum,
                smoothing,
                smoothing_per_class,
                z_loss,
                SMOOTHED,
                WEIGHTED,
                SQUARED,
            )
            y = exponentials * scale[:, None]
            y = tl.where(column == target[:, None], y - of_target[:, None], y)
            if SMOOTHED:
                if WEIGHTED:
                    weight = tl.load(weights + column, mask=column < V, other=0.0)
                    y -= of_class[:, None] * weight
                else:
                    y -= of_class[:, None]
            if CAPPED:
                slope = logits / softcap
                y *= 1.0 - slope * slope
            y = tl.where(counted[:, None], y, 0.0).to(OUT.dtype.element_ty)
            out = OUT + i.to(tl.int64) * out_stride
            is_full_group = column // GRAIN * GRAIN + GRAIN <= V if EDGES else column < V
            tl.store(
                out[:, None] + column,
                y,
                mask=(i < count)[:, None] & is_full_group,
                eviction_policy=WRITE,
            )
            if EDGES:
                is_edge = (column < V) & (is_full_group == 0)
                tl.store(
                    out[:, None] + column,
                    y,
                    mask=(i < count)[:, None] & is_edge,
                    eviction_policy=WRITE,
                )
    if SUM:
        tl.store(PARTS + tl.program_id(0), tl.sum(losses, 0))
        tl.store(
            PARTS + tl.num_programs(0) + tl.program_id(0), tl.sum(counted_tokens, 0).to(tl.float32)
        )


@triton.jit(do_not_specialize=_NUMBERS)
def cross_entropy_classes_kernel(
    X,
    TARGETS,
    OFFSETS,
    LOSSES,
    STATS,
    PARTS,
    DLOSSES,
    SHARE,
    OUT,
    CLASS_WEIGHTS,
    ACCURACIES,
    x_stride,
    out_stride,
    n,
    first,
    low,
    count,
    size,
    ignored,
    d_stride,
    smoothing,
    smoothing_per_class,
    softcap,
    z_loss,
    V: tl.constexpr,
    LANES: tl.constexpr,
    DEEP: tl.constexpr,
    GRAIN: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    SUM: tl.constexpr,
    SAVE: tl.constexpr,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    ACCURACY: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SQUARED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute losses and gradients of the tokens [first, first + count) of `size`.

    X and OUT hold V classes, from the class `low` on. The flags select the outputs:

    - EACH: LOSSES (size,). - SUM: PARTS (2, CTAs), the sum and the number of the losses of each
    CTA. - GRADIENT: OUT, the gradient of the logits. - SAVE: STATS (2, size), the maximum and the
    sum of exponentials; the sum is _NONE for an ignored
      token. STATS is read if neither EACH nor SUM is set.
    - ACCURACY: ACCURACIES (size,), 1 where the target is the first class with the largest logit.

    CAPPED, SMOOTHED, SQUARED and WEIGHTED add the options softcap, label smoothing, z-loss and class
    weights. CLASS_WEIGHTS holds the weights after a header of their sum and the factor of the
    z-loss.

    With SHIFTED a token begins anywhere within 16 bytes, which are GRAIN elements. The kernel then
    reads it from the start of a cache line on.
    """
    STEP: tl.constexpr = LANES * DEEP
    # Elements of a cache line of 128 bytes.
    LINE: tl.constexpr = min(8 * GRAIN, LANES)
    # Eviction policies of the first and the second pass: the second pass reads the logits again.
    FIRST: tl.constexpr = "evict_last" if GRADIENT else ""
    SECOND: tl.constexpr = "evict_first" if EACH | SUM else ""
    end = size
    if ROWS:
        end = tl.minimum(end, tl.load(OFFSETS + n)).to(tl.int32)
    if CHAINED:
        gdc_launch_dependents()
    weights = CLASS_WEIGHTS + _HEADER + low
    weight_sum = 0.0
    if WEIGHTED:
        weight_sum = tl.load(CLASS_WEIGHTS)
        z_loss *= tl.load(CLASS_WEIGHTS + 1)
    losses = tl.full([], 0.0, tl.float32)
    counted_tokens = tl.full([], 0, tl.int32)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        token = first + i
        target = tl.load(TARGETS + token)
        counted = (token < end) & (target != ignored)
        global_target = target
        target -= low
        has_target = (target >= 0) & (target < V)
        target = tl.where(has_target, target, -1).to(tl.int32)
        x_start = tl.cast(i, tl.int64) * x_stride
        out_start = tl.cast(i, tl.int64) * out_stride
        lead = 0
        begin = 0
        stop = V // STEP * STEP
        if SHIFTED:
            lead = (x_start % LINE).to(tl.int32)
            begin = LANES
            stop = begin + (V + lead - begin) // STEP * STEP
            x_start = tl.multiple_of(x_start - lead, LINE)
            out_start = x_start
        x = X + x_start
        out = OUT + out_start
        if counted:
            if EACH | SUM:
                lane_maxima = tl.full([LANES], -float("inf"), tl.float32)
                lane_sums = tl.zeros([LANES], tl.float32)
                target_logit = tl.load(x + lead + target, mask=has_target, other=0.0).to(tl.float32)
                if CAPPED:
                    target_logit = _cap(target_logit, softcap, CAPPED)
                # Not used without SMOOTHED and ACCURACY.
                lane_differences = tl.zeros([LANES], tl.float32)
                lane_earlier = tl.full([LANES], -float("inf"), tl.float32)
                earlier = 0
                if SHIFTED:
                    lane_maxima, lane_sums, lane_differences, lane_earlier, earlier = _visit_tile(
                        x,
                        weights,
                        0,
                        lead,
                        target,
                        target_logit,
                        lane_maxima,
                        lane_sums,
                        lane_differences,
                        lane_earlier,
                        earlier,
                        softcap,
                        V,
                        LANES,
                        1,
                        GRAIN,
                        True,
                        FIRST,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                        ACCURACY,
                    )
                for at in range(begin, stop, STEP):
                    lane_maxima, lane_sums, lane_differences, lane_earlier, earlier = _visit_tile(
                        x,
                        weights,
                        at,
                        lead,
                        target,
                        target_logit,
                        lane_maxima,
                        lane_sums,
                        lane_differences,
                        lane_earlier,
                        earlier,
                        softcap,
                        V,
                        LANES,
                        DEEP,
                        GRAIN,
                        False,
                        FIRST,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                        ACCURACY,
                    )
                for at in range(stop, V + lead, LANES):
                    lane_maxima, lane_sums, lane_differences, lane_earlier, earlier = _visit_tile(
                        x,
                        weights,
                        at,
                        lead,
                        target,
                        target_logit,
                        lane_maxima,
                        lane_sums,
                        lane_differences,
                        lane_earlier,
                        earlier,
                        softcap,
                        V,
                        LANES,
                        1,
                        GRAIN,
                        True,
                        FIRST,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                        ACCURACY,
                    )
                maximum = tl.max(lane_maxima, 0)
                # A lane without logits has the sum 0, which stays 0.
                base = tl.where(lane_maxima == -float("inf"), maximum, lane_maxima)
                total = tl.sum(lane_sums * tl.exp2((base - maximum) * _LOG2E), 0)
                total = tl.where(has_target, total, float("nan"))
                target_weight = 1.0
                if WEIGHTED:
                    target_weight = tl.load(weights + target, mask=has_target, other=0.0)
                loss = _token_loss(
                    tl.log(total),
                    maximum,
                    target_logit,
                    target_weight,
                    weight_sum,
                    tl.sum(lane_differences, 0),
                    smoothing,
                    smoothing_per_class,
                    z_loss,
                    SMOOTHED,
                    WEIGHTED,
                    SQUARED,
                )
                losses += loss
                counted_tokens += 1
                if EACH:
                    tl.store(LOSSES + token, loss)
                if ACCURACY:
                    is_correct = (total == total) & _is_first_maximum(
                        x,
                        lead,
                        target,
                        target_logit,
                        maximum,
                        tl.max(lane_earlier, 0),
                        earlier,
                        softcap,
                        LANES,
                        CAPPED,
                    )
                    tl.store(ACCURACIES + token, is_correct.to(tl.float32))
                if SAVE:
                    tl.store(STATS + token, maximum)
                    tl.store(STATS + size + token, total)
            else:
                maximum = tl.load(STATS + token)
                total = tl.load(STATS + size + token)
                target_weight = 1.0
                if WEIGHTED:
                    # The sum is NaN for a target that is not a class.
                    target_weight = tl.load(
                        CLASS_WEIGHTS + _HEADER + global_target,
                        mask=(global_target >= 0) & (total == total),
                        other=0.0,
                    )
            if GRADIENT:
                factor = _factor(DLOSSES, SHARE, token, counted, d_stride, SCALED, SHARED)
                scale, of_target, of_class = _gradient_factors(
                    factor,
                    total,
                    maximum,
                    target_weight,
                    weight_sum,
                    smoothing,
                    smoothing_per_class,
                    z_loss,
                    SMOOTHED,
                    WEIGHTED,
                    SQUARED,
                )
                target_index = tl.where(has_target, lead + target, -1)
                if SHIFTED:
                    _store_gradient(
                        out,
                        x,
                        0,
                        lead,
                        target_index,
                        maximum,
                        of_target,
                        scale,
                        of_class,
                        weights,
                        softcap,
                        V,
                        LANES,
                        1,
                        GRAIN,
                        True,
                        SECOND,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                    )
                for at in range(begin, stop, STEP):
                    _store_gradient(
                        out,
                        x,
                        at,
                        lead,
                        target_index,
                        maximum,
                        of_target,
                        scale,
                        of_class,
                        weights,
                        softcap,
                        V,
                        LANES,
                        DEEP,
                        GRAIN,
                        False,
                        SECOND,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                    )
                for at in range(stop, V + lead, LANES):
                    _store_gradient(
                        out,
                        x,
                        at,
                        lead,
                        target_index,
                        maximum,
                        of_target,
                        scale,
                        of_class,
                        weights,
                        softcap,
                        V,
                        LANES,
                        1,
                        GRAIN,
                        True,
                        SECOND,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                    )
                if SHIFTED | (V % GRAIN > 0):
                    index, is_edge = _edge_indices(lead, V, GRAIN)
                    logits = tl.load(x + index, mask=is_edge, other=0.0).to(tl.float32)
                    y = _logit_gradient(
                        logits,
                        index,
                        lead,
                        target_index,
                        maximum,
                        of_target,
                        scale,
                        of_class,
                        weights,
                        softcap,
                        V,
                        CAPPED,
                        SMOOTHED,
                        WEIGHTED,
                    ).to(OUT.dtype.element_ty)
                    tl.store(out + index, y, mask=is_edge)
        else:
            if EACH:
                tl.store(LOSSES + token, 0.0)
            if ACCURACY:
                tl.store(ACCURACIES + token, 0.0)
            if SAVE:
                tl.store(STATS + size + token, _NONE)
            if GRADIENT:
                for at in range(0, V + lead, LANES):
                    index = at + tl.arange(0, LANES)
                    zeros = tl.zeros([LANES], OUT.dtype.element_ty)
                    tl.store(
                        out + index,
                        zeros,
                        mask=_is_full_group(index, lead, V, GRAIN),
                        eviction_policy="evict_first",
                    )
                if SHIFTED | (V % GRAIN > 0):
                    index, is_edge = _edge_indices(lead, V, GRAIN)
                    tl.store(out + index, tl.zeros([2 * GRAIN], OUT.dtype.element_ty), mask=is_edge)
    if SUM:
        tl.store(PARTS + tl.program_id(0), losses)
        tl.store(PARTS + tl.num_programs(0) + tl.program_id(0), counted_tokens.to(tl.float32))


class _Tile(NamedTuple):
    """Lanes per CTA, logits that each lane reads at a time, warps, and maximum CTAs per SM."""

    lanes: int
    deep: int
    warps: int
    programs_per_sm: int


#: Minimum number of classes -> tile: for losses, for a gradient, for a gradient with a softcap, and
#: for both. For both, the logits of all CTAs fit into the cache.
LOSSES = {0: _Tile(512, 4, 2, 64), 1 << 12: _Tile(1024, 8, 4, 64), 1 << 16: _Tile(1024, 4, 4, 64)}
GRADIENT = {
    0: _Tile(512, 4, 2, 64),
    1 << 12: _Tile(1024, 4, 4, 64),
    1 << 13: _Tile(4096, 2, 16, 64),
}
CAPPED_GRADIENT = {0: _Tile(512, 4, 2, 64), 1 << 12: _Tile(2048, 2, 8, 64)}
BOTH = {0: _Tile(4096, 4, 16, 2), (1 << 16) + 1: _Tile(8192, 4, 32, 1)}
#: Maximum classes for which a CTA holds all logits of a token: for losses, for a gradient, for both.
MAX_CLASSES_AT_ONCE, MAX_CLASSES_AT_ONCE_GRADIENT, MAX_CLASSES_AT_ONCE_BOTH = 2048, 4096, 1 << 14
#: Minimum logits of such a CTA, of several tokens if one token has fewer.
MIN_LOGITS_PER_CTA = 1024
# Small tiles, so that small inputs reach every code path.
if INTERPRETED:
    LOSSES = GRADIENT = CAPPED_GRADIENT = BOTH = {0: _Tile(16, 2, 1, 4)}
    MAX_CLASSES_AT_ONCE = MAX_CLASSES_AT_ONCE_GRADIENT = MAX_CLASSES_AT_ONCE_BOTH = 32
    MIN_LOGITS_PER_CTA = 64


@launch_args
class CrossEntropyArgs:
    """Arguments of `cross_entropy_tokens_kernel` and of `cross_entropy_classes_kernel`."""

    X: Pointer
    TARGETS: Pointer
    OFFSETS: Pointer
    LOSSES: Written
    STATS: Written
    PARTS: Written
    DLOSSES: Pointer
    SHARE: Pointer
    OUT: Written
    CLASS_WEIGHTS: Pointer
    ACCURACIES: Written
    x_stride: Stride
    out_stride: Stride
    n: Number
    first: Number
    low: Number
    count: Number
    size: Number
    ignored: Number
    d_stride: Number
    smoothing: Number
    smoothing_per_class: Number
    softcap: Number
    z_loss: Number


class Outputs(NamedTuple):
    """Optional inputs and outputs of a kernel; see `visit_logits`."""

    EACH: bool
    SUM: bool
    SAVE: bool
    GRADIENT: bool
    SCALED: bool
    SHARED: bool
    ACCURACY: bool

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Names of the arguments that are not written."""
        written = {
            "LOSSES": self.EACH,
            "STATS": self.SAVE,
            "PARTS": self.SUM,
            "OUT": self.GRADIENT,
            "ACCURACIES": self.ACCURACY,
        }
        return tuple(name for name, is_written in written.items() if not is_written)


class OptionFlags(NamedTuple):
    """The options of the loss that a kernel computes.

    CAPPED is 0 without a softcap, 1 with a fast softcap, and 2 with an accurate one, see `_cap`.
    """

    CAPPED: int = 0
    SMOOTHED: bool = False
    SQUARED: bool = False
    WEIGHTED: bool = False


_NO_OPTIONS = OptionFlags()


@cache
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    classes: int,
    grain: int,
    shifted: bool,
    outputs: Outputs,
    options: OptionFlags,
) -> tuple[Launch, int, int]:
    """Return the launch, the tokens that a CTA processes at a time, and the maximum CTAs."""
    flags: dict[str, Any] = dict(
        ROWS=dtypes[2] is not None,
        **outputs._asdict(),
        **options._asdict(),
        CHAINED=outputs.SUM and device_info(device).supports_pdl,
    )
    computes_both, padded_classes = (
        outputs.GRADIENT and (outputs.EACH or outputs.SUM),
        max(16, triton.next_power_of_2(classes)),
    )
    if classes <= (
        MAX_CLASSES_AT_ONCE_BOTH
        if computes_both
        else MAX_CLASSES_AT_ONCE_GRADIENT
        if outputs.GRADIENT and not shifted
        else MAX_CLASSES_AT_ONCE
    ):
        logits_per_cta, logits_per_warp = (
            max(MIN_LOGITS_PER_CTA, padded_classes),
            1024
            if padded_classes > 2048
            else 256
            if outputs.GRADIENT and not computes_both
            else 512,
        )
        tokens, warps = logits_per_cta // padded_classes, max(1, logits_per_cta // logits_per_warp)
        launch = Launch(
            cross_entropy_tokens_kernel,
            dict(V=classes, BLOCK=padded_classes, TOKENS=tokens, GRAIN=1 if shifted else grain)
            | flags,
            dict(num_warps=warps),
            args=CrossEntropyArgs,
            unwritten=outputs.unwritten,
        )
        return (
            launch,
            tokens,
            (32 if warps == 1 else 64) * device_info(device).sm_count if outputs.SUM else 1 << 30,
        )
    tiles = BOTH if computes_both else GRADIENT if outputs.GRADIENT else LOSSES
    if options.CAPPED and outputs.GRADIENT and not computes_both:
        tiles = CAPPED_GRADIENT
    lanes, deep, warps, programs_per_sm = tiles[max(least for least in tiles if least <= classes)]
    if options.CAPPED or outputs.ACCURACY or (options.SMOOTHED and options.WEIGHTED):
        # Registers for more numbers per logit.
        deep = min(deep, 2 if options.SMOOTHED and options.WEIGHTED else 4)
    deep = max(1, min(deep, padded_classes // lanes))
    launch = Launch(
        cross_entropy_classes_kernel,
        dict(V=classes, LANES=lanes, DEEP=deep, GRAIN=grain, SHIFTED=shifted) | flags,
        dict(num_warps=warps),
        args=CrossEntropyArgs,
        unwritten=outputs.unwritten,
    )
    return launch, 1, programs_per_sm * device_info(device).sm_count


def visit_logits(
    x: torch.Tensor,
    targets: Targets,
    first: int = 0,
    low: int = 0,
    *,
    losses: torch.Tensor | None = None,
    parts: list[torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dlosses: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
    accuracies: torch.Tensor | None = None,
    options: LossOptions = PLAIN,
) -> None:
    """Run the kernel on x (count, classes), the logits of the tokens from `first` on.

    x holds all classes. Where `stats` are read it can hold some classes, from `low` on.

    Parameters
    ----------
    losses
        (total,) float32, written if present.
    parts
        List that gets one more array if present: (2, CTAs), the sum and number of the losses per
        CTA.
    stats
        (2, total) float32: written together with losses or parts, read if neither is present.
    out
        (count, classes) the gradient, written if present; can be x.
    dlosses
        (total,) the gradient of the losses; 1 by default.
    share
        A factor of the gradient.
    accuracies
        (total,) float32, whether each prediction is correct, written together with losses or parts
        if present.
    options
        The options of the loss.
    """
    (count, classes), device = x.shape, x.device
    destination = x if out is None else out
    grain = 16 // x.element_size()
    shifted = (x.stride(0) | destination.stride(0)) % grain > 0
    if (x.data_ptr() | destination.data_ptr()) % 16 or (
        shifted and x.stride(0) != destination.stride(0)
    ):
        grain, shifted = 1, False
    computes_sum = parts is not None
    outputs = Outputs(
        losses is not None,
        computes_sum,
        (losses is not None or computes_sum) and stats is not None,
        out is not None,
        dlosses is not None,
        share is not None,
        accuracies is not None,
    )
    flags, smoothing_per_class = _NO_OPTIONS, 0.0
    if options is not PLAIN:
        # Logits in half precision have larger errors than the fast tanh.
        capped = 0 if options.softcap == 0 else 2 if x.dtype == torch.float32 else 1
        flags = OptionFlags(
            capped,
            options.label_smoothing > 0,
            options.z_loss > 0,
            options.class_weights is not None,
        )
        smoothing_per_class = options.label_smoothing / options.classes
    dtypes = x.dtype, *targets.dtypes, None if dlosses is None else dlosses.dtype
    launch, tokens, max_programs = _launch(device, dtypes, classes, grain, shifted, outputs, flags)
    programs = min(-(-count // tokens), max_programs)
    part = None
    if parts is not None:
        part = torch.empty((2, programs), dtype=torch.float32, device=device)
        parts.append(part)
    if not count:
        return
    offsets, n = targets.rows
    args = CrossEntropyArgs(
        X=x,
        TARGETS=targets.classes,
        OFFSETS=offsets,
        LOSSES=x if losses is None else losses,
        STATS=x if stats is None else stats,
        PARTS=x if part is None else part,
        DLOSSES=x if dlosses is None else dlosses,
        SHARE=x if share is None else share,
        OUT=destination,
        CLASS_WEIGHTS=x if options.class_weights is None else options.class_weights,
        ACCURACIES=x if accuracies is None else accuracies,
        x_stride=x.stride(0),
        out_stride=destination.stride(0),
        n=n,
        first=first,
        low=low,
        count=count,
        size=targets.classes.shape[0],
        ignored=targets.ignored,
        d_stride=0 if dlosses is None else dlosses.stride(0),
        smoothing=options.label_smoothing,
        smoothing_per_class=smoothing_per_class,
        softcap=options.softcap,
        z_loss=options.z_loss,
    )
    launch_on_device(launch, programs, args)


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """Return x (total, size) with contiguous tokens, copied if necessary."""
    return (
        x if (x.stride(1) == 1 or x.shape[1] == 1) and x.stride(0) >= x.shape[1] else x.contiguous()
    )
