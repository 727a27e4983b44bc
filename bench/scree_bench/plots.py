"""Pictures of results, each in a light and a dark theme, as SVG with plain text.

A subcommand says what to draw: ``pictures(result)`` of its module gives the name of each picture and a function that draws it
into a figure. The same pictures come out of the JSON later, so that `report` needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from . import results
from .results import Result, Row, text, unit

Draw = Callable[[Any], None]
Pictures = dict[str, Draw]

#: Theme -> background, text, grid, and the colors of the series in turn; the first is ours.
THEMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "light": ("#ffffff", "#1f2328", "#d8dee4",
              ("#0969da", "#e16f24", "#2da44e", "#8250df", "#bf8700", "#cf222e", "#57606a", "#1b7c83", "#d63384")),
    "dark": ("#0d1117", "#e6edf3", "#30363d",
             ("#58a6ff", "#ffa657", "#56d364", "#d2a8ff", "#e3b341", "#ff7b72", "#8b949e", "#39c5cf", "#f778ba")),
}  # fmt: skip
STYLES = (
    "-",
    "--",
    ":",
    "-.",
    (0, (5, 1)),
    (0, (1, 1)),
    (0, (3, 1, 1, 1)),
    (0, (8, 3)),
    "-",
)  # lines may cover each other
SIZE = (8.0, 4.2)  # inches at 100 dots each: the width of a README
LETTER = 8  # dots of a letter in a picture, at most
LINE = 28  # letters of a label in a line


def draw(result: Result, out: Path, form: str = "svg") -> list[Path]:
    """Write the pictures of a result into a folder; the paths written."""
    module = import_module(f"scree_bench.commands.{result.command}")
    written = []
    for name, paint in getattr(module, "pictures", lambda _: {})(result).items():
        written += save(f"{name}-{result.machine['tag']}", paint, out, form)
    return written


def tables(result: Result) -> list[results.Table]:
    """The tables of a result: ``tables(result)`` of its module where it has one, otherwise everything."""
    module = import_module(f"scree_bench.commands.{result.command}")
    found: list[results.Table] = (
        module.tables(result) if hasattr(module, "tables") else results.tables(result.rows)
    )
    return found


def save(name: str, paint: Draw, out: Path, form: str = "svg") -> list[Path]:
    """Draw one picture in every theme: ``name-light.svg`` and ``name-dark.svg``."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, (back, ink, grid, colors) in THEMES.items():
        style = {
            "figure.facecolor": back, "axes.facecolor": back, "savefig.facecolor": back, "text.color": ink,
            "axes.labelcolor": ink, "axes.edgecolor": grid, "xtick.color": ink, "ytick.color": ink, "grid.color": grid,
            "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=colors, linestyle=STYLES),
            "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left",
            "legend.frameon": False, "legend.fontsize": 10, "lines.linewidth": 2, "lines.markersize": 5,
            "svg.fonttype": "none", "svg.hashsalt": "scree", "font.family": "sans-serif",
        }  # fmt: skip
        with mpl.rc_context(style):
            figure = Figure(figsize=SIZE, layout="constrained")
            paint(figure)
            path = out / f"{name}-{theme}.{form}"
            figure.savefig(path, dpi=100, metadata={"Date": None} if form == "svg" else None)
            written.append(path)
    return written


def series(rows: Iterable[Row], x: str, value: str) -> dict[str, tuple[list[float], list[float]]]:
    """For each contender, where it was measured and what came out, in order."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if value in row.values and x in row.case:
            found.setdefault(row.who, {})[row.case[x]] = row.values[value]
    return {
        who: (sorted(points), [points[p] for p in sorted(points)]) for who, points in found.items()
    }


def curves(axes: Any, rows: Iterable[Row], x: str, value: str, title: str) -> None:
    """A line a contender, both axes by powers of two and ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for who, (xs, ys) in series(rows, x, value).items():
        axes.plot(xs, ys, marker="o", label=who)
    axes.set(title=title, xlabel=x.replace("_", " "))
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        axes.legend()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(lambda v, _: unit(value).show(v))
    axes.yaxis.set_minor_formatter(NullFormatter())


def bars(
    axes: Any, groups: Mapping[str, Mapping[str, float]], kind: str, title: str, apart: bool = False
) -> None:
    """A group of horizontal bars for each entry, a color for each contender, its value beside each bar.

    With `apart` each group has a scale of its own.
    """
    names = sorted(
        dict.fromkeys(who for group in groups.values() for who in group),
        key=lambda who: not who.startswith("scree"),
    )
    palette = _colors()
    crowded = len(names) > len(
        palette
    )  # then names stand beside the bars, and color only tells ours from theirs
    colors = {
        who: palette[not who.startswith("scree")] if crowded else palette[i]
        for i, who in enumerate(names)
    }
    room = 100 * SIZE[0] - LETTER * max(
        (len(line) for label in groups for line in label.split("\n")), default=0
    )
    place, ticks, width = 0.0, [], 0.0
    for label, group in groups.items():
        ticks.append((place + (len(group) - 1) / 2, label))
        scale = max(group.values(), default=1.0) if apart else 1.0
        for who, x in group.items():
            beside = f" {unit(kind).show(x)}{f'  {who}' if crowded else ''}"
            axes.barh(place, x / scale, color=colors[who], height=0.8)
            axes.text(x / scale, place, beside, va="center", fontsize=9)
            width, place = (
                max(width, x / scale / max(0.2, 1 - LETTER * len(beside) / room)),
                place + 1,
            )
        place += 0.8
    axes.set(xlim=(0, width or 1), xticks=[])
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(place - 1.2, -0.6)  # from above
    figure = axes.get_figure()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    columns = max(1, min(3, len(names)))
    if len(names) > 1 and not crowded:
        handles = [axes.barh(0, 0, color=colors[who], label=who) for who in names]
        figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    figure.set_size_inches(
        SIZE[0], max(2.0, 0.24 * place + 0.6 + 0.25 * math.ceil(len(names) / columns))
    )


def labels(rows: Sequence[Row], *without: str) -> Callable[[Row], str]:
    """What sets a row's case apart from the others', in at most a few lines."""
    keys = dict.fromkeys(k for row in rows for k in row.case if k not in without)
    apart = [k for k in keys if len({repr(row.case.get(k)) for row in rows}) > 1]

    def label(row: Row) -> str:
        words = [
            x if isinstance(x := row.case[k], str) else f"{k} {text(x)}"
            for k in apart
            if k in row.case
        ]
        lines: list[str] = []
        for word in words:
            if lines and len(lines[-1]) + len(word) <= LINE:
                lines[-1] += f", {word}"
            else:
                lines.append(word)
        return "\n".join(lines)

    return label


def grouped(
    rows: Iterable[Row], value: str, label: Callable[[Row], str]
) -> dict[str, dict[str, float]]:
    """Rows as `bars` takes them: one group a label."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if value in row.values:
            found.setdefault(label(row), {})[row.who] = row.values[value]
    return found


def fastest(groups: Mapping[str, Mapping[str, float]], count: int) -> dict[str, dict[str, float]]:
    """Of each group ours and the least of the others, so many in all."""
    found = {}
    for label, group in groups.items():
        best = sorted(group, key=lambda who: (who != "scree", group[who]))[:count]
        found[label] = {
            who: group[who] for who in sorted(best, key=lambda who: (who != "scree", group[who]))
        }
    return found


def _colors() -> Sequence[str]:
    import matplotlib as mpl

    colors: list[str] = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors


def ticks(count: int, whole: bool = False) -> Any:
    """A locator of at most so many ticks, at whole numbers alone if that is asked for."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=whole)
