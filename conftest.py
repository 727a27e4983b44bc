"""What pytest leaves alone: modules and tests that need a library or a device."""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# JAX compiles every operation for every shape, which takes most of the time of the tests. Without
# optimizations and fusions it takes half. `python -m scree_conformance` runs with optimizations.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends a process with an unknown flag, so this flag is set for the tested version only.
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
# JAX writes the frames of the caller into every program, and the frames of pytest are many.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Workers and later runs share compiled programs. The keys of the cache include versions and flags.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# JAX would take three quarters of a GPU's memory, which the workers share.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# JAX compares the file of every frame of an error with its own files, which takes half of the time of
# tests that try many wrong calls.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and threads wait actively
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MLX_PREAMBLE = "mlx/backend/cpu/compiled_preamble.h"


def precompile_preamble_of_mlx() -> None:
    """Let `g++` load the declarations that MLX includes in every compiled function from one file.

    MLX calls `g++` for each function that it compiles for a CPU. The declarations take four fifths of
    this time. The flags of the file have to be the flags of MLX; otherwise `g++` ignores it.
    """
    compiler, mlx = shutil.which("g++"), find_spec("mlx")
    if sys.platform != "linux" or compiler is None or mlx is None:
        return
    include = Path(mlx.submodule_search_locations[0]) / "include"
    if not (include / MLX_PREAMBLE).exists():  # another version of MLX
        return
    cache = Path(__file__).parent / ".cache" / f"mlx-{version('mlx')}"
    program, compiled = cache / "bin" / "g++", cache / f"{MLX_PREAMBLE}.gch"
    if Path(compiler) == program:  # the environment of this process is already changed
        return
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(include / MLX_PREAMBLE, cache / MLX_PREAMBLE)
        # Other runs of the tests may do the same at this time.
        new = Path(f"{compiled}.{os.getpid()}")
        flags = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-w", f"-I{include}", "-x", "c++-header"]
        subprocess.run([compiler, *flags, str(include / MLX_PREAMBLE), "-o", str(new)], check=True)
        new.replace(compiled)
    program.parent.mkdir(exist_ok=True)
    # Another run may execute the program at this time.
    new = Path(f"{program}.{os.getpid()}")
    new.write_text(f'#!/bin/sh\nexec "{compiler}" "-I{cache}" "$@"\n')
    new.chmod(0o755)
    new.replace(program)
    os.environ["PATH"] = os.pathsep.join([str(program.parent), os.environ["PATH"]])


NEEDS = {
    "bench/tests": "typer matplotlib",
    "kernels_triton/tests": "triton",
    "kernels_triton/tests/test_jax_attention_gpu.py": "jax",
    "kernels_triton/tests/test_jax_operations.py": "jax",
    "scree_api/scree/bridges/arrow.py": "pyarrow",
    "scree_api/scree/bridges/awkward.py": "awkward ragged",
    "scree_api/scree/bridges/continuous_batching.py": "torch transformers",
    "scree_api/scree/bridges/flash_attn": "torch",
    "scree_api/scree/bridges/lists.py": "pandas",
    "scree_api/scree/bridges/scipy.py": "scipy",
    "scree_api/scree/bridges/tensorflow.py": "tensorflow",
    "scree_api/scree/bridges/torch.py": "torch",
    "scree_api/scree/bridges/transformers.py": "torch transformers",
    "scree_api/scree/bridges/varlen.py": "torch",
    "scree_api/tests/bridges/test_arrow.py": "pyarrow",
    "scree_api/tests/bridges/test_awkward.py": "awkward ragged",
    "scree_api/tests/bridges/test_continuous_batching.py": "torch transformers",
    "scree_api/tests/bridges/test_flash_attn.py": "torch",
    "scree_api/tests/bridges/test_flash_attn_raw.py": "torch",
    "scree_api/tests/bridges/test_flash_attn_versions.py": "torch",
    "scree_api/tests/bridges/test_minilm.py": "torch transformers",
    "scree_api/tests/bridges/test_scipy.py": "scipy",
    "scree_api/tests/bridges/test_torch.py": "torch",
    "scree_api/tests/bridges/test_transformers.py": "torch transformers",
    "scree_api/tests/bridges/test_transformers_training.py": "torch transformers accelerate",
    "scree_api/tests/bridges/test_tensorflow_installed.py": "tensorflow",
    "scree_api/tests/test_call_cache.py": "torch",
    "scree_api/scree/distributed": "torch",
    "scree_api/tests/test_context_parallel.py": "torch",
    "scree_api/tests/processes.py": "torch",
    "scree_api/tests/test_distributed.py": "torch",
    "scree_api/tests/test_distributed_checkpoint.py": "torch",
    "scree_api/tests/test_mlx_namespace.py": "mlx array_api_strict",
    "scree_api/tests/test_opinfo_nested.py": "torch",
    "scree_api/tests/test_processes.py": "torch",
    "scree_api/tests/test_records.py": "torch",
    "scree_api/tests/test_rope.py": "torch",
    "scree_api/tests/test_transforms_bucket.py": "jax",
    "scree_api/tests/test_transforms_jax.py": "jax",
    "scree_api/tests/test_transforms_mlx.py": "mlx",
    "scree_api/tests/test_transforms_parallel.py": "torch",
    "scree_api/tests/test_transforms_torch.py": "torch",
    "scree_api/tests/test_transforms_train.py": "torch jax optax mlx chatterbot_corpus yaml",
}

