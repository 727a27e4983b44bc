"""Cross-entropy of each token's logits and its target class.

It comes alone and fused with the product that makes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import (
    accumulation_dtype,
    as_values,
    check_array,
    check_ragged,
    check_same_rows,
    peek_tokens,
    with_values_like,
)
from ..dispatch.operation import define_operation
from .segment import safe_divide, segment_reduce

#: The mean or the sum over all tokens, the mean of each row, or the loss of each token.
REDUCTIONS = ("mean", "sum", "row_mean", "none")
#: Logits that the standard implementation holds at a time, unless the inputs are larger.
MAX_LOGITS = 1 << 22

__all__ = ["cross_entropy", "linear_cross_entropy"]


class LossCall:
    """The part that both call records share.

    The loss of a token is 0 where `counted` is False. It is NaN, with a gradient of NaN, where a
    counted target is not a class. `reduce_losses` turns the losses of all tokens into the result.

    Attributes
    ----------
    tokens
        The logits or hidden states, ragged or dense.
    values, labels
        (total, size) the logits or hidden states, and (total,) the targets, int32 or int64; dense.
    """

    __slots__ = ("labels", "tokens", "values")
    tokens: Any
    values: Any
    labels: Any
    targets: Any
    ignore_index: int
    reduction: str

    @property
    def counted(self) -> Any:
        """(total,) whether a token counts: it belongs to a row, and its target is not ignored."""
        counted = self.labels != self.ignore_index
        mask = self.tokens.layout.token_mask if isinstance(self.tokens, Array) else None
        return counted if mask is None else counted & mask

    def result(self, reduced: Any) -> Any:
        """Return reduced losses as the operation does: on the layout of the tokens for ``"none"``."""
        return with_values_like(self.tokens, reduced) if self.reduction == "none" else reduced


@dataclass(frozen=True, slots=True)
class CrossEntropyCall(LossCall):
    """A validated call of `cross_entropy`.

    Attributes
    ----------
    logits, targets, ignore_index, reduction
        See `cross_entropy`.
    """

    logits: Any
    targets: Any
    ignore_index: int = -100
    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check_tokens(self, "logits", self.logits)
        if self.values.shape[1] == 0:
            raise ValueError(
                f"logits: expected at least one class, got shape {tuple(self.logits.shape)}"
            )
        _check_targets(self, self.values.shape[1])


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyCall(LossCall):
    """A validated call of `linear_cross_entropy`.

    Attributes
    ----------
    x, weight, targets, bias, ignore_index, reduction
        See `linear_cross_entropy`.
    """

    x: Any
    weight: Any
    targets: Any
    bias: Any = None
    ignore_index: int = -100
    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check_tokens(self, "x", self.x)
        values, weight = self.values, self.weight
        checks.check_dense("weight", weight, values)
        if weight.ndim != 2 or weight.shape[1] != values.shape[1] or weight.shape[0] == 0:
            raise ValueError(
                f"weight: expected shape (classes, width), at least one class and the last axis of x, {tuple(self.x.shape)}, "
                f"got {tuple(weight.shape)}"
            )
        checks.check_same_dtype("weight", weight, values)
        if self.bias is not None:
            checks.check_dense("bias", self.bias, values)
            checks.check_shape("bias", self.bias, (weight.shape[0],), "one number per class")
            checks.check_same_dtype("bias", self.bias, values)
        _check_targets(self, weight.shape[0])

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The weight and, if there is one, the bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def _check_tokens(call: LossCall, name: str, x: Any) -> None:
    """Set the tokens; raise unless `x` is floating point, (n, None, size) or (total, size)."""
    values = check_array(name, x)
    if values.ndim != 2 or (isinstance(x, Array) and x.ragged_dim != 0):
        raise ValueError(
            f"{name}: expected a ragged array (n, None, size) or a dense one (total, size), got {tuple(x.shape)}"
        )
    checks.check_floating(name, values)
    object.__setattr__(call, "tokens", x)
    object.__setattr__(call, "values", values)


def _check_targets(call: LossCall, classes: int) -> None:
    """Set the labels; raise unless each token's target is a class, and the reduction is known."""
    x, targets, values = call.tokens, call.targets, call.values
    if isinstance(x, Array):
        if check_ragged("targets", targets).ndim != 2:
            raise ValueError(
                f"targets: expected shape (n, None), one class per token, got {targets.shape}"
            )
        check_same_rows("targets", x, targets)
    elif not is_array(targets) or tuple(targets.shape) != tuple(values.shape[:1]):
        actual = (
            f"shape {tuple(targets.shape)}" if hasattr(targets, "shape") else type(targets).__name__
        )
        raise ValueError(
            f"targets: expected a dense array of shape {tuple(values.shape[:1])}, one class per token, got {actual}"
        )
    checks.check_integer("ignore_index", call.ignore_index)
    if call.reduction not in REDUCTIONS:
        names = ", ".join(map(repr, REDUCTIONS))
        raise ValueError(f"reduction: expected one of {names}, got {call.reduction!r}")
    if call.reduction == "row_mean" and not isinstance(x, Array):
        raise ValueError(
            f"reduction: 'row_mean' needs rows, got a dense array of shape {tuple(x.shape)}"
        )
    labels = checks.check_integers("targets", as_values(targets), values)
    host = peek_tokens(x, labels)
    if host is not None:
        wrong = np.flatnonzero((host != call.ignore_index) & ((host < 0) | (host >= classes)))
        if wrong.size:
            raise ValueError(
                f"targets: expected 0 <= class < {classes}, or ignore_index, {call.ignore_index}, got {host[wrong[0]]} for token "
                f"{wrong[0]}"
            )
    object.__setattr__(call, "labels", labels)


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    kernel: str | None = None,
) -> Any:
    """Compute the cross-entropy ``log(sum(exp(logits))) - logits[target]`` of each token, in nats.

    Parameters
    ----------
    logits
        (n, None, classes) ragged or (total, classes) dense floating-point array.
    targets
        (n, None) or (total,) integers, the class of each token, on the layout of the logits. A
        class that does not exist is an error where reading it is free; elsewhere the loss of the
        token and its gradient are NaN.
    ignore_index
        Tokens with this target do not count: their loss and their gradient are 0.
    reduction
        ``"mean"`` or ``"sum"`` over all tokens that count, ``"row_mean"``, the mean of each row, or
        ``"none"``, the loss of each token. A mean over no token is NaN, its gradient 0.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    dense array or Array
        0-d; (n,) for ``"row_mean"``; like the targets for ``"none"``. The dtype is float32, or
        float64 for float64: in half precision the loss of a batch would have three digits.

    Raises
    ------
    ValueError
        If a shape does not fit, or a target is no class.

    Examples
    --------
    >>> import numpy as np, scree
    >>> logits = scree.from_lengths(np.log(np.asarray([[0.5, 0.5], [0.8, 0.2], [0.9, 0.1]])), [1, 2])
    >>> targets = logits.with_values(np.asarray([0, 1, -100]))
    >>> scree.cross_entropy(logits, targets, reduction="row_mean").round(4)  # -log(0.5), -log(0.2)
    array([0.6931, 1.6094])
    """
    options = {"ignore_index": ignore_index, "reduction": reduction}
    return _cross_entropy.run({"logits": logits, "targets": targets}, options, kernel)


