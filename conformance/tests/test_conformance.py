"""Run the suite on every library.

``SCREE_BACKENDS=numpy,torch`` selects libraries; a missing library is a failure.
"""

from __future__ import annotations

import os
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
bench_of = cache(lambda name: Bench(load(name)))


def _parameters() -> list[object]:
    parameters: list[object] = []
    for name in BACKENDS:
        try:
            parameters += [
                pytest.param(name, case, id=f"{name}-{case.name}") for case in cases(load(name))
            ]
        # A missing library becomes one failing case.
        except ImportError:
            parameters.append(pytest.param(name, None, id=f"{name}-missing"))
    return parameters


@pytest.mark.parametrize(("name", "case"), _parameters())
def test_conformance(name: str, case: Case | None) -> None:
    # Raises if the library is missing, which is a failure and not a reason to skip.
    bench = bench_of(name)
    assert case is not None
    # Absent is a confirmed gap in the library's table.
    with suppress(Absent):
        case.run(bench)
