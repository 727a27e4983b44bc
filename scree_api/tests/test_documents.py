"""Every Python block of the README and of the documentation runs, page by page, in order.

A block whose first line is ``# needs CUDA`` runs only in the tests that need a GPU. The code cells
of every notebook in the gallery run, too.
"""

import doctest
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from scree.dispatch.operation import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "gallery").glob("*.ipynb"))
BLOCK = re.compile(r"^```(?:python|pycon)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS_CUDA = "# needs CUDA\n"


def blocks(page: Path) -> list[tuple[str, int]]:
    """Return the blocks of a page with their first lines, except blocks that include a module."""
    text = page.read_text(encoding="utf-8")
    found = [(block[1], text.count("\n", 0, block.start(1))) for block in BLOCK.finditer(text)]
    return [(code, line) for code, line in found if not code.startswith("--8<--")]


def runs(page: Path) -> bool:
    """Return whether a page has blocks, and all libraries that it needs are installed.

    CI has all libraries: there a page without its libraries runs, and fails.
    """
    needs = re.match(r"<!-- needs: (.*) -->", page.read_text(encoding="utf-8"))
    has_all = "CI" in os.environ and "SCREE_BACKENDS" not in os.environ
    return bool(blocks(page)) and (
        has_all or all(map(find_spec, needs[1].split() if needs else ()))
    )


def needs_cuda(page: Path) -> bool:
    """Return whether a page has blocks that need CUDA."""
    return any(code.startswith(NEEDS_CUDA) for code, _ in blocks(page))


def name(page: Path) -> str:
    """Return the path within the repository."""
    return page.relative_to(ROOT).as_posix()


def run(page: Path, cuda: bool = False) -> str:
    """Run the blocks of a page in one namespace; return the report of doctest."""
    names: dict[str, object] = {"__name__": "__main__"}
    said: list[str] = []
    for code, line in blocks(page):
        if code.startswith(NEEDS_CUDA) and not cuda:
            continue
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), line)
            test.globs = names
            doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
                test, out=said.append, clear_globs=False
            )
        else:
            exec(compile("\n" * line + code, str(page), "exec"), names)
    return "".join(said)


def run_tables(page: Path) -> None:
    """Run the blocks of the cheat sheet, then the code in the last column of its tables."""
    names: dict[str, object] = {}
    for code, line in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)
    lines = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, text in enumerate(lines):
            if text.startswith("| "):
                for code in re.findall("`([^`]+)`", text.rsplit(" | ", 1)[1]):
                    exec(compile("\n" * number + code, str(page), "exec"), names)
        os.chdir(ROOT)


def run_notebook(path: Path) -> None:
    """Run the code cells of a notebook in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path}, cell {i}", "exec"), names)


def run_file(path: Path, *options: str) -> str | None:
    """Run a page or a notebook; return the report of doctest if an example fails."""
    if path.suffix == ".ipynb":
        return run_notebook(path)
    if "--tables" in options:
        return run_tables(path)
    return run(path, cuda="--cuda" in options) or None


def serve() -> None:
    """Run every file that standard input names in a fork of this process.

    A line is a JSON list: the file for the output, the page or notebook, and options. The answer is
    the exit status.
    """
    for library in ("torch", "jax"):  # importing them starts no threads
        if find_spec(library):
            import_module(library)
    for line in sys.stdin:
        log, path, *options = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                report = run_file(Path(path), *options)
                status = 0 if report is None else 1
                print(report)
            except BaseException:  # a fork must never continue the loop of its parent
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Start a process that has imported PyTorch and JAX, which takes seconds per page otherwise."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_in_process(server: subprocess.Popen[str], log: Path, path: Path, *options: str) -> None:
    """Run a page or a notebook in its own process.

    Libraries that other tests have loaded register kernels.
    """
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([str(log), str(path), *options]) + "\n")
    server.stdin.flush()
    status = server.stdout.readline().strip()
    assert status == "0", f"exit status {status or 'of the server'}\n" + log.read_text()


@pytest.mark.parametrize("page", list(filter(runs, PAGES)), ids=name)
def test_code_blocks_of_the_page_run(
    page: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    run_in_process(server, tmp_path / "log", page)


@pytest.mark.parametrize("page", list(filter(runs, [ROOT / "docs" / "cheatsheet.md"])), ids=name)
def test_code_in_the_tables_of_the_page_runs(
    page: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    run_in_process(server, tmp_path / "log", page, "--tables")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [page for page in PAGES if runs(page) and needs_cuda(page)], ids=name
)
def test_code_blocks_of_the_page_with_cuda_run(
    page: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    run_in_process(server, tmp_path / "log", page, "--cuda")


@pytest.mark.parametrize("path", NOTEBOOKS if find_spec("matplotlib") else [], ids=name)
def test_code_cells_of_the_notebook_run(
    path: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    run_in_process(server, tmp_path / "log", path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_holds_no_outputs(path: Path) -> None:
    # The site executes the notebooks, so that no output becomes outdated.
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


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


def test_copied_examples_have_no_prompts_and_errors_are_comments() -> None:
    source = runpy.run_path(str(ROOT / "docs/code_blocks.py"))["source"]
    text = """>>> for i in range(2):
...     print(i)
0
1
>>> int("x")
Traceback (most recent call last):
    ...
ValueError: invalid literal
>>> 1 + 1
2
"""
    expected = 'for i in range(2):\n    print(i)\n# int("x")  # ValueError\n1 + 1\n'
    assert source(text) == expected


if __name__ == "__main__":
    serve()
