"""Launch configs of the Gluon kernels on Hopper."""

from typing import Any

import torch
import triton

from ..runtime.descriptors import ragged
from ..runtime.device import device_info
from ..runtime.launch import BoundLaunch, Launch, bind_launch, bind_launches, contiguous
from . import sum_splits
from .arguments import (
    BackwardNumbers,
    DkdvArgs,
    DkdvNumbers,
    DkdvStrides,
    DqArgs,
    DqNumbers,
    DqStrides,
    Float32DkdvArgs,
    Float32DqArgs,
    Float32ForwardArgs,
    Float32ForwardStrides,
    ForwardArgs,
    ForwardNumbers,
    ForwardStrides,
    SplitArgs,
    SplitDoutArgs,
    SumChunksArgs,
    SumSplitsArgs,
)
from .base_config import (
    BACKWARD_PARAMETERS,
    FORWARD_PARAMETERS,
    LaunchConfig,
    count_heads_in_l2,
    raise_head_count,
)
from .dkdv_splits import choose_splits, estimate_work, gains_by_chunks
from .metadata import (
    ALL_ROWS,
    AttentionSpec,
    HeadLayout,
    Rows,
    VarlenLayout,
    are_strides_tma_addressable,
    to_base2,
)
from .tile_chunks import ChunkSpec
from .tile_configs import (
    SM90_TILES,
    BatchKind,
    Sm90Tile,
    count_short_rows,
    has_registers_for_queries,
    head_parts,
    sm90_tiles,
)
from .tile_scheduler import UNBOUNDED

#: Elements per CTA of the kernels that sum over splits, and over chunks of tiles. Most CTAs of the latter
#: have nothing to do.
_SUM_BLOCK, _CHUNK_SUM_BLOCK = 1024, 2048


def _descriptor(layout: HeadLayout, wide_parts: bool = False) -> Any:
    """Return the ragged descriptor of values with this layout, in parts of a head."""
    return ragged(*layout, *head_parts(layout.head_dim, wide_parts))


def _initial_registers(ctas_per_sm: int, consumers: int) -> int:
    """Return the registers per thread at launch.

    `ctas_per_sm` CTAs share an SM, each with a producer and `consumers` consumers of 4 warps each.
    """
    return 512 // (ctas_per_sm * (consumers + 1)) // 8 * 8


