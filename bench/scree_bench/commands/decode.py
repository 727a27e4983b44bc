"""`decode`: attention and appends to a paged key-value cache, relative to a plain copy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from .. import caches, plots, results, vllm_checkout
from ..caches import Batch, Cache, Make
from ..libraries import MeasuredLibrary, installed_libraries, resolve_device
from ..measure import PATIENCE, before_launch_samples, median
from ..options import (
    Backend,
    Device,
    Dtype,
    Out,
    Patience,
    Quick,
    Seconds,
    Seed,
    data_type,
    parse_words,
)
from ..peers import HALF_DTYPES, importable
from ..results import Result, Row, Table
from ..session import Session

#: Seconds of measurement per contender and case: the whole run on a GPU takes about 4 minutes.
SECONDS = 0.1
SHOWN = (
    "call_s",
    "call_rate",
    "call_of_copy_share",
    "clean_l2_s",
    "clean_l2_rate",
    "call_host_s",
    "before_launch_s",
    "plan_s",
    "less_floor_s",
    "relative_ratio",
    "speedup_value",
    "relative_error",
)
#: Name -> module and build of the peers on CUDA.
PEERS: dict[str, tuple[str, Make]] = {
    "FlashInfer": ("flashinfer", caches.flashinfer_attend),
    "FA3 (contiguous)": ("fa3_fwd_interface", caches.fa3_contiguous),
    "FA4": ("flash_attn.cute", caches.fa4_paged),
    "vLLM (Triton)": (vllm_checkout.MODULE, caches.vllm_attend),
}
#: Kinds that run on JAX.
JAX_KINDS = ("decode", "append")
#: Kinds that are also timed with a cache L2 that has no lines to write back.
CLEAN_KINDS = ("decode", "fp8", "shared")
#: Random shapes are drawn from these.
SHAPES = {
    "page_size": (1, 8, 16, 64, 256),
    "kv_heads": (1, 2, 4, 8),
    "group": (1, 2, 4, 8),
    "dim": (64, 128),
}
RANDOM_SHAPES, RANDOM_TOKENS, LONGEST = 12, 1 << 19, 1 << 17


class Sizes(NamedTuple):
    """Sizes of the cases of a device.

    Attributes
    ----------
    decode
        (rows, shortest, longest, page sizes) of each case.
    skew
        (rows, mean length, ratio of the longest row to the others).
    mixed
        (queries of the prefill, rows that decode, their length).
    append
        (rows, length).
    shared
        (rows, shared tokens, private tokens).
    fp8
        (rows, length, page sizes) of each case.
    random
        (number of shapes, tokens of the largest).
    """

    decode: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    skew: tuple[int, int, int]
    mixed: tuple[int, int, int]
    append: tuple[int, int]
    shared: tuple[int, int, int]
    fp8: tuple[tuple[int, int, tuple[int, ...]], ...]
    random: tuple[int, int]


CUDA = Sizes(
    decode=(
        (32, 4096, 4096, (16, 256)),
        (64, 4096, 4096, (16, 256)),
        (64, 512, 8192, (16, 256)),
        (256, 100, 2000, (16, 256)),
        (1, 1024, 1024, (16, 256)),
        (1, 32768, 32768, (16, 256)),
        (1, 131072, 131072, (16, 256)),
    ),
    skew=(64, 4096, 100),
    mixed=(2048, 63, 4096),
    append=(64, 4096),
    shared=(256, 32768, 128),
    fp8=((32, 4096, (16, 256)), (64, 4096, (16, 256))),
    random=(RANDOM_SHAPES, RANDOM_TOKENS),
)
CPU = Sizes(
    decode=((8, 2048, 2048, (16,)), (8, 512, 2048, (16,))),
    skew=(8, 1024, 100),
    mixed=(256, 7, 1024),
    append=(8, 2048),
    shared=(16, 1024, 64),
    fp8=((8, 1024, (16,)),),
    random=(4, 1 << 13),
)
TINY = Sizes(
    decode=((3, 20, 40, (4, 16)),),
    skew=(4, 32, 100),
    mixed=(24, 3, 20),
    append=(4, 20),
    shared=(4, 32, 8),
    fp8=((3, 20, (4,)),),
    random=(3, 128),
)


class Contender(NamedTuple):
    """A contender: its arrays, its build, the bytes it has to move, and whether it attends."""

    cache: Callable[[], Cache]
    make: Make
    traffic: float
    attends: bool = True


def command(
    kinds: Annotated[
        str, typer.Option(help="decode, skew, mixed, append, shared, fp8, random; all by default.")
    ] = "",
    backend: Backend = "numpy,torch",
    dtype: Dtype = "",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure attention and appends to a paged key-value cache, relative to a plain copy.

    Only the keys and values of the rows count as bytes, and for an append those that are read and
    written. On CUDA, the host time is the time of a whole call with its launches. The time of scree
    before its first launch, and the plan of FlashInfer, are timed apart. The environment variable
    VLLM_CHECKOUT names a checkout of vLLM, whose Triton attention is then a contender. On the CPU, the
    peer gathers the pages and calls padded attention. On JAX the calls run under `jax.jit`, and an
    append updates donated caches.
    """
    chosen = parse_words(kinds, "--kinds", KINDS) or list(KINDS)
    with Session("decode", locals(), resolve_device(device)) as session:
        dtype = data_type(dtype, session.device)
        sizes = TINY if session.quick else CUDA if session.device == "cuda" else CPU
        session.limits()
        if vllm := os.environ.get("VLLM_CHECKOUT"):
            vllm_checkout.load(Path(vllm))
        for lib in installed_libraries(
            session, backend, ("numpy", "torch", "jax"), on_cuda=("jax",)
        ):
            if dtype not in lib.arrays.dtypes:
                session.leave_out(lib.name, f"has no {dtype}")
                continue
            run = Run(session, lib, dtype, sizes, seed)
            kinds_of_lib = [x for x in chosen if lib.name != "jax" or x in JAX_KINDS]
            for kind in (x for x in chosen if x not in kinds_of_lib):
                session.leave_out(f"{kind} on jax", "runs on the other libraries only")
            jobs = [job for kind in kinds_of_lib for job in KINDS[kind](run)]
            for job in session.track(jobs, lib.name):
                job()


