"""Times of the parts of a training step, by PyTorch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from .loop import Training

#: Steps of a profile, and of the host's time.
STEPS = 3
#: Part of a step -> pattern in the names of its kernels, or of the operators that launched them.
#: The first match counts.
PARTS = {
    # They compute several parts at once, most of all casts.
    "kernels of Inductor": "^triton_(poi|red|per|for|mix)_",
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


class Kernel(NamedTuple):
    """A kernel or a copy on the device: its name, its operators, and its start and end.

    The operators are those around its launch, innermost first.
    """

    name: str
    operators: tuple[str, ...]
    start: float
    end: float


def seconds_per_part(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the seconds of each part of a step, and the seconds in which no kernel runs.

    Kernels overlap where one waits on the device for the kernel before it. That time belongs to
    the kernel that started first, so that all parts add up to the time from the first start to the
    last end.
    """
    seconds: dict[str, float] = defaultdict(float)
    busy_until = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if busy_until is None:
            busy_until = kernel.start
        seconds[IDLE] += max(0.0, kernel.start - busy_until)
        part = classify(kernel.name, *kernel.operators)
        seconds[part] += max(0.0, kernel.end - max(kernel.start, busy_until))
        busy_until = max(busy_until, kernel.end)
    return seconds


def breakdown(training: Training) -> dict[str, float]:
    """Return the seconds per step of each part, and the seconds in which the device waits.

    On the CPU the seconds are the operators' own.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = training.settings.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    training.wait()
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            training.run()
        training.wait()
    if cuda:
        seconds = seconds_per_part(device_kernels(profiler))
    else:
        seconds = defaultdict(float)
        for event in profiler.events():
            seconds[classify(*_names(event))] += event.self_cpu_time_total / 1e6
    order = [*PARTS, OTHER, IDLE]
    return {part: seconds[part] / STEPS for part in order if part in seconds}


def host_seconds(training: Training) -> list[float]:
    """Return the seconds that the host takes to launch a step, for each of some steps.

    The device is idle when a step begins, and the host does not wait for it to end. On the CPU they are
    the seconds of the steps.
    """
    seconds = []
    for _ in range(STEPS):
        training.wait()
        start = perf_counter()
        training.run()
        seconds.append(perf_counter() - start)
    return seconds


def device_kernels(profiler: Any) -> Iterator[Kernel]:
    """Yield each kernel and each copy that ran on the device, once."""
    from torch.autograd import DeviceType

    operators, ranges = {}, set()
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:
            if event.is_user_annotation:
                ranges.add(event.name)
            # Calls of the CUDA runtime have numbers of their own, which other operators have too.
            if not re.match("cu(da)?[A-Z]", event.name):
                operators[event.id] = event
    trace = profiler.profiler.kineto_results
    origin = trace.trace_start_ns()
    for event in trace.events():
        # The ranges of record_function appear on the device too, with their name. The kernels of
        # Inductor have the name of an event on the CPU, which is no such range.
        if event.device_type() == DeviceType.CUDA and event.name() not in ranges:
            around = _names(operators.get(event.linked_correlation_id()))
            start, end = ((ns - origin) / 1e9 for ns in (event.start_ns(), event.end_ns()))
            yield Kernel(event.name(), tuple(around), start, end)


def _names(event: Any) -> list[str]:
    """Return the name of an operator and of the operators around it, innermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
