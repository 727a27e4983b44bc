"""What an attention call allocates and launches: the portable plan and the Hopper plan.

A plan holds what follows from a call's static facts (device, dtype, shapes but for the number of tokens, strides, kind of
mask). Plans are cached. For given rows a plan makes functions that only allocate their results and launch.
"""

import os
import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import triton

from ..runtime.autograd import on_device
from ..runtime.launch import Launch, contiguous, empty, ragged
from . import portable
from .tile_configs import FEW, GLUON, GLUON_FEW, SHORT, GluonTiles, Tile, Tiles, portable_tiles
from .tile_scheduler import UNBOUNDED, tile_bound, tile_map

LOG2E = 1.4426950408889634
_MOST_PLANS = 1024
_MOST_READ = (
    40_000_000  # numbers of heads side by side, beyond which the L2 cache of an H100 loses them
)
AUTOTUNE = (
    os.environ.get("SCREE_AUTOTUNE") == "1"
)  # measure the tiles of portable kernels at the first call of a kind
GLUON_KNOWN = triton.__version__.startswith(
    ("3.6.", "3.7.")
)  # Gluon changes, and so does what it compiles to


class Spec(NamedTuple):
    """What is computed, in plain numbers: `UNBOUNDED` for an open side of the window, softcap 0 for none."""

    left: int
    right: int
    scale: float
    softcap: float


class Rows(NamedTuple):
    """The rows of queries and keys, the dict (or None) of the queries' rows in which the tile maps are kept, and a bound on the
    rows' lengths that is known without reading them."""

    q: torch.Tensor
    k: torch.Tensor
    memo: dict | None
    longest: int = UNBOUNDED

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
        if self.memo is not None and not capturing(offsets):
            # The keys' offsets are kept beside the map, so that their id stays theirs.
            self.memo[key] = tiles, None if self.k is self.q else self.k
        return tiles


def capturing(x: torch.Tensor) -> bool:
    """Whether what is computed on the tensor's device becomes part of a graph: then it is not there before the graph runs."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Shape(NamedTuple):
    """A tensor's static facts: (heads, size of a head) and strides."""

    heads: int
    dim: int
    stride: int
    head: int


_PLANS: dict[tuple, "Plan"] = {}


def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, spec: Spec, alibi: bool
) -> "Plan":
    """The plan for a call, from the cache or new."""
    left, right, _, softcap = spec
    total, heads, dim = q.shape
    total_k, k_heads, dim_v = v.shape
    some = total > 0 and total_k > 0
    key = (
        q.device,
        q.dtype,
        heads,
        dim,
        k_heads,
        dim_v,
        q.stride(),
        k.stride(),
        v.stride(),
        left < UNBOUNDED,
        right < UNBOUNDED,
        right == 0,
        softcap > 0,
        alibi,
        some and aligned(q, k, v),
        rows.q is rows.k,
        tf32(q.dtype),
        rows.longest <= SHORT and total * heads <= FEW,
    )
    found = _PLANS.get(key)
    if found is None:
        if (
            len(_PLANS) >= _MOST_PLANS
        ):  # strides that change with the number of tokens make new keys for ever
            _PLANS.clear()
        shapes = tuple(_Shape(*x.shape[1:], *x.stride()[:2]) for x in (q, k, v))
        found = _plan(q.device, q.dtype, shapes, *key[9:])
        if AUTOTUNE and isinstance(found, PortablePlan) and some:
            found = found.tuned(q, k, v, rows, spec)
        _PLANS[key] = found
    return found


def aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the copy engine can read the tensors where they begin."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def tf32(dtype: torch.dtype) -> bool:
    """Whether products may round float32 to tf32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _plan(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[_Shape, ...],
    left: bool,
    right: bool,
    causal: bool,
    softcap: bool,
    alibi: bool,
    aligned: bool,
    same: bool,
    tf32: bool,
    few: bool,
) -> "Plan":
    q, _, v = shapes
    window = left or (right and not causal)
    half = dtype != torch.float32
    hopper = (
        GLUON_KNOWN
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and _gluon_tiles(dtype.itemsize, q.dim, v.dim) is not None
        and aligned
        and q.dim % 8 == v.dim % 8 == 0
        and all(_reachable(x.stride, x.head, x.heads) for x in shapes)
    )
    if hopper and half:
        return HopperPlan(device, dtype, shapes, causal, window, softcap, alibi, same, few)
    if hopper and not tf32:
        return SplitPlan(device, shapes, causal, window, softcap, alibi)
    return PortablePlan(device, dtype, shapes, left, right, softcap, alibi, tf32)


def _tiled(dim: int) -> tuple[int, int]:
    """The width of a head's tiles in shared memory, and how many it has; the copy engine fills up the last one with zeros."""
    if dim <= 128:
        return triton.next_power_of_2(dim), 1
    return (64, 3) if dim <= 192 else (128, 2)


