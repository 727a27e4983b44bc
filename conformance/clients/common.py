"""The parts that the scripts of this folder share."""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: The time at which a script starts, before it imports other modules.
START = time.perf_counter()


def open_checkout(folder: str | None = None) -> Path:
    """Make a checkout importable, and return its path; the default is the script's only argument."""
    if folder is None:
        parser = argparse.ArgumentParser()
        parser.add_argument("checkout")
        folder = parser.parse_args().checkout
    assert folder is not None
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


def report(client: str, checkout: Path | None = None, **results: Any) -> None:
    """Print one line of JSON, and append it to the file that `RESULTS` names."""
    import torch

    import scree

    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    line = {"client": client, "commit": commit(checkout) if checkout else None, **results}
    line |= {"seconds": round(time.perf_counter() - START, 1), "device": device}
    line |= {"torch": torch.__version__, "scree": scree.__version__}
    text = json.dumps(line)
    print(text, flush=True)
    if "RESULTS" in os.environ:
        with (Path(os.environ["RESULTS"]) / "clients.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def add_generation_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Add the arguments of scripts that generate tokens; `tokens` is the default per prompt."""
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--median", type=int, default=20, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=tokens, help="new tokens of each prompt")
    parser.add_argument("--write", type=Path, help="file for the tokens")
    parser.add_argument("--compare", type=Path, help="file with the tokens of another run")


def log_normal_lengths(count: int, median: int, longest: int) -> list[int]:
    """Return lengths of prompts, most of them near `median`."""
    generator = random.Random(0)
    return [
        min(longest, max(4, int(median * generator.lognormvariate(0, 0.8)))) for _ in range(count)
    ]


def random_prompts(lengths: list[int], tokens: range, seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths, with random tokens from a range."""
    generator = random.Random(seed)
    return [[generator.choice(tokens) for _ in range(length)] for length in lengths]


def compare_tokens(options: argparse.Namespace, rows: list[list[int]]) -> dict[str, Any]:
    """Write the generated tokens to `--write`, and compare them with the tokens in `--compare`."""
    if options.write:
        options.write.write_text(json.dumps(rows))
    if not options.compare or not options.compare.exists():
        return {}
    others = json.loads(options.compare.read_text())
    total = equal = 0
    for row, other in zip(rows, others, strict=True):
        pairs = [a == b for a, b in zip(row, other)]
        total += len(row)
        equal += pairs.index(False) if False in pairs else len(pairs)
    return {
        "equal_tokens": round(equal / max(total, 1), 4),  # before the first difference of a row
        "equal_rows": sum(a == b for a, b in zip(others, rows)),
        "equal_first_tokens": sum(a[:1] == b[:1] for a, b in zip(others, rows)),
    }
