"""Command line: `scree-bench COMMAND`, or `python -m scree_bench COMMAND`."""

import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from . import __version__
from .commands import MEASURING, report
from .options import Device, Quick
from .session import INTERRUPTED

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"scree-bench {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure what scree saves and costs on this machine, compared with other libraries."""


COMMANDS = {name: import_module(f"scree_bench.commands.{name}").command for name in MEASURING}
for name, command in COMMANDS.items():
    app.command(name)(command)


@app.command("all")
def everything(
    out: Annotated[Path, typer.Argument(help="Folder for the JSON and the pictures.")],
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Run every subcommand in its own process, with its results in the folder OUT.

    The exit status is 1 if a subcommand has an exit status other than 0. Ctrl-C ends the running
    subcommand, which keeps its results so far. The remaining subcommands are not started.
    """
    failed = []
    for name, command in COMMANDS.items():
        options = ["--device", device] if "device" in signature(command).parameters else []
        start = perf_counter()
        status = _run([name, "--out", str(out), *options, *(["--quick"] if quick else [])])
        typer.echo(f"scree-bench {name}: {perf_counter() - start:.0f} s, exit status {status}")
        if status == INTERRUPTED:
            raise typer.Exit(INTERRUPTED)
        failed += [name] if status else []
    if failed:
        typer.echo(f"exit status not 0: {', '.join(failed)}")
        raise typer.Exit(1)


def _run(arguments: list[str]) -> int:
    """Run a subcommand in its own process and return its exit status.

    Ctrl-C also reaches the process. The function then waits for its orderly end.
    """
    process, interrupted = (
        subprocess.Popen([sys.executable, "-m", "scree_bench", *arguments]),
        False,
    )
    while True:
        try:
            status = process.wait()
            return INTERRUPTED if interrupted else status
        # The process has received the signal too, and ends by itself.
        except KeyboardInterrupt:
            interrupted = True


app.command("report")(report.command)
app.command("compare")(report.compare)
