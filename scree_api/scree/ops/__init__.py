"""`xp.ragged`: what the standard lacks for ragged arrays. One object serves every namespace."""

from ..create import from_cu_seqlens, from_lengths, from_offsets, from_segment_ids, pack, unpack
from ..padded import from_padded, to_padded
from .attention import attention
from .cross_entropy import cross_entropy, linear_cross_entropy
from .dropout import dropout
from .gated import swiglu
from .norms import layer_norm, rms_norm
from .rope import rope
from .routing import gather, group, scatter, scatter_add
from .rows import align, positions, same_layout, segment_ids
from .softmax import log_softmax, logsumexp, softmax
from .split import split

__all__ = [
    "align",
    "attention",
    "cross_entropy",
    "dropout",
    "from_cu_seqlens",
    "from_lengths",
    "from_offsets",
    "from_padded",
    "from_segment_ids",
    "gather",
    "group",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "pack",
    "positions",
    "rms_norm",
    "rope",
    "same_layout",
    "scatter",
    "scatter_add",
    "segment_ids",
    "softmax",
    "split",
    "swiglu",
    "to_padded",
    "unpack",
]