class Run(NamedTuple):
    """A library, with the sizes and options of a run."""

    session: Session
    lib: MeasuredLibrary
    dtype: str
    sizes: Sizes
    seed: int

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the cache."""
        return 2 if self.dtype in HALF_DTYPES else 4

    def batch(self, name: str, lengths: Any, page_size: int = 16, **options: Any) -> Batch:
        """Return a batch with the heads of the run: 32 and 8 of size 128, or tiny ones."""
        heads = {"heads": 4, "kv_heads": 2, "dim": 16} if self.session.quick else {}
        lengths = tuple(int(n) for n in lengths)
        return Batch(name, lengths, page_size, **{**heads, "seed": self.seed, **options})

    def arrays(self, batch: Batch, **options: Any) -> Callable[[], Cache]:
        """Return a function that makes the arrays of a batch once."""
        return cache(partial(caches.make_cache, self.lib, batch, self.dtype, **options))

    def peers(self) -> dict[str, Make]:
        """Return the peers that can run here; the session notes the others."""
        if self.session.device != "cuda":
            for name in PEERS:
                self.session.leave_out(name, "runs on CUDA devices only")
            return {"gather, padded SDPA": caches.padded_sdpa}
        if self.lib.name == "jax":
            return {"scree, standard path": caches.standard_paged}
        peers = {}
        for name, (module, make) in PEERS.items():
            if reason := self.unavailable(module):
                self.session.leave_out(name, reason)
            else:
                peers[name] = make
        return peers

    def loads_only(self, arrays: Callable[[], Cache], traffic: float) -> dict[str, Contender]:
        """Return the limit that only reads the pages, for PyTorch on CUDA."""
        if self.session.device != "cuda" or self.lib.name != "torch":
            return {}
        return {"loads only": Contender(arrays, caches.loads_only, traffic, attends=False)}

    def unavailable(self, module: str) -> str | None:
        """Return the reason why a kernel package cannot run, or None."""
        if self.session.device != "cuda":
            return "runs on CUDA devices only"
        if self.lib.name != "torch":
            return "runs on PyTorch only"
        if self.dtype not in HALF_DTYPES:
            return f"takes {' and '.join(HALF_DTYPES)}, not {self.dtype}"
        if not importable(module):
            if module == vllm_checkout.MODULE:
                return "needs a checkout of vLLM; set VLLM_CHECKOUT"
            return f"{module} cannot be imported"
        try:
            import_module(module)
        # A package may also be incompatible with its dependencies.
        except Exception as error:
            return f"cannot be imported ({type(error).__name__}: {str(error)[:200]})"
        return None

    def measure(
        self, case: Mapping[str, Any], contenders: Mapping[str, Contender]
    ) -> dict[str, Row]:
        """Time contenders, and add rates, shares of the copy rate, and errors to their rows."""
        session, lib = self.session, self.lib
        builds = {
            name: cache(lambda x=contender: x.make(x.cache()))
            for name, contender in contenders.items()
        }
        rows = session.time(case, "call_s", builds, wait=lib.wait, library=lib.name)
        if session.device == "cuda" and lib.name == "torch" and case["kind"] in CLEAN_KINDS:
            session.time(
                case, "clean_l2_s", builds, wait=lib.wait, has_host_times=False, has_clean_l2=True
            )
        copy_rate = session.limits().get("copy_rate")
        references: dict[int, Any] = {}
        for name, row in rows.items():
            contender = contenders[name]
            if "call_s" not in row.values:
                continue
            if contender.traffic:
                rate = contender.traffic / row.values["call_s"]
                row.values["call_rate"] = rate
                if "clean_l2_s" in row.values:
                    row.values["clean_l2_rate"] = contender.traffic / row.values["clean_l2_s"]
                row.values |= {"call_of_copy_share": rate / copy_rate} if copy_rate else {}
            if contender.attends:
                arrays = contender.cache()
                if id(arrays) not in references:
                    references[id(arrays)] = caches.reference(arrays)
                expected = references[id(arrays)]
                session.value(
                    case,
                    name,
                    "relative_error",
                    partial(_error, lib, arrays, builds[name], expected),
                )
        return rows

    def before_launch(self, case: Mapping[str, Any], arrays: Callable[[], Cache]) -> None:
        """Time the host from the call of scree to its first launch, for PyTorch on CUDA."""
        session = self.session
        row = session.row(case, "scree")
        if session.device != "cuda" or self.lib.name != "torch" or "call_s" not in row.values:
            return
        from scree_triton.runtime.launch import observed_launches

        times: list[float] = []
        with observed_launches(lambda: times.append(time.perf_counter())):
            # New layouts, for which the call is prepared again.
            thunk = caches.scree_paged(arrays().select(slice(None)))
            for _ in range(3):
                # The first calls also launch kernels that prepare the layout.
                times.clear()
                thunk()
        if count_triton_launches(thunk) or not times:
            session.leave_out("time before the launch", "Triton's own launcher runs, unobserved")
            return
        samples = before_launch_samples(
            thunk, times, session.seconds, seconds=row.values["call_s"], wait=self.lib.wait
        )
        row.add("before_launch_s", samples)

    def plan(self, case: Mapping[str, Any], arrays: Callable[[], Cache]) -> None:
        """Time the plan of FlashInfer with the clock of the host."""
        if self.unavailable("flashinfer") is None:
            build = {"FlashInfer": lambda: caches.flashinfer_plan(arrays())}
            self.session.time(case, "plan_s", build, wait=self.lib.wait, device="cpu")


def count_triton_launches(thunk: Callable[[], Any]) -> int:
    """Return the number of launches of a call by Triton's own launcher, which runs hooks."""
    from triton import knobs

    launches: list[Any] = []
    count = launches.append
    knobs.runtime.launch_enter_hook.add(count)
    try:
        thunk()
    finally:
        knobs.runtime.launch_enter_hook.remove(count)
    return len(launches)


