"""PyTorch: registration of ragged arrays as pytrees, operators with tensors, and two kernels.

The kernels are `torch.segment_reduce` and `torch.split_with_sizes`.
"""

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..array import Array, restore
from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.segment import MAX_SEQUENTIAL, SegmentCall, identity
from ..ops.split import SplitCall

xp = BACKEND.xp

pytree.register_pytree_node(
    Array,
    lambda x: ((x.values, x.offsets), (x.ragged_dim, x.max_length, x.shard_layout)),
    lambda children, static: Array.from_leaves(*children, *static),
    serialized_type_name="scree.Array",
)
torch.serialization.add_safe_globals([restore])  # `torch.load` with weights_only, its default


#: Method of a tensor -> function of the standard, and whether its arguments are swapped.
TENSOR_METHODS = {
    "add": ("add", False), "mul": ("multiply", False), "sub": ("subtract", False), "__rsub__": ("subtract", True),
    "div": ("divide", False), "__rdiv__": ("divide", True), "__floordiv__": ("floor_divide", False),
    "__rfloordiv__": ("floor_divide", True), "remainder": ("remainder", False), "__rmod__": ("remainder", True),
    "pow": ("pow", False), "__rpow__": ("pow", True), "__eq__": ("equal", False), "eq": ("equal", False),
    "ne": ("not_equal", False), "lt": ("less", False), "le": ("less_equal", False), "gt": ("greater", False),
    "ge": ("greater_equal", False), "__and__": ("bitwise_and", False), "bitwise_and": ("bitwise_and", False),
    "__or__": ("bitwise_or", False), "bitwise_or": ("bitwise_or", False), "__xor__": ("bitwise_xor", False),
    "bitwise_xor": ("bitwise_xor", False), "__lshift__": ("bitwise_left_shift", False),
    "__rlshift__": ("bitwise_left_shift", True), "__rshift__": ("bitwise_right_shift", False),
    "__rrshift__": ("bitwise_right_shift", True), "matmul": ("matmul", False), "__rmatmul__": ("matmul", True),
}  # fmt: skip


def _torch_function(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Compute an operator between a tensor and a ragged array, the tensor first.

    Python calls the reflected method of `Array` itself; Dynamo calls this function. Dynamo swaps
    the arguments where the tensor is second, and passes the reflected method.
    """
    method = TENSOR_METHODS.get(func.__name__)
    if method is None:
        raise TypeError(
            f"{func.__name__} of torch takes no ragged arrays: use a function of scree.namespace(arr), or give the tokens to it, "
            "arr.with_values(f(arr.values))"
        )
    if not torch.compiler.is_compiling():
        return NotImplemented
    name, is_swapped = method
    function = getattr(args[1].__array_namespace__(), name)
    return function(args[1], args[0]) if is_swapped else function(args[0], args[1])


class _TorchFunction:
    """The attribute `Array.__torch_function__`, which Dynamo reads before it traces an operator.

    Dynamo's table of reflected operators lacks ``matmul``: it passes the same method for ``arr @ w``
    and ``w @ arr``. The table is completed here, as importing Dynamo takes seconds.
    """

    def __get__(self, arr: Any, cls: type) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            dynamo = sys.modules.get("torch._dynamo.variables.builtin")
            table = getattr(dynamo, "BUILTIN_TO_TENSOR_RFN_MAP", {})
            table.setdefault(operator.matmul, torch.Tensor.__rmatmul__)
        return _torch_function


Array.__torch_function__ = _TorchFunction()  # type: ignore[attr-defined]  # only PyTorch reads it


def _rejects_reduction(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "segment_reduce takes torch tensors only"
    if call.values.device.type != "cpu":
        return "segment_reduce checks its offsets on the host, which would stop the device"
    if call.op not in ("sum", "max", "min") or call.accumulation_dtype not in (
        torch.float32,
        torch.float64,
    ):
        return f"segment_reduce has no {call.op} of {call.dtype}"
    if call.op == "sum" and call.layout.max_length_bound > MAX_SEQUENTIAL:
        return f"segment_reduce adds one number after the other, which is less exact than a tree in rows beyond {MAX_SEQUENTIAL}"
    return None


@register_kernel("segment_reduce", provider="torch", rejects=_rejects_reduction)
def segment_reduce(call: SegmentCall) -> torch.Tensor:
    """Reduce rows by `torch.segment_reduce`."""
    return _SegmentReduce.apply(
        call.converted.contiguous(),
        call.layout.offsets.to(torch.int64),
        call.op,
        identity(xp, call.op, call.accumulation_dtype),
    )


def _rejects_split(call: SplitCall) -> str | None:
    return None if isinstance(call.values, torch.Tensor) else "split takes torch tensors only"


def _prepare_split(call: SplitCall) -> Callable[..., tuple[Any, ...]]:
    sizes, axis = list(call.sizes), call.values_axis
    if not isinstance(call.x, Array):
        return lambda x: tuple(torch.split_with_sizes(x, sizes, axis))

    def run(x: Array) -> tuple[Array, ...]:
        parts = torch.split_with_sizes(x.values, sizes, axis)
        return tuple([Array.from_layout(part, x.layout, x.ragged_dim) for part in parts])

    return run


@register_kernel("split", provider="torch", rejects=_rejects_split, prepare=_prepare_split)
def split(call: SplitCall) -> tuple[Any, ...]:
    """Split by `torch.split`, whose backward pass is one copy."""
    return _prepare_split(call)(call.x)


class _SegmentReduce(torch.autograd.Function):
    """`torch.segment_reduce` with a differentiable backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: torch.Tensor, offsets: torch.Tensor, op: str, empty: float) -> torch.Tensor:
        return torch.segment_reduce(values, op, offsets=offsets, axis=0, unsafe=True, initial=empty)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        values, offsets, ctx.op, _ = inputs
        ctx.total = values.shape[0]
        ctx.save_for_backward(offsets, *((values, output) if ctx.op != "sum" else ()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        offsets, *values_and_extrema = ctx.saved_tensors
        segment_ids = Layout(BACKEND, offsets, ctx.total).segment_ids

        def per_token(x: torch.Tensor) -> torch.Tensor:
            """Return the entry of each token's row; 0 for the tail."""
            with_tail = torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
            return torch.index_select(with_tail, 0, segment_ids)

        if ctx.op == "sum":
            return per_token(grad), None, None, None
        # All tokens equal to the extremum share its gradient.
        values, extrema = values_and_extrema
        is_extremum = values == per_token(extrema)
        zeros = grad.new_zeros((grad.shape[0] + 1, *grad.shape[1:]))
        counts = zeros.index_add(0, segment_ids, is_extremum.to(grad.dtype))[:-1]
        token_grad = torch.where(is_extremum, per_token(grad / counts.clamp(min=1)), 0.0)
        return token_grad, None, None, None
