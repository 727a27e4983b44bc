"""Training in the processes of `scree-bench shards`: data parallel and context parallel."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scree
from scree.data import TokenBudgetSampler, fit_cost
from scree.distributed import shard

from .measure import median
from .shard_attention import log_normal
from .training import models
from .training.models import SIZES, Size

if TYPE_CHECKING:
    from .shard_workers import Worker

#: Steps whose losses are compared.
LOSS_STEPS = 4
#: Settings of data parallel training, see `_wrap`.
SETTINGS = (
    "DDP",
    "DDP, buckets of 100 MB",
    "DDP, sums in bfloat16",
    "FSDP2",
    "FSDP2, sums in bfloat16",
    "FSDP2, parameters kept",
)
#: Tokens of a batch. Models of at least LARGE parameters have larger activations, so they take LARGE_TOKENS.
TOKENS, LARGE_TOKENS, LARGE = 65_536, 16_384, 1_000_000_000


# --- balance ---
def balance(process: Worker) -> None:
    """Compare the compute times of the ranks, which no collective equalizes."""
    unit = _usual_length(process)
    budget, step, fitted = 64 * unit, _make_step(process), _training_cost(process)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(unit), 1.5, 3000).astype(int), 1, budget)
    case = {"lengths": f"median {unit}, sigma 1.5", "budget": budget}
    for name, cost, window in (
        ("cost of tokens", (1.0, 0.0), 4),
        ("fitted cost", fitted, 1),
        ("fitted cost", fitted, 4),
    ):
        sampler = TokenBudgetSampler(
            lengths, budget, rank=process.rank, num_ranks=process.world, cost=cost, window=window
        )
        steps = [lengths[batch].tolist() for batch in sampler]
        process.row(
            {**case, "window": window},
            f"scree, {name}",
            slowest_rank_ratio=_slowest_ratios(process, step, steps, window),
            token_cost_value=fitted[0] / fitted[1] if fitted[1] else 0.0,
        )


def _usual_length(process: Worker) -> int:
    """Return the median length of the rows of `balance`."""
    usual = 256 if _is_large(SIZES[process.job.size]) else 512
    return max(8, usual // process.job.scale)


def _make_step(process: Worker) -> Callable[[list[int]], None]:
    """Return a function that runs forward and backward on random tokens of some lengths."""
    torch, size = process.torch, SIZES[process.job.size]
    p = models.parameters(size, process.job.device, torch.float32, 0)
    generator = torch.Generator().manual_seed(process.rank)

    def step(lengths: list[int]) -> None:
        tokens = torch.randint(0, size.vocabulary, (sum(lengths),), generator=generator)
        ids = scree.from_lengths(tokens.to(process.device), lengths)
        _loss(p, size, ids, process.dtype).backward()
        for x in p.values():
            x.grad = None

    return step


@cache
def _training_cost(process: Worker) -> tuple[float, float]:
    """Return the cost of a row, fitted on the first process to the times of some batches."""
    unit, step = _usual_length(process), _make_step(process)
    batches = [[unit] * 64, [unit] * 32, [8 * unit] * 8, [8 * unit] * 4, [64 * unit], [32 * unit]]
    seconds = []
    for lengths in batches:
        samples = [_seconds(process, partial(step, lengths)) for _ in range(4)]
        seconds.append(median(samples[1:]))
    times = process.torch.tensor(seconds, device=process.device)
    process.dist.broadcast(times, 0)
    try:
        return fit_cost(batches, times.cpu().numpy())
    except ValueError:  # the times of tiny rows do not grow with the lengths
        return 6.0 * SIZES[process.job.size].width, 1.0


def _slowest_ratios(
    process: Worker, step: Callable[[list[int]], None], batches: list[list[int]], window: int
) -> list[float]:
    """Return the time of the slowest rank over the mean of the ranks, per window of batches."""
    torch, dist = process.torch, process.dist
    ratios = []
    count = min(process.job.windows + 1, len(batches) // window)

    def run(batches: list[list[int]]) -> None:
        for batch in batches:
            step(batch)

    for i in range(0, count * window, window):
        process.synchronize()
        dist.barrier()
        elapsed = _seconds(process, partial(run, batches[i : i + window]))
        highest = torch.tensor([elapsed], dtype=torch.float64, device=process.device)
        total = highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        ratios.append(float(highest / total) * process.world)
    # The first window warms up.
    return ratios[1:]


def _seconds(process: Worker, run: Callable[[], Any]) -> float:
    """Return the seconds of a call on this process alone."""
    process.synchronize()
    start = time.perf_counter()
    run()
    process.synchronize()
    return time.perf_counter() - start


# --- models ---
class Mode(NamedTuple):
    """A way to train a model.

    Attributes
    ----------
    name
        The name in the results.
    arrays, targets
        The token ids and the targets of this process.
    num_batches
        Number of batches of a step, over all processes.
    wrapper
        "DDP" or "FSDP2", also with a setting of `SETTINGS`, or "" for one device.
    peer
        The mode on one device that has the same losses, or "".
    is_timed
        Whether steps are timed, or only their losses are compared.
    """

    name: str
    arrays: list[scree.Array]
    targets: list[scree.Array]
    num_batches: int
    wrapper: str = ""
    peer: str = ""
    is_timed: bool = True


class Batches(NamedTuple):
    """Token ids and targets of some batches with equal lengths."""

    lengths: list[int]
    ids: list[scree.Array]
    targets: list[scree.Array]


def model(process: Worker, name: str) -> None:
    """Train a model on one device, data parallel and context parallel."""
    world, rank = process.world, process.rank
    # One batch per process. One step of data parallel training takes all of them.
    data = _make_batches(process, name, world)
    ids, targets = data.ids, data.targets
    share, cost = slice(rank, rank + 1), _training_cost(process)
    cut_ids, cut_targets = (
        [shard(x[0], process.mesh, cost=cost, causal=True)] for x in (ids, targets)
    )
    everything = "one device, all batches"
    _compare(
        process,
        name,
        data.lengths,
        [
            Mode("one device", ids[:1], targets[:1], 1),
            Mode(everything, ids, targets, world, is_timed=False),
            Mode("data parallel, DDP", ids[share], targets[share], world, "DDP", everything),
            Mode("data parallel, FSDP2", ids[share], targets[share], world, "FSDP2", everything),
            Mode("context parallel, DDP", cut_ids, cut_targets, 1, "DDP", "one device"),
            Mode("context parallel, FSDP2", cut_ids, cut_targets, 1, "FSDP2", "one device"),
        ],
    )


def settings(process: Worker, name: str) -> None:
    """Train a model data parallel with several settings of DDP and FSDP2.

    With two batches per process and step, the gradients are summed over the processes once per step.
    """
    world, rank = process.world, process.rank
    # DDP's hook of these sums needs NCCL.
    needs_nccl = "DDP, sums in bfloat16"
    single = [x for x in SETTINGS if process.job.device == "cuda" or x != needs_nccl]
    for count, wrappers in ((1, single), (2, ["DDP", "FSDP2"])):
        data = _make_batches(process, name, count * world)
        share, everything = slice(count * rank, count * (rank + 1)), "one device, all batches"
        _compare(
            process,
            name if count == 1 else f"{name}, {count} batches per step",
            data.lengths * count,
            [
                Mode("one device", data.ids[:count], data.targets[:count], 1),
                Mode(everything, data.ids, data.targets, world, is_timed=False),
                *(
                    Mode(
                        f"data parallel, {x}",
                        data.ids[share],
                        data.targets[share],
                        world,
                        x,
                        everything,
                    )
                    for x in wrappers
                ),
            ],
        )


def mesh(process: Worker, name: str) -> None:
    """Train a model on one device, and on a mesh of processes with FSDP2 over all of them.

    One axis of the mesh has the batches. The rows of each batch are cut over the other axis.
    """
    num_parts, num_batches = process.job.mesh
    axes = process.dist.device_mesh.init_device_mesh(
        process.job.device, (num_batches, num_parts), mesh_dim_names=("data", "context")
    )
    data = _make_batches(process, name, num_batches)
    index, cost = axes["data"].get_local_rank(), _training_cost(process)
    cut_ids, cut_targets = (
        [shard(x[index], axes["context"], cost=cost, causal=True)] for x in (data.ids, data.targets)
    )
    peer = f"one device, {num_batches} batches"
    name_of_mesh = f"context {num_parts} x data {num_batches}"
    _compare(
        process,
        name,
        data.lengths,
        [
            Mode("one device", data.ids[:1], data.targets[:1], 1),
            Mode(peer, data.ids, data.targets, num_batches, is_timed=False),
            Mode(name_of_mesh, cut_ids, cut_targets, num_batches, "FSDP2", peer),
        ],
    )


def _is_large(size: Size) -> bool:
    """Return whether a model takes the batches for large models."""
    return sum(map(math.prod, models.shapes(size).values())) >= LARGE


def _make_batches(process: Worker, name: str, count: int) -> Batches:
    """Return `count` batches of random tokens, equal on all processes."""
    size, torch = SIZES[process.job.size], process.torch
    total = (LARGE_TOKENS if _is_large(size) else TOKENS) // process.job.scale
    median_length = max(16, 2048 // process.job.scale)
    lengths = [total] if name == "one document" else log_normal(total, median_length, 1.5, 5)
    generator = torch.Generator().manual_seed(0)
    ids = []
    for _ in range(count):
        tokens = torch.randint(0, size.vocabulary, (total,), generator=generator)
        ids.append(scree.from_lengths(tokens.to(process.device), lengths))
    return Batches(lengths, ids, [scree.shift(x, -1, fill_value=-100) for x in ids])


def _compare(process: Worker, name: str, lengths: list[int], modes: list[Mode]) -> None:
    """Train in all modes; the efficiency is relative to the first."""
    losses: dict[str, list[float]] = {}
    total, base = sum(lengths), 0.0
    case = {"model": process.job.size, "batch": name, "rows": len(lengths), "tokens": total}
    for mode in modes:
        # Each row has one token without a target.
        values, losses[mode.name] = _train(process, mode, total - len(lengths))
        gc.collect()  # wrapped modules have reference cycles
        if not mode.is_timed:
            continue
        values["step_tokens"] = mode.num_batches * total / median(values["step_s"])
        base = base or values["step_tokens"]
        if mode.peer:
            values["efficiency_share"] = values["step_tokens"] / base / process.world
            pairs = zip(losses[mode.name], losses[mode.peer], strict=True)
            values["loss_error"] = max(abs(a / b - 1) for a, b in pairs)
        values["last_loss_value"] = losses[mode.name][-1]
        process.row(case, f"scree, {mode.name}", **values)


def _train(
    process: Worker, mode: Mode, tokens_per_batch: int
) -> tuple[dict[str, Any], list[float]]:
    """Return the measurements of a mode, and the losses of its first steps."""
    from torch.distributed.fsdp import FSDPModule

    torch, size = process.torch, SIZES[process.job.size]
    if process.job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    module = _wrap(process, _make_module(size, process.job.device, process.dtype), mode.wrapper)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    count = tokens_per_batch * mode.num_batches
    # DDP and FSDP2 take the mean over the processes.
    factor = (process.world if mode.wrapper else 1) / count

    last = len(mode.arrays) - 1

    def step() -> Any:
        total = torch.zeros((), device=process.device)
        for i, (x, y) in enumerate(zip(mode.arrays, mode.targets, strict=True)):
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(i == last)
            with module.no_sync() if i < last and hasattr(module, "no_sync") else nullcontext():
                loss = module(x, y)
                (loss * factor).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total / count

    first = torch.stack([step() for _ in range(LOSS_STEPS)])
    if mode.wrapper:
        process.dist.all_reduce(first)
    values: dict[str, Any] = {}
    if mode.is_timed:
        times = process.times(step, "max" if mode.wrapper else "mean")
        values = {
            "step_s": times.seconds,
            "step_host_s": times.host,
            "slowest_rank_ratio": times.slowest_ratio,
        }
        if process.job.device == "cuda":
            values["memory_bytes"] = float(torch.cuda.max_memory_allocated())
    parameters = sum(x.numel() for x in module.parameters())
    if mode.name == "data parallel, FSDP2" and parameters < LARGE:
        values |= _checkpoint(process, module, optimizer, step)
    return values, first.tolist()


def _wrap(process: Worker, module: Any, wrapper: str) -> Any:
    """Return a module whose gradients are means over all processes; "" for one device."""
    torch = process.torch
    kind, _, setting = wrapper.partition(", ")
    if kind == "DDP":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        module = torch.nn.parallel.DistributedDataParallel(
            module,
            gradient_as_bucket_view=True,
            bucket_cap_mb=100 if setting == "buckets of 100 MB" else None,
        )
        if setting == "sums in bfloat16":
            module.register_comm_hook(None, bf16_compress_hook)
    elif kind == "FSDP2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Inputs of layers already have the dtype of the parameters.
        policy = MixedPrecisionPolicy(
            param_dtype=process.dtype,
            reduce_dtype=torch.bfloat16 if setting == "sums in bfloat16" else torch.float32,
            cast_forward_inputs=False,
        )
        # Whether each layer is gathered again in the backward pass.
        reshards = setting != "parameters kept"
        # One gather per layer, which runs during the layer before it.
        for layer in module.layers:
            fully_shard(layer, mesh=process.mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(module, mesh=process.mesh, mp_policy=policy, reshard_after_forward=reshards)
    return module


def _checkpoint(
    process: Worker, module: Any, optimizer: Any, step: Callable[[], Any]
) -> dict[str, float]:
    """Save and load a sharded checkpoint, and compare the losses of the next two steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    path = Path(process.file.name).parent / "checkpoint"
    start = time.perf_counter()
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    saved = time.perf_counter() - start
    expected = [float(step()) for _ in range(2)]
    start = time.perf_counter()
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = time.perf_counter() - start
    actual = [float(step()) for _ in range(2)]
    return {
        "save_s": saved,
        "load_s": loaded,
        "checkpoint_bytes": float(sum(x.stat().st_size for x in path.glob("*"))),
        "resumed_loss_error": max(abs(a / b - 1) for a, b in zip(actual, expected, strict=True)),
    }


