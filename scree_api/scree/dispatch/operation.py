"""Operations, their kernels, and the one dispatcher that runs their calls.

An operation is defined once, by `define_operation`: a call record, which validates the arguments,
and the standard implementation, which is the specification. Kernels are added by
`scree.register_kernel`. The newest kernel that does not reject a call runs it; the standard
implementation comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from . import call_cache

STANDARD = "standard"  # the provider of every standard implementation

Rejects = Callable[[Any], str | None]
Prepare = Callable[[Any], Callable[..., Any] | None]


def rejects_nothing(call: Any) -> None:
    """Accept every call."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation.

    Attributes
    ----------
    provider
        The name for ``kernel=``.
    rejects
        ``rejects(call)`` returns None, or the reason why the kernel does not take the call.
    run
        ``run(call)`` returns what the operation's standard implementation returns.
    prepare
        ``prepare(call)`` returns a function of the call's arrays for later calls with the same
        guard, or None.
    """

    provider: str
    rejects: Rejects
    run: Callable[[Any], Any]
    prepare: Prepare | None = None
    with_library: bool = False
    """Whether it was registered when its library was loaded; kernels of the user are asked before
    such kernels.
    """


class Operation:
    """A named computation with a standard implementation and any number of kernels.

    Attributes
    ----------
    name
        The name for `scree.register_kernel`.
    call
        The call record: a frozen dataclass whose constructor validates the arguments.
    kernels
        All kernels: first kernels of the user, then kernels registered with a library, each newest
        first; the standard implementation last. Every change makes a new list, so that the call cache can
        compare lists by identity.
    internal
        Whether the operation only prepares a layout for another operation; `scree.explain` passes
        over it.
    """

    __slots__ = ("call", "internal", "kernels", "name")

    def __init__(
        self, name: str, call: Callable[..., Any], standard: Callable[[Any], Any], internal: bool
    ) -> None:
        self.name, self.call, self.internal = name, call, internal
        self.kernels = [Kernel(STANDARD, rejects_nothing, standard, with_library=True)]

    def run(
        self, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None = None
    ) -> Any:
        """Validate a call, choose its kernel and run it.

        A cached decision about an earlier call of the same kind is used instead where there is one.

        Parameters
        ----------
        arrays
            The call's fields that hold an array, a layout or None. The first is ragged or a layout;
            otherwise the call is not cached.
        options
            The other fields.
        kernel
            The provider that must run the call; by default the first kernel that accepts.
        """
        kernels = self.kernels
        if kernels[0].prepare is None or OBSERVERS:
            return self.run_call(self.call(**arrays, **options), kernel)
        values: list[Any] = []
        entries = call_cache.lookup(self.name, arrays, options, kernel, values)
        for entry in entries or ():
            if entry.kernels is kernels and entry.guard(*values):
                return entry.run(**arrays)
        call = self.call(**arrays, **options)
        chosen, rejected = self.select(call, kernel)
        if entries is None or chosen.prepare is None or rejected:
            return chosen.run(call)
        prepared = chosen.prepare(call)
        if prepared is None:
            return chosen.run(call)
        call_cache.store(entries, kernels, values, prepared)
        return prepared(**arrays)

    def run_call(self, call: Any, kernel: str | None = None) -> Any:
        """Run a validated call on the named kernel, or on the first that accepts it; never cached."""
        chosen, rejected = self.select(call, kernel)
        if OBSERVERS and not self.internal and (observer := OBSERVERS.get(get_ident())):
            observer(self.name, chosen.provider, rejected)
        return chosen.run(call)

    def select(self, call: Any, kernel: str | None) -> tuple[Kernel, dict[str, str]]:
        """Return the kernel for a call, and the reasons of the kernels that were asked before it."""
        rejected: dict[str, str] = {}
        if kernel is not None and not isinstance(kernel, str):
            raise TypeError(f"kernel: expected the name of a provider or None, got {kernel!r}")
        for candidate in self.kernels:
            if kernel is not None and candidate.provider != kernel:
                continue
            reason = candidate.rejects(call)
            if reason is None:
                return candidate, rejected
            rejected[candidate.provider] = reason
        if kernel in rejected:
            raise ValueError(
                f"{self.name}: kernel={kernel!r} rejects this call: {rejected[kernel]}"
            )
        providers = ", ".join(repr(k.provider) for k in self.kernels)
        raise ValueError(f"kernel: expected one of {providers} for {self.name}, got {kernel!r}")


#: All operations by name.
OPERATIONS: dict[str, Operation] = {}

#: Thread -> function that is told which kernel was selected; `scree.explain` enters itself here.
OBSERVERS: dict[int, Callable[[str, str, dict[str, str]], None]] = {}


def define_operation(
    name: str, call: Callable[..., Any], *, internal: bool = False
) -> Callable[[Callable[[Any], Any]], Operation]:
    """Define an operation; the decorated function is its standard implementation.

    Parameters
    ----------
    name
        The operation's name, which `scree.register_kernel` takes.
    call
        The call record: a frozen dataclass with the field names of the public signature, whose
        constructor validates.
    internal
        Whether the operation only prepares a layout for another operation.

    Returns
    -------
    function
        The decorator, which replaces the function by the `Operation`. The public function calls
        `Operation.run`.
    """

    def decorate(standard: Callable[[Any], Any]) -> Operation:
        OPERATIONS[name] = Operation(name, call, standard, internal)
        return OPERATIONS[name]

    return decorate
