"""`precision`: errors of each data type against float64: accumulation, softmax, norms and sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import scree

from .. import plots, results
from ..formulas import EPS, layer_norm, rms_norm, softmax
from ..lengths import lognormal_with_total
from ..libraries import MeasuredLibrary, installed_libraries, resolve_device
from ..options import Backend, Device, Out, Quick, Seed
from ..results import Result, Table
from ..session import Session
from ..work import relative_error

DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Factors of the inputs. At 300 the square of a number exceeds the range of float16.
SCALES = (1.0, 300.0)

#: Data types for the sum of a thousand times 0.01: of the sum, of the number, and of the number
#: converted before adding.
ACCUMULATIONS = (
    ("float32", "float32", "float32"),
    ("float16", "float16", "float16"),
    ("float32", "float16", "float16"),
    ("float32", "float16", "float32"),
)


#: Name -> function of a ragged array, and function of one row in plain namespace functions, which
#: also computes the truth.
OPERATIONS: dict[str, tuple[Callable[[Any, scree.Array], Any], Callable[[Any, Any], Any]]] = {
    "softmax": (lambda xp, x: xp.ragged.softmax(x).values, partial(softmax, axis=0)),
    "rms_norm": (lambda xp, x: xp.ragged.rms_norm(x, eps=EPS).values, rms_norm),
    "layer_norm": (lambda xp, x: xp.ragged.layer_norm(x, eps=EPS).values, layer_norm),
    "sum": (lambda xp, x: xp.sum(x, axis=1), lambda xp, x: xp.sum(x, axis=0)),
    "mean": (lambda xp, x: xp.mean(x, axis=1), lambda xp, x: xp.mean(x, axis=0)),
}


def accumulate(lib: MeasuredLibrary, total: str, number: str, added: str) -> float:
    """Return the sum of a thousand times 0.01, added one by one."""
    kinds, xp = lib.arrays.dtypes, lib.xp
    sum_so_far, x = (
        xp.asarray(value, dtype=kinds[name]) for value, name in ((0.0, total), (0.01, number))
    )
    x = xp.astype(x, kinds[added])
    for _ in range(1000):
        sum_so_far = xp.astype(sum_so_far + x, kinds[total], copy=False)
    return float(lib.arrays.read(sum_so_far))


def command(
    backend: Backend = "all",
    device: Device = "auto",
    seed: Seed = 0,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure errors against float64: accumulation, softmax, norms and sums in each data type.

    Accumulation uses four combinations of data types. An error is the norm of the difference over
    the norm of the truth, on inputs that the data type can represent. The peer of scree is the same
    formula in the data type itself, row by row. A result that overflows is not finite.
    """
    with Session("precision", locals(), resolve_device(device)) as session:
        rng = np.random.default_rng(seed)
        lengths = lognormal_with_total(8 if quick else 32, 400 if quick else 20_000, rng)
        values = rng.standard_normal((int(lengths.sum()), 16)) + 0.5
        for lib in installed_libraries(session, backend):
            for combination in ACCUMULATIONS:
                _accumulation(session, lib, combination)
            for dtype in session.track(DTYPES, lib.name):
                if dtype not in lib.arrays.dtypes:
                    session.leave_out(
                        f"{dtype} on {lib.name}", "the library does not have it as it is set up"
                    )
                    continue
                for scale in SCALES:
                    _operations(session, lib, dtype, scale, values * scale, lengths)


def _accumulation(
    session: Session, lib: MeasuredLibrary, combination: tuple[str, str, str]
) -> None:
    if not set(combination) <= set(lib.arrays.dtypes):
        return
    case = dict(zip(("sum in", "numbers in", "added as"), combination, strict=True))
    session.value(case, lib.name, "sum_value", lambda: accumulate(lib, *combination))
    row = session.row(case, lib.name)
    if "sum_value" in row.values:
        row.values["sum_error"] = abs(row.values["sum_value"] - 10) / 10


def _operations(
    session: Session,
    lib: MeasuredLibrary,
    dtype: str,
    scale: float,
    values: np.ndarray,
    lengths: np.ndarray,
) -> None:
    x = lib.make(values, dtype)
    arr, ends = scree.from_lengths(x, lengths), np.cumsum(lengths)[:-1]
    exact, rows, xp = np.split(lib.arrays.read(x), ends), scree.unpack(arr), lib.xp
    join = {"sum": np.stack, "mean": np.stack}
    for name, (ragged, row) in OPERATIONS.items():
        case = {"operation": name, "dtype": dtype, "size of numbers": scale, "backend": lib.name}
        put = join.get(name, np.concatenate)
        expected = put([row(np, part) for part in exact])

        def ours(ragged: Any = ragged, expected: Any = expected) -> float:
            return _distance(lib.arrays.read(ragged(xp, arr)), expected)

        def plain(row: Any = row, put: Any = put, expected: Any = expected) -> float:
            with np.errstate(all="ignore"):
                return _distance(put([lib.arrays.read(row(xp, part)) for part in rows]), expected)

        session.value(case, "scree", "relative_error", ours)
        session.value(case, "in the dtype itself", "relative_error", plain)


def _distance(result: np.ndarray, expected: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return relative_error(result, expected)


def tables(result: Result) -> list[Table]:
    """Return tables with the contenders side by side."""
    added = [row for row in result.rows if "sum in" in row.case]
    others = [row for row in result.rows if "operation" in row.case]
    keys = ["operation", "dtype", "size of numbers", "backend"]
    return [
        results.pivot(
            added,
            "sum_value",
            ["sum in", "numbers in", "added as"],
            "a thousand times 0.01, added one by one",
        ),
        results.pivot(others, "relative_error", keys, "relative errors against float64"),
    ]


def pictures(result: Result) -> plots.Pictures:
    """Return the picture of errors by operation and data type, on numbers of about 1."""
    rows = [
        row
        for row in result.rows
        if row.case.get("size of numbers") == 1.0
        and np.isfinite(row.values.get("relative_error", np.nan))
    ]

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        names = list(dict.fromkeys((row.case["operation"], row.case["dtype"]) for row in rows))
        for contender, marker in (("scree", "o"), ("in the dtype itself", "x")):
            points = [
                (
                    row.values["relative_error"],
                    names.index((row.case["operation"], row.case["dtype"])),
                )
                for row in rows
                if row.who == contender and row.values["relative_error"] > 0
            ]
            axes.plot(*zip(*points, strict=True), marker=marker, linestyle="", label=contender)
        axes.set(xscale="log", title="Relative error against float64, all libraries")
        axes.set_yticks(range(len(names)), [f"{a}, {b}" for a, b in names], fontsize=8)
        axes.invert_yaxis()
        figure.set_size_inches(plots.SIZE[0], 0.8 + 0.17 * len(names))

    return {"precision-errors": paint} if rows else {}
