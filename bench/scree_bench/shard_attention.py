"""Attention of shards in the processes of `scree-bench shards`, and ring-flash-attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scree
from scree.data import fit_cost
from scree.distributed import shard, unshard
from scree.distributed.pieces import plan_keys
from scree.ops.attention import AttentionCall

from .measure import median
from .ring_attention import ring_flash_attention

if TYPE_CHECKING:
    from .shard_workers import Worker

#: Numbers of the batches that are measured by default: up to 128k tokens.
DEFAULT_BATCHES = 0, 1, 2, 3, 4


class Batch(NamedTuple):
    """Rows for attention: a name, their lengths, and a sliding window or None."""

    name: str
    lengths: list[int]
    window: int | None = None

    @property
    def case(self) -> dict[str, Any]:
        """The description of the batch in the results."""
        return {"batch": self.name, "rows": len(self.lengths), "tokens": sum(self.lengths)}


def log_normal(total: int, median_length: float, sigma: float, seed: int) -> list[int]:
    """Return lengths with the sum `total`, in multiples of 8, which the peers need."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (rest := total - sum(lengths)) > 0:
        length = max(8, int(rng.lognormal(math.log(median_length), sigma)) // 8 * 8)
        lengths.append(min(length, rest))
    return lengths


def batches(scale: int) -> list[Batch]:
    """Return the batches for attention, with all lengths divided by `scale`."""
    short, long, longest = 32_768 // scale, 131_072 // scale, 524_288 // scale
    window, median_length = max(8, 4096 // scale), max(16, 2048 // scale)

    def size(tokens: int) -> str:
        return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)

    def one_document(tokens: int, window: int | None = None) -> Batch:
        suffix = "" if window is None else f", window {size(window)}"
        return Batch(f"one document of {size(tokens)}{suffix}", [tokens], window)

    def packed(tokens: int, sigma: float, seed: int) -> Batch:
        suffix = "" if sigma == 1 else f", sigma {sigma}"
        name = f"{size(tokens)} packed, median {size(median_length)}{suffix}"
        return Batch(name, log_normal(tokens, median_length, sigma, seed))

    return [
        one_document(short),
        packed(short, 1.0, 1),
        packed(long, 1.5, 2),
        one_document(long, window),
        one_document(long),
        packed(longest, 1.5, 3),
        one_document(longest, window),
        one_document(longest),
    ]


def attention(process: Worker, batch: Batch) -> None:
    """Compare attention of shards with attention of whole rows on one device."""
    torch, (heads, kv_heads, dim) = process.torch, process.job.heads
    generator = torch.Generator(process.device).manual_seed(0)
    total = sum(batch.lengths)

    def random(num_heads: int) -> Any:
        shape = (total, num_heads, dim)
        x = torch.randn(shape, generator=generator, device=process.device, dtype=torch.float32)
        return x.to(process.dtype)

    values = [random(n) for n in (heads, kv_heads, kv_heads, heads)]
    base = scree.from_lengths(values[0], batch.lengths)
    whole = [base.with_values(x) for x in values]
    whole_times = _attention_times(process, whole, batch.window, "mean")
    process.row(batch.case, "scree, one device", **whole_times)
    ideals = {name: median(whole_times[name]) / process.world for name in ("forward_s", "step_s")}
    cost = _attention_cost(process, batch.window)
    chosen = None
    # The default form first, then the other form.
    for exchange in (None, "keys", "heads"):
        shards = [shard(x, process.mesh, cost=cost, exchange=exchange) for x in whole]
        if exchange is None:
            chosen = _exchange(shards, batch.window)
        elif chosen in (None, exchange) or (exchange == "heads" and kv_heads % process.world):
            continue
        results = _attention_times(process, shards, batch.window)
        for name, ideal in ideals.items():
            results[f"{name.removesuffix('_s')}_efficiency_share"] = ideal / median(results[name])
        results |= _communication(process, shards, batch.window)
        process.row(batch.case, "scree" if exchange is None else f"scree, {exchange}", **results)
        del shards
    # The error comes last, because an interrupt keeps the rows so far.
    shards = [shard(x, process.mesh, cost=cost) for x in whole]
    error = _attention_error(whole, shards, batch.window)
    process.row(batch.case, "scree", relative_error=error)


def _exchange(shards: list[scree.Array], window: int | None) -> str | None:
    """Return what attention of the shards exchanges: "keys", "heads" or None."""
    cut: Any = shards[0].layout.cut
    if not cut.is_cut:
        return None
    q, k, v = (scree.Array.from_layout(x.values, cut.local_layout) for x in shards[:3])
    call = AttentionCall(q, k, v, causal=True, window=window)
    return "heads" if cut.exchanges_heads(call) else "keys"


def _attend(arrays: list[scree.Array], window: int | None) -> Any:
    """Run attention forward and backward; the last array is the gradient of the output."""
    *leaves, out_grad = arrays
    for x in leaves:
        x.values.grad = None
    out = scree.attention(*leaves, causal=True, window=window)
    out.values.backward(out_grad.values)
    return out


def _attention_times(
    process: Worker, arrays: list[scree.Array], window: int | None, combine: str = "max"
) -> dict[str, Any]:
    """Return the times of the forward pass and of a step; see `_attend` for `arrays`."""
    plain = [x.with_values(x.values.detach()) for x in arrays]
    leaves = [x.with_values(x.values.detach().requires_grad_()) for x in plain[:3]]
    forward = process.times(
        lambda: scree.attention(*plain[:3], causal=True, window=window), combine
    )
    step = process.times(lambda: _attend([*leaves, plain[3]], window), combine)
    return {
        "forward_s": forward.seconds,
        "step_s": step.seconds,
        "step_host_s": step.host,
        "slowest_rank_ratio": step.slowest_ratio,
    }


@cache
def _attention_cost(process: Worker, window: int | None) -> tuple[float, float]:
    """Return the cost of a row for `shard`; all devices fit it to the same times."""
    torch, (heads, kv_heads, dim) = process.torch, process.job.heads
    if window is not None:
        return 1, 0
    unit = max(8, 512 // process.job.scale)
    samples = [[unit] * 64, [4 * unit] * 16, [16 * unit] * 4, [32 * unit], [4 * unit] * 4]
    seconds = []
    for lengths in samples:
        values = [
            torch.randn((sum(lengths), n, dim), device=process.device).to(process.dtype)
            for n in (heads, kv_heads, kv_heads, heads)
        ]
        base = scree.from_lengths(values[0], lengths)
        arrays = [base.with_values(x.requires_grad_(i < 3)) for i, x in enumerate(values)]
        seconds.append(median(process.times(partial(_attend, arrays, None)).seconds))
    try:
        return fit_cost(samples, seconds)
    except ValueError:  # the times of tiny rows do not grow with the lengths
        return 1, 1


def _attention_error(
    whole: list[scree.Array], shards: list[scree.Array], window: int | None
) -> float:
    """Return the largest difference of results and gradients, relative to the largest number."""
    results = []
    for arrays in (whole, shards):
        leaves = [x.with_values(x.values.detach().requires_grad_()) for x in arrays[:3]]
        out = _attend([*leaves, arrays[3]], window)
        parts = [out, *(x.with_values(x.values.grad) for x in leaves)]
        results.append([x if x.layout.cut is None else unshard(x) for x in parts])
    errors = []
    for expected, actual in zip(*results, strict=True):
        difference = (actual.values.detach() - expected.values.detach()).abs().max()
        errors.append(float(difference / expected.values.detach().abs().max()))
    return max(errors)


def _communication(
    process: Worker, shards: list[scree.Array], window: int | None
) -> dict[str, float]:
    """Return the bytes that this device receives in a forward pass, and properties of the cut."""
    cut: Any = shards[0].layout.cut
    pieces = np.bincount(cut.pieces.rows, minlength=cut.whole.num_rows)
    counts = [cut.pieces.lengths[cut.pieces.ranks == r].sum() for r in range(process.world)]
    # Bytes of a token of q, k and v. The output is as wide as q.
    q, k, v = (math.prod(x.values.shape[1:]) * x.values.element_size() for x in shards[:3])
    exchange, received = _exchange(shards, window), 0.0
    if exchange == "heads":
        own = counts[process.rank]
        received = (sum(counts) - own) * (q + k + v) / process.world
        received += own * q * (process.world - 1) / process.world
    elif exchange == "keys":
        lengths = np.diff(cut.whole.read_offsets()).astype(np.int64)
        bounds = None if window is None else window - 1, 0
        plan = plan_keys(cut.pieces, lengths, process.rank, process.world, bounds)
        received = sum(plan.received) * (k + v)
    return {
        "received_bytes": float(received),
        "cut_rows_count": float((pieces > 1).sum()),
        "fewest_tokens_count": float(min(counts)),
    }


def peers(process: Worker, batch: Batch) -> None:
    """Time the zigzag and llama3 forms of ring-flash-attention on the same lengths."""
    torch, (heads, kv_heads, dim) = process.torch, process.job.heads
    lengths, window, world = batch.lengths, batch.window, process.world
    q, k, v, grad = (
        torch.randn((sum(lengths) // world, n, dim), device=process.device).to(process.dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=process.device)
    options = {"causal": True, "group": process.mesh.get_group()}
    for served in ("torch", "scree") if process.job.device == "cuda" else ("scree",):
        with ring_flash_attention(process.job.peers, served) as load:
            llama3 = load("llama3_flash_attn_varlen")
            *bounds, local = llama3.llama3_flash_attn_prepare_cu_seqlens(
                offsets, True, process.rank, world
            )
            forms: dict[str, Callable[[], Any]] = {
                "llama3": partial(
                    llama3.llama3_flash_attn_varlen_func,
                    *leaves,
                    *bounds,
                    heads_k_stride=kv_heads,
                    local_k_slice=local,
                    window_size=(-1, -1) if window is None else (window - 1, 0),
                    **options,
                )
            }
            # The zigzag form has no window over several devices, and halves the part of a device.
            if window is None and all(n % (2 * world) == 0 for n in lengths):
                zigzag = load("zigzag_ring_flash_attn_varlen")
                forms["zigzag"] = partial(
                    zigzag.zigzag_ring_flash_attn_varlen_func,
                    *leaves,
                    offsets // world,
                    max(lengths) // world,
                    **options,
                )
            for form, run in forms.items():

                def step(run: Callable[[], Any] = run) -> None:
                    for x in leaves:
                        x.grad = None
                    run().backward(grad)

                who = f"ring-flash-attention {form} on {served}"
                process.row(batch.case, who, step_s=process.times(step).seconds)
