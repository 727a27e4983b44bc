"""Into and out of everything that holds ragged data: one module a foreign system, imported when it is first asked for.

Conversions go by the names ``from_*`` and ``to_*`` and are found here, whichever module they stand in. Modules that stand in
for another library (`flash_attn`, `varlen`) or plug scree into one (`transformers`) are used by their own names.
"""

from importlib import import_module
from typing import Any

#: Module -> what it gives.
NAMES = {
    "dlpack": ("to_backend", "to_jax", "to_mlx", "to_numpy", "to_torch"),
    "huggingface": ("from_hf_flattened", "from_hf_padded", "to_hf_flattened", "to_hf_padded"),
    "torch": ("from_torch_nested", "to_torch_nested"),
}
MODULES = {name: module for module, names in NAMES.items() for name in names}

__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    if name in NAMES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*NAMES, *MODULES])
