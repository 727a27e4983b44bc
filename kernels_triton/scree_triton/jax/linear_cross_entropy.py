"""Linear cross-entropy for JAX, with the gradients in the forward pass, part by part of the tokens.

The standard path computes the logits again in the backward pass. Here a loop of XLA computes the
logits of a part, their losses and gradients by the kernels of `cross_entropy`, and the products with
these gradients. The backward pass multiplies the sums by the gradient of the loss.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import scree
from scree.ops.cross_entropy import LinearCrossEntropyCall
from scree.ops.segment import safe_divide

from .devices import rejects_arrays, rejects_partitioning
from .operations import vary_alike

#: The fewest tokens per part without `max_logits`, so that the products are efficient.
MIN_TOKENS = 1024
#: The most parts without `max_logits`, unless a part would have more logits than `MAX_LOGITS`.
MAX_PARTS = 12
MAX_LOGITS = 1 << 28
#: Products with other sizes are slower. XLA pads their operands and slices their results.
ALIGNED_SIZE = 8
#: Products with many classes are faster if their number is a multiple of this, not only of 8.
ALIGNED_CLASSES = 64
#: Fewer classes are padded to a multiple of 8 only: more padding could take longer than it saves.
MANY_CLASSES = 1024
DTYPES = ("float16", "bfloat16", "float32")


class Static(NamedTuple):
    """The static part of a call."""

    part_size: int
    """The tokens per part; the last part is padded."""
    classes: int
    ignore_index: int


def rejects(call: LinearCrossEntropyCall) -> str | None:
    """Return why the loop cannot serve `call`, from host metadata only; None if it can."""
    arrays = call.values, *call.parameters, call.labels
    if reason := rejects_arrays(*arrays) or rejects_partitioning(*arrays):
        return reason
    if call.has_options or call.reduction not in ("mean", "sum"):
        return (
            "the gradients in the forward pass need a mean or sum over all tokens, without options of "
            "the loss"
        )
    if str(call.values.dtype) not in DTYPES:
        return (
            f"the gradients in the forward pass take {', '.join(DTYPES)}, not {call.values.dtype}"
        )
    if 0 in call.values.shape:
        return "the Triton kernels for JAX need at least one token"
    return None


def linear_cross_entropy(call: LinearCrossEntropyCall) -> Any:
    """Compute a call for which `rejects` returns None."""
    counted = call.counted
    classes = call.weight.shape[0]
    # No class of the padding may be a target. The kernels take a negative target as none of the classes.
    no_class = -1 if call.ignore_index != -1 else -2
    targets = jnp.where(call.labels < classes, call.labels, no_class)
    targets = jnp.where(counted, targets, call.ignore_index).astype(jnp.int32)
    # Tokens that do not count may hold anything.
    x = jnp.where(counted[:, None], call.values, 0)
    static = Static(_part_size(call), classes, call.ignore_index)
    x, targets, weight, *biases = vary_alike([x, targets, *call.parameters])
    loss = _sum_of_losses(static, x, weight, biases[0] if biases else None, targets)
    if call.reduction == "sum":
        return loss
    return safe_divide(jnp, loss, jnp.sum(counted, dtype=jnp.int32).astype(loss.dtype))


def _aligned_classes(weight: Any) -> int:
    """Return the classes of the products, with the padding of 16-bit dtypes."""
    classes = weight.shape[0]
    if weight.dtype.itemsize != 2:
        return classes  # type: ignore[no-any-return]
    return classes + -classes % (ALIGNED_CLASSES if classes >= MANY_CLASSES else ALIGNED_SIZE)


def _part_size(call: LinearCrossEntropyCall) -> int:
    """Return the tokens per part."""
    total, classes = call.values.shape[0], _aligned_classes(call.weight)
    if call.max_logits is None:
        tokens = min(max(MIN_TOKENS, -(-total // MAX_PARTS)), MAX_LOGITS // classes)
    else:
        tokens = call.max_logits // classes
    parts = -(-total // max(1, tokens))
    size = -(-total // parts)
    # Only a part of one token may exceed the caller's limit.
    aligned = size + -size % ALIGNED_SIZE
    return size if call.max_logits is not None and aligned > tokens else aligned


def _split(static: Static, x: Any, targets: Any) -> tuple[Any, Any]:
    """Return the parts of tokens and of targets; the last part is padded with ignored targets."""
    size = static.part_size
    padding = -x.shape[0] % size
    x = jnp.pad(x, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding), constant_values=static.ignore_index)
    return x.reshape(-1, size, x.shape[1]), targets.reshape(-1, size)


def _pad_classes(weight: Any, bias: Any) -> tuple[Any, Any]:
    """Return weight and bias with an aligned number of classes; their padding is 0."""
    padding = _aligned_classes(weight) - weight.shape[0]
    weight = jnp.pad(weight, ((0, padding), (0, 0)))
    return weight, None if bias is None else jnp.pad(bias, (0, padding))


def _loss_of_part(static: Static, x: Any, weight: Any, bias: Any, targets: Any) -> tuple[Any, Any]:
    """Return the sum of the losses, and a function that returns the gradient of the logits.

    The classes of the padding have logits of -inf and a gradient of 0.
    """
    logits = x @ weight.T
    if bias is not None:
        # XLA adds the bias within the product.
        logits = logits + bias
    if padding := weight.shape[0] - static.classes:
        # XLA writes only the padding. A slice of the logits would be a copy, and so would its gradient.
        no_logits = jnp.full((x.shape[0], padding), -jnp.inf, logits.dtype)
        no_logits, _ = vary_alike([no_logits, logits])
        logits = jax.lax.dynamic_update_slice(logits, no_logits, (0, static.classes))
    loss, pull = jax.vjp(
        lambda logits: scree.cross_entropy(
            logits, targets, ignore_index=static.ignore_index, reduction="sum"
        ),
        logits,
    )
    return loss, lambda: pull(jnp.ones_like(loss))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_losses(static: Static, x: Any, weight: Any, bias: Any, targets: Any) -> Any:
    weight, bias = _pad_classes(weight, bias)
    losses = jax.lax.map(
        lambda part: _loss_of_part(static, part[0], weight, bias, part[1])[0],
        _split(static, x, targets),
    )
    return jnp.sum(losses)


def _forward(
    static: Static, x: Any, weight: Any, bias: Any, targets: Any
) -> tuple[Any, tuple[Any, ...]]:
    has_bias = bias is not None

    def run_part(sums: Any, part: Any) -> tuple[Any, tuple[Any, Any]]:
        weight_grad, bias_grad = sums
        tokens, labels = part
        loss, gradient = _loss_of_part(static, tokens, weight, bias, labels)
        slope = gradient()
        weight_grad += jnp.matmul(slope.T, tokens, preferred_element_type=jnp.float32)
        if has_bias:
            bias_grad += jnp.sum(slope, 0, dtype=jnp.float32)
        return (weight_grad, bias_grad), (loss, slope @ weight)

    weight, bias = _pad_classes(weight, bias)
    zeros = jnp.zeros(weight.shape, jnp.float32)
    zeros, _ = vary_alike([zeros, weight])
    parts = _split(static, x, targets)
    sums, (losses, x_grad) = jax.lax.scan(
        run_part, (zeros, zeros[:, 0] if has_bias else None), parts
    )
    x_grad = x_grad.reshape(-1, x.shape[1])[: x.shape[0]]
    weight_grad, bias_grad = jax.tree.map(lambda g: g[: static.classes], sums)
    # The last residual has the dtype of the weight, because the weight itself must not be kept.
    return jnp.sum(losses), (x_grad, weight_grad, bias_grad, jnp.zeros((), weight.dtype))


def _backward(static: Static, residuals: tuple[Any, ...], grad: Any) -> tuple[Any, ...]:
    *grads, example = residuals
    scaled = jax.tree.map(
        lambda g: (g.astype(jnp.float32) * grad).astype(example.dtype), tuple(grads)
    )
    return *scaled, None


_sum_of_losses.defvjp(_forward, _backward)
