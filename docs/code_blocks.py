"""Give the copy button of interactive examples their code without prompts and outputs.

A line that shows an error is copied as a comment.
"""

import re
from doctest import DocTestParser
from html import escape, unescape
from typing import Any

BLOCK = re.compile(r'<div class="language-pycon highlight">(<pre.*?</pre>)', re.DOTALL)


def source(text: str) -> str:
    """Return the code of the examples in a text."""
    lines = []
    for example in DocTestParser().get_examples(text):
        code = example.source.rstrip("\n")
        if example.exc_msg is not None:
            error = example.exc_msg.partition(":")[0].strip()
            code = "\n".join(f"# {line}" for line in f"{code}  # {error}".split("\n"))
        lines.append(code)
    return "\n".join(lines) + "\n"


def on_page_content(html: str, **_: Any) -> str:
    """Add the attribute `data-copy`, which the copy button uses, to interactive examples."""

    def add_copy(match: re.Match[str]) -> str:
        text = unescape(re.sub(r"<[^>]*>", "", match[1]))
        code = escape(source(text)).replace("\n", "&#10;")
        return f'<div class="language-pycon highlight" data-copy="{code}">{match[1]}'

    return BLOCK.sub(add_copy, html)
