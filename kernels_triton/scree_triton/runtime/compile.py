"""Operators for torch.compile: one specification per operation, registered in one place."""

import inspect
from collections.abc import Callable
from typing import Any

import torch


def define_operator(
    name: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register an operator that a compiler sees as one call.

    Parameters
    ----------
    name
        The name of the operator in the library ``scree_triton``.
    forward
        The computation. Its annotations are the schema of the operator.
    fake
        The same function on tensors without data; it allocates outputs of the right shape and
        dtype.
    save
        ``save(ctx, inputs, output)`` keeps on ``ctx`` what `backward` needs.
    backward
        ``backward(ctx, *grads)`` returns the gradients of the leading arguments; the remaining
        arguments have none. It calls operators only, so that a compiler can trace it.
    """
    operator = torch.library.custom_op(f"scree_triton::{name}", forward, mutates_args=())
    operator.register_fake(fake)
    if backward is not None:
        count = len(inspect.signature(forward).parameters)

        def differentiate(ctx: Any, *grads: Any) -> Any:
            gradients = backward(ctx, *grads)
            return *gradients, *(None,) * (count - len(gradients))

        operator.register_autograd(differentiate, setup_context=save)
    return operator
