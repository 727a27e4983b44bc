"""What an attention call allocates and launches: the portable plan and the Hopper plan.

A plan holds what follows from a call's static facts (device, dtype, shapes but for the number of tokens, strides, kind of
mask). Plans are cached, so that a call only allocates its results and launches.
"""
import os
from typing import Any, NamedTuple

import torch
import triton

from . import portable
from .launch import Launch, current_device, empty, ragged
from .tiles import UNBOUNDED, tile_bound, tile_map
from .tuned import GLUON, LONG, Tile, Tiles, portable_tiles

LOG2E = 1.4426950408889634
_MOST_PLANS = 1024
AUTOTUNE = os.environ.get("SCREE_AUTOTUNE") == "1"  # measure the tiles of portable kernels at the first call of a kind
GLUON_KNOWN = triton.__version__.startswith("3.6.")  # Gluon changes between versions, and so does what it compiles to


class Spec(NamedTuple):
    """What is computed, in plain numbers: `UNBOUNDED` for an open side of the window, softcap 0 for none."""

    left: int
    right: int
    scale: float
    softcap: float


class Rows(NamedTuple):
    """The rows of queries and keys, and the dict (or None) of the queries' rows in which the tile maps are kept."""

    q: torch.Tensor
    k: torch.Tensor
    memo: dict | None

    def query_tiles(self, total: int, block: int, spec: Spec) -> torch.Tensor:
        """The tiles of the queries."""
        key = "q", id(self.k), total, block, spec[0], spec[1]
        found = self.memo.get(key) if self.memo else None
        return found[0] if found else self._tiles(key, self.q, self.k)

    def key_tiles(self, total: int, block: int, spec: Spec) -> torch.Tensor:
        """The tiles of the keys. Seen from a key, the window's sides change places."""
        key = "k", id(self.k), total, block, spec[1], spec[0]
        found = self.memo.get(key) if self.memo else None
        return found[0] if found else self._tiles(key, self.k, self.q)

    def _tiles(self, key: tuple, offsets: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        tiles = tile_map(offsets, other, *key[2:])
        capturing = offsets.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.memo is not None and not capturing:  # a map that belongs to a graph is not there before it runs
            # The keys' offsets are kept beside the map, so that their id stays theirs.
            self.memo[key] = tiles, None if self.k is self.q else self.k
        return tiles


class _Shape(NamedTuple):
    """A tensor's static facts: (heads, size of a head) and strides."""

    heads: int
    dim: int
    stride: int
    head: int


_PLANS: dict[tuple, "Plan"] = {}


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, spec: Spec, alibi: bool,
         plans: dict[Any, Any] | None = None) -> "Plan":
    """The plan for a call, from the cache or new; `plans` are those of calls that differ in the contents of arrays alone."""
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0
    tf32 = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    found = None if plans is None else plans.get((aligned, tf32))
    if found is None:
        found = _cached(q, k, v, rows, spec, alibi, aligned, tf32)
        if plans is not None:
            plans[aligned, tf32] = found
    return found


def _cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, spec: Spec, alibi: bool, aligned: bool,
            tf32: bool) -> "Plan":
    left, right, _, softcap = spec
    total, heads, dim = q.shape
    total_k, k_heads, dim_v = v.shape
    key = (q.device, q.dtype, heads, dim, k_heads, dim_v, q.stride(), k.stride(), v.stride(), left < UNBOUNDED,
           right < UNBOUNDED, right == 0, softcap > 0, alibi, aligned and total > 0 and total_k > 0, rows.q is rows.k, tf32)
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) >= _MOST_PLANS:  # strides that change with the number of tokens make new keys for ever
            _PLANS.clear()
        shapes = tuple(_Shape(*x.shape[1:], *x.stride()[:2]) for x in (q, k, v))
        found = _plan(q.device, q.dtype, shapes, *key[9:])
        if AUTOTUNE and isinstance(found, PortablePlan) and total > 0 and total_k > 0:
            found = found.tuned(q, k, v, rows, spec)
        _PLANS[key] = found
    return found


