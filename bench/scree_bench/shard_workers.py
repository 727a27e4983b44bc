"""The processes of `scree-bench shards`: one per GPU, or several on the CPU over gloo.

All processes run the same functions, because each sample ends with a collective. The first process
writes one line of JSON per result.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import scree
from scree.data import TokenBudgetSampler, fit_cost
from scree.distributed import shard, unshard

from .measure import L2_BYTES, Failure, median
from .training import models
from .training.models import SIZES, Size

#: A collective that waits longer raises.
TIMEOUT = timedelta(seconds=120)
#: Seconds to measure a call by default, and the largest number of samples.
MAX_SAMPLES = 15
#: Bounds of the seconds that the device sleeps while the host launches a call. The device has at most
#: about CYCLES cycles per second, so it sleeps at least that long.
MIN_SLEEP, MAX_SLEEP, CYCLES = 1e-3, 0.05, 2e9
#: Steps whose losses are compared.
LOSS_STEPS = 4


class Batch(NamedTuple):
    """Rows for attention: a name, their lengths, and a sliding window or None."""

    name: str
    lengths: list[int]
    window: int | None = None


class Job(NamedTuple):
    """The parts that the processes measure, and their sizes.

    Attributes
    ----------
    device
        "cuda" or "cpu".
    parts
        Names as in "attention: BATCH", "peers: BATCH", "model: BATCH" or "balance".
    scale
        Divisor of the lengths of all batches.
    heads
        Query heads, key heads and head_dim of attention.
    peers
        Folder of a checkout of ring-flash-attention, or "".
    size
        Name of the model in `training.models.SIZES`.
    seconds
        Seconds to measure each call.
    windows
        Number of timed windows of batches for the balance.
    """

    device: str
    parts: tuple[str, ...]
    scale: int
    heads: tuple[int, int, int]
    peers: str
    size: str
    seconds: float
    windows: int


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
    long, short, window = 131_072 // scale, 32_768 // scale, max(8, 4096 // scale)
    median_length = max(16, 2048 // scale)

    def size(tokens: int) -> str:
        return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)

    packed = f"packed, median {size(median_length)}"
    return [
        Batch(f"one document of {size(short)}", [short]),
        Batch(f"{size(short)} {packed}", log_normal(short, median_length, 1.0, 1)),
        Batch(f"{size(long)} {packed}, sigma 1.5", log_normal(long, median_length, 1.5, 2)),
        Batch(f"one document of {size(long)}, window {size(window)}", [long], window),
        Batch(f"one document of {size(long)}", [long]),
    ]


def worker(rank: int, world: int, job: Job, folder: str) -> None:
    """Run one process of the group."""
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {}
    if job.device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        **options,
    )
    with open(Path(folder) / f"lines-{rank}", "w", encoding="utf-8") as file:
        process = Worker(job, rank, world, file)
        for part in job.parts:
            process.run(part)
    dist.barrier()
    dist.destroy_process_group()


class Worker:
    """One process of the group; the first process also writes the results."""

    def __init__(self, job: Job, rank: int, world: int, file: Any) -> None:
        import torch
        import torch.distributed as dist

        self.job, self.rank, self.world, self.file = job, rank, world, file
        self.torch, self.dist = torch, dist
        self.device = torch.device(job.device, rank if job.device == "cuda" else None)
        self.dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
        self.mesh = dist.device_mesh.init_device_mesh(job.device, (world,))
        self.sleep = MIN_SLEEP
        is_cuda = job.device == "cuda"
        self.cache = torch.empty(L2_BYTES if is_cuda else 1, dtype=torch.int8, device=self.device)
        self.token = torch.zeros(1, device=self.device)

    def run(self, part: str) -> None:
        """Run one part; list it as left out if it fails in the same way in all processes."""
        kind, _, name = part.partition(": ")
        start = time.perf_counter()
        try:
            if kind in ("attention", "peers"):
                batch = next(x for x in batches(self.job.scale) if x.name == name)
                self.attention(batch) if kind == "attention" else self.peers(batch)
            elif kind == "balance":
                self.balance()
            else:
                self.model(name)
        # The other parts still run.
        except Exception as error:
            self.write(left_out=[part, Failure.of(error).why])
        if self.job.device == "cuda":
            self.torch.cuda.empty_cache()
        self.write(done=part, seconds=time.perf_counter() - start)

    def write(self, **line: Any) -> None:
        """Write one line, in the first process."""
        if self.rank == 0:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def row(self, case: dict[str, Any], who: str, **values: Any) -> None:
        """Write the numbers or the lists of samples of a contender."""
        self.write(case=case, who=who, values=values)

    # --- time ---
    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.job.device == "cuda":
            self.torch.cuda.synchronize()

    def _sample(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds of a call, and the seconds that the host takes to launch it.

        On GPUs a collective makes all devices begin at the same time, after the hosts have launched
        the call. So the hosts are ahead of their devices, as in a training step.
        """
        torch, dist = self.torch, self.dist
        if self.job.device != "cuda":
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            return seconds, seconds
        self.cache.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(int(self.sleep * CYCLES))
        dist.all_reduce(self.token)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        self.sleep = min(MAX_SLEEP, max(MIN_SLEEP, 2 * host))
        return begin.elapsed_time(end) / 1e3, host

    def times(self, run: Callable[[], Any], combine: str = "max") -> tuple[list[float], float]:
        """Return samples of the seconds of a call, and the median seconds of the host.

        A sample is the maximum over the processes, or their mean for ``combine="mean"``.
        """
        torch, dist = self.torch, self.dist
        run()
        first = torch.tensor([self._sample(run)[0]], device=self.device)
        dist.broadcast(first, 0)
        count = min(MAX_SAMPLES, max(3, int(self.job.seconds / float(first))))
        samples = [self._sample(run) for _ in range(count)]
        seconds = torch.tensor([x for x, _ in samples], dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX if combine == "max" else dist.ReduceOp.SUM)
        if combine == "mean":
            seconds /= self.world
        return seconds.tolist(), median([host for _, host in samples])

    # --- attention ---
    def attention(self, batch: Batch) -> None:
        """Compare attention of shards with attention of whole rows on one device."""
        torch, (heads, kv_heads, dim) = self.torch, self.job.heads
        generator = torch.Generator(self.device).manual_seed(0)
        total = sum(batch.lengths)

        def random(num_heads: int) -> Any:
            shape = (total, num_heads, dim)
            x = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return x.to(self.dtype)

        values = [random(n) for n in (heads, kv_heads, kv_heads, heads)]
        base = scree.from_lengths(values[0], batch.lengths)
        case = _case(batch)
        whole = [base.with_values(x) for x in values]
        whole_times = self._attention_times(whole, batch.window, "mean")
        self.row(case, "scree, one device", **whole_times)
        cost = self._attention_cost(batch.window)
        ideals = {name: median(whole_times[name]) / self.world for name in ("forward_s", "step_s")}
        for exchange in (None, "heads"):
            shards = [shard(x, self.mesh, cost=cost, exchange=exchange) for x in whole]
            cut: Any = shards[0].layout.cut
            if exchange == "heads" and (kv_heads % self.world or not cut.is_cut):
                continue
            results = self._attention_times(shards, batch.window)
            for name, ideal in ideals.items():
                results[f"{name.removesuffix('_s')}_efficiency_share"] = ideal / median(
                    results[name]
                )
            if exchange is None:
                results["relative_error"] = self._attention_error(whole, shards, batch.window)
                results |= self._communication(shards, batch.window)
            self.row(case, "scree" if exchange is None else f"scree, {exchange}", **results)
            del shards

    def _attend(self, arrays: list[scree.Array], window: int | None) -> Any:
        """Run attention forward and backward; the last array is the gradient of the output."""
        *leaves, out_grad = arrays
        for x in leaves:
            x.values.grad = None
        out = scree.attention(*leaves, causal=True, window=window)
        out.values.backward(out_grad.values)
        return out

    def _attention_times(
        self, arrays: list[scree.Array], window: int | None, combine: str = "max"
    ) -> dict[str, Any]:
        """Return the times of the forward pass and of a step; see `_attend` for `arrays`."""
        plain = [x.with_values(x.values.detach()) for x in arrays]
        leaves = [x.with_values(x.values.detach().requires_grad_()) for x in plain[:3]]
        forward, _ = self.times(
            lambda: scree.attention(*plain[:3], causal=True, window=window), combine
        )
        step, host = self.times(lambda: self._attend([*leaves, plain[3]], window), combine)
        return {"forward_s": forward, "step_s": step, "step_host_s": host}

    def _attention_cost(self, window: int | None) -> tuple[float, float]:
        """Return the cost of a row for `shard`; all devices fit it to the same times."""
        torch, (heads, kv_heads, dim) = self.torch, self.job.heads
        if window is not None:
            return 1, 0
        unit = max(8, 512 // self.job.scale)
        samples = [[unit] * 64, [4 * unit] * 16, [16 * unit] * 4, [32 * unit], [4 * unit] * 4]
        seconds = []
        for lengths in samples:
            values = [
                torch.randn((sum(lengths), n, dim), device=self.device).to(self.dtype)
                for n in (heads, kv_heads, kv_heads, heads)
            ]
            base = scree.from_lengths(values[0], lengths)
            arrays = [base.with_values(x.requires_grad_(i < 3)) for i, x in enumerate(values)]
            seconds.append(median(self.times(partial(self._attend, arrays, None))[0]))
        try:
            return fit_cost(samples, seconds)
        except ValueError:  # the times of tiny rows do not grow with the lengths
            return 1, 1

    def _attention_error(
        self, whole: list[scree.Array], shards: list[scree.Array], window: int | None
    ) -> float:
        """Return the largest difference of results and gradients, relative to the largest number."""
        results = []
        for arrays in (whole, shards):
            leaves = [x.with_values(x.values.detach().requires_grad_()) for x in arrays[:3]]
            out = self._attend([*leaves, arrays[3]], window)
            parts = [out, *(x.with_values(x.values.grad) for x in leaves)]
            results.append([x if x.layout.cut is None else unshard(x) for x in parts])
        errors = []
        for expected, actual in zip(*results, strict=True):
            difference = (actual.values.detach() - expected.values.detach()).abs().max()
            errors.append(float(difference / expected.values.detach().abs().max()))
        return max(errors)

    def _communication(self, shards: list[scree.Array], window: int | None) -> dict[str, float]:
        """Return the bytes that this device receives in a forward pass, and properties of the cut."""
        cut: Any = shards[0].layout.cut
        pieces = np.bincount(cut.pieces.rows, minlength=cut.whole.num_rows)
        tokens = [cut.pieces.lengths[cut.pieces.ranks == r].sum() for r in range(self.world)]
        received = cut.received_tokens(None if window is None else window - 1, 0)
        width = sum(math.prod(x.values.shape[1:]) * x.values.element_size() for x in shards[1:3])
        return {
            "received_bytes": float(received * width),
            "cut_rows_count": float((pieces > 1).sum()),
            "fewest_tokens_count": float(min(tokens)),
        }

    # --- ring-flash-attention ---
    def peers(self, batch: Batch) -> None:
        """Time the zigzag and llama3 forms of ring-flash-attention on the same lengths."""
        torch, (heads, kv_heads, dim) = self.torch, self.job.heads
        lengths, window = batch.lengths, batch.window
        total = sum(lengths) // self.world
        q, k, v, grad = (
            torch.randn((total, n, dim), device=self.device).to(self.dtype)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
        for served in ("torch", "scree") if self.job.device == "cuda" else ("scree",):
            with _ring_flash_attention(self.job.peers, served) as load:
                llama3 = load("llama3_flash_attn_varlen")
                zigzag = load("zigzag_ring_flash_attn_varlen")
                *bounds, local = llama3.llama3_flash_attn_prepare_cu_seqlens(
                    offsets, True, self.rank, self.world
                )
                options = {"causal": True, "group": self.mesh.get_group()}
                forms = {
                    "llama3": partial(
                        llama3.llama3_flash_attn_varlen_func,
                        *leaves,
                        *bounds,
                        heads_k_stride=kv_heads,
                        local_k_slice=local,
                        window_size=(-1, -1) if window is None else (window - 1, 0),
                        **options,
                    ),
                    "zigzag": partial(
                        zigzag.zigzag_ring_flash_attn_varlen_func,
                        *leaves,
                        offsets // self.world,
                        max(lengths) // self.world,
                        **options,
                    ),
                }
                for form, run in forms.items():
                    who = f"ring-flash-attention {form} on {served}"
                    if form == "zigzag" and window is not None:
                        continue  # it has no window over several devices

                    def step(run: Callable[[], Any] = run) -> None:
                        for x in leaves:
                            x.grad = None
                        run().backward(grad)

                    try:
                        step()
                    except Exception as error:
                        self.write(left_out=[f"{batch.name}, {who}", Failure.of(error).why])
                        continue
                    self.row(_case(batch), who, step_s=self.times(step)[0])

    # --- data parallel ---
    def balance(self) -> None:
        """Compare the compute times of the ranks, which no collective equalizes."""
        torch, dist, size = self.torch, self.dist, SIZES[self.job.size]
        unit = max(8, 512 // self.job.scale)
        budget = 64 * unit
        p = models.parameters(size, self.job.device, torch.float32, 0)
        generator = torch.Generator().manual_seed(self.rank)

        def step(lengths: list[int]) -> None:
            shape = (sum(lengths),)
            tokens = torch.randint(0, size.vocabulary, shape, generator=generator)
            ids = scree.from_lengths(tokens.to(self.device), lengths)
            _loss(p, size, ids, self.dtype).backward()
            for x in p.values():
                x.grad = None

        def seconds(lengths: list[int]) -> float:
            samples = []
            for _ in range(4):
                self.synchronize()
                start = time.perf_counter()
                step(lengths)
                self.synchronize()
                samples.append(time.perf_counter() - start)
            return median(samples[1:])

        samples = [
            [unit] * 64,
            [unit] * 32,
            [8 * unit] * 8,
            [8 * unit] * 4,
            [64 * unit],
            [32 * unit],
        ]
        times = torch.tensor([seconds(x) for x in samples], device=self.device)
        dist.broadcast(times, 0)
        fitted = fit_cost(samples, times.cpu().numpy())
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(math.log(unit), 1.5, 3000).astype(int), 1, budget)
        case = {"lengths": f"median {unit}, sigma 1.5", "budget": budget}
        for cost, window in (("tokens", 4), ("fitted", 1), ("fitted", 4)):
            sampler = TokenBudgetSampler(
                lengths,
                budget,
                rank=self.rank,
                num_ranks=self.world,
                cost=(1, 0) if cost == "tokens" else fitted,
                window=window,
            )
            rows = [lengths[batch].tolist() for batch in sampler]
            ratios = []
            # The first window warms up.
            for i in range(0, min(self.job.windows + 1, len(rows) // window) * window, window):
                self.synchronize()
                dist.barrier()
                self.synchronize()
                start = time.perf_counter()
                for batch in rows[i : i + window]:
                    step(batch)
                self.synchronize()
                elapsed = torch.tensor([time.perf_counter() - start], device=self.device)
                gathered = [torch.zeros_like(elapsed) for _ in range(self.world)]
                dist.all_gather(gathered, elapsed)
                times_of_ranks = [float(x) for x in gathered]
                ratios.append(max(times_of_ranks) / (sum(times_of_ranks) / self.world))
            self.row(
                {**case, "window": window},
                f"scree, cost of {cost}" if cost == "tokens" else f"scree, {cost} cost",
                slowest_rank_ratio=ratios[1:],
                token_cost_value=fitted[0] / fitted[1] if fitted[1] else 0.0,
            )

    # --- training ---
    def model(self, name: str) -> None:
        """Train a model on one device, data parallel and context parallel."""
        torch, size = self.torch, SIZES[self.job.size]
        total = 65_536 // self.job.scale
        median_length = max(16, 2048 // self.job.scale)
        lengths = [total] if name == "one document" else log_normal(total, median_length, 1.5, 5)
        generator = torch.Generator().manual_seed(0)
        # One batch per process. One step of data parallel training takes all of them.
        data = []
        for _ in range(self.world):
            tokens = torch.randint(0, size.vocabulary, (total,), generator=generator)
            data.append(scree.from_lengths(tokens.to(self.device), lengths))
        case = {"model": self.job.size, "batch": name, "rows": len(lengths), "tokens": total}
        cost = (6 * size.width, 1)
        modes: dict[str, tuple[list[Any], int]] = {
            "one device": (data[:1], total),
            "one device, all batches": (data, 0),
            "data parallel, DDP": ([data[self.rank]], total * self.world),
            "data parallel, FSDP2": ([data[self.rank]], total * self.world),
            "context parallel, DDP": ([shard(data[0], self.mesh, cost=cost)], total),
        }
        losses: dict[str, list[float]] = {}
        base = 0.0
        for mode, (arrays, tokens) in modes.items():
            values, losses[mode] = self._train(size, mode, arrays, data[0], cost, tokens)
            if not tokens:
                continue
            base = base or values["step_tokens"]
            if mode != "one device":
                values["efficiency_share"] = values["step_tokens"] / base / self.world
                peer = "one device, all batches" if mode.startswith("data") else "one device"
                pairs = zip(losses[mode], losses[peer], strict=True)
                values["loss_error"] = max(abs(a / b - 1) for a, b in pairs)
            values["last_loss_value"] = losses[mode][-1]
            self.row(case, f"scree, {mode}", **values)

    def _train(
        self, size: Size, mode: str, arrays: list[Any], whole: Any, cost: Any, tokens: int
    ) -> tuple[dict[str, Any], list[float]]:
        """Return the measurements of a mode, and the losses of its first steps."""
        torch, dist = self.torch, self.dist
        model: Any = _make_module(size, self.job.device, self.dtype)
        is_parallel = not mode.startswith("one")
        if mode.endswith("FSDP2"):
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=self.mesh)
        elif is_parallel:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        targets = [scree.shift(whole, -1, fill_value=-100)]
        if mode.startswith("context"):
            targets = [shard(targets[0], self.mesh, cost=cost)]
        else:
            targets = [scree.shift(x, -1, fill_value=-100) for x in arrays]
        per_batch = whole.total_length - whole.batch_size
        batches_of_step = self.world if mode.startswith("data") else len(arrays)
        count = per_batch * (1 if mode.startswith("context") else batches_of_step)
        # DDP and FSDP2 take the mean over the processes.
        factor = (self.world if is_parallel else 1) / count

        def step() -> Any:
            total = torch.zeros((), device=self.device)
            for x, y in zip(arrays, targets, strict=True):
                loss = model(x, y)
                (loss * factor).backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total / count

        first = torch.stack([step() for _ in range(LOSS_STEPS)])
        if is_parallel:
            dist.all_reduce(first)
        values: dict[str, Any] = {}
        if tokens:
            combine = "max" if is_parallel else "mean"
            values["step_s"], values["step_host_s"] = self.times(step, combine)
            values["step_tokens"] = tokens / median(values["step_s"])
        if mode.endswith("FSDP2"):
            values |= self._checkpoint(model, optimizer, step)
        return values, first.tolist()

    def _checkpoint(self, model: Any, optimizer: Any, step: Callable[[], Any]) -> dict[str, float]:
        """Save and load a sharded checkpoint, and compare the losses of the next two steps."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        path = Path(self.file.name).parent / "checkpoint"
        start = time.perf_counter()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=path)
        saved = time.perf_counter() - start
        expected = [float(step()) for _ in range(2)]
        start = time.perf_counter()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        loaded = time.perf_counter() - start
        actual = [float(step()) for _ in range(2)]
        return {
            "save_s": saved,
            "load_s": loaded,
            "checkpoint_bytes": float(sum(x.stat().st_size for x in path.glob("*"))),
            "resumed_loss_error": max(
                abs(a / b - 1) for a, b in zip(actual, expected, strict=True)
            ),
        }


def _case(batch: Batch) -> dict[str, Any]:
    return {"batch": batch.name, "rows": len(batch.lengths), "tokens": sum(batch.lengths)}


def _loss(p: dict[str, Any], size: Size, ids: scree.Array, dtype: Any, targets: Any = None) -> Any:
    """Return the sum of the losses of all tokens, with matrix products in `dtype`."""
    if targets is None:
        targets = scree.shift(ids, -1, fill_value=-100)
    p = {name: x.to(dtype) for name, x in p.items()}
    x = models.hidden_states(p, size, ids)
    return scree.linear_cross_entropy(x, p["embedding"], targets, reduction="sum")


def _make_module(size: Size, device: str, dtype: Any) -> Any:
    """Return a module with the parameters of the model, which DDP and FSDP2 wrap."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, x in models.parameters(size, device, torch.float32, 0).items():
                # Names of parameters have no dots.
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(x.detach()))

        def forward(self, ids: scree.Array, targets: scree.Array) -> Any:
            p = {name: getattr(self, name.replace(".", "_")) for name in models.shapes(size)}
            return _loss(p, size, ids, dtype, targets)

    return Module()


@contextmanager
def _ring_flash_attention(folder: str, served: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that loads modules of a checkout of ring-flash-attention.

    Its flash_attn is PyTorch's operators or scree's bridge, as `served` says. The `__init__` of the
    package is skipped, because it imports private names of transformers.
    """
    names = ("flash_attn", "ring_flash_attn")

    def forget() -> dict[str, Any]:
        removed = {name: x for name, x in sys.modules.items() if name.split(".")[0] in names}
        for name in removed:
            del sys.modules[name]
        return removed

    before = forget()
    try:
        if served == "scree":
            import scree.bridges.flash_attn

            scree.bridges.flash_attn.install(force=True)
        else:
            package, interface = (
                ModuleType(names[0]),
                ModuleType(f"{names[0]}.flash_attn_interface"),
            )
            interface.__dict__.update(_flash_operators())
            package.flash_attn_interface = interface  # type: ignore[attr-defined]
            package.__path__ = []
            sys.modules[names[0]], sys.modules[interface.__name__] = package, interface
        peer = ModuleType(names[1])
        peer.__path__ = [str(Path(folder) / names[1])]
        sys.modules[names[1]] = peer
        yield lambda module: import_module(f"{names[1]}.{module}")
    finally:
        forget()
        sys.modules.update(before)


def _flash_operators() -> dict[str, Any]:
    """Return the functions of flash_attn that the peer calls, by PyTorch's operators."""
    import torch

    state: list[Any] = []

    def window(options: dict[str, Any]) -> dict[str, int]:
        left = options.get("window_size_left", -1)
        return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}

    def forward(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, **options: Any,
    ) -> Any:  # fmt: skip
        out, lse, *state[:], _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k),
            0.0, causal, False, scale=softmax_scale, **window(options),
        )  # fmt: skip
        return out, lse, None, state[0]

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
        cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, **options: Any,
    ) -> None:  # fmt: skip
        grads = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out.contiguous(), softmax_lse.contiguous(),
            cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k),
            0.0, causal, *state, scale=softmax_scale, **window(options),
        )  # fmt: skip
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    def missing(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("flash_attn on tensors of equal lengths")

    return {
        "_flash_attn_varlen_forward": forward,
        "_flash_attn_varlen_backward": backward,
        "_flash_attn_forward": missing,
        "_flash_attn_backward": missing,
    }
