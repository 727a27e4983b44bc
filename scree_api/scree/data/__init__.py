"""Samples, batches and streams of ragged arrays."""

from .batches import (
    Interleaved,
    TokenBudgetSampler,
    chunk,
    collate,
    interleave,
    split_balanced,
    truncate,
)

__all__ = [
    "Interleaved",
    "TokenBudgetSampler",
    "chunk",
    "collate",
    "interleave",
    "split_balanced",
    "truncate",
]
