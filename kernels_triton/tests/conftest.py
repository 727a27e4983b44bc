"""Run the kernels in Triton's interpreter where there is no GPU, in the tests of this directory only."""

import importlib
import os
from importlib.util import find_spec

import pytest

import scree
import scree_triton

SWITCH = "TRITON_INTERPRET"


def gpu() -> bool:
    """Return whether a CUDA device is available."""
    import torch

    return torch.cuda.is_available()


# The import of a kernel decides whether it is interpreted.
if find_spec("triton") and not gpu():
    os.environ[SWITCH] = "1"
    for module in {entry.module for entry in scree_triton.KERNELS.values()}:
        importlib.import_module(f"scree_triton.{module}")
    del os.environ[SWITCH]


def pytest_collection_finish():
    if find_spec("triton") and not gpu():
        os.environ.pop(SWITCH, None)


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Register the kernels for the tests of one module.

    Without an installed scree no entry point registers them.
    """
    import torch

    interpreted = not gpu()
    if interpreted:
        os.environ[SWITCH] = "1"
    scree.namespace(torch.zeros(1))
    scree_triton.register()
    yield
    if interpreted:
        del os.environ[SWITCH]
        for operation in scree_triton.KERNELS:
            scree.unregister_kernel(operation, "triton")
