"""`throughput`: real tokens per second of four operations, ragged against the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import typer

import scree

from .. import lengths as draws
from .. import plots
from ..formulas import EPS, rms_norm, softmax
from ..libraries import MeasuredLibrary, installed_libraries, nested_tensor_maker, resolve_device
from ..measure import Thunk, require
from ..options import Backend, Device, Lengths, Out, Quick, Seconds, Seed
from ..peers import NO_TIME, Peer, available_peers
from ..results import Result
from ..session import SECONDS, Session
from ..work import Work

LOOP = "loop over rows"


@dataclass(frozen=True)
class Stream:
    """Batches of rows in their original order.

    `ordered` has the same rows, sorted by length before they are cut into batches.
    """

    batches: list[np.ndarray]
    heads: int
    dim: int
    seed: int

    @cached_property
    def ordered(self) -> list[np.ndarray]:
        """Batches of the sorted rows."""
        rows = np.sort(np.concatenate(self.batches))
        return np.split(rows, np.cumsum([len(x) for x in self.batches])[:-1])

    @property
    def total(self) -> int:
        """Number of real tokens."""
        return int(sum(x.sum() for x in self.batches))

    def works(self, ordered: bool = False) -> list[Work]:
        """Return one attention problem per batch."""
        lists = self.ordered if ordered else self.batches
        return [
            Work(tuple(map(int, x)), self.heads, self.heads, self.dim, seed=self.seed + i)
            for i, x in enumerate(lists)
        ]


# ---------------------------------------------------------------------------- operations on tokens
#: Name -> function of a ragged array; of one row (tokens first); of a padded batch
#: (rows, longest, ...) with its mask (rows, longest, 1).
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (
        lambda xp, x, weight: xp.ragged.rms_norm(x, weight, eps=EPS).values,
        lambda xp, x, weight: rms_norm(xp, x) * weight,
        lambda xp, x, mask, weight: rms_norm(xp, x) * weight,
    ),
    "softmax": (
        lambda xp, x, weight: xp.ragged.softmax(x).values,
        lambda xp, x, weight: softmax(xp, x, axis=0),
        lambda xp, x, mask, weight: softmax(xp, xp.where(mask, x, -np.inf), axis=1),
    ),
    "sum and max": (
        lambda xp, x, weight: xp.sum(x, axis=1) + xp.max(x, axis=1),
        lambda xp, x, weight: xp.sum(x, axis=0) + xp.max(x, axis=0),
        lambda xp, x, mask, weight: (
            xp.sum(xp.where(mask, x, 0.0), axis=1) + xp.max(xp.where(mask, x, -np.inf), axis=1)
        ),
    ),
}

#: PyTorch's functions: on a padded batch with its mask, and on a nested tensor.
TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (
        lambda F, x, mask, weight: F.rms_norm(x, weight.shape, weight, EPS),
        lambda F, x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    ),
    "softmax": (
        lambda F, x, mask, weight: F.softmax(x.masked_fill(~mask, -np.inf), 1),
        lambda F, x, weight: F.softmax(x, 1),
    ),
    "sum and max": (
        lambda F, x, mask, weight: (
            x.masked_fill(~mask, 0.0).sum(1) + x.masked_fill(~mask, -np.inf).amax(1)
        ),
        lambda F, x, weight: x.sum(1) + x.amax(1),
    ),
}


def builds(lib: MeasuredLibrary, stream: Stream, operation: str) -> dict[str, Callable[[], Thunk]]:
    """Return builders of a pass over all batches by contender, for an operation on tokens."""
    ragged, on_row, padded = OPERATIONS[operation]
    xp, width = lib.xp, stream.heads * stream.dim
    rng = np.random.default_rng(stream.seed)
    weight = lib.make(rng.standard_normal(width, dtype=np.float32))

    def values(lengths: np.ndarray) -> np.ndarray:
        return rng.standard_normal((int(lengths.sum()), width), dtype=np.float32)

    def every(run: Callable[..., Any], parts: Sequence[tuple[Any, ...]]) -> Thunk:
        return lambda: [run(*part) for part in parts]

    def dense(batches: list[np.ndarray]) -> list[tuple[Any, ...]]:
        require(sum(len(x) * int(x.max()) for x in batches) * width * 4.0, lib.device)
        parts = []
        for lengths in batches:
            x, mask = scree.to_padded(scree.from_lengths(values(lengths), lengths))
            parts.append((lib.make(x), lib.make(mask[:, :, None], "bool")))
        return parts

    def ours() -> Thunk:
        def call(x: Any, offsets: Any) -> Any:
            return ragged(xp, scree.Array(x, offsets, max_length=max_length), weight)

        max_length = int(max(x.max() for x in stream.batches))
        arrays = [scree.from_lengths(lib.make(values(x)), x) for x in stream.batches]
        if lib.name == "jax":
            return every(lib.compiled(call), [(x.values, x.offsets) for x in arrays])
        return every(lambda x: ragged(xp, x, weight), [(x,) for x in arrays])

    def by_row() -> Thunk:
        rows = [
            (lib.make(x),)
            for lengths in stream.batches
            for x in np.split(values(lengths), np.cumsum(lengths)[:-1])
        ]
        return every(lambda x: on_row(xp, x, weight), rows)

    def padding(run: Callable[..., Any], batches: list[np.ndarray]) -> Callable[[], Thunk]:
        return lambda: every(run, dense(batches))

    plain = lib.compiled(lambda x, mask: padded(xp, x, mask, weight))
    passes = {
        "scree": ours,
        "padded": padding(plain, stream.batches),
        "padded, sorted": padding(plain, stream.ordered),
        LOOP: by_row,
    }
    if lib.name == "torch":
        import torch.nn.functional as F

        eager, nested = TORCH[operation]

        def jagged() -> Thunk:
            return every(
                lambda x: nested(F, x, weight),
                [(nested_tensor_maker(lib, x)(lib.make(values(x))),) for x in stream.batches],
            )

        passes["padded, torch's own"] = padding(
            lambda x, mask: eager(F, x, mask, weight), stream.batches
        )
        passes["torch.nested"] = jagged
    return passes


def attention_builds(
    session: Session, lib: MeasuredLibrary, stream: Stream
) -> dict[str, Callable[[], Thunk]]:
    """Return the contenders of attention; padded ones also run on rows sorted by length."""

    def build(peer: Peer, ordered: bool) -> Callable[[], Thunk]:
        def passes() -> Thunk:
            prepared = [peer.prepare(lib, work) for work in stream.works(ordered)]
            steps = [lib.steps(p.function, p.args)["forward"]() for p in prepared]
            return lambda: [step() for step in steps]

        return passes

    builders = {}
    for peer in available_peers(session, lib, stream.works()[0]):
        if peer.slow and len(stream.batches) > 1:
            session.leave_out(
                f"{peer.name} on a stream", "compiles for each batch; measured on one batch"
            )
            continue
        builders[peer.name] = build(peer, False)
        if peer.name.startswith("padded") and "einsum" not in peer.name and len(stream.batches) > 1:
            builders[f"{peer.name}, sorted"] = build(peer, True)
    return builders


def command(
    lengths: Lengths = None,
    num_seqs: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 16,
    mean_len: Annotated[
        float, typer.Option(min=1, help="Median length of the log-normal lengths.")
    ] = 256,
    sigma: Annotated[
        float, typer.Option(min=0, help="Standard deviation of their logarithms.")
    ] = 0.8,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Batches of the stream; 4 on CUDA, 2 on the CPU.")
    ] = None,
    heads: Annotated[
        int, typer.Option(min=1, help="Heads of attention; a token has heads x dim features.")
    ] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 32,
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure real tokens per second: ragged, padded, sorted, nested, and in a loop over rows.

    The operations are attention, rms_norm, softmax and reductions. Each contender processes a
    stream of batches, forward only. Padding is not timed. The sorted form sorts all rows before the
    first batch. The share of the limit is the rate of operations relative to this machine's peak
    for matrix products, or the rate of bytes relative to its bandwidth. The second workload is one
    batch of sixteen rows, 4 heads x 32, from the first CPU table of the project.
    """
    with Session("throughput", locals(), resolve_device(device)) as session:
        rng = np.random.default_rng(seed)
        batches = batches or (4 if session.device == "cuda" else 2)
        if quick:
            mean_len, batches = min(mean_len, 48), min(batches, 2)
        row_lengths = (
            draws.read(lengths)
            if lengths
            else draws.lognormal(num_seqs * batches, mean_len, sigma, rng)
        )
        stream = Stream(draws.batches(row_lengths, num_seqs), heads, dim, seed)
        first = Stream(
            [draws.lognormal_with_total(16, 200 if quick else 2_000, np.random.default_rng(11))],
            4,
            32,
            seed,
        )
        for lib in installed_libraries(session, backend):
            for name, rows in session.track((("stream", stream), ("one batch", first)), lib.name):
                _measure(
                    session, lib, name, "attention", rows, attention_builds(session, lib, rows)
                )
                for operation in OPERATIONS if name == "stream" else ():
                    contenders_by_name = builds(lib, rows, operation)
                    if quick and lib.arrays.compiles:
                        session.leave_out(f"{LOOP} on {lib.name}", NO_TIME)
                        del contenders_by_name[LOOP]
                    _measure(session, lib, name, operation, rows, contenders_by_name)


