"""Kernels that call primitives of an array library, registered like any other kernel.

When a library is loaded, its modules here are imported and the kernels of installed packages are
registered.
"""

from importlib import import_module

from ..backends import Backend, add_load_hook
from ..dispatch.registry import load_plugins, loading_library

#: Library -> its modules.
MODULES = {
    "jax": ("jax", "jax_attention", "jax_cross_entropy"),
    "mlx": ("mlx",),
    "numpy": ("numpy", "numpy_paged_attention"),
    "torch": (
        "torch",
        "torch_attention",
        "torch_attention_gradient",
        "torch_cross_entropy",
        "torch_paged_attention",
    ),
}


def register_providers(backend: Backend) -> None:
    """Register the kernels of a library."""
    with loading_library(backend.name):
        for module in MODULES.get(backend.name, ()):
            import_module(f"{__name__}.{module}")
        load_plugins(backend.name)


add_load_hook(register_providers)
