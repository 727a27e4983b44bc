"""One run of one subcommand: it measures, shows progress, and keeps partial results."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import machine, plots
from .measure import FEWEST, PATIENCE, Failure, Thunk, Times, interleaved, within
from .results import Result, Row

#: Builds the timed call of a contender. It may fail, for lack of memory or any other reason.
Build = Callable[[], Thunk]

INTERRUPTED = 130
EVERY = 5.0  # seconds between two writes of the JSON during a run
SECONDS = 0.2  # per contender and case


class Session:
    """A context in which a subcommand measures.

    On exit, the table is printed. With ``--out``, JSON and pictures are written into that folder.
    This also happens after Ctrl-C or SIGTERM, with the measurements so far. The JSON is also
    written at intervals.

    Parameters
    ----------
    command
        The subcommand.
    options
        Its options as the user gave them; `out` and `quick` are read from them.
    device
        The measured device, "cpu" or "cuda".
    """

    def __init__(self, command: str, options: Mapping[str, Any], device: str = "cpu") -> None:
        self.out: Path | None = options.get("out")
        self.quick = bool(options.get("quick"))
        self.seconds = float(options.get("seconds", SECONDS))
        self.patience = float(options.get("patience", PATIENCE))
        self.device = device
        config = {k: str(v) if isinstance(v, Path) else v for k, v in options.items() if k != "out"}
        self.result = Result(
            command, config, machine.describe(device), machine.versions(), machine.now()
        )
        self._before: dict[int, Any] = {}  # previous handlers of the signals
        self._asked = False  # whether a signal was received
        self._written = 0.0
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 320  # a file has no line limit
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> Session:
        self._progress.start()
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._end)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def _end(self, number: int, frame: Any) -> None:
        self._asked = True
        raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._progress.stop()
        for number, before in self._before.items():
            signal.signal(number, before)
        self.result.complete = kind is None
        if kind is not None and not issubclass(kind, KeyboardInterrupt):
            return
        self._show()
        if self.out is not None:
            self._save(self.out)
        if kind is not None:
            self.say("Interrupted: these are the measurements so far.")
            raise typer.Exit(INTERRUPTED)

    @property
    def path(self) -> Path:
        """Path of the JSON."""
        return (self.out or Path()) / f"{self.result.command}-{self.result.machine['tag']}.json"

    # --- measuring ---
    def track(self, items: Iterable[Any], what: str = "") -> Iterator[Any]:
        """Yield the items and show a progress bar."""
        sequence = list(items)
        task = self._progress.add_task(what or self.result.command, total=len(sequence))
        for item in sequence:
            yield item
            self._progress.advance(task)
            self._keep()

    def row(self, case: Mapping[str, Any], who: str) -> Row:
        """Return the row of a contender on a case; add a new row if there is none."""
        for row in reversed(self.result.rows):
            if row.who == who and row.case == case:
                return row
        self.result.rows.append(Row(dict(case), who))
        return self.result.rows[-1]

    def time(
        self,
        case: Mapping[str, Any],
        name: str,
        contenders: Mapping[str, Build],
        *,
        wait: Callable[[Any], Any] = lambda x: x,
        device: str | None = None,
    ) -> dict[str, Row]:
        """Time contenders round-robin, and add the samples to their rows under `name`.

        On "cuda" this is the device time, and "call_s" is accompanied by "call_host_s". With
        ``device="cpu"`` the host's clock is used on CUDA too.
        """
        thunks: dict[str, Thunk] = {}
        outcome: dict[str, Times | Failure] = {}
        seconds, fewest = (self.seconds / 10, 2) if self.quick else (self.seconds, FEWEST)
        try:
            for who, build in contenders.items():
                try:
                    with within(self.patience):
                        thunks[who] = build()
                # A contender that fails is a result, and the others still run.
                except Exception as error:
                    outcome[who] = Failure.of(error)
            interleaved(
                thunks,
                seconds,
                wait=wait,
                device=device or self.device,
                fewest=fewest,
                patience=self.patience,
                out=outcome,
            )
        finally:  # after an interrupt too: keeps contenders with a sample
            measured = [
                who for who in contenders if who in outcome and outcome[who] != Times([], [])
            ]
            rows = {who: self.row(case, who) for who in measured}
            for who, row in rows.items():
                result = outcome[who]
                row.add(name, result if isinstance(result, Failure) else result.seconds)
                if isinstance(result, Times) and result.host:
                    row.add(f"{name.removesuffix('_s')}_host_s", result.host)
        self._keep()
        return rows

    def value(
        self, case: Mapping[str, Any], who: str, name: str, compute: Callable[[], float]
    ) -> None:
        """Add one computed or counted number to a row. A failure is a result too."""
        row = self.row(case, who)
        try:
            row.values[name] = float(compute())
        except Exception as error:  # a contender that fails is a result, and the others still run
            row.add(name, Failure.of(error))
        self._keep()

    def leave_out(self, what: str, why: str) -> None:
        """Note once that something could not run here."""
        entry = {"what": what, "why": why}
        if entry not in self.result.left_out:
            self.result.left_out.append(entry)

    def limits(self) -> dict[str, float]:
        """Return the limits of this machine, measured once per run."""
        rates: dict[str, float] | None = self.result.machine.get("limits")
        if rates is None:
            rates = self.result.machine["limits"] = machine.limits(self.device, self.quick)
        return rates

    # --- output ---
    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False)

    def _keep(self) -> None:
        """Write the JSON if `EVERY` seconds have passed since the last time.

        Also raises `KeyboardInterrupt` if an earlier one was swallowed.
        """
        if self._asked:
            raise KeyboardInterrupt  # a callback of a library may have swallowed the first
        if self.out is not None and time.monotonic() > self._written + EVERY:
            self.result.write(self.path)
            self._written = time.monotonic()

    def _show(self) -> None:
        result = self.result
        self.say(f"{result.command} on {result.where}, {result.date[:10]}")
        for table in plots.tables(result):
            screen_table = Table(box=box.SIMPLE_HEAD, title=table.caption, title_justify="left")
            for i, title in enumerate(table.header):
                screen_table.add_column(title, justify="right" if i else "left")
            for line in table.lines:
                screen_table.add_row(*map(Text, line))
            self.console.print(screen_table)
            for note in table.notes:
                self.say(f"- {note}")
        for limit in result.limits:
            self.say(f"limit: {limit}")
        for entry in result.left_out:
            self.say(f"left out: {entry['what']}: {entry['why']}")

    def _save(self, out: Path) -> None:
        self.result.write(self.path)
        try:
            self.say(f"Wrote {self.path} and {len(plots.draw(self.result, out))} pictures.")
        except ImportError:
            self.say(
                f"Wrote {self.path}; pictures need matplotlib, here or where `scree-bench report` "
                "reads the file."
            )
