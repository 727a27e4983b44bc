"""Conversions between scree and other formats of ragged data: one module per library.

A module is imported when one of its names is first used, so that ``import scree`` loads no other
library. The conversions ``from_*`` and ``to_*`` are attributes of this package. Three modules are
used by their own names. `flash_attn` and `varlen` have the functions of other libraries.
`transformers` registers scree in the models of Hugging Face.
"""

from importlib import import_module
from typing import Any

#: Module -> the conversions that it defines.
NAMES: dict[str, tuple[str, ...]] = {
    "arrow": ("from_arrow", "to_arrow"),
    "awkward": ("from_awkward", "from_ragged", "to_awkward", "to_ragged"),
    "dlpack": ("to_backend", "to_jax", "to_mlx", "to_numpy", "to_torch"),
    "huggingface": ("from_hf_flattened", "from_hf_padded", "to_hf_flattened", "to_hf_padded"),
    "lists": ("from_lists", "from_pandas", "to_lists", "to_pandas"),
    "scipy": ("from_scipy", "to_scipy"),
    "serving": (
        "from_block_table",
        "from_flashinfer",
        "slot_mapping",
        "to_block_table",
        "to_flashinfer",
    ),
    "tensorflow": ("from_tensorflow", "to_tensorflow"),
    "torch": ("from_torch_nested", "to_torch_nested"),
    "flash_attn": (),
    "transformers": (),
    "varlen": (),
}
#: Conversion -> its module.
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
