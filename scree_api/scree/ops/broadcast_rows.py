"""One entry per row, repeated over the tokens of the row."""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..broadcasting import check_ragged, mask_tail
from ..checks import check_dense
from ..dtypes import accumulation_dtype

__all__ = ["broadcast_rows"]


def broadcast_rows(per_row: Any, /, like: Array) -> Array:
    """Repeat one entry per row over the tokens of the row.

    Operators and functions of the standard broadcast ``per_row[:, None]`` without this function. It
    serves functions of tokens that do not broadcast, such as ``xp.concat`` along an element axis.

    Parameters
    ----------
    per_row
        (n, ...) dense array of any dtype.
    like
        Ragged array of n rows, of the same library and device.

    Returns
    -------
    Array
        (n, None, ...) on the layout of `like`, with the dtype of `per_row`. The gradient of an
        entry is the sum of the gradients of its tokens. Half precision adds them in float32.

    Raises
    ------
    TypeError
        If `like` is not a ragged array, or `per_row` is not a dense array of its library.
    ValueError
        If `per_row` does not have one entry per row.

    Examples
    --------
    >>> import numpy as np, scree
    >>> like = scree.from_lengths(np.zeros(4), [1, 0, 3])
    >>> scree.broadcast_rows(np.asarray([7, 8, 9]), like).tolist()
    [[7], [], [9, 9, 9]]
    """
    layout = check_ragged("like", like, shards=True).layout
    check_dense("per_row", per_row, like.values)
    shape = tuple(per_row.shape)
    if shape[:1] != (layout.num_rows,):
        raise ValueError(
            f"per_row: expected shape ({layout.num_rows}, ...), one entry per row of like, got {shape}"
        )
    xp = layout.xp
    # The gradient is a sum over tokens, in the dtype in which the tokens are gathered.
    wide = xp.astype(per_row, accumulation_dtype(xp, per_row.dtype), copy=False)
    values = xp.astype(layout.per_token(wide), per_row.dtype, copy=False)
    out = like.with_values(values, ragged_dim=0)
    return out.with_values(mask_tail(out, values))
