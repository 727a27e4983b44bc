"""Record launches on tensors without data, for a library other than PyTorch that launches them.

A launch config allocates results and launches kernels. On tensors of PyTorch's device "meta" it runs
without a GPU, and `record` returns the launches with their arguments. `describe_device` says which
hardware they are for.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

    They are tensors, numbers, and for a TMA descriptor the triple (tensor, shape, rows of a tile).
    """
    constants: dict[str, Any]
    options: dict[str, Any]
    written: frozenset[str]
    """The names of the arguments that the kernel writes. It may read them too."""


class RecordedSort(NamedTuple):
    """A sort of int64 keys in falling order."""

    keys: torch.Tensor
    result: torch.Tensor


class Recording:
    """The launches of a function, in their order."""

    def __init__(self) -> None:
        self.steps: list[RecordedLaunch | RecordedSort] = []
        self.zeros: list[torch.Tensor] = []
        """Tensors that the first launch must find filled with 0."""


@contextmanager
def record() -> Iterator[Recording]:
    """Record the launches of this thread on tensors of the device "meta"."""
    previous = getattr(_local, "recording", None)
    _local.recording = recording = Recording()
    try:
        yield recording
    finally:
        _local.recording = previous


def current_recording() -> Recording:
    """Return the recording of this thread."""
    recording = getattr(_local, "recording", None)
    if recording is None:
        raise RuntimeError("the kernels do not run on the device 'meta', which has no data")
    return recording  # type: ignore[no-any-return]


def recorded_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the device "meta" that the launches find filled with 0."""
    zeros = torch.empty(shape, dtype=dtype, device="meta")
    current_recording().zeros.append(zeros)
    return zeros


def sort_descending(keys: torch.Tensor) -> torch.Tensor:
    """Return a vector of int64 in falling order."""
    if not keys.is_meta:
        return torch.sort(keys, descending=True).values
    result = torch.empty_like(keys)
    current_recording().steps.append(RecordedSort(keys, result))
    return result


def launch_jit(
    kernel: Any, programs: int, *arguments: Any, written: tuple[str, ...], **constants: Any
) -> None:
    """Launch a kernel without descriptors through Triton's JIT, or record the launch.

    `written` has the names of the arguments that the kernel writes. `constants` may end with
    ``num_warps``.
    """
    if not arguments[0].is_meta:
        kernel[(programs,)](*arguments, **constants)
        return
    options = {"num_warps": constants.pop("num_warps")} if "num_warps" in constants else {}
    launch = RecordedLaunch(kernel, programs, arguments, constants, options, frozenset(written))
    current_recording().steps.append(launch)
