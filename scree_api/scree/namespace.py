"""`namespace(*arrays)`: the standard namespace of their library that knows ragged arrays."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from . import functions, ragged
from .array import Array
from .backends import NAMESPACES, Backend, backend, is_array, named
from .functions.table import EXTENSIONS, KINDS, Kind

#: Versions of the standard that a namespace may be asked for.
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")


def namespace(*arrays: Any, api_version: str | None = None) -> Any:
    """The Array API namespace for ragged and dense arrays of one library.

    Parameters
    ----------
    *arrays
        Ragged or dense arrays, all of one library; Python scalars are passed over.
    api_version
        A version of the standard, such as "2024.12"; only checked.

    Returns
    -------
    module
        Every function of the standard, which takes ragged arrays where the table `scree.functions.KINDS` says so and is the
        library's own on dense arrays; and the extension ``ragged`` beside ``linalg`` and ``fft``.

    Raises
    ------
    TypeError
        If there is no array, or arrays are of two libraries.
    ValueError
        If the version of the standard is not known.

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
    found: Backend | None = None
    for i, x in enumerate(arrays):
        if isinstance(x, Array):
            lib = x.layout.backend
        elif is_array(x):
            lib = backend(x)
        elif isinstance(x, bool | int | float | complex | None):
            continue
        else:
            raise TypeError(
                f"arrays[{i}]: expected a ragged or dense array, got {type(x).__name__}"
            )
        if found is not None and lib is not found:
            raise TypeError(
                f"arrays[{i}]: expected an array of {found.name} as the others, got one of {lib.name}"
            )
        found = lib
    if found is None:
        raise TypeError(f"arrays: expected at least one array, got {arrays}")
    known = NAMESPACES.get(found.name)
    return known if known is not None else build(found)


def by_name(library: str) -> ModuleType:
    """The namespace of a library that is imported for it; see `scree.xp`."""
    lib = named(library)
    return NAMESPACES.get(lib.name) or build(lib)


def build(lib: Backend) -> ModuleType:
    module = ModuleType(
        f"scree.xp.{lib.name}", f"The Array API standard for ragged and dense arrays of {lib.name}."
    )
    _fill(module, lib.xp, KINDS, lib)
    for name, table in EXTENSIONS.items():
        if hasattr(lib.xp, name):
            extension = ModuleType(f"{module.__name__}.{name}")
            _fill(extension, getattr(lib.xp, name), table, lib)
            setattr(module, name, extension)
    module.ragged = ragged  # type: ignore[attr-defined]
    NAMESPACES[lib.name] = module
    return module


def _fill(module: ModuleType, own: Any, table: dict[str, Kind], lib: Backend) -> None:
    """Every name of the table: the library's own, or lifted. A gap of the library stays a gap."""
    for name, kind in table.items():
        if not hasattr(own, name):
            continue
        found = getattr(own, name)
        if kind.name == "unsupported":
            found = functools.wraps(found)(functions.elementwise.unsupported(found, name, kind.why))
        elif kind.name != "plain":
            found = functools.wraps(found)(functions.LIFTERS[kind.name](found, name, lib))
        setattr(module, name, found)
