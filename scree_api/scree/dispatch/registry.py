"""Who runs an operation: providers register kernels, the first that does not reject a call runs it.

A provider is asked with `rejects(call)`, which reads host metadata only and answers None or the reason why not. That one
sentence is the error message, what `explain` shows, and the documentation. The newest provider is asked first, the standard
path last.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

#: Third-party packages declare their `register` function in this group, under the name of the library that it serves.
ENTRY_POINTS = "scree.kernels"
STANDARD = "standard"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Kernel:
    """One provider's way to run one operation."""

    provider: str
    rejects: Callable[[Any], str | None]
    run: Callable[[Any], Any]
    prepare: Callable[[Any], Callable[..., Any] | None] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who would run a call, and why the providers asked before would not."""

    operation: str
    provider: str
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.operation}: runs on {self.provider!r}"]
        return "\n".join(
            lines + [f"  {name!r} rejects: {reason}" for name, reason in self.rejected.items()]
        )


_KERNELS: dict[str, list[Kernel]] = {}
_DESCRIBE: dict[str, Callable[..., Any]] = {}
_LOADED: set[str] = set()


def _accepts(call: Any) -> None:
    return None


def declare(name: str, describe: Callable[..., Any]) -> Callable[[F], F]:
    """Declare an operation: how its arguments become a validated call, and (decorated) its standard path."""
    _DESCRIBE[name] = describe

    def register(run: F) -> F:
        _KERNELS.setdefault(name, []).append(Kernel(STANDARD, _accepts, run))
        return run

    return register


def register_kernel(
    operation: str,
    *,
    provider: str,
    rejects: Callable[[Any], str | None] = _accepts,
    prepare: Callable[[Any], Callable[..., Any] | None] | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as a kernel for an operation.

    Parameters
    ----------
    operation
        The operation's name, for instance ``"attention"``.
    provider
        The name that users give to ``kernel=`` to insist on this kernel. Registering it again replaces it.
    rejects
        ``rejects(call)`` returns None to take the call, or the reason why not. It may read host metadata only: shapes,
        dtypes, devices, flags.
    prepare
        ``prepare(call)`` gives a function that takes the arrays of a call by their names and runs it as `run` does. It is used
        for all calls on the same rows that differ from this one in the contents of their arrays alone, and kept as long as the
        rows are, so it must not hold arrays itself. Whoever gives it promises that `rejects` answers from options and from
        dtypes, shapes, strides, devices and `requires_grad` of arrays. It gives None where each call is to be checked, as
        where targets are in host memory and looked at. On PyTorch attention, norms, rope, softmax, the gate, split, gather,
        scatter, concat of rows, cross-entropy, grouped products, reductions and scans of rows, and `to_padded` ask for it.

    Returns
    -------
    function
        The decorator, which gives back what it decorates.

    Raises
    ------
    ValueError
        If there is no such operation, or the provider has the name of the standard path.

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
        _KERNELS[operation].insert(0, Kernel(provider, rejects, run, prepare))
        return run

    return register


def unregister_kernel(operation: str, provider: str) -> None:
    """Forget a provider's kernel for an operation, if there is one.

    Parameters
    ----------
    operation, provider
        As they were registered.

    Raises
    ------
    ValueError
        If there is no such operation, or the provider is the standard path.

    Examples
    --------
    >>> import scree
    >>> scree.unregister_kernel("attention", "of a package that is not installed")
    """
    _declared(operation)
    if provider == STANDARD:
        raise ValueError(
            f"provider: {STANDARD!r} names the standard path, which stays; choose another name"
        )
    _KERNELS[operation] = [k for k in _KERNELS[operation] if k.provider != provider]


def kernels(operation: str) -> tuple[Kernel, ...]:
    """Return the kernels of an operation in the order in which a call is offered to them.

    Parameters
    ----------
    operation
        The operation's name, for instance ``"attention"``.

    Returns
    -------
    tuple of Kernel
        The newest provider first, the standard path last.

    Raises
    ------
    ValueError
        If there is no such operation.

    Examples
    --------
    >>> from scree.dispatch import registry
    >>> registry.kernels("softmax")[-1].provider
    'standard'
    """
    _declared(operation)
    return tuple(_KERNELS[operation])


@contextmanager
def isolated() -> Iterator[None]:
    """Undo every change of the registry at the end of the ``with`` block; meant for tests.

    Kernels registered or unregistered in the block, and plugins loaded in it, are as before after it.
    Calls prepared in the block are not used after it, and calls prepared before it are not used in it.
    The registry belongs to the process, so other threads see the changes while the block runs.

    Examples
    --------
    >>> import scree
    >>> from scree.dispatch import registry
    >>> with registry.isolated():
    ...     _ = scree.register_kernel("softmax", provider="mine")(lambda call: call.x)
    ...     registry.kernels("softmax")[0].provider
    'mine'
    >>> "mine" in [kernel.provider for kernel in registry.kernels("softmax")]
    False
    """
    saved_kernels, saved_factories, saved_plugins = dict(_KERNELS), dict(_DESCRIBE), set(_LOADED)
    # The block gets copies: prepared calls recognize the registry's state by the identity of its lists.
    _KERNELS.update({name: list(kernels) for name, kernels in saved_kernels.items()})
    try:
        yield
    finally:
        for current, saved in ((_KERNELS, saved_kernels), (_DESCRIBE, saved_factories)):
            current.clear()
            current.update(saved)
        _LOADED.clear()
        _LOADED.update(saved_plugins)


def _declared(operation: str) -> None:
    if not isinstance(operation, str) or operation not in _DESCRIBE:
        raise ValueError(
            f"operation: expected one of {', '.join(sorted(_DESCRIBE))}, got {operation!r}"
        )


def _select(name: str, call: Any, kernel: str | None) -> tuple[Kernel, dict[str, str]]:
    rejected: dict[str, str] = {}
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel: expected the name of a provider or None, got {kernel!r}")
    for candidate in _KERNELS[name]:
        if kernel is not None and candidate.provider != kernel:
            continue
        reason = candidate.rejects(call)
        if reason is None:
            return candidate, rejected
        rejected[candidate.provider] = reason
    if kernel in rejected:
        raise ValueError(f"{name}: kernel={kernel!r} rejects this call: {rejected[kernel]}")
    known = ", ".join(repr(k.provider) for k in _KERNELS[name])
    raise ValueError(f"kernel: expected one of {known} for {name}, got {kernel!r}")


def run(name: str, call: Any, kernel: str | None = None) -> Any:
    """Run a call on the kernel that is named, or on the first that accepts it."""
    chosen, _ = _select(name, call, kernel)
    return chosen.run(call)


def explain(operation: str, *args: Any, kernel: str | None = None, **kwargs: Any) -> Explanation:
    """Say who would run an operation on these arguments, and why the others would not.

    Parameters
    ----------
    operation
        The operation's name, for instance ``"attention"``.
    *args, **kwargs
        The operation's arguments, as one would pass them to ``xp.ragged``.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Explanation
        Prints as one line for the provider that runs and one for each that rejects.

    Raises
    ------
    TypeError, ValueError
        What the operation itself raises for these arguments; if there is no such operation; or if `kernel` rejects them.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.explain("rms_norm", scree.from_lengths(np.ones((3, 4)), [1, 2])).provider
    'standard'
    """
    _declared(operation)
    chosen, rejected = _select(operation, _DESCRIBE[operation](*args, **kwargs), kernel)
    return Explanation(operation, chosen.provider, rejected)


def load_plugins(library: str) -> None:
    """Let every installed package that declares kernels for a library register them, once."""
    from importlib.metadata import (
        entry_points,
    )  # here, because `import scree` should not wait for it

    if library in _LOADED:
        return
    _LOADED.add(library)
    for entry in entry_points(group=ENTRY_POINTS, name=library):
        try:
            entry.load()()
        except Exception as error:  # foreign code may raise anything; it is raised again, with the name of the package
            _LOADED.remove(library)
            package = entry.dist.name if entry.dist else "an unknown package"
            raise ImportError(
                f"the entry point {entry.name} = {entry.value} of {package} in the group {ENTRY_POINTS} does not load: "
                f"{error}; repair or uninstall {package}"
            ) from error
