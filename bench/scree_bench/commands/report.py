"""`report` and `compare`: what becomes of the JSON of many runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import plots, results
from ..measure import median
from ..results import Result
from . import MEASURING

#: Above this line stands what is written by hand, below it what `report` writes.
MARK = "<!-- results: written by scree-bench report -->"

METHOD = """\
# Benchmarks

Every number here comes from `scree-bench`, which anyone can run: `pip install 'scree[bench]'`, then `scree-bench --help`.
What stands below is written by `scree-bench report` from the JSON of the runs, which holds every sample.

How it measures: all contenders of a case run in one process, in turn, round after round, so that a drift of the machine meets all
of them alike; one whose time is used up leaves the rounds. The first call of each is not counted. A number is the median; behind ±
stands half the interquartile range as a share of it; in brackets the ratio to ours. Errors are relative, against float64. Limits
are those of the same machine in the same run: a large copy, and a large matrix product. What could not run is listed, and so is
what ran out of memory.

On GPUs the device is timed by events, a single call between rests. While it sleeps, the host launches all that the call consists
of, so that no kernel comes late; where one did, the sample is taken again. Before that, zeros overwrite the second-level cache, as
`triton.testing.do_bench` does it: a call finds lines of others to write back and leaves its own, as in a program. On an H100 a
rope of 34 MB takes 0.93 of that time in a loop without rests or zeros, and 0.79 behind a cache that was only read, where it need
not write back as much as it leaves. Lines that a kernel marked to stay, as compiled forms do and some of ours, outlive zeros, and
the next reader of the same tensor would take 0.88 of its time: the driver is asked to release them before. Attention with 128-wide
heads takes 1.07 of that time by `do_bench`, where nothing rests: the ratio to a peer's is the same. All arrays are random numbers,
and so are the gradients that are sent back, the same ones to all contenders (to a loss, one): multiplying numbers that are all
alike takes a device less power, and so less time. *Host*, in rounds of its own behind, is how long the host takes to prepare and
launch a call, in a loop of up to 30 that waits for none of them. A call that waits for both takes the longer of the two. A call
that waits for the device itself, as a boolean mask does, is timed with what the host does in it, behind a short sleep: a core that
has waited for 20 ms takes up to 200 us to wake up, which no program that is at work pays.
"""


def head() -> str:
    """What a new page begins with: how it was measured, and what there is to run."""
    lines = [METHOD, "## What there is to run", "", "| command | what it shows |", "|---|---|"]
    return (
        "\n".join(lines + [f"| `scree-bench {name}` | {_words(name)[0]} |" for name in MEASURING])
        + "\n"
    )


def page(found: list[Result], folder: Path, at: Path) -> str:
    """The page in Markdown; writes its pictures into `folder`, to which it refers from the page's own place `at`.

    Where the page is there and has the mark, what stands above it is kept.
    """
    old = at.read_text(encoding="utf-8") if at.exists() else ""
    parts = [(old.partition(MARK)[0] if MARK in old else head() + "\n") + MARK]
    if not found:
        parts += ["", "## Results", "", "None are committed yet."]
    found = sorted(
        found, key=lambda r: (r.machine.get("gpu") is None, MEASURING.index(r.command), _run(r))
    )
    if len(found) > 1:
        parts += ["", *_contents(found)]
    for result in found:
        parts += ["", *_section(result, folder, at)]
    return "\n".join(parts) + "\n"


def _contents(found: list[Result]) -> Iterator[str]:
    """A table of links to the sections: a line for each run, a column for each machine."""
    yield "## Results\n"
    lines = sorted({(MEASURING.index(r.command), _run(r)) for r in found})
    machines = list(dict.fromkeys(r.where for r in found))
    yield f"| | {' | '.join(machines)} |\n|---|{'---|' * len(machines)}"
    for _, run in lines:
        dates = {
            r.where: f"[{r.date[:10]}](#{_anchor(_title(r))})" for r in found if _run(r) == run
        }
        yield f"| {run} | {' | '.join(dates.get(name, '') for name in machines)} |"


def _run(result: Result) -> str:
    """The subcommand, and which part of it where it was run in several."""
    part = result.machine.get("part")
    return f"{result.command}, {part}" if part else result.command


def _title(result: Result) -> str:
    name = _run(result)
    return f"{name[0].upper()}{name[1:]}: {result.where}"


def _anchor(title: str) -> str:
    """Where Markdown puts a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def _call(result: Result) -> str:
    """How the subcommand was called: the options that are not as they are by default."""
    known = signature(import_module(f"scree_bench.commands.{result.command}").command).parameters
    words = [f"scree-bench {result.command}"]
    for name, x in result.config.items():
        if name in known and x not in (None, "") and str(x) != str(known[name].default):
            option = name.replace("_", "-")
            words.append(
                f"--{option}"
                if x is True
                else f"--no-{option}"
                if x is False
                else f"--{option} {x}"
            )
    return " ".join(words)


def _words(command: str) -> tuple[str, str]:
    """What a subcommand says of itself: the first line, and the rest."""
    first, _, rest = (
        getdoc(import_module(f"scree_bench.commands.{command}").command) or ""
    ).partition("\n")
    return first, " ".join(rest.split())


