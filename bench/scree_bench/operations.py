"""An operation on tokens by several contenders: times, bytes a second beside a plain copy, and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .libraries import Function, Library, Step
from .measure import Thunk
from .session import Build, Session
from .work import worst

#: Builds what is timed: ``(function, args)``.
Contender = Callable[[], tuple[Function, tuple[Any, ...]]]

PHASES = {"forward": 0, "backward": 1, "both": 2}
COPY = "plain copy"
SENT_BACK = 1 << 20  # seed of the gradients that are sent back


class Operation(NamedTuple):
    """What is computed, by whom, and how many bytes it cannot help but read and write.

    Attributes
    ----------
    name
        The operation.
    contenders
        Who -> builds ``(function, args)``; the function is differentiated by all `args`.
    moved
        Bytes of the forward, the backward, and both passes; 0 where nobody knows.
    truth
        The result in float64, of PyTorch or NumPy, or None; contenders whose result has another form are not compared.
    flops
        Floating-point operations of the passes, where these and not the bytes are what counts.
    yardsticks
        As `contenders`: other work of the same size, which has no error.
    differentiable
        Whether there is a backward.
    peak
        Whether the memory of both passes is what it is about.
    """

    name: str
    contenders: Mapping[str, Contender]
    moved: tuple[float, float, float] = (0, 0, 0)
    truth: Callable[[], Any] | None = None
    flops: tuple[float, float, float] = (0, 0, 0)
    yardsticks: Mapping[str, Contender] = {}
    differentiable: bool = True
    peak: bool = False


def measure(session: Session, lib: Library, case: Mapping[str, Any], operation: Operation) -> None:
    """Time every contender, forward and, where there is one, backward; beside a copy of as many bytes where these are known."""
    case = {"operation": operation.name, **case}
    peak = session.limits().get(f"matmul_{case['dtype']}_flops")
    for phase, at in PHASES.items():
        if phase != "forward" and not (operation.differentiable and lib.phases is not None):
            continue
        name, moved, flops = f"{phase}_s", operation.moved[at], operation.flops[at]
        everyone = {**operation.contenders, **operation.yardsticks}
        builds: dict[str, Build] = {
            who: partial(step, lib, build, phase) for who, build in everyone.items()
        }
        if moved:
            builds[COPY] = partial(_copy, lib, moved)
        rows = session.time(case, name, builds, wait=lib.wait)
        copied = rows[COPY].values.get(name) if moved else None
        for row in rows.values():
            if name not in row.values:
                continue
            seconds = row.values[name]
            if moved:
                row.values |= {f"{phase}_rate": moved / seconds} | (
                    {f"{phase}_of_copy_share": copied / seconds} if copied else {}
                )
            if flops:
                row.values |= {f"{phase}_flops": flops / seconds} | (
                    {f"{phase}_share": flops / seconds / peak} if peak else {}
                )
    if operation.peak:
        for who, build in operation.contenders.items():
            if "both_s" in session.row(case, who).values:
                session.value(case, who, "both_peak_bytes", partial(_peak, lib, build))
    if operation.truth is not None:
        right = operation.truth()
        for who, build in operation.contenders.items():
            if "forward_s" in session.row(case, who).values:
                session.value(case, who, "relative_error", partial(_error, lib, build, right))


def step(lib: Library, build: Contender, phase: str) -> Step:
    """A phase of a contender, ready to be called."""
    function, args = build()
    return lib.steps(
        function, args, None if phase == "forward" else _gradient(lib, function(*args))
    )[phase]()


def _gradient(lib: Library, out: Any, seed: int = SENT_BACK) -> Any:
    """What is sent back to a result: random numbers, the same ones to all contenders; and one to a loss."""
    if isinstance(out, tuple):
        return tuple(_gradient(lib, x, seed + i) for i, x in enumerate(out))
    dtype = lib.arrays.dtype_name(out)
    return lib.normal(seed, dtype)(*out.shape) if out.shape else lib.make(np.ones(()), dtype)


def _peak(lib: Library, build: Contender) -> int:
    return lib.peak(step(lib, build, "both"))


def _copy(lib: Library, moved: float) -> Thunk:
    """Reads and writes so many bytes in all."""
    import torch

    source = torch.randint(256, (int(moved / 2),), dtype=torch.uint8, device=lib.device)
    into = torch.empty_like(source)
    return lambda: into.copy_(source)


def _error(lib: Library, build: Contender, right: Any) -> float:
    found = lib.wait(step(lib, build, "forward")())
    if isinstance(right, tuple):
        return worst(lib, found, right)
    return worst(lib, found.reshape(right.shape), (right,))
