"""The GPU for which JAX compiles, and the reasons why kernels on it cannot take an array."""

from typing import Any

import jax
import torch

from ..runtime.device import Device, describe_meta, device_info

#: The platform names of JAX for CUDA devices; "gpu" also names AMD devices.
PLATFORMS = ("gpu", "cuda")
_KIB = 1 << 10
#: Bytes of the L2 cache, which JAX does not report.
_L2_CACHE = 40 << 20
#: Compute capability -> bytes of shared memory that one CTA can have; 99 KiB for all others.
_SHARED_MEMORY = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}


def describe_gpu(gpu: Any, has_descriptors: bool) -> None:
    """Declare the GPU for which launches are recorded.

    Parameters
    ----------
    gpu
        Device of JAX.
    has_descriptors
        Whether jaxlib passes TMA descriptors to kernels. Otherwise the portable kernels run.
    """
    major, minor = map(int, gpu.compute_capability.split("."))
    shared_memory = _SHARED_MEMORY.get(10 * major + minor, 99 * _KIB)
    describe_meta(
        Device(
            "nvidia", (major, minor), gpu.core_count, shared_memory, _L2_CACHE,
            has_descriptors=has_descriptors,
        )
    )  # fmt: skip


def capability() -> int:
    """Return the compute capability of the GPU, for instance 90."""
    major, minor = device_info(torch.device("meta")).capability
    return 10 * major + minor


def rejects_arrays(*arrays: Any) -> str | None:
    """Return why the kernels cannot take the arrays; None if they can."""
    for x in arrays:
        if not isinstance(x, jax.Array):
            return "the Triton kernels for JAX take arrays of JAX"
        if type(x).__name__ == "BatchTracer":
            return "the Triton kernels for JAX run under no jax.vmap"
        if not isinstance(x, jax.core.Tracer) and x.platform() not in PLATFORMS:
            return f"the Triton kernels run on CUDA devices, not on {x.platform()!r}"
    return device_info(torch.device("meta")).rejection


def rejects_partitioning(*arrays: Any) -> str | None:
    """Return why the arrays are split between devices; None if they are not, or are traced."""
    if jax.device_count() == 1 or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    is_split = any(len(x.devices()) > 1 for x in arrays)
    return "the Triton kernels take arrays on one device" if is_split else None