def _error(
    lib: MeasuredLibrary, arrays: Cache, build: Callable[[], Callable[[], Any]], expected: Any
) -> float:
    return caches.relative_error(arrays, lib.wait(build()()), expected)


Job = Callable[[], None]


# --- the kinds of cases ---
def decode_jobs(run: Run) -> list[Job]:
    """One query per row, on rows of equal and of different lengths."""
    rng = np.random.default_rng(run.seed)
    jobs: list[Job] = []
    for rows, shortest, longest, page_sizes in run.sizes.decode:
        lengths = rng.integers(shortest, longest + 1, rows)
        span = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        for page_size in page_sizes:
            batch = run.batch(f"B={rows}, KV {span}", lengths, page_size)
            jobs.append(partial(_decode, run, "decode", batch, contiguous=True))
    return jobs


def _decode(run: Run, kind: str, batch: Batch, *, contiguous: bool = False) -> None:
    arrays, traffic = run.arrays(batch), batch.traffic(run.itemsize)
    contenders = {"scree": Contender(arrays, caches.scree_paged, traffic)}
    if contiguous:
        contenders["scree, contiguous"] = Contender(arrays, caches.scree_contiguous, traffic)
    for name, make in run.peers().items():
        # FlashAttention-4 compiles for every number of heads and page size.
        if kind != "random" or name != "FA4":
            contenders[name] = Contender(arrays, make, traffic)
    if kind != "random":
        contenders |= run.loads_only(arrays, traffic)
    case = batch.case(kind, run.lib, run.dtype)
    run.measure(case, contenders)
    if kind == "decode":
        run.before_launch(case, arrays)
    run.plan(case, arrays)


