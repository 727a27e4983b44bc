"""The functions of the standard on ragged arrays, one module per chapter of the standard.

`KINDS` binds every name.
"""

# These modules register implementations.
from . import elementwise, linear_algebra, manipulation, searching, sets, sorting, statistical  # noqa: F401
from .binding import IMPLEMENTATIONS, bind
from .table import EXTENSIONS, KINDS, Kind

__all__ = ["EXTENSIONS", "IMPLEMENTATIONS", "KINDS", "Kind", "bind"]
