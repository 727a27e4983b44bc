"""An operation on tokens by several contenders: times, bytes a second, and the share of a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .libraries import Function, Library
from .measure import Thunk
from .peers import distance
from .session import Session

PHASES = {"forward": 0, "backward": 1, "both": 2}


class Operation(NamedTuple):
    """What is computed, by whom, and how many bytes it cannot help but read and write.

    Attributes
    ----------
    name
        The operation.
    contenders
        Who -> builds ``(function, args)``; the function is differentiated by all `args`. A `None` says that the peer cannot be
        imported, or why not.
    moved
        Bytes of the forward, the backward, and both passes; 0 where nobody knows.
    truth
        The result in float64, or None; contenders whose result has another form are not compared.
    """

    name: str
    contenders: Mapping[str, Callable[[], tuple[Function, tuple[Any, ...]]]]
    moved: tuple[float, float, float]
    truth: Callable[[], np.ndarray] | None = None


def measure(session: Session, lib: Library, case: Mapping[str, Any], operation: Operation, gradients: bool = True) -> None:
    """Time every contender, forward and, where asked for, backward."""
    copy = session.limits().get("copy_rate")
    case = {"operation": operation.name, **case}
    phases = [phase for phase in PHASES if phase == "forward" or (gradients and lib.phases is not None)]
    for phase in phases:
        name = f"{phase}_s"
        builds = {who: lambda b=build, p=phase: step(lib, b, p) for who, build in operation.contenders.items()}
        moved = operation.moved[PHASES[phase]]
        for row in session.time(case, name, builds, budget=0.5, wait=lib.wait).values():
            if moved and name in row.values:
                rate = moved / row.values[name]
                row.values |= {f"{phase}_rate": rate} | ({f"{phase}_of_copy_share": rate / copy} if copy else {})
    if operation.truth is not None:
        right = operation.truth()
        for who, build in operation.contenders.items():
            if "forward_s" in session.row(case, who).values:
                session.value(case, who, "relative_error", lambda b=build: _error(lib, b, right))


def step(lib: Library, build: Callable[[], tuple[Function, tuple[Any, ...]]], phase: str) -> Thunk:
    """A phase of a contender, ready to be called; the gradient sent back is all ones times a hundredth."""
    function, args = build()
    cotangent = None
    if phase != "forward":
        out = function(*args)
        cotangent = lib.xp.ones_like(out) * 0.01
    return lib.steps(function, args, cotangent)[phase]()


def _error(lib: Library, build: Callable[[], tuple[Function, tuple[Any, ...]]], right: np.ndarray) -> float:
    found = lib.arrays.read(lib.wait(step(lib, build, "forward")()))
    if found.shape != right.shape:
        raise ValueError(f"expected shape {right.shape}, got {found.shape}")
    return distance(found, right)