def _measure(
    session: Session,
    lib: MeasuredLibrary,
    name: str,
    operation: str,
    stream: Stream,
    contenders: dict[str, Callable[[], Thunk]],
) -> None:
    slots = sum(len(x) * int(x.max()) for x in stream.batches)
    case = {
        "batches": name,
        "backend": lib.name,
        "operation": operation,
        "tokens": stream.total,
        "padded": slots,
    }
    least = _least(session, operation, stream)
    for row in session.time(case, "pass_s", contenders, wait=lib.wait).values():
        if "pass_s" in row.values:
            row.values["real_tokens"] = stream.total / row.values["pass_s"]
            row.values["of_limit_share"] = least / row.values["pass_s"]


def _least(session: Session, operation: str, stream: Stream) -> float:
    """Return the least seconds by the limits of the machine.

    For attention, operations set it. Otherwise it is one read per number, and one write per number
    unless the operation is a reduction.
    """
    limits = session.limits()
    if operation == "attention":
        return sum(work.flops for work in stream.works()) / limits["matmul_float32_flops"]
    passes = 1 if operation == "sum and max" else 2
    return passes * 4.0 * stream.total * stream.heads * stream.dim / limits["copy_rate"]


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of tokens per second, one per operation."""
    drawn: plots.Pictures = {}
    for operation in dict.fromkeys(row.case["operation"] for row in result.rows):
        rows = [
            row
            for row in result.rows
            if row.case["operation"] == operation and row.case["batches"] == "stream"
        ]

        def paint(figure: Any, rows: Any = rows, operation: str = operation) -> None:
            groups = plots.grouped(rows, "real_tokens", plots.labels(rows, "operation"))
            plots.bars(
                figure.add_subplot(),
                groups,
                "real_tokens",
                f"{operation}: real tokens per second, more is better",
            )

        drawn[f"throughput-{operation.replace(' ', '-')}"] = paint
    return drawn
