"""JAX launches each kernel with the arguments that the kernel declares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lower_for_jax.py")


@pytest.mark.needs("jax")
@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_attention_lowered_for_cuda_matches_kernels(kernels):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kernels],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("passed\n")
