"""Cross-entropy of each token's logits against its right class, and the same fused with the product that makes the logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import accumulator, equal_rows, like, ragged, values_of
from ..checks import dense, floating, integer, integers
from ..dispatch import call_cache
from ..dispatch.registry import declare, run
from .segment import divide, segment_reduce

#: What comes of the losses of the tokens: one mean, one sum, a mean of each row, or the losses themselves.
REDUCTIONS = ("mean", "sum", "row_mean", "none")
LOGITS = 1 << 22  # that the standard path holds at a time, unless the inputs are larger


class Losses:
    """What both calls share: tokens `x` and their `targets`, ragged or dense.

    A provider gives what `reduction` makes of the losses, in the dtype that it adds up in: of all tokens a number, of each row
    (n,), of each token (total,). The loss of a token is 0 where `known` is False; NaN, with a gradient of NaN, where a known
    target is no class.
    """

    __slots__ = ()
    x: Any
    targets: Any
    ignore_index: int
    reduction: str

    @property
    def values(self) -> Any:
        """(total, size) `x`, dense."""
        return values_of(self.x)

    @property
    def labels(self) -> Any:
        """(total,) the targets, dense, int32 or int64."""
        return integers("targets", values_of(self.targets), self.values)

    @property
    def known(self) -> Any:
        """(total,) which tokens count: those of a row, with a target that is not ignored."""
        known = self.labels != self.ignore_index
        real = self.x.layout.real if isinstance(self.x, Array) else None
        return known if real is None else known & real


@dataclass(frozen=True, slots=True)
class CrossEntropyCall(Losses):
    """The losses of the logits `x`, values (total, classes), against `targets`, values (total,)."""

    x: Any
    targets: Any
    ignore_index: int = -100
    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check_tokens("logits", self)
        if self.values.shape[1] == 0:
            raise ValueError(
                f"logits: expected at least one class, got shape {tuple(self.x.shape)}"
            )
        _check_targets(self, self.values.shape[1])


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyCall(Losses):
    """The losses of the logits ``x @ weight.T + bias``, x with values (total, width), which should never exist all at once."""

    x: Any
    weight: Any
    targets: Any
    bias: Any = None
    ignore_index: int = -100
    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check_tokens("x", self)
        values, weight = self.values, self.weight
        dense("weight", weight, values)
        if weight.ndim != 2 or weight.shape[1] != values.shape[1] or weight.shape[0] == 0:
            raise ValueError(
                f"weight: expected shape (classes, width), at least one class and the last axis of x, {tuple(self.x.shape)}, "
                f"got {tuple(weight.shape)}"
            )
        if self.bias is not None:
            dense("bias", self.bias, values)
            if tuple(self.bias.shape) != (weight.shape[0],):
                raise ValueError(
                    f"bias: expected shape ({weight.shape[0]},), a number a class, got {tuple(self.bias.shape)}"
                )
        for name, found in (("weight", weight), ("bias", self.bias)):
            if found is not None and found.dtype != values.dtype:
                raise TypeError(
                    f"{name}: expected the dtype of x, {values.dtype}, got {found.dtype}; convert it with xp.astype"
                )
        _check_targets(self, weight.shape[0])

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The weight and, if there is one, the bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def _check_tokens(name: str, call: Losses) -> None:
    """Raise unless the tokens are floating point, (n, None, size) or (total, size)."""
    x, values = call.x, call.values
    backend(values, name)
    if values.ndim != 2 or (isinstance(x, Array) and x.ragged_dim != 0):
        raise ValueError(
            f"{name}: expected a ragged array (n, None, size) or a dense one (total, size), got {tuple(x.shape)}"
        )
    floating(name, values)


def _check_targets(call: Losses, classes: int) -> None:
    """Raise unless each token has a target that is a class, and the way to reduce the losses is known."""
    x, targets, values = call.x, call.targets, call.values
    lib = backend(values)
    if isinstance(x, Array):
        if ragged("targets", targets).ndim != 2:
            raise ValueError(
                f"targets: expected shape (n, None), a class a token, got {targets.shape}"
            )
        equal_rows("targets", x, targets)
    elif not is_array(targets) or tuple(targets.shape) != tuple(values.shape[:1]):
        came = (
            f"shape {tuple(targets.shape)}" if hasattr(targets, "shape") else type(targets).__name__
        )
        raise ValueError(
            f"targets: expected a dense array of shape {tuple(values.shape[:1])}, a class a token, got {came}"
        )
    integer("ignore_index", call.ignore_index)
    if call.reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {call.reduction!r}"
        )
    if call.reduction == "row_mean" and not isinstance(x, Array):
        raise ValueError(
            f"reduction: 'row_mean' needs rows, got a dense array of shape {tuple(x.shape)}"
        )
    rows = x.layout.host if isinstance(x, Array) else None
    seen = rows is not None or (not isinstance(x, Array) and not lib.compiling())
    host = lib.peek(call.labels) if seen else None
    if host is not None:
        host = host[: None if rows is None else rows[-1]]
        wrong = np.flatnonzero((host != call.ignore_index) & ((host < 0) | (host >= classes)))
        if wrong.size:
            raise ValueError(
                f"targets: expected 0 <= class < {classes}, or ignore_index, {call.ignore_index}, got {host[wrong[0]]} for token "
                f"{wrong[0]}"
            )


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    kernel: str | None = None,
) -> Any:
    """How badly the logits of each token predict its class: ``log(sum(exp(logits))) - logits[target]``, in nats.

    Parameters
    ----------
    logits
        (n, None, classes) ragged or (total, classes) dense floating-point array.
    targets
        (n, None) or (total,) integers, the class of each token, on the layout of the logits. A class that does not exist is an
        error where reading it is free; elsewhere the loss of the token and its gradient are NaN.
    ignore_index
        Tokens with this target do not count: their loss and their gradient are 0.
    reduction
        ``"mean"`` over all tokens that count, their ``"sum"``, ``"row_mean"``, the mean of each row, or ``"none"``, the loss of
        each token. A mean over no token is NaN, its gradient 0.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    dense array or Array
        A number; (n,) for ``"row_mean"``; like the targets for ``"none"``. float32, or float64 for float64: the loss of a batch
        in half precision would have three digits.

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
    return _shaped(
        logits,
        reduction,
        call_cache.run("cross_entropy", {"x": logits, "targets": targets}, options, kernel),
    )


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
    """`cross_entropy` of the logits ``x @ weight.T + bias``, a part of the tokens at a time: all logits never exist at once.

    With a vocabulary of 128,000 the logits take more memory than the model that makes them. Here they take no more than the
    inputs or 2**22 numbers, whichever is more, in the backward pass too, which computes them again. (A kernel may do that together
    with the forward pass, and hold some more.)

    Parameters
    ----------
    x
        (n, None, width) ragged or (total, width) dense floating-point array, the last hidden states.
    weight
        (classes, width) matrix with the dtype of `x`: the layout of ``torch.nn.Linear`` and of an embedding.
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
    >>> scree.linear_cross_entropy(x, np.zeros((4, 2)), targets).round(4)  # four classes, equally likely
    np.float64(1.3863)
    """
    call = LinearCrossEntropyCall(x, weight, targets, bias, ignore_index, reduction)
    return _shaped(x, reduction, run("linear_cross_entropy", call, kernel))


