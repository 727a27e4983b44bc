"""Attention for the models of Hugging Face transformers, on flattened and on padded batches.

transformers calls two functions. `mask` runs once per forward pass and returns the mask that all
layers share. `forward` runs in each layer and computes attention. The mask has one sequence id per
key: 0 for padding, else a number that all tokens of one sequence share.

The tensors of a flattened batch are used in place. The tokens of a padded batch are copied without
the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import PagedAttentionCache

from ..array import Array
from ..backends import backend
from ..layout import Layout
from ..ops.attention import attention, normalize_window
from .continuous_batching import VERSION, WITHOUT_PREFIX, admit_name, paged_forward
from .flash_attn import varlen_attention
from .flash_attn.common import equal_rows

#: Mask functions that `forward` does not need: it takes causality and the window from the layer,
#: and the boundaries of sequences from the tokens.
SUPPORTED_MASKS = (
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
#: Outermost mask functions that are accepted under a compiler, which cannot inspect their parts.
SUPPORTED_OUTERMOST = ("and_mask", "causal_mask_function", "bidirectional_mask_function")
#: Keyword arguments of transformers that raise.
UNSUPPORTED_ARGUMENTS = ("position_bias", "cache", "output_attentions")
#: Settings of models that have layers with cross-attention.
CROSS_ATTENTION_SETTINGS = ("is_encoder_decoder", "add_cross_attention")
GAPS_MESSAGE = (
    "attention_mask: expected padding before or after the tokens, "
    "a window does not support gaps between them"
)

PACKED_MESSAGE = (
    "position_ids: expected one sequence per row in a compiled model, or a single row with "
    "cu_seq_lens_q"
)


def register(name: str = "scree") -> None:
    """Register scree as an attention implementation of transformers.

    Afterwards every model runs on it with ``from_pretrained(..., attn_implementation="scree")``.

    Parameters
    ----------
    name
        Name to pass as ``attn_implementation``.

    Raises
    ------
    ValueError
        If transformers gives the name a meaning of its own, as it does for names with "flash".

    Notes
    -----
    Flattened batches (`DataCollatorWithFlattening`, `to_hf_flattened`) and padded ones give the
    results of ``sdpa`` and ``eager`` at every real token: in the forward pass, in its gradients and
    in `generate` with a cache. At padding, attention is 0.

    Attention dropout, which many configurations train with, runs PyTorch's own attention with a
    dense mask of all pairs of tokens: it draws the same numbers as ``sdpa`` and needs as much
    memory. Set it to 0 for memory linear in the number of tokens. Layers with a softcap or sinks,
    which ``sdpa`` lacks, use the dropout of `attention`.

    Arguments of transformers that scree does not support raise: position biases, attention weights,
    and masks other than causal, windowed, padded or packed.

    A model compiled with ``fullgraph=True`` takes rows of one sequence, with or without a mask, and
    a single row with ``cu_seq_lens_q``. Several sequences in one of several rows raise there.

    Encoders such as BERT find the sequences of a flattened batch only by ``cu_seq_lens_q``.
    Decoders find them by ``position_ids`` too.

    Examples
    --------
    >>> import torch, transformers, scree
    >>> scree.bridges.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1, attn_implementation="scree",
    ... )
    >>> ids = scree.from_lengths(torch.tensor([7, 8, 4, 5, 6]), [2, 3])
    >>> batch = scree.bridges.to_hf_flattened(ids)
    >>> transformers.LlamaForCausalLM(config)(**batch).logits.shape
    torch.Size([1, 5, 50])
    """
    if any(word in name for word in ("flash", "sdpa", "flex", "eager", "paged")):
        raise ValueError(
            f"name: expected a name without a meaning in transformers, got {name!r}; "
            "use for example 'scree'"
        )
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    if VERSION < WITHOUT_PREFIX:
        AttentionInterface.register(f"paged|{name}", forward)


def register_continuous_batching(name: str = "scree_flash2") -> None:
    """Register scree as an attention implementation that `generate_batch` accepts.

    `generate_batch` is the continuous batching of transformers. Up to 5.18 it accepts the name of
    `register` too, but passes block tables only to names with "flash" and 2 or 3. From 5.19 on it
    refuses other names. So this function uses such a name, and replaces the functions of
    transformers that load FlashAttention by that name.

    Parameters
    ----------
    name
        Name to pass as ``attn_implementation``. It must have "flash" in it, and then 2 or 3.

    Raises
    ------
    ValueError
        If transformers would not accept the name.
    RuntimeError
        If scree was not tested with the installed version of transformers: 5.17 to 5.24 are
        accepted.

    Notes
    -----
    Models with windows, softcaps and sinks are supported, with the tokens of ``sdpa`` or ``eager``.
    Windowed layers get block tables as well, which transformers itself does not give them.

    Examples
    --------
    >>> import torch, transformers, scree
    >>> scree.bridges.transformers.register_continuous_batching()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, attn_implementation="scree_flash2",
    ... )
    >>> config._attn_implementation
    'scree_flash2'
    """
    admit_name(name)
    for prefix in ("", "paged|"):
        AttentionInterface.register(prefix + name, forward)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    use_vmap: bool = False,
    config: Any = None,
    **unused: Any,
) -> torch.Tensor | None:
    """Return the mask that all layers of a model share in one forward pass.

    It has the sequence id of every key up to the last query, in one of three forms:

    - (batch, keys) booleans: False for padding, True for the one sequence of a row;
    - (batch, keys) integers: 0 for padding, else equal for the tokens of one sequence;
    - None, if every row is one sequence without padding.

    Under a compiler neither a padded batch nor a single row is read. `forward` then finds the
    sequences of a single row. Each of several rows without a mask must be one sequence.
    """
    request = _MaskRequest(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device
    )
    if not torch.compiler.is_compiling():
        return _inspected_mask(request)
    # Users and models may add functions of their own to a mask.
    is_extended = use_vmap or getattr(config, "attention_chunk_size", None)
    if is_extended or mask_function.__name__ not in SUPPORTED_OUTERMOST:
        return _uncompiled_mask(request)
    if not isinstance(q_offset, int):  # a static cache
        return _static_key_mask(request) if q_length == 1 else _uncompiled_mask(request)
    if attention_mask is None and batch_size > 1 and mask_function.__name__ == "and_mask":
        _assert_unpacked(request)
    return _key_mask(request, mask_function.__name__ != "bidirectional_mask_function")


class _MaskRequest(NamedTuple):
    """The arguments that transformers passes to `mask`."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: int
    function: Any
    attention_mask: torch.Tensor | None
    device: Any


