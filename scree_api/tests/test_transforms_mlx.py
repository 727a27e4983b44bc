"""Under the transforms of MLX: compiled, differentiated, mapped.

And lazy until somebody asks for a value.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
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
    STANDARD,
    TOTAL,
    apply,
    expected,
    judged,
    loss,
    slope,
    standard,
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

    def both(
        v: mx.array, w: mx.array, offsets: mx.array, index: mx.array
    ) -> tuple[mx.array, mx.array]:
        traces.append(None)
        x = scree.from_cu_seqlens(v, offsets, max_length=LONGEST)
        found = apply(name, x, w, index)
        return judged(x.layout.xp, found), found

    compiled = mx.compile(mx.value_and_grad(both, (0, 1)))
    rounds = []
    for lengths in (LENGTHS, OTHER, LENGTHS, OTHER):
        (_, found), (of_v, of_w) = compiled(
            mx.array(values()), mx.array(weights()), offsets(lengths), mx.array(INDEX)
        )
        np.testing.assert_allclose(
            found, expected(name, values(), weights(), lengths), rtol=1e-4, atol=1e-5
        )
        dx, dw, want = slope(name, lengths)
        assert abs(np.vdot(of_v, dx) + np.vdot(of_w, dw) - want) < 1e-5 * np.linalg.norm(dx)
        rounds.append(len(traces))
    assert rounds[1] == rounds[-1] <= 2  # the first function of a process may be traced twice


@pytest.mark.parametrize("name", OPERATIONS)
def test_functions_of_lazy_arrays_stay_lazy(name: str, lazy: list[str]) -> None:
    """Forward and backward are built without a look at a value; asking for one is noticed."""
    x = scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS), max_length=LONGEST)
    found, of_w = mx.value_and_grad(partial(loss, name, x, index=mx.array(INDEX)))(
        mx.array(weights())
    )
    assert not lazy
    mx.eval([found, of_w])
    np.asarray(found)
    assert lazy


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_over_parameters(name: str) -> None:
    x, index = (
        scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS), max_length=LONGEST),
        mx.array(INDEX),
    )
    found = mx.vmap(lambda w: apply(name, x, w, index))(
        mx.stack([mx.array(weights(seed)) for seed in (1, 5)])
    )
    for one, seed in zip(found, (1, 5)):
        np.testing.assert_allclose(
            one, expected(name, values(), weights(seed), LENGTHS), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", STANDARD)
def test_the_functions_of_the_standard_compile(name: str) -> None:
    args = mx.array(values()), mx.array(INDEX), offsets(LENGTHS)
    for found, right in zip(
        mx.compile(partial(standard, name))(*args), standard(name, *args), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_unpack_and_total_length_of_lazy_offsets() -> None:
    x = scree.from_cu_seqlens(mx.array(values()), offsets(LENGTHS))
    assert len(scree.unpack(x)) == len(LENGTHS)
    assert x.total_length == TOTAL


def test_save_drops_the_tail_and_to_numpy_raises(tmp_path: Path) -> None:
    x = scree.from_offsets(mx.array([1.0, 2.0, 3.0, 9.0]), offsets([1, 2]))
    scree.save(tmp_path / "x.npz", x)
    assert scree.load(tmp_path / "x.npz").values.tolist() == [1.0, 2.0, 3.0]
    for _ in range(2):  # whether the offsets were read before or not
        with pytest.raises(ValueError, match="offsets: expected to end at 4"):
            x.to_numpy()
        x.layout.read_offsets()


def test_a_token_that_a_row_does_not_have_is_nan() -> None:
    for lengths, right in (([1, 0], [7.0, np.nan]), ([0, 0], [np.nan, np.nan])):
        x = scree.from_offsets(mx.array(np.full(sum(lengths), 7, np.float32)), offsets(lengths))
        np.testing.assert_array_equal(x[:, 0], right)


@pytest.mark.parametrize("known", [False, True])
def test_gradients_pass_through_a_sort(known: bool) -> None:
    numbers, order = (
        np.asarray([3, 1, 2, 5, 4], np.float32),
        np.asarray([1, 0, 2, 4, 3], np.float32),
    )

    def total(v: mx.array, f: Callable[[Any, scree.Array], scree.Array]) -> mx.array:
        x = (
            scree.from_lengths(v, [2, 3])
            if known
            else scree.from_offsets(v, offsets([2, 3]), max_length=3)
        )
        return mx.sum(f(scree.namespace(x), x).values * mx.arange(5))

    for f in (lambda xp, x: xp.sort(x), lambda xp, x: xp.take_along_axis(x, xp.argsort(x), axis=1)):
        np.testing.assert_array_equal(mx.grad(partial(total, f=f))(mx.array(numbers)), order)
