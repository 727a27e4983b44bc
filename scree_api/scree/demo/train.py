"""Training of the language model: batches of conversations, loss curves, and a text plot.

``python -m scree train-demo`` runs it. There is one loop per library (`train_torch`, `train_jax`,
`train_mlx`), because gradients and optimizers belong to the library.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

import scree

from . import DemoError, lm

#: The differentiable backends, and the package that each loop needs in addition.
BACKENDS = {"torch": "torch", "jax": "optax", "mlx": "mlx"}
BATCH = 16  # conversations
MAX_LENGTH = 256  # bytes; longer conversations are cut
LEARNING_RATE = 3e-3


def check_installed(backend: str) -> None:
    """Raise DemoError unless the packages that the loop of a backend needs are installed."""
    missing = [name for name in (backend, BACKENDS[backend]) if find_spec(name) is None]
    if missing:
        raise DemoError(
            f"--backend: {missing[0]} is not installed; install it, or choose another backend"
        )


def ragged_batches(
    texts: list[str], steps: int, seed: int, size: int = BATCH
) -> Iterator[tuple[scree.Array, np.ndarray]]:
    """Yield ragged batches of random texts as bytes, in few shapes.

    Parameters
    ----------
    texts
        Texts to sample from, with replacement.
    steps
        Number of batches.
    seed
        Seed of the random generator.
    size
        Texts per batch.

    Yields
    ------
    tokens, row_mask
        (n, None) integers and (n,) booleans, False for rows that only pad the batch.
    """
    for rows in sample_rows(texts, steps, seed, size):
        yield scree.bucket(scree.pack(rows))


def padded_batches(
    texts: list[str], steps: int, seed: int, size: int = BATCH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the batches of `ragged_batches` padded to the bound of their length.

    Parameters
    ----------
    texts, steps, seed, size
        See `ragged_batches`.

    Yields
    ------
    tokens, mask
        (n, length) integers and booleans, False in the padding.
    """
    for rows in sample_rows(texts, steps, seed, size):
        tokens = scree.pack(rows)
        yield scree.to_padded(tokens, length=scree.bucket(tokens)[0].max_length)


def sample_rows(texts: list[str], steps: int, seed: int, size: int) -> Iterator[list[np.ndarray]]:
    """Yield `steps` lists of `size` random texts, each as an array of bytes."""
    rng = np.random.default_rng(seed)
    rows = [np.frombuffer(text.encode()[:MAX_LENGTH], np.uint8).astype(np.int32) for text in texts]
    for _ in range(steps):
        yield [rows[i] for i in rng.integers(0, len(rows), size)]


def to_library(x: Any, asarray: Callable[[np.ndarray], Any]) -> Any:
    """Convert a ragged or dense NumPy array to another library.

    Parameters
    ----------
    x
        The array.
    asarray
        Function of the library that converts a dense NumPy array.

    Returns
    -------
    Array or array
        The ragged or dense array.
    """
    if not isinstance(x, scree.Array):
        return asarray(x)
    return scree.from_offsets(asarray(x.values), asarray(x.offsets), max_length=x.max_length)


class Losses(Protocol):
    """The function `losses` of the module with the training loop of a library."""

    def __call__(
        self,
        loss: Callable[..., Any],
        weights: dict[str, np.ndarray],
        batches: Iterable[Any],
        learning_rate: float,
    ) -> Iterator[float]:
        """Train on the batches, and yield the loss of each before its update.

        Parameters
        ----------
        loss
            ``loss(weights, *batch)``.
        weights
            The initial weights.
        batches
            Tuples of ragged or dense NumPy arrays.
        learning_rate
            Learning rate of Adam.

        Yields
        ------
        float
            The loss.
        """


def curve(
    backend: str,
    texts: list[str],
    steps: int,
    *,
    padded: bool = False,
    seed: int = 0,
    size: int = BATCH,
) -> Iterator[float]:
    """Train from random weights, and yield the loss of every step.

    Parameters
    ----------
    backend
        A name in `BACKENDS`.
    texts, steps, seed, size
        See `ragged_batches`; `seed` is also the seed of the weights.
    padded
        Train the padded form of the model instead of the ragged form.

    Yields
    ------
    float
        The loss in nats per byte.
    """
    loss, batches = (lm.padded_loss, padded_batches) if padded else (lm.loss, ragged_batches)
    losses: Losses = import_module(f"{__package__}.train_{backend}").losses
    return losses(loss, lm.weights(seed=seed), batches(texts, steps, seed, size), LEARNING_RATE)


def plot(losses: list[float], width: int = 64, height: int = 12) -> str:
    """Return a text plot of a loss curve.

    Parameters
    ----------
    losses
        The loss of each step, at least one.
    width, height
        Size of the plot in characters. Each column is the mean of its steps.

    Returns
    -------
    str
        The plot, with labels of the lowest and the highest mean.
    """
    parts = np.array_split(np.asarray(losses), min(width, len(losses)))
    means = np.asarray([part.mean() for part in parts])
    low, high = float(means.min()), float(means.max())
    levels = np.round((means - low) / ((high - low) or 1) * (height - 1)).astype(int)
    lines = []
    for row in reversed(range(height)):
        label = f"{low + (high - low) * row / (height - 1):5.2f}" if row in (0, height - 1) else ""
        lines.append(f"{label:>5} │" + "".join("•" if level == row else " " for level in levels))
    return "\n".join(
        [
            *lines,
            "      └" + "─" * len(means),
            f"       1{len(losses):>{max(len(means) - 1, 1)}}  steps",
        ]
    )
