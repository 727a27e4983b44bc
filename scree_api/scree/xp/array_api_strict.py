"""`scree.namespace` of array_api_strict arrays, by name."""

import sys

from ..namespace import namespace_by_name

sys.modules[__name__] = namespace_by_name("array_api_strict")
