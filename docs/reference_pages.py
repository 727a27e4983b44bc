"""Build the reference when mkdocs runs: one page per public name, one per chapter of the standard.

The pages are generated from the code and from the tables of `reference_groups.py`. Pages of the
documentation insert parts of it: `<!-- reference: index -->` the tables of all groups,
`<!-- reference: chapters -->` the table of the chapters, `<!-- reference: GROUP -->` links to the
functions of a group.
"""

import re
import textwrap
from collections.abc import Iterator
from inspect import Parameter, getdoc, signature
from posixpath import relpath
from typing import TYPE_CHECKING, Any, get_overloads

from reference_groups import (
    CHAPTERS,
    DOCUMENTED,
    GROUPS,
    MODULES,
    check,
    docstring,
    pages,
    summary,
    true_path,
)

from scree import ragged
from scree.array import Array, CachedAttribute
from scree.functions import EXTENSIONS, KINDS, Kind
from scree.hints import ALTERNATIVES
from scree.standard import Fft, Linalg, Namespace

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PLAIN = Kind("plain")
CLASSES: dict[str, Any] = {"": Namespace, "linalg": Linalg, "fft": Fft}

#: Members of `Array` that connect it with its layout; the page of `Layout` describes them.
ON_LAYOUT = ("from_layout", "unchecked")

#: Operator method of `Array` -> the expression that calls it.
OPERATORS = {
    "__neg__": "-x", "__pos__": "+x", "__abs__": "abs(x)", "__invert__": "~x", "__add__": "x + y",
    "__sub__": "x - y", "__mul__": "x * y", "__truediv__": "x / y", "__floordiv__": "x // y",
    "__mod__": "x % y", "__pow__": "x ** y", "__matmul__": "x @ y", "__and__": "x & y",
    "__or__": "x | y", "__xor__": "x ^ y", "__lshift__": "x << y", "__rshift__": "x >> y",
    "__eq__": "x == y", "__ne__": "x != y", "__lt__": "x < y", "__le__": "x <= y",
    "__gt__": "x > y", "__ge__": "x >= y",
}  # fmt: skip

#: Name of a parameter of the standard that the code annotates with `Any` -> the type on the page.
PARAMETER_TYPES = {
    "arrays": "array", "arrays_and_dtypes": "array | dtype | number", "append": "array | None",
    "axes": "int | tuple[tuple[int, ...], tuple[int, ...]]", "condition": "array | number",
    "device": "device | None", "dtype": "dtype | None", "from_": "dtype | array",
    "indices": "array", "invert": "bool", "kind": "dtype | str | tuple[dtype | str, ...]",
    "max": "array | number | None", "min": "array | number | None", "obj": "object",
    "ord": "int | float | str", "prepend": "array | None", "repeats": "int | array",
    "rtol": "float | array | None", "shape": "int | tuple[int | None, ...]",
    "sorter": "array | None", "to": "dtype", "type": "dtype | array", "x": "array", "x1": "array",
    "x2": "array",
}  # fmt: skip

#: Function of the standard whose result is no single array -> the type on the page.
RESULTS = {
    "__array_namespace_info__": "object", "finfo": "object", "iinfo": "object",
    "nonzero": "tuple[array, ...]", "result_type": "dtype",
    "unique_all": "(values, indices, inverse_indices, counts)",
    "unique_counts": "(values, counts)", "unique_inverse": "(values, inverse_indices)",
    "linalg.eig": "(eigenvalues, eigenvectors)", "linalg.eigh": "(eigenvalues, eigenvectors)",
    "linalg.qr": "(Q, R)", "linalg.slogdet": "(sign, logabsdet)", "linalg.svd": "(U, S, Vh)",
}  # fmt: skip

#: Alias of a type in `scree.standard` -> the type on the page.
ALIASES = {"T": "array", "Axes": "int | tuple[int, ...] | None", "Flag": "bool"}


# --- The pages of the public names.


def address(name: str) -> str:
    """Return the source path of the page of a public name."""
    if name in MODULES:
        return MODULES[name]
    if name == "Namespace":  # `reference/Namespace` and `reference/namespace` are one on some disks
        return "reference/standard.md"
    return f"reference/{pages()[name].replace('.', '/')}.md"


def block(path: str, **options: Any) -> str:
    """Return a block of mkdocstrings."""
    return "\n".join(
        [f"::: {path}", "    options:", *(f"      {k}: {v}" for k, v in options.items())]
    )


