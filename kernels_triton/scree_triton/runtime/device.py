"""Facts about the hardware and the Triton version, in one record per device."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs

from scree.backends import constant

#: Whether the kernels run in Triton's interpreter, on the CPU.
INTERPRETED = knobs.runtime.interpret
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
#: Version of Triton -> how the kernels were tested with it. Gluon, its compiler and the launcher in C
#: change between releases. So with other versions the portable kernels replace the Gluon kernels,
#: and every launch goes through Triton's JIT.
TESTED_VERSIONS = {
    (3, 6): "all kernels ran on H100 and H200",
    (3, 7): "the Gluon kernels ran on an H200 with the launcher of 3.6",
    (3, 8): "all kernels compile",
    (3, 9): "all kernels compile; attention ran on an H200",
}
#: Compute capabilities of devices where a CTA can have 227 KB of shared memory.
LARGE_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# The functions that torch.cuda calls, without its check that CUDA is initialized: the tensors are
# on the device already.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
#: Called only where a tensor is on a device, so the count no longer changes and can be cached.
device_count = cache(torch.cuda.device_count)


@dataclass(frozen=True)
class Device:
    """The hardware that a kernel runs on."""

    vendor: str
    """``"nvidia"``, ``"amd"`` or ``"cpu"``; the latter is the interpreter."""
    capability: tuple[int, int]
    """Compute capability; (8, 0) in the interpreter, so that it runs the portable kernels."""
    sm_count: int
    """Number of SMs, hence of the largest CTAs that run at once; a few in the interpreter."""
    shared_memory: int
    """Bytes of shared memory that one CTA can have; 0 in the interpreter."""
    l2_cache: int
    """Bytes of the L2 cache; 0 in the interpreter."""
    triton_version: tuple[int, ...] = TRITON_VERSION
    has_descriptors: bool = True
    """False if the library that launches passes no TMA descriptors, which the Gluon kernels need."""

    @property
    def supports_pdl(self) -> bool:
        """True if a kernel can start before the previous one ends (programmatic dependent launch)."""
        return self.vendor == "nvidia" and self.capability >= (9, 0)

    @property
    def supports_sm90_gluon(self) -> bool:
        """True if the Gluon kernels for Hopper run on the device with this version of Triton."""
        return self.is_hopper and self.note is None

    @property
    def is_hopper(self) -> bool:
        """True for an H100, an H200 or a GH200."""
        return self.vendor == "nvidia" and self.capability == (9, 0)

    @property
    def note(self) -> str | None:
        """Why the Gluon kernels do not run on a Hopper GPU, or None."""
        if not self.is_hopper:
            return None
        if not self.has_descriptors:
            return (
                "the faster kernels for Hopper need TMA descriptors, which this jaxlib does not "
                "pass; portable kernels run instead"
            )
        if self.triton_version in TESTED_VERSIONS:
            return None
        version, first, last = (
            ".".join(map(str, v))
            for v in (self.triton_version, min(TESTED_VERSIONS), max(TESTED_VERSIONS))
        )
        return (
            f"the faster kernels for Hopper were tested with Triton {first} to {last}, not "
            f"{version}; portable kernels run instead"
        )

    @property
    def rejection(self) -> str | None:
        """Why no kernel runs on the device, or None."""
        if self.vendor == "amd":
            return "the Triton kernels take NVIDIA GPUs, not AMD GPUs"
        if self.capability < (8, 0):
            return "the Triton kernels need compute capability 8.0 (Ampere) or later"
        return None

    @property
    def has_large_shared_memory(self) -> bool:
        """True if one CTA can have 227 KB of shared memory."""
        return self.capability in LARGE_SHARED_MEMORY


#: Device -> its record. "meta" has one after `describe_meta`.
_RECORDS: dict[torch.device, Device] = {}


def describe_meta(device: Device) -> None:
    """Declare the hardware for which launches on the device "meta" are recorded.

    Raises
    ------
    RuntimeError
        If other hardware was declared before, for which launch configs may be cached.
    """
    declared = _RECORDS.setdefault(torch.device("meta"), device)
    if declared != device:
        raise RuntimeError(
            f"device: expected the hardware that was declared before, {declared}, got {device}; "
            f"record launches for other hardware in another process"
        )


def device_info(device: torch.device) -> Device:
    """Return the record of a device; warn once if faster kernels do not run on it."""
    record = _RECORDS.get(device)
    if record is not None:
        return record
    if INTERPRETED or device.type != "cuda" or not torch.cuda.is_available():
        return Device("cpu", (8, 0), 3, 0, 0)
    properties = torch.cuda.get_device_properties(device)
    record = _RECORDS[device] = Device(
        "nvidia" if torch.version.cuda is not None else "amd",
        torch.cuda.get_device_capability(device),
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 0),
        properties.L2_cache_size,
    )
    if record.note:
        warnings.warn(f"scree: {record.note}", RuntimeWarning, stacklevel=2)
    return record


@constant
def rejects_device(device: torch.device) -> str | None:
    """Return why no kernel runs on a device; None if kernels run."""
    if device.type != "cuda" and not INTERPRETED:
        return f"the Triton kernels run on CUDA devices, not on {device.type!r}"
    return device_info(device).rejection


def persistent_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros that outlive the call, ready for use on the current stream.

    They are allocated on the default stream by a thread of its own. Before `torch.compile` captures
    a CUDA graph, PyTorch takes all memory of the calling thread from the pool of the graph, and
    reuses that memory later.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)

    def allocate() -> tuple[torch.Tensor, torch.cuda.Event]:
        with torch.cuda.device(device):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            return zeros, torch.cuda.current_stream().record_event()

    with ThreadPoolExecutor(1) as executor:
        zeros, is_ready = executor.submit(allocate).result()
    stream = torch.cuda.current_stream(device)
    stream.wait_event(is_ready)
    zeros.record_stream(stream)
    return zeros


def unsupported_dtype(x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Return why no kernel supports the dtype of a tensor; None if one does."""
    if x.dtype not in dtypes:
        supported = ", ".join(str(d)[6:] for d in dtypes)
        return f"the Triton kernels take {supported} here, not {str(x.dtype)[6:]}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None