def _inspected_mask(request: _MaskRequest) -> torch.Tensor | None:
    """Return the mask after inspecting the parts of the function and reading the padding."""
    parts = {
        getattr(part, "__qualname__", "a callable object").partition(".")[0]: part
        for part in _mask_parts(request.function)
    }
    for name in parts:
        if name not in SUPPORTED_MASKS:
            raise ValueError(
                f"attention_mask: expected a causal, windowed, padded or packed mask, got {name}; "
                "use sdpa or eager for this model"
            )
    if "packed_sequence_mask_function" in parts:
        (sequence_ids,) = (
            cell.cell_contents for cell in parts["packed_sequence_mask_function"].__closure__
        )
        return sequence_ids.to(torch.int64) + 1
    is_causal = "causal_mask_function" in parts
    if is_causal:  # the offset of a static cache is a tensor
        request = request._replace(q_offset=int(request.q_offset))
    key_mask = _key_mask(request, is_causal)
    if key_mask is not None and key_mask.shape[1] == request.kv_length and bool(key_mask.all()):
        return None
    return key_mask


_uncompiled_mask = torch.compiler.disable(_inspected_mask)


def _assert_unpacked(request: _MaskRequest) -> None:
    """Raise on the device if a row has several sequences, without reading its positions.

    A compiler cannot inspect the parts of the mask function. So the function is evaluated: every
    token sees the token before it, unless a sequence starts there.
    """
    rows = torch.arange(request.batch_size, device=request.device)[:, None]
    tokens = torch.arange(1, request.q_length, device=request.device)[None]
    is_continued = request.function(rows, 0, tokens, tokens - 1)
    torch._assert_async(is_continued.all(), PACKED_MESSAGE)


def _key_mask(request: _MaskRequest, is_causal: bool) -> torch.Tensor | None:
    """Return (batch, keys) booleans, False for padding; None if no key is masked.

    For a causal mask the keys end at the last query: a static cache has unused slots after it.
    """
    num_keys = request.kv_length
    if is_causal:
        num_keys = min(num_keys, request.q_offset - request.kv_offset + request.q_length)
    mask = request.attention_mask
    if mask is None or not mask.shape[1]:
        if num_keys == request.kv_length:
            return None
        shape = request.batch_size, num_keys
        return torch.ones(shape, dtype=torch.bool, device=request.device)
    mask = mask[:, request.kv_offset : request.kv_offset + num_keys]
    return torch.nn.functional.pad(mask, (0, num_keys - mask.shape[1])).to(torch.bool)


