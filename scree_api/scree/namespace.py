"""`namespace(*arrays)`: the namespace of the standard that understands ragged arrays.

This is the highest layer of the core. On import it fills the hook of `Array`, and it builds the
namespace of every library that is loaded.
"""

from __future__ import annotations

from functools import update_wrapper
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from . import display as display  # attaches the display of arrays
from . import providers as providers  # registers kernels when a library is loaded
from . import ragged
from .array import UPPER, VERSIONS, Array
from .backends import Backend, add_load_hook, backend, backend_by_name, is_array
from .construct import unpack
from .functions import EXTENSIONS, KINDS, Kind, bind
from .hints import missing_from_namespace
from .indexing.at import update
from .indexing.getitem import getitem

if TYPE_CHECKING:
    from .standard import Namespace


def namespace(*arrays: Any, api_version: str | None = None) -> Namespace:
    """Return the Array API namespace for ragged and dense arrays of one library.

    Parameters
    ----------
    *arrays
        Ragged or dense arrays, all of one library; Python scalars are ignored.
    api_version
        A version of the standard, such as "2024.12"; only checked.

    Returns
    -------
    Namespace
        A module with every function of the standard, for ragged arrays as the table `scree.functions.KINDS` says,
        and the library's own function for dense arrays; and the extensions ``linalg``, ``fft`` and
        ``ragged``.

    Raises
    ------
    TypeError
        If there is no array, or arrays are of two libraries.
    ValueError
        If the version of the standard is unknown.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.pack([np.asarray([1.0, 2.0]), np.asarray([3.0])])
    >>> xp = scree.namespace(arr)
    >>> xp.sum(arr, axis=1)
    array([3., 3.])
    >>> xp.ragged.softmax(arr).values.round(2)
    array([0.27, 0.73, 1.  ])
    """
    if api_version is not None and api_version not in VERSIONS:
        raise ValueError(f"api_version: expected one of {', '.join(VERSIONS)}, got {api_version!r}")
    lib: Backend | None = None
    for i, x in enumerate(arrays):
        if isinstance(x, Array):
            other = x.layout.backend
        elif is_array(x):
            other = backend(x)
        elif isinstance(x, bool | int | float | complex | None):
            continue
        else:
            raise TypeError(
                f"arrays[{i}]: expected a ragged or dense array, got {type(x).__name__}"
            )
        if lib is not None and other is not lib:
            raise TypeError(
                f"arrays[{i}]: expected an array of {lib.name} as the others, got one of {other.name}"
            )
        lib = other
    if lib is None:
        raise TypeError(f"arrays: expected at least one array, got {arrays}")
    xp: Namespace = UPPER.namespaces[lib.name]
    return xp


def namespace_by_name(library: str) -> ModuleType:
    """Return the namespace of a library by its name; imports the library. See `scree.xp`."""
    module: ModuleType = UPPER.namespaces[backend_by_name(library).name]
    return module


def build_namespace(lib: Backend) -> None:
    """Make the namespace of a library.

    It is made when the library is loaded, because the first call may be inside a compiled function,
    where no module can be made.
    """
    from .standard import Fft, Linalg, Namespace  # a large module, for its docstrings only

    doc = f"The Array API standard for ragged and dense arrays of {lib.name}."
    module = _make_module(f"scree.xp.{lib.name}", doc, lib.xp, KINDS, Namespace, lib)
    protocols: dict[str, type] = {"linalg": Linalg, "fft": Fft}
    for name, protocol in protocols.items():
        if hasattr(lib.xp, name):
            extension = _make_module(
                f"scree.xp.{lib.name}.{name}",
                f"The extension {name} of the Array API standard, for {lib.name}.",
                getattr(lib.xp, name),
                EXTENSIONS[name],
                protocol,
                lib,
            )
            setattr(module, name, extension)
            module.__all__.append(name)
    module.__dict__["ragged"] = ragged
    module.__all__.append("ragged")
    UPPER.namespaces[lib.name] = module


def _make_module(
    name: str, doc: str, library: Any, table: dict[str, Kind], protocol: type, lib: Backend
) -> ModuleType:
    """Return a module with every name of the table that the namespace `library` has.

    The functions have the signature and the documentation of the protocol.
    """
    module = ModuleType(name, doc)
    names = [x for x in table if hasattr(library, x)]

    def missing(attribute: str) -> NoReturn:
        operations = ragged.__all__ if table is KINDS else ()
        raise AttributeError(missing_from_namespace(attribute, names, operations))

    specification = type(protocol.__name__, (protocol,), {})()  # its methods are bound
    for x in names:
        value = getattr(library, x)
        if table[x].name != "plain":
            value = update_wrapper(bind(value, x, table[x], lib), getattr(specification, x))
            value.__module__, value.__qualname__ = name, x
        setattr(module, x, value)
    public = [x for x in names if x[0] != "_"]
    # Python looks for these functions in the dictionary of a module.
    module.__dict__.update(__all__=public, __dir__=lambda: sorted(public), __getattr__=missing)
    return module


UPPER.getitem, UPPER.update, UPPER.unpack = getitem, update, unpack
add_load_hook(build_namespace)
