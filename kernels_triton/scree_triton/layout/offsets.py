"""Offsets: the row of a token, by bisection, and offsets from lengths, by one launch."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.compile import define_operator, uses_operators
from ..runtime.fallback import falls_back_to
from ..runtime.launch import Launch, Number, Pointer, launch_args, launch_on_device

# Rows per CTA.
_BLOCK = 1024
# Earlier rows that a CTA sums at a time.
_SCAN_BLOCK = 8192
# With more rows, a scan is faster than CTAs that each read all rows before their own rows.
_MAX_ROWS = 1 << 16
_DTYPES = (torch.int32, torch.int64)


@triton.jit
def row_of(OFFSETS, tokens, n, bisections):
    """Return the row of each token; n for a token of the tail."""
    low = tl.zeros_like(tokens).to(tl.int32)
    high = low + n + 1
    for _ in range(bisections):
        middle = (low + high) // 2
        inside = tl.load(OFFSETS + middle) <= tokens
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit(do_not_specialize=("n",))
def offsets_kernel(LENGTHS, OFFSETS, n, BLOCK: tl.constexpr, SCAN_BLOCK: tl.constexpr):
    """Compute OFFSETS (n + 1,), the exclusive sums of LENGTHS (n,) and the total.

    A CTA computes the offsets of BLOCK rows. It sums the lengths of all earlier rows itself,
    SCAN_BLOCK at a time.
    """
    number: tl.constexpr = OFFSETS.dtype.element_ty
    first = tl.program_id(0) * BLOCK
    whole = first // SCAN_BLOCK * SCAN_BLOCK
    each = tl.arange(0, SCAN_BLOCK)
    before = tl.load(LENGTHS + whole + each, mask=whole + each < first, other=0).to(number)
    for at in range(0, whole, SCAN_BLOCK):
        before += tl.load(LENGTHS + at + each).to(number)
    row = first + tl.arange(0, BLOCK)
    length = tl.load(LENGTHS + row, mask=row < n, other=0).to(number)
    tl.store(OFFSETS + row, tl.sum(before, 0) + tl.cumsum(length, 0) - length, mask=row <= n)


@launch_args
class OffsetsArgs:
    """Arguments of `offsets_kernel`."""

    LENGTHS: Pointer
    OFFSETS: Pointer
    n: Number


def offsets_from_lengths(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the offsets (n + 1,) of rows of these lengths, in this dtype."""
    n = lengths.shape[0]
    result = torch.empty((n + 1,), dtype=dtype, device=lengths.device)
    launch_on_device(
        _launch(lengths.device, lengths.dtype, dtype),
        n // _BLOCK + 1,
        OffsetsArgs(LENGTHS=lengths.contiguous(), OFFSETS=result, n=n),
    )
    return result


@cache
def _launch(device: torch.device, *dtypes: torch.dtype) -> Launch:
    return Launch(
        offsets_kernel,
        dict(BLOCK=_BLOCK, SCAN_BLOCK=_SCAN_BLOCK),
        dict(num_warps=16),
        args=OffsetsArgs,
    )


def _fake(lengths, dtype):
    return lengths.new_empty((lengths.shape[0] + 1,), dtype=dtype)


def _standard(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=dtype), (1, 0))


_op = define_operator("offsets", falls_back_to(_standard)(offsets_from_lengths), _fake)


def rejects(call: Any) -> str | None:
    """Return why the kernel does not support an `OffsetsCall`; None if it does."""
    if call.lengths.shape[0] > _MAX_ROWS:
        return (
            f"the Triton kernel adds up the lengths of at most {_MAX_ROWS} rows, "
            f"not {call.lengths.shape[0]}"
        )
    if call.lengths.dtype not in _DTYPES:
        return f"the Triton kernel takes int32 or int64, not {call.lengths.dtype}"
    return None


def offsets(call: Any) -> torch.Tensor:
    """Compute an `OffsetsCall`."""
    return (_op if uses_operators(call.lengths) else offsets_from_lengths)(call.lengths, call.dtype)
