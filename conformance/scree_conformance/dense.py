"""The namespace on dense arrays: every function of the table gives what the library's own gives, errors included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from scree.kinds import EXTENSIONS, KINDS, Kind

from .bench import Bench
from .layouts import Layout
from .table import operation

NAMES: dict[str, Kind] = {**KINDS, **{f"{e}.{name}": kind for e, kinds in EXTENSIONS.items() for name, kind in kinds.items()}}

#: Calls of which each function takes at least one and refuses some; `a` holds arrays by name: x, y, m (a square matrix) of
#: floating-point numbers, i of integers, b of booleans, c of complex numbers.
CALLS: list[Callable[[Any, Any, Any], Any]] = [
    lambda xp, f, a: f(a.x),
    lambda xp, f, a: f(a.x, a.y),
    lambda xp, f, a: f(a.x, 2),
    lambda xp, f, a: f(2.5, a.x),
    lambda xp, f, a: f(a.x, axis=1),
    lambda xp, f, a: f(a.x, axis=5),
    lambda xp, f, a: f(a.x, axis=(0, 1), keepdims=True),
    lambda xp, f, a: f(a.i),
    lambda xp, f, a: f(a.i, a.i),
    lambda xp, f, a: f(a.b),
    lambda xp, f, a: f(a.b, a.b),
    lambda xp, f, a: f(a.b, a.x, a.y),
    lambda xp, f, a: f(a.c),
    lambda xp, f, a: f(a.m),
    lambda xp, f, a: f(a.m, a.m),
    lambda xp, f, a: f(a.m, 3),
    lambda xp, f, a: f(a.x[0, ...], a.y[1, ...]),
    lambda xp, f, a: f(a.x, a.i[0, ...], axis=1),
    lambda xp, f, a: f(a.x, a.i, axis=1),
    lambda xp, f, a: f(a.x, xp.int32),
    lambda xp, f, a: f(a.x, 7.0, dtype=xp.float32),
    lambda xp, f, a: f(a.x, (3, 2)),
    lambda xp, f, a: f(a.x, (4, 2, 3)),
    lambda xp, f, a: f(a.x, (1, 0)),
    lambda xp, f, a: f(a.x, 0, 1),
    lambda xp, f, a: f([a.x, a.y]),
    lambda xp, f, a: f([a.x, a.y], axis=1),
    lambda xp, f, a: f(xp.expand_dims(a.x, axis=0), axis=0),
    lambda xp, f, a: f((2, 3)),
    lambda xp, f, a: f((2, 3), 5.0),
    lambda xp, f, a: f((2, 3), (3,)),
    lambda xp, f, a: f(3),
    lambda xp, f, a: f(0.0, 1.0, 5),
    lambda xp, f, a: f(xp.float32),
    lambda xp, f, a: f(xp.int32),
    lambda xp, f, a: f(xp.float32, "real floating"),
    lambda xp, f, a: f(xp.int32, xp.int64),
    lambda xp, f, a: f(),
]  # fmt: skip


FLOATS = CALLS[1]


class Arrays:
    """The arguments of the calls."""

    def __init__(self, bench: Bench) -> None:
        self.x, self.y = (bench.dense((2, 3), "float32", "positive").x for _ in "xy")
        self.m = bench.lib.make(2 * np.eye(3) + bench.rng.uniform(0.1, 0.2), "float32")
        self.i, self.b = bench.dense((2, 3), "int32", "twos").x, bench.dense((2, 3), "bool", "bool").x
        self.c = bench.dense((2, 3), "complex64", "complex").x


def _outcome(bench: Bench, f: Any, call: Callable[..., Any]) -> Any:
    """What a call gives, in a form that can be compared, or the type of the error."""
    bench.start("the same numbers for each call, some of which write into them")
    try:
        return _plain(bench, call(bench.own, f, Arrays(bench)))
    except Exception as error:  # any error will do, as long as both raise the same
        return type(error)


def _plain(bench: Bench, found: Any) -> Any:
    if isinstance(found, tuple | list):
        return type(found).__name__, [_plain(bench, x) for x in found]
    if isinstance(found, type(bench.lib.make(0, "int32"))):
        return str(found.dtype), bench.lib.read(found)
    return found if isinstance(found, bool | int | float) else str(type(found))


def _equal(a: Any, b: Any) -> bool:
    try:
        np.testing.assert_equal(a, b)
    except AssertionError:
        return False
    return True


def same(bench: Bench, name: str) -> None:
    """Hold a function of the namespace against the library's own, on every call."""
    ours, own = bench.xp, bench.own
    for part in name.split("."):
        ours, own = getattr(ours, part), getattr(own, part)  # an AttributeError is a gap of the library
    if not callable(own) or isinstance(own, type):
        assert ours is own or ours == own or ours != ours, f"{name}: expected {own!r}, got {ours!r}"
        return
    works = 0
    for i, call in enumerate(CALLS):
        if works and bench.lib.compiles:
            break
        if name.startswith("take") and call is FLOATS:
            continue  # a library may read anywhere by such indices
        expected, again, got = (_outcome(bench, f, call) for f in (own, own, ours))
        works += not isinstance(expected, type)
        if not _equal(again, expected):
            continue  # what was in the memory
        assert _equal(got, expected) or name.startswith("empty"), f"{name}, call {i}: expected {expected}, got {got}"
    assert works, f"{name}: no call of the list is right for it"


@operation("law: dense arrays get the library's own functions", ("plain",), ("float32",))
def every(bench: Bench, layout: Layout, dtype: str) -> None:
    """The same results with the same dtypes, and the same errors."""
    for name in NAMES:
        if name not in bench.lib.gaps:
            same(bench, name)


def plain(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """A function or constant without arrays of rows: the library's own."""
    same(bench, name)


def refused(bench: Bench, layout: Layout, dtype: str, *, name: str, why: str) -> None:
    """A ragged array is refused with the reason of the table, wherever it stands; a dense one is served."""
    same(bench, name)
    x, f = bench.ragged(layout, (3,), dtype), bench.xp
    for part in name.split("."):
        f = getattr(f, part)
    dense = bench.dense((3,), dtype)
    for args in ((x.x,), (x.x, x.x), (dense.x, x.x)):
        try:
            f(*args)
        except TypeError as error:
            assert str(error) == f"{name.split('.')[-1]} does not take ragged arrays: {why}", f"{name}: {error}"
        else:
            raise AssertionError(f"{name} took a ragged array")


for _name, _kind in NAMES.items():
    if _kind.name == "plain":
        operation(_name, ("plain",), ("float32",))(partial(plain, name=_name))
    elif _kind.name == "unsupported":
        operation(_name, ("plain",), ("float32",))(partial(refused, name=_name, why=_kind.why))
