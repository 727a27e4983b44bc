"""Write `scree.standard`, the typed namespace with its documentation, from `standard.toml`.

It also writes the stub of the modules in `scree.xp`, which have the same names.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
import warnings
from pathlib import Path
from typing import Any

from scree.functions.table import EXTENSIONS, KINDS, Kind

HERE = Path(__file__).parent
TABLE: dict[str, Any] = tomllib.loads((HERE / "standard.toml").read_text(encoding="utf-8"))
STANDARD, STUB = HERE / "scree" / "standard.py", HERE / "scree" / "xp" / "names.pyi"
CONSTANTS = {"e": "float", "inf": "float", "nan": "float", "pi": "float", "newaxis": "None"}
OPERANDS = {"DenseArray | complex": "Any", "Any": "Array"}  # types of an overload -> its result

HEADER = '''"""`Namespace`, the type of `scree.namespace`: every function with its signature and documentation.

Written by ``nox -s generate`` from `standard.toml`.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from . import ragged as _ragged
from .array import Array

__all__ = ["DenseArray", "Fft", "Linalg", "Namespace", "Ragged"]

T = TypeVar("T")
Axes: TypeAlias = int | tuple[int, ...] | None
Flag: TypeAlias = builtins.bool  # the standard has a data type of the name bool


class DenseArray(Protocol):
    """A dense array of any library of the standard; a ragged array is none."""

    def __dlpack__(self) -> Any:
        """Export the array."""
        ...


class Ragged:
    """The type of `xp.ragged`: the operations that the standard lacks."""

