"""`scree.namespace` of mlx arrays, by name."""

import sys

from ..namespace import namespace_by_name

sys.modules[__name__] = namespace_by_name("mlx")
