"""Shift of the tokens within their rows."""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..broadcasting import check_ragged, expand_to_tokens
from ..checks import check_integer, check_scalar
from ..layout import Layout

__all__ = ["shift"]


def shift(x: Array, n: int, /, *, fill_value: bool | int | float | complex = 0) -> Array:
    """Return the tokens of each row, moved by n positions within the row.

    ``shift(ids, -1, fill_value=-100)`` are the labels of a causal language model: each token's
    label is the next token of its row, and the last token has none.

    Parameters
    ----------
    x
        (n, None, ...) ragged array of any dtype.
    n
        Number of positions: later positions for n > 0, earlier ones for n < 0. It may exceed the
        length of a row. Tokens that leave their row are dropped.
    fill_value
        The elements of the free positions, a Python scalar that the dtype of `x` holds.

    Returns
    -------
    Array
        Like `x`. The gradient of a dropped token is 0.

    Raises
    ------
    TypeError
        If `x` is not a ragged array, `n` is not a Python integer, or the dtype of `x` does not hold
        `fill_value`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.asarray([1, 2, 3, 4]), [3, 1])
    >>> scree.shift(arr, 1).tolist(), scree.shift(arr, -1, fill_value=-100).tolist()
    ([[0, 1, 2], [0]], [[2, 3, -100], [-100]])
    """
    layout, xp, dim = check_ragged("x", x).layout, x.layout.xp, x.ragged_dim
    # A larger number also leaves every row, but the dtype of the positions may not hold it.
    n = max(-layout.total, min(check_integer("n", n), layout.total))
    fill_value = check_scalar("fill_value", fill_value, x.values)
    mask = has_neighbor(layout, -n)
    if mask is None:
        return x
    moved = xp.roll(x.values, n, axis=dim)
    return x.with_values(xp.where(expand_to_tokens(x, mask), moved, fill_value))


def has_neighbor(layout: Layout, distance: int) -> Any:
    """Return (total,) whether the row of each token has a token `distance` positions later.

    The result is False for the tail, and None if it is True for all tokens.
    """
    if distance == 0:
        return layout.token_mask
    if distance > 0:
        ends = layout.per_token(layout.offsets[1:])
        return ends - layout.arange(layout.total) > distance
    mask = layout.positions >= -distance
    return mask if layout.token_mask is None else mask & layout.token_mask
