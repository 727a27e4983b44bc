"""Standard implementations in place of kernels that do not compile, after a kernel was selected.

If the forward of an eager call raises `KernelUnavailableError`, the dispatch of scree selects
another kernel. A gradient runs later, and an operator runs in a compiled program or under a dispatch
mode. Both fall back here, with one warning and a line in `scree.explain`. Gradients that are
differentiated again use the same implementations, because autograd does not record a kernel.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from scree.dispatch.operation import KernelUnavailableError

#: Module of the kernels, and dtype or None -> why some of its kernels do not run.
_UNAVAILABLE: dict[tuple[str, torch.dtype | None], list[str]] = {}


class _State(threading.local):
    records_gradients = False


_state = _State()


def recorded_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backward` on the standard implementations, so that autograd records it."""

    def run(*args: Any) -> Any:
        before, _state.records_gradients = _state.records_gradients, True
        try:
            return backward(*args)
        finally:
            _state.records_gradients = before

    return run


def falls_back_to(standard: Callable[..., Any], module: str | None = None) -> Callable[..., Any]:
    """Return a decorator for a function that launches kernels.

    `standard` takes the same arguments and computes the same result without these kernels. It runs
    where one of them does not compile. `module` is the module that offers the operations to scree;
    by default it is the module of `standard`.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def run_or_fall_back(*args: Any) -> Any:
            if _state.records_gradients:
                return standard(*args)
            try:
                return run(*args)
            except KernelUnavailableError as error:
                return run_standard(standard, args, error, module or standard.__module__)

        return run_or_fall_back

    return decorate


def run_standard(
    standard: Callable[..., Any], args: Sequence[Any], error: KernelUnavailableError, module: str
) -> Any:
    """Return the results of `standard`, see `falls_back_to`, and record why a kernel does not run."""
    floats = (x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point())
    dtypes = {x.dtype for x in floats} or {None}  # None: only offsets or indices
    record_replacement(module, dtypes, str(error))
    # Compiled programs expect the strides that the fake function of an operator returns.
    return tree_map_only(torch.Tensor, torch.Tensor.contiguous, standard(*args))


def record_replacement(module: str, dtypes: set[torch.dtype | None], reason: str) -> None:
    """Warn once that a kernel of a module does not run for these dtypes, and keep the reason."""
    note = f"another implementation replaces a kernel: {reason}"
    notes = [_UNAVAILABLE.setdefault((module, dtype), []) for dtype in dtypes]
    if all(note in recorded for recorded in notes):
        return
    for recorded in notes:
        recorded.append(note)
    warnings.warn(f"{module}: {note}", RuntimeWarning, stacklevel=3)


def fallback_note(module: str, dtype: torch.dtype) -> str | None:
    """Return why kernels of a module do not run for arrays of a dtype; None if all run."""
    notes = [note for key in (dtype, None) for note in _UNAVAILABLE.get((module, key), ())]
    return "; ".join(dict.fromkeys(notes)) or None


@cache
def _initial_dispatch_keys() -> tuple[Any, Any]:
    """Return the dispatch keys that a new thread includes and excludes."""

    def keys() -> tuple[Any, Any]:
        return (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(keys).result()


def gradients(
    run: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...], grads: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `inputs` from the gradients of the results of ``run(*inputs)``.

    The gradient of None is None. Autograd records the gradients for `recorded_gradients`.
    """
    if _state.records_gradients:
        # Aliases, because an array may be several inputs.
        aliases = [
            x if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            for x in inputs
        ]
        return _differentiate(run, aliases, grads, create_graph=True)
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    # Inside an operator the dispatcher skips autograd. A checkpoint around the call counts the
    # tensors that autograd saves, and must not see these.
    keys, hooks = _initial_dispatch_keys(), (lambda x: x, lambda x: x)
    with (
        torch._C._ForceDispatchKeyGuard(*keys),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(*hooks),
    ):
        return _differentiate(run, leaves, grads)


def _differentiate(
    run: Callable[..., Any], inputs: list[torch.Tensor | None], grads: Any, **options: Any
) -> tuple[torch.Tensor | None, ...]:
    present, results = [x for x in inputs if x is not None], run(*inputs)
    input_grads = iter(
        torch.autograd.grad(results, present, grads, materialize_grads=True, **options)
    )
    return tuple(None if x is None else next(input_grads) for x in inputs)
