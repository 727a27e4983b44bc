r"""Run the test files of other projects through scree, from checkouts of these projects.

Usage::

    python conformance/upstream/run.py flash_attn=DIR liger=DIR quack=DIR torch=DIR \
        transformers=DIR [options]

A directory may also be given as an environment variable, for instance ``SCREE_LIGER=DIR``. On a
CPU a few cases of each test run. No file of these projects is part of scree.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
#: Largest number in the name of a case on a CPU: larger arrays take minutes there.
MAX_ON_CPU = 1100


@dataclass(frozen=True)
class Suite:
    """The test files of one project.

    Attributes
    ----------
    repository, commit, licence
        The tested state of the project: a commit, or the tag of a release.
    files
        Test files, relative to the checkout or absolute.
    changes
        (before, after) of the lines that are changed in a copy of each file.
    cpu_changes
        The same, only on a CPU.
    draw
        Cases per test: on a CPU, and on a GPU (0: all).
    """

    repository: str
    commit: str
    licence: str
    files: tuple[str, ...]
    changes: tuple[tuple[str, str], ...] = ()
    cpu_changes: tuple[tuple[str, str], ...] = ()
    draw: tuple[int, int] = (4, 0)


_LIGER = "cross_entropy fused_linear_cross_entropy rms_norm fused_add_rms_norm layer_norm swiglu geglu rope softmax"
_QUACK = "rmsnorm layernorm softmax cross_entropy linear_cross_entropy rotary"
_TORCH = (
    "https://github.com/pytorch/pytorch",
    "02ab03ff574cb2dbced0cd0d457a98dedc5ba177",
    "BSD-3-Clause",
    ("test/test_varlen_attention.py",),
)

SUITES = {
    "flash_attn": Suite(
        "https://github.com/Dao-AILab/flash-attention",
        "0251105a2fb19d2957484b7f023cd8c115286ced",
        "BSD-3-Clause",
        ("tests/test_flash_attn.py",),
        draw=(4, 60),
    ),
    "torch": Suite(
        *_TORCH,
        changes=(("from torch.nn.attention.varlen import", "from scree.bridges.varlen import"),),
        cpu_changes=(('device_types = ("cuda",)', 'device_types = ("cpu",)'),),
        draw=(1, 0),
    ),
    "torch_switch": Suite(*_TORCH),
    "liger": Suite(
        "https://github.com/linkedin/Liger-Kernel",
        "ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        "BSD-2-Clause",
        tuple(f"test/transformers/test_{name}.py" for name in _LIGER.split()),
    ),
    "quack": Suite(
        "https://github.com/Dao-AILab/quack",
        "c8ec3170057987da0ec99883736f381ea1937cf3",
        "Apache-2.0",
        tuple(f"tests/test_{name}.py" for name in _QUACK.split()),
        draw=(4, 24),
    ),
    # The checkout is the source distribution of the installed version, which has no tests of models.
    "transformers": Suite(
        "https://github.com/huggingface/transformers",
        "v5.23.0",
        "Apache-2.0",
        (str(HERE / "transformers_models.py"),),
        draw=(0, 0),
    ),
}

#: Suite -> pattern of the names of tests that are not run, and the reason.
EXCLUDED: dict[str, dict[str, str]] = {
    "flash_attn": {
        "test_flash_attn_generator_arg_must_be_none": "functions of FlashAttention's extension"
    },
    "liger": {
        "test_dtensor_.*": "starts processes of its own",
        "test_float32_internal": "launches a kernel of Liger",
        "test_swiglu_blackwell_.*": "a kernel of Liger",
        "test_(correctness_mixtral|correctness_falcon_h1|gemma4).*": "modules without kernels",
    },
    "quack": {
        ".*(tuned|compile_cache|degenerate_cluster).*": "configurations of quack's kernels",
        ".*(scaled_exp|compile_dispatch|lse_partial|kernel_count).*": "kernels of quack",
        ".*(no_copy|vector_width|block_h|multiple_of_8).*": "kernels of quack",
        "test_rotary_emb_(qkv|kv).*": "rotates a packed array in place",
        "test_(apply_rotary_.*|amp_bf16_training|rmsnorm_bwd_empty)": "raw functions of quack",
        ".*_input_validation": "the texts of quack's errors",
        # The gradient is computed inside the forward function.
        r"test_cross_entropy_fwd_with_grad\[True.*": "PyTorch does not compile this function",
    },
}


#: The same, only on a CPU.
EXCLUDED_ON_CPU: dict[str, dict[str, str]] = {
    "flash_attn": {"test_.*(race_condition|deterministic)": "repeats a call 50 or 250 times"}
}


def revision(directory: Path) -> str | None:
    """Return the commit of a checkout; None for a directory without Git."""
    command = ["git", "-C", str(directory), "rev-parse", "--show-toplevel", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if done.returncode == 0 and Path(top) == directory else None


def run_suite(name: str, source: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run the files of a suite, and return its counts and failures."""
    import torch

    suite = SUITES[name]
    is_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for file in suite.files:
            path = source / file
            changes = suite.changes + (suite.cpu_changes if is_cpu else ())
            if changes:
                text = path.read_text(encoding="utf-8")
                for before, after in changes:
                    text = text.replace(before, after)
                path = Path(folder) / path.name
                path.write_text(text, encoding="utf-8")
            files.append(str(path))
        report = Path(folder) / "report.xml"
        draw = suite.draw[not is_cpu] if options.draw is None else options.draw
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(source), str(source / "src"), os.environ.get("PYTHONPATH", "")]
            ),
            "SCREE_UPSTREAM": name,
            "SCREE_UPSTREAM_SOURCE": str(source),
            "SCREE_UPSTREAM_DRAW": str(draw),
            "SCREE_UPSTREAM_SEED": str(options.seed),
            "SCREE_UPSTREAM_MAX": str(options.max or (MAX_ON_CPU if is_cpu else 0)),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"),
            *("--noconftest", "-c", os.devnull, "--rootdir", str(source), "--tb=short"),
            *("--import-mode=importlib", "-o", "junit_logging=no", f"--junitxml={report}"),
            *(("-n", str(options.workers)) if options.workers else ()),
            *options.pytest,
            *files,
        ]
        is_complete = run_for(command, env, folder, options.seconds)
        counts, failures = read_report(report)
    return {
        "commit": revision(source),
        "tested_commit": suite.commit,
        "is_complete": is_complete,
        "drawn": draw,
        **counts,
        "failures": failures,
    }


