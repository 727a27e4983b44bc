"""Activations where formulas fail: at 0, at infinity and for large numbers; and the accuracy of erf."""

from __future__ import annotations

import math

import numpy as np
import pytest
from libraries import NAMES, load

import scree
from scree.ops.activations import erf_by_polynomials

POINTS = np.asarray([-math.inf, -1e30, 0.0, 1e30, math.inf], np.float32)
#: Call -> values and gradients at `POINTS`.
LIMITS = {
    "relu": (scree.relu, [0, 0, 0, 1e30, math.inf], [0, 0, 0, 1, 1]),
    "gelu": (scree.gelu, [0, 0, 0, 1e30, math.inf], [0, 0, 0.5, 1, 1]),
    "gelu tanh": (
        lambda x: scree.gelu(x, approximate="tanh"), [0, 0, 0, 1e30, math.inf], [0, 0, 0.5, 1, 1],
    ),
    "silu": (scree.silu, [0, 0, 0, 1e30, math.inf], [0, 0, 0.5, 1, 1]),
    "erf": (scree.erf, [-1, -1, 0, 1, 1], [0, 0, 2 / math.sqrt(math.pi), 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_activations_at_limits_have_finite_gradients(name: str, case: str) -> None:
    arrays, (function, values, gradients) = load(name), LIMITS[case]
    x = arrays.make(POINTS)
    np.testing.assert_allclose(arrays.library.read(function(x)), values, rtol=1e-6)
    if arrays.library.grad is None:
        return
    total = arrays.library.grad(lambda x: arrays.xp.sum(function(x)), x)
    np.testing.assert_allclose(arrays.library.read(total[0]), gradients, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2.5), ("float64", 2.5)])
def test_erf_by_polynomials_is_accurate(dtype: str, limit: float) -> None:
    rng = np.random.default_rng(0)
    parts = [
        rng.uniform(-7, 7, 20000),
        rng.uniform(-1.1, 1.1, 20000),
        10.0 ** rng.uniform(-30, 0, 999),
    ]
    x = np.concatenate([*parts, [0.0, 1.0, np.nextafter(1, 0), 6.0]]).astype(dtype)
    exact = np.asarray([math.erf(number) for number in x.tolist()])
    actual = erf_by_polynomials(np, x)
    assert actual.dtype == dtype
    spacing = np.spacing(np.abs(exact).astype(dtype)).astype(np.float64)
    assert np.max(np.abs(actual - exact) / spacing) < limit
    np.testing.assert_array_equal(
        erf_by_polynomials(np, np.asarray([-np.inf, np.inf, np.nan, 1e300])), [-1, 1, np.nan, 1]
    )


@pytest.mark.parametrize("name", NAMES)
def test_erf_in_several_blocks_equals_one_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scree.ops import activations

    arrays = load(name)
    for shape in ((3, 5), (0, 2), ()):
        x = arrays.make(np.linspace(-3, 3, int(np.prod(shape))).reshape(shape).astype(np.float32))
        whole = arrays.library.read(scree.erf(x))
        with monkeypatch.context() as patch:
            patch.setattr(activations, "BLOCK", 4)
            np.testing.assert_array_equal(arrays.library.read(scree.erf(x)), whole)