BACKENDS = ("numpy", "torch", "jax", "mlx", "array_api_strict")

collect_ignore = [
    path for path, libraries in NEEDS.items() if not all(map(find_spec, libraries.split()))
]
collect_ignore_glob = [
    "*/conftest.py",  # plug-ins, not modules with doctests
    "bench/scree_bench/*",
    "conformance/upstream/*",  # needs checkouts of other projects
    "conformance/clients/*",  # programs that need checkouts
    "docs/*",
    "kernels_triton/scree_triton/*",
    "noxfile.py",
    "scree_api/scree/backends/*",
    "scree_api/scree/providers/*",
    "scree_api/scree/xp/*",
    "scree_api/tests/typing/*",  # read by type checkers
]


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker of tests that need a library, and fail if CI lacks one.

    `collect_ignore` leaves out whole files. The sessions of one library set ``SCREE_BACKENDS``, and
    TensorFlow has a session of its own.
    """
    precompile_preamble_of_mlx()
    config.addinivalue_line("markers", "needs(*libraries): runs only with all of them")
    if "CI" in os.environ and "SCREE_BACKENDS" not in os.environ:
        needed = {name for libraries in NEEDS.values() for name in libraries.split()}
        missing = [name for name in sorted(needed - {"tensorflow"}) if find_spec(name) is None]
        if missing:
            raise pytest.UsageError(
                f"CI: expected all libraries of the tests, {', '.join(missing)} missing; install "
                "the extras of the command in the README"
            )


def _is_under_test(library: str) -> bool:
    """Return whether a library is installed, and not a backend that ``SCREE_BACKENDS`` leaves out.

    In CI, without ``SCREE_BACKENDS``, all libraries are under test: tests of a missing one fail.
    """
    selected = os.environ.get("SCREE_BACKENDS")
    if "CI" in os.environ and selected is None:
        return True
    is_left_out = (
        library in BACKENDS and selected is not None and library not in selected.split(",")
    )
    return find_spec(library) is not None and not is_left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests whose libraries are not under test, and put the longest tests first.

    The order lets the workers of `--dist worksteal` end together. The tests of targets compile
    kernels once for the whole module, so that one worker has to run them all.
    """
    removed = [
        item
        for item in items
        if not all(
            _is_under_test(name) for mark in item.iter_markers("needs") for name in mark.args
        )
    ]
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = [item for item in items if item not in removed]
    longest = ("test_targets.py", "test_compile_time_grows_linearly_with_depth")
    items.sort(key=lambda item: item.path.name not in longest and item.name not in longest)


def pytest_collection_finish() -> None:
    """Keep the modules and the tests out of garbage collections, which traverse millions of objects.

    Otherwise the collections of a test take up to an eighth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Turn a skip in CI into a failure."""
    return _without_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """Turn the skip of a whole module into a failure, as the skip of a test."""
    return _without_skip((yield))


def _without_skip(report: Any) -> Any:
    """Return the report, failed if it is skipped in CI."""
    if report.skipped and "CI" in os.environ:
        report.outcome = "failed"
    return report
