"""Hugging Face's two forms of a batch: padded with an attention mask, and flattened.

A flattened batch is the output of `DataCollatorWithFlattening` and shares memory in both
directions. A padded batch is copied. Gradients pass both ways within one library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..array import Array
from ..backends import backend
from ..broadcasting import check_shared_layout
from ..indexing.getitem import drop_tail
from ..layout import Layout
from ..ops.padding import from_padded, to_padded
from .dlpack import tokens_first, widest_integer

IGNORED_LABEL = -100  # the label that every loss of transformers ignores


def from_hf_padded(hidden_states: Any, attention_mask: Any = None) -> Any:
    """Return the tokens of a padded batch without the padding; reads the mask.

    Parameters
    ----------
    hidden_states
        (n, L, ...) array of any library; or a mapping of names to such arrays, for example the
        `BatchEncoding` of a tokenizer.
    attention_mask
        (n, L) integers or booleans; 0 is padding, which may be anywhere in a row. It may also be
        an entry of the mapping.

    Returns
    -------
    Array or dict
        (n, None, ...) copy of the tokens, with gradients. For a mapping, a dict of all its arrays
        except the mask, on one layout.

    Raises
    ------
    ValueError
        If there is no mask, or shapes do not agree.

    Examples
    --------
    >>> import numpy as np, scree
    >>> batch = {
    ...     "input_ids": np.asarray([[0, 7, 8], [4, 5, 6]]),
    ...     "attention_mask": np.asarray([[0, 1, 1], [1, 1, 1]]),
    ... }
    >>> ids = scree.bridges.from_hf_padded(batch)["input_ids"]
    >>> ids.values, ids.lengths
    (array([7, 8, 4, 5, 6]), array([2, 3], dtype=int32))
    """
    if not isinstance(hidden_states, Mapping):
        if attention_mask is None:
            raise ValueError(
                "attention_mask: expected a mask, got None; without padding use from_lengths"
            )
        return from_padded(hidden_states, attention_mask)
    batch = dict(hidden_states)
    mask = batch.pop("attention_mask", None) if attention_mask is None else attention_mask
    if mask is None:
        raise ValueError(
            "attention_mask: expected a mask as an argument or in the batch, "
            f"got the names {', '.join(batch)}"
        )
    lib = backend(mask, "attention_mask")
    if mask.ndim != 2:
        raise ValueError(f"attention_mask: expected shape (n, L), got {tuple(mask.shape)}")
    n, length = mask.shape
    slots = lib.xp.reshape(lib.xp.arange(n * length, device=lib.device(mask)), (n, length))
    token_slots = from_padded(slots, mask)
    for name, x in batch.items():
        if tuple(getattr(x, "shape", ()))[:2] != (n, length):
            raise ValueError(
                f"{name}: expected shape {(n, length)} as the mask, "
                f"got {getattr(x, 'shape', type(x).__name__)}"
            )

    def take_tokens(x: Any) -> Array:
        flat = lib.xp.reshape(x, (n * length, *x.shape[2:]))
        return token_slots.with_values(lib.xp.take(flat, token_slots.values, axis=0))

    return {name: take_tokens(x) for name, x in batch.items()}


def to_hf_padded(
    arr: Array, *, side: str = "right", fill_value: Any = 0, length: int | None = None
) -> tuple[Any, Any]:
    """Return a padded batch and its attention mask; gradients flow back into the array.

    Parameters
    ----------
    arr
        Ragged array of any library. Its ragged axis becomes the second axis of the batch.
    side
        "right" or "left", the side of the padding. Generation with a decoder needs "left".
    fill_value
        Value of the padding; for token ids, the id of the padding token.
    length
        Length of the padded rows; by default the longest row. See `scree.to_padded`.

    Returns
    -------
    hidden_states, attention_mask
        (n, length, ...) batch, and (n, length) int64 mask, or int32 in a library without int64.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> ids = scree.from_lengths(np.asarray([7, 8, 4, 5, 6]), [2, 3])
    >>> scree.bridges.to_hf_padded(ids, side="left")[1]
    array([[0, 1, 1],
           [1, 1, 1]])
    """
    padded, mask = to_padded(tokens_first(arr), side=side, fill_value=fill_value, length=length)
    xp = arr.layout.xp
    return padded, xp.astype(mask, widest_integer(xp))


def from_hf_flattened(batch: Mapping[str, Any]) -> dict[str, Array]:
    """Return the sequences of a flattened batch as ragged arrays; copies nothing.

    Parameters
    ----------
    batch
        Mapping of names to arrays (1, total, ...), as `DataCollatorWithFlattening` returns it. It
        has either ``cu_seq_lens_q`` (and ``max_length_q``), or ``position_ids``, which restart with
        every sequence. Empty sequences cannot be recovered from ``position_ids``.

    Returns
    -------
    dict
        Each array (1, total, ...) of the batch as a ragged array, all on one layout.

    Raises
    ------
    TypeError
        If `batch` is not a mapping.
    ValueError
        If the boundaries are missing, or shapes do not agree.

    Examples
    --------
    >>> import numpy as np, scree
    >>> flat = {
    ...     "input_ids": np.asarray([[7, 8, 4, 5, 6]]),
    ...     "position_ids": np.asarray([[0, 1, 0, 1, 2]]),
    ... }
    >>> scree.bridges.from_hf_flattened(flat)["input_ids"].lengths
    array([2, 3], dtype=int32)
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping of names to arrays, got {type(batch).__name__}")
    cu_seqlens, position_ids = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    tokens = {name: x for name, x in batch.items() if getattr(x, "ndim", 0) >= 2}
    first = next(iter(tokens.values()), None)
    if first is None or (cu_seqlens is None and position_ids is None):
        raise ValueError(
            "batch: expected an array (1, total, ...) and cu_seq_lens_q or position_ids, "
            f"got the names {', '.join(batch)}"
        )
    total = int(first.shape[1])
    for name, x in tokens.items():
        if tuple(x.shape[:2]) != (1, total):
            raise ValueError(
                f"{name}: expected shape {(1, total)} before the axes of a token, "
                f"got {tuple(x.shape)}"
            )
    if cu_seqlens is not None:
        arr = Array(first[0, ...], cu_seqlens, max_length=batch.get("max_length_q"))
    else:
        lib = backend(position_ids, "position_ids")
        positions = lib.read(position_ids)[0]
        starts = np.flatnonzero(np.diff(positions, prepend=positions[:1]) != 1)
        lengths = np.diff(starts, append=total)
        layout = Layout.from_host_lengths(lib, lengths, device=lib.device(position_ids))
        arr = Array.from_layout(first[0, ...], layout)
    return {name: arr.with_values(x[0, ...]) for name, x in tokens.items()}


