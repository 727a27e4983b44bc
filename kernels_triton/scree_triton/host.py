"""What the kernels beside attention share on the host side."""
from functools import cache
from typing import Any

import torch

from .launch import INTERPRETED, Launch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Kernel:
    """A Triton kernel with a `Launch` for each device, dtypes of its pointers and constants that it has met.

    The parameters of the jitted function come in the order that `Launch` asks for.
    """

    __slots__ = ("jitted", "launches")

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.launches: dict[tuple, Launch] = {}

    def __call__(self, programs: int, pointers: tuple[torch.Tensor, ...], strides: tuple[int, ...],
                 numbers: tuple[int | float, ...], constants: dict[str, Any], warps: int = 4) -> None:
        """Launch on the device of the pointers; nothing happens for 0 programs."""
        device = pointers[0].device
        if programs == 0:
            return
        if not INTERPRETED and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, pointers, strides, numbers, constants, warps)
        key = (device, warps, *[x.dtype for x in pointers], *constants.values())
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = Launch(self.jitted, constants, dict(num_warps=warps))
        found(programs, pointers, strides, numbers)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of the largest size run at once; a few in the interpreter."""
    return 3 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def refuses(x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Why no kernel takes a tensor of this dtype; None if it does."""
    if x.dtype not in dtypes:
        return f"the Triton kernels take {', '.join(str(d)[6:] for d in dtypes)} here, not {str(x.dtype)[6:]}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None
