"""``python -m scree_bench.gpu_kernels FILE.json``: the Triton kernels beside attention and their peers, on one CUDA device.

Times are of the device alone: a CUDA graph of the call, replayed with a cold cache, the median. Host times are of eager calls
on a small input. Every peer runs in the same process, in turn with ours. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
import triton
from triton.testing import do_bench

import scree
import scree_triton

COPY = "copy"


class Entry(NamedTuple):
    """One thing to measure: `run()` gives a result, whose gradient `dy` makes those of `leaves`."""

    operation: str
    size: str
    who: str
    run: Callable[[], Any]
    leaves: tuple[torch.Tensor, ...] = ()
    moved: tuple[int, int] = (0, 0)  # bytes that forward and backward must read and write
    done: tuple[int, int] = (0, 0)  # or the operations that they must do
    small: bool = False  # an input so small that the host's time is all


def replay_ms(f: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    """Device time of `f`, in milliseconds."""
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = f()
    found = do_bench(graph.replay, warmup=5, rep=25, return_mode="median")
    del kept
    return float(found)


def host_us(f: Callable[[], Any], calls: int = 200) -> float:
    """Host time of one call of `f`, in microseconds: the best of three."""
    best = float("inf")
    for _ in range(3):
        f()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            f()
        best = min(best, (time.perf_counter() - began) / calls * 1e6)
    return best


def measure(entry: Entry) -> dict[str, Any]:
    """One row of the file."""
    row: dict[str, Any] = {"operation": entry.operation, "size": entry.size, "who": entry.who}
    stream = torch.cuda.Stream()

    def forward() -> Any:
        with torch.no_grad():
            return entry.run()

    y = entry.run()
    dy = torch.randn_like(y)

    def both() -> Any:
        return torch.autograd.grad(entry.run(), entry.leaves, dy)

    if entry.small:
        return {**row, "forward_us": round(host_us(forward), 1), "both_us": round(host_us(both), 1)}
    times = [replay_ms(forward, stream)]
    if entry.leaves:
        with torch.cuda.stream(stream):
            y = entry.run()
        times.append(replay_ms(lambda: torch.autograd.grad(y, entry.leaves, dy, retain_graph=True), stream))
    for name, ms, moved, done in zip(("forward", "backward"), times, entry.moved, entry.done, strict=False):
        row[f"{name}_ms"] = round(ms, 4)
        if moved:
            row[f"{name}_gb_s"] = round(moved / ms / 1e6)
        if done:
            row[f"{name}_tflop_s"] = round(done / ms / 1e9)
    return row


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, leaf: bool = True) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(leaf)


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths on the device."""
    lengths = lengths.cuda()
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def log_normal(n: int, mean: int, sigma: float = 0.6) -> torch.Tensor:
    """Lengths of `n` rows."""
    x = torch.exp(torch.randn(n, generator=torch.Generator().manual_seed(0)) * sigma)
    return (x / x.mean() * mean).long().clamp(min=1)


def size_of(x: torch.Tensor) -> int:
    """Bytes."""
    return x.numel() * x.element_size()


def copying(operation: str, size: str, x: torch.Tensor) -> Entry:
    """A plain copy of `x`: the speed of the memory."""
    source, target = x.detach(), torch.empty_like(x)
    return Entry(operation, size, COPY, lambda: target.copy_(source), (), (2 * size_of(x), 0))


def norms() -> Iterator[Entry]:
    """RMS norm and layer norm, at two widths, and their host time."""
    yield from norm(12160, 4096)
    yield from norm(12160, 1024)
    x, w = random(32, 1024), random(1024)
    size = "32 x 1024, bf16"
    yield Entry("rms_norm", size, "scree", lambda: scree.rms_norm(x, w, kernel="triton"), (x, w), small=True)
    yield Entry("rms_norm", size, "torch", lambda: functional.rms_norm(x, w.shape, w, 1e-6), (x, w), small=True)


