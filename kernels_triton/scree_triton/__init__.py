"""CUDA kernels for scree, written in Triton. Importing this package imports neither torch nor Triton."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: Operation -> the module and function that run it, and the values of a call. The module's `rejects` answers for it; where the
#: module has a function `prepare_<name>`, that function prepares a call for later calls with the same guard.
KERNELS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "attention": ("attention.interface", "run", lambda call: call.q.values),
    "cross_entropy": ("losses.cross_entropy", "run", lambda call: call.values),
    "gather": ("layout.interface", "run_gather", lambda call: call.x),
    "grouped_matmul": ("gemm.grouped", "run", lambda call: call.x.values),
    "join": ("layout.interface", "run_join", lambda call: call.arrays[0].values),
    "layer_norm": ("norms.norms", "layer_norm", lambda call: call.values),
    "linear_cross_entropy": ("losses.linear_cross_entropy", "run", lambda call: call.values),
    "log_softmax": ("segments.softmax", "log_softmax", lambda call: call.x.values),
    "logsumexp": ("segments.softmax", "logsumexp", lambda call: call.x.values),
    "mark": ("layout.scatter_indices", "run", lambda call: call.mask),
    "offsets": ("layout.offsets", "run", lambda call: call.lengths),
    "pad": ("layout.interface", "run_pad", lambda call: call.x.values),
    "rms_norm": ("norms.norms", "rms_norm", lambda call: call.values),
    "rope": ("norms.rope", "run", lambda call: call.x.values),
    "scatter": ("layout.interface", "run_scatter", lambda call: call.x),
    "segment_arg": ("segments.argmax", "run", lambda call: call.values),
    "segment_mean": ("segments.interface", "run", lambda call: call.values),
    "segment_reduce": ("segments.interface", "run", lambda call: call.values),
    "segment_scan": ("segments.scan", "run", lambda call: call.values),
    "select": ("layout.interface", "run_select", lambda call: call.x.values),
    "softmax": ("segments.softmax", "softmax", lambda call: call.x.values),
    "swiglu": ("norms.swiglu", "run", lambda call: call.values),
    "unpad": ("layout.interface", "run_unpad", lambda call: call.x),
}


def register() -> None:
    """Register the kernels with scree where they can run; called through the entry-point group ``scree.kernels``.

    They run on CUDA devices, and with the environment variable ``TRITON_INTERPRET=1`` on the CPU.
    """
    import torch

    if not find_spec("triton") or not (torch.cuda.is_available() or _interpreted()):
        return
    for operation, (module, function, values) in KERNELS.items():
        # Imported now, because the first call may stand in a compiled function.
        _register(operation, import_module(f".{module}", __name__), function, values)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _register(operation: str, kernels: Any, function: str, values: Callable[[Any], Any]) -> None:
    import torch

    from scree import register_kernel

    def rejects(call: Any) -> str | None:
        x = values(call)
        if not isinstance(x, torch.Tensor):
            return "the Triton kernels take torch tensors"
        if not (x.is_cuda or _interpreted()):
            return f"the Triton kernels run on CUDA devices, not on {x.device.type!r}"
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return "the Triton kernels run under no transform of torch.func, such as vmap"
        return kernels.rejects(call)  # type: ignore[no-any-return]

    register_kernel(
        operation,
        provider="triton",
        rejects=rejects,
        prepare=getattr(kernels, f"prepare_{function}", None),
    )(getattr(kernels, function))
