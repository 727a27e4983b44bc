"""Operators for torch.compile, dispatch modes and tensor subclasses: one specification per operation,
registered in one place.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

#: Every operator that `define_operator` made.
OPERATORS: list[Any] = []
_PLAIN_TYPES = torch.Tensor, torch.nn.Parameter
_lowered = 0  # the operators that Inductor knows: this many at the front of OPERATORS


def define_operator(
    name: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register an operator that compilers and dispatch modes see as one call.

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
    flops
        ``flops(*args)`` returns the number of floating-point operations of a call for
        `torch.utils.flop_counter.FlopCounterMode`. None if the operator has no matrix product.
    mutates
        Names of the arguments that `forward` writes in place.
    """
    operator = torch.library.custom_op(f"scree_triton::{name}", forward, mutates_args=mutates)

    @wraps(fake)
    def fake_and_lower(*args: Any) -> Any:
        # Inductor traces every operator in this way before it compiles the trace.
        if "torch._inductor.compile_fx" in sys.modules:
            register_lowerings()
        return fake(*args)

    operator.register_fake(fake_and_lower)
    if backward is not None:
        count = len(inspect.signature(forward).parameters)

        def differentiate(ctx: Any, *grads: Any) -> Any:
            gradients = backward(ctx, *grads)
            return *gradients, *(None,) * (count - len(gradients))

        operator.register_autograd(differentiate, setup_context=save)
    if flops is not None:
        # The counter also passes the result as `out_val`.
        register_flop_formula(getattr(torch.ops.scree_triton, name), get_raw=True)(
            lambda *args, out_val=None: flops(*args)
        )
    OPERATORS.append(operator)
    return operator


def register_lowerings() -> None:
    """Register every operator with Inductor as a call that it does not look into.

    Inductor would do the same when it meets an operator for the first time, but up to PyTorch 2.12
    it first formats the arguments of that call as text. The text doubles with every residual
    connection before the call, so the compile time of a model would grow exponentially.
    """
    global _lowered
    if _lowered == len(OPERATORS):
        return
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for operator in OPERATORS[_lowered:]:
        overload = operator._opoverload
        if overload not in lowerings:
            tag = get_layout_constraint_tag(overload, with_default=True)
            make_fallback(overload, layout_constraint=tag_to_layout_constraint(tag), warn=False)
    _lowered = len(OPERATORS)


def support_dtensor() -> None:
    """Register the sharding strategies of the operators, if the program has loaded DTensor."""
    if "torch.distributed.tensor" in sys.modules:
        from .sharding import register_shardings

        # DTensor's interface for strategies is private. Without it, DTensor itself raises for the
        # operators, and programs without DTensor still run.
        with suppress(ImportError, AttributeError):
            register_shardings(OPERATORS)


def uses_operators(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call must go through the operators instead of launching kernels directly.

    Compilers, dispatch modes (FLOP counters, selective checkpointing, fake tensors) and tensor
    subclasses see operators only.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    is_plain = all(x is None or type(x) in _PLAIN_TYPES for x in tensors)
    if not is_plain:
        support_dtensor()
    return not is_plain