def _plan(device: torch.device, dtype: torch.dtype, shapes: tuple[_Shape, ...], left: bool, right: bool, causal: bool,
          softcap: bool, alibi: bool, aligned: bool, same: bool, tf32: bool) -> "Plan":
    q, _, v = shapes
    window = left or (right and not causal)
    half = dtype != torch.float32
    hopper = (GLUON_KNOWN and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
              and (dtype.itemsize, _filled(q.dim) if half else q.dim) in GLUON and v.dim == q.dim and aligned
              and all(_reachable(x.stride, x.head, x.heads) for x in shapes))
    if hopper and half:
        return HopperPlan(device, dtype, shapes, causal, window, softcap, alibi, same)
    if hopper and not tf32:
        return SplitPlan(device, shapes, causal, window, softcap, alibi)
    return PortablePlan(device, dtype, shapes, left, right, softcap, alibi, tf32)


def _filled(dim: int) -> int:
    """The width of tiles for heads that the copy engine fills up with zeros."""
    return triton.next_power_of_2(dim)


def _registers(programs: int, consumers: int) -> int:
    """Of a thread at first, where programs of some consumers and a producer, 4 warps each, share a multiprocessor."""
    return 512 // (programs * (consumers + 1)) // 8 * 8


def _reachable(stride: int, head: int, heads: int) -> bool:
    """Whether the copy engine can address a tensor: strides of multiples of 16 bytes, in reach of its coordinates."""
    return stride % 8 == 0 and head % 8 == 0 and 0 < stride < 1 << 31 and 0 < heads * head < 1 << 31


def _head_group(heads: int, dim: int) -> int:
    """Heads that run side by side. Wide heads fill the L2 cache, so few at a time; narrow ones all at once."""
    if dim < 128:
        return heads
    return next(g for g in (8, 4, 6, 5, 7, 3, 2, 1) if heads % g == 0)


