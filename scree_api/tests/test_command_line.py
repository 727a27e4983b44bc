"""The program `scree`: its version, the programs of other distributions, and interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import scree
from scree import __main__ as command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["scree", "scree_conformance", "scree_bench"])
def test_every_program_prints_its_version(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == scree.__version__


def test_conformance_and_bench_run_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["conformance", "--only", "softmax, plain"]) in (0, 1)
    assert "scree 0.1.0: numpy" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as stop:
        command_line.main(["bench", "--help"])
    assert stop.value.code == 0


@pytest.mark.parametrize("command", command_line.PROGRAMS)
def test_absent_program_says_what_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = command_line.PROGRAMS[command][0].partition(".")[0]
    monkeypatch.setitem(command_line.PROGRAMS, command, (f"{package}_absent.__main__", command))
    assert command_line.main([command, "--help"]) == 1
    message = capsys.readouterr().err
    assert f"scree {command}: {package}_absent is not installed" in message
    assert f"./{command}" in message


def test_interrupt_ends_the_conformance_run_without_a_traceback() -> None:
    command = [sys.executable, "-u", "-m", "scree_conformance", "fuzz", "--backend", "numpy"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(5)  # beyond the imports
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_wheel_holds_scree_and_the_kernels_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [os.path.basename(package) for package in packages] == ["scree", "scree_triton"]
