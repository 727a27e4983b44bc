"""Gradients in eager code: one specification per operation, from which an autograd function is
made.
"""

from collections.abc import Callable
from typing import Any

import torch


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd must record an operation on the tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class _Function(torch.autograd.Function):
    """Autograd function with a shorter `apply` where no transform of `torch.func` is active."""

    def __init_subclass__(cls) -> None:
        cls._short = super(torch.autograd.Function, cls).apply

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Return the results of `forward`, recorded by autograd."""
        return (super().apply if torch._C._are_functorch_transforms_active() else cls._short)(*args)


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `backward` as `torch.autograd.function.once_differentiable`, at a cost only where it
    matters.

    PyTorch's decorator is slow; `create_graph=True` is the only case that needs it.
    """
    refusing = torch.autograd.function.once_differentiable(backward)
    return lambda ctx, *grads: (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)


def differentiable(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    twice_differentiable: bool = False,
) -> Callable[..., Any]:
    """Return `forward` as a function that autograd records.

    Parameters
    ----------
    name
        The name that autograd shows.
    forward
        ``forward(ctx, *args)`` computes the results and keeps on ``ctx`` what `backward` needs. It
        calls ``ctx.set_materialize_grads(False)`` if `backward` accepts None as a gradient.
    backward
        ``backward(ctx, *grads)`` returns the gradient of every argument.
    twice_differentiable
        Whether `backward` is itself made of functions that autograd records. Otherwise a second
        derivative raises.
    """
    methods = dict(
        forward=staticmethod(forward),
        backward=staticmethod(backward if twice_differentiable else _once_differentiable(backward)),
    )
    return type(name, (_Function,), methods).apply  # type: ignore[attr-defined, no-any-return]
