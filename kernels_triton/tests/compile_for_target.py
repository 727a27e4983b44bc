"""Compile the kernels of every call for a compute capability, without a GPU.

Usage: compile_for_target.py CAPABILITY [CALL ...], for instance ``compile_for_target.py 80``. The
kernels are compiled to machine code by the assembler that Triton brings, and not run.
"""

import sys
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

#: Compute capability -> bytes of shared memory that one CTA can have.
SHARED_MEMORY = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip

#: Attention, forward and backward, for the widths whose tiles fill the shared memory.
HEAD_DIMS = "head_dims"
HEAD_DIM_SIZES = {torch.bfloat16: (128, 256), torch.float32: (64, 256)}


class Driver:
    """The part of Triton's driver that compilation needs."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def prepare(capability: int, compiled: list[str]) -> None:
    """Make scree believe in a GPU, and compile where it launches."""
    triton.runtime.driver.set_active(Driver(capability))
    torch.cuda.is_current_stream_capturing = lambda: True
    from scree_triton.runtime import device, launch

    record = device.Device(
        "nvidia", divmod(capability, 10), 108, SHARED_MEMORY[capability], 40 << 20
    )
    device.device_info = lambda _: record
    device.rejects_device = lambda _: None
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        used = kernel.metadata.shared
        if used > SHARED_MEMORY[capability]:
            raise RuntimeError(f"{self.__name__} needs {used} bytes of shared memory")
        seconds = time.perf_counter() - start
        if seconds > 0.05:
            compiled.append(self.__name__)
            print(f"{self.__name__}: {used} bytes of shared memory, {seconds:.1f} s", flush=True)
        return kernel

    JITFunction.run = compile_only
    launch.device_info = device.device_info
    launch.Launch._keep = lambda *args: None


def main() -> None:
    capability, *names = sys.argv[1:]
    compiled: list[str] = []
    prepare(int(capability), compiled)
    from program_calls import CALLS, LENGTHS, make_inputs, run

    import scree
    import scree_triton
    from scree.dispatch import registry
    from scree_triton.attention import launch_configs

    with registry.isolated():
        scree_triton.find_spec, scree_triton._interpreted = lambda _: True, lambda: True
        scree_triton.register()
        for dtype in (torch.bfloat16, torch.float32):
            inputs = make_inputs("cpu", dtype)
            # Tiles depend on the size of an element in products only.
            both = ("grouped_product", "linear_cross_entropy")
            chosen = [*CALLS, HEAD_DIMS] if dtype == torch.bfloat16 else [*both, HEAD_DIMS]
            for name in [name for name in chosen if not names or name in names]:
                print(f"# {name}, {dtype}", flush=True)
                if name != HEAD_DIMS:
                    run(name, inputs)
                    continue
                for dim in HEAD_DIM_SIZES[dtype]:
                    values = torch.randn(sum(LENGTHS), 2, dim, dtype=dtype, requires_grad=True)
                    x = inputs.array(values)
                    # Equal options would take the launch config of the first call.
                    for launch_configs.MANY_ROWS, left in ((1 << 30, 100), (1, 101)):
                        out = scree.attention(x, x, x, causal=True, window=(left, None))
                        out.values.sum().backward()
    print(f"{len(compiled)} kernels", flush=True)


if __name__ == "__main__":
    main()