def _shaped(x: Any, reduction: str, found: Any) -> Any:
    """What a provider gave, as rows where it is a loss of each token."""
    return like(x, found) if reduction == "none" else found


def given(call: Losses, losses: Any) -> Any:
    """What a provider gives, of the losses of the tokens."""
    if call.reduction == "none":
        return losses
    xp, known = backend(call.values).xp, call.known
    if call.reduction == "row_mean":
        rows = call.x.layout
        return divide(
            xp,
            segment_reduce("sum", losses, rows),
            segment_reduce("sum", xp.astype(known, losses.dtype), rows),
        )
    total = xp.sum(losses)
    if call.reduction == "sum":
        return total
    return divide(xp, total, xp.astype(xp.sum(xp.astype(known, xp.int32)), total.dtype))


@declare("cross_entropy", CrossEntropyCall)
def _cross_entropy(call: CrossEntropyCall) -> Any:
    lib, known, classes = backend(call.values), call.known, call.values.shape[1]
    xp = lib.xp
    logits = xp.astype(call.values, accumulator(xp, call.values.dtype), copy=False)
    logits = xp.where(known[:, None], logits, xp.zeros_like(logits))
    labels = xp.where(known, call.labels, 0)
    target = xp.arange(classes, dtype=labels.dtype, device=lib.device(logits)) == labels[:, None]
    right = xp.sum(
        xp.where(target, logits, xp.zeros_like(logits)), axis=1
    )  # a gather compiles for one size only
    top = xp.ceil(
        xp.max(logits, axis=1)
    )  # rounded, and so a constant to every library that differentiates
    loss = xp.log(xp.sum(xp.exp(logits - top[:, None]), axis=1)) + (top - right)
    one, exists = xp.ones_like(loss), (labels >= 0) & (labels < classes)
    return given(call, xp.where(known, loss * xp.where(exists, one, one * float("nan")), one * 0))


@declare("linear_cross_entropy", LinearCrossEntropyCall)
def _linear_cross_entropy(call: LinearCrossEntropyCall) -> Any:
    lib, (total, _), size = backend(call.values), call.values.shape, part_size(call)
    labels, known, losses = call.labels, call.known, []
    if total <= size:
        found = losses_of_part(call.ignore_index, labels, known, call.values, *call.parameters)
    else:
        for at in range(0, total, size):
            some = slice(at, min(at + size, total))
            part = lib.checkpoint(
                partial(losses_of_part, call.ignore_index, labels[some], known[some])
            )
            losses.append(part(call.values[some, :], *call.parameters))
        found = lib.xp.concat(losses, axis=0)
    return given(call, found)


def part_size(call: LinearCrossEntropyCall) -> int:
    """How many tokens' logits exist at a time."""
    (total, width), classes = call.values.shape, call.weight.shape[0]
    return max(1, max(LOGITS, total * width, classes * width) // classes)  # type: ignore[no-any-return]


def losses_of_part(ignored: int, labels: Any, known: Any, x: Any, weight: Any, *bias: Any) -> Any:
    """(tokens,) of hidden states x (tokens, width); those that are not known come out as 0, whatever they hold."""
    xp = backend(x).xp
    logits = xp.where(known[:, None], x, xp.zeros_like(x)) @ xp.matrix_transpose(weight)
    targets = xp.where(known, labels, ignored)
    return run(
        "cross_entropy",
        CrossEntropyCall(logits + bias[0] if bias else logits, targets, ignored, "none"),
    )