def _gluon_tiles(itemsize: int, dim: int, dim_v: int, few: bool = False) -> GluonTiles | None:
    """The tiles of the Gluon kernels, if there are such for heads of these widths; and where there are few of them."""
    if itemsize == 4:
        return GLUON.get((itemsize, dim)) if dim == dim_v else None
    width, width_v = (prod(_tiled(x)) for x in (dim, dim_v))
    if min(width, width_v) < 32:
        return None
    found = GLUON.get((itemsize, width, width_v)) or GLUON.get((itemsize, max(width, width_v)))
    return GLUON_FEW.get(found, found) if few else found


def _registers(programs: int, consumers: int) -> int:
    """Of a thread at first, where programs of some consumers and a producer, 4 warps each, share a multiprocessor."""
    return 512 // (programs * (consumers + 1)) // 8 * 8


def _reachable(stride: int, head: int, heads: int) -> bool:
    """Whether the copy engine can address a tensor: strides of multiples of 16 bytes, in reach of its coordinates."""
    return stride % 8 == 0 and head % 8 == 0 and 0 < stride < 1 << 31 and 0 < heads * head < 1 << 31


def _beside(heads: int, most: int) -> int:
    """How many heads run side by side: what divides them evenly, at most `most`, as the L2 cache holds the keys of few."""
    return max(g for g in range(1, heads + 1) if heads % g == 0 and g <= most)


class Plan:
    """The common part: shapes, and what a forward and a backward allocate."""

    programs = sys.maxsize  # at most, where each of them takes one tile after another

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: tuple[_Shape, ...]):
        self.device, self.dtype = device, dtype
        self.index = device.index if device.type == "cuda" else None
        self.q, self.k, self.v = shapes
        self.heads, self.k_heads = self.q.heads, self.k.heads
        self.out_stride = self.heads * self.v.dim
        self.empty = empty(device.type)

    def _query_tiles(
        self, rows: Rows, total: int, block: int, spec: Spec, shared: int = 1
    ) -> tuple[torch.Tensor, int]:
        """The tiles of the queries, and how many programs take them, `shared` on a multiprocessor."""
        return rows.query_tiles(total, block, spec), min(
            shared * self.programs, tile_bound(total, rows.q.shape[0] - 1, block) * self.heads
        )

    def _key_tiles(
        self, rows: Rows, total: int, block: int, spec: Spec
    ) -> tuple[torch.Tensor, int]:
        """The same of the keys."""
        return rows.key_tiles(total, block, spec), min(
            self.programs, tile_bound(total, rows.q.shape[0] - 1, block) * self.k_heads
        )

    def _counts(self, heads: int, tokens: int) -> tuple[int, int, int]:
        """Of heads that read so many tokens each: the queries', those that share a key's, and how many run side by side."""
        room = _MOST_READ // max(tokens * (self.q.dim + self.v.dim), 1)
        most = heads if max(self.q.dim, self.v.dim) < 128 else 8
        return self.heads, self.heads // self.k_heads, _beside(heads, max(min(room, most), 4))

    def _takes(self, dout: torch.Tensor) -> bool:
        """Whether the kernels read a gradient of the output as it lies."""
        return dout.stride(2) == 1

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        rows: Rows,
        spec: Spec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (total, heads, head_dim of v) and the natural log-sum-exp (heads, total)."""
        found: tuple[torch.Tensor, torch.Tensor] = self.forward_on(
            rows, q.shape[0], k.shape[0], spec
        )(q, k, v, slopes)
        return found

    def forward_on(self, rows: Rows, total: int, total_k: int, spec: Spec) -> Callable[..., Any]:
        """What computes `forward` of q, k, v and slopes on these rows, with so many tokens."""
        new, out_like = self.empty, (*contiguous((total, self.heads, self.v.dim)), self.dtype)
        lse_like = *contiguous((self.heads, total)), torch.float32
        launch = self._forward(rows, total, spec) if total > 0 else lambda *_: None

        def run(q, k, v, slopes):
            out, lse = new(*out_like), new(*lse_like)
            launch(q, k, v, q if slopes is None else slopes, out, lse)
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
        rows: Rows,
        spec: Spec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v, contiguous; dlse has the shape of lse."""
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.backward_on(
            rows, q.shape[0], k.shape[0], spec
        )(q, k, v, slopes, out, lse, dout, dlse)
        return found

    def backward_on(self, rows: Rows, total: int, total_k: int, spec: Spec) -> Callable[..., Any]:
        """What computes `backward` of its other arguments on these rows, with so many tokens."""
        new, prepare = self.empty, self._backward(rows, total, total_k, spec)
        dq_like, dk_like, dv_like = (
            (*contiguous(shape), self.dtype)
            for shape in (
                (total, self.heads, self.q.dim),
                (total_k, self.k_heads, self.q.dim),
                (total_k, self.k_heads, self.v.dim),
            )
        )
        stats_like = *contiguous((2, self.heads, total)), torch.float32
        launches: dict[Any, Callable[..., None]] = {}

        def run(q, k, v, slopes, out, lse, dout, dlse):
            if dout is None:
                dout = torch.zeros_like(out)
            strides = dout.stride(), None if dlse is None else dlse.stride()
            launch = launches.get((*strides, dout.data_ptr() & 15))
            if launch is None:
                dout = dout if self._takes(dout) else dout.contiguous()
                strides = dout.stride(), strides[1]
                launch = launches[*strides, dout.data_ptr() & 15] = prepare(*strides)
            dq, dk, dv, stats = new(*dq_like), new(*dk_like), new(*dv_like), new(*stats_like)
            launch(
                q,
                k,
                v,
                q if slopes is None else slopes,
                out,
                lse,
                dout,
                lse if dlse is None else dlse,
                stats,
                dq,
                dk,
                dv,
            )
            return dq, dk, dv

        return on_device(self.index, run)


