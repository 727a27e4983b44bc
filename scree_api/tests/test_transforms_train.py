"""The language model of the demo.

Against plain NumPy, and the same curve in every library, ragged and padded.
"""

import json
import sys

import numpy as np
import pytest

import scree
from scree import __main__ as command
from scree.demo import DemoError, lm, text, train

TEXTS = text.sample(
    [t for t in text.conversations() if 70 < len(t) < 120], 40, 0
)  # batches of one shape
STEPS, BATCH = 5, 4


def plain_loss(w: dict[str, np.ndarray], rows: list[np.ndarray]) -> float:
    """One plain loop over rows, in float64."""
    w = {name: x.astype(np.float64) for name, x in w.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight

    def heads(x: np.ndarray, turned: bool) -> np.ndarray:
        x = np.swapaxes(x.reshape(len(x), -1, lm.HEAD_DIM), 0, 1)
        half = lm.HEAD_DIM // 2
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(
            1j * np.arange(x.shape[1])[:, None] * 1e4 ** (-np.arange(half) / half)
        )
        return np.concatenate([z.real, z.imag], axis=-1) if turned else x

    surprise: list[float] = []
    for row in rows:
        x = w["embedding"][row]
        for i in range(2):
            y = norm(x, w[f"{i}.attention.norm"])
            q, k, v = (
                heads(y @ w[f"{i}.attention.{part}"], part != "value")
                for part in ("query", "key", "value")
            )
            score = q @ np.swapaxes(np.repeat(k, 2, axis=0), 1, 2) / np.sqrt(lm.HEAD_DIM)
            weight = np.exp(np.where(np.tri(len(row)) > 0, score, -np.inf))
            y = weight / weight.sum(axis=-1, keepdims=True) @ np.repeat(v, 2, axis=0)
            x = x + np.swapaxes(y, 0, 1).reshape(len(row), -1) @ w[f"{i}.attention.output"]
            y = norm(x, w[f"{i}.mlp.norm"])
            gate = y @ w[f"{i}.mlp.gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{i}.mlp.up"])) @ w[f"{i}.mlp.down"]
        scores = norm(x, w["norm"]) @ w["embedding"].T
        surprise += [float(np.log(np.exp(s).sum()) - s[to]) for s, to in zip(scores, row[1:])]
    return float(np.mean(surprise))


@pytest.mark.parametrize(
    "loss, batches", [(lm.loss, train.ragged_batches), (lm.padded_loss, train.padded_batches)]
)
def test_model_loss_agrees_with_the_plain_model(loss: object, batches: object) -> None:
    w = lm.weights(seed=3)
    rows = next(train.sample_rows(TEXTS, 1, 0, BATCH))
    found = loss(w, *next(batches(TEXTS, 1, 0, BATCH)))
    np.testing.assert_allclose(found, plain_loss(w, rows), rtol=1e-5)


@pytest.fixture(scope="module")
def first() -> list[float]:
    return list(train.curve("torch", TEXTS, STEPS, size=BATCH))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", train.BACKENDS)
def test_the_same_curve_in_every_library(backend: str, padded: bool, first: list[float]) -> None:
    losses = list(train.curve(backend, TEXTS, STEPS, padded=padded, size=BATCH))
    assert losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(losses, first, rtol=32 * np.finfo(np.float32).eps)


def test_conversations_are_many_and_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    found = text.conversations()
    lengths = [len(talk.encode()) for talk in found]
    assert len(set(found)) == len(found) > 500
    assert min(lengths) < 20 < 500 < max(lengths)
    assert all(remark == remark.strip() for talk in found for remark in talk.split("\n"))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        DemoError, match="yaml is not installed; install scree with the extra train"
    ):
        text.conversations()


def test_the_command_prints_a_plot_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train-demo", "--steps", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2
    assert command.main(["train-demo", "--steps", "2", "--padded"]) == 0
    assert "steps" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"optax is not installed|jax is not installed"):
        train.check_installed("jax")
    assert command.main(["train-demo", "--backend", "mlx"]) == 1
    assert "mlx is not installed" in capsys.readouterr().err


def test_the_plot_falls_with_the_loss() -> None:
    lines = train.plot([3.0, 2.0, 1.0], height=3).splitlines()
    assert [line.index("•") for line in lines[:3]] == [7, 8, 9]
    assert scree.demo.train.plot([1.0]).count("•") == 1
