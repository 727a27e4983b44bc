"""CUDA kernels for scree, written in Triton. Importing this package imports neither torch nor Triton."""

from importlib.util import find_spec
from typing import Any


def register() -> None:
    """Register the kernels with scree; called through the entry-point group ``scree.kernels``."""
    from scree import register_kernel

    absent = None if find_spec("triton") else "the Triton kernels need the package triton: pip install 'scree[triton]'"

    def rejects(call: Any) -> str | None:
        if absent:
            return absent
        from .attention import rejects

        return rejects(call)

    @register_kernel("attention", provider="triton", rejects=rejects)
    def run(call: Any) -> Any:
        from .attention import run

        return run(call)
