"""Shards of JAX arrays for `jax.shard_map`, whose shapes must be equal on all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..array import Array
from ..checks import check_whole
from ..layout import SHARD_LAYOUTS, Layout, RowCut
from ..ops.attention import AttentionCall
from .operations import ShardOperations, map_results
from .pieces import Pieces


class Group:
    """The devices of a mesh of one axis.

    Attributes
    ----------
    group
        The mesh.
    size
        Number of devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"mesh: expected one axis, got {mesh.axis_names}; make a Mesh of the devices of one axis"
            )
        self.group, self.size = mesh, int(mesh.size)
        self._axis = mesh.axis_names[0]

    @property
    def rank(self) -> Any:
        """Index of this device, inside of `jax.shard_map`."""
        return jax.lax.axis_index(self._axis)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of arrays whose first axis has the tokens of all devices."""
        return NamedSharding(self.group, PartitionSpec(self._axis))

    def all_gather(self, x: Any) -> Any:
        """Return (size, ...) the equally shaped arrays of all devices."""
        return jax.lax.all_gather(x, self._axis)

    def all_sum(self, x: Any) -> Any:
        """Return the sum over all devices, without gradient."""
        return jax.lax.psum(jax.lax.stop_gradient(x), self._axis)

    def outside_of_graphs(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, which JAX traces."""
        return function(*arguments)

    def without_gradient(self, x: Any) -> Any:
        """Return the array as a constant."""
        return jax.lax.stop_gradient(x)


