"""What importing scree costs and loads, which module may import which, and that every public name is documented."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import scree

PACKAGE = Path(scree.__file__).parent
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
LIBRARIES = {
    "torch",
    "jax",
    "jaxlib",
    "mlx",
    "triton",
    "array_api_strict",
    "cupy",
    "tensorflow",
    "scree_triton",
}
EXTRAS = {"rich", "tokenizers", "safetensors", "awkward", "pyarrow", "scipy", "transformers"}

#: Modules of one line may not import one another; each may import those of the lines above it.
LEVELS = """
registry kinds
backends/__init__
checks
layout display
array
fit again
segments
create index
padded
update lift ops
bucket namespace
bridges
data storage
backends xp
demo __init__
__main__
"""


def python(code: str, cache: Path | None = None) -> str:
    """What the code prints; `cache` keeps compiled modules, as an installed package has them."""
    env = dict(os.environ)
    if cache is not None:
        env |= {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout


# --------------------------------------------------------------------------------------------------------- import
def test_import_loads_no_library() -> None:
    loaded = json.loads(
        python(
            "import sys, json, scree; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
        )
    )
    assert {"numpy", "scree"} <= set(loaded)
    assert not (LIBRARIES | EXTRAS) & set(loaded)


def test_import_costs_little_more_than_its_dependencies(tmp_path: Path) -> None:
    def cost(what: str) -> float:
        code = (
            f"import time; t = time.process_time(); import {what}; print(time.process_time() - t)"
        )
        return float(python(code, tmp_path))

    def ratio() -> float:
        return cost("scree") / cost(
            "numpy, array_api_compat"
        )  # one right behind the other, as the machine's speed changes

    ratio()  # compiles
    assert median(ratio() for _ in range(9)) < 1.5


# --------------------------------------------------------------------------------------------------- architecture
def imports(path: Path, everywhere: bool) -> Iterator[tuple[int, str]]:
    """(level, module) of the imports of a module, those inside of functions too if `everywhere`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.level, node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, alias.name) for alias in node.names)


@pytest.mark.parametrize(
    "name",
    [name for name in MODULES if not name.startswith(("backends/", "bridges/", "demo/train_"))],
)
def test_only_backends_bridges_and_examples_name_a_library(name: str) -> None:
    roots = {
        module.partition(".")[0]
        for level, module in imports(MODULES[name], everywhere=True)
        if level == 0
    }
    assert not roots & LIBRARIES


def level(name: str) -> int:
    """The line of a module in `LEVELS`."""
    lines = [line.split() for line in LEVELS.split("\n")]
    found = [
        i
        for wanted in (name, name.partition("/")[0])
        for i, line in enumerate(lines)
        if wanted in line
    ]
    assert found, f"{name} has no place in the table"
    return found[0]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    package = name.split("/")[:-1]
    for dots, module in imports(MODULES[name], everywhere=False):
        if dots:
            target = "/".join([*package[: len(package) - dots + 1], *module.split(".")])
            target = next(
                t
                for t in (target, f"{target}/__init__", target.rpartition("/")[0] + "/__init__")
                if t in MODULES
            )
            if target.partition("/")[0] != name.partition("/")[0]:
                assert level(target) < level(name), f"{name} imports {target}"


# ---------------------------------------------------------------------------------------------------------- names
PUBLIC = [name for name in scree.__all__ if callable(getattr(scree, name))]
#: What a sentence and an example say in full.
SHORT = set(
    """
    align at from_cu_seqlens from_offsets log_softmax logsumexp namespace positions same_layout scatter_add segment_ids unpack
    unregister_kernel""".split()
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(scree, name)
    doc = inspect.getdoc(thing) or ""
    assert doctest.DocTestParser().get_examples(doc), "an example"
    if name not in SHORT:
        assert "Parameters\n----------" in doc
        for parameter in inspect.signature(thing).parameters:
            words = doc.replace(",", " ").replace("*", " ").split()
            assert parameter in words, f"{parameter} is not described"


def test_all_is_sorted_and_true() -> None:
    assert scree.__all__ == sorted(scree.__all__)
    assert all(hasattr(scree, name) for name in scree.__all__)
    assert set(scree.ragged.__all__) <= set(scree.__all__), "xp.ragged stands in scree too"
    assert [
        getattr(scree, name) is getattr(scree.ragged, name) for name in scree.ragged.__all__
    ] == [True] * len(scree.ragged.__all__)


def test_doctests_are_collected() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    options = project["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"] and "scree_api" in options["testpaths"]
