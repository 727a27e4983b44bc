"""`scree.bucket`: a stream of batches of any sizes compiles a few times."""

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
