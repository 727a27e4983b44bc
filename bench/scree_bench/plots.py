"""Pictures of results: narrow SVG with plain text, for light and dark pages.

Each subcommand's module has ``pictures(result)``. It returns the name of each picture and a
function that draws it into a figure. `report` and the documentation draw the same pictures later
from the JSON alone.

All colors of a picture are CSS variables, so one SVG serves both color schemes: inside a page the
page defines them (`css`), and a file brings its own definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from . import results
from .results import LIMITS, Result, Row, text, unit

Draw = Callable[[Any], None]
Pictures = dict[str, Draw]

#: CSS variable -> its color on a light and on a dark page.
COLORS = {
    "chart-text": ("#1f2328", "#e6edf3"),
    "chart-grid": ("#d8dee4", "#3d444d"),
    "chart-limit": ("#6e7781", "#9198a1"),
    "chart-scree": ("#0969da", "#58a6ff"),
    "chart-1": ("#e16f24", "#ffa657"),
    "chart-2": ("#2da44e", "#56d364"),
    "chart-3": ("#d63384", "#f778ba"),
    "chart-4": ("#1b7c83", "#39c5cf"),
    "chart-5": ("#cf222e", "#ff7b72"),
    "chart-6": ("#bf8700", "#e3b341"),
    "chart-7": ("#7a5230", "#c69c6d"),
    "chart-8": ("#6b7a1f", "#b5c464"),
}
#: Placeholders that matplotlib accepts as colors, until the SVG gets the CSS variables.
PLACEHOLDERS = {name: f"#0000{i + 16:02x}" for i, name in enumerate(COLORS)}
TEXT, GRID, LIMIT, SCREE, *PEERS = PLACEHOLDERS.values()
# Lines may overlap, so they also differ in style.
STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 3)))
#: Inches. A picture is 360 points wide and fits a phone without scaling.
SIZE = (5.0, 3.2)
#: Peers that many pictures share -> the index of their color.
PEER_COLORS = {
    "FA4": 0, "FA2": 1, "FA2 (aten)": 1, "FA3": 3, "FA3 (forward only)": 3, "padded, SDPA": 2,
    "varlen_attn (FA2)": 7, "flex_attention": 5, "torch.nested, SDPA": 4,
    "loop over rows, SDPA": 6, "efficient": 2, "efficient, packed": 2, "torch": 0,
    "torch, compiled": 1, "liger_kernel": 2, "quack": 3, "padded": 4, "bare": 0,
}  # fmt: skip
#: Opacity of the first and of further forms of scree in one picture.
OPACITIES = (1.0, 0.65, 0.4, 0.25)
#: Maximum points per letter in a picture, and points of a figure's width outside the axes.
LETTER_POINTS, MARGIN_POINTS = 5.2, 8
#: Letters per line of a label.
LABEL_LETTERS = 56
#: Letters of a legend entry above which the legend has one column.
LEGEND_LETTERS = 26
#: Inches per bar.
BAR_INCHES = 0.2


class Picture(NamedTuple):
    """A drawn picture: its caption, and its SVG with CSS variables as colors."""

    caption: str
    svg: str


def css(light: str = ":root", dark: str = "") -> str:
    """Return the definitions of the colors, for the CSS selectors of light and dark pages.

    Without a selector `dark`, the preference of the reader decides.
    """

    def block(selector: str, scheme: int) -> str:
        values = "".join(f"--{name}:{pair[scheme]};" for name, pair in COLORS.items())
        return f"{selector}{{{values}}}"

    if dark:
        return f"{block(light, 0)}\n{block(dark, 1)}\n"
    return f"{block(light, 0)}@media (prefers-color-scheme:dark){{{block(light, 1)}}}"


def draw(result: Result, out: Path) -> list[Path]:
    """Write the pictures of a result into a folder and return their paths."""
    return [save(name, paint, out) for name, paint in pictures(result).items()]


def pictures(result: Result) -> Pictures:
    """Return the pictures of a result; their names end in the machine."""
    module = import_module(f"scree_bench.commands.{result.command}")
    drawn: Pictures = getattr(module, "pictures", lambda _: {})(result)
    tag = "-".join(filter(None, (result.part.replace(" ", "-"), result.machine["tag"])))
    return {f"{name}-{tag}": paint for name, paint in drawn.items()}


def tables(result: Result) -> list[results.Table]:
    """Return the tables of a result.

    These come from ``tables(result)`` of the subcommand's module, or else contain all rows.
    """
    module = import_module(f"scree_bench.commands.{result.command}")
    result_tables: list[results.Table] = (
        module.tables(result) if hasattr(module, "tables") else results.tables(result.rows)
    )
    return result_tables


def save(name: str, paint: Draw, out: Path) -> Path:
    """Draw a picture into ``name.svg``, which follows the color scheme of the reader."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.svg"
    head, rest = render(paint).svg.split(">", 1)
    path.write_text(f"{head}>\n<style>{css()}</style>{rest}\n", encoding="utf-8")
    return path


