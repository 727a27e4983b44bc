"""A kernel provider that needs no device: it counts its calls and passes them to the standard implementation."""

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
    """Accept every dtype except float64, so that a test can see a refusal."""
    x = next(getattr(call, name) for name in ("q", "x", "logits", "arr") if hasattr(call, name))
    return "loopback takes no float64" if str(x.dtype).endswith("float64") else None


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """Register the loopback provider for a ``with`` block; yield the number of calls per operation."""
    calls: Counter[str] = Counter()

    def kernel(operation: str) -> Callable[[Any], Any]:
        def hand_on(call: Any) -> Any:
            calls[operation] += 1
            return dispatch.OPERATIONS[operation].run_call(call, "standard")

        return hand_on

    for operation in KERNELS:
        scree.register_kernel(operation, provider=PROVIDER, rejects=rejects)(kernel(operation))
    try:
        yield calls
    finally:
        for operation in KERNELS:
            scree.unregister_kernel(operation, PROVIDER)
