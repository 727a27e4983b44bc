"""ring-flash-attention, on PyTorch's flash attention operators or on scree's bridge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def ring_flash_attention(folder: str, served: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that loads modules of a checkout of ring-flash-attention.

    Its flash_attn is PyTorch's operators or scree's bridge, as `served` says. The `__init__` of the
    package is skipped, because it imports private names of transformers.
    """
    names = ("flash_attn", "ring_flash_attn")

    def forget() -> dict[str, Any]:
        removed = {name: x for name, x in sys.modules.items() if name.split(".")[0] in names}
        for name in removed:
            del sys.modules[name]
        return removed

    before = forget()
    try:
        if served == "scree":
            import scree.bridges.flash_attn

            scree.bridges.flash_attn.install(force=True)
        else:
            package, interface = (
                ModuleType(names[0]),
                ModuleType(f"{names[0]}.flash_attn_interface"),
            )
            interface.__dict__.update(_flash_operators())
            package.__dict__["flash_attn_interface"] = interface
            package.__path__ = []
            sys.modules[names[0]], sys.modules[interface.__name__] = package, interface
        peer = ModuleType(names[1])
        peer.__path__ = [str(Path(folder) / names[1])]
        sys.modules[names[1]] = peer
        yield lambda module: import_module(f"{names[1]}.{module}")
    finally:
        forget()
        sys.modules.update(before)


def _flash_operators() -> dict[str, Any]:
    """Return the functions of flash_attn that the peer calls, by PyTorch's operators."""
    import torch

    state: list[Any] = []

    def window(options: dict[str, Any]) -> dict[str, int]:
        left = options.get("window_size_left", -1)
        return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}

    def forward(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, **options: Any,
    ) -> Any:  # fmt: skip
        out, lse, *state[:], _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k),
            0.0, causal, False, scale=softmax_scale, **window(options),
        )  # fmt: skip
        return out, lse, None, state[0]

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
        cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, **options: Any,
    ) -> None:  # fmt: skip
        grads = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out.contiguous(), softmax_lse.contiguous(),
            cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k),
            0.0, causal, *state, scale=softmax_scale, **window(options),
        )  # fmt: skip
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    def missing(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("flash_attn on tensors of equal lengths")

    return {
        "_flash_attn_varlen_forward": forward,
        "_flash_attn_varlen_backward": backward,
        "_flash_attn_forward": missing,
        "_flash_attn_backward": missing,
    }
