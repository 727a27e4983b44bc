"""Drop-in replacement for FlashAttention: change the import and nothing else.

The tensors are used in place; nothing is copied. The layout of a ``cu_seqlens`` tensor is cached,
so that all layers of a model share it.

This package has the functions of FlashAttention 2. The positional arguments of the versions differ,
so `v3` has the functions of FlashAttention 3 (``flash_attn_interface``) and `v4` the functions of
FlashAttention 4 (``flash_attn.cute``). `install` makes all of them importable by their own names.
"""

from .bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from .common import check_unsupported, ragged_array, varlen_attention, window_bounds
from .installation import install
from .rotary import apply_rotary_emb
from .v2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "apply_rotary_emb",
    "check_unsupported",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_put_first_axis",
    "install",
    "pad_input",
    "ragged_array",
    "unpad_input",
    "varlen_attention",
    "window_bounds",
]
