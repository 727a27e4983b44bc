"""The parts of the pages of benchmarks: answers, ratios, tables, pictures, and names of runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple, get_args, get_type_hints

from . import plots, results
from .results import LIMITS, OK, Result, Row, bold, is_loss

#: Forms of a contender: scree is compared with peers in the same form.
FORMS = ("", ", compiled", ", captured", ", compiled, captured")


class Answer(NamedTuple):
    """The answer to one question: a table, a picture, and the runs that they come from."""

    title: str
    text: str
    table: results.Table
    picture: tuple[str, plots.Draw]
    runs: list[Result]


def ratio(scree: float, peer: float | None, name: str) -> str:
    """Return scree's number divided by a peer's, in bold if it is a loss."""
    if not peer:
        return ""
    text = f"{scree / peer:.2f}"
    return bold(text) if is_loss(scree / peer, name) else text


def iterate_cases(
    result: Result, among: Callable[[Row], bool] = lambda row: True
) -> Iterator[tuple[dict[str, Any], dict[str, Row]]]:
    """Yield each case with its rows by contender."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Row]]] = {}
    for row in result.rows:
        if among(row) and row.status == OK and "phase" not in row.case:
            cases.setdefault(repr(row.case), (row.case, {}))[1].setdefault(row.who, row)
    yield from (pair for pair in cases.values() if "scree" in pair[1])


def fastest_row(rows: dict[str, Row], value: str, scree: str = "scree") -> Row | None:
    """Return the fastest peer, or None if scree or all peers lack the value."""
    timed = [
        row
        for who, row in rows.items()
        if value in row.values and not who.startswith("scree") and who not in LIMITS
    ]
    if scree not in rows or value not in rows[scree].values:
        return None
    return min(timed, key=lambda row: row.values[value], default=None)


def form_of(contender: str) -> str:
    """Return the form of a contender, an element of `FORMS`."""
    return next(form for form in sorted(FORMS, key=len)[::-1] if contender.endswith(form))


def make_table(header: list[str], lines: list[list[str]]) -> results.Table:
    """Return a table without a caption."""
    return results.Table("", header, lines, [])


def draw_bars(figure: Any, groups: dict[str, dict[str, float]], kind: str, title: str) -> None:
    """Draw the values of each group as bars, each group in a scale of its own."""
    plots.bars(figure.add_subplot(), groups, kind, title, apart=True)


def draw_dots(figure: Any, groups: dict[str, dict[str, float]], title: str, limit: str) -> None:
    """Draw the ratios of each group as dots, with a line at 1."""
    plots.dots(figure.add_subplot(), groups, title, limit)


def fold(title: str, body: str) -> str:
    """Return Markdown that the reader unfolds."""
    from html import escape

    return f'<details markdown="1">\n<summary>{escape(title)}</summary>\n\n{body}\n\n</details>'


def run_name(result: Result) -> str:
    """Return the subcommand, and its part if it was run in several parts."""
    return f"{result.command}, {result.part}" if result.part else result.command


def short_name(result: Result) -> str:
    """Return a short name of the machine: H100, CPU."""
    return str(result.machine["tag"]).upper()


def link_to(result: Result, folder: str) -> str:
    """Return the address of the section of a run on the page of its machine."""
    anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", run_name(result).lower()))
    return f"{folder}/{result.machine['tag']}.md#{anchor}"


def versions_of(result: Result) -> str:
    """Return the versions of Python and the packages in words."""
    return ", ".join(f"{name} {version}" for name, version in result.versions.items())


def command_line(result: Result) -> str:
    """Return the command line of a run, with the options that differ from their defaults."""
    command = import_module(f"scree_bench.commands.{result.command}").command
    parameters, hints = signature(command).parameters, get_type_hints(command, include_extras=True)
    arguments = ["scree-bench", result.command]
    for name, x in result.config.items():
        if name not in parameters or x is None or str(x) == str(parameters[name].default):
            continue
        # In an annotation, typer keeps the first name of an option as its default.
        named = [str(getattr(y, "default", None)) for y in get_args(hints[name])[1:]]
        option = next((y for y in named if y.startswith("--")), "--" + name.replace("_", "-"))
        if isinstance(x, bool):
            arguments.append(option if x else option.replace("--", "--no-", 1))
        else:
            arguments += [option, str(x)]
    return shlex.join(arguments)
