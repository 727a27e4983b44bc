"""The arrays here are so small that PyTorch's threads would only wait for each other."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
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
    """On a device: Triton's kernels, where scree is not installed and no entry point registers them."""
    if request.node.get_closest_marker("gpu"):
        import torch

        import scree
        import scree_triton

        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # JAX would take the memory of all the others
        scree.namespace(torch.zeros(1))
        scree_triton.register()
