"""Dropout with an explicit source of random numbers."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..backends import backend
from ..broadcasting import as_values, with_values_like

__all__ = ["dropout"]


def dropout(x: Any, rate: float, key: Any) -> Any:
    """Set elements to 0 with probability `rate` (Srivastava et al., 2014).

    The others are scaled by ``1 / (1 - rate)``.

    Parameters
    ----------
    x
        Ragged or dense floating-point array.
    rate
        Probability in [0, 1).
    key
        The source of random numbers: ``numpy.random.Generator``, ``torch.Generator``, a key of
        ``jax.random`` or ``mlx.core.random``. No global state is used.

    Returns
    -------
    Array or dense array
        Like `x`.

    Raises
    ------
    TypeError
        If `x` is not floating-point, the key belongs to another library, or the library has no
        random numbers.
    ValueError
        If `rate` is not in [0, 1).

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.ones(6), [2, 4])
    >>> scree.dropout(arr, 0.5, np.random.default_rng(0)).values
    array([2., 2., 2., 0., 0., 0.])
    """
    values = as_values(x)
    lib = backend(values, "x")
    if not 0 <= checks.check_number("rate", rate) < 1:
        raise ValueError(f"rate: expected a probability in [0, 1), got {rate}")
    checks.check_floating("x", values)
    if lib.uniform is None:
        raise TypeError(
            f"x: expected an array of a library with random numbers, got one of {lib.name}"
        )
    kept = lib.uniform(key, tuple(values.shape), values) >= rate
    zero = lib.xp.zeros((), dtype=values.dtype, device=lib.device(values))
    return with_values_like(x, lib.xp.where(kept, values * (1 / (1 - rate)), zero))