def skew_jobs(run: Run) -> list[Job]:
    """One long row among short ones, beside rows of equal length and the same total."""
    return [partial(_skew, run)]


def _skew(run: Run) -> None:
    rows, mean, ratio = run.sizes.skew
    total = rows * mean
    short = max(1, total // (rows - 1 + ratio))
    skewed = [short] * (rows - 1) + [total - (rows - 1) * short]
    # The long row is in the middle, where no scheduler expects it.
    skewed[rows // 2], skewed[-1] = skewed[-1], skewed[rows // 2]
    batch = run.batch(f"{rows} rows, one {ratio} times as long", skewed)
    traffic = batch.traffic(run.itemsize)
    uneven, even = run.arrays(batch), run.arrays(run.batch("even", [mean] * rows))
    makes: dict[str, Make] = {"scree": caches.scree_paged}
    if run.unavailable("flashinfer") is None:
        makes["FlashInfer"] = caches.flashinfer_attend
    contenders = {}
    for name, make in makes.items():
        contenders[name] = Contender(uneven, make, traffic)
        contenders[f"{name}, even rows"] = Contender(even, make, traffic)
    measured = run.measure(batch.case("skew", run.lib, run.dtype), contenders)
    for name in makes:
        _relate(measured, name, [f"{name}, even rows"])


def _relate(rows: Mapping[str, Row], name: str, parts: list[str]) -> None:
    """Add the time of a row relative to the sum of the times of others."""
    if all(x in rows and "call_s" in rows[x].values for x in (name, *parts)):
        whole = sum(rows[x].values["call_s"] for x in parts)
        rows[name].values["relative_ratio"] = rows[name].values["call_s"] / whole


def mixed_jobs(run: Run) -> list[Job]:
    """A prefill and decodes in one call, beside the two in calls of their own."""
    return [partial(_mixed, run)]


def _mixed(run: Run) -> None:
    count, rows, length = run.sizes.mixed
    batch = run.batch(
        f"prefill of {count:,} and {rows} decodes",
        [count] + [length] * rows,
        queries=(count,) + (1,) * rows,
    )
    arrays = run.arrays(batch)
    prefill, decodes = (
        cache(lambda part=part: arrays().select(part)) for part in (slice(0, 1), slice(1, None))
    )
    token = batch.token_bytes(run.itemsize)
    contenders = {
        "scree": Contender(arrays, caches.scree_paged, batch.traffic(run.itemsize)),
        "scree, prefill alone": Contender(prefill, caches.scree_paged, float(count * token)),
        "scree, decodes alone": Contender(
            decodes, caches.scree_paged, float(rows * length * token)
        ),
    }
    measured = run.measure(batch.case("mixed", run.lib, run.dtype), contenders)
    _relate(measured, "scree", ["scree, prefill alone", "scree, decodes alone"])


def append_jobs(run: Run) -> list[Job]:
    """One new token per row, beside a call that writes one number."""
    return [partial(_append, run)]


def _append(run: Run) -> None:
    rows, length = run.sizes.append
    batch = run.batch(f"one token for each of {rows} rows", [length] * rows)
    arrays = run.arrays(batch)
    # New tokens are read and written.
    traffic = 2.0 * rows * batch.token_bytes(run.itemsize)
    makes: dict[str, Make] = {
        "scree": caches.scree_append,
        "scree, with rope": caches.scree_append_rope,
        "assignment by index": caches.indexed_append,
        "empty": caches.empty_call,
    }
    if run.lib.name == "jax":
        makes = {"scree": caches.donated_append}
    if run.unavailable("flashinfer") is None:
        makes["FlashInfer"] = caches.flashinfer_append
    contenders = {
        name: Contender(arrays, make, 0.0 if name == "empty" else traffic, attends=False)
        for name, make in makes.items()
    }
    measured = run.measure(batch.case("append", run.lib, run.dtype), contenders)
    floor = measured["empty"].values.get("call_s") if "empty" in measured else None
    for name, row in measured.items():
        if floor is not None and "call_s" in row.values and name != "empty":
            row.values["less_floor_s"] = max(0.0, row.values["call_s"] - floor)


def shared_jobs(run: Run) -> list[Job]:
    """Rows with a common prefix, read once, beside rows with pages of their own."""
    return [partial(_shared, run)]


def _shared(run: Run) -> None:
    rows, prefix, private = run.sizes.shared
    batch = run.batch(f"prefix {prefix:,}, private {private}", [prefix + private] * rows)
    pages = prefix // batch.page_size
    levels = [(np.asarray([0, rows]), np.asarray([pages]))]
    distinct = run.arrays(batch)
    shared = cache(lambda: distinct().share(pages))
    token = batch.token_bytes(run.itemsize)
    contenders = {
        "scree": Contender(
            shared,
            partial(caches.scree_paged, shared_pages=levels),
            float((prefix + rows * private) * token),
        ),
        "scree, distinct pages": Contender(
            distinct, caches.scree_paged, batch.traffic(run.itemsize)
        ),
    }
    if run.unavailable("flashinfer") is None:
        contenders["FlashInfer, distinct pages"] = Contender(
            distinct, caches.flashinfer_attend, batch.traffic(run.itemsize)
        )
    measured = run.measure(batch.case("shared", run.lib, run.dtype), contenders)
    _speed_up(measured, "scree", "scree, distinct pages")


def _speed_up(rows: Mapping[str, Row], name: str, other: str) -> None:
    """Add how many times as fast as another row a row is."""
    if all(x in rows and "call_s" in rows[x].values for x in (name, other)):
        quotient = rows[other].values["call_s"] / rows[name].values["call_s"]
        rows[name].values["speedup_value"] = quotient


def fp8_jobs(run: Run) -> list[Job]:
    """A cache of 8-bit numbers, beside a cache in the data type of the queries."""
    if run.lib.name != "torch":
        run.session.leave_out(f"8-bit caches on {run.lib.name}", "has no 8-bit floating point")
        return []
    return [
        partial(_fp8, run, rows, length, page_size)
        for rows, length, page_sizes in run.sizes.fp8
        for page_size in page_sizes
    ]


def _fp8(run: Run, rows: int, length: int, page_size: int) -> None:
    batch = run.batch(f"B={rows}, KV {length:,}, e4m3", [length] * rows, page_size)
    narrow, wide = run.arrays(batch, is_fp8=True), run.arrays(batch)
    contenders = {
        "scree": Contender(narrow, caches.scree_paged, batch.traffic(1)),
        f"scree, {run.dtype} cache": Contender(
            wide, caches.scree_paged, batch.traffic(run.itemsize)
        ),
    }
    if run.unavailable("flashinfer") is None:
        contenders["FlashInfer"] = Contender(narrow, caches.flashinfer_attend, batch.traffic(1))
    contenders |= run.loads_only(narrow, batch.traffic(1))
    measured = run.measure(batch.case("fp8", run.lib, run.dtype), contenders)
    _speed_up(measured, "scree", f"scree, {run.dtype} cache")


def random_jobs(run: Run) -> list[Job]:
    """Random shapes: rows, lengths, pages and heads."""
    rng = np.random.default_rng(run.seed + 1)
    jobs: list[Job] = []
    count, tokens = run.sizes.random
    for i in range(count):
        rows = int(2 ** rng.integers(0, min(9, tokens.bit_length())))
        longest = min(LONGEST, max(1, 2 * tokens // rows))
        page_size, kv_heads, group, dim = (int(rng.choice(among)) for among in SHAPES.values())
        batch = run.batch(
            f"shape {i}",
            rng.integers(1, longest + 1, rows),
            page_size,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            dim=dim,
            seed=run.seed + i,
        )
        jobs.append(partial(_decode, run, "random", batch))
    return jobs


#: Kind of case -> function that returns the jobs of a run.
KINDS: dict[str, Callable[[Run], list[Job]]] = {
    "decode": decode_jobs,
    "skew": skew_jobs,
    "mixed": mixed_jobs,
    "append": append_jobs,
    "shared": shared_jobs,
    "fp8": fp8_jobs,
    "random": random_jobs,
}


# --- tables and pictures ---
def tables(result: Result) -> list[Table]:
    """Return one table per kind of case, and the ratios over the random shapes."""
    by_kind: dict[str, list[Row]] = {}
    for row in result.rows:
        by_kind.setdefault(row.case["kind"], []).append(row)
    shown = [table for rows in by_kind.values() for table in results.tables(rows, SHOWN)]
    return shown + ([_ratios(by_kind["random"])] if "random" in by_kind else [])


def _ratios(rows: list[Row]) -> Table:
    """Return the table of our time over each peer's, over all shapes, with the worst shape."""
    scree = {
        (row.case["backend"], row.case["case"]): row.values["call_s"]
        for row in rows
        if row.who == "scree" and "call_s" in row.values
    }
    lines = []
    for backend, name in dict.fromkeys((r.case["backend"], r.who) for r in rows):
        ratios = sorted(
            (scree[backend, row.case["case"]] / row.values["call_s"], row.case["case"])
            for row in rows
            if (row.case["backend"], row.who) == (backend, name)
            and name != "scree"
            and "call_s" in row.values
            and (backend, row.case["case"]) in scree
        )
        if ratios:
            numbers = [x for x, _ in ratios]
            shown = [
                results.bold(f"{x:.2f}") if results.is_loss(x, name) else f"{x:.2f}"
                for x in (median(numbers), numbers[0], numbers[-1])
            ]
            faster = f"{sum(x <= 1 for x in numbers)} of {len(numbers)}"
            lines.append([backend, name, *shown, ratios[-1][1], faster])
    header = [
        "backend",
        "peer",
        "our time over the peer's, median",
        "best",
        "worst",
        "worst shape",
        "not slower on",
    ]
    return Table("random shapes, ratios: below 1 is faster", header, lines, [])


def pictures(result: Result) -> plots.Pictures:
    """Return a picture of bytes per second for each kind of decode step."""

    def paint(figure: Any, rows: list[Row], title: str) -> None:
        labels = plots.labels(rows, "kind", "tokens", "rows", "heads", "kv_heads", "dim")
        groups = plots.grouped(rows, "call_rate", labels)
        plots.bars(figure.add_subplot(), groups, "call_rate", title)

    drawn: plots.Pictures = {}
    for kind in ("decode", "fp8"):
        rows = [r for r in result.rows if r.case["kind"] == kind and "call_rate" in r.values]
        if rows:
            title = f"Paged cache, {kind}: bytes per second, more is better"
            drawn[f"decode-{kind}"] = partial(paint, rows=rows, title=title)
    return drawn
