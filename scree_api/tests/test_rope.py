"""The options of `rope`: scaled frequencies, tables, and the errors of options that exclude each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from libraries import NAMES, load

import scree

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": LINEAR,
    "llama3": LLAMA,
    "yarn": YARN,
    "yarn of mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn of one mscale": YARN | {"mscale": 0.7},
    "yarn of betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn of a factor": YARN | {"attention_factor": 1.3, "truncate": False},
    "yarn of short rows": YARN | {"original_max_position_embeddings": 8},
}


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
@pytest.mark.parametrize(
    ("head_dim", "part", "theta"), [(64, 1.0, 10000.0), (128, 1.0, 5e5), (80, 0.25, 1e6)]
)
def test_rope_frequencies_agree_with_transformers(
    name: str, head_dim: int, part: float, theta: float
) -> None:
    from transformers import LlamaConfig, modeling_rope_utils

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=65536,
        rope_parameters={**SCALINGS[name], "rope_theta": theta, "partial_rotary_factor": part},
    )
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    expected, expected_factor = compute(config, "cpu")
    rotary_dim = int(part * head_dim)
    scaling = SCALINGS[name]
    inv_freq, factor = scree.rope_frequencies(rotary_dim, theta=theta, scaling=scaling)
    # The ramp of YaRN without rounding amplifies the float32 numbers of the reference.
    np.testing.assert_allclose(inv_freq, expected.numpy(), rtol=1e-5)
    assert inv_freq.dtype == np.float64 and factor == pytest.approx(expected_factor)
    # `rope` takes the dictionary of the configuration as it is.
    x = scree.from_lengths(np.ones((3, 1, head_dim)), [1, 2])
    options = {"theta": theta, "rotary_dim": rotary_dim}
    got = scree.rope(x, scaling=config.rope_parameters, **options)
    assert np.array_equal(got.values, scree.rope(x, scaling=scaling, **options).values)


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("name", NAMES)
def test_rope_with_scaling_is_the_rotation_by_its_frequencies(name: str, case: str) -> None:
    library = load(name)
    x = np.random.default_rng(0).standard_normal((7, 2, 12)).astype(np.float32)
    inv_freq, factor = scree.rope_frequencies(8, theta=500.0, scaling=SCALINGS[case])
    angle = np.asarray([0, 1, 2, 3, 0, 1, 2])[:, None, None] * inv_freq
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    a, b = x[..., :4], x[..., 4:8]
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 8:]], -1)
    arr = scree.from_lengths(library.make(x), [4, 0, 3])
    got = scree.rope(arr, theta=500.0, rotary_dim=8, scaling=SCALINGS[case])
    np.testing.assert_allclose(library.library.read(got.values), expected, rtol=0, atol=2e-6)


def test_rope_gradient_does_not_touch_the_passed_elements_and_the_tables() -> None:
    values = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(3, 2, dtype=torch.float64)

    def rotate(values: torch.Tensor) -> torch.Tensor:
        x = scree.from_lengths(values, [3, 0, 2])
        return scree.rope(x, cos=angle.cos(), sin=angle.sin()).values

    assert torch.autograd.gradcheck(rotate, values)
    weights = torch.randn(5, 2, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(rotate(values), values, weights)
    assert torch.equal(gradient[..., 4:], weights[..., 4:])


def test_rope_frequencies_compile() -> None:
    values = torch.randn(5, 2, 8)
    x = scree.from_lengths(values, [3, 0, 2])

    def rotate(values: torch.Tensor) -> torch.Tensor:
        out = scree.rope(x.with_values(values), theta=500.0, rotary_dim=6, scaling=YARN)
        return scree.rope(out, inv_freq=torch.ones(2)).values

    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(values), rotate(values))


def half(x: float = 1.0) -> np.ndarray:
    return np.full(4, x)


#: Options of `rope` for a head_dim of 8 and rows of up to 3 tokens, the error and its message.
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "odd": ({"rotary_dim": 3}, ValueError, "rotary_dim: expected an even number.*got 3"),
    "zero": ({"rotary_dim": 0}, ValueError, "rotary_dim: expected an even number.*got 0"),
    "wide": ({"rotary_dim": 10}, ValueError, "at most head_dim 8, got 10"),
    "float": ({"rotary_dim": 4.0}, TypeError, "rotary_dim: expected a Python integer"),
    "only cos": ({"cos": np.ones((3, 4))}, TypeError, "sin: expected a table as cos, got None"),
    "only sin": ({"sin": np.ones((3, 4))}, TypeError, "cos: expected a table as sin, got None"),
    "list": ({"inv_freq": [1.0] * 4}, TypeError, "inv_freq: expected a dense array"),
    "integers": ({"inv_freq": np.ones(4, int)}, TypeError, "inv_freq: expected a real floating"),
    "two axes": ({"inv_freq": np.ones((3, 4))}, ValueError, "inv_freq: expected shape"),
    "one axis": ({"cos": half(), "sin": half()}, ValueError, "cos: expected shape"),
    "many": ({"inv_freq": np.ones(5)}, ValueError, "inv_freq: expected 1 to 4 frequencies"),
    "few": ({"inv_freq": np.ones(0)}, ValueError, "inv_freq: expected 1 to 4 frequencies"),
    "width": ({"inv_freq": half(), "rotary_dim": 4}, ValueError, "rotary_dim: expected 8"),
    "theta": ({"inv_freq": half(), "theta": 5.0}, TypeError, "theta: expected its default"),
    "scaled": ({"inv_freq": half(), "scaling": LINEAR}, TypeError, "scaling: expected None"),
    "all": (
        {"inv_freq": half(), "cos": np.ones((3, 4)), "sin": np.ones((3, 4))},
        TypeError,
        "inv_freq: expected None with cos and sin",
    ),
    "shapes": ({"cos": np.ones((3, 4)), "sin": np.ones((3, 3))}, ValueError, "sin: expected shape"),
    "short": (
        {"cos": np.ones((2, 4)), "sin": np.ones((2, 4))},
        ValueError,
        "cos: expected at least 3 rows, one per position, got 2",
    ),
    "empty table": ({"cos": np.ones((0, 4)), "sin": np.ones((0, 4))}, ValueError, "got 0"),
    "negative": (
        {"cos": np.ones((9, 4)), "sin": np.ones((9, 4)), "start": np.asarray([0, 1, -1])},
        ValueError,
        "start: expected positions of at least 0 with cos, got -1",
    ),
    "a number": ({"scaling": 2.0}, TypeError, "scaling: expected a RopeScaling or a dictionary"),
    "no type": ({"scaling": {"factor": 2.0}}, TypeError, "expected the key 'rope_type'"),
    "unknown type": ({"scaling": {"type": "dynamic"}}, ValueError, "got 'dynamic'; compute the"),
    "types": ({"scaling": LINEAR | {"type": "yarn"}}, ValueError, "equal rope_type and type"),
    "unknown key": ({"scaling": LINEAR | {"mystery": 1}}, TypeError, "got 'mystery'; remove it"),
    "other key": ({"scaling": LINEAR | {"beta_fast": 1.0}}, TypeError, "expected no beta_fast"),
    "missing key": ({"scaling": {"rope_type": "yarn"}}, TypeError, "expected factor for rope_type"),
    "order": ({"scaling": LLAMA | {"low_freq_factor": 4.0}}, ValueError, "low_freq_factor <"),
    "theta 1": ({"scaling": YARN, "theta": 1.0}, ValueError, "theta: expected a number other than"),
    "model's theta": ({"scaling": LINEAR | {"rope_theta": 5.0}}, ValueError, "theta: expected 5.0"),
    "model's part": (
        {"scaling": LINEAR | {"partial_rotary_factor": 0.5}},
        ValueError,
        "rotary_dim: expected 4, head_dim 8 times",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_rope_with_wrong_options_raises(case: str) -> None:
    options, error, message = WRONG[case]
    x = scree.from_lengths(np.ones((5, 2, 8)), [3, 0, 2])
    with pytest.raises(error, match=message):
        scree.rope(x, **options)
    options = {name: value for name, value in options.items() if name != "start"}
    if case != "negative":  # a cache has no negative positions
        caches, table = np.zeros((2, 4, 4, 2, 8)), np.asarray([[0], [1], [2]])
        with pytest.raises(error, match=message):
            scree.append_paged(*caches, x, x, table, np.asarray([3, 0, 2]), rope=options)
        assert not caches.any()


def test_rope_with_tables_that_ask_for_a_gradient_raises() -> None:
    x, table = scree.from_lengths(torch.ones(2, 1, 4), [2]), torch.ones(2, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"inv_freq: expected a table without gradient.*detach\(\)"
    ):
        scree.rope(x, inv_freq=table)


def test_rope_with_tables_ignores_the_positions_of_the_tail_and_of_empty_rows() -> None:
    x = scree.Array.unchecked(np.ones((9, 1, 4)), np.asarray([0, 2, 2]), 0, 2)
    start = np.asarray([1, 70])
    out = scree.rope(x, cos=np.zeros((3, 2)), sin=np.ones((3, 2)), start=start)
    np.testing.assert_array_equal(out.values[:2, 0], [[-1.0, -1.0, 1.0, 1.0]] * 2)
    empty = scree.from_lengths(np.ones((0, 1, 4)), [])
    assert scree.rope(empty, cos=np.zeros((3, 2)), sin=np.ones((3, 2))).values.shape == (0, 1, 4)
