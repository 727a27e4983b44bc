"""`shards`: attention and training over several GPUs, or over several processes on the CPU."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import plots
from ..libraries import resolve_device
from ..options import Device, Out, Quick, parse_numbers, parse_words
from ..results import Result
from ..session import Session

#: Device and --quick -> divisor of all lengths.
SCALES = {("cuda", False): 1, ("cuda", True): 16, ("cpu", False): 32, ("cpu", True): 256}
#: Device -> query heads, key heads and head_dim.
HEADS = {"cuda": (32, 8, 128), "cpu": (16, 8, 8)}
#: Device -> default of --size.
SIZE = {"cuda": "124m", "cpu": "tiny"}
PARTS = ("attention", "balance")
MODEL_BATCHES = ("packed", "one document")


def command(
    world: Annotated[
        int, typer.Option(min=2, help="Processes, one per GPU; the batches are cut over them.")
    ] = 2,
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, or nothing.")] = ",".join(
        PARTS
    ),
    batches: Annotated[
        str,
        typer.Option(
            help="Numbers of the batches for attention, from 0; by default 0 to 4, up to 128k tokens. "
            "5 to 7 have 512k tokens."
        ),
    ] = "",
    model: Annotated[
        bool,
        typer.Option("--model", help="Also train a model, data parallel and context parallel."),
    ] = False,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="Also train a model data parallel with several settings of DDP and FSDP2.",
        ),
    ] = False,
    mesh: Annotated[
        str,
        typer.Option(
            help="Context x data, such as 2x2: also train a model whose rows are cut over the first "
            "number of processes, with the second number of batches, and with FSDP2 over all."
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(
            help="Model of --model, --settings, --mesh and balance: 124m on CUDA, tiny on the CPU."
        ),
    ] = "",
    peers: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Checkout of ring-flash-attention: its zigzag and llama3 forms are timed too.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to measure each contender.")] = 0.5,
    device: Device = "auto",
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure attention and training over several GPUs, relative to one GPU.

    A sample is the time of the slowest process. On GPUs a collective makes all devices begin at the
    same time, after the hosts have launched the call. The efficiency is the time of one device,
    divided by the number of devices and by the time of the sample. One device attends to the whole
    rows. Its time is the mean over the devices, which all do this at the same time. The slowest rank
    is the time of the slowest process relative to the mean.

    The balance is the compute time of the slowest process relative to the mean of the processes. It
    is measured per window of batches, before any collective.

    An error in one process ends all processes. It is listed, and the parts after it run in new
    processes.
    """
    with Session("shards", locals(), resolve_device(device)) as session:
        if find_spec("torch") is None:
            return session.leave_out("shards", "needs PyTorch, which is not installed")
        import torch

        from ..shard_workers import Job

        count = torch.cuda.device_count()
        if session.device == "cuda" and count < world:
            return session.leave_out(f"{world} processes", f"there are {count} GPUs")
        scale = SCALES[session.device, quick]
        job = Job(
            session.device,
            _sequence(parts, batches, scale, model, settings, bool(mesh), bool(peers)),
            scale,
            HEADS[session.device],
            str(peers or ""),
            size or SIZE[session.device],
            _parse_mesh(mesh, world),
            seconds / 10 if quick else seconds,
            2 if quick else 8,
        )
        _measure(session, world, job)
    return None


def _sequence(
    parts: str,
    batches: str,
    scale: int,
    has_model: bool,
    has_settings: bool,
    has_mesh: bool,
    has_peers: bool,
) -> tuple[str, ...]:
    """Return the names of the parts in the order in which they run; see `Job`."""
    chosen = parse_words(parts, "--parts", PARTS)
    names = _batch_names(batches, scale) if "attention" in chosen else []
    sequence = [f"attention: {name}" for name in names]
    sequence += ["balance"] if "balance" in chosen else []
    sequence += [f"model: {name}" for name in MODEL_BATCHES if has_model]
    sequence += [f"settings: {MODEL_BATCHES[0]}"] if has_settings else []
    sequence += [f"mesh: {name}" for name in MODEL_BATCHES if has_mesh]
    sequence += [f"peers: {name}" for name in names if has_peers]
    return tuple(sequence)


