"""The table is complete, the command line works, and the coverage page matches the table."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import scree
from scree.functions import EXTENSIONS, KINDS
from scree_conformance import backends, coverage, layouts, loopback, suite, table
from scree_conformance.__main__ import main, run
from scree_conformance.suite import OPERATIONS
from scree_conformance.table import FUNCTIONS, Operation

COVERAGE = Path(__file__).parents[2] / "docs" / "results" / "coverage.json"


def test_the_functions_are_those_of_the_namespace() -> None:
    assert set(KINDS) < set(FUNCTIONS)
    assert {f"linalg.{name}" for name in EXTENSIONS["linalg"]} < set(FUNCTIONS)
    assert {f"ragged.{name}" for name in scree.ragged.__all__} < set(FUNCTIONS)
    assert max(Counter(FUNCTIONS).values()) == 1


def test_every_function_has_an_operation() -> None:
    checked = {
        name
        for operation in OPERATIONS
        for name in operation.functions
        if operation.variant not in coverage.VARIANTS
    }
    assert set(FUNCTIONS) == checked


def test_every_extension_says_whether_it_compiles() -> None:
    for variant in ("jitted", "differentiated"):
        checked = {
            name
            for operation in OPERATIONS
            for name in operation.functions
            if operation.variant == variant
        }
        assert checked == {f"ragged.{name}" for name in scree.ragged.__all__}


def test_names_of_operations_are_unique() -> None:
    names = Counter(operation.name for operation in OPERATIONS)
    assert max(names.values()) == 1, names.most_common(3)


def test_a_name_lists_functions_or_none() -> None:
    def named(name: str) -> Operation:
        return Operation(name, lambda *_: None, (), (), None)

    assert named("sort argsort: NaN").functions == ("sort", "argsort")
    assert named("sort argsort: NaN").variant == "NaN"
    assert named("law: all rows").functions == () == named("all sorts of things").functions


def test_hard_layouts_are_included() -> None:
    all_lengths = layouts.LAYOUTS.values()
    assert (
        [] in all_lengths
        and [0, 0, 0] in all_lengths
        and any(len(lengths) == 1 for lengths in all_lengths)
        and any(set(lengths) == {1} for lengths in all_lengths)
    )
    assert any(lengths[:1] == [0] and any(lengths) for lengths in all_lengths) and any(
        lengths[-1:] == [0] and any(lengths) for lengths in all_lengths
    )
    assert any(0 in lengths[1:-1] and lengths[0] and lengths[-1] for lengths in all_lengths)
    assert any(max(lengths, default=0) >= 500 and len(lengths) > 1 for lengths in all_lengths)


# --------------------------------------------------------------------------------- the command line
def test_reports_are_written_in_both_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "--backend",
                "numpy",
                "--only",
                "ragged.softmax-",
                "--report",
                str(tmp_path / "report"),
            ]
        )
        == 0
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["backend"], report["failed"], report["passed"]) == (
        "numpy",
        0,
        report["operations"]["ragged.softmax"]["passed"],
    )
    report = (tmp_path / "report.md").read_text()
    assert "| ragged.softmax |" in report
    assert len({line.count("|") for line in report.splitlines() if line.startswith("|")}) == 1
    assert "ragged.softmax" in capsys.readouterr().out


def test_report_form_follows_the_suffix(tmp_path: Path) -> None:
    assert main(["--only", "ragged.softmax-plain", "--report", str(tmp_path / "report.md")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_a_failure_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_check(bench: object, layout: object, dtype: str) -> None:
        raise AssertionError("no such luck")

    monkeypatch.setattr(
        table, "OPERATIONS", [Operation("sort", failing_check, ("plain",), ("float32",), None)]
    )
    monkeypatch.setattr("scree_conformance.suite.OPERATIONS", table.OPERATIONS)
    assert main(["--backend", "numpy"]) == 1
    assert "no such luck" in capsys.readouterr().out


def test_coverage_with_only_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "sort", "--coverage", str(tmp_path / "coverage.json")])
    assert "without --only" in capsys.readouterr().err


def test_numpy_on_another_device_raises() -> None:
    with pytest.raises(
        ValueError, match="device: expected 'cpu', the only one of NumPy, got 'cuda'"
    ):
        run("numpy", "cuda")


def test_nothing_to_run_ends_with_status_1() -> None:
    assert main(["--only", "no case has this name"]) == 1


def test_the_loopback_kernel_runs_every_call() -> None:
    with loopback.registered() as calls:
        results = run("numpy", kernel=loopback.PROVIDER)
    counts = {
        name: counts.passed + counts.rejected
        for name, counts in results.items()
        if name.partition(":")[0] == "ragged.attention"
    }
    assert not any(counts.failed for counts in results.values())
    assert sorted(calls) == loopback.KERNELS
    assert calls["attention"] >= sum(counts.values())
    attention = results["ragged.attention"]
    assert (
        attention.passed
        and attention.rejected
        and "loopback takes no float64" in attention.notes[0]
    )
    with pytest.raises(ValueError, match="kernel: expected one of"):
        x = scree.from_lengths(np.ones(3), [3])
        scree.softmax(x, kernel=loopback.PROVIDER)


# ----------------------------------------------------------------------------- the page of coverage
def test_coverage_adds_up_operations_and_keeps_other_libraries(tmp_path: Path) -> None:
    def counts(passed: int, absent: int, why: str) -> SimpleNamespace:
        return SimpleNamespace(passed=passed, failed=0, absent=absent, why=why)

    path = tmp_path / "results" / "coverage.json"
    coverage.update(
        path,
        "torch",
        {"unique_all": counts(0, 2, "not there"), "ragged.rope: jitted": counts(2, 0, "")},
    )
    coverage.update(path, "numpy", {"unique_all": counts(2, 0, "")})
    columns = json.loads(path.read_text())
    assert list(columns) == ["numpy", "torch"]
    assert columns["torch"]["functions"]["unique_all"] == {"eager": [0, 0, 2, "not there"]}
    assert columns["torch"]["functions"]["ragged.rope"] == {"jitted": [2, 0, 0, ""]}


def test_coverage_page_lists_every_function() -> None:
    columns = json.loads(COVERAGE.read_text())
    assert set(columns) == set(coverage.PACKAGES)
    for column in columns.values():
        assert list(column["functions"]) == list(FUNCTIONS), (
            "run python -m scree_conformance --coverage for each backend"
        )
        assert all(cells.get("eager") for cells in column["functions"].values())
        assert not any(cell[1] for cells in column["functions"].values() for cell in cells.values())


def test_quick_yields_one_case_per_operation_without_laws() -> None:
    names = [case.operation.name for case in suite.cases(backends.load("numpy"), quick=True)]
    assert names == [operation.name for operation in OPERATIONS if not operation.is_law]
    assert {"sum", "ragged.softmax", "indexing"} < set(names)


@pytest.mark.parametrize("name", list(backends.PARTIAL_LIBRARIES))
def test_load_library_that_is_not_installed_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"array_api_compat.{name}.array", raising=False)
    with pytest.raises(ImportError, match=name):
        backends.load(name)


def test_gap_of_extension_covers_its_functions() -> None:
    library = backends.Library("some", {}, None, None, gaps={"linalg": "no linalg"})
    assert library.gap("linalg.qr", "float32") == "no linalg"
    assert library.gap("linalg", "float32") == "no linalg"
    assert library.gap("matmul", "float32") is None


def test_load_unknown_library_names_partial_libraries() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*dask, ndonnx, cupy, got 'other'"):
        backends.load("other")
