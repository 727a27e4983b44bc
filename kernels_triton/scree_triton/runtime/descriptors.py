"""TMA descriptors: the shape, strides and tiles by which a kernel addresses a tensor."""

from functools import cache, lru_cache
from typing import Any

import torch

_MAX_DESCRIPTORS = 4096


def ragged_shape(
    heads: int, dim: int, stride: int, head: int, width: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the descriptor of values (total, heads, dim).

    The kernel addresses a head by its column, a multiple of `head`. If `width` is larger than
    `dim`, the kernel reads `width` elements per head and addresses the head by its number.
    """
    if width > dim:
        return (0x7FFF0000, 0x7FFF0000, 1 << 30, heads, dim), (
            (1 << 34) - stride,
            stride,
            stride,
            head,
            1,
        )
    width = (heads - 1) * head + dim
    return (0x7FFF0000, 0x7FFF0000, 1 << 30, width), ((1 << 34) - stride, stride, stride, 1)


class Ragged:
    """TMA descriptor of values (total, heads, dim), with tiles that end at the end of a ragged row.

    Two dimensions precede the token dimension, which is declared 2**30 tokens long. A tile of the
    row ``[start, start + length)`` is read at token ``2**30 - length + r``. So the end of the
    dimension is the end of the row. The two leading dimensions move the address back, by wrapping
    around 2**64. Triton's own ``triton.tools.ragged_tma`` uses the same idea. Here heads and
    head_dim share the last dimension. The exception are heads padded with zeros: the tiles of one
    head, `parts` of `block` elements each, are then wider than the head.
    """

    __slots__ = ("block", "shape", "strides")

    def __init__(
        self, heads: int, dim: int, stride: int, head: int, block: int = 0, parts: int = 1
    ):
        self.block = block or dim
        self.shape, self.strides = ragged_shape(heads, dim, stride, head, self.block * parts)

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """Return the descriptor as Gluon's compiler expects it."""
        block = [1] * (len(self.shape) - 1) + [self.block]
        block[2] = rows
        return _gluon(base, self.shape, self.strides, block)


class Tiled:
    """TMA descriptor of a dense array, with tiles of its last two axes and 0 outside the array."""

    __slots__ = ("columns", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], columns: int):
        self.shape, self.strides, self.columns = shape, strides, columns

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """Return the descriptor as Triton's compiler expects it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(
            base,
            list(self.shape),
            list(self.strides),
            [1] * (len(self.shape) - 2) + [rows, self.columns],
        )


class Boxed(Tiled):
    """`Tiled` for a kernel in Gluon."""

    __slots__ = ()

    def typed(self, base: torch.Tensor, rows: int) -> Any:
        """Return the descriptor as Gluon's compiler expects it."""
        return _gluon(
            base, self.shape, self.strides, [1] * (len(self.shape) - 2) + [rows, self.columns]
        )


def _gluon(
    base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]
) -> Any:
    """Return a descriptor of Gluon, with the layout of a tile in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[
        base.dtype
    ]
    return TensorDescriptor(
        base, list(shape), list(strides), block, gl.NVMMASharedLayout.get_default_for(block, dtype)
    )


# One object for all tensors that differ only in their tokens: a key that is cheap to compare.
ragged = cache(Ragged)
tiled = lru_cache(_MAX_DESCRIPTORS)(Tiled)
boxed = lru_cache(_MAX_DESCRIPTORS)(Boxed)
