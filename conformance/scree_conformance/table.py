"""The table of operations: per operation the check, the layouts and the dtypes."""

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

#: float32 comes first: it runs on every layout, the other dtypes on the first layout only.
DTYPES = ("float32", *(name for name in FLOATS if name != "float32"))

#: Name in `xp` of every function that scree implements for ragged arrays, or refuses with a reason.
FUNCTIONS = (
    *KINDS,
    *(f"{extension}.{name}" for extension, kinds in EXTENSIONS.items() for name in kinds),
    *(f"ragged.{name}" for name in scree.ragged.__all__),
)


class Absent(Exception):
    """A function that the library lacks, or lacks for this dtype, according to its gaps."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry: ``check(bench, layout, dtype)`` raises if a result of scree is wrong.

    `kernel` is the operation that kernel providers may implement, or None. The name lists the
    checked functions and, after a colon, the checked variant: ``"sort argsort: NaN"``. A name
    without functions describes a law of all functions.
    """

    name: str
    check: Check
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    kernel: str | None

    @property
    def functions(self) -> tuple[str, ...]:
        """The checked functions."""
        words = tuple(self.name.partition(":")[0].split())
        return words if set(words) <= set(FUNCTIONS) else ()

    @property
    def is_law(self) -> bool:
        """Return whether this is a law, an equation between results of several functions."""
        return self.name.startswith("law: ")

    @property
    def variant(self) -> str:
        """The checked variant of the functions."""
        return self.name.partition(": ")[2]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one layout in one dtype."""

    operation: Operation
    layout: Layout
    dtype: str

    @property
    def name(self) -> str:
        """The name in pytest and in the reports."""
        return f"{self.operation.name}-{self.layout}-{self.dtype}"

    def run(self, bench: Bench) -> None:
        """Run the case; raise `Absent` for a known gap of the library.

        A failure raises `AssertionError`, or the error that scree raised.
        """
        gap = bench.lib.gap(self.operation.name, self.dtype)
        with bench.lib.context():
            bench.start(self.name)
            try:
                self.operation.check(bench, self.layout, self.dtype)
            # Any failure confirms a gap of the library.
            except Exception as error:
                if gap is None:
                    raise
                raise Absent(gap) from error
        if gap is not None:
            raise AssertionError(
                f"{bench.lib.name} has {self.operation.name} now: remove it from the gaps"
            )


OPERATIONS: list[Operation] = []


def operation(
    name: str,
    layouts: tuple[str, ...] = ALL,
    dtypes: tuple[str, ...] = DTYPES,
    *,
    kernel: str | None = None,
) -> Callable[[Check], Check]:
    """Add the decorated check to the table."""

    def add_to_table(check: Check) -> Check:
        OPERATIONS.append(Operation(name, check, layouts, dtypes, kernel))
        return check

    return add_to_table
