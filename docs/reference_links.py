"""Extension of griffe: links in docstrings, and docstrings of the methods attached to `Array`."""

import re
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprBinOp,
    ExprName,
    Extension,
    Function,
    Module,
    ParameterKind,
)
from reference_groups import names_of_standard, pages, true_path

#: Text in single backticks -> the identifier of its entry.
TARGETS = {
    **{f"xp.{name}": f"xp.{name}" for name in names_of_standard()},
    **{name.rpartition(".")[2]: true_path(name) for name in reversed(pages())},
    **{f"scree.{name}": true_path(name) for name in pages()},
    "Update": "scree.array.Update",
}
#: Aliases of types that signatures show in full.
TYPE_ALIASES = {"Window", "Rejects", "Prepare"}
#: Common words that are also names of functions.
AMBIGUOUS = {"at", "group", "shift", "split", "register", "load"}


class Links(Extension):
    """Link every public name in a docstring to its page."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Change the docstrings of the whole package."""
        if pkg.name != "scree":
            return
        array, methods = pkg["array.Array"], pkg["bridges.methods"]
        for name, member in array.members.items():
            if member.docstring is None and name in methods.members:
                member.docstring = Docstring(methods[name].docstring.value, parent=member)
        for path in ("array.Array", "layout.Layout"):
            make_attributes(pkg[path])
        self.visit(pkg)

    def visit(self, obj: Any) -> None:
        """Change the docstrings of an object and of its members."""
        if obj.docstring is not None:
            own = {obj.name}
            if isinstance(obj, Function):
                own |= {parameter.name for parameter in obj.parameters}
            if isinstance(obj, Class):
                own |= set(obj.members)
            obj.docstring.value = linked(one_name_per_item(see_also(obj.docstring.value)), own)
        if isinstance(obj, Function):
            for parameter in obj.parameters:
                if parameter.kind in (ParameterKind.var_positional, ParameterKind.var_keyword):
                    parameter.default = None  # griffe shows () and {}
                parameter.annotation = expanded(parameter.annotation, obj)
        for member in obj.members.values():
            if not member.is_alias:
                self.visit(member)


def make_attributes(owner: Class) -> None:
    """Replace the methods that a decorator turns into attributes."""
    for name, member in list(owner.members.items()):
        if isinstance(member, Function) and [str(x.value) for x in member.decorators] == [
            "CachedAttribute"
        ]:
            attribute = Attribute(name, annotation=member.returns, lineno=member.lineno)
            attribute.labels |= {"property"}
            attribute.docstring = member.docstring and Docstring(member.docstring.value)
            owner.set_member(name, attribute)
            if attribute.docstring is not None:
                attribute.docstring.parent = attribute


def see_also(text: str) -> str:
    """Return a docstring whose section See Also is a list with links."""

    def item(match: re.Match[str]) -> str:
        return f"- [`{match[1]}`][{TARGETS[match[1]]}]: {match[2]}"

    parts = re.split(r"(^See Also\n-+\n(?:\S[^\n]*\n?)*)", text, flags=re.MULTILINE)
    for i in range(1, len(parts), 2):
        parts[i] = re.sub(r"^(\w+) : (.*)", item, parts[i], flags=re.MULTILINE)
    return "".join(parts)


def expanded(annotation: Any, function: Function) -> Any:
    """Return an annotation without the aliases of types that no page describes."""
    if not isinstance(annotation, Expr):
        return annotation
    for name in annotation.iterate(flat=True):
        if isinstance(name, ExprName) and name.name in TYPE_ALIASES:
            alias = function.module[name.name]
            value = alias.final_target.value if alias.is_alias else alias.value
            if annotation is name:
                return value
            if isinstance(annotation, ExprBinOp) and annotation.left is name:
                annotation.left = value
    return annotation


def one_name_per_item(text: str) -> str:
    """Return a docstring with one item per name, as griffe gives all names of an item one type."""

    def items(match: re.Match[str]) -> str:
        return "".join(f"{name}\n{match[2]}" for name in match[1].split(", "))

    parts = re.split(r"(^(?:Parameters|Raises)\n-+\n)", text, flags=re.MULTILINE)
    for i in range(2, len(parts), 2):
        own, rest = re.match(r"(.*?)((?:^\w[^\n]*\n-+\n.*)?)\Z", parts[i], re.M | re.S).groups()
        item = r"^([*\w]+(?:, [*\w]+)+)\n((?:(?:    [^\n]*)?\n)*(?:    [^\n]*)?)"
        parts[i] = re.sub(item, items, own if own.endswith("\n") else own + "\n", flags=re.M) + rest
    return "".join(parts)


def linked(text: str, own: set[str]) -> str:
    """Return a docstring with links; names in `own` belong to the object itself."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TARGETS or name in own | AMBIGUOUS:
            return match[0]
        return f"[`{name}`][{TARGETS[name]}]"

    lines = re.split(r"(^ *>>> .*?(?:\n\s*\n|\Z))", text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(lines), 2):
        lines[i] = re.sub(r"(?<![`\w])`([\w.]+)`(?!`)", link, lines[i])
    return "".join(lines)
