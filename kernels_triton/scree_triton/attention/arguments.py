"""Named arguments of the attention kernels, in the order of the kernels' parameters.

Strides are named as in FlashAttention's Triton kernels: `m` counts queries, `n` keys and `h` heads.
Strides and numbers are known before a launch, and the named tuples here hold them until then.
"""

from typing import NamedTuple

from ..runtime.launch import (
    Descriptor,
    Number,
    Pointer,
    Stride,
    Written,
    WrittenDescriptor,
    launch_args,
)


# --- Strides and numbers that several kernels or launches share
class ForwardNumbers(NamedTuple):
    """Numbers of the forward kernels."""

    total_q: int
    heads: int
    qheads_per_khead: int
    heads_in_l2: int
    window_left: int
    window_right: int
    scale: float
    softcap: float


class BackwardNumbers(NamedTuple):
    """Numbers of the kernels of dK and dV, and of dQ in float32."""

    total_q: int
    stats_stride: int
    heads: int
    qheads_per_khead: int
    heads_in_l2: int
    window_left: int
    window_right: int
    scale: float
    softcap: float


class DqNumbers(NamedTuple):
    """Numbers of the half-precision and portable kernels of dQ."""

    stride_dlsem: int
    stride_dlseh: int
    total_q: int
    stats_stride: int
    heads: int
    qheads_per_khead: int
    heads_in_l2: int
    window_left: int
    window_right: int
    scale: float
    softcap: float


class DropoutNumbers(NamedTuple):
    """Numbers of the portable kernels after the others."""

    dropout: int


# --- Portable kernels
class PortableForwardStrides(NamedTuple):
    """Strides of `portable.attention_forward_kernel`."""

    stride_qm: int
    stride_qh: int
    stride_kn: int
    stride_kh: int
    stride_vn: int
    stride_vh: int
    stride_om: int


@launch_args
class PortableForwardArgs:
    """Arguments of `portable.attention_forward_kernel`."""

    Q: Pointer
    K: Pointer
    V: Pointer
    SLOPES: Pointer
    OUT: Written
    LSE: Written
    TILES: Pointer
    SEED: Pointer
    stride_qm: Stride
    stride_qh: Stride
    stride_kn: Stride
    stride_kh: Stride
    stride_vn: Stride
    stride_vh: Stride
    stride_om: Stride
    total_q: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    dropout: Number


class PortableDqStrides(NamedTuple):
    """Strides of `portable.attention_dq_kernel`."""

    stride_qm: int
    stride_qh: int
    stride_kn: int
    stride_kh: int
    stride_vn: int
    stride_vh: int
    stride_om: int
    stride_dom: int
    stride_doh: int
    stride_dqm: int


@launch_args
class PortableDqArgs:
    """Arguments of `portable.attention_dq_kernel`."""

    Q: Pointer
    K: Pointer
    V: Pointer
    SLOPES: Pointer
    OUT: Pointer
    LSE: Pointer
    DO: Pointer
    DLSE: Pointer
    STATS: Written
    DQ: Written
    TILES: Pointer
    SEED: Pointer
    stride_qm: Stride
    stride_qh: Stride
    stride_kn: Stride
    stride_kh: Stride
    stride_vn: Stride
    stride_vh: Stride
    stride_om: Stride
    stride_dom: Stride
    stride_doh: Stride
    stride_dqm: Stride
    stride_dlsem: Number
    stride_dlseh: Number
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    dropout: Number


class PortableDkdvStrides(NamedTuple):
    """Strides of `portable.attention_dkdv_kernel`."""

    stride_qm: int
    stride_qh: int
    stride_kn: int
    stride_kh: int
    stride_vn: int
    stride_vh: int
    stride_dom: int
    stride_doh: int
    stride_dkn: int
    stride_dvn: int


@launch_args
class PortableDkdvArgs:
    """Arguments of `portable.attention_dkdv_kernel`."""

    Q: Pointer
    K: Pointer
    V: Pointer
    SLOPES: Pointer
    DO: Pointer
    STATS: Pointer
    DK: Written
    DV: Written
    TILES: Pointer
    SEED: Pointer
    stride_qm: Stride
    stride_qh: Stride
    stride_kn: Stride
    stride_kh: Stride
    stride_vn: Stride
    stride_vh: Stride
    stride_dom: Stride
    stride_doh: Stride
    stride_dkn: Stride
    stride_dvn: Stride
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number
    dropout: Number


