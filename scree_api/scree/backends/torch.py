"""PyTorch: pytree registration and `segment_reduce`; attention stands in `torch_attention`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._C._functorch import get_unwrapped, is_gradtrackingtensor, peek_interpreter_stack
from torch._C._functorch import is_functorch_wrapped_tensor as wrapped
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.checkpoint import checkpoint

from ..array import Array
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.segment import LONGEST, SegmentCall, identity
from ..ops.split import SplitCall
from . import UNREADABLE, Backend

_AT_ONCE = 1 << 16  # bytes that CUDA takes along with the call


def _peek(x: torch.Tensor) -> np.ndarray | None:
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or x.device.type != "cpu"
        or wrapped(x)
    ):
        return None
    with _outside(x):
        return np.asarray(x)


def _read(x: torch.Tensor) -> np.ndarray:
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    if torch.compiler.is_compiling() or wrapped(x):
        raise TypeError(UNREADABLE)
    with _outside(x):
        if x.device.type != "cuda" or x.nbytes > _AT_ONCE:
            return np.asarray(x.detach().cpu())
        host = (
            x.detach().to("cpu", non_blocking=True).numpy()
        )  # pinned: the copy to other memory takes CUDA 15 us longer
        torch.cuda.current_stream(x.device).synchronize()
        return host.copy()


def _row_ids(repeats: torch.Tensor, total: int) -> torch.Tensor:
    return torch.repeat_interleave(repeats, output_size=total)


def _uniform(key: torch.Generator, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if not isinstance(key, torch.Generator):
        raise TypeError(f"key: expected a torch.Generator, got {type(key).__name__}")
    return torch.rand(shape, generator=key, device=like.device)


@contextmanager
def _plainly() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        yield


def _outside(offsets: torch.Tensor) -> AbstractContextManager[None]:
    """Transforms wrap all that is computed inside of them, and inference mode makes tensors that no backward pass may keep."""
    if torch.compiler.is_compiling() or wrapped(offsets) or offsets.is_inference():
        return nullcontext()
    return (
        _plainly()
        if torch.is_inference_mode_enabled() or peek_interpreter_stack()
        else nullcontext()
    )


def _checkpoint(f: Callable[..., Any]) -> Callable[..., Any]:
    """Not inside of torch.func, which has no hooks on what a backward pass keeps."""
    if not torch.compiler.is_compiling() and peek_interpreter_stack():
        return f
    return partial(checkpoint, f, use_reentrant=False, preserve_rng_state=False)


def _place(host: np.ndarray, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """On its way to a GPU much is pinned: a copy of more than 64 KB from other memory waits for all that the GPU has to do."""
    if device is None or torch.device(device).type != "cuda" or torch.compiler.is_compiling():
        return xp.asarray(host, dtype=dtype, device=device)
    found = torch.asarray(host, dtype=dtype)
    if (
        found.nbytes > _AT_ONCE or torch.cuda.is_current_stream_capturing()
    ):  # a graph reads it later
        found = found.pin_memory()
    return found.to(device, non_blocking=True)


def _traits(x: Any) -> tuple[Any, ...]:
    return type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad


def _alike(arrays: list[torch.Tensor]) -> Callable[..., bool]:
    """What compiled code of PyTorch asks before it runs, in C; but it answers no where a tensor comes twice."""
    if _GUARDS and len({*map(id, arrays)}) == len(arrays):
        return _GUARDS(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    traits = [_traits(x) for x in arrays]
    return lambda *others: (
        all(isinstance(x, torch.Tensor) for x in others) and [*map(_traits, others)] == traits
    )


def _guards() -> Any:
    """The class, where it is there and does as is known here."""
    guards, x = getattr(torch._C._dynamo.guards, "TensorGuards", None), torch.empty(1)
    try:
        return (
            guards
            if guards is not None
            and guards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check(x)
            else None
        )
    except TypeError:
        return None


_GUARDS = _guards()

BACKEND = Backend(
    "torch",
    xp,
    _peek,
    _read,
    row_ids=_row_ids,
    uniform=_uniform,
    place=_place,
    checkpoint=_checkpoint,
    gather=lambda x, axis, index: torch.gather(x, axis, index.to(torch.int64)),
    compiling=torch.compiler.is_compiling,
    outside=_outside,
    to_device=lambda x, device: x.to(device),
    alike=_alike,
)

pytree.register_pytree_node(
    Array,
    lambda x: ((x.values, x.offsets), (x.ragged_dim, x.max_length)),
    lambda children, static: Array._restore(*children, *static),
    serialized_type_name="scree.Array",
)


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


def _operator(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """An operator between a tensor and a ragged array, the tensor first. Python finds ours by itself; Dynamo asks here.

    Dynamo changes the places of both arguments where the tensor stands second, and does not say so for ``matmul``; a tensor
    times a ragged array is no product, so that it can only be that.
    """
    known = METHODS.get(func.__name__)
    if known is None:
        raise TypeError(
            f"{func.__name__} of torch takes no ragged arrays: use a function of scree.namespace(arr), or give the tokens to it, "
            "arr.with_values(f(arr.values))"
        )
    if not torch.compiler.is_compiling():
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
    if call.op not in ("sum", "max", "min") or call.wide not in (torch.float32, torch.float64):
        return f"segment_reduce has no {call.op} of {call.dtype}"
    if call.op == "sum" and call.layout.bound > LONGEST:
        return f"segment_reduce adds one number after the other, which is less exact than a tree in rows beyond {LONGEST}"
    return None


@register_kernel("segment_reduce", provider="torch", rejects=_rejects)
def segment_reduce(call: SegmentCall) -> torch.Tensor:
    """Row reductions by `torch.segment_reduce`."""
    return _Reduce.apply(
        call.converted.contiguous(),
        call.layout.offsets.to(torch.int64),
        call.op,
        identity(xp, call.op, call.wide),
    )


def _not_torch(call: SplitCall) -> str | None:
    return None if isinstance(call.values, torch.Tensor) else "split takes torch tensors only"


def _prepare_split(call: SplitCall) -> Callable[..., tuple[torch.Tensor, ...]]:
    sizes, place = list(call.sizes), call.place
    return lambda x: torch.split_with_sizes(x.values, sizes, place)


@register_kernel("split", provider="torch", rejects=_not_torch, prepare=_prepare_split)
def split(call: SplitCall) -> tuple[torch.Tensor, ...]:
    """`torch.split`, whose backward pass is one copy."""
    return torch.split(call.values, list(call.sizes), call.place)


class _Reduce(torch.autograd.Function):
    """`torch.segment_reduce` with a backward pass that can be differentiated in its turn."""

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
        offsets, *kept = ctx.saved_tensors
        rows = Layout(BACKEND, offsets, ctx.total).segment_ids

        def per_token(x: torch.Tensor) -> torch.Tensor:
            """What belongs to the row of each token; 0 behind the last row."""
            return torch.index_select(torch.cat([x, x.new_zeros((1, *x.shape[1:]))]), 0, rows)

        if ctx.op == "sum":
            return per_token(grad), None, None, None
        values, best = kept  # those that share the maximum share its gradient
        chosen = values == per_token(best)
        shares = grad.new_zeros((grad.shape[0] + 1, *grad.shape[1:])).index_add(
            0, rows, chosen.to(grad.dtype)
        )[:-1]
        return torch.where(chosen, per_token(grad / shares.clamp(min=1)), 0.0), None, None, None


from ..namespace import build  # noqa: E402
from ..providers import torch_attention, torch_cross_entropy  # noqa: E402, F401 (register their kernels)

build(
    BACKEND
)  # now, because the first call may stand in a compiled function, where no module can be made
