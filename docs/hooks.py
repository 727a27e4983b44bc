"""What mkdocs does before it renders a page: put the tables in that the code itself holds, so that no copy grows old."""

import re
import sys
from inspect import getdoc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scree_api"))

from scree.kinds import KINDS
from scree.lift import LIFTERS

OWN = "Takes no arrays of rows: the library's own."


def kinds() -> str:
    """One row for each kind with its functions; one for each reason why functions have no ragged form."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind in KINDS.items():
        groups.setdefault((kind.name, kind.why), []).append(name)
    lines = ["| kind | what it does on ragged arrays | functions |", "|---|---|---|"]
    for (kind, why), names in groups.items():
        meaning = f"Raises: {why}." if why else (getdoc(LIFTERS[kind]) or "") if kind in LIFTERS else OWN
        lines.append(f"| {kind} | {meaning} | {' '.join(f'`{name}`' for name in sorted(names))} |")
    return "\n".join(lines)


TABLES = {"kinds": kinds}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- table: NAME -->` by the table."""
    return re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]](), markdown)
