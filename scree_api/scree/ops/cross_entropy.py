"""Cross-entropy of each token's logits and its target class.

It comes alone and fused with the product that makes the logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import (
    as_values,
    check_array,
    check_ragged,
    check_same_rows,
    peek_tokens,
    with_values_like,
)
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record
from .segment import divide_by_weight, safe_divide, segment_reduce

#: The mean or the sum over all tokens, the mean of each row, or the loss of each token.
REDUCTIONS = ("mean", "sum", "row_mean", "none")
#: Reductions that divide by the number of tokens, or by the sum of their weights.
MEANS = ("mean", "row_mean")
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
    has_options
        Whether the call needs more than the plain loss of each token.
    """

    __slots__ = ("has_options", "labels", "tokens", "values")
    has_options: bool
    tokens: Any
    values: Any
    labels: Any
    targets: Any
    class_weights: Any
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_accuracy: bool

    @property
    def counted(self) -> Any:
        """(total,) whether a token counts: it belongs to a row, and its target is not ignored."""
        counted = self.labels != self.ignore_index
        mask = self.tokens.layout.token_mask if isinstance(self.tokens, Array) else None
        return counted if mask is None else counted & mask

    def result(self, reduced: Any) -> Any:
        """Return reduced losses as the operation does: on the layout of the tokens for ``"none"``."""
        return with_values_like(self.tokens, reduced) if self.reduction == "none" else reduced


@record
class CrossEntropyCall(LossCall):
    """A validated call of `cross_entropy`.

    Attributes
    ----------
    logits, targets, class_weights, ignore_index, label_smoothing, softcap, z_loss, reduction, \
    return_accuracy
        See `cross_entropy`.
    """

    logits: Any
    targets: Any
    class_weights: Any = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "mean"
    return_accuracy: bool = False

    def __post_init__(self) -> None:
        _check_tokens(self, "logits", self.logits)
        if self.values.shape[1] == 0:
            raise ValueError(
                f"logits: expected at least one class, got shape {tuple(self.logits.shape)}"
            )
        _check_options(self, self.values.shape[1])
        _check_targets(self, self.values.shape[1])


