"""Timing and memory: interleaved calls, samples, failures as results.

Contenders are measured round-robin, so that a drift of the machine affects all of them equally. A
contender that has used its budget leaves the rounds. The first call of each contender warms up
(and compiles) and is not counted. An asynchronous device has its own rounds, with single calls
between pauses. The host is timed after them in loops of calls, because such a loop changes the
cache and the clock rate, which would affect the next sample of the device.
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

#: Seconds. A sample of a shorter call is the mean of enough calls to take this long.
MIN_SAMPLE_SECONDS = 2e-3
#: Minimum samples per contender, even if they exceed the budget. The minimum is two if they exceed
#: it tenfold, or with `--quick`.
MIN_SAMPLES = 5
#: Time limit in seconds for building and first calling a contender, so that one that hangs does not
#: stop the others.
PATIENCE = 120.0
#: Minimum and maximum seconds that a device sleeps while the host launches a call.
MIN_SLEEP, MAX_SLEEP = 3e-4, 0.02
#: Calls in the loop that times the host, and the limit of their seconds on the host or the device.
MAX_QUEUED_CALLS, MAX_QUEUED_SECONDS = 30, 0.005
#: Seconds on the device above which the host time of a call is not measured.
MAX_HOST_TIMED_SECONDS = 10 * MAX_SLEEP
#: Cycles that a device spins to measure its clock: about 0.3 ms.
CLOCK_CYCLES = 500_000
#: More than the L2 cache of any GPU so far.
L2_BYTES = 256 << 20

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"

#: Parts of the out-of-memory messages of the libraries. Several have no exception type for it.
_OUT_OF_MEMORY_SIGNS = (
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
    """The reason for a missing number: "out of memory" or "failed", and one line of text."""

    status: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure that an exception represents."""
        text = " ".join(str(error).split()) or type(error).__name__
        is_out_of_memory = isinstance(error, MemoryError) or any(
            sign in f"{type(error).__name__} {text}".lower() for sign in _OUT_OF_MEMORY_SIGNS
        )
        return cls(OUT_OF_MEMORY if is_out_of_memory else FAILED, text[:300])


def median(samples: Sequence[float]) -> float:
    """Return the median, or NaN of no samples."""
    return statistics.median(samples) if samples else float("nan")


