"""Attention with values that are not finite, and with a scale that is not positive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import NAMES, load

import scree
from scree_conformance import oracle

LENGTHS = [3, 0, 5, 70, 1]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "both sides": {"window": (2, 1)},
    "softcap": {"causal": True, "softcap": 2.0},
    "slopes": {"causal": True, "alibi_slopes": [0.5, 0.25]},
    "all keys": {},
}


def expected_output(q: list, k: list, v: list, scale: float, **options: Any) -> list[np.ndarray]:
    """Compute every query from the keys that it sees alone."""
    softcap, slopes = options.get("softcap"), options.get("alibi_slopes")
    out = []
    for queries, keys, values in zip(q, k, v, strict=True):
        n = len(queries)
        mask = oracle.attention_mask(n, n, options.get("causal", False), options.get("window"))
        row = np.zeros((n, *queries.shape[1:]))
        for i, head in np.ndindex(n, queries.shape[1]):
            seen = np.flatnonzero(mask[i])
            with np.errstate(all="ignore"):
                scores = keys[seen, 0] @ queries[i, head] * scale
                scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
                scores = scores if slopes is None else scores - slopes[head] * np.abs(seen - i)
                weights = np.exp(scores - scores.max())
                row[i, head] = weights / weights.sum() @ values[seen, 0]
        out.append(row)
    return out


def draw(seed: int, heads: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((sum(LENGTHS), heads, 8)).astype(np.float32)


def attend(name: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Return the output of scree by row, and the output of the definition."""
    arrays = load(name)
    x, y, z = (scree.from_lengths(arrays.make(a), LENGTHS) for a in (q, k, v))
    y, z = (x.with_values(a.values) for a in (y, z))
    rows = [np.split(a.astype(np.float64), np.cumsum(LENGTHS)[:-1]) for a in (q, k, v)]
    reference = {key: value for key, value in options.items() if key not in ("kernel", "scale")}
    expected = expected_output(*rows, options.get("scale", 8**-0.5), **reference)
    if "alibi_slopes" in options:
        slopes = np.asarray(options["alibi_slopes"], np.float32)
        options = {**options, "alibi_slopes": arrays.make(slopes)}
    got = scree.attention(x, y, z, **options)
    return arrays.library.read(got.values), np.concatenate(expected)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_attention_scale_not_positive_gives_the_definition(
    name: str, case: str, scale: float
) -> None:
    got, expected = attend(name, draw(0, 2), draw(1, 1), draw(2, 1), scale=scale, **OPTIONS[case])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_attention_scale_not_positive_has_a_finite_gradient(scale: float) -> None:
    import torch

    values = torch.from_numpy(draw(0, 2)).requires_grad_()
    x = scree.from_lengths(values, LENGTHS)
    scree.attention(x, x, x, causal=True, scale=scale).values.square().sum().backward()
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_attention_key_that_is_not_seen_has_no_influence(
    name: str, case: str, number: float, argument: str
) -> None:
    q, k, v = draw(0, 2), draw(1, 1), draw(2, 1)
    changed = k if argument == "k" else v
    ends = np.cumsum(LENGTHS)
    changed[ends[3] - 1] = number
    changed[ends[3] - 10, 0, 2] = number
    changed[ends[0] - 1, 0, 1] = number
    changed[ends[2] - 2, 0, 1] = -number
    kernel = "standard" if name == "torch" else None  # PyTorch's own kernel does not promise it
    got, expected = attend(name, q, k, v, kernel=kernel, **OPTIONS[case])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(got[: ends[0] - 1]).all() or case in ("all keys", "both sides")


@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax", "mlx")])
def test_attention_gradient_of_a_query_ignores_keys_that_it_does_not_see(
    name: str, argument: str
) -> None:
    arrays = load(name)
    lengths = [4, 70]
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, sum(lengths), 1, 8)).astype(np.float32)
    (k if argument == "k" else v)[[3, 73]] = np.nan
    keys, values = arrays.make(k), arrays.make(v)
    kernel = "standard" if name == "torch" else None
    is_first = arrays.make((np.arange(sum(lengths)) % 4 == 0).astype(np.float32)[:, None, None])

    def loss(x: Any) -> Any:
        x = scree.from_lengths(x, lengths, max_length=70)
        y, z = x.with_values(keys), x.with_values(values)
        out = scree.attention(x, y, z, causal=True, kernel=kernel).values
        xp = scree.namespace(out)
        return xp.sum(xp.where(is_first > 0, out, xp.zeros_like(out)))

    (grad,) = arrays.library.grad(loss, arrays.make(q))
    assert np.isfinite(arrays.library.read(grad)[[0, 1, 2, 4, 5, 8, 40]]).all()


