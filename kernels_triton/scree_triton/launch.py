"""Launching a compiled kernel without paying for the JIT's argument inspection at every call."""
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

INTERPRETED = knobs.runtime.interpret


class Ragged(NamedTuple):
    """A ragged tensor descriptor: tiles of rows that end where a row of the batch ends, by the copy engine itself.

    Two dimensions are put before the token dimension, which is declared 2**30 tokens long. A tile of the row
    ``[start, start + length)`` is read at token ``2**30 - length + r``, so that the end of the dimension is the end of the
    row; the two dimensions in front move the address back, by wrapping around 2**64. The idea is that of Triton's own
    ``triton.tools.ragged_tma``; here heads and head_dim share the last dimension.

    The fields are those that Triton's launcher reads from a tensor descriptor.
    """

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def ragged_shape(heads: int, dim: int, stride: int, head: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides that describe values (total, heads, dim); a head is reached by its column, a multiple of `head`."""
    width = (heads - 1) * head + dim
    return (0x7FFF0000, 0x7FFF0000, 1 << 30, width), ((1 << 34) - stride, stride, stride, 1)


class Launch:
    """A Triton kernel with its constants fixed.

    One is made for one device. The JIT inspects every argument at every call to choose a variant. Here one variant is kept
    for the common case, all pointers and strides multiples of 16 and fit for 32 bits, and launched directly; other calls go
    through the JIT.

    Parameters
    ----------
    kernel
        The jitted function. Its parameters come in the order descriptors, pointers, strides, other numbers, constants,
        and the other numbers are not specialized.
    constants, options
        Its constexpr arguments, in its order, and its compile options.
    rows
        The rows of a tile of each descriptor.
    """

    __slots__ = ("compiled", "constants", "kernel", "options", "rows", "values")

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any], rows: tuple[int, ...] = ()):
        self.kernel, self.constants, self.options, self.rows = kernel, constants, options, rows
        self.values = tuple(constants.values())
        self.compiled: Any = None

    def __call__(self, programs: int, pointers: tuple[torch.Tensor, ...], strides: tuple[int, ...],
                 numbers: tuple[int | float, ...], descriptors: tuple[Ragged, ...] = ()) -> None:
        """Launch on the current device, which must be that of the pointers, and its current stream."""
        if INTERPRETED:
            self.kernel[(programs,)](*pointers, *strides, *numbers, **self.constants)
            return
        bits = 0
        for pointer in pointers:
            bits |= pointer.data_ptr()
        size = 0
        for stride in strides:
            size |= stride
        common = (bits | size) & 15 == 0 and size < 1 << 31 and max(numbers) < 1 << 31
        kernel = self.compiled if common else None
        if kernel is None:
            described = (_typed(d, rows) for d, rows in zip(descriptors, self.rows))
            kernel = self.kernel[(programs,)](*described, *pointers, *strides, *numbers, **self.constants, **self.options)
            if common:
                self.compiled = kernel
            return
        stream = driver.active.get_current_stream(pointers[0].get_device())
        kernel.run(programs, 1, 1, stream, kernel.function, kernel.packed_metadata,
                   None, None, None, *descriptors, *pointers, *strides, *numbers, *self.values)


def _typed(descriptor: Ragged, rows: int) -> Any:
    """The descriptor as Gluon's compiler wants to see it, with its layout in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base, shape, strides, *_ = descriptor
    block = [1, 1, rows, base.shape[2]]
    dtype = gl.float16 if base.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor(base, list(shape), list(strides), block, gl.NVMMASharedLayout.get_default_for(block, dtype))
