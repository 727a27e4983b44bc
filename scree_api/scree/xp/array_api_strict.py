"""`scree.namespace` of array_api_strict arrays, by name."""

import sys

from ..namespace import by_name

sys.modules[__name__] = by_name("array_api_strict")