class Plan:
    """The common part: shapes, and what a forward and a backward allocate."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: tuple[_Shape, ...]):
        self.device, self.dtype = device, dtype
        self.index = device.index if device.type == "cuda" else None
        self.q, self.k, self.v = shapes
        self.heads, self.k_heads = self.q.heads, self.k.heads
        shared = self.heads // self.k_heads
        self.q_counts = self.heads, shared, _head_group(self.heads, self.q.dim)
        self.k_counts = self.heads, shared, _head_group(self.k_heads, self.q.dim)
        self.out_stride = self.heads * self.v.dim
        self.empty = empty(device.type)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, rows: Rows,
                spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (total, heads, head_dim of v) and the natural log-sum-exp (heads, total)."""
        if self.index is not None and self.index != current_device():
            with torch.cuda.device(self.index):
                return self.forward(q, k, v, slopes, rows, spec)
        total = q.shape[0]
        out = self.empty((total, self.heads, self.v.dim), (self.out_stride, self.v.dim, 1), self.dtype)
        lse = self.empty((self.heads, total), (total, 1), torch.float32)
        if total > 0:
            self._forward(q, k, v, slopes, out, lse, rows, spec)
        return out, lse

    def backward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, out: torch.Tensor,
                 lse: torch.Tensor, dout: torch.Tensor | None, dlse: torch.Tensor | None, rows: Rows,
                 spec: Spec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v, contiguous; dlse has the shape of lse."""
        if self.index is not None and self.index != current_device():
            with torch.cuda.device(self.index):
                return self.backward(q, k, v, slopes, out, lse, dout, dlse, rows, spec)
        if dout is None:
            dout = torch.zeros_like(out)
        elif not self._takes(dout):
            dout = dout.contiguous()
        total, total_k = q.shape[0], k.shape[0]
        heads, k_heads, dim, dim_v = self.heads, self.k_heads, self.q.dim, self.v.dim
        grads = (self.empty((total, heads, dim), (heads * dim, dim, 1), self.dtype),
                 self.empty((total_k, k_heads, dim), (k_heads * dim, dim, 1), self.dtype),
                 self.empty((total_k, k_heads, dim_v), (k_heads * dim_v, dim_v, 1), self.dtype))
        stats = self.empty((2, heads, total), (heads * total, total, 1), torch.float32)
        self._backward(q, k, v, slopes, out, lse, dout, dlse, stats, grads, rows, spec)
        return grads


class PortablePlan(Plan):
    """Plain Triton: one program a tile and head."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: tuple[_Shape, ...], left: bool,
                 right: bool, softcap: bool, alibi: bool, tf32: bool, tiles: Tiles | None = None):
        super().__init__(device, dtype, shapes)
        self.features = dict(left=left, right=right, softcap=softcap, alibi=alibi, tf32=tf32)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
        block_d, block_dv = (triton.next_power_of_2(x) for x in (self.q.dim, self.v.dim))
        if any(stride % 16 for x in shapes for stride in (x.stride, x.head)):
            # Loads of such strides are not pipelined, and then Triton 3.6 gives too little shared memory to two widths.
            block_d = block_dv = max(block_d, block_dv)
        self.kind = dtype.itemsize, max(block_d, block_dv, 32)
        self.tiles = tiles or portable_tiles(capability, *self.kind)
        self.strides = (*self.q[2:], *self.k[2:], *self.v[2:])

        def launch(kernel: Any, tile: Tile, **more: Any) -> Launch:
            return Launch(kernel, dict(DIM=self.q.dim, DIM_V=self.v.dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
                                       BLOCK_M=tile.m, BLOCK_N=tile.n, LEFT=left, RIGHT=right,
                                       SOFTCAP=softcap, ALIBI=alibi, PRECISION="tf32" if tf32 else "tf32x3", **more),
                          dict(num_warps=tile.warps, num_stages=tile.stages))

        self.forward_launch = launch(portable.forward_kernel, self.tiles.forward)
        self.dq_launches = [launch(portable.dq_kernel, self.tiles.dq, HAS_DLSE=x) for x in (False, True)]
        self.dkdv_launch = launch(portable.dkdv_kernel, self.tiles.dkdv)

    def tuned(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, spec: Spec) -> "PortablePlan":
        """The same plan with the tiles that are the fastest for these arguments."""
        from .autotune import measured

        def make(tiles: Tiles) -> PortablePlan:
            return PortablePlan(self.device, self.dtype, (self.q, self.k, self.v), **self.features, tiles=tiles)

        features = tuple(name for name, has in self.features.items() if has)
        return make(measured((self.device, *self.kind, self.dtype, *features), make, self.tiles, q, k, v, rows, spec,
                             self.features["alibi"]))

    def _takes(self, dout: torch.Tensor) -> bool:
        return dout.stride(2) == 1

    def _forward(self, q, k, v, slopes, out, lse, rows, spec):
        total, block = q.shape[0], self.tiles.forward.m
        tiles = rows.query_tiles(total, block, spec)
        self.forward_launch(tile_bound(total, rows.q.shape[0] - 1, block) * self.heads,
                            (q, k, v, q if slopes is None else slopes, out, lse, tiles),
                            (*self.strides, self.out_stride), (total, *self.q_counts, *spec))

    def _backward(self, q, k, v, slopes, out, lse, dout, dlse, stats, grads, rows, spec):
        dq, dk, dv = grads
        total, total_k, n = q.shape[0], k.shape[0], rows.q.shape[0] - 1
        plane = self.heads * total
        dout_strides = dout.stride()[:2]
        dlse_strides = (0, 0) if dlse is None else dlse.stride()[::-1]
        slopes = q if slopes is None else slopes
        if total > 0:
            block = self.tiles.dq.m
            tiles = rows.query_tiles(total, block, spec)
            self.dq_launches[dlse is not None](
                tile_bound(total, n, block) * self.heads,
                (q, k, v, slopes, out, lse, dout, lse if dlse is None else dlse, stats, dq, tiles),
                (*self.strides, self.out_stride, *dout_strides, self.heads * self.q.dim),
                (*dlse_strides, total, plane, *self.q_counts, *spec))
        if total_k > 0:
            block = self.tiles.dkdv.n
            tiles = rows.key_tiles(total_k, block, spec)
            self.dkdv_launch(
                tile_bound(total_k, n, block) * self.k_heads, (q, k, v, slopes, dout, stats, dk, dv, tiles),
                (*self.strides, *dout_strides, self.k_heads * self.q.dim, self.k_heads * self.v.dim),
                (total, plane, *self.k_counts, *spec))


def _numbers(spec: Spec) -> tuple[int, int, float, float]:
    """The window, and what scores are multiplied by before and after the softcap, log2(e) in the last factor of all."""
    left, right, scale, softcap = spec
    return (left, right, scale / softcap, softcap * LOG2E) if softcap else (left, right, scale * LOG2E, 0.0)


