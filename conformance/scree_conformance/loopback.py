"""A provider of kernels that needs no device: it counts its calls and hands them to the standard path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import scree

PROVIDER = "loopback"

#: Operation -> how to hand a call on.
HAND_ON: dict[str, Callable[[Any], Any]] = {
    "attention": lambda call: scree.attention(
        call.q, call.k, call.v, causal=call.causal, window=call.window, scale=call.scale, softcap=call.softcap,
        alibi_slopes=call.alibi_slopes, return_lse=call.return_lse, kernel="standard",
    ),
    "softmax": lambda call: scree.softmax(call.x, kernel="standard"),
    "rms_norm": lambda call: scree.rms_norm(call.x, call.weight, eps=call.eps, kernel="standard"),
}  # fmt: skip


def rejects(call: Any) -> str | None:
    """It takes everything but float64, so that a refusal can be seen."""
    x = getattr(call, "q", None)
    x = call.x if x is None else x
    return "loopback takes no float64" if str(x.dtype).endswith("float64") else None


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """While this lasts, the loopback provider is registered; gives the number of calls of each operation."""
    calls: Counter[str] = Counter()

    def kernel(operation: str) -> Callable[[Any], Any]:
        def run(call: Any) -> Any:
            calls[operation] += 1
            return HAND_ON[operation](call)

        return run

    for operation in HAND_ON:
        scree.register_kernel(operation, provider=PROVIDER, rejects=rejects)(kernel(operation))
    try:
        yield calls
    finally:
        for operation in HAND_ON:
            scree.unregister_kernel(operation, PROVIDER)
