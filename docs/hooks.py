"""What mkdocs does before it renders a page: put the tables in that the code itself holds, so that no copy grows old."""

import re
from inspect import getdoc
from typing import Any

from scree.kinds import EXTENSIONS, KINDS, Kind
from scree.lift import LIFTERS
from scree_conformance.layouts import LAYOUTS

OWN = "Takes no arrays of rows: the library's own."


def functions(kinds: dict[str, Kind]) -> str:
    """One row for the functions of each kind, and for each reason why functions have no ragged form."""
    groups: dict[Kind, list[str]] = {}
    for name, kind in kinds.items():
        groups.setdefault(kind, []).append(name)
    lines = ["| functions | on ragged arrays |", "|---|---|"]
    for kind, names in groups.items():
        meaning = f"Raises: {kind.why}." if kind.why else (getdoc(LIFTERS[kind.name]) or "") if kind.name in LIFTERS else OWN
        cells = " ".join(f"`{name}`" for name in sorted(names)), " ".join(meaning.split()).replace("|", "\\|")
        lines.append("| {} | {} |".format(*cells))
    return "\n".join(lines)


def layouts() -> str:
    """The row lengths that the conformance suite tries."""
    lines = ["| layout | lengths of the rows |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {', '.join(map(str, rows)) or 'none'} |" for name, rows in LAYOUTS.items()])


TABLES = {
    "kinds": functions(KINDS),
    **{name: functions(kinds) for name, kinds in EXTENSIONS.items()},
    "layouts": layouts(),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- table: NAME -->` by the table."""
    return re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]], markdown)
