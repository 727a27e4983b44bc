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

#: Attention, forward and backward, for the widths whose tiles fill the shared memory; for 9.0, every
#: Gluon kernel of attention.
HEAD_DIMS = "head_dims"
HEAD_DIM_SIZES = {torch.bfloat16: (96, 128, 160, 256), torch.float32: (64, 256)}
#: The same for the portable kernels. They pad a head to a power of two. So 96 has the tiles of 128, which
#: `LONG_ROWS` compiles, and 160 has the tiles of 256.
PORTABLE_HEAD_DIM_SIZES = {torch.bfloat16: (96, 256), torch.float32: (64, 256)}
#: Softmax of rows that clusters of CTAs process on 9.0; causal attention on one long row, with 16
#: query heads of one key head.
LONG_ROWS = "long_rows"
#: Attention of short rows that share tiles on 9.0.
SHORT_ROWS = "short_rows"
#: Attention of many queries per row to a paged cache on 9.0.
PAGED_PREFILL = "paged_prefill"
#: Pages of which a block of keys has several, or a part of one; mask and softcap.
PAGED_PREFILLS = (16, {"causal": False}), (16, {}), (256, {"window": 100, "softcap": 5.0})


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
    device.current_stream = lambda index: 1
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


def attend_long_row(dim: int, dtype: torch.dtype, query_heads: int = 16) -> None:
    """Compute attention on one long row, and its gradients; with one head, tiles are cut into chunks."""
    import scree

    q, k, v = (
        torch.randn(5000, heads, dim, dtype=dtype, requires_grad=True)
        for heads in (query_heads, 1, 1)
    )
    x = scree.Array(q, torch.tensor([0, 5000], dtype=torch.int32), max_length=5000)
    out = scree.attention(x, x.with_values(k), x.with_values(v), causal=True)
    out.values.sum().backward()


def attend_to_pages(page_size: int, options: dict[str, Any]) -> None:
    """Compute attention of many queries per row to a paged cache."""
    import scree

    table = scree.from_lengths(torch.arange(6, dtype=torch.int32), [2, 4])
    cache = torch.zeros(6, page_size, 2, 128, dtype=torch.bfloat16)
    q = scree.from_lengths(torch.zeros(50, 8, 128, dtype=torch.bfloat16), [20, 30])
    lengths = torch.tensor([2 * page_size, 4 * page_size], dtype=torch.int32)
    scree.paged_attention(q, cache, cache, table, lengths, return_lse=True, **options)


def main() -> None:
    capability, *names = sys.argv[1:]
    compiled: list[str] = []
    prepare(int(capability), compiled)
    from program_calls import CALLS, LENGTHS, make_inputs, run
    from stress import VARIANTS, Variant

    import scree
    import scree_triton
    from scree.dispatch import registry
    from scree_triton.attention import launch_configs
    from scree_triton.gemm import grouped

    def grouped_product(dtype: torch.dtype) -> None:
        """Compute products and gradients of short rows, and of one long row."""
        length = grouped.SHORT_ROWS
        long_row = scree.from_lengths(torch.zeros(length, 1), [length])
        for rows in (inputs.array(torch.zeros(sum(LENGTHS), 1)), long_row):
            x = torch.randn(rows.values.shape[0], 64, dtype=dtype, requires_grad=True)
            weight = torch.randn(rows.shape[0], 64, 128, dtype=dtype, requires_grad=True)
            (rows.with_values(x) @ weight).values.sum().backward()

    def attention(variant: Variant, with_lse: bool) -> None:
        dtype, dim, dim_v, options = variant
        q, k, v = (
            inputs.array(torch.randn(sum(LENGTHS), 2, d, dtype=dtype, requires_grad=True))
            for d in (dim, dim, dim_v)
        )
        k, v = q.with_values(k.values), q.with_values(v.values)
        out, lse = scree.attention(q, k, v, return_lse=True, **options)
        loss = out.values.float().sum()
        (loss + lse.values.sum() if with_lse else loss).backward()

    with registry.isolated():
        scree_triton.find_spec, scree_triton._interpreted = lambda _: True, lambda: True
        scree_triton.register()
        for dtype in (torch.bfloat16, torch.float32):
            inputs = make_inputs("cpu", dtype)
            # Tiles depend on the size of an element in products only.
            some = ["grouped_product", "linear_cross_entropy"]
            chosen = [
                *(CALLS if dtype == torch.bfloat16 else some),
                HEAD_DIMS,
                LONG_ROWS,
                SHORT_ROWS,
                PAGED_PREFILL,
            ]
            for name in [name for name in chosen if not names or name in names]:
                print(f"# {name}, {dtype}", flush=True)
                if name == LONG_ROWS:
                    row = torch.randn(70_000, dtype=dtype)
                    scree.softmax(scree.from_lengths(row, [70_000], max_length=70_000))
                    # The portable kernels with head_dim 64 differ from 128 only in the tile.
                    dims = (32, 64, 128) if capability == "90" else (128,)
                    for dim in dims if dtype == torch.bfloat16 else ():
                        attend_long_row(dim, dtype)
                    if capability == "90" and dtype == torch.bfloat16:
                        attend_long_row(64, dtype, query_heads=1)
                elif name in (SHORT_ROWS, PAGED_PREFILL) and capability != "90":
                    continue  # the portable kernels treat them as other rows
                elif name == PAGED_PREFILL:
                    for page_size, options in PAGED_PREFILLS if dtype == torch.bfloat16 else ():
                        attend_to_pages(page_size, options)
                elif name == SHORT_ROWS:
                    launch_configs.MANY_ROWS = 1
                    for dim in HEAD_DIM_SIZES[dtype]:
                        # Options of their own, as equal ones take an earlier call's launch config.
                        options = {"causal": True, "window": (101, None)}
                        attention(Variant(dtype, dim, dim, options), with_lse=False)
                elif name == HEAD_DIMS and capability == "90":
                    is_half = dtype == torch.bfloat16
                    for variant in VARIANTS:
                        if variant.dim and (variant.dtype.itemsize == 2) == is_half:
                            attention(variant, with_lse=variant.dim == 64)
                elif name == HEAD_DIMS:
                    options = {"causal": True, "window": (100, None)}
                    for dim in PORTABLE_HEAD_DIM_SIZES[dtype]:
                        attention(Variant(dtype, dim, dim, options), with_lse=False)
                elif name == "grouped_product":
                    run(name, inputs)
                    grouped_product(dtype)
                else:
                    run(name, inputs)
    print(f"{len(compiled)} kernels", flush=True)


if __name__ == "__main__":
    main()
