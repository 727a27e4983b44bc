"""What mkdocs does before it renders a page: put the tables in that the code itself holds, so that no copy grows old."""

import json
import re
from inspect import getdoc
from pathlib import Path
from typing import Any

from scree.functions import EXTENSIONS, KINDS, LIFTERS, Kind
from scree_conformance.coverage import VARIANTS
from scree_conformance.layouts import LAYOUTS
from scree_conformance.table import FUNCTIONS

OWN = "Takes no arrays of rows: the library's own."


def functions(kinds: dict[str, Kind]) -> str:
    """One row for the functions of each kind, and for each reason why functions have no ragged form."""
    groups: dict[Kind, list[str]] = {}
    for name, kind in kinds.items():
        groups.setdefault(kind, []).append(name)
    lines = ["| functions | on ragged arrays |", "|---|---|"]
    for kind, names in groups.items():
        meaning = (
            f"Raises: {kind.why}."
            if kind.why
            else (getdoc(LIFTERS[kind.name]) or "")
            if kind.name in LIFTERS
            else OWN
        )
        cells = (
            " ".join(f"`{name}`" for name in sorted(names)),
            " ".join(meaning.split()).replace("|", "\\|"),
        )
        lines.append("| {} | {} |".format(*cells))
    return "\n".join(lines)


def layouts() -> str:
    """The row lengths that the conformance suite tries."""
    lines = ["| layout | lengths of the rows |", "|---|---|"]
    return "\n".join(
        lines
        + [f"| {name} | {', '.join(map(str, rows)) or 'none'} |" for name, rows in LAYOUTS.items()]
    )


RESULTS = Path(__file__).parent / "results" / "coverage.json"
LIBRARIES = json.loads(RESULTS.read_text())


def versions() -> str:
    """What was measured, and when."""
    lines = ["| library | versions | date |", "|---|---|---|"]
    for name, column in LIBRARIES.items():
        lines.append(
            f"| `{name}` | {', '.join(' '.join(item) for item in column['versions'].items())} | {column['date']} |"
        )
    return "\n".join(lines)


def coverage(functions: list[str], variant: str = "eager") -> str:
    """One row for each function, one column for each library; numbers are cases that passed, notes stand below."""
    notes: list[str] = []
    lines = [
        "| function | " + " | ".join(f"`{name}`" for name in LIBRARIES) + " |",
        "|---|" + "---|" * len(LIBRARIES),
    ]
    for name in functions:
        cells = [
            cell(name, column["functions"][name][variant], notes) for column in LIBRARIES.values()
        ]
        lines.append(f"| `{name.removeprefix('ragged.')}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def cell(name: str, outcome: list[Any], notes: list[str]) -> str:
    """What became of one function on one library."""
    passed, failed, absent, why = outcome
    kind = ALL_KINDS.get(name)
    if failed:
        return f"**{failed} of {passed + failed} failed**"
    if absent and why not in notes:
        notes.append(why)
    mark = f" <sup>{notes.index(why) + 1}</sup>" if absent else ""
    if not passed:
        return f"absent{mark}"
    word = (
        "raises" if kind and kind.why else "own" if kind and kind.name == "plain" else f"{passed}"
    )
    return word + mark


ALL_KINDS = {
    **KINDS,
    **{f"{e}.{name}": kind for e, kinds in EXTENSIONS.items() for name, kind in kinds.items()},
}
RAGGED = [name for name in FUNCTIONS if name.startswith("ragged.")]


TABLES = {
    "kinds": functions(KINDS),
    **{name: functions(kinds) for name, kinds in EXTENSIONS.items()},
    "layouts": layouts(),
    "versions": versions(),
    "coverage": coverage([name for name in FUNCTIONS if name not in RAGGED]),
    **{variant: coverage(RAGGED, variant) for variant in VARIANTS},
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- table: NAME -->` by the table."""
    return re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]], markdown)