def linear_cross_entropy(
    x: Any,
    weight: Any,
    targets: Any,
    bias: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    kernel: str | None = None,
) -> Any:
    """Compute `cross_entropy` of the logits ``x @ weight.T + bias``.

    The logits exist for a part of the tokens at a time.

    With a vocabulary of 128,000 all logits take more memory than the model that makes them. Here
    they take no more than the inputs or 2**22 numbers, whichever is larger. The backward pass
    computes them again. A kernel may do so in the forward pass, and hold more.

    Parameters
    ----------
    x
        (n, None, width) ragged or (total, width) dense floating-point array, the last hidden
        states.
    weight
        (classes, width) matrix with the dtype of `x`: the layout of ``torch.nn.Linear`` and of an
        embedding.
    targets, ignore_index, reduction, kernel
        See `cross_entropy`.
    bias
        (classes,) or None.

    Returns
    -------
    dense array or Array
        See `cross_entropy`.

    Raises
    ------
    TypeError, ValueError
        See `cross_entropy`; and if the weight or the bias does not fit `x`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.ones((3, 2)), [1, 2])
    >>> targets = x.with_values(np.asarray([0, 1, 3]))
    >>> scree.linear_cross_entropy(x, np.zeros((4, 2)), targets).round(4)
    np.float64(1.3863)
    """
    call = LinearCrossEntropyCall(x, weight, targets, bias, ignore_index, reduction)
    return _linear_cross_entropy.run_call(call, kernel)


