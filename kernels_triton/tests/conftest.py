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


# A kernel is compiled or interpreted depending on the switch at the time of its import. No test module
# sets the switch: a later module whose import loads a library would register the kernels for all tests.
if find_spec("triton") and not gpu():
    os.environ[SWITCH] = "1"
    from fast_interpreter import speed_up_interpreter

    speed_up_interpreter()
    for module in {entry.module for entry in scree_triton.KERNELS.values()}:
        importlib.import_module(f"scree_triton.{module}")
    del os.environ[SWITCH]


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Register the kernels for the tests of a module; no entry point does it if scree is not installed."""
    import torch

    # Before the switch: otherwise the entry point registers the kernels for all later tests too.
    scree.namespace(torch.zeros(1))
    interpreted = not gpu()
    if interpreted:
        os.environ[SWITCH] = "1"
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
