"""Constants of the attention kernels."""

from triton.language import constexpr

LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)
#: The initial running maximum of the online softmax.
#: It is finite, so that a row without valid keys so far gives exp2(-inf - max) = 0 and not NaN.
INITIAL_MAX = constexpr(-1.0e30)
#: Parameters that change from batch to batch. Triton must not compile a kernel anew because one of
#: them is 1 or a multiple of 16.
UNSPECIALIZED = (
    "stride_dlsem",
    "stride_dlseh",
    "total_q",
    "stats_stride",
    "heads",
    "qheads_per_khead",
    "qheads_per_split",
    "splits_per_khead",
    "heads_in_l2",
    "window_left",
    "window_right",
)
