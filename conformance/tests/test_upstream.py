"""The program that runs the test files of other projects."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "upstream" / "run.py"

REPORT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><skipped message="no device"/></testcase>
<testcase name="test_c"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("upstream_run", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_report_counts_outcomes_and_keeps_first_lines(run: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    counts, failures = run.read_report(path)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert failures == {"test_c": "assert 1 == 2"}


def test_report_that_is_missing_is_a_failure(run: ModuleType, tmp_path: Path) -> None:
    counts, failures = run.read_report(tmp_path / "none.xml")
    assert counts["failed"] == 1 and failures == {"pytest": "did not finish"}


def test_suites_name_commit_and_licence(run: ModuleType) -> None:
    for suite in run.SUITES.values():
        assert re.fullmatch(r"[0-9a-f]{40}|v[\d.]+", suite.commit) and suite.licence
        assert suite.repository.startswith("https://github.com/") and suite.files
    for excluded in (run.EXCLUDED, run.EXCLUDED_ON_CPU):
        assert set(excluded) <= set(run.SUITES)
        for patterns in excluded.values():
            assert all(map(re.compile, patterns)) and all(patterns.values())