def spread(samples: Sequence[float]) -> float:
    """Return half the interquartile range relative to the median: the usual relative deviation."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


class Times(NamedTuple):
    """All samples, in seconds per call.

    `host` has the samples of the host alone, for an asynchronous device.
    """

    seconds: list[float]
    host: list[float]


def interleaved(
    thunks: Mapping[str, Thunk],
    budget: float,
    *,
    wait: Callable[[Any], Any] = lambda x: x,
    device: str = "cpu",
    library: str = "torch",
    min_samples: int = MIN_SAMPLES,
    patience: float = PATIENCE,
    has_host_times: bool = True,
    has_clean_l2: bool = False,
    outcomes: dict[str, Times | Failure] | None = None,
) -> dict[str, Times | Failure]:
    """Return the seconds per call of each contender: all samples, or the reason for their absence.

    Parameters
    ----------
    thunks
        The contenders. One that raises leaves the rounds and does not stop the others.
    budget
        Seconds for the samples of each contender, after which it leaves the rounds. On "cuda" the
        samples of the host have the same budget again.
    wait
        Waits until the result of a thunk has been computed, for asynchronous libraries.
    device
        On "cuda" the device is timed, and then the host: see `device_samples` and `_host_samples`.
    library
        The library that runs on "cuda". JAX has a clock of its own, see `jax_clock`.
    min_samples
        Samples of each contender, even if they exceed the budget; two if they would exceed it
        tenfold.
    patience
        Seconds for the first call of each contender, which may compile.
    has_host_times
        Whether the host is timed too on "cuda".
    has_clean_l2
        On "cuda", whether the L2 cache has no lines to write back before a call.
    outcomes
        The dictionary that is filled sample by sample. A caller that passes it keeps the samples
        after an interrupt.

    Examples
    --------
    >>> outcome = interleaved({"sum": lambda: sum(range(10)), "bad": lambda: 1 / 0}, budget=0.01)
    >>> len(outcome["sum"].seconds) >= 5, outcome["bad"]
    (True, Failure(status='failed', why='division by zero'))
    """
    outcomes = {} if outcomes is None else outcomes
    for name, thunk in thunks.items():
        try:
            with time_limit(patience):
                # The first call warms up and compiles.
                wait(thunk())
            outcomes[name] = Times([], [])
        # A contender that fails is a result, and the others still run.
        except Exception as error:
            outcomes[name] = Failure.of(error)

    def run_rounds(samples: Mapping[str, Iterator[float]], field_name: str) -> None:
        seconds_spent = dict.fromkeys(samples, 0.0)
        while seconds_spent:
            for name in list(seconds_spent):
                start = time.perf_counter()
                try:
                    samples_so_far: list[float] = getattr(outcomes[name], field_name)
                    samples_so_far.append(next(samples[name]))
                except Exception as error:
                    outcomes[name] = Failure.of(error)
                    del seconds_spent[name]
                    continue
                seconds_spent[name] += time.perf_counter() - start
                if len(samples_so_far) >= 2 and seconds_spent[name] >= (
                    budget if len(samples_so_far) >= min_samples else 10 * budget
                ):
                    del seconds_spent[name]

    def completed() -> dict[str, Times]:
        return {name: times for name in thunks if isinstance(times := outcomes[name], Times)}

    if not device.startswith("cuda"):
        run_rounds({name: _samples(thunks[name], wait) for name in completed()}, "seconds")
        return outcomes
    sampler: Callable[[Thunk], Iterator[float]]
    if library == "jax":
        from . import jax_clock

        sampler = jax_clock.device_samples
    else:
        import torch

        sampler, wait = device_samples(has_clean_l2), lambda _: torch.cuda.synchronize()
    run_rounds({name: sampler(thunks[name]) for name in completed()}, "seconds")
    if not has_host_times:
        return outcomes
    device_seconds = {name: median(times.seconds) for name, times in completed().items()}
    run_rounds(
        {
            name: _host_samples(thunks[name], seconds, wait)
            for name, seconds in device_seconds.items()
            if seconds < MAX_HOST_TIMED_SECONDS
        },
        "host",
    )
    return outcomes


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` in a block that runs for longer than `seconds`.

    It has no effect on systems without alarms, and outside of the main thread.
    """
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
    """Yield seconds per call, where every call is waited for.

    A sample is the mean of enough calls that it lasts at least `SHORTEST`, to rise above noise.
    """
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            wait(thunk())
        seconds = (time.perf_counter() - start) / count
        if count == 1 and seconds < MIN_SAMPLE_SECONDS:
            count = math.ceil(MIN_SAMPLE_SECONDS / max(seconds, 1e-9))
        else:
            yield seconds


