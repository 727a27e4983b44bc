"""The processes of `scree-bench shards`: one per GPU, or several on the CPU over gloo.

All processes run the same functions, because each sample ends with a collective. The first process
writes one line of JSON per result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from . import shard_attention, shard_training
from .measure import L2_BYTES, median

#: A collective that waits longer raises.
TIMEOUT = timedelta(seconds=120)
#: The smallest and the largest number of samples. A call of more than LONG_CALL seconds has one.
MIN_SAMPLES, MAX_SAMPLES, LONG_CALL = 3, 15, 2.0
#: Bounds of the seconds that the device sleeps while the host launches a call. The device has at most
#: about CYCLES cycles per second, so it sleeps at least that long.
MIN_SLEEP, MAX_SLEEP, CYCLES = 1e-3, 0.05, 2e9


class Job(NamedTuple):
    """The parts that the processes measure, and their sizes.

    Attributes
    ----------
    device
        "cuda" or "cpu".
    parts
        Names as in "attention: BATCH", "peers: BATCH", "model: BATCH", "settings: BATCH", "mesh: BATCH"
        or "balance".
    scale
        Divisor of the lengths of all batches.
    heads
        Query heads, key heads and head_dim of attention.
    peers
        Folder of a checkout of ring-flash-attention, or "".
    size
        Name of the model in `training.models.SIZES`.
    mesh
        Number of processes over which rows are cut, and number of batches of a step, for "mesh".
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
    mesh: tuple[int, int]
    seconds: float
    windows: int


class Samples(NamedTuple):
    """The times of a call.

    Attributes
    ----------
    seconds
        Samples of the seconds of the slowest process, or of the mean of the processes.
    host
        Median seconds that the host of this process takes to launch the call.
    slowest_ratio
        Median time of the slowest process, relative to the mean of the processes.
    """

    seconds: list[float]
    host: float
    slowest_ratio: float


def worker(rank: int, world: int, job: Job, folder: str) -> None:
    """Run one process of the group; an error in a part ends it, and with it all processes."""
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
        """Run one part."""
        kind, _, name = part.partition(": ")
        start = time.perf_counter()
        if kind == "balance":
            shard_training.balance(self)
        elif kind == "model":
            shard_training.model(self, name)
        elif kind == "settings":
            shard_training.settings(self, name)
        elif kind == "mesh":
            shard_training.mesh(self, name)
        else:
            batch = next(x for x in shard_attention.batches(self.job.scale) if x.name == name)
            run = shard_attention.attention if kind == "attention" else shard_attention.peers
            run(self, batch)
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

    def times(self, run: Callable[[], Any], combine: str = "max") -> Samples:
        """Return the times of a call.

        A sample is the maximum over the processes, or their mean for ``combine="mean"``.
        """
        torch, dist = self.torch, self.dist
        run()
        samples = [self._sample(run)]
        first = torch.tensor([samples[0][0]], device=self.device)
        dist.broadcast(first, 0)
        if float(first) < LONG_CALL:
            count = min(MAX_SAMPLES, max(MIN_SAMPLES, int(self.job.seconds / float(first))))
            samples = [self._sample(run) for _ in range(count)]
        highest = torch.tensor([x for x, _ in samples], dtype=torch.float64, device=self.device)
        mean = highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        mean /= self.world
        seconds = highest if combine == "max" else mean
        host = median([host for _, host in samples])
        return Samples(seconds.tolist(), host, float((highest / mean).median()))
