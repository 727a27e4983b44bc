"""`memory`: bytes of ragged batches against padded, length-sorted and bucketed ones; and peaks that were measured."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from .. import lengths as draws
from .. import plots
from ..libraries import Library, device, wanted
from ..options import Backend, Device, Lengths, Out, Quick, Seed
from ..peers import Peer, Work, contenders
from ..results import Result
from ..session import Session

ITEM, OFFSET, MASK = 4, 4, 1  # bytes: a float32 number, an int32 offset, a mask's boolean
PUBLISHED = ((64, 256.0, 0.6), (32, 1024.0, 1.2))  # rows, median and sigma for which savings of 71% and 85% were published
HEADS, DIM = 4, 32
PEAK_SCORES = 2e9  # bytes of padded scores up to which the peak is measured; the naive form holds them three times
PEAK_SCORES_QUICK = 5e7


def ragged_bytes(lengths: np.ndarray, width: int) -> int:
    """Bytes of a ragged batch: every token once, and the offsets."""
    return int(lengths.sum()) * width * ITEM + (len(lengths) + 1) * OFFSET


def padded_bytes(lengths: np.ndarray, width: int) -> int:
    """Bytes of a padded batch: as many tokens as the longest row has, for every row, and the mask."""
    return len(lengths) * int(lengths.max()) * (width * ITEM + MASK)


def bucketed_bytes(lengths: np.ndarray, width: int) -> int:
    """Bytes where every row is padded to the next power of two, as compilers for static shapes want it."""
    slots = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return int(slots.sum()) * (width * ITEM + MASK)


def savings(trials: list[np.ndarray], width: int) -> dict[str, list[int]]:
    """Bytes of each trial's batch, in each of the four ways; sorting is over the rows of all trials together."""
    rows = np.sort(np.concatenate(trials))
    ordered = np.split(rows, np.cumsum([len(x) for x in trials])[:-1])
    return {
        "scree": [ragged_bytes(x, width) for x in trials],
        "padded": [padded_bytes(x, width) for x in trials],
        "padded, sorted by length": [padded_bytes(x, width) for x in ordered],
        "padded to powers of two": [bucketed_bytes(x, width) for x in trials],
    }


def command(
    num_seqs: Annotated[int | None, typer.Option(help="Rows of a batch.")] = None,
    mean_len: Annotated[float | None, typer.Option(help="Median length of the log-normal lengths.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of their logarithms.")] = None,
    feature_dim: Annotated[int, typer.Option(help="Numbers in a token.")] = 512,
    trials: Annotated[int, typer.Option(help="Batches.")] = 100,
    lengths: Lengths = None, backend: Backend = "all", device_name: Annotated[str, typer.Option("--device")] = "auto",
    seed: Seed = 0, quick: Quick = False, out: Out = None,
) -> None:  # fmt: skip
    """Bytes of ragged batches against padded ones, counted; and the peak of attention, measured.

    Without options, for the two kinds of batches whose savings were published: 64 rows of median 256 (sigma 0.6) and 32 rows of
    median 1,024 (sigma 1.2). Saved is the share of the padded bytes that the ragged batch does not need; sorting takes the rows
    of all batches, so it is for those who may change the order.
    """
    with Session("memory", locals(), device(device_name)) as session:
        rng = np.random.default_rng(seed)
        cases: list[tuple[dict[str, Any], list[np.ndarray]]] = []
        if lengths is not None:
            found = draws.read(lengths)
            size = num_seqs or min(32, len(found))
            cases = [({"rows": size, "lengths": lengths.name}, draws.batches(found, size))]
        else:
            asked = (num_seqs, mean_len, sigma)
            kinds = PUBLISHED if asked == (None, None, None) else [tuple(a or b for a, b in zip(asked, PUBLISHED[0], strict=True))]
            for rows, median, deviation in kinds:
                batches = [draws.lognormal(int(rows), median, deviation, rng) for _ in range(trials)]
                cases.append(({"rows": rows, "median": median, "sigma": deviation}, batches))
        for case, batches in cases:
            _count(session, case, batches, feature_dim)
        libraries = wanted(session, backend)
        for case, batches in session.track(cases, "measured peaks"):
            for lib in libraries:
                _peaks(session, case, batches[0], lib)