def run_for(command: list[str], env: dict[str, str], folder: str, seconds: float | None) -> bool:
    """Run a command, and return whether it ended in time.

    After some seconds it is interrupted. Then it reports the tests that it has run.
    """
    process = subprocess.Popen(command, env=env, cwd=folder)
    try:
        process.wait(seconds)
        return True
    # The caller reports that the time was not enough.
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        # A call of a library may hold the interrupt back.
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def read_report(path: Path) -> tuple[Counter[str], dict[str, str]]:
    """Return the counts of a JUnit report, and test -> first line of its failure."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failures: dict[str, str] = {}
    if not path.exists():
        counts["failed"] = 1
        return counts, {"pytest": "did not finish"}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
                message = child.get("message", "").strip().splitlines()
                failures[case.get("name", "")] = message[0] if message else ""
            elif child.tag == "skipped":
                outcome = "skipped"
        counts[outcome] += 1
    return counts, failures


def main() -> int:
    """Run the suites that have a checkout; return the number of failed tests, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", help="SUITE=DIR")
    parser.add_argument("--draw", type=int, help="number of cases per test; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max", type=int, help="largest number in the name of a case")
    parser.add_argument("--seconds", type=float, help="time limit of a suite")
    parser.add_argument("-n", "--workers", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the counts")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    given = dict(x.split("=", 1) for x in options.checkouts)
    for name in SUITES:
        if directory := os.environ.get(f"SCREE_{name.upper()}"):
            given.setdefault(name, directory)
    if not given:
        for name, suite in SUITES.items():
            print(f"{name}: {suite.repository} at {suite.commit} ({suite.licence})")
        parser.error("checkouts: expected at least one SUITE=DIR, got none")
    results = {x: run_suite(x, Path(at).resolve(), options) for x, at in given.items()}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, result in results.items():
        failures = result.pop("failures")
        print(name, json.dumps(result))
        for test, message in failures.items():
            print(f"  {test}: {message}")
    return int(any(result["failed"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
