"""JAX launches each kernel with the arguments that the kernel declares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_without_gpu(program, *arguments):
    """Run a program on two devices of a CPU, and not in Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("passed\n")


@pytest.mark.needs("jax")
@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_attention_lowered_for_cuda_matches_kernels(kernels):
    run_without_gpu("lower_for_jax.py", kernels)


@pytest.mark.needs("jax")
def test_operations_lowered_for_cuda_match_kernels():
    run_without_gpu("lower_operations_for_jax.py")
