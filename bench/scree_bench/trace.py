"""Timeline of the kernels of a call on a CUDA device, by PyTorch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

PROFILED_CALLS = 5  # per profile
SLEEP_CYCLES = (
    20_000_000  # cycles that the device sleeps before each call, so that the host is ahead
)
MIN_SLEEP_SECONDS = 1e-3  # minimum seconds of such a sleep


class Kernel(NamedTuple):
    """Start and end of a kernel in seconds, and whether it is a mark."""

    start: float
    end: float
    marks: bool = False


def mark() -> None:
    """Run a kernel that does nothing."""
    import torch

    torch.cuda._sleep(1)


def profile_calls(thunk: Callable[[], Any]) -> list[list[Kernel]]:
    """Return the kernels of `PROFILED_CALLS` calls, in order."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    thunk()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            torch.cuda._sleep(SLEEP_CYCLES)
            thunk()
            torch.cuda.synchronize()
    calls: list[list[Kernel]] = []
    for kernel in sorted(
        Kernel(e.time_range.start / 1e6, e.time_range.end / 1e6, "spin" in e.name)
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA
    ):
        if kernel.marks and kernel.end - kernel.start > MIN_SLEEP_SECONDS:
            calls.append([])
        else:
            calls[-1].append(kernel)
    return calls


def idle_seconds(kernels: Sequence[Kernel]) -> float:
    """Return the seconds between the first and the last kernel in which no kernel runs."""
    return sum(after.start - before.end for before, after in pairwise(kernels))


def seconds_by_mark(kernels: Sequence[Kernel], marks: Sequence[str]) -> dict[str, float]:
    """Return the seconds of the kernels of each part of a call.

    `marks` are the names of the parts, in the order of their marks. The mark of a part follows its
    forward kernels. If there is a backward pass, another mark precedes the backward kernels of the
    part.
    """
    seconds: dict[str, float] = defaultdict(float)
    forward, marks_passed = len(set(marks)), 0
    for kernel in kernels:
        if kernel.marks:
            marks_passed += 1
        else:
            seconds[marks[marks_passed if marks_passed < forward else marks_passed - 1]] += (
                kernel.end - kernel.start
            )
    return seconds
