"""Ratios of scree to the fastest peer of each shape: statistics, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import plots, results
from .measure import median
from .results import Row, Table, bold, is_loss
from .work import BACKWARD

#: The row of the errors of eager PyTorch, which is not timed.
EAGER = "eager"
#: Phase -> its operations relative to the forward pass.
PHASES = {"forward": 1.0, "both": 1 + BACKWARD}
ERRORS = {"forward": "forward_error", "both": "gradient_error"}
#: Failures of a contender with this many equal letters have the same reason.
SAME_LETTERS = 60
#: Shapes in the tables of the worst, and statistics of the ratios, with their headings.
WORST = 10
STATISTICS = {"median": "median", "percentile_95": "95%", "worst": "worst"}


class ShapeRatio(NamedTuple):
    """The time of scree on a shape relative to the fastest peer."""

    case: dict[str, Any]
    ratio: float
    seconds: float
    share: float | None
    peer: str
    peer_seconds: float


def _interval(x: float, bounds: Sequence[int]) -> str:
    """Return the interval of `bounds` that contains an integer, as text."""
    low = max((b for b in bounds if b <= x), default=0)
    high = min((b for b in bounds if b > x), default=None)
    if high is None:
        return f"{low:,} or more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"


#: Heading -> class of a case.
CLASSES: dict[str, Callable[[dict[str, Any]], str]] = {
    "all": lambda case: "",
    "lengths": lambda case: str(case["lengths"]),
    "head_dim": lambda case: _interval(case["dim"], (1, 65, 97, 129, 193)),
    "query heads per kv head": lambda case: _interval(
        case["heads"] // case["kv_heads"], (1, 2, 5, 9)
    ),
    "tokens per row": lambda case: _interval(case["tokens"] / case["rows"], (1, 32, 256, 2048)),
    "causal": lambda case: "yes" if case["causal"] else "no",
    "window": lambda case: "yes" if case["window"] else "no",
    "keys": lambda case: "as queries" if case["keys"] == case["tokens"] else "other",
    "dtype": lambda case: str(case["dtype"]),
}


def shape_ratios(rows: Sequence[Row], phase: str) -> list[ShapeRatio]:
    """Return the ratio of every shape on which scree and a peer were timed, the worst first."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if f"{phase}_s" in row.values:
            by_case.setdefault(repr(row.case), []).append(row)
    ratios = []
    for case_rows in by_case.values():
        scree = next((row for row in case_rows if row.who == "scree"), None)
        peers = [row for row in case_rows if row.who != "scree"]
        if scree is None or not peers:
            continue
        best = min(peers, key=lambda row: row.values[f"{phase}_s"])
        seconds, peer_seconds = (row.values[f"{phase}_s"] for row in (scree, best))
        share = scree.values.get(f"{phase}_share")
        ratio = seconds / peer_seconds
        ratios.append(ShapeRatio(scree.case, ratio, seconds, share, best.who, peer_seconds))
    return sorted(ratios, key=lambda x: -x.ratio)


def statistics(ratios: Sequence[float]) -> dict[str, float]:
    """Return the number of ratios, their median, 95th percentile and maximum."""
    if not ratios:
        return {"count": 0}
    return {
        "count": len(ratios),
        "median": float(np.median(ratios)),
        "percentile_95": float(np.quantile(ratios, 0.95)),
        "worst": float(np.max(ratios)),
    }


def by_class(rows: Sequence[Row], phase: str) -> dict[tuple[str, str], list[float]]:
    """Return heading and class -> the ratios of its shapes."""
    groups: dict[tuple[str, str], list[float]] = {}
    for heading, classify in CLASSES.items():
        for entry in sorted(shape_ratios(rows, phase), key=lambda x: classify(x.case)):
            groups.setdefault((heading, classify(entry.case)), []).append(entry.ratio)
    return groups


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the statistics of each phase and class, and the worst shapes, for the JSON."""
    return {
        phase: {
            "classes": {
                " ".join(filter(None, key)): statistics(ratios)
                for key, ratios in by_class(rows, phase).items()
            },
            "worst": [
                {"shape": x.case["shape"], "ratio": x.ratio, "peer": x.peer}
                for x in shape_ratios(rows, phase)[:WORST]
            ],
        }
        for phase in PHASES
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the statistics, the worst shapes of each phase, and the errors."""
    return [_statistics_table(rows), *(_worst_table(rows, x) for x in PHASES), _errors_table(rows)]


