"""The exact combination of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import as_values, check_array, check_same_rows, check_shared_layout
from ..checks import check_floating, check_same_dtype, check_shape
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record

__all__ = ["merge_attention"]


@record
class MergeAttentionCall:
    """A validated call of `merge_attention`.

    Attributes
    ----------
    outputs
        Tuple of arrays (..., num_heads, value_dim), all ragged on one layout or all dense.
    lses
        Tuple of arrays (..., num_heads), one per output.
    """

    outputs: tuple[Any, ...]
    lses: tuple[Any, ...]

    def __post_init__(self) -> None:
        for name, arrays in (("outputs", self.outputs), ("lses", self.lses)):
            if not isinstance(arrays, tuple) or not arrays:
                raise TypeError(f"{name}: expected a list of arrays, got {type(arrays).__name__}")
            for x in arrays:
                check_array(name, x)
        outputs, lses = self.outputs, self.lses
        if len(lses) != len(outputs):
            raise ValueError(f"lses: expected {len(outputs)} arrays as outputs, got {len(lses)}")
        ragged = [x for x in (*outputs, *lses) if isinstance(x, Array)]
        if ragged:
            if len(ragged) < len(outputs) + len(lses):
                raise TypeError("outputs: expected all arrays ragged or all dense, got both")
            check_shared_layout("outputs", outputs)
            for x in lses:
                check_same_rows("lses", outputs[0], x)
        shape = tuple(outputs[0].shape)
        check_floating("outputs", self.values)
        for x in outputs:
            check_same_dtype("outputs", x, outputs[0], "the first")
            check_shape("outputs", x, shape, "as the first")
        for x in lses:
            check_same_dtype("lses", x, lses[0], "the first")
            check_shape("lses", x, shape[:-1], "one number per query and head")

    @property
    def values(self) -> Any:
        """The values of the first output."""
        return as_values(self.outputs[0])


def merge_attention(
    outputs: Sequence[Any], lses: Sequence[Any], *, kernel: str | None = None
) -> tuple[Any, Any]:
    """Combine attention over disjoint sets of keys into attention over all of them.

    It serves shared prefixes (cascade attention), context parallelism and split caches. The result
    is exact up to rounding, and differentiable.

    Parameters
    ----------
    outputs
        Results of attention of the same queries, (n, None, num_heads, value_dim) ragged on one
        layout, or dense (..., num_heads, value_dim).
    lses
        The log-sum-exp of each, (n, None, num_heads) or (..., num_heads), as
        ``attention(..., return_lse=True)`` returns it. -inf for a query that saw no key. Give
        attention sinks to one of the calls only.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    out, lse
        Like the first output and the first log-sum-exp. For a query that no call gave a key, the
        output is 0 and the log-sum-exp is -inf.

    Raises
    ------
    TypeError
        If the arrays are not all ragged or all dense, or their dtypes differ.
    ValueError
        If shapes or layouts differ.

    Examples
    --------
    >>> import numpy as np, scree
    >>> q = scree.from_lengths(np.ones((1, 1, 2)), [1])
    >>> k = scree.from_lengths(np.arange(8.0).reshape(4, 1, 2), [4])
    >>> parts = [scree.attention(q, x, x, return_lse=True) for x in (k[:, :1], k[:, 1:])]
    >>> out, lse = scree.merge_attention(*zip(*parts))
    >>> np.allclose(out.values, scree.attention(q, k, k).values)
    True
    """
    parts: list[Any] = [tuple(x) if isinstance(x, list) else x for x in (outputs, lses)]
    return _merge_attention.run_call(MergeAttentionCall(*parts), kernel)


@define_operation("merge_attention", MergeAttentionCall)
def _merge_attention(call: MergeAttentionCall) -> tuple[Any, Any]:
    first = call.outputs[0]
    xp = backend(call.values).xp
    wide = accumulation_dtype(xp, first.dtype)
    lses = xp.stack([xp.astype(as_values(x), wide, copy=False) for x in call.lses])
    maximum = xp.max(lses, axis=0)
    # Without any key the weights are 0 instead of NaN.
    weights = xp.exp(lses - xp.where(maximum == -float("inf"), 0.0, maximum))
    total = xp.sum(weights, axis=0)
    is_seen = total > 0
    safe_total = xp.where(is_seen, total, 1.0)
    factors = (weights / safe_total)[..., None]
    # An output without keys has no influence, even if it is NaN.
    parts = [
        xp.where(factor > 0, factor * xp.astype(as_values(x), wide, copy=False), 0.0)
        for factor, x in zip(xp.unstack(factors), call.outputs)
    ]
    out = xp.astype(sum(parts[1:], start=parts[0]), first.dtype, copy=False)
    lse = xp.where(is_seen, maximum + xp.log(safe_total), -float("inf"))
    lse = xp.astype(lse, call.lses[0].dtype, copy=False)
    if not isinstance(first, Array):
        return out, lse
    return first.with_values(out), call.lses[0].with_values(lse)