def escaped(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")


def page(name: str) -> str:
    """Return the Markdown of the page of a public name."""
    path, others = true_path(name), [x for x in pages() if pages()[x] == name and x != name]
    boost = 1 if name in DOCUMENTED else 2
    parts = [front_matter(f"scree.{name}", boost)]
    if name == "Array":
        return "\n\n".join([*parts, *page_of_array()])
    options = {"heading": f'"scree.{name}"', "toc_label": f'"{name}"', "heading_level": 1}
    if name == "Namespace":
        return "\n\n".join([*parts, block(path, **options, members="false"), *page_of_standard()])
    parts.append(block(path, **options, members_order="source", filters='["!^_"]'))
    names = [f"`scree.{x}`" for x in others]
    names += [f"`xp.ragged.{x}`" for x in (name, *others) if x in ragged.__all__]
    if names:
        parts.append(f"Other names of this function: {', '.join(names)}.")
    if foreign := foreign_names(f"ragged.{name}"):
        parts.append(foreign)
    level = {"heading_level": 2, "members_order": "source", "filters": '["!^_"]'}
    if name == "at":
        parts.append("[](){#scree.array.At}")
        parts.append(
            block("scree.array.Update", heading='"Update"', merge_init_into_class="false", **level)
        )
    if name == "layout.Layout":
        parts.append("## Arrays on a layout")
        parts += [block(f"scree.array.Array.{x}", heading_level=3) for x in ON_LAYOUT]
    return "\n\n".join(parts) + "\n"


def foreign_names(name: str) -> str:
    """Return a sentence with the names that other libraries give to `xp.NAME`, or nothing."""
    pattern = rf"\bxp\.{re.escape(name)}(?![\w.])"
    found = [x for x, expression in ALTERNATIVES.items() if re.search(pattern, expression)]
    names = [f"`{x}`" for x in found if x not in ("arange", "item")]  # these do something else
    return f"Names in NumPy, PyTorch or JAX: {', '.join(names)}." if names else ""


def front_matter(title: str, boost: int = 2) -> str:
    """Return the head of a page; the search lists the reference before other pages."""
    return f"---\ntitle: {title}\nsearch:\n  boost: {boost}\n---"


def page_of_array() -> Iterator[str]:
    """Yield the parts of the page of `Array`."""
    path = "scree.array.Array"
    yield block(
        path, heading='"scree.Array"', toc_label='"Array"', heading_level=1, members="false"
    )
    public = {x: v for x, v in vars(Array).items() if x[0] != "_" and x not in ON_LAYOUT}
    properties = {x: v for x, v in public.items() if isinstance(v, property | CachedAttribute)}
    methods = {x: v for x, v in public.items() if callable(v)}
    fields = re.findall(
        r"^(\w+)\n    (.+?)(?=^\S|\Z)", section(docstring(path), "Parameters"), re.M | re.S
    )
    yield "## Attributes\n\n| attribute | summary |\n|---|---|\n" + "\n".join(
        [f"| `{x}` | {escaped(' '.join(text.split()))} |" for x, text in fields]
        + [f"| [`{x}`][{path}.{x}] | {first_line(v)} |" for x, v in properties.items()]
    )
    yield "## Methods\n\n| method | summary |\n|---|---|\n" + "\n".join(
        f"| [`{x}`][{path}.{x}] | {first_line(v)} |" for x, v in methods.items()
    )
    rows = [f"| `{OPERATORS[x]}` | {link_to(name)} |" for x, name in operators().items()]
    yield (
        "## Operators\n\nThe operand `y` is a ragged array, a dense array or a number; "
        "`y` may also be on the left.\n\n| operator | function |\n|---|---|\n" + "\n".join(rows)
    )
    yield (
        "`arr[key]` [indexes](../array.md#indexing). `len(arr)` is the number of rows, and "
        "iteration yields the rows. `bool(arr)` and assignment to `arr[key]` raise `TypeError`."
    )
    yield "## Attributes in detail"
    yield from (block(f"{path}.{x}", heading_level=3) for x in properties)
    yield "## Methods in detail"
    yield from (block(f"{path}.{x}", heading_level=3) for x in methods)


def operators() -> dict[str, str]:
    """Return the function of the standard for every operator method of `Array`."""
    functions = {}
    for method in OPERATORS:
        constants = vars(Array)[method].__code__.co_consts
        functions[method] = next(x for x in constants if isinstance(x, str) and x in KINDS)
    return functions


def first_line(value: Any) -> str:
    """Return the first paragraph of the docstring of an object, for a cell of a table."""
    return escaped(" ".join((getdoc(value) or "").partition("\n\n")[0].split()))


def section(text: str, title: str) -> str:
    """Return the content of a section of numpydoc, or an empty string."""
    pattern = rf"^{title}\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)"
    match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    return match[1].rstrip() + "\n" if match else ""


# --- The pages of the standard.


def anchor(name: str) -> str:
    """Return the anchor of the entry of a name of the standard."""
    return f"xp.{name.strip('_')}"


def link_to(name: str, text: str = "") -> str:
    """Return a link to the entry of a function of the standard."""
    return f"[`{text or name}`][{anchor(name)}]"


def page_of_standard() -> Iterator[str]:
    """Yield the parts of the page of `Namespace` after its docstring."""
    yield "## Chapters of the standard"
    lines = ["| chapter | functions |", "|---|---|"]
    for chapter, (title, names) in CHAPTERS.items():
        links = " ".join(link_to(name, name.rpartition(".")[2]) for name in names.split())
        lines.append(f"| [{title}][standard-{chapter}] | {links} |")
    yield "\n".join(lines)
    yield (
        "The namespace also has [`xp.ragged`](../ragged.md), the functions that the standard "
        "lacks. A function is missing if the library's own namespace lacks it."
    )


def chapters() -> str:
    """Return links to the chapters of the standard."""
    return "\n".join(f"- [{title}][standard-{x}]" for x, (title, _) in CHAPTERS.items())


def chapter_page(chapter: str) -> str:
    """Return the Markdown of a chapter of the standard."""
    title, names = CHAPTERS[chapter]
    parts = [front_matter(title), f"# {title} {{#standard-{chapter}}}"]
    parts.append(
        "In the signatures, `array` is a ragged or dense array, and `xp` is the "
        "[namespace][scree.namespace.namespace] of the arrays. A call with dense arrays only runs the "
        "library's own function."
    )
    entries = {name: entry(name) for name in names.split()}
    rows = [f"| {link_to(name, name)} | {text[1]} |" for name, text in entries.items()]
    parts.append("| name | summary |\n|---|---|\n" + "\n".join(rows))
    parts += [text[0] for text in entries.values()]
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> tuple[str, str]:
    """Return the entry of a name of the standard, and its summary for a table."""
    extension, _, short = name.rpartition(".")
    kind = EXTENSIONS[extension][short] if extension else KINDS[short]
    shown = name.replace("_", "\\_")
    heading = f"## xp.{shown} {{#{anchor(name)}}}"
    function = getattr(CLASSES[extension], short, None)
    if function is None:
        text = CONSTANTS.get(short) or f"The data type `{short}` of the library."
        return f"{heading}\n\n{text}", text
    text = getdoc(function) or ""
    first, _, rest = text.partition("\n\n")
    first = " ".join(first.split())
    action = rest.partition("\n\n")[0] if rest and not re.match(r"\w+\n-+\n", rest) else ""
    action = " ".join(action.split()).removeprefix("Ragged arrays: ")
    parts = [
        heading,
        f"``` {{ .python .no-copy }}\nxp.{name}{typed_signature(name, function)}\n```",
        first,
    ]
    if kind.why:
        parts.append(f"**Ragged arrays:** it raises `TypeError`, because {kind.why}.")
    elif kind.name == "plain":
        parts.append("**Ragged arrays:** none; it is the library's own function.")
    elif action:
        parts.append(f"**Ragged arrays:** {action}")
    if foreign := foreign_names(name):
        parts.append(foreign)
    for title in ("Parameters", "Returns"):
        if lines := numpydoc_items(section(text, title)):
            parts.append(f"**{title}:**\n\n" + "\n".join(lines))
    if example := section(text, "Examples"):
        parts.append(f"**Example:**\n\n```pycon\n{example}```")
    return "\n\n".join(parts), escaped(first)


#: Constant of the standard, or an attribute of the namespace -> its description.
CONSTANTS = {
    "e": "The base of the natural logarithm, 2.71828...",
    "inf": "Positive infinity.",
    "nan": "Not a number.",
    "newaxis": "None, a new axis of size 1 in an index.",
    "pi": "The ratio of a circle's circumference to its diameter, 3.14159...",
    "__array_api_version__": "The version of the standard that the library follows, a string.",
}


def numpydoc_items(text: str) -> list[str]:
    """Return one item of a list per name of a section."""
    items = re.findall(r"^(\S[^\n]*)\n((?:    [^\n]*\n?)+)", text, re.MULTILINE)
    return [f"- `{name}`: {' '.join(words.split())}" for name, words in items]


def typed_signature(name: str, function: Any) -> str:
    """Return the signature of a function of the standard with the types of the page."""
    own = signature(function)
    is_binary, is_plain = bool(get_overloads(function)), KINDS.get(name, PLAIN) == PLAIN
    parts, kind = [], None
    for parameter in list(own.parameters.values())[1:]:
        if kind == Parameter.POSITIONAL_ONLY != parameter.kind:
            parts.append("/")
        if parameter.kind == Parameter.KEYWORD_ONLY and kind not in (
            Parameter.KEYWORD_ONLY,
            Parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        kind = parameter.kind
        star = "*" if kind == Parameter.VAR_POSITIONAL else ""
        type_ = type_of(parameter, is_binary, is_plain)
        default = "" if parameter.default is Parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{star}{parameter.name}: {type_}{default}")
    if kind == Parameter.POSITIONAL_ONLY:
        parts.append("/")
    result = RESULTS.get(name) or plain_type(str(own.return_annotation)).replace("Any", "array")
    line = f"({', '.join(parts)}) -> {result}"
    if len(f"xp.{name}{line}") > 84:
        line = "(\n" + textwrap.indent(",\n".join(parts), "    ") + f",\n) -> {result}"
    return line


def plain_type(annotation: str) -> str:
    """Return an annotation without the aliases of `scree.standard`."""
    return re.sub(r"\b(T|Axes|Flag)\b", lambda match: ALIASES[match[1]], annotation)


def type_of(parameter: Parameter, is_binary: bool, is_plain: bool) -> str:
    """Return the type of a parameter of the standard on the page."""
    annotation = plain_type(str(parameter.annotation))
    if annotation != "Any":
        return annotation
    if is_binary and parameter.name in ("x1", "x2"):
        return "array | number"
    if parameter.name == "shape" and is_plain:
        return "int | tuple[int, ...]"
    return PARAMETER_TYPES[parameter.name]


# --- The hooks of mkdocs.


def sources() -> dict[str, str]:
    """Return the Markdown of every generated page by its source path."""
    check()
    text = {address(name): page(name) for name in pages() if pages()[name] == name}
    return text | {f"reference/standard/{x}.md": chapter_page(x) for x in CHAPTERS}


def index() -> str:
    """Return the tables of all groups, seen from `reference/index.md`."""
    parts = []
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n\n| name | summary |\n|---|---|")
        for name in names.split():
            target = relpath(address(name), "reference")
            parts.append(f"| [`{name}`]({target}) | {escaped(brief(name))} |")
        parts.append("")
        if group == "The namespace":
            parts += ["", "The functions of the standard, by chapter:", "", chapters()]
    return "\n".join(parts)


def links(group: str, page: str) -> str:
    """Return links to the functions of a group, seen from a page."""
    folder = page.rpartition("/")[0] or "."
    lines = []
    for name in GROUPS[group].split():
        if name not in MODULES:
            target = relpath(address(name), folder)
            lines.append(f"- [`{name.removeprefix('bridges.')}`]({target}): {brief(name)}")
    return "\n".join(lines)


def brief(name: str) -> str:
    """Return the summary of a public name, or the name that it is another name of."""
    if pages().get(name, name) != name:
        return f"Another name of `{pages()[name]}`."
    return summary(true_path(name)).replace("``", "`")


def on_config(config: "MkDocsConfig") -> None:
    """Add the generated pages to the section of the reference in the navigation."""
    section = next(item["Reference"] for item in config.nav or [] if "Reference" in item)
    for group, names in GROUPS.items():
        own = [x for x in names.split() if pages().get(x) == x]
        items: list[dict[str, Any]] = [{x: address(x)} for x in own]
        section.append({group: items})
        if group == "The namespace":
            items += [{title: f"reference/standard/{x}.md"} for x, (title, _) in CHAPTERS.items()]


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in sources().items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, page: "Page", **_: Any) -> str:
    """Replace every `<!-- reference: PART -->`."""

    def part(match: re.Match[str]) -> str:
        if match[1] in ("index", "chapters"):
            return {"index": index, "chapters": chapters}[match[1]]()
        return links(match[1], page.file.src_uri)

    return re.sub(r"<!-- reference: (.+?) -->", part, markdown)
