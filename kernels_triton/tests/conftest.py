"""Without a GPU the kernels run in Triton's interpreter: here, and in no other test of the same process."""

import importlib
import os
from importlib.util import find_spec

import pytest

import scree
import scree_triton
from scree.dispatch import registry

SWITCH = "TRITON_INTERPRET"


def gpu() -> bool:
    """Whether there is a device."""
    import torch

    return torch.cuda.is_available()


if find_spec("triton") and not gpu():  # what the kernels are is settled when they are imported
    os.environ[SWITCH] = "1"
    for module in {entry.module for entry in scree_triton.KERNELS.values()}:
        importlib.import_module(f"scree_triton.{module}")
    del os.environ[SWITCH]


def pytest_collection_finish():
    if find_spec("triton") and not gpu():
        os.environ.pop(SWITCH, None)


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Register the kernels for the tests of a module; no entry point does it if scree is not installed."""
    import torch

    interpreted = not gpu()
    if interpreted:
        os.environ[SWITCH] = "1"
    scree.namespace(torch.zeros(1))
    with registry.isolated():
        scree_triton.register()
        yield
    if interpreted:
        del os.environ[SWITCH]


@pytest.fixture
def isolated_registry():
    """Undo what the test registers and unregisters."""
    with registry.isolated():
        yield
