"""The subcommands: one module each, with `command` for the command line and, where there is something to see, `pictures`."""

#: The subcommands that measure, a module each, in the order in which help and the report show them.
MEASURING = (
    "memory",
    "throughput",
    "attention",
    "algorithms",
    "norms",
    "kernels",
    "block",
    "model",
    "precision",
    "collectives",
    "ratios",
    "overhead",
)