class ShardCut(RowCut):
    """The pieces of the rows of a batch that each device holds, in host memory.

    Shapes are equal on all devices. Each has `capacity` tokens, and tokens after its last piece
    belong to no row. Each has the same number of pieces, and its last pieces may be empty. `layout` is
    the layout of shards.
    """

    def __init__(self, whole: Layout, group: Group, pieces: Pieces) -> None:
        self.group, self.pieces = group, pieces
        self.lengths = np.diff(whole.read_offsets()).astype(np.int64)
        self.whole = Layout.from_host_lengths(whole.backend, self.lengths, like=whole.offsets)
        self.is_cut = bool((pieces.lengths != self.lengths[pieces.rows]).any())
        ranks = range(group.size)
        own = [pieces.select(pieces.ranks == rank) for rank in ranks]
        tokens = [int(x.lengths.sum()) for x in own]
        self.capacity, num_pieces = max(1, *tokens), max(1, *(x.rows.size for x in own))
        shape = group.size, num_pieces
        # (devices, pieces) lengths, first positions and rows of the pieces.
        self.piece_lengths, self.starts, self.rows = (np.zeros(shape, np.int64) for _ in range(3))
        self.row_lengths = np.zeros((group.size, self.lengths.size), np.int64)
        # (tokens,) index of each token of the whole rows among the tokens of all devices.
        self.slots = np.zeros(self.whole.total, np.int64)
        first = np.cumsum(self.lengths) - self.lengths
        for rank, x in enumerate(own):
            count = x.rows.size
            self.piece_lengths[rank, :count] = x.lengths
            self.starts[rank, :count], self.rows[rank, :count] = x.starts, x.rows
            np.add.at(self.row_lengths[rank], x.rows, x.lengths)
            before = np.cumsum(x.lengths) - x.lengths
            index = np.repeat(first[x.rows] + x.starts - before, x.lengths) + np.arange(
                tokens[rank]
            )
            self.slots[index] = rank * self.capacity + np.arange(tokens[rank])
        # Shards have offsets of their own, because `SHARD_LAYOUTS` recognizes shards by their offsets.
        self._offsets = Layout.from_host_lengths(
            whole.backend, self.lengths, like=whole.offsets
        ).offsets
        self.layout = SHARD_LAYOUTS[id(self._offsets)] = self.layout_with(self)

    def layout_with(self, cut: RowCut) -> Layout:
        """Return a layout of shards with a cut of these rows."""
        whole = self.whole
        layout = Layout(whole.backend, self._offsets, self.capacity, whole.max_length)
        layout.cut = cut
        return layout

    def has_tokens(self, layout: Layout, count: int) -> bool:
        """Return whether an array has the tokens of one device, or the tokens of all devices."""
        return count in (self.capacity, self.group.size * self.capacity)

    def __eq__(self, other: object) -> bool:
        """Return whether both cuts divide the same rows over the same devices in the same way."""
        if isinstance(other, LocalCut):
            other = other.outer
        return self is other or (
            isinstance(other, ShardCut)
            and self.group.group == other.group.group
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.pieces.stops, other.pieces.stops)
            and np.array_equal(self.pieces.ranks, other.pieces.ranks)
        )

    def token_index(self) -> np.ndarray:
        """Return the index in the whole rows of each token of all devices; 0 for tokens of no row."""
        index = np.zeros(self.group.size * self.capacity, np.int64)
        index[self.slots] = np.arange(self.slots.size)
        return index

    @property
    def positions(self) -> Any:
        """(capacity,) position of each token of this device in its whole row."""
        return LocalCut(self).positions

    def run(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Run an operation whose first array is a shard; see `RowCut`."""
        local = self._local_cut(arrays.values())
        return local.adopt(local.run(operation, arrays, options, kernel))

    def call(
        self, kind: str, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a function of the standard on shards; see `RowCut`."""
        local = self._local_cut(args[0] if isinstance(args[0], list | tuple) else args)
        return local.adopt(local.call(kind, name, function, args, kwargs))

    def _local_cut(self, operands: Iterable[Any]) -> LocalCut:
        """Return the cut of an operand that an operation of this trace made, or a new cut."""
        for x in operands:
            if isinstance(x, Array) and isinstance(x.layout.cut, LocalCut):
                return x.layout.cut
        return LocalCut(self)

    def unshard(self, values: Any) -> Any:
        """Return the values of the whole rows, inside and outside of `jax.shard_map`."""
        if values.shape[0] != self.group.size * self.capacity:
            values = self.group.all_gather(values).reshape(-1, *values.shape[1:])
        else:
            values = jax.device_put(values, NamedSharding(self.group.group, PartitionSpec()))
        return jnp.take(values, jnp.asarray(self.slots), axis=0)


class LocalCut(ShardOperations):
    """The pieces of the device on which a traced function runs.

    The results of operations keep this cut, so it is made once per trace instead of once per operation.
    A pytree keeps the layout of `outer` instead, because the index of the device belongs to one trace.
    """

    def __init__(self, outer: ShardCut) -> None:
        self.outer, self.whole, self.group = outer, outer.whole, outer.group
        self.local_layout = self._layout(outer.row_lengths)
        self.piece_layout = self._layout(outer.piece_lengths)
        self.piece_starts, self.piece_rows = self._own(outer.starts), self._own(outer.rows)
        self.layout = outer.layout_with(self)

    def __eq__(self, other: object) -> bool:
        """Return whether both cuts divide the same rows over the same devices in the same way."""
        return bool(self.outer == other)

    def static_layout(self, layout: Layout) -> Layout:
        """Return the layout of `outer`, which contains no tracers; see `RowCut`."""
        return self.outer.layout

    def adopt(self, results: Any) -> Any:
        """Return the results of an operation, with this cut in the layouts of shards."""
        if isinstance(results, list | tuple):
            return type(results)([self.adopt(x) for x in results])
        if not isinstance(results, Array) or results.layout.cut is None:
            return results
        return Array.from_layout(results.values, self.layout, results.ragged_dim)

    def unshard(self, values: Any) -> Any:
        """Return the values of the whole rows."""
        return self.outer.unshard(values)

    def _own(self, table: np.ndarray) -> Any:
        """Return the row of a table that belongs to this device."""
        return jnp.asarray(table, self.whole.offsets.dtype)[self.group.rank]

    def _layout(self, lengths: np.ndarray, total: int | None = None) -> Layout:
        """Return the layout whose lengths are this device's row of a table."""
        ends = np.cumsum(lengths, axis=1)
        offsets = self._own(np.concatenate([np.zeros_like(ends[:, :1]), ends], axis=1))
        longest = int(lengths.max(initial=0))
        total = self.outer.capacity if total is None else total
        return Layout(self.whole.backend, offsets, total, longest)

    def _attention(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        layout = arrays["q"].layout
        if options["dropout"]:
            check_whole("dropout", layout)
        local = {key: self.on(self.local_layout, x) for key, x in arrays.items()}
        call = AttentionCall(**local, **options)
        left, right = call.window
        if right not in (0, None) or (left is not None and right is None):
            raise ValueError(
                f"window: expected no bound after the query, or causal=True, for shards of JAX, got {call.window}; "
                "use scree.distributed.unshard first"
            )
        if call.alibi_slopes is not None:
            raise ValueError("alibi_slopes: expected None for shards of JAX, got slopes")
        key_lengths, index = self._keys(left, right)
        keys = self._layout(key_lengths, index.shape[1])
        own = self._own(index)
        k, v = (
            jnp.take(self.group.all_gather(x.values).reshape(-1, *x.values.shape[1:]), own, axis=0)
            for x in (call.k, call.v)
        )
        parts = {
            "q": Array.from_layout(call.q.values, self.piece_layout),
            "k": Array.from_layout(k, keys),
            "v": Array.from_layout(v, keys),
            "alibi_slopes": None,
        }
        result = operation.run(parts, options, kernel)
        return map_results(lambda x: Array.from_layout(x.values, layout), result)

    def _keys(self, left: int | None, right: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys that the pieces of each device see.

        Returns
        -------
        lengths
            (devices, pieces) number of keys of each piece.
        index
            (devices, keys) index of each key among the tokens of all devices. The last keys of a
            device may belong to no piece.
        """
        outer = self.outer
        first_of_row = np.cumsum(outer.lengths) - outer.lengths
        lengths = np.zeros_like(outer.piece_lengths)
        indices: list[list[np.ndarray]] = []
        for rank in range(self.group.size):
            indices.append([np.zeros(0, np.int64)])
            for i, length in enumerate(outer.piece_lengths[rank].tolist()):
                if not length:
                    continue
                row, start = int(outer.rows[rank, i]), int(outer.starts[rank, i])
                low = 0 if left is None else max(0, start - left)
                high = start + length if right == 0 else int(outer.lengths[row])
                lengths[rank, i] = high - low
                first = int(first_of_row[row])
                indices[rank].append(outer.slots[first + low : first + high])
        joined = [np.concatenate(parts) for parts in indices]
        index = np.zeros((self.group.size, max(1, *(x.size for x in joined))), np.int64)
        for rank, x in enumerate(joined):
            index[rank, : x.size] = x
        return lengths, index


def shard_values(values: Any, cut: ShardCut) -> Any:
    """Return the tokens of each device, sharded over the mesh along the first axis."""
    taken = jnp.take(jnp.asarray(values), jnp.asarray(cut.token_index()), axis=0)
    return jax.device_put(taken, cut.group.sharding)
