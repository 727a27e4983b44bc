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


def _register(operation: str, module: str, values: Callable[[Any], Any]) -> None:
    from scree import register_kernel

    absent = None if find_spec("triton") else "the Triton kernels need the package triton: pip install 'scree[triton]'"

    def rejects(call: Any) -> str | None:
        import torch

        x = values(call)
        if not isinstance(x, torch.Tensor):
            return "the Triton kernels take torch tensors"
        if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"the Triton kernels run on CUDA devices, not on {x.device.type!r}"
        return absent or import_module(f".{module}", __name__).rejects(call)  # type: ignore[no-any-return]

    @register_kernel(operation, provider="triton", rejects=rejects)
    def run(call: Any) -> Any:
        kernels = import_module(f".{module}", __name__)
        return getattr(kernels, operation if hasattr(kernels, operation) else "run")(call)
