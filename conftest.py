"""What pytest leaves alone: modules that need a library or a device to be imported, when it looks for doctests or tests."""

from importlib.util import find_spec

NEEDS = {
    "kernels_triton/tests": "triton",
    "scree_api/tests/test_mlx_namespace.py": "mlx",
    "scree_api/tests/test_transforms_bucket.py": "jax",
    "scree_api/tests/test_transforms_jax.py": "jax",
    "scree_api/tests/test_transforms_mlx.py": "mlx",
    "scree_api/tests/test_transforms_torch.py": "torch",
    "scree_api/tests/test_transforms_train.py": "torch jax optax mlx",
}

collect_ignore = [path for path, libraries in NEEDS.items() if not all(map(find_spec, libraries.split()))]
collect_ignore_glob = [
    "bench/*",
    "docs/*",
    "kernels_triton/scree_triton/*",
    "noxfile.py",
    "scree_api/scree/backends/*",
    "scree_api/scree/xp/*",
]
