"""One ragged array for NumPy, PyTorch, JAX, MLX and every Array API library."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before the modules of scree: from within their imports, the import of NumPy takes 16 of 62 ms longer
# on Python 3.11, because calls at that depth allocate and free a part of the interpreter's stack.
import numpy as _numpy  # noqa: F401 (imported for this reason alone)

from . import bridges, functions, ragged
from .array import Array
from .bridges import methods as _methods  # noqa: F401 (attaches the methods of `Array` that convert)
from .bridges.lists import from_lists
from .dispatch.registry import register_kernel, unregister_kernel
from .indexing.at import at
from .namespace import namespace
from .ragged import *  # noqa: F403 (a generated list)

if TYPE_CHECKING:
    from . import data, distributed, xp
    from .data.bucket import bucket
    from .explanation import explain
    from .io import load, save
    from .ops.rope_scaling import RopeScaling, rope_frequencies
    from .page_pool import PagePool
    from .standard import Namespace

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Namespace",
    "PagePool",
    "RopeScaling",
    "at",
    "bridges",
    "bucket",
    "data",
    "distributed",
    "explain",
    "from_lists",
    "functions",
    "load",
    "namespace",
    "ragged",
    "register_kernel",
    "rope_frequencies",
    "save",
    "unregister_kernel",
    "xp",
]
__all__ += ragged.__all__

#: Names that few programs need -> the module that is imported on first use.
_LAZY = {
    "Namespace": "standard",
    "PagePool": "page_pool",
    "RopeScaling": "ops.rope_scaling",
    "bucket": "data.bucket",
    "data": "data",
    "distributed": "distributed",
    "explain": "explanation",
    "load": "io",
    "rope_frequencies": "ops.rope_scaling",
    "save": "io",
    "xp": "xp",
}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{_LAZY[name]}", __name__)
        return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
