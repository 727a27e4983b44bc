"""Options that the subcommands share, so that each means the same everywhere."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

Quick = Annotated[
    bool,
    typer.Option("--quick", help="Use small sizes and few samples: under a minute on two cores."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the JSON and the pictures. Without it, only the table is shown."),
]
Backend = Annotated[str, typer.Option(help="numpy, torch, jax, mlx, or all (the installed ones).")]
KernelBackend = Annotated[str, typer.Option(help="torch, jax, or both: torch,jax.")]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, or auto: cuda if PyTorch finds a device.")
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="File with your row lengths: whole numbers, or a JSON list.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds to measure each contender of each case; a tenth of that with --quick."
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
        help="float32, float16 or bfloat16. Default: bfloat16 on CUDA, float32 on the CPU."
    ),
]

DTYPES = ("float32", "float16", "bfloat16")


def parse_numbers(
    text: str, option: str, between: str = ",", kind: type = int, least: float = 1
) -> list[Any]:
    """Parse a list option of numbers, separated by `between`.

    Raises
    ------
    typer.BadParameter
        If an entry is not a number, or is less than `least`.
    """
    try:
        values = [kind(x) for x in text.split(between) if x.strip()]
    except ValueError as error:
        raise typer.BadParameter(
            f"{option}: expected numbers with {between!r} between them, got {text!r}"
        ) from error
    if any(x < least for x in values):
        raise typer.BadParameter(f"{option}: expected numbers of at least {least:g}, got {text!r}")
    return values


def parse_words(text: str, option: str, among: Collection[str]) -> list[str]:
    """Parse a list option of words from `among`, separated by commas.

    Raises
    ------
    typer.BadParameter
        If an entry is not in `among`.
    """
    chosen = [x.strip() for x in text.split(",") if x.strip()]
    for word in chosen:
        if word not in among:
            raise typer.BadParameter(f"{option}: expected some of {', '.join(among)}, got {word!r}")
    return chosen


def data_type(dtype: str, device: str) -> str:
    """Return the data type for ``--dtype``, or the default data type of a device."""
    default = "bfloat16" if device == "cuda" else "float32"
    return next(iter(parse_words(dtype, "--dtype", DTYPES)), default)
