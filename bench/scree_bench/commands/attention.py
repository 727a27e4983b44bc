"""`attention`: time and error of every attention that can be imported, and sweeps of tile sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from .. import comparison, plots, results, shape_ratios
from .. import lengths as draws
from ..attentions import Prepared, scree_attention
from ..libraries import MeasuredLibrary, installed_libraries, resolve_device
from ..measure import FAILED, PATIENCE, Failure, Thunk, median
from ..options import (
    DTYPES,
    Backend,
    Device,
    Lengths,
    Out,
    Patience,
    Quick,
    Seconds,
    Seed,
    parse_numbers,
    parse_words,
)
from ..peers import available_peers
from ..results import OK, Result, Row, Table
from ..session import SECONDS, Session
from ..work import BACKWARD, Work, max_relative_error, reference

SHOWN = (
    "forward_s",
    "forward_share",
    "backward_s",
    "both_s",
    "both_share",
    "forward_host_s",
    "both_host_s",
    "forward_error",
    "gradient_error",
)
#: Name -> head size, heads and mean length of the workloads that "shapes" selects.
SHAPES = {
    f"d{dim} h{heads} n{length}": (dim, heads, length)
    for dim, heads, length in itertools.product((32, 64, 128), (4, 8, 16), (256, 1024, 2048))
}
#: Maximum operations for which a CPU computes the float64 reference, in about ten seconds.
MAX_CHECKED_FLOPS = 1e11
#: Phase -> its operations relative to the forward pass.
PHASES = {"forward": 1.0, "backward": BACKWARD, "both": 1 + BACKWARD}
#: Library -> phase that cannot be timed on it -> reason.
PARTIAL = {
    "numpy": dict.fromkeys(("backward", "both"), "the library does not differentiate"),
    "mlx": {"backward": "the library keeps no graph; the phase both includes it"},
}
SKEWED = (32_768, *(128,) * 255)
TILES = (16, 32, 64, 128)


def _lengths_near(median: float, rows: int, seed: int) -> tuple[int, ...]:
    """Return log-normal lengths that add up to `rows` times `median`."""
    return tuple(
        map(
            int,
            draws.lognormal_with_total(
                rows, int(rows * median), np.random.default_rng(seed), sigma=0.6
            ),
        )
    )


#: Name -> lengths, heads, kv_heads, dim, dtype on CUDA. On the CPU all are float32, with a quarter
#: of the heads and of the row lengths.
WORKLOADS: dict[str, tuple[tuple[int, ...], int, int, int, str]] = {
    "seed": (draws.SEED, 16, 16, 64, "float16"),
    "seed-bf16": (draws.SEED, 16, 16, 64, "bfloat16"),
    "hd128": (draws.LONG, 16, 16, 128, "bfloat16"),
    "gqa": (draws.LONG, 32, 8, 128, "bfloat16"),
    "small": (draws.SHORT, 4, 4, 32, "float16"),
    "skewed": (SKEWED, 16, 16, 128, "bfloat16"),
    "fp32": (draws.SEED, 16, 16, 64, "float32"),
}


def workloads(names: str, device: str, seed: int, quick: bool) -> Iterator[tuple[str, Work]]:
    """Yield the named workloads; "shapes" selects all of `SHAPES`."""
    cuda = device == "cuda"
    selected = parse_words(names, "--work", ("shapes", *SHAPES, *WORKLOADS))
    for name in itertools.chain.from_iterable(
        SHAPES if name == "shapes" else (name,) for name in selected
    ):
        if name in SHAPES:
            dim, heads, length = SHAPES[name]
            rows = _lengths_near(length // 16 if quick else length, 16, dim + heads + length)
            yield name, Work(rows, heads, heads, dim, "bfloat16" if cuda else "float32", seed=seed)
        else:
            rows, heads, kv_heads, dim, dtype = WORKLOADS[name]
            if not cuda:
                rows, heads, kv_heads, dtype = (
                    tuple(n // 4 for n in rows),
                    heads // 4,
                    kv_heads // 4,
                    "float32",
                )
            if quick:
                rows = tuple(max(1, n // 8) for n in rows[:32])
            yield name, Work(rows, heads, kv_heads, dim, dtype, seed=seed)


def custom_lengths(
    lengths: Path | None, count: int, medians: list[int], sigmas: list[float], seed: int
) -> dict[str, tuple[int, ...]]:
    """Return row lengths by name: from a file, or log-normal for each median and sigma."""
    if lengths is not None:
        return {lengths.name: tuple(map(int, draws.read(lengths)))}
    return {
        f"median {median}, sigma {sigma:g}": tuple(
            map(int, draws.lognormal(count, median, sigma, np.random.default_rng(seed)))
        )
        for median, sigma in itertools.product(medians, sigmas)
    }


def command(
    work: Annotated[
        str,
        typer.Option(help=f"Some of {', '.join(WORKLOADS)}, shapes (27: d32 h4 n256 ...); seed."),
    ] = "",
    lengths: Lengths = None,
    num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Rows of a custom workload; default 16.")
    ] = None,
    mean_len: Annotated[str, typer.Option(help="Median length of its rows; default 512.")] = "",
    sigma: Annotated[
        str,
        typer.Option(help="Standard deviation of the log lengths; default 0.6; 0 makes all equal."),
    ] = "",
    heads: Annotated[str, typer.Option(help="Heads of the queries; default 8.")] = "",
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of keys and values; as many by default.")
    ] = None,
    dim: Annotated[str, typer.Option(help="Size of a head; default 64.")] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, float16, bfloat16; float32 is the default.")
    ] = "",
    causal: Annotated[
        str, typer.Option(help="Mask out later tokens: yes, no, or both (yes,no).")
    ] = "yes",
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Sweep tile sizes instead, on PyTorch.")
    ] = False,
    errors: Annotated[bool, typer.Option(help="Compare all results with float64.")] = True,
    only: Annotated[str, typer.Option(help="Peers, by name or prefix of a name.")] = "",
    random: Annotated[
        int | None, typer.Option(min=1, help="Compare this many random shapes instead.")
    ] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON of shapes to compare instead."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no further shape after so many minutes.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard earlier results of these shapes.")
    ] = False,
    compile_processes: Annotated[
        int, typer.Option(min=0, help="Processes that compile the kernels of all shapes first.")
    ] = 0,
    restart: Annotated[
        bool, typer.Option(help="Go on in a new process if a peer ends the process.")
    ] = True,
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure attention against every peer that can be imported: time, and error against float64.

    The phases are forward, backward and both. The workloads are named (--work), or custom with any
    of --lengths, --num-seqs, --mean-len, --sigma, --heads, --kv-heads, --dim and --dtype. Comma
    lists in these options and in --causal give all combinations. The share is the rate of useful
    operations relative to this machine's peak for matrix products. On CUDA, JAX is timed by the clock of
    the GPU, and PyTorch by its events. --tiles finds the best tile of each shape instead: one
    sequence of 128 to 65,536 tokens, head sizes 16 to 128, float32 and bfloat16, unless --mean-len, --dim
    or --dtype select others.

    --random N compares scree with the fastest peer on N shapes drawn with --seed, and --shapes on
    the shapes of a file. With --out, the same command goes on after the last complete shape.
    """
    only_names = [x.strip() for x in only.split(",") if x.strip()]
    if random is not None or shapes is not None:
        config = {k: v for k, v in locals().items() if k != "only_names"}
        deadline = time.time() + 60 * minutes if minutes is not None else math.inf
        options = comparison.Options(
            config, resolve_device(device), seed, random or 0, shapes, tuple(only_names), deadline
        )
        return comparison.run(
            options, processes=compile_processes, restarts=restart, is_fresh=fresh
        )
    with Session("attention", locals(), resolve_device(device)) as session:
        sizes, dims, dtypes = (
            parse_numbers(mean_len, "--mean-len"),
            parse_numbers(dim, "--dim"),
            parse_words(dtype, "--dtype", DTYPES),
        )
        if tiles:
            return sweep(session, sizes, dims, dtypes, seed)
        if lengths or num_seqs or kv_heads or any((mean_len, sigma, heads, dim, dtype)):
            if work:
                raise typer.BadParameter(
                    f"--work: expected none with the options of a custom workload, got {work!r}"
                )
            kinds = itertools.product(
                parse_numbers(heads, "--heads") or [8],
                [kv_heads],
                dims or [64],
                dtypes or ["float32"],
            )
            sigmas = parse_numbers(sigma, "--sigma", kind=float, least=0) or [0.6]
            rows = custom_lengths(lengths, num_seqs or 16, sizes or [512], sigmas, seed)
            works = [
                (name, Work(n, h, kv or h, d, kind, seed=seed))
                for (name, n), (h, kv, d, kind) in itertools.product(rows.items(), kinds)
            ]
        else:
            works = list(workloads(work or "seed", session.device, seed, quick))
        masks = parse_words(causal, "--causal", ("yes", "no"))
        cases = [
            (name, replace(base, causal=mask == "yes"))
            for (name, base), mask in itertools.product(works, masks)
        ]
        session.limits()
        for lib in installed_libraries(session, backend, on_cuda=("jax",)):
            for name, case_work in session.track(cases, lib.name):
                _measure(session, lib, name, case_work, only_names, errors)
    return None


