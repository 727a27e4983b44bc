"""Llama-like models and GPT-2 in PyTorch, on ragged arrays and on tensors.

Both forms of a model have the same parameters and the same hidden states. Everything except
attention works per token, so packed tokens, windows and padded rows share one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import scree

#: ``attend(q, k, v)`` on (..., heads, dim).
Attend = Callable[[Any, Any, Any], Any]
#: What the backward pass computes again: nothing; the activations of the feed-forward networks, with
#: values copied out of the product that they are views of; or whole layers.
RECOMPUTE = "nothing", "activations", "layers"


class Size(NamedTuple):
    """Published shape of a model. A size with positions is a GPT-2, otherwise a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    vocabulary: int
    positions: int = 0
    #: Default learning rate.
    rate: float = 6e-4

    @property
    def eps(self) -> float:
        """The constant of the norms."""
        return 1e-5 if self.positions else 1e-6


SIZES = {
    "tiny": Size(2, 64, 4, 2, 16, 128, 512, rate=3e-3),
    "124m": Size(12, 768, 12, 12, 64, 2048, 50_304),
    "1.2b": Size(16, 2048, 32, 8, 64, 8192, 128_256, rate=3e-4),
    "gpt2": Size(12, 768, 12, 12, 64, 3072, 50_304, positions=1024),
    "gpt2-tiny": Size(2, 64, 4, 4, 16, 256, 512, positions=128, rate=3e-3),
}


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter. The embedding is also the matrix of the logits."""
    width, heads = size.width, size.heads + 2 * size.kv_heads
    up = size.hidden if size.positions else 2 * size.hidden
    norms = ["norm", *(f"{i}.norm{k}" for i in range(size.layers) for k in (1, 2))]
    result: dict[str, tuple[int, ...]] = {"embedding": (size.vocabulary, width)}
    result |= dict.fromkeys(norms, (width,))
    for i in range(size.layers):
        result |= {
            f"{i}.qkv": (width, heads * size.dim),
            f"{i}.out": (size.heads * size.dim, width),
            f"{i}.up": (width, up),
            f"{i}.down": (size.hidden, width),
        }
    if size.positions:
        result |= {f"{name}.bias": shape[-1:] for name, shape in result.items() if "." in name}
        result |= {"norm.bias": (width,), "positions": (size.positions, width)}
    return result


def parameters(size: Size, device: str, dtype: Any, seed: int) -> dict[str, Any]:
    """Return random parameters that require gradients, as GPT-2 initializes them.

    Matrices are normal with a standard deviation of 0.02; matrices that add to the residual are
    smaller by ``sqrt(2 * layers)``. Norms are 1 and biases 0.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    result = {}
    for name, shape in shapes(size).items():
        if len(shape) == 1:
            x = torch.full(shape, float(not name.endswith("bias")), device=device)
        else:
            x = 0.02 * torch.randn(shape, generator=generator, device=device)
            if name.endswith((".out", ".down")):
                x /= math.sqrt(2 * size.layers)
        result[name] = x.to(dtype).requires_grad_()
    return result


def flops(size: Size, lengths: list[int]) -> float:
    """Return the operations that a training step on documents needs, whatever the form.

    They are 6 per parameter and token, and 12 per layer, query head, head dimension and attended
    pair of tokens. Padding and recomputation do not count, and neither do position embeddings.
    """
    count = sum(math.prod(shape) for name, shape in shapes(size).items() if name != "positions")
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 6.0 * count * sum(lengths) + 12.0 * size.layers * size.heads * size.dim * pairs


def ragged(
    p: dict[str, Any], size: Size, ids: Any, offsets: Any, longest: int, recompute: str
) -> scree.Array:
    """Return the hidden states of packed documents, on scree."""
    # One layout for all layers, as kernels cache in it the data that they derive from the offsets.
    tokens = scree.from_cu_seqlens(ids, offsets, max_length=longest)
    return hidden_states(p, size, tokens, recompute)


def hidden_states(
    p: dict[str, Any],
    size: Size,
    tokens: scree.Array,
    recompute: str = "nothing",
    layers: Sequence[Callable[..., Any]] | None = None,
) -> scree.Array:
    """Return the hidden states of ragged token ids, which may be a shard of a batch.

    Parameters
    ----------
    p
        The parameters by name, see `parameters`.
    size
        The size of the model.
    tokens
        (n, None) int64 token ids.
    recompute
        One of `RECOMPUTE`.
    layers
        One function per layer with the arguments (tokens, branch, residual) of `layer`. By default
        `layer` with the parameters `p` and with `recompute`.
    """
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    array = tokens.with_values
    if layers is None:
        recomputes = recompute == "activations"
        layers = [
            partial(layer, layer_parameters(p, i), size, recomputes=recomputes)
            for i in range(size.layers)
        ]
    x, y = scree.gather(p["embedding"], tokens).values, None
    if size.positions:
        x = x + F.embedding(scree.positions(tokens), p["positions"])

    def add_layer(run: Any, x: Any) -> Any:
        # The backward pass keeps the sum instead of both terms.
        y, x = run(tokens, None, x)
        return x + y

    if recompute == "layers":
        for run in layers:
            x = checkpoint(add_layer, run, x, use_reentrant=False)
        return _norm(p, size, "norm", array(x))
    for run in layers:
        y, x = run(tokens, y, x)
    return _norm(p, size, "norm", array(y), array(x))[0]