def norm(tokens: int, width: int) -> Iterator[Entry]:
    """Ours, torch's, compiled ones, and those of quack and Liger where they are installed."""
    x, w, b = random(tokens, width), random(width), random(width)
    size, moved = f"{tokens} x {width}, bf16", (2 * size_of(x), 3 * size_of(x))

    def rms() -> torch.Tensor:
        return functional.rms_norm(x, w.shape, w, 1e-6)

    def layer() -> torch.Tensor:
        return functional.layer_norm(x, w.shape, w, b, 1e-6)

    yield copying("rms_norm", size, x)
    yield Entry("rms_norm", size, "scree", lambda: scree.rms_norm(x, w, kernel="triton"), (x, w), moved)
    yield Entry("rms_norm", size, "torch", rms, (x, w), moved)
    yield Entry("rms_norm", size, "torch, compiled", torch.compile(rms, dynamic=False), (x, w), moved)
    yield Entry("layer_norm", size, "scree", lambda: scree.layer_norm(x, w, b, kernel="triton"), (x, w, b), moved)
    yield Entry("layer_norm", size, "torch", layer, (x, w, b), moved)
    yield Entry("layer_norm", size, "torch, compiled", torch.compile(layer, dynamic=False), (x, w, b), moved)
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from quack.rmsnorm import rmsnorm
    except ImportError:
        return
    yield Entry("rms_norm", size, "quack", lambda: rmsnorm(x, w, eps=1e-6), (x, w), moved)
    yield Entry("layer_norm", size, "Liger", lambda: LigerLayerNormFunction.apply(x, w, b, 1e-6), (x, w, b), moved)


def softmaxes() -> Iterator[Entry]:
    """Softmax along rows of one length, and of many."""
    for length in (1, 4, 64, 500, 4096, 65536, 1 << 20):
        n = (1 << 24) // length
        yield from softmax(torch.full((n,), length), (), torch.float32, f"{n} rows of {length}, fp32")
    yield from softmax(log_normal(32768, 500), (), torch.float32, "32768 rows of about 500, fp32")
    yield from softmax(log_normal(4096, 500), (16,), torch.bfloat16, "4096 rows of about 500, x 16, bf16")


def softmax(lengths: torch.Tensor, token: tuple[int, ...], dtype: torch.dtype, size: str) -> Iterator[Entry]:
    """Ours, the standard path, and a dense one where all rows are equal."""
    cu = offsets(lengths)
    v = random(int(cu[-1]), *token, dtype=dtype)
    x, moved, length = scree.from_offsets(v, cu), (2 * size_of(v), 3 * size_of(v)), int(lengths[0])
    yield copying("softmax", size, v)
    yield Entry("softmax", size, "scree", lambda: scree.softmax(x, kernel="triton").values, (v,), moved)
    if bool((lengths == length).all()):
        yield Entry("softmax", size, "torch, dense", lambda: v.view(-1, length).softmax(1), (v,), moved)
    else:
        yield Entry("softmax", size, "standard path", lambda: scree.softmax(x, kernel="standard").values, (v,), moved)


def reductions() -> Iterator[Entry]:
    """Sums and maxima of rows, skewed and not."""
    skewed = torch.full((1_000_001,), 4)
    skewed[500_000] = 10_000_000
    yield from reduction(skewed, (), torch.float32, "10M in one row among 1M rows of 4, fp32")
    yield from reduction(torch.full((1_000_000,), 4), (), torch.float32, "1M rows of 4, fp32")
    yield from reduction(log_normal(32768, 500), (), torch.float32, "32768 rows of about 500, fp32")
    yield from reduction(torch.full((16,), 1 << 20), (), torch.float32, "16 rows of 1M, fp32")
    yield from reduction(log_normal(256, 500), (1024,), torch.bfloat16, "256 rows of about 500, x 1024, bf16")


