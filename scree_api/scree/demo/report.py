"""What a person reads: tables and pairs, by rich."""

import textwrap

from rich.console import Console
from rich.table import Table

from .run import WAYS, Result

TITLES = {"ragged": "ragged", "padded": "padded", "sorted": "padded, sorted by length"}
SHOWN = 150  # characters of a paragraph


def show(result: Result, console: Console) -> None:
    """Print a result."""
    console.print(
        f"[bold]scree {result.scree}[/bold]: {result.paragraphs} paragraphs of {result.shortest} to {result.longest} "
        f"tokens, median {result.median:g}, {result.tokens:,} in all; {result.weights} weights, batches of {result.batch}\n"
    )
    console.print(_sizes(result), _backends(result), sep="\n")
    if result.not_installed:
        console.print(f"Not installed, and left out: {', '.join(result.not_installed)}.")
    verdict = "[green]within[/green]" if result.largest_difference <= result.tolerance else "[red]beyond[/red]"
    console.print(
        f"Largest difference of any two embeddings of a paragraph: {result.largest_difference:.1e}, {verdict} the "
        f"{result.tolerance:.0e} allowed.\n"
    )
    if result.weights == "random":
        console.print("No nearest pairs: to random weights, texts mean nothing.")
        return
    console.print("[bold]Nearest paragraphs[/bold]")
    for pair in result.nearest:
        for mark, text in ((f"{pair.similarity:.2f}", pair.a), ("", pair.b)):
            console.print(f"{mark:>4}", textwrap.shorten(text, SHOWN, placeholder=" ..."), markup=False, highlight=False)


def _sizes(result: Result) -> Table:
    table = Table(
        title="What is computed", title_justify="left",
        caption="Bytes of one layer in the largest batch, counted, in float32. Activations: input, q, k, v, context and the "
        "wide hidden state. Scores: those that stand in memory at once; the ragged path holds a few tiles of them.",
        caption_justify="left",
    )  # fmt: skip
    for title in ("", "tokens", "of them real", "activations", "attention scores"):
        table.add_column(title, justify="left" if not title else "right")
    for way in WAYS:
        size = result.sizes[way]
        scores = f"{size.scores / 1e6:,.1f} MB" if size.scores else "tiles"
        share = f"{result.tokens / size.tokens:.0%}"
        table.add_row(TITLES[way], f"{size.tokens:,}", share, f"{size.activations / 1e6:,.1f} MB", scores)
    return table


def _backends(result: Result) -> Table:
    table = Table(
        title="Time, and what padding would have cost", title_justify="left",
        caption="Tokens are real ones. Sorting needs all paragraphs before the first batch. The differences are between "
        "embeddings of length 1: from those of the padded runs, and from those of the first backend.",
        caption_justify="left",
    )  # fmt: skip
    for title in ("backend", "ragged", "tokens/s", "padded", "sorted", "from padded", "from first"):
        table.add_column(title, justify="left" if title == "backend" else "right")
    for name, m in result.backends.items():
        ragged, *others = (m.seconds[way] for way in WAYS)
        costs = [f"{s:.2f} s ({s / ragged:.2f}x)" for s in others]
        differences = [f"{x:.1e}" for x in (m.from_padded, m.from_first_backend)]
        rate = f"{m.tokens_per_second['ragged']:,.0f}"
        table.add_row(f"{name} {m.version}", f"{ragged:.2f} s", rate, *costs, *differences)
    return table
