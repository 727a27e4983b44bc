"""Entry point of `python -m scree_bench`."""

from .cli import app

if __name__ == "__main__":
    app()
