"""`explain`: which kernel a call selects, and why the others reject it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from . import ragged
from .array import Array
from .backends import is_array
from .dispatch.operation import OBSERVERS, OPERATIONS
from .functions import KINDS
from .namespace import namespace


@dataclass(frozen=True, slots=True)
class Explanation:
    """The kernel that a call selects.

    Attributes
    ----------
    operation
        The name given to `explain`.
    provider
        The provider of the kernel, or the library's name where its own function computes the
        result.
    rejected
        Provider -> reason, for the kernels that were asked before.
    """

    operation: str
    provider: str
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.operation}: runs on {self.provider!r}"]
        return "\n".join(
            lines + [f"  {name!r} rejects: {reason}" for name, reason in self.rejected.items()]
        )


class _Selected(BaseException):
    """Ends a call after its kernel was selected; not an `Exception`, which a function might catch."""


def explain(name: str, *args: Any, **kwargs: Any) -> Explanation:
    """Return which kernel a function would run on these arguments, and why others would not.

    The function itself runs up to the selection of its kernel, so `explain` accepts exactly what
    the function accepts. Where a function needs several operations, the first one is explained.

    Parameters
    ----------
    name
        A function of ``xp.ragged`` or of the standard, for instance ``"attention"`` or ``"sum"``,
        or an operation that `register_kernel` knows.
    *args, **kwargs
        The function's arguments; for an operation, the fields of its call record.

    Returns
    -------
    Explanation
        Prints one line for the provider that runs and one for each that rejects.

    Raises
    ------
    TypeError, ValueError
        What the function raises for these arguments, or if there is no such function.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.ones((3, 4)), [1, 2])
    >>> scree.explain("rms_norm", arr).provider
    'standard'
    >>> scree.explain("sum", arr, axis=1).provider
    'reduceat'
    """
    function = _function(name, [*args, *kwargs.values()])
    selected: list[tuple[str, dict[str, str]]] = []

    def observe(operation: str, provider: str, rejected: dict[str, str]) -> None:
        selected.append((provider, rejected))
        raise _Selected

    thread = get_ident()
    OBSERVERS[thread] = observe
    try:
        function(*args, **kwargs)
    except _Selected:
        return Explanation(name, *selected[0])
    finally:
        del OBSERVERS[thread]
    library = namespace(*filter(_is_any_array, _leaves([*args, *kwargs.values()])))
    return Explanation(name, library.__name__.rpartition(".")[2], {})


def _function(name: Any, args: list[Any]) -> Callable[..., Any]:
    if not isinstance(name, str):
        raise ValueError(f"name: expected the name of a function, got {name!r}")
    if name in ragged.__all__:
        return getattr(ragged, name)  # type: ignore[no-any-return]
    if name in KINDS:
        return getattr(namespace(*filter(_is_any_array, _leaves(args))), name)  # type: ignore[no-any-return]
    if name in OPERATIONS:
        operation = OPERATIONS[name]

        def run(*args: Any, kernel: str | None = None, **kwargs: Any) -> Any:
            return operation.run_call(operation.record(*args, **kwargs), kernel)

        return run
    names = sorted({*ragged.__all__, *KINDS, *OPERATIONS})
    raise ValueError(f"name: expected one of {', '.join(names)}, got {name!r}")


def _leaves(args: list[Any]) -> list[Any]:
    """The arguments, with lists and tuples of them flattened."""
    return [
        x for arg in args for x in (_leaves([*arg]) if isinstance(arg, list | tuple) else [arg])
    ]


def _is_any_array(x: Any) -> bool:
    return isinstance(x, Array) or is_array(x)
