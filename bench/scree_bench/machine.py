"""Description of the machine: processor, versions, and measured copy and matrix-product rates."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Times, interleaved, median

#: Distributions whose versions affect a measured number.
PACKAGES = (
    "scree",
    "numpy",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "mlx",
    "array-api-compat",
    "array-api-strict",
    "awkward",
    "ragged",
    "flash-attn",
    "flash-attn-4",
    "fa3-fwd",
    "liger-kernel",
    "quack-kernels",
    "flashinfer-python",
)


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> str | None:
    """Return the name of the first CUDA device, or None."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        # Only installed packages are listed.
        except metadata.PackageNotFoundError:
            continue
    return installed


def describe(device: str) -> dict[str, Any]:
    """Return the description of the machine for the results."""
    description: dict[str, Any] = {
        "device": device, "tag": tag(device), "cpu": processor(), "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    if device.startswith("cuda"):
        description["gpu"] = gpu()
    return description


def tag(device: str) -> str:
    """Return a short name of the device for file names: "cpu", "h100", "a100" ..."""
    name = (gpu() or "cuda").lower() if device.startswith("cuda") else device
    parts = name.replace("-", " ").split()
    return next(
        (word for word in parts if any(c.isdigit() for c in word) and not word.endswith("gb")),
        parts[0],
    )


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def limits(device: str, quick: bool) -> dict[str, float]:
    """Measure the rate of a large copy and of matrix products.

    The copy rate is in bytes read and written per second; the product rates are in floating-point
    operations per second. They are measured with PyTorch if it is installed, since most contenders
    run on it, otherwise with NumPy.
    """
    cuda = device.startswith("cuda")
    size, width = (1 << 24, 512) if quick else (1 << 30, 8192) if cuda else (1 << 28, 2048)
    dtypes = ("float16", "bfloat16", "float32") if cuda else ("float32",)
    if find_spec("torch") is None:
        rng = np.random.default_rng(0)
        source, destination = rng.integers(0, 256, size, np.uint8), np.empty(size, np.uint8)
        calls: dict[str, Any] = {"copy_rate": lambda: np.copyto(destination, source)}
        factors = rng.standard_normal((width, width), np.float32)
        calls["matmul_float32_flops"] = lambda: factors @ factors
    else:
        import torch

        source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        destination = torch.empty_like(source)
        calls = {"copy_rate": lambda: destination.copy_(source)}
        for dtype in dtypes:
            factors = torch.randn(width, width, device=device).to(getattr(torch, dtype))
            calls[f"matmul_{dtype}_flops"] = lambda x=factors: x @ x
    times = interleaved(calls, 0.1 if quick or cuda else 1.0, device=device)
    work = {"copy_rate": 2.0 * size}
    return {
        name: work.get(name, 2.0 * width**3) / median(x.seconds)
        for name, x in times.items()
        if isinstance(x, Times)
    }
