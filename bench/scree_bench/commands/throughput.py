"""`throughput`: real tokens a second of four operations, ragged against every way to do without."""

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
from ..libraries import Library, nesting, wanted, where
from ..measure import Thunk, require
from ..options import Backend, Device, Lengths, Out, Quick, Seconds, Seed
from ..peers import NO_TIME, Peer, contenders
from ..results import Result
from ..session import SECONDS, Session
from ..work import Work

LOOP = "loop over rows"


@dataclass(frozen=True)
class Stream:
    """Batches of rows as they come; `ordered` holds the same rows, sorted by length before they are cut into batches."""

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
        """Real tokens."""
        return int(sum(x.sum() for x in self.batches))

    def works(self, ordered: bool = False) -> list[Work]:
        """An attention problem for each batch."""
        lists = self.ordered if ordered else self.batches
        return [
            Work(tuple(map(int, x)), self.heads, self.heads, self.dim, seed=self.seed + i)
            for i, x in enumerate(lists)
        ]


# ------------------------------------------------------------------------------------- operations on tokens
#: Name -> on a ragged array; on one row (tokens first); on a padded batch (rows, longest, ...) with its mask (rows, longest, 1).
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

#: What PyTorch has of its own: on a padded batch with its mask, and on a nested tensor.
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


def builds(lib: Library, stream: Stream, operation: str) -> dict[str, Callable[[], Thunk]]:
    """The contenders of an operation that goes over tokens: who -> what builds the pass over all batches."""
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
            return ragged(xp, scree.Array(x, offsets, max_length=longest), weight)

        longest = int(max(x.max() for x in stream.batches))
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
    found = {
        "scree": ours,
        "padded": padding(plain, stream.batches),
        "padded, sorted": padding(plain, stream.ordered),
        LOOP: by_row,
    }
    if lib.name == "torch":
        import torch.nn.functional as F  # noqa: N812

        own, nested = TORCH[operation]

        def jagged() -> Thunk:
            return every(
                lambda x: nested(F, x, weight),
                [(nesting(lib, x)(lib.make(values(x))),) for x in stream.batches],
            )

        found["padded, torch's own"] = padding(
            lambda x, mask: own(F, x, mask, weight), stream.batches
        )
        found["torch.nested"] = jagged
    return found


def attention_builds(
    session: Session, lib: Library, stream: Stream
) -> dict[str, Callable[[], Thunk]]:
    """The contenders of attention; each padded one also on rows sorted by length."""

    def build(peer: Peer, ordered: bool) -> Callable[[], Thunk]:
        def passes() -> Thunk:
            prepared = [peer.prepare(lib, work) for work in stream.works(ordered)]
            steps = [lib.steps(p.function, p.args)["forward"]() for p in prepared]
            return lambda: [step() for step in steps]

        return passes

    found = {}
    for peer in contenders(session, lib, stream.works()[0]):
        if peer.slow and len(stream.batches) > 1:
            session.leave_out(
                f"{peer.name} on a stream",
                "compiles for each of its batches; it is there for one batch",
            )
            continue
        found[peer.name] = build(peer, False)
        if peer.name.startswith("padded") and "einsum" not in peer.name and len(stream.batches) > 1:
            found[f"{peer.name}, sorted"] = build(peer, True)
    return found


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
        int | None, typer.Option(min=1, help="Batches to work through; 4 on CUDA, 2 on the CPU.")
    ] = None,
    heads: Annotated[
        int,
        typer.Option(min=1, help="Heads of attention; a token has that many times --dim numbers."),
    ] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 32,
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Attention, rms_norm, softmax and reductions: ragged, padded, sorted, nested, and by a loop over rows.

    A stream of batches goes through each contender, forward only; what counts are real tokens a second. Padded batches are
    padded before the clock starts. The sorted form has seen all rows before the first batch. The share of the limit is that of
    the operations in this machine's peak for matrix products, or of the bytes in its bandwidth. Beside the stream stands the
    one batch of sixteen rows, 4 heads x 32, that the project's first CPU table was made on.
    """
    with Session("throughput", locals(), where(device)) as session:
        rng = np.random.default_rng(seed)
        batches = batches or (4 if session.device == "cuda" else 2)
        if quick:
            mean_len, batches = min(mean_len, 48), min(batches, 2)
        found = (
            draws.read(lengths)
            if lengths
            else draws.lognormal(num_seqs * batches, mean_len, sigma, rng)
        )
        stream = Stream(draws.batches(found, num_seqs), heads, dim, seed)
        first = Stream(
            [draws.adding_up(16, 200 if quick else 2_000, np.random.default_rng(11))], 4, 32, seed
        )
        for lib in wanted(session, backend):
            for name, rows in session.track((("stream", stream), ("one batch", first)), lib.name):
                _measure(
                    session, lib, name, "attention", rows, attention_builds(session, lib, rows)
                )
                for operation in OPERATIONS if name == "stream" else ():
                    everyone = builds(lib, rows, operation)
                    if quick and lib.arrays.compiles:
                        session.leave_out(f"{LOOP} on {lib.name}", NO_TIME)
                        del everyone[LOOP]
                    _measure(session, lib, name, operation, rows, everyone)


def _measure(
    session: Session,
    lib: Library,
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
    """Seconds that the limits of the machine leave: operations of attention, or a look at every number and a result of each."""
    limits = session.limits()
    if operation == "attention":
        return sum(work.flops for work in stream.works()) / limits["matmul_float32_flops"]
    passes = 1 if operation == "sum and max" else 2
    return passes * 4.0 * stream.total * stream.heads * stream.dim / limits["copy_rate"]


def pictures(result: Result) -> plots.Pictures:
    """Tokens a second, an operation each."""
    found: plots.Pictures = {}
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
                f"{operation}: real tokens a second, more is better",
            )

        found[f"throughput-{operation.replace(' ', '-')}"] = paint
    return found
