"""Comparison of attention with its peers on many shapes: measuring, resuming and restarting.

A shape is measured as a whole, and its results are written before the next one starts, so that a
later run continues after the last complete shape. Every result is compared with the exact result on
a sample before it is timed. A peer that hangs or ends the process is left out on that shape, and a
new process continues.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from . import results, shapes
from .libraries import MeasuredLibrary, Step, installed_libraries, load
from .measure import FAILED, PATIENCE, Failure, clock_rate, median, time_limit
from .peers import PEERS, Peer, available_peers
from .results import Row
from .samples import Sample
from .session import INTERRUPTED, Session
from .shape_ratios import EAGER, ERRORS, PHASES, describe, shape_ratios, summary
from .shapes import Shape
from .work import Work

#: Device -> contenders. scree is compared with the fastest of the others.
CONTENDERS = {
    "cuda": ("scree", "FA2 (aten)", "varlen_attn (FA2)", "FA3", "FA3 (forward only)", "FA4"),
    "cpu": ("scree", "loop over rows, SDPA"),
}
#: Contenders that compile kernels for a shape.
COMPILING = ("scree", "FA4")
#: Dense products of half precision per second, in the data sheets of the H100 and the H200 (SXM).
DATA_SHEET_FLOPS = 989e12
DATA_SHEET_TAGS = ("h100", "h200")
#: Exit status of a process that has to be replaced, because its device can no longer be used.
RESTART = 75
#: Seconds after the patience until a process that hangs is ended.
GRACE = 15.0
#: Calls of which the wall time is the median, unless one takes `LONG_SECONDS`.
WALL_CALLS, LONG_SECONDS = 3, 0.1


class State:
    """The progress of a comparison, in the `extra` of its results."""

    def __init__(self, session: Session, *, is_resumed: bool, is_replaceable: bool) -> None:
        self.session, self.is_replaceable = session, is_replaceable
        extra = session.result.extra
        self.done: list[str] = extra.setdefault("done", [])
        #: Shape, peer and reason; the peer is "" if the shape itself ended the process.
        self.excluded: list[list[str]] = extra.setdefault("excluded", [])
        if is_resumed:
            done = set(self.done)
            rows = session.result.rows
            rows[:] = [row for row in rows if row.case["shape"] in done]
            if running := extra.get("running"):
                self.excluded.append([*running, "the process ended or did not answer"])
        extra["running"] = None

    def reason(self, shape: Shape, peer: str) -> str | None:
        """Return the reason why a peer is left out on a shape, or None."""
        return next((w for s, p, w in self.excluded if (s, p) == (shape.name, peer)), None)

    @contextmanager
    def running(self, shape: Shape, peer: str, seconds: float) -> Iterator[None]:
        """Note that a peer runs, for the case that the process does not survive it.

        A replaceable process is ended after `seconds`, even if the interpreter does not run.
        """
        extra = self.session.result.extra
        extra["running"] = [shape.name, peer]
        if self.is_replaceable:
            self.session.save()
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            extra["running"] = None


def compare(
    session: Session,
    lib: MeasuredLibrary,
    todo: Sequence[Shape],
    state: State,
    only: Sequence[str] = (),
    deadline: float = math.inf,
) -> None:
    """Measure the shapes that are not done, and start none after a time of the system's clock."""
    try:
        for shape in session.track(todo, "shapes"):
            if shape.name in state.done:
                continue
            if time.time() > deadline:
                session.say("The time is over. The same command measures the other shapes.")
                break
            if why := state.reason(shape, ""):
                session.leave_out(f"shape {shape.name}", why)
            else:
                measure_shape(session, lib, shape, state, only)
                session.say(_line(session.result.rows, shape))
                release(lib)
            state.done.append(shape.name)
            session.save()
    finally:
        session.result.extra["ratios"] = summary(session.result.rows)


def measure_shape(
    session: Session, lib: MeasuredLibrary, shape: Shape, state: State, only: Sequence[str]
) -> None:
    """Check all contenders on a shape, and time the ones whose results are right."""
    # A copy keeps its arrays until this function returns, and the shape keeps none.
    case, work = shape.case, replace(shape.work)
    peers = available_peers(session, lib, work, only or CONTENDERS[session.device])
    steps: dict[str, dict[str, Step]] = {phase: {} for phase in PHASES}
    try:
        with state.running(shape, "", session.patience + GRACE):
            sample = Sample(lib, work)
            errors = dict(zip(ERRORS.values(), sample.eager, strict=True))
    # No time is shown without a check of the result.
    except Exception as error:
        return session.leave_out(f"shape {shape.name}", Failure.of(error).why)
    session.row(case, EAGER).values |= errors
    for peer in peers:
        row = session.row(case, peer.name)
        if why := state.reason(shape, peer.name):
            row.add("both_s", Failure(FAILED, why))
            continue
        with state.running(shape, peer.name, 2 * session.patience + GRACE):
            for phase, step in _checked_steps(session, lib, peer, sample, row):
                steps[phase][peer.name] = step
        _require_device(session, lib, shape, peer.name, state)
    with state.running(shape, "", 10 * session.patience):
        for phase, by_name in steps.items():
            builds = {name: partial(lambda step: step, step) for name, step in by_name.items()}
            rows = session.time(case, f"{phase}_s", builds, wait=lib.wait, has_host_times=False)
            for name, row in rows.items():
                if f"{phase}_s" in row.values:
                    _describe(session, lib, work, phase, by_name[name], row)
    _require_device(session, lib, shape, "", state)
    return None