@record
class LinearCrossEntropyCall(LossCall):
    """A validated call of `linear_cross_entropy`.

    Attributes
    ----------
    x, weight, targets, bias, class_weights, ignore_index, label_smoothing, softcap, z_loss, \
    reduction, return_accuracy, max_logits
        See `linear_cross_entropy`.
    """

    x: Any
    weight: Any
    targets: Any
    bias: Any = None
    class_weights: Any = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "mean"
    return_accuracy: bool = False
    max_logits: int | None = None

    def __post_init__(self) -> None:
        _check_tokens(self, "x", self.x)
        if self.max_logits is not None:
            checks.check_integer("max_logits", self.max_logits, 1)
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
        _check_options(self, weight.shape[0])
        _check_targets(self, weight.shape[0])

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The arrays of weight, bias and class weights that are present."""
        arrays = self.weight, self.bias, self.class_weights
        return tuple(x for x in arrays if x is not None)


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


def _check_options(call: LossCall, classes: int) -> None:
    """Set whether there are options; raise unless they fit `classes` classes."""
    numbers = call.label_smoothing, call.softcap, call.z_loss, call.return_accuracy
    weights = call.class_weights
    has_options = weights is not None or numbers != (0.0, None, 0.0, False)
    object.__setattr__(call, "has_options", has_options)
    if not has_options:
        return
    if weights is not None:
        checks.check_dense("class_weights", weights, call.values)
        checks.check_shape("class_weights", weights, (classes,), "one number per class")
        checks.check_floating("class_weights", weights)
    if checks.check_number("label_smoothing", call.label_smoothing, low=0) > 1:
        raise ValueError(
            f"label_smoothing: expected a number from 0 to 1, got {call.label_smoothing}"
        )
    if call.softcap is not None:
        checks.check_number("softcap", call.softcap, above=0)
    checks.check_number("z_loss", call.z_loss, low=0)
    checks.check_flag("return_accuracy", call.return_accuracy)


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
    class_weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_accuracy: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute the cross-entropy ``log(sum(exp(logits))) - logits[target]`` of each token, in nats.

    Class weights, smoothing and the mean follow `torch.nn.functional.cross_entropy`.

    Parameters
    ----------
    logits
        (n, None, classes) ragged or (total, classes) dense floating-point array.
    targets
        (n, None) or (total,) integers, the class of each token, on the layout of the logits. A
        class that does not exist is an error where reading it is free; elsewhere the loss of the
        token and its gradient are NaN.
    class_weights
        (classes,) floating-point weights, or None. They multiply the loss of each target. A mean is
        divided by the sum of the weights of the targets instead of by the number of tokens.
    ignore_index
        Tokens with this target do not count: their loss and their gradient are 0.
    label_smoothing
        The part, from 0 to 1, of each target that is spread evenly over all classes. With
        `class_weights` the loss of each class has the weight of that class.
    softcap
        Logits become ``softcap * tanh(logits / softcap)`` before the loss, or None.
    z_loss
        The loss of a token becomes ``loss + z_loss * log(sum(exp(logits)))**2`` (PaLM, Chowdhery et
        al., 2022). Class weights do not apply to this term; its mean is over the number of tokens.
    reduction
        ``"mean"`` or ``"sum"`` over all tokens that count, ``"row_mean"``, the mean of each row, or
        ``"none"``, the loss of each token. A mean over no token is NaN, its gradient 0.
    return_accuracy
        Also return the accuracy. Training loops report it beside the loss, and the logits are read
        once for both. `linear_cross_entropy` keeps no logits to compute it from.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    dense array or Array, or a pair
        0-d; (n,) for ``"row_mean"``; like the targets for ``"none"``. The dtype is float32, or
        float64 for float64: in half precision the loss of a batch would have three digits.

        With `return_accuracy` a pair of the loss and the accuracy, which has the shape and dtype of
        the loss and no gradient. A token has the accuracy 1 if its target is the first class with
        the largest logit, and 0 otherwise. The mean or sum is over the tokens that count, without
        class weights, so ``"sum"`` counts the correct tokens.

    Raises
    ------
    TypeError, ValueError
        If a shape or dtype does not fit, a target is no class, or an option is out of range.

    Examples
    --------
    >>> import numpy as np, scree
    >>> logits = scree.from_lengths(np.log(np.asarray([[0.5, 0.5], [0.8, 0.2], [0.9, 0.1]])), [1, 2])
    >>> targets = logits.with_values(np.asarray([0, 1, -100]))
    >>> scree.cross_entropy(logits, targets, reduction="row_mean").round(4)  # -log(0.5), -log(0.2)
    array([0.6931, 1.6094])
    >>> loss, accuracy = scree.cross_entropy(
    ...     logits, targets, label_smoothing=0.1, reduction="row_mean", return_accuracy=True
    ... )
    >>> accuracy  # of two equal logits the first is the prediction
    array([1., 0.])
    """
    arrays = {"logits": logits, "targets": targets, "class_weights": class_weights}
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
        "reduction": reduction,
        "return_accuracy": return_accuracy,
    }
    return _cross_entropy.run(arrays, options, kernel)


