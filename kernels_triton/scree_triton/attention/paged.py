"""Calls of `paged_attention`: rejection of unsupported calls, launches and the operator."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

import scree

from ..runtime.autograd import needs_gradient
from ..runtime.compile import define_operator, uses_operators
from ..runtime.descriptors import ragged
from ..runtime.device import INTERPRETED, device_info, unsupported_dtype
from ..runtime.fallback import fallback_note, falls_back_to
from ..runtime.launch import (
    BoundLaunch,
    Descriptor,
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    bind_launches,
    empty,
    launch_args,
    on_device,
)
from .metadata import AttentionSpec, allows_tf32, are_strides_tma_addressable, to_base2
from .paged_kernels import combine_kernel, combine_prefill_kernel, decode_kernel, prefill_kernel
from .tile_scheduler import UNBOUNDED

#: Bound once, because a class method is bound anew at every call.
_from_layout = scree.Array.from_layout
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Rows of the tile of queries of `decode_kernel`: at least what a matrix product takes, and at most
#: what the registers hold beside the keys.
_MIN_ROWS, _MAX_ROWS, _MAX_SHARED_ROWS = 16, 64, 8
_MAX_LENGTH = (1 << 31) - 1
#: The parameters of the functions that launch decoding and prefill.
_PARAMETERS = "q, k, v, pages, kv_lengths, out, lse, partial, slopes, k_scale, v_scale"
#: Rows up to which CTAs of `decode_kernel` have one key head each.
_FEW_ROWS = 8
#: Rows whose lengths are read at a time; few sizes, as each compiles a kernel.
_ROWS_AT_A_TIME = (16, 64, 256, 1024)
#: Parts that `combine_kernel` loads at a time, for few rows and for many, and elements at most.
_PARTS_OF_FEW, _PARTS_OF_MANY, _MAX_COMBINED = 64, 8, 1 << 13


class _Tile(NamedTuple):
    """Columns of a block, keys times heads; compile options; CTAs per SM of `decode_kernel`."""

    columns: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


#: By bytes per element of the cache and padded head_dim.
_DECODE_TILES = {
    (1, 64): _Tile(128, 4, 3, 3),
    (1, 128): _Tile(64, 4, 3, 3),
    (1, 256): _Tile(64, 4, 3, 2),
    (2, 64): _Tile(128, 4, 3, 2),
    (2, 128): _Tile(32, 4, 3, 3),
    (2, 256): _Tile(32, 4, 3, 2),
    (4, 64): _Tile(64, 4, 3, 2),
    (4, 128): _Tile(32, 4, 3, 2),
    (4, 256): _Tile(16, 4, 3, 2),
}
#: Keys of a block of `prefill_kernel`, and its compile options.
_PREFILL_TILES = {
    (1, 64): _Tile(64, 8, 3),
    (1, 128): _Tile(64, 8, 3),
    (1, 256): _Tile(32, 8, 2),
    (2, 64): _Tile(64, 8, 3),
    (2, 128): _Tile(64, 8, 3),
    (2, 256): _Tile(32, 8, 2),
    (4, 64): _Tile(32, 8, 2),
    (4, 128): _Tile(32, 8, 2),
    (4, 256): _Tile(16, 8, 2),
}
#: The same for calls without a mask, such as shared pages.
_UNMASKED_PREFILL_TILES = {**_PREFILL_TILES, (2, 128): _Tile(128, 8, 3)}
_PREFILL_ROWS = 128
#: The most CTAs that share the keys of a tile of queries, the fewest keys of each CTA, and the rows of a
#: CTA that combines their results.
_MAX_PREFILL_PARTS, _MIN_PREFILL_PART, _COMBINED_ROWS = 16, 512, 16


class _Sm90Tile(NamedTuple):
    """Query rows and keys of a tile of `paged_prefill_sm90_kernel`, and stages of its rings."""

    block_m: int
    block_n: int
    num_stages: int


#: By head_dim of keys and values, the tile of `paged_prefill_sm90_kernel`. The kernel is right with
#: any of 64 and 128, but was timed with 128 only.
_SM90_PREFILL_TILES = {(128, 128): _Sm90Tile(128, 128, 2)}
#: Columns of its descriptors.
_SM90_COLUMNS = 64
#: Tokens of an array that TMA coordinates reach, see `descriptors.Ragged`.
_MAX_TMA_TOKENS = 0x7FFF0000
#: Shared memory for queries and for products that warps exchange.
_OTHER_MEMORY = 16 << 10


def _shrink(tile: _Tile, bytes_per_key: int, shared_memory: int) -> _Tile:
    """Return the tile with as many stages, and then columns, as the shared memory has room for."""
    while tile.columns * bytes_per_key * (tile.num_stages - 1) + _OTHER_MEMORY > shared_memory > 0:
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.columns > 16:
            tile = tile._replace(columns=tile.columns // 2)
        else:
            break
    return tile


@launch_args
class DecodeArgs:
    """Arguments of `decode_kernel`."""

    Q: Pointer
    K: Pointer
    V: Pointer
    PAGES: Pointer
    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    Q_OFFSETS: Pointer
    SLOPES: Pointer
    K_SCALE: Pointer
    V_SCALE: Pointer
    OUT: Written
    LSE: Written
    PARTIAL: Written
    stride_qt: Stride
    stride_qh: Stride
    stride_kp: Stride
    stride_kt: Stride
    stride_kh: Stride
    stride_vp: Stride
    stride_vt: Stride
    stride_vh: Stride
    n: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    value_scale: Number
    table_width: Number
    capacity: Number


@launch_args
class CombineArgs:
    """Arguments of `combine_kernel`."""

    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    Q_OFFSETS: Pointer
    OUT: Written
    LSE: Written
    PARTIAL: Pointer
    n: Number
    window_left: Number
    capacity: Number
    num_tokens: Number


@launch_args
class PrefillArgs:
    """Arguments of `prefill_kernel`."""

    Q: Pointer
    K: Pointer
    V: Pointer
    PAGES: Pointer
    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    Q_OFFSETS: Pointer
    SLOPES: Pointer
    K_SCALE: Pointer
    V_SCALE: Pointer
    OUT: Written
    LSE: Written
    PARTIAL: Written
    stride_qt: Stride
    stride_qh: Stride
    stride_kp: Stride
    stride_kt: Stride
    stride_kh: Stride
    stride_vp: Stride
    stride_vt: Stride
    stride_vh: Stride
    n: Number
    bisections: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    value_scale: Number
    table_width: Number
    capacity: Number


@launch_args
class PrefillSm90Args:
    """Arguments of `paged_prefill_sm90_kernel`."""

    k_desc: Descriptor
    v_desc: Descriptor
    Q: Pointer
    PAGES: Pointer
    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    Q_OFFSETS: Pointer
    OUT: Written
    LSE: Written
    PARTIAL: Written
    stride_qt: Stride
    stride_qh: Stride
    stride_kh: Stride
    stride_vh: Stride
    k_page_stride: Number
    v_page_stride: Number
    n: Number
    bisections: Number
    parts: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    value_scale: Number
    table_width: Number
    capacity: Number


@launch_args
class CombinePrefillArgs:
    """Arguments of `combine_prefill_kernel`."""

    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    Q_OFFSETS: Pointer
    OUT: Written
    LSE: Written
    PARTIAL: Pointer
    n: Number
    bisections: Number
    parts: Number
    window_left: Number
    window_right: Number
    capacity: Number


class Spec(NamedTuple):
    """The options of a call."""

    left: int
    right: int
    scale: float
    softcap: float
    value_scale: float
    split_size: int
    """Tokens per part of a row; 0 for parts that fill the device."""
    return_lse: bool


class _Shape(NamedTuple):
    """Metadata of a call that determines its kernels."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    """Of q, k, v, the page table, its offsets, the lengths, and the offsets of q."""
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    is_table_ragged: bool
    has_slopes: bool
    is_scaled: bool
    has_pairs: bool
    """Whether both caches have 8 bits per number, and can be loaded in pairs of numbers."""
    has_same_strides: bool
    """Whether both caches have equal strides, so that the kernels compute offsets once."""
    is_tma_addressable: bool
    """Whether TMA can copy the tokens of a page of both caches."""
    shares_heads: bool
    """Whether a CTA of `decode_kernel` may take several key heads."""
    max_length: int
    """A bound on the queries per row, at most `_MAX_ROWS`."""
    rows_at_a_time: int
    """Rows whose lengths are read at a time: all rows of the batch, or a part of many."""
    has_many_rows: bool
    has_one_row: bool
    """Whether one query attends to one row of pages."""
    clears_tail: bool
    """Whether the tail of the results is cleared: where launches are recorded, except for one row and
    one token, which is in the tail only if the row is empty."""


class _LaunchConfig:
    """Launches for one kind of call."""

    def __init__(self, shape: _Shape, spec: Spec, is_tf32: bool):
        device, group = device_info(shape.device), shape.heads // shape.kv_heads
        dtype, *cache_dtypes = shape.dtypes[:3]
        itemsize = max(cache_dtype.itemsize for cache_dtype in cache_dtypes)
        self.index = shape.device.index if shape.device.type == "cuda" else None
        self.new = empty(shape.device.type)
        self.shape, self.spec = shape, spec
        block_d, block_dv = (
            max(16, triton.next_power_of_2(d)) for d in (shape.head_dim, shape.head_dim_v)
        )
        key = itemsize, max(64, block_d, block_dv)
        # Rows of queries per key head that are decoded; no more for a few heads together.
        self.rows = max(2, triton.next_power_of_2(group))
        used = shape.max_length * group
        if used <= _MAX_ROWS and not spec.split_size:
            self.rows = max(self.rows, triton.next_power_of_2(used))
        # A CTA with several heads reads longer runs of memory. Few rows have fewer parts without it.
        heads_per_cta = next(
            h
            for h in (8, 4, 2, 1)
            if shape.kv_heads % h == 0
            and (h == 1 or (shape.shares_heads and h * self.rows <= _MAX_SHARED_ROWS))
        )
        self.rows = max(self.rows, _MIN_ROWS // heads_per_cta)
        self.has_prefill = used > self.rows
        self.used = min(used, self.rows)
        bytes_per_key = (block_d + block_dv) * itemsize
        decode = _shrink(_DECODE_TILES[key], bytes_per_key, device.shared_memory)
        has_mask = min(spec.left, spec.right) < UNBOUNDED
        prefill = _shrink(
            (_PREFILL_TILES if has_mask else _UNMASKED_PREFILL_TILES)[key],
            bytes_per_key,
            device.shared_memory - _PREFILL_ROWS * block_d * dtype.itemsize * 2,
        )
        block_n = max(1, decode.columns // heads_per_cta)
        per_sm = device.sm_count * decode.ctas_per_sm
        self.slots = max(1, per_sm * heads_per_cta // shape.kv_heads)
        self.ctas = self.slots * (shape.kv_heads // heads_per_cta)
        self.split = -(-spec.split_size // block_n)
        self.block_n = block_n
        heads = dict(KV_HEADS=shape.kv_heads, GROUP=group)
        dims = dict(
            HEAD_DIM=shape.head_dim, HEAD_DIM_V=shape.head_dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv
        )
        options = dict(
            PAGE_SIZE=shape.page_size,
            IS_RAGGED=shape.is_table_ragged,
            HAS_LEFT=spec.left < UNBOUNDED,
            # One query is the last token of its row.
            HAS_RIGHT=spec.right < UNBOUNDED and shape.max_length > 1,
            SOFTCAP=spec.softcap > 0,
            ALIBI=shape.has_slopes,
            SCALED=shape.is_scaled,
            IS_NARROW=dtype == torch.bfloat16 and itemsize == 1,
            WRITE_LSE=spec.return_lse,
        )
        schedule = dict(
            SPLIT=self.split,
            LENGTHS=shape.rows_at_a_time,
            MANY=shape.has_many_rows,
            SLOTS=self.slots,
        )
        self.by_row = bool(self.split) or shape.rows_at_a_time == _ROWS_AT_A_TIME[0]
        last = dict(PRECISION="tf32" if is_tf32 else "tf32x3")
        # Few rows may have many parts each, of which a CTA loads as many as it can.
        self.used = triton.next_power_of_2(self.used)
        tile = 1 if self.by_row else self.used
        parts = _PARTS_OF_FEW if self.by_row else _PARTS_OF_MANY
        parts = max(2, min(parts, _MAX_COMBINED // (tile * block_dv)))
        self.tiles = self.used // tile
        unwritten = () if spec.return_lse else ("LSE",)
        self.decode = Launch(
            decode_kernel,
            heads
            | dict(HEADS=heads_per_cta)
            | dims
            | dict(ROWS=self.rows, BLOCK_N=block_n)
            | options
            | schedule
            | dict(PAIRS=shape.has_pairs, SAME_STRIDES=shape.has_same_strides)
            | last
            | dict(PDL=device.supports_pdl, ONE_ROW=shape.has_one_row),
            dict(num_warps=decode.num_warps, num_stages=decode.num_stages),
            args=DecodeArgs,
            unwritten=unwritten,
        )
        self.combine = Launch(
            combine_kernel,
            heads
            | dict(
                HEAD_DIM_V=shape.head_dim_v,
                BLOCK_DV=block_dv,
                ROWS=self.rows,
                BLOCK_N=block_n,
                **{x: options[x] for x in ("PAGE_SIZE", "IS_RAGGED", "HAS_LEFT", "WRITE_LSE")},
            )
            | schedule
            | dict(
                BY_ROW=self.by_row,
                TILES=self.used // tile,
                TILE=tile,
                PARTS=parts,
                PDL=device.supports_pdl,
                CLEAR_TAIL=shape.clears_tail,
            ),
            # For one row of 1,024 keys two warps are 2% faster than four; other rows were timed with four.
            dict(num_warps=2 if shape.has_one_row else 4, launch_pdl=device.supports_pdl),
            args=CombineArgs,
            unwritten=unwritten,
        )
        self.sm90_tile = sm90 = _sm90_tile(shape, spec)
        self.block_m, block_n = sm90[:2] if sm90 else (_PREFILL_ROWS, prefill.columns)
        self.queries = self.block_m // group
        self.sm_count = device.sm_count
        tiles = dict(DECODE_ROWS=self.rows, BLOCK_M=self.block_m, BLOCK_N=block_n)
        combined = dict(HEAD_DIM_V=shape.head_dim_v, BLOCK_DV=block_dv)
        combined_options = {
            x: options[x] for x in ("PAGE_SIZE", "IS_RAGGED", "HAS_LEFT", "HAS_RIGHT", "WRITE_LSE")
        }

        min_part = dict(MIN_PART=_MIN_PREFILL_PART)
        self.combine_prefill = Launch(
            combine_prefill_kernel,
            heads | combined | tiles | combined_options | min_part | dict(TILE=_COMBINED_ROWS),
            dict(num_warps=4),
            args=CombinePrefillArgs,
            unwritten=unwritten,
        )

        @cache
        def prefill_launch(parts: int) -> Launch:
            if sm90 is None:
                cut = dict(PARTS=parts) | min_part | dict(SAME_STRIDES=shape.has_same_strides)
                return Launch(
                    prefill_kernel,
                    heads | dims | tiles | options | cut | last,
                    dict(num_warps=prefill.num_warps, num_stages=prefill.num_stages),
                    args=PrefillArgs,
                    unwritten=unwritten if parts > 1 else (*unwritten, "PARTIAL"),
                )
            from .paged_sm90 import paged_prefill_sm90_kernel

            consumers, box = sm90.block_m // 64, min(shape.page_size, sm90.block_n)
            names = "PAGE_SIZE", "IS_RAGGED", "HAS_LEFT", "HAS_RIGHT", "SOFTCAP", "WRITE_LSE"
            return Launch(
                paged_prefill_sm90_kernel,
                heads
                | dict(HEAD_DIM=shape.head_dim, HEAD_DIM_V=shape.head_dim_v)
                | tiles
                | {x: options[x] for x in names}
                | min_part
                | dict(STAGES=sm90.num_stages, CONSUMERS=consumers),
                # Registers per thread of an SM's only CTA, whose producers take those of 4 warps.
                dict(num_warps=4, maxnreg=512 // (consumers + 1) // 8 * 8),
                (box, box),
                args=PrefillSm90Args,
                unwritten=unwritten,
            )

        self.prefill_launch = prefill_launch

    def prefill_parts(self, programs: int) -> int:
        """Return into how many parts the keys of a tile are cut, so that few SMs are idle.

        `programs` is the number of CTAs without parts.
        """
        if self.spec.split_size or not programs:
            return 1
        if self.sm90_tile is not None:
            if programs >= 2 * self.sm_count:
                return 1

            def relative_time(parts: int) -> float:
                # An SM runs one CTA at a time. Each part adds to the time of the combination.
                rounds = -(-programs * parts // self.sm_count)
                return rounds / parts * (1 + parts / 64)

            return min(range(1, _MAX_PREFILL_PARTS + 1), key=relative_time)
        # A power of two, because each number of parts compiles a kernel.
        parts = 2 * self.sm_count // programs
        return min(_MAX_PREFILL_PARTS, 1 << max(parts.bit_length() - 1, 0))

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        page_offsets: torch.Tensor | None,
        q_offsets: torch.Tensor,
    ) -> Callable[..., Any]:
        """Return a function for calls on these rows, with arrays of these sizes and strides.

        It takes q, k, v, pages, kv_lengths, slopes, k_scale and v_scale. It returns the output
        (total, heads, head_dim_v), with `Spec.return_lse` also the log-sum-exp (total, heads).
        """
        n, q_offsets = q_offsets.shape[0] - 1, q_offsets.contiguous()
        shape, spec, new, slots = self.shape, self.spec, self.new, self.slots
        total, heads, dim_v = q.shape[0], shape.heads, shape.head_dim_v
        out_spec = (total, heads, dim_v), (heads * dim_v, dim_v, 1), q.dtype
        lse_spec, return_lse = ((total, heads), (heads, 1), torch.float32), spec.return_lse
        parts = 2 * slots
        if self.split:
            parts = n + pages.numel() * shape.page_size // (self.split * self.block_n)
        size = parts * shape.kv_heads * self.rows * (dim_v + 4)
        partial_spec = (size,), (1,), torch.float32
        stride_qt, stride_qh, _ = q.stride()
        stride_kp, stride_kt, stride_kh, _ = (0,) * (4 - k.ndim) + k.stride()
        stride_vp, stride_vt, stride_vh, _ = (0,) * (4 - v.ndim) + v.stride()
        # The pages of one row of a dense table, or of all rows of a ragged one.
        num_pages = pages.shape[1] if pages.ndim == 2 else pages.numel()
        capacity = min(num_pages * shape.page_size, _MAX_LENGTH)
        numbers = dict(
            stride_qt=stride_qt,
            stride_qh=stride_qh,
            stride_kp=stride_kp,
            stride_kt=stride_kt,
            stride_kh=stride_kh,
            stride_vp=stride_vp,
            stride_vt=stride_vt,
            stride_vh=stride_vh,
            n=n,
            window_left=spec.left,
            window_right=spec.right,
            scale=spec.scale,
            softcap=spec.softcap,
            value_scale=spec.value_scale,
            table_width=0 if page_offsets is not None else pages.stride(0),
            capacity=capacity,
        )
        bisections = n.bit_length()
        prefill_programs = (total // self.queries + n) * shape.kv_heads if self.has_prefill else 0
        # Not all rows end with a tile that has one query.
        used = (-(-total // self.queries) + n - 1) * shape.kv_heads if self.has_prefill else 0
        prefill_parts = self.prefill_parts(used if self.sm90_tile else prefill_programs)
        prefill_numbers = numbers | dict(bisections=bisections, parts=prefill_parts)
        prefill_size = 0
        if prefill_parts > 1:
            prefill_size = prefill_programs * prefill_parts * self.block_m * (dim_v + 4)
        prefill_launch = self.prefill_launch(prefill_parts)
        # Arrays that a call does not have get any pointer, which the kernels do not read.
        offsets = dict(
            PAGE_OFFSETS=q_offsets if page_offsets is None else page_offsets.contiguous(),
            Q_OFFSETS=q_offsets,
        )
        inputs: dict[str, Any] = dict(
            Q="q",
            K="k",
            V="v",
            PAGES="pages",
            KV_LENGTHS="kv_lengths",
            SLOPES="slopes" if shape.has_slopes else q_offsets,
            K_SCALE="k_scale" if shape.is_scaled else q_offsets,
            V_SCALE="v_scale" if shape.is_scaled else q_offsets,
        )
        # Unless it is written, LSE is any other array.
        attended = dict(
            inputs, OUT="out", LSE="lse" if return_lse else "q", PARTIAL="partial", **offsets
        )
        combined = dict(
            KV_LENGTHS="kv_lengths",
            OUT="out",
            LSE="lse" if return_lse else "partial",
            PARTIAL="partial",
            **offsets,
        )
        prefill_args: Any = PrefillArgs
        prefill_values = prefill_numbers | attended
        if self.sm90_tile is not None:
            prefill_args = PrefillSm90Args
            *_, scale, softcap = to_base2(AttentionSpec(*spec[:4]))
            prefill_values |= dict(
                k_desc=("k", _page_descriptor(k)),
                v_desc=("v", _page_descriptor(v)),
                k_page_stride=stride_kp // stride_kt,
                v_page_stride=stride_vp // stride_vt,
                scale=scale,
                softcap=softcap,
            )
        prefill = BoundLaunch(
            prefill_launch, prefill_programs * prefill_parts, prefill_args, **prefill_values
        )
        combine_prefill = BoundLaunch(
            self.combine_prefill,
            prefill_programs * (self.block_m // _COMBINED_ROWS),
            CombinePrefillArgs,
            **{name: prefill_numbers[name] for name in CombinePrefillArgs.numbers},
            **combined,
        )
        decode = BoundLaunch(self.decode, self.ctas, DecodeArgs, **numbers, **attended)
        combine = BoundLaunch(
            self.combine,
            (n if self.by_row else slots) * shape.kv_heads * self.tiles,
            CombineArgs,
            n=n,
            window_left=spec.left,
            capacity=capacity,
            num_tokens=total,
            **combined,
        )
        is_sm90, is_ragged = self.sm90_tile is not None, page_offsets is not None
        launch_decode = bind_launches(_PARAMETERS, decode, combine)
        launch_prefill = bind_launches(
            _PARAMETERS, *((prefill, combine_prefill) if prefill_size else (prefill,))
        )

        def run(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            pages: torch.Tensor,
            kv_lengths: torch.Tensor,
            slopes: torch.Tensor | None = None,
            k_scale: torch.Tensor | None = None,
            v_scale: torch.Tensor | None = None,
        ) -> Any:
            out = new(*out_spec)
            lse = new(*lse_spec) if return_lse else None
            if n and total:
                # The least aligned pointer selects the variant of a kernel.
                if is_ragged and pages.data_ptr() % 16:
                    pages = pages.clone()
                others = slopes, k_scale, v_scale
                partial = new(*partial_spec)
                if prefill_programs:
                    # Without parts, the kernels use no pointer. The kernel for Hopper needs its type.
                    cut = partial if is_sm90 else q
                    if prefill_size:
                        cut = new((prefill_size,), (1,), torch.float32)
                    launch_prefill(q, k, v, pages, kv_lengths, out, lse, cut, *others)
                launch_decode(q, k, v, pages, kv_lengths, out, lse, partial, *others)
            return (out, lse) if return_lse else out

        return on_device(self.index, run)


_launch_config = cache(_LaunchConfig)


def _sm90_rejection(shape: _Shape, spec: Spec) -> str | None:
    """Return why `paged_prefill_sm90_kernel` does not take a call on Hopper; None if it does."""
    prefix = "the faster kernel of prefill on Hopper takes"
    q_dtype, k_dtype, v_dtype = shape.dtypes[:3]
    if not (q_dtype == k_dtype == v_dtype and q_dtype.itemsize == 2):
        return f"{prefix} q and caches in one type, float16 or bfloat16"
    dims = shape.head_dim, shape.head_dim_v
    if dims not in _SM90_PREFILL_TILES:
        return f"{prefix} head_dim 128, not {dims[0]} (q, k) and {dims[1]} (v)"
    if shape.has_slopes or shape.is_scaled:
        return f"{prefix} no ALiBi slopes, and scales of the cache as numbers, not per head"
    if spec.scale <= 0:
        return f"{prefix} a positive scale, not {spec.scale}"
    if not shape.is_tma_addressable:
        return (
            f"{prefix} pages of 8, 16, 32 or another power of two of tokens, in caches whose address "
            f"and strides are multiples of 16 bytes"
        )
    return None


def _sm90_tile(shape: _Shape, spec: Spec) -> _Sm90Tile | None:
    """Return the tile of `paged_prefill_sm90_kernel`, or None for calls that it does not take."""
    if not device_info(shape.device).supports_sm90_gluon or _sm90_rejection(shape, spec):
        return None
    return _SM90_PREFILL_TILES[shape.head_dim, shape.head_dim_v]


def _page_descriptor(x: torch.Tensor) -> Any:
    """Return the descriptor of a cache whose pages are tokens of one array."""
    _, stride_t, stride_h, _ = x.stride()
    _, _, heads, dim = x.shape
    return ragged(heads, dim, stride_t, stride_h, _SM90_COLUMNS, dim // _SM90_COLUMNS)


def _is_tma_addressable(x: torch.Tensor) -> bool:
    """Return whether TMA can copy the tokens of a page, with the swizzle of a block of keys."""
    if x.ndim != 4:
        return False
    pages, size, heads, dim = x.shape
    stride_p, stride_t, stride_h, _ = x.stride()
    return (
        size >= 8
        and size & (size - 1) == 0
        and x.data_ptr() % 16 == 0
        and are_strides_tma_addressable(stride_t, stride_h, heads)
        and stride_p % stride_t == 0
        # A cache without pages has no address.
        and pages > 0
        and pages * stride_p // stride_t < _MAX_TMA_TOKENS
        and dim % _SM90_COLUMNS == 0
    )


def _select(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: tuple[torch.Tensor | None, ...],
    has_slopes: bool,
    is_scaled: bool,
    max_length: int,
    n: int,
    spec: Spec,
) -> _LaunchConfig:
    """Return the launch config of a call.

    `indices` are the pages, their offsets or None, the lengths, and the offsets of q. Keys and values
    without an axis of pages are contiguous rows.
    """
    _, heads, head_dim = q.shape
    *_, kv_heads, head_dim_v = v.shape
    page_size = v.shape[1] if v.ndim == 4 else 0
    shape = _Shape(
        q.device,
        tuple(x.dtype for x in (q, k, v, *indices) if x is not None),
        heads,
        kv_heads,
        head_dim,
        head_dim_v,
        page_size,
        indices[1] is not None,
        has_slopes,
        is_scaled,
        _has_pairs(q, k, v),
        k.stride() == v.stride(),
        _is_tma_addressable(k) and _is_tma_addressable(v),
        bool(spec.split_size) or n > _FEW_ROWS,
        min(max_length, _MAX_ROWS + 1),
        next((rows for rows in _ROWS_AT_A_TIME if rows >= n), _ROWS_AT_A_TIME[-1]),
        n > _ROWS_AT_A_TIME[-1],
        n == max_length == 1 and page_size > 0 and not spec.split_size,
        q.is_meta and not n == q.shape[0] == 1,
    )
    return _launch_config(shape, spec, allows_tf32(q.dtype))


def _has_pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether two caches of 8 bits can be loaded in pairs of numbers."""
    widths = k.shape[-1], v.shape[-1]
    numbers = (*k.stride()[:-1], *v.stride()[:-1], *widths)
    return (
        q.dtype.itemsize == 2
        and k.dtype.itemsize == v.dtype.itemsize == 1
        and min(widths) > 16  # a matrix product takes 16 numbers, of every other pair
        and not (k.data_ptr() % 2 or v.data_ptr() % 2)
        and all(number % 2 == 0 for number in numbers)
    )


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `PagedAttentionCall`; None if they do."""
    q, k, v = call.q.values, call.k_pages, call.v_pages
    if reason := unsupported_dtype(q):
        return reason
    for x in (k, v):
        if x.dtype != q.dtype and x.dtype not in _FLOAT8:
            return f"the Triton kernels take caches in float8_e4m3fn or float8_e5m2, not {x.dtype}"
        if x.dtype in _FLOAT8 and not INTERPRETED and device_info(q.device).capability < (8, 9):
            return "the Triton kernels take 8-bit caches from compute capability 8.9 (Ada) on"
    dims = q.shape[2], v.shape[3]
    if not all(16 <= dim <= 256 for dim in dims):
        return f"the Triton kernels take head_dim 16 to 256, not {dims[0]} (q, k) and {dims[1]} (v)"
    if not q.stride(2) == k.stride(3) == v.stride(3) == 1:
        return "the Triton kernels need the last axis of q, k and v to be contiguous"
    if q.shape[1] // k.shape[2] > _MAX_ROWS:
        return f"the Triton kernels take up to {_MAX_ROWS} query heads per key head"
    if call.alibi_slopes is not None and call.alibi_slopes.ndim == 2:
        return "the Triton kernels take ALiBi slopes per head, not per row and head"
    if needs_gradient(*_differentiable_arrays(call)):
        return "the Triton kernels compute no gradients of attention to a cache"
    return None


def _differentiable_arrays(call: Any) -> list[torch.Tensor]:
    """Return the arrays of a call that can require a gradient."""
    arrays = (
        *(call.q.values, call.k_pages, call.v_pages),
        *(call.alibi_slopes, call.k_scale, call.v_scale),
    )
    return [x for x in arrays if isinstance(x, torch.Tensor)]


def note(call: Any) -> str | None:
    """Return why another implementation replaces a kernel; None if none does."""
    q, table = call.q, call.page_table
    reason, device = fallback_note(__name__, q.values.dtype), device_info(q.values.device)
    if reason or not device.is_hopper:
        return reason
    has_scales = any(isinstance(x, torch.Tensor) for x in (call.k_scale, call.v_scale))
    config = _select(
        *(q.values, call.k_pages, call.v_pages),
        (table.values, table.offsets, call.kv_lengths, q.offsets),
        call.alibi_slopes is not None,
        has_scales,
        q.layout.max_length_bound,
        q.batch_size,
        _spec_of(call),
    )
    if not config.has_prefill:
        return None
    return device.note or _sm90_rejection(config.shape, config.spec)


def paged_attention(call: Any) -> Any:
    """Compute a `PagedAttentionCall`."""
    q, table = call.q, call.page_table
    k_scale, v_scale = _scales(call.k_scale, call.v_scale, q.values, call.k_pages.shape[2])
    arguments = (
        q.values,
        call.k_pages,
        call.v_pages,
        table.values,
        table.offsets,
        call.kv_lengths,
        q.offsets,
        None if call.alibi_slopes is None else _as_float32(call.alibi_slopes),
        k_scale,
        v_scale,
    )
    spec = _spec_of(call)
    if uses_operators(*arguments):
        out, lse = _op(*arguments, q.layout.max_length_bound, *spec)
    else:
        out, lse = _run_operator(*arguments, q.layout.max_length_bound, *spec)
    result = q.with_values(out)
    return (result, q.with_values(lse)) if call.return_lse else result


def is_decoding(call: Any) -> bool:
    """Return whether the decode kernel is the faster one for an `AttentionCall` without gradients.

    That is so for a few known queries per row, on keys of other rows.
    """
    q, k = call.q.values, call.k.values
    rows = call.q.layout.max_length_bound * (q.shape[1] // max(k.shape[1], 1))
    has_row_slopes = call.alibi_slopes is not None and call.alibi_slopes.ndim == 2
    return (
        not (call.dropout or has_row_slopes)
        and call.k.layout is not call.q.layout
        and rows <= _MIN_ROWS
        and rows < call.k.layout.max_length_bound
    )


def prepare_decoding(call: Any, spec: AttentionSpec) -> Callable[..., Any]:
    """Return a function that runs calls of `attention` with the metadata of one that `is_decoding`."""
    return_lse, max_length = call.return_lse, call.q.layout.max_length_bound
    dtype = call.q.values.dtype
    # Whether products may use tf32 -> function that runs calls.
    prepared: dict[bool, Callable[..., Any]] = {}

    def attend(q: Any, k: Any, v: Any, alibi_slopes: torch.Tensor | None) -> Any:
        arrays, offsets, k_offsets = (q.values, k.values, v.values), q.offsets, k.offsets
        is_tf32 = allows_tf32(dtype)
        if is_tf32 not in prepared:
            prepared[is_tf32] = prepare_contiguous_decoding(
                *arrays, offsets, k_offsets, spec, max_length, return_lse, alibi_slopes is not None
            )
        slopes = None if alibi_slopes is None else _as_float32(alibi_slopes)
        result = prepared[is_tf32](*arrays, offsets, k_offsets.contiguous(), slopes)
        return _as_ragged(result, q.layout)

    return attend


def prepare_contiguous_decoding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor,
    k_offsets: torch.Tensor,
    spec: AttentionSpec,
    max_length: int,
    return_lse: bool,
    has_slopes: bool = False,
) -> Callable[..., Any]:
    """Return a function that decodes on keys without pages, one row after the other.

    It takes q, k, v, both offsets and the slopes, and returns the output, with `return_lse` also the
    log-sum-exp (total, heads). A row has at most `max_length` queries.
    """
    n, indices = q_offsets.shape[0] - 1, (q_offsets, q_offsets, k_offsets, q_offsets)
    options = Spec(*spec[:4], value_scale=1.0, split_size=0, return_lse=return_lse)
    config = _select(q, k, v, indices, has_slopes, False, max_length, n, options)
    return config.prepare(q, k, v, q_offsets, q_offsets, q_offsets)


def prepare_paged_attention(call: Any) -> Callable[..., Any] | None:
    """Return a function for calls with the same metadata.

    None if an array requires a gradient: the kernels take such calls only while gradients are
    disabled, which no guard of the call cache checks.
    """
    if any(x.requires_grad for x in _differentiable_arrays(call)):
        return None
    spec, has_slopes = _spec_of(call), call.alibi_slopes is not None
    has_scales = any(isinstance(x, torch.Tensor) for x in (call.k_scale, call.v_scale))
    kv_heads, dtype = call.k_pages.shape[2], call.q.values.dtype
    # Whether products may use tf32, and the caches' address modulo 16 -> function that runs calls. TMA
    # needs a multiple of 16, and 8-bit numbers are loaded in pairs from even addresses.
    prepared: dict[tuple[bool, int], Callable[..., Any]] = {}
    max_length, n = call.q.layout.max_length_bound, call.q.batch_size
    is_float32 = dtype == torch.float32
    has_8_bits = 1 in (call.k_pages.itemsize, call.v_pages.itemsize)

    # The functions below are cached, so they must not hold the arrays of the first call.
    def prepare(
        q: Any,
        caches: tuple[torch.Tensor, torch.Tensor],
        pages: torch.Tensor,
        page_offsets: torch.Tensor | None,
        kv_lengths: torch.Tensor,
        key: tuple[bool, int],
    ) -> Callable[..., Any]:
        used_pages, used_lengths = _make_contiguous(pages, kv_lengths)
        indices = used_pages, page_offsets, used_lengths, q.offsets
        config = _select(q.values, *caches, indices, has_slopes, has_scales, max_length, n, spec)
        run = launch = config.prepare(q.values, *caches, used_pages, page_offsets, q.offsets)
        if used_pages is not pages or used_lengths is not kv_lengths:

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
                return launch(q, k, v, *_make_contiguous(*others[:2]), *others[2:])

        prepared[key] = run
        # Calls of which nothing but the dense arrays can differ, and in which no address matters.
        if not (has_slopes or has_scales or is_float32 or has_8_bits):
            attend.run_dense = None if config.has_prefill else run  # type: ignore[attr-defined]
        return run

    def attend(
        q: Any,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: Any,
        kv_lengths: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        k_scale: Any,
        v_scale: Any,
    ) -> Any:
        values, layout = q.values, q.layout
        if has_scales:
            k_scale, v_scale = _scales(k_scale, v_scale, values, kv_heads)
        else:
            k_scale = v_scale = None
        # An instance check of another type takes longer.
        if isinstance(page_table, scree.Array):
            pages, page_offsets = page_table.values, page_table.offsets
        else:
            pages, page_offsets = page_table, None
        address = (k_pages.data_ptr() | v_pages.data_ptr()) & 15
        key = is_float32 and allows_tf32(dtype), address
        run = prepared.get(key) or prepare(
            q, (k_pages, v_pages), pages, page_offsets, kv_lengths, key
        )
        slopes = None if alibi_slopes is None else _as_float32(alibi_slopes)
        result = run(values, k_pages, v_pages, pages, kv_lengths, slopes, k_scale, v_scale)
        return _as_ragged(result, layout)

    return attend


def _as_ragged(result: Any, layout: Any) -> Any:
    """Return the result of `_LaunchConfig.prepare`'s function with ragged arrays."""
    if isinstance(result, tuple):
        out, lse = result
        return _from_layout(out, layout), _from_layout(lse, layout)
    return _from_layout(result, layout)


