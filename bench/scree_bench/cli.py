"""The command line: `scree-bench COMMAND`, or `python -m scree_bench COMMAND`."""

from importlib import import_module

import typer

from .commands import report

#: The subcommands that measure, a module each, in the order in which help and the report show them.
MEASURING = (
    "memory", "throughput", "attention", "algorithms", "norms", "kernels", "model", "precision", "collectives", "ratios",
    "overhead",
)  # fmt: skip

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Measure what scree saves and costs on this machine, beside everything else that does the same."""


for name in MEASURING:
    app.command(name)(import_module(f"scree_bench.commands.{name}").command)
app.command("report")(report.command)
app.command("compare")(report.compare)
