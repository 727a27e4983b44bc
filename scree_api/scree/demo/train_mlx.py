"""The training loop of the language model on MLX, with MLX's Adam.

MLX is lazy: each step is evaluated when its loss is requested.
"""

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
    import mlx.core as mx
    from mlx.optimizers import Adam

    w = {name: mx.array(x) for name, x in weights.items()}
    adam = Adam(learning_rate, bias_correction=True)
    for batch in batches:
        value, gradients = mx.value_and_grad(loss)(w, *(to_library(x, mx.array) for x in batch))
        w = adam.apply_gradients(gradients, w)
        mx.eval(value, w, adam.state)
        yield float(value)
