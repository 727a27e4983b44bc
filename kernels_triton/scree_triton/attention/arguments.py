"""Named arguments of the attention kernels, in the order of the kernels' parameters.

A kernel takes tensors that TMA reads or writes through descriptors, then pointers, strides and
other numbers. Each group is a named tuple, because the kernels have up to 44 parameters. Strides
are named as in FlashAttention's Triton kernels: `m` counts queries, `n` keys and `h` heads.
"""

from typing import NamedTuple

import torch


# --- Numbers of all kernels
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


# --- Portable kernels
class PortableForwardPointers(NamedTuple):
    """Pointers of `portable.forward_kernel`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    tiles: torch.Tensor


class PortableForwardStrides(NamedTuple):
    """Strides of `portable.forward_kernel`."""

    stride_qm: int
    stride_qh: int
    stride_kn: int
    stride_kh: int
    stride_vn: int
    stride_vh: int
    stride_om: int


class PortableDqPointers(NamedTuple):
    """Pointers of `portable.dq_kernel`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor
    stats: torch.Tensor
    dq: torch.Tensor
    tiles: torch.Tensor


class PortableDqStrides(NamedTuple):
    """Strides of `portable.dq_kernel`."""

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


class PortableDkdvPointers(NamedTuple):
    """Pointers of `portable.dkdv_kernel`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    do: torch.Tensor
    stats: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    tiles: torch.Tensor


class PortableDkdvStrides(NamedTuple):
    """Strides of `portable.dkdv_kernel`."""

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


# --- Hopper, half precision
class ForwardTensors(NamedTuple):
    """TMA tensors of `forward_sm90.forward_kernel`."""

    q_desc: torch.Tensor
    k_desc: torch.Tensor
    v_desc: torch.Tensor
    o_desc: torch.Tensor


class ForwardPointers(NamedTuple):
    """Pointers of the forward kernels on Hopper."""

    slopes: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    tiles: torch.Tensor
    counter: torch.Tensor


class ForwardStrides(NamedTuple):
    """Strides of `forward_sm90.forward_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_om: int


class DqTensors(NamedTuple):
    """TMA tensors of `backward_sm90.dq_kernel`."""

    q_desc: torch.Tensor
    k_desc: torch.Tensor
    v_desc: torch.Tensor
    do_desc: torch.Tensor
    dq_desc: torch.Tensor


class DqPointers(NamedTuple):
    """Pointers of `backward_sm90.dq_kernel`."""

    slopes: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor
    stats: torch.Tensor
    tiles: torch.Tensor
    counter: torch.Tensor


class DqStrides(NamedTuple):
    """Strides of `backward_sm90.dq_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_doh: int
    stride_om: int


class BackwardTensors(NamedTuple):
    """TMA tensors of the kernels of dK and dV, and of dQ in float32."""

    q_desc: torch.Tensor
    k_desc: torch.Tensor
    v_desc: torch.Tensor
    do_desc: torch.Tensor


class DkdvPointers(NamedTuple):
    """Pointers of the kernels of dK and dV on Hopper."""

    slopes: torch.Tensor
    stats: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    tiles: torch.Tensor
    counter: torch.Tensor


class DkdvStrides(NamedTuple):
    """Strides of `backward_sm90.dkdv_kernel`."""

    stride_qh: int
    stride_kh: int
    stride_vh: int
    stride_doh: int
    stride_dkn: int
    stride_dvn: int


# --- Hopper, float32
class Float32ForwardTensors(NamedTuple):
    """TMA tensors of `float32_sm90.forward_kernel`."""

    q_desc: torch.Tensor
    k_desc: torch.Tensor
    v_desc: torch.Tensor


class Float32ForwardStrides(NamedTuple):
    """Strides of `float32_sm90.forward_kernel`."""

    stride_qh: int
    stride_om: int


class Float32DqPointers(NamedTuple):
    """Pointers of `float32_sm90.dq_kernel`."""

    slopes: torch.Tensor
    stats: torch.Tensor
    dq: torch.Tensor
    tiles: torch.Tensor
    counter: torch.Tensor


class Float32DqStrides(NamedTuple):
    """Strides of `float32_sm90.dq_kernel`."""

    stride_dqm: int


class Float32DkdvStrides(NamedTuple):
    """Strides of `float32_sm90.dkdv_kernel`."""

    stride_dkn: int


class SplitPointers(NamedTuple):
    """Pointers of `bf16x3.split_kernel`."""

    x: torch.Tensor
    split: torch.Tensor


class SplitStrides(NamedTuple):
    """Strides of `bf16x3.split_kernel`."""

    stride_xt: int
    stride_xh: int


class SplitNumbers(NamedTuple):
    """Numbers of `bf16x3.split_kernel`."""

    total: int
    heads: int


class SplitDoutPointers(NamedTuple):
    """Pointers of `bf16x3.split_dout_kernel`."""

    out: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor
    stats: torch.Tensor
    split: torch.Tensor


class SplitDoutStrides(NamedTuple):
    """Strides of `bf16x3.split_dout_kernel`."""

    stride_dom: int
    stride_doh: int


class SplitDoutNumbers(NamedTuple):
    """Numbers of `bf16x3.split_dout_kernel`."""

    stride_dlsem: int
    stride_dlseh: int
    total_q: int
    stats_stride: int
    heads: int
