"""`scree.namespace` of jax arrays, by name."""

import sys

from ..namespace import by_name

sys.modules[__name__] = by_name("jax")
