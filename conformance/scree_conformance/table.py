"""The lines of the table: an operation, the check of it, and where to try it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .backends import FLOATS
from .bench import Bench
from .layouts import ALL

Check = Callable[[Bench, str, str], None]

#: float32 comes first: it is tried on every layout, the others on the first.
DTYPES = ("float32", *(name for name in FLOATS if name != "float32"))


@dataclass(frozen=True, slots=True)
class Operation:
    """``check(bench, layout, dtype)`` raises unless scree is right; `kernel` says that providers may run it."""

    name: str
    check: Check
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    kernel: str | None


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one layout in one dtype."""

    operation: Operation
    layout: str
    dtype: str

    @property
    def name(self) -> str:
        """What pytest and the reports call it."""
        return f"{self.operation.name}-{self.layout}-{self.dtype}"

    def run(self, bench: Bench) -> None:
        """Raise `AssertionError`, or whatever scree raises, unless scree is right."""
        with bench.lib.context():
            bench.start(self.name)
            self.operation.check(bench, self.layout, self.dtype)


OPERATIONS: list[Operation] = []


def operation(
    name: str, layouts: tuple[str, ...] = ALL, dtypes: tuple[str, ...] = DTYPES, *, kernel: str | None = None
) -> Callable[[Check], Check]:
    """Put the decorated check into the table."""

    def add(check: Check) -> Check:
        OPERATIONS.append(Operation(name, check, layouts, dtypes, kernel))
        return check

    return add