def _make_contiguous(
    pages: torch.Tensor, kv_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a page table of contiguous rows, and contiguous lengths."""
    if pages.stride(-1) != 1:
        pages = pages.contiguous()
    return pages, kv_lengths.contiguous()


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.to(torch.float32).contiguous()


def _scales(
    k_scale: Any, v_scale: Any, q: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales per head, of both if one has any; numbers are part of the spec."""
    given = isinstance(k_scale, torch.Tensor), isinstance(v_scale, torch.Tensor)
    if not any(given):
        return None, None
    ones = None if all(given) else q.new_ones((kv_heads,), dtype=torch.float32)
    k_scale, v_scale = (
        _as_float32(x) if is_given else ones for x, is_given in zip((k_scale, v_scale), given)
    )
    return k_scale, v_scale


def _spec_of(call: Any) -> Spec:
    left, right = (UNBOUNDED if side is None else min(side, UNBOUNDED) for side in call.window)
    k_scale, v_scale = (
        1.0 if x is None or isinstance(x, torch.Tensor) else float(x)
        for x in (call.k_scale, call.v_scale)
    )
    scale = call.q.values.shape[2] ** -0.5 if call.scale is None else float(call.scale)
    return Spec(
        left,
        right,
        scale * k_scale,
        float(call.softcap or 0.0),
        v_scale,
        call.split_size or 0,
        call.return_lse,
    )


def _standard(
    q, k, v, pages, page_offsets, kv_lengths, q_offsets, slopes, k_scale, v_scale, max_length, left,
    right, scale, softcap, value_scale, split_size, return_lse,
):  # fmt: skip
    """Compute the operator without kernels; see `_run_operator`."""
    result = scree.paged_attention(
        scree.Array(q, q_offsets, max_length=max_length),
        k,
        v,
        scree.Array(pages, page_offsets),
        kv_lengths,
        causal=False,  # the window has the causal mask
        window=tuple(None if side >= UNBOUNDED else side for side in (left, right)),
        scale=scale,
        softcap=softcap or None,
        alibi_slopes=slopes,
        k_scale=k_scale,
        v_scale=value_scale if v_scale is None else v_scale,
        return_lse=return_lse,
        kernel="standard",
    )
    if return_lse:
        return tuple(x.values for x in result)
    return result.values, q.new_empty(0, dtype=torch.float32)


@falls_back_to(_standard)
def _run_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    page_offsets: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_offsets: torch.Tensor,
    slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    max_length: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    value_scale: float,
    split_size: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = Spec(left, right, scale, softcap, value_scale, split_size, return_lse)
    has_scales, n = k_scale is not None, q_offsets.shape[0] - 1
    pages, indices = pages.contiguous(), (pages, page_offsets, kv_lengths, q_offsets)
    config = _select(q, k, v, indices, slopes is not None, has_scales, max_length, n, spec)
    run = config.prepare(q, k, v, pages, page_offsets, q_offsets)
    result = run(q, k, v, pages, kv_lengths.contiguous(), slopes, k_scale, v_scale)
    return result if return_lse else (result, result.new_empty(0, dtype=torch.float32))


def _fake(q, k, v, *arguments):
    total, heads, _ = q.shape
    lse = (total, heads) if arguments[-1] else (0,)
    return q.new_empty((total, heads, v.shape[3])), q.new_empty(lse, dtype=torch.float32)


_op = define_operator("paged_attention", _run_operator, _fake)
