"""The table of operations: for each, the call on scree, the oracle, and the layouts and dtypes to try it on.

`cases(lib)` lists the cases of a library; pytest and the command line both run that list. A case raises `AssertionError` where
scree is wrong, and `Rejected` where the kernel provider under test will not take the call.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import dense, extension, laws, ordering, products, reshaping, standard, structure, transforms
from .backends import Library
from .layouts import FEW
from .table import OPERATIONS, Case

#: Each puts its operations into the table when it is imported.
MODULES = (standard, reshaping, ordering, products, extension, structure, transforms, dense, laws)


def cases(lib: Library, kernel: str | None = None) -> Iterator[Case]:
    """All cases of a library; with a kernel provider, those of the operations that may have one.

    Where every shape is compiled, each costs seconds: few layouts, and besides the first dtype the hardest, where scree itself
    has to do with precision, which is where an operation has many layouts.
    """
    for operation in OPERATIONS:
        if kernel is not None and operation.kernel is None:
            continue
        dtypes = [name for name in operation.dtypes if name in lib.dtypes]
        first, *others = operation.layouts
        if lib.compiles:
            dtypes = dtypes[:1] + [name for name in dtypes[1:] if name == "bfloat16" and len(others) > 2]
            others = [name for name in others if name in FEW]
        for i, dtype in enumerate(dtypes):
            for layout in (first, *others) if i == 0 else (first,):
                yield Case(operation, layout, dtype)
