"""`attention`: every attention that can be imported, forward, backward and both, with errors; and sweeps of tile sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from .. import lengths as draws
from .. import plots
from ..libraries import Library, wanted, where
from ..measure import FAILED, PATIENCE, Failure, Thunk
from ..options import Backend, Device, Lengths, Out, Patience, Quick, Seconds, Seed
from ..peers import BACKWARD, Prepared, Work, contenders, distance, ours, reference
from ..results import OK, Result
from ..session import Session

CHECKED = 1e11  # operations up to which a CPU computes the float64 reference; some ten seconds
PHASES = {"forward": 1.0, "backward": BACKWARD, "both": 1 + BACKWARD}  # and their operations over those of the forward pass
SKEWED = (32_768, *(128,) * 255)
TILES = (16, 32, 64, 128)


def _near(median: float, rows: int, seed: int) -> tuple[int, ...]:
    """Log-normal lengths that add up to `rows` times `median`."""
    return tuple(map(int, draws.adding_up(rows, int(rows * median), np.random.default_rng(seed), sigma=0.6)))


#: Name -> lengths, heads, kv_heads, dim, dtype on CUDA. On the CPU all run in float32, with a quarter of the heads.
WORKLOADS: dict[str, tuple[tuple[int, ...], int, int, int, str]] = {
    "seed": (draws.SEED, 16, 16, 64, "float16"),
    "seed-bf16": (draws.SEED, 16, 16, 64, "bfloat16"),
    "hd128": (_near(2048, 8, 1), 16, 16, 128, "bfloat16"),
    "gqa": (_near(2048, 8, 1), 32, 8, 128, "bfloat16"),
    "small": (_near(256, 16, 2), 4, 4, 32, "float16"),
    "skewed": (SKEWED, 16, 16, 128, "bfloat16"),
    "fp32": (draws.SEED, 16, 16, 64, "float32"),
}


def workloads(names: str, device: str, causal: bool, seed: int, quick: bool) -> Iterator[tuple[str, Work]]:
    """The works that go by a name; "shapes" is the sweep over 27 shapes."""
    cuda = device == "cuda"
    for name in (x.strip() for x in names.split(",")):
        if name == "shapes":
            for dim, heads, length in itertools.product((32, 64, 128), (4, 8, 16), (256, 1024, 2048)):
                rows = _near(length // 16 if quick else length, 16, dim + heads + length)
                dtype = "bfloat16" if cuda else "float32"
                yield f"d{dim} h{heads} n{length}", Work(rows, heads, heads, dim, dtype, causal, seed)
        elif name in WORKLOADS:
            rows, heads, kv_heads, dim, dtype = WORKLOADS[name]
            if not cuda:
                heads, kv_heads, dtype = heads // 4, kv_heads // 4, "float32"
            if quick:
                rows = tuple(max(1, n // 16) for n in rows[:32])
            yield name, Work(rows, heads, kv_heads, dim, dtype, causal, seed)
        else:
            raise typer.BadParameter(f"--work: expected shapes or some of {', '.join(WORKLOADS)}, got {name!r}")


def command(
    work: Annotated[str, typer.Option(help=f"Some of {', '.join(WORKLOADS)}, shapes (27 of them).")] = "seed",
    lengths: Lengths = None,
    num_seqs: Annotated[int | None, typer.Option(help="Rows of your own workload.")] = None,
    mean_len: Annotated[float, typer.Option(help="Median length of its rows.")] = 512,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the logarithms of the lengths; 0 is all alike.")] = 0.6,
    heads: int = 8, kv_heads: Annotated[int | None, typer.Option(help="As heads by default.")] = None, dim: int = 64,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16; several with commas between.")] = "float32",
    causal: bool = True,
    tiles: Annotated[bool, typer.Option("--tiles", help="Sweep tile sizes instead, on PyTorch.")] = False,
    only: Annotated[str, typer.Option(help="Peers, by the first letters of their names, with commas between them.")] = "",
    backend: Backend = "all", device: Device = "auto", seed: Seed = 0, seconds: Seconds = 0.5, patience: Patience = PATIENCE,
    quick: Quick = False, out: Out = None,
) -> None:  # fmt: skip
    """Attention against every peer that can be imported: forward, backward and both, and the error against float64.

    Named workloads, or your own by --lengths or --num-seqs. The share is that of the useful operations in this machine's peak
    for matrix products. With --tiles: sequences of 128 to 65,536 tokens, head sizes 16 to 128, and the best tile of each.
    """
    with Session("attention", locals(), where(device)) as session:
        if tiles:
            return sweep(session, quick, seed)
        if lengths is not None or num_seqs is not None:
            rng = np.random.default_rng(seed)
            rows = draws.read(lengths) if lengths else draws.lognormal(num_seqs or 16, mean_len, sigma, rng)
            sizes = tuple(map(int, rows)), heads, kv_heads or heads, dim
            cases = [("yours", Work(*sizes, name.strip(), causal, seed)) for name in dtype.split(",")]
        else:
            cases = list(workloads(work, session.device, causal, seed, quick))
        session.limits()
        for lib in wanted(session, backend):
            for name, what in session.track(cases, lib.name):
                _measure(session, lib, name, what, [x.strip() for x in only.split(",") if x.strip()])
    return None


def _measure(session: Session, lib: Library, name: str, work: Work, only: list[str]) -> None:
    case = {"work": name, "backend": lib.name, "rows": len(work.lengths), "tokens": work.total, "heads": work.heads,
            "kv_heads": work.kv_heads, "dim": work.dim, "dtype": work.dtype, "causal": work.causal}  # fmt: skip
    if work.dtype not in lib.arrays.dtypes:
        return session.leave_out(f"{name} on {lib.name}", f"has no {work.dtype}")
    peers = contenders(session, lib, work, only)
    prepared = {peer.name: _once(lambda peer=peer: peer.prepare(lib, work)) for peer in peers}
    ready = {(who, phase): _once(lambda p=p, phase=phase: _step(lib, p(), phase)) for who, p in prepared.items()
             for phase in _phases(lib)}  # fmt: skip
    limit = session.limits().get(f"matmul_{work.dtype}_flops")
    for phase in _phases(lib):
        builds = {who: ready[who, phase] for who in prepared}
        for row in session.time(case, f"{phase}_s", builds, wait=lib.wait).values():
            if f"{phase}_s" in row.values:
                flops = PHASES[phase] * work.flops / row.values[f"{phase}_s"]
                row.values |= {f"{phase}_flops": flops} | ({f"{phase}_share": flops / limit} if limit else {})
    if session.device == "cpu" and PHASES["both"] * work.flops > CHECKED:
        return session.leave_out(f"errors of {name}", "too many operations for the float64 reference")
    try:
        right = reference(lib, work, gradients=lib.phases is not None)
    except Exception as error:
        return session.leave_out(f"errors of {name}", Failure.of(error).why)
    for phase, name, truth in (("forward", "forward_error", right[:1]), ("both", "gradient_error", right[1:])):
        for who, prepare in prepared.items():
            if f"{phase}_s" in session.row(case, who).values:
                session.value(case, who, name, lambda p=prepare, s=ready[who, phase], t=truth: _error(lib, p(), s(), t))
    return None


def _phases(lib: Library) -> list[str]:
    """What can be timed on a library: MLX has no graph that is kept, NumPy none at all."""
    if lib.phases is None:
        return ["forward"]
    return [phase for phase in PHASES if phase != "backward" or lib.name != "mlx"]


def _once(build: Callable[[], Any]) -> Callable[[], Any]:
    """Build when first asked; a failure comes again each time."""
    kept: list[Any] = []

    def get() -> Any:
        if not kept:
            kept.append(build())
        return kept[0]

    return get


def _step(lib: Library, prepared: Prepared, phase: str) -> Thunk:
    return lib.steps(prepared.function, prepared.args, prepared.cotangent)[phase]()


def _error(lib: Library, prepared: Prepared, step: Thunk, truth: tuple[Any, ...]) -> float:
    found = lib.wait(step())
    parts = found if isinstance(found, tuple | list) else [found]
    return max(distance(lib.wide(prepared.packed(x), t), t) for x, t in zip(parts, truth, strict=True))


# --------------------------------------------------------------------------------------------------- tiles
@contextmanager
def _standard(m: int, n: int) -> Iterator[None]:
    """The standard path with tiles of so many queries and keys."""
    module = import_module("scree.ops.attention")
    with patch.object(module, "QUERIES", m), patch.object(module, "KEYS", n):
        yield


@contextmanager
def _triton(m: int, n: int) -> Iterator[None]:
    """The portable Triton kernels with tiles of so many queries and keys, in all three of them."""
    plans, tuned = import_module("scree_triton.plans"), import_module("scree_triton.tuned")
    tile = tuned.Tile(m, n, 8 if m * n > 8192 else 4, 2)
    with ExitStack() as stack:
        for name, value in (("GLUON", {}), ("portable_tiles", lambda *_: tuned.Tiles(tile, tile, tile)), ("_PLANS", {})):
            stack.enter_context(patch.object(plans, name, value))
        yield


#: Kernel -> how to run it with other tiles.
TILERS: dict[str, Callable[[int, int], AbstractContextManager[None]]] = {"standard": _standard, "triton": _triton}


def sweep(session: Session, quick: bool, seed: int) -> None:
    """Every tile on every shape: each cell is a row of its own, and the best of them is named for each shape."""
    lib = next(iter(wanted(session, "torch")), None)
    if lib is None:
        return
    kernel = "triton" if session.device == "cuda" else "standard"
    sizes = (128, 256) if quick else tuple(2**i for i in range(7, 17 if kernel == "triton" else 12))
    dims, dtypes = ((32,), ("float32",)) if quick else ((16, 32, 64, 128), ("float32", "bfloat16"))
    candidates = (32, 64) if quick else TILES
    for length, dim, dtype in session.track(list(itertools.product(sizes, dims, dtypes)), "tiles"):
        work = Work((length,), 1, 1, dim, dtype, True, seed)
        case = {"kernel": kernel, "length": length, "dim": dim, "dtype": dtype}
        for (m, n), phase in itertools.product(itertools.product(candidates, candidates), PHASES):
            with TILERS[kernel](m, n):  # one after the other: each tile compiles kernels of its own
                builds = {f"{m} x {n}": lambda work=work, phase=phase: _step(lib, ours(kernel)(lib, work), phase)}
                session.time(case, f"{phase}_s", builds, wait=lib.wait)
        rows = [row for row in session.result.rows if row.case == case]
        for phase in PHASES:
            timed = [row for row in rows if f"{phase}_s" in row.values]
            best = min(timed, key=lambda row: row.values[f"{phase}_s"], default=None)
            found = session.row({**case, "best of": phase}, best.who if best else "none")
            if best:
                found.values[f"{phase}_s"] = best.values[f"{phase}_s"]
            else:
                found.add(f"{phase}_s", Failure(FAILED, "no tile runs"))


# ------------------------------------------------------------------------------------------------ pictures
def pictures(result: Result) -> plots.Pictures:
    """Times of each workload, by phase; with more than six workloads, ratios to ours."""
    rows = [row for row in result.rows if row.status == OK and "work" in row.case]
    found: plots.Pictures = {}
    for phase in PHASES:
        value = f"{phase}_s"
        chosen = [row for row in rows if value in row.values]
        if not chosen:
            continue

        def paint(figure: Any, chosen: Any = chosen, value: str = value, phase: str = phase) -> None:
            title = {"both": "Attention, forward and backward"}.get(phase, f"Attention, {phase}")
            groups = plots.grouped(chosen, value, plots.labels(chosen, "rows", "tokens", "heads", "kv_heads", "dim"))
            plots.bars(figure.add_subplot(), groups, value, f"{title}: less is better")

        def ratios(figure: Any, chosen: Any = chosen, value: str = value, phase: str = phase) -> None:
            axes = figure.add_subplot()
            own = {repr(row.case): row.values[value] for row in reversed(chosen) if row.who.startswith("scree")}
            theirs = [row for row in chosen if not row.who.startswith("scree") and repr(row.case) in own]
            for who in dict.fromkeys(row.who for row in theirs):
                points = sorted(own[repr(row.case)] / row.values[value] for row in theirs if row.who == who)
                axes.plot(range(len(points)), points, marker="o", label=who)
            axes.axhline(1, color=axes.xaxis.label.get_color(), linewidth=1, linestyle=":")
            name = {"both": "forward and backward"}.get(phase, phase)
            axes.set(title=f"scree's time over a peer's, {name}: below 1 is faster", xlabel="shapes, sorted", yscale="log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which(lambda v, _: f"{v:.2g}")
            if theirs:
                axes.legend()

        many = len({repr(row.case) for row in chosen}) > 6
        found[f"attention-{phase}"] = ratios if many else paint
    return found