def reduction(lengths: torch.Tensor, token: tuple[int, ...], dtype: torch.dtype, size: str) -> Iterator[Entry]:
    """Ours, torch's, and one sum over everything, which reads the same."""
    cu = offsets(lengths)
    v = random(int(cu[-1]), *token, dtype=dtype)
    x, xp, wide, read = scree.from_offsets(v, cu), scree.namespace(v), cu.long(), size_of(v)
    yield Entry("sum", size, "scree", lambda: xp.sum(x, axis=1), (v,), (read, read))
    yield Entry("sum", size, "torch, one sum of all", lambda: v.sum(0), (), (read, 0))
    yield Entry("sum", size, "torch.segment_reduce",
                lambda: torch.segment_reduce(v, "sum", offsets=wide, axis=0, unsafe=True), (), (read, 0))
    yield Entry("max", size, "scree", lambda: xp.max(x, axis=1), (v,), (read, 2 * read))


def ropes() -> Iterator[Entry]:
    """Queries and keys, as slices of one tensor, by one launch."""
    cu = offsets(log_normal(16, 1024))
    v = random(int(cu[-1]), 20, 128)
    x, size, moved = scree.from_offsets(v, cu), f"{v.shape[0]} tokens x 20 x 128, bf16", (2 * size_of(v), 2 * size_of(v))
    angle = scree.positions(x).float()[:, None] * 10000.0 ** (-torch.arange(64, device="cuda") / 64)
    cos, sin = (torch.cat((f(angle),) * 2, -1)[:, None].to(v.dtype) for f in (torch.cos, torch.sin))

    def eager() -> torch.Tensor:
        return v * cos + torch.cat((-v[..., 64:], v[..., :64]), -1) * sin

    yield copying("rope", size, v)
    for interleaved in (False, True):
        who = "scree, interleaved" if interleaved else "scree"
        yield Entry("rope", size, who, lambda i=interleaved: scree.rope(x, interleaved=i, kernel="triton").values, (v,), moved)
    yield Entry("rope", size, "eager, cos and sin given", eager, (v,), moved)
    yield Entry("rope", size, "compiled, cos and sin given", torch.compile(eager, dynamic=False), (v,), moved)


def products() -> Iterator[Entry]:
    """Mixtures of experts with unequal numbers of tokens."""
    for experts, k, m in ((8, 2048, 4096), (64, 2048, 1408), (128, 2048, 768)):
        yield from product(experts, k, m)


def product(experts: int, k: int, m: int) -> Iterator[Entry]:
    """Ours, torch's, and one dense product of as many operations."""
    cu = offsets(log_normal(experts, 32768 // experts, 1.0))
    v, w = random(int(cu[-1]), k), random(experts, k, m)
    x, done, one = scree.from_offsets(v, cu), (2 * v.shape[0] * k * m, 4 * v.shape[0] * k * m), w.detach()[0]
    size = f"{experts} experts, {v.shape[0]} x {k} x {m}, bf16"
    yield Entry("grouped_matmul", size, "scree", lambda: (x @ w).values, (v, w), done=done)
    yield Entry("grouped_matmul", size, "torch._grouped_mm", lambda: torch._grouped_mm(v, w, offs=cu[1:]), (v, w), done=done)
    yield Entry("grouped_matmul", size, "cuBLAS, one dense product", lambda: v @ one, (), done=done)


GROUPS = {f.__name__: f for f in (norms, softmaxes, reductions, ropes, products)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m scree_bench.gpu_kernels", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=list(GROUPS), nargs="*", default=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so many")
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # a backward is timed more than once
    scree.namespace(torch.zeros(1))
    scree_triton.register()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "scree": scree.__version__,
        "torch": torch.__version__, "triton": triton.__version__, "rows": [],
    }  # fmt: skip
    began = time.monotonic()
    for name in options.only:
        for entry in GROUPS[name]():
            if time.monotonic() - began > options.seconds:
                return
            try:
                row = measure(entry)
            except Exception as error:  # a peer that fails is said, and the others still run
                row = {"operation": entry.operation, "size": entry.size, "who": entry.who, "error": repr(error)[:200]}
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            options.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