def render(paint: Draw) -> Picture:
    """Draw a picture. Titles become the caption, and all legends one legend on top."""
    import io

    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    style = {
        "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": GRID,
        "xtick.color": TEXT, "ytick.color": TEXT, "grid.color": GRID,
        "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
        "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=PEERS, linestyle=STYLES),
        "font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left",
        "xtick.labelsize": 9, "ytick.labelsize": 9, "axes.labelsize": 9,
        "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.8,
        "legend.borderpad": 0, "legend.labelspacing": 0.3, "legend.columnspacing": 1,
        "lines.markersize": 4, "svg.fonttype": "none", "svg.hashsalt": "scree",
        "font.family": "sans-serif", "hatch.linewidth": 0.6,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        paint(figure)
        caption = _take_caption(figure)
        _put_legend_on_top(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Picture(caption, _compact(file.getvalue(), caption))


def _take_caption(figure: Any) -> str:
    """Remove the title of a figure, or of its only axes, and return it."""
    caption: str = figure.get_suptitle()
    if caption:
        figure.suptitle("")
    elif len(figure.axes) == 1:
        caption = figure.axes[0].get_title(loc="left")
        figure.axes[0].set_title("")
    return caption


def _put_legend_on_top(figure: Any) -> None:
    """Color the lines of scree, and join the legends of all axes above them."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_label().startswith("scree"):
                line.set_color(SCREE)
        if axes.get_legend():
            axes.get_legend().remove()
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        columns = 1 if max(map(len, entries)) > LEGEND_LETTERS else 2
        figure.legend(entries.values(), entries, loc="outside upper left", ncols=columns)


def _round_coordinates(tag: re.Match[str]) -> str:
    """Round the numbers inside a tag to a tenth of a point; texts between tags stay."""
    return re.sub(
        r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), tag[0]
    )


def _compact(svg: str, caption: str) -> str:
    """Replace placeholder colors by CSS variables, and drop what a page does not need from an SVG."""
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<clipPath.*?</clipPath>| clip-path="[^"]*"', "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for name, color in PLACEHOLDERS.items():
        svg = svg.replace(color, f"var(--{name})")
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg))
    names = {name for pair in used for name in pair if name}
    svg = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in names else "", svg)
    svg = re.sub(r"<[^>]*>", _round_coordinates, svg)
    while (shorter := re.sub(r"<g>\s*(<(?!g\b|/g)[^>]*/>)?\s*</g>", r"\1", svg)) != svg:
        svg = shorter
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").replace(' "', '"')
    svg = re.sub(r"([;:]) (?=[^<>]*>)", r"\1", svg)
    ((width, height),) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="system-ui,sans-serif" aria-label="{escape(caption)}">'
    )
    return opening + svg.split(">", 1)[1].rstrip()


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


def contender_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of the bars of each contender, scree first and limits last.

    Scree has the accent color, forms of scree are paler, peers have other colors, and limits are
    hatched outlines.
    """
    forms = [name for name in names if name.startswith("scree")]
    peers = [name for name in names if name not in forms and name not in LIMITS]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(forms):
        styles[name] = {"color": SCREE, "alpha": OPACITIES[min(i, len(OPACITIES) - 1)]}
    crowded = is_crowded(names)
    taken: dict[str, int] = {}
    for name in sorted(peers, key=lambda name: name not in PEER_COLORS):
        wanted = PEER_COLORS.get(name, 0)
        free = [i for i in (wanted, *range(len(PEERS))) if i not in taken.values()]
        taken[name] = 0 if crowded else free[0]
    for name in peers:
        styles[name] = {"color": PEERS[taken[name]]}
    for name in names:
        if name in LIMITS:
            styles[name] = {
                "facecolor": "none", "edgecolor": LIMIT, "linestyle": (0, (3, 2)), "hatch": "////",
            }  # fmt: skip
    return styles


def is_crowded(names: Iterable[str]) -> bool:
    """Return whether there are more peers than colors, so that names are next to the bars."""
    return sum(not n.startswith("scree") and n not in LIMITS for n in names) > len(PEERS)


def bars(
    axes: Any, groups: Mapping[str, Mapping[str, float]], kind: str, title: str, apart: bool = False
) -> None:
    """Draw a group of horizontal bars per entry, with one style per contender.

    The label of a group is above its bars, and the value is next to each bar. With `apart` each
    group has its own scale.
    """
    styles = contender_styles(
        list(dict.fromkeys(contender for group in groups.values() for contender in group))
    )
    crowded = is_crowded(styles)
    bar_points = 72 * SIZE[0] - MARGIN_POINTS
    position, width = 0.0, 0.0
    for label, group in groups.items():
        lines = label.count("\n") + bool(label)
        position += 0.9 * lines
        if label:
            axes.text(0, position - 0.55, label, va="bottom", fontsize=9, fontweight="bold")
        scale = max(group.values(), default=1.0) if apart else 1.0
        for contender, x in group.items():
            annotation = f"{unit(kind).show(x)}{f', {contender}' if crowded else ''}"
            axes.barh(position, x / scale, height=0.8, **styles[contender])
            axes.annotate(
                annotation, (x / scale, position), (3, 0), textcoords="offset points",
                va="center", fontsize=8.5,
            )  # fmt: skip
            share = max(0.2, 1 - (3 + LETTER_POINTS * len(annotation)) / bar_points)
            width, position = max(width, x / scale / share), position + 1
        position += 0.3
    axes.set(xlim=(0, width or 1), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_ylim(position - 0.8, -0.6)  # from top to bottom
    figure = axes.get_figure()
    figure.suptitle(title)
    legend = 0.0
    if len(styles) > 1 and not crowded:
        for contender, style in styles.items():
            # Only for the legend: nothing is drawn at NaN.
            axes.barh(math.nan, 0, label=contender, **style)
        columns = 1 if max(map(len, styles)) > LEGEND_LETTERS else 2
        legend = 0.2 * math.ceil(len(styles) / columns)
    figure.set_size_inches(SIZE[0], BAR_INCHES * position + 0.2 + legend)


def dots(axes: Any, groups: Mapping[str, Mapping[str, float]], title: str, limit: str) -> None:
    """Draw ratios as dots: one line per group, one color per series, a dashed line at one."""
    from matplotlib.ticker import FixedLocator, NullLocator

    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    axes.axvline(1, color=LIMIT, linestyle=(0, (4, 3)), linewidth=1.2, label=limit)
    for i, name in enumerate(names):
        points = [(group[name], y) for y, group in enumerate(groups.values()) if name in group]
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="", color=PEERS[i], label=name)
    values = [x for group in groups.values() for x in group.values()]
    axes.set_xscale("log")
    steps = [0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]
    low, high = min([*values, 0.9]) / 1.1, max([*values, 1.1]) * 1.1
    if high < 2.5 * low:
        steps = [0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4]
    axes.xaxis.set_major_locator(FixedLocator([x for x in steps if low <= x <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(groups)), list(groups), fontsize=9)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    figure = axes.get_figure()
    figure.suptitle(title)
    line = 0.165 if not any("\n" in label for label in groups) else 0.32
    figure.set_size_inches(SIZE[0], line * len(groups) + 0.8)


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


def ticks(count: int, whole: bool = False) -> Any:
    """Return a locator of at most `count` ticks; with `whole`, only at integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=whole)
