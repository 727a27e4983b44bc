"""Measurement of an operation by several contenders: times, rates relative to a copy, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .libraries import Function, MeasuredLibrary, Step
from .measure import Thunk
from .session import Build, Session
from .work import max_relative_error

#: Builds the timed call: ``(function, args)``.
Contender = Callable[[], tuple[Function, tuple[Any, ...]]]

PHASES = {"forward": 0, "backward": 1, "both": 2}
COPY = "plain copy"
#: Seed of the gradients of results.
COTANGENT_SEED = 1 << 20


class Operation(NamedTuple):
    """An operation, its contenders, and its minimum traffic in bytes.

    Attributes
    ----------
    name
        The operation.
    contenders
        Name -> builder of ``(function, args)``. The function is differentiated by all `args`.
    moved
        Bytes of the forward, the backward, and both passes; 0 if unknown.
    truth
        The result in float64, of PyTorch or NumPy, or None. Contenders whose result has another
        form are not compared.
    flops
        Floating-point operations of the passes, for compute-bound operations.
    yardsticks
        As `contenders`: other work of the same size, which has no error.
    differentiable
        Whether there is a backward pass.
    peak
        Whether to measure the memory of both passes.
    """

    name: str
    contenders: Mapping[str, Contender]
    traffic: tuple[float, float, float] = (0, 0, 0)
    reference: Callable[[], Any] | None = None
    flops: tuple[float, float, float] = (0, 0, 0)
    yardsticks: Mapping[str, Contender] = {}
    differentiable: bool = True
    peak: bool = False


def measure(
    session: Session, lib: MeasuredLibrary, case: Mapping[str, Any], operation: Operation
) -> None:
    """Time the forward pass of every contender and, if there is one, the backward pass.

    If the traffic in bytes is known, a copy of as many bytes is timed for comparison, on PyTorch.
    """
    case = {"operation": operation.name, **case}
    peak = session.limits().get(f"matmul_{case['dtype']}_flops")
    for phase, at in PHASES.items():
        if phase != "forward" and not (operation.differentiable and lib.phases is not None):
            continue
        name, traffic, flops = f"{phase}_s", operation.traffic[at], operation.flops[at]
        everyone = {**operation.contenders, **operation.yardsticks}
        builds: dict[str, Build] = {
            contender: partial(step, lib, build, phase) for contender, build in everyone.items()
        }
        if traffic and lib.name == "torch":
            builds[COPY] = partial(_copy, lib, traffic)
        rows = session.time(case, name, builds, wait=lib.wait, library=lib.name)
        copies = (x for x in session.result.rows if x.who == COPY and x.case == case)
        copied = next((x.values[name] for x in copies if name in x.values), None)
        for row in rows.values():
            if name not in row.values:
                continue
            seconds = row.values[name]
            if traffic:
                row.values |= {f"{phase}_rate": traffic / seconds} | (
                    {f"{phase}_of_copy_share": copied / seconds} if copied else {}
                )
            if flops:
                row.values |= {f"{phase}_flops": flops / seconds} | (
                    {f"{phase}_share": flops / seconds / peak} if peak else {}
                )
    if operation.peak:
        for contender, build in operation.contenders.items():
            if "both_s" in session.row(case, contender).values:
                session.value(case, contender, "both_peak_bytes", partial(_peak, lib, build))
    if operation.reference is not None:
        expected = operation.reference()
        for contender, build in operation.contenders.items():
            if "forward_s" in session.row(case, contender).values:
                session.value(
                    case, contender, "relative_error", partial(_error, lib, build, expected)
                )


def step(lib: MeasuredLibrary, build: Contender, phase: str) -> Step:
    """Build a prepared call of one phase of a contender."""
    function, args = build()
    return lib.steps(
        function, args, None if phase == "forward" else _gradient(lib, function(*args))
    )[phase]()


def _gradient(lib: MeasuredLibrary, out: Any, seed: int = COTANGENT_SEED) -> Any:
    """Return the gradient of a result: the same random numbers for all contenders; 1 for a loss."""
    if isinstance(out, tuple):
        return tuple(_gradient(lib, x, seed + i) for i, x in enumerate(out))
    dtype = lib.arrays.dtype_name(out)
    return lib.normal(seed, dtype)(*out.shape) if out.shape else lib.make(np.ones(()), dtype)


def _peak(lib: MeasuredLibrary, build: Contender) -> int:
    return lib.peak(step(lib, build, "both"))


def _copy(lib: MeasuredLibrary, traffic: float) -> Thunk:
    """Build a copy that reads and writes `moved` bytes in total."""
    import torch

    source = torch.randint(256, (int(traffic / 2),), dtype=torch.uint8, device=lib.device)
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)


def _error(lib: MeasuredLibrary, build: Contender, expected: Any) -> float:
    result = lib.wait(step(lib, build, "forward")())
    if isinstance(expected, tuple):
        return max_relative_error(lib, result, expected)
    return max_relative_error(lib, result.reshape(expected.shape), (expected,))
