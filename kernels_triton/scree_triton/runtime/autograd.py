"""Gradients in eager code: one specification per operation, from which an autograd function is
made.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .fallback import recorded_gradients


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd must record an operation on the tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


_SAVED = object()  # in place of a tensor that autograd keeps


def save_args(ctx: Any, args: Sequence[Any]) -> None:
    """Keep arguments for the backward pass.

    Autograd keeps the tensors, and raises if one of them was changed in place. It cannot keep
    tensors of `torch.inference_mode`; `ctx` keeps those.
    """
    tensors, ctx.args = [], []
    for x in args:
        if isinstance(x, torch.Tensor) and not x.is_inference():
            tensors.append(x)
            x = _SAVED
        ctx.args.append(x)
    ctx.has_saved = bool(tensors)
    if tensors:
        ctx.save_for_backward(*tensors)


def saved_args(ctx: Any) -> list[Any]:
    """Return the arguments that `save_args` kept."""
    if not ctx.has_saved:
        return ctx.args
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if x is _SAVED else x for x in ctx.args]


def _backward_by_grad_mode(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backward` with another function for ``create_graph=True``, which enables gradients.

    Without it, no wrapper costs host time.
    """
    differentiable_backward = recorded_gradients(backward)

    def run(ctx: Any, *grads: Any) -> Any:
        return (differentiable_backward if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def differentiable(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    second_derivative: Literal["own", "standard"] = "standard",
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
    second_derivative
        "own" if `backward` is itself made of functions that autograd records, or calls
        `once_differentiable` itself. "standard" if all its kernels fall back (`falls_back_to`): then
        the standard implementations compute a gradient that is differentiated again.
    """
    if second_derivative != "own":
        backward = _backward_by_grad_mode(backward)
    methods = dict(forward=staticmethod(forward), backward=staticmethod(backward))
    function = type(name, (torch.autograd.Function,), methods)
    # `_backward_cls`, the class of the graph's nodes, is private. Its `apply` is a Python function that
    # looks up `backward`. Without this function the backward pass of one call takes 2% less time.
    if (node := getattr(function, "_backward_cls", None)) is not None:
        node.apply = backward
    # The part of `apply` in C; the part in Python before it serves the transforms of `torch.func`.
    apply, apply_in_c = function.apply, super(torch.autograd.Function, function).apply
    is_transformed = torch._C._are_functorch_transforms_active

    def run(*args: Any) -> Any:
        return apply(*args) if is_transformed() else apply_in_c(*args)

    # Callers whose host time matters call this and save one Python function per call.
    run.function, run.apply_in_c = function, apply_in_c
    return run
