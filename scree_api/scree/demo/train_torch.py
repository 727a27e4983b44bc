"""The training loop of the language model on PyTorch, with its own optimizer."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .train import moved


def losses(
    loss: Callable[..., Any], weights: dict[str, np.ndarray], batches: Iterable[Any], rate: float
) -> Iterator[float]:
    """The loss of each batch, before the step that it leads to."""
    import torch

    w = {name: torch.tensor(x, requires_grad=True) for name, x in weights.items()}
    adam = torch.optim.Adam(w.values(), lr=rate)
    for batch in batches:
        adam.zero_grad()
        found = loss(w, *(moved(x, torch.from_numpy) for x in batch))
        found.backward()
        adam.step()
        yield float(found.detach())
