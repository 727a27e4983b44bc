"""Calls that move tokens: to and from padded batches, by their numbers, rows, and rows of several arrays end to end."""

from collections.abc import Callable
from typing import Any

import torch

from .concat import MOST_JOINED
from .linear_map import apply, join_rows
from .scatter_add import ACC
from .scatter_indices import last, last_op, mark


def rejects(call: Any) -> str | None:
    """Why the kernels do not take a call; None if they do."""
    x = call.arrays[0] if hasattr(call, "arrays") else call.x
    x = x if isinstance(x, torch.Tensor) else x.values
    if hasattr(call, "arrays"):
        if len(call.arrays) > MOST_JOINED:
            return f"the Triton kernels join up to {MOST_JOINED} arrays at once, not {len(call.arrays)}"
        if any(other.values.dtype != x.dtype for other in call.arrays):
            return "the Triton kernels join arrays of one data type"
    if x.is_complex():
        return f"the Triton kernels take no {str(x.dtype)[6:]} here"
    if (x.requires_grad or getattr(call, "add", False)) and x.dtype not in ACC:
        return f"the Triton kernels do not add up {str(x.dtype)[6:]}"
    if hasattr(call, "fill_value") and x.numel() == 0 and call.x.total_length:
        return "the Triton kernels pad tokens of one element at least"
    return None


def _offsets(layout: Any) -> torch.Tensor:
    return layout.offsets.contiguous()


def run_pad(call: Any) -> Any:
    """Run a `PadCall`."""
    return _padding(call)(call.x)


def prepare_run_pad(call: Any) -> Callable[[Any], Any] | None:
    """What runs calls that differ from this one in the contents of their arrays alone; 0.0 is not told from -0.0 there."""
    return None if isinstance(call.fill_value, float) and call.fill_value == 0 else _padding(call)


def _padding(call: Any) -> Callable[[Any], Any]:
    dim, length, left, fill = call.x.ragged_dim, call.length, call.side == "left", call.fill_value
    return lambda arr: apply("pad", arr.values, _offsets(arr.layout), dim, length, left, fill, True)


def run_unpad(call: Any) -> torch.Tensor:
    """Run an `UnpadCall`; what does not depend on the number of tokens comes first, as the host may have to wait for that."""
    x, dim, offsets, layout = call.x, call.ragged_dim, _offsets(call.layout), call.layout
    if call.mask is None:
        return apply("unpad", x, offsets, dim, layout.total, False)
    x = (x.movedim(dim + 1, 1) if dim else x).flatten(0, 1)
    slots = (
        mark(call.mask, layout.total, offsets.dtype)[1]
        if call.slots is None
        else call.slots[: layout.total]
    )
    out = apply("take", x, slots, True)
    return out.movedim(0, dim) if dim else out


def run_gather(call: Any) -> torch.Tensor:
    """Run a `GatherCall`."""
    return apply("take", call.x, call.index.contiguous(), call.distinct)


def prepare_run_gather(call: Any) -> Callable[..., torch.Tensor] | None:
    """What runs calls that differ from this one in the contents of their arrays alone; numbers on the host are looked at."""
    dtype, distinct = call.index.dtype, call.distinct
    if call.index.device.type == "cpu":
        return None

    def take(index: Any, x: Any) -> torch.Tensor:
        x = x if isinstance(x, torch.Tensor) else x.values
        return apply("take", x, index.values.to(dtype).contiguous(), distinct)  # type: ignore[no-any-return]

    return take


def run_scatter(call: Any) -> torch.Tensor:
    """Run a `ScatterCall`."""
    index = call.index.contiguous()
    if call.add:
        return apply("add", call.x, index, call.size)
    return apply(
        "keep",
        call.x,
        index,
        (last_op if torch.compiler.is_compiling() else last)(index, call.size),
    )


def prepare_run_scatter(call: Any) -> Callable[..., torch.Tensor] | None:
    """The same as `prepare_run_gather`."""
    dtype, size, add, make = call.index.dtype, call.size, call.add, type(call)
    if call.index.device.type == "cpu":
        return None

    def put(x: Any, index: Any) -> torch.Tensor:
        places, real = (
            (index if isinstance(index, torch.Tensor) else index.values).to(dtype),
            x.layout.token_mask,
        )
        return run_scatter(
            make(x.values, places if real is None else torch.where(real, places, size), size, add)
        )

    return put


def run_select(call: Any) -> torch.Tensor:
    """Run a `SelectCall`."""
    x, layout = call.x, call.layout
    return apply(
        "select",
        x.values,
        _offsets(layout),
        call.starts.contiguous(),
        x.ragged_dim,
        layout.total,
        call.step,
        call.distinct,
    )


def run_join(call: Any) -> torch.Tensor:
    """Run a `JoinCall`."""
    return prepare_run_join(call)(**{str(i): x for i, x in enumerate(call.arrays)})


def prepare_run_join(call: Any) -> Callable[..., torch.Tensor]:
    """What runs calls that differ from this one in the contents of their arrays alone."""
    dim, wide = call.arrays[0].ragged_dim, len({x.offsets.dtype for x in call.arrays}) > 1

    def joined(**arrays: Any) -> torch.Tensor:
        xs = arrays.values()
        offsets = [x.offsets.to(torch.int64) if wide else x.offsets.contiguous() for x in xs]
        return join_rows([x.values for x in xs], offsets, dim)

    return joined
