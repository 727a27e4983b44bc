"""Shards over gloo, 2 to 4 processes, have the results and the gradients of whole rows."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import TIMEOUT, run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import scree
from scree.data import split_balanced
from scree.distributed import shard, unshard
from scree.distributed.exchange import REMOTE_LOSS
from scree.distributed.one_cut import cut_longest_row
from scree.distributed.pieces import KeyPlan, Pieces, cut_rows, plan_keys, plan_remote_keys
from scree.ops.attention import AttentionCall

WINDOWS = [(True, None), (True, 5), (False, None), (False, (3, 2)), (False, (None, 4))]


def make_lengths(seed: int) -> np.ndarray:
    """Return random lengths, with empty rows; some batches have one row, or hardly any token."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 1:
        return np.asarray([[150], [1, 0, 1], [0, 0]][seed // 4 % 3])
    lengths = rng.lognormal(2.5, 1.2, rng.integers(1, 9)).astype(int)
    return np.minimum(lengths * (rng.random(lengths.size) > 0.1), 200)


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def compare(
    compute: Callable[..., list[Any]],
    leaves: list[torch.Tensor],
    lengths: np.ndarray,
    ragged: int,
    mesh: Any,
    exchange: str | None = None,
    causal: bool = False,
) -> None:
    """Compare results and gradients on shards and on whole rows.

    `compute` takes the leaves, the first `ragged` of them as ragged arrays, and returns ragged
    arrays, or dense arrays that are equal on all ranks. `exchange` and `causal` are options of `shard`.
    """
    options: Any = {"exchange": exchange, "causal": causal}
    results = []
    for is_shard in (False, True):
        inputs = [x.clone().requires_grad_() for x in leaves]
        base = scree.from_lengths(inputs[0], lengths)
        arrays = [base, *(base.with_values(x) for x in inputs[1:ragged])]
        arrays = [shard(x, mesh, **options) if is_shard else x for x in arrays]
        outputs = compute(*arrays, *inputs[ragged:])
        loss = torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(outputs):
            if isinstance(x, scree.Array):
                weights = base.with_values(random(100 + i, *unshard_if(x).shape))
                weights = shard(weights, mesh, **options) if is_shard else weights
                finite = torch.where(torch.isfinite(x.values), x.values, 0.0)
                loss = loss + (finite * weights.values).sum()
            else:  # each rank has the result of all; one rank has the loss of it
                finite = torch.where(torch.isfinite(x), x, 0.0)
                factor = float(dist.get_rank() == 0 or not is_shard)
                loss = loss + factor * (finite * random(100 + i, *x.shape)).sum()
        loss.backward()
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        if is_shard:
            for x in grads:
                dist.all_reduce(x, group=group_of(mesh))
        results.append([*(unshard_if(x) for x in outputs), *grads])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def attend_with_lse(
    q: Any, k: Any, v: Any, sinks: Any = None, *, causal: bool, window: Any
) -> list[Any]:
    """Return the result of attention and its log-sum-exp."""
    return list(
        scree.attention(q, k, v, causal=causal, window=window, sinks=sinks, return_lse=True)
    )


def group_of(mesh: Any) -> Any:
    """Return the process group of a mesh."""
    return mesh.get_group() if isinstance(mesh, dist.device_mesh.DeviceMesh) else mesh


def unshard_if(x: Any) -> torch.Tensor:
    """Return the values of whole rows, or a dense array."""
    if not isinstance(x, scree.Array):
        return x.detach()
    return (x if x.layout.cut is None else unshard(x)).values.detach()


def check_attention(mesh: Any, seeds: Iterable[int], is_causal: bool = False) -> None:
    for seed in seeds:
        lengths, heads = make_lengths(seed), [(4, 2), (3, 1), (2, 2)][seed % 3]
        total = int(lengths.sum())
        leaves = [random(i, total, h, 4) for i, h in enumerate((*heads, heads[1]))]
        for causal, window in [*WINDOWS, (False, (6, None))]:
            attend = partial(attend_with_lse, causal=causal, window=window)
            sinks = [random(9, heads[0])] if seed % 2 else []
            compare(attend, [*leaves, *sinks], lengths, 3, mesh, causal=is_causal)
    lengths = make_lengths(2)
    leaves = [random(i, int(lengths.sum()), 2, 4) for i in range(3)]
    slopes = torch.rand(lengths.size, 2, dtype=torch.float64)
    dist.broadcast(slopes, 0, group=group_of(mesh))
    compare(
        lambda q, k, v: [scree.attention(q, k, v, causal=True, alibi_slopes=slopes, softcap=3.0)],
        leaves,
        lengths,
        3,
        mesh,
        causal=is_causal,
    )


def check_heads(mesh: Any, size: int) -> None:
    """Exchange heads for tokens, which all masks and slopes allow."""
    lengths = make_lengths(2)
    # Two key heads per rank; values are wider.
    total, heads = int(lengths.sum()), (4 * size, 2 * size)
    leaves = [random(i, total, h, 4 + 2 * (i == 2)) for i, h in enumerate((*heads, heads[1]))]
    slopes = random(3, lengths.size, heads[0]).abs()
    for i, (causal, window) in enumerate(WINDOWS):

        def attend(
            q: Any,
            k: Any,
            v: Any,
            sinks: Any,
            causal: bool = causal,
            window: Any = window,
            alibi_slopes: Any = slopes if i == 1 else None,
            has_lse: bool = i < 4,
        ) -> list[Any]:
            options: Any = {"causal": causal, "window": window}
            options |= {"alibi_slopes": alibi_slopes, "return_lse": has_lse}
            result = scree.attention(q, k, v, sinks=sinks if has_lse else None, **options)
            return list(result) if has_lse else [result]

        compare(attend, [*leaves, random(9, heads[0])], lengths, 3, mesh, "heads")
    x = shard(scree.from_lengths(leaves[0][:, :1], lengths), mesh, exchange="heads")
    with pytest.raises(ValueError, match="exchange: expected the number of ranks"):
        scree.attention(x, x, x)
    # By default the cost model chooses.
    heads_of_call = 16 * size, size, size
    call = AttentionCall(
        *(scree.from_lengths(torch.zeros(4, h, 8), [4]) for h in heads_of_call), causal=True
    )
    for length in (64, 131_072):
        cut: Any = shard(scree.from_lengths(torch.zeros(length), [length]), mesh).layout.cut
        assert cut.exchanges_heads(call) == (length > 64)


def check_different_losses(group: Any, exchange: str, has_slopes: bool) -> None:
    """The loss of the first rank uses the log-sum-exp only, other losses use the output only."""
    lengths, is_first = np.asarray([37, 3]), dist.get_rank(group) == 0
    size, total = dist.get_world_size(group), int(lengths.sum())
    leaves = [random(i, total, size, 4) for i in range(3)]
    tokens = shard(scree.from_lengths(torch.arange(total), lengths), group, exchange=exchange)
    of_first = torch.zeros(total, 1, dtype=torch.float64)
    of_first[tokens.values] = float(is_first)
    dist.all_reduce(of_first, group=group)
    slopes, grads = random(3, size).abs() if has_slopes else None, []
    for is_shard in (False, True):
        inputs = [x.clone().requires_grad_() for x in leaves]
        arrays = [scree.from_lengths(x, lengths) for x in inputs]
        if is_shard:
            arrays = [shard(x, group, exchange=exchange) for x in arrays]
        out, lse = scree.attention(*arrays, causal=True, alibi_slopes=slopes, return_lse=True)
        if is_shard:
            loss = lse.values.square().sum() if is_first else out.values.square().sum()
        else:
            squares = out.values.square().sum(2) * (1 - of_first)
            loss = (squares + lse.values.square() * of_first).sum()
        loss.backward()
        grads.append([x.grad for x in inputs])
    for expected, actual in zip(*grads, strict=True):
        dist.all_reduce(actual, group=group)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check_functions(mesh: Any, seed: int) -> None:
    lengths = make_lengths(seed)
    total = int(lengths.sum())
    x, y = random(0, total, 2, 4), random(1, total, 2, 4)

    def tokens(a: Any, b: Any, weight: Any) -> list[Any]:
        xp = scree.namespace(a)
        half = scree.split(scree.rms_norm(a), (2, 2))[0]
        return [
            a * 2 + xp.exp(b),
            scree.rms_norm(a, weight),
            *scree.rope(a, b),
            scree.swiglu(xp.concat([half, b], axis=-1)),
            scree.softmax(a, axis=-1),
            a @ torch.ones(4, 3, dtype=torch.float64),
            xp.sum(a, axis=(2, 3)),
            xp.reshape(b, (*b.shape[:2], 8)),
            b[..., 1],
            b[:, :, 0, 1:3],
            scree.gelu(b),
            a + scree.broadcast_rows(random(4, b.batch_size, 1, 4), b),
        ]

    compare(tokens, [x, y, random(2, 4)], lengths, 2, mesh)

    def rows(a: Any) -> list[Any]:
        xp = scree.namespace(a)
        names = ("sum", "mean", "max", "min", "prod")
        return [
            *(getattr(xp, name)(a, axis=1) for name in names),
            xp.mean(a, axis=(1, 3)),
            xp.sum(a, axis=1, keepdims=True),
            scree.logsumexp(a),
            scree.softmax(a),
            scree.log_softmax(a, axis=1),
        ]

    compare(rows, [x], lengths, 1, mesh)
    base = scree.from_lengths(x, lengths)
    part = shard(base, mesh)
    table, ids = random(2, 9, 3), base.with_values(torch.arange(total) % 9)
    embedded = unshard(scree.gather(table, shard(ids, mesh)))
    assert torch.equal(embedded.values, table[torch.arange(total) % 9])
    start = torch.arange(lengths.size)
    expected = scree.rope(base, start=start, theta=100.0).values
    torch.testing.assert_close(unshard(scree.rope(part, start=start, theta=100.0)).values, expected)
    index = unshard(part.with_values(scree.positions(part))).values
    assert torch.equal(index, scree.positions(base))
    assert torch.equal(
        unshard(part.with_values(scree.segment_ids(part))).values, scree.segment_ids(base)
    )
    xp = scree.namespace(base)
    for name in ("any", "all", "count_nonzero"):
        function = getattr(xp, name)
        torch.testing.assert_close(function(part > 1, axis=1), function(base > 1, axis=1))
    logits = scree.from_lengths(random(5, total, 7), lengths)
    labels = torch.randint(0, 7, (total,), generator=torch.Generator().manual_seed(1))
    targets = logits.with_values(torch.where(labels == 3, -100, labels))
    for reduction in ("sum", "mean"):
        loss = scree.cross_entropy(
            shard(logits, mesh), shard(targets, mesh), reduction=reduction, z_loss=1e-3
        )
        dist.all_reduce(loss, group=group_of(mesh))
        expected = scree.cross_entropy(logits, targets, reduction=reduction, z_loss=1e-3)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        weight = random(6, 5, 7)
        loss = scree.linear_cross_entropy(
            shard(logits, mesh), weight, shard(targets, mesh) % 5, reduction=reduction
        )
        dist.all_reduce(loss, group=group_of(mesh))
        expected = scree.linear_cross_entropy(logits, weight, targets % 5, reduction=reduction)
        torch.testing.assert_close(loss, expected, equal_nan=True)


def check_refusals(mesh: Any) -> None:
    arr = scree.from_lengths(random(0, 12, 2), [7, 0, 5])
    x, xp = shard(arr, mesh), scree.namespace(arr)
    y = x.with_values(x.values[:, None])
    refused: list[Callable[[], Any]] = [
        lambda: x[0],
        lambda: x[:, 0],
        lambda: list(x),
        lambda: scree.to_padded(x),
        lambda: scree.shift(x, 1),
        lambda: scree.topk(x, 1),
        lambda: scree.gather(arr, x.with_values(torch.zeros(x.values.shape[0], dtype=torch.int64))),
        lambda: split_balanced(x, 2),
        lambda: xp.cumulative_sum(x, axis=1),
        lambda: xp.sort(x, axis=1),
        lambda: xp.flip(x, axis=1),
        lambda: xp.sum(x),
        lambda: xp.var(x, axis=1),
        lambda: xp.argmax(x, axis=1),
        lambda: xp.concat([x, x]),
        lambda: xp.take(x, torch.tensor([0]), axis=0),
        lambda: scree.at(x),
        lambda: x.at,
        lambda: scree.bucket(x),
        lambda: x.to_numpy(),
        lambda: x.tolist(),
        lambda: x.to_device("cpu"),
        lambda: scree.attention(y, y, y, dropout=0.5, seed=0),
        lambda: shard(x, mesh),
        lambda: scree.unpack(x),
        lambda: __import__("pickle").dumps(x),
    ]
    for call in refused:
        with pytest.raises(TypeError, match=r"expected whole rows, got a shard"):
            call()
    with pytest.raises(TypeError, match="arr: expected a shard"):
        unshard(arr)
    for other in (arr, shard(scree.from_lengths(arr.values, [4, 0, 8]), mesh)):
        with pytest.raises(ValueError, match=r"expected (shards of one cut|rows of equal lengths)"):
            x + other
    with pytest.raises(TypeError, match="mesh: expected a torch"):
        shard(arr, 3)
    with pytest.raises(ValueError, match="exchange: expected 'keys', 'heads' or None"):
        shard(arr, mesh, exchange="ring")
    with pytest.raises(TypeError, match="causal: expected True or False, got 'left'"):
        shard(arr, mesh, causal="left")
    with pytest.raises(TypeError, match="arr: expected a ragged array of torch"):
        shard(scree.from_lengths(np.ones(3), [3]), mesh)
    # Pytrees and `dataclasses.replace`, by which FSDP2 casts the inputs of modules, keep the cut.
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 1, x)
    assert doubled.layout.cut is x.layout.cut
    assert dataclasses.replace(x, values=x.values * 2).layout.cut is x.layout.cut


def check_checkpoint(mesh: Any) -> None:
    """Activation checkpointing repeats the exchange in the backward pass."""
    lengths = make_lengths(2)
    leaves = [random(i, int(lengths.sum()), 2, 4) for i in range(3)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return scree.attention(scree.rms_norm(q), k, v, causal=True)

    def checkpointed(*arrays: Any) -> list[Any]:
        return [torch.utils.checkpoint.checkpoint(attend, *arrays, use_reentrant=False)]

    compare(checkpointed, leaves, lengths, 3, mesh)


def check_compile(group: Any) -> None:
    """The graph breaks at attention; the parts before and after it are compiled."""
    x = scree.from_lengths(random(0, 60, 2, 4), [37, 3, 20])

    def layer(x: scree.Array) -> scree.Array:
        q, k = scree.rope(x * 2, x)
        return scree.attention(q, k, x, causal=True) + x

    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(unshard(compiled(shard(x, group))).values, layer(x).values)


def check_half_precision(mesh: Any, exchange: str) -> None:
    # Heads of 7 elements are not a number of words, and other values are narrower than keys.
    for dim, value_dim in [(7, 7), (8, 8), (8, 4)] if exchange == "keys" else [(8, 8)]:
        check_half_precision_of_widths(mesh, exchange, (dim, dim, value_dim))


def check_half_precision_of_widths(mesh: Any, exchange: str, dims: tuple[int, ...]) -> None:
    lengths = make_lengths(2)
    leaves = [
        random(i, int(lengths.sum()), 4, dim).to(torch.bfloat16) for i, dim in enumerate(dims)
    ]
    q, k, v = (scree.from_lengths(x.double().requires_grad_(), lengths) for x in leaves)
    out = scree.attention(q, k, v, causal=True)
    out.values.sum().backward()
    inputs = [x.requires_grad_() for x in leaves]
    parts = [shard(scree.from_lengths(x, lengths), mesh, exchange=exchange) for x in inputs]
    assert (parts[0] + parts[1]).layout.cut == parts[2].layout.cut
    actual = scree.attention(*parts, causal=True)
    actual.values.float().sum().backward()
    torch.testing.assert_close(unshard_if(actual).double(), out.values, rtol=0, atol=0.02)
    for x, expected in zip(inputs, (q, k, v), strict=True):
        grad = x.grad.double()
        dist.all_reduce(grad)
        scale = float(expected.values.grad.abs().max())
        torch.testing.assert_close(grad, expected.values.grad, rtol=0, atol=0.01 * scale)


class Model(torch.nn.Module):
    """One layer of attention and a loss; shards and whole rows take the same way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 30)

    def forward(self, ids: scree.Array, targets: scree.Array) -> torch.Tensor:
        x = ids.with_values(self.embedding(ids.values))
        parts = self.qkv(scree.rms_norm(x).values).unflatten(1, (3, 2, 4)).unbind(1)
        q, k = scree.rope(*map(x.with_values, parts[:2]))
        out = scree.attention(q, k, x.with_values(parts[2]), causal=True)
        logits = x.with_values(self.head(out.values.flatten(1)))
        return scree.cross_entropy(logits, targets, reduction="sum")


def check_fsdp() -> None:
    """Four ranks: two groups have a batch each, whose rows are cut over two ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    batches = []
    for lengths in ([37, 3, 20], [5, 50]):
        ids = scree.from_lengths(torch.arange(sum(lengths)) % 30, lengths)
        batches.append((ids, scree.shift(ids, -1, fill_value=-100)))
    count = sum(ids.total_length - ids.batch_size for ids, _ in batches)
    single, parallel = Model(), Model()
    (sum(single(*batch) for batch in batches) / count).backward()
    everyone = dist.device_mesh.init_device_mesh("cpu", (4,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(parallel, mesh=everyone, mp_policy=policy)
    ids, targets = (shard(x, mesh["cp"]) for x in batches[mesh["dp"].get_local_rank()])
    # FSDP2 takes the mean over four ranks.
    (parallel(ids, targets) * 4 / count).backward()
    for (name, x), expected in zip(parallel.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), expected.grad, msg=name)


def check_missing_backward(rank: int, exchange: str) -> None:
    """The first rank never calls `backward`; the others must raise within the time-out, not wait."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    ids = scree.from_lengths(torch.ones(64, 4, 4), [64])
    x = shard(ids.with_values(ids.values.requires_grad_()), group, exchange=exchange)
    loss = scree.attention(x, x, x, causal=True).values.sum()
    start = time.monotonic()
    if rank > 0:
        with pytest.raises(RuntimeError):
            loss.backward()
        assert time.monotonic() - start < TIMEOUT / 2, "the time-out of the group"
    dist.barrier()


def check_death(mesh: Any, rank: int) -> None:
    """End one process before the exchange of keys; the others must raise, not wait."""
    x = shard(scree.from_lengths(torch.ones(64, 1, 4), [64]), mesh)
    dist.barrier()
    if rank == 3:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        scree.attention(x, x, x, causal=True)
    assert time.monotonic() - start < TIMEOUT, "the time-out of the process group"


def work(rank: int, folder: Path) -> None:
    """Run the checks in one of the processes, on groups of 4, 3 and 2 of them."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    groups = [mesh.get_group(), *(dist.new_group(list(range(size))) for size in (3, 2))]
    for i, group in enumerate(groups):
        if rank < (4, 3, 2)[i]:
            check_attention(group, ((0, 1, 6), (2, 9, 10), (4, 5, 7))[i])
            check_functions(group, (0, 5, 2)[i])
            check_heads(group, (4, 3, 2)[i])
            for exchange in ("keys", "heads"):
                check_different_losses(group, exchange, i == 1)
    if rank < 2:
        # Cuts for a causal mask also serve attention without one.
        check_attention(groups[2], (2, 4, 6), True)
        check_compile(groups[2])
    check_refusals(mesh)
    check_checkpoint(mesh)
    for exchange in ("keys", "heads"):
        check_half_precision(mesh, exchange)
        check_missing_backward(rank, exchange)
    check_fsdp()
    check_death(mesh, rank)
    (folder / f"done-{rank}").touch()


def test_shards_have_the_results_and_gradients_of_whole_rows(tmp_path: Path) -> None:
    run_ranks(work, 4, tmp_path)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1", "done-2"}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("cost", [(1, 0), (4096, 1), (0, 1)])
def test_cut_rows_balances_costs(num_ranks: int, cost: tuple[float, float]) -> None:
    rng = np.random.default_rng(num_ranks)
    for lengths in (
        np.asarray([32768]),
        rng.lognormal(7, 1.5, 40).astype(int),
        np.full(7, 3000),
        rng.lognormal(7, 0.5, 300).astype(int),
    ):
        pieces = cut_rows(lengths, num_ranks, cost)
        totals = np.zeros(num_ranks)
        covered = np.zeros(lengths.size, int)
        for row, start, stop, rank in zip(
            pieces.rows, pieces.starts, pieces.stops, pieces.ranks, strict=True
        ):
            assert start == covered[row] < stop
            covered[row] = stop
            # A causal mask: query i sees i + 1 keys; the cost of a row is a L + 2 b (1 + ... + L).
            totals[rank] += cost[0] * (stop - start)
            totals[rank] += cost[1] * (stop * (stop + 1.0) - start * (start + 1.0))
        assert np.array_equal(covered, lengths)
        assert totals.max() <= 1.015 * totals.mean()
    assert cut_rows(np.asarray([0, 0]), num_ranks, cost).rows.size == 0


def test_cut_rows_cuts_only_where_whole_rows_are_unbalanced() -> None:
    def cut_and_loads(lengths: list[int], num_ranks: int) -> tuple[list[int], list[int]]:
        pieces = cut_rows(np.asarray(lengths), num_ranks, (1, 0))
        loads = [int(pieces.lengths[pieces.ranks == rank].sum()) for rank in range(num_ranks)]
        return np.flatnonzero(np.bincount(pieces.rows) > 1).tolist(), loads

    # The longest row first: 13 + 4 and 13. Exchanging 700 and 500 balances the ranks.
    assert cut_and_loads([800, 700, 600, 500, 400], 2) == ([], [1500, 1500])
    assert cut_and_loads([900, 500, 400, 300, 300, 300], 3) == ([], [900, 900, 900])
    # A row above the mean cost is cut; otherwise the shortest row that is enough.
    rows, loads = cut_and_loads([1000, 600, 320], 2)
    assert rows == [0] and max(loads) <= 961
    rows, loads = cut_and_loads([900, 900, 300], 2)
    assert rows == [2] and max(loads) - min(loads) <= 2


def test_cut_rows_causal_balances_tokens_and_attention_with_fewer_remote_pairs() -> None:
    def measure(pieces: Pieces) -> tuple[float, float, float]:
        """Return the imbalance of tokens and of attention, and the remote pairs."""
        tokens, pairs, remote = np.zeros(2), np.zeros(2), np.zeros(2)
        for row, start, stop, rank in zip(
            pieces.rows, pieces.starts, pieces.stops, pieces.ranks, strict=True
        ):
            tokens[rank] += stop - start
            for position in range(start, stop):
                pairs[rank] += position + 1
            for other, first, last, owner in zip(
                pieces.rows, pieces.starts, pieces.stops, pieces.ranks, strict=True
            ):
                if other == row and owner != rank and last <= start:
                    remote[rank] += (last - first) * (stop - start)
        attention = pairs + REMOTE_LOSS * remote
        return (
            float(tokens.max() / tokens.mean()),
            float(attention.max() / attention.mean()),
            float(remote.sum()),
        )

    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.append(rng.lognormal(5, 1, 20).astype(np.int64), 0)
        lengths[3] = 0.6 * lengths.sum()
        evenly, causal = (cut_rows(lengths, 2, (500, 1), x) for x in (False, True))
        covered = np.zeros(lengths.size, np.int64)
        for row, start, stop in zip(causal.rows, causal.starts, causal.stops, strict=True):
            assert start == covered[row] < stop
            covered[row] = stop
        assert np.array_equal(covered, lengths)
        tokens, attention, remote = measure(causal)
        assert tokens < 1.02 and attention < 1.05
        assert remote < 0.9 * measure(evenly)[2]


@pytest.mark.parametrize("lengths", [[65_536], [3, 0, 3], [1, 1, 1], [2], [0], [900, 800, 100]])
def test_cut_rows_causal_cuts_evenly_where_that_is_no_slower(lengths: list[int]) -> None:
    evenly, causal = (cut_rows(np.asarray(lengths), 2, (4096, 1), x) for x in (False, True))
    if causal.rows.size == evenly.rows.size:
        assert np.array_equal(causal.stops, evenly.stops)
    for num_ranks in (1, 3):
        expected = cut_rows(np.asarray(lengths), num_ranks, (4096, 1))
        actual = cut_rows(np.asarray(lengths), num_ranks, (4096, 1), True)
        assert np.array_equal(actual.stops, expected.stops)
    assert causal.lengths.sum() == sum(lengths)


def test_cut_rows_causal_of_many_rows_cuts_evenly() -> None:
    for num_rows, num_pieces in ((1_023, 2), (1_024, 3)):
        lengths = np.append(np.full(num_rows, 3), 2_000)
        pieces = cut_rows(lengths, 2, (1, 1), causal=True)
        assert np.count_nonzero(pieces.rows == num_rows) == num_pieces


def test_cut_rows_causal_searches_nonempty_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[np.ndarray] = []

    def search(lengths: np.ndarray, cost: tuple[float, float]) -> Any:
        searched.append(lengths)
        return cut_longest_row(lengths, cost)

    monkeypatch.setattr("scree.distributed.pieces.cut_longest_row", search)
    dense = np.asarray([3000, 20_000, 4000, 500, 7000])
    sparse = np.zeros(100_000, np.int64)
    places = np.asarray([3, 500, 501, 70_000, 99_998])
    sparse[places] = dense
    expected, actual = (cut_rows(x, 2, (4096, 1), causal=True) for x in (dense, sparse))
    assert [x.tolist() for x in searched] == [dense.tolist()] * 2
    assert np.count_nonzero(expected.rows == 1) == 2
    assert np.array_equal(actual.rows, places[expected.rows])
    for name in ("starts", "stops", "ranks"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name))


def tokens_of(pieces: Pieces, rank: int) -> list[tuple[int, int]]:
    """Return the row and the position of each token of a rank."""
    mine = pieces.select(pieces.ranks == rank)
    return [
        (row, position)
        for row, start, stop in zip(mine.rows, mine.starts, mine.stops, strict=True)
        for position in range(start, stop)
    ]


def delivered_keys(
    pieces: Pieces, plans: list[Any], rank: int, plan: KeyPlan
) -> list[tuple[int, int]]:
    """Return the row and the position of each key that a rank gets by the plans of all ranks."""
    buffers = []
    for source in range(len(plans)):
        tokens = tokens_of(pieces, source)
        if source != rank:
            runs = plans[source].sent[rank]
            tokens = [x for start, length in runs for x in tokens[start : start + length]]
            assert len(tokens) == plan.received[source]
        buffers.append(tokens)
    return [x for source, start, length in plan.keys for x in buffers[source][start:][:length]]


@pytest.mark.parametrize(
    ("num_ranks", "causal"), [(2, False), (2, True), (3, False), (4, False), (8, False)]
)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (5, 0), (3, 2), (None, 4)])
def test_plans_deliver_the_visible_keys(
    num_ranks: int, causal: bool, window: tuple[int | None, ...]
) -> None:
    left, right = window
    for seed in range(8):
        lengths = make_lengths(seed).astype(np.int64)
        pieces = cut_rows(lengths, num_ranks, (1, 1), causal)
        plans = [plan_keys(pieces, lengths, r, num_ranks, window) for r in range(num_ranks)]
        remote = [plan_remote_keys(pieces, lengths, r, num_ranks, window) for r in range(num_ranks)]
        for rank, plan in enumerate(plans):
            mine = np.flatnonzero(pieces.ranks == rank)
            own = set(tokens_of(pieces, rank))
            every: dict[int, list[tuple[int, int]]] = {}
            for p in mine.tolist():
                row, length = int(pieces.rows[p]), int(lengths[pieces.rows[p]])
                is_whole = int(pieces.lengths[p]) == length
                seen = {
                    (row, key)
                    for query in range(pieces.starts[p], pieces.stops[p])
                    for key in range(length)
                    if is_whole
                    or (
                        (left is None or key >= query - left)
                        and (right is None or key <= query + right)
                    )
                }
                every[p] = sorted(seen)
            order = [int(mine[i]) for group in plan.groups for i in group.pieces]
            assert sorted(order) == mine.tolist()
            expected = [x for p in order for x in every[p]]
            assert delivered_keys(pieces, plans, rank, plan) == expected
            counts = [n for group in plan.groups for n in group.key_lengths.tolist()]
            assert counts == [len(every[p]) for p in order]
            other = remote[rank]
            if other is not None:
                expected = [x for p in mine.tolist() for x in every[p] if x not in own]
                assert delivered_keys(pieces, remote, rank, other) == expected
                once = len(set(expected)) == len(expected) == sum(other.received)
                assert other.is_partition == once
