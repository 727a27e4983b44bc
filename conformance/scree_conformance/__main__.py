"""Run the suite against one library or kernel provider: ``python -m scree_conformance``.

``python -m scree_conformance fuzz`` runs random calls instead; see `fuzz`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scree

from . import __version__, coverage, fuzz, loopback
from .backends import DEVICE_LIBRARIES, LIBRARIES, PARTIAL_LIBRARIES, load
from .bench import Bench, Rejected
from .suite import cases
from .table import Absent

OUTCOMES = ("passed", "failed", "rejected", "absent")


@dataclass(slots=True)
class OutcomeCounts:
    """Counts of the outcomes of one operation's cases."""

    passed: int = 0
    failed: int = 0
    rejected: int = 0
    absent: int = 0
    notes: list[str] = field(default_factory=list)
    why: str = ""


def run(
    backend: str,
    device: str | None = None,
    kernel: str | None = None,
    only: str = "",
    quick: bool = False,
) -> dict[str, OutcomeCounts]:
    """Run cases of the suite, and return the outcomes per operation.

    Parameters
    ----------
    backend
        Name of the library, as in the dictionaries of `backends`.
    device
        Device of the arrays, by the library's name for it. None is the library's default.
    kernel
        Provider that must run the operations. Operations without kernels are left out.
    only
        Run only cases whose name contains this text.
    quick
        Run only the first case of each operation, and no law.

    Raises
    ------
    ValueError
        If `backend` is unknown.
    ImportError
        If the library is not installed.
    """
    lib = load(backend, device)
    bench, results = Bench(lib, kernel), dict[str, OutcomeCounts]()
    chosen = [case for case in cases(lib, kernel, quick) if only in case.name]
    for done, case in enumerate(chosen):
        _show_progress(done, len(chosen), case.name)
        counts = results.setdefault(case.operation.name, OutcomeCounts())
        try:
            case.run(bench)
            counts.passed += 1
        except Rejected as reason:
            counts.rejected += 1
            counts.notes.append(f"{case.name}: {reason}")
        except Absent as reason:
            counts.absent += 1
            counts.notes.append(f"{case.name}: {reason}")
            counts.why = str(reason)
        # A case may fail in any way; the other cases still run.
        except Exception as error:
            counts.failed += 1
            counts.notes.insert(
                0, f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())}"
            )
    _show_progress(len(chosen), len(chosen))
    return results


def _show_progress(done: int, total: int, name: str = "") -> None:
    """Rewrite a line on a terminal; the empty name clears it."""
    if sys.stderr.isatty():
        line = f"{done} of {total}  {name}"[:99] if name else ""
        print(f"\r{line:<99}\r", end="", file=sys.stderr, flush=True)


def markdown(title: str, results: dict[str, OutcomeCounts]) -> str:
    """Return the table, followed by the first note of each operation."""
    cells = (
        [name, *(str(getattr(counts, outcome)) for outcome in OUTCOMES)]
        for name, counts in results.items()
    )
    rows = [f"| {' | '.join(row)} |" for row in cells]
    notes = [f"- {counts.notes[0]}" for counts in results.values() if counts.notes]
    header = ["| operation | " + " | ".join(OUTCOMES) + " |", "|---|" + "---:|" * len(OUTCOMES)]
    return "\n".join([f"# {title}", "", *header, *rows, *(["", *notes] if notes else []), ""])


def write(
    path: Path, title: str, metadata: dict[str, Any], results: dict[str, OutcomeCounts]
) -> list[Path]:
    """Write Markdown or JSON, by the suffix of `path`; without a suffix, write both."""
    texts = {".md": markdown(title, results)}
    table = {
        name: {k: getattr(counts, k) for k in (*OUTCOMES, "notes")}
        for name, counts in results.items()
    }
    texts[".json"] = json.dumps({**metadata, "operations": table}, indent=1) + "\n"
    suffixes = [path.suffix] if path.suffix in texts else list(texts)
    paths = [
        path if path.suffix in texts else path.with_name(path.name + suffix) for suffix in suffixes
    ]
    for target, suffix in zip(paths, suffixes, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(texts[suffix])
    return paths


def show(title: str, results: dict[str, OutcomeCounts]) -> None:
    """Print the table."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    # rich is optional; without it the report is Markdown.
    except ImportError:
        print(markdown(title, results))
        return
    table = Table("operation", *OUTCOMES, title=title)
    for name, counts in results.items():
        style = "red" if counts.failed else "yellow" if counts.rejected or counts.absent else ""
        table.add_row(
            escape(name),
            *(str(getattr(counts, outcome) or "") for outcome in OUTCOMES),
            style=style,
        )
    console = Console()
    console.print(table)
    for counts in results.values():
        for note in counts.notes[:1]:
            console.print(escape(note))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return 1 if a case failed or no case ran."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return fuzz.main(arguments[1:]) if arguments[:1] == ["fuzz"] else _main(arguments)
    except KeyboardInterrupt:
        return 130  # the convention of shells for SIGINT


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scree_conformance", description=__doc__)
    parser.add_argument("--version", action="version", version=f"scree-conformance {__version__}")
    parser.add_argument(
        "--backend",
        choices=[*LIBRARIES, *PARTIAL_LIBRARIES, *DEVICE_LIBRARIES],
        default="numpy",
        help="the library (default: numpy)",
    )
    parser.add_argument("--device", help="the device of the arrays, by the library's name for it")
    parser.add_argument("--kernel", help="run only operations that have kernels, on this provider")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose name contains TEXT"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the first case of each operation, and no law"
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
    options = parser.parse_args(arguments)
    if options.coverage is not None and (options.only or options.kernel or options.quick):
        parser.error(
            "--coverage: expected a run of all cases, without --only, --kernel and --quick"
        )
    start = time.perf_counter()
    with ExitStack() as stack:
        if options.kernel == loopback.PROVIDER:
            stack.enter_context(loopback.registered())
        results = run(options.backend, options.device, options.kernel, options.only, options.quick)
    totals = {
        outcome: sum(getattr(counts, outcome) for counts in results.values())
        for outcome in OUTCOMES
    }
    device = f" on {options.device}" if options.device else ""
    kernel = f", kernel {options.kernel}" if options.kernel else ""
    summary = ", ".join(f"{count} {outcome}" for outcome, count in totals.items())
    quick = ", quick" if options.quick else ""
    title = f"scree {scree.__version__}: {options.backend}{device}{kernel}{quick}: {summary}"
    show(title, results)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.report is not None:
        metadata = {
            "scree": scree.__version__,
            "backend": options.backend,
            "device": options.device,
            "kernel": options.kernel,
        }
        for path in write(options.report, title, {**metadata, **totals}, results):
            print(f"wrote {path}")
    if options.coverage is not None:
        coverage.update(options.coverage, options.backend, results)
        print(f"wrote {options.coverage}")
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
