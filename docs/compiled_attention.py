"""Print the table of compiled attention on the CPU.

Run ``python docs/compiled_attention.py [torch] [jax] [mlx]`` on an idle machine. Every peer
computes the same rows under the same compiler. Peers and `xp.ragged.attention` run alternately,
and the median of each is reported.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import scree

LENGTHS = [512, 1024, 768, 256, 2048, 384, 896, 640, 1536, 320, 1152, 480, 704, 192, 832, 416]
HEADS, DIM, LONGEST, ROUNDS = 4, 64, max(LENGTHS), 5
VALUES = [
    np.random.default_rng(seed).standard_normal((sum(LENGTHS), HEADS, DIM)).astype(np.float32)
    for seed in range(3)
]
OFFSETS = np.cumsum([0, *LENGTHS]).astype(np.int32)
MASK = np.arange(LONGEST) < np.asarray(LENGTHS)[:, None]
PADDED = [np.zeros((len(LENGTHS), LONGEST, HEADS, DIM), np.float32) for _ in VALUES]
for _to, _from in zip(PADDED, VALUES):
    _to[MASK] = _from

# Name -> calls: forward, and forward with backward if there is a backward pass.
Contenders = dict[str, tuple[Callable[[], Any], ...]]


def ragged(q: Any, k: Any, v: Any, offsets: Any) -> Any:
    """Run ragged attention in which every token sees its whole row."""
    q, k, v = (scree.from_cu_seqlens(x, offsets, max_length=LONGEST) for x in (q, k, v))
    k, v = scree.align(k, like=q), scree.align(v, like=q)
    return scree.attention(q, k, v).values


def torch_contenders() -> Contenders:
    """Return PyTorch's padded SDPA, `torch.nested`, and SDPA row by row."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    values = [torch.tensor(x, requires_grad=True) for x in VALUES]
    padded = [torch.tensor(x, requires_grad=True) for x in PADDED]
    offsets, long, mask = (
        torch.tensor(OFFSETS),
        torch.tensor(OFFSETS).to(torch.int64),
        torch.tensor(MASK)[:, None, None, :],
    )

    def by_head(x: Any) -> Any:
        return x.transpose(1, 2)

    def of_padded(q: Any, k: Any, v: Any) -> Any:
        return by_head(sdpa(by_head(q), by_head(k), by_head(v), attn_mask=mask))

    def of_nested(q: Any, k: Any, v: Any) -> Any:
        jagged = [
            torch.nested.nested_tensor_from_jagged(x, long, max_seqlen=LONGEST, min_seqlen=192)
            for x in (q, k, v)
        ]
        return by_head(sdpa(*map(by_head, jagged))).values()

    def of_rows(q: Any, k: Any, v: Any) -> Any:
        rows = zip(*(x.split(LENGTHS) for x in (q, k, v)))
        return torch.cat(
            [sdpa(*(x.transpose(0, 1)[None] for x in row))[0].transpose(0, 1) for row in rows]
        )

    def forward(f: Callable[..., Any], args: list[Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return f(*args)

        return call

    def both(f: Callable[..., Any], args: list[Any]) -> tuple[Callable[[], Any], ...]:
        compiled = torch.compile(f, fullgraph=True)
        return forward(compiled, args), lambda: torch.autograd.grad(compiled(*args).sum(), args)

    return {
        "scree": both(lambda q, k, v: ragged(q, k, v, offsets), values),
        "padded": both(of_padded, padded),
        # With gradients torch.nested has no backend on the CPU.
        "torch.nested": (forward(of_nested, [x.detach() for x in values]),),
        "row by row": both(of_rows, values),
    }


def jax_contenders() -> Contenders:
    """Return JAX's padded attention, and padded attention by hand."""
    import jax
    import jax.numpy as jnp

    values, padded = [jnp.asarray(x) for x in VALUES], [jnp.asarray(x) for x in PADDED]
    offsets, mask = jnp.asarray(OFFSETS), jnp.asarray(MASK)[:, None, None, :]

    def of_padded(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    def by_hand(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        scores = jnp.where(mask, q @ jnp.swapaxes(k, 2, 3) / DIM**0.5, -jnp.inf)
        return jnp.swapaxes(jax.nn.softmax(scores) @ v, 1, 2)

    def both(f: Callable[..., Any], args: list[Any]) -> tuple[Callable[[], Any], ...]:
        forward, gradient = jax.jit(f), jax.jit(jax.grad(lambda *x: f(*x).sum(), (0, 1, 2)))
        return lambda: jax.block_until_ready(forward(*args)), lambda: jax.block_until_ready(
            gradient(*args)
        )

    return {
        "scree": both(ragged, [*values, offsets]),
        "jax.nn.dot_product_attention, padded": both(of_padded, padded),
        "by hand, padded": both(by_hand, padded),
    }


def mlx_contenders() -> Contenders:
    """Return MLX's padded attention."""
    import mlx.core as mx

    values, padded = [mx.array(x) for x in VALUES], [mx.array(x) for x in PADDED]
    offsets, mask = mx.array(OFFSETS), mx.array(MASK)[:, None, None, :]

    def of_padded(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (mx.swapaxes(x, 1, 2) for x in (q, k, v))
        return mx.swapaxes(
            mx.fast.scaled_dot_product_attention(q, k, v, scale=DIM**-0.5, mask=mask), 1, 2
        )

    def both(f: Callable[..., Any], args: list[Any]) -> tuple[Callable[[], Any], ...]:
        forward, gradient = mx.compile(f), mx.compile(mx.grad(lambda *x: f(*x).sum(), (0, 1, 2)))
        return lambda: mx.eval(forward(*args)), lambda: mx.eval(gradient(*args))

    return {
        "scree": both(ragged, [*values, offsets]),
        "mx.fast.scaled_dot_product_attention, padded": both(of_padded, padded),
    }


def main() -> None:
    """Print the table."""
    print("| library | peer | pass | peer, s | scree, s | ratio |\n|---|---|---|---|---|---|")
    for name in sys.argv[1:] or ("torch", "jax", "mlx"):
        contenders: Contenders = globals()[f"{name}_contenders"]()
        seconds: dict[str, list[list[float]]] = {
            contender: [[] for _ in calls] for contender, calls in contenders.items()
        }
        for round_number in range(ROUNDS + 1):
            for contender, calls in contenders.items():
                for call, times in zip(calls, seconds[contender]):
                    start = time.perf_counter()
                    call()
                    if round_number:  # the first round compiles
                        times.append(time.perf_counter() - start)
        ours, *peers = ([statistics.median(times) for times in calls] for calls in seconds.values())
        for peer, medians in zip(list(contenders)[1:], peers):
            for task, a, b in zip(("forward", "forward and backward"), medians, ours):
                ratio = f"{b / a:.2f}" if b < a else f"**{b / a:.2f}**"
                print(f"| {name} | {peer} | {task} | {a:.3g} | {b:.3g} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
