"""A kernel provider that needs no device: it counts its calls and passes them to the standard path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import scree
from scree.dispatch import registry

from .suite import OPERATIONS

PROVIDER = "loopback"
KERNELS = sorted({operation.kernel for operation in OPERATIONS if operation.kernel is not None})


def rejects(call: Any) -> str | None:
    """Accept every dtype except float64, so that a test can see a refusal."""
    x = call.q if hasattr(call, "q") else call.x
    return "loopback takes no float64" if str(x.dtype).endswith("float64") else None


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """Register the loopback provider for a ``with`` block; yield the number of calls per operation."""
    calls: Counter[str] = Counter()

    def make_kernel(operation: str) -> Callable[[Any], Any]:
        def run_standard(call: Any) -> Any:
            calls[operation] += 1
            return registry.run(operation, call, registry.STANDARD)

        return run_standard

    with registry.isolated():
        for operation in KERNELS:
            register = scree.register_kernel(operation, provider=PROVIDER, rejects=rejects)
            register(make_kernel(operation))
        yield calls
