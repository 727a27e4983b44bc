"""Registration of kernels, by hand or by installed packages.

A kernel's `rejects` reads host metadata only and returns None, or the reason why the kernel does
not take the call. That one sentence is the error message, the line in `scree.explain`, and the
documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .operation import OPERATIONS, STANDARD, Kernel, Operation, Prepare, Rejects, rejects_nothing

#: Third-party packages declare their `register` function in this group, under the name of the
#: library it serves.
ENTRY_POINTS = "scree.kernels"

F = TypeVar("F", bound=Callable[..., Any])

_loaded: set[str] = set()  # libraries whose plugins are registered
_loading_library: str | None = None  # the library whose kernels are being registered


def register_kernel(
    operation: str,
    *,
    provider: str,
    rejects: Rejects = rejects_nothing,
    prepare: Prepare | None = None,
    note: Rejects = rejects_nothing,
) -> Callable[[F], F]:
    """Register the decorated function as a kernel for an operation.

    The function takes the operation's call record and returns what the operation returns.

    Parameters
    ----------
    operation
        The operation's name, for instance ``"attention"``.
    provider
        The name that users give to ``kernel=`` to require this kernel. A second registration
        replaces the first.
    rejects
        ``rejects(call)`` returns None to take the call, or the reason why not. It reads host
        metadata only: shapes, dtypes, devices, flags.
    prepare
        ``prepare(call)`` returns a function that takes the arrays of a call by their names and
        returns what the kernel returns. It serves all later calls on the same layout that differ
        from this call only in the contents of their arrays. It is kept as long as the layout, so it
        must not hold arrays. A kernel with `prepare` promises that `rejects` depends only on
        options and on the dtypes, shapes, strides, devices and `requires_grad` of arrays.
        ``prepare(call)`` returns None where every call must be validated, for instance where the
        validation reads targets in host memory. Only PyTorch calls are cached.
    note
        ``note(call)`` returns one sentence for `scree.explain` if the kernel takes the call but does
        not run its fastest variant, else None.

    Returns
    -------
    function
        The decorator, which returns the function unchanged.

    Raises
    ------
    ValueError
        If there is no such operation, or the provider has the name of the standard implementation.

    Examples
    --------
    >>> import numpy as np, scree
    >>> @scree.register_kernel("softmax", provider="mine", rejects=lambda call: "only a demonstration")
    ... def mine(call):
    ...     return call.x
    >>> arr = scree.pack([np.zeros(2), np.zeros(3)])
    >>> scree.explain("softmax", arr).rejected["mine"]
    'only a demonstration'
    >>> scree.unregister_kernel("softmax", "mine")
    """

    def register(run: F) -> F:
        unregister_kernel(operation, provider)
        target = OPERATIONS[operation]
        new = Kernel(provider, rejects, run, prepare, _loading_library, note)
        others = target.kernels
        # A library may be loaded after the user has registered kernels.
        at = next(i for i, k in enumerate(others) if k.library) if _loading_library else 0
        target.kernels = [*others[:at], new, *others[at:]]
        return run

    return register


def unregister_kernel(operation: str, provider: str) -> None:
    """Remove a provider's kernel for an operation, if there is one.

    Parameters
    ----------
    operation, provider
        The arguments of `register_kernel`.

    Raises
    ------
    ValueError
        If there is no such operation, or the provider is the standard implementation.

    Examples
    --------
    >>> import scree
    >>> scree.unregister_kernel("attention", "a package that is not installed")
    """
    target = get_operation(operation)
    if provider == STANDARD:
        raise ValueError(
            f"provider: {STANDARD!r} names the standard implementation, which stays; choose another name"
        )
    target.kernels = [k for k in target.kernels if k.provider != provider]
    target.unavailable = {key: why for key, why in target.unavailable.items() if key[0] != provider}


@contextmanager
def loading_library(library: str) -> Iterator[None]:
    """Register kernels of a library.

    They are asked after the kernels of the user, whichever come first.
    """
    global _loading_library
    before, _loading_library = _loading_library, library
    try:
        yield
    finally:
        _loading_library = before


@contextmanager
def isolated(*, standard_only: bool = False) -> Iterator[None]:
    """Restore all registered kernels and loaded plugins on exit.

    For tests of kernels and of the registry.

    Load the libraries that a test needs before: their kernels are registered only once.

    Parameters
    ----------
    standard_only
        Whether only standard implementations are registered inside.

    Examples
    --------
    >>> import scree
    >>> from scree.dispatch import registry
    >>> with registry.isolated():
    ...     @scree.register_kernel("softmax", provider="mine")
    ...     def mine(call):
    ...         return call.x
    >>> "mine" in [kernel.provider for kernel in registry.kernels("softmax")]
    False
    """
    saved = {op: (op.kernels, dict(op.unavailable)) for op in OPERATIONS.values()}
    loaded = set(_loaded)
    if standard_only:
        for operation in saved:
            operation.kernels = operation.kernels[-1:]
    try:
        yield
    finally:
        for operation, state in saved.items():
            operation.kernels, operation.unavailable = state
        _loaded.clear()
        _loaded.update(loaded)


def kernels(operation: str) -> tuple[Kernel, ...]:
    """Return the kernels of an operation in the order in which they are asked.

    The standard implementation is the last.
    """
    return tuple(get_operation(operation).kernels)


def get_operation(name: str) -> Operation[Any]:
    """Return an operation by name; raise `ValueError` if there is none."""
    if not isinstance(name, str) or name not in OPERATIONS:
        names = ", ".join(sorted(OPERATIONS))
        raise ValueError(f"operation: expected one of {names}, got {name!r}")
    return OPERATIONS[name]


def forget_plugins(library: str) -> None:
    """Let `load_plugins` look for the packages of a library again."""
    _loaded.discard(library)


def load_plugins(library: str) -> None:
    """Register the kernels of every installed package that declares some for a library, once."""
    from importlib.metadata import entry_points  # slow to import

    if library in _loaded:
        return
    _loaded.add(library)
    for entry in entry_points(group=ENTRY_POINTS, name=library):
        before = {operation: operation.kernels for operation in OPERATIONS.values()}
        try:
            entry.load()()
        except Exception as error:  # foreign code may raise anything; it is raised again, with the name of the package
            for operation, kernels_before in before.items():
                operation.kernels = kernels_before
            _loaded.remove(library)
            package = entry.dist.name if entry.dist else "an unknown package"
            raise ImportError(
                f"the entry point {entry.name} = {entry.value} of {package} in the group {ENTRY_POINTS} does not load: "
                f"{error}; repair or uninstall {package}"
            ) from error
