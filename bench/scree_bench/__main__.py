"""Entry point of `python -m scree_bench`, and of `scree bench`."""

from .cli import app


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the process exits with its status."""
    app(arguments)
    return 0


if __name__ == "__main__":
    main()
