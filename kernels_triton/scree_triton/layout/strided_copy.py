"""Strided copy of the bytes of tokens, independent of the dtype.

The kernels of `padding`, `gather` and `concat` differ only in how a CTA computes the source and
the target of a token. The copy moves units of up to 8 bytes. A thread moves two units at a time if
all strides and addresses are multiples of 16. Tokens of one unit with adjacent targets are written
up to 16 bytes at a time, so a thread holds several adjacent tokens. A target without a source
receives a fill value: the tail is not read, and it becomes 0.

Values have the shape (..., total, ...), with the tokens along one axis. The axes before this axis
index the pieces of a token.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..runtime.device import device_info
from ..runtime.launch import Launch, contiguous, empty, method_on_device

# Units that a CTA copies.
_TILE_UNITS = 1024
# The same for padding and gather.
_TILE_UNITS_INDEXED = 512
# The same for a gather of single units: with more loads in flight per thread, the loads wait for
# each other.
_TILE_UNITS_SCATTERED = 128
# Bytes of a token of one unit, written to adjacent targets -> tokens per program, adjacent tokens
# per thread, warps.
_SINGLE_UNIT_TILES = {1: (1024, 8, 2), 2: (1024, 8, 2), 4: (2048, 4, 4), 8: (1024, 2, 4)}
_WARPS = 4
# Constants that select the mode of a kernel; the other constants describe its tile.
_MODE_FLAGS = ("LEFT", "WRITE_MASK", "CHECKED", "INVERSE", "COUNT")
# Cached launch configs per operation.
MAX_CONFIGS = 1024


@triton.jit
def _bisect_rows(OFFSETS, token, low, high, most):
    """Return the row of each token, in [low, high]; the distance is at most `most` rows."""
    zero = tl.zeros(token.shape, tl.int32)
    low, high = low + zero, high + 1 + zero
    while most > 0:
        middle = (low + high) >> 1
        inside = tl.load(OFFSETS + middle) <= token
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
        most = most >> 1
    return low


@triton.jit
def find_rows(OFFSETS, STARTS, token, first, n, TOKENS: tl.constexpr, PER_THREAD: tl.constexpr):
    """Return the row of each token, the first token of the row, and the row's entry of STARTS.

    The tokens have the shape (TOKENS // PER_THREAD, PER_THREAD). The row of a token of the tail is
    n. The search first finds the rows of the first and the last token of the tile, 256 rows at a
    time. They bound the rows of the first and the last token of each thread, which bound the rows
    of the other tokens.
    """
    ways: tl.constexpr = 256
    ends = first + tl.arange(0, 2) * (TOKENS - 1)
    low_rows = tl.zeros([2], tl.int32)
    candidates = low_rows + n + 1
    while tl.max(candidates, 0) > 1:
        step = (candidates + (ways - 1)) // ways
        beyond = tl.arange(0, ways)[None, :] * step[:, None]
        inside = beyond < candidates[:, None]
        begins = tl.load(OFFSETS + low_rows[:, None] + beyond, mask=inside, other=0)
        inside &= begins <= ends[:, None]
        skipped = tl.maximum(tl.sum(inside.to(tl.int32), 1) - 1, 0) * step
        low_rows += skipped
        candidates = tl.minimum(step, candidates - skipped)
    least, most = tl.min(low_rows, 0), tl.max(low_rows, 0)
    side = first + tl.arange(0, TOKENS // PER_THREAD) * PER_THREAD
    low = _bisect_rows(OFFSETS, side, least, most, most - least)
    if PER_THREAD == 1:
        row = low[:, None]
        begin, start = tl.load(OFFSETS + row), tl.load(STARTS + row, mask=row < n, other=0)
    else:
        high = _bisect_rows(OFFSETS, side + (PER_THREAD - 1), least, most, most - least)
        apart = tl.max(high - low, 0)
        if apart > 1:
            row = _bisect_rows(OFFSETS, token, low[:, None], high[:, None], apart)
            begin, start = tl.load(OFFSETS + row), tl.load(STARTS + row, mask=row < n, other=0)
        else:
            # A thread has tokens of at most two rows, which need no lookup per token.
            begin = tl.load(OFFSETS + high)[:, None]
            later = token >= begin
            row = tl.where(later, high[:, None], low[:, None])
            begin = tl.where(later, begin, tl.load(OFFSETS + low)[:, None])
            start = tl.where(
                later,
                tl.load(STARTS + high, mask=high < n, other=0)[:, None],
                tl.load(STARTS + low, mask=low < n, other=0)[:, None],
            )
    return row, begin.to(token.dtype), start.to(token.dtype)


@triton.jit
def program_tile(
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    INT64: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return the tile of this program: block, first token, tokens, piece and first column.

    The tokens have the shape (TOKENS // PER_THREAD, PER_THREAD).
    """
    if PDL:
        # Wait for the end of the previous kernel.
        gdc_wait()
    COLUMNS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0)
    block = program // (PIECES * COLUMNS)
    first = block.to(tl.int64 if INT64 else tl.int32) * TOKENS
    tokens = first + (
        tl.arange(0, TOKENS // PER_THREAD)[:, None] * PER_THREAD + tl.arange(0, PER_THREAD)[None, :]
    )
    return (
        block,
        first,
        tokens,
        (program // COLUMNS % PIECES).to(first.dtype),
        program % COLUMNS * BC,
    )


@triton.jit
def store_tile(y, value, exists, ends, PER_THREAD: tl.constexpr):
    """Store adjacent tokens at once if all of them exist; `ends` means that some may not."""
    if PER_THREAD == 1:
        tl.store(y, value, mask=exists)
    else:
        whole = tl.min(exists.to(tl.int32), 1, keep_dims=True) > 0
        tl.store(y, value, mask=whole & (tl.zeros([1, PER_THREAD], tl.int32) == 0))
        if ends:
            tl.store(y, value, mask=exists & (whole == 0))


@triton.jit
def copy_tile(
    FROM,
    TO,
    source,
    target,
    valid,
    exists,
    ends,
    low,
    high,
    column,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    PER_THREAD: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy BC units of each token that exists from the unit `source` to the unit `target`.

    Tokens that are not valid receive the fill value.
    """
    unit: tl.constexpr = (
        tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    )
    reads, writes = valid & exists, exists
    if PER_THREAD == 1:
        columns = (column + tl.arange(0, BC))[None, :]
        source = tl.multiple_of(source, [ALIGN, ALIGN]) + columns
        target = tl.multiple_of(target, [ALIGN, ALIGN]) + columns
        if WIDTH % BC != 0:
            reads, writes = reads & (columns < WIDTH), writes & (columns < WIDTH)
    x = FROM.to(tl.pointer_type(unit), bitcast=True) + source
    y = TO.to(tl.pointer_type(unit), bitcast=True) + target
    fill = (tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)
    units = tl.load(x, mask=reads, other=0)
    store_tile(y, tl.where(reads, units, fill.to(unit)), writes, ends, PER_THREAD)


class TensorSpec(NamedTuple):
    """Metadata of a tensor, on which a launch config may depend.

    `address_bits` are the last four bits of its address.
    """

    device: torch.device
    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    address_bits: int = 0

    def with_shape(self, shape: Sequence[int]) -> "TensorSpec":
        """Return the metadata of a new tensor of this shape and the same dtype and device."""
        return TensorSpec(self.device, self.dtype, *contiguous(shape))

    def byte_strides(self, axis: int, row_axes: int) -> tuple[int, ...]:
        """Return the strides in bytes of rows, tokens and pieces.

        Tokens are along `axis`. `row_axes` is 1 if the first axis is an axis of rows, otherwise 0.
        """
        step = [stride * self.dtype.itemsize for stride in self.strides]
        return *step[:row_axes], step[axis], step[axis - 1] if axis > row_axes else 0


def tensor_spec(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the fields of `TensorSpec`, the key of the cached launch configs."""
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr() & 15


class LaunchConfig:
    """A launch and its static arguments, so that a call only allocates and launches.

    `make_args` is a function of the outputs and the inputs that returns the kernel's arguments.
    """

    def __init__(
        self,
        device: torch.device,
        outputs: Sequence[tuple[Sequence[int], torch.dtype]],
        launch: Launch | None = None,
        programs: int = 0,
        make_args: Callable[..., Any] | None = None,
        zeros: bool = False,
    ):
        self.index = device.index if device.type == "cuda" else None
        self.new, self.zeros = empty(device.type), zeros
        self.launch, self.programs, self.make_args = launch, programs, make_args
        self.outputs = [(*contiguous(shape), dtype) for shape, dtype in outputs]

    @method_on_device
    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs for these inputs, the first of which is the source of the copy."""
        outputs = [self.new(*spec) for spec in self.outputs]
        if self.zeros:
            for output in outputs:
                output.zero_()
        if self.launch is not None:
            self.launch(self.programs, self.make_args(outputs, *inputs))
        return outputs


class StridedCopy:
    """A copy kernel for given arrays.

    Parameters
    ----------
    kernel
        The jitted function.
    args
        The kernel's named arguments, see `launch_args`.
    tokens
        The number of tokens.
    streams
        Whether adjacent tokens have adjacent targets, and mostly adjacent sources.
    arrays
        For each array its metadata, its token axis, and 1 if its first axis is an axis of rows,
        otherwise 0. `unit_strides` has a tuple per array: its strides in units.
    dtypes
        The dtypes of the other pointers.
    flags
        The values of the kernel's mode flags.
    """

    def __init__(
        self,
        kernel: Any,
        args: Any,
        tokens: int,
        streams: bool,
        arrays: Sequence[tuple[TensorSpec, int, int]],
        dtypes: tuple[torch.dtype | None, ...],
        *flags: bool | int,
    ):
        x, axis, row_axes = arrays[0]
        width = math.prod(x.shape[axis + 1 :]) * x.dtype.itemsize
        strides = [x.byte_strides(axis, row_axes) for x, axis, row_axes in arrays]
        bits = 16 | width
        for number in (*sum(strides, ()), *(x.address_bits for x, *_ in arrays)):
            bits |= number
        # The largest power of two, up to 16, that divides all strides and addresses.
        align = bits & -bits
        self.device, unit = x.device, min(align, 8)
        self.launch, self.tokens, each = _launch(
            kernel,
            args,
            x.device,
            dtypes,
            math.prod(x.shape[row_axes:axis]),
            width // unit,
            align,
            needs_int64(tokens, arrays),
            streams,
            *flags,
        )
        self.programs_per_token = each
        self.unit_strides = [tuple(stride // unit for stride in array) for array in strides]

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks of these tokens, one block per program."""
        return -(-tokens // self.tokens)

    def config(
        self,
        outputs: Sequence[tuple[Sequence[int], torch.dtype]],
        blocks: int,
        make_args: Callable[..., Any],
        zeros: bool = False,
    ) -> LaunchConfig:
        """Return the launch config for outputs of these shapes and dtypes."""
        return LaunchConfig(
            self.device, outputs, self.launch, blocks * self.programs_per_token, make_args, zeros
        )


@cache
def _launch(
    kernel: Any,
    args: Any,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    pieces: int,
    units: int,
    align: int,
    long: bool,
    streams: bool,
    *flags: bool | int,
) -> tuple[Launch, int, int]:
    """Return the launch, the tokens per program and the programs per token.

    A piece has `units` units, and all addresses are multiples of `align` bytes.
    """
    unit, single = min(align, 8), pieces == units == 1
    if streams and single:
        block, (tokens, side, warps) = 1, _SINGLE_UNIT_TILES[unit]
    else:
        is_gather, is_padding = "INDEX" in kernel.arg_names, "WRITE_MASK" in kernel.arg_names
        most, side, warps = (
            _TILE_UNITS_SCATTERED
            if is_gather and single
            else _TILE_UNITS_INDEXED
            if is_gather or is_padding
            else _TILE_UNITS,
            1,
            _WARPS,
        )
        # The largest power of two that divides the units of a token, unless it is too small.
        block = units & -units
        block = min(block if block >= 32 else triton.next_power_of_2(units), most)
        tokens = most // block
    names = [name for name in kernel.arg_names if name in _MODE_FLAGS]
    tile = dict(
        PIECES=pieces,
        WIDTH=units,
        BC=block,
        TOKENS=tokens,
        PER_THREAD=side,
        UNIT=unit,
        ALIGN=align // unit,
        INT64=long,
        PDL=device_info(device).supports_pdl,
    )
    options = dict(num_warps=warps, launch_pdl=device_info(device).supports_pdl)
    return (
        Launch(kernel, {**dict(zip(names, flags)), **tile}, options, args=args),
        tokens,
        pieces * -(-units // block),
    )


def needs_int64(tokens: int, arrays: Sequence[tuple[TensorSpec, int, int]]) -> bool:
    """Return whether token numbers or element offsets need 64 bits."""
    return (
        max(
            tokens,
            *(sum((size - 1) * step for size, step in zip(x.shape, x.strides)) for x, *_ in arrays),
        )
        >= 1 << 30
    )


def with_regular_strides(x: torch.Tensor, axis: int, row_axes: int = 0) -> torch.Tensor:
    """Return x, or a contiguous copy unless pieces are contiguous and at equal distances."""
    if x.is_contiguous():
        return x
    shape, strides = x.shape, x.stride()
    inner, even = (
        1,
        all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(row_axes, axis - 1)),
    )
    for i in range(x.ndim - 1, axis, -1):
        even = even and strides[i] == inner
        inner *= shape[i]
    return x if even else x.contiguous()


def resized_shape(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Return a shape with another size along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


@lru_cache(1024)
def fill_words(value: float, sign: float, dtype: torch.dtype) -> tuple[int, int]:
    """Return eight bytes filled with a value, as two int32; `sign` separates -0.0 from 0.0."""
    low, high = torch.full((8 // dtype.itemsize,), value, dtype=dtype).view(torch.int32).tolist()
    return low, high
