"""`record`, the form of the many small classes that `import scree` defines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a dataclass with slots, without comparison and repr.

    Fields must not change after construction, and type checkers refuse an assignment. Python does
    not: ``frozen=True`` compiles two methods per class that raise, and its constructors take three
    times as long.
    """
    return dataclass(eq=False, repr=False, slots=True)(cls)
