"""Batching of samples of different lengths: collating, sampling, splitting and cutting."""

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
