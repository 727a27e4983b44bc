"""The training loop of the language model on PyTorch, with PyTorch's Adam."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .train import to_library


def losses(
    loss: Callable[..., Any],
    weights: dict[str, np.ndarray],
    batches: Iterable[Any],
    learning_rate: float,
) -> Iterator[float]:
    """Train on the batches, and yield the loss of each before its update; see `train.Losses`."""
    import torch

    w = {name: torch.tensor(x, requires_grad=True) for name, x in weights.items()}
    adam = torch.optim.Adam(w.values(), lr=learning_rate)
    for batch in batches:
        adam.zero_grad()
        value = loss(w, *(to_library(x, torch.from_numpy) for x in batch))
        value.backward()
        adam.step()
        yield float(value.detach())
