"""Subcommands of scree-bench, one module each: `command`, and optionally `tables`, `pictures`."""

#: The subcommands that measure, one module each, in the order of the help and of the report.
MEASURING = (
    "memory",
    "throughput",
    "attention",
    "decode",
    "algorithms",
    "norms",
    "kernels",
    "block",
    "model",
    "train",
    "precision",
    "collectives",
    "shards",
    "ratios",
    "overhead",
)
