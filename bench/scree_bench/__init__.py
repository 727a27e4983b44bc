"""The measuring program of scree."""

__version__ = "0.1.0"
