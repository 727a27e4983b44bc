"""No retired identifier, phrase or docstring opening in the code and the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE, KERNELS = "scree_api/scree", "kernels_triton/scree_triton"
PACKAGES = [CORE, KERNELS, "conformance/scree_conformance", "bench/scree_bench"]
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
#: `bench.md` is generated: its tables repeat the names of cases from result files. The folder
#: `results` is no part of the site.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name != "bench.md" and page.parent.name != "results"
    ),
]

#: Retired names of modules, functions, classes and parameters -> replacement.
#: A leading underscore counts only if the entry has one.
IDENTIFIERS = {
    "again": "call_cache, prepare",
    "against": "broadcast_operand",
    "axes_of": "normalize_axes",
    "beside": "pair_cache",
    "by_token": "expand_to_tokens",
    "compiling": "is_compiling",
    "declare": "define_operation",
    "_DESCRIBE": "a call record of define_operation",
    "fit": "broadcasting",
    "in_rows": "mask_tail",
    "lift": "functions",
    "lifter": "implements",
    "lifters": "implements",
    "stretches": "is_broadcastable",
    "trimmed": "drop_tail",
}

#: Retired in the core only, as modules, functions and classes. Elsewhere, and as parameters, these
#: are ordinary words.
CORE_IDENTIFIERS = {
    "alike": "make_guard",
    "apart": "on_different_devices",
    "gated": "swiglu",
    "once": "cached",
    "outside": "untraced",
    "place": "from_numpy",
    "spread": "append_axes",
    "tiled": "gather_tiles",
    "truth": "is_nonzero",
}

#: Retired in the Triton kernels only.
KERNEL_IDENTIFIERS = {
    "addition": "scatter_add",
    "binned": "bucketed",
    "copies": "strided_copy",
    "extrema": "argmax",
    "gated": "swiglu",
    "joining": "concat",
    "lanes": "threads_per_row",
    "moves": "layout",
    "multiprocessor": "sm",
    "multiprocessors": "num_sms",
    "picking": "gather",
    "places": "scatter_indices",
    "planes": "bf16x3",
    "Plan": "LaunchConfig",
    "plans": "launch_configs",
    "shares": "partitions",
    "_claim": "fetch_tile",
    "_follow": "pdl_wait",
    "_let_follow": "pdl_launch_dependents",
    "_post": "publish_tile",
    "_take_turn": "the ping-pong barrier",
}

_PREPOSITION = r"(?:of|in|for|to|with|from|by|at|on|per|is|has|as|and|or)\b"

#: Retired phrases (regular expressions) -> replacement.
PHRASES = {
    "behind": "after",
    "(?:that|those) of": "repeat the noun",
    "stands?|stood": "is, are",
    "lies": "is",
    "mend(?:s|ed|ing)?": "fix",
    "guests?|the house": "the plain term, no metaphor",
    rf"(?:an?|one|each) (?!{_PREPOSITION})\w+ an? "
    r"(?:row|token|head|thread|program|tile|block|layer|call|batch|step)": "per",
    "who (?:runs?|asks?|calls?|has|gives?|adds?|takes?|knows?|makes?)|whoever": "name the actor",
    "what (?:stands|lies|remains|comes out|follows from)": "name the object",
}

#: Words that begin no docstring. "Return whether ..." is fine.
OPENING = re.compile(r"(?:What|Who|Where|How|Of|Whether|With|Without)\b")
OPENING_REPLACEMENT = "an imperative verb, or a noun phrase that names the object"


def definitions(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name and whether it is a parameter, for every function, class and parameter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, True


def retired_identifiers(source: str, where: str) -> list[str]:
    """Return one message per definition with a retired name, the module itself included."""
    module = Path(where)
    module_name = module.parent.name if module.stem == "__init__" else module.stem
    messages = []
    for line, name, is_parameter in [(1, module_name, False), *definitions(source)]:
        entries = dict(IDENTIFIERS)
        if where.startswith(KERNELS):
            entries |= KERNEL_IDENTIFIERS
        if where.startswith(CORE) and not is_parameter:
            entries |= CORE_IDENTIFIERS
        replacement = entries.get(name) or entries.get(name.lstrip("_"))
        if replacement is not None:
            messages.append(f"{where}:{line}: {name!r} -> {replacement}")
    return messages


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line number and the text of every docstring."""
    documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            constant = node.body[0].value  # the docstring
            yield constant.lineno, constant.value


