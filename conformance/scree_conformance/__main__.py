"""Run the suite against one library or kernel provider: ``python -m scree_conformance``."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scree

from . import coverage, loopback
from .backends import LIBRARIES, load
from .bench import Bench, Rejected
from .suite import cases
from .table import Absent

OUTCOMES = ("passed", "failed", "rejected", "absent")


@dataclass(slots=True)
class Line:
    """Counts of the outcomes of one operation's cases."""

    passed: int = 0
    failed: int = 0
    rejected: int = 0
    absent: int = 0
    notes: list[str] = field(default_factory=list)
    why: str = ""


def run(
    backend: str, device: str | None = None, kernel: str | None = None, only: str = ""
) -> dict[str, Line]:
    """Run every case whose name contains `only`, and return the outcomes per operation."""
    lib = load(backend, device)
    bench, lines = Bench(lib, kernel), dict[str, Line]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about NaN and empty arrays
        for case in cases(lib, kernel):
            if only not in case.name:
                continue
            line = lines.setdefault(case.operation.name, Line())
            try:
                case.run(bench)
                line.passed += 1
            except Rejected as reason:
                line.rejected += 1
                line.notes.append(f"{case.name}: {reason}")
            except Absent as reason:
                line.absent += 1
                line.notes.append(f"{case.name}: {reason}")
                line.why = str(reason)
            except Exception as error:  # a case may fail in any way; the other cases still run
                line.failed += 1
                line.notes.insert(
                    0, f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())}"
                )
    return lines


def markdown(title: str, lines: dict[str, Line]) -> str:
    """Return the table, followed by the first failure or refusal of each operation."""
    cells = (
        [name, *(str(getattr(line, outcome)) for outcome in OUTCOMES)]
        for name, line in lines.items()
    )
    rows = [f"| {' | '.join(row)} |" for row in cells]
    notes = [f"- {line.notes[0]}" for line in lines.values() if line.notes]
    head = ["| operation | " + " | ".join(OUTCOMES) + " |", "|---|" + "---:|" * len(OUTCOMES)]
    return "\n".join([f"# {title}", "", *head, *rows, *(["", *notes] if notes else []), ""])


def write(path: Path, title: str, about: dict[str, Any], lines: dict[str, Line]) -> list[Path]:
    """Write Markdown or JSON, by the suffix of `path`; both where it has no suffix."""
    parts = {".md": markdown(title, lines)}
    table = {
        name: {k: getattr(line, k) for k in (*OUTCOMES, "notes")} for name, line in lines.items()
    }
    parts[".json"] = json.dumps({**about, "operations": table}, indent=1) + "\n"
    wanted = [path.suffix] if path.suffix in parts else list(parts)
    written = [
        path if path.suffix in parts else path.with_name(path.name + suffix) for suffix in wanted
    ]
    for target, suffix in zip(written, wanted, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(parts[suffix])
    return written


def show(title: str, lines: dict[str, Line]) -> None:
    """Print the table."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(markdown(title, lines))
        return
    table = Table("operation", *OUTCOMES, title=title)
    for name, line in lines.items():
        style = "red" if line.failed else "yellow" if line.rejected or line.absent else ""
        table.add_row(
            escape(name), *(str(getattr(line, outcome) or "") for outcome in OUTCOMES), style=style
        )
    console = Console()
    console.print(table)
    for line in lines.values():
        for note in line.notes[:1]:
            console.print(escape(note))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return 1 if a case failed or no case ran."""
    parser = argparse.ArgumentParser(prog="python -m scree_conformance", description=__doc__)
    parser.add_argument(
        "--backend", choices=list(LIBRARIES), default="numpy", help="the library (default: numpy)"
    )
    parser.add_argument("--device", help="where its arrays are, as the library names it")
    parser.add_argument("--kernel", help="run only operations that have kernels, on this provider")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose name contains TEXT"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="FILE.md or FILE.json; both without a suffix"
    )
    parser.add_argument(
        "--coverage",
        type=Path,
        metavar="FILE",
        help="put the outcome of each function into this JSON file",
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.coverage is not None and (options.only or options.kernel):
        parser.error("--coverage: expected a run of all operations, without --only and --kernel")
    began = time.perf_counter()
    with ExitStack() as stack:
        if options.kernel == loopback.PROVIDER:
            stack.enter_context(loopback.registered())
        lines = run(options.backend, options.device, options.kernel, options.only)
    counts = {
        outcome: sum(getattr(line, outcome) for line in lines.values()) for outcome in OUTCOMES
    }
    where = f"{options.backend}" + (f" on {options.device}" if options.device else "")
    who = f", kernel {options.kernel}" if options.kernel else ""
    title = f"scree {scree.__version__}: {where}{who}: " + ", ".join(
        f"{n} {outcome}" for outcome, n in counts.items()
    )
    show(title, lines)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.report is not None:
        about = {
            "scree": scree.__version__,
            "backend": options.backend,
            "device": options.device,
            "kernel": options.kernel,
        }
        for path in write(options.report, title, {**about, **counts}, lines):
            print(f"wrote {path}")
    if options.coverage is not None:
        coverage.update(options.coverage, options.backend, lines)
        print(f"wrote {options.coverage}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
