"""Compare 50 steps of one training on PyTorch, JAX and MLX, ragged and padded.

``nox -s curves`` runs this program. It trains the model of `scree.demo.lm` on conversations of all
lengths, in the loops of `scree.demo.train`: PyTorch's Adam, `jax.jit` with optax on batches of few
shapes, and MLX's optimizer. It exits with 1 if a loss differs from PyTorch's by more than 1e-3.
"""

import argparse

import numpy as np

from scree.demo import text, train

TOLERANCE = 1e-3


def main() -> int:
    """Print the first and the last loss of each library, and the largest relative difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8, help="conversations per batch")
    options = parser.parse_args()
    conversations = text.conversations()
    expected: np.ndarray | None = None
    largest = 0.0
    print("library  form    first loss  last loss  largest difference")
    for backend in train.BACKENDS:
        for padded in (False, True):
            losses = np.asarray(
                list(
                    train.curve(
                        backend, conversations, options.steps, padded=padded, size=options.rows
                    )
                )
            )
            expected = losses if expected is None else expected
            difference = float(np.abs(losses / expected - 1).max())
            largest = max(largest, difference)
            form = "padded" if padded else "ragged"
            print(
                f"{backend:8} {form:7} {losses[0]:10.5f} {losses[-1]:10.5f} {difference:19.1e}",
                flush=True,
            )
    return int(not largest <= TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
