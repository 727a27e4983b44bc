"""Operations, their kernels, and the dispatch of calls by `Operation.run`.

An operation is defined once, by `define_operation`: a call record, which validates the arguments,
and the standard implementation, which is the specification. `scree.register_kernel` adds kernels.
They are asked in this order, and the first that does not reject a call runs it: kernels of the user,
kernels registered when a library is loaded, each newest first, then the standard implementation.
"""

from __future__ import annotations

import warnings
from _thread import get_ident  # importing `threading` takes longer than this module
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any, Generic, TypeVar

from ..array import Array
from ..backends import backend
from ..layout import Layout
from ..records import record
from . import call_cache

STANDARD = "standard"  # the provider of every standard implementation
ANY_LIBRARY = "any"  # the library of every standard implementation

Rejects = Callable[[Any], str | None]
Prepare = Callable[[Any], Callable[..., Any] | None]
Result = TypeVar("Result")  # of the standard implementation, and so of every kernel


def rejects_nothing(call: Any) -> None:
    """Return None: accept every call."""


class KernelUnavailableError(RuntimeError):
    """A kernel cannot run a call that it accepted, for instance because it does not compile.

    Then the next kernel runs this call, and all calls with the same dtypes, widths and options.
    """


@record
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
        ``prepare(call)`` returns a function for later calls, or None; see `register_kernel`.
    library
        The library whose loading registered the kernel; None for kernels of the user, which are
        asked before the others.
    note
        ``note(call)`` returns why a faster variant of the kernel does not run, or None, for
        `scree.explain`.
    """

    provider: str
    rejects: Rejects
    run: Callable[[Any], Any]
    prepare: Prepare | None = None
    library: str | None = None
    note: Rejects = rejects_nothing


class Operation(Generic[Result]):
    """A named computation with a standard implementation and any number of kernels.

    Attributes
    ----------
    name
        The name for `scree.register_kernel`.
    record
        The call record: a `records.record` whose constructor validates the arguments.
    kernels
        All kernels in the order in which they are asked. The list is never changed; a registration
        makes a new one, so that the call cache can compare it by identity.
    internal
        True for an operation that only prepares a layout for another one; `scree.explain` does not
        show it.
    unavailable
        Provider and kind of call -> why the kernel could not run such a call.
    """

    __slots__ = ("internal", "kernels", "name", "record", "unavailable")

    def __init__(
        self,
        name: str,
        record: Callable[..., Any],
        standard: Callable[[Any], Result],
        internal: bool,
    ) -> None:
        self.name, self.record, self.internal = name, record, internal
        # The kernels of a library are inserted before the first entry with a `library`.
        self.kernels = [Kernel(STANDARD, rejects_nothing, standard, library=ANY_LIBRARY)]
        self.unavailable: dict[Any, str] = {}

    def run(
        self,
        arrays: dict[str, Any],
        options: dict[str, Any],
        kernel: str | None = None,
        short_key: tuple[Any, ...] | None = None,
    ) -> Result:
        """Run a call; use the prepared kernel of the call cache if one matches.

        A decision is cached if the chosen kernel has `prepare`, and only kernels of other libraries
        rejected the call. Every other call is validated, and its kernel selected, again. While
        `scree.explain` observes, nothing is cached.

        Parameters
        ----------
        arrays
            The call's fields that hold an array, a layout or None. The call is cached only if the
            first that is not None is a ragged array or a layout.
        options
            The other fields.
        kernel
            The provider that must run the call; by default the first kernel that accepts.
        short_key
            The key under which `recall` finds this call, or None.
        """
        operand = next(iter(arrays.values()), None)
        if type(operand) not in _CACHED_TYPES:
            # The record loads the library of dense arrays, which registers kernels. `torch.compile`
            # must not read the kernels before.
            return self.run_call(self.record(**arrays, **options), kernel)
        # No call on shards is in the cache.
        if type(operand) is Array and (cut := operand.layout.cut) is not None:
            result: Result = cut.run(self, arrays, options, kernel)
            return result
        kernels = self.kernels
        entries: list[call_cache.Entry] | None = None
        values: list[Any] = []
        if not OBSERVERS:
            for candidate in kernels:
                if candidate.prepare is not None:
                    entries, values = call_cache.lookup(
                        self.name, arrays, options, kernel, short_key
                    )
                    break
        if entries:
            for entry in entries:
                if entry.kernels is kernels and entry.guard(*values):
                    try:
                        result = entry.run(**arrays)
                        return result
                    # Validation below selects a kernel again, and says why.
                    except KernelUnavailableError:
                        break
        call = self.record(**arrays, **options)
        if OBSERVERS:
            return self.run_call(call, kernel)
        chosen, rejected = self.select(call, kernel)
        if (
            entries is not None
            and chosen.prepare is not None
            and not self._rejections_depend_on_contents(rejected, values)
        ):
            guard = call_cache.make_guard(values)
            prepared = None if guard is None else chosen.prepare(call)
            if guard is not None and prepared is not None:
                # On this error `_run_on` below runs the kernel again, warns and selects another kernel.
                with suppress(KernelUnavailableError):
                    result = prepared(**arrays)
                    call_cache.store(entries, call_cache.Entry(kernels, guard, prepared))
                    return result
        return self._run_on(chosen, call, kernel)

    def recall(
        self,
        values: tuple[Any, ...],
        layout: Layout,
        short_key: tuple[Any, ...],
        second: Layout | None = None,
    ) -> call_cache.Entry | None:
        """Return the entry of the call cache with which `run` would run a call; None if it has none.

        The caller has inspected the arguments, so this takes a third of the time. `Entry.run` may raise
        `KernelUnavailableError`; then `run` selects another kernel.

        Parameters
        ----------
        values
            The dense arrays of the call, for the guards.
        layout
            The layout of the first ragged array.
        short_key
            A key that determines the operation, the options and their types, the kernel, which
            arrays are absent, and which are on the layout, with which ragged axis.
        second
            The layout of ragged arrays that are not on the first layout, or None.
        """
        if OBSERVERS or layout.backend.intercepts_calls():
            return None
        raw_stream = layout.raw_stream
        if raw_stream is None or raw_stream():
            cache = layout.eager_cache()
        else:
            cache = layout.default_stream_cache
        if second is not None:
            # As `Layout.eager_pair_cache`, without the host time of its functions.
            cache = cache.get("pairs", _NO_CACHE).get(second.identity, _NO_CACHE)
        kernels = self.kernels
        entries: list[call_cache.Entry] = cache.get(short_key, _NO_ENTRIES)
        for entry in entries:
            if entry.kernels is kernels and entry.guard(*values):
                return entry
        return None

    def _rejections_depend_on_contents(self, rejected: dict[str, str], values: list[Any]) -> bool:
        """Return whether a kernel rejected a call for more than the library of its arrays."""
        if not rejected:
            return False
        library = backend(values[0]).name
        return any(
            kernel.library in (None, library)
            for kernel in self.kernels
            if kernel.provider in rejected
        )

    def run_call(self, call: Any, kernel: str | None = None) -> Result:
        """Run a validated call on the named kernel, or on the first that accepts it; never cached."""
        chosen, rejected = self.select(call, kernel)
        if OBSERVERS and not self.internal and (observer := OBSERVERS.get(get_ident())):
            observer(chosen.provider, rejected, chosen.note(call))
        return self._run_on(chosen, call, kernel)

    def _run_on(self, chosen: Kernel, call: Any, kernel: str | None) -> Result:
        try:
            result: Result = chosen.run(call)
            return result
        except KernelUnavailableError as error:
            self.unavailable[chosen.provider, _kind_of(call)] = str(error)
            message = f"{self.name}: {chosen.provider!r} cannot run this kind of call: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            return self.run_call(call, kernel)

    def select(self, call: Any, kernel: str | None) -> tuple[Kernel, dict[str, str]]:
        """Return the kernel for a call, and the reasons of the kernels that rejected it."""
        rejected: dict[str, str] = {}
        if kernel is not None and not isinstance(kernel, str):
            raise TypeError(f"kernel: expected the name of a provider or None, got {kernel!r}")
        for candidate in self.kernels:
            if kernel is not None and candidate.provider != kernel:
                continue
            reason = None
            if self.unavailable:
                reason = self.unavailable.get((candidate.provider, _kind_of(call)))
            # A kernel may keep a call that it accepts until it runs, so this comes last.
            if reason is None:
                reason = candidate.rejects(call)
            if reason is None:
                return candidate, rejected
            rejected[candidate.provider] = reason
        if kernel in rejected:
            reason = rejected[kernel]
            raise ValueError(f"{self.name}: kernel={kernel!r} rejects this call: {reason}")
        providers = ", ".join(repr(k.provider) for k in self.kernels)
        raise ValueError(f"kernel: expected one of {providers} for {self.name}, got {kernel!r}")


_NO_CACHE: dict[Any, Any] = {}
_NO_ENTRIES: list[call_cache.Entry] = []

#: Types of the first array of a call that may be cached.
_CACHED_TYPES = (Array, Layout, type(None))


def _kind_of(call: Any) -> tuple[Any, ...]:
    """Return the dtypes and widths of the arrays of a call, and its options."""
    return tuple(
        (str(x.dtype), *map(str, x.shape[1:])) if hasattr(x, "dtype") else repr(x)
        for x in (getattr(call, field.name) for field in fields(call))
        if not isinstance(x, Layout)
    )


#: All operations by name.
OPERATIONS: dict[str, Operation[Any]] = {}

#: Thread id -> callback that receives the selected kernel; `scree.explain` enters its own.
OBSERVERS: dict[int, Callable[[str, dict[str, str], str | None], None]] = {}


def define_operation(
    name: str, record: Callable[..., Any], *, internal: bool = False
) -> Callable[[Callable[[Any], Result]], Operation[Result]]:
    """Define an operation; the decorated function is its standard implementation.

    Parameters
    ----------
    name
        The operation's name, which `scree.register_kernel` takes.
    record
        The call record: a `records.record` with the field names of the public signature, whose
        constructor validates.
    internal
        True for an operation that only prepares a layout for another one.

    Returns
    -------
    function
        A decorator that registers the function and returns its `Operation`, which the public
        function runs.
    """

    def decorate(standard: Callable[[Any], Result]) -> Operation[Result]:
        operation = Operation(name, record, standard, internal)
        OPERATIONS[name] = operation
        return operation

    return decorate
