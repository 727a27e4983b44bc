"""Under the transforms of MLX: compiled, differentiated, mapped; and lazy until somebody asks for a value."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_transforms import (
    INDEX,
    LENGTHS,
    LONGEST,
    OPERATIONS,
    OTHER,
    TOTAL,
    apply,
    expected,
    judged,
    loss,
    slope,
    values,
    weights,
)

import scree
from scree.backends import mlx as backend


def offsets(lengths: list[int]) -> mx.array:
    return mx.array(np.cumsum([0, *lengths]).astype(np.int32))


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of everything that made MLX compute."""
    asked: list[str] = []
    for module, name in ((mx, "eval"), (backend, "_read"), (np, "array"), (np, "asarray")):
        own = getattr(module, name)

        def trap(x: Any, *args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            if isinstance(x, mx.array):
                asked.append(name)
            return own(x, *args, **kwargs)

        monkeypatch.setattr(module, name, trap)
    return asked


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_functions_serve_all_offsets_of_a_shape(name: str) -> None:
    traces = []

    def both(v: mx.array, w: mx.array, offsets: mx.array, index: mx.array) -> tuple[mx.array, mx.array]:
        traces.append(None)
        x = scree.from_cu_seqlens(v, offsets, max_length=LONGEST)
        found = apply(name, x, w, index)
        return judged(x.layout.xp, found), found

    compiled = mx.compile(mx.value_and_grad(both, (0, 1)))
    rounds = []
    for lengths in (LENGTHS, OTHER, LENGTHS, OTHER):
        (_, found), (of_v, of_w) = compiled(mx.array(values()), mx.array(weights()), offsets(lengths), mx.array(INDEX))
        np.testing.assert_allclose(found, expected(name, values(), weights(), lengths), rtol=1e-4, atol=1e-5)
        dx, dw, want = slope(name, lengths)
        assert abs(np.vdot(of_v, dx) + np.vdot(of_w, dw) - want) < 1e-5 * np.linalg.norm(dx)
        rounds.append(len(traces))
    assert rounds[1] == rounds[-1] <= 2  # the first function of a process may be traced twice


@pytest.mark.parametrize("name", OPERATIONS)
def test_lazy_stays_lazy(name: str, lazy: list[str]) -> None:
    """Forward and backward are built without a look at a value; asking for one is noticed."""
    x = scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS), max_length=LONGEST)
    found, of_w = mx.value_and_grad(partial(loss, name, x, index=mx.array(INDEX)))(mx.array(weights()))
    assert not lazy
    mx.eval([found, of_w])
    np.asarray(found)
    assert lazy


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_over_parameters(name: str) -> None:
    x, index = scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS), max_length=LONGEST), mx.array(INDEX)
    found = mx.vmap(lambda w: apply(name, x, w, index))(mx.stack([mx.array(weights(seed)) for seed in (1, 5)]))
    for one, seed in zip(found, (1, 5)):
        np.testing.assert_allclose(one, expected(name, values(), weights(seed), LENGTHS), rtol=1e-4, atol=1e-5)


def test_the_tokens_of_a_row_are_read_once_where_somebody_asks() -> None:
    x = scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS))
    assert len(scree.unpack(x)) == len(LENGTHS)
    assert x.total_length == TOTAL
