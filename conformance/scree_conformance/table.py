"""The lines of the table: an operation, the check of it, and where to try it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import scree
import scree.ragged
from scree.functions import EXTENSIONS, KINDS

from .backends import FLOATS
from .bench import Bench
from .layouts import ALL, Layout

Check = Callable[[Bench, Layout, str], None]

#: float32 comes first: it is tried on every layout, the others on the first.
DTYPES = ("float32", *(name for name in FLOATS if name != "float32"))

#: Every function that scree has for ragged arrays, or says why not, by the name that it has in `xp`.
FUNCTIONS = (
    *KINDS,
    *(f"{extension}.{name}" for extension, kinds in EXTENSIONS.items() for name in kinds),
    *(f"ragged.{name}" for name in scree.ragged.__all__),
)


class Absent(Exception):
    """The library has no such function, or not for this dtype, as its table of gaps says."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``check(bench, layout, dtype)`` raises unless scree is right; `kernel` says that providers may run it.

    The name lists the functions that it checks, and, behind a colon, what of them: ``"sort argsort: NaN"``. Names of other
    words are promises that belong to no function.
    """

    name: str
    check: Check
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    kernel: str | None

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that it checks."""
        words = tuple(self.name.partition(":")[0].split())
        return words if set(words) <= set(FUNCTIONS) else ()

    @property
    def variant(self) -> str:
        """What of them it checks."""
        return self.name.partition(": ")[2]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one layout in one dtype."""

    operation: Operation
    layout: Layout
    dtype: str

    @property
    def name(self) -> str:
        """What pytest and the reports call it."""
        return f"{self.operation.name}-{self.layout}-{self.dtype}"

    def run(self, bench: Bench) -> None:
        """Raise `AssertionError`, or whatever scree raises, unless scree is right; `Absent` for a known gap of the library."""
        gap = bench.lib.gap(self.operation.name, self.dtype)
        with bench.lib.context():
            bench.start(self.name)
            try:
                self.operation.check(bench, self.layout, self.dtype)
            except Exception as error:  # any failure will do for a gap that the table names
                if gap is None:
                    raise
                raise Absent(gap) from error
        if gap is not None:
            raise AssertionError(
                f"{bench.lib.name} has {self.operation.name} by now: take it out of its gaps"
            )


OPERATIONS: list[Operation] = []


def operation(
    name: str,
    layouts: tuple[str, ...] = ALL,
    dtypes: tuple[str, ...] = DTYPES,
    *,
    kernel: str | None = None,
) -> Callable[[Check], Check]:
    """Put the decorated check into the table."""

    def add(check: Check) -> Check:
        OPERATIONS.append(Operation(name, check, layouts, dtypes, kernel))
        return check

    return add
