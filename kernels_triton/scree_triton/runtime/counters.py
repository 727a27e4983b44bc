"""Counters in device memory that are 0 before and after every launch."""

from collections.abc import Callable
from functools import cache

import torch

from .device import current_stream, persistent_zeros
from .recording import recorded_zeros

#: The most counters of a launch, and the launches whose counters are allocated together.
MAX_COUNTERS, _RESERVED = 512, 512
#: The handle of the default stream per thread: a stream of its own in every thread.
_STREAM_PER_THREAD = 2
_address = torch.Tensor.data_ptr
# The function that torch.cuda calls; the tensors are on the device already.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


@cache
def counters(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that returns counters for the next launch on the current stream.

    The function takes memory that the launch writes and no other launch uses at the same time. It
    returns (MAX_COUNTERS,) int32 at 0, which the launch must leave at 0.

    Launches on one stream run one after the other, so they share counters. A captured graph may be
    replayed on any stream. But no two graphs with the same memory can be replayed at the same time, so
    the address of the memory determines the counters. They are allocated before the capture, as filling
    them takes a launch; only where none are left, the graph fills its own.

    Examples
    --------
    >>> counters(torch.device("cpu"))(torch.empty(1)).any()
    tensor(False)
    """
    if device.type == "meta":
        return lambda _: recorded_zeros((MAX_COUNTERS,), torch.int32)
    if device.type == "cpu":
        zeros = torch.zeros(MAX_COUNTERS, dtype=torch.int32)
        return lambda _: zeros
    index = device.index
    by_stream: dict[int, torch.Tensor] = {}
    by_memory: dict[int, torch.Tensor] = {}
    unused: list[torch.Tensor] = []

    def take(used: dict[int, torch.Tensor], key: int, is_captured: bool) -> torch.Tensor:
        """Return counters for a key that has none. Other threads may do so at the same time."""
        if not unused and not is_captured:
            zeros = persistent_zeros((_RESERVED, MAX_COUNTERS), torch.int32, device)
            # From now on they are ready on every stream.
            torch.cuda.current_stream(device).synchronize()
            unused.extend(zeros.unbind())
        try:
            return used.setdefault(key, unused.pop())
        except IndexError:
            return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)

    def counters_of(memory: torch.Tensor) -> torch.Tensor:
        stream = current_stream(index)
        # CUDA cannot capture the default stream, which is 0.
        if stream and _is_capturing():
            address = _address(memory)
            found = by_memory.get(address)
            return take(by_memory, address, True) if found is None else found
        found = by_stream.get(stream)
        if found is not None:
            return found
        if stream == _STREAM_PER_THREAD:
            return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        return take(by_stream, stream, False)

    return counters_of