def _static_key_mask(request: _MaskRequest) -> torch.Tensor:
    """Return (batch, keys) booleans for one query per row, whose position is only on the device.

    False for padding, and for the slots of a static cache after the query.
    """
    key_mask = _key_mask(request._replace(q_offset=request.kv_offset), is_causal=False)
    slots = torch.arange(request.kv_length, device=request.device) + request.kv_offset
    is_written = (slots <= request.q_offset).expand(request.batch_size, -1)
    return is_written if key_mask is None else is_written & key_mask


def _mask_parts(function: Any) -> Iterator[Any]:
    """Yield a mask function and all functions that its closure combines."""
    if isinstance(function, tuple):
        for part in function:
            yield from _mask_parts(part)
    elif hasattr(function, "__qualname__"):
        yield function
        for cell in function.__closure__ or ():
            yield from _mask_parts(cell.cell_contents)
    elif callable(function):
        yield function


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer.

    Takes (batch, heads, length, head_dim) tensors; returns (batch, length, heads, value_dim), and
    None for the attention weights.
    """
    cache = kwargs.get("cache")
    is_paged = isinstance(cache, PagedAttentionCache)
    _check_supported(module, {**kwargs, "cache": None} if is_paged else kwargs)
    query, key, value = _autocast(query, key, value)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window: Any = kwargs.get("sliding_window") or None
    if window and not causal:
        window = window - 1, window - 1
    options = {
        "causal": causal,
        "window": window,
        "scale": scaling,
        "softcap": softcap or None,
        "sinks": kwargs.get("s_aux"),
    }
    if is_paged:
        kwargs |= {
            "position_ids": position_ids,
            "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k,
            "max_length_q": max_length_q,
            "max_length_k": max_length_k,
        }
        options["causal"] = True  # 5.17 does not say it
        return paged_forward(module, query, key, value, options, **kwargs)[None], None
    batch, length = query.shape[0], query.shape[2]
    if dropout and (options["softcap"] is not None or options["sinks"] is not None):
        seed = torch.randint(2**63 - 1, (1,), device=query.device)
        options = {**options, "dropout": dropout, "seed": seed}
    elif dropout:
        ids = attention_mask
        if cu_seq_lens_q is not None:
            ids = _ids_from_offsets(cu_seq_lens_q, length)
        elif ids is None and position_ids is not None and batch == 1:
            ids = torch.cumsum(torch.diff(position_ids, prepend=position_ids[:, :1]) != 1, dim=1)
        return _dropout_attention(query, key, value, ids, dropout, options), None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ValueError(
                f"cu_seq_lens_q: expected a flattened batch (1, total), got {batch} rows"
            )
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        out, _ = varlen_attention(
            q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **options
        )
        return out[None], None
    if attention_mask is not None and attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(
            f"attention_mask: expected (batch, length) of 0 and 1, got {shape}; use sdpa or eager"
        )
    config = getattr(module, "config", None)
    is_cross = not causal and any(getattr(config, name, False) for name in CROSS_ATTENTION_SETTINGS)
    if (
        torch.compiler.is_compiling()
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and not is_cross
        and (causal or attention_mask.shape[1] == length)
    ):
        out = compacted_attention(q, k, v, batch, attention_mask, options)
    elif torch.compiler.is_compiling() and attention_mask is None and batch > 1:
        queries = Array.from_layout(q, equal_rows(batch, length, q))
        keys = Array.from_layout(k, equal_rows(batch, k.shape[0] // batch, k))
        out = attention(queries, keys, keys.with_values(v), **options).values
    else:
        out = _uncompiled_attention(q, k, v, batch, attention_mask, position_ids, is_cross, options)
    return out.unflatten(0, (batch, length)), None


def _autocast(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert arrays in a region of `torch.autocast`, as PyTorch's own attention does.

    In such a region linear layers return the dtype of the region, and rotations of models float32.
    """
    device = arrays[0].device.type
    if not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in arrays)


def _ids_from_offsets(offsets: torch.Tensor, length: int) -> torch.Tensor:
    """Return (1, length) sequence ids, from 1 on, of a flattened batch."""
    tokens = torch.arange(length, device=offsets.device)
    return torch.searchsorted(offsets.to(torch.int64), tokens, right=True)[None]


