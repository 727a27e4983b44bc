"""Kernels for operations that move tokens: padding, gather, scatter, selection and concatenation of rows."""

from collections.abc import Callable
from typing import Any

import torch

from scree.functions.manipulation import joined_layout

from ..runtime.compile import uses_operators
from .concat import MAX_ARRAYS
from .linear_map import apply, concat_rows
from .scatter_add import ACC_TYPES
from .scatter_indices import last_tokens, last_tokens_op, mask_indices

_ARRAYS = "values", "padded", "arr", "x"  # the field of a call record that holds the tokens


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a call; None if they do."""
    if hasattr(call, "arrays"):
        x = call.arrays[0].values
        if len(call.arrays) > MAX_ARRAYS:
            return (
                f"the Triton kernels join up to {MAX_ARRAYS} arrays at once, not {len(call.arrays)}"
            )
        if any(other.values.dtype != x.dtype for other in call.arrays):
            return "the Triton kernels join arrays of one data type"
    else:
        x = next(getattr(call, name) for name in _ARRAYS if hasattr(call, name))
        x = x if isinstance(x, torch.Tensor) else x.values
    if x.is_complex():
        return f"the Triton kernels take no {str(x.dtype)[6:]} here"
    if (x.requires_grad or getattr(call, "add", False)) and x.dtype not in ACC_TYPES:
        return f"the Triton kernels do not add {str(x.dtype)[6:]}"
    if hasattr(call, "fill_value") and x.numel() == 0 and call.arr.total_length:
        return "the Triton kernels pad tokens of one element at least"
    return None


def _offsets(layout: Any) -> torch.Tensor:
    return layout.offsets.contiguous()


def pad(call: Any) -> Any:
    """Compute a `PadCall`."""
    return _padding(call)(call.arr)


def prepare_pad(call: Any) -> Callable[[Any], Any] | None:
    """Return a function for calls with the same metadata; None for a fill value of 0.0, which equals -0.0 as a key."""
    return None if isinstance(call.fill_value, float) and call.fill_value == 0 else _padding(call)


def _padding(call: Any) -> Callable[[Any], Any]:
    dim, length, left = call.arr.ragged_dim, call.length, call.side == "left"
    fill = call.fill_value
    return lambda arr: apply("pad", arr.values, _offsets(arr.layout), dim, length, left, fill, True)


def unpad(call: Any) -> Any:
    """Compute an `UnpadCall`; the number of tokens is read last, as the host may have to wait for it."""
    x, dim, offsets, layout = call.padded, call.ragged_dim, _offsets(call.layout), call.layout
    if call.mask is None:
        values = apply("unpad", x, offsets, dim, layout.total, False)
    else:
        x = (x.movedim(dim + 1, 1) if dim else x).flatten(0, 1)
        if call.slots is None:
            slots = mask_indices(call.mask, layout.total, offsets.dtype)[1]
        else:
            slots = call.slots[: layout.total]
        values = apply("gather", x, slots, True)
        values = values.movedim(0, dim) if dim else values
    return call.result(values)


def gather(call: Any) -> Any:
    """Compute a `GatherCall`."""
    values = apply("gather", call.values, call.indices.contiguous(), call.distinct)
    return call.index.with_values(values, ragged_dim=0)


def prepare_gather(call: Any) -> Callable[..., Any] | None:
    """Return a function for calls with the same metadata; None for indices on the host, which are validated."""
    dtype, distinct = call.indices.dtype, call.distinct
    if call.indices.device.type == "cpu":
        return None

    def run(index: Any, x: Any) -> Any:
        x = x if isinstance(x, torch.Tensor) else x.values
        values = apply("gather", x, index.values.to(dtype).contiguous(), distinct)
        return index.from_layout(values, index.layout)

    return run


def scatter(call: Any) -> torch.Tensor:
    """Compute a `ScatterCall`."""
    return _scatter(call.values, call.indices.contiguous(), call.size, call.add)


def _scatter(values: torch.Tensor, indices: torch.Tensor, size: int, add: bool) -> torch.Tensor:
    if add:
        return apply("scatter_add", values, indices, size)
    find_last = last_tokens_op if uses_operators(values, indices) else last_tokens
    return apply("scatter_last", values, indices, find_last(indices, size))


def prepare_scatter(call: Any) -> Callable[..., torch.Tensor] | None:
    """Return a function for calls with the same metadata; None for indices on the host, which are validated."""
    dtype, size, add = call.indices.dtype, call.size, call.add
    if call.indices.device.type == "cpu":
        return None

    def run(x: Any, index: Any) -> torch.Tensor:
        indices = (index if isinstance(index, torch.Tensor) else index.values).to(dtype)
        mask = x.layout.token_mask
        indices = indices if mask is None else torch.where(mask, indices, size)
        return _scatter(x.values, indices.contiguous(), size, add)

    return run


def select(call: Any) -> Any:
    """Compute a `SelectCall`."""
    x, layout = call.x, call.layout
    offsets, starts = _offsets(layout), call.starts.contiguous()
    arguments = x.ragged_dim, layout.total, call.step, call.distinct
    values = apply("select", x.values, offsets, starts, *arguments)
    return x.from_layout(values, layout, x.ragged_dim)


def join(call: Any) -> Any:
    """Compute a `JoinCall`."""
    return prepare_join(call)(**{str(i): x for i, x in enumerate(call.arrays)})


def prepare_join(call: Any) -> Callable[..., Any]:
    """Return a function for calls with the same metadata."""
    dim, wide = call.arrays[0].ragged_dim, len({x.offsets.dtype for x in call.arrays}) > 1

    def run(**arrays: Any) -> Any:
        xs = [*arrays.values()]
        offsets = [x.offsets.to(torch.int64) if wide else x.offsets.contiguous() for x in xs]
        values = concat_rows([x.values for x in xs], offsets, dim)
        return xs[0].from_layout(values, joined_layout([x.layout for x in xs]), dim)

    return run
