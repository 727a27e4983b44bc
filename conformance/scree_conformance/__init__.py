"""The conformance suite: cases of scree's behaviour for any library or kernel provider."""

__version__ = "0.1.0"
