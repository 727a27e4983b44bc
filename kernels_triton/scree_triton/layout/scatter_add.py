"""scatter_add by one of three methods; half precision is added in float32.

A place is an index of the first axis of the result. The method depends on the shapes:

- Few tokens per place: bucketed, in the order of the tokens, see `scatter_add_bucketed`.
- Narrow tokens: atomic additions in any order. Always used for scalars, and for wider tokens if
  buckets are not supported. The last bits of a floating-point sum depend on the order, so floating-
  point numbers use another method under `torch.use_deterministic_algorithms`.
- Otherwise: sorted, in the order of the tokens, see `scatter_add_sorted`.
"""

import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.device import INTERPRETED, device_info
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)
from . import scatter_add_bucketed, scatter_add_sorted

# Largest token, in bytes, for atomic additions: where buckets are supported, and elsewhere.
_NARROW_BYTES, _ATOMIC_BYTES = 16, 128
# Tokens (minimum, maximum) and elements per CTA.
_TOKENS, _ELEMENTS = (64, 128), 1024
# Places per token, and parts of the sums, up to which the parts are computed one after another.
_MAX_PLACES_PER_TOKEN, _MAX_PARTS = 4, 8
ACC_TYPES = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
ACC_DTYPES = {
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
}


@triton.jit(do_not_specialize=("count", "first", "size"))
def scatter_add_atomic_kernel(
    X, INDEX, OUT, count, first, size, C: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr
):
    """Add the tokens X (count, C) to OUT (size, C), the zeroed sums of the places from `first` on.

    Loads of X use evict_first, so that the sums stay in the cache.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BC)[None, :]
    place = (
        tl.load(INDEX + token, mask=token < count, other=-1, eviction_policy="evict_first").to(
            tl.int64
        )
        - first
    )
    inside = ((place >= 0) & (place < size))[:, None] & (column < C)
    x = tl.load(
        X + token[:, None] * C + column, mask=inside, other=0, eviction_policy="evict_first"
    ).to(OUT.dtype.element_ty)
    tl.atomic_add(OUT + place[:, None] * C + column, x, mask=inside, sem="relaxed")


@launch_args
class AtomicArgs:
    """Arguments of `scatter_add_atomic_kernel`."""

    X: Pointer
    INDEX: Pointer
    OUT: Pointer
    count: Number
    first: Number
    size: Number


@cache
def _launch(
    device: torch.device, x: torch.dtype, index: torch.dtype, wide: torch.dtype, width: int
) -> tuple[Launch, int]:
    """Return the launch and the tokens per program."""
    block = triton.next_power_of_2(width)
    tokens = min(max(_ELEMENTS // block, _TOKENS[0]), _TOKENS[1])
    return Launch(
        scatter_add_atomic_kernel,
        dict(C=width, BC=block, TOKENS=tokens),
        dict(num_warps=4),
        args=AtomicArgs,
    ), tokens


@cache
def l2_budget(device: torch.device) -> int:
    """Return the bytes of sums that the L2 cache holds while tokens pass through it."""
    return 1 << 25 if INTERPRETED else device_info(device).l2_cache * 2 // 3 + 1


class AtomicConfig:
    """Launch config of atomic additions: depends on shapes and dtypes only.

    Sums larger than the cache are computed in parts that fit into the cache, unless there are many
    parts or few tokens per place: the indices of all tokens are read for each part.
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
        parts = -(-size * width * wide.itemsize // l2_budget(device))
        parts = parts if parts <= _MAX_PARTS and _MAX_PLACES_PER_TOKEN * shape[0] >= size else 1
        # A multiple of 16, so that all parts have the same alignment.
        self.part_size = size // parts // 16 * 16 + 16
        self.out, self.sums = (
            (*contiguous((size, *shape[1:])), x),
            (*contiguous((min(self.part_size, size), *shape[1:])), wide),
        )
        self.programs, self.count = -(-shape[0] // tokens), shape[0]

    @method_on_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return (size, ...): the tokens of x, contiguous, added at `index`."""
        out = self.new(*self.out)
        wide = None if self.sums[2] == out.dtype else self.new(*self.sums)
        for i, part in enumerate(
            (out,) if out.shape[0] <= self.part_size else out.split(self.part_size)
        ):
            sums = part if wide is None else wide[: part.shape[0]]
            sums.zero_()
            args = AtomicArgs(
                X=x,
                INDEX=index,
                OUT=sums,
                count=self.count,
                first=i * self.part_size,
                size=part.shape[0],
            )
            self.launch(self.programs, args)
            if wide is not None:
                part.copy_(sums)
        return out


@lru_cache(1024)
def scatter_add_config(
    device: torch.device,
    x: torch.dtype,
    index: torch.dtype,
    shape: tuple[int, ...],
    size: int,
    deterministic: bool,
) -> Any:
    """Return the launch config for this metadata; None if there is nothing to add."""
    if not math.prod(shape) * size:
        return None
    bucketed, width = (
        scatter_add_bucketed.is_supported(shape[0], size),
        math.prod(shape[1:]) * x.itemsize,
    )
    if width <= (_NARROW_BYTES if bucketed else _ATOMIC_BYTES) and not (
        deterministic and x.is_floating_point
    ):
        config_type = AtomicConfig
    else:
        config_type = (
            scatter_add_bucketed.LaunchConfig if bucketed else scatter_add_sorted.LaunchConfig
        )
    return config_type(device, x, index, shape, size, ACC_TYPES[x], ACC_DTYPES[ACC_TYPES[x]])


def scatter_add(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Return (size, ...): the tokens of x, (tokens, ...), added at `index`.

    Tokens with an index out of bounds are ignored.
    """
    config = scatter_add_config(
        x.device, x.dtype, index.dtype, x.shape, size, torch.are_deterministic_algorithms_enabled()
    )
    if config is None:
        return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return config.run(x.contiguous(), index)