def _line(rows: Sequence[Row], shape: Shape) -> str:
    """Return the ratios of a shape as a line of text."""
    shape_rows = [row for row in rows if row.case == shape.case]
    parts = [f"shape {shape.name}: {describe(shape.case)}"]
    seconds = results.unit("_s").show
    for phase in PHASES:
        for x in shape_ratios(shape_rows, phase):
            parts.append(
                f"{phase} {seconds(x.seconds)}, {x.ratio:.2f} of {x.peer}"
                + ("" if x.share is None else f", {x.share:.0%} of peak")
            )
    parts += [f"{row.who} {row.status}" for row in shape_rows if row.status != results.OK]
    return "; ".join(parts)


def _checked_steps(
    session: Session, lib: MeasuredLibrary, peer: Peer, sample: Sample, row: Row
) -> Iterator[tuple[str, Step]]:
    """Yield the phases of a contender whose results are right, with their calls.

    The others are failures in its row.
    """
    for phase in PHASES:
        if phase == "both" and not peer.backward:
            continue
        try:
            with time_limit(session.patience):
                prepared = peer.prepare(lib, sample.work)
                step = lib.steps(prepared.function, prepared.args, prepared.cotangent)[phase]()
                result = lib.wait(step())
                if phase == "forward":
                    error = sample.error(sample.parts(result))
                else:
                    _check_finite(lib, result)
                    sampled = lib.steps(prepared.function, prepared.args, sample.cotangent)
                    gradients = lib.wait(sampled[phase]()())
                    error = sample.error(sample.parts(gradients=gradients))
            row.values[ERRORS[phase]] = error
            bound = sample.bounds()[phase == "both"]
            if not error <= bound:
                why = f"wrong: the error is {error:.1e}, and at most {bound:.1e} is accepted"
                row.add(f"{phase}_s", Failure(FAILED, why))
                continue
        # A contender that fails is a result, and the others still run.
        except Exception as error_raised:
            row.add(f"{phase}_s", Failure.of(error_raised))
            continue
        yield phase, step


def release(lib: MeasuredLibrary) -> None:
    """Free the memory of arrays that are no longer used, for the next shape."""
    gc.collect()
    if lib.device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _check_finite(lib: MeasuredLibrary, arrays: Sequence[Any]) -> None:
    for name, x in zip("qkv", arrays, strict=True):
        if not bool(lib.xp.all(lib.xp.isfinite(x))):
            raise ArithmeticError(f"the gradient of {name} is not finite")


def _require_device(
    session: Session, lib: MeasuredLibrary, shape: Shape, peer: str, state: State
) -> None:
    """End the process if a peer has made the device unusable, after a note of the peer."""
    try:
        lib.wait(None)
    except Exception as error:
        state.excluded.append([shape.name, peer, Failure.of(error).why])
        session.save()
        if state.is_replaceable:
            raise typer.Exit(RESTART) from error
        raise


def _describe(
    session: Session, lib: MeasuredLibrary, work: Work, phase: str, step: Step, row: Row
) -> None:
    """Add the share of the data sheet, the wall time and the clock rate to a row."""
    seconds = row.values[f"{phase}_s"]
    flops = PHASES[phase] * work.flops / seconds
    row.values[f"{phase}_flops"] = flops
    if session.result.machine["tag"] in DATA_SHEET_TAGS:
        row.values[f"{phase}_share"] = flops / DATA_SHEET_FLOPS
    calls = 1 if seconds > LONG_SECONDS else WALL_CALLS
    wall_time = partial(_wall_seconds, lib, step, calls)
    session.value(row.case, row.who, f"{phase}_wall_s", wall_time)
    if session.device == "cuda":
        session.value(row.case, row.who, f"{phase}_clock_hz", partial(clock_rate, step))


