"""A kernel provider that needs no device: it counts calls and runs the standard implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import scree
from scree.dispatch import operation as dispatch

from .suite import OPERATIONS

PROVIDER = "loopback"
KERNELS = sorted({operation.kernel for operation in OPERATIONS if operation.kernel is not None})


def rejects(call: Any) -> str | None:
    """Reject float64, so that tests can check the handling of a rejection."""
    names = ("q", "x", "logits", "arr", "padded", "k", "outputs")
    x = next(x for name in names if (x := getattr(call, name, None)) is not None)
    dtype = (x[0] if isinstance(x, tuple) else x).dtype
    return "loopback takes no float64" if str(dtype).endswith("float64") else None


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """Register the loopback provider for a ``with`` block; yield the calls per operation."""
    calls: Counter[str] = Counter()

    def kernel(operation: str) -> Callable[[Any], Any]:
        def run_standard(call: Any) -> Any:
            calls[operation] += 1
            return dispatch.OPERATIONS[operation].run_call(call, "standard")

        return run_standard

    for operation in KERNELS:
        scree.register_kernel(operation, provider=PROVIDER, rejects=rejects)(kernel(operation))
    try:
        yield calls
    finally:
        for operation in KERNELS:
            scree.unregister_kernel(operation, PROVIDER)