def _batch_names(batches: str, scale: int) -> list[str]:
    """Return the names of the batches for attention whose numbers the user gave."""
    from ..shard_attention import DEFAULT_BATCHES
    from ..shard_attention import batches as make_batches

    names = [batch.name for batch in make_batches(scale)]
    numbers = parse_numbers(batches, "--batches", least=0) or DEFAULT_BATCHES
    if max(numbers) >= len(names):
        raise typer.BadParameter(f"--batches: expected numbers below {len(names)}, got {batches!r}")
    return [names[i] for i in numbers]


def _parse_mesh(mesh: str, world: int) -> tuple[int, int]:
    """Return the two numbers of --mesh, whose product is the number of processes."""
    numbers = parse_numbers(mesh or f"{world}x1", "--mesh", between="x")
    if len(numbers) != 2 or math.prod(numbers) != world:
        raise typer.BadParameter(
            f"--mesh: expected two numbers with the product {world}, such as {world}x1, got {mesh!r}"
        )
    return numbers[0], numbers[1]


def _measure(session: Session, world: int, job: Any) -> None:
    """Run the parts. If a process fails, list its part, and run the others in new processes."""
    lines: Generator[dict[str, Any]] | None = None
    try:
        for i, part in enumerate(session.track(job.parts)):
            if lines is None:
                lines = _run_processes(world, job._replace(parts=job.parts[i:]))
            try:
                for line in lines:
                    _add(session, world, line)
                    if line.get("done") == part:
                        break
                else:
                    raise RuntimeError("the processes ended before the part did")
            # The results before the error are kept, and the error is listed with them.
            except Exception as error:
                session.leave_out(part, " ".join(str(error).split())[-300:])
                lines = None
            except KeyboardInterrupt:
                session.leave_out(part, "interrupted; its results may be incomplete")
                for name in job.parts[i + 1 :]:
                    session.leave_out(name, "interrupted before its start")
                raise
    # An interrupt must end the processes too.
    finally:
        if lines is not None:
            lines.close()


def _run_processes(world: int, job: Any) -> Generator[dict[str, Any]]:
    """Yield the lines of the first process until all end; raise if one ends with an error."""
    import torch.multiprocessing as processes

    from ..shard_workers import worker

    with tempfile.TemporaryDirectory() as folder:
        context = processes.spawn(
            worker, (world, job, folder), nprocs=world, join=False, daemon=True
        )
        try:
            yield from _lines(context, Path(folder) / "lines-0")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _lines(context: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file until the processes end; raise if one ends with an error."""
    position, has_ended = 0, False
    while not has_ended:
        error = None
        try:
            has_ended = context.join(timeout=0.2)
        # The lines that were written before the error are yielded first.
        except Exception as caught:
            error = caught
        text = path.read_text(encoding="utf-8")[position:] if path.exists() else ""
        end = text.rfind("\n") + 1
        position += end
        yield from map(json.loads, text[:end].splitlines())
        if error is not None:
            raise error


def _add(session: Session, world: int, line: dict[str, Any]) -> None:
    """Add a line of the first process to the results."""
    if "left_out" in line:
        session.leave_out(*line["left_out"])
    if "done" in line:
        seconds: dict[str, float] = session.result.extra.setdefault("part_seconds", {})
        seconds[line["done"]] = line["seconds"]
    if "who" not in line:
        return
    row = session.row({**line["case"], "processes": world, "device": session.device}, line["who"])
    for name, value in line["values"].items():
        if isinstance(value, list):
            row.add(name, value)
        else:
            row.values[name] = value


def pictures(result: Result) -> plots.Pictures:
    """Return a bar chart of the time of a step per batch."""
    rows = [row for row in result.rows if "step_s" in row.values]
    title = "Forward and backward pass, or step of training, less is better"

    def paint(figure: Any) -> None:
        groups = plots.grouped(rows, "step_s", plots.labels(rows, "rows", "model"))
        plots.bars(figure.subplots(), groups, "step_s", title, apart=True)

    return {"shards": paint} if rows else {}
