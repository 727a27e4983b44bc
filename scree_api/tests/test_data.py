"""Batching: collate, token-budget sampling, balanced splits, truncation, windows and modalities."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

import scree
from scree.data import (
    TokenBudgetSampler,
    chunk,
    collate,
    fit_cost,
    interleave,
    split_balanced,
    truncate,
)

LENGTHS = [5, 0, 1, 3, 12]
LIBRARIES = ("torch", "jax", "mlx", "array_api_strict")


def make_array(ragged_dim: int = 0) -> scree.Array:
    values = np.arange(42).reshape(21, 2) if ragged_dim == 0 else np.arange(42).reshape(2, 21)
    return scree.from_lengths(values, LENGTHS, ragged_dim=ragged_dim)


def log_normal(n: int, sigma: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.maximum(
        np.random.default_rng(seed).lognormal(np.log(256), sigma, n).astype(np.int64), 1
    )


# ---------------------------------------------------------------- collate
def test_collate_shares_layouts_and_keeps_dtypes() -> None:
    samples = [
        {
            "ids": np.arange(n),
            "labels": np.ones(n, np.int8),
            "image": np.zeros((n + 1, 2), np.float32),
            "weight": n / 2,
            "n": n,
        }
        for n in (3, 0, 2)
    ]
    batch = collate(samples)
    assert list(batch) == list(samples[0])
    assert batch["ids"].layout is batch["labels"].layout
    assert batch["ids"].layout is not batch["image"].layout
    assert batch["image"].shape == (3, None, 2)
    assert [batch[name].dtype for name in batch] == [
        np.int64,
        np.int8,
        np.float32,
        np.float64,
        np.int64,
    ]
    for i, sample in enumerate(samples):
        assert all(np.array_equal(batch[name][i], sample[name]) for name in batch)


@pytest.mark.needs("torch")
def test_collate_in_a_data_loader() -> None:
    import torch

    data = [{"ids": torch.arange(n), "label": torch.tensor(n)} for n in LENGTHS]
    sampler = TokenBudgetSampler(LENGTHS, budget=12, seed=1)
    seen = []
    for batch in torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=collate):
        assert batch["ids"].total_length <= 12
        assert torch.equal(batch["ids"].lengths, batch["label"].to(torch.int32))
        seen += batch["label"].tolist()
    assert sorted(seen) == sorted(LENGTHS)
    assert collate([[1, 2], [3]], torch).values.dtype == torch.int64
    assert collate([{"x": 1}], "torch")["x"].dtype == torch.int64


def test_collate_invalid_field_raises() -> None:
    with pytest.raises(ValueError, match="samples: expected at least one"):
        collate([])
    with pytest.raises(ValueError, match=r"samples\[1\]: expected the names \['x'\], got \['y'\]"):
        collate([{"x": [1]}, {"y": [1]}])
    with pytest.raises(TypeError, match=r"x: arrays\[1\]: expected the dtype"):
        collate([{"x": np.zeros(1)}, {"x": np.zeros(1, int)}])
    with pytest.raises(TypeError, match=r"x: rows\[1\]: expected a list"):
        collate([{"x": [1]}, {"x": None}])
    with pytest.raises(TypeError, match="samples: expected a list of samples, got NoneType"):
        collate(None)


# ---------------------------------------------------------------- sampler
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [1, 7, 500])
def test_sampler_has_every_row_once_within_the_budget(
    num_ranks: int, shuffle: bool, n: int
) -> None:
    lengths, budget = np.minimum(log_normal(n), 2000), 2048
    ranks = [
        list(TokenBudgetSampler(lengths, budget, shuffle=shuffle, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = list(itertools.chain(*ranks))
    assert all(batch and lengths[batch].sum() <= budget for batch in batches)
    row_indices = sorted(itertools.chain(*batches))
    if n >= num_ranks:
        assert row_indices == list(range(n))
    else:
        assert set(row_indices) == set(range(n))
    if n == 500:
        tokens = [sum(lengths[batch].sum() for batch in batches) for batches in ranks]
        assert max(tokens) <= 1.1 * sum(tokens) / num_ranks
        assert len(batches) <= 1.4 * lengths.sum() / budget + num_ranks
    if not shuffle and num_ranks == 1:
        assert list(itertools.chain(*batches)) == row_indices


@pytest.mark.parametrize("rank, num_ranks", [(0, 1), (0, 3), (2, 3)])
def test_sampler_resumes_and_reshuffles(rank: int, num_ranks: int) -> None:
    ranks = {"rank": rank, "num_ranks": num_ranks}
    sampler = TokenBudgetSampler(LENGTHS * 10, 20, seed=3, **ranks)
    first_epoch = list(sampler)
    assert sampler.epoch == 1
    second_epoch = list(sampler)
    assert first_epoch != second_epoch
    interrupted = TokenBudgetSampler(LENGTHS * 10, 20, seed=3, **ranks)
    first_batches = list(itertools.islice(interrupted, 3))
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = TokenBudgetSampler(LENGTHS * 10, 20, **ranks)
    resumed.load_state_dict(state)
    assert first_batches + list(resumed) == first_epoch
    assert list(resumed) == second_epoch
    resumed.set_epoch(0)
    assert list(resumed) == first_epoch
    assert len(first_epoch) == len(interrupted)


def test_sampler_drop_last() -> None:
    lengths = [5] * 11
    batches = [
        list(TokenBudgetSampler(lengths, 10, rank=r, num_ranks=2, drop_last=True)) for r in range(2)
    ]
    assert [len(x) for x in batches] == [2, 2]
    assert all(len(batch) == 2 for batch in itertools.chain(*batches))
    assert list(TokenBudgetSampler([], 10)) == []
    full = TokenBudgetSampler([5] * 4, 10, shuffle=False, drop_last=True)
    assert list(full) == [[0, 1], [2, 3]]  # the last batch is full and stays


@pytest.mark.parametrize(
    "changes", [{"shuffle": False}, {"drop_last": True}, {"lengths": LENGTHS[::-1][1:] + [1]}]
)
def test_sampler_state_of_other_settings_raises(changes: dict[str, Any]) -> None:
    state = TokenBudgetSampler(LENGTHS, 20).state_dict()
    with pytest.raises(ValueError, match="the batches would differ"):
        TokenBudgetSampler(**{"lengths": LENGTHS, "budget": 20, **changes}).load_state_dict(state)


def test_sampler_invalid_argument_raises() -> None:
    with pytest.raises(ValueError, match="lengths: expected at most 11, the budget, got 12 at 4"):
        TokenBudgetSampler(make_array(), 11)
    for cost in (None, (1,), (0, 0), (-1, 1), (1, np.nan), (1, np.inf), ("a", "b")):
        with pytest.raises(ValueError, match=r"cost: expected two finite numbers \(a, b\) >= 0"):
            TokenBudgetSampler(LENGTHS, 20, cost=cost)
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        TokenBudgetSampler(LENGTHS, 20, window=0)
    with pytest.raises(ValueError, match="rank: expected"):
        TokenBudgetSampler(LENGTHS, 20, rank=2, num_ranks=2)
    for name in ("shuffle", "drop_last"):
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
            TokenBudgetSampler([1, 2], 8, **{name: "no"})
    for lengths, received in (
        (5, "int"),
        ([[1], [2, 3]], "lists of different lengths"),
        ({}, "dict"),
    ):
        with pytest.raises(TypeError, match=f"lengths: expected .* {received}"):
            TokenBudgetSampler(lengths, 8)
    with pytest.raises(ValueError, match="seed: expected at least 0, got -1"):
        TokenBudgetSampler(LENGTHS, 20, seed=-1)
    with pytest.raises(ValueError, match="epoch: expected at least 0, got -1"):
        TokenBudgetSampler(LENGTHS, 20).set_epoch(-1)
    with pytest.raises(ValueError, match="lengths: expected one axis of integers"):
        TokenBudgetSampler([1.5], 20)


def deal(lengths: Any, budget: int, num_ranks: int, **options: Any) -> list[list[list[int]]]:
    """Return the batches of an epoch per rank."""
    return [
        list(TokenBudgetSampler(lengths, budget, rank=rank, num_ranks=num_ranks, **options))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks, window, sigma", [(2, 4, 1.5), (2, 8, 1.5), (3, 8, 1.0)])
@pytest.mark.parametrize("cost", [(1, 0), (1, 1 / 4608), (0, 1)])
def test_sampler_balances_the_cost_of_windows(
    num_ranks: int, window: int, sigma: float, cost: tuple[float, float]
) -> None:
    lengths, budget = np.minimum(2 * log_normal(6000, sigma), 32768), 32768
    ranks = deal(lengths, budget, num_ranks, cost=cost, window=window)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(lengths.size))
    assert all(0 < lengths[batch].sum() <= budget for batches in ranks for batch in batches)
    costs = cost[0] * lengths + cost[1] * lengths.astype(float) ** 2
    per_batch = np.asarray([[costs[batch].sum() for batch in batches] for batches in ranks])
    size = per_batch.shape[1] // window * window
    assert size
    totals = per_batch[:, :size].reshape(num_ranks, -1, window).sum(2)
    steps = TokenBudgetSampler(lengths, budget, window=window * num_ranks)
    one_rank = list(steps)
    for step in range(size // window):  # the rows of an optimizer step do not depend on the ranks
        rows = itertools.chain(
            *(ranks[r][step * window + i] for r in range(num_ranks) for i in range(window))
        )
        expected = one_rank[step * window * num_ranks : (step + 1) * window * num_ranks]
        assert sorted(rows) == sorted(itertools.chain(*expected))
    # A single window with one very long row may be above the bound.
    assert (totals.max(0) / totals.mean(0)).mean() <= 1.02


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("counts", [[3, 2], [5, 1, 7], [4, 4, 2]])
def test_sampler_resumes_on_other_numbers_of_ranks(drop_last: bool, counts: list[int]) -> None:
    lengths, options = np.minimum(log_normal(700), 2000), {"seed": 4, "drop_last": drop_last}
    settings = [(2, 4, (1, 0.001)), (3, 2, (1, 0)), (1, 1, (1, 0)), (5, 3, (0, 1))]
    seen: list[int] = []
    state = None
    for i, (num_ranks, window, cost) in enumerate(settings[: len(counts) + 1]):
        states = []
        for rank in range(num_ranks):
            sampler = TokenBudgetSampler(
                lengths, 2048, rank=rank, num_ranks=num_ranks, window=window, cost=cost, **options
            )
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
                assert len(sampler) > sampler.position
            count = counts[i] if i < len(counts) else None
            batches = list(itertools.islice(sampler, count))
            assert count is None or len(batches) == count
            seen += itertools.chain(*batches)
            states.append(sampler.state_dict())
        state = states[0]
        assert all(other == state for other in states)
    assert state is not None
    assert (state["epoch"], state["position"]) == (1, 0)
    assert len(set(seen)) == len(seen)
    if not drop_last:
        assert len(seen) == lengths.size
    else:  # what another number of ranks would drop is not lost
        assert len(seen) >= lengths.size - 2048 * num_ranks / lengths.mean()


def test_sampler_repeats_no_row_twice_after_uneven_batches() -> None:
    # Three batches of one row on two ranks repeat a row, but three other ranks repeat none.
    sampler = TokenBudgetSampler([8] * 3, 8, num_ranks=2, window=2, shuffle=False)
    first = [*itertools.islice(sampler, 1)]
    other = TokenBudgetSampler([8] * 3, 8, rank=1, num_ranks=2, window=2, shuffle=False)
    first += itertools.islice(other, 1)
    resumed = TokenBudgetSampler([8] * 3, 8, shuffle=False)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(itertools.chain(*first, *resumed)) == [0, 1, 2]


def test_fit_cost_recovers_the_coefficients() -> None:
    rng = np.random.default_rng(0)
    lengths = [log_normal(n, seed=n) for n in rng.integers(1, 200, 40)]
    for a, b, c in ((2e-6, 3e-10, 1e-3), (2e-6, 0, 0), (0, 1e-9, 0.1)):
        seconds = [c + sum(a * n + b * n**2 for n in batch.tolist()) for batch in lengths]
        assert np.allclose(fit_cost(lengths, seconds), (a, b), rtol=1e-6, atol=1e-14)
    # Without the bound, times that fall with the squares would give b < 0.
    seconds = [sum(2e-6 * n - 1e-10 * n**2 for n in batch.tolist()) for batch in lengths]
    a, b = fit_cost([scree.from_lengths(np.zeros(x.sum()), x) for x in lengths], seconds)
    assert a > 0 == b
    for wrong in (seconds[1:], [np.nan] * 40, [-1.0] * 40):
        with pytest.raises(ValueError, match="seconds: expected 40 finite numbers >= 0"):
            fit_cost(lengths, wrong)
    with pytest.raises(ValueError, match="lengths: expected at least 3 batches, got 2"):
        fit_cost(lengths[:2], seconds[:2])
    with pytest.raises(ValueError, match="seconds: expected times that grow with the lengths"):
        fit_cost(lengths, [1.0] * 40)


# ---------------------------------------------------------------- split
@pytest.mark.parametrize("cost", ["tokens", "attention", "both"])
@pytest.mark.parametrize("k, n", [(2, 64), (8, 128), (8, 1000), (64, 2000)])
@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_split_balanced_is_within_two_percent_of_the_optimum(
    cost: str, k: int, n: int, sigma: float
) -> None:
    lengths = log_normal(n, sigma, seed=k)
    costs = {"tokens": lengths, "attention": lengths**2, "both": 6 * 384 * lengths + lengths**2}[
        cost
    ].astype(float)
    parts = split_balanced(lengths, k, costs if cost == "both" else cost)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert all((np.diff(part) > 0).all() for part in parts)
    top = np.sort(costs)[::-1]
    bound = max(costs.sum() / k, top[0], top[k - 1] + top[k])  # of k + 1 rows, two are in one part
    assert max(costs[part].sum() for part in parts) <= 1.02 * bound


def test_split_balanced_of_few_or_free_rows() -> None:
    assert [part.tolist() for part in split_balanced([3], 3)].count([]) == 2
    assert [part.size for part in split_balanced([], 2)] == [0, 0]
    assert all(part.size for part in split_balanced([5, 0, 0], 3))
    assert sorted(part.size for part in split_balanced([0] * 7, 3))[0] >= 1
    assert [part.tolist() for part in split_balanced(make_array(), 1)] == [[0, 1, 2, 3, 4]]
    assert [make_array()[part].total_length for part in split_balanced(make_array(), 2)] == [12, 9]
    with pytest.raises(ValueError, match="cost: expected 'tokens', 'attention'"):
        split_balanced(make_array(), 2, "money")
    with pytest.raises(TypeError, match="cost: expected an array or a list of numbers, got Array"):
        split_balanced([1], 2, scree.from_lengths(np.ones(1), [1]))
    with pytest.raises(ValueError, match="cost: expected 5 numbers, one per row"):
        split_balanced(make_array(), 2, [1, 2, 3, 4])
    for wrong in (-1, np.inf, np.nan):
        with pytest.raises(
            ValueError, match=f"cost: expected finite numbers >= 0, got {float(wrong)} for row 3"
        ):
            split_balanced(make_array(), 2, [1.0, 2, 3, wrong, 4])
    with pytest.raises(ValueError, match="k: expected at least 1"):
        split_balanced(make_array(), 0)


# ---------------------------------------------------------------- truncate, chunk, interleave
@pytest.mark.parametrize("ragged_dim", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 4, 99])
def test_truncate_slices_each_row(ragged_dim: int, length: int) -> None:
    arr = make_array(ragged_dim)
    for side, cut in (
        ("right", slice(0, length)),
        ("left", slice(-length or None, None if length else 0)),
    ):
        truncated = truncate(arr, length, side=side)
        assert truncated.layout.max_length is not None
        assert truncated.layout.max_length <= length
        for row, original in zip(truncated, arr, strict=True):
            np.testing.assert_array_equal(
                row, original[cut] if ragged_dim == 0 else original[:, cut]
            )
    with pytest.raises(ValueError, match="side: expected"):
        truncate(arr, 1, side="up")


@pytest.mark.parametrize("ragged_dim", [0, 1])
@pytest.mark.parametrize("size, overlap", [(3, 0), (3, 1), (4, 3), (1, 0), (50, 10)])
def test_chunk_windows_each_row(ragged_dim: int, size: int, overlap: int) -> None:
    arr = make_array(ragged_dim)
    windows, window_rows = chunk(arr, size, overlap=overlap)
    expected, numbers = [], []
    for i, row in enumerate(arr):
        row, start = np.moveaxis(row, ragged_dim, 0), 0
        while start < len(row):
            expected.append(np.moveaxis(row[start : start + size], 0, ragged_dim))
            numbers.append(i)
            if start + size >= len(row):
                break
            start += size - overlap
    assert window_rows.tolist() == numbers
    assert windows.batch_size == len(expected)
    for window, expected_window in zip(windows, expected, strict=True):
        np.testing.assert_array_equal(window, expected_window)
    with pytest.raises(ValueError, match="overlap: expected"):
        chunk(arr, size, overlap=size)


def test_interleave_marks_modality_and_segment() -> None:
    text, image = 0, 4
    samples: list[list[tuple[int, Any]]] = [
        [(text, np.ones((2, 3))), (image, np.full((3, 3), 2.0)), (text, np.full((1, 3), 3.0))],
        [],
        [(image, np.full((2, 3), 4.0)), (text, np.zeros((0, 3)))],
        [(text, np.full((1, 3), 5.0))],
    ]
    tokens, modality, segment = interleave(samples)
    assert tokens.lengths.tolist() == [6, 0, 2, 1]
    assert modality.layout is tokens.layout is segment.layout
    for i, sample in enumerate(samples):
        assert np.array_equal(
            tokens[i], np.concatenate([np.zeros((0, 3)), *(x for _, x in sample)])
        )
        assert modality[i].tolist() == [label for label, x in sample for _ in x]
        assert segment[i].tolist() == [j for j, (_, x) in enumerate(sample) for _ in x]
    images = tokens[modality == image]
    assert images.lengths.tolist() == [3, 0, 2, 0]
    changed = scree.at(tokens)[modality == image].set(0.0)
    assert changed.values.sum() == tokens.values.sum() - images.values.sum()
    with pytest.raises(TypeError, match="samples: expected a list of rows, got int"):
        interleave(5)
    with pytest.raises(
        TypeError, match=r"samples\[1\]: expected pairs of a modality and an array, got \[1\]"
    ):
        interleave([[(0, np.ones(2))], [1]])
    with pytest.raises(ValueError, match="samples: expected at least one segment"):
        interleave([[]])
    with pytest.raises(TypeError, match="samples: expected an integer for each segment's modality"):
        interleave([[("text", np.ones(2))]])


@pytest.mark.needs("torch")
def test_gradients_pass_through_batches() -> None:
    import torch

    parts = [torch.ones(n, 2, requires_grad=True) for n in (3, 0, 5)]
    arr = collate([{"x": part} for part in parts])["x"]
    windows, _ = chunk(truncate(arr, 4, side="left"), 3, overlap=1)
    interleave([[(0, row), (1, row)] for row in windows]).tokens.values.sum().backward()
    assert [part.grad[:, 0].tolist() for part in parts] == [[2, 2, 2], [], [0, 2, 2, 4, 2]]


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=pytest.mark.needs(name)) for name in LIBRARIES]
)
def test_functions_on_every_library(library: str) -> None:
    arr = make_array().with_values(make_array().values.astype(np.int32))
    converted = arr.to_backend(library)
    np.testing.assert_array_equal(
        truncate(converted, 3, side="left").to_numpy().values, truncate(arr, 3, side="left").values
    )
    np.testing.assert_array_equal(
        chunk(converted, 4, overlap=2)[0].to_numpy().values, chunk(arr, 4, overlap=2)[0].values
    )
    segments = [[(i, row)] for i, row in enumerate(converted)]
    assert (
        interleave(segments).modality.to_numpy().values.tolist()
        == np.repeat(range(5), LENGTHS).tolist()
    )
    assert [part.tolist() for part in split_balanced(converted, 2)] == [
        part.tolist() for part in split_balanced(arr, 2)
    ]
