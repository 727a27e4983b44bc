"""PyTorch's nested tensors, and the methods that a DataLoader and a training loop call on a batch.

Jagged nested tensors share values and offsets in both directions. `from_torch_nested` shares the
buffer of a strided nested tensor; `to_torch_nested` copies the rows into a new buffer. Gradients
pass both ways.

On a machine with a CUDA device, importing this module also offers scree's attention kernels to
``torch.nn.attention.activate_flash_attention_impl("scree")``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..array import Array
from ..backends import backend, backend_by_name
from ..broadcasting import check_ragged
from ..construct import unpack
from ..indexing.getitem import select
from ..layout import Layout


def from_torch_nested(nested: torch.Tensor) -> Array:
    """Return a ragged array of the components of a nested tensor; gradients flow back into it.

    Parameters
    ----------
    nested
        Jagged or strided nested tensor. A jagged tensor may have any ragged axis; its values and
        offsets are shared. A jagged tensor with holes between its rows is packed, which copies and
        reads the lengths. The buffer of a strided tensor is shared if its components differ along
        their first axis.

    Returns
    -------
    Array
        The same rows. `max_length` is the longest row if a jagged tensor has it cached.

    Raises
    ------
    TypeError
        If `nested` is not a nested tensor.
    ValueError
        If the components of a strided tensor differ along more than one axis, or it has none.

    Examples
    --------
    >>> import torch, scree
    >>> parts = [torch.ones(2, 3), torch.ones(5, 3)]
    >>> nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    >>> arr = scree.bridges.from_torch_nested(nested)
    >>> arr.shape, arr.lengths, arr.values.data_ptr() == nested.values().data_ptr()
    ((2, None, 3), tensor([2, 5]), True)
    """
    if not getattr(nested, "is_nested", False):
        raise TypeError(
            f"nested: expected a nested tensor, got {type(nested).__name__}; "
            "for a dense one use from_padded"
        )
    if nested.layout != torch.jagged:
        return _from_strided(nested)
    values, offsets, ragged_dim = nested.values(), nested.offsets(), nested._ragged_idx - 1
    if nested.lengths() is None:
        return Array(values, offsets, ragged_dim, nested._maybe_max_seqlen)
    lib = backend(values)
    layout = Layout.from_host_lengths(lib, lib.read(nested.lengths()), like=offsets)
    return select(Array.unchecked(values, offsets, ragged_dim, None), layout, offsets[:-1])


def _from_strided(nested: torch.Tensor) -> Array:
    """Return a ragged array of the components of a strided nested tensor."""
    sizes = nested._nested_tensor_size()
    if sizes.ndim < 2:
        raise ValueError(
            "nested: expected at least one component, got none; "
            "the axes of an empty strided nested tensor are unknown"
        )
    varying_axes = (sizes != sizes[0]).any(dim=0).nonzero().flatten().tolist()
    if len(varying_axes) > 1:
        raise ValueError(
            "nested: expected components that differ along one axis, "
            f"got components that differ along axes {varying_axes}"
        )
    ragged_dim = varying_axes[0] if varying_axes else 0
    ragged_first = nested.transpose(1, ragged_dim + 1) if ragged_dim else nested
    lengths, shape = sizes[:, ragged_dim].numpy(), sizes[0].tolist()
    shape[0], shape[ragged_dim] = shape[ragged_dim], shape[0]
    values = ragged_first.contiguous().values().reshape(int(lengths.sum()), *shape[1:])
    layout = Layout.from_host_lengths(backend(values), lengths, device=values.device)
    return Array.from_layout(values.transpose(0, ragged_dim), layout, ragged_dim)


def to_torch_nested(arr: Array, *, layout: torch.layout = torch.jagged) -> torch.Tensor:
    """Return a nested tensor of the rows; gradients flow back into the array.

    Parameters
    ----------
    arr
        Ragged array on PyTorch.
    layout
        ``torch.jagged`` shares values and offsets. Arrays on one layout get one ragged size, so
        that PyTorch combines them in one operation. ``torch.strided`` copies the rows and reads
        the offsets.

    Returns
    -------
    torch.Tensor
        Nested tensor of `arr.batch_size` components.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array on PyTorch.
    ValueError
        If `layout` is another layout, or is ``torch.strided`` and `arr` has no rows.

    Examples
    --------
    >>> import torch, scree
    >>> arr = scree.from_lengths(torch.arange(3.0), [1, 2])
    >>> scree.bridges.to_torch_nested(arr).unbind()
    (tensor([0.]), tensor([1., 2.]))
    """
    _check_is_torch(arr, "to_torch_nested")
    if layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(
            arr.values, arr.offsets, jagged_dim=arr.ragged_dim + 1, max_seqlen=arr.layout.max_length
        )
    if layout != torch.strided:
        raise ValueError(f"layout: expected torch.jagged or torch.strided, got {layout}")
    if not arr.batch_size:
        raise ValueError(
            "arr: expected at least one row for a strided nested tensor, got none; "
            "use layout=torch.jagged"
        )
    return torch.nested.as_nested_tensor(unpack(arr), layout=torch.strided)


def to(arr: Array, *args: Any, **kwargs: Any) -> Array:
    """Return the array with another device or dtype, as `torch.Tensor.to` does.

    Parameters
    ----------
    arr
        Ragged array on PyTorch.
    *args, **kwargs
        Arguments of `torch.Tensor.to`: a device, a dtype or a tensor, ``non_blocking=``, ``copy=``.
        The offsets are moved to the device and keep their dtype.

    Returns
    -------
    Array
        The converted array; `arr` itself if nothing changes.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array on PyTorch.

    Examples
    --------
    >>> import torch, scree
    >>> scree.from_lengths(torch.ones(3), [1, 2]).to(torch.float16).dtype
    torch.float16
    """
    _check_is_torch(arr, "to")
    values = arr.values.to(*args, **kwargs)
    options = {name: kwargs[name] for name in ("non_blocking", "copy") if name in kwargs}
    return _with_parts(arr, values, arr.offsets.to(values.device, **options))


def pin_memory(arr: Array) -> Array:
    """Return the array in pinned memory, from which it can be copied to a device asynchronously.

    Parameters
    ----------
    arr
        Ragged array on PyTorch, in host memory.

    Returns
    -------
    Array
        The array with values and offsets in pinned memory.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array on PyTorch.
    """
    _check_is_torch(arr, "pin_memory")
    return _with_parts(arr, arr.values.pin_memory(), arr.offsets.pin_memory())


def record_stream(arr: Array, stream: Any) -> None:
    """Tell the allocator that `stream` uses the memory of the array.

    The allocator does not reuse the memory before the work queued on the stream is done.

    Parameters
    ----------
    arr
        Ragged array on PyTorch, on a CUDA device.
    stream
        `torch.cuda.Stream` that uses the array.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array on PyTorch.
    """
    _check_is_torch(arr, "record_stream")
    arr.values.record_stream(stream)
    arr.offsets.record_stream(stream)


def _with_parts(arr: Array, values: torch.Tensor, offsets: torch.Tensor) -> Array:
    """Return the array with other tensors; keeps the layout if the offsets are the same tensor."""
    if offsets is arr.offsets:
        return arr if values is arr.values else arr.with_values(values)
    layout = Layout(
        arr.layout.backend,
        offsets,
        arr.total_length,
        arr.layout.max_length,
        arr.layout.host_offsets,
    )
    return Array.from_layout(values, layout, arr.ragged_dim)


def _check_is_torch(arr: Array, function: str) -> None:
    if check_ragged("arr", arr).layout.backend.name != "torch":
        raise TypeError(
            f"{function}: expected an array on torch, got one on {arr.layout.backend.name}; "
            "use to_backend"
        )


# Loads the packages of kernels. One of them offers its attention to PyTorch's own switch.
backend_by_name("torch")
