"""Write `scree.ragged`, the list of all operations, from the modules in `scree.ops`."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "scree"
RAGGED = PACKAGE / "ragged.py"
MODULES = {"construct": PACKAGE / "construct.py"} | {
    f"ops.{path.stem}": path for path in sorted(PACKAGE.glob("ops/[!_]*.py"))
}
TAIL = """if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_from_operations(name, __all__))


def __dir__() -> list[str]:
    return __all__
"""


def public_names(path: Path) -> list[str]:
    """Return the `__all__` of a module without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def source() -> str:
    """Return the text of `scree.ragged`."""
    names = {module: sorted(public_names(path)) for module, path in MODULES.items()}
    imports = names | {"hints": ["missing_from_operations"]}
    lines = [
        '"""`xp.ragged`: operations that the standard lacks; one module for every namespace.',
        "",
        "Written by ``nox -s generate`` from the modules in `scree.ops`.",
        '"""',
        "",
        "from typing import TYPE_CHECKING, Any",
        "",
    ]
    for module, exported in sorted(imports.items()):
        line = f"from .{module} import {', '.join(exported)}"
        if len(line) > 100:
            line = f"from .{module} import (\n    " + ",\n    ".join(exported) + ",\n)"
        lines += [line] if exported else []
    exported = sorted(name for group in names.values() for name in group)
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in exported), "]", "", ""]
    return "\n".join(lines) + TAIL


if __name__ == "__main__":
    if "--check" in sys.argv and RAGGED.read_text(encoding="utf-8") != source():
        sys.exit(f"{RAGGED} is not current: run nox -s generate")
    RAGGED.write_text(source(), encoding="utf-8")