class PortablePlan(Plan):
    """Plain Triton: one program a tile and head."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[_Shape, ...],
        left: bool,
        right: bool,
        softcap: bool,
        alibi: bool,
        tf32: bool,
        tiles: Tiles | None = None,
    ):
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
            return Launch(
                kernel,
                dict(
                    DIM=self.q.dim,
                    DIM_V=self.v.dim,
                    BLOCK_D=block_d,
                    BLOCK_DV=block_dv,
                    BLOCK_M=tile.m,
                    BLOCK_N=tile.n,
                    LEFT=left,
                    RIGHT=right,
                    SOFTCAP=softcap,
                    ALIBI=alibi,
                    PRECISION="tf32" if tf32 else "tf32x3",
                    **more,
                ),
                dict(num_warps=tile.warps, num_stages=tile.stages),
            )

        self.forward_launch = launch(portable.forward_kernel, self.tiles.forward)
        self.dq_launches = [
            launch(portable.dq_kernel, self.tiles.dq, HAS_DLSE=x) for x in (False, True)
        ]
        self.dkdv_launch = launch(portable.dkdv_kernel, self.tiles.dkdv)

    def tuned(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, spec: Spec
    ) -> "PortablePlan":
        """The same plan with the tiles that are the fastest for these arguments."""
        from .autotune import measured

        def make(tiles: Tiles) -> PortablePlan:
            return PortablePlan(
                self.device, self.dtype, (self.q, self.k, self.v), **self.features, tiles=tiles
            )

        features = tuple(name for name, has in self.features.items() if has)
        return make(
            measured(
                (self.device, *self.kind, self.dtype, *features),
                make,
                self.tiles,
                q,
                k,
                v,
                rows,
                spec,
                self.features["alibi"],
            )
        )

    def _forward(self, rows, total, spec):
        tiles, programs = self._query_tiles(rows, total, self.tiles.forward.m, spec)
        launch, strides = self.forward_launch, (*self.strides, self.out_stride)
        numbers = total, *self._counts(self.heads, total), *spec
        return lambda q, k, v, slopes, out, lse: launch(
            programs, (q, k, v, slopes, out, lse, tiles), strides, numbers
        )

    def _backward(self, rows, total, total_k, spec):
        plane = self.heads * total
        query_tiles, dq_programs = (
            self._query_tiles(rows, total, self.tiles.dq.m, spec) if total > 0 else (None, 0)
        )
        key_tiles, dkdv_programs = (
            self._key_tiles(rows, total_k, self.tiles.dkdv.n, spec) if total_k > 0 else (None, 0)
        )
        dkdv_launch, dkdv_numbers = (
            self.dkdv_launch,
            (total, plane, *self._counts(self.k_heads, total), *spec),
        )

        def prepare(dout_strides, dlse_strides):
            dlse_head, dlse_stride = dlse_strides or (0, 0)
            dq_launch = self.dq_launches[dlse_strides is not None]
            dq_strides = *self.strides, self.out_stride, *dout_strides[:2], self.heads * self.q.dim
            dq_numbers = (
                dlse_stride,
                dlse_head,
                total,
                plane,
                *self._counts(self.heads, total_k),
                *spec,
            )
            dkdv_strides = (
                *self.strides,
                *dout_strides[:2],
                self.k_heads * self.q.dim,
                self.k_heads * self.v.dim,
            )

            def launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv):
                if query_tiles is not None:
                    dq_launch(
                        dq_programs,
                        (q, k, v, slopes, out, lse, dout, dlse, stats, dq, query_tiles),
                        dq_strides,
                        dq_numbers,
                    )
                if key_tiles is not None:
                    dkdv_launch(
                        dkdv_programs,
                        (q, k, v, slopes, dout, stats, dk, dv, key_tiles),
                        dkdv_strides,
                        dkdv_numbers,
                    )

            return launch

        return prepare


def _numbers(spec: Spec) -> tuple[int, int, float, float]:
    """The window, and what scores are multiplied by before and after the softcap, log2(e) in the last factor of all."""
    left, right, scale, softcap = spec
    return (
        (left, right, scale / softcap, softcap * LOG2E)
        if softcap
        else (left, right, scale * LOG2E, 0.0)
    )


class HopperPlan(Plan):
    """Gluon on Hopper: one persistent program a multiprocessor."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[_Shape, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
        same: bool,
        few: bool,
    ):
        from ..sm90 import pipeline
        from . import backward_sm90, forward_sm90

        super().__init__(device, dtype, shapes)
        (block_d, parts), (block_dv, parts_v) = _tiled(self.q.dim), _tiled(self.v.dim)
        width = max(block_d * parts, block_dv * parts_v)
        # What is not plain comes with a window, which may be endless.
        window = window or softcap or alibi
        causal = causal and not window
        self.counter, self.tiles = pipeline.counter, _gluon_tiles(2, self.q.dim, self.v.dim, few)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.described = tuple(ragged(*x, *_tiled(x.dim)) for x in shapes)
        self.columns = self.q.head, self.k.head, self.v.head
        values = dict(DIM_V=self.v.dim, BLOCK_DV=block_dv, PARTS=parts, PARTS_V=parts_v)
        features = dict(CAUSAL=causal, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        self.forward_counts = (
            self.heads,
            self.heads // self.k_heads,
            _beside(self.heads, 4 if width >= 128 else 8),
        )
        m, n, stages, own, self.shared = self.tiles.forward
        self.forward_launch = Launch(
            forward_sm90.forward_kernel,
            dict(
                BLOCK_M=m,
                BLOCK_N=n,
                **values,
                STAGES=stages,
                Q_STAGES=own,
                THROUGH=own > 1 and self.q.dim == self.v.dim,
                CONSUMERS=m // 64,
                SAME=same and causal,
                **features,
            ),
            dict(num_warps=4, maxnreg=_registers(self.shared, m // 64)),
            (64, n, n, 64),
        )
        values = dict(DIM=self.q.dim, BLOCK_D=block_d, **values)
        m, n, stages, own = self.tiles.dq
        self.dq_launches = [
            Launch(
                backward_sm90.dq_kernel,
                dict(
                    BLOCK_M=m,
                    BLOCK_N=n,
                    **values,
                    STAGES=stages,
                    Q_STAGES=own,
                    CONSUMERS=m // 64,
                    **features,
                    HAS_DLSE=x,
                ),
                dict(num_warps=4, maxnreg=_registers(1, m // 64), launch_pdl=True),
                (64, n, n, 64, 64),
            )
            for x in (False, True)
        ]
        m, n, stages, own = self.tiles.dkdv
        # To pass over tiles takes registers, which at head_dim 128 the loops need themselves.
        self.dkdv_launches = [
            Launch(
                backward_sm90.dkdv_kernel,
                dict(
                    BLOCK_M=m,
                    BLOCK_N=n,
                    **values,
                    HAS_DK=dk,
                    HAS_DV=dv,
                    STAGES=stages,
                    K_STAGES=own,
                    CONSUMERS=n // 64,
                    **features,
                    HELD=width == 64 and causal,
                    PASS=width != 128,
                ),
                dict(num_warps=4, maxnreg=_registers(1, n // 64), launch_pdl=True),
                (m, 64, 64, m),
            )
            for dk, dv in ([(True, False), (False, True)] if self.tiles.apart else [(True, True)])
        ]

    def _takes(self, dout: torch.Tensor) -> bool:
        stride, head, last = dout.stride()
        return last == 1 and dout.data_ptr() & 15 == 0 and _reachable(stride, head, self.heads)

    def _forward(self, rows, total, spec):
        counter, device = self.counter, self.device
        described = (
            *self.described,
            ragged(self.heads, self.v.dim, self.out_stride, self.v.dim, *_tiled(self.v.dim)),
        )
        launch = self.forward_launch
        tiles, programs = self._query_tiles(rows, total, self.tiles.forward[0], spec, self.shared)
        strides, numbers = (
            (*self.columns, self.out_stride),
            (total, *self.forward_counts, *_numbers(spec)),
        )
        return lambda q, k, v, slopes, out, lse: launch(
            programs,
            (slopes, out, lse, tiles, counter(device)),
            strides,
            numbers,
            (q, k, v, out),
            described,
        )

    def _backward(self, rows, total, total_k, spec):
        plane, numbers, counter, device = (
            self.heads * total,
            _numbers(spec),
            self.counter,
            self.device,
        )
        query_tiles, dq_programs = self._query_tiles(rows, total, self.tiles.dq[0], spec)
        key_tiles, dkdv_programs = self._key_tiles(rows, total_k, self.tiles.dkdv[1], spec)
        dkdv_launches, dkdv_numbers = (
            self.dkdv_launches,
            (total, plane, *self._counts(self.k_heads, total), *numbers),
        )

        def prepare(dout_strides, dlse_strides):
            stride, head, _ = dout_strides
            shapes = (
                *self.described,
                ragged(self.heads, self.v.dim, stride, head, *_tiled(self.v.dim)),
            )
            dq_shapes = (
                *shapes,
                ragged(
                    self.heads, self.q.dim, self.heads * self.q.dim, self.q.dim, *_tiled(self.q.dim)
                ),
            )
            columns, (dlse_head, dlse_stride) = (*self.columns, head), dlse_strides or (0, 0)
            dq_launch, dq_strides = (
                self.dq_launches[dlse_strides is not None],
                (*columns, self.out_stride),
            )
            dq_numbers = (
                dlse_stride,
                dlse_head,
                total,
                plane,
                *self._counts(self.heads, total_k),
                *numbers,
            )
            dkdv_strides = *columns, self.k_heads * self.q.dim, self.k_heads * self.v.dim

            def launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv):
                described, count = (q, k, v, dout), counter(device)
                dq_launch(
                    dq_programs,
                    (slopes, out, lse, dlse, stats, query_tiles, count),
                    dq_strides,
                    dq_numbers,
                    (*described, dq),
                    dq_shapes,
                )
                for dkdv_launch in dkdv_launches:
                    dkdv_launch(
                        dkdv_programs,
                        (slopes, stats, dk, dv, key_tiles, count),
                        dkdv_strides,
                        dkdv_numbers,
                        described,
                        shapes,
                    )

            return launch

        return prepare


class SplitPlan(Plan):
    """float32 in Gluon on Hopper: every operand is split into planes of bfloat16 first."""

    BLOCK = 32  # numbers of heads that a program of the kernels that split takes

    def __init__(
        self,
        device: torch.device,
        shapes: tuple[_Shape, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
    ):
        from ..sm90 import pipeline
        from . import bf16x3, float32_sm90

        super().__init__(device, torch.float32, shapes)
        dim, count = self.q.dim, bf16x3.PLANES.value
        self.counter, self.planes = pipeline.counter, count
        self.tiles = GLUON[4, dim]
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        described = [ragged(count * x.heads, dim, count * x.heads * dim, dim) for x in shapes]
        self.described = *described, described[0]
        self.described_q = ragged(*self.q)
        window = window or softcap or alibi
        features = dict(CAUSAL=causal and not window, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        split, options = dict(DIM=dim, BLOCK=self.BLOCK), dict(num_warps=4)
        self.split_launch = Launch(bf16x3.split_kernel, split, options)
        self.split_dout_launches = [
            Launch(bf16x3.split_dout_kernel, dict(**split, HAS_DLSE=x), options)
            for x in (False, True)
        ]
        options = dict(num_warps=4, maxnreg=_registers(1, 2))
        m, n, stages, *_ = self.tiles.forward
        self.forward_launch = Launch(
            float32_sm90.forward_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n),
        )
        m, n, stages, _ = self.tiles.dq
        self.dq_launch = Launch(
            float32_sm90.dq_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n, m // 2),
        )
        m, n, stages, _ = self.tiles.dkdv
        self.dkdv_launch = Launch(
            float32_sm90.dkdv_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, DIM=dim, STAGES=stages, **features),
            options,
            (m, n // 2, n // 2, m),
        )

    def _empty_planes(self, x: torch.Tensor) -> torch.Tensor:
        total, heads, dim = x.shape
        heads *= self.planes
        return self.empty((total, heads, dim), (heads * dim, dim, 1), torch.bfloat16)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        planes, (total, heads, _) = self._empty_planes(x), x.shape
        self.split_launch(
            triton.cdiv(total * heads, self.BLOCK), (x, planes), x.stride()[:2], (total, heads)
        )
        return planes

    def _forward(self, rows, total, spec):
        counter, device, split = self.counter, self.device, self._split
        launch, shapes = self.forward_launch, (self.described_q, *self.described[1:3])
        tiles, programs = self._query_tiles(rows, total, self.tiles.forward[0], spec)
        strides, numbers = (
            (self.q.head, self.out_stride),
            (total, *self._counts(self.heads, total), *_numbers(spec)),
        )
        return lambda q, k, v, slopes, out, lse: launch(
            programs,
            (slopes, out, lse, tiles, counter(device)),
            strides,
            numbers,
            (q, split(k), split(v)),
            shapes,
        )

    def _backward(self, rows, total, total_k, spec):
        plane, numbers, counter, device, split = (
            self.heads * total,
            _numbers(spec),
            self.counter,
            self.device,
            self._split,
        )
        query_tiles, dq_programs = self._query_tiles(rows, total, self.tiles.dq[0], spec)
        key_tiles, dkdv_programs = self._key_tiles(rows, total_k, self.tiles.dkdv[1], spec)
        dq_numbers = total, plane, *self._counts(self.heads, total_k), *numbers
        dkdv_numbers = total, plane, *self._counts(self.k_heads, total), *numbers

        def prepare(dout_strides, dlse_strides):
            dlse_head, dlse_stride = dlse_strides or (0, 0)
            split_dout_launch, split_programs = (
                self.split_dout_launches[dlse_strides is not None],
                triton.cdiv(plane, self.BLOCK),
            )
            split_numbers = dlse_stride, dlse_head, total, plane, self.heads

            def launch(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv):
                split_dout = self._empty_planes(dout)
                split_dout_launch(
                    split_programs,
                    (out, dout, lse, dlse, stats, split_dout),
                    dout_strides[:2],
                    split_numbers,
                )
                described, count = (split(q), split(k), split(v), split_dout), counter(device)
                self.dq_launch(
                    dq_programs,
                    (slopes, stats, dq, query_tiles, count),
                    (self.out_stride,),
                    dq_numbers,
                    described,
                    self.described,
                )
                self.dkdv_launch(
                    dkdv_programs,
                    (slopes, stats, dk, dv, key_tiles, count),
                    (self.k_heads * self.q.dim,),
                    dkdv_numbers,
                    described,
                    self.described,
                )

            return launch

        return prepare
