"""`collectives`: time and bandwidth in a process group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import plots
from ..libraries import resolve_device
from ..measure import Failure, require
from ..options import Device, Out, Quick, parse_numbers
from ..results import Result, unit
from ..session import Session

#: Name -> bytes that must pass each link, relative to the whole buffer, for n processes.
BUS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}

#: A sample is the mean of enough calls that their buffers hold this many bytes.
SAMPLE = {"cuda": 200_000_000, "cpu": 10_000_000}
#: A CPU call with a buffer of at least this many bytes takes seconds: fewer samples are taken.
SLOW_BYTES, SLOW_SAMPLES = 500_000_000, 3
#: Bytes that a process allocates, relative to the buffer.
HELD = 3.0


def _calls(dist: Any, torch: Any, size: int, world: int, device: str) -> dict[str, Any]:
    """Return the calls of each process; the buffers have `size` bytes, split evenly."""
    count = max(1, size // 4 // world)
    whole, part = torch.ones(count * world, device=device), torch.ones(count, device=device)
    gathered = torch.empty_like(whole)
    # PyTorch before 2.13 has only `reduce_scatter_tensor`.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, part),
        "reduce-scatter": lambda: scatter(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(gathered, whole),
    }


def worker(rank: int, world: int, sizes: list[int], device: str, samples: int, folder: str) -> None:
    """Run one process of a group, which writes one line of times per size and operation."""
    import torch
    import torch.distributed as dist

    options = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options = {"device_id": torch.device("cuda", rank)}
    else:
        torch.set_num_threads(1)
    init_method = f"file://{folder}/meet"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method, rank=rank, world_size=world, **options
    )
    with open(Path(folder) / f"times-{rank}", "w", encoding="utf-8") as file:
        for size in sizes:
            for name, call in _calls(dist, torch, size, world, device).items():
                try:
                    calls = -(-SAMPLE[device] // size)
                    slow = device == "cpu" and size >= SLOW_BYTES
                    count = min(samples, SLOW_SAMPLES) if slow else samples
                    times: Any = [
                        _seconds(call, calls, dist, torch, device) for _ in range(count + 1)
                    ][1:]
                # All processes get the same error.
                except Exception as error:
                    times = Failure.of(error).why
                file.write(json.dumps([size, name, times]) + "\n")
                file.flush()
    dist.destroy_process_group()


def _seconds(call: Any, calls: int, dist: Any, torch: Any, device: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def command(
    sizes: Annotated[
        str, typer.Option(help="Buffer sizes in megabytes, separated by commas.")
    ] = "1,10,100,1000",
    worlds: Annotated[
        str, typer.Option(help="Process counts of the groups, separated by commas.")
    ] = "2,4",
    samples: Annotated[
        int, typer.Option(min=2, help="Samples of each; at most three of large buffers on the CPU.")
    ] = 10,
    device: Device = "auto",
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure time and bus bandwidth of collectives, by buffer size and number of processes.

    The collectives are all-reduce, all-gather, reduce-scatter and all-to-all. Bus bandwidth is the
    rate that each link carries: it does not depend on the number of processes. A sample is the
    time of the first process, which starts with the others after a barrier. For small buffers it
    is the mean of several successive calls.
    """
    with Session("collectives", locals(), resolve_device(device)) as session:
        if find_spec("torch") is None:
            return session.leave_out("collectives", "needs PyTorch, which is not installed")
        megabytes, groups = (
            parse_numbers(sizes, "--sizes", kind=float, least=0.001),
            parse_numbers(worlds, "--worlds"),
        )
        if quick:
            megabytes, groups, samples = megabytes[:1], groups[:1], 3
        for world in session.track(groups):
            _group(session, world, [int(x * 1e6) for x in megabytes], samples)
    return None


def _group(session: Session, world: int, sizes: list[int], samples: int) -> None:
    import torch
    import torch.multiprocessing as processes

    if session.device == "cuda" and torch.cuda.device_count() < world:
        return session.leave_out(
            f"{world} processes", f"there are {torch.cuda.device_count()} GPUs"
        )
    feasible = []
    for size in sizes:
        try:
            require(HELD * size * (1 if session.device == "cuda" else world), session.device)
            feasible.append(size)
        except MemoryError as error:
            session.leave_out(f"{world} processes, {size:,} bytes", str(error))
    if not feasible:
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(
                worker,
                (world, feasible, session.device, samples, folder),
                nprocs=world,
                daemon=True,
            )
        # A process that ends with an error is a result.
        except Exception as error:
            session.leave_out(f"the rest of {world} processes", " ".join(str(error).split())[-300:])
        # After an interrupt too.
        finally:
            _read(session, world, Path(folder) / "times-0")
    return None


def _read(session: Session, world: int, written: Path) -> None:
    """Add the times that the first process has written."""
    for line in written.read_text(encoding="utf-8").splitlines() if written.exists() else ():
        size, name, seconds = json.loads(line)
        if isinstance(seconds, str):
            session.leave_out(f"{name}, {world} processes, {size:,} bytes", seconds)
            continue
        row = session.row({"processes": world, "bytes": size, "device": session.device}, name)
        row.add("call_s", seconds)
        row.values["bus_rate"] = BUS[name](world) * size / row.values["call_s"]


def pictures(result: Result) -> plots.Pictures:
    """Return the picture of bus bandwidth by buffer size."""

    def paint(figure: Any) -> None:
        figure.suptitle("Bus bandwidth by size of the buffer, more is better")
        worlds = list(dict.fromkeys(row.case["processes"] for row in result.rows))
        for axes, world in zip(
            figure.subplots(len(worlds), 1, squeeze=False)[:, 0], worlds, strict=True
        ):
            rows = [row for row in result.rows if row.case["processes"] == world]
            plots.curves(axes, rows, "bytes", "bus_rate", f"{world} processes")
            axes.set_xscale("log")
            figure.set_size_inches(plots.SIZE[0], 2.6 * len(worlds) + 0.5)
            axes.xaxis.set_major_formatter(lambda v, _: unit("x_bytes").show(v))

    return {"collectives": paint} if result.rows else {}