def _dropout_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention with dropout by PyTorch's own function; see `forward` for the shapes."""
    length, kv_length = query.shape[2], key.shape[2]
    rows = torch.arange(kv_length - length, kv_length, device=query.device)[:, None]
    columns = torch.arange(kv_length, device=query.device)
    allowed = torch.ones((length, kv_length), dtype=torch.bool, device=query.device)
    left, right = normalize_window(options["window"], options["causal"])
    if right is not None:
        allowed &= columns <= rows + right
    if left is not None:
        allowed &= columns >= rows - left
    if sequence_ids is not None:
        ids = torch.nn.functional.pad(sequence_ids, (0, kv_length - sequence_ids.shape[1]))
        allowed = allowed & (ids != 0)[:, None, None]
        if length == kv_length:  # padding sees nothing, so its result is 0
            allowed = allowed & (ids != 0)[:, None, :, None]
            allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        scale=options["scale"],
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def _check_supported(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise if a layer requests a feature that scree does not support."""
    requested = {name: kwargs.get(name) for name in UNSUPPORTED_ARGUMENTS}
    for name, x in requested.items():
        if x is not None and x is not False:
            raise ValueError(
                f"{name}: scree's attention does not support it, got {x!r:.80}; "
                "use sdpa or eager for this model"
            )
    config = getattr(module, "config", None)
    if "sliding_window" not in kwargs and getattr(config, "sliding_window", None):
        raise ValueError(
            "sliding_window: expected the window from the layer too, not from its mask alone; "
            "use sdpa or eager"
        )


def compacted_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    key_mask: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of (batch * length, heads, head_dim) tensors without reading the mask.

    A compiler needs static shapes, so padding is not removed. The padding is moved into the tail,
    after the last row. The output is moved back.
    """
    length, kv_length, num_keys = q.shape[0] // batch, k.shape[0] // batch, key_mask.shape[1]
    if options["window"]:
        before_first = key_mask.new_zeros((batch, 1), dtype=torch.int8)
        is_start = torch.diff(key_mask.to(torch.int8), prepend=before_first) > 0
        torch._assert_async((is_start.sum(1) <= 1).all(), GAPS_MESSAGE)
    # In a static cache, slots after a single query have a mask too.
    query_mask = key_mask.any(1, True) if length == 1 else key_mask[:, num_keys - length :]
    q_slots, q_offsets = _compact(query_mask)
    queries = Array(_scatter_tokens(q, q_slots), q_offsets, max_length=length)
    if length == num_keys == kv_length:
        k_slots, keys = q_slots, queries.with_values(_scatter_tokens(k, q_slots))
    else:
        padded_mask = torch.nn.functional.pad(key_mask, (0, kv_length - num_keys))
        k_slots, k_offsets = _compact(padded_mask)
        keys = Array(_scatter_tokens(k, k_slots), k_offsets, max_length=kv_length)
    values = keys.with_values(_scatter_tokens(v, k_slots))
    out = attention(queries, keys, values, **options).values
    return torch.where(query_mask.flatten()[:, None, None], out.index_select(0, q_slots), 0.0)


def _compact(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each entry of a (batch, length) mask after compaction, and the offsets.

    The tokens come first, in order. The padding comes after the last row.
    """
    is_token = mask.flatten()
    padding_slots = is_token.sum() + (~is_token).cumsum(0) - 1
    slots = torch.where(is_token, is_token.cumsum(0) - 1, padding_slots)
    return slots, torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _scatter_tokens(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return `x` with each token moved to its slot."""
    return x.new_empty(x.shape).index_copy(0, slots, x)


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    sequence_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    is_cross: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of (batch * length, heads, head_dim) tensors within each sequence.

    The sequences follow from `sequence_ids` or `position_ids`, which are read on the host. Without
    both, each row of the batch is one sequence.
    """
    length, kv_length = q.shape[0] // batch, k.shape[0] // batch
    is_flattened = position_ids is not None and batch == 1 and position_ids.shape == (1, kv_length)
    if sequence_ids is None and is_flattened:
        sequence_ids = _ids_from_positions(position_ids, _version(position_ids))
    if sequence_ids is None:
        q_layout = _uniform_layout(batch, length, q.device)
        k_layout = _uniform_layout(batch, kv_length, k.device)
        sequences = _Sequences(q_layout, k_layout, q_tokens=None, k_tokens=None, has_gaps=False)
    else:
        is_cross = is_cross or (sequence_ids.shape[1] != length and not options["causal"])
        sequences = _find_sequences(
            sequence_ids, _version(sequence_ids), length, kv_length, is_cross
        )
    if sequences.has_gaps and options["window"]:
        raise ValueError(GAPS_MESSAGE)
    out: torch.Tensor = attention(*sequences.arrays(q, k, v), **options).values
    if sequences.q_tokens is not None:
        out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, sequences.q_tokens, out)
    return out


_uncompiled_attention = torch.compiler.disable(sequence_attention)


def _version(x: torch.Tensor) -> Any:
    """Return a key that changes when the tensor is written to.

    Tensors of the inference mode have no version, so their key is new on every call.
    """
    return object() if x.is_inference() else x._version


class _Sequences(NamedTuple):
    """The sequences of a batch: their layouts, and the indices of their tokens (None for all)."""

    q_layout: Layout
    k_layout: Layout
    q_tokens: torch.Tensor | None
    k_tokens: torch.Tensor | None
    has_gaps: bool

    def arrays(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Array]:
        """Yield ragged arrays of (batch * length, heads, head_dim) queries, keys and values."""
        for x, layout, tokens in (
            (q, self.q_layout, self.q_tokens),
            (k, self.k_layout, self.k_tokens),
            (v, self.k_layout, self.k_tokens),
        ):
            yield Array.from_layout(x if tokens is None else x.index_select(0, tokens), layout)


@lru_cache(maxsize=8)
def _find_sequences(
    sequence_ids: torch.Tensor, version: Any, length: int, kv_length: int, is_cross: bool
) -> _Sequences:
    """Return the sequences of a batch; reads the (batch, num_keys) sequence ids of its keys.

    The queries are the last `length` of these keys, or tokens of another batch if `is_cross`. Each
    row of the tensor of keys has `kv_length` entries, of which the first num_keys have an id.

    Every layer of a model passes the same tensor, so that the cache reads it once per forward pass.
    """
    lib = backend(sequence_ids)
    host_ids = lib.read(sequence_ids)
    batch, num_keys = host_ids.shape
    row, column = np.nonzero(host_ids)
    token_ids = host_ids[row, column]
    is_start = np.diff(row, prepend=-1) != 0
    is_start |= np.diff(token_ids, prepend=token_ids[:1]) != 0
    has_gaps = bool((~is_start & (np.diff(column, prepend=-1) != 1)).any())
    if is_cross:
        k_lengths, q_lengths = np.bincount(row, minlength=batch), np.full(batch, length)
        q_tokens = np.arange(batch * length)
    else:
        first_query = num_keys - length
        sequence, is_query = np.cumsum(is_start) - 1, column >= first_query
        num_sequences = np.count_nonzero(is_start)
        k_lengths = np.bincount(sequence, minlength=num_sequences)
        q_lengths = np.bincount(sequence[is_query], minlength=num_sequences)
        q_tokens = row[is_query] * length + column[is_query] - first_query
    k_layout = Layout.from_host_lengths(lib, k_lengths, device=sequence_ids.device)
    q_layout = (
        k_layout
        if np.array_equal(q_lengths, k_lengths)
        else Layout.from_host_lengths(lib, q_lengths, device=sequence_ids.device)
    )

    def to_device(indices: np.ndarray, total: int) -> torch.Tensor | None:
        return None if indices.size == total else torch.from_numpy(indices).to(sequence_ids.device)

    return _Sequences(
        q_layout,
        k_layout,
        to_device(q_tokens, batch * length),
        to_device(row * kv_length + column, batch * kv_length),
        has_gaps,
    )


@lru_cache(maxsize=8)
def _uniform_layout(batch: int, length: int, device: torch.device) -> Layout:
    """Return the layout of rows of equal length."""
    lib = backend(torch.empty(0))
    return Layout.from_host_lengths(lib, np.full(batch, length), device=device)


@lru_cache(maxsize=8)
def _ids_from_positions(position_ids: torch.Tensor, version: Any) -> torch.Tensor | None:
    """Return the sequence id of each token of a flattened batch; None for a single sequence.

    The positions restart with every sequence.
    """
    positions = backend(position_ids).read(position_ids)[0]
    starts = np.flatnonzero(np.diff(positions) != 1) + 1
    if not starts.size or (positions[starts] != positions[0]).any():
        return None
    is_start = np.zeros(positions.size, np.int64)
    is_start[starts] = 1
    return torch.from_numpy(np.cumsum(is_start) + 1)[None].to(position_ids.device)
