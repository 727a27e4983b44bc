"""Training of the language model: batches of conversations, one loop a library (`train_torch`, `train_jax`, `train_mlx`), a plot.

It runs as ``python -m scree train-demo``. Gradients and optimizers are each library's own, so the three loops name theirs.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import scree

from . import DemoError, lm

#: The backends that differentiate, and what each loop needs besides its library.
BACKENDS = {"torch": "torch", "jax": "optax", "mlx": "mlx"}
BATCH = 16  # conversations
LENGTH = 256  # bytes of a conversation at most
RATE = 3e-3


def installed(backend: str) -> None:
    """Raise unless what the loop of a backend needs is there."""
    missing = [name for name in (backend, BACKENDS[backend]) if find_spec(name) is None]
    if missing:
        raise DemoError(
            f"--backend: {missing[0]} is not installed; install it, or choose another backend"
        )


def ragged_batches(
    texts: list[str], steps: int, seed: int, size: int = BATCH
) -> Iterator[tuple[scree.Array, np.ndarray]]:
    """Batches of texts as bytes, in random order, in few shapes: tokens, and which rows are texts."""
    for rows in _chosen(texts, steps, seed, size):
        yield scree.bucket(scree.pack(rows))


def padded_batches(
    texts: list[str], steps: int, seed: int, size: int = BATCH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same texts padded to the bound on their length: tokens, and which are real."""
    for rows in _chosen(texts, steps, seed, size):
        tokens = scree.pack(rows)
        yield scree.to_padded(tokens, length=scree.bucket(tokens)[0].max_length)


def _chosen(texts: list[str], steps: int, seed: int, size: int) -> Iterator[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    rows = [np.frombuffer(text.encode()[:LENGTH], np.uint8).astype(np.int32) for text in texts]
    for _ in range(steps):
        yield [rows[i] for i in rng.integers(0, len(rows), size)]


def moved(x: Any, asarray: Callable[[np.ndarray], Any]) -> Any:
    """A ragged or dense NumPy array in another library."""
    if not isinstance(x, scree.Array):
        return asarray(x)
    return scree.from_offsets(asarray(x.values), asarray(x.offsets), max_length=x.max_length)


def curve(
    backend: str,
    texts: list[str],
    steps: int,
    *,
    padded: bool = False,
    seed: int = 0,
    size: int = BATCH,
) -> Iterator[float]:
    """The loss at every step of training from random weights."""
    loss, batches = (lm.padded_loss, padded_batches) if padded else (lm.loss, ragged_batches)
    losses: Callable[..., Iterator[float]] = import_module(f"{__package__}.train_{backend}").losses
    return losses(loss, lm.weights(seed=seed), batches(texts, steps, seed, size), RATE)


def plot(losses: list[float], width: int = 64, height: int = 12) -> str:
    """A curve of text: the mean of the steps of each column."""
    parts = np.array_split(np.asarray(losses), min(width, len(losses)))
    means = np.asarray([part.mean() for part in parts])
    low, high = float(means.min()), float(means.max())
    level = np.round((means - low) / ((high - low) or 1) * (height - 1)).astype(int)
    lines = []
    for row in reversed(range(height)):
        label = f"{low + (high - low) * row / (height - 1):5.2f}" if row in (0, height - 1) else ""
        lines.append(f"{label:>5} │" + "".join("•" if at == row else " " for at in level))
    return "\n".join(
        [
            *lines,
            "      └" + "─" * len(means),
            f"       1{len(losses):>{max(len(means) - 1, 1)}}  steps",
        ]
    )
