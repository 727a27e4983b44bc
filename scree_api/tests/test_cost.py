"""What operations may cost: memory in proportion to the tokens, however the rows are skewed."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import scree

SKEWED = [4096] + [
    64
] * 63  # padded, the scores of one head alone would take 64 * 4096**2 * 4 bytes, 4 GB


def peak(f) -> int:
    """Bytes that NumPy holds at most while `f` runs the second time, its layout known."""
    f()
    tracemalloc.start()
    try:
        f()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def tokens() -> scree.Array:
    rng = np.random.default_rng(0)
    return scree.from_lengths(rng.standard_normal((sum(SKEWED), 4, 32)).astype(np.float32), SKEWED)


@pytest.mark.parametrize("window", [None, (64, 0), (None, None)])
def test_attention_holds_no_more_than_the_tokens(tokens: scree.Array, window: object) -> None:
    causal = window is None
    assert (
        peak(lambda: scree.attention(tokens, tokens, tokens, causal=causal, window=window))
        < 10 * tokens.values.nbytes
    )


@pytest.mark.parametrize("name", ["sum", "max", "mean", "var", "cumulative_sum", "sort", "argmax"])
def test_rows_are_reduced_without_padding(tokens: scree.Array, name: str) -> None:
    function = getattr(scree.namespace(tokens), name)
    assert peak(lambda: function(tokens, axis=1)) < 10 * tokens.values.nbytes


@pytest.mark.parametrize("has_options", [False, True])
def test_linear_cross_entropy_never_holds_all_logits(
    tokens: scree.Array, has_options: bool
) -> None:
    x = tokens.with_values(tokens.values[:, 0])
    weight = np.random.default_rng(1).standard_normal((10000, x.values.shape[1])).astype(np.float32)
    targets = x.with_values(np.arange(x.total_length) % len(weight))
    options: dict[str, Any] = {}
    if has_options:
        options = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4, "return_accuracy": True}
        options["class_weights"] = np.ones(len(weight), np.float32)
    whole = 4 * x.total_length * len(weight)  # bytes
    assert peak(lambda: scree.linear_cross_entropy(x, weight, targets, **options)) < whole / 4
    allowed = peak(
        lambda: scree.linear_cross_entropy(
            x, weight, targets, max_logits=x.total_length * len(weight), **options
        )
    )
    assert allowed > whole / 2
