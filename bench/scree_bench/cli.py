"""The command line: `scree-bench COMMAND`, or `python -m scree_bench COMMAND`."""

from importlib import import_module

import typer

#: The subcommands, in the order in which help shows them.
COMMANDS = ("memory", "throughput", "attention", "algorithms", "ratios", "overhead")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Measure what scree saves and costs on this machine, beside everything else that does the same."""


for name in COMMANDS:
    app.command(name)(import_module(f"scree_bench.commands.{name}").command)
