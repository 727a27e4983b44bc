"""Every Python block of the README and of the documentation runs, from the first to the last of a page."""

import doctest
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scree.dispatch import registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:python|pycon)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, int]]:
    """The blocks of a page and the line that each begins at; not those that show a module, which has its own doctest."""
    text = page.read_text(encoding="utf-8")
    found = [(block[1], text.count("\n", 0, block.start(1))) for block in BLOCK.finditer(text)]
    return [(code, line) for code, line in found if not code.startswith("--8<--")]


def runs(page: Path) -> bool:
    """Whether a page has blocks, and the libraries are there that it needs beside NumPy."""
    needs = re.match(r"<!-- needs: (.*) -->", page.read_text(encoding="utf-8"))
    return bool(blocks(page)) and all(map(find_spec, needs[1].split() if needs else ()))


def run(page: Path) -> str:
    """Run the blocks of a page in one namespace; what doctest has to say about them."""
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
def test_blocks_run(page: Path) -> None:
    """In a process of its own, as a reader would: libraries that other tests have loaded bring their kernels."""
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
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    for name, describe in registry._DESCRIBE.items():
        call = describe if isinstance(describe, type) else describe.__self__  # type: ignore[attr-defined]  # its `make`
        assert f"::: {call.__module__}.{call.__name__}\n" in page, name


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])) or None)
