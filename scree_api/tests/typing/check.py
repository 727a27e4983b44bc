"""Check that type checkers accept the code of a user and find every mistake in wrong code."""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
USER, WRONG = HERE / "user_code.py", HERE / "wrong_code.py"
LINE = re.compile(r"^(.+?):(\d+): error: (.+)$")


def mypy() -> list[tuple[str, int, str]]:
    """Return the errors of strict mypy: file, line, message."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(USER), str(WRONG)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = (LINE.match(line) for line in done.stdout.splitlines())
    return [(Path(m[1]).name, int(m[2]), m[3]) for m in found if m]


def pyright() -> list[tuple[str, int, str]]:
    """Return the errors of pyright."""
    # pyright would take the libraries from a `.venv` in the working directory.
    options = ["--outputjson", "--level", "error", "--pythonpath", sys.executable]
    command = [sys.executable, "-m", "basedpyright", *options, str(USER), str(WRONG)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [
        (Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["message"])
        for e in json.loads(done.stdout)["generalDiagnostics"]
        if e["severity"] == "error"
    ]


def main() -> None:
    """Run both checkers."""
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    expected = {(WRONG.name, i) for i, line in enumerate(lines, 1) if line.endswith("# error")}
    failed = False
    for checker in (mypy, pyright):
        errors = checker()
        found = {(file, line) for file, line, _ in errors}
        for file, line, message in errors:
            if (file, line) not in expected:
                print(f"{checker.__name__}: {file}:{line}: unexpected: {message}")
        for file, line in sorted(expected - found):
            print(f"{checker.__name__}: {file}:{line}: no error: {lines[line - 1]}")
        failed |= found != expected
    sys.exit(failed)


if __name__ == "__main__":
    main()