def _measure(
    session: Session, lib: MeasuredLibrary, name: str, work: Work, only: list[str], errors: bool
) -> None:
    case = {
        "work": name,
        "backend": lib.name,
        "rows": len(work.lengths),
        "tokens": work.total,
        "heads": work.heads,
        "kv_heads": work.kv_heads,
        "dim": work.dim,
        "dtype": work.dtype,
        "causal": work.causal,
    }
    if work.dtype not in lib.arrays.dtypes:
        return session.leave_out(f"{name} on {lib.name}", f"has no {work.dtype}")
    peers = available_peers(session, lib, work, only)
    prepared = {peer.name: cache(partial(peer.prepare, lib, work)) for peer in peers}
    steps = {
        (contender, phase): partial(_step, lib, prepare, phase)
        for contender, prepare in prepared.items()
        for phase in _phases(lib)
    }
    ready = {
        (contender, phase): step if phase == "backward" else cache(step)
        for (contender, phase), step in steps.items()
    }
    limit = session.limits().get(f"matmul_{work.dtype}_flops")
    for phase, reason in PARTIAL.get(lib.name, {}).items():
        session.leave_out(f"{phase} on {lib.name}", reason)
    for phase in _phases(lib):
        builds = {
            peer.name: ready[peer.name, phase]
            for peer in peers
            if peer.backward or phase == "forward"
        }
        for row in session.time(
            case, f"{phase}_s", builds, wait=lib.wait, library=lib.name
        ).values():
            if f"{phase}_s" in row.values:
                flops = PHASES[phase] * work.flops / row.values[f"{phase}_s"]
                row.values |= {f"{phase}_flops": flops} | (
                    {f"{phase}_share": flops / limit} if limit else {}
                )
    if not errors:
        return None
    if session.device == "cpu" and PHASES["both"] * work.flops > MAX_CHECKED_FLOPS:
        return session.leave_out(
            f"errors of {name}", "too many operations for the float64 reference"
        )
    try:
        result_and_gradients = reference(lib, work, gradients=lib.phases is not None)
    # Without a reference the times are still valid.
    except Exception as error:
        return session.leave_out(f"errors of {name}", Failure.of(error).why)
    for phase, name, expected in (
        ("forward", "forward_error", result_and_gradients[:1]),
        ("both", "gradient_error", result_and_gradients[1:]),
    ):
        for contender, prepare in prepared.items():
            if f"{phase}_s" in session.row(case, contender).values:
                session.value(
                    case,
                    contender,
                    name,
                    partial(_error, lib, prepare, ready[contender, phase], expected),
                )
    return None


