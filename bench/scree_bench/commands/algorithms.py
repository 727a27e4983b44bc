"""`algorithms`: time and memory of the study implementations of attention.

Compares the estimated with the measured memory and draws how the algorithms work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from .. import plots
from ..algorithms import ALGORITHMS, BLOCK, Algorithm, Shape
from ..libraries import MeasuredLibrary, Step, installed_libraries, resolve_device
from ..measure import require
from ..options import Backend, Device, Out, Quick, Seconds, Seed, parse_numbers
from ..results import OK, Result, Row
from ..session import SECONDS, Session

LENGTHS = {"cpu": "256,512,1024,2048", "cuda": "256,512,1024,2048,4096,8192"}
#: Longest sequence for libraries that compile: they trace the loops unrolled, block by block.
MAX_COMPILED_LENGTH = 1024


def inputs(lib: MeasuredLibrary, shape: Shape, algorithm: Algorithm, seed: int) -> list[Any]:
    """Return random queries, keys and values."""
    normal, kv = lib.normal(seed), algorithm.kv_heads(shape.heads)
    return [normal(shape.n, heads, shape.length, shape.dim) for heads in (shape.heads, kv, kv)]


def command(
    lengths: Annotated[
        str, typer.Option(help=f"Sequence lengths; {LENGTHS['cuda']}, on the CPU up to 2048.")
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences; 4 on CUDA, 1 on the CPU.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of the queries; 12 on CUDA, 4 on the CPU.")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure study implementations of attention, from naive to flash v2, with memory estimates.

    The implementations are naive, flash v1 and v2, sliding window, grouped and multi-query, and
    padding-masked attention. `scree_bench.algorithms` has them, written for reading, once for all
    libraries on the Array API. The values are time, peak memory and the estimate of that memory.
    The pictures show the blocks that each algorithm visits, and its running maximum and sum.
    """
    with Session("algorithms", locals(), resolve_device(device)) as session:
        cuda = session.device == "cuda"
        sizes = parse_numbers(lengths or LENGTHS[session.device], "--lengths")
        batch, heads = batch or (4 if cuda else 1), heads or (12 if cuda else 4)
        if quick:
            sizes, batch, heads, dim = [n for n in sizes if n <= 512] or sizes[:1], 1, 4, 32
        session.result.extra = trace(seed)
        for lib in installed_libraries(session, backend):
            for length in session.track(sizes, lib.name):
                if lib.arrays.compiles and length > MAX_COMPILED_LENGTH:
                    session.leave_out(
                        f"length {length:,} on {lib.name}",
                        "the unrolled loops take too long to compile",
                    )
                    continue
                _measure(session, lib, Shape(batch, heads, length, dim), seed)


def _measure(session: Session, lib: MeasuredLibrary, shape: Shape, seed: int) -> None:
    case = {
        "backend": lib.name,
        "batch": shape.n,
        "heads": shape.heads,
        "dim": shape.dim,
        "length": shape.length,
    }
    steps = {
        name: partial(_step, lib, algorithm, shape, seed) for name, algorithm in ALGORITHMS.items()
    }
    for name, algorithm in ALGORITHMS.items():
        session.row(case, name).values["estimate_bytes"] = float(algorithm.estimate_memory(shape))
    session.time(case, "forward_s", steps, wait=lib.wait)
    for name, build in steps.items():
        if session.row(case, name).status == OK:
            session.value(case, name, "peak_bytes", partial(_peak, lib, build))


def _peak(lib: MeasuredLibrary, build: Callable[[], Step]) -> int:
    return lib.peak(build())


def _step(lib: MeasuredLibrary, algorithm: Algorithm, shape: Shape, seed: int) -> Step:
    require(algorithm.estimate_memory(shape) + 4 * shape.output, lib.device)
    return lib.steps(algorithm.run, inputs(lib, shape, algorithm, seed))["forward"]()


