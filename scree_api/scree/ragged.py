"""`xp.ragged`: operations that the standard lacks; one module for every namespace.

Written by ``nox -s generate`` from the modules in `scree.ops`.
"""

from typing import TYPE_CHECKING, Any

from .construct import from_cu_seqlens, from_lengths, from_offsets, from_segment_ids, pack, unpack
from .hints import missing_from_operations
from .ops.activations import erf, gelu, relu, silu
from .ops.append_paged import append_paged
from .ops.attention import attention
from .ops.broadcast_rows import broadcast_rows
from .ops.conv1d import conv1d
from .ops.cross_entropy import cross_entropy, linear_cross_entropy
from .ops.dropout import dropout
from .ops.gather_scatter import gather, group, scatter, scatter_add
from .ops.layout_queries import align, positions, same_layout, segment_ids
from .ops.merge_attention import merge_attention
from .ops.norms import layer_norm, rms_norm
from .ops.padding import from_padded, to_padded
from .ops.paged_attention import paged_attention
from .ops.pages import validate_pages
from .ops.rope import rope
from .ops.shift import shift
from .ops.softmax import log_softmax, logsumexp, softmax
from .ops.split import split
from .ops.swiglu import swiglu
from .ops.topk import topk

__all__ = [
    "align",
    "append_paged",
    "attention",
    "broadcast_rows",
    "conv1d",
    "cross_entropy",
    "dropout",
    "erf",
    "from_cu_seqlens",
    "from_lengths",
    "from_offsets",
    "from_padded",
    "from_segment_ids",
    "gather",
    "gelu",
    "group",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "merge_attention",
    "pack",
    "paged_attention",
    "positions",
    "relu",
    "rms_norm",
    "rope",
    "same_layout",
    "scatter",
    "scatter_add",
    "segment_ids",
    "shift",
    "silu",
    "softmax",
    "split",
    "swiglu",
    "to_padded",
    "topk",
    "unpack",
    "validate_pages",
]

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_from_operations(name, __all__))


def __dir__() -> list[str]:
    return __all__
