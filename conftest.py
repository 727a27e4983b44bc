"""Which modules pytest leaves alone when it looks for doctests: those that need a library or a device to be imported."""

collect_ignore_glob = [
    "bench/*",
    "docs/*",
    "kernels_triton/scree_triton/*",
    "noxfile.py",
    "scree_api/scree/backends/*",
    "scree_api/scree/xp/*",
]
