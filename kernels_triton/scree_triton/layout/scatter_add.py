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

from ..runtime.autograd import on_its_device
from ..runtime.launch import INTERPRETED, Launch, contiguous, empty
from . import scatter_add_bucketed, scatter_add_sorted

_NARROW, _MANY = (
    16,
    128,
)  # bytes of a token that is added as it comes: always, and beyond what bins are for
_TOKENS, _ELEMENTS = (64, 128), 1024  # that a program adds as they come
_SPARSE, _MOST_PARTS = (
    4,
    8,
)  # places a token, and parts of the sums, up to which these are made one after another
ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_WIDE = {
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
}


@triton.jit(do_not_specialize=("count", "first", "size"))
def add_kernel(
    X, INDEX, OUT, count, first, size, C: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr
):
    """OUT (size, C), which held 0: the sums of the tokens X (count, C) that go to each place, `first` and what follows.

    What is read once makes room in the cache for the sums.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BC)[None, :]
    place = (
        tl.load(INDEX + token, mask=token < count, other=-1, eviction_policy="evict_first").to(
            tl.int64
        )
        - first
    )
    there = ((place >= 0) & (place < size))[:, None] & (column < C)
    x = tl.load(
        X + token[:, None] * C + column, mask=there, other=0, eviction_policy="evict_first"
    ).to(OUT.dtype.element_ty)
    tl.atomic_add(OUT + place[:, None] * C + column, x, mask=there, sem="relaxed")


@cache
def _launch(
    device: torch.device, x: torch.dtype, index: torch.dtype, wide: torch.dtype, width: int
) -> tuple[Launch, int]:
    """What adds, and the tokens of a program."""
    block = triton.next_power_of_2(width)
    tokens = min(max(_ELEMENTS // block, _TOKENS[0]), _TOKENS[1])
    return Launch(add_kernel, dict(C=width, BC=block, TOKENS=tokens), dict(num_warps=4)), tokens


@cache
def _cached(device: torch.device) -> int:
    """The bytes of sums that the cache holds beside what passes through it."""
    return (
        1 << 25
        if INTERPRETED
        else torch.cuda.get_device_properties(device).L2_cache_size * 2 // 3 + 1
    )


class _Coming:
    """What follows from shapes and dtypes where tokens are added as they come.

    Sums that take more than the cache holds are made in parts that it does hold, unless these are many or tokens are sparse: the
    numbers of all tokens are looked at for each part.
    """

    def __init__(
        self,
        device: torch.device,
        x: torch.dtype,
        index: torch.dtype,
        shape: tuple[int, ...],
        size: int,
        acc: tl.dtype,
        wide: torch.dtype,
    ):
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        width = math.prod(shape[1:])
        self.launch, tokens = _launch(device, x, index, wide, width)
        parts = -(-size * width * wide.itemsize // _cached(device))
        parts = parts if parts <= _MOST_PARTS and _SPARSE * shape[0] >= size else 1
        self.each = size // parts // 16 * 16 + 16  # so that all parts have the same alignment
        self.out, self.sums = (
            (*contiguous((size, *shape[1:])), x),
            (*contiguous((min(self.each, size), *shape[1:])), wide),
        )
        self.programs, self.count = -(-shape[0] // tokens), shape[0]

    @on_its_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(size, ...): the tokens of x, contiguous, added up at `index`."""
        out = self.new(*self.out)
        wide = None if self.sums[2] == out.dtype else self.new(*self.sums)
        for i, part in enumerate((out,) if out.shape[0] <= self.each else out.split(self.each)):
            sums = part if wide is None else wide[: part.shape[0]]
            sums.zero_()
            self.launch(
                self.programs, (x, index, sums), (), (self.count, i * self.each, part.shape[0])
            )
            if wide is not None:
                part.copy_(sums)
        return out


@lru_cache(1024)
def _plan(
    device: torch.device,
    x: torch.dtype,
    index: torch.dtype,
    shape: tuple[int, ...],
    size: int,
    ordered: bool,
) -> Any:
    """What runs such an addition; None where there is nothing to add."""
    if not math.prod(shape) * size:
        return None
    few, width = scatter_add_bucketed.suits(shape[0], size), math.prod(shape[1:]) * x.itemsize
    if width <= (_NARROW if few else _MANY) and not (ordered and x.is_floating_point):
        way = _Coming
    else:
        way = scatter_add_bucketed.Plan if few else scatter_add_sorted.Plan
    return way(device, x, index, shape, size, ACC[x], _WIDE[ACC[x]])


def add(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """(size, ...): the tokens of x, (tokens, ...), added up at `index`; an index that is no place of these counts nothing."""
    plan = _plan(
        x.device, x.dtype, index.dtype, x.shape, size, torch.are_deterministic_algorithms_enabled()
    )
    if plan is None:
        return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return plan.run(x.contiguous(), index)  # type: ignore[no-any-return]