def _section(result: Result, folder: Path, at: Path) -> Iterator[str]:
    yield f"## {_title(result)}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield f"\n`{_call(result)}`, {result.date[:10]}; {versions}."
    if not result.complete:
        yield "\nThe run was interrupted; this is what had been measured."
    for note in result.extra.get("notes", []):
        yield f"\n{note}"
    if result.limits:
        yield f"\nLimits of the machine: {', '.join(result.limits)}."
    for light, dark in _pictures(result, folder):
        title = light.stem.removesuffix("-light").replace("-", " ")
        yield "\n" + " ".join(
            f"![{title}]({Path(os.path.relpath(path, at.parent)).as_posix()}#only-{theme})"
            for path, theme in ((light, "light"), (dark, "dark"))
        )
    for table in plots.tables(result):
        yield "\n" + table.markdown()
    if result.left_out:
        yield (
            "\nNot run: "
            + "; ".join(f"{entry['what']} ({entry['why']})" for entry in result.left_out)
            + "."
        )


def _pictures(result: Result, folder: Path) -> Iterator[tuple[Path, Path]]:
    written = plots.draw(result, folder)
    return zip(written[::2], written[1::2], strict=True)


def command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="JSON of runs, on any machines.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The page to write; pictures go into a folder of that name.")
    ] = Path("bench.md"),
) -> None:
    """Assemble the JSON of many runs into one page of Markdown with pictures.

    A page that is there keeps what stands above its line `<!-- results: ... -->`.
    """
    console, found = Console(), []
    for path in files or []:
        try:
            result = results.read(path)
            tag = path.stem.removeprefix(
                f"{result.command}-"
            )  # the file tells runs of one subcommand apart
            result.machine |= {
                "part": tag.removesuffix(result.machine["tag"]).strip("-").replace("-", " "),
                "tag": tag,
            }
            found.append(result)
        except ValueError as error:
            console.print(f"left out: {error}", highlight=False, markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(found, out.with_suffix(""), out), encoding="utf-8")
    console.print(f"Wrote {out} from {len(found)} runs.", highlight=False)


def compare(
    before: Annotated[Path, typer.Argument(help="JSON of a run.")],
    after: Annotated[Path, typer.Argument(help="JSON of a later run of the same command.")],
    least: Annotated[
        float, typer.Option(help="Changes of samples smaller than this count as noise.")
    ] = 0.05,
    worst: Annotated[
        int, typer.Option(min=0, help="Also print this many of the worst ratios after/before.")
    ] = 0,
) -> None:
    """Print the values that changed beyond noise between two runs of one subcommand.

    Noise is three times the spread of both runs together. The exit status is 1 if any value got
    worse. With --worst N, the ratios after/before of scree's values follow: their minimum, median
    and maximum for each kind of value, and the N worst cases. Use it to compare two source trees.
    """
    console, runs = Console(width=160), []
    for path in (before, after):
        try:
            runs.append(results.read(path))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    a, b = runs
    if a.command != b.command:
        raise typer.BadParameter(
            f"expected two runs of one command, got {a.command} and {b.command}"
        )
    for what, x, y in (("machine", _host(a), _host(b)), ("versions", a.versions, b.versions)):
        if x != y:
            console.print(f"The {what} differ: {_difference(x, y)}", highlight=False, markup=False)
    moves = results.compare(a, b, least)
    for move in moves:
        kind = results.unit(move.name)
        verdict = {True: "better", False: "worse", None: "moved"}[move.better]
        case = ", ".join(f"{k} {results.text(v)}" for k, v in move.case.items())
        console.print(
            f"{verdict}: {case}: {move.who}: {move.name}: {kind.show(move.before)} -> {kind.show(move.after)} "
            f"({move.after / move.before - 1 if move.before else float('inf'):+.0%}, noise {move.noise:.0%})",
            highlight=False,
            markup=False,
        )
    if not moves:
        console.print("Nothing moved beyond noise.")
    if worst:
        _print_ratios(console, results.ratios(a, b), worst)
    raise typer.Exit(1 if any(move.better is False for move in moves) else 0)


def _print_ratios(console: Console, ratios: list[results.Ratio], worst: int) -> None:
    """Print the spread of the ratios of each value, and the worst cases."""
    if not ratios:
        console.print("The runs have no value of scree in common.")
    for name in dict.fromkeys(entry.name for entry in ratios):
        values = [entry.ratio for entry in ratios if entry.name == name]
        console.print(
            f"{name}: {len(values)} ratios: min {min(values):.2f}, median {median(values):.2f}, "
            f"max {max(values):.2f}",
            highlight=False,
            markup=False,
        )
    for entry in ratios[:worst]:
        show = results.unit(entry.name).show
        case = ", ".join(f"{k} {results.text(v)}" for k, v in entry.case.items())
        console.print(
            f"{entry.ratio:.2f}x: {case}: {entry.who}: {entry.name}: "
            f"{show(entry.before)} -> {show(entry.after)}",
            highlight=False,
            markup=False,
        )


def _host(result: Result) -> dict[str, Any]:
    return {k: v for k, v in result.machine.items() if k != "limits"}


def _difference(x: dict[str, Any], y: dict[str, Any]) -> str:
    return ", ".join(
        f"{k} {x.get(k, 'none')} -> {y.get(k, 'none')}"
        for k in dict.fromkeys((*x, *y))
        if x.get(k) != y.get(k)
    )
