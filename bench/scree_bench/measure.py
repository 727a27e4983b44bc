"""How a number comes about: calls in turn, medians with every sample kept, and failures that are results.

Contenders are measured in turn, one after the other in every round, so that a drift of the machine meets all of them alike.
The first call of each warms up (and compiles) and is not counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Thunk = Callable[[], Any]

SHORTEST = 2e-3  # seconds; a sample of a faster call is the mean of so many calls that it lasts this long
FEWEST = 5  # samples of each contender, whatever they cost; `--quick` takes two
L2_BYTES = 256 << 20  # more than the second-level cache of any GPU so far

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"

#: What the libraries say when memory runs out; several have no exception of their own for it.
_SIGNS = ("out of memory", "out_of_memory", "resource_exhausted", "can't allocate memory", "unable to allocate", "bad_alloc",
          "failed to allocate", "attempting to allocate")  # fmt: skip


class Failure(NamedTuple):
    """Why there is no number: "out of memory" or "failed", and the reason in one line."""

    status: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What an exception means."""
        text = " ".join(str(error).split()) or type(error).__name__
        short = isinstance(error, MemoryError) or any(sign in f"{type(error).__name__} {text}".lower() for sign in _SIGNS)
        return cls(OUT_OF_MEMORY if short else FAILED, text[:300])


def median(samples: Sequence[float]) -> float:
    """The median, or NaN of nothing."""
    return statistics.median(samples) if samples else float("nan")


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range, over the median: by how much a sample is usually off."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


def interleaved(
    thunks: Mapping[str, Thunk], budget: float, *, wait: Callable[[Any], Any] = lambda x: x, device: str = "cpu",
    fewest: int = FEWEST,
) -> dict[str, list[float] | Failure]:  # fmt: skip
    """Seconds a call of each contender: all samples, or why there are none.

    Parameters
    ----------
    thunks
        The contenders. One that raises is left out of the rounds that follow, and does not stop the others.
    budget
        Seconds for each contender, on average.
    wait
        Waits until the result of a thunk has been computed, for libraries that run behind.
    device
        On "cuda" calls are timed by events, each after its second-level cache was overwritten.
    fewest
        Samples of each contender, even where they exceed the budget.

    Examples
    --------
    >>> found = interleaved({"sum": lambda: sum(range(10)), "bad": lambda: 1 / 0}, budget=0.01)
    >>> len(found["sum"]) >= 5, found["bad"]
    (True, Failure(status='failed', why='division by zero'))
    """
    timer = _cuda_timer() if device.startswith("cuda") else _host_timer(wait)
    out: dict[str, list[float] | Failure] = {name: [] for name in thunks}
    inner: dict[str, int] = {}

    def sample(name: str, count: int) -> float:
        try:
            return timer(thunks[name], count)
        except Exception as error:
            out[name] = Failure.of(error)
            inner.pop(name, None)
            return 0.0

    for name in thunks:
        inner[name] = 1
        sample(name, 1)  # warm-up
    for name in list(inner):
        once = sample(name, 1)
        if name in inner and not device.startswith("cuda"):
            inner[name] = max(1, int(SHORTEST / max(once, 1e-9)))
    stop, rounds = time.perf_counter() + budget * len(inner), 0
    while inner and (rounds < fewest or time.perf_counter() < stop):
        for name, count in list(inner.items()):
            seconds = sample(name, count)
            if name in inner:
                out[name].append(seconds)  # type: ignore[union-attr]
        rounds += 1
    return out


def _host_timer(wait: Callable[[Any], Any]) -> Callable[[Thunk, int], float]:
    def timer(thunk: Thunk, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            wait(thunk())
        return (time.perf_counter() - start) / count

    return timer


def _cuda_timer() -> Callable[[Thunk, int], float]:
    import torch

    cache = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")

    def timer(thunk: Thunk, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        begin.record()
        thunk()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    return timer


# ---------------------------------------------------------------------------------------------------- memory
def available(device: str = "cpu") -> int:
    """Bytes that an allocation may still take."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def require(needed: float, device: str = "cpu") -> None:
    """Raise `MemoryError` where so many bytes are not there; an operating system may end the process instead."""
    there = available(device)
    if needed > there:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB, {there / 1e9:.1f} GB are free")


def traced_peak(thunk: Thunk) -> int:
    """The most bytes of NumPy arrays and Python objects that a call holds at once beside what was there before."""
    import tracemalloc

    thunk()  # what is made once and kept is not the call's
    gc.collect()
    tracemalloc.start()
    try:
        kept = thunk()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return peak
