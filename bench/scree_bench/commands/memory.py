"""`memory`: bytes of ragged, padded, length-sorted and bucketed batches, and measured peaks."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from .. import lengths as draws
from .. import plots
from ..libraries import MeasuredLibrary, installed_libraries, resolve_device
from ..options import Backend, Device, Lengths, Out, Quick, Seed
from ..peers import Peer, available_peers
from ..results import Result
from ..session import Session
from ..work import Work

#: Bytes of a float32 number, an int32 offset and a boolean of a mask.
ITEM, OFFSET, MASK = 4, 4, 1
#: Rows, median and sigma for which savings of 71% and 85% were published.
PUBLISHED = ((64, 256.0, 0.6), (32, 1024.0, 1.2))
#: Batches whose rows are sorted together.
POOL = 100
HEADS, DIM = 4, 32
#: Maximum bytes of padded scores for which the peak is measured; the naive form holds three copies.
PEAK_SCORES = {"cuda": 2e9, "cpu": 3e8}


def ragged_bytes(lengths: np.ndarray, width: int) -> int:
    """Return the bytes of a ragged batch: every token once, and the offsets."""
    return int(lengths.sum()) * width * ITEM + (len(lengths) + 1) * OFFSET


def padded_bytes(lengths: np.ndarray, width: int) -> int:
    """Return the bytes of a padded batch: all rows as long as the longest, and the mask."""
    return len(lengths) * int(lengths.max()) * (width * ITEM + MASK)


def bucketed_bytes(lengths: np.ndarray, width: int) -> int:
    """Return the bytes with every row padded to the next power of two.

    Compilers for static shapes need such a batch.
    """
    slots = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return int(slots.sum()) * (width * ITEM + MASK)


def savings(batches: list[np.ndarray], width: int) -> dict[str, dict[str, float]]:
    """Return the mean bytes of a batch in four layouts, and the saved share of the padded bytes.

    Sorting is over the rows of all batches together.
    """
    rows = np.sort(np.concatenate(batches))
    ordered = np.split(rows, np.cumsum([len(x) for x in batches])[:-1])
    ways = {
        "scree": [ragged_bytes(x, width) for x in batches],
        "padded": [padded_bytes(x, width) for x in batches],
        "padded, sorted by length": [padded_bytes(x, width) for x in ordered],
        "padded to powers of two": [bucketed_bytes(x, width) for x in batches],
    }
    total = sum(ways["padded"])
    return {
        contender: {"batch_bytes": float(np.mean(x)), "total_saved": 1 - sum(x) / total}
        for contender, x in ways.items()
    }


def command(
    num_seqs: Annotated[int | None, typer.Option(min=1, help="Rows of a batch.")] = None,
    mean_len: Annotated[
        float | None, typer.Option(min=1, help="Median length of the log-normal lengths.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation of their logarithms.")
    ] = None,
    feature_dim: Annotated[int, typer.Option(min=1, help="Numbers in a token.")] = 512,
    trials: Annotated[
        int, typer.Option(min=1, help="Batches; the published savings are for five.")
    ] = 5,
    lengths: Lengths = None,
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Count the bytes of ragged and padded batches, and measure the peak memory of attention.

    The default batches are the two kinds whose savings were published. Five batches are a small
    sample: the mean of many (--trials 1000) is lower.

    - 64 rows of median 256 (sigma 0.6): published 71%, over 1,000 batches 70%
    - 32 rows of median 1,024 (sigma 1.2): published 85%, over 1,000 batches 82%

    Saved is the share of the padded bytes that the ragged batch does not need. Sorting takes the
    rows of all batches, so it applies only if their order may change. Peaks are measured on one
    such batch; on the CPU its rows have a quarter of the length.
    """
    with Session("memory", locals(), resolve_device(device)) as session:
        cases: list[tuple[dict[str, Any], list[np.ndarray]]] = []
        if lengths is not None:
            row_lengths = draws.read(lengths)
            size = num_seqs or min(32, len(row_lengths))
            cases = [({"rows": size, "lengths": lengths.name}, draws.batches(row_lengths, size))]
        else:
            options = (num_seqs, mean_len, sigma)
            custom = tuple(
                b if a is None else a for a, b in zip(options, PUBLISHED[0], strict=True)
            )
            kinds = PUBLISHED if options == (None, None, None) else [custom]
            for rows, median, deviation in kinds:
                rngs = (np.random.default_rng(seed + i) for i in range(max(trials, POOL)))
                batches = [draws.lognormal(int(rows), median, deviation, rng) for rng in rngs]
                cases.append(({"rows": rows, "median": median, "sigma": deviation}, batches))
        for case, batches in cases:
            _count(session, case, batches, len(batches) if lengths else trials, feature_dim)
        libraries = installed_libraries(session, backend)
        for case, batches in session.track(cases, "measured peaks"):
            for lib in libraries:
                _peaks(session, case, batches[0], lib)