def device_samples(has_clean_l2: bool) -> Callable[[Thunk], Iterator[float]]:
    """Return a sampler of the device time of a call, by events, with a cleared L2 cache.

    Zeros clear the cache, and the call writes them back. With `has_clean_l2` another array is read
    after them.

    The device sleeps until the host has launched all kernels of the call, so that no kernel is
    late. The time then equals the time of a captured graph, also for calls that cannot be captured.
    A sleep is twice as long as the previous launch. If the device woke up too early, the sample is
    discarded and the next sleep is longer. If no sleep is long enough, the call itself waits for
    the device. It is then timed after the shortest sleep, because a host that has waited for long
    is slow to resume.
    """
    import torch

    cache = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    other = torch.zeros(L2_BYTES // 4, device="cuda") if has_clean_l2 else None
    driver = (
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if torch.version.cuda
        else None
    )

    def clear_l2() -> None:
        if driver is not None:
            # Lines that a kernel marked as persisting would survive the zeros.
            driver.cuCtxResetPersistingL2Cache()
        cache.zero_()
        if other is not None:
            other.sum()

    def event() -> Any:
        new_event = torch.cuda.Event(enable_timing=True)
        new_event.record()
        return new_event

    def sleep(cycles: float) -> None:
        torch.cuda._sleep(int(cycles))

    sleep(1)
    begin = event()
    sleep(1e6)
    end = event()
    torch.cuda.synchronize()
    cycles_per_second = 1e9 / begin.elapsed_time(end)

    def samples(thunk: Thunk) -> Iterator[float]:
        sleep_seconds, call_waits = MIN_SLEEP, False
        while True:
            clear_l2()
            sleep(cycles_per_second * sleep_seconds)
            begin, start = event(), time.perf_counter()
            thunk()
            seconds_launched = time.perf_counter() - start
            end = event()
            woke_early = begin.query()
            torch.cuda.synchronize()
            if woke_early and not call_waits:
                next_sleep = 2 * max(sleep_seconds, seconds_launched)
                call_waits = next_sleep > 2 * MAX_SLEEP
                sleep_seconds = MIN_SLEEP if call_waits else next_sleep
                continue
            if not call_waits:
                sleep_seconds = max(MIN_SLEEP, 2 * seconds_launched)
            yield begin.elapsed_time(end) / 1e3

    return samples


def _host_samples(thunk: Thunk, seconds: float, wait: Callable[[Any], Any]) -> Iterator[float]:
    """Yield the host time of a call, given the seconds that it takes on the device.

    This is the time of the call in a busy program. The host makes a number of calls without waiting
    for any, few enough that all fit into the queue of the device.
    """
    max_calls = _queued_calls(seconds)
    while True:
        # The first call after a synchronization takes longer.
        result = thunk()
        calls, start = 0, time.perf_counter()
        while calls < max_calls and time.perf_counter() - start < MAX_QUEUED_SECONDS:
            result = thunk()
            calls += 1
        seconds_elapsed = time.perf_counter() - start
        wait(result)
        yield seconds_elapsed / calls


def before_launch_samples(
    thunk: Thunk,
    launch_times: list[float],
    budget: float,
    *,
    seconds: float,
    wait: Callable[[Any], Any],
) -> list[float]:
    """Return seconds from the start of a call to its first launch, in the loops of `_host_samples`.

    Parameters
    ----------
    thunk
        A call that appends the result of `time.perf_counter` to `launch_times` before each launch.
    launch_times
        The list.
    budget
        Seconds for all samples, of which there are at least two.
    seconds
        Seconds of the call on the device.
    wait
        Waits until the result of a call has been computed.
    """
    samples: list[float] = []
    calls, end = _queued_calls(seconds), time.perf_counter() + budget
    while len(samples) < 2 or time.perf_counter() < end:
        # The first call after a synchronization takes longer.
        result, total = thunk(), 0.0
        for _ in range(calls):
            launch_times.clear()
            start = time.perf_counter()
            result = thunk()
            total += launch_times[0] - start
        wait(result)
        samples.append(total / calls)
    return samples


def _queued_calls(seconds: float) -> int:
    """Return a number of calls that fit into the queue of the device, given the seconds of each."""
    return max(1, min(MAX_QUEUED_CALLS, int(MAX_QUEUED_SECONDS / max(seconds, 1e-6))))


def clock_rate(thunk: Thunk) -> float:
    """Return the clock rate of a CUDA device in Hz, right after a call.

    The device spins for a number of cycles after the call, and events time it.
    """
    import torch

    thunk()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(CLOCK_CYCLES)
    end.record()
    end.synchronize()
    return CLOCK_CYCLES / (begin.elapsed_time(end) / 1e3)


# --- memory ---
def available(device: str = "cpu") -> int:
    """Return the bytes that can still be allocated."""
    if device.startswith("cuda"):
        import torch

        # PyTorch's allocator keeps freed memory for later allocations.
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0] + cached)
    for line in (
        Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/meminfo").exists()
        else []
    ):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def require(needed: float, device: str = "cpu") -> None:
    """Raise `MemoryError` if `needed` bytes are not available.

    Without this check the operating system may end the process instead.
    """
    free_bytes = available(device)
    if needed > free_bytes:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free")


def traced_peak(thunk: Thunk) -> int:
    """Return the peak bytes of NumPy arrays and Python objects of a call.

    Objects that existed before the call are not counted.
    """
    import tracemalloc

    # Exclude memory that the first call allocates and keeps.
    thunk()
    gc.collect()
    tracemalloc.start()
    try:
        result = thunk()
        peak = tracemalloc.get_traced_memory()[1]
        del result
    finally:
        tracemalloc.stop()
    return peak
