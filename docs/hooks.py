"""Insert tables into the pages before mkdocs renders them.

The tables are built from the code, so that no copy becomes outdated.
"""

import json
import re
from pathlib import Path
from typing import Any

import scree
from scree.dispatch.operation import OPERATIONS
from scree.functions import EXTENSIONS, KINDS
from scree_conformance.coverage import VARIANTS
from scree_conformance.layouts import LAYOUTS
from scree_conformance.table import FUNCTIONS


def layouts() -> str:
    """Return the table of the row lengths in the conformance suite."""
    lines = ["| layout | row lengths |", "|---|---|"]
    return "\n".join(
        lines
        + [f"| {name} | {', '.join(map(str, rows)) or 'none'} |" for name, rows in LAYOUTS.items()]
    )


RESULTS = Path(__file__).parent / "results" / "coverage.json"
LIBRARIES = json.loads(RESULTS.read_text())


def call_records() -> str:
    """Return one block for mkdocstrings per call record of an operation."""
    blocks: dict[str, None] = {}
    for operation in OPERATIONS.values():
        record: Any = operation.record
        blocks[f"::: {record.__module__}.{record.__name__}\n    options: {{members: false}}"] = None
    return "\n".join(blocks)


def versions() -> str:
    """Return the table of libraries, their versions and the dates of their runs."""
    lines = ["| library | versions | date |", "|---|---|---|"]
    for name, column in LIBRARIES.items():
        names = ", ".join(" ".join(item) for item in column["versions"].items())
        lines.append(f"| `{name}` | {names} | {column['date']} |")
    return "\n".join(lines)


def coverage(functions: list[str], variant: str = "eager") -> str:
    """Return a table of one row per function and one column per library, with notes after it."""
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
    """Return the table cell for the outcome of one function on one library."""
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
    "layouts": layouts(),
    "calls": call_records(),
    "versions": versions(),
    "coverage": coverage([name for name in FUNCTIONS if name not in RAGGED]),
    **{variant: coverage(RAGGED, variant) for variant in VARIANTS},
}


#: Factor of the rank in the search -> the beginnings of page addresses.
SEARCH_BOOSTS = {
    3: ("guides/", "tutorial", "cheatsheet"),
    2: ("array", "semantics", "questions"),
    0.2: ("reference/layout", "kernels.md"),
}


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Replace every `<!-- table: NAME -->` by the table; rank guides first in the search."""
    for boost, prefixes in SEARCH_BOOSTS.items():
        if page is not None and page.file.src_uri.startswith(prefixes):
            page.meta.setdefault("search", {"boost": boost})
    return re.sub(r"<!-- table: (\w+) -->", lambda match: TABLES[match[1]], markdown)


def on_config(config: Any) -> None:
    """Show the version at the end of every page."""
    config.copyright = f"scree {scree.__version__}, Apache License 2.0"
