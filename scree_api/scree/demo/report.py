"""What a person reads: tables and pairs, by rich."""

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from .run import WAYS, Result

TITLES = {"ragged": "ragged", "padded": "padded", "sorted": "padded, sorted by length"}
SHOWN = 160  # characters of a paragraph


def show(result: Result, console: Console) -> None:
    """Print a result."""
    console.print(
        f"[bold]scree {result.scree}[/bold]: {result.paragraphs} paragraphs of {result.shortest} to {result.longest} "
        f"tokens, median {result.median:g}, {result.tokens:,} in all; {result.weights} weights; batches of {result.batch}\n"
    )
    console.print(_sizes(result), _backends(result), sep="\n\n")
    if result.not_installed:
        console.print(f"\nNot installed, and left out: {', '.join(result.not_installed)}.")
    verdict = (
        "[green]within[/green]"
        if result.largest_difference <= result.tolerance
        else "[red]beyond[/red]"
    )
    console.print(
        f"\nLargest difference between any two embeddings of one paragraph: {result.largest_difference:.1e}, {verdict} the "
        f"{result.tolerance:.0e} allowed.\n"
    )
    if result.weights == "random":
        console.print("No nearest paragraphs: to random weights, texts mean nothing.")
    elif result.nearest:
        console.print(
            "[bold]Nearest paragraphs[/bold], of those that share few words, and the cosine between them"
        )
        for pair in result.nearest:
            for mark, text in ((f"{pair.similarity:.2f}", pair.a), ("", pair.b)):
                shown = textwrap.shorten(text, SHOWN, placeholder=" ...")
                console.print(
                    textwrap.fill(
                        shown,
                        console.width - 6,
                        initial_indent=f"{mark:4}  ",
                        subsequent_indent=" " * 6,
                    ),
                    markup=False,
                    highlight=False,
                )


def _table(title: str, caption: str, columns: tuple[str, ...]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=i > 0)
    return table


def _sizes(result: Result) -> Table:
    table = _table(
        "What is computed",
        "Bytes are those of one layer in the largest batch, float32, counted and not measured. Activations: input, queries, "
        "keys, values, context and the wide hidden state. Scores: all that stand in memory at once; the ragged path holds "
        "those of a few tiles.",
        ("", "tokens", "real", "activations", "attention scores"),
    )
    for way in WAYS:
        size = result.sizes[way]
        scores = f"{size.scores / 1e6:,.1f} MB" if size.scores else "tiles"
        share = f"{result.tokens / size.tokens:.0%}"
        table.add_row(
            TITLES[way], f"{size.tokens:,}", share, f"{size.activations / 1e6:,.1f} MB", scores
        )
    return table


def _backends(result: Result) -> Table:
    table = _table(
        "Time, and what padding would have cost",
        "Tokens per second are real ones of the ragged run. Sorting must have all paragraphs before the first batch. Last: "
        "the largest differences of embeddings, which have length 1, from those of the same backend's padded runs and "
        "from those of the first backend.",
        ("backend", "ragged", "tokens/s", "padded", "sorted", "from padded", "from first"),
    )
    for name, m in result.backends.items():
        ragged, *others = (m.seconds[way] for way in WAYS)
        costs = [f"{seconds:.3g} s {seconds / ragged:.2f}x" for seconds in others]
        differences = [f"{x:.1e}" for x in (m.from_padded, m.from_first_backend)]
        table.add_row(
            name, f"{ragged:.3g} s", f"{m.tokens_per_second['ragged']:,.0f}", *costs, *differences
        )
    return table
