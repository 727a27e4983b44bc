"""Fixtures of the bridge tests."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: the arrays are so small that threads only add overhead."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    """Register the Triton kernels for GPU tests.

    Without an installed scree there is no entry point that registers them.
    """
    if request.node.get_closest_marker("gpu"):
        import torch

        import scree
        import scree_triton

        # Otherwise JAX reserves the memory that the other libraries need.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        scree.namespace(torch.zeros(1))
        scree_triton.register()