def blank(text: str, pattern: str) -> str:
    """Replace all matches by spaces; lines keep their numbers."""
    flags = re.MULTILINE | re.DOTALL
    return re.sub(pattern, lambda match: re.sub(r"\S", " ", match[0]), text, flags=flags)


def retired_phrases(text: str, where: str, line: int = 1) -> list[str]:
    """Return one message per retired phrase in a text from line `line` on, except in code."""
    text = blank(text, r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$")  # fenced code
    text = blank(text, r"^ *>>> .*?(?:\n\s*\n|\Z)")  # doctests
    text = blank(
        text, r"(`+)[^`]+\1|<!--.*?-->|\]\([^)\s]*\)"
    )  # inline code, comments, link targets
    messages = []
    for phrase, replacement in PHRASES.items():
        pattern = rf"\b(?:{phrase})\b".replace(" ", r"\s+")
        for match in re.finditer(pattern, text, re.IGNORECASE):
            at = line + text.count("\n", 0, match.start())
            messages.append(f"{where}:{at}: {' '.join(match[0].split())!r} -> {replacement}")
    return messages


def retired_docstrings(source: str, where: str) -> list[str]:
    """Return one message per retired phrase or opening in the docstrings of a module."""
    messages = []
    for line, text in docstrings(source):
        if match := OPENING.match(text.lstrip()):
            messages.append(f"{where}:{line}: opens with {match[0]!r} -> {OPENING_REPLACEMENT}")
        messages += retired_phrases(text, where, line)
    return messages


def name(path: Path) -> str:
    """Return the path within the repository."""
    return path.relative_to(ROOT).as_posix()


def fail(messages: list[str]) -> None:
    """Fail with one message per line, if there are any."""
    if messages:
        pytest.fail("\n".join(messages), pytrace=False)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_definitions_have_no_retired_name(path: Path) -> None:
    fail(retired_identifiers(path.read_text(encoding="utf-8"), name(path)))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_docstrings_have_no_retired_phrase(path: Path) -> None:
    fail(retired_docstrings(path.read_text(encoding="utf-8"), name(path)))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_have_no_retired_phrase(path: Path) -> None:
    fail(retired_phrases(path.read_text(encoding="utf-8"), name(path)))


WRONG = '''"""Where rows fit.

Those of the last row stand behind it, `behind` not.
"""

class Plan:
    """A thread a row takes it."""

    def spread(self, again, place):
        rows = again
        return rows

def _lift():
    """Return what lies
    behind.

    >>> "that of"
    """
'''


def test_retired_identifiers_wrong_sample_names_line_and_replacement() -> None:
    common = [":9: 'again' -> call_cache, prepare", ":13: '_lift' -> functions"]
    expected = {
        "conformance/scree_conformance/sample.py": common,
        f"{CORE}/sample.py": [":9: 'spread' -> append_axes", *common],
        f"{KERNELS}/sample.py": [":6: 'Plan' -> LaunchConfig", *common],
        f"{KERNELS}/plans.py": [
            ":1: 'plans' -> launch_configs",
            ":6: 'Plan' -> LaunchConfig",
            *common,
        ],
        f"{KERNELS}/moves/__init__.py": [
            ":1: 'moves' -> layout",
            ":6: 'Plan' -> LaunchConfig",
            *common,
        ],
    }
    for where, messages in expected.items():
        found = retired_identifiers(WRONG, where)
        assert sorted(found) == sorted(where + message for message in messages)


def test_retired_docstrings_wrong_sample_names_line_and_replacement() -> None:
    assert retired_docstrings(WRONG, "sample.py") == [
        f"sample.py:1: opens with 'Where' -> {OPENING_REPLACEMENT}",
        "sample.py:3: 'behind' -> after",
        "sample.py:3: 'Those of' -> repeat the noun",
        "sample.py:3: 'stand' -> is, are",
        "sample.py:7: 'A thread a row' -> per",
        "sample.py:15: 'behind' -> after",
        "sample.py:14: 'lies' -> is",
        "sample.py:14: 'what lies' -> name the object",
    ]


def test_retired_phrases_of_code_are_ignored() -> None:
    page = "```python\n# behind\n```\n\n[after](behind.md) `behind` <!-- behind -->\n\nbehind\n"
    assert retired_phrases(page, "page.md") == ["page.md:7: 'behind' -> after"]