# --- Hopper, half precision
class ForwardStrides(NamedTuple):
    """Strides of `forward_sm90.attention_forward_sm90_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_om: int


@launch_args
class ForwardArgs:
    """Arguments of `forward_sm90.attention_forward_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    o_desc: WrittenDescriptor
    SLOPES: Pointer
    OUT: Written
    LSE: Written
    TILES: Pointer
    COUNTER: Written
    stride_qh: Stride
    stride_kh: Stride
    stride_vh: Stride
    stride_om: Stride
    total_q: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


class DqStrides(NamedTuple):
    """Strides of `dq_sm90.attention_dq_sm90_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_doh: int
    stride_om: int


@launch_args
class DqArgs:
    """Arguments of `dq_sm90.attention_dq_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    do_desc: Descriptor
    dq_desc: WrittenDescriptor
    SLOPES: Pointer
    OUT: Pointer
    LSE: Pointer
    DLSE: Pointer
    STATS: Written
    DQ_SUMS: Written
    TILES: Pointer
    COUNTER: Written
    stride_qh: Stride
    stride_kh: Stride
    stride_vh: Stride
    stride_doh: Stride
    stride_om: Stride
    stride_dlsem: Number
    stride_dlseh: Number
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


class DkdvStrides(NamedTuple):
    """Strides of `dkdv_sm90.attention_dkdv_sm90_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_doh: int
    stride_dkn: int
    stride_dvn: int


class DkdvNumbers(NamedTuple):
    """Numbers of `dkdv_sm90.attention_dkdv_sm90_kernel`."""

    total_q: int
    stats_stride: int
    heads: int
    qheads_per_split: int
    splits_per_khead: int
    heads_in_l2: int
    window_left: int
    window_right: int
    scale: float
    softcap: float


@launch_args
class DkdvArgs:
    """Arguments of `dkdv_sm90.attention_dkdv_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    do_desc: Descriptor
    SLOPES: Pointer
    STATS: Pointer
    DK: Written
    DV: Written
    DK_SUMS: Written
    DV_SUMS: Written
    TILES: Pointer
    COUNTER: Written
    stride_qh: Stride
    stride_kh: Stride
    stride_vh: Stride
    stride_doh: Stride
    stride_dkn: Stride
    stride_dvn: Stride
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_split: Number
    splits_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


@launch_args
class SumSplitsArgs:
    """Arguments of `sum_splits.attention_sum_splits_kernel`."""

    DK_SPLITS: Pointer
    DV_SPLITS: Pointer
    DK: Written
    DV: Written
    rows: Number


@launch_args
class SumChunksArgs:
    """Arguments of `sum_splits.attention_sum_chunks_kernel`."""

    ITEMS: Pointer
    A_SUMS: Pointer
    B_SUMS: Pointer
    A: Written
    B: Written
    first_entry: Number
    heads: Number


# --- Hopper, float32
class Float32ForwardStrides(NamedTuple):
    """Strides of `float32_sm90.attention_forward_float32_sm90_kernel`."""

    stride_qh: int
    stride_om: int


@launch_args
class Float32ForwardArgs:
    """Arguments of `float32_sm90.attention_forward_float32_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    SLOPES: Pointer
    OUT: Written
    LSE: Written
    TILES: Pointer
    COUNTER: Written
    stride_qh: Stride
    stride_om: Stride
    total_q: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


@launch_args
class Float32DqArgs:
    """Arguments of `float32_sm90.attention_dq_float32_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    do_desc: Descriptor
    SLOPES: Pointer
    STATS: Pointer
    DQ: Written
    TILES: Pointer
    COUNTER: Written
    stride_dqm: Stride
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


@launch_args
class Float32DkdvArgs:
    """Arguments of `float32_sm90.attention_dkdv_float32_sm90_kernel`."""

    q_desc: Descriptor
    k_desc: Descriptor
    v_desc: Descriptor
    do_desc: Descriptor
    SLOPES: Pointer
    STATS: Pointer
    DK: Written
    DV: Written
    TILES: Pointer
    COUNTER: Written
    stride_dkn: Stride
    total_q: Number
    stats_stride: Number
    heads: Number
    qheads_per_khead: Number
    heads_in_l2: Number
    window_left: Number
    window_right: Number
    scale: Number
    softcap: Number


@launch_args
class SplitArgs:
    """Arguments of `bf16x3.attention_split_kernel`."""

    X: Pointer
    SPLIT: Written
    stride_xt: Stride
    stride_xh: Stride
    total: Number
    heads: Number


@launch_args
class SplitDoutArgs:
    """Arguments of `bf16x3.attention_split_dout_kernel`."""

    OUT: Pointer
    DO: Pointer
    LSE: Pointer
    DLSE: Pointer
    STATS: Written
    SPLIT: Written
    stride_dom: Stride
    stride_doh: Stride
    stride_dlsem: Number
    stride_dlseh: Number
    total_q: Number
    stats_stride: Number
    heads: Number
