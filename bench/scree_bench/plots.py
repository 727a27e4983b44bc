"""Pictures of results, in a light and a dark theme, as SVG with plain text.

Each subcommand's module has ``pictures(result)``. It returns the name of each picture and a
function that draws it into a figure. `report` draws the same pictures later from the JSON alone.
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

#: Theme -> background, text, grid, and the colors of the series; the first color is scree's.
THEMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "light": ("#ffffff", "#1f2328", "#d8dee4",
              ("#0969da", "#e16f24", "#2da44e", "#8250df", "#bf8700", "#cf222e",
               "#57606a", "#1b7c83", "#d63384")),
    "dark": ("#0d1117", "#e6edf3", "#30363d",
             ("#58a6ff", "#ffa657", "#56d364", "#d2a8ff", "#e3b341", "#ff7b72",
              "#8b949e", "#39c5cf", "#f778ba")),
}  # fmt: skip
# Lines may overlap, so they also differ in style.
STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 3)), "-")
#: Inches at 100 dots per inch: the width of a README.
SIZE = (8.0, 4.2)
#: Maximum dots per letter in a picture.
LETTER_DOTS = 8
#: Letters per line of a label.
LABEL_LETTERS = 28


def draw(result: Result, out: Path, file_format: str = "svg") -> list[Path]:
    """Write the pictures of a result into a folder and return their paths."""
    module = import_module(f"scree_bench.commands.{result.command}")
    paths = []
    for name, paint in getattr(module, "pictures", lambda _: {})(result).items():
        paths += save(f"{name}-{result.machine['tag']}", paint, out, file_format)
    return paths


def tables(result: Result) -> list[results.Table]:
    """Return the tables of a result.

    These come from ``tables(result)`` of the subcommand's module, or else contain all rows.
    """
    module = import_module(f"scree_bench.commands.{result.command}")
    result_tables: list[results.Table] = (
        module.tables(result) if hasattr(module, "tables") else results.tables(result.rows)
    )
    return result_tables


def save(name: str, paint: Draw, out: Path, file_format: str = "svg") -> list[Path]:
    """Draw one picture in every theme: ``name-light.svg`` and ``name-dark.svg``."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for theme, (background, text_color, grid_color, colors) in THEMES.items():
        style = {
            "figure.facecolor": background, "axes.facecolor": background, "savefig.facecolor": background,
            "text.color": text_color,
            "axes.labelcolor": text_color, "axes.edgecolor": grid_color, "xtick.color": text_color, "ytick.color": text_color,
            "grid.color": grid_color,
            "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=colors, linestyle=STYLES),
            "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left",
            "legend.frameon": False, "legend.fontsize": 10, "lines.linewidth": 2,
            "lines.markersize": 5,
            "svg.fonttype": "none", "svg.hashsalt": "scree", "font.family": "sans-serif",
        }  # fmt: skip
        with mpl.rc_context(style):
            figure = Figure(figsize=SIZE, layout="constrained")
            paint(figure)
            path = out / f"{name}-{theme}.{file_format}"
            figure.savefig(path, dpi=100, metadata={"Date": None} if file_format == "svg" else None)
            paths.append(path)
    return paths


def series(rows: Iterable[Row], x: str, value: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return sorted positions and values per contender."""
    points_of: dict[str, dict[float, float]] = {}
    for row in rows:
        if value in row.values and x in row.case:
            points_of.setdefault(row.who, {})[row.case[x]] = row.values[value]
    return {
        contender: (sorted(points), [points[p] for p in sorted(points)])
        for contender, points in points_of.items()
    }


def curves(axes: Any, rows: Iterable[Row], x: str, value: str, title: str) -> None:
    """Draw one line per contender, with axes in powers of two and ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for contender, (xs, ys) in series(rows, x, value).items():
        axes.plot(xs, ys, marker="o", label=contender)
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
    """Draw a group of horizontal bars per entry, with one color per contender.

    The value is written next to each bar. With `apart` each group has its own scale.
    """
    names = sorted(
        dict.fromkeys(contender for group in groups.values() for contender in group),
        key=lambda contender: not contender.startswith("scree"),
    )
    palette = _colors()
    # With more names than colors, names are next to the bars, and color only marks scree.
    crowded = len(names) > len(palette)
    colors = {
        contender: palette[not contender.startswith("scree")] if crowded else palette[i]
        for i, contender in enumerate(names)
    }
    bar_dots = 100 * SIZE[0] - LETTER_DOTS * max(
        (len(line) for label in groups for line in label.split("\n")), default=0
    )
    position, ticks, width = 0.0, [], 0.0
    for label, group in groups.items():
        ticks.append((position + (len(group) - 1) / 2, label))
        scale = max(group.values(), default=1.0) if apart else 1.0
        for contender, x in group.items():
            annotation = f" {unit(kind).show(x)}{f'  {contender}' if crowded else ''}"
            axes.barh(position, x / scale, color=colors[contender], height=0.8)
            axes.text(x / scale, position, annotation, va="center", fontsize=9)
            width, position = (
                max(width, x / scale / max(0.2, 1 - LETTER_DOTS * len(annotation) / bar_dots)),
                position + 1,
            )
        position += 0.8
    axes.set(xlim=(0, width or 1), xticks=[])
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(position - 1.2, -0.6)  # from top to bottom
    figure = axes.get_figure()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    columns = max(1, min(3, len(names)))
    if len(names) > 1 and not crowded:
        handles = [axes.barh(0, 0, color=colors[contender], label=contender) for contender in names]
        figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    figure.set_size_inches(
        SIZE[0], max(2.0, 0.24 * position + 0.6 + 0.25 * math.ceil(len(names) / columns))
    )


def labels(rows: Sequence[Row], *without: str) -> Callable[[Row], str]:
    """Return a function that labels a row by the entries in which its case differs."""
    keys = dict.fromkeys(k for row in rows for k in row.case if k not in without)
    varying = [k for k in keys if len({repr(row.case.get(k)) for row in rows}) > 1]

    def label(row: Row) -> str:
        entries = [
            x if isinstance(x := row.case[k], str) else f"{k} {text(x)}"
            for k in varying
            if k in row.case
        ]
        lines: list[str] = []
        for entry in entries:
            if lines and len(lines[-1]) + len(entry) <= LABEL_LETTERS:
                lines[-1] += f", {entry}"
            else:
                lines.append(entry)
        return "\n".join(lines)

    return label


def grouped(
    rows: Iterable[Row], value: str, label: Callable[[Row], str]
) -> dict[str, dict[str, float]]:
    """Group rows by label, as `bars` expects."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if value in row.values:
            groups.setdefault(label(row), {})[row.who] = row.values[value]
    return groups


def fastest(groups: Mapping[str, Mapping[str, float]], count: int) -> dict[str, dict[str, float]]:
    """Select scree and the fastest other contenders of each group, `count` in total."""
    selected = {}
    for label, group in groups.items():
        best = sorted(group, key=lambda contender: (contender != "scree", group[contender]))[:count]
        selected[label] = {
            contender: group[contender]
            for contender in sorted(
                best, key=lambda contender: (contender != "scree", group[contender])
            )
        }
    return selected


def _colors() -> Sequence[str]:
    import matplotlib as mpl

    colors: list[str] = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors


def ticks(count: int, whole: bool = False) -> Any:
    """Return a locator of at most `count` ticks; with `whole`, only at integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=whole)
