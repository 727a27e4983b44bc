"""The parts that the scripts of this folder share."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def open_checkout(folder: str) -> Path:
    """Make a checkout importable, and return its path."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise SystemExit(f"checkout: expected a folder, got {folder}")
    sys.path.insert(0, str(path))
    return path


def definitions(file: Path, names: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the classes and functions of a file that have these names, without its other code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    missing = names - {node.name for node in kept}
    if missing:
        raise SystemExit(f"{file}: expected the definitions {missing}")
    exec(compile(ast.Module(kept, []), str(file), "exec"), namespace)
    return namespace


def commit(checkout: Path) -> str:
    """Return the commit of a checkout: of git, or in its file `COMMIT`."""
    file = checkout / "COMMIT"
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def report(client: str, start: float, checkout: Path | None = None, **results: Any) -> None:
    """Print one line of JSON, and append it to the file that `RESULTS` names."""
    import torch

    import scree

    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    line = {"client": client, "commit": commit(checkout) if checkout else None, **results}
    line |= {"seconds": round(time.perf_counter() - start, 1), "device": device}
    line |= {"torch": torch.__version__, "scree": scree.__version__}
    text = json.dumps(line)
    print(text, flush=True)
    if "RESULTS" in os.environ:
        with (Path(os.environ["RESULTS"]) / "clients.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def log_normal_lengths(count: int, median: int, longest: int, seed: int = 0) -> list[int]:
    """Return lengths of prompts, most of them near `median`."""
    generator = random.Random(seed)
    return [
        min(longest, max(4, int(median * generator.lognormvariate(0, 0.8)))) for _ in range(count)
    ]


def equal_prefix(rows: list[list[int]], others: list[list[int]]) -> float:
    """Return the fraction of tokens before the first difference of each pair of rows."""
    equal = total = 0
    for row, other in zip(rows, others, strict=True):
        total += len(row)
        for a, b in zip(row, other):
            if a != b:
                break
            equal += 1
    return round(equal / max(total, 1), 4)
