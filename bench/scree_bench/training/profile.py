"""Times of the parts of a training step, by PyTorch's profiler."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

from .loop import Training

#: Profiled steps.
STEPS = 3
#: Part of a step -> pattern in the names of its kernels, or of the operators that launched them.
#: The first match counts.
PARTS = {
    "optimizer": "optimizer|adam|multi_tensor|clip_grad|foreach|lpnorm",
    "copies to the device": "copy to the device|memcpy htod|memcpy.*host.*device",
    "attention": "attention|flash|fmha|sdpa|flex|tile_schedule",
    "loss": "cross_entropy|loss_|logsumexp|softmax|chunkedcross|liger",
    "embedding": "embedding|gather_kernel|scatter_add|index_select|index_add|index_put",
    "matrix products": r"grouped_|(^|[^a-z])(add|b|badd)?mm([^a-z]|$)|gemm|matmul|cutlass|nvjet|cublas|xmma",
    "norms": "norm",
    "rotation, activation": "rope|rotate|swiglu|silu|gelu|sigmoid|split",
    "casts and copies": "_to_copy|copy_|::to|clone|memcpy|memset|fill|zeros",
}
OTHER, IDLE = "other", "no kernel runs"


def classify(*names: str) -> str:
    """Return the part of a step that a kernel belongs to.

    The names are the kernel's own and then the operators around its launch, innermost first.
    """
    for name in names:
        for part, pattern in PARTS.items():
            if re.search(pattern, name.lower()):
                return part
    return OTHER


def breakdown(training: Training) -> dict[str, float]:
    """Return the seconds per step of each part, and the seconds in which the device waits.

    On the CPU the seconds are the operators' own.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = training.settings.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    training.wait()
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            training.run()
        training.wait()
    seconds: dict[str, float] = defaultdict(float)
    # Kernel -> its seconds that no operator launched, such as Triton kernels of eager code.
    unassigned: dict[str, float] = defaultdict(float)
    start, end = math.inf, 0.0  # of the kernels; the wait for the first one is not of a step
    for event in profiler.events():
        if not cuda:
            seconds[classify(*_names(event))] += event.self_cpu_time_total / 1e6
        elif event.device_type == DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                start, end = min(start, event.time_range.start), max(end, event.time_range.end)
                unassigned[event.name] += event.time_range.elapsed_us() / 1e6
        else:
            for kernel in event.kernels:
                seconds[classify(kernel.name, *_names(event))] += kernel.duration / 1e6
                unassigned[kernel.name] -= kernel.duration / 1e6
    for name, left in unassigned.items():
        seconds[classify(name)] += max(0.0, left)
    if cuda:
        seconds[IDLE] = max(0.0, (end - start) / 1e6 - sum(seconds.values()))
    order = [*PARTS, OTHER, IDLE]
    return {part: seconds[part] / STEPS for part in order if part in seconds}


def _names(event: Any) -> list[str]:
    """Return the name of an operator and of the operators around it, innermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
