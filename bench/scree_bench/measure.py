"""How a number comes about: calls in turn, medians with every sample kept, and failures that are results.

Contenders are measured in turn, one after the other in every round, so that a drift of the machine meets all of them alike; one
whose time is used up leaves the rounds. The first call of each warms up (and compiles) and is not counted. A device that works
behind the host has rounds of its own, a single call between rests, and the host has its loops of calls behind them: what such a
loop leaves in the cache, and of the clock rate, would meet the next one's sample.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Thunk = Callable[[], Any]

SHORTEST = (
    2e-3  # seconds; a sample of a faster call is the mean of so many calls that it lasts this long
)
FEWEST = 5  # samples of each contender even where they exceed the budget; two where they do so tenfold, or with `--quick`
PATIENCE = 120.0  # seconds for building and first calling a contender; one that hangs must not stop the others
NAP, LONGEST_NAP = (
    3e-4,
    0.02,
)  # seconds that a device sleeps while the host launches a call: at least, and at most
QUEUED, QUEUED_SECONDS = (
    30,
    0.005,
)  # calls in the loop that times the host, and how long they may take it or the device
SLOW = 10 * LONGEST_NAP  # seconds; beside a longer call the host is not timed
L2_BYTES = 256 << 20  # more than the second-level cache of any GPU so far

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"

#: What the libraries say when memory runs out; several have no exception of their own for it.
_SIGNS = (
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "can't allocate memory",
    "unable to allocate",
    "bad_alloc",
    "failed to allocate",
    "attempting to allocate",
)


class Failure(NamedTuple):
    """Why there is no number: "out of memory" or "failed", and the reason in one line."""

    status: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What an exception means."""
        text = " ".join(str(error).split()) or type(error).__name__
        short = isinstance(error, MemoryError) or any(
            sign in f"{type(error).__name__} {text}".lower() for sign in _SIGNS
        )
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
    """Seconds a call, all samples; and those of the host alone, where a device works behind it."""

    seconds: list[float]
    host: list[float]


def interleaved(
    thunks: Mapping[str, Thunk],
    budget: float,
    *,
    wait: Callable[[Any], Any] = lambda x: x,
    device: str = "cpu",
    fewest: int = FEWEST,
    patience: float = PATIENCE,
    out: dict[str, Times | Failure] | None = None,
) -> dict[str, Times | Failure]:
    """Seconds a call of each contender: all samples, or why there are none.

    Parameters
    ----------
    thunks
        The contenders. One that raises is left out of the rounds that follow, and does not stop the others.
    budget
        Seconds for the samples of each contender, after which it leaves the rounds; on "cuda" for those of the host as many again.
    wait
        Waits until the result of a thunk has been computed, for libraries that run behind.
    device
        On "cuda" the device is timed, and then the host: see `_device_samples` and `_host_samples`.
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
    out = {} if out is None else out
    for name, thunk in thunks.items():
        try:
            with within(patience):
                wait(thunk())  # warm-up
            out[name] = Times([], [])
        except Exception as error:  # a contender that fails is a result, and the others still run
            out[name] = Failure.of(error)

    def rounds(samples: Mapping[str, Iterator[float]], kind: str) -> None:
        spent = dict.fromkeys(samples, 0.0)
        while spent:
            for name in list(spent):
                start = time.perf_counter()
                try:
                    kept: list[float] = getattr(out[name], kind)
                    kept.append(next(samples[name]))
                except Exception as error:
                    out[name] = Failure.of(error)
                    del spent[name]
                    continue
                spent[name] += time.perf_counter() - start
                if len(kept) >= 2 and spent[name] >= (
                    budget if len(kept) >= fewest else 10 * budget
                ):
                    del spent[name]

    def there() -> dict[str, Times]:
        return {name: found for name in thunks if isinstance(found := out[name], Times)}

    if not device.startswith("cuda"):
        rounds({name: _samples(thunks[name], wait) for name in there()}, "seconds")
        return out
    on_device = _device_samples()
    rounds({name: on_device(thunks[name]) for name in there()}, "seconds")
    took = {name: median(found.seconds) for name, found in there().items()}
    rounds(
        {
            name: _host_samples(thunks[name], seconds)
            for name, seconds in took.items()
            if seconds < SLOW
        },
        "host",
    )
    return out


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` in what runs for longer; where the system has no alarms, and outside of the main thread, never."""
    if (
        seconds is None
        or not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
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


def _samples(thunk: Thunk, wait: Callable[[Any], Any]) -> Iterator[float]:
    """Seconds a call, each waited for; a sample is the mean of so many that it lasts long enough to be told from noise."""
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            wait(thunk())
        seconds = (time.perf_counter() - start) / count
        if count == 1 and seconds < SHORTEST:
            count = math.ceil(SHORTEST / max(seconds, 1e-9))
        else:
            yield seconds


def _device_samples() -> Callable[[Thunk], Iterator[float]]:
    """Seconds of the device alone for a call, by events, from an overwritten second-level cache.

    The device sleeps until the host has launched all that the call consists of, so that no kernel comes late: the time is that
    of a captured graph, also for calls that cannot be captured. A sleep is twice as long as the launch before took. Where the
    device woke up too early, the sample does not count, and the next sleep is longer. Where none is long enough, the call waits
    for the device itself, and is timed behind the shortest: a host that has waited for long takes its time to wake up.
    """
    import torch

    cache = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    driver = (
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if torch.version.cuda
        else None
    )

    def clear() -> None:
        if driver is not None:
            driver.cuCtxResetPersistingL2Cache()  # lines that a kernel marked to stay would outlive the zeros
        cache.zero_()

    def event() -> Any:
        found = torch.cuda.Event(enable_timing=True)
        found.record()
        return found

    def sleep(cycles: float) -> None:
        torch.cuda._sleep(int(cycles))

    sleep(1)
    begin = event()
    sleep(1e6)
    end = event()
    torch.cuda.synchronize()
    rate = 1e9 / begin.elapsed_time(end)  # cycles a second

    def samples(thunk: Thunk) -> Iterator[float]:
        nap, waits = NAP, False
        while True:
            clear()
            sleep(rate * nap)
            begin, start = event(), time.perf_counter()
            thunk()
            took = time.perf_counter() - start
            end = event()
            late = begin.query()
            torch.cuda.synchronize()
            if late and not waits:
                longer = 2 * max(nap, took)
                waits = longer > 2 * LONGEST_NAP
                nap = NAP if waits else longer
                continue
            if not waits:
                nap = max(NAP, 2 * took)
            yield begin.elapsed_time(end) / 1e3

    return samples


def _host_samples(thunk: Thunk, seconds: float) -> Iterator[float]:
    """Seconds of the host alone for a call that takes the device so many: the time of a call in a program that is busy.

    The host makes some calls one after another without waiting for any, few enough that the device's queue takes them all.
    """
    import torch

    most = max(1, min(QUEUED, int(QUEUED_SECONDS / max(seconds, 1e-6))))
    while True:
        thunk()  # the first after a wait takes longer
        calls, start = 0, time.perf_counter()
        while calls < most and time.perf_counter() - start < QUEUED_SECONDS:
            thunk()
            calls += 1
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        yield took / calls


# ---------------------------------------------------------------------------------------------------- memory
def available(device: str = "cpu") -> int:
    """Bytes that an allocation may still take."""
    if device.startswith("cuda"):
        import torch

        held = (
            torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        )  # by PyTorch, for what comes next
        return int(torch.cuda.mem_get_info()[0] + held)
    for line in (
        Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/meminfo").exists()
        else []
    ):
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
