"""The options that subcommands share, so that each means the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, few samples: under a minute on two cores.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the JSON and the pictures; without it, only the table is shown.")]
Backend = Annotated[str, typer.Option(help="numpy, torch, jax, mlx, or all that are installed.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: cuda where PyTorch has it.")]
Lengths = Annotated[Path | None, typer.Option(help="File with the lengths of your rows: whole numbers, or a JSON list.")]
Seconds = Annotated[float, typer.Option(help="Seconds to measure each contender of each case; a tenth with --quick.")]
Patience = Annotated[float, typer.Option(help="Seconds for building and first calling a contender, which may compile.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]


def numbers(text: str, between: str = ",", kind: type = int) -> list[Any]:
    """A list option: numbers with something between them.

    Raises
    ------
    typer.BadParameter
        If an entry is no number.
    """
    try:
        return [kind(x) for x in text.split(between) if x.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"expected numbers with {between!r} between them, got {text!r}") from error
