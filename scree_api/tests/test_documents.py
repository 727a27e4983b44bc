"""Every Python block of the README and of the documentation runs, page by page, in order."""

import doctest
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scree.dispatch.operation import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:python|pycon)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, int]]:
    """Return the blocks of a page with their first lines, except blocks that include a module."""
    text = page.read_text(encoding="utf-8")
    found = [(block[1], text.count("\n", 0, block.start(1))) for block in BLOCK.finditer(text)]
    return [(code, line) for code, line in found if not code.startswith("--8<--")]


def runs(page: Path) -> bool:
    """Return whether a page has blocks, and all libraries that it needs are installed."""
    needs = re.match(r"<!-- needs: (.*) -->", page.read_text(encoding="utf-8"))
    return bool(blocks(page)) and all(map(find_spec, needs[1].split() if needs else ()))


def run(page: Path) -> str:
    """Run the blocks of a page in one namespace; return the report of doctest."""
    names: dict[str, object] = {"__name__": "__main__"}
    said: list[str] = []
    for code, line in blocks(page):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), line)
            test.globs = names
            doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
                test, out=said.append, clear_globs=False
            )
        else:
            exec(compile("\n" * line + code, str(page), "exec"), names)
    return "".join(said)


@pytest.mark.parametrize("page", list(filter(runs, PAGES)), ids=lambda page: page.name)
def test_code_blocks_of_the_page_run(page: Path) -> None:
    """Run each page in its own process, because libraries loaded by other tests register kernels."""
    done = subprocess.run(
        [sys.executable, __file__, str(page)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_begins_with_its_two_commands() -> None:
    first = re.search(
        r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert first is not None
    demo, tests = (line for line in first[1].splitlines() if line and not line.startswith("#"))
    assert demo.endswith("-m scree demo")
    assert "bin/pytest" in tests


def test_the_page_on_kernels_describes_every_call() -> None:
    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    page = hooks["on_page_markdown"]((ROOT / "docs/kernels.md").read_text(encoding="utf-8"))
    for name, operation in OPERATIONS.items():
        call = operation.record
        assert f"::: {call.__module__}.{call.__name__}\n" in page, name


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])) or None)
