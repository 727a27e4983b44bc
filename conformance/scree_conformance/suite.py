"""The cases of a library, which pytest and the command line run.

A case raises `AssertionError` if a result of scree is wrong, and `Rejected` if the kernel provider
under test rejects the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

from . import (
    dense,
    extension,
    laws,
    ordering,
    paged,
    products,
    reshaping,
    standard,
    structure,
    transforms,
)
from .backends import Library
from .layouts import FEW
from .table import OPERATIONS, Case

#: Each module adds its operations to the table when it is imported.
MODULES = (
    *(standard, reshaping, ordering, products, extension, paged, structure, transforms, dense),
    laws,
)


def cases(lib: Library, kernel: str | None = None, quick: bool = False) -> Iterator[Case]:
    """Yield all cases of a library; with a kernel provider, only cases of operations with kernels.

    With `quick`, yield one case per operation, in the first layout and dtype, and no law.

    If the library compiles every shape, a shape costs seconds. Then an operation runs on `FEW`
    layouts and one more. Its dtypes are the first, bfloat16 if the operation has many layouts (for
    these scree itself affects the precision), and one more. The additional layout and dtype depend
    on the name of the operation, so that the suite covers all of them.
    """
    for operation in OPERATIONS:
        if kernel is not None and operation.kernel is None:
            continue
        dtypes = [name for name in operation.dtypes if name in lib.dtypes]
        first_layout, *other_layouts = operation.layouts
        if quick:
            dtypes, other_layouts = [] if operation.is_law else dtypes[:1], []
        elif lib.compiles:
            seed = crc32(operation.name.encode())
            always = ("bfloat16",) if len(other_layouts) > 2 else ()
            dtypes = dtypes[:1] + _with_one_more(dtypes[1:], always, seed)
            other_layouts = _with_one_more(other_layouts, FEW, seed)
        for i, dtype in enumerate(dtypes):
            for layout in (first_layout, *other_layouts) if i == 0 else (first_layout,):
                yield Case(operation, layout, dtype)


def _with_one_more(names: Sequence[str], always: Sequence[str], seed: int) -> list[str]:
    """Return the names that are in `always`, and one of the remaining names, chosen by `seed`."""
    optional = [name for name in names if name not in always]
    return [name for name in names if name in always or name == optional[seed % len(optional)]]
