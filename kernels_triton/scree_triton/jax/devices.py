"""The GPU for which JAX compiles, and why arrays are not on it."""

from typing import Any

import jax
import torch

from ..runtime.device import Device, describe_meta, device_info

#: The names of JAX for platforms whose devices can be CUDA devices.
PLATFORMS = ("gpu", "cuda")
_KIB = 1 << 10
#: Compute capability -> bytes of shared memory that one CTA can have; others have 99 KiB.
_SHARED_MEMORY = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}


def describe_gpu(gpu: Any, has_descriptors: bool) -> None:
    """Declare a device of JAX as the one for which launches are recorded.

    Without `has_descriptors` jaxlib passes no TMA descriptors to kernels, and the portable kernels
    run.
    """
    major, minor = map(int, gpu.compute_capability.split("."))
    known = 10 * major + minor
    device = Device(
        "nvidia", (major, minor), gpu.core_count, _SHARED_MEMORY.get(known, 99 * _KIB), 40 << 20
    )
    if not has_descriptors:
        device = Device(
            device.vendor,
            device.capability,
            device.sm_count,
            device.shared_memory,
            device.l2_cache,
            (0, 0),
        )
    describe_meta(device)


def capability() -> int:
    """Return the compute capability of the GPU, for instance 90."""
    major, minor = device_info(torch.device("meta")).capability
    return 10 * major + minor


def rejects_arrays(*arrays: Any) -> str | None:
    """Return why no kernel can take the arrays; None if kernels can."""
    for x in arrays:
        if not isinstance(x, jax.Array):
            return "the Triton kernels for JAX take arrays of JAX"
        if type(x).__name__ == "BatchTracer":
            return "the Triton kernels for JAX run under no jax.vmap"
        if not isinstance(x, jax.core.Tracer) and x.platform() not in PLATFORMS:
            return f"the Triton kernels run on CUDA devices, not on {x.platform()!r}"
    return device_info(torch.device("meta")).rejection
