"""Device time of calls of JAX on CUDA, by kernels that read the clock of the GPU.

JAX has no events, and the events of PyTorch are on other streams. Two launches on JAX's stream around
a call read the nanoseconds of the GPU instead. The first one spins until the host has launched the
call, as the device sleeps in `measure` for calls of PyTorch.

XLA leaves a gap of about 5 us between two programs, and events leave a smaller one. So the times are
shifted: a program with one empty kernel takes as long as an empty kernel of PyTorch by its events.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from scree_triton.jax.devices import capability
from scree_triton.jax.triton_call import run_recording
from scree_triton.runtime.recording import launch_jit, record

from .measure import L2_BYTES, MAX_SLEEP, Thunk, median
from .measure import device_samples as event_samples

#: Seconds that the device spins at least. Threads of XLA launch kernels after a call has returned.
MIN_SPIN = 2e-3


@triton.jit
def clock_kernel(OUT, nanoseconds):  # type: ignore[no-untyped-def]  # Triton reads the annotations
    """Spin, and store the clock of the GPU in nanoseconds."""
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
    tl.store(OUT, now)


@cache
def clock(nanoseconds: int = 0) -> Any:
    """Return a compiled function that spins, and returns the clock of the GPU as two int32."""

    def launch() -> Any:
        with record() as recording:
            now = torch.empty(1, dtype=torch.int64, device="meta")
            launch_jit(clock_kernel, 1, now, nanoseconds, written=("OUT",), num_warps=1)
        return run_recording(recording, capability(), [], [now])[0]

    return jax.jit(launch)


def nanoseconds(words: Any) -> int:
    """Return the clock that a function of `clock` returned."""
    return int(np.asarray(words).reshape(2).view(np.int64)[0])


@jax.jit
def _fill() -> Any:
    return jnp.zeros(L2_BYTES, jnp.int8)


@cache
def _empty_kernel() -> float:
    """Return the seconds of an empty kernel of PyTorch, by events."""
    samples = event_samples(has_clean_l2=False)(lambda: torch.cuda._sleep(1))
    return median([*islice(samples, 15)])


def device_samples(thunk: Thunk) -> Iterator[float]:
    """Yield seconds of the device per call, with a cleared L2 cache.

    A sample is late if the device stopped spinning before the host had launched the call. At most five
    late samples in a row are discarded; the next one counts, with one warning per sampler.
    """
    # Spins have a fixed length, because another length compiles again.
    spin, discarded, has_warned = MIN_SPIN, 0, False
    read, empty = clock(), _empty_kernel()
    read().block_until_ready()
    while True:
        clear_l2, begin_clock = _fill(), clock(int(1e9 * spin))
        begin, start = begin_clock(), time.perf_counter()
        result = thunk()
        end = read()
        launched = time.perf_counter() - start
        was_late = begin.is_ready()
        # The clock again, with an empty kernel before it.
        others = read(), read()
        jax.block_until_ready((clear_l2, result, others))
        del clear_l2, result
        if was_late and discarded < 5 and spin < MAX_SLEEP:
            discarded += 1
            spin = 2 * spin if launched > spin / 2 else spin
            continue
        if was_late and not has_warned:
            has_warned = True
            warnings.warn(
                "device_samples: the device stopped spinning before the host had launched the call, so "
                "its times include time of the host; run on an idle host",
                RuntimeWarning,
                stacklevel=2,
            )
        discarded = 0
        first, last, after = map(nanoseconds, (begin, end, others[1]))
        yield max(0.0, (last - first) - (after - last)) / 1e9 + empty
