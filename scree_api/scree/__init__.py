"""scree: one ragged array for NumPy, PyTorch, JAX, MLX and every library that follows the Array API standard."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import bridges, functions
from .array import Array
from .data.bucket import bucket
from .dispatch.registry import register_kernel, unregister_kernel
from .explain import explain
from .indexing.at import at
from .namespace import namespace
from .ragged import (
    align,
    attention,
    cross_entropy,
    dropout,
    from_cu_seqlens,
    from_lengths,
    from_offsets,
    from_padded,
    from_segment_ids,
    gather,
    group,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    logsumexp,
    pack,
    positions,
    rms_norm,
    rope,
    same_layout,
    scatter,
    scatter_add,
    segment_ids,
    softmax,
    split,
    swiglu,
    to_padded,
    unpack,
)

if TYPE_CHECKING:
    from . import data
    from .io import load, save

__version__ = "0.1.0"

__all__ = [
    "Array",
    "align",
    "at",
    "attention",
    "bridges",
    "bucket",
    "cross_entropy",
    "data",
    "dropout",
    "explain",
    "from_cu_seqlens",
    "from_lengths",
    "from_offsets",
    "from_padded",
    "from_segment_ids",
    "functions",
    "gather",
    "group",
    "layer_norm",
    "linear_cross_entropy",
    "load",
    "log_softmax",
    "logsumexp",
    "namespace",
    "pack",
    "positions",
    "register_kernel",
    "rms_norm",
    "rope",
    "same_layout",
    "save",
    "scatter",
    "scatter_add",
    "segment_ids",
    "softmax",
    "split",
    "swiglu",
    "to_padded",
    "unpack",
    "unregister_kernel",
]

#: What few programs need, and where it is loaded from when it is asked for.
_LATER = {"data": "data", "load": "io", "save": "io"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_LATER[name]}", __name__)
    return module if name == _LATER[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
