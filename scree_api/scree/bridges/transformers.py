"""Hugging Face transformers: models whose attention is scree's, on flattened batches and on padded ones.

The library asks for two functions: one that makes the mask of a whole forward pass, one that attends in each layer. The first
gives the second what it needs to leave padding out: a number for every token, 0 for padding, and else the sequence it is of.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..array import Array
from ..backends import backend
from ..layout import Layout
from ..ops.attention import attention
from .flash_attn import attend

#: The parts of a mask that attention knows by other ways: causality and the window from the layer, boundaries from the tokens.
KNOWN = (
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
#: Functions at the top of a mask whose parts need no look inside, which a compiler does not allow.
OUTERMOST = ("and_mask", "causal_mask_function", "bidirectional_mask_function")
REFUSED = ("position_bias", "cache", "output_attentions")
GAPS = "attention_mask: expected padding before or behind the tokens, a window sees no gaps"
ACROSS = (
    "is_encoder_decoder",
    "add_cross_attention",
)  # settings of models that attend to tokens of another batch


def register(name: str = "scree") -> None:
    """Let every model of transformers run on scree: ``from_pretrained(..., attn_implementation="scree")``.

    Parameters
    ----------
    name
        The name to give as ``attn_implementation``.

    Notes
    -----
    Flattened batches (`DataCollatorWithFlattening`, `to_hf_flattened`) and padded ones give the same as ``sdpa`` and ``eager``
    at every real token, in the forward pass, in its gradients and in `generate` with a cache. At padding attention gives 0.
    What transformers passes on beside, and scree does not have, raises: attention dropout, position biases,
    attention weights, and masks other than causal, windowed, padded or packed. Encoders such as BERT learn of the sequences of
    a flattened batch from ``cu_seq_lens_q`` alone, decoders from ``position_ids`` too.

    Examples
    --------
    >>> import transformers, scree
    >>> scree.bridges.transformers.register()
    >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1, attn_implementation="scree")
    >>> import torch
    >>> ids = scree.from_lengths(torch.tensor([7, 8, 4, 5, 6]), [2, 3])
    >>> transformers.LlamaForCausalLM(config)(**scree.bridges.to_hf_flattened(ids)).logits.shape
    torch.Size([1, 5, 50])
    """
    if any(word in name for word in ("flash", "sdpa", "flex", "eager", "paged")):
        raise ValueError(
            f"name: expected one that transformers gives no meaning of its own, got {name!r}"
        )
    AttentionInterface.register(name, forward)
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
    """What a model makes once for all its layers: the sequence of every key up to the last query, None where there is but one.

    (batch, keys): False for padding and True for the one sequence of a row; or integers, equal ones for the tokens of one
    sequence. Under a compiler nothing is read of a padded batch, nor of a single row, whose sequences `forward` learns of.
    """
    given = (
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        device,
    )
    if not torch.compiler.is_compiling():
        return _mask(*given)
    name = mask_function.__name__
    own = use_vmap or getattr(
        config, "attention_chunk_size", None
    )  # what users or models add to a mask
    packed = attention_mask is None and batch_size > 1  # may be
    if own or packed or name not in OUTERMOST or not isinstance(q_offset, int):
        return _uncompiled_mask(*given)
    used = (
        kv_length
        if name == "bidirectional_mask_function"
        else min(kv_length, q_offset - kv_offset + q_length)
    )
    return _real(batch_size, kv_length, kv_offset, used, attention_mask, device)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None,
    device: Any,
) -> torch.Tensor | None:
    """`mask` with a look at the parts of the function, and at whether there is any padding."""
    parts = {
        getattr(part, "__qualname__", "a callable object").partition(".")[0]: part
        for part in _parts(mask_function)
    }
    for name in parts:
        if name not in KNOWN:
            raise ValueError(
                f"attention_mask: scree knows no mask like that of {name}; use sdpa or eager for this model"
            )
    if "packed_sequence_mask_function" in parts:
        (packed,) = (
            cell.cell_contents for cell in parts["packed_sequence_mask_function"].__closure__
        )
        return packed.to(torch.int64) + 1
    used = kv_length
    if "causal_mask_function" in parts:  # a static cache has room behind the last query
        used = min(kv_length, int(q_offset) - kv_offset + q_length)
    real = _real(batch_size, kv_length, kv_offset, used, attention_mask, device)
    return None if real is not None and used == kv_length and bool(real.all()) else real


_uncompiled_mask = torch.compiler.disable(_mask)


def _real(
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    used: int,
    attention_mask: torch.Tensor | None,
    device: Any,
) -> torch.Tensor | None:
    """(batch, used) which keys are real, None where all of a cache are."""
    if attention_mask is None or not attention_mask.shape[1]:
        return (
            None
            if used == kv_length
            else torch.ones((batch_size, used), dtype=torch.bool, device=device)
        )
    real = attention_mask[:, kv_offset : kv_offset + used]
    return torch.nn.functional.pad(real, (0, used - real.shape[1])).to(torch.bool)


def _parts(function: Any) -> Iterator[Any]:
    """A mask function and all those that it is made of."""
    if isinstance(function, tuple):
        for part in function:
            yield from _parts(part)
    elif hasattr(function, "__qualname__"):
        yield function
        for cell in function.__closure__ or ():
            yield from _parts(cell.cell_contents)
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
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer: (batch, heads, length, head_dim) to (batch, length, heads, value_dim)."""
    for name, x in {
        "dropout": dropout or None,
        **{name: more.get(name) for name in REFUSED},
    }.items():
        if x is not None and x is not False:
            raise ValueError(
                f"{name}: scree's attention does not support it, got {x!r:.80}; use sdpa or eager for this model"
            )
    config = getattr(module, "config", None)
    if "sliding_window" not in more and getattr(config, "sliding_window", None):
        raise ValueError(
            "sliding_window: expected the window from the layer too, not from its mask alone; use sdpa or eager"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window: Any = more.get("sliding_window") or None
    if window and not causal:
        window = window - 1, window - 1

    options = {
        "causal": causal,
        "window": window,
        "scale": scaling,
        "softcap": softcap or None,
        "sinks": more.get("s_aux"),
    }
    batch, length = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ValueError(
                f"cu_seq_lens_q: expected a flattened batch (1, total), got {batch} rows"
            )
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return attend(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **options)[
            0
        ][None], None
    if attention_mask is not None and attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(
            f"attention_mask: expected (batch, length) of 0 and 1, got {shape}; use sdpa or eager"
        )
    across = not causal and any(getattr(config, name, False) for name in ACROSS)
    real = (
        attention_mask
        if attention_mask is not None and attention_mask.dtype == torch.bool
        else None
    )
    if (
        torch.compiler.is_compiling()
        and real is not None
        and not across
        and (causal or real.shape[1] == length)
    ):
        out = _compacted(q, k, v, batch, real, options)
    else:
        out = _uncompiled(q, k, v, batch, attention_mask, position_ids, across, options)
    return out.unflatten(0, (batch, length)), None


def _compacted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    real: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of (batch * length, heads, head_dim) whose padding nobody reads: it goes behind the last row, and back."""
    length, room, used = q.shape[0] // batch, k.shape[0] // batch, real.shape[1]
    if options["window"]:
        begins = (
            torch.diff(real.to(torch.int8), prepend=real.new_zeros((batch, 1), dtype=torch.int8))
            > 0
        )
        torch._assert_async((begins.sum(1) <= 1).all(), GAPS)
    asks = real[:, used - length :]
    slots, offsets = _front(asks)
    q_rows, k_slots = Array(_moved(q, slots), offsets, max_length=length), slots
    if length == used == room:
        k_rows = q_rows.with_values(_moved(k, slots))
    else:
        k_slots, k_offsets = _front(torch.nn.functional.pad(real, (0, room - used)))
        k_rows = Array(_moved(k, k_slots), k_offsets, max_length=room)
    out = attention(q_rows, k_rows, k_rows.with_values(_moved(v, k_slots)), **options).values
    return torch.where(asks.flatten()[:, None, None], out.index_select(0, slots), 0.0)


def _front(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each token of (batch, length) goes if those that are not real go behind all others; and the offsets of the rows."""
    flat = real.flatten()
    slots = torch.where(flat, flat.cumsum(0) - 1, flat.sum() + (~flat).cumsum(0) - 1)
    return slots, torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _moved(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The tokens of `x`, each in its slot."""
    return x.new_empty(x.shape).index_copy(0, slots, x)


def _by_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    across: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of (batch * length, heads, head_dim) where `ids` or the positions, read on the host, say what a sequence is."""
    length, room = q.shape[0] // batch, k.shape[0] // batch
    if ids is None and position_ids is not None and batch == 1 and position_ids.shape == (1, room):
        ids = _sequences(position_ids, _version(position_ids))
    if ids is None:
        plan = _Plan(
            _even(batch, length, q.device), _even(batch, room, k.device), None, None, False
        )
    else:
        across = across or (ids.shape[1] != length and not options["causal"])
        plan = _plan(ids, _version(ids), length, room, across)
    if plan.holes and options["window"]:
        raise ValueError(GAPS)
    out: torch.Tensor = attention(*plan.arrays(q, k, v), **options).values
    if plan.q_tokens is not None:
        out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, plan.q_tokens, out)
    return out


_uncompiled = torch.compiler.disable(_by_sequence)


def _version(x: torch.Tensor) -> Any:
    """What changes when a tensor is written to; something new every time where that leaves no trace."""
    return object() if x.is_inference() else x._version


class _Plan(NamedTuple):
    """The sequences of a batch, and which of its tokens they are made of, None where of all."""

    q_rows: Layout
    k_rows: Layout
    q_tokens: torch.Tensor | None
    k_tokens: torch.Tensor | None
    holes: bool

    def arrays(self, *qkv: torch.Tensor) -> Iterator[Array]:
        """The sequences in queries, keys and values of (batch * length, heads, head_dim)."""
        rows, tokens = (
            (self.q_rows, self.k_rows, self.k_rows),
            (self.q_tokens, self.k_tokens, self.k_tokens),
        )
        for x, own, index in zip(qkv, rows, tokens, strict=True):
            yield Array.from_layout(x if index is None else x.index_select(0, index), own)


@lru_cache(maxsize=8)
def _plan(ids: torch.Tensor, version: Any, length: int, room: int, across: bool) -> _Plan:
    """The plan of queries at the last `length` of the keys that `ids` numbers, or (`across`) of queries that stand elsewhere.

    Reads the numbers; every layer of a model brings the same tensor, so that is done once. `room` is the length of the keys.
    """
    lib = backend(ids)
    host = lib.read(ids)
    batch, width = host.shape
    row, place = np.nonzero(host)
    new = np.diff(row, prepend=-1) != 0
    number = host[row, place]
    new |= np.diff(number, prepend=number[:1]) != 0
    holes = bool((~new & (np.diff(place, prepend=-1) != 1)).any())
    if across:
        k_lengths, q_lengths = np.bincount(row, minlength=batch), np.full(batch, length)
        q_tokens = np.arange(batch * length)
    else:
        of, asks = np.cumsum(new) - 1, place >= width - length
        k_lengths, q_lengths = (
            np.bincount(x, minlength=np.count_nonzero(new)) for x in (of, of[asks])
        )
        q_tokens = row[asks] * length + place[asks] - (width - length)
    k_rows = Layout.from_host(lib, k_lengths, device=ids.device)
    q_rows = (
        k_rows
        if np.array_equal(q_lengths, k_lengths)
        else Layout.from_host(lib, q_lengths, device=ids.device)
    )

    def tokens(index: np.ndarray, count: int) -> torch.Tensor | None:
        return None if index.size == count else torch.from_numpy(index).to(ids.device)

    return _Plan(
        q_rows,
        k_rows,
        tokens(q_tokens, batch * length),
        tokens(row * room + place, batch * room),
        holes,
    )


@lru_cache(maxsize=8)
def _even(batch: int, length: int, device: torch.device) -> Layout:
    lib = backend(torch.empty(0))
    return Layout.from_host(lib, np.full(batch, length), device=device)


@lru_cache(maxsize=8)
def _sequences(position_ids: torch.Tensor, version: Any) -> torch.Tensor | None:
    """The sequence of each token of a flattened batch whose positions begin anew with every sequence; None for a single one."""
    places = backend(position_ids).read(position_ids)[0]
    starts = np.flatnonzero(np.diff(places) != 1) + 1
    if not starts.size or (places[starts] != places[0]).any():
        return None
    number = np.zeros(places.size, np.int64)
    number[starts] = 1
    return torch.from_numpy(np.cumsum(number) + 1)[None].to(position_ids.device)
