"""Options of the losses, alone and together, against a loop over tokens in float64 and PyTorch's own function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import NAMES, SmallArrays, load

import scree

CLASSES, WIDTH, LENGTHS = 7, 5, [3, 0, 4, 2]
TARGETS = np.asarray([3, -100, 0, 6, 6, -100, 1, 2, 5], np.int32)
#: "weights" stands for class weights.
OPTIONS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0},
    "z_loss": {"z_loss": 0.3},
    "class_weights": {"class_weights": True},
    "class_weights and label_smoothing": {"class_weights": True, "label_smoothing": 1.0},
    "class_weights and z_loss": {"class_weights": True, "z_loss": 0.3},
    "all": {"class_weights": True, "label_smoothing": 0.2, "softcap": 3.0, "z_loss": 0.1},
}
REDUCTIONS = ("mean", "sum", "row_mean", "none")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) * 2


def weights() -> np.ndarray:
    return np.random.default_rng(9).uniform(0.3, 2.0, CLASSES)


def options_of(name: str, make: Any) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "class_weights" in options:
        options["class_weights"] = make(weights())
    return options


def token_losses(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """(tokens, 3): the loss without z-loss, the weight of the target, and the z-loss."""
    results = []
    weight = options.get("class_weights", np.ones(CLASSES))
    smoothing = options.get("label_smoothing", 0.0)
    for x, target in zip(logits, TARGETS, strict=True):
        if target == -100:
            results.append((0.0, 0.0, 0.0))
            continue
        if "softcap" in options:
            x = options["softcap"] * np.tanh(x / options["softcap"])
        lse = np.log(np.sum(np.exp(x)))
        goal = np.full(CLASSES, smoothing / CLASSES)
        goal[target] += 1 - smoothing
        loss = np.sum(goal * weight * (lse - x))
        results.append((loss, weight[target], options.get("z_loss", 0.0) * lse**2))
    return np.asarray(results)


def loop(logits: np.ndarray, reduction: str, options: dict[str, Any]) -> np.ndarray:
    loss, weight, square = token_losses(logits, options).T
    counted = (TARGETS != -100).astype(float)
    if reduction == "none":
        return np.asarray(loss + square)
    if reduction == "sum":
        return np.asarray(np.sum(loss + square))

    def mean(part: slice) -> np.ndarray:
        loss_mean = np.sum(loss[part]) / np.sum(weight[part])
        return np.asarray(loss_mean + np.sum(square[part]) / np.sum(counted[part]))

    if reduction == "mean":
        return mean(slice(None))
    ends = np.cumsum(LENGTHS)
    with np.errstate(invalid="ignore"):
        return np.asarray([mean(slice(end - n, end)) for end, n in zip(ends, LENGTHS, strict=True)])


def gradient_of(f: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return the gradient of ``sum(dy * f(x))`` by central differences; NaN results do not count."""
    gradient, step = np.zeros_like(x), 1e-5
    for index in np.ndindex(x.shape):
        high, low = x.copy(), x.copy()
        high[index] += step
        low[index] -= step
        gradient[index] = np.nansum(dy * (f(high) - f(low))) / (2 * step)
    return gradient


def run(arrays: SmallArrays, logits: Any, reduction: str, options: dict[str, Any]) -> Any:
    rows = scree.from_lengths(logits, LENGTHS)
    loss = scree.cross_entropy(
        rows, rows.with_values(arrays.i(TARGETS)), reduction=reduction, **options
    )
    return loss.values if reduction == "none" else loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_cross_entropy_options_agree_with_a_loop(name: str, option: str, reduction: str) -> None:
    arrays, logits = load(name), draw(sum(LENGTHS), CLASSES)
    options = options_of(option, lambda x: arrays.make(x.astype(np.float32)))
    loss = run(arrays, arrays.make(logits.astype(np.float32)), reduction, options)
    expected = loop(logits, reduction, options_of(option, lambda x: x))
    np.testing.assert_allclose(arrays.library.read(loss), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "option", ["label_smoothing", "softcap", "class_weights and z_loss", "all"]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "jax", "mlx")])
