"""Record launches on tensors without data, so that another library can launch the kernels.

A launch config allocates results and launches kernels. On tensors of PyTorch's device "meta" it runs
without a GPU, and `record` returns the launches with their arguments. `device.describe_meta` declares
the hardware that they are for.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_local = threading.local()


class RecordedLaunch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    """The jitted function."""
    programs: int
    """The number of CTAs."""
    arguments: tuple[Any, ...]
    """The arguments before the constants, in the kernel's order.

    Tensors, numbers, and for a TMA descriptor the triple (tensor, shape, rows of a tile).
    """
    constants: dict[str, Any]
    """The constexpr arguments, by name."""
    options: dict[str, Any]
    """The compile options."""
    written: frozenset[str]
    """The names of the arguments that the kernel writes, and may also read."""


class RecordedSort(NamedTuple):
    """A sort of int64 keys in descending order."""

    keys: torch.Tensor
    result: torch.Tensor


@dataclass
class Recording:
    """The launches and sorts of a function, in order."""

    steps: list[RecordedLaunch | RecordedSort] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    """Tensors that are filled with 0 before the first launch."""


@contextmanager
def record() -> Iterator[Recording]:
    """Record the launches on tensors of the device "meta" by this thread.

    Examples
    --------
    >>> with record() as recording:
    ...     keys = sort_descending(torch.empty(4, dtype=torch.int64, device="meta"))
    >>> len(recording.steps)
    1
    """
    previous = getattr(_local, "recording", None)
    _local.recording = recording = Recording()
    try:
        yield recording
    finally:
        _local.recording = previous


def current_recording() -> Recording:
    """Return the recording of this thread; raise `RuntimeError` outside of `record`."""
    recording = getattr(_local, "recording", None)
    if recording is None:
        raise RuntimeError("the kernels do not run on the device 'meta', which has no data")
    return recording


def recorded_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the device "meta" that is filled with 0 before the first launch."""
    zeros = torch.empty(shape, dtype=dtype, device="meta")
    current_recording().zeros.append(zeros)
    return zeros


def sort_descending(keys: torch.Tensor) -> torch.Tensor:
    """Return a vector of int64 in descending order, or record the sort."""
    if not keys.is_meta:
        return torch.sort(keys, descending=True).values
    result = torch.empty_like(keys)
    current_recording().steps.append(RecordedSort(keys, result))
    return result


def launch_jit(
    kernel: Any,
    programs: int,
    *arguments: Any,
    written: tuple[str, ...],
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """Launch a kernel without descriptors through Triton's JIT, or record the launch.

    `written` has the names of the arguments that the kernel writes.
    """
    options = {"num_warps": num_warps}
    if arguments[0].is_meta:
        launch = RecordedLaunch(kernel, programs, arguments, constants, options, frozenset(written))
        current_recording().steps.append(launch)
    else:
        kernel[(programs,)](*arguments, **constants, **options)
