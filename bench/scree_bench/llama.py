"""A Llama-like language model in PyTorch, on ragged arrays, on packed tokens and on padded rows.

All forms have the same parameters and the same loss. The packed form is what a program writes
without scree: `torch.nn.attention.varlen`, and PyTorch's own norms, activations and losses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import scree

from .gpt import IGNORED

EPS = 1e-6


class Size(NamedTuple):
    """Sizes of a model without its depth."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    vocabulary: int


SIZES = {"cuda": Size(768, 12, 12, 64, 2048, 50_304), "cpu": Size(64, 4, 2, 16, 128, 512)}

#: ``loss(parameters)`` of one batch.
Loss = Callable[[dict[str, Any]], Any]


def parameters(size: Size, depth: int, device: str, seed: int) -> dict[str, Any]:
    """Return random parameters that require gradients: bfloat16 on CUDA, float32 on the CPU."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = (size.heads + 2 * size.kv_heads) * size.dim

    def draw(*shape: int, scale: float | None = None) -> Any:
        scale = shape[0] ** -0.5 if scale is None else scale
        x = scale * torch.randn(shape, generator=generator, device=device)
        return x.to(dtype).requires_grad_()

    def ones() -> Any:
        return torch.ones(size.width, dtype=dtype, device=device, requires_grad=True)

    result = {"embedding": draw(size.vocabulary, size.width, scale=0.02), "norm": ones()}
    for i in range(depth):
        result |= {
            f"{i}.norm1": ones(),
            f"{i}.qkv": draw(size.width, qkv),
            f"{i}.out": draw(size.heads * size.dim, size.width),
            f"{i}.norm2": ones(),
            f"{i}.up": draw(size.width, 2 * size.hidden),
            f"{i}.down": draw(size.hidden, size.width),
        }
    return result


def ragged(size: Size, depth: int, rows: list[np.ndarray], device: str) -> Loss:
    """Return the loss on ragged arrays."""
    import torch
    import torch.nn.functional as F

    tokens = scree.pack([torch.from_numpy(row).to(device) for row in rows])
    labels = torch.from_numpy(_labels(rows)).to(device)
    longest = max(map(len, rows))

    def loss(p: dict[str, Any], ids: Any, offsets: Any, labels: Any) -> Any:
        x = scree.from_cu_seqlens(F.embedding(ids, p["embedding"]), offsets, max_length=longest)
        xp = scree.namespace(x)
        y = xp.ragged.rms_norm(x, p["0.norm1"], eps=EPS)
        for i in range(depth):
            qkv = y @ p[f"{i}.qkv"]
            qkv = qkv.with_values(qkv.values.unflatten(1, (-1, size.dim)))
            parts = size.heads, size.kv_heads, size.kv_heads
            q, k, v = xp.ragged.split(qkv, parts, axis=2)
            q, k = xp.ragged.rope(q, k)
            a = xp.ragged.attention(q, k, v, causal=True)
            y = a.with_values(a.values.flatten(1)) @ p[f"{i}.out"]
            y, x = xp.ragged.rms_norm(y, p[f"{i}.norm2"], residual=x, eps=EPS)
            y = xp.ragged.swiglu(y @ p[f"{i}.up"]) @ p[f"{i}.down"]
            weight = p[f"{i + 1}.norm1"] if i + 1 < depth else p["norm"]
            y, x = xp.ragged.rms_norm(y, weight, residual=x, eps=EPS)
        return xp.ragged.linear_cross_entropy(
            y, p["embedding"], y.with_values(labels), ignore_index=IGNORED
        )

    return lambda p: loss(p, tokens.values, tokens.offsets, labels)


def packed(size: Size, depth: int, rows: list[np.ndarray], device: str) -> Loss:
    """Return the loss on packed tokens, with PyTorch's attention for them."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    lengths = [len(row) for row in rows]
    offsets = torch.tensor(np.r_[0, np.cumsum(lengths)], dtype=torch.int32, device=device)
    ids = torch.from_numpy(np.concatenate(rows)).to(device)
    positions = torch.from_numpy(np.concatenate([*map(np.arange, lengths)])).to(device)
    labels, longest = torch.from_numpy(_labels(rows)).to(device), max(lengths)
    takes_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if takes_flag else {"window_size": (-1, 0)}

    def attend(q: Any, k: Any, v: Any) -> Any:
        repeats = size.heads // size.kv_heads
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        return varlen_attn(q, k, v, offsets, offsets, longest, longest, **causal)

    return lambda p: _plain(p, size, depth, ids, positions, labels, attend)


def padded(size: Size, depth: int, rows: list[np.ndarray], device: str) -> Loss:
    """Return the loss on rows padded to the longest."""
    import torch
    import torch.nn.functional as F

    longest, first = max(map(len, rows)), np.cumsum([0, *map(len, rows)])
    ids, labels = (np.full((len(rows), longest), fill, np.int64) for fill in (0, IGNORED))
    packed_labels = _labels(rows)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, : len(row)] = packed_labels[first[i] : first[i + 1]]
    arrays = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
    positions = torch.arange(longest, device=device)

    def attend(*qkv: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        is_grouped = size.heads != size.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    return lambda p: _plain(p, size, depth, arrays[0], positions, arrays[1], attend)


def _labels(rows: list[np.ndarray]) -> np.ndarray:
    """Return the next token of each token; the last token of a row has none."""
    return np.concatenate([np.append(row[1:], IGNORED) for row in rows])


def _plain(
    p: dict[str, Any],
    size: Size,
    depth: int,
    ids: Any,
    positions: Any,
    labels: Any,
    attend: Callable[[Any, Any, Any], Any],
) -> Any:
    import torch
    import torch.nn.functional as F

    def norm(x: Any, name: str) -> Any:
        return F.rms_norm(x, (size.width,), p[name], EPS)

    def rotate(x: Any) -> Any:
        half = size.dim // 2
        steps = torch.arange(half, device=x.device) * (-math.log(1e4) / half)
        angle = positions.float()[..., None, None] * steps.exp()
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    x = F.embedding(ids, p["embedding"])
    for i in range(depth):
        qkv = (norm(x, f"{i}.norm1") @ p[f"{i}.qkv"]).unflatten(-1, (-1, size.dim))
        q, k, v = qkv.split([size.heads, size.kv_heads, size.kv_heads], -2)
        x = x + attend(rotate(q), rotate(k), v).flatten(-2) @ p[f"{i}.out"]
        gate, up = (norm(x, f"{i}.norm2") @ p[f"{i}.up"]).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ p[f"{i}.down"]
    logits = (norm(x, "norm") @ p["embedding"].T).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


FORMS = {"scree": ragged, "varlen_attn": packed, "padded": padded}
