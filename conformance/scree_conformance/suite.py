"""The table of operations: for each, the call on scree, the oracle, and the layouts and dtypes to try it on.

`cases(lib)` lists the cases of a library; pytest and the command line both run that list. A case raises `AssertionError` where
scree is wrong, and `Rejected` where the kernel provider under test will not take the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

from . import dense, extension, laws, ordering, products, reshaping, standard, structure, transforms
from .backends import Library
from .layouts import FEW
from .table import OPERATIONS, Case

#: Each puts its operations into the table when it is imported.
MODULES = (standard, reshaping, ordering, products, extension, structure, transforms, dense, laws)


def cases(lib: Library, kernel: str | None = None) -> Iterator[Case]:
    """All cases of a library; with a kernel provider, those of the operations that may have one.

    Where every shape is compiled, each costs seconds. There an operation is tried on few layouts and one more; and in few
    dtypes: the first, the hardest where scree itself has to do with precision, which is where an operation has many layouts,
    and one more. The one more is another for other operations, so that none is left out.
    """
    for operation in OPERATIONS:
        if kernel is not None and operation.kernel is None:
            continue
        dtypes = [name for name in operation.dtypes if name in lib.dtypes]
        first, *others = operation.layouts
        if lib.compiles:
            turn = crc32(operation.name.encode())
            dtypes = dtypes[:1] + _and_one(
                dtypes[1:], ("bfloat16",) if len(others) > 2 else (), turn
            )
            others = _and_one(others, FEW, turn)
        for i, dtype in enumerate(dtypes):
            for layout in (first, *others) if i == 0 else (first,):
                yield Case(operation, layout, dtype)


def _and_one(names: Sequence[str], some: Sequence[str], turn: int) -> list[str]:
    """Those of the names that are among some, and one of the rest, in turn."""
    rest = [name for name in names if name not in some]
    return [name for name in names if name in some or name == rest[turn % len(rest)]]
