"""Temporary memory: at most 4 times the values in the dtype of the accumulation, plus 64 MiB.

The layouts have many short rows beside a few long ones: padding rows to tiles of a fixed size would
take 30 to 60 times the memory of the values.
"""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import NAMES

import scree

SLACK = 1 << 26
ROW_FUNCTIONS = (
    "sum prod mean max min var std any all count_nonzero argmax cumulative_sum cumulative_prod sort "
    "argsort flip"
).split()
RAGGED_FUNCTIONS = "softmax log_softmax logsumexp".split()


def draw_lengths(seed: int) -> list[int]:
    """Draw the lengths of many short rows and of a few long rows."""
    rng = np.random.default_rng(seed)
    short = rng.integers(rng.integers(0, 2), rng.integers(2, 5), int(rng.integers(20000, 60000)))
    long = rng.integers(100, 9000, int(rng.integers(0, 4)))
    return rng.permutation(np.concatenate([short, long])).tolist()


def traced_peak(f: Callable[[], Any]) -> int:
    """Return the bytes that NumPy holds at most while `f` runs, without its result."""
    tracemalloc.start()
    try:
        result = f()
        return tracemalloc.get_traced_memory()[1] - nbytes(result)
    finally:
        tracemalloc.stop()


def nbytes(result: Any) -> int:
    values = result.values if isinstance(result, scree.Array) else result
    return int(values.nbytes)


def storage_peak(f: Callable[[], Any]) -> int:
    """Return the bytes of the storages that PyTorch holds at most while `f` runs, without its result."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Storages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live: dict[int, int] = {}
            self.peak = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if (
                    isinstance(x, torch.Tensor)
                    and (key := x.untyped_storage()._cdata) not in self.live
                ):
                    self.live[key] = x.untyped_storage().nbytes()
                    weakref.finalize(x.untyped_storage(), self.live.pop, key)
            self.peak = max(self.peak, sum(self.live.values()))
            return out

    with Storages() as storages:
        result = f()
    return storages.peak - nbytes(result)


def ragged_calls(x: scree.Array, depthwise: Any) -> dict[str, Callable[[], Any]]:
    """Return calls of `xp.ragged`; `depthwise` is the weight of a depthwise convolution."""
    calls = {name: lambda name=name: getattr(scree, name)(x) for name in RAGGED_FUNCTIONS}
    calls |= {
        f"{name} of elements": lambda name=name: getattr(scree, name)(x, axis=-1)
        for name in RAGGED_FUNCTIONS
    }
    calls["shift"] = lambda: scree.shift(x, 2)
    calls["broadcast_rows"] = lambda: scree.broadcast_rows(x.values[: x.batch_size], x)
    calls["conv1d"] = lambda: scree.conv1d(x, depthwise, groups=depthwise.shape[0])
    calls["gelu"] = lambda: scree.gelu(x)
    return calls


def selecting_calls(x: scree.Array) -> dict[str, Callable[[], Any]]:
    """Return calls that select tokens or entries of each row."""
    xp = scree.namespace(x)
    positions = xp.zeros_like(x, dtype=xp.int32)
    return {
        "topk": lambda: scree.topk(x, 3)[0],
        "take_along_axis": lambda: xp.take_along_axis(x, positions, axis=1),
        "at, first tokens": lambda: x.at[:, :1].add(1),
        "at, an element": lambda: x.at[..., 0].set(1),
        "at, masked entries": lambda: x.at[x > 0].set(0),
    }


PEAKS = {"numpy": traced_peak, "torch": storage_peak}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("library", [name for name in NAMES if name in PEAKS])
def test_row_functions_of_short_rows_need_little_memory(
    library: str, dtype: str, seed: int
) -> None:
    lengths = draw_lengths(seed)
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, (sum(lengths), 48)).astype(dtype)
    depthwise = np.ones((48, 1, 4), np.float32)
    limit = 4 * values.size * (8 if dtype == "int8" else 4) + SLACK
    if library == "torch":
        import torch

        values, depthwise = torch.from_numpy(values), torch.from_numpy(depthwise)
    x = scree.from_lengths(values, lengths)
    xp = scree.namespace(x)
    calls = {name: lambda name=name: getattr(xp, name)(x, axis=1) for name in ROW_FUNCTIONS}
    calls |= selecting_calls(x)
    if dtype == "float32":
        calls |= ragged_calls(x, depthwise)
    peaks = {name: PEAKS[library](call) for name, call in calls.items()}
    assert not {name: peak for name, peak in peaks.items() if peak > limit}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("library", [name for name in NAMES if name in PEAKS])
def test_attention_on_short_rows_needs_little_memory(library: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.permutation([1] * 20000 + rng.integers(1, 300, 5).tolist()).tolist()
    values = rng.standard_normal((sum(lengths), 2, 64)).astype(np.float32)
    limit = 4 * 3 * values.nbytes + SLACK
    if library == "torch":
        import torch

        values = torch.from_numpy(values)
    x = scree.from_lengths(values, lengths)
    assert PEAKS[library](lambda: scree.attention(x, x, x, causal=True, kernel="standard")) < limit


@pytest.mark.parametrize("library", [name for name in NAMES if name in PEAKS])
def test_grouped_matmul_of_short_rows_needs_little_memory(library: str) -> None:
    lengths = [1] * 20000 + [3000]
    values = np.ones((sum(lengths), 64), np.float32)
    weight = np.ones((len(lengths), 64, 8), np.float32)
    limit = 4 * (values.nbytes + weight.nbytes) + SLACK
    if library == "torch":
        import torch

        values, weight = torch.from_numpy(values), torch.from_numpy(weight)
    x = scree.from_lengths(values, lengths)
    assert PEAKS[library](lambda: x @ weight) < limit


@pytest.mark.parametrize("name", ["prod", "any", "cumulative_sum", "mean"])
@pytest.mark.needs("jax")
def test_compiled_row_functions_of_short_rows_need_little_memory(name: str) -> None:
    import jax

    lengths = [1] * 40000 + [4097]
    x = scree.from_lengths(jax.numpy.ones((sum(lengths), 48)), lengths)
    function = jax.jit(lambda x: getattr(scree.namespace(x), name)(x, axis=1))
    memory = function.lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * x.values.nbytes + SLACK


@pytest.mark.parametrize("library", [name for name in NAMES if name in PEAKS])
def test_map_rows_in_ranges_gives_the_result_of_one_range(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from libraries import load

    from scree.ops import row_chunks

    arrays = load(library)
    x = arrays.r([0, 3, 0, 1, 40, 0, 2, 7, 0], 5)
    xp = scree.namespace(x)
    calls = {name: lambda name=name: getattr(xp, name)(x, axis=1) for name in ROW_FUNCTIONS}
    calls |= ragged_calls(x, arrays.f(5, 1, 3))
    whole = {name: call() for name, call in calls.items()}
    monkeypatch.setattr(row_chunks, "MAX_BYTES", 64)
    for name, call in calls.items():
        part, expected = call(), whole[name]
        assert isinstance(part, scree.Array) == isinstance(expected, scree.Array), name
        pair = [y.values if isinstance(y, scree.Array) else y for y in (part, expected)]
        np.testing.assert_allclose(*map(arrays.library.read, pair), rtol=1e-6, err_msg=name)
