"""Cost and contents of ``import scree``, layers of its modules, and documentation."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest

import scree

PACKAGE = Path(scree.__file__).parent
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
}
LIBRARIES = {
    "torch",
    "jax",
    "jaxlib",
    "mlx",
    "triton",
    "array_api_strict",
    "cupy",
    "dask",
    "ndonnx",
    "tensorflow",
    "scree_triton",
}
EXTRAS = {"rich", "tokenizers", "safetensors", "awkward", "pyarrow", "scipy", "transformers"}

#: Layers from bottom to top; a module imports from its own layer and from those above its line, and
#: there is no circle.
LAYERS = """
records
backends
checks dtypes hints
layout
array
broadcasting display dispatch
construct indexing ops functions ragged standard
providers
namespace
explanation bridges data distributed io page_pool xp
__init__
demo __main__
"""


def python(code: str, cache: Path | None = None) -> str:
    """What the code prints; `cache` keeps compiled modules, as an installed package has them."""
    env = dict(os.environ)
    if cache is not None:
        env |= {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout


# ---------------------------------------------------------------------------------------------------------
# import
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
        # The time of this thread: the threads of NumPy's libraries wait actively until the process ends.
        code = f"import time; t = time.thread_time(); import {what}; print(time.thread_time() - t)"
        with pytest.MonkeyPatch.context() as patch:
            # As in a program: the workers of the tests limit the threads of NumPy's libraries.
            patch.delenv("OMP_NUM_THREADS", raising=False)
            return float(python(code, tmp_path))

    def ratio() -> float:
        return cost("scree") / cost(
            "numpy, array_api_compat"
        )  # one right behind the other, as the machine's speed changes

    ratio()  # compiles
    assert median(ratio() for _ in range(9)) < 1.5


# ---------------------------------------------------------------------------------------------------
# architecture
def absolute_imports(path: Path) -> set[str]:
    """The root modules that a module imports, inside of functions too."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


def imported_modules(name: str, modules: dict[str, Path], root: str = "scree") -> set[str]:
    """The modules of the package that a module imports.

    Imports inside of functions and of its own package count too.
    """
    package, targets = name.split("/")[:-1], set()
    for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = package[: len(package) - node.level + 1]
            start += node.module.split(".") if node.module else []
            candidates = ["/".join([*start, alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == root:
            start = (node.module or "").split(".")[1:]
            candidates = ["/".join([*start, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == root]
            candidates = ["/".join([*name.split(".")[1:], "?"]) for name in names]
        else:
            continue
        for candidate in candidates:
            parent = candidate.rpartition("/")[0]
            forms = candidate, f"{candidate}/__init__", parent, f"{parent}/__init__".lstrip("/")
            targets.add(next(form for form in forms if form in modules))
    return targets - {name}


def layer(name: str) -> int:
    """The line of a module in `LAYERS`."""
    lines = [line.split() for line in LAYERS.strip().split("\n")]
    found = [i for i, line in enumerate(lines) if name in line or name.partition("/")[0] in line]
    assert found, f"{name} has no layer"
    return found[0]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that can reach themselves."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += graph[node]
        return seen

    return [name for name in graph if name in reachable(name)]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODULES
        if not name.startswith(
            ("backends/", "providers/", "bridges/", "distributed/", "demo/train_")
        )
    ],
)
def test_modules_outside_of_backends_name_no_library(name: str) -> None:
    assert not absolute_imports(MODULES[name]) & LIBRARIES


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name: str) -> None:
    for target in imported_modules(name, MODULES):
        assert layer(target) <= layer(name), f"{name} imports {target}, which is above it"


def test_imports_have_no_cycle() -> None:
    assert circles({name: imported_modules(name, MODULES) for name in MODULES}) == []


def test_imports_have_no_cycle_finds_cycles_inside_functions(tmp_path: Path) -> None:
    modules = {name: tmp_path / f"{name}.py" for name in ("a", "b", "c")}
    modules["a"].write_text("from . import b")
    modules["b"].write_text("def f():\n    from .c import g")
    modules["c"].write_text("import scree.a")
    assert circles({name: imported_modules(name, modules) for name in modules}) == ["a", "b", "c"]
    modules["c"].write_text("")
    assert circles({name: imported_modules(name, modules) for name in modules}) == []


TRITON = PACKAGE.parents[1] / "kernels_triton" / "scree_triton"


def test_kernels_have_no_cycle_and_few_packages() -> None:
    modules = {
        path.relative_to(TRITON).with_suffix("").as_posix(): path for path in TRITON.rglob("*.py")
    }
    graph = {name: imported_modules(name, modules, "scree_triton") for name in modules}
    assert circles(graph) == []
    assert len({name.partition("/")[0] for name in modules} - {"__init__"}) <= 10
    assert max(name.count("/") for name in modules) < 3


def test_no_private_name_is_imported_from_another_file() -> None:
    for root in (PACKAGE, TRITON):
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (
                    node.level or (node.module or "").startswith("scree")
                ):
                    names = [a.name for a in node.names]
                    private = [n for n in names if n[0] == "_" and not n.endswith("__")]
                    assert not private, f"{path}:{node.lineno} imports {private}"


# ----------------------------------------------------------------------------------------------------------
# names
PUBLIC = [name for name in scree.__all__ if callable(getattr(scree, name))]
#: What a sentence and an example say in full.
SHORT = set(
    """
    Namespace align at from_cu_seqlens from_offsets log_softmax logsumexp namespace positions same_layout
    scatter_add segment_ids unpack unregister_kernel""".split()
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


def test_all_is_unique_and_true() -> None:
    assert len(set(scree.__all__)) == len(scree.__all__)
    assert scree.ragged.__all__ == sorted(scree.ragged.__all__)
    assert all(hasattr(scree, name) for name in scree.__all__)
    assert set(scree.ragged.__all__) <= set(scree.__all__), "xp.ragged stands in scree too"
    assert [
        getattr(scree, name) is getattr(scree.ragged, name) for name in scree.ragged.__all__
    ] == [True] * len(scree.ragged.__all__)


def test_doctests_are_collected() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    options = project["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"] and "scree_api" in options["testpaths"]
