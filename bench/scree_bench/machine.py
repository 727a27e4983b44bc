"""What a number was measured on: the processor, the versions, and how fast it can copy and multiply at all."""

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

#: Distributions whose versions matter to some number.
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
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> str | None:
    """The name of the first CUDA device, or None."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # only what is there is named
            continue
    return found


def describe(device: str) -> dict[str, Any]:
    """The machine, as it goes into the results."""
    found: dict[str, Any] = {
        "device": device, "tag": tag(device), "cpu": processor(), "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    if device.startswith("cuda"):
        found["gpu"] = gpu()
    return found


def tag(device: str) -> str:
    """A short name of the device for file names: "cpu", "h100", "a100" ..."""
    name = (gpu() or "cuda").lower() if device.startswith("cuda") else device
    words = name.replace("-", " ").split()
    return next(
        (word for word in words if any(c.isdigit() for c in word) and not word.endswith("gb")),
        words[0],
    )


def now() -> str:
    """The time, to the second, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def limits(device: str, quick: bool) -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and floating-point operations a second of a matrix product.

    By PyTorch where it is installed, which is what most contenders run on, otherwise by NumPy.
    """
    cuda = device.startswith("cuda")
    size, width = (1 << 24, 512) if quick else (1 << 30, 8192) if cuda else (1 << 28, 2048)
    dtypes = ("float16", "bfloat16", "float32") if cuda else ("float32",)
    if find_spec("torch") is None:
        rng = np.random.default_rng(0)
        source, into = rng.integers(0, 256, size, np.uint8), np.empty(size, np.uint8)
        calls: dict[str, Any] = {"copy_rate": lambda: np.copyto(into, source)}
        factors = rng.standard_normal((width, width), np.float32)
        calls["matmul_float32_flops"] = lambda: factors @ factors
    else:
        import torch

        source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        into = torch.empty_like(source)
        calls = {"copy_rate": lambda: into.copy_(source)}
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