def _statistics_table(rows: Sequence[Row]) -> Table:
    classes = {phase: by_class(rows, phase) for phase in PHASES}
    lines = []
    for key in dict.fromkeys(key for groups in classes.values() for key in groups):
        line = [key[0], key[1]]
        for groups in classes.values():
            numbers = statistics(groups.get(key, []))
            line += [f"{numbers['count']:,.0f}"]
            line += [_ratio(numbers[x]) if x in numbers else "" for x in STATISTICS]
        lines.append(line)
    header = ["", "class"]
    for phase in ("forward", "forward and backward"):
        header += [f"{phase}, shapes", *STATISTICS.values()]
    caption = "time of scree relative to the fastest peer of each shape: below 1 is faster"
    return Table(caption, header, lines, _failures(rows))


def _ratio(x: float) -> str:
    return bold(f"{x:.2f}") if is_loss(x, "") else f"{x:.2f}"


def _failures(rows: Sequence[Row]) -> list[str]:
    """Return one line per contender and reason with its shapes, scree first."""
    failed: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.who != "scree"):
        if row.status != results.OK:
            failed.setdefault((row.who, row.why[:SAME_LETTERS]), []).append(row)
    return [
        f"{who}, shapes {', '.join(row.case['shape'] for row in alike)}: {alike[0].why}"
        for (who, _), alike in failed.items()
    ]


def _worst_table(rows: Sequence[Row], phase: str) -> Table:
    seconds = results.unit("_s").show
    lines = []
    for entry in shape_ratios(rows, phase)[:WORST]:
        case = entry.case
        lines.append(
            [
                case["shape"],
                describe(case),
                seconds(entry.seconds),
                "" if entry.share is None else f"{entry.share:.1%}",
                entry.peer,
                seconds(entry.peer_seconds),
                _ratio(entry.ratio),
            ]
        )
    name = "forward" if phase == "forward" else "forward and backward"
    header = ["shape", "", "scree", "of 989 TFLOP/s", "fastest peer", "its time", "ratio"]
    return Table(f"the worst shapes, {name}", header, lines, [])


def describe(case: dict[str, Any]) -> str:
    """Return a shape in words."""
    heads = f"{case['heads']}" + (
        f" and {case['kv_heads']} kv" if case["heads"] != case["kv_heads"] else ""
    )
    parts = [
        f"{case['rows']:,} rows ({case['lengths']}), {case['tokens']:,} tokens",
        f"longest {case['longest']:,}",
        f"{case['keys']:,} keys" if case["keys"] != case["tokens"] else "",
        f"{heads} x {case['dim']}",
        case["dtype"],
        "causal" if case["causal"] else "",
        f"window {case['window']}" if case["window"] else "",
    ]
    return ", ".join(filter(None, parts))


def _errors_table(rows: Sequence[Row]) -> Table:
    """Return the errors of each contender relative to eager PyTorch."""
    eager = {repr(row.case): row.values for row in rows if row.who == EAGER}
    lines = []
    for who in dict.fromkeys(row.who for row in rows if row.who != EAGER):
        line = [who]
        for name in ERRORS.values():
            relative = [
                row.values[name] / eager[repr(row.case)][name]
                for row in rows
                if row.who == who and name in row.values and eager[repr(row.case)].get(name)
            ]
            if relative:
                count = f"{sum(x <= 1 for x in relative)} of {len(relative)}"
                line += [count, f"{median(relative):.2f}", f"{max(relative):.2f}"]
            else:
                line += ["", "", ""]
        lines.append(line)
    header = ["", "forward: not larger on", "median", "largest"]
    header += ["gradients: not larger on", "median", "largest"]
    return Table("errors relative to eager PyTorch in the same data type", header, lines, [])


def picture(figure: Any, rows: Sequence[Row]) -> None:
    """Draw the sorted ratios of both phases."""
    axes = figure.add_subplot()
    for phase, name in zip(PHASES, ("forward", "forward and backward"), strict=True):
        ratios = sorted(x.ratio for x in shape_ratios(rows, phase))
        axes.plot(range(1, len(ratios) + 1), ratios, marker=".", label=name)
    axes.axhline(1, color=plots.LIMIT, linewidth=1.2, linestyle="--", label="as fast")
    axes.set(
        title="scree's time over the fastest peer's: below 1 is faster",
        xlabel="shapes, sorted",
        yscale="log",
    )
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda v, _: f"{v:.2g}")
    axes.legend()