def _loss(p: dict[str, Any], size: Size, ids: scree.Array, dtype: Any) -> Any:
    """Return the sum of the losses of all tokens, with matrix products in `dtype`."""
    targets = scree.shift(ids, -1, fill_value=-100)
    p = {name: x.to(dtype) for name, x in p.items()}
    x = models.hidden_states(p, size, ids)
    return scree.linear_cross_entropy(x, p["embedding"], targets, reduction="sum")


def _make_module(size: Size, device: str, dtype: Any) -> Any:
    """Return a module that computes the sum of the losses, with one module per layer."""
    import torch

    class Parameters(torch.nn.Module):
        """Parameters by name; `read` converts them to the dtype of matrix products."""

        def __init__(self, parameters: dict[str, Any]) -> None:
            super().__init__()
            self.names = list(parameters)
            for name, x in parameters.items():
                # Names of parameters have no dots.
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(x.detach()))

        def read(self) -> dict[str, Any]:
            return {name: getattr(self, name.replace(".", "_")).to(dtype) for name in self.names}

    class Layer(Parameters):
        def forward(self, tokens: scree.Array, branch: Any, residual: Any) -> Any:
            return models.layer(self.read(), size, tokens, branch, residual)

    class Model(Parameters):
        def __init__(self, parameters: dict[str, Any]) -> None:
            outer = {name: x for name, x in parameters.items() if not name[0].isdigit()}
            super().__init__(outer)
            layers = [models.layer_parameters(parameters, i) for i in range(size.layers)]
            self.layers = torch.nn.ModuleList([Layer(x) for x in layers])

        def forward(self, ids: scree.Array, targets: scree.Array) -> Any:
            p = self.read()
            x = models.hidden_states(p, size, ids, layers=list(self.layers))
            return scree.linear_cross_entropy(x, p["embedding"], targets, reduction="sum")

    return Model(models.parameters(size, device, torch.float32, 0))
