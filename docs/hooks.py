"""What mkdocs does before it renders a page: put the tables in that the code itself holds, so that no copy grows old."""

import re
import sys
from inspect import getdoc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scree_api"))

from scree.kinds import EXTENSIONS, KINDS, Kind
from scree.lift import LIFTERS

OWN = "Takes no arrays of rows: the library's own."


def table(functions: dict[str, Kind]) -> str:
    """One row for the functions of each kind, and for each reason why functions have no ragged form."""
    groups: dict[Kind, list[str]] = {}
    for name, kind in functions.items():
        groups.setdefault(kind, []).append(name)
    lines = ["| functions | on ragged arrays |", "|---|---|"]
    for kind, names in groups.items():
        meaning = f"Raises: {kind.why}." if kind.why else (getdoc(LIFTERS[kind.name]) or "") if kind.name in LIFTERS else OWN
        cells = " ".join(f"`{name}`" for name in sorted(names)), " ".join(meaning.split()).replace("|", "\\|")
        lines.append("| {} | {} |".format(*cells))
    return "\n".join(lines)


TABLES = {"kinds": KINDS, **EXTENSIONS}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- table: NAME -->` by the table."""
    return re.sub(r"<!-- table: (\w+) -->", lambda found: table(TABLES[found[1]]), markdown)
