"""The options that subcommands share, so that each means the same everywhere."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes, few samples: under a minute on two cores.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the JSON and the pictures; without it, only the table is shown."),
]
Backend = Annotated[str, typer.Option(help="numpy, torch, jax, mlx, or all that are installed.")]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, or auto: cuda where PyTorch has it.")
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="File with the lengths of your rows: whole numbers, or a JSON list.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds to measure each contender of each case; a tenth with --quick."
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds for building and first calling a contender, which may compile."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")]


Dtype = Annotated[
    str,
    typer.Option(
        help="float32, float16 or bfloat16; by default bfloat16 on CUDA and float32 on the CPU."
    ),
]

DTYPES = ("float32", "float16", "bfloat16")


def numbers(
    text: str, option: str, between: str = ",", kind: type = int, least: float = 1
) -> list[Any]:
    """A list option: numbers with something between them.

    Raises
    ------
    typer.BadParameter
        If an entry is no number, or less than `least`.
    """
    try:
        found = [kind(x) for x in text.split(between) if x.strip()]
    except ValueError as error:
        raise typer.BadParameter(
            f"{option}: expected numbers with {between!r} between them, got {text!r}"
        ) from error
    if any(x < least for x in found):
        raise typer.BadParameter(f"{option}: expected numbers of at least {least:g}, got {text!r}")
    return found


def words(text: str, option: str, among: Collection[str]) -> list[str]:
    """A list option: some of these words, with commas between them.

    Raises
    ------
    typer.BadParameter
        If an entry is none of them.
    """
    found = [x.strip() for x in text.split(",") if x.strip()]
    for word in found:
        if word not in among:
            raise typer.BadParameter(f"{option}: expected some of {', '.join(among)}, got {word!r}")
    return found


def data_type(dtype: str, device: str) -> str:
    """The data type for ``--dtype``, or the one that is usual on a device."""
    usual = "bfloat16" if device == "cuda" else "float32"
    return next(iter(words(dtype, "--dtype", DTYPES)), usual)
