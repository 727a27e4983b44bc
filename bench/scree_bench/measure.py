"""How a number comes about: calls in turn, medians with every sample kept, and failures that are results.

Contenders are measured in turn, one after the other in every round, so that a drift of the machine meets all of them alike; one
whose time is used up leaves the rounds. The first call of each warms up (and compiles) and is not counted.
"""

from __future__ import annotations

import gc
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Thunk = Callable[[], Any]

SHORTEST = 2e-3  # seconds; a sample of a faster call is the mean of so many calls that it lasts this long
FEWEST = 5  # samples of each contender even where they exceed the budget; two where they do so tenfold, or with `--quick`
PATIENCE = 120.0  # seconds for building and first calling a contender; one that hangs must not stop the others
LONGEST_SLEEP = 0.02  # seconds that a device waits for the host
COLD = 3e-4  # of them beside the host's time: the first call after a synchronization takes longer
QUEUED, QUEUED_SECONDS = 30, 0.01  # calls in the loop that times the host, and how long they may take it or the device
SLOW = 10 * LONGEST_SLEEP  # seconds; of longer calls there is no such loop: beside them the wait for a sleeping device is little
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


class Times(NamedTuple):
    """Seconds a call, all samples; and those that the host alone was busy with, where a device works behind it."""

    seconds: list[float]
    host: list[float]


def interleaved(
    thunks: Mapping[str, Thunk], budget: float, *, wait: Callable[[Any], Any] = lambda x: x, device: str = "cpu",
    fewest: int = FEWEST, patience: float = PATIENCE, out: dict[str, Times | Failure] | None = None,
) -> dict[str, Times | Failure]:  # fmt: skip
    """Seconds a call of each contender: all samples, or why there are none.

    Parameters
    ----------
    thunks
        The contenders. One that raises is left out of the rounds that follow, and does not stop the others.
    budget
        Seconds for each contender, after which it leaves the rounds.
    wait
        Waits until the result of a thunk has been computed, for libraries that run behind.
    device
        On "cuda" calls are timed by events: see `_device_clock`.
    fewest
        Samples of each contender, even where they exceed the budget; two where they would exceed it tenfold.
    patience
        Seconds for the first call of each contender, which may compile.
    out
        Where the result is put together, sample by sample: whoever gives it has what was measured also after an interrupt.

    Examples
    --------
    >>> found = interleaved({"sum": lambda: sum(range(10)), "bad": lambda: 1 / 0}, budget=0.01)
    >>> len(found["sum"].seconds) >= 5, found["bad"]
    (True, Failure(status='failed', why='division by zero'))
    """
    clock = _device_clock() if device.startswith("cuda") else _host_clock(wait)
    out = {} if out is None else out
    inner: dict[str, int] = {}

    def sample(name: str, patience: float | None = None) -> tuple[float, float | None]:
        try:
            with within(patience):
                return clock(thunks[name], inner[name])
        except Exception as error:  # a contender that fails is a result, and the others still run
            out[name] = Failure.of(error)
            inner.pop(name, None)
            return 0.0, None

    for name in thunks:
        inner[name] = 1
        sample(name, patience)  # warm-up
    times = {name: Times([], []) for name in inner}
    out |= times
    spent = dict.fromkeys(inner, 0.0)
    while inner:
        for name in list(inner):
            start = time.perf_counter()
            seconds, host = sample(name)
            spent[name] += time.perf_counter() - start
            if host is None and name in inner and inner[name] == 1 and seconds < SHORTEST:
                inner[name] = math.ceil(SHORTEST / max(seconds, 1e-9))  # a sample are so many calls from now on
                continue
            times[name].seconds.append(seconds)
            times[name].host.extend(() if host is None else (host,))
            count = len(times[name].seconds)
            if count >= 2 and spent[name] >= (budget if count >= fewest else 10 * budget):
                inner.pop(name, None)
    return out


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` in what runs for longer; where the system has no alarms, and outside of the main thread, never."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


#: Times a thunk called so many times: seconds a call, and those of the host alone where it is not the host that works.
Clock = Callable[[Thunk, int], tuple[float, float | None]]


def _host_clock(wait: Callable[[Any], Any]) -> Clock:
    def clock(thunk: Thunk, count: int) -> tuple[float, None]:
        start = time.perf_counter()
        for _ in range(count):
            wait(thunk())
        return (time.perf_counter() - start) / count, None

    return clock


def _device_clock() -> Clock:
    """Seconds of the device alone, from a cold second-level cache; and those of the host alone, in a loop of calls.

    The device sleeps until the host has launched all that a call consists of, so that no kernel comes late: the time is that of
    a captured graph, also for calls that cannot be captured. Then the host makes some calls one after another without waiting
    for any, few enough that the device's queue takes them all: its time is that of a call in a program that is busy.
    """
    import torch

    cache = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    last: dict[int, tuple[float, float]] = {}  # of each thunk: seconds of the host and of the device

    def events() -> tuple[Any, Any]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sleep(cycles: float) -> None:
        torch.cuda._sleep(int(cycles))

    sleep(1)
    begin, end = events()
    begin.record()
    sleep(1e6)
    end.record()
    torch.cuda.synchronize()
    rate = 1e9 / begin.elapsed_time(end)  # cycles a second

    def clock(thunk: Thunk, count: int) -> tuple[float, float]:
        host, seconds = last.get(id(thunk), (0.0, QUEUED_SECONDS))
        known = max(host, seconds)
        calls = 0 if known > SLOW else max(1, min(QUEUED, int(QUEUED_SECONDS / known)))
        begin, end = events()
        cache.zero_()
        sleep(rate * min(1.5 * host + COLD, LONGEST_SLEEP))
        begin.record()
        start = time.perf_counter()
        thunk()
        host = time.perf_counter() - start
        end.record()
        start = time.perf_counter()
        for _ in range(calls):
            thunk()
        host = (time.perf_counter() - start) / calls if calls else host
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        last[id(thunk)] = host, max(seconds, 1e-6)
        return seconds, host

    return clock


# ---------------------------------------------------------------------------------------------------- memory
def available(device: str = "cpu") -> int:
    """Bytes that an allocation may still take."""
    if device.startswith("cuda"):
        import torch

        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by PyTorch, for what comes next
        return int(torch.cuda.mem_get_info()[0] + held)
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
