"""Launch config of the portable kernels."""

from typing import Any

import torch
import triton

from ..runtime.device import device_info
from ..runtime.launch import BoundLaunch, Launch, bind_launches
from . import portable
from .arguments import (
    BackwardNumbers,
    DqNumbers,
    DropoutNumbers,
    ForwardNumbers,
    PortableDkdvArgs,
    PortableDkdvStrides,
    PortableDqArgs,
    PortableDqStrides,
    PortableForwardArgs,
    PortableForwardStrides,
)
from .base_config import BACKWARD_PARAMETERS, FORWARD_PARAMETERS, LaunchConfig
from .metadata import AttentionSpec, HeadLayout, VarlenLayout
from .tile_configs import Tile, Tiles, portable_tiles


class PortableConfig(LaunchConfig):
    """Launch config of the kernels in plain Triton: one CTA per tile and head."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        layouts: tuple[HeadLayout, ...],
        has_left: bool,
        has_right: bool,
        softcap: bool,
        alibi: int,
        dropout: bool,
        tf32: bool,
        tiles: Tiles | None = None,
    ):
        super().__init__(device, dtype, layouts)
        self.features = dict(
            has_left=has_left,
            has_right=has_right,
            softcap=softcap,
            alibi=alibi,
            dropout=dropout,
            tf32=tf32,
        )
        block_d, block_dv = (triton.next_power_of_2(x) for x in (self.q.head_dim, self.v.head_dim))
        if any(stride % 16 for x in layouts for stride in (x.token_stride, x.head_stride)):
            # Triton does not pipeline loads with such strides, and then Triton 3.6 allocates too
            # little shared memory if the two widths differ.
            block_d = block_dv = max(block_d, block_dv)
        self.kind = dtype.itemsize, max(block_d, block_dv, 32)
        capability = device_info(device).capability
        self.tiles = tiles or portable_tiles(capability, *self.kind, dropout=dropout)
        self.strides = (*self.q[2:], *self.k[2:], *self.v[2:])
        # Arrays that a call does not have get any pointer, which the kernels do not read.
        self.tensors = dict(
            Q="q", K="k", V="v", SLOPES="slopes" if alibi else "q", SEED="seed" if dropout else "q"
        )

        def launch(kernel: Any, args: Any, tile: Tile, **constants: Any) -> Launch:
            return Launch(
                kernel,
                dict(
                    HEAD_DIM=self.q.head_dim,
                    HEAD_DIM_V=self.v.head_dim,
                    BLOCK_D=block_d,
                    BLOCK_DV=block_dv,
                    BLOCK_M=tile.block_m,
                    BLOCK_N=tile.block_n,
                    HAS_LEFT=has_left,
                    HAS_RIGHT=has_right,
                    SOFTCAP=softcap,
                    ALIBI=alibi,
                    DROPOUT=dropout,
                    PRECISION="tf32" if tf32 else "tf32x3",
                    **constants,
                ),
                dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
                args=args,
            )

        self.forward_launch = launch(
            portable.attention_forward_kernel, PortableForwardArgs, self.tiles.forward
        )
        self.dq_launches = [
            launch(portable.attention_dq_kernel, PortableDqArgs, self.tiles.dq, HAS_DLSE=x)
            for x in (False, True)
        ]
        self.dkdv_launch = launch(portable.attention_dkdv_kernel, PortableDkdvArgs, self.tiles.dkdv)

    def autotuned(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: VarlenLayout,
        spec: AttentionSpec,
    ) -> "PortableConfig":
        """Return this launch config with the fastest tiles for these arguments."""
        from .autotune import autotune_tiles

        def make_config(tiles: Tiles) -> PortableConfig:
            return PortableConfig(
                self.device, self.dtype, (self.q, self.k, self.v), **self.features, tiles=tiles
            )

        features = tuple(
            name.removeprefix("has_") for name, present in self.features.items() if present
        )
        tiles = autotune_tiles(
            (*self.kind, self.dtype, *features),
            make_config,
            self.tiles,
            q,
            k,
            v,
            layout,
            spec,
            self.features["alibi"],
        )
        return make_config(tiles)

    def _forward(self, layout, total_q, total_k, spec):
        tiles, ctas = self._query_tiles(layout, total_q, self.tiles.forward.block_m, spec)
        dropout = DropoutNumbers(spec.dropout)
        strides = PortableForwardStrides(*self.strides, stride_om=self.out_stride)
        numbers = ForwardNumbers(total_q, *self._head_counts(self.heads, total_q), *spec[:4])
        launch = BoundLaunch(
            self.forward_launch,
            ctas,
            PortableForwardArgs,
            **self.tensors,
            OUT="out",
            LSE="lse",
            TILES=tiles,
            **strides._asdict(),
            **numbers._asdict(),
            **dropout._asdict(),
        )
        return bind_launches(FORWARD_PARAMETERS, launch)

    def _backward(self, layout, total_q, total_k, spec):
        stats_stride = self.heads * total_q
        query_tiles, key_tiles, dq_ctas, dkdv_ctas = None, None, 0, 0
        if total_q > 0:
            query_tiles, dq_ctas = self._query_tiles(layout, total_q, self.tiles.dq.block_m, spec)
        if total_k > 0:
            key_tiles, dkdv_ctas = self._key_tiles(layout, total_k, self.tiles.dkdv.block_n, spec)
        dropout = DropoutNumbers(spec.dropout)
        dkdv_numbers = BackwardNumbers(
            total_q, stats_stride, *self._head_counts(self.k_heads, total_q), *spec[:4]
        )

        def prepare(dout_strides, dlse_strides):
            stride_dom, stride_doh, _ = dout_strides
            stride_dlseh, stride_dlsem = dlse_strides or (0, 0)
            dq_strides = PortableDqStrides(
                *self.strides,
                stride_om=self.out_stride,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dqm=self.heads * self.q.head_dim,
            )
            dq_numbers = DqNumbers(
                stride_dlsem,
                stride_dlseh,
                total_q,
                stats_stride,
                *self._head_counts(self.heads, total_k),
                *spec[:4],
            )
            dkdv_strides = PortableDkdvStrides(
                *self.strides,
                stride_dom=stride_dom,
                stride_doh=stride_doh,
                stride_dkn=self.k_heads * self.q.head_dim,
                stride_dvn=self.k_heads * self.v.head_dim,
            )

            launches = []
            if query_tiles is not None:
                launches.append(
                    BoundLaunch(
                        self.dq_launches[dlse_strides is not None],
                        dq_ctas,
                        PortableDqArgs,
                        **self.tensors,
                        OUT="out",
                        LSE="lse",
                        DO="dout",
                        DLSE="lse" if dlse_strides is None else "dlse",
                        STATS="stats",
                        DQ="dq",
                        TILES=query_tiles,
                        **dq_strides._asdict(),
                        **dq_numbers._asdict(),
                        **dropout._asdict(),
                    )
                )
            if key_tiles is not None:
                launches.append(
                    BoundLaunch(
                        self.dkdv_launch,
                        dkdv_ctas,
                        PortableDkdvArgs,
                        **self.tensors,
                        DO="dout",
                        STATS="stats",
                        DK="dk",
                        DV="dv",
                        TILES=key_tiles,
                        **dkdv_strides._asdict(),
                        **dkdv_numbers._asdict(),
                        **dropout._asdict(),
                    )
                )
            return bind_launches(BACKWARD_PARAMETERS, *launches) if launches else lambda *_: None

        return prepare