def test_cross_entropy_options_have_gradients(name: str, option: str, reduction: str) -> None:
    arrays, logits = load(name), draw(sum(LENGTHS), CLASSES)
    options = options_of(option, lambda x: arrays.make(x.astype(np.float32)))
    exact = options_of(option, lambda x: x)
    dy = np.linspace(0.5, 1.5, loop(logits, reduction, exact).size)
    dy = dy.reshape(loop(logits, reduction, exact).shape)
    if reduction == "row_mean":
        dy[1] = 0  # the empty row, whose mean is NaN

    def total(x: Any) -> Any:
        loss = run(arrays, x, reduction, options)
        factors = arrays.make(dy.astype(np.float32))
        loss = arrays.xp.where(factors > 0, loss, arrays.xp.zeros_like(factors))
        return arrays.xp.sum(loss * factors)

    (gradient,) = arrays.library.grad(total, arrays.make(logits.astype(np.float32)))
    expected = gradient_of(lambda x: loop(x, reduction, exact), logits, dy)
    np.testing.assert_allclose(arrays.library.read(gradient), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("option", ["label_smoothing", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_linear_cross_entropy_options_agree_with_a_loop(
    name: str, option: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_parts:
        for module in ("scree.ops.cross_entropy", "scree.providers.jax_cross_entropy"):
            if name == "jax" or not module.startswith("scree.providers"):
                monkeypatch.setattr(f"{module}.tokens_per_part", lambda call: 4)
    arrays = load(name)
    x, weight, bias = draw(sum(LENGTHS), WIDTH), draw(CLASSES, WIDTH, seed=1), draw(CLASSES, seed=2)
    options = options_of(option, lambda x: arrays.make(x.astype(np.float32)))
    exact = options_of(option, lambda x: x)

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        rows = scree.from_lengths(x, LENGTHS)
        return scree.linear_cross_entropy(
            rows, weight, rows.with_values(arrays.i(TARGETS)), bias, **options
        )

    inputs = [arrays.make(a.astype(np.float32)) for a in (x, weight, bias)]
    expected = loop(x @ weight.T + bias, "mean", exact)
    np.testing.assert_allclose(arrays.library.read(loss(*inputs)), expected, rtol=5e-6)
    if arrays.library.grad is None:
        return
    gradients = arrays.library.grad(loss, *inputs)
    exact_inputs = [x, weight, bias]
    for i, gradient in enumerate(gradients):

        def loss_at(part: np.ndarray, i: int = i) -> np.ndarray:
            x, weight, bias = (part if i == j else a for j, a in enumerate(exact_inputs))
            return loop(x @ weight.T + bias, "mean", exact)

        expected = gradient_of(loss_at, exact_inputs[i], np.asarray(1.0))
        np.testing.assert_allclose(arrays.library.read(gradient), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_agrees_with_torch(reduction: str, weighted: bool, smoothing: float) -> None:
    import torch

    logits = torch.tensor(draw(9, CLASSES), requires_grad=True)
    targets = torch.tensor(TARGETS.astype(np.int64))
    class_weights = torch.tensor(weights()) if weighted else None
    expected = torch.nn.functional.cross_entropy(
        logits, targets, class_weights, reduction=reduction, label_smoothing=smoothing
    )
    loss = scree.cross_entropy(
        logits, targets, class_weights=class_weights, reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for result, right in zip(*(torch.autograd.grad(x.sum(), logits) for x in (loss, expected))):
        torch.testing.assert_close(result, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_cross_entropy_returns_the_accuracy_of_counted_tokens(name: str) -> None:
    arrays = load(name)
    logits = np.zeros((9, CLASSES), np.float32)
    logits[np.arange(9), [3, 1, 1, 6, 6, 0, 1, 4, 5]] = 1.0
    logits[6, 4] = 1.0  # equal to the logit of the target, and later
    logits[8, 2] = 1.0  # equal, and earlier
    expected = {
        "none": [1, 0, 0, 1, 1, 0, 1, 0, 0],
        "row_mean": [1 / 2, np.nan, 1, 0],
        "sum": 4,
        "mean": 4 / 7,
    }
    rows = scree.from_lengths(arrays.make(logits), LENGTHS)
    targets = rows.with_values(arrays.i(TARGETS))
    for reduction in REDUCTIONS:
        plain = scree.cross_entropy(rows, targets, reduction=reduction)
        loss, accuracy = scree.cross_entropy(
            rows, targets, reduction=reduction, return_accuracy=True
        )
        if reduction == "none":
            plain, loss, accuracy = plain.values, loss.values, accuracy.values
        read = arrays.library.read
        np.testing.assert_allclose(read(accuracy), expected[reduction], rtol=1e-6)
        np.testing.assert_allclose(read(loss), read(plain), rtol=1e-6)
        assert arrays.library.dtype_name(accuracy) == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_mean_with_class_weights_of_no_token_is_nan(name: str) -> None:
    arrays = load(name)
    options = {"class_weights": arrays.f(CLASSES), "z_loss": 0.1}
    logits, targets = arrays.f(3, CLASSES), arrays.i([-100] * 3)
    assert np.isnan(arrays.library.read(scree.cross_entropy(logits, targets, **options)))
    if arrays.library.grad is not None:
        (gradient,) = arrays.library.grad(
            lambda x: scree.cross_entropy(x, targets, **options), logits
        )
        assert not np.any(arrays.library.read(gradient))


@pytest.mark.parametrize("name", NAMES)
def test_cross_entropy_with_an_infinite_logit_has_finite_plain_loss_and_infinite_smooth_loss(
    name: str,
) -> None:
    arrays = load(name)
    logits = arrays.make(np.asarray([[1.0, -np.inf, 2.0]], np.float32))
    targets = arrays.i([0])
    plain = scree.cross_entropy(logits, targets)
    np.testing.assert_allclose(arrays.library.read(plain), np.log(1 + np.e), rtol=1e-6)
    smooth = scree.cross_entropy(logits, targets, label_smoothing=0.1)
    assert arrays.library.read(smooth) == np.inf
