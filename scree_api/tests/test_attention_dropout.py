"""Attention with dropout: the random numbers, the mask, and its use in both passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import NAMES, load

import scree
from scree.ops import attention as attention_module
from scree.ops.philox import as_seed, kept_pairs, philox, threshold
from scree_conformance import oracle

#: Counter, key and result of Philox-4x32 with 7 rounds, as published with the Random123 library.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]  # fmt: skip
LENGTHS, KEY_LENGTHS = [5, 0, 70, 33], [90, 3, 70, 20]
SEED = (123 << 33) + 77


def words(text: str, dtype: Any = np.uint32) -> tuple[Any, ...]:
    return tuple(np.asarray([int(x, 16)], dtype) for x in text.split())


def draw(lengths: list[int], heads: int, seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((sum(lengths), heads, 8)).astype(dtype)


def make_qkv(make: Any = np.asarray, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    q, k, v = (
        draw(n, h, i, dtype) for i, (n, h) in enumerate(((LENGTHS, 4), *((KEY_LENGTHS, 2),) * 2))
    )
    keys = scree.from_lengths(make(k), KEY_LENGTHS)
    return scree.from_lengths(make(q), LENGTHS), keys, keys.with_values(make(v))


def expected(dropout: float, seed: int, **options: Any) -> np.ndarray:
    rows = [
        np.split(draw(n, h, i).astype(np.float64), np.cumsum(n)[:-1])
        for i, (n, h) in enumerate(((LENGTHS, 4), *((KEY_LENGTHS, 2),) * 2))
    ]
    return np.concatenate(oracle.attention(*rows, dropout=dropout, seed=seed, **options)[0])


def mask(dropout: float, seed: int, queries: int, keys: int, heads: int = 1) -> np.ndarray:
    """Return the kept pairs (heads, keys, queries) of one row."""
    x = scree.from_lengths(np.zeros((queries, heads, 1)), [queries])
    positions, zero = np.arange(queries)[None], np.zeros(1, np.int64)
    seeds = as_seed(seed, x)
    return kept_pairs(x.layout, seeds, dropout, positions, zero, zero, heads, keys)[0]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize("counter, key, result", KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(
    counter: str, key: str, result: str, dtype: Any
) -> None:
    got = philox(words(counter, dtype), words(key, dtype))
    assert [f"{int(x[0]):08x}" for x in got] == result.split()
    numbers = [[int(x, 16) for x in text.split()] for text in (counter, key, result)]
    assert oracle.philox(numbers[0], numbers[1]) == numbers[2]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 70), "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_dropout_drops_the_pairs_of_the_oracle(name: str, options: dict[str, Any]) -> None:
    arrays = load(name)
    out = scree.attention(*make_qkv(arrays.make), dropout=0.3, seed=SEED, **options)
    got = arrays.library.read(out.values)
    np.testing.assert_allclose(got, expected(0.3, SEED, **options), rtol=1e-4, atol=1e-4)


# Few functions of PyTorch take uint32, and JAX has int64 only in another mode.
@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in NAMES
        for dtype in ("int32", "int64", "uint32")
        if (name, dtype) not in (("torch", "uint32"), ("jax", "int64"))
    ],
)
def test_dropout_seed_as_array_equals_the_number(name: str, dtype: str) -> None:
    arrays = load(name)
    seed = arrays.make(np.asarray([77], dtype))
    out = scree.attention(*make_qkv(arrays.make), dropout=0.3, seed=seed)
    got = arrays.library.read(out.values)
    np.testing.assert_allclose(got, expected(0.3, 77), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.01, 0.17, 0.5, 0.9])
def test_dropout_rate_is_the_probability(dropout: float) -> None:
    """The rate of 2**20 pairs is within five standard deviations, in every head and of both halves."""
    kept = mask(dropout, 5, 512, 512, heads=4)
    deviation = np.sqrt(dropout * (1 - dropout) / kept[0].size)
    assert np.abs(1 - kept.mean(axis=(1, 2)) - dropout).max() < 5 * deviation
    for part in (kept[:, ::2], kept[:, 1::2], kept[:, :, :256], kept[:, 8:16]):
        assert abs(1 - part.mean() - dropout) < 5 * np.sqrt(dropout * (1 - dropout) / part.size)


def test_dropout_of_neighbours_heads_rows_and_seeds_is_uncorrelated() -> None:
    kept = mask(0.5, 5, 512, 512, heads=2) - 0.5
    other = mask(0.5, 6, 512, 512, heads=2) - 0.5
    high = mask(0.5, 5 + (1 << 32), 512, 512, heads=2) - 0.5
    bound = 5 * 0.25 / np.sqrt(kept.size / 2)
    for shift in (1, 2, 4, 8, 16):
        assert abs((kept[:, shift:] * kept[:, :-shift]).mean()) < bound * 1.1
        assert abs((kept[:, :, shift:] * kept[:, :, :-shift]).mean()) < bound * 1.1
    assert abs((kept[0] * kept[1]).mean()) < bound
    assert max(abs((kept * x).mean()) for x in (other, high)) < bound


def test_dropout_does_not_depend_on_tiles_or_ranges_of_rows(monkeypatch: Any) -> None:
    whole = scree.attention(*make_qkv(), dropout=0.3, seed=SEED).values
    monkeypatch.setattr(attention_module, "MAX_TILE_BYTES", 1 << 12)
    np.testing.assert_allclose(
        scree.attention(*make_qkv(), dropout=0.3, seed=SEED).values, whole, rtol=1e-5, atol=1e-6
    )
    monkeypatch.setattr(attention_module, "QUERY_TILE", 16)
    np.testing.assert_allclose(
        scree.attention(*make_qkv(), dropout=0.3, seed=SEED).values, whole, rtol=1e-5, atol=1e-6
    )


def test_dropout_mean_over_seeds_is_the_output_without_dropout() -> None:
    x = scree.from_lengths(draw([20], 2, 0, np.float64), [20])
    outs = [scree.attention(x, x, x, dropout=0.4, seed=seed).values for seed in range(200)]
    error = np.mean(outs, axis=0) - scree.attention(x, x, x).values
    deviation = np.std(outs, axis=0) / np.sqrt(len(outs))
    assert np.abs(error / deviation).max() < 6


@pytest.mark.needs("torch")
def test_dropout_gradient_uses_the_mask_of_the_forward_pass() -> None:
    import torch

    q, k, v = (
        torch.from_numpy(draw([20], heads, i, np.float64)).requires_grad_()
        for i, heads in enumerate((4, 2, 2))
    )

    def attend(*values: Any) -> Any:
        x, y, z = (scree.from_lengths(a, [5, 0, 15]) for a in values)
        return scree.attention(
            x, y, y.with_values(z.values), causal=True, dropout=0.4, seed=3
        ).values

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


@pytest.mark.needs("jax")
def test_dropout_traced_seed_gives_the_same_mask() -> None:
    import jax

    q, k, v = make_qkv(jax.numpy.asarray)

    def attend(seed: Any) -> Any:
        return scree.attention(q, k, v, dropout=0.3, seed=seed).values

    got = jax.jit(attend)(jax.numpy.asarray(77, "uint32"))
    np.testing.assert_allclose(np.asarray(got), expected(0.3, 77), rtol=1e-4, atol=1e-4)


def test_dropout_below_the_resolution_is_none() -> None:
    """A probability that is rounded to 0 needs no seed; the highest one keeps some weights."""
    q, k, v = make_qkv()
    got = scree.attention(q, k, v, dropout=1e-6).values
    np.testing.assert_array_equal(got, scree.attention(q, k, v).values)
    assert threshold(1 - 1e-9) == 2**16 - 1


def test_dropout_keeps_the_log_sum_exp() -> None:
    q, k, v = make_qkv()
    _, lse = scree.attention(q, k, v, dropout=0.5, seed=1, return_lse=True)
    _, without = scree.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(lse.values, without.values, rtol=1e-6)
