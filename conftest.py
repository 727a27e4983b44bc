"""What pytest leaves alone: modules that need a library or a device to be imported, when it looks for doctests or tests."""

from importlib.util import find_spec

NEEDS = {"mlx": "scree_api/tests/test_mlx_namespace.py", "triton": "kernels_triton/tests"}

collect_ignore = [path for library, path in NEEDS.items() if find_spec(library) is None]
collect_ignore_glob = [
    "bench/*",
    "docs/*",
    "kernels_triton/scree_triton/*",
    "noxfile.py",
    "scree_api/scree/backends/*",
    "scree_api/scree/xp/*",
]
