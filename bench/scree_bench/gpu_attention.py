"""`python -m scree_bench.gpu_attention OUT.json`: the Triton attention beside every other ragged attention that is installed.

All in one process, on the same inputs, in turn, medians of CUDA events with the L2 cache cleared before each call. "forward +
backward" calls the two halves directly where an implementation has them apart (ours, FlashAttention-2, memory-efficient), and
goes through autograd where it has not (FlashAttention-4); "ours, autograd" is what a training step sees.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.testing import do_bench

from scree_triton.attention import attention
from scree_triton.plans import Rows, Spec, plan
from scree_triton.tiles import UNBOUNDED

from .lengths import SEED

Calls = dict[str, Callable[[], Any]]


class Workload(NamedTuple):
    """Causal self-attention on rows of these lengths."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        """Useful operations of the forward; the backward has 2.5 times as many."""
        return 4.0 * self.heads * self.dim * sum(n * (n + 1) / 2 for n in self.lengths)


def lognormal(count: int, total: int, seed: int) -> tuple[int, ...]:
    """Log-normal lengths of at least 16 that add up to `total`."""
    rng = random.Random(seed)
    draws = [math.exp(rng.gauss(0.0, 0.6)) for _ in range(count)]
    lengths = [max(16, round(x / sum(draws) * total)) for x in draws]
    lengths[0] += total - sum(lengths)
    return tuple(lengths)


f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
WORKLOADS = {
    "seed": Workload(SEED, 16, 16, 64, f16),
    "seed bf16": Workload(SEED, 16, 16, 64, bf16),
    "hd128": Workload(lognormal(8, 16384, 1), 16, 16, 128, bf16),
    "gqa": Workload(lognormal(8, 16384, 1), 32, 8, 128, bf16),
    "small": Workload(lognormal(16, 4096, 2), 4, 4, 32, f16),
    "fp32": Workload(SEED, 16, 16, 64, f32),
    "skewed": Workload((32768, *(128,) * 255), 16, 16, 128, bf16),
}
TINY = Workload((16, 16), 4, 4, 64, f16)
GRID = {f"{dim} x {heads} x {length}": Workload(lognormal(16, 16 * length, dim + heads + length), heads, heads, dim, bf16)
        for dim in (32, 64, 128) for heads in (4, 8, 16) for length in (256, 1024, 2048)}  # fmt: skip


def contenders(w: Workload) -> tuple[Calls, Calls]:
    """The forward, and forward and backward, of every implementation that takes the workload."""
    total, longest, scale = sum(w.lengths), max(w.lengths), w.dim**-0.5
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, k, v, dout = (
        torch.randn((total, heads, w.dim), generator=generator, device="cuda").to(w.dtype)
        for heads in (w.heads, w.kv_heads, w.kv_heads, w.heads)
    )
    cu = torch.tensor([0, *accumulate(w.lengths)], dtype=torch.int32, device="cuda")
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    memo: dict[Any, Any] = {}
    rows, spec = Rows(cu, cu, memo), Spec(UNBOUNDED, 0, scale, 0.0)

    def ours(a: Any, b: Any, c: Any) -> Any:
        return attention(a, b, c, cu, cu, causal=True, scale=scale, memo=memo)

    def through_autograd(f: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            out = f(*leaves)
            return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, dout)

        return call

    def without_gradient(f: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return f(q, k, v)

        return call

    def both() -> Any:
        out, lse = without_gradient(ours)()
        return plan(q, k, v, rows, spec, False).backward(q, k, v, None, out, lse.t(), dout, None, rows, spec)

    forward: Calls = {"ours": without_gradient(ours)}
    training: Calls = {"ours": both, "ours, autograd": through_autograd(ours)}
    if w.dtype == f32:
        _efficient(forward, training, q, k, v, dout, cu, longest)
        return forward, training
    _flash2(forward, training, q, k, v, dout, cu, longest)
    try:  # FlashAttention-3, forward only
        from fa3_fwd_interface import flash_attn_varlen_func as flash3

        if w.dtype == bf16:
            forward["FA3"] = without_gradient(lambda a, b, c: flash3(a, b, c, cu, cu, longest, longest, causal=True))
    except ImportError:
        pass
    try:
        from flash_attn.cute import flash_attn_varlen_func as flash4

        def fa4(a: Any, b: Any, c: Any) -> Any:
            return flash4(a, b, c, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)

        forward["FA4"], training["FA4"] = without_gradient(fa4), through_autograd(fa4)
    except ImportError:
        pass
    return forward, training


def _flash2(forward: Calls, training: Calls, q: Any, k: Any, v: Any, dout: Any, cu: Any, longest: int) -> None:
    ops, shape = torch.ops.aten, (cu, cu, longest, longest, 0.0, True)

    def fa2() -> Any:
        return ops._flash_attention_forward(q, k, v, *shape, False)

    def fa2_both() -> Any:
        out, lse, seed, unused, _ = fa2()
        return ops._flash_attention_backward(dout, q, k, v, out, lse, *shape, seed, unused)

    forward["FA2"], training["FA2"] = fa2, fa2_both


def _efficient(forward: Calls, training: Calls, q: Any, k: Any, v: Any, dout: Any, cu: Any, longest: int) -> None:
    ops, one, grad = torch.ops.aten, [x[None] for x in (q, k, v)], dout[None]

    def efficient() -> Any:
        return ops._efficient_attention_forward(*one, None, cu, cu, longest, longest, 0.0, 1, True)

    def efficient_both() -> Any:
        out, lse, seed, offset, most_q, most_k = efficient()
        return ops._efficient_attention_backward(
            grad, *one, None, out, cu, cu, most_q, most_k, lse, 0.0, seed, offset, 1, False
        )

    forward["memory-efficient"], training["memory-efficient"] = efficient, efficient_both


def working(calls: Calls) -> Calls:
    """Those that run here; what fails is said and left out, except ours."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            if name.startswith("ours"):
                raise
            print(f"  {name} does not run: {type(error).__name__}: {str(error)[:90]}", flush=True)
    return found


