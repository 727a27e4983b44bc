"""`scree.bucket`: a stream of batches of any sizes compiles a few times."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import scree


def batches(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [
        np.clip(rng.lognormal(4, 1, rng.integers(17, 33)), 1, 512).astype(int).tolist()
        for _ in range(count)
    ]


def test_a_thousand_batches_compile_at_most_a_dozen_times() -> None:
    import jax

    traces = []

    @jax.jit
    def total(x: scree.Array, row_mask: object) -> object:
        traces.append(x.shape)
        return jax.numpy.where(row_mask, scree.namespace(x).max(x, axis=1), 0).sum()

    for lengths in batches(1000):
        values = (
            np.random.default_rng(sum(lengths)).standard_normal(sum(lengths)).astype(np.float32)
        )
        rows = np.split(values, np.cumsum(lengths)[:-1])
        found = total(*scree.bucket(scree.from_lengths(jax.device_put(values), lengths)))
        assert abs(found - sum(row.max() for row in rows)) < 1e-4 * len(rows)
    assert len(traces) <= 12


@pytest.mark.parametrize("growth", [1.2, 2, 4])
def test_bucket_pads_after_the_values_within_the_bound(growth: float) -> None:
    for lengths in [*batches(50), [], [0], [0, 0], [7], [1] * 9, [4096]]:
        values = np.arange(1, sum(lengths) + 1)
        arr, row_mask = scree.bucket(scree.from_lengths(values, lengths), growth=growth)
        arr.validate()
        np.testing.assert_array_equal(np.asarray(arr.lengths)[row_mask], lengths)
        np.testing.assert_array_equal(arr.values[: len(values)], values)
        assert not arr.values[len(values) :].any()
        assert row_mask[: len(lengths)].all() and not row_mask[len(lengths) :].any()
        assert arr.total_length < max(growth * len(values) + 1, 2)
        assert arr.max_length < max(growth * max(lengths, default=0) + 1, 2)


def test_bucket_keeps_axes_dtypes_and_offsets() -> None:
    arr = scree.from_offsets(np.ones((2, 5, 3), np.float32), np.asarray([0, 2, 5]), ragged_dim=1)
    padded, _ = scree.bucket(arr, fill_value=-1)
    assert (
        padded.values.shape == (2, 8, 3)
        and padded.dtype == np.float32
        and padded.offsets.dtype == np.int64
    )
    assert (padded.values[:, 5:] == -1).all()
    with pytest.raises(ValueError, match="growth"):
        scree.bucket(arr, growth=1)


@pytest.mark.parametrize("growth", [1 + 1e-9, 1.001, float("inf")])
def test_bucket_growth_that_does_not_end_raises(growth: float) -> None:
    with pytest.raises(ValueError, match="growth: expected a"):
        scree.bucket(scree.from_lengths(np.arange(5), [2, 3]), growth=growth)


def test_bucket_pads_labels_like_the_rows() -> None:
    tokens = scree.from_lists([[1, 2], [], [3, 4, 5]])
    per_token, per_row = tokens.with_values(tokens.values * 10), np.asarray([[7.0], [8.0], [9.0]])
    padded, labels, scores, is_row = scree.bucket(
        tokens, per_token, per_row, fill_value=(0, -100, np.nan)
    )
    assert labels.layout is padded.layout
    rows, real = padded.tolist(), is_row.tolist()
    for row, label, score, flag in zip(rows, labels.tolist(), scores.tolist(), real, strict=True):
        assert label == ([10 * x for x in row] if flag else [-100] * len(row))
        assert flag or np.isnan(score).all()
    assert scores[:3].tolist() == per_row.tolist() and real[:3] == [True] * 3


@pytest.mark.parametrize(
    ("others", "fill_value", "message"),
    [
        ([np.zeros(2)], 0, r"others\[0\]: expected one entry for each of 3 rows"),
        ([scree.from_lists([[1], [2], [3]])], 0, r"others\[0\]"),
        ([np.zeros(3)], (0,), "fill_value: expected one value for each of 2 arrays"),
        ([np.zeros(3, int)], (0, 0.5), "fill_value"),
    ],
)
def test_bucket_of_other_rows_raises(others: Any, fill_value: Any, message: str) -> None:
    tokens = scree.from_lists([[1, 2], [], [3, 4, 5]])
    with pytest.raises((TypeError, ValueError), match=message):
        scree.bucket(tokens, *others, fill_value=fill_value)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_many_token_counts_outside_of_jit_warn_once(is_compiled: bool) -> None:
    code = f"""
import warnings, jax, numpy as np, scree
def total(x):
    return scree.namespace(x).sum(x, axis=1)
compiled = jax.jit(total)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for n in range(1, 30):
        x = scree.from_lengths(jax.device_put(np.arange(n)), [n])
        compiled(scree.bucket(x)[0]) if {is_compiled} else total(x)
print(*[str(w.message) for w in caught if "jax.jit" in str(w.message)], sep="\\n")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.split("\n")
    assert [("scree.bucket" in line) for line in lines if line] == [True] * (not is_compiled)