def _wall_seconds(lib: MeasuredLibrary, step: Step, calls: int) -> float:
    """Return the median time of single calls on the clock of the host, until each has ended."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        lib.wait(step())
        seconds.append(time.perf_counter() - start)
    return median(seconds)


# --- processes ---
class Options(NamedTuple):
    """The options of a comparison; see the command.

    Attributes
    ----------
    config
        All options of the command, for the results.
    device
        "cpu" or "cuda".
    seed, num_shapes
        Shapes to draw, unless there is a file.
    file
        JSON of shapes.
    only
        Names of peers, or none for all.
    deadline
        Time of the system's clock after which no further shape starts.
    """

    config: dict[str, Any]
    device: str
    seed: int
    num_shapes: int
    file: Path | None
    only: tuple[str, ...]
    deadline: float

    @property
    def out(self) -> Path | None:
        """The folder of the results."""
        return self.config["out"]

    @property
    def part(self) -> str:
        """The part of the subcommand, which is in the name of the results."""
        return f"random seed {self.seed}" if self.file is None else f"file {self.file.stem}"

    def shapes(self) -> list[Shape]:
        """Return the shapes of the file, or draw them."""
        if self.file is not None:
            return shapes.read(self.file)
        limits = shapes.CUDA if self.device == "cuda" else shapes.CPU
        if self.config["quick"]:
            limits = shapes.TINY
        return [shapes.draw(self.seed, i, limits) for i in range(self.num_shapes)]

    def earlier(self) -> list[Path]:
        """Return the files of earlier results, at most one per kind of machine."""
        if self.out is None:
            return []
        return sorted(self.out.glob(f"attention-{self.part.replace(' ', '-')}-*.json"))


def run(options: Options, *, processes: int, restarts: bool, is_fresh: bool) -> None:
    """Compile kernels ahead in some processes, then measure in a process that can be replaced.

    Without a folder for the results, or without `restarts`, this process measures.
    """
    if is_fresh:
        for path in options.earlier():
            path.unlink()
    if processes:
        _compile_in_processes(options, processes)
    if options.out is None or not restarts:
        return measure(options)
    status = supervise(_measuring_process, (options,), partial(_is_unfinished, options))
    if status:
        raise typer.Exit(status)
    return None


def measure(options: Options, *, is_replaceable: bool = False) -> None:
    """Measure the shapes in this process, except the ones with earlier results."""
    with Session("attention", options.config, options.device, options.part) as session:
        is_resumed = session.resume()
        state = State(session, is_resumed=is_resumed, is_replaceable=is_replaceable)
        for lib in installed_libraries(session, "torch"):
            compare(session, lib, options.shapes(), state, options.only, options.deadline)


def _measuring_process(options: Options) -> None:
    try:
        measure(options, is_replaceable=True)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except typer.BadParameter as error:
        error.show()
        sys.exit(error.exit_code)


def _is_unfinished(options: Options) -> bool:
    """Return whether the last process ended while a peer ran."""
    newest = max(options.earlier(), key=lambda path: path.stat().st_mtime, default=None)
    return newest is not None and bool(results.read(newest).extra.get("running"))


def supervise(
    target: Callable[..., None], arguments: tuple[Any, ...], is_unfinished: Callable[[], bool]
) -> int:
    """Run a function in a process, and return its exit status.

    A process with the status `RESTART`, or that ends with work unfinished, is replaced. Every
    replacement leaves out one peer on one shape, so their number is bounded.
    """
    context = multiprocessing.get_context("spawn")
    while True:
        process = context.Process(target=target, args=arguments)
        process.start()
        before = signal.signal(signal.SIGTERM, lambda *_, child=process: child.terminate())
        try:
            while process.is_alive():
                try:
                    process.join()
                # The process has received the signal too, and ends by itself.
                except KeyboardInterrupt:
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
        status = process.exitcode or 0
        if status in (0, INTERRUPTED) or not (status == RESTART or is_unfinished()):
            return status


def _compile_in_processes(options: Options, count: int) -> None:
    """Compile the kernels of the contenders in several processes, which share caches on disk."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compile, args=(options, i, count)) for i in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()


def _compile(options: Options, first: int, step: int) -> None:
    """Call every contender that compiles once per phase, on every `step`-th shape."""
    done = {name for path in options.earlier() for name in results.read(path).extra.get("done", ())}
    todo = [shape for shape in options.shapes() if shape.name not in done]
    lib = load("torch", options.device)
    for work in (replace(shape.work) for shape in todo[first::step]):
        for peer in PEERS:
            if (
                peer.name not in COMPILING
                or peer.library != "torch"
                or (options.only and peer.name not in options.only)
                or peer.missing(lib, work)
            ):
                continue
            for phase in PHASES:
                # The measuring process reports the failure.
                with suppress(Exception), time_limit(PATIENCE):
                    prepared = peer.prepare(lib, work)
                    steps = lib.steps(prepared.function, prepared.args, prepared.cotangent)
                    lib.wait(steps[phase]()())
        work.arrays_by_library.clear()
        release(lib)
