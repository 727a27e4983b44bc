"""Array API namespace for ragged and dense MLX arrays.

Importing this module gives the object that `scree.namespace` returns for such arrays.
"""

import sys
from typing import TYPE_CHECKING

from ..namespace import namespace_by_name

if TYPE_CHECKING:
    from .names import *

sys.modules[__name__] = namespace_by_name("mlx")
