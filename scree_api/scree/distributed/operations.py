"""Operations on shards.

An operation on a shard runs on an array of this rank's tokens without the cut, and the result gets
the cut again. This is correct for operations in which tokens do not depend on each other. Rope,
losses and reductions of rows have implementations here; attention is left to the subclasses. All other
operations raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..array import Array
from ..broadcasting import moveaxis
from ..checks import check_whole
from ..dtypes import accumulation_dtype
from ..layout import Layout, RowCut
from ..ops.segment import append_axes, safe_divide
from ..ops.softmax import logsumexp

#: Operations in which tokens do not depend on each other.
TOKENWISE = {"layer_norm", "rms_norm", "split", "swiglu"}
#: Operations that are tokenwise along an element axis, and combine the parts of all ranks along rows.
SOFTMAX = {"log_softmax", "logsumexp", "softmax"}
#: Kinds of functions of the standard in which tokens do not depend on each other.
TOKENWISE_KINDS = set(
    """
    asarray broadcast_to expand_dims matmul matrices matrix_transpose moveaxis permute_dims reshape
    same_rows squeeze take tensordot""".split()
)
#: Kinds that are tokenwise along an element axis.
KINDS_WITH_AXIS = {"arg", "concat", "flip", "reduction", "roll", "scan", "sort"}
#: Reduction of rows -> the reduction that combines the results of the ranks.
MERGES = {
    "all": "all",
    "any": "any",
    "count_nonzero": "sum",
    "max": "max",
    "mean": "sum",
    "min": "min",
    "prod": "prod",
    "sum": "sum",
}


class ShardOperations(RowCut):
    """Operations on the tokens of this rank.

    Attributes
    ----------
    whole
        Layout of the whole rows.
    local_layout
        Layout of this rank's tokens: row i is the part of row i that this rank holds.
    piece_layout
        Layout of the same tokens in which each piece is a row.
    group
        The ranks.
    piece_starts, piece_rows
        (pieces,) position of the first token of each piece of this rank, and the row of the piece.
    """

    whole: Layout
    local_layout: Layout
    piece_layout: Layout
    group: Any
    piece_starts: Any
    piece_rows: Any

    @property
    def positions(self) -> Any:
        """(total,) position of each token of this rank in its whole row."""
        layout = self.piece_layout
        return self.local_layout.cached(
            "global positions", lambda: layout.positions + layout.per_token(self.piece_starts)
        )

    def run(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Run an operation whose first array is a shard; see `RowCut`."""
        name, first = operation.name, next(iter(arrays.values()))
        if name in RUN:
            return getattr(self, RUN[name])(operation, arrays, options, kernel)
        if name in SOFTMAX:
            axis = options["axis"]
            if axis is None or (type(axis) is int and axis % first.ndim == first.ragged_dim + 1):
                return self._softmax_of_rows(name, first)
        # An index into a dense array, such as an embedding.
        elif name not in TOKENWISE and not (
            name == "gather" and not isinstance(arrays["x"], Array)
        ):
            check_whole(name, first.layout)
        local = {key: self.on(self.local_layout, x) for key, x in arrays.items()}
        return self._restore(name, first.layout, operation.run(local, options, kernel))

    def call(
        self, kind: str, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a function of the standard on shards; see `RowCut`."""
        operands = args[0] if isinstance(args[0], list | tuple) else args
        first = next(x for x in operands if isinstance(x, Array) and x.layout.cut == self)
        if kind in KINDS_WITH_AXIS and not self._is_element_axis(first, kwargs.get("axis", -1)):
            if kind == "reduction":
                return self._reduce_rows(name, first, **kwargs)
            check_whole(name, first.layout)
        elif kind == "getitem":
            _check_element_key(first, args[1])
        elif kind not in TOKENWISE_KINDS | KINDS_WITH_AXIS:
            check_whole(name, first.layout)
        local = [self.on(self.local_layout, x) for x in args]
        named = {key: self.on(self.local_layout, x) for key, x in kwargs.items()}
        return self._restore(name, first.layout, function(*local, **named))

    def on(self, layout: Layout, x: Any) -> Any:
        """Return a shard on a layout of this rank's tokens; other objects unchanged."""
        if isinstance(x, list | tuple) and any(isinstance(y, Array) for y in x):
            return type(x)([self.on(layout, y) for y in x])
        if not isinstance(x, Array):
            return x
        if x.layout.cut != self:
            other = "an array of whole rows" if x.layout.cut is None else "another shard"
            raise ValueError(
                f"expected shards of one cut, got a shard and {other}; "
                "shard all arrays of a batch with the same layout, mesh and cost"
            )
        return Array.from_layout(x.values, layout, x.ragged_dim)

    def _restore(self, name: str, layout: Layout, result: Any) -> Any:
        """Return results on the layout of this rank's tokens as shards; raise for all others."""
        if isinstance(result, list | tuple):
            return type(result)([self._restore(name, layout, x) for x in result])
        if not isinstance(result, Array) or result.layout is not self.local_layout:
            check_whole(name, layout)
        return Array.from_layout(result.values, layout, result.ragged_dim)

    def _is_element_axis(self, x: Array, axis: Any) -> bool:
        """Return whether all axes are element axes."""
        axes = axis if isinstance(axis, tuple) else (axis,)
        return all(isinstance(a, int) and a % x.ndim not in (0, x.ragged_dim + 1) for a in axes)

    def _rope(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        layout, start = arrays["x"].layout, self.piece_starts
        if arrays.get("start") is not None:
            start = start + layout.xp.take(arrays["start"], self.piece_rows, axis=0)
        pieces = {key: self.on(self.piece_layout, x) for key, x in arrays.items()}
        result = operation.run({**pieces, "start": start}, options, kernel)
        return map_results(lambda x: Array.from_layout(x.values, layout, x.ragged_dim), result)

    def _loss(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Return this rank's part of the loss: the sum over ranks is the loss of the whole rows."""
        layout, reduction = next(iter(arrays.values())).layout, options["reduction"]
        local = {key: self.on(self.local_layout, x) for key, x in arrays.items()}
        if reduction == "mean":
            if arrays["class_weights"] is not None:
                raise ValueError(
                    "class_weights: expected None for reduction='mean' of a shard; use "
                    "reduction='sum', and divide by the sum of the weights over all ranks"
                )
            options = {**options, "reduction": "sum"}
        elif reduction == "row_mean":
            check_whole("reduction='row_mean'", layout)
        result = operation.run(local, options, kernel)
        if reduction == "sum":
            return result
        if reduction == "none":
            return self._restore(operation.name, layout, result)
        xp, targets = layout.xp, local["targets"].values
        loss = result[0] if isinstance(result, tuple) else result
        is_counted = targets != options["ignore_index"]
        mask = self.local_layout.token_mask
        is_counted = is_counted if mask is None else is_counted & mask
        counted = xp.sum(xp.astype(is_counted, loss.dtype))
        count = self.group.all_sum(counted)
        return map_results(lambda x: safe_divide(xp, x, count), result)

    def _attention(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Compute attention of the whole rows."""
        raise NotImplementedError

    def _attention_outside_of_graphs(self, *arguments: Any) -> Any:
        return self.group.outside_of_graphs(self._attention, *arguments)

    def _softmax_of_rows(self, name: str, x: Array) -> Any:
        """Compute the log-sum-exp of whole rows, and the softmax from it."""
        xp, local = x.layout.xp, self.on(self.local_layout, x)
        wide = accumulation_dtype(xp, x.dtype)
        local = local.with_values(xp.astype(local.values, wide, copy=False))
        parts = self.group.all_gather(logsumexp(local))
        largest = xp.max(self.group.without_gradient(parts), axis=0)
        largest = xp.where(largest == -math.inf, 0.0, largest)
        total = xp.sum(xp.exp(parts - largest), axis=0)
        is_empty = total == 0
        log_sum = largest + xp.log(xp.where(is_empty, 1.0, total))
        log_sum = xp.where(is_empty, -math.inf, log_sum)
        if name == "logsumexp":
            return xp.astype(log_sum, x.dtype, copy=False)
        rows = moveaxis(xp, self.local_layout.per_token(log_sum), 0, x.ragged_dim)
        values = local.values - rows
        values = values if name == "log_softmax" else xp.exp(values)
        return x.with_values(xp.astype(values, x.dtype, copy=False))

    def _reduce_rows(
        self, name: str, x: Array, *, axis: Any = None, keepdims: bool = False, **options: Any
    ) -> Any:
        """Reduce whole rows: the results of all ranks are combined, on each rank."""
        axes = axis if isinstance(axis, tuple) else (axis,)
        axes = tuple([a % x.ndim for a in axes if isinstance(a, int)])
        if name not in MERGES or 0 in axes or x.ragged_dim + 1 not in axes:
            check_whole(f"{name} along axis {axis}", x.layout)
        xp, functions, local = x.layout.xp, x.__array_namespace__(), self.on(self.local_layout, x)
        dtype = options.get("dtype")
        if name in ("sum", "prod", "mean") and xp.isdtype(x.dtype, "real floating"):
            # Half precision is rounded once, after the last addition.
            local = local.with_values(
                xp.astype(local.values, accumulation_dtype(xp, x.dtype), copy=False)
            )
            dtype = x.dtype if dtype is None else dtype
        elif name == "mean":
            raise TypeError(
                f"mean: expected a real floating-point dtype for a shard, got {x.dtype}; convert it with astype"
            )
        own_name = "sum" if name == "mean" else name
        part = getattr(functions, own_name)(local, axis=axis, keepdims=keepdims, **options)
        is_bool = xp.isdtype(part.dtype, "bool")
        parts = self.group.all_gather(xp.astype(part, xp.uint8) if is_bool else part)
        merged = getattr(xp, MERGES[name])(xp.astype(parts, xp.bool) if is_bool else parts, axis=0)
        if name == "mean":
            per_token = math.prod([x.values.shape[a - 1] for a in axes if a != x.ragged_dim + 1])
            count = xp.astype(self.whole.lengths, merged.dtype) * per_token
            merged = merged / append_axes(xp, count, merged.ndim)
        return merged if dtype is None else xp.astype(merged, dtype, copy=False)


def _check_element_key(x: Array, key: Any) -> None:
    """Raise unless an index selects entries of element axes only."""
    full = slice(None)
    if isinstance(key, tuple) and key and x.ragged_dim == 0:
        if key[0] is Ellipsis and len(key) - 1 <= x.ndim - 2:
            return
        if len(key) >= 2 and all(isinstance(k, slice) and k == full for k in key[:2]):
            return
    check_whole("index of rows or tokens", x.layout)


def map_results(function: Callable[[Any], Any], results: Any) -> Any:
    """Apply a function to the one result of an operation, or to each result of a tuple."""
    if isinstance(results, tuple):
        return tuple([function(x) for x in results])
    return function(results)


#: Operation in which tokens depend on each other -> the method that runs it on shards.
RUN = {
    "attention": "_attention_outside_of_graphs",
    "cross_entropy": "_loss",
    "linear_cross_entropy": "_loss",
    "rope": "_rope",
}
