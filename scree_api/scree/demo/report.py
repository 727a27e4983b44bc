"""The printed report: tables and pairs of paragraphs, with rich."""

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from . import generate
from .run import LAYOUTS, Result

TITLES = {"ragged": "ragged", "padded": "padded", "sorted": "padded, sorted by length"}
MAX_CHARACTERS = 160  # of a printed paragraph


def show(result: Result, console: Console) -> None:
    """Print a result.

    Parameters
    ----------
    result
        The result of `scree.demo.run.measure`.
    console
        Output.
    """
    console.print(
        f"[bold]scree {result.scree}[/bold]: {result.paragraphs} paragraphs "
        f"of {result.shortest} to {result.longest} tokens, median {result.median:g}, "
        f"{result.tokens:,} in total; {result.weights} weights; batches of {result.batch}\n"
    )
    console.print(_sizes(result), _backends(result), sep="\n\n")
    if result.not_installed:
        console.print(f"\nNot installed, and omitted: {', '.join(result.not_installed)}.")
    verdict = (
        "[green]within[/green]"
        if result.largest_difference <= result.tolerance
        else "[red]beyond[/red]"
    )
    console.print(
        "\nLargest difference between any two embeddings of one paragraph: "
        f"{result.largest_difference:.1e}, {verdict} the tolerance of {result.tolerance:.0e}.\n"
    )
    if result.weights == "random":
        console.print("No nearest paragraphs: embeddings of random weights have no meaning.")
    elif result.nearest:
        console.print(
            "[bold]Nearest paragraphs[/bold] among those that share few words, with their cosine"
        )
        for pair in result.nearest:
            _print_paragraph(console, f"{pair.similarity:.2f}", pair.a)
            _print_paragraph(console, "", pair.b)


def show_generation(result: generate.Result, console: Console) -> None:
    """Print the result of a generation.

    Parameters
    ----------
    result
        The result of `scree.demo.generate.measure`.
    console
        Output.
    """
    console.print(
        f"[bold]scree {result.scree}[/bold]: {result.new_tokens} new bytes for each of "
        f"{result.prompts} paragraphs of {result.shortest} to {result.longest} bytes, "
        "by a decoder of random weights\n"
    )
    paged, padded = (result.cache_bytes[form] / 1e6 for form in generate.FORMS)
    table = _table(
        "Tokens per second",
        "New tokens per second, without the prompts and the first step, which compile on some "
        "backends. Padded: prompts padded on the left, in a dense cache. Equal: the tokens that "
        "equal the tokens of the first backend with the paged cache. "
        f"The caches have {paged:,.1f} MB paged and {padded:,.1f} MB padded.",
        ("backend", "", "paged", "padded", "paged / padded", "equal"),
    )
    for name, speed in result.backends.items():
        for mode in generate.MODES:
            rates = [speed.tokens_per_second[f"{mode}, {form}"] for form in generate.FORMS]
            equal = min(speed.equal[f"{mode}, {form}"] for form in generate.FORMS)
            table.add_row(
                name,
                mode,
                *(f"{rate:,.0f}" for rate in rates),
                f"{rates[0] / rates[1]:.2f}x",
                f"{equal:.2%}",
            )
    console.print(table)
    if result.not_installed:
        console.print(f"\nNot installed, and omitted: {', '.join(result.not_installed)}.")
    verdict = "[green]agree[/green]" if result.agree else "[red]disagree[/red]"
    ties = f", except where two scores differ by less than {generate.TOLERANCE:.0e}"
    is_equal = all(x == 1 for speed in result.backends.values() for x in speed.equal.values())
    console.print(f"\nAll tokens {verdict}{'' if is_equal or not result.agree else ties}.")


def _print_paragraph(console: Console, label: str, text: str) -> None:
    """Print the beginning of a paragraph, with a label on its first line."""
    lines = textwrap.fill(
        textwrap.shorten(text, MAX_CHARACTERS, placeholder=" ..."),
        console.width - 6,
        initial_indent=f"{label:4}  ",
        subsequent_indent=" " * 6,
    )
    console.print(lines, markup=False, highlight=False)


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
        "Size of the computation",
        "Bytes are computed for one layer in the largest batch in float32, not measured. "
        "Activations: input, queries, keys, values, context, and the wide hidden state. "
        "Scores: all that are in memory at once; the ragged path holds only a few tiles.",
        ("", "tokens", "not padding", "activations", "attention scores"),
    )
    for layout in LAYOUTS:
        size = result.sizes[layout]
        scores = f"{size.scores / 1e6:,.1f} MB" if size.scores else "tiles"
        share = f"{result.tokens / size.tokens:.0%}"
        table.add_row(
            TITLES[layout], f"{size.tokens:,}", share, f"{size.activations / 1e6:,.1f} MB", scores
        )
    return table


def _backends(result: Result) -> Table:
    table = _table(
        "Time, and the cost of padding",
        "Tokens per second are from the ragged run, without padding. Sorting needs all paragraphs "
        "before the first batch. The last columns are the largest differences of embeddings, which "
        "have length 1, relative to the padded runs of the same backend and to the first backend.",
        ("backend", "ragged", "tokens/s", "padded", "sorted", "from padded", "from first"),
    )
    for name, measured in result.backends.items():
        ragged, *padded = (measured.seconds[layout] for layout in LAYOUTS)
        costs = [f"{seconds:.3g} s {seconds / ragged:.2f}x" for seconds in padded]
        differences = [f"{x:.1e}" for x in (measured.from_padded, measured.from_first_backend)]
        table.add_row(
            name,
            f"{ragged:.3g} s",
            f"{measured.tokens_per_second['ragged']:,.0f}",
            *costs,
            *differences,
        )
    return table
