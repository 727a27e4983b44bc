"""Run random calls for a long time, and check that equal calls give equal bits.

Usage::

    python kernels_triton/tests/stress.py --rounds 10000 --seed 1   # streams
    python kernels_triton/tests/stress.py --seconds 200 --seed 1    # shapes

`--rounds`: calls of all operations with gradients on 8 streams that share layouts, under
``torch.use_deterministic_algorithms(True)``. Every 50 rounds a new layout is first used while its
stream is busy.

`--seconds`: attention and grouped products of random shapes, with gradients. Every shape runs many
times on three streams at once. A shape that does not end within `--limit` seconds is a hang: the
program prints the shape and exits with status 3.

The exit status is 1 if two results of a call differ.
"""

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from program_calls import CALLS, NOT_DIFFERENTIABLE, make_inputs, run

import scree
from scree.dispatch import registry

#: Rounds that share a layout.
ROUNDS_PER_LAYOUT = 50
#: Passes of a shape, and the streams that run them at the same time.
PASSES, STREAMS = 12, 3
MAX_TOKENS = 12_000
#: Time between two lines about the progress.
REPORT_SECONDS = 20
#: A result, and the gradients of the arguments.
NAMES = "out", "dx", "dy", "dz"


# --- Streams
def is_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two results have equal bits; a NaN equals every NaN."""
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def stress_streams(rounds: int, streams: int = 8, seed: int = 0) -> list[tuple[int, str]]:
    """Run random calls on random streams; return the round and the name of calls that differ."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.use_deterministic_algorithms(True)
    try:
        draw = random.Random(seed)
        names = [*CALLS]
        inputs = make_inputs(device, dtype)
        expected = {name: run(name, inputs) for name in names}
        pool = [torch.cuda.Stream() for _ in range(streams)] if device == "cuda" else [None]
        wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        wrong: list[tuple[int, str]] = []
        for first in range(0, rounds, ROUNDS_PER_LAYOUT):
            wait()
            array = inputs.array(inputs.x)
            if device == "cuda":
                with torch.cuda.stream(draw.choice(pool)):
                    torch.cuda._sleep(2_000_000)
            calls = [draw.choice(names) for _ in range(min(ROUNDS_PER_LAYOUT, rounds - first))]
            results = []
            for name in calls:
                with torch.cuda.stream(draw.choice(pool)):
                    results.append(_call(name, array, inputs))
            wait()
            for i, (name, result) in enumerate(zip(calls, results, strict=True)):
                if not all(map(is_equal, result, expected[name])):
                    wrong.append((first + i, name))
        return wrong
    finally:
        torch.use_deterministic_algorithms(False)


