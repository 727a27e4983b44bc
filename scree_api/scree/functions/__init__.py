"""The functions of the standard on ragged arrays, one module per chapter of the standard.

`KINDS` binds every name.
"""

from . import elementwise, linear_algebra, manipulation, searching, sets, sorting, statistical
from .binding import IMPLEMENTATIONS, bind
from .table import EXTENSIONS, KINDS, Kind

__all__ = [
    "EXTENSIONS",
    "IMPLEMENTATIONS",
    "KINDS",
    "Kind",
    "bind",
    "elementwise",
    "linear_algebra",
    "manipulation",
    "searching",
    "sets",
    "sorting",
    "statistical",
]
