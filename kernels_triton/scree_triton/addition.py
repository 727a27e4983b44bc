"""Tokens added up at numbered places: half precision in float32, in one of three ways.

Tokens of places that have few are put into bins, and added in their order: see `binned`. Narrow ones are added as they come, by
atomic instructions, single numbers wherever they go, others beyond what bins are for. That is exact for integers; the sum of
floating-point numbers depends on an order that nobody knows in its last bits, so that it is not done where
`torch.use_deterministic_algorithms` asks for equal bits. All else is sorted, and added in its order: see `sorting`.
"""
import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from . import binned, sorting
from .host import on_its_device
from .launch import Launch, contiguous, empty

_NARROW, _MANY = 16, 128  # bytes of a token that is added as it comes: always, and beyond what bins are for
_TOKENS, _ELEMENTS = 128, 1024  # that a program adds as they come, at most
ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64,
       torch.int32: tl.int32, torch.int64: tl.int64}
_WIDE = {tl.float32: torch.float32, tl.float64: torch.float64, tl.int32: torch.int32, tl.int64: torch.int64}


@triton.jit(do_not_specialize=("count", "size"))
def add_kernel(X, INDEX, OUT, count, size, C: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr):
    """OUT (size, C), which held 0: the sums of the tokens X (count, C) that go to each place."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BC)[None, :]
    there = (token < count)[:, None] & (column < C)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    x = tl.load(X + token[:, None] * C + column, mask=there, other=0).to(OUT.dtype.element_ty)
    known = (place >= 0) & (place < size)
    tl.atomic_add(OUT + place[:, None] * C + column, x, mask=there & known[:, None], sem="relaxed")


@cache
def _launch(device: torch.device, x: torch.dtype, index: torch.dtype, wide: torch.dtype, width: int) -> tuple[Launch, int]:
    """What adds, and the tokens of a program."""
    block = triton.next_power_of_2(width)
    tokens = min(_TOKENS, max(1, _ELEMENTS // block))
    return Launch(add_kernel, dict(C=width, BC=block, TOKENS=tokens), dict(num_warps=4)), tokens


class _Coming:
    """What follows from shapes and dtypes where tokens are added as they come."""

    def __init__(self, device: torch.device, x: torch.dtype, index: torch.dtype, shape: tuple[int, ...], size: int,
                 acc: tl.dtype, wide: torch.dtype):
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.launch, tokens = _launch(device, x, index, wide, math.prod(shape[1:]))
        self.out, self.dtype = (*contiguous((size, *shape[1:])), wide), x
        self.programs, self.numbers = -(-shape[0] // tokens), (shape[0], size)

    @on_its_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(size, ...): the tokens of x, contiguous, added up at `index`."""
        out = self.new(*self.out).zero_()
        self.launch(self.programs, (x, index, out), (), self.numbers)
        return out if out.dtype == self.dtype else out.to(self.dtype)


@lru_cache(1024)
def _plan(device: torch.device, x: torch.dtype, index: torch.dtype, shape: tuple[int, ...], size: int, ordered: bool) -> Any:
    """What runs such an addition; None where there is nothing to add."""
    if not math.prod(shape) * size:
        return None
    few, width = binned.suits(shape[0], size), math.prod(shape[1:]) * x.itemsize
    if width <= (_NARROW if few else _MANY) and not (ordered and x.is_floating_point):
        way = _Coming
    else:
        way = binned.Plan if few else sorting.Plan
    return way(device, x, index, shape, size, ACC[x], _WIDE[ACC[x]])


def add(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """(size, ...): the tokens of x, (tokens, ...), added up at `index`; an index that is no place of these counts nothing."""
    plan = _plan(x.device, x.dtype, index.dtype, x.shape, size, torch.are_deterministic_algorithms_enabled())
    if plan is None:
        return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return plan.run(x.contiguous(), index)  # type: ignore[no-any-return]
