"""What the kernels share on the host side."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch

from .launch import INTERPRETED, Launch, current_device

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_device_count = cache(
    torch.cuda.device_count
)  # asked where there is a tensor on a device, so that it stays


def on_device(index: int | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, on the CUDA device of this index, whichever is the current one; None where it runs on no such device."""

    def there(*args: Any) -> Any:
        if index == current_device():
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return there if index is not None and _device_count() > 1 else run


def start(
    launch: Launch,
    programs: int,
    pointers: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    numbers: tuple[int | float, ...],
    *described: Any,
) -> None:
    """Launch on the device of the pointers."""
    on_device(pointers[0].device.index, launch)(programs, pointers, strides, numbers, *described)


def on_its_device(run: Callable[..., Any]) -> Any:
    """A method of a plan, run so on the device of the plan's `index`."""
    return cached_property(lambda plan: on_device(plan.index, run.__get__(plan)))


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must hear of what is done to the tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class Function(torch.autograd.Function):
    """A function for autograd whose `apply` goes the short way where no transform of `torch.func` is active."""

    def __init_subclass__(cls) -> None:
        cls._short = super(torch.autograd.Function, cls).apply

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The results of `forward`, known to autograd."""
        return (super().apply if torch._C._are_functorch_transforms_active() else cls._short)(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of this name of `torch.autograd.function`, whose way is long, taken where `create_graph` asks for it."""
    refusing = torch.autograd.function.once_differentiable(backward)
    return lambda ctx, *grads: (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of the largest size run at once; a few in the interpreter."""
    return 3 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def follows(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended, whose end it waits for itself."""
    return (
        not INTERPRETED
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def refuses(x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Why no kernel takes a tensor of this dtype; None if it does."""
    if x.dtype not in dtypes:
        return f"the Triton kernels take {', '.join(str(d)[6:] for d in dtypes)} here, not {str(x.dtype)[6:]}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None
