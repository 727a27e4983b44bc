"""`explain`: the kernel that a call selects, and the reasons of the kernels that reject it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        Provider -> reason, for the kernels that rejected the call before.
    note
        Why a faster variant of the selected kernel does not run; None if the fastest one runs.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.explain("sum", scree.from_lengths(np.ones(3), [1, 2]), axis=1).provider
    'reduceat'
    """

    operation: str
    provider: str
    rejected: dict[str, str]
    note: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: runs on {self.provider!r}"]
        if self.note is not None:
            lines.append(f"  {self.note}")
        return "\n".join(
            lines + [f"  {name!r} rejects: {reason}" for name, reason in self.rejected.items()]
        )


class _Selected(BaseException):
    """Ends a call after its kernel was selected.

    It is not an `Exception`, because the called function might catch that.
    """


def explain(name: str, *args: Any, **kwargs: Any) -> Explanation:
    """Return the kernel that a function would run on these arguments, and why others reject them.

    The function itself runs up to the selection of its kernel, so `explain` accepts the same
    arguments. Where a function needs several operations, the first one is explained.

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
        The selected provider and the rejections; printing it shows one line for each.

    Raises
    ------
    TypeError, ValueError
        If the function raises it for these arguments, or there is no such function.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.ones((3, 4)), [1, 2])
    >>> scree.explain("rms_norm", arr).provider
    'standard'
    >>> scree.explain("sum", arr, axis=1).provider
    'reduceat'
    """
    arguments = [*args, *kwargs.values()]
    function = _find_function(name, arguments)
    selected: list[tuple[str, dict[str, str], str | None]] = []

    def observe(provider: str, rejected: dict[str, str], note: str | None) -> None:
        selected.append((provider, rejected, note))
        raise _Selected

    thread = get_ident()
    OBSERVERS[thread] = observe
    try:
        function(*args, **kwargs)
    # The observer ends the call once the kernel is selected.
    except _Selected:
        return Explanation(name, *selected[0])
    finally:
        del OBSERVERS[thread]
    library = _namespace_of(arguments)
    return Explanation(name, library.__name__.rpartition(".")[2], {})


def _find_function(name: Any, arguments: list[Any]) -> Callable[..., Any]:
    """Return the function or operation of a name; raise if there is none."""
    if not isinstance(name, str):
        raise ValueError(f"name: expected the name of a function, got {name!r}")
    if name in ragged.__all__:
        function: Callable[..., Any] = getattr(ragged, name)
        return function
    if name in KINDS:
        function = getattr(_namespace_of(arguments), name)
        return function
    if name in OPERATIONS:
        operation = OPERATIONS[name]

        def run(*args: Any, kernel: str | None = None, **kwargs: Any) -> Any:
            return operation.run_call(operation.record(*args, **kwargs), kernel)

        return run
    names = sorted({*ragged.__all__, *KINDS, *OPERATIONS})
    raise ValueError(f"name: expected one of {', '.join(names)}, got {name!r}")


def _namespace_of(arguments: list[Any]) -> Any:
    """Return the namespace of the arrays among the arguments."""
    return namespace(*(x for x in _flatten(arguments) if isinstance(x, Array) or is_array(x)))


def _flatten(arguments: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments, and the items of lists and tuples instead of these."""
    for x in arguments:
        if isinstance(x, list | tuple):
            yield from _flatten(x)
        else:
            yield x
