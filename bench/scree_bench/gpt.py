"""GPT-2 in PyTorch, on tokens without a batch axis.

Everything except attention works per token. So the ragged and the padded model are one function,
with the attention and the tokens as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import scree

#: Target of tokens without a next token.
IGNORED = -100


class Size(NamedTuple):
    """Width, layers, heads, and entries of the vocabulary."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 50_257

    @property
    def parameters(self) -> int:
        """Number of parameters, without the position embeddings."""
        return (
            self.vocabulary * self.width
            + self.layers * (12 * self.width**2 + 13 * self.width)
            + 2 * self.width
        )


SIZES = {
    "tiny": Size(64, 2, 2, 512),
    "mini": Size(128, 4, 4, 4096),
    "small": Size(768, 12, 12),
    "medium": Size(1024, 24, 16),
    "large": Size(1280, 36, 20),
    "xl": Size(1600, 48, 25),
    "2.7b": Size(2560, 32, 32),
}


def weights(size: Size, max_length: int, device: str, seed: int) -> dict[str, Any]:
    """Return random weights that require gradients."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    d = size.width

    def normal(*shape: int) -> Any:
        return (0.02 * torch.randn(shape, generator=generator, device=device)).requires_grad_()

    parameters = {"tokens": normal(size.vocabulary, d), "positions": normal(max_length, d)}
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    for i in range(size.layers):
        for name, shape in shapes.items():
            parameters[f"{i}.{name}"] = normal(*shape)
            parameters[f"{i}.{name}.bias"] = torch.zeros(
                shape[0], device=device, requires_grad=True
            )
    for name in [f"{i}.norm{j}" for i in range(size.layers) for j in (1, 2)] + ["norm"]:
        parameters[name] = torch.ones(d, device=device, requires_grad=True)
        parameters[f"{name}.bias"] = torch.zeros(d, device=device, requires_grad=True)
    return parameters


def loss(
    w: dict[str, Any],
    size: Size,
    ids: Any,
    positions: Any,
    targets: Any,
    attend: Callable[[Any, Any, Any], Any],
) -> Any:
    """Compute the mean loss of the next token.

    `ids`, `at` (positions) and `targets` are (tokens,), including padding if there is any.
    """
    import torch.nn.functional as F

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (size.width,), w[name], w[f"{name}.bias"])

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, w[name], w[f"{name}.bias"])

    x = w["tokens"][ids] + w["positions"][positions]
    for i in range(size.layers):
        q, k, v = (
            linear(norm(x, f"{i}.norm1"), f"{i}.qkv").view(len(x), 3, size.heads, -1).unbind(1)
        )
        x = x + linear(attend(q, k, v).reshape(len(x), size.width), f"{i}.out")
        x = x + linear(
            F.gelu(linear(norm(x, f"{i}.norm2"), f"{i}.up"), approximate="tanh"), f"{i}.down"
        )
    return F.cross_entropy(
        F.linear(norm(x, "norm"), w["tokens"]).float(), targets, ignore_index=IGNORED
    )


class Batch(NamedTuple):
    """The arguments of `loss` that depend on the batch, in one of its two forms."""

    ids: Any
    positions: Any
    targets: Any
    attend: Callable[[Any, Any, Any], Any]


def _targets(rows: list[np.ndarray]) -> list[np.ndarray]:
    return [np.append(row[1:], IGNORED) for row in rows]


def ragged(rows: list[np.ndarray], device: str) -> Batch:
    """Return a batch of packed rows, with attention by scree."""
    import torch

    template = scree.pack([torch.from_numpy(x).to(device) for x in rows])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return scree.attention(*map(template.with_values, (q, k, v)), causal=True).values

    positions, targets = (
        np.concatenate(x) for x in ([np.arange(len(row)) for row in rows], _targets(rows))
    )
    return Batch(
        template.values,
        torch.from_numpy(positions).to(device),
        torch.from_numpy(targets).to(device),
        attend,
    )


def padded(rows: list[np.ndarray], device: str) -> Batch:
    """Return a batch padded to the longest row, with attention by PyTorch."""
    import torch
    import torch.nn.functional as F

    n, max_length = len(rows), max(map(len, rows))

    def pad(parts: list[np.ndarray], fill: int) -> Any:
        out = np.full((n, max_length), fill, dtype=np.int64)
        for i, part in enumerate(parts):
            out[i, : len(part)] = part
        return torch.from_numpy(out.reshape(-1)).to(device)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.view(n, max_length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Batch(
        pad(rows, 0), pad([np.arange(max_length)] * n, 0), pad(_targets(rows), IGNORED), attend
    )