@pytest.mark.needs("jax")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_attention_gradient_of_jax_loops_ignores_nonfinite_keys_that_are_not_seen(
    number: float, softcap: float | None
) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = np.random.default_rng(0).standard_normal((3, 12, 1, 8)).astype(np.float32)
    k[7] = number

    def loss(q: Any, k: Any, v: Any) -> Any:
        queries = scree.from_lengths(q, [8, 4], max_length=8)
        y, z = queries.with_values(k), queries.with_values(v)
        out = scree.attention(queries, y, z, causal=True, softcap=softcap, kernel="loops").values
        return jnp.sum(out[jnp.asarray([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11])])

    got, expected = (
        jax.grad(loss)(*(jnp.asarray(x) for x in (q, keys, v)))
        for keys in (k, np.where(np.isfinite(k), k, 0))
    )
    np.testing.assert_allclose(np.delete(got, 7, 0), np.delete(expected, 7, 0), rtol=1e-5)


@pytest.mark.needs("jax")
def test_attention_of_jax_loops_rejects_deterministic_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    x = scree.from_lengths(jax.numpy.ones((5, 1, 8)), [2, 3])
    scree.attention(x, x, x, deterministic=True, kernel="loops")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="no fixed order"):
        scree.attention(x, x, x, deterministic=True, kernel="loops")


def gradients(q: Any, k: Any, v: Any, grad: Any, mask: Any, scale: float) -> tuple[Any, Any, Any]:
    """Return the gradients of one row in float64, one head of queries at a time."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for head in range(q.shape[1]):
        key_head = head * k.shape[1] // q.shape[1]
        keys, values = k[:, key_head], v[:, key_head]
        scores = np.where(mask, q[:, head] @ keys.T * scale, -np.inf)
        shift = scores.max(1, keepdims=True)
        weights = np.where(mask, np.exp(scores - np.where(np.isinf(shift), 0, shift)), 0)
        weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
        score_grads = grad[:, head] @ values.T
        score_grads = weights * (score_grads - (weights * score_grads).sum(1, keepdims=True))
        dv[:, key_head] += weights.T @ grad[:, head]
        dk[:, key_head] += score_grads.T @ q[:, head] * scale
        dq[:, head] = score_grads @ keys * scale
    return dq, dk, dv


@pytest.mark.needs("jax")
@pytest.mark.parametrize(
    ("q_lengths", "window", "chunk"),
    [([70, 0, 300, 1, 150], (None, 0), 3), ([9, 4, 290, 40, 0], (30, 12), 7)],
)
def test_attention_of_jax_in_steps_of_accelerators_gives_the_gradients(
    q_lengths: list[int], window: tuple[int | None, int], chunk: int
) -> None:
    import jax
    import jax.numpy as jnp

    from scree.providers import jax_attention

    k_lengths, scale = [70, 3, 300, 1, 150], 0.3
    rng = np.random.default_rng(0)
    totals = sum(q_lengths) + 5, sum(k_lengths) + 5
    q, grad = rng.standard_normal((2, totals[0], 2, 8))
    k, v = rng.standard_normal((2, totals[1], 1, 8))
    scores = chunk * 2 * 128 * 256
    blocking = jax_attention.ACCELERATOR_BLOCKING._replace(min_scores=scores, max_scores=scores)
    options = jax_attention.Options(window, scale, None, 128, blocking)
    offsets = [np.concatenate([[0], np.cumsum(x)]) for x in (q_lengths, k_lengths)]
    arguments = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    (out, lse), residuals = jax_attention.forward(
        options, *arguments, *(jnp.asarray(x, jnp.int32) for x in offsets)
    )
    cotangents = jnp.asarray(grad, out.dtype), jnp.zeros_like(lse)
    got = jax_attention.backward(options, residuals, cotangents)[:3]
    expected = [np.zeros(x.shape) for x in (q, k, v)]
    for q_start, q_end, k_start, k_end in zip(
        offsets[0], offsets[0][1:], offsets[1], offsets[1][1:], strict=False
    ):
        of_q, of_k = slice(q_start, q_end), slice(k_start, k_end)
        mask = oracle.attention_mask(q_end - q_start, k_end - k_start, False, window)
        if q_end > q_start:
            parts = gradients(q[of_q], k[of_k], v[of_k], grad[of_q], mask, scale)
            for total, part, rows in zip(expected, parts, (of_q, of_k, of_k), strict=True):
                total[rows] = part
    for array, reference, ends in zip(
        got, expected, (offsets[0], offsets[1], offsets[1]), strict=True
    ):
        array, reference = np.asarray(array)[: ends[-1]], reference[: ends[-1]]
        np.testing.assert_allclose(array, reference, rtol=1e-3, atol=1e-4)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), got))
