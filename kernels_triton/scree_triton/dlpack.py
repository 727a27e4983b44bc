"""The Triton kernels of PyTorch for CuPy: arrays pass by DLPack, without copies.

Importing this module imports neither torch nor CuPy. The kernels need torch and Triton.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from scree import Array
from scree.backends import backend, is_array
from scree.dispatch.operation import OBSERVERS
from scree.layout import Layout

from . import KERNELS, KernelEntry
from .runtime.calls import attributes_of, copy_call

PROVIDER = "triton_dlpack"
#: The libraries that are served.
LIBRARIES = {"cupy"}
OPERATIONS = (
    "attention", "cross_entropy", "layer_norm", "linear_cross_entropy", "log_softmax", "logsumexp",
    "paged_attention", "rms_norm", "rope", "segment_arg", "segment_mean", "segment_reduce",
    "segment_scan", "softmax", "swiglu",
)  # fmt: skip
#: Layout -> the same layout in PyTorch. Its cache has the tile schedules of the kernels.
_layouts: WeakKeyDictionary[Layout, Layout] = WeakKeyDictionary()


class _Converted(NamedTuple):
    """A call in PyTorch."""

    call: Any
    layouts: dict[int, Layout]
    """Identity of offsets in PyTorch -> the layout of the original call."""


class _State(threading.local):
    call: Any = None
    converted: _Converted | None = None


#: The call that this thread accepted and will run next, and the same call in PyTorch.
_accepted = _State()


def register() -> None:
    """Register the kernels with scree, if torch and Triton are installed and torch has a device.

    scree calls this function through the entry-point group ``scree.kernels``.
    """
    from scree import register_kernel

    if not (find_spec("triton") and find_spec("torch")) or not _runs_here():
        return
    for name in OPERATIONS:
        entry = KERNELS[name]
        kernels = import_module(f".{entry.module}", __package__)
        function = getattr(kernels, entry.function or name)
        register_kernel(name, provider=PROVIDER, rejects=partial(rejects, entry, kernels.rejects))(
            partial(run, entry, function)
        )


def _runs_here() -> bool:
    import torch

    return torch.cuda.is_available()


def rejects(entry: KernelEntry, rejects_call: Callable[[Any], str | None], call: Any) -> str | None:
    """Return why the kernels cannot serve a call, from host metadata only; None if they can.

    `rejects_call` says the same of calls in PyTorch.
    """
    from .runtime.device import rejects_device

    if backend(entry.values(call)).name not in LIBRARIES:
        return f"the Triton kernels by DLPack take arrays of {' and '.join(sorted(LIBRARIES))}"
    try:
        converted = _to_torch(call)
    # A library raises one of these for a dtype or a device that the other lacks.
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        return f"the Triton kernels need arrays that PyTorch takes by DLPack, but {error}"
    if converted is None:
        return "the Triton kernels by DLPack take no shards"
    device = entry.values(converted.call).device
    reason = rejects_device(device) or rejects_call(converted.call)
    # `scree.explain` selects a kernel and does not run it, so nothing would release the arrays.
    if reason is None and threading.get_ident() not in OBSERVERS:
        _accepted.call, _accepted.converted = call, converted
    return reason


def run(entry: KernelEntry, function: Callable[[Any], Any], call: Any) -> Any:
    """Compute a call for which `rejects` returns None, on the current stream of its library.

    `function` computes a call in PyTorch.
    """
    converted = _accepted.converted if _accepted.call is call else _to_torch(call)
    _accepted.call = _accepted.converted = None
    lib, layouts = backend(entry.values(call)), converted.layouts

    def result_of(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(result_of, x))
        if isinstance(x, Array):
            return Array.from_layout(
                lib.xp.from_dlpack(x.values), layouts[id(x.offsets)], x.ragged_dim
            )
        return lib.xp.from_dlpack(x)

    with _on_stream_of(lib.name, entry.values(converted.call).device):
        return result_of(function(converted.call))


def _layouts_of(call: Any) -> list[Layout]:
    values = (getattr(call, name) for name in attributes_of(type(call)))
    return [
        x.layout if isinstance(x, Array) else x for x in values if isinstance(x, Array | Layout)
    ]


def _to_torch(call: Any) -> _Converted | None:
    """Return the call with arrays of PyTorch in the same memory, as `_Converted`; None if it has shards."""
    import torch

    layouts = _layouts_of(call)
    if any(layout.cut is not None for layout in layouts):
        return None

    converted: dict[int, Any] = {}

    def convert(x: Any) -> Any:
        # Kernels compare attributes by identity.
        if id(x) not in converted:
            converted[id(x)] = convert_once(x)
        return converted[id(x)]

    def convert_once(x: Any) -> Any:
        if isinstance(x, Array):
            return Array.from_layout(convert(x.values), _to_layout(x.layout), x.ragged_dim)
        if isinstance(x, Layout):
            return _to_layout(x)
        if isinstance(x, np.dtype | type):
            return getattr(torch, np.dtype(x).name)
        return torch.from_dlpack(x) if is_array(x) else x

    converted_call = copy_call(call, convert)
    return _Converted(converted_call, {id(_to_layout(x).offsets): x for x in layouts})


def _to_layout(layout: Layout) -> Layout:
    import torch

    converted = _layouts.get(layout)
    if converted is None:
        offsets = torch.from_dlpack(layout.offsets)
        converted = _layouts[layout] = Layout(
            backend(offsets), offsets, layout.total, layout.max_length, layout.host_offsets
        )
    return converted


def _on_stream_of(library: str, device: Any) -> AbstractContextManager[Any]:
    """Return the context in which PyTorch uses the current stream of a library.

    Then memory that one library frees and reuses is ordered after the kernels of the other.
    """
    import torch

    if library != "cupy" or device.type != "cuda":
        return nullcontext()
    import cupy

    stream = cupy.cuda.get_current_stream(device.index).ptr
    if stream == torch.cuda.current_stream(device).cuda_stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
