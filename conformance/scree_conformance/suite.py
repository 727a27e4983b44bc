"""The table of operations: per operation the call, the oracle, the layouts and the dtypes.

`cases(lib)` lists the cases of a library; pytest and the command line both run that list. A case
raises `AssertionError` where scree is wrong. It raises `Rejected` where the kernel provider under
test rejects the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

from . import dense, extension, laws, ordering, products, reshaping, standard, structure, transforms
from .backends import Library
from .layouts import FEW
from .table import OPERATIONS, Case

#: Each module adds its operations to the table when it is imported.
MODULES = (standard, reshaping, ordering, products, extension, structure, transforms, dense, laws)


def cases(lib: Library, kernel: str | None = None) -> Iterator[Case]:
    """Yield all cases of a library; with a kernel provider, only cases of operations with kernels.

    Where the library compiles every shape, each shape costs seconds. There an operation runs on few
    layouts plus one more, and in few dtypes. The dtypes are the first, bfloat16 for operations with
    many layouts (there scree itself affects the precision), and one more. The additional layout and
    dtype differ between operations, so that the suite leaves none out.
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
    """Return the names that are in `some`, and one of the rest, chosen by `turn`."""
    rest = [name for name in names if name not in some]
    return [name for name in names if name in some or name == rest[turn % len(rest)]]
