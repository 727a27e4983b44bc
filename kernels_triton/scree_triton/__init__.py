"""CUDA kernels for scree, written in Triton. Importing this package imports neither torch nor Triton."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class KernelEntry:
    """Location of the kernel of one operation.

    The module offers three functions. ``rejects(call)`` returns why the kernel does not support a
    call, or None. ``<function>(call)`` computes it. ``prepare_<function>(call)`` is optional. It
    returns a function for later calls with the same guard. ``note(call)`` is optional too. It returns
    why a faster variant does not run, or None.
    """

    module: str
    """Name of the module, relative to this package."""
    values: Callable[[Any], Any]
    """Returns the array of a call whose type and device decide whether the kernel can run."""
    function: str | None = None
    """Name of the function in the module; by default the name of the operation."""


#: The kernel of each operation.
KERNELS: dict[str, KernelEntry] = {
    "append_paged": KernelEntry("attention.append_paged", lambda call: call.k.values),
    "attention": KernelEntry("attention.interface", lambda call: call.q.values, "run"),
    "attention_gradient": KernelEntry("attention.gradient", lambda call: call.attention.q.values),
    "cross_entropy": KernelEntry("losses.cross_entropy", lambda call: call.values),
    "gather": KernelEntry("layout.interface", lambda call: call.values, "gather"),
    "grouped_matmul": KernelEntry("gemm.grouped", lambda call: call.x.values),
    "join": KernelEntry("layout.interface", lambda call: call.arrays[0].values, "join"),
    "layer_norm": KernelEntry("norms.norms", lambda call: call.values),
    "linear_cross_entropy": KernelEntry("losses.linear_cross_entropy", lambda call: call.values),
    "log_softmax": KernelEntry("segments.softmax", lambda call: call.x.values),
    "logsumexp": KernelEntry("segments.softmax", lambda call: call.x.values),
    "mark": KernelEntry("layout.scatter_indices", lambda call: call.mask),
    "merge_attention": KernelEntry("attention.merge", lambda call: call.values),
    "offsets": KernelEntry("layout.offsets", lambda call: call.lengths),
    "pad": KernelEntry("layout.interface", lambda call: call.arr.values, "pad"),
    "paged_attention": KernelEntry("attention.paged", lambda call: call.q.values),
    "rms_norm": KernelEntry("norms.norms", lambda call: call.values),
    "rope": KernelEntry("norms.rope", lambda call: call.x.values),
    "scatter": KernelEntry("layout.interface", lambda call: call.values, "scatter"),
    "segment_arg": KernelEntry("segments.argmax", lambda call: call.values),
    "segment_mean": KernelEntry("segments.interface", lambda call: call.values, "segment_reduce"),
    "segment_reduce": KernelEntry("segments.interface", lambda call: call.values),
    "segment_scan": KernelEntry("segments.scan", lambda call: call.values),
    "select": KernelEntry("layout.interface", lambda call: call.x.values, "select"),
    "softmax": KernelEntry("segments.softmax", lambda call: call.x.values),
    "swiglu": KernelEntry("norms.swiglu", lambda call: call.values),
    "unpad": KernelEntry("layout.interface", lambda call: call.padded, "unpad"),
}


def register() -> None:
    """Register the kernels with scree, if they can run.

    scree calls this function through the entry-point group ``scree.kernels``. The kernels run on
    CUDA devices, and with the environment variable ``TRITON_INTERPRET=1`` on the CPU.
    """
    import torch

    if not find_spec("triton") or not (torch.cuda.is_available() or _interpreted()):
        return
    for operation, entry in KERNELS.items():
        # Imported now, because the first call may be inside a compiled function.
        _register(operation, entry, import_module(f".{entry.module}", __name__))
    import_module(".runtime.compile", __name__).support_dtensor()
    offer_flash_attention()


def offer_flash_attention() -> None:
    """Offer the attention kernels to ``torch.nn.attention.activate_flash_attention_impl("scree")``.

    PyTorch has this function since 2.11. Nothing changes before the program calls it.
    """
    from torch.nn import attention

    offer = getattr(attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer("scree", register_fn=_activate_flash_attention)


def _activate_flash_attention() -> Any:
    return import_module(".attention.flash_backend", __name__).register_operators()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _register(operation: str, entry: KernelEntry, kernels: Any) -> None:
    import torch

    from scree import register_kernel
    from scree.backends import backend

    from .runtime.device import rejects_device
    from .runtime.fallback import fallback_note

    function = entry.function or operation

    def rejects(call: Any) -> str | None:
        x = entry.values(call)
        if not isinstance(x, torch.Tensor):
            return "the Triton kernels take torch tensors"
        if reason := rejects_device(x.device):
            return reason
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return "the Triton kernels run under no transform of torch.func, such as vmap"
        if backend(x).is_forward_mode():
            return "the Triton kernels compute no tangents, so forward mode needs the standard path"
        return kernels.rejects(call)

    def note(call: Any) -> str | None:
        # A kernel that is unavailable is worse news than one that is not the fastest.
        return fallback_note(kernels.__name__, entry.values(call).dtype) or variant_note(call)

    variant_note = getattr(kernels, "note", lambda call: None)
    register_kernel(
        operation,
        provider="triton",
        rejects=rejects,
        prepare=getattr(kernels, f"prepare_{function}", None),
        note=note,
    )(getattr(kernels, function))
