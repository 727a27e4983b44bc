"""Calls of functions of other libraries on ragged arrays, each compared with the same call per row.

``python array_api_clients.py`` prints the outcomes of SciPy's functions as JSON. SciPy reads the
environment variable SCIPY_ARRAY_API when it is imported, so the test runs it in another process.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import scree

LENGTHS = [3, 0, 2, 4]
EMPTY_BATCH: list[int] = []
#: A call takes the function, the array and the axis of its tokens.
Call = Callable[[Any, Any, int], Any]


def elementwise(f: Any, x: Any, axis: int) -> Any:
    """Call a function of one array."""
    return f(x)


def elementwise_of_two(f: Any, x: Any, axis: int) -> Any:
    """Call a function of two arrays."""
    return f(x, x)


def elementwise_of_three(f: Any, x: Any, axis: int) -> Any:
    """Call a function of three arrays."""
    return f(x, x, x)


def along(f: Any, x: Any, axis: int) -> Any:
    """Call a function with the keyword `axis`."""
    return f(x, axis=axis)


def along_with(*args: Any) -> Call:
    """Return a call with the keyword `axis` and more positional arguments."""
    return lambda f, x, axis: f(x, *args, axis=axis)


def scores_of_itself(f: Any, x: Any, axis: int) -> Any:
    """Call a function that compares an array with another one."""
    return f(x, x, axis=axis)


#: Functions of SciPy that work on ragged arrays.
SCIPY_WORKS: dict[str, Call] = {
    "integrate.cumulative_trapezoid": along,
    "integrate.trapezoid": along,
    "special.log_softmax": along,
    "special.softmax": along,
    "special.xlogy": elementwise_of_two,
    "stats.circmean": along,
    "stats.gmean": along,
    "stats.hmean": along,
    "stats.moment": along_with(2),
    "stats.pmean": along_with(2),
    "stats.tmean": along,
}
#: Functions of SciPy that raise, with an error of scree or, where they compute with the length of
#: the ragged axis, which is None, with an error of Python.
SCIPY_RAISES: dict[str, Call] = {
    **dict.fromkeys(
        """
        special.entr special.erf special.erfc special.exp1 special.expit special.gammaln special.i0
        special.i0e special.i1 special.i1e special.log_ndtr special.logit special.ndtr special.ndtri
        cluster.vq.whiten linalg.det ndimage.sobel signal.hilbert fft.fft fft.rfft fft.dct
        """.split(),
        elementwise,
    ),
    **dict.fromkeys(
        """
        special.chdtr special.chdtrc special.gammainc special.gammaincc special.rel_entr
        special.stdtr spatial.distance.cdist
        """.split(),
        elementwise_of_two,
    ),
    **dict.fromkeys(["special.betainc", "special.betaincc"], elementwise_of_three),
    **dict.fromkeys(
        """
        integrate.simpson signal.detrend special.logsumexp stats.describe stats.directional_stats
        stats.entropy stats.gstd stats.gzscore stats.iqr stats.jarque_bera stats.kurtosis
        stats.kurtosistest stats.median_abs_deviation stats.mode stats.normaltest stats.rankdata
        stats.sem stats.skew stats.skewtest stats.tstd stats.tsem stats.tvar stats.variation
        stats.zscore
        """.split(),
        along,
    ),
    "ndimage.gaussian_filter": lambda f, x, axis: f(x, 1),
    "stats.quantile": along_with(0.5),
    "stats.trim_mean": along_with(0.1),
    "stats.ttest_1samp": along_with(0.0),
    "stats.zmap": scores_of_itself,
}


def make(lengths: list[int], dtype: Any = np.float64) -> tuple[Any, list[np.ndarray]]:
    """Return a ragged array of numbers between 1 and 9, and its rows."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(4, 36, n) / 4).astype(dtype) for n in lengths]
    values = np.concatenate([np.empty(0, dtype), *rows])
    return scree.from_lengths(values, lengths), rows


#: Results of SciPy's functions for empty rows that differ from the same call on an empty array.
EMPTY_ROWS = {"stats.circmean": 0.0}


def compare(
    result: Any, expected: list[Any], to_numpy: Callable[[Any], Any] = np.asarray
) -> str | None:
    """Return how a result differs from the results of the rows, or None.

    An expected result of None is not compared.
    """
    if isinstance(result, scree.Array):
        actual = [to_numpy(row) for row in scree.unpack(result)]
    else:
        actual = list(to_numpy(result))
    if len(actual) != len(expected):
        return f"{len(actual)} results of {len(expected)} rows"
    for i, (row, exact) in enumerate(zip(actual, expected, strict=True)):
        if exact is None:
            continue
        if row.shape != np.shape(exact) or not np.allclose(row, exact, 1e-5, 1e-6, equal_nan=True):
            return f"row {i} is {row}, not {exact}"
    return None


def row_result(name: str, f: Any, call: Call, row: np.ndarray) -> Any:
    """Return the result of a row; None if the function does not take empty arrays."""
    if not len(row) and name in EMPTY_ROWS:
        return EMPTY_ROWS[name]
    try:
        return call(f, row, 0)
    except (ValueError, IndexError, ZeroDivisionError):
        if len(row):
            raise
        return None


def outcome(name: str, f: Any, call: Call, lengths: list[int]) -> tuple[str, str]:
    """Return "works", "raises" or "wrong" of a call, and the message."""
    x, rows = make(lengths)
    with warnings.catch_warnings():
        # SciPy warns about each short row.
        warnings.filterwarnings("ignore", "One or more sample arguments is too small")
        try:
            result = call(f, x, 1)
        except Exception as error:
            return "raises", f"{type(error).__name__}: {error}"
        expected = [row_result(name, f, call, row) for row in rows]
    difference = compare(result, expected)
    return ("works", "") if difference is None else ("wrong", difference)


def scipy_outcomes() -> dict[str, list[tuple[str, str]]]:
    """Return the outcomes of SciPy's functions; functions that this SciPy lacks are left out."""
    outcomes = {}
    for name, call in (SCIPY_WORKS | SCIPY_RAISES).items():
        module, _, function = name.rpartition(".")
        f = getattr(importlib.import_module(f"scipy.{module}"), function, None)
        if f is not None:
            outcomes[name] = [outcome(name, f, call, lengths) for lengths in (LENGTHS, EMPTY_BATCH)]
    return outcomes


if __name__ == "__main__":
    assert os.environ["SCIPY_ARRAY_API"] == "1" and Path(__file__).exists()
    json.dump(scipy_outcomes(), sys.stdout)
