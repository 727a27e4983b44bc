"""Array API namespace for ragged and dense NumPy arrays.

Importing this module gives the object that `scree.namespace` returns for such arrays.
"""

import sys

from ..namespace import namespace_by_name

sys.modules[__name__] = namespace_by_name("numpy")