'''

NAMESPACE_DOC = """The type of `scree.namespace`: the Array API standard for ragged and dense arrays.

    It annotates a namespace that a function takes as an argument.

    Examples
    --------
    >>> import scree, scree.xp.numpy
    >>> def normalized(xp: scree.Namespace, x: scree.Array) -> scree.Array:
    ...     return x / xp.sum(x, axis=1, keepdims=True)
    >>> normalized(scree.xp.numpy, scree.from_lists([[1.0, 3.0]])).tolist()
    [[0.25, 0.75]]
    """


def entry(name: str, table: str) -> dict[str, Any]:
    """Return the entry of a function: signature, summary, parameters and example."""
    if table == "functions":
        for chapter, signature in (
            ("unary", "(x: T, /) -> T"),
            ("binary", "(x1: Operand, x2: Operand, /) -> Either"),
        ):
            if name in TABLE[chapter]:
                examples = TABLE[f"{chapter}_examples"]
                example = examples.get(name, examples["default"].format(name=name))
                summary = TABLE[chapter][name]
                return {"signature": signature, "summary": summary, "example": example}
    found: dict[str, Any] = TABLE[table][name]
    return entry(found["same"], "functions") if "same" in found else found


def run(lines: list[str]) -> list[str]:
    """Return the lines of an example with the output of the last one."""
    scope: dict[str, Any] = {}
    *setup, last = lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for line in setup:
            exec(line, scope)
        result = repr(eval(last, scope))
    return [*(f">>> {line}" for line in lines), *result.splitlines()]


def section(title: str, entries: dict[str, str]) -> list[str]:
    """Return a section of numpydoc."""
    lines = ["", title, "-" * len(title)]
    for name, text in entries.items():
        lines += [name, *textwrap.wrap(text, 84, initial_indent="    ", subsequent_indent="    ")]
    return lines


def docstring(name: str, kind: Kind, found: dict[str, Any]) -> list[str]:
    """Return the lines of a function's documentation."""
    text = found.get("ragged", TABLE["ragged"].get(kind.name, ""))
    if kind.name == "unsupported":
        text = f"It takes no ragged arrays: {kind.why}."
    elif kind.name == "plain":
        text = "It is the library's own function."
    if kind.name not in ("plain", "unsupported"):
        text = f"Ragged arrays: {text}"
    lines = [found["summary"], "", *textwrap.wrap(text, 88)]
    signature = found["signature"]
    names = re.findall(r"(\*?\w+):", signature)
    if kind.name != "plain" and names:
        own = found.get("parameters", {})
        known = {n: own.get(n) or TABLE["parameters"].get(n) for n in names}
        lines += section("Parameters", {n: text for n, text in known.items() if text})
    returns = found.get("returns", TABLE["returns"].get(kind.name))
    if returns and kind.name != "plain":
        lines += section("Returns", returns)
    elif signature.endswith("-> T"):
        lines += section("Returns", {"array": "Ragged if the argument is, else dense."})
    elif signature.endswith("Either"):
        lines += section("Returns", {"array": "Ragged if an operand is, else dense."})
    if kind.name == "unsupported":
        lines += section("Raises", {"TypeError": "If an argument is ragged."})
    if "example" in found:
        example = found["example"]
        setup = [f"{n} = {v}" for n, v in TABLE["setup"].items() if re.search(rf"\b{n}\b", example)]
        code = ["import scree, scree.xp.numpy as xp", *setup, example]
        lines += ["", "Examples", "--------", *run(code)]
    return lines


def function(name: str, kind: Kind, found: dict[str, Any]) -> list[str]:
    """Return the lines of a function of a protocol."""
    signature, lines = (
        found["signature"].replace("(", "(self, ", 1).replace("(self, )", "(self)"),
        [],
    )
    if signature.endswith("Either"):
        for operand, result in OPERANDS.items():
            typed = signature.replace("Operand", operand).replace("Either", result)
            lines += ["@overload", f"def {name}{typed}: ...", ""]
        signature = signature.replace("Operand", "Any").replace("Either", "Any")
    first, *rest = docstring(name, kind, found)
    body = ['"""' + first, *rest, '"""', "raise NotImplementedError"]
    return [*lines, f"def {name}{signature}:", *(f"    {x}" for x in body), ""]


def protocol(name: str, doc: str, table: str, kinds: dict[str, Kind]) -> list[str]:
    """Return the lines of a protocol with every name of a table of kinds."""
    lines = [f'    """{doc}"""', ""]
    entries = TABLE["functions"] | TABLE["unary"] | TABLE["binary"]
    entries = entries if table == "functions" else TABLE[table]
    if table == "functions":
        lines += [f"    {x}: {x.title()}" for x in ("fft", "linalg", "ragged")]
        values = sorted(kinds.keys() - entries.keys())
        lines += [f"    {x}: {CONSTANTS.get(x, 'Any')}" for x in values] + [""]
    for x in sorted(kinds.keys() & entries.keys()):
        lines += [f"    {line}" for line in function(x, kinds[x], entry(x, table))]
    if unknown := sorted(entries.keys() - kinds.keys()):
        sys.exit(f"standard.toml: names that KINDS lacks: {', '.join(unknown)}")
    return ["", f"class {name}(Protocol):", *lines]


def standard() -> str:
    """Return the text of `scree.standard`."""
    from generate_ragged import MODULES, public_names

    operations = sorted(name for path in MODULES.values() for name in public_names(path))
    lines = [f"    {name} = staticmethod(_ragged.{name})" for name in operations] + [""]
    for name, table in EXTENSIONS.items():
        doc = f"The type of `xp.{name}`, an extension of the standard."
        lines += protocol(name.title(), doc, name, table)
    lines += protocol("Namespace", NAMESPACE_DOC, "functions", KINDS)
    return HEADER + "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def stub() -> str:
    """Return the text of the stub of the modules in `scree.xp`."""
    names = sorted({*KINDS, *EXTENSIONS, "ragged"})
    lines = [
        '"""The names of every module of `scree.xp`. Written by ``nox -s generate``."""',
        "",
        "from ..standard import Namespace as _Namespace",
        "",
        "_xp: _Namespace",
        "",
        *(f"{name} = _xp.{name}" for name in names),
        "",
        "__all__ = [",
        *(f'    "{name}",' for name in names),
        "]",
    ]
    return "\n".join(lines)


def formatted(path: Path, text: str) -> str:
    """Return the text as Ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for path, text in ((STANDARD, standard()), (STUB, stub())):
        text = formatted(path, text)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not current: run nox -s generate")
