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

from . import machine, plots, results
from .measure import MIN_SAMPLES, PATIENCE, Failure, Thunk, Times, interleaved, time_limit
from .results import Result, Row

#: Builds the timed call of a contender. It may fail, for lack of memory or any other reason.
Build = Callable[[], Thunk]

#: Exit status after an interrupt.
INTERRUPTED = 130
#: Seconds between two writes of the JSON during a run.
WRITE_INTERVAL = 5.0
#: Default seconds of measurement per contender and case.
SECONDS = 0.2


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
    part
        The part of the subcommand that is run; its results have a file of their own.
    """

    def __init__(
        self, command: str, options: Mapping[str, Any], device: str = "cpu", part: str = ""
    ) -> None:
        self.out: Path | None = options.get("out")
        self.quick = bool(options.get("quick"))
        self.seconds = float(options.get("seconds", SECONDS))
        self.patience = float(options.get("patience", PATIENCE))
        self.device = device
        config = {k: str(v) if isinstance(v, Path) else v for k, v in options.items() if k != "out"}
        self.result = Result(
            command, config, machine.describe(device), machine.versions(), machine.now()
        )
        if part:
            self.result.machine["part"] = part
        self._previous_handlers: dict[int, Any] = {}
        self._is_interrupted = False
        self._last_write = 0.0
        self.console = Console()
        # A file has no line limit.
        if not self.console.is_terminal:
            self.console.width = 320
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
            self._previous_handlers = {
                number: signal.signal(number, self._end)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def _end(self, number: int, frame: Any) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._progress.stop()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
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
        part = self.result.part.replace(" ", "-")
        words = (self.result.command, part, self.result.machine["tag"])
        return (self.out or Path()) / f"{'-'.join(filter(None, words))}.json"

    def resume(self) -> bool:
        """Take over the results of an earlier run from the folder, if there are any.

        Raises
        ------
        typer.BadParameter
            If the file has results of another machine or of other versions.
        """
        if self.out is None or not self.path.exists():
            return False
        earlier = results.read(self.path)
        for what in ("machine", "versions"):
            before, now = (
                {k: v for k, v in getattr(result, what).items() if k not in ("limits", "part")}
                for result in (earlier, self.result)
            )
            if before != now:
                changed = ", ".join(
                    f"{k} {before.get(k, 'none')} -> {now.get(k, 'none')}"
                    for k in dict.fromkeys((*before, *now))
                    if before.get(k) != now.get(k)
                )
                raise typer.BadParameter(
                    f"--out: expected results of the same {what} in {self.path}, got {changed}; "
                    "choose another folder, or give --fresh"
                )
        self.result.rows, self.result.extra = earlier.rows, earlier.extra
        self.result.left_out = earlier.left_out
        return True

    # --- measuring ---
    def track(self, items: Iterable[Any], what: str = "") -> Iterator[Any]:
        """Yield the items and show a progress bar."""
        sequence = list(items)
        task = self._progress.add_task(what or self.result.command, total=len(sequence))
        for item in sequence:
            yield item
            self._progress.advance(task)
            self._keep()

    def row(self, case: Mapping[str, Any], contender: str) -> Row:
        """Return the row of a contender on a case; add a new row if there is none."""
        for row in reversed(self.result.rows):
            if row.who == contender and row.case == case:
                return row
        self.result.rows.append(Row(dict(case), contender))
        return self.result.rows[-1]

    def time(
        self,
        case: Mapping[str, Any],
        name: str,
        contenders: Mapping[str, Build],
        *,
        wait: Callable[[Any], Any] = lambda x: x,
        device: str | None = None,
        library: str = "torch",
        has_host_times: bool = True,
        has_clean_l2: bool = False,
    ) -> dict[str, Row]:
        """Time contenders round-robin, and add medians and spreads to their rows under `name`.

        On "cuda" this is the device time, and "call_s" is accompanied by "call_host_s" unless
        `has_host_times` is false. With ``device="cpu"`` the host's clock is used on CUDA too. For
        `library` and `has_clean_l2` see `interleaved`.
        """
        thunks: dict[str, Thunk] = {}
        outcome: dict[str, Times | Failure] = {}
        seconds, min_samples = (self.seconds / 10, 2) if self.quick else (self.seconds, MIN_SAMPLES)
        try:
            for contender, build in contenders.items():
                try:
                    with time_limit(self.patience):
                        thunks[contender] = build()
                # A contender that fails is a result, and the others still run.
                except Exception as error:
                    outcome[contender] = Failure.of(error)
            interleaved(
                thunks,
                seconds,
                wait=wait,
                device=device or self.device,
                library=library,
                min_samples=min_samples,
                patience=self.patience,
                has_host_times=has_host_times,
                has_clean_l2=has_clean_l2,
                outcomes=outcome,
            )
        # After an interrupt too, keep the contenders that have samples.
        finally:
            measured = [
                contender
                for contender in contenders
                if contender in outcome and outcome[contender] != Times([], [])
            ]
            rows = {contender: self.row(case, contender) for contender in measured}
            for contender, row in rows.items():
                result = outcome[contender]
                row.add(name, result if isinstance(result, Failure) else result.seconds)
                if isinstance(result, Times) and result.host:
                    row.add(f"{name.removesuffix('_s')}_host_s", result.host)
        self._keep()
        return rows

    def value(
        self, case: Mapping[str, Any], contender: str, name: str, compute: Callable[[], float]
    ) -> None:
        """Add one computed or counted number to a row. A failure is a result too."""
        row = self.row(case, contender)
        try:
            row.values[name] = float(compute())
        # A contender that fails is a result, and the others still run.
        except Exception as error:
            row.add(name, Failure.of(error))
        self._keep()

    def save(self) -> None:
        """Write the JSON now, if there is a folder."""
        if self.out is not None:
            self.result.write(self.path)
            self._last_write = time.monotonic()

    def leave_out(self, what: str, reason: str) -> None:
        """Note once that something could not run here."""
        entry = {"what": what, "why": reason}
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
        """Write the JSON if `WRITE_INTERVAL` seconds have passed since the last time.

        Also raises `KeyboardInterrupt` if an earlier one was swallowed.
        """
        # A callback of a library may have swallowed the first exception.
        if self._is_interrupted:
            raise KeyboardInterrupt
        if time.monotonic() > self._last_write + WRITE_INTERVAL:
            self.save()

    def _show(self) -> None:
        result = self.result
        self.say(f"{result.command} on {result.where}, {result.date[:10]}")
        for table in plots.tables(result):
            screen_table = Table(box=box.SIMPLE_HEAD, title=table.caption, title_justify="left")
            for i, title in enumerate(table.header):
                screen_table.add_column(title, justify="right" if i else "left")
            for line in table.lines:
                screen_table.add_row(*(Text(x.replace("**", "")) for x in line))
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
        # matplotlib is optional; the measurements are written already.
        except ImportError:
            self.say(
                f"Wrote {self.path}; pictures need matplotlib, here or where `scree-bench report` "
                "reads the file."
            )