def linear_cross_entropy(
    x: Any,
    weight: Any,
    targets: Any,
    bias: Any = None,
    *,
    class_weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_accuracy: bool = False,
    max_logits: int | None = None,
    kernel: str | None = None,
) -> Any:
    """Compute `cross_entropy` of the logits ``x @ weight.T + bias``.

    The logits exist for a part of the tokens at a time.

    With a vocabulary of 128,000 all logits take more memory than the model that makes them. Here
    they take by default no more than the inputs or 2**22 numbers, whichever is larger. The backward
    pass computes them again. A kernel may do so in the forward pass, and hold more.

    Parameters
    ----------
    x
        (n, None, width) ragged or (total, width) dense floating-point array, the last hidden
        states.
    weight
        (classes, width) matrix with the dtype of `x`: the layout of ``torch.nn.Linear`` and of an
        embedding.
    targets, class_weights, ignore_index, label_smoothing, softcap, z_loss, reduction, \
    return_accuracy, kernel
        See `cross_entropy`.
    bias
        (classes,) or None.
    max_logits
        Logits that may exist at a time, or None for the default. On a GPU more logits take less
        time: with enough for 1,024 tokens and for a twelfth of all tokens, a kernel with many
        classes computes them once instead of twice.

    Returns
    -------
    dense array or Array, or a pair
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
    arrays = {
        "x": x,
        "weight": weight,
        "targets": targets,
        "bias": bias,
        "class_weights": class_weights,
    }
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
        "reduction": reduction,
        "return_accuracy": return_accuracy,
        "max_logits": max_logits,
    }
    return _linear_cross_entropy.run(arrays, options, kernel)


def reduce_losses(call: LossCall, losses: Any, weights: Any = None) -> Any:
    """Return the result of a call from the (total,) losses of its tokens.

    A mean is divided by the sum of the (total,) `weights` of the tokens, by default by their number.
    """
    if call.reduction == "none":
        return call.result(losses)
    xp = backend(call.values).xp
    if call.reduction == "row_mean":
        layout = call.tokens.layout
        weights = xp.astype(call.counted, losses.dtype) if weights is None else weights
        sums = (segment_reduce("sum", x, layout) for x in (losses, weights))
        return divide_by_weight(xp, *sums)
    total = xp.sum(losses)
    if call.reduction == "sum":
        return total
    if weights is None:
        return safe_divide(
            xp, total, xp.astype(xp.sum(xp.astype(call.counted, xp.int32)), total.dtype)
        )
    return divide_by_weight(xp, total, xp.sum(weights))


def reduce_token_losses(call: LossCall, losses: dict[str, Any]) -> Any:
    """Return the result of a call from the `token_losses` of all its tokens."""
    loss = reduce_losses(call, losses["loss"], losses.get("weight"))
    if "z_loss" in losses:
        loss = loss + reduce_losses(call, losses["z_loss"])
    if not call.return_accuracy:
        return loss
    return loss, reduce_losses(call, losses["accuracy"])


def token_losses(
    call: LossCall, logits: Any, labels: Any, counted: Any, class_weights: Any
) -> dict[str, Any]:
    """Return the losses of some tokens of a call, and what else its result depends on.

    Parameters
    ----------
    call
        The call, of which only the options are read.
    logits, labels, counted, class_weights
        (tokens, classes), (tokens,), (tokens,) and (classes,) or None.

    Returns
    -------
    dict
        (tokens,) arrays, 0 for tokens that do not count:

        - ``"loss"``: the loss. It includes the z-loss if both are reduced alike.
        - ``"weight"`` and ``"z_loss"``, for the mean with class weights: the weight of the target,
          and the z-loss if there is one.
        - ``"accuracy"``, if the call returns it.
    """
    lib, classes = backend(logits), logits.shape[1]
    xp, smoothing = lib.xp, call.label_smoothing
    logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
    logits = xp.where(counted[:, None], logits, xp.zeros_like(logits))
    if call.softcap is not None:
        logits = xp.tanh(logits / call.softcap) * call.softcap
    labels = xp.where(counted, labels, 0)
    # One-hot, as a gather compiles for one size only.
    index = xp.arange(classes, dtype=labels.dtype, device=lib.device(logits))
    one_hot = index == labels[:, None]
    target = xp.sum(xp.where(one_hot, logits, xp.zeros_like(logits)), axis=1)
    # Rounded, and so a constant to every library that differentiates.
    shift = xp.ceil(xp.max(logits, axis=1))
    log_sum = xp.log(xp.sum(xp.exp(logits - shift[:, None]), axis=1))
    loss = log_sum + (shift - target)
    one, is_class = xp.ones_like(loss), (labels >= 0) & (labels < classes)

    def mask(losses: Any) -> Any:
        return xp.where(counted, losses * xp.where(is_class, one, one * float("nan")), one * 0)

    results: dict[str, Any] = {}
    weights = class_weights
    if weights is not None:
        weights = xp.astype(weights, logits.dtype, copy=False)
        target_weight = xp.sum(xp.where(one_hot, weights, xp.zeros_like(logits)), axis=1)
        loss = target_weight * loss
        if call.reduction in MEANS:
            results["weight"] = xp.where(counted, target_weight, one * 0)
    if smoothing:
        # -log(softmax), relative to the largest logit, summed over all classes.
        differences = shift[:, None] - logits
        if weights is None:
            smooth = log_sum + xp.mean(differences, axis=1)
        else:
            smooth = log_sum * xp.sum(weights) + xp.sum(differences * weights, axis=1)
            smooth = smooth / classes
        loss = loss * (1 - smoothing) + smooth * smoothing
    if call.z_loss:
        z_loss = call.z_loss * (log_sum + shift) ** 2
        if "weight" in results:
            results["z_loss"] = mask(z_loss)
        else:
            loss = loss + z_loss
    if call.return_accuracy:
        leads = (logits < target[:, None]) | (
            (logits == target[:, None]) & (index >= labels[:, None])
        )
        is_correct = xp.all(leads, axis=1) & counted & is_class
        results["accuracy"] = xp.astype(is_correct, loss.dtype)
    return {"loss": mask(loss), **results}


@define_operation("cross_entropy", CrossEntropyCall)
def _cross_entropy(call: CrossEntropyCall) -> Any:
    arrays = call.values, call.labels, call.counted, call.class_weights
    return reduce_token_losses(call, token_losses(call, *arrays))


@define_operation("linear_cross_entropy", LinearCrossEntropyCall)
def _linear_cross_entropy(call: LinearCrossEntropyCall) -> Any:
    return reduce_token_losses(call, linear_token_losses(call))


def linear_token_losses(call: LinearCrossEntropyCall) -> dict[str, Any]:
    """Return the `token_losses` of all tokens of a call."""
    lib, (total, _), size = backend(call.values), call.values.shape, tokens_per_part(call)
    labels, counted, parameters, parts = call.labels, call.counted, call.parameters, []
    if total <= size:
        return losses_of_part(call, labels, counted, call.values, *parameters)
    for start in range(0, total, size):
        part = slice(start, min(start + size, total))
        f = lib.checkpoint(partial(losses_of_part, call, labels[part], counted[part]))
        parts.append(f(call.values[part, :], *parameters))
    return {name: lib.xp.concat([part[name] for part in parts], axis=0) for name in parts[0]}


def tokens_per_part(call: LinearCrossEntropyCall) -> int:
    """Return the number of tokens whose logits exist at a time."""
    (total, width), classes = call.values.shape, call.weight.shape[0]
    limit = call.max_logits or max(MAX_LOGITS, total * width, classes * width)
    tokens: int = limit // classes
    return max(1, tokens)


def losses_of_part(
    call: LinearCrossEntropyCall, labels: Any, counted: Any, x: Any, *parameters: Any
) -> dict[str, Any]:
    """Return the `token_losses` of hidden states x (tokens, width).

    They are 0 for tokens that do not count, whatever these hold. `parameters` are the parameters of
    the call.
    """
    xp, arrays = backend(x).xp, iter(parameters)
    logits = xp.where(counted[:, None], x, xp.zeros_like(x)) @ xp.matrix_transpose(next(arrays))
    logits = logits if call.bias is None else logits + next(arrays)
    if call.has_options:
        return token_losses(call, logits, labels, counted, next(arrays, None))
    targets = xp.where(counted, labels, call.ignore_index)
    plain = CrossEntropyCall(logits, targets, ignore_index=call.ignore_index, reduction="none")
    return {"loss": _cross_entropy.run_call(plain)}
