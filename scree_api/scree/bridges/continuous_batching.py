"""Attention for the continuous batching of transformers, which is its method `generate_batch`.

transformers passes the new tokens of all requests in one row, its paged cache, and the places of the
tokens in this cache in one of two forms:

- a block table, if each request has one new token. This function writes the new keys and values
  into the pages and attends to the pages.
- slots, one number per token. The function writes the new tokens to their slots and attends to the
  slots as pages of one token. Nothing is copied, except in windowed layers, where the slots of a new
  chunk of several tokens may hold keys that the chunk still needs.

The cache of a windowed layer is a ring: the token at position p is at p modulo the window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers.generation.continuous_batching import PagedAttentionCache

from ..array import Array
from ..ops.append_paged import append_paged
from ..ops.paged_attention import paged_attention
from .flash_attn import varlen_attention
from .flash_attn.common import ragged_array

#: Major and minor version of transformers.
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
#: The first and the last version on which the tests ran.
TESTED_VERSIONS = (5, 17), (5, 24)
#: From this version on, transformers ignores the prefix "paged|" of a name.
WITHOUT_PREFIX = (5, 19)
#: From this version on, an allocator has the cache of all layers of one type.
WITH_ALLOCATORS = (5, 18)
#: From this version on, the model updates the cache; before it, the attention function does.
WITH_UPDATE_BY_MODEL = (5, 24)


class _LayerCache(NamedTuple):
    """The cache of one layer.

    Attributes
    ----------
    k, v
        (num_pages, page_size, num_kv_heads, head_dim) pages.
    group
        Index of the layer's group in the block table and in the lists of slots.
    layer_type
        The key of its lengths: "full_attention" or "sliding_attention".
    window
        Size of the ring, or None.
    sentinel
        The slot whose place a new token takes.
    """

    k: torch.Tensor
    v: torch.Tensor
    group: int
    layer_type: str
    window: int | None
    sentinel: int


def _layer_cache(cache: PagedAttentionCache, layer: int) -> _LayerCache:
    if VERSION >= WITH_ALLOCATORS:
        from transformers.generation.continuous_batching import cache_allocators

        allocator = cache.layer_to_allocator[layer]
        # The method of the subclass for windowed layers raises.
        full: Any = cache_allocators.FullAttentionCacheAllocator
        k, v = full.get_cache_for_block_table(allocator, layer)
        window = getattr(allocator, "sliding_window", None)
        group, sentinel = allocator.index, allocator.sentinel_index
    else:
        group, index = cache.layer_index_to_group_indices[layer]
        shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
        k, v = (x[index].view(shape) for x in (cache.key_cache, cache.value_cache))
        window, sentinel = cache.sliding_windows[layer], cache.sentinel_index
        window = None if window == 1 else window  # transformers says 1 for no window
    layer_type = "full_attention" if window is None else "sliding_attention"
    return _LayerCache(k, v, group, layer_type, window, sentinel)


def _paged_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    cache: PagedAttentionCache,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: Any,
    read_index: list[torch.Tensor],
    write_index: list[torch.Tensor],
    block_table: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: Any = None,
    **unused: Any,
) -> torch.Tensor:
    """Write the new tokens of a layer to its cache, and return (tokens, heads, head_dim) attention.

    Takes (1, heads, tokens, head_dim) tensors; `options` are arguments of `paged_attention`. Up to
    5.18 the bounds of the lengths are called ``max_seqlen``, and a model with one type of layers
    has no dictionaries.
    """
    layer_idx: Any = module.layer_idx
    layer = _layer_cache(cache, layer_idx)
    max_q = max_seqlen_q if max_length_q is None else max_length_q
    max_k = max_seqlen_k if max_length_k is None else max_length_k
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, max_k = cu_seq_lens_k[layer.layer_type], max_k[layer.layer_type]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if block_table is not None:
        queries = ragged_array(q, cu_seq_lens_q, 1)
        table = block_table[layer.group]
        return _decode(queries, k, v, layer, table, cu_seq_lens_k, position_ids, options)
    read, write = read_index[layer.group], write_index[layer.group]
    if not read.numel():  # all requests are new
        _write(layer, write, k, v)
    elif layer.window is None or max_q == 1:
        _write(layer, write, k, v)
        if layer.window is not None:  # the new token is the last one of its row
            read = read.index_copy(0, cu_seq_lens_k[1:].to(torch.int64) - 1, write)
        queries = ragged_array(q, cu_seq_lens_q, max_q)
        slots = ragged_array(read, cu_seq_lens_k, max_k)
        k_slots, v_slots = (x.flatten(0, 1)[:, None] for x in (layer.k, layer.v))
        lengths = torch.diff(cu_seq_lens_k)
        out: torch.Tensor = paged_attention(
            queries, k_slots, v_slots, slots, lengths, **options
        ).values
        return out
    else:  # a chunk may overwrite keys that it needs, so it is written last
        new_k, new_v = k, v
        is_new = (read == layer.sentinel)[:, None, None]
        k, v = (
            x.flatten(0, 1).index_select(0, read).masked_scatter_(is_new, new)
            for x, new in ((layer.k, new_k), (layer.v, new_v))
        )
        _write(layer, write, new_k, new_v)
    out, _ = varlen_attention(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_q, max_k, **options)
    return out


paged_forward = torch.compiler.disable(_paged_forward)


def _write(layer: _LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for pages, new in ((layer.k, k), (layer.v, v)):
        pages.flatten(0, 1).index_copy_(0, slots, new)


def _decode(
    q: Array,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: _LayerCache,
    block_table: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    position_ids: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return attention of one new token per request, through a block table.

    The ring of a windowed layer holds just the keys that the token sees. Their order does not
    matter, so the token sees all of it.
    """
    lengths = ends = torch.diff(cu_seq_lens_k)
    if layer.window is not None:
        if position_ids is None:
            raise ValueError(
                "position_ids: a windowed layer needs them with a block table, got None; "
                "set max_blocks_per_request=0 for this model"
            )
        positions = position_ids[0, : q.batch_size].to(lengths.dtype)
        ends = torch.minimum(positions % layer.window + 1, lengths)  # 0 for rows of padding
        options = {**options, "window": None}
    new_k, new_v = q.with_values(k), q.with_values(v)
    append_paged(layer.k, layer.v, new_k, new_v, block_table, ends)
    out: torch.Tensor = paged_attention(q, layer.k, layer.v, block_table, lengths, **options).values
    return out


