"""Hugging Face's two forms of a batch: padded with an attention mask, and flattened, as its data collator makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..array import Array
from ..backends import backend
from ..broadcasting import check_shared_layout
from ..layout import Layout
from ..ops.padding import from_padded, to_padded
from .dlpack import tokens_first, widest_integer

IGNORED = -100  # the label that every loss of transformers leaves out


def from_hf_padded(hidden_states: Any, attention_mask: Any = None) -> Any:
    """The real tokens of a padded batch; gradients flow back to them.

    Parameters
    ----------
    hidden_states
        (n, L, ...) array of any library; or a mapping, such as a tokenizer's `BatchEncoding`, whose arrays are all (n, L, ...).
    attention_mask
        (n, L) integers or booleans, 0 for padding: on the right, on the left or anywhere. With a mapping it may stand in that.

    Returns
    -------
    Array or dict
        (n, None, ...), which copies the real tokens; of a mapping each array but the mask, all on one layout. Reads the mask.

    Examples
    --------
    >>> import numpy as np, scree
    >>> batch = {"input_ids": np.asarray([[0, 7, 8], [4, 5, 6]]), "attention_mask": np.asarray([[0, 1, 1], [1, 1, 1]])}
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
            f"attention_mask: expected one beside or in the batch, got the names {', '.join(batch)}"
        )
    lib = backend(mask, "attention_mask")
    if mask.ndim != 2:
        raise ValueError(f"attention_mask: expected shape (n, L), got {tuple(mask.shape)}")
    n, length = mask.shape
    grid = lib.xp.reshape(lib.xp.arange(n * length, device=lib.device(mask)), (n, length))
    slots = from_padded(grid, mask)
    for name, x in batch.items():
        if tuple(getattr(x, "shape", ()))[:2] != (n, length):
            raise ValueError(
                f"{name}: expected shape {(n, length)} as the mask, got {getattr(x, 'shape', type(x).__name__)}"
            )
    return {
        name: slots.with_values(
            lib.xp.take(lib.xp.reshape(x, (n * length, *x.shape[2:])), slots.values, axis=0)
        )
        for name, x in batch.items()
    }


def to_hf_padded(
    arr: Array, *, side: str = "right", fill_value: Any = 0, length: int | None = None
) -> tuple[Any, Any]:
    """A padded batch and its attention mask; gradients flow back.

    Parameters
    ----------
    arr, side, fill_value, length
        See `scree.to_padded`. Decoders that generate want ``side="left"``, and `fill_value` is the id of the padding token. A
        ragged axis that is not the first becomes the first.

    Returns
    -------
    hidden_states, attention_mask
        (n, length, ...), and (n, length) int64, or int32 in a library that has no int64.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_hf_padded(scree.from_lengths(np.asarray([7, 8, 4, 5, 6]), [2, 3]), side="left")[1]
    array([[0, 1, 1],
           [1, 1, 1]])
    """
    padded, mask = to_padded(tokens_first(arr), side=side, fill_value=fill_value, length=length)
    xp = arr.layout.xp
    return padded, xp.astype(mask, widest_integer(xp))


def from_hf_flattened(batch: Mapping[str, Any]) -> dict[str, Array]:
    """The sequences of a flattened batch, as `DataCollatorWithFlattening` makes it; nothing is copied.

    Parameters
    ----------
    batch
        Arrays (1, total, ...), and either ``cu_seq_lens_q`` (and ``max_length_q``) or ``position_ids``, which begin anew with
        every sequence. Of the latter no empty sequence can be seen.

    Returns
    -------
    dict
        Every array (1, total, ...) of the batch as a ragged array, all on one layout.

    Examples
    --------
    >>> import numpy as np, scree
    >>> flat = {"input_ids": np.asarray([[7, 8, 4, 5, 6]]), "position_ids": np.asarray([[0, 1, 0, 1, 2]])}
    >>> scree.bridges.from_hf_flattened(flat)["input_ids"].lengths
    array([2, 3], dtype=int32)
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping of names to arrays, got {type(batch).__name__}")
    cu, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    first = next((x for x in batch.values() if getattr(x, "ndim", 0) >= 2), None)
    if first is None or (cu is None and positions is None):
        raise ValueError(
            f"batch: expected an array (1, total, ...) and cu_seq_lens_q or position_ids, got the names {', '.join(batch)}"
        )
    total = int(first.shape[1])
    tokens = {name: x for name, x in batch.items() if getattr(x, "ndim", 0) >= 2}
    for name, x in tokens.items():
        if tuple(x.shape[:2]) != (1, total):
            raise ValueError(
                f"{name}: expected shape {(1, total)} before the axes of a token, got {tuple(x.shape)}"
            )
    if cu is not None:
        rows = Array(first[0, ...], cu, max_length=batch.get("max_length_q"))
    else:
        lib = backend(positions, "position_ids")
        host = lib.read(positions)[0]
        starts = np.flatnonzero(np.diff(host, prepend=host[:1]) != 1)
        lengths = np.diff(starts, append=total)
        rows = Array.from_layout(
            first[0, ...], Layout.from_host(lib, lengths, device=lib.device(positions))
        )
    return {name: rows.with_values(x[0, ...]) for name, x in tokens.items()}


def to_hf_flattened(input_ids: Array, *, labels: Array | None = None) -> dict[str, Any]:
    """A flattened batch with all that transformers' models take beside it, as `DataCollatorWithFlattening` makes it.

    Parameters
    ----------
    input_ids
        (n, None) token ids; (n, None, d) embeddings go by the name ``inputs_embeds``. A ragged axis that is not the first
        becomes the first.
    labels
        (n, None) on the same rows; give `input_ids` to train a language model. The first of each row is left out of the loss,
        as it would be predicted from the row before. By default there are none.

    Returns
    -------
    dict
        ``input_ids`` (1, total) and ``cu_seq_lens_q``, ``cu_seq_lens_k`` share memory with the array;
        ``position_ids`` (1, total); ``max_length_q`` and ``max_length_k`` are Python integers, which reads the offsets unless
        `max_length` is known.

    Examples
    --------
    >>> import numpy as np, scree
    >>> flat = scree.bridges.to_hf_flattened(scree.from_lengths(np.asarray([7, 8, 4, 5, 6]), [2, 3]))
    >>> flat["position_ids"], flat["cu_seq_lens_k"], flat["max_length_q"]
    (array([[0, 1, 0, 1, 2]]), array([0, 2, 5], dtype=int32), 3)
    """
    input_ids, rows = tokens_first(input_ids), input_ids.layout
    if rows.max_length is None:
        rows.read()
    xp = rows.xp
    cu = xp.astype(rows.offsets, xp.int32, copy=False)
    positions = input_ids.with_values(xp.astype(rows.positions, widest_integer(xp), copy=False))
    batch = {
        "input_ids" if input_ids.ndim == 2 else "inputs_embeds": input_ids.values[None, ...],
        "position_ids": positions.values[None, :],
        "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": rows.max_length_bound, "max_length_k": rows.max_length_bound,
    }  # fmt: skip
    if labels is not None:
        check_shared_layout("labels", (positions, labels))
        batch["labels"] = xp.where(positions.values == 0, IGNORED, labels.values)[None, :]
    return batch
