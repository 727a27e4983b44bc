"""The selection of tests by the libraries that they need."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"


def select(needed: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the names of the tests that `conftest.py` keeps, given the libraries that each needs."""
    spec = spec_from_file_location("selection", CONFTEST)
    assert spec is not None and spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    items = [
        SimpleNamespace(
            name=name,
            path=CONFTEST,
            iter_markers=lambda _, libraries=libraries: [SimpleNamespace(args=libraries)],
        )
        for name, libraries in needed.items()
    ]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    module.pytest_collection_modifyitems(config, items)
    return {item.name for item in items}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"none", "numpy"}),
        ({"SCREE_BACKENDS": "numpy"}, {"none", "numpy"}),
        ({"SCREE_BACKENDS": "jax"}, {"none"}),
        # A test of a missing library must fail in CI.
        ({"CI": "true"}, {"none", "numpy", "absent"}),
        ({"CI": "true", "SCREE_BACKENDS": "numpy"}, {"none", "numpy"}),
    ],
)
def test_collection_keeps_the_tests_of_libraries_under_test(
    environment: dict[str, str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "SCREE_BACKENDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    needed = {"none": (), "numpy": ("numpy",), "absent": ("numpy", "no_such_library")}
    assert select(needed) == expected