def device_ms(calls: Calls, rounds: int, rep: int) -> dict[str, float]:
    """Median milliseconds of each, over rounds in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=rep // 3, rep=rep, return_mode="median"))
    return {name: statistics.median(x) for name, x in times.items()}


def host_us(call: Callable[[], Any], count: int = 100) -> float:
    """Microseconds of host time a call, the least of five rounds."""
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


def limits() -> dict[str, float]:
    """TFLOP/s of an 8192 matrix product in bfloat16, and TB/s of a copy, read and written."""
    x = torch.randn(8192, 8192, device="cuda", dtype=bf16)
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    into = torch.empty_like(source)
    product, copy = (do_bench(f, warmup=20, rep=80, return_mode="median") for f in (lambda: x @ x, lambda: into.copy_(source)))
    return {"matmul_tflops": 2 * 8192**3 / product / 1e9, "copy_tb_s": 2 * (1 << 30) / copy / 1e9}


def versions() -> dict[str, str]:
    """Of ours and of what it stands beside."""
    found = {"torch": torch.__version__, "triton": triton.__version__}
    for name in ("scree", "flash-attn-4", "fa3-fwd"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure, print, and write after every workload, so that an interrupted run leaves what it has."""
    parser = argparse.ArgumentParser(prog="python -m scree_bench.gpu_attention", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="comma-separated workloads", default=",".join([*WORKLOADS, "host", "grid"]))
    parser.add_argument("--warm", action="store_true", help="compile and measure nothing")
    options = parser.parse_args()
    only = options.only.split(",")
    if options.warm:
        for name in only:
            for calls in contenders({**WORKLOADS, **GRID}[name]._replace(lengths=(64, 64))):
                working(calls)
        return
    result: dict[str, Any] = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "versions": versions(),
                              "limits": limits(), "workloads": {}, "grid": {}}  # fmt: skip
    print(result, flush=True)

    def measure(name: str, w: Workload, rounds: int, rep: int) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": sum(w.lengths), "rows": len(w.lengths), "heads": w.heads, "kv_heads": w.kv_heads,
                                 "head_dim": w.dim, "dtype": str(w.dtype)[6:], "gflop": w.flops / 1e9}  # fmt: skip
        for what, calls in zip(("forward_ms", "forward_backward_ms"), contenders(w)):
            found[what] = device_ms(working(calls), rounds, rep)
        print(name, *(f"{what} " + " ".join(f"{who} {ms:.4f}" for who, ms in found[what].items())
                      for what in ("forward_ms", "forward_backward_ms")), sep=" | ", flush=True)  # fmt: skip
        return found

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name, w in WORKLOADS.items():
        if name in only:
            result["workloads"][name] = measure(name, w, 3, 40)
            save()
    if "host" in only:
        forward, training = (working(calls) for calls in contenders(TINY))
        result["host_us"] = {"forward": {name: host_us(call) for name, call in forward.items()},
                             "forward_backward": {name: host_us(call) for name, call in training.items()}}  # fmt: skip
        print("host", result["host_us"], flush=True)
        save()
    if "grid" in only:
        for name, w in GRID.items():
            result["grid"][name] = measure(name, w, 1, 15)
            save()


if __name__ == "__main__":
    main()
