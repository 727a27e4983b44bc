"""PyTorch: pytree registration and `segment_reduce`; attention stands in `torch_attention`."""

from contextlib import AbstractContextManager, nullcontext

import array_api_compat.torch as xp
import numpy as np
import torch
import torch.utils._pytree as pytree

from ..array import Array
from ..registry import register_kernel
from ..segments import SegmentCall, identity
from . import Backend


def _peek(x: torch.Tensor) -> np.ndarray | None:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.device.type != "cpu":
        return None
    return np.asarray(x.detach())


def _read(x: torch.Tensor) -> np.ndarray:
    if torch.compiler.is_compiling():
        raise TypeError("the size of this result depends on the offsets, which a compiled function cannot read")
    return np.asarray(x.detach().cpu())


def _row_ids(repeats: torch.Tensor, total: int) -> torch.Tensor:
    return torch.repeat_interleave(repeats, output_size=total)


def _uniform(key: torch.Generator, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if not isinstance(key, torch.Generator):
        raise TypeError(f"key: expected a torch.Generator, got {type(key).__name__}")
    return torch.rand(shape, generator=key, device=like.device)


def _outside(offsets: torch.Tensor) -> AbstractContextManager[None]:
    """Inference mode makes tensors that no later backward pass may keep."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() and not offsets.is_inference() else nullcontext()


BACKEND = Backend("torch", xp, _peek, _read, row_ids=_row_ids, uniform=_uniform,
                  compiling=torch.compiler.is_compiling, outside=_outside, to_device=lambda x, device: x.to(device))

pytree.register_pytree_node(
    Array,
    lambda x: ((x.values, x.offsets), (x.ragged_dim, x.max_length)),
    lambda children, static: Array._restore(*children, *static),
    serialized_type_name="scree.Array",
)


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "segment_reduce takes torch tensors only"
    if call.values.device.type != "cpu":
        return "segment_reduce checks its offsets on the host, which would stop the device"
    if call.op not in ("sum", "prod", "max", "min") or call.dtype not in (torch.float32, torch.float64):
        return f"segment_reduce has no {call.op} of {call.dtype}"
    return None


@register_kernel("segment_reduce", provider="torch", rejects=_rejects)
def segment_reduce(call: SegmentCall) -> torch.Tensor:
    """Row reductions by `torch.segment_reduce`."""
    return torch.segment_reduce(
        call.converted.contiguous(), call.op, offsets=call.layout.offsets.to(torch.int64), axis=0, unsafe=True,
        initial=identity(xp, call.op, call.dtype),
    )


from ..namespace import build  # noqa: E402
from . import torch_attention  # noqa: E402, F401 (registers its kernel)

build(BACKEND)  # now, because the first call may stand in a compiled function, where no module can be made
