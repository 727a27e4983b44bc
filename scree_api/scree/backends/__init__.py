"""What scree must know of a library beyond the standard: one `Backend` a library, found by the type of an array.

Only the modules of this package name a library. A library that follows the standard and is not listed here works too,
through `generic`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from array_api_compat import is_array_api_obj

from ..dispatch.registry import load_plugins

#: Root module of an array's type -> the module of this package that knows its library.
LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}

#: What `Backend.read` says under a trace.
UNREADABLE = "the size of this result depends on the offsets, which a traced or compiled function cannot read; make it outside"

F = TypeVar("F", bound=Callable[..., Any])


def _standard_device(x: Any) -> Any:
    return x.device


def _standard_to_device(x: Any, device: Any, /) -> Any:
    return x.to_device(device)


def _never() -> bool:
    return False


def _unchanged(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """What scree asks of a library, beside its standard namespace.

    Attributes
    ----------
    name
        The library's name.
    xp
        Its namespace of the Array API standard.
    peek
        The values of an integer array as NumPy sees them where looking is free (host memory, already computed), or None:
        never waits, never copies from a device, never breaks a trace.
    read
        The same, waiting and copying where it must; raises `TypeError` under a trace.
    row_ids
        ``row_ids(repeats, total)``: each index of `repeats` as often as its entry says, `total` entries in all, without a
        look at the values; None where the library has nothing faster than a binary search.
    device, to_device
        The device of an array, or None where a trace hides it or the library finds the place by itself; and a copy of an array on
        another device.
    uniform
        ``uniform(key, shape, like)``: random numbers in [0, 1) from an explicit key or generator, or None.
    place
        ``place(host, dtype, device)``: an array from one in host memory, where the library has something better than `asarray`.
    compiling
        Whether a compiler follows every step, so that NumPy must be left alone; where traced arrays have a type of their own,
        `peek` tells.
    outside
        ``outside(offsets)``: the context in which what follows from offsets is computed, so that it lives as long as they do:
        outside of a trace that does not trace them.
    checkpoint
        ``checkpoint(f)``: the same function, whose backward pass computes again what `f` had on the way, and so need not keep it;
        `f` itself where the library has no gradients.
    gather
        ``gather(x, axis, index)``: `take_along_axis` of arrays whose other axes are alike, where the library's own makes a compiler
        fix their sizes.
    alike
        ``alike(arrays)`` makes what tells whether others are like these arrays in all that the host knows of them and that a
        check or a kernel may ask; None where a call costs more than its checks.
    """

    name: str
    xp: Any
    peek: Callable[[Any], np.ndarray | None]
    read: Callable[[Any], np.ndarray]
    row_ids: Callable[[Any, int], Any] | None = None
    device: Callable[[Any], Any] = _standard_device
    to_device: Callable[[Any, Any], Any] = _standard_to_device
    uniform: Callable[[Any, tuple[int, ...], Any], Any] | None = None
    place: Callable[[np.ndarray, Any, Any], Any] | None = None
    compiling: Callable[[], bool] = _never
    outside: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged
    gather: Callable[[Any, int, Any], Any] | None = None
    alike: Callable[[list[Any]], Callable[..., bool]] | None = None

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"

    def from_host(self, host: np.ndarray, dtype: Any, device: Any) -> Any:
        """An array of the library on a device."""
        return (
            self.place(host, dtype, device)
            if self.place
            else self.xp.asarray(host, dtype=dtype, device=device)
        )

    def take_along_axis(self, x: Any, index: Any, axis: int) -> Any:
        """The entries of `x` at the places of `index` along an axis >= 0."""
        alike = all(
            a == axis or m == n for a, (m, n) in enumerate(zip(x.shape, index.shape, strict=True))
        )
        return (
            self.gather(x, axis, index)
            if self.gather and alike
            else self.xp.take_along_axis(x, index, axis=axis)
        )

    def apart(self, x: Any, y: Any) -> bool:
        """Whether two arrays are known to lie on different devices."""
        a, b = self.device(x), self.device(y)
        return a is not None and b is not None and bool(a != b)


#: By the name of their library, the namespaces that know ragged arrays; see `scree.namespace`.
NAMESPACES: dict[str, ModuleType] = {}
_BY_TYPE: dict[type, Backend] = {}
_LISTED: dict[str, Backend] = {}


def backend(x: Any, name: str = "x") -> Backend:
    """The backend that the dense array `x` belongs to; `name` is the argument that an error speaks of."""
    found = _BY_TYPE.get(type(x))
    return found if found is not None else _resolve(x, name)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of some library (and not a Python scalar, a list or a ragged array)."""
    return type(x) in _BY_TYPE or _library(type(x)) is not None or _is_standard(x)


def _is_standard(x: Any) -> bool:
    return is_array_api_obj(x) and hasattr(
        x, "__dlpack_device__"
    )  # a ragged array has no DLPack, CuPy's no namespace


def constant(f: F) -> F:
    """Mark a function of constants, so that `torch.compile` calls it instead of tracing it."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result does
    return f


@constant
def _library(cls: type) -> str | None:
    """The listed library that `cls` or one of its bases comes from, if instances of it can be arrays."""
    if not hasattr(cls, "shape"):
        return None
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((LIBRARIES[root] for root in roots if root in LIBRARIES), None)


def named(library: str) -> Backend:
    """The backend of a library by its name; imports the library."""
    if library in LIBRARIES.values():
        return _load(library)
    module = import_module(library)
    if not hasattr(module, "empty"):
        raise TypeError(
            f"library: expected one that follows the Array API standard, got {library!r}"
        )
    return backend(module.empty(0))


def _load(library: str) -> Backend:
    _import(library)
    return _LISTED[library]


@constant
def _import(library: str) -> None:
    _LISTED[library] = import_module(f"{__name__}.{library}").BACKEND
    load_plugins(library)


def _resolve(x: Any, name: str) -> Backend:
    found: Backend
    library = _library(type(x))
    if library is None and not _is_standard(x):
        raise TypeError(
            f"{name}: expected a dense array of a library that follows the Array API standard, got {type(x).__name__}; "
            "convert it first, for instance with numpy.asarray"
        )
    if library is None:
        found = import_module(f"{__name__}.generic").make(x)
    else:
        found = _load(library)
    _BY_TYPE[type(x)] = found
    return found
