"""PyTorch: pytree registration and `segment_reduce`; attention stands in `torch_attention`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or offsets.is_inference():
        return nullcontext()
    return torch.inference_mode(False)


BACKEND = Backend("torch", xp, _peek, _read, row_ids=_row_ids, uniform=_uniform,
                  compiling=torch.compiler.is_compiling, outside=_outside, to_device=lambda x, device: x.to(device))

pytree.register_pytree_node(
    Array,
    lambda x: ((x.values, x.offsets), (x.ragged_dim, x.max_length)),
    lambda children, static: Array._restore(*children, *static),
    serialized_type_name="scree.Array",
)


LONGEST = 4096


#: A tensor's method -> the function of the standard that it is on ragged arrays, and whether its arguments change places.
METHODS = {
    "add": ("add", False), "mul": ("multiply", False), "sub": ("subtract", False), "__rsub__": ("subtract", True),
    "div": ("divide", False), "__rdiv__": ("divide", True), "__floordiv__": ("floor_divide", False),
    "__rfloordiv__": ("floor_divide", True), "remainder": ("remainder", False), "__rmod__": ("remainder", True),
    "pow": ("pow", False), "__rpow__": ("pow", True), "__eq__": ("equal", False), "eq": ("equal", False),
    "ne": ("not_equal", False), "lt": ("less", False), "le": ("less_equal", False), "gt": ("greater", False),
    "ge": ("greater_equal", False), "__and__": ("bitwise_and", False), "bitwise_and": ("bitwise_and", False),
    "__or__": ("bitwise_or", False), "bitwise_or": ("bitwise_or", False), "__xor__": ("bitwise_xor", False),
    "bitwise_xor": ("bitwise_xor", False), "__lshift__": ("bitwise_left_shift", False),
    "__rlshift__": ("bitwise_left_shift", True), "__rshift__": ("bitwise_right_shift", False),
    "__rrshift__": ("bitwise_right_shift", True), "matmul": ("matmul", True),
}  # fmt: skip


def _operator(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """An operator between a tensor and a ragged array, the tensor first. Python finds ours by itself; Dynamo asks here.

    Dynamo changes the places of both arguments where the tensor stands second, and does not say so for ``matmul``; a tensor
    times a ragged array is no product, so that it can only be that.
    """
    known = METHODS.get(func.__name__)
    if known is None or not torch.compiler.is_compiling():
        return NotImplemented
    name, swapped = known
    function = getattr(args[1].__array_namespace__(), name)
    return function(args[1], args[0]) if swapped else function(args[0], args[1])


Array.__torch_function__ = classmethod(_operator)  # type: ignore[attr-defined]


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "segment_reduce takes torch tensors only"
    if call.values.device.type != "cpu":
        return "segment_reduce checks its offsets on the host, which would stop the device"
    if call.op not in ("sum", "prod", "max", "min") or call.dtype not in (torch.float32, torch.float64):
        return f"segment_reduce has no {call.op} of {call.dtype}"
    if call.op == "sum" and call.layout.bound > LONGEST:
        return f"segment_reduce adds one number after the other, which is less exact than a tree in rows beyond {LONGEST}"
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