def _count(session: Session, case: dict[str, Any], batches: list[np.ndarray], width: int) -> None:
    found = savings(batches, width)
    ours, padded = (np.asarray(found[k], dtype=np.float64) for k in ("scree", "padded"))
    for who, counts in found.items():
        row = session.row(case, who)
        row.values["batch_bytes"] = float(np.mean(counts))
        if who != "padded":
            saved = 1 - np.asarray(counts) / padded
            if who == "padded, sorted by length":  # other rows in each batch: only the whole compares
                saved = np.asarray([1 - sum(counts) / padded.sum()])
            row.values |= {"mean_saved": saved.mean(), "least_saved": saved.min(), "most_saved": saved.max()}
    session.row(case, "scree").samples["mean_saved"] = (1 - ours / padded).tolist()


def _peaks(session: Session, case: dict[str, Any], batch: np.ndarray, lib: Library) -> None:
    """The peak of attention on one batch, forward and with its gradients, inputs counted."""
    limit, work = (PEAK_SCORES_QUICK, _work(batch[:4])) if session.quick else (PEAK_SCORES, _work(batch))
    while work.padded_scores > limit and len(work.lengths) > 1:  # fewer rows, from the end
        work = _work(batch[: len(work.lengths) - 1])
    what = {**case, "rows": len(work.lengths), "longest": work.longest, "heads": HEADS, "dim": DIM}
    peers, _ = contenders(lib, work)
    for peer in peers:
        if peer.name.startswith(("scree", "padded, matmul", "padded, SDPA", "padded, jax", "padded, mx")):
            _peak(session, what, lib, peer, work)


def _work(batch: np.ndarray) -> Work:
    return Work(tuple(map(int, batch)), HEADS, HEADS, DIM)


def _peak(session: Session, case: dict[str, Any], lib: Library, peer: Peer, work: Work) -> None:
    def measured(phase: str) -> float:
        function, args, cotangent, _ = peer.prepare(lib, work)
        step = lib.steps(function, args, cotangent)[phase]()
        lib.wait(step())  # what is made once and kept is not the call's
        return lib.peak(step) + sum(ITEM * float(np.prod(x.shape)) for x in args)

    case, who = {**case, "backend": lib.name}, peer.name
    session.value(case, who, "forward_peak_bytes", lambda: measured("forward"))
    if lib.phases is not None:
        session.value(case, who, "both_peak_bytes", lambda: measured("both"))


def pictures(result: Result) -> plots.Pictures:
    """Bytes of a batch in each way, the savings of all batches, and the measured peaks."""

    def label(row: Any) -> str:
        return ", ".join(f"{k} {v}" if k != "backend" else str(v) for k, v in row.case.items() if k not in ("heads", "dim"))

    def counted(figure: Any) -> None:
        plots.bars(figure.add_subplot(), plots.grouped(result.rows, "batch_bytes", label), "batch_bytes", "Bytes of a batch")

    def spreads(figure: Any) -> None:
        axes = figure.add_subplot()
        for row in result.rows:
            if "mean_saved" in row.samples:
                axes.hist(row.samples["mean_saved"], bins=20, alpha=0.8, label=label(row))
        axes.set(title="Saved against a padded batch, over all batches", ylabel="batches")
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        axes.legend()

    def peaks(figure: Any) -> None:
        value = "both_peak_bytes" if any("both_peak_bytes" in row.values for row in result.rows) else "forward_peak_bytes"
        title = "Peak memory of attention, forward and backward, measured"
        plots.bars(figure.add_subplot(), plots.grouped(result.rows, value, label), value, title)

    return {"memory-batch": counted, "memory-saved": spreads, "memory-peak": peaks}