def _phases(lib: MeasuredLibrary) -> list[str]:
    return [phase for phase in PHASES if phase not in PARTIAL.get(lib.name, ())]


def _step(lib: MeasuredLibrary, prepare: Callable[[], Prepared], phase: str) -> Thunk:
    prepared = prepare()
    return lib.steps(prepared.function, prepared.args, prepared.cotangent)[phase]()


def _error(
    lib: MeasuredLibrary,
    prepare: Callable[[], Prepared],
    step: Callable[[], Thunk],
    expected: tuple[Any, ...],
) -> float:
    return max_relative_error(lib, lib.wait(step()()), expected, prepare().packed)


# ------------------------------------------------------------------------------------------- tiles
@contextmanager
def _standard_tiles(m: int, n: int) -> Iterator[None]:
    """Run the standard path with tiles of `m` queries and `n` keys."""
    module = import_module("scree.ops.attention")
    with patch.object(module, "QUERY_TILE", m), patch.object(module, "KEY_TILE", n):
        yield


@contextmanager
def _triton_tiles(m: int, n: int) -> Iterator[None]:
    """Run all three portable Triton kernels with tiles of `m` queries and `n` keys."""
    launch_configs, portable_config, tile_configs = (
        import_module(f"scree_triton.attention.{name}")
        for name in ("launch_configs", "portable_config", "tile_configs")
    )
    tile = tile_configs.Tile(m, n, 8 if m * n > 8192 else 4, 2)
    tiles = tile_configs.Tiles(tile, tile, tile)
    with ExitStack() as stack:
        for module, name, value in (
            (tile_configs, "SM90_TILES", {}),
            (portable_config, "portable_tiles", lambda *_, **__: tiles),
            (launch_configs, "portable_tiles", lambda *_, **__: tiles),
            (launch_configs, "CONFIG_CACHE", {}),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


#: Kernel -> context manager that sets its tile sizes.
TILERS: dict[str, Callable[[int, int], AbstractContextManager[None]]] = {
    "standard": _standard_tiles,
    "triton": _triton_tiles,
}


def sweep(
    session: Session, sizes: list[int], dims: list[int], dtypes: list[str], seed: int
) -> None:
    """Time every tile on every shape, one result row each, and name the best tile per shape.

    The default sizes go up to 65,536 tokens on CUDA and up to 2,048 on the CPU.
    """
    lib = next(iter(installed_libraries(session, "torch")), None)
    if lib is None:
        return
    quick, kernel = session.quick, "triton" if session.device == "cuda" else "standard"
    sizes = sizes or (
        [128, 256] if quick else [2**i for i in range(7, 17 if kernel == "triton" else 12)]
    )
    dims, dtypes = (
        dims or ([32] if quick else [16, 32, 64, 128]),
        dtypes or (["float32"] if quick else ["float32", "bfloat16"]),
    )
    candidates = (32, 64) if quick else TILES
    for length, dim, dtype in session.track(list(itertools.product(sizes, dims, dtypes)), "tiles"):
        work = Work((length,), 1, 1, dim, dtype, True, seed)
        case = {"kernel": kernel, "length": length, "dim": dim, "dtype": dtype}
        for (m, n), phase in itertools.product(itertools.product(candidates, candidates), PHASES):
            # Each tile compiles separate kernels, so the tiles are not interleaved.
            with TILERS[kernel](m, n):
                builds = {
                    f"{m} x {n}": partial(
                        _step, lib, partial(scree_attention(kernel), lib, work), phase
                    )
                }
                session.time(case, f"{phase}_s", builds, wait=lib.wait)
        rows = [row for row in session.result.rows if row.case == case]
        for phase in PHASES:
            timed = [row for row in rows if f"{phase}_s" in row.values]
            best = min(timed, key=lambda row: row.values[f"{phase}_s"], default=None)
            best_row = session.row({**case, "best of": phase}, best.who if best else "none")
            if best:
                best_row.values[f"{phase}_s"] = best.values[f"{phase}_s"]
            else:
                best_row.add(f"{phase}_s", Failure(FAILED, "no tile runs"))


# ----------------------------------------------------------------------------- tables and pictures
def tables(result: Result) -> list[Table]:
    """Return the main values of named workloads, and ratios and times of the sweep over shapes.

    Compared shapes have the tables of `shape_ratios` instead.
    """
    compared = [row for row in result.rows if "shape" in row.case]
    if compared:
        return shape_ratios.tables(compared)
    swept = [row for row in result.rows if row.case.get("work") in SHAPES]
    shown = results.tables([row for row in result.rows if row not in swept], SHOWN)
    if swept:
        shown.append(_ratios(swept))
        shown += [
            results.pivot(swept, f"{phase}_s", ["work"], f"the sweep over shapes, {name}")
            for phase, name in (("forward", "forward"), ("both", "forward and backward"))
        ]
    return shown


def _ratios(rows: Sequence[Row]) -> Table:
    """Return the table of our time over each peer's, over all shapes."""
    lines = []
    scree_values = {repr(row.case): row.values for row in rows if row.who == "scree"}
    for contender in dict.fromkeys(row.who for row in rows if row.who != "scree"):
        for phase in PHASES:
            value = f"{phase}_s"
            ratios = sorted(
                scree_values[repr(row.case)][value] / row.values[value]
                for row in rows
                if row.who == contender
                and value in row.values
                and value in scree_values.get(repr(row.case), ())
            )
            if ratios:
                faster = f"{sum(x <= 1 for x in ratios)} of {len(ratios)}"
                lines.append(
                    [
                        contender,
                        phase,
                        *map(_ratio, (median(ratios), ratios[0], ratios[-1])),
                        faster,
                    ]
                )
    header = ["peer", "", "our time over the peer's, median", "from", "to", "not slower on"]
    return Table("the sweep over shapes, ratios: below 1 is faster", header, lines, [])


def _ratio(x: float) -> str:
    return results.bold(f"{x:.2f}") if results.is_loss(x, "") else f"{x:.2f}"


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the fastest times, the ratios over shapes, and the best tiles."""
    rows = [row for row in result.rows if row.status == OK and "work" in row.case]
    tiled = [row for row in result.rows if row.status == OK and "kernel" in row.case]
    compared = [row for row in result.rows if "shape" in row.case]
    if compared:
        return {"attention-ratios": partial(shape_ratios.picture, rows=compared)}
    drawn: plots.Pictures = {"attention-tiles": partial(_grid, rows=tiled)} if tiled else {}
    for phase, name in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("both", "forward and backward"),
    ):
        timed = [row for row in rows if f"{phase}_s" in row.values]
        swept = [row for row in timed if row.case["work"] in SHAPES]
        named = [row for row in timed if row not in swept]
        if named:
            drawn[f"attention-{phase}"] = partial(_bars, rows=named, phase=phase, name=name)
        if swept:
            drawn[f"attention-shapes-{phase}"] = partial(
                _curves, rows=swept, phase=phase, name=name
            )
    return drawn


def _bars(figure: Any, rows: list[Row], phase: str, name: str) -> None:
    groups = plots.grouped(
        rows, f"{phase}_s", plots.labels(rows, "rows", "tokens", "heads", "kv_heads", "dim")
    )
    title = f"Attention, {name}: less is better, one scale per workload"
    plots.bars(figure.add_subplot(), plots.fastest(groups, 6), f"{phase}_s", title, apart=True)


def _grid(figure: Any, rows: list[Row]) -> None:
    """Draw the best tile of each shape, forward and backward, and the ratio of the worst to it."""
    shapes = {(row.case["dtype"], row.case["dim"]): None for row in rows}
    sizes = sorted({row.case["length"] for row in rows})
    slowdowns = np.full((len(shapes), len(sizes)), np.nan)
    axes = figure.add_subplot()
    for (i, shape), (j, size) in itertools.product(enumerate(shapes), enumerate(sizes)):
        shape_rows = [
            row
            for row in rows
            if (row.case["dtype"], row.case["dim"], row.case["length"]) == (*shape, size)
            and "best of" not in row.case
            and "both_s" in row.values
        ]
        if shape_rows:
            best, *_, slowest = sorted(shape_rows * 2, key=lambda row: row.values["both_s"])
            slowdowns[i, j] = slowest.values["both_s"] / best.values["both_s"]
            axes.text(
                j,
                i,
                f"{best.who}\n{slowdowns[i, j]:.3g}x",
                ha="center",
                va="center",
                fontsize=7,
                color="#1f2328",
            )
    axes.pcolormesh(
        np.arange(len(sizes)),
        np.arange(len(shapes)),
        np.ma.masked_invalid(np.log(slowdowns)),
        cmap="YlOrRd",
        vmin=0,
        vmax=2 * float(np.nanmax(np.log(slowdowns), initial=0.5)),
    )
    axes.invert_yaxis()
    axes.set(
        title="Best tile (queries x keys), and time of the worst tile relative to it",
        xlabel="length",
    )
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_yticks(range(len(shapes)), [f"{dtype}\nhead size {dim}" for dtype, dim in shapes])
    axes.grid(visible=False)
    figure.set_size_inches(plots.SIZE[0], 1.2 + 0.55 * len(shapes))


def _curves(figure: Any, rows: list[Row], phase: str, name: str) -> None:
    axes = figure.add_subplot()
    scree_times = {row.case["work"]: row.values[f"{phase}_s"] for row in rows if row.who == "scree"}
    theirs = [row for row in rows if row.who != "scree" and row.case["work"] in scree_times]
    for contender in dict.fromkeys(row.who for row in theirs):
        points = sorted(
            scree_times[row.case["work"]] / row.values[f"{phase}_s"]
            for row in theirs
            if row.who == contender
        )
        axes.plot(range(1, len(points) + 1), points, marker="o", label=contender)
    axes.axhline(1, color=plots.LIMIT, linewidth=1.2, linestyle="--", label="as fast")
    axes.set(
        title=f"scree's time over a peer's, {name}: below 1 is faster",
        xlabel="shapes, sorted",
        yscale="log",
    )
    axes.set_xticks(range(5, len(scree_times) + 1, 5))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda v, _: f"{v:.2g}")
    if theirs:
        axes.legend()
