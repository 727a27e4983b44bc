"""Batching of samples of different lengths: collating, sampling, splitting and cutting."""

from .batches import Interleaved, chunk, collate, interleave, split_balanced, truncate
from .sampler import TokenBudgetSampler, fit_cost

__all__ = [
    "Interleaved",
    "TokenBudgetSampler",
    "chunk",
    "collate",
    "fit_cost",
    "interleave",
    "split_balanced",
    "truncate",
]
