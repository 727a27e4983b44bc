"""Standard implementations in place of kernels that do not compile, after a kernel was selected.

If the forward of an eager call raises `KernelUnavailableError`, the dispatch of scree selects another
kernel. A gradient runs later, and an operator runs in a compiled program or under a dispatch mode.
Both fall back here: with one warning, and a line in `scree.explain`.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from scree.dispatch.operation import KernelUnavailableError

#: Module of the kernels and dtype -> why one of its kernels does not run.
_UNAVAILABLE: dict[tuple[str, torch.dtype], str] = {}


def falls_back_to(standard: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator for a function that launches kernels.

    `standard` takes the same arguments. It computes the same result without these kernels and runs
    where one of them does not compile.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def run_or_fall_back(*args: Any) -> Any:
            try:
                return run(*args)
            except KernelUnavailableError as error:
                _record(standard.__module__, args, str(error))
            # Compiled programs expect the strides that the fake function of an operator returns.
            return tree_map_only(torch.Tensor, torch.Tensor.contiguous, standard(*args))

        return run_or_fall_back

    return decorate


def _record(module: str, args: tuple[Any, ...], reason: str) -> None:
    note = f"gradients and compiled calls run without a kernel: {reason}"
    dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if any(_UNAVAILABLE.get((module, dtype)) != note for dtype in dtypes):
        warnings.warn(f"{module}: {note}", RuntimeWarning, stacklevel=3)
    _UNAVAILABLE.update({(module, dtype): note for dtype in dtypes})


def fallback_note(module: str, dtype: torch.dtype) -> str | None:
    """Return why kernels of a module do not run for arrays of a dtype; None if all run."""
    return _UNAVAILABLE.get((module, dtype))


def gradients(
    run: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...], grads: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `inputs` from the gradients of the results of ``run(*inputs)``.

    The gradient of None is None. Unlike `torch.autograd.grad`, `torch.func.vjp` also records inside
    an operator, where autograd is off.
    """
    indices = [i for i, x in enumerate(inputs) if x is not None]

    def run_on(*tensors: torch.Tensor) -> Any:
        arguments: list[torch.Tensor | None] = [None] * len(inputs)
        for i, tensor in zip(indices, tensors):
            arguments[i] = tensor
        return run(*arguments)

    _, pull_back = torch.func.vjp(run_on, *(inputs[i] for i in indices))
    results = dict(zip(indices, pull_back(grads)))
    return tuple(results.get(i) for i in range(len(inputs)))