def _call(name: str, array: Any, inputs: Any) -> list[torch.Tensor]:
    """Return the result of a call on an array that other streams use, and its gradients."""
    out = CALLS[name](array, inputs.weight, inputs.classes)
    if name in NOT_DIFFERENTIABLE:
        return [out]
    loss = out.float().nan_to_num(0.0, 0.0, 0.0).square().sum()
    grads = torch.autograd.grad(loss, inputs[1:3], allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


# --- Shapes
class Variant(NamedTuple):
    """Compiled kernels; head_dim 0 stands for grouped products."""

    dtype: torch.dtype
    dim: int
    dim_v: int
    options: dict[str, Any]


#: Every Gluon kernel for Hopper: one to three consumer warp groups, one to three parts of a head,
#: masks, bfloat16x3 and grouped products.
VARIANTS = (
    Variant(torch.bfloat16, 64, 64, {"causal": True}),
    Variant(torch.bfloat16, 128, 128, {"causal": True}),
    Variant(torch.float16, 128, 128, {"window": (200, 60), "softcap": 20.0}),
    Variant(torch.float16, 32, 32, {}),
    Variant(torch.bfloat16, 192, 128, {"causal": True}),
    Variant(torch.bfloat16, 192, 192, {"causal": True}),
    Variant(torch.bfloat16, 256, 256, {"causal": True}),
    Variant(torch.float32, 64, 64, {"causal": True}),
    Variant(torch.bfloat16, 0, 0, {}),
)
INTERPRETED_VARIANTS = (
    Variant(torch.float32, 16, 16, {"causal": True}),
    Variant(torch.float32, 0, 0, {}),
)


class Shape(NamedTuple):
    """A random call: lengths of the rows, and heads or the sizes of the matrices."""

    variant: Variant
    lengths: tuple[int, ...]
    heads: tuple[int, int]

    def __str__(self) -> str:
        dtype, dim, dim_v, options = self.variant
        kind = f"attention, head_dim {dim} and {dim_v}, heads" if dim else "grouped product, sizes"
        return f"{kind} {self.heads}, {dtype}, {options}, lengths {self.lengths}"


def draw_shape(draw: random.Random, variant: Variant, max_tokens: int = MAX_TOKENS) -> Shape:
    """Return a random shape of a variant: few or many rows, short or long, some empty."""
    total, mean = draw.randrange(1, max_tokens), 2.0 ** draw.uniform(0, np.log2(max_tokens))
    lengths: list[int] = []
    while total > 0 and len(lengths) < 400:
        length = 0 if draw.random() < 0.1 else min(int(draw.expovariate(1 / mean)) + 1, total)
        lengths.append(length)
        total -= length
    if variant.dim:
        k_heads = draw.choice((1, 2, 3))
        return Shape(variant, tuple(lengths), (k_heads * draw.choice((1, 2, 4)), k_heads))
    # One matrix per row: few rows bound the memory.
    sizes = 8 * draw.randrange(1, 80), 8 * draw.randrange(1, 80)
    return Shape(variant, tuple(lengths[:40]), sizes)


def make_call(shape: Shape, device: str, seed: int) -> Callable[..., list[torch.Tensor]]:
    """Return a function that runs a shape with gradients on arrays of its own layout."""
    generator = torch.Generator(device).manual_seed(seed)
    (dtype, dim, dim_v, options), (heads, k_heads) = shape.variant, shape.heads
    total = sum(shape.lengths)
    offsets = torch.tensor(np.r_[0, np.cumsum(shape.lengths)], dtype=torch.int32, device=device)

    def random_leaf(*sizes: int) -> torch.Tensor:
        x = torch.randn(sizes, generator=generator, device=device)
        return x.to(dtype).requires_grad_()

    def array(values: torch.Tensor) -> Any:
        return scree.Array(values, offsets, max_length=max(shape.lengths))

    if dim:
        leaves = [
            random_leaf(total, count, width)
            for count, width in ((heads, dim), (k_heads, dim), (k_heads, dim_v))
        ]

        def forward(x: Any) -> torch.Tensor:
            k, v = x.with_values(leaves[1]), x.with_values(leaves[2])
            return scree.attention(x, k, v, **options).values

    else:
        leaves = [random_leaf(total, heads), random_leaf(len(shape.lengths), heads, k_heads)]

        def forward(x: Any) -> torch.Tensor:
            return (x @ leaves[1]).values

    def call() -> list[torch.Tensor]:
        out = forward(array(leaves[0]))
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        return [out.detach(), *grads]

    return call


@contextmanager
def watchdog(what: object, limit: float, end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Print `what` and end the process with status 3 if the block takes more than `limit` seconds.

    A thread waits, because a kernel that hangs keeps the main thread in a call of CUDA.
    """

    def report() -> None:
        print(f"hang: no end after {limit:g} s: {what}", flush=True)
        end(3)

    timer = threading.Timer(limit, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_shape(shape: Shape, seed: int, passes: int = PASSES, limit: float = 60.0) -> str | None:
    """Run a shape many times; return how results differ, or None."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with watchdog(f"seed {seed}, {shape}", limit):
        call = make_call(shape, device, seed)
        first = call()
        if device == "cuda":
            torch.cuda.synchronize()
            pool: list[Any] = [torch.cuda.Stream() for _ in range(STREAMS)]
        else:
            pool = [None]
        results = []
        for i in range(1, passes):
            with torch.cuda.stream(pool[i % len(pool)]):
                results.append(call())
        if device == "cuda":
            torch.cuda.synchronize()
        for i, result in enumerate(results, 1):
            if not all(map(torch.equal, result, first)):
                return f"pass {i} has other bits: {shape}"
        # The standard implementation adds in another order, and rounds its own intermediates.
        with registry.isolated(standard_only=True):
            standard = call()
        for name, got, wanted in zip(NAMES, first, standard, strict=False):
            error = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6)
            if not error < (2e-2 if shape.variant.dtype != torch.float32 else 1e-3):
                return f"{name} is {error:.1e} from the standard implementation: {shape}"
    return None


def stress_shapes(
    seconds: float, seed: int, limit: float = 60.0, max_tokens: int = MAX_TOKENS
) -> tuple[Counter, list[str]]:
    """Run random shapes; return the number of shapes by variant, and how results differ.

    Every variant is compiled before the time begins.
    """
    variants = VARIANTS if torch.cuda.is_available() else INTERPRETED_VARIANTS
    draw, counts, wrong = random.Random(seed), Counter(), []

    def run_next(variant: Variant, i: int, limit: float) -> None:
        difference = run_shape(draw_shape(draw, variant, max_tokens), seed + i, limit=limit)
        if difference:
            wrong.append(difference)
            print(difference, flush=True)
        counts[f"{str(variant.dtype)[6:]} {variant.dim or 'grouped'}"] += 1

    start = time.monotonic()
    for i, variant in enumerate(variants):
        run_next(variant, -i, limit=10 * limit)
    print(
        f"compiled and ran {len(variants)} variants: {time.monotonic() - start:.0f} s", flush=True
    )
    start, i, reported = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds:
        if elapsed - reported >= REPORT_SECONDS:
            print(f"{elapsed:.0f} s: {i} shapes, {len(wrong)} differ", flush=True)
            reported = elapsed
        i += 1
        run_next(draw.choice(variants), i, limit)
    return counts, wrong


def main(arguments: list[str]) -> int:
    """Run the stress test that the arguments select; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=0, help="calls on shared streams")
    parser.add_argument("--seconds", type=float, default=0, help="time for random shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a shape hangs")
    options = parser.parse_args(arguments)
    failed = False
    if options.rounds:
        start = time.monotonic()
        wrong = stress_streams(options.rounds, seed=options.seed)
        print(
            f"{options.rounds} rounds on 8 streams, seed {options.seed}: {len(wrong)} differ, "
            f"{time.monotonic() - start:.0f} s {wrong[:10]}",
            flush=True,
        )
        failed |= bool(wrong)
    if options.seconds:
        counts, messages = stress_shapes(options.seconds, options.seed, options.limit)
        print(
            f"{sum(counts.values())} shapes, {PASSES} passes each, in {options.seconds:g} s, "
            f"seed {options.seed}: {len(messages)} differ; {dict(counts)}",
            flush=True,
        )
        failed |= bool(messages)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
