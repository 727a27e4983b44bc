"""PyTorch: nested tensors, jagged and strided, and what a DataLoader and a training loop ask of a batch."""

from __future__ import annotations

from typing import Any

import torch

from ..array import Array
from ..backends import backend
from ..broadcasting import check_ragged
from ..construct import unpack
from ..indexing.getitem import select
from ..layout import Layout


def from_torch_nested(nested: torch.Tensor) -> Array:
    """A ragged array of the components of a nested tensor; gradients flow back into it.

    Parameters
    ----------
    nested
        Jagged, of any ragged axis: the values and offsets are those of the nested tensor, not copied; with holes between its
        rows it is packed, which copies and reads the lengths. Strided: the buffer is not copied where the first axis of the
        components is the one that differs.

    Returns
    -------
    Array
        The same rows. `max_length` is the longest row where a jagged tensor remembers it.

    Raises
    ------
    TypeError
        If it is no nested tensor.
    ValueError
        If the components of a strided one differ along more than one axis, or if there are none.

    Examples
    --------
    >>> import torch, scree
    >>> nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged)
    >>> arr = scree.bridges.from_torch_nested(nested)
    >>> arr.shape, arr.lengths, arr.values.data_ptr() == nested.values().data_ptr()
    ((2, None, 3), tensor([2, 5]), True)
    """
    if not getattr(nested, "is_nested", False):
        raise TypeError(
            f"nested: expected a nested tensor, got {type(nested).__name__}; for a dense one use from_padded"
        )
    if nested.layout != torch.jagged:
        return _from_strided(nested)
    values, offsets, ragged_dim = nested.values(), nested.offsets(), nested._ragged_idx - 1
    if nested.lengths() is None:
        return Array(values, offsets, ragged_dim, nested._maybe_max_seqlen)
    lib = backend(values)
    rows = Layout.from_host(lib, lib.read(nested.lengths()), like=offsets)
    return select(Array.unchecked(values, offsets, ragged_dim, None), rows, offsets[:-1])


def _from_strided(nested: torch.Tensor) -> Array:
    sizes = nested._nested_tensor_size()
    if sizes.ndim < 2:
        raise ValueError(
            "nested: expected at least one component, a strided nested tensor without any knows no axes"
        )
    differ = (sizes != sizes[0]).any(dim=0).nonzero().flatten().tolist()
    if len(differ) > 1:
        raise ValueError(
            f"nested: expected components that differ along one axis, got some that differ along {differ}"
        )
    ragged_dim = differ[0] if differ else 0
    first = nested.transpose(1, ragged_dim + 1) if ragged_dim else nested
    lengths, shape = sizes[:, ragged_dim].numpy(), sizes[0].tolist()
    shape[0], shape[ragged_dim] = shape[ragged_dim], shape[0]
    values = first.contiguous().values().reshape(int(lengths.sum()), *shape[1:])
    rows = Layout.from_host(backend(values), lengths, device=values.device)
    return Array.from_layout(values.transpose(0, ragged_dim), rows, ragged_dim)


def to_torch_nested(arr: Array, *, layout: torch.layout = torch.jagged) -> torch.Tensor:
    """A nested tensor of the rows, with gradients.

    Parameters
    ----------
    arr
        Ragged array on PyTorch.
    layout
        ``torch.jagged``: values and offsets are shared, and so is the ragged size of two results on one layout, so that PyTorch
        takes them together. ``torch.strided`` copies and reads the offsets.

    Examples
    --------
    >>> import torch, scree
    >>> arr = scree.from_lengths(torch.arange(3.0), [1, 2])
    >>> scree.bridges.to_torch_nested(arr).unbind()
    (tensor([0.]), tensor([1., 2.]))
    """
    _torch(arr, "to_torch_nested")
    if layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(
            arr.values, arr.offsets, jagged_dim=arr.ragged_dim + 1, max_seqlen=arr.layout.max_length
        )
    if layout != torch.strided:
        raise ValueError(f"layout: expected torch.jagged or torch.strided, got {layout}")
    if not arr.batch_size:
        raise ValueError(
            "arr: expected at least one row, a strided nested tensor without any knows no axes"
        )
    return torch.nested.as_nested_tensor(unpack(arr), layout=torch.strided)


def to(arr: Array, *args: Any, **kwargs: Any) -> Array:
    """`torch.Tensor.to`: a device, a dtype or a tensor, ``non_blocking=``, ``copy=``; the offsets follow the device alone."""
    _torch(arr, "to")
    values = arr.values.to(*args, **kwargs)
    options = {name: kwargs[name] for name in ("non_blocking", "copy") if name in kwargs}
    return _moved(arr, values, arr.offsets.to(values.device, **options))


def pin_memory(arr: Array) -> Array:
    """The array in pinned memory, from which a copy to the device need not wait."""
    _torch(arr, "pin_memory")
    return _moved(arr, arr.values.pin_memory(), arr.offsets.pin_memory())


def record_stream(arr: Array, stream: Any) -> None:
    """Tell the allocator that `stream` uses the memory, so that it is not given away before the stream is done."""
    _torch(arr, "record_stream")
    arr.values.record_stream(stream)
    arr.offsets.record_stream(stream)


def _moved(arr: Array, values: torch.Tensor, offsets: torch.Tensor) -> Array:
    if offsets is arr.offsets:
        return arr if values is arr.values else arr.with_values(values)
    rows = Layout(
        arr.layout.backend, offsets, arr.total_length, arr.layout.max_length, arr.layout.host
    )
    return Array.from_layout(values, rows, arr.ragged_dim)


def _torch(arr: Array, name: str) -> None:
    if check_ragged("arr", arr).layout.backend.name != "torch":
        raise TypeError(
            f"{name}: expected an array on torch, got one on {arr.layout.backend.name}; use to_backend"
        )