def layer_parameters(p: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the parameters of a layer by their names within the layer."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): x for name, x in p.items() if name.startswith(prefix)}


def layer(
    p: dict[str, Any],
    size: Size,
    tokens: scree.Array,
    branch: Any,
    residual: Any,
    recomputes: bool = False,
) -> tuple[Any, Any]:
    """Return the branch and the residual after a layer; each is added by the next norm.

    `p` has the parameters of the layer. The branch is None before the first layer. With `recomputes`
    the backward pass computes the activations again.
    """
    import torch.nn.functional as F

    array = tokens.with_values

    def down(up: Any) -> Any:
        x = F.gelu(up, approximate="tanh") if size.positions else scree.swiglu(up)
        return product(x, "down")

    def product(x: Any, name: str) -> Any:
        if not size.positions:
            return x @ p[name]
        return F.linear(x, p[name].T, p[f"{name}.bias"])

    x = array(residual)
    if branch is None:
        y = _norm(p, size, "norm1", x)
    else:
        y, x = _norm(p, size, "norm1", array(branch), x)
    qkv = product(y.values, "qkv").unflatten(1, (-1, size.dim))
    q, k, v = scree.split(array(qkv), (size.heads, size.kv_heads, size.kv_heads), axis=2)
    if not size.positions:
        q, k = scree.rope(q, k)
        if recomputes:
            # As a view it would keep the product, which has the queries and keys too.
            v = array(v.values.contiguous())
    a = scree.attention(q, k, v, causal=True)
    a = a.with_values(product(a.values.flatten(1), "out"))
    y, x = _norm(p, size, "norm2", a, x)
    return _call(down, product(y.values, "up"), recomputes), x.values


def _call(run: Callable[[Any], Any], x: Any, recomputes: bool) -> Any:
    """Return ``run(x)``, of which the backward pass keeps only `x` if it `recomputes` the rest."""
    from torch.utils.checkpoint import checkpoint

    if not recomputes:
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def _norm(
    p: dict[str, Any], size: Size, name: str, x: scree.Array, residual: scree.Array | None = None
) -> Any:
    """Return the layer norm of a GPT-2 or the RMS norm of a Llama."""
    if size.positions:
        return scree.layer_norm(x, p[name], p[f"{name}.bias"], residual=residual, eps=size.eps)
    return scree.rms_norm(x, p[name], residual=residual, eps=size.eps)


def plain(
    p: dict[str, Any],
    size: Size,
    ids: Any,
    positions: Any,
    run_layer: Callable[..., Any],
    recomputes: bool,
) -> Any:
    """Return the hidden states of tokens of any shape, in PyTorch's own functions.

    `run_layer` is `plain_layer` with its first arguments, or its compiled form. With `recomputes` the
    backward pass computes whole layers again.
    """
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    x = F.embedding(ids, p["embedding"])
    angles: tuple[Any, ...] = ()
    if size.positions:
        x = x + F.embedding(positions, p["positions"])
    else:
        half = size.dim // 2
        steps = torch.arange(half, device=x.device) * (-math.log(1e4) / half)
        angle = positions.float()[..., None, None] * steps.exp()
        angles = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    for i in range(size.layers):
        arguments = layer_parameters(p, i), x, *angles
        if recomputes:
            x = checkpoint(run_layer, *arguments, use_reentrant=False)
        else:
            x = run_layer(*arguments)
    return _plain_norm(p, size, "norm", x)


def plain_layer(
    size: Size, attend: Attend, recomputes: bool, p: dict[str, Any], x: Any, *angles: Any
) -> Any:
    """Return the hidden states after a layer with the parameters `p`, from `x` (..., width).

    With `recomputes` the backward pass computes the activations again.
    """
    import torch
    import torch.nn.functional as F

    def product(x: Any, name: str) -> Any:
        if not size.positions:
            return x @ p[name]
        return F.linear(x, p[name].T, p[f"{name}.bias"])

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def down(up: Any) -> Any:
        if size.positions:
            return product(F.gelu(up, approximate="tanh"), "down")
        gate, up = up.chunk(2, -1)
        return product(F.silu(gate) * up, "down")

    qkv = product(_plain_norm(p, size, "norm1", x), "qkv").unflatten(-1, (-1, size.dim))
    q, k, v = qkv.split([size.heads, size.kv_heads, size.kv_heads], -2)
    if angles:
        q, k = rotate(q, *angles), rotate(k, *angles)
        if recomputes:
            v = v.contiguous()
    x = x + product(attend(q, k, v).flatten(-2), "out")
    up = product(_plain_norm(p, size, "norm2", x), "up")
    return x + _call(down, up, recomputes)


def _plain_norm(p: dict[str, Any], size: Size, name: str, x: Any) -> Any:
    import torch.nn.functional as F

    if size.positions:
        return F.layer_norm(x, (size.width,), p[name], p[f"{name}.bias"], size.eps)
    return F.rms_norm(x, (size.width,), p[name], size.eps)
