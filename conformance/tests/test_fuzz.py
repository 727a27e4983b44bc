"""The fuzzer: its cases pass, repeat by number, and fail where a result is wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest

import scree
from scree_conformance import fuzz
from scree_conformance.__main__ import main
from scree_conformance.backends import LIBRARIES

BACKENDS = [
    name
    for name in os.environ.get("SCREE_BACKENDS", ",".join(LIBRARIES)).split(",")
    if name and name != "strict_minimal"
]


@pytest.mark.parametrize("name", BACKENDS)
def test_run_case_of_the_library_passes(name: str) -> None:
    for number in range(8 if name == "jax" else 80):
        failure = fuzz.run_case(name, number)
        assert failure is None, f"--backend {name} --case {number}\n{failure}"


def test_run_case_of_one_number_draws_the_same_rows() -> None:
    first, second = (fuzz.Case("numpy", 5) for _ in range(2))
    assert first.lengths == second.lengths
    assert (
        first.array("float32").array.values.tolist()
        == second.array("float32").array.values.tolist()
    )


def test_main_wrong_result_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong_topk(x: Any, k: int, **options: Any) -> Any:
        return x, x

    monkeypatch.setattr(scree, "topk", wrong_topk)
    monkeypatch.setattr(fuzz, "FUNCTIONS", (fuzz.topk,))
    monkeypatch.setattr(fuzz, "MAX_FAILURES", 1)
    assert main(["fuzz", "--backend", "numpy", "--minutes", "0.2", "--seed", "3"]) == 1
    assert (
        "python -m scree_conformance fuzz --backend numpy --case 30000" in capsys.readouterr().out
    )