# ---------------------------------------------------------------- names of transformers
#: The names that `admit_name` has admitted.
_NAMES: set[str] = set()


def _is_admitted(name: str | None) -> bool:
    return (name or "").removeprefix("paged|") in _NAMES


def admit_name(name: str) -> None:
    """Make `generate_batch` accept the name of an attention implementation, with block tables.

    transformers decides by the name. It accepts names with "flash", for which it loads functions. It
    passes block tables to names with "flash" and then "2" or "3". It has no block tables for
    windowed layers. So this function replaces some functions of transformers. The new functions
    treat the admitted names differently, and all other names as before.
    """
    first, last = TESTED_VERSIONS
    if not first <= VERSION <= last:
        raise RuntimeError(
            f"transformers: expected version {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
            f"got {transformers.__version__}"
        )
    if "flash" not in name or not any(digit in name.partition("flash")[2] for digit in "23"):
        raise ValueError(
            f"name: expected a name with 'flash' and then 2 or 3, as transformers does, got {name!r}"
        )
    if not _NAMES:
        _replace_loader()
        _replace_block_tables()
        if VERSION >= WITH_UPDATE_BY_MODEL:
            _replace_update()
    _NAMES.add(name)


def _replace_loader() -> None:
    """Accept an admitted name for every model, and load the functions of scree for it."""
    from transformers import modeling_flash_attention_utils as utils

    from . import flash_attn

    load = utils._lazy_imports

    def load_functions(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if not _is_admitted(implementation):
            return load(implementation, *args, **kwargs)
        return (
            flash_attn.flash_attn_func,
            flash_attn.flash_attn_varlen_func,
            flash_attn.flash_attn_with_kvcache,
            flash_attn.pad_input,
            flash_attn.unpad_input,
        )

    utils._lazy_imports = load_functions
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation

    def check_name(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if _is_admitted(attn_implementation):  # GPT-OSS names the implementations that it accepts
            return attn_implementation or ""
        name: str = check(self, attn_implementation, *args, **kwargs)
        return name

    transformers.PreTrainedModel._check_and_adjust_attn_implementation = check_name


def _replace_block_tables() -> None:
    """Let windowed layers have block tables, for an admitted name."""
    if VERSION >= WITH_ALLOCATORS:
        _replace_allocators()
    else:
        _replace_cache()


def _replace_update() -> None:
    """Pass the cache to the attention function, which writes the new tokens itself: 5.24 and later.

    The method of transformers copies all keys and values of the requests.
    """
    update = PagedAttentionCache.update

    def update_cache(
        self: Any,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> Any:
        if not _is_admitted(self.config._attn_implementation):
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    PagedAttentionCache.update = update_cache


def _replace_allocators() -> None:
    """Let the allocators of windowed layers fill block tables: 5.18 and later."""
    from transformers.generation.continuous_batching import cache_allocators, initialization

    sliding: Any = cache_allocators.SlidingAttentionCacheAllocator
    full: Any = cache_allocators.FullAttentionCacheAllocator
    construct, ensure = sliding.__init__, initialization.ensure_decode_fast_path_is_available

    def construct_allocator(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        construct(self, *args, config=config, **kwargs)
        self.supports_block_table = _is_admitted(config._attn_implementation)

    def ensure_available(config: Any, *args: Any, **kwargs: Any) -> None:
        sliding.supports_block_table = _is_admitted(config._attn_implementation)
        try:
            ensure(config, *args, **kwargs)
        finally:
            sliding.supports_block_table = False

    sliding.fill_block_table = full.fill_block_table  # it raised
    sliding.__init__ = construct_allocator
    initialization.ensure_decode_fast_path_is_available = ensure_available


def _replace_cache() -> None:
    """Let the cache give block tables to windowed layers: 5.17."""
    from transformers.generation.continuous_batching import cache_manager

    construct_cache = PagedAttentionCache.__init__

    def construct(self: Any, config: Any, continuous_batching_config: Any, **kwargs: Any) -> None:
        num_blocks = continuous_batching_config.max_blocks_per_request
        construct_cache(
            self, config=config, continuous_batching_config=continuous_batching_config, **kwargs
        )
        if _is_admitted(config._attn_implementation) and self.num_sliding_attention_groups:
            self.max_blocks_per_request = num_blocks or 0

    def fill_block_table(
        self: Any, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        pages = torch.tensor(self.block_table[request_id], dtype=block_table.dtype)
        block_table[: len(pages)] = pages.to(block_table.device)

    PagedAttentionCache.__init__ = construct
    cache_manager.SlidingAttentionCacheAllocator.fill_block_table = fill_block_table  # it raised
