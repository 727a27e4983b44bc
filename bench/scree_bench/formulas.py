"""Softmax and norms as one writes them down, for any namespace: what many contenders and references are made of."""

from typing import Any

EPS = 1e-6


def softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    """Exponentials over their sum."""
    x = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return x / xp.sum(x, axis=axis, keepdims=True)


def rms_norm(xp: Any, x: Any) -> Any:
    """Each token over the root of its mean square."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + EPS)


def layer_norm(xp: Any, x: Any) -> Any:
    """Each token without its mean, over its deviation."""
    return rms_norm(xp, x - xp.mean(x, axis=-1, keepdims=True))
