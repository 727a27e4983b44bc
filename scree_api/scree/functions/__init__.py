"""One lifter a kind: from a library's function to one that also takes ragged arrays.

Axis 0 is the batch, axis k >= 1 of a ragged array is axis k - 1 of its values. Dense arguments pass straight through to the
library. A lifter takes the library's function, its name and the library.
"""

from collections.abc import Callable

from ..backends import Backend
from ..broadcasting import Function
from . import elementwise, linear_algebra, manipulation, sorting, statistical
from .table import EXTENSIONS, KINDS, Kind

__all__ = ["EXTENSIONS", "KINDS", "LIFTERS", "Kind"]

LIFTERS: dict[str, Callable[[Function, str, Backend], Function]] = {
    "elementwise": elementwise.elementwise,
    "same_rows": elementwise.same_rows,
    "dtypes": elementwise.dtypes,
    "reduction": statistical.reduction,
    "scan": statistical.scan,
    "arg": sorting.arg,
    **{name: getattr(sorting, name) for name in (
        "argsort", "isin", "nonzero", "searchsorted", "sort", "take", "take_along_axis", "unique_all", "unique_counts",
        "unique_inverse", "unique_values")},
    **{name: getattr(linear_algebra, name) for name in ("matmul", "matrices", "tensordot", "vecdot", "vector_norm")},
    **{name: getattr(manipulation, name) for name in (
        "broadcast_arrays", "broadcast_to", "concat", "diff", "expand_dims", "flip", "matrix_transpose", "moveaxis",
        "permute_dims", "repeat", "reshape", "roll", "squeeze", "stack", "tile", "unstack")},
}  # fmt: skip
