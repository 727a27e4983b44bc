"""`namespace(*arrays)`: the standard namespace of their library that knows ragged arrays."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from . import lift, ops
from .array import Array
from .backends import Backend, backend, is_array
from .kinds import EXTENSIONS, KINDS
from .registry import load_plugins

#: Versions of the standard that a namespace may be asked for.
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")

_NAMESPACES: dict[str, ModuleType] = {}


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
        Every function of the standard, which takes ragged arrays where the table `scree.kinds.KINDS` says so and is the
        library's own on dense arrays; and the extension ``ragged`` beside ``linalg`` and ``fft``.

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
            raise TypeError(f"arrays[{i}]: expected a ragged or dense array, got {type(x).__name__}")
        if found is not None and lib is not found:
            raise TypeError(f"arrays[{i}]: expected an array of {found.name} as the others, got one of {lib.name}")
        found = lib
    if found is None:
        raise TypeError(f"arrays: expected at least one array, got {arrays}")
    known = _NAMESPACES.get(found.name)
    return known if known is not None else _build(found)


def _build(lib: Backend) -> ModuleType:
    module = ModuleType(f"scree.xp.{lib.name}", f"The Array API standard for ragged and dense arrays of {lib.name}.")
    for name, kind in KINDS.items():
        if not hasattr(lib.xp, name):
            continue  # a gap of the library, as its own namespace has it
        own = getattr(lib.xp, name)
        if kind.name == "plain":
            lifted = own
        elif kind.name == "unsupported":
            lifted = functools.wraps(own)(lift.unsupported(own, name, kind.why))
        else:
            lifted = functools.wraps(own)(lift.LIFTERS[kind.name](own, name, lib))
        setattr(module, name, lifted)
    for name in EXTENSIONS:
        if hasattr(lib.xp, name):
            setattr(module, name, getattr(lib.xp, name))
    module.ragged = ops  # type: ignore[attr-defined]
    _NAMESPACES[lib.name] = module
    load_plugins(lib.name)
    return module
