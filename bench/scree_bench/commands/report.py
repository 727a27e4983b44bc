"""`report` and `compare`: a page, or a comparison, from the JSON of runs."""

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

#: The text above this line is written by hand, the text below it by `report`.
MARK = "<!-- results: written by scree-bench report -->"

METHOD = """\
# Benchmarks

Every number here comes from `scree-bench`, which anyone can run: install it from a checkout,
then `scree-bench --help`. `scree-bench report` writes the results below from the JSON of the runs,
which holds every sample.

All contenders of a case run in one process, in alternating rounds, so that a drift of the machine
affects all of them equally. A contender whose time is used up leaves the rounds. The first call of
each is not counted. A number is the median. The number after ± is half the interquartile range
relative to the median; the number in brackets is the ratio to scree. Errors are relative, against
float64. Limits are measured on the same machine in the same run: a large copy, and a large matrix
product. Contenders that could not run or ran out of memory are listed.

On GPUs, events time the device: one call at a time, with a rest between calls. While the device
sleeps, the host launches all kernels of the call, so that no kernel is late. A sample with a late
kernel is taken again. Before each call, zeros overwrite the L2 cache, as in
`triton.testing.do_bench`. The call finds dirty lines to write back and leaves its own, as in a
program. The driver is also asked to release lines that a kernel marked as persistent. Compiled
forms and some kernels of scree mark such lines, which outlive the zeros.

| H100 case, relative to this method | time |
|---|---|
| rope of 34 MB, in a loop without rests or zeros | 0.93 |
| rope of 34 MB, after a cache that was only read (fewer lines to write back) | 0.79 |
| reader of a tensor with persistent lines, without the release | 0.88 |
| attention with 128-wide heads, by `do_bench` without rests (same ratio to a peer) | 1.07 |

All arrays are random numbers, and so are the gradients of the results; the gradient of a loss is
one. All contenders get the same ones. Multiplying equal numbers takes a device less power, and so
less time.

*Host* is the time in which the host prepares and launches a call. It is measured in separate later
rounds, in a loop of up to 30 calls that waits for none of them. A call that waits for both takes
the longer of the two. A call that itself waits for the device, such as a boolean mask, is timed
with its host work, after a short sleep. A core that has waited for 20 ms takes up to 200 us to wake
up, which a busy program does not pay.
"""


def head() -> str:
    """Return the beginning of a new page: the method of measurement, and the subcommands."""
    lines = [METHOD, "## What there is to run", "", "| command | what it shows |", "|---|---|"]
    return (
        "\n".join(lines + [f"| `scree-bench {name}` | {_words(name)[0]} |" for name in MEASURING])
        + "\n"
    )


def page(runs: list[Result], folder: Path, at: Path) -> str:
    """Return the page in Markdown, and write its pictures into `folder`.

    Links to pictures are relative to the path `at` of the page. If the page exists and has the
    mark, the text above the mark is kept.
    """
    old = at.read_text(encoding="utf-8") if at.exists() else ""
    parts = [(old.partition(MARK)[0] if MARK in old else head() + "\n") + MARK]
    if not runs:
        parts += ["", "## Results", "", "None are committed yet."]
    runs = sorted(
        runs, key=lambda r: (r.machine.get("gpu") is None, MEASURING.index(r.command), _run(r))
    )
    if len(runs) > 1:
        parts += ["", *_contents(runs)]
    for result in runs:
        parts += ["", *_section(result, folder, at)]
    return "\n".join(parts) + "\n"


def _contents(runs: list[Result]) -> Iterator[str]:
    """Yield a table of links to the sections: one line per run, one column per machine."""
    yield "## Results\n"
    lines = sorted({(MEASURING.index(r.command), _run(r)) for r in runs})
    machines = list(dict.fromkeys(r.where for r in runs))
    yield f"| | {' | '.join(machines)} |\n|---|{'---|' * len(machines)}"
    for _, run in lines:
        dates = {r.where: f"[{r.date[:10]}](#{_anchor(_title(r))})" for r in runs if _run(r) == run}
        yield f"| {run} | {' | '.join(dates.get(name, '') for name in machines)} |"


def _run(result: Result) -> str:
    """Return the subcommand, and its part if it was run in several parts."""
    part = result.machine.get("part")
    return f"{result.command}, {part}" if part else result.command


def _title(result: Result) -> str:
    name = _run(result)
    return f"{name[0].upper()}{name[1:]}: {result.where}"


def _anchor(title: str) -> str:
    """Return the anchor that Markdown gives to a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def _call(result: Result) -> str:
    """Return the command line of a run, with the options that differ from their defaults."""
    parameters = signature(
        import_module(f"scree_bench.commands.{result.command}").command
    ).parameters
    arguments = [f"scree-bench {result.command}"]
    for name, x in result.config.items():
        if name in parameters and x not in (None, "") and str(x) != str(parameters[name].default):
            option = name.replace("_", "-")
            arguments.append(
                f"--{option}"
                if x is True
                else f"--no-{option}"
                if x is False
                else f"--{option} {x}"
            )
    return " ".join(arguments)


def _words(command: str) -> tuple[str, str]:
    """Return the help text of a subcommand: the first line, and the rest."""
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
        Path,
        typer.Option(
            help="The page to write; pictures go into a folder with the name of the page."
        ),
    ] = Path("bench.md"),
) -> None:
    """Assemble the JSON of many runs into one page of Markdown with pictures.

    An existing page keeps the text above its line `<!-- results: ... -->`.
    """
    console, runs = Console(), []
    for path in files or []:
        try:
            result = results.read(path)
            # The file name distinguishes runs of one subcommand.
            tag = path.stem.removeprefix(f"{result.command}-")
            result.machine |= {
                "part": tag.removesuffix(result.machine["tag"]).strip("-").replace("-", " "),
                "tag": tag,
            }
            runs.append(result)
        except ValueError as error:
            console.print(f"left out: {error}", highlight=False, markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs, out.with_suffix(""), out), encoding="utf-8")
    console.print(f"Wrote {out} from {len(runs)} runs.", highlight=False)


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
    for aspect, x, y in (("machine", _host(a), _host(b)), ("versions", a.versions, b.versions)):
        if x != y:
            console.print(
                f"The {aspect} differ: {_difference(x, y)}", highlight=False, markup=False
            )
    changes = results.compare(a, b, least)
    for change in changes:
        kind = results.unit(change.name)
        verdict = {True: "better", False: "worse", None: "moved"}[change.better]
        case = ", ".join(f"{k} {results.text(v)}" for k, v in change.case.items())
        console.print(
            f"{verdict}: {case}: {change.who}: {change.name}: "
            f"{kind.show(change.before)} -> {kind.show(change.after)} "
            f"({change.after / change.before - 1 if change.before else float('inf'):+.0%}, "
            f"noise {change.noise:.0%})",
            highlight=False,
            markup=False,
        )
    if not changes:
        console.print("Nothing moved beyond noise.")
    if worst:
        _print_ratios(console, results.ratios(a, b), worst)
    raise typer.Exit(1 if any(change.better is False for change in changes) else 0)


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
