"""The base class of launch configs: the allocations of a call."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..runtime.launch import contiguous, empty, on_device
from .dkdv_splits import KeyTileWork
from .metadata import ALL_ROWS, AttentionSpec, HeadLayout, VarlenLayout
from .tile_configs import FEW_QUERIES
from .tile_scheduler import max_tiles

#: The L2 cache of an H100 holds the keys and values of this many numbers, summed over heads.
_L2_NUMBERS = 40_000_000
#: The parameters of the functions that launch forward and backward.
FORWARD_PARAMETERS = "q, k, v, slopes, out, lse, count, seed=None"
BACKWARD_PARAMETERS = "q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count, seed=None"


def count_heads_in_l2(heads: int, limit: int, group: int = 1) -> int:
    """Return how many heads run concurrently, because the L2 cache holds the keys of few heads.

    `group` adjacent heads read the same keys, so they run together. The result is the largest multiple of
    `group` that divides `heads` and is at most `limit`, or else `group`.
    """
    return max(
        g for g in range(group, heads + 1, group) if heads % g == 0 and (g <= limit or g == group)
    )


def raise_head_count(
    heads: int, count: int, works: Sequence[KeyTileWork], ctas: int, numbers: int, group: int = 1
) -> int:
    """Return how many heads run concurrently: `count`, or more where the last heads would end late.

    Heads run in groups, one after another. A group ends late if its work per CTA is less than its
    longest tile.

    Parameters
    ----------
    heads
        Number of heads; the result divides it.
    count
        The number of heads by the L2 cache alone, see `count_heads_in_l2`.
    works
        Estimates of the work of one head.
    ctas
        Number of CTAs that run at once.
    numbers
        Numbers in the keys and values of the longest row, per head. If all heads of a larger group do
        not fit into the L2 cache, the group stays smaller, unless it would end at twice the mean.
    group
        Number of adjacent heads that read the same keys; `count` and the result are multiples of it.
    """
    needed = max(work.longest * ctas / work.total for work in works)
    for larger in range(count + group, heads + 1, group):
        if heads % larger == 0:
            fits = larger * numbers <= _L2_NUMBERS
            if count >= needed or not (fits or 2 * count <= needed):
                break
            count = larger
    return count


class LaunchConfig:
    """The common part of launch configs: shapes, and the allocations of forward and backward."""

    #: The maximum number of CTAs; persistent CTAs take one tile after another.
    max_ctas = sys.maxsize
    rows = ALL_ROWS

    def __init__(self, device: torch.device, dtype: torch.dtype, layouts: tuple[HeadLayout, ...]):
        self.device, self.dtype = device, dtype
        self.index = device.index if device.type == "cuda" else None
        self.q, self.k, self.v = layouts
        self.heads, self.k_heads = self.q.heads, self.k.heads
        self.out_stride = self.heads * self.v.head_dim
        self.empty = empty(device.type)

    def next_counter(self) -> torch.Tensor | None:
        """Return the tile counters of the next launches; None for kernels without counters."""
        return None

    def _query_tiles(
        self,
        layout: VarlenLayout,
        total_q: int,
        block_m: int,
        spec: AttentionSpec,
        ctas_per_sm: int = 1,
    ) -> tuple[torch.Tensor, int]:
        """Return the schedule of query tiles and the number of CTAs."""
        bound = max_tiles(total_q, layout.cu_seqlens_q.shape[0] - 1, block_m) * self.heads
        tiles = layout.query_tiles(total_q, block_m, spec, self.rows)
        return tiles, min(ctas_per_sm * self.max_ctas, bound)

    def _key_tiles(
        self,
        layout: VarlenLayout,
        total_k: int,
        block_n: int,
        spec: AttentionSpec,
        ctas_per_sm: int = 1,
        splits_per_khead: int = 1,
    ) -> tuple[torch.Tensor, int]:
        """Return the schedule of key tiles and the number of CTAs."""
        heads = self.k_heads * splits_per_khead
        bound = max_tiles(total_k, layout.cu_seqlens_q.shape[0] - 1, block_n) * heads
        tiles = layout.key_tiles(total_k, block_n, spec, self.rows)
        return tiles, min(ctas_per_sm * self.max_ctas, bound)

    def _has_few_queries(self, total_q: int) -> bool:
        """Return whether the order of tiles matters more than hits in the L2 cache.

        If so, all heads run side by side, and the longest tiles of all heads come first.
        """
        return total_q * self.heads <= FEW_QUERIES

    def _head_counts(
        self, heads: int, tokens: int, few_queries: bool = False, group: int = 1
    ) -> tuple[int, int, int]:
        """Return the query heads, the query heads per key head, and the heads that share the L2.

        The last number is for `heads` heads that read `tokens` tokens each. Adjacent `group` heads read
        the same tokens.
        """
        fitting = _L2_NUMBERS // max(tokens * (self.q.head_dim + self.v.head_dim), 1)
        is_narrow = max(self.q.head_dim, self.v.head_dim) < 128
        limit = heads if is_narrow or few_queries else 8
        return (
            self.heads,
            self.heads // self.k_heads,
            count_heads_in_l2(heads, max(min(fitting * group, limit), 4), group),
        )

    def _reads_in_place(self, dout: torch.Tensor) -> bool:
        """Return whether the kernels can read a gradient of the output without a copy."""
        return dout.stride(2) == 1

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        layout: VarlenLayout,
        spec: AttentionSpec,
        seed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (total_q, heads, head_dim_v) and the log-sum-exp (heads, total_q)."""
        run = self.prepare_forward(layout, q.shape[0], k.shape[0], spec)
        return run(q, k, v, slopes, seed)

    def prepare_forward(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> Callable[..., Any]:
        """Return a function of q, k, v and slopes that computes `forward` on these rows.

        With dropout it takes the seed too, an int64 tensor of one element.
        """
        out_shape = contiguous((total_q, self.heads, self.v.head_dim))
        new_out = partial(self.empty, *out_shape, self.dtype)
        new_lse = partial(self.empty, *contiguous((self.heads, total_q)), torch.float32)
        launch = self._forward(layout, total_q, total_k, spec) if total_q > 0 else lambda *_: None
        next_counter = self.next_counter

        # Parameters such as `*seed` would take host time at every call.
        def run(q, k, v, slopes, seed=None):
            out, lse = new_out(), new_lse()
            if seed is None:
                launch(q, k, v, slopes, out, lse, next_counter())
            else:
                launch(q, k, v, slopes, out, lse, next_counter(), seed)
            return out, lse

        return on_device(self.index, run)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        layout: VarlenLayout,
        spec: AttentionSpec,
        seed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v, contiguous; dlse has the shape of lse."""
        run = self.prepare_backward(layout, q.shape[0], k.shape[0], spec)
        return run(q, k, v, slopes, out, lse, dout, dlse, seed)

    def prepare_backward(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> Callable[..., Any]:
        """Return a function of the other arguments that computes `backward` on these rows."""
        prepare, next_counter = self._backward(layout, total_q, total_k, spec), self.next_counter
        new_dq, new_dk, new_dv = (
            partial(self.empty, *contiguous(shape), self.dtype)
            for shape in (
                (total_q, self.heads, self.q.head_dim),
                (total_k, self.k_heads, self.q.head_dim),
                (total_k, self.k_heads, self.v.head_dim),
            )
        )
        new_stats = partial(self.empty, *contiguous((2, self.heads, total_q)), torch.float32)
        launches: dict[Any, Callable[..., None]] = {}
        contiguous_launch: Callable[..., None] | None = None

        def copy_or_prepare(dout, dlse):
            """Return a gradient that the kernels can read, and its launch."""
            if not self._reads_in_place(dout):
                # Not `contiguous`, which returns a contiguous gradient at any address.
                dout = dout.clone(memory_format=torch.contiguous_format)
            strides = dout.stride(), None if dlse is None else dlse.stride()
            key = *strides, dout.data_ptr() & 15
            if key not in launches:
                launches[key] = prepare(*strides)
            return dout, launches[key]

        def run(q, k, v, slopes, out, lse, dout, dlse, seed=None):
            nonlocal contiguous_launch
            if dout is None:
                dout = torch.zeros_like(out)
            # Nearly all gradients. The key of the other launches takes 0.3 us of host time.
            if dlse is None and dout.is_contiguous() and not dout.data_ptr() & 15:
                if contiguous_launch is None:
                    contiguous_launch = prepare(contiguous(dout.shape)[1], None)
                launch = contiguous_launch
            else:
                dout, launch = copy_or_prepare(dout, dlse)
            dq, dk, dv, stats = new_dq(), new_dk(), new_dv(), new_stats()
            count = next_counter()
            if seed is None:
                launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count)
            else:
                launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count, seed)
            return dq, dk, dv

        return on_device(self.index, run)