class HopperPlan(Plan):
    """Gluon on Hopper: one persistent program a multiprocessor."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: tuple[_Shape, ...], causal: bool, window: bool,
                 softcap: bool, alibi: bool, same: bool):
        from . import hopper, hopper_backward, hopper_forward

        super().__init__(device, dtype, shapes)
        dim = _filled(self.q.dim)
        # What is not plain comes with a window, which may be endless.
        window = window or softcap or alibi
        causal = causal and not window
        self.counter, self.block_d, self.tiles = hopper.counter, dim, GLUON[dtype.itemsize, dim]
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.described = tuple(ragged(*x, dim) for x in shapes)
        self.columns = self.q.head, self.k.head, self.v.head
        features = dict(CAUSAL=causal, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        options = dict(num_warps=4, maxnreg=_registers(1, 2))
        # The forward for rows that are short on average, and for long ones.
        self.forwards = []
        for m, n, stages, shared in (self.tiles.forward, self.tiles.long or self.tiles.forward):
            consumers = m // 64
            self.forwards.append((m, shared * self.programs, Launch(hopper_forward.forward_kernel, dict(
                BLOCK_M=m, BLOCK_N=n, DIM=self.q.dim, BLOCK_D=dim, STAGES=stages, CONSUMERS=consumers, SAME=same and causal,
                **features), dict(num_warps=4, maxnreg=_registers(shared, consumers)), (64, n, n))))
        m, n, stages, own = self.tiles.dq
        # Not held at head_dim 64, with tiles of 128 keys, ptxas makes the descriptor of the queries for the masked loop alone. Held
        # where there is one loop, it puts what is in registers to another use while that is still needed.
        self.dq_launches = [Launch(hopper_backward.dq_kernel, dict(
            BLOCK_M=m, BLOCK_N=n, DIM=self.q.dim, BLOCK_D=dim, STAGES=stages, Q_STAGES=own, **features, HAS_DLSE=x,
            HELD=dim <= 64 and not window), options, (m // 2, n, n, m // 2)) for x in (False, True)]
        m, n, stages, own = self.tiles.dkdv
        held = (dim == 32 and not window) or (dim == 64 and causal)
        self.dkdv_launch = Launch(hopper_backward.dkdv_kernel, dict(
            BLOCK_M=m, BLOCK_N=n, DIM=self.q.dim, BLOCK_D=dim, STAGES=stages, K_STAGES=own, **features, HELD=held), options,
            (m, n // 2, n // 2, m))

    def _takes(self, dout: torch.Tensor) -> bool:
        stride, head, last = dout.stride()
        return last == 1 and dout.data_ptr() & 15 == 0 and _reachable(stride, head, self.heads)

    def _forward(self, q, k, v, slopes, out, lse, rows, spec):
        total, n = q.shape[0], rows.q.shape[0] - 1
        block, programs, launch = self.forwards[total >= LONG * n]
        tiles = rows.query_tiles(total, block, spec)
        launch(min(programs, tile_bound(total, n, block) * self.heads),
               (q if slopes is None else slopes, out, lse, tiles, self.counter(self.device)),
               (*self.columns, self.out_stride), (total, *self.q_counts, *_numbers(spec)), (q, k, v), self.described)

    def _backward(self, q, k, v, slopes, out, lse, dout, dlse, stats, grads, rows, spec):
        dq, dk, dv = grads
        total, total_k, n = q.shape[0], k.shape[0], rows.q.shape[0] - 1
        stride, head, _ = dout.stride()
        descriptors = (q, k, v, dout), (*self.described, ragged(self.heads, self.v.dim, stride, head, self.block_d))
        columns = (*self.columns, head)
        plane, numbers, slopes = self.heads * total, _numbers(spec), q if slopes is None else slopes
        dlse_strides = (0, 0) if dlse is None else dlse.stride()[::-1]
        block = self.tiles.dq[0]
        tiles = rows.query_tiles(total, block, spec)
        self.dq_launches[dlse is not None](
            min(self.programs, tile_bound(total, n, block) * self.heads),
            (slopes, out, lse, lse if dlse is None else dlse, stats, dq, tiles, self.counter(self.device)),
            (*columns, self.out_stride, self.out_stride), (*dlse_strides, total, plane, *self.q_counts, *numbers), *descriptors)
        block = self.tiles.dkdv[1]
        tiles = rows.key_tiles(total_k, block, spec)
        self.dkdv_launch(min(self.programs, tile_bound(total_k, n, block) * self.k_heads),
                         (slopes, stats, dk, dv, tiles, self.counter(self.device)), (*columns, self.k_heads * self.q.dim),
                         (total, plane, *self.k_counts, *numbers), *descriptors)


class SplitPlan(Plan):
    """float32 in Gluon on Hopper: every operand is split into planes of bfloat16 first."""

    BLOCK = 32  # numbers of heads that a program of the kernels that split takes

    def __init__(self, device: torch.device, shapes: tuple[_Shape, ...], causal: bool, window: bool, softcap: bool, alibi: bool):
        from . import hopper, hopper_float32

        super().__init__(device, torch.float32, shapes)
        dim, planes = self.q.dim, hopper_float32.PLANES.value
        self.counter, self.planes = hopper.counter, planes
        self.tiles = GLUON[4, dim]
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        described = [ragged(planes * x.heads, dim, planes * x.heads * dim, dim) for x in shapes]
        self.described = *described, described[0]
        self.described_q = ragged(*self.q)
        window = window or softcap or alibi
        features = dict(CAUSAL=causal and not window, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        split, options = dict(DIM=dim, BLOCK=self.BLOCK), dict(num_warps=4)
        self.split_launch = Launch(hopper_float32.split_kernel, split, options)
        self.split_dout_launches = [Launch(hopper_float32.split_dout_kernel, dict(**split, HAS_DLSE=x), options)
                                    for x in (False, True)]
        options = dict(num_warps=4, maxnreg=_registers(1, 2))
        m, n, stages, _ = self.tiles.forward
        self.forward_launch = Launch(hopper_float32.forward_kernel, dict(
            BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features), options, (m // 2, n, n))
        m, n, stages, _ = self.tiles.dq
        self.dq_launch = Launch(hopper_float32.dq_kernel, dict(
            BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features), options, (m // 2, n, n, m // 2))
        m, n, stages, _ = self.tiles.dkdv
        self.dkdv_launch = Launch(hopper_float32.dkdv_kernel, dict(
            BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features), options, (m, n // 2, n // 2, m))

    def _takes(self, dout: torch.Tensor) -> bool:
        return dout.stride(2) == 1

    def _empty_planes(self, x: torch.Tensor) -> torch.Tensor:
        total, heads, dim = x.shape
        heads *= self.planes
        return self.empty((total, heads, dim), (heads * dim, dim, 1), torch.bfloat16)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        planes, (total, heads, _) = self._empty_planes(x), x.shape
        self.split_launch(triton.cdiv(total * heads, self.BLOCK), (x, planes), x.stride()[:2], (total, heads))
        return planes

    def _forward(self, q, k, v, slopes, out, lse, rows, spec):
        total, block = q.shape[0], self.tiles.forward[0]
        tiles = rows.query_tiles(total, block, spec)
        self.forward_launch(min(self.programs, tile_bound(total, rows.q.shape[0] - 1, block) * self.heads),
                            (q if slopes is None else slopes, out, lse, tiles, self.counter(self.device)),
                            (self.q.head, self.out_stride), (total, *self.q_counts, *_numbers(spec)),
                            (q, self._split(k), self._split(v)),
                            (self.described_q, *self.described[1:3]))

    def _backward(self, q, k, v, slopes, out, lse, dout, dlse, stats, grads, rows, spec):
        dq, dk, dv = grads
        total, total_k, n = q.shape[0], k.shape[0], rows.q.shape[0] - 1
        plane, numbers, slopes = self.heads * total, _numbers(spec), q if slopes is None else slopes
        dlse_strides = (0, 0) if dlse is None else dlse.stride()[::-1]
        split_dout = self._empty_planes(dout)
        self.split_dout_launches[dlse is not None](
            triton.cdiv(plane, self.BLOCK), (out, dout, lse, lse if dlse is None else dlse, stats, split_dout),
            dout.stride()[:2], (*dlse_strides, total, plane, self.heads))
        descriptors = (self._split(q), self._split(k), self._split(v), split_dout), self.described
        block = self.tiles.dq[0]
        tiles = rows.query_tiles(total, block, spec)
        self.dq_launch(min(self.programs, tile_bound(total, n, block) * self.heads),
                       (slopes, stats, dq, tiles, self.counter(self.device)), (self.out_stride,),
                       (total, plane, *self.q_counts, *numbers), *descriptors)
        block = self.tiles.dkdv[1]
        tiles = rows.key_tiles(total_k, block, spec)
        self.dkdv_launch(min(self.programs, tile_bound(total_k, n, block) * self.k_heads),
                         (slopes, stats, dk, dv, tiles, self.counter(self.device)), (self.k_heads * self.q.dim,),
                         (total, plane, *self.k_counts, *numbers), *descriptors)