def reduce_losses(call: LossCall, losses: Any) -> Any:
    """Return the result of a call from the (total,) losses of its tokens."""
    if call.reduction == "none":
        return call.result(losses)
    xp, counted = backend(call.values).xp, call.counted
    if call.reduction == "row_mean":
        layout = call.tokens.layout
        count = segment_reduce("sum", xp.astype(counted, losses.dtype), layout)
        return safe_divide(xp, segment_reduce("sum", losses, layout), count)
    total = xp.sum(losses)
    if call.reduction == "sum":
        return total
    return safe_divide(xp, total, xp.astype(xp.sum(xp.astype(counted, xp.int32)), total.dtype))


@define_operation("cross_entropy", CrossEntropyCall)
def _cross_entropy(call: CrossEntropyCall) -> Any:
    lib, counted, classes = backend(call.values), call.counted, call.values.shape[1]
    xp = lib.xp
    logits = xp.astype(call.values, accumulation_dtype(xp, call.values.dtype), copy=False)
    logits = xp.where(counted[:, None], logits, xp.zeros_like(logits))
    labels = xp.where(counted, call.labels, 0)
    # One-hot, as a gather compiles for one size only.
    one_hot = xp.arange(classes, dtype=labels.dtype, device=lib.device(logits)) == labels[:, None]
    target = xp.sum(xp.where(one_hot, logits, xp.zeros_like(logits)), axis=1)
    # Rounded, and so a constant to every library that differentiates.
    shift = xp.ceil(xp.max(logits, axis=1))
    loss = xp.log(xp.sum(xp.exp(logits - shift[:, None]), axis=1)) + (shift - target)
    one, is_class = xp.ones_like(loss), (labels >= 0) & (labels < classes)
    loss = xp.where(counted, loss * xp.where(is_class, one, one * float("nan")), one * 0)
    return reduce_losses(call, loss)


@define_operation("linear_cross_entropy", LinearCrossEntropyCall)
def _linear_cross_entropy(call: LinearCrossEntropyCall) -> Any:
    lib, (total, _), size = backend(call.values), call.values.shape, tokens_per_part(call)
    labels, counted, parameters, parts = call.labels, call.counted, call.parameters, []
    if total <= size:
        losses = losses_of_part(call.ignore_index, labels, counted, call.values, *parameters)
        return reduce_losses(call, losses)
    for start in range(0, total, size):
        part = slice(start, min(start + size, total))
        f = lib.checkpoint(partial(losses_of_part, call.ignore_index, labels[part], counted[part]))
        parts.append(f(call.values[part, :], *parameters))
    return reduce_losses(call, lib.xp.concat(parts, axis=0))


def tokens_per_part(call: LinearCrossEntropyCall) -> int:
    """Return the number of tokens whose logits exist at a time."""
    (total, width), classes = call.values.shape, call.weight.shape[0]
    return max(1, max(MAX_LOGITS, total * width, classes * width) // classes)  # type: ignore[no-any-return]


def losses_of_part(
    ignore_index: int, labels: Any, counted: Any, x: Any, weight: Any, *bias: Any
) -> Any:
    """Return (tokens,) the losses of hidden states x (tokens, width).

    0 for tokens that do not count, whatever they hold.
    """
    xp = backend(x).xp
    logits = xp.where(counted[:, None], x, xp.zeros_like(x)) @ xp.matrix_transpose(weight)
    logits = logits + bias[0] if bias else logits
    targets = xp.where(counted, labels, ignore_index)
    return _cross_entropy.run_call(CrossEntropyCall(logits, targets, ignore_index, "none"))
