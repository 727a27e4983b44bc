"""Context parallelism: divide the rows of a batch over ranks of PyTorch or devices of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array
from ..broadcasting import check_ragged, moveaxis
from ..checks import check_flag, check_number

__all__ = ["shard", "unshard"]


def shard(
    arr: Array,
    mesh: Any,
    *,
    cost: tuple[float, float] = (4096, 1),
    exchange: str | None = None,
    causal: bool = False,
) -> Array:
    """Return this rank's tokens of a batch that all ranks hold.

    Row i of the result is this rank's part of row i, which may be empty. Rows stay whole where that
    gives all ranks nearly equal costs. Otherwise one row or the longest rows are cut into chunks.
    Any lengths and any number of ranks are possible.

    Shard the token ids, the targets and all other arrays of a batch. Arrays on one layout are cut
    in the same way. Elementwise functions, norms, matrix products, `rope` (with the positions in the
    whole rows), losses, `attention` and reductions of rows take shards. All other operations raise
    `TypeError`. `attention` sends the keys and values that other ranks need, so all ranks must call
    it.

    The loss of a batch is the sum of the losses of all ranks, and gradients are of this sum.
    `cross_entropy` of a shard is this rank's part of the sum or mean. Reductions of rows return the
    result of the whole rows on each rank.

    Parameters
    ----------
    arr
        (n, None, ...) ragged array of any dtype, on PyTorch or JAX, equal on all ranks. On PyTorch
        the ragged axis may also be a later one. A tail is dropped.
    mesh
        `torch.distributed.device_mesh.DeviceMesh` of one dimension, such as ``mesh["cp"]``, or a
        process group. For JAX a `jax.sharding.Mesh` of one axis.
    cost
        Two numbers (a, b). A row of L tokens costs ``a * L + b * L**2``; see
        `scree.data.fit_cost`. ``(6 * width, 1)`` is close to the cost of a transformer with causal
        attention.
    exchange
        The tokens that `attention` sends. ``"keys"``: the keys and values that chunks on other ranks
        need. ``"heads"``, if the number of ranks divides the number of key heads: each rank computes
        whole rows for a part of the heads (Ulysses; Jacobs et al., 2023). By default the form that
        takes less time by a cost model, whose numbers were measured on H200 GPUs with NVLink. On JAX
        always ``"keys"``.
    causal
        Whether all attention to the batch has a causal mask. Results are the same. On two ranks a cut
        row may then have one chunk per rank, of different lengths, so that the ranks exchange fewer
        keys. Other attention would take longer on one rank. Arrays with another `causal` may have
        another cut. No effect on JAX and on batches of more than 1,024 nonempty rows.

    Returns
    -------
    Array
        (n, None, ...) shard, with the dtype of `arr`. On JAX the shards of all devices, for
        `jax.shard_map` with a `PartitionSpec` of the axis of the mesh.

    Raises
    ------
    TypeError
        If `arr` is no ragged array of PyTorch or JAX, is a shard, `mesh` is no mesh, or `causal` is no
        boolean.
    ValueError
        If the mesh has several dimensions, a cost is negative, or `exchange` is another string. On
        JAX also if the ragged axis is not the second one, or `exchange` is "heads".

    Notes
    -----
    The offsets are read once per layout. Second derivatives of `attention` and of reductions of
    shards are not supported. Under `torch.compile` the graph breaks at `attention`; call `shard`
    outside of compiled functions.

    On JAX all devices have the same number of tokens, the last of which may belong to no row. Shapes
    depend on the lengths alone, so `jax.jit` compiles once per layout. Operations take shards inside
    of `jax.shard_map` only. `attention` gathers the keys of all devices. It takes no `alibi_slopes`,
    and no window with a bound after the query.

    Examples
    --------
    >>> import scree, torch, torch.distributed as dist
    >>> from scree.distributed import shard, unshard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> arr = scree.from_lengths(torch.arange(5.0), [3, 2])
    >>> x = shard(arr, mesh)
    >>> unshard(x * 2).tolist()
    [[0.0, 2.0, 4.0], [6.0, 8.0]]
    >>> dist.destroy_process_group()
    """
    layout = check_ragged("arr", arr).layout
    if layout.backend.name not in ("jax", "torch"):
        raise TypeError(
            f"arr: expected a ragged array of torch or jax, got one of {layout.backend.name}; use arr.to_backend"
        )
    from .pieces import cut_rows

    if exchange not in (None, "keys", "heads"):
        raise ValueError(f"exchange: expected 'keys', 'heads' or None, got {exchange!r}")
    a, b = (check_number(f"cost[{i}]", x, low=0) for i, x in enumerate(cost))
    causal = check_flag("causal", causal)
    if layout.backend.name == "jax":
        return _shard_of_jax(arr, mesh, (a, b), exchange)
    from .cut import Cut
    from .torch import Group

    group = Group(mesh)

    def make() -> tuple[Any, Any]:
        lengths = np.diff(layout.read_offsets()).astype(np.int64)
        pieces = cut_rows(lengths, group.size, (a, b), causal)
        cut = Cut(layout, group, pieces, exchange)
        return cut.make_layout(), layout.to_index(cut.whole_index(group.rank))

    shard_layout, index = layout.cached(("shard", group.group, a, b, exchange, causal), make)
    values = layout.xp.take(arr.values, index, axis=arr.ragged_dim)
    return Array.from_layout(values, shard_layout, arr.ragged_dim)


def _shard_of_jax(arr: Array, mesh: Any, cost: tuple[float, float], exchange: str | None) -> Array:
    """Return the shards of all devices of a mesh."""
    from jax.sharding import Mesh

    from .jax import Group, ShardCut, shard_values
    from .pieces import cut_rows

    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh of one axis for arrays of jax, got {type(mesh).__name__}"
        )
    if exchange == "heads":
        raise ValueError("exchange: expected 'keys' or None for arrays of jax, got 'heads'")
    if arr.ragged_dim:
        raise ValueError(
            f"arr: expected the ragged axis after the batch for arrays of jax, got ragged_dim {arr.ragged_dim}"
        )
    layout = arr.layout

    def make() -> Any:
        lengths = np.diff(layout.read_offsets()).astype(np.int64)
        return ShardCut(layout, Group(mesh), cut_rows(lengths, mesh.size, cost)).layout

    shard_layout = layout.cached(("shard", mesh, *cost), make)
    return Array.from_layout(shard_values(arr.values, shard_layout.cut), shard_layout)


def unshard(arr: Array) -> Array:
    """Return the whole rows of a shard, on all ranks.

    Parameters
    ----------
    arr
        (n, None, ...) shard, a result of `shard` or of an operation on shards. All ranks must call
        the function. On JAX it works inside and outside of `jax.shard_map`.

    Returns
    -------
    Array
        (n, None, ...) whole rows in their original order, with the dtype of `arr`. Gradients are
        summed over the ranks.

    Raises
    ------
    TypeError
        If `arr` is no shard.

    Examples
    --------
    >>> import scree, torch, torch.distributed as dist
    >>> from scree.distributed import shard, unshard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> arr = scree.from_lengths(torch.arange(5), [3, 2])
    >>> unshard(shard(arr, dist.group.WORLD)).tolist()
    [[0, 1, 2], [3, 4]]
    >>> dist.destroy_process_group()
    """
    cut: Any = check_ragged("arr", arr, shards=True).layout.cut
    if cut is None:
        raise TypeError("arr: expected a shard, got an array of whole rows; see shard")
    if arr.layout.backend.name == "jax":
        return Array.from_layout(cut.unshard(arr.values), cut.whole)
    xp, layout = arr.layout.xp, arr.layout
    longest, index = layout.cached("unshard", cut.gathered_index)
    values = moveaxis(xp, arr.values, arr.ragged_dim, 0)
    padding = xp.zeros(
        (longest - values.shape[0], *values.shape[1:]), dtype=values.dtype, device=arr.device
    )
    gathered = cut.group.all_gather(xp.concat([values, padding], axis=0))
    tokens = xp.reshape(gathered, (-1, *values.shape[1:]))
    values = moveaxis(xp, xp.take(tokens, index, axis=0), 0, arr.ragged_dim)
    return Array.from_layout(values, cut.whole, arr.ragged_dim)
