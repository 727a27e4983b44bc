"""`report` and `compare`: pages, or a comparison, from the JSON of runs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import pages, plots, results
from ..measure import median
from ..results import Result


def command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="JSON of runs, on any machines.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The overview to write. The pages per machine and the pictures go into a folder "
            "with the name of the page."
        ),
    ] = Path("bench.md"),
    pictures: Annotated[
        bool, typer.Option(help="Without pictures, only the overview is written.")
    ] = True,
) -> None:
    """Assemble the JSON of many runs into pages of Markdown with pictures.

    The overview has one table per question. The page of each machine has all results.
    """
    console, folder = Console(), out.with_suffix("")
    runs, messages = pages.read(files or [])
    for message in messages:
        console.print(f"left out: {message}", highlight=False, markup=False)

    def embed(at: Path, name: str, draw: plots.Draw) -> str:
        if not pictures:
            return ""
        path = plots.save(name, draw, folder)
        return f"![{name.replace('-', ' ')}]({Path(os.path.relpath(path, at.parent)).as_posix()})"

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(pages.overview(runs, folder.name, partial(embed, out)), encoding="utf-8")
    console.print(f"Wrote {out} from {len(runs)} runs.", highlight=False)
    for tag in pages.machine_names(runs) if pictures else ():
        path = folder / f"{tag}.md"
        folder.mkdir(exist_ok=True)
        text = pages.machine_page(runs, tag, partial(embed, path))
        path.write_text(text.replace("../bench.md", f"../{out.name}"), encoding="utf-8")
        console.print(f"Wrote {path}.", highlight=False)


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
