"""Every public name is in one group of the reference, and its docstring has all sections."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scree.array import Array, Update
from scree.data import TokenBudgetSampler
from scree.functions import EXTENSIONS, KINDS
from scree.standard import Fft, Linalg, Namespace

DOCS = Path(__file__).parents[2] / "docs"


def import_from_docs(name: str) -> ModuleType:
    """Return a module that the documentation builds the reference from."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


groups = import_from_docs("reference_groups")
reference = import_from_docs("reference_pages")

#: Public names with a page, except other names of the same function.
NAMES = [name for name, page in groups.pages().items() if name == page]

#: Class -> the sections that it lacks. Users construct `Array`, the pool and the sampler; only kernels
#: construct a `Layout`, and no user constructs the others.
CLASSES = {
    "Array": {"Returns"},
    "Namespace": {"Parameters", "Returns"},
    "PagePool": {"Returns"},
    "RopeScaling": {"Returns"},
    "data.Interleaved": {"Parameters", "Returns"},
    "data.TokenBudgetSampler": {"Returns"},
    "explanation.Explanation": {"Parameters", "Returns"},
    "functions.Kind": {"Parameters", "Returns"},
    "layout.Layout": {"Returns", "Examples"},
    "layout.Tiles": {"Parameters", "Returns", "Examples"},
}

#: Methods without an example: it would need pinned memory or a CUDA device.
WITHOUT_EXAMPLE = {"pin_memory", "record_stream"}

METHODS = [
    (kind, name)
    for kind in (Array, Update, TokenBudgetSampler)
    for name, value in vars(kind).items()
    if inspect.isfunction(value) and name[0] != "_"
]


def missing_sections(text: str, takes_arguments: bool, returns: bool) -> set[str]:
    """Return the sections of numpydoc that a docstring lacks."""
    expected = {"Examples"}
    expected |= {"Parameters"} if takes_arguments else set()
    expected |= {"Returns"} if returns else set()
    return {title for title in expected if not re.search(rf"^{title}\n-+$", text, re.MULTILINE)}


def test_groups_contain_every_public_name_once() -> None:
    groups.check()


def test_differences_wrong_groups_name_every_problem() -> None:
    messages = groups.differences(["softmax", "rope", "rope", "lost"], {"softmax", "rope", "split"})
    assert messages == ["split is in no group", "lost is not public", "rope is in 2 groups"]


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_all_sections(name: str) -> None:
    path = groups.true_path(name)
    node, text = groups.definition(path), groups.docstring(path)
    if isinstance(node, ast.ClassDef):
        assert missing_sections(text, True, True) == CLASSES[name]
        return
    arguments = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]
    returns = ast.unparse(node.returns) != "None"
    assert not missing_sections(text, bool(arguments), returns)


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=lambda x: getattr(x, "__name__", x))
def test_method_has_all_sections(kind: type, name: str) -> None:
    method = vars(kind)[name]
    signature = inspect.signature(method)
    returns = signature.return_annotation not in (None, "None")
    missing = missing_sections(inspect.getdoc(method) or "", len(signature.parameters) > 1, returns)
    assert missing == ({"Examples"} if name in WITHOUT_EXAMPLE else set())


@pytest.mark.parametrize("extension", ["", *EXTENSIONS])
def test_function_of_the_standard_says_its_action_and_result(extension: str) -> None:
    kinds = EXTENSIONS[extension] if extension else KINDS
    protocol: Any = {"": Namespace, "linalg": Linalg, "fft": Fft}[extension]
    for name, kind in kinds.items():
        if kind.name == "plain":
            continue
        text = inspect.getdoc(getattr(protocol, name)) or ""
        expected = {"Examples"} if kind.why else set()
        assert missing_sections(text, True, True) == expected, name
        assert re.search("Ragged arrays: |takes no ragged arrays: ", text), name


def test_pages_show_no_call_record() -> None:
    pages = reference.sources()
    assert "reference/softmax.md" in pages
    assert "reference/standard/statistical.md" in pages
    texts = [*pages.values(), *(groups.docstring(groups.true_path(name)) for name in NAMES)]
    assert not [text for text in texts if re.search(r"\w+Call\b", text)]
    assert "{#xp.sum}" in pages["reference/standard/statistical.md"]
    assert "::: scree.ops.softmax.softmax\n" in pages["reference/softmax.md"]
