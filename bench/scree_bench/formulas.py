"""Softmax and norms in their textbook form, for any namespace: for contenders and references."""

from typing import Any

EPS = 1e-6


def softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    """Compute the exponentials divided by their sum."""
    x = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return x / xp.sum(x, axis=axis, keepdims=True)


def rms_norm(xp: Any, x: Any) -> Any:
    """Divide each token by the root of its mean square."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + EPS)


def layer_norm(xp: Any, x: Any) -> Any:
    """Subtract the mean of each token and divide by its standard deviation."""
    return rms_norm(xp, x - xp.mean(x, axis=-1, keepdims=True))
