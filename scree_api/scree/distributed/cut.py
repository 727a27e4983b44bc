"""The cut of a batch over ranks, and attention of shards: by keys or heads of other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..array import Array
from ..checks import check_whole
from ..layout import SHARD_LAYOUTS, Layout
from ..ops.attention import AttentionCall
from ..ops.merge_attention import merge_attention
from .exchange import HeadCounts, is_faster_by_heads
from .operations import ShardOperations
from .pieces import (
    GroupPlan,
    KeyGroup,
    Pieces,
    RemotePlan,
    find_token_runs,
    plan_keys,
    plan_remote_keys,
)

if TYPE_CHECKING:
    from .torch import Group, TokenRuns


class Cut(ShardOperations):
    """The pieces of the rows of a batch that each rank holds.

    Attributes
    ----------
    pieces
        The pieces of all ranks.
    local_pieces
        The pieces of this rank.
    exchange
        "keys", "heads" or None; see `shard`.

    `ShardOperations` has the layouts.
    """

    def __init__(self, whole: Layout, group: Group, pieces: Pieces, exchange: str | None) -> None:
        self.group, self.pieces, self.exchange = group, pieces, exchange
        lib, like = whole.backend, whole.offsets
        self._lengths = np.diff(whole.read_offsets()).astype(np.int64)
        self.whole = Layout.from_host_lengths(lib, self._lengths, like=like)
        self.local_pieces = pieces.select(pieces.ranks == group.rank)
        row_lengths = np.zeros(whole.num_rows, np.int64)
        np.add.at(row_lengths, self.local_pieces.rows, self.local_pieces.lengths)
        self.local_layout = Layout.from_host_lengths(lib, row_lengths, like=like)
        self.piece_layout = Layout.from_host_lengths(lib, self.local_pieces.lengths, like=like)
        self.piece_starts = self.local_layout.to_index(self.local_pieces.starts)
        self.piece_rows = self.local_layout.to_index(self.local_pieces.rows)
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

    def make_layout(self) -> Layout:
        """Return the layout of shards: the layout of this rank's tokens, with the cut."""
        local = self.local_layout
        # A copy, because `SHARD_LAYOUTS` recognizes shards by their offsets: arrays on `local_layout` are
        # no shards.
        offsets = local.xp.asarray(local.offsets, copy=True)
        layout = Layout(local.backend, offsets, local.total, local.max_length, local.host_offsets)
        layout.cut = self
        SHARD_LAYOUTS[id(offsets)] = layout
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

    def _attention(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        layout, xp = arrays["q"].layout, arrays["q"].layout.xp
        if options["dropout"]:
            check_whole("dropout", layout)
        local = {key: self.on(self.local_layout, x) for key, x in arrays.items()}
        call = AttentionCall(**local, **options)
        if not self.is_cut:
            return self._restore("attention", layout, operation.run(local, options, kernel))
        if self.exchanges_heads(call):
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
            slopes = xp.take(slopes, self.piece_rows, axis=0)
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
        local = self.local_layout if plan.has_rows else self.piece_layout
        parts = _Parts(operation, options, kernel, local, queries, keys, plan.window)
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
            lib, like = self.local_layout.backend, self.local_layout.offsets
            queries, keys = (
                Layout.from_host_lengths(lib, x, like=like)
                for x in (plan.query_lengths, plan.key_lengths)
            )
            return plan, queries, keys

        return self.local_layout.cached(("remote keys", left, right), make)

    def exchanges_heads(self, call: AttentionCall) -> bool:
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
        dims, itemsize = call.head_dim + int(call.v.values.shape[2]), call.q.values.itemsize
        counts = HeadCounts(heads, kv_heads, dims, itemsize)
        window, has_slopes = call.window, call.alibi_slopes is not None

        def choose() -> bool:
            is_cut = np.ones(self._lengths.size, bool)
            is_whole = self.pieces.lengths == self._lengths[self.pieces.rows]
            is_cut[self.pieces.rows[is_whole]] = False
            overlaps = not has_slopes and self._remote_plan(*window) is not None
            return is_faster_by_heads(self._lengths, is_cut, size, counts, window, overlaps)

        key = "exchanges heads", counts, window, has_slopes
        return bool(self.local_layout.cached(key, choose))

    def _attention_of_heads(
        self,
        operation: Any,
        call: AttentionCall,
        layout: Layout,
        options: dict[str, Any],
        kernel: str | None,
    ) -> Any:
        """Compute attention of whole rows for a part of the heads (Ulysses)."""
        group, whole = self.group, self.whole
        runs: TokenRuns = self.local_layout.cached(
            "token runs", lambda: find_token_runs(self.pieces, self._lengths, group.size)
        )
        if call.alibi_slopes is None:
            rows = _Parts(operation, options, kernel, whole, whole, whole, (None, None))
            out, lse = group.attend_to_heads(
                call.q.values, call.k.values, call.v.values, runs, rows, call.return_lse
            )
            result = Array.from_layout(out, layout)
            return (result, Array.from_layout(lse, layout)) if call.return_lse else result
        q, k, v = (
            Array.from_layout(group.tokens_of_all_ranks(x.values, runs), whole)
            for x in (call.q, call.k, call.v)
        )
        heads = call.num_heads // group.size
        slopes = call.alibi_slopes[..., group.rank * heads : (group.rank + 1) * heads]
        result = operation.run({"q": q, "k": k, "v": v, "alibi_slopes": slopes}, options, kernel)
        results = [x.values for x in (result if call.return_lse else (result,))]
        shards = [Array.from_layout(x, layout) for x in group.heads_of_all_ranks(results, runs)]
        return tuple(shards) if call.return_lse else shards[0]

    def _key_plan(self, left: int | None, right: int | None) -> tuple[GroupPlan, list[QueryGroup]]:
        def make() -> tuple[GroupPlan, list[QueryGroup]]:
            plan = plan_keys(
                self.pieces, self._lengths, self.group.rank, self.group.size, (left, right)
            )
            groups = [self._query_group(group, left, right) for group in plan.groups]
            return plan, groups

        return self.local_layout.cached(("keys", left, right), make)

    def _query_group(self, group: KeyGroup, left: int | None, right: int | None) -> QueryGroup:
        lib, like, lengths = (
            self.local_layout.backend,
            self.local_layout.offsets,
            self.local_pieces.lengths,
        )
        keys = Layout.from_host_lengths(lib, group.key_lengths, like=like)
        if group.pieces.size == lengths.size:
            queries, order = self.piece_layout, None
        else:
            starts = np.cumsum(lengths) - lengths
            tokens = [starts[p] + np.arange(lengths[p]) for p in group.pieces.tolist()]
            queries = Layout.from_host_lengths(lib, lengths[group.pieces], like=like)
            order = self.local_layout.to_index(np.concatenate(tokens))
        window = (
            None if left is None else left + group.shift,
            None if right is None else right - group.shift,
        )
        return QueryGroup(queries, keys, order, group.shift, window)


class _Parts(NamedTuple):
    """Attention to the keys of this rank, and to the keys of other ranks; implements `torch.Parts`.

    Attributes
    ----------
    operation, options, kernel
        The attention operation, its options, and the provider that must run it or None.
    local
        Layout of the tokens of this rank, or of the whole rows if the ranks exchange heads.
    queries, keys
        Layouts of the queries that see keys of other ranks, and of these keys.
    window
        The window between `queries` and `keys`.
    """

    operation: Any
    options: dict[str, Any]
    kernel: str | None
    local: Layout
    queries: Layout
    keys: Layout
    window: tuple[int | None, int | None]

    def _call(
        self, q: Any, k: Any, v: Any, is_local: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays and the options of one part."""
        layouts = (self.local, self.local) if is_local else (self.queries, self.keys)
        arrays = {
            "q": Array.from_layout(q, layouts[0]),
            "k": Array.from_layout(k, layouts[1]),
            "v": Array.from_layout(v, layouts[1]),
            "alibi_slopes": None,
        }
        options = {**self.options, "return_lse": True}
        return arrays, options if is_local else {**options, "causal": False, "window": self.window}

    def attend(self, q: Any, k: Any, v: Any, is_local: bool) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp of a part."""
        arrays, options = self._call(q, k, v, is_local)
        out, lse = self.operation.run(arrays, options, self.kernel)
        return out.values, lse.values

    def merge(self, outputs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp for all keys."""
        return merge_attention(outputs, lses)

    def gradients(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, is_local: bool
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v of a part."""
        from ..providers.torch_attention_gradient import attention_gradient

        arrays, options = self._call(q, k, v, is_local)
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
