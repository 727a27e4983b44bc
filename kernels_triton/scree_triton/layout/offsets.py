"""What kernels ask of offsets: the row of a token, by bisection; and offsets from lengths, by one launch."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.autograd import start
from ..runtime.compile import define_operator
from ..runtime.launch import Launch

_BLOCK = 1024  # rows of a program
_BEFORE = 8192  # rows at a time, of those before
_MOST_ROWS = (
    1 << 16
)  # beyond, a scan is faster than programs that each look at all rows before their own
_DTYPES = (torch.int32, torch.int64)


@triton.jit
def row_of(OFFSETS, tokens, n, bisections):
    """The row of each token; n behind the last one."""
    low = tl.zeros_like(tokens).to(tl.int32)
    high = low + n + 1
    for _ in range(bisections):
        middle = (low + high) // 2
        inside = tl.load(OFFSETS + middle) <= tokens
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit(do_not_specialize=("n",))
def offsets_kernel(LENGTHS, OFFSETS, n, BLOCK: tl.constexpr, BEFORE: tl.constexpr):
    """OFFSETS (n + 1,): the sums of what stands before each of LENGTHS (n,), and of all.

    A program does BLOCK of them, and adds up by itself what stands before these, BEFORE lengths at a time.
    """
    number: tl.constexpr = OFFSETS.dtype.element_ty
    first = tl.program_id(0) * BLOCK
    whole = first // BEFORE * BEFORE
    each = tl.arange(0, BEFORE)
    before = tl.load(LENGTHS + whole + each, mask=whole + each < first, other=0).to(number)
    for at in range(0, whole, BEFORE):
        before += tl.load(LENGTHS + at + each).to(number)
    row = first + tl.arange(0, BLOCK)
    length = tl.load(LENGTHS + row, mask=row < n, other=0).to(number)
    tl.store(OFFSETS + row, tl.sum(before, 0) + tl.cumsum(length, 0) - length, mask=row <= n)


def offsets(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n + 1,) of a dtype: where rows of these lengths begin, and where the last one ends."""
    n = lengths.shape[0]
    found = torch.empty((n + 1,), dtype=dtype, device=lengths.device)
    start(
        _launch(lengths.device, lengths.dtype, dtype),
        n // _BLOCK + 1,
        (lengths.contiguous(), found),
        (),
        (n,),
    )
    return found


@cache
def _launch(device: torch.device, *dtypes: torch.dtype) -> Launch:
    return Launch(offsets_kernel, dict(BLOCK=_BLOCK, BEFORE=_BEFORE), dict(num_warps=16))


def _fake(lengths, dtype):
    return lengths.new_empty((lengths.shape[0] + 1,), dtype=dtype)


_op = define_operator("offsets", offsets, _fake)


def rejects(call: Any) -> str | None:
    """Why the kernel does not take an `OffsetsCall`; None if it does."""
    if call.lengths.shape[0] > _MOST_ROWS:
        return f"the Triton kernel adds up the lengths of at most {_MOST_ROWS} rows, not {call.lengths.shape[0]}"
    if call.lengths.dtype not in _DTYPES:
        return f"the Triton kernel takes int32 or int64, not {call.lengths.dtype}"
    return None


def run(call: Any) -> torch.Tensor:
    """Run an `OffsetsCall`."""
    return (_op if torch.compiler.is_compiling() else offsets)(call.lengths, call.dtype)
