"""`namespace(*arrays)`: the namespace of the standard that understands ragged arrays.

This is the highest layer of the core. On import it fills the hook of `Array`, and it builds the
namespace of every library that is loaded.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import display as display  # attaches the display of arrays
from . import providers as providers  # registers kernels when a library is loaded
from . import ragged
from .array import UPPER, VERSIONS, Array
from .backends import Backend, add_load_hook, backend, backend_by_name, is_array
from .construct import unpack
from .functions import EXTENSIONS, KINDS, Kind, bind
from .indexing.getitem import getitem


def namespace(*arrays: Any, api_version: str | None = None) -> Any:
    """Return the Array API namespace for ragged and dense arrays of one library.

    Parameters
    ----------
    *arrays
        Ragged or dense arrays, all of one library; Python scalars are ignored.
    api_version
        A version of the standard, such as "2024.12"; only checked.

    Returns
    -------
    module
        Every function of the standard, for ragged arrays as the table `scree.functions.KINDS` says,
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
    return UPPER.namespaces[lib.name]


def namespace_by_name(library: str) -> ModuleType:
    """Return the namespace of a library by its name; imports the library. See `scree.xp`."""
    return UPPER.namespaces[backend_by_name(library).name]  # type: ignore[no-any-return]


def build_namespace(lib: Backend) -> None:
    """Make the namespace of a library.

    It is made when the library is loaded, because the first call may be inside a compiled function,
    where no module can be made.
    """
    module = ModuleType(
        f"scree.xp.{lib.name}", f"The Array API standard for ragged and dense arrays of {lib.name}."
    )
    _bind_table(module, lib.xp, KINDS, lib)
    for name, table in EXTENSIONS.items():
        if hasattr(lib.xp, name):
            extension = ModuleType(f"{module.__name__}.{name}")
            _bind_table(extension, getattr(lib.xp, name), table, lib)
            setattr(module, name, extension)
    module.ragged = ragged  # type: ignore[attr-defined]
    UPPER.namespaces[lib.name] = module


def _bind_table(module: ModuleType, own: Any, table: dict[str, Kind], lib: Backend) -> None:
    """Add every name of the table that the library has."""
    for name, kind in table.items():
        if hasattr(own, name):
            function = getattr(own, name)
            is_own = kind.name == "plain"
            setattr(module, name, function if is_own else bind(function, name, kind, lib))


UPPER.getitem, UPPER.unpack = getitem, unpack
add_load_hook(build_namespace)
