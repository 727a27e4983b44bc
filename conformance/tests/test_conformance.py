"""Run the suite on every library.

``SCREE_BACKENDS=numpy,torch`` selects libraries; a missing library is a failure.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import cache

import pytest

from scree_conformance.backends import LIBRARIES, load
from scree_conformance.bench import Bench
from scree_conformance.suite import cases
from scree_conformance.table import Absent, Case

BACKENDS = [
    name for name in os.environ.get("SCREE_BACKENDS", ",".join(LIBRARIES)).split(",") if name
]
bench = cache(lambda name: Bench(load(name)))


def _all() -> list[object]:
    parameters: list[object] = []
    for name in BACKENDS:
        try:
            parameters += [
                pytest.param(name, case, id=f"{name}-{case.name}") for case in cases(load(name))
            ]
        except ImportError:  # becomes a case that fails
            parameters.append(pytest.param(name, None, id=f"{name}-missing"))
    return parameters


@pytest.mark.parametrize(("name", "case"), _all())
def test_conformance(name: str, case: Case | None) -> None:
    on = bench(name)  # raises if the library is missing: that is a failure, not a reason to skip
    assert case is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(Absent):  # a confirmed gap of the library's table
            case.run(on)