def _count(
    session: Session, case: dict[str, Any], batches: list[np.ndarray], trials: int, width: int
) -> None:
    for contender, values in savings(batches, width).items():
        session.row(case, contender).values |= values
    each = [1 - ragged_bytes(x, width) / padded_bytes(x, width) for x in batches[:trials]]
    row = session.row({**case, "batches": len(each)}, "scree")
    row.values = {
        "mean_saved": float(np.mean(each)),
        "least_saved": min(each),
        "most_saved": max(each),
    }


def _peaks(session: Session, case: dict[str, Any], batch: np.ndarray, lib: MeasuredLibrary) -> None:
    """Measure the peak of attention on one batch, forward and with gradients, inputs included.

    On the CPU its rows have a quarter of the length.
    """
    batch = batch[:4] // 4 if session.quick else batch // 4 if session.device == "cpu" else batch
    work = _work(batch)
    max_scores = PEAK_SCORES[session.device]
    # Drop rows from the end.
    while work.padded_scores > max_scores and len(work.lengths) > 1:
        work = _work(batch[: len(work.lengths) - 1])
    if len(work.lengths) < len(batch):
        session.leave_out(
            f"peaks of all {len(batch)} rows of median {case.get('median', 'as given')}",
            f"padded scores of more than {max_scores / 1e9:g} GB; "
            f"the first {len(work.lengths)} rows are measured",
        )
    case_sizes = {
        **case,
        "rows": len(work.lengths),
        "longest": work.max_length,
        "heads": HEADS,
        "dim": DIM,
    }
    for peer in available_peers(session, lib, work):
        if peer.name.startswith(
            ("scree", "padded, matmul", "padded, SDPA", "padded, jax", "padded, mx")
        ):
            _peak(session, case_sizes, lib, peer, work)


def _work(batch: np.ndarray) -> Work:
    return Work(tuple(map(int, batch)), HEADS, HEADS, DIM)


def _peak(
    session: Session, case: dict[str, Any], lib: MeasuredLibrary, peer: Peer, work: Work
) -> None:
    def measured(phase: str) -> float:
        function, args, cotangent, _ = peer.prepare(lib, work)
        step = lib.steps(function, args, cotangent)[phase]()
        return lib.peak(step) + sum(ITEM * float(np.prod(x.shape)) for x in args)

    case, contender = {**case, "backend": lib.name}, peer.name
    session.value(case, contender, "forward_peak_bytes", lambda: measured("forward"))
    if lib.phases is not None:
        session.value(case, contender, "both_peak_bytes", lambda: measured("both"))


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of bytes by layout, the savings of all batches, and the measured peaks."""
    batch, each, peak = (
        [row for row in result.rows if any(name in row.values for name in names)]
        for names in (("batch_bytes",), ("mean_saved",), ("forward_peak_bytes",))
    )

    def counted(figure: Any) -> None:
        groups = plots.grouped(batch, "batch_bytes", plots.labels(batch))
        plots.bars(figure.add_subplot(), groups, "batch_bytes", "Bytes of a batch")

    def shares(figure: Any) -> None:
        title = "Mean share of memory saved relative to a padded batch, more is better"
        groups = plots.grouped(each, "mean_saved", plots.labels(each))
        plots.bars(figure.add_subplot(), groups, "mean_saved", title)

    def peaks(figure: Any) -> None:
        value = (
            "both_peak_bytes"
            if any("both_peak_bytes" in row.values for row in peak)
            else "forward_peak_bytes"
        )
        title = "Peak memory of attention, forward and backward, measured"
        plots.bars(
            figure.add_subplot(), plots.grouped(peak, value, plots.labels(peak)), value, title
        )

    drawn = {
        "memory-batch": (batch, counted),
        "memory-saved": (each, shares),
        "memory-peak": (peak, peaks),
    }
    return {name: paint for name, (rows, paint) in drawn.items() if rows}
