"""The coverage table: the outcome of each function on each library, in a JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from .table import FUNCTIONS, OPERATIONS

#: Variants with separate outcomes; every other variant of an operation counts as eager.
VARIANTS = ("eager", "jitted", "differentiated")
#: Library -> packages whose versions the table shows.
PACKAGES = {
    "numpy": ("numpy",), "torch": ("torch",), "jax": ("jax", "jaxlib"), "mlx": ("mlx",),
    "array_api_strict": ("array-api-strict",), "strict_minimal": ("array-api-strict",),
}  # fmt: skip


class OutcomeCounts(Protocol):
    """Counts of the outcomes of one operation's cases."""

    passed: int
    failed: int
    absent: int
    why: str


def outcomes(results: Mapping[str, OutcomeCounts]) -> dict[str, dict[str, list[Any]]]:
    """Return ``[passed, failed, absent, why]`` per function and variant.

    The counts are sums over the operations that check the function.
    """
    totals: dict[str, dict[str, list[Any]]] = {name: {} for name in FUNCTIONS}
    for operation in OPERATIONS:
        counts = results.get(operation.name)
        if counts is None:
            continue
        variant = operation.variant if operation.variant in VARIANTS else "eager"
        for name in operation.functions:
            cell = totals[name].setdefault(variant, [0, 0, 0, ""])
            for i, count in enumerate((counts.passed, counts.failed, counts.absent)):
                cell[i] += count
            cell[3] = cell[3] or counts.why
    return totals


def update(path: Path, backend: str, results: Mapping[str, OutcomeCounts]) -> None:
    """Write the column of one library into the file, with the date and the versions."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[backend] = {
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("scree", *PACKAGES[backend])},
        },
        "functions": outcomes(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [f"{json.dumps(name)}: {_column(table[name])}" for name in PACKAGES if name in table]
    path.write_text("{\n" + ",\n".join(columns) + "\n}\n")


def _column(column: dict[str, Any]) -> str:
    """Return JSON with one function per line."""
    rows = [
        f"  {json.dumps(name)}: {json.dumps(cells)}" for name, cells in column["functions"].items()
    ]
    header = [f" {json.dumps(key)}: {json.dumps(column[key])}" for key in ("date", "versions")]
    return "{\n" + ",\n".join([*header, ' "functions": {\n' + ",\n".join(rows) + "\n }"]) + "\n}"


def _version(package: str) -> str:
    try:
        return version(package)
    # The package is on the import path, but not installed.
    except PackageNotFoundError:
        return "unknown"
