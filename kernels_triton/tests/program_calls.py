"""Every operation with a kernel, as functions of the same few tensors, for tests of whole programs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import scree

#: Rows of every size class: empty, one token, below and above a block, a long one.
LENGTHS = (5, 130, 0, 64, 300, 1, 3)
WIDTH, HEADS, DIM, CLASSES = 64, 4, 16, 50


class Inputs(NamedTuple):
    """Leaves of a program."""

    offsets: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    classes: torch.Tensor

    def array(self, values: torch.Tensor) -> Any:
        """Return a ragged array on a layout of its own."""
        return scree.Array(values, self.offsets, max_length=max(LENGTHS))


def make_inputs(
    device: Any,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> Inputs:
    """Return the same leaves on any device."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    x = torch.randn((total, WIDTH), generator=generator)
    weight = torch.randn((WIDTH, WIDTH), generator=generator) / 8
    classes = torch.randint(0, CLASSES, (total,), generator=generator)
    offsets = torch.tensor(np.r_[0, np.cumsum(lengths)], dtype=torch.int32)
    return Inputs(
        offsets.to(device),
        x.to(device, dtype).requires_grad_(),
        weight.to(device, dtype).requires_grad_(),
        classes.to(device),
    )


def _heads(x: Any) -> Any:
    return x.with_values(x.values.reshape(-1, HEADS, DIM))


def _attention(x: Any, weight: torch.Tensor, classes: torch.Tensor, **options: Any) -> torch.Tensor:
    xp, y = scree.namespace(x), _heads(x)
    return xp.ragged.attention(y, y, y, **options).values


def _linear_cross_entropy(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    labels = x.with_values(classes)
    return scree.namespace(x).ragged.linear_cross_entropy(x, weight[:CLASSES], labels)


def _cross_entropy(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return scree.namespace(x).ragged.cross_entropy(x, x.with_values(classes))


def _loss_options(classes: int, like: torch.Tensor) -> dict[str, Any]:
    weights = torch.linspace(0.5, 1.5, classes, device=like.device)
    options = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01, "return_accuracy": True}
    return {"class_weights": weights, **options}


def _linear_cross_entropy_options(
    x: Any, weight: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    labels, options = x.with_values(classes), _loss_options(CLASSES, weight)
    loss, accuracy = scree.namespace(x).ragged.linear_cross_entropy(
        x, weight[:CLASSES], labels, max_logits=1 << 20, **options
    )
    return loss + accuracy


def _cross_entropy_options(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    options = _loss_options(x.shape[-1], weight)
    loss, accuracy = scree.namespace(x).ragged.cross_entropy(x, x.with_values(classes), **options)
    return loss + accuracy


def _grouped(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return (x @ weight.expand(len(x), WIDTH, WIDTH)).values


def _cache(x: Any) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return the tokens as pages of one token, their page table and the numbers of tokens."""
    pages = x.values.detach().reshape(-1, 1, HEADS, DIM)
    numbers = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
    return pages, x.with_values(numbers), torch.diff(x.offsets)


def _paged_attention(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    (pages, table, lengths), q = _cache(x), _heads(x.with_values(x.values.detach()))
    xp = scree.namespace(x)
    return xp.ragged.paged_attention(q, pages, pages, table, lengths, window=90).values


def _append_paged(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    (pages, table, lengths), k = _cache(x), _heads(x.with_values(x.values.detach()))
    caches, xp = (torch.zeros_like(pages), torch.zeros_like(pages)), scree.namespace(x)
    rope = {"rotary_dim": DIM // 2, "scaling": {"rope_type": "linear", "factor": 2.0}}
    k_pages, v_pages, q = xp.ragged.append_paged(*caches, k, k, table, lengths, q=k, rope=rope)
    return k_pages + v_pages + q.values[:, None]


def _rope_with_tables(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    numbers = weight.detach().reshape(-1)[: 2 * max(LENGTHS) * (DIM // 4)]
    cos, sin = numbers.reshape(2, max(LENGTHS), DIM // 4)
    return scree.namespace(x).ragged.rope(_heads(x), cos=cos, sin=sin).values


def _rope_with_frequencies(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return scree.namespace(x).ragged.rope(_heads(x), inv_freq=weight.detach()[0, :4]).values


def _of(function: Callable[[Any, Any], Any]) -> Callable[..., torch.Tensor]:
    """Return the dense result of ``function(xp, x)``."""

    def call(x: Any, weight: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        result = function(scree.namespace(x), x)
        return result.values if isinstance(result, scree.Array) else result

    return call


#: Name -> function of a ragged array (total, WIDTH), a weight and classes. Every result has the dtype
#: of the values, except those of `NOT_DIFFERENTIABLE`.
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "attention": lambda *args: _attention(*args, causal=True),
    "attention_window": lambda *args: _attention(*args, window=(9, 3)),
    "rms_norm": lambda x, w, c: scree.namespace(x).ragged.rms_norm(x, w[0]).values,
    "layer_norm": lambda x, w, c: scree.namespace(x).ragged.layer_norm(x, w[0], w[1]).values,
    "rope": _of(lambda xp, x: xp.ragged.rope(_heads(x))),
    "rope_with_tables": _rope_with_tables,
    "rope_with_frequencies": _rope_with_frequencies,
    "swiglu": _of(lambda xp, x: xp.ragged.swiglu(x)),
    "softmax": _of(lambda xp, x: xp.ragged.softmax(x)),
    "log_softmax": _of(lambda xp, x: xp.ragged.log_softmax(x)),
    "logsumexp": _of(lambda xp, x: xp.ragged.logsumexp(x)),
    "sum": _of(lambda xp, x: xp.sum(x, axis=1)),
    "mean": _of(lambda xp, x: xp.mean(x, axis=1)),
    "max": _of(lambda xp, x: xp.max(x, axis=1)),
    "var": _of(lambda xp, x: xp.var(x, axis=1)),
    "cumulative_sum": _of(lambda xp, x: xp.cumulative_sum(x, axis=1)),
    "sort": _of(lambda xp, x: xp.sort(x, axis=1)),
    "flip": _of(lambda xp, x: xp.flip(x, axis=1)),
    "concat": _of(lambda xp, x: xp.concat([x, x + 1], axis=1)),
    "tail_slice": _of(lambda xp, x: x[:, 1:]),
    "to_padded": _of(lambda xp, x: scree.to_padded(x, length=max(LENGTHS))[0]),
    "product": lambda x, w, c: (x @ w).values,
    "grouped_product": _grouped,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "cross_entropy_options": _cross_entropy_options,
    "linear_cross_entropy_options": _linear_cross_entropy_options,
    "argmax": _of(lambda xp, x: xp.argmax(x, axis=1)),
    "paged_attention": _paged_attention,
    "append_paged": _append_paged,
}
NOT_DIFFERENTIABLE = ("argmax", "paged_attention", "append_paged")
#: Calls whose result has a size that depends on the offsets.
READS_OFFSETS = ("tail_slice",)


def run(name: str, inputs: Inputs) -> list[torch.Tensor]:
    """Return the result of a call and its gradients with respect to x and the weight."""
    out = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
    if name in NOT_DIFFERENTIABLE:
        return [out]
    finite = out.float().nan_to_num(0.0, 0.0, 0.0)
    grads = torch.autograd.grad(finite.square().sum(), inputs[1:3], allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]