def to_hf_flattened(input_ids: Array, *, labels: Array | None = None) -> dict[str, Any]:
    """Return a flattened batch, with all arguments that the models of transformers need for it.

    Parameters
    ----------
    input_ids
        (n, None) token ids, or (n, None, d) embeddings, which get the name ``inputs_embeds``. The
        ragged axis becomes the second axis of the batch.
    labels
        (n, None) labels on the same rows; pass `input_ids` to train a language model. The first
        label of each row is excluded from the loss: it would be predicted from the previous row.
        By default there are no labels.

    Returns
    -------
    dict
        The entries of `DataCollatorWithFlattening`. ``input_ids`` (1, total), ``cu_seq_lens_q`` and
        ``cu_seq_lens_k`` share memory with the array; ``position_ids`` (1, total) is new.
        ``max_length_q`` and ``max_length_k`` are Python integers; unless `max_length` is known
        they need the offsets to be read. Tokens of a tail are left out; the offsets are read if it
        is not known that there is none.

    Raises
    ------
    TypeError
        If `input_ids` is not a ragged array.
    ValueError
        If `labels` has other rows.

    Examples
    --------
    >>> import numpy as np, scree
    >>> ids = scree.from_lengths(np.asarray([7, 8, 4, 5, 6]), [2, 3])
    >>> flat = scree.bridges.to_hf_flattened(ids)
    >>> flat["position_ids"], flat["cu_seq_lens_k"], flat["max_length_q"]
    (array([[0, 1, 0, 1, 2]]), array([0, 2, 5], dtype=int32), 3)
    """
    if labels is not None:
        check_shared_layout("labels", (input_ids, labels))
    input_ids = tokens_first(input_ids)
    if not input_ids.layout.has_no_tail:
        input_ids, labels = drop_tail(input_ids), None if labels is None else drop_tail(labels)
    layout = input_ids.layout
    if layout.max_length is None:
        layout.read_offsets()
    xp = layout.xp
    cu_seqlens = xp.astype(layout.offsets, xp.int32, copy=False)
    positions = input_ids.with_values(xp.astype(layout.positions, widest_integer(xp), copy=False))
    batch = {
        "input_ids" if input_ids.ndim == 2 else "inputs_embeds": input_ids.values[None, ...],
        "position_ids": positions.values[None, :],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": layout.max_length_bound,
        "max_length_k": layout.max_length_bound,
    }
    if labels is not None:
        batch["labels"] = xp.where(positions.values == 0, IGNORED_LABEL, labels.values)[None, :]
    return batch