# ---------------------------------------------------------------------------------------- pictures
def trace(seed: int, length: int = 512) -> dict[str, Any]:
    """Return the blocks that each blocked algorithm visits, in order.

    Every visit also has the running maximum and sum of the last query.
    """
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 1, length, 32)) for _ in range(3))
    traced: dict[str, Any] = {"block": BLOCK, "blocks": length // BLOCK, "visits": {}}
    for name in ("flash v1", "flash v2", "sliding window"):
        visits: list[list[float]] = []

        def visit(i: int, j: int, top: Any, total: Any, visits: list[list[float]] = visits) -> None:
            visits.append([i, j, float(top[0, 0, -1, 0]), float(total[0, 0, -1, 0])])

        ALGORITHMS[name].run(q, k, v, visit)
        traced["visits"][name] = visits
    return traced


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of memory and time by length, the estimates, and the visited blocks."""
    drawn: plots.Pictures = {
        "algorithms-blocks": partial(_blocks, result=result),
        "algorithms-softmax": partial(_softmax, result=result),
    }
    for name in dict.fromkeys(row.case["backend"] for row in result.rows):
        rows = [row for row in result.rows if row.case["backend"] == name]
        for metric, value, title in (
            ("memory", "peak_bytes", "Peak memory without the inputs"),
            ("time", "forward_s", "Time of the forward pass"),
        ):
            drawn[f"algorithms-{name}-{metric}"] = partial(
                _line, rows=rows, value=value, title=f"{title}, {name}"
            )
        drawn[f"algorithms-{name}-estimates"] = partial(_estimates, rows=rows, name=name)
    return drawn


def _line(figure: Any, rows: list[Row], value: str, title: str) -> None:
    plots.curves(figure.add_subplot(), rows, "length", value, title)


def _estimates(figure: Any, rows: list[Row], name: str) -> None:
    axes = figure.add_subplot()
    ratios = [
        Row(
            row.case,
            row.who,
            values={"peak_ratio": row.values["peak_bytes"] / row.values["estimate_bytes"]},
        )
        for row in rows
        if "peak_bytes" in row.values
    ]
    plots.curves(axes, ratios, "length", "peak_ratio", f"Measured over estimated memory, {name}")
    max_ratio = max((row.values["peak_ratio"] for row in ratios), default=1)
    axes.set(yscale="linear", ylim=(0, 1.15 * max(max_ratio, 1)))
    axes.yaxis.set_major_locator(plots.ticks(5))
    axes.axhline(1, color=plots.LIMIT, linewidth=1.2, linestyle="--", label="as estimated")


def _blocks(figure: Any, result: Result) -> None:
    """Draw the visited blocks, numbered in order."""
    visits, blocks = result.extra["visits"], result.extra["blocks"]
    figure.set_size_inches(plots.SIZE[0], 2.2)
    figure.suptitle("The blocks that each algorithm visits, in order")
    for axes, (name, steps) in zip(figure.subplots(1, len(visits)), visits.items(), strict=True):
        grid = np.full((blocks, blocks), np.nan)
        for number, (i, j, *_) in enumerate(steps):
            grid[int(i), int(j)] = number
            axes.text(j, i, str(number + 1), ha="center", va="center", fontsize=6, color="#1f2328")
        axes.pcolormesh(
            np.arange(blocks),
            np.arange(blocks),
            np.ma.masked_invalid(grid),
            cmap="YlGnBu",
            vmin=-len(steps),
            vmax=1.6 * len(steps),
        )
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.set(title=name, xlabel="block of keys", xticks=[], yticks=[])
        axes.grid(visible=False)
    figure.axes[0].set_ylabel("block of queries")


def _softmax(figure: Any, result: Result) -> None:
    """Draw the running maximum and sum of the last query."""
    high, total = figure.subplots(2, 1)
    figure.suptitle("The softmax of one query, block by block of the keys")
    figure.set_size_inches(plots.SIZE[0], 4.5)
    for name, steps in result.extra["visits"].items():
        last = [step for step in steps if step[0] == result.extra["blocks"] - 1]
        at = [step[1] + 1 for step in last]
        high.plot(at, [step[2] for step in last], marker="o", label=name, alpha=0.8)
        total.plot(at, [step[3] for step in last], marker="o", label=name, alpha=0.8)
    high.set(title="Running maximum of one query", xlabel="blocks of keys seen")
    total.set(title="Running sum of its exponentials", xlabel="blocks of keys seen")
    high.legend()
