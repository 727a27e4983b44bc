"""The rows of JAX: operations against NumPy, and the clock of the GPU without a GPU."""

import itertools
from importlib import import_module

import numpy as np
import pytest

pytestmark = pytest.mark.needs("jax", "torch", "triton")


@pytest.fixture(scope="module")
def jax_library():
    from scree_bench import libraries

    return libraries.load("jax")


def compare(lib, operation):
    expected = operation.reference()
    expected = expected if isinstance(expected, tuple) else (expected,)
    for name, build in operation.contenders.items():
        function, args = build()
        actual = lib.compiled(function)(*args)
        actual = actual if isinstance(actual, tuple) else (actual,)
        for x, y in zip(actual, expected, strict=True):
            x = lib.as_float64(x).reshape(np.shape(y))
            error = np.abs(x - y).max() / np.abs(y).max()
            assert error < 1e-5, (operation.name, name, error)


def test_operations_on_rows_match_numpy(jax_library):
    from scree_bench import jax_operations
    from scree_bench.commands.kernels import Batch, Sizes

    sizes = Sizes(lambda rng: rng.integers(3, 20, 6), (64,), "float32")
    batch = Batch(jax_library, sizes, 0)
    operations = [make(batch) for make in jax_operations.OPERATIONS]
    names = {operation.name for operation in operations}
    assert {"softmax", "sum of rows", "rope", "grouped product"} < names
    for operation in operations:
        compare(jax_library, operation)


def test_operations_on_rows_of_numbers_match_numpy(jax_library):
    from scree_bench import jax_operations
    from scree_bench.commands.kernels import Batch, Sizes

    batch = Batch(jax_library, Sizes(lambda rng: rng.integers(1, 20, 6), (), "float32"), 0)
    for make in jax_operations.ALONG_ROWS_OPERATIONS:
        compare(jax_library, make(batch))


def test_norms_match_numpy(jax_library):
    from scree_bench.commands import norms

    for name in norms.NORMS:
        compare(jax_library, norms._operation(None, jax_library, name, 12, 64, "float32", 0))


class Now:
    """A reading of the clock, as two int32."""

    def __init__(self, nanoseconds, is_ready):
        self.words, self.is_ready = np.asarray([nanoseconds]).view(np.int32), lambda: is_ready
        self.block_until_ready = lambda: self

    def __array__(self, dtype=None, copy=None):
        return self.words.reshape(1, 2)


def sampler_of(samples, monkeypatch):
    """Return the clock, its sampler of a call, the lengths of its spins, and the calls.

    A sample has readings before and after the call, two more, and whether the device had woken up.
    """
    clock = import_module("scree_bench.jax_clock")
    spins, calls = [], []
    readings = iter([(0, False), *((at, late) for *ats, late in samples for at in ats)])

    def read(nanoseconds=0):
        spins.append(nanoseconds)
        return lambda: Now(*next(readings))

    monkeypatch.setattr(clock, "clock", read)
    monkeypatch.setattr(clock, "_fill", lambda: None)
    monkeypatch.setattr(clock, "_empty_kernel", lambda: 1e-6)
    return clock, clock.device_samples(lambda: calls.append("call")), spins, calls


def test_device_samples_are_differences_of_the_clock(monkeypatch):
    start = 5 << 40
    samples = [
        (start, start + 7000, start + 7300, start + 8000, False),
        (1, 9, 10, 12, True),
        (4, 804, 900, 1004, False),
    ]
    clock, times, spins, calls = sampler_of(samples, monkeypatch)
    assert [*itertools.islice(times, 2)] == pytest.approx([6e-6 + 1e-6, 6e-7 + 1e-6])
    assert len(calls) == 3
    assert int(1e9 * clock.MIN_SPIN) in spins


def test_device_samples_that_stay_late_count_with_one_warning(monkeypatch):
    _, times, _, calls = sampler_of([(4, 804, 900, 1004, True)] * 12, monkeypatch)
    with pytest.warns(RuntimeWarning, match="include time of the host") as caught:
        assert [*itertools.islice(times, 2)] == pytest.approx([6e-7 + 1e-6] * 2)
    assert len(caught) == 1
    assert len(calls) == 12
