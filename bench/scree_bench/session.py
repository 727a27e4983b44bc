"""One run of one subcommand: it measures, shows progress, and keeps what it has, whatever happens."""

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

#: Builds a contender: what is timed, ready to be called. It may fail, for want of memory or of anything else.
Build = Callable[[], Thunk]

INTERRUPTED = 130
EVERY = 5.0  # seconds between two times that the JSON is written on the way
SECONDS = 0.2  # for each contender of each case


class Session:
    """A context under which a subcommand measures.

    Parameters
    ----------
    command
        The subcommand.
    options
        Its options as the user gave them; `out` and `quick` are taken out of them.
    device
        Where it runs, "cpu" or "cuda".

    On leaving, the table goes to the screen and, with ``--out``, JSON and pictures into that folder; also after Ctrl-C or a
    request to end, with what was measured until then. The JSON is written on the way too.
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
        self._before: dict[int, Any] = {}  # what requests to end did
        self._asked = False  # whether there was one
        self._written = 0.0
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 320  # a file takes what it is given
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
            self.say("Interrupted: this is what had been measured.")
            raise typer.Exit(INTERRUPTED)

    @property
    def path(self) -> Path:
        """Where the JSON goes."""
        return (self.out or Path()) / f"{self.result.command}-{self.result.machine['tag']}.json"

    # ------------------------------------------------------------------------------------------------ measuring
    def track(self, items: Iterable[Any], what: str = "") -> Iterator[Any]:
        """The items, with a bar that shows how far along they are."""
        found = list(items)
        task = self._progress.add_task(what or self.result.command, total=len(found))
        for item in found:
            yield item
            self._progress.advance(task)
            self._keep()

    def row(self, case: Mapping[str, Any], who: str) -> Row:
        """The row of a contender on a case; a new one where there is none yet."""
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
        """Time contenders in turn, and put the samples into their rows under `name`.

        On "cuda" that is the time of the device; beside "call_s" then stands "call_host_s". With ``device="cpu"`` it is the
        host's clock there too.
        """
        thunks: dict[str, Thunk] = {}
        outcome: dict[str, Times | Failure] = {}
        seconds, fewest = (self.seconds / 10, 2) if self.quick else (self.seconds, FEWEST)
        try:
            for who, build in contenders.items():
                try:
                    with within(self.patience):
                        thunks[who] = build()
                except (
                    Exception
                ) as error:  # a contender that fails is a result, and the others still run
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
        finally:  # after an interrupt too: what has a sample by then
            there = [who for who in contenders if who in outcome and outcome[who] != Times([], [])]
            rows = {who: self.row(case, who) for who in there}
            for who, row in rows.items():
                found = outcome[who]
                row.add(name, found if isinstance(found, Failure) else found.seconds)
                if isinstance(found, Times) and found.host:
                    row.add(f"{name.removesuffix('_s')}_host_s", found.host)
        self._keep()
        return rows

    def value(
        self, case: Mapping[str, Any], who: str, name: str, compute: Callable[[], float]
    ) -> None:
        """Put one number that is computed or counted into a row; failing is a result too."""
        row = self.row(case, who)
        try:
            row.values[name] = float(compute())
        except Exception as error:  # a contender that fails is a result, and the others still run
            row.add(name, Failure.of(error))
        self._keep()

    def leave_out(self, what: str, why: str) -> None:
        """Note what could not run here, once."""
        entry = {"what": what, "why": why}
        if entry not in self.result.left_out:
            self.result.left_out.append(entry)

    def limits(self) -> dict[str, float]:
        """The limits of this machine, measured once a run."""
        known: dict[str, float] | None = self.result.machine.get("limits")
        if known is None:
            known = self.result.machine["limits"] = machine.limits(self.device, self.quick)
        return known

    # ------------------------------------------------------------------------------------------------ output
    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False)

    def _keep(self) -> None:
        """Write the JSON, if it is some seconds since the last time; and end, if that was asked for and did not come through."""
        if self._asked:
            raise KeyboardInterrupt  # raised in a callback of a library it may have been swallowed
        if self.out is not None and time.monotonic() > self._written + EVERY:
            self.result.write(self.path)
            self._written = time.monotonic()

    def _show(self) -> None:
        result = self.result
        self.say(f"{result.command} on {result.where}, {result.date[:10]}")
        for found in plots.tables(result):
            shown = Table(box=box.SIMPLE_HEAD, title=found.caption, title_justify="left")
            for i, title in enumerate(found.header):
                shown.add_column(title, justify="right" if i else "left")
            for line in found.lines:
                shown.add_row(*map(Text, line))
            self.console.print(shown)
            for note in found.notes:
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
                f"Wrote {self.path}; pictures need matplotlib, here or where `scree-bench report` reads the file."
            )
