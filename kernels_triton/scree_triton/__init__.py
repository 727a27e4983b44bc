"""CUDA kernels for scree, written in Triton. Importing this package imports neither torch nor Triton."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: Operation -> the module here whose function of this name runs it and whose `rejects` answers for it; the values of a call.
KERNELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "attention": ("attention", lambda call: call.q.values),
    "grouped_matmul": ("grouped", lambda call: call.x.values),
    "layer_norm": ("norms", lambda call: call.values),
    "log_softmax": ("softmax", lambda call: call.x.values),
    "logsumexp": ("softmax", lambda call: call.x.values),
    "rms_norm": ("norms", lambda call: call.values),
    "rope": ("rope", lambda call: call.x.values),
    "segment_reduce": ("segments", lambda call: call.values),
    "softmax": ("softmax", lambda call: call.x.values),
}


def register() -> None:
    """Register the kernels with scree; called through the entry-point group ``scree.kernels``."""
    for operation, (module, values) in KERNELS.items():
        _register(operation, module, values)


def _unusable() -> str | None:
    """Why no kernel can run here at all."""
    import torch

    if not find_spec("triton"):
        return "the Triton kernels need the package triton: pip install 'scree[triton]'"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "the Triton kernels run on CUDA devices, and there is none"
    return None


def _register(operation: str, module: str, values: Callable[[Any], Any]) -> None:
    import torch
    from scree import register_kernel

    unusable = _unusable()
    # Imported now, because the first call may stand in a compiled function.
    kernels = None if unusable else import_module(f".{module}", __name__)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def rejects(call: Any) -> str | None:
        if kernels is None:
            return unusable
        x = values(call)
        if not isinstance(x, torch.Tensor):
            return "the Triton kernels take torch tensors"
        if x.device.type != "cuda" and not interpreted:
            return f"the Triton kernels run on CUDA devices, not on {x.device.type!r}"
        return kernels.rejects(call)  # type: ignore[no-any-return]

    register_kernel(operation, provider="triton", rejects=rejects)(getattr(kernels, operation, getattr(kernels, "run", rejects)))
