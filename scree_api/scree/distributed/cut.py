"""The cut of a batch over ranks: operations on shards.

An operation on a shard runs on an array of this rank's tokens without the cut, and the result gets
the cut again. This is correct for operations in which tokens do not depend on each other. Attention,
rope, losses and reductions of rows have implementations here. All other operations raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..array import Array
from ..broadcasting import accumulation_dtype, moveaxis
from ..checks import check_whole
from ..layout import Layout, RowCut
from ..ops.attention import AttentionCall
from ..ops.merge_attention import merge_attention
from ..ops.segment import append_axes, safe_divide
from ..ops.softmax import logsumexp
from .pieces import KeyGroup, KeyPlan, Pieces, RemotePlan, plan_keys, plan_remote_keys

if TYPE_CHECKING:
    from .torch import Group

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


class Cut(RowCut):
    """The pieces of the rows of a batch that each rank holds.

    Attributes
    ----------
    whole
        Layout of the whole rows.
    plain
        Layout of this rank's tokens: row i is the part of row i that this rank holds.
    piece_layout
        Layout of the same tokens in which each piece is a row.
    group
        The ranks.
    pieces
        The pieces of all ranks.
    own
        The pieces of this rank.
    exchange
        "keys", "heads" or None; see `shard`.
    """

    def __init__(self, whole: Layout, group: Group, pieces: Pieces, exchange: str | None) -> None:
        self.group, self.pieces, self.exchange = group, pieces, exchange
        lib, like = whole.backend, whole.offsets
        self._lengths = np.diff(whole.read_offsets()).astype(np.int64)
        self.whole = Layout.from_host_lengths(lib, self._lengths, like=like)
        self.own = pieces.select(pieces.ranks == group.rank)
        row_lengths = np.zeros(whole.num_rows, np.int64)
        np.add.at(row_lengths, self.own.rows, self.own.lengths)
        self.plain = Layout.from_host_lengths(lib, row_lengths, like=like)
        self.piece_layout = Layout.from_host_lengths(lib, self.own.lengths, like=like)
        # (pieces,) position of the first token of each piece of this rank, and its row.
        self._starts = self.plain.to_index(self.own.starts)
        self._rows = self.plain.to_index(self.own.rows)
        self.is_cut = bool((pieces.lengths != self._lengths[pieces.rows]).any())

    def __eq__(self, other: object) -> bool:
        """Return whether both cuts divide the same rows over the same ranks in the same way."""
        if self is other or not isinstance(other, Cut):
            return self is other
        return (
            self.group.group is other.group.group
            and self.exchange == other.exchange
            and np.array_equal(self._lengths, other._lengths)
            and np.array_equal(self.pieces.stops, other.pieces.stops)
            and np.array_equal(self.pieces.ranks, other.pieces.ranks)
        )

    __hash__ = None  # type: ignore[assignment]

    def make_layout(self) -> Layout:
        """Return the layout of shards: the layout of this rank's tokens, with the cut."""
        plain = self.plain
        layout = Layout(
            plain.backend, plain.offsets, plain.total, plain.max_length, plain.host_offsets
        )
        layout.cut = self
        return layout

    def whole_index(self, rank: int) -> np.ndarray:
        """Return the index of each token of a rank among the tokens of the whole rows."""
        pieces = self.pieces.select(self.pieces.ranks == rank)
        host = self.whole.read_offsets().astype(np.int64)
        before = np.cumsum(pieces.lengths) - pieces.lengths
        first = host[pieces.rows] + pieces.starts - before
        index: np.ndarray = np.repeat(first, pieces.lengths)
        return index + np.arange(index.size)

    def gathered_index(self) -> tuple[int, Any]:
        """Return how to find the tokens of the whole rows among the gathered tokens of all ranks.

        Returns
        -------
        longest
            The largest number of tokens on a rank, to which the tokens of each rank are padded.
        index
            (total,) index of each token of the whole rows among the padded tokens of all ranks.
        """
        indices = [self.whole_index(rank) for rank in range(self.group.size)]
        longest = max(index.size for index in indices)
        slots = np.zeros(self.whole.total, np.int64)
        for rank, index in enumerate(indices):
            slots[index] = rank * longest + np.arange(index.size)
        return longest, self.whole.to_index(slots, longest * self.group.size)

    @property
    def positions(self) -> Any:
        """(total,) position of each token of this rank in its whole row."""
        layout = self.piece_layout
        return self.plain.cached(
            "global positions", lambda: layout.positions + layout.per_token(self._starts)
        )

    def received_tokens(self, left: int | None, right: int | None) -> int:
        """Return how many keys this rank receives for `attention` under a window."""
        if not self.is_cut:
            return 0
        remote = self._remote_plan(left, right)
        plan = self._key_plan(left, right)[0] if remote is None else remote[0]
        return sum(plan.received)

    # Calls ------------------------------------------------------------------------------------------
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
        plain = {key: self.on(self.plain, x) for key, x in arrays.items()}
        return self._restore(name, first.layout, operation.run(plain, options, kernel))

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
        plain = [self.on(self.plain, x) for x in args]
        named = {key: self.on(self.plain, x) for key, x in kwargs.items()}
        return self._restore(name, first.layout, function(*plain, **named))

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
        if not isinstance(result, Array) or result.layout is not self.plain:
            check_whole(name, layout)
        return Array.from_layout(result.values, layout, result.ragged_dim)

    def _is_element_axis(self, x: Array, axis: Any) -> bool:
        """Return whether all axes are element axes."""
        axes = axis if isinstance(axis, tuple) else (axis,)
        return all(isinstance(a, int) and a % x.ndim not in (0, x.ragged_dim + 1) for a in axes)

    # Operations on whole rows -------------------------------------------------------------------------
    def _rope(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        layout, start = arrays["x"].layout, self._starts
        if arrays.get("start") is not None:
            start = start + layout.xp.take(arrays["start"], self._rows, axis=0)
        pieces = {key: self.on(self.piece_layout, x) for key, x in arrays.items()}
        result = operation.run({**pieces, "start": start}, options, kernel)
        is_pair = isinstance(result, tuple)
        shards = [
            Array.from_layout(x.values, layout, x.ragged_dim)
            for x in (result if is_pair else [result])
        ]
        return tuple(shards) if is_pair else shards[0]

    def _loss(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Return this rank's part of the loss: the sum over ranks is the loss of the whole rows."""
        layout, reduction = next(iter(arrays.values())).layout, options["reduction"]
        plain = {key: self.on(self.plain, x) for key, x in arrays.items()}
        if reduction == "mean":
            if arrays["class_weights"] is not None:
                raise ValueError(
                    "class_weights: expected None for reduction='mean' of a shard; use "
                    "reduction='sum', and divide by the sum of the weights over all ranks"
                )
            options = {**options, "reduction": "sum"}
        elif reduction == "row_mean":
            check_whole("reduction='row_mean'", layout)
        result = operation.run(plain, options, kernel)
        if reduction == "sum":
            return result
        if reduction == "none":
            return self._restore(operation.name, layout, result)
        xp, targets = layout.xp, plain["targets"].values
        is_pair = isinstance(result, tuple)
        losses = result if is_pair else (result,)
        is_counted = targets != options["ignore_index"]
        mask = self.plain.token_mask
        is_counted = is_counted if mask is None else is_counted & mask
        counted = xp.sum(xp.astype(is_counted, losses[0].dtype))
        count = self.group.all_sum(counted)
        means = [safe_divide(xp, x, count) for x in losses]
        return tuple(means) if is_pair else means[0]

    def _attention_outside_of_graphs(self, *arguments: Any) -> Any:
        return self.group.outside_of_graphs(self._attention, *arguments)

    def _attention(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        layout, xp = arrays["q"].layout, arrays["q"].layout.xp
        if options["dropout"]:
            check_whole("dropout", layout)
        plain = {key: self.on(self.plain, x) for key, x in arrays.items()}
        call = AttentionCall(**plain, **options)
        if not self.is_cut:
            return self._restore("attention", layout, operation.run(plain, options, kernel))
        if self._exchanges_heads(call):
            return self._attention_of_heads(operation, call, layout, options, kernel)
        remote = None if call.alibi_slopes is not None else self._remote_plan(*call.window)
        if remote is not None:
            return self._attention_to_parts(operation, call, layout, options, kernel, remote)
        slopes = call.alibi_slopes
        if slopes is not None and not call.causal:
            raise ValueError(
                "alibi_slopes: expected causal=True for shards, got causal=False; use shard(..., exchange='heads')"
            )
        if slopes is not None and len(slopes.shape) == 2:
            slopes = xp.take(slopes, self._rows, axis=0)
        plan, groups = self._key_plan(*call.window)
        k, v = self.group.exchange(call.k.values, call.v.values, plan)
        results, start = [], 0
        for group in groups:
            end = start + group.keys.total
            q = (
                call.q.values
                if group.order is None
                else xp.take(call.q.values, group.order, axis=0)
            )
            parts = {
                "q": Array.from_layout(q, group.queries),
                "k": Array.from_layout(k[start:end], group.keys),
                "v": Array.from_layout(v[start:end], group.keys),
                "alibi_slopes": slopes,
            }
            shifted = {**options, "window": group.window} if group.shift else options
            result = operation.run(parts, shifted, kernel)
            results.append(result if isinstance(result, tuple) else (result,))
            start = end
        outputs = [x.values for x in results[0]]
        if len(groups) > 1:
            outputs = [xp.concat([x.values for x in parts]) for parts in zip(*results, strict=True)]
            inverse = xp.argsort(xp.concat([group.order for group in groups]))
            outputs = [xp.take(x, inverse, axis=0) for x in outputs]
        shards = [Array.from_layout(x, layout) for x in outputs]
        return tuple(shards) if call.return_lse else shards[0]

    def _attention_to_parts(
        self,
        operation: Any,
        call: AttentionCall,
        layout: Layout,
        options: dict[str, Any],
        kernel: str | None,
        remote: tuple[RemotePlan, Layout, Layout],
    ) -> Any:
        """Compute attention to the keys of this rank while the keys of other ranks arrive."""
        plan, queries, keys = remote
        own = self.plain if plan.has_rows else self.piece_layout
        parts = _Parts(operation, options, kernel, own, queries, keys, plan.window)
        out, lse = self.group.attend_to_parts(
            call.q.values, call.k.values, call.v.values, plan, parts
        )
        out, lse = Array.from_layout(out, layout), Array.from_layout(lse, layout)
        return (out, lse) if call.return_lse else out

    def _remote_plan(
        self, left: int | None, right: int | None
    ) -> tuple[RemotePlan, Layout, Layout] | None:
        """Return the plan, the layout of its queries, and the layout of the keys of other ranks.

        None where `plan_remote_keys` has no plan.
        """

        def make() -> tuple[RemotePlan, Layout, Layout] | None:
            plan = plan_remote_keys(
                self.pieces, self._lengths, self.group.rank, self.group.size, (left, right)
            )
            if plan is None:
                return None
            lib, like = self.plain.backend, self.plain.offsets
            queries, keys = (
                Layout.from_host_lengths(lib, x, like=like)
                for x in (plan.query_lengths, plan.key_lengths)
            )
            return plan, queries, keys

        return self.plain.cached(("remote keys", left, right), make)

    def _exchanges_heads(self, call: AttentionCall) -> bool:
        """Return whether all ranks exchange heads for tokens, instead of sending keys."""
        size, heads, kv_heads = self.group.size, call.num_heads, call.num_kv_heads
        fits = kv_heads % size == 0
        if self.exchange == "heads" and not fits:
            raise ValueError(
                f"exchange: expected the number of ranks, {size}, to divide the number of key heads for 'heads', "
                f"got {kv_heads}; use exchange='keys'"
            )
        if self.exchange is not None or not fits:
            return self.exchange == "heads"
        # A rank receives at most the other tokens of each cut row, or the windows of its two chunks.
        left, right = call.window
        is_cut = np.ones(self._lengths.size, bool)
        is_cut[self.pieces.rows[self.pieces.lengths == self._lengths[self.pieces.rows]]] = False
        tokens = self._lengths[is_cut] * (size - 1) / size
        if left is not None and right is not None:
            tokens = np.minimum(tokens, 2 * (left + right))
        dim, value_dim = call.head_dim, int(call.v.values.shape[2])
        sent_as_heads = self._lengths.sum() / size * (size - 1) / size * (heads + kv_heads)
        return bool(sent_as_heads * (dim + value_dim) < tokens.sum() * kv_heads * (dim + value_dim))

    def _attention_of_heads(
        self,
        operation: Any,
        call: AttentionCall,
        layout: Layout,
        options: dict[str, Any],
        kernel: str | None,
    ) -> Any:
        """Compute attention of whole rows for a part of the heads (Ulysses)."""
        xp, group, whole = layout.xp, self.group, self.whole
        counts, order, inverse = self._token_order()
        q, k, v = (
            Array.from_layout(
                xp.take(group.tokens_of_all_ranks(x.values, counts), order, axis=0), whole
            )
            for x in (call.q, call.k, call.v)
        )
        slopes = call.alibi_slopes
        if slopes is not None:
            heads = call.num_heads // group.size
            slopes = slopes[..., group.rank * heads : (group.rank + 1) * heads]
        result = operation.run({"q": q, "k": k, "v": v, "alibi_slopes": slopes}, options, kernel)
        shards = [
            Array.from_layout(
                group.heads_of_all_ranks(xp.take(x.values, inverse, axis=0), counts), layout
            )
            for x in (result if call.return_lse else [result])
        ]
        return tuple(shards) if call.return_lse else shards[0]

    def _token_order(self) -> tuple[list[int], Any, Any]:
        """Return the number of tokens per rank, and two permutations of the tokens of the batch.

        The first permutation takes tokens in the order of the ranks, and returns whole rows. The
        second is its inverse.
        """

        def make() -> tuple[list[int], Any, Any]:
            indices = [self.whole_index(rank) for rank in range(self.group.size)]
            inverse = np.concatenate(indices)
            order = self.whole.to_index(np.argsort(inverse))
            return [index.size for index in indices], order, self.whole.to_index(inverse)

        return self.plain.cached("token order", make)

    def _key_plan(self, left: int | None, right: int | None) -> tuple[KeyPlan, list[QueryGroup]]:
        def make() -> tuple[KeyPlan, list[QueryGroup]]:
            plan = plan_keys(
                self.pieces, self._lengths, self.group.rank, self.group.size, (left, right)
            )
            groups = [self._query_group(group, left, right) for group in plan.groups]
            return plan, groups

        return self.plain.cached(("keys", left, right), make)

    def _query_group(self, group: KeyGroup, left: int | None, right: int | None) -> QueryGroup:
        lib, like, lengths = self.plain.backend, self.plain.offsets, self.own.lengths
        keys = Layout.from_host_lengths(lib, group.key_lengths, like=like)
        if group.pieces.size == lengths.size:
            queries, order = self.piece_layout, None
        else:
            starts = np.cumsum(lengths) - lengths
            tokens = [starts[p] + np.arange(lengths[p]) for p in group.pieces.tolist()]
            queries = Layout.from_host_lengths(lib, lengths[group.pieces], like=like)
            order = self.plain.to_index(np.concatenate(tokens))
        window = (
            None if left is None else left + group.shift,
            None if right is None else right - group.shift,
        )
        return QueryGroup(queries, keys, order, group.shift, window)

    def _softmax_of_rows(self, name: str, x: Array) -> Any:
        """Compute the log-sum-exp of whole rows, and the softmax from it."""
        xp, plain = x.layout.xp, self.on(self.plain, x)
        wide = accumulation_dtype(xp, x.dtype)
        plain = plain.with_values(xp.astype(plain.values, wide, copy=False))
        parts = self.group.all_gather(logsumexp(plain))
        largest = xp.max(self.group.without_gradient(parts), axis=0)
        largest = xp.where(largest == -math.inf, 0.0, largest)
        total = xp.sum(xp.exp(parts - largest), axis=0)
        is_empty = total == 0
        log_sum = largest + xp.log(xp.where(is_empty, 1.0, total))
        log_sum = xp.where(is_empty, -math.inf, log_sum)
        if name == "logsumexp":
            return xp.astype(log_sum, x.dtype, copy=False)
        rows = moveaxis(xp, self.plain.per_token(log_sum), 0, x.ragged_dim)
        values = plain.values - rows
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
        xp, functions, local = x.layout.xp, x.__array_namespace__(), self.on(self.plain, x)
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


class _Parts(NamedTuple):
    """Attention to the keys of this rank, and to the keys of other ranks; implements `torch.Parts`.

    Attributes
    ----------
    operation, options, kernel
        The attention operation, its options, and the provider that must run it or None.
    own
        Layout of the tokens of this rank.
    queries, keys
        Layouts of the queries that see keys of other ranks, and of these keys.
    window
        The window between `queries` and `keys`.
    """

    operation: Any
    options: dict[str, Any]
    kernel: str | None
    own: Layout
    queries: Layout
    keys: Layout
    window: tuple[int | None, int | None]

    def _call(self, q: Any, k: Any, v: Any, is_own: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays and the options of one part."""
        layouts = (self.own, self.own) if is_own else (self.queries, self.keys)
        arrays = {
            "q": Array.from_layout(q, layouts[0]),
            "k": Array.from_layout(k, layouts[1]),
            "v": Array.from_layout(v, layouts[1]),
            "alibi_slopes": None,
        }
        options = {**self.options, "return_lse": True}
        return arrays, options if is_own else {**options, "causal": False, "window": self.window}

    def attend(self, q: Any, k: Any, v: Any, is_own: bool) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp of a part."""
        arrays, options = self._call(q, k, v, is_own)
        out, lse = self.operation.run(arrays, options, self.kernel)
        return out.values, lse.values

    def merge(self, outputs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp for all keys."""
        return merge_attention(outputs, lses)

    def gradients(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, is_own: bool
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v of a part."""
        from ..providers.torch_attention_gradient import attention_gradient

        arrays, options = self._call(q, k, v, is_own)
        return attention_gradient(AttentionCall(**arrays, **options), out, lse, dout, dlse)


class QueryGroup(NamedTuple):
    """A `KeyGroup` on the device.

    Attributes
    ----------
    queries, keys
        Layouts of the pieces and of their keys.
    order
        Index of each query among the tokens of the rank; None for all tokens in order.
    shift
        See `KeyGroup`.
    window
        The window relative to the last key of each piece, instead of the last query.
    """

    queries: Layout
    keys: Layout
    order: Any
    shift: int
    window: tuple[int | None, int | None]


def _check_element_key(x: Array, key: Any) -> None:
    """Raise unless an index selects entries of element axes only."""
    full = slice(None)
    if isinstance(key, tuple) and key and x.ragged_dim == 0:
        if key[0] is Ellipsis and len(key) - 1 <= x.ndim - 2:
            return
        if len(key) >= 2 and all(isinstance(k, slice) and k == full for k in key[:2]):
            return
    check_whole("index of rows or tokens", x.layout)


#: Operation in which tokens depend on each other -> the method that runs it on shards.
RUN = {
    "attention": "_attention_outside_of_graphs",
    "cross_entropy": "_loss",
    "linear_cross_entropy": "_loss",
    "rope": "_rope",
}