class Sm90Config(LaunchConfig):
    """Launch config of the half-precision Gluon kernels on Hopper, with persistent CTAs."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layouts: tuple[HeadLayout, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
        same_offsets: bool,
        batch_kind: BatchKind,
        rows: Rows = ALL_ROWS,
    ):
        from ..sm90 import pipeline
        from . import dkdv_sm90, dq_sm90, forward_sm90

        super().__init__(device, dtype, layouts)
        block_d, parts = head_parts(self.q.head_dim)
        block_dv, parts_v = head_parts(self.v.head_dim)
        width = max(block_d * parts, block_dv * parts_v)
        # Softcap and ALiBi are compiled only together with a window, which may be unbounded.
        window = window or softcap or alibi
        causal = causal and not window
        self.next_counter = pipeline.tile_counters(device)
        self.slopes = "slopes" if alibi else "q"  # a pointer that the kernels do not read
        self.rows = rows
        self.tiles = sm90_tiles(2, self.q.head_dim, self.v.head_dim, batch_kind, rows.merged)
        self.max_ctas = device_info(device).sm_count
        self.descriptors = tuple(_descriptor(x) for x in layouts)
        self.head_strides = self.q.head_stride, self.k.head_stride, self.v.head_stride
        values = dict(HEAD_DIM_V=self.v.head_dim, BLOCK_DV=block_dv, PARTS=parts, PARTS_V=parts_v)
        features = dict(CAUSAL=causal, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        self.group = self.heads // self.k_heads
        self.forward_heads_in_l2 = count_heads_in_l2(
            self.heads, 4 if width >= 128 else 8, self.group
        )
        m, n, stages, own_stages, ctas_per_sm, _, q_in_registers, wide = self.tiles.forward
        self.forward_descriptors = tuple(_descriptor(x, wide) for x in layouts)
        forward_parts = head_parts(self.q.head_dim, wide)[1]
        forward_block_dv, forward_parts_v = head_parts(self.v.head_dim, wide)
        q_in_registers = (
            q_in_registers
            and not (softcap or alibi)
            # Tiles of a window are short. Then it helps to free the only slot of queries early.
            and (not window or own_stages == 1)
            and has_registers_for_queries(self.tiles.forward, self.q.head_dim, self.v.head_dim)
        )
        # Whether the kernel writes the output through the descriptor, instead of the pointer.
        self.stores_by_tma = own_stages > 1 and self.q.head_dim == self.v.head_dim
        self.forward_launch = Launch(
            forward_sm90.attention_forward_sm90_kernel,
            dict(
                BLOCK_M=m,
                BLOCK_N=n,
                HEAD_DIM=self.q.head_dim,
                HEAD_DIM_V=self.v.head_dim,
                BLOCK_DV=forward_block_dv,
                PARTS=forward_parts,
                PARTS_V=forward_parts_v,
                STAGES=stages,
                Q_STAGES=own_stages,
                STORE_IN_Q_SMEM=self.stores_by_tma,
                CONSUMERS=m // 64,
                SAME_OFFSETS=same_offsets and causal,
                MERGED=rows.merged,
                **features,
                Q_IN_REGISTERS=q_in_registers,
                SKIP_EMPTY=self._skips_empty_tiles(causal, same_offsets, batch_kind, width),
            ),
            dict(num_warps=4, maxnreg=_initial_registers(ctas_per_sm, m // 64)),
            (64, n, n, 64),
            args=ForwardArgs,
            unwritten=("OUT",) if self.stores_by_tma else ("o_desc",),
        )
        values = dict(HEAD_DIM=self.q.head_dim, BLOCK_D=block_d, **values)
        m, n, stages, own_stages, ctas_per_sm, ping_pong, *_ = self.tiles.dq
        self.dq_launches = {
            (x, chunks): Launch(
                dq_sm90.attention_dq_sm90_kernel,
                dict(
                    BLOCK_M=m,
                    BLOCK_N=n,
                    **values,
                    STAGES=stages,
                    Q_STAGES=own_stages,
                    CONSUMERS=m // 64,
                    MERGED=rows.merged,
                    **features,
                    HAS_DLSE=x,
                    PING_PONG=m // 64 if ping_pong else 1,
                    CHUNKED=chunks,
                ),
                dict(
                    num_warps=4, maxnreg=_initial_registers(ctas_per_sm, m // 64), launch_pdl=True
                ),
                (64, n, n, 64, 64),
                args=DqArgs,
                unwritten=() if chunks else ("DQ_SUMS",),
            )
            for x in (False, True)
            for chunks in (False, True)
        }
        m, n, stages, own_stages, ctas_per_sm, ping_pong, *_ = self.tiles.dkdv
        # Parts of keys and values in registers: in the launch of dK or of both, in the launch of dV.
        count = int(width == 64 and causal and not rows.merged)
        kv_in_registers = [(count, count)] * 2
        if (block_d, parts) == (64, 3) and self.tiles.split_dkdv and not (window or rows.merged):
            # Launches of their own leave registers. The launch of dV does not read values.
            kv_in_registers = [(1, 1) if block_dv == 64 else (2, 0), (3, 0)]
        # Skipping blocks takes registers, which at head_dim 128 the loops themselves need.
        self.dkdv_launches, self.dkdv_split_launches, self.dkdv_chunk_launches = (
            [
                Launch(
                    dkdv_sm90.attention_dkdv_sm90_kernel,
                    dict(
                        BLOCK_M=m,
                        BLOCK_N=n,
                        **values,
                        HAS_DK=dk,
                        HAS_DV=dv,
                        STAGES=stages,
                        K_STAGES=own_stages,
                        CONSUMERS=n // 64,
                        MERGED=rows.merged,
                        **features,
                        K_IN_REGISTERS=kv_in_registers[not dk][0],
                        V_IN_REGISTERS=kv_in_registers[not dk][1],
                        SKIP_BLOCKS=width != 128,
                        IN_FLOAT32=in_float32,
                        PING_PONG=n // 64 if ping_pong else 1,
                        CHUNKED=chunks,
                    ),
                    dict(
                        num_warps=4,
                        maxnreg=_initial_registers(ctas_per_sm, n // 64),
                        launch_pdl=True,
                    ),
                    (m, 64, 64, m),
                    args=DkdvArgs,
                    unwritten=() if chunks else ("DK_SUMS", "DV_SUMS"),
                )
                for dk, dv in (
                    [(True, False), (False, True)] if self.tiles.split_dkdv else [(True, True)]
                )
            ]
            for in_float32, chunks in ((False, False), (True, False), (False, True))
        )
        #: Splits per key head -> the launch that sums over the splits.
        self.sum_splits_launches: dict[int, Launch] = {}
        # The kernels that add up the chunks of tiles of queries, and of tiles of keys.
        self.sum_chunks_launches = [
            Launch(
                sum_splits.attention_sum_chunks_kernel,
                dict(
                    TILE_SIZE=size, DIM_A=dim_a, DIM_B=dim_b, BLOCK=_CHUNK_SUM_BLOCK, DEPENDENT=True
                ),
                dict(num_warps=4, launch_pdl=True),
                args=SumChunksArgs,
                unwritten=() if dim_b else ("B",),
            )
            for size, dim_a, dim_b in (
                (self.tiles.dq.block_m, self.q.head_dim, 0),
                (self.tiles.dkdv.block_n, self.q.head_dim, self.v.head_dim),
            )
        ]

    def _skips_empty_tiles(
        self, causal: bool, same_offsets: bool, batch_kind: BatchKind, width: int
    ) -> bool:
        """Return whether the forward skips tiles whose queries precede the first key of their row.

        In long rows of heads of one part, the other tiles lose as much time as these tiles save.
        """
        is_long = batch_kind in ("long rows", "two long rows")
        return (
            causal
            and not same_offsets
            and not self.rows.merged
            and not (is_long and width in (64, 128))
        )

    def _count_splits(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec
    ) -> int:
        """Return the number of splits of the query heads that share a key head."""
        # The launch that adds the splits processes all rows, and this config only some of them.
        if self.rows != ALL_ROWS:
            return 1
        num_rows = layout.cu_seqlens_q.shape[0] - 1
        dims = self.q.head_dim + self.v.head_dim
        block_n = self.tiles.dkdv.block_n
        # The longest row of queries need not attend to the longest row of keys. In causal rows,
        # queries before the first key attend to nothing, so a tile of few keys has few queries.
        is_aligned = layout.cu_seqlens_q is layout.cu_seqlens_k or spec.window_right < UNBOUNDED
        works = [
            estimate_work(num_rows, layout.max_seqlen, total_q, total_k, block_n, spec, aligned)
            for aligned in ((True,) if is_aligned else (True, False))
        ]
        return choose_splits(self.group, self.k_heads, total_q, total_k, dims, works, self.max_ctas)

    def _raise_head_count(
        self,
        heads: int,
        count: int,
        layout: VarlenLayout,
        tile: Sm90Tile,
        total: int,
        other_total: int,
        spec: AttentionSpec,
        by_keys: bool = False,
    ) -> int:
        """Return how many of `heads` heads run concurrently in a kernel, at least `count`.

        `total` counts the tokens that the kernel cuts into tiles, keys if `by_keys`.
        """
        num_rows, max_seqlen = layout.cu_seqlens_q.shape[0] - 1, layout.max_seqlen
        same_offsets = layout.cu_seqlens_q is layout.cu_seqlens_k
        if count == heads or max_seqlen >= UNBOUNDED or min(num_rows, total, other_total) == 0:
            return count
        left, right, *others = spec
        if same_offsets and right == 0 and left >= UNBOUNDED:
            # The tiles of a causal row become shorter, and the last heads end with the short ones.
            right = UNBOUNDED
        window = (left, right) if by_keys else (right, left)
        size = tile.block_n if by_keys else tile.block_m
        works = [
            estimate_work(
                num_rows, max_seqlen, other_total, total, size, AttentionSpec(*window, *others), x
            )
            for x in ((True,) if same_offsets else (True, False))
        ]
        numbers = min(max_seqlen, other_total) * (self.q.head_dim + self.v.head_dim)
        group = 1 if by_keys else self.group
        ctas = tile.ctas_per_sm * self.max_ctas
        return raise_head_count(heads, count, works, ctas, numbers // group, group)

    def _sum_splits_launch(self, splits_per_khead: int) -> Launch:
        """Return the launch that sums dk and dv over so many splits per key head."""
        launch = self.sum_splits_launches.get(splits_per_khead)
        if launch is None:
            launch = self.sum_splits_launches[splits_per_khead] = Launch(
                sum_splits.attention_sum_splits_kernel,
                dict(
                    NUM_SPLITS=splits_per_khead,
                    HEAD_DIM=self.q.head_dim,
                    HEAD_DIM_V=self.v.head_dim,
                    BLOCK=_SUM_BLOCK,
                    DEPENDENT=True,
                ),
                dict(num_warps=4, launch_pdl=True),
                args=SumSplitsArgs,
            )
        return launch

    def _reads_in_place(self, dout: torch.Tensor) -> bool:
        token_stride, head_stride, last_stride = dout.stride()
        return (
            last_stride == 1
            and dout.data_ptr() & 15 == 0
            and are_strides_tma_addressable(token_stride, head_stride, self.heads)
        )

    def _forward(self, layout, total_q, total_k, spec):
        out_layout = HeadLayout(self.heads, self.v.head_dim, self.out_stride, self.v.head_dim)
        q_desc, k_desc, v_desc = self.forward_descriptors
        tile = self.tiles.forward
        tiles, ctas = self._query_tiles(layout, total_q, tile.block_m, spec, tile.ctas_per_sm)
        strides = ForwardStrides(*self.head_strides, stride_om=self.out_stride)
        heads_in_l2 = self.heads
        if not self._has_few_queries(total_q):
            heads_in_l2 = self._raise_head_count(
                self.heads, self.forward_heads_in_l2, layout, tile, total_q, total_k, spec
            )
        numbers = ForwardNumbers(total_q, self.heads, self.group, heads_in_l2, *to_base2(spec))
        # The kernel writes the output through the descriptor or through the pointer. The other argument
        # gets q, which TMA can address: a recorded launch must not pass memory that it writes twice.
        described, written = ("out", "q") if self.stores_by_tma else ("q", "out")
        launch = BoundLaunch(
            self.forward_launch,
            ctas,
            ForwardArgs,
            q_desc=("q", q_desc),
            k_desc=("k", k_desc),
            v_desc=("v", v_desc),
            o_desc=(described, _descriptor(out_layout, tile.wide_parts)),
            SLOPES=self.slopes,
            OUT=written,
            LSE="lse",
            TILES=tiles,
            COUNTER="count",
            **strides._asdict(),
            **numbers._asdict(),
        )
        return bind_launches(FORWARD_PARAMETERS, launch, varying=("count",))

    def _chunk_specs(
        self, layout: VarlenLayout, total_q: int, total_k: int, spec: AttentionSpec, splits: int
    ) -> tuple[ChunkSpec | None, ChunkSpec | None]:
        """Return how to cut the tiles of queries, and the tiles of keys; None if they stay whole.

        `splits` is the number of splits that the tiles of keys have otherwise.
        """
        num_rows, max_seqlen = layout.cu_seqlens_q.shape[0] - 1, layout.max_seqlen
        is_known = self.rows.min_length <= max_seqlen < UNBOUNDED
        if self.rows.merged or not is_known or min(num_rows, total_q, total_k) == 0:
            return None, None
        all_rows = num_rows, total_q, total_k
        if self.rows != ALL_ROWS:
            # Rows that share no tile have an eighth of the tokens or more, and half of the longest length.
            short = int(count_short_rows(num_rows, max(total_q, total_k), max_seqlen))
            tokens = short * self.rows.min_length // 2
            num_rows = max(num_rows - short, 2)
            total_q, total_k = (
                max(x - tokens, min(x, max_seqlen), x // 8) for x in (total_q, total_k)
            )
            num_rows = max(num_rows, 2 * max(total_q, total_k) // max_seqlen - 1)
        same_offsets = layout.cu_seqlens_q is layout.cu_seqlens_k
        left, right, *others = spec
        is_masked = min(left, right) < UNBOUNDED
        dq, dkdv = self.tiles.dq, self.tiles.dkdv
        dims = self.q.head_dim + self.v.head_dim
        flops = 3 * dims, (5 if self.tiles.split_dkdv else 4) * dims
        specs: list[ChunkSpec | None] = []
        for by_keys, tile in enumerate((dq, dkdv)):
            size, block = (tile.block_n, tile.block_m) if by_keys else (tile.block_m, tile.block_n)
            window = (left, right) if by_keys else (right, left)
            # A tile of few keys in a causal row has few queries, but a tile of few queries has many keys.
            is_aligned = same_offsets or (by_keys and right < UNBOUNDED)
            # If the longest row of queries and the longest row of keys may be two rows, all other rows
            # may be short.
            known_rows = num_rows, total_q, total_k
            estimates = (known_rows, True), (known_rows, False), (all_rows, False)
            works = [
                estimate_work(
                    rows,
                    max_seqlen,
                    *(totals if by_keys else reversed(totals)),
                    size,
                    AttentionSpec(*window, *others),
                    aligned,
                )
                for (rows, *totals), aligned in estimates[: 1 if is_aligned else 3]
            ]
            total = total_k if by_keys else total_q
            longest = min(max_seqlen, total) if same_offsets and not is_masked else 0
            chunk_spec = ChunkSpec(
                tile_size=size,
                block=block,
                window_left=window[1],
                window_right=window[0],
                group=self.group if by_keys else 1,
                heads=self.k_heads if by_keys else self.heads,
                ctas=tile.ctas_per_sm * self.max_ctas,
                min_blocks=int(not by_keys),
            )
            is_cut = chunk_spec.max_chunks > 1 and gains_by_chunks(
                works,
                chunk_spec.heads,
                chunk_spec.group,
                splits if by_keys else 1,
                size,
                flops[by_keys],
                4 * (dims if by_keys else self.q.head_dim),
                total,
                longest,
                chunk_spec.ctas,
            )
            specs.append(chunk_spec if is_cut else None)
        return specs[0], specs[1]

    def _sum_chunks(self, spec: ChunkSpec, items: torch.Tensor, by_keys: bool) -> BoundLaunch:
        """Return the launch that adds up the sums of chunks."""
        launch = self.sum_chunks_launches[by_keys]
        blocks = sum(
            triton.cdiv(spec.tile_size * launch.constants[dim], _CHUNK_SUM_BLOCK)
            for dim in ("DIM_A", "DIM_B")
        )
        a, b = ("dk", "dv") if by_keys else ("dq", "q")
        return BoundLaunch(
            launch,
            spec.max_chunks * spec.heads * blocks,
            SumChunksArgs,
            ITEMS=items,
            A_SUMS=f"{a}_sums",
            B_SUMS=f"{b}_sums" if by_keys else f"{a}_sums",
            A=a,
            B=b,
            first_entry=items.shape[0] - spec.max_chunks,
            heads=spec.heads,
        )

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride, base2_spec = self.heads * total_q, to_base2(spec)
        k_heads = self.k_heads
        dq_tile, dkdv = self.tiles.dq, self.tiles.dkdv
        splits = self._count_splits(layout, total_q, total_k, spec)
        query_chunks, key_chunks = self._chunk_specs(layout, total_q, total_k, spec, splits)
        if key_chunks:
            splits = 1
        query_tiles, dq_ctas = self._query_tiles(
            layout, total_q, dq_tile.block_m, spec, dq_tile.ctas_per_sm
        )
        key_tiles, dkdv_ctas = self._key_tiles(
            layout, total_k, dkdv.block_n, spec, dkdv.ctas_per_sm, splits
        )
        k_rows, new = total_k * k_heads, self.empty
        # Name -> shape of the float32 sums of splits or chunks.
        sums, sum_launches = {}, []
        if query_chunks:
            query_tiles = layout.chunks(query_tiles, query_chunks)
            dq_ctas = query_chunks.ctas
            max_sums = query_chunks.max_chunks * self.heads * dq_tile.block_m
            sums["dq_sums"] = max_sums, self.q.head_dim
            sum_launches.append(self._sum_chunks(query_chunks, query_tiles, by_keys=False))
        dkdv_launches = self.dkdv_launches
        if key_chunks:
            key_tiles = layout.chunks(key_tiles, key_chunks)
            dkdv_ctas = key_chunks.ctas
            dkdv_launches = self.dkdv_chunk_launches
            max_sums = key_chunks.max_chunks * k_heads * dkdv.block_n
            sums |= dict(dk_sums=(max_sums, self.q.head_dim), dv_sums=(max_sums, self.v.head_dim))
            sum_launches.append(self._sum_chunks(key_chunks, key_tiles, by_keys=True))
        if splits > 1:
            dkdv_launches = self.dkdv_split_launches
            sums |= dict(
                dk_sums=(k_rows, splits, self.q.head_dim), dv_sums=(k_rows, splits, self.v.head_dim)
            )
            sum_launches.append(
                BoundLaunch(
                    self._sum_splits_launch(splits),
                    sum(triton.cdiv(k_rows * x.head_dim, _SUM_BLOCK) for x in (self.q, self.v)),
                    SumSplitsArgs,
                    DK_SPLITS="dk_sums",
                    DV_SPLITS="dv_sums",
                    DK="dk",
                    DV="dv",
                    rows=k_rows,
                )
            )
        few_queries = self._has_few_queries(total_q)
        *_, count = self._head_counts(k_heads * splits, total_q, few_queries)
        heads_in_l2 = self._raise_head_count(
            k_heads * splits, count, layout, dkdv, total_k, total_q, spec, by_keys=True
        )
        dkdv_numbers = DkdvNumbers(
            total_q,
            stats_stride,
            self.heads,
            self.heads // (k_heads * splits),
            splits,
            heads_in_l2,
            *base2_spec,
        )
        allocations = {name: (*contiguous(shape), torch.float32) for name, shape in sums.items()}

        def prepare(dout_strides, dlse_strides):
            stride_dom, stride_doh, _ = dout_strides
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            heads, head_dim = self.heads, self.q.head_dim
            dout_layout = HeadLayout(heads, self.v.head_dim, stride_dom, stride_doh)
            dq_layout = HeadLayout(heads, head_dim, heads * head_dim, head_dim)
            q_desc, k_desc, v_desc = self.descriptors
            descriptors = dict(
                q_desc=("q", q_desc),
                k_desc=("k", k_desc),
                v_desc=("v", v_desc),
                do_desc=("dout", _descriptor(dout_layout)),
            )
            dq_strides = DqStrides(
                *self.head_strides, stride_doh=stride_doh, stride_om=self.out_stride
            )
            *head_counts, count = self._head_counts(heads, total_k, few_queries, self.group)
            dq_numbers = DqNumbers(
                stride_dlsem,
                stride_dlseh,
                total_q,
                stats_stride,
                *head_counts,
                self._raise_head_count(heads, count, layout, dq_tile, total_q, total_k, spec),
                *base2_spec,
            )
            dkdv_strides = DkdvStrides(
                *self.head_strides,
                stride_doh=stride_doh,
                stride_dkn=k_heads * splits * head_dim,
                stride_dvn=k_heads * splits * self.v.head_dim,
            )
            launches = [
                BoundLaunch(
                    self.dq_launches[dlse_strides is not None, query_chunks is not None],
                    dq_ctas,
                    DqArgs,
                    **descriptors,
                    dq_desc=("dq", _descriptor(dq_layout)),
                    SLOPES=self.slopes,
                    OUT="out",
                    LSE="lse",
                    DLSE="lse" if dlse_strides is None else "dlse",
                    STATS="stats",
                    DQ_SUMS="dq_sums" if query_chunks else "q",
                    TILES=query_tiles,
                    COUNTER="count",
                    **dq_strides._asdict(),
                    **dq_numbers._asdict(),
                )
            ]
            launches += [
                BoundLaunch(
                    launch,
                    dkdv_ctas,
                    DkdvArgs,
                    **descriptors,
                    SLOPES=self.slopes,
                    STATS="stats",
                    DK="dk" if splits == 1 else "dk_sums",
                    DV="dv" if splits == 1 else "dv_sums",
                    DK_SUMS="dk_sums" if key_chunks else "q",
                    DV_SUMS="dv_sums" if key_chunks else "q",
                    TILES=key_tiles,
                    COUNTER="count",
                    **dkdv_strides._asdict(),
                    **dkdv_numbers._asdict(),
                )
                for launch in dkdv_launches
            ]
            if not sums:
                return bind_launches(BACKWARD_PARAMETERS, *launches, varying=("count",))
            launch_all = bind_launches(
                f"{BACKWARD_PARAMETERS}, *, {', '.join(sums)}",
                *launches,
                *sum_launches,
                varying=("count",),
            )
            return lambda *args: launch_all(
                *args, **{name: new(*shape) for name, shape in allocations.items()}
            )

        return prepare


class Sm90MixedConfig(LaunchConfig):
    """Launch config of two launches per kernel: short rows, which share tiles, and other rows."""

    def __init__(self, short: Sm90Config, other: Sm90Config):
        super().__init__(short.device, short.dtype, (short.q, short.k, short.v))
        self.short, self.other = short, other
        self._reads_in_place, self.next_counter = other._reads_in_place, other.next_counter

    def _forward(self, layout, total_q, total_k, spec):
        short, other = (
            x._forward(layout, total_q, total_k, spec) for x in (self.short, self.other)
        )
        return self._run_both(short, other)

    def _run_both(self, short, other):
        next_counter = self.next_counter

        def run(*args):
            other(*args)
            short(*args[:-1], next_counter())

        return run

    def _backward(self, layout, total_q, total_k, spec):
        prepare_short, prepare_other = (
            x._backward(layout, total_q, total_k, spec) for x in (self.short, self.other)
        )

        def prepare(*strides):
            return self._run_both(prepare_short(*strides), prepare_other(*strides))

        return prepare


class Bf16x3Config(LaunchConfig):
    """Launch config of the float32 Gluon kernels on Hopper, which split operands into bfloat16."""

    #: Heads of tokens that one CTA of a splitting kernel takes.
    BLOCK = 32

    def __init__(
        self,
        device: torch.device,
        layouts: tuple[HeadLayout, ...],
        causal: bool,
        window: bool,
        softcap: bool,
        alibi: bool,
    ):
        from ..sm90 import pipeline
        from . import bf16x3, float32_sm90

        super().__init__(device, torch.float32, layouts)
        dim, count = self.q.head_dim, bf16x3.TERMS.value
        self.next_counter, self.terms = pipeline.tile_counters(device), count
        self.has_slopes = alibi
        self.tiles = SM90_TILES[4, dim]
        self.max_ctas = device_info(device).sm_count
        # The terms of a head are adjacent. dout has the layout of q.
        split = [ragged(count * x.heads, dim, count * x.heads * dim, dim) for x in layouts]
        self.descriptors = *split, split[0]
        self.forward_descriptors = ragged(*self.q), *split[1:]
        window = window or softcap or alibi
        features = dict(CAUSAL=causal and not window, WINDOW=window, SOFTCAP=softcap, ALIBI=alibi)
        constants, options = dict(HEAD_DIM=dim, BLOCK=self.BLOCK), dict(num_warps=4)
        self.split_launch = Launch(
            bf16x3.attention_split_kernel, constants, options, args=SplitArgs
        )
        self.split_dout_launches = [
            Launch(
                bf16x3.attention_split_dout_kernel,
                dict(**constants, HAS_DLSE=x),
                options,
                args=SplitDoutArgs,
            )
            for x in (False, True)
        ]
        options = dict(num_warps=4, maxnreg=_initial_registers(1, 2))
        m, n, stages, *_ = self.tiles.forward
        self.forward_launch = Launch(
            float32_sm90.attention_forward_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n),
            args=Float32ForwardArgs,
        )
        m, n, stages, *_ = self.tiles.dq
        self.dq_launch = Launch(
            float32_sm90.attention_dq_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m // 2, n, n, m // 2),
            args=Float32DqArgs,
        )
        m, n, stages, *_ = self.tiles.dkdv
        self.dkdv_launch = Launch(
            float32_sm90.attention_dkdv_float32_sm90_kernel,
            dict(BLOCK_M=m, BLOCK_N=n, HEAD_DIM=dim, STAGES=stages, **features),
            options,
            (m, n // 2, n // 2, m),
            args=Float32DkdvArgs,
        )

    def _empty_terms(self, x: torch.Tensor) -> torch.Tensor:
        total, heads, dim = x.shape
        heads *= self.terms
        return self.empty((total, heads, dim), (heads * dim, dim, 1), torch.bfloat16)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bfloat16 terms of a float32 tensor."""
        terms, (total, heads, _) = self._empty_terms(x), x.shape
        self.split_launch(
            triton.cdiv(total * heads, self.BLOCK),
            SplitArgs(
                X=x,
                SPLIT=terms,
                stride_xt=x.stride(0),
                stride_xh=x.stride(1),
                total=total,
                heads=heads,
            ),
        )
        return terms

    def _forward(self, layout, total_q, total_k, spec):
        split, has_slopes = self._split, self.has_slopes
        q_desc, k_desc, v_desc = self.forward_descriptors
        tiles, ctas = self._query_tiles(layout, total_q, self.tiles.forward.block_m, spec)
        strides = Float32ForwardStrides(self.q.head_stride, self.out_stride)
        numbers = ForwardNumbers(total_q, *self._head_counts(self.heads, total_q), *to_base2(spec))
        launch = bind_launch(
            self.forward_launch,
            ctas,
            Float32ForwardArgs,
            q_desc=q_desc,
            k_desc=k_desc,
            v_desc=v_desc,
            TILES=tiles,
            **strides._asdict(),
            **numbers._asdict(),
        )

        def run(q, k, v, slopes, out, lse, count):
            launch(
                q_desc=q,
                k_desc=split(k),
                v_desc=split(v),
                SLOPES=slopes if has_slopes else q,
                OUT=out,
                LSE=lse,
                COUNTER=count,
            )

        return run

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride, base2_spec = self.heads * total_q, to_base2(spec)
        split, has_slopes = self._split, self.has_slopes
        query_tiles, dq_ctas = self._query_tiles(layout, total_q, self.tiles.dq.block_m, spec)
        key_tiles, dkdv_ctas = self._key_tiles(layout, total_k, self.tiles.dkdv.block_n, spec)
        stride_dqm, stride_dkn = self.out_stride, self.k_heads * self.q.head_dim
        dq_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.heads, total_k), *base2_spec
        )
        dkdv_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.k_heads, total_q), *base2_spec
        )

        def prepare(dout_strides, dlse_strides):
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            stride_dom, stride_doh, _ = dout_strides
            names = "q_desc", "k_desc", "v_desc", "do_desc"
            descriptors = dict(zip(names, self.descriptors, strict=True))
            split_dout_launch = bind_launch(
                self.split_dout_launches[dlse_strides is not None],
                triton.cdiv(stats_stride, self.BLOCK),
                SplitDoutArgs,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dlsem=stride_dlsem,
                stride_dlseh=stride_dlseh,
                total_q=total_q,
                stats_stride=stats_stride,
                heads=self.heads,
            )
            dq_launch = bind_launch(
                self.dq_launch,
                dq_ctas,
                Float32DqArgs,
                **descriptors,
                TILES=query_tiles,
                stride_dqm=stride_dqm,
                **dq_numbers._asdict(),
            )
            dkdv_launch = bind_launch(
                self.dkdv_launch,
                dkdv_ctas,
                Float32DkdvArgs,
                **descriptors,
                TILES=key_tiles,
                stride_dkn=stride_dkn,
                **dkdv_numbers._asdict(),
            )

            def run(q, k, v, slopes, out, lse, dout, dlse, stats, dq, dk, dv, count):
                slopes, split_dout = slopes if has_slopes else q, self._empty_terms(dout)
                split_dout_launch(
                    OUT=out,
                    DO=dout,
                    LSE=lse,
                    DLSE=lse if dlse is None else dlse,
                    STATS=stats,
                    SPLIT=split_dout,
                )
                terms = dict(q_desc=split(q), k_desc=split(k), v_desc=split(v), do_desc=split_dout)
                dq_launch(**terms, SLOPES=slopes, STATS=stats, DQ=dq, COUNTER=count)
                dkdv_launch(**terms, SLOPES=slopes, STATS=stats, DK=dk, DV=dv, COUNTER=count)

            return run

        return prepare
