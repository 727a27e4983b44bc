"""Calls of each attention: scree, the padded attention of each library, and importable kernels.

Each attention is built for a `Work` on a library and prepares its own form of the inputs. Such
conversions (padding, for example) are not timed. Results are returned packed, so that all are
compared with the same float64 reference. `peers` says which attention can run where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

import scree

from .formulas import softmax
from .libraries import Function, MeasuredLibrary, nested_tensor_maker, torch_compiled
from .measure import available, require
from .work import Work, inputs

#: ``make(lib, work)`` gives ``attend(q, k, v)``.
Make = Callable[[MeasuredLibrary, Work], Function]


class Prepared(NamedTuple):
    """The call of a peer: ``function(*args)``, and the gradient of its result.

    `packed` converts a result or a gradient to packed tokens.
    """

    function: Function
    args: tuple[Any, ...]
    cotangent: Any
    packed: Callable[[Any], Any] = lambda x: x


Prepare = Callable[[MeasuredLibrary, Work], Prepared]


def packed(make: Make) -> Prepare:
    """Prepare an attention on packed rows."""
    return lambda lib, work: Prepared(make(lib, work), *inputs(lib, work))


def padded(make: Make) -> Prepare:
    """Prepare an attention on a padded batch, (rows, heads, longest, dim)."""
    return lambda lib, work: Prepared(make(lib, work), *_padded_inputs(lib, work))


# --- scree ---
def scree_attention(kernel: str | None) -> Prepare:
    """Prepare `scree.attention` on the named kernel, or on the first that accepts the inputs."""

    def make(lib: MeasuredLibrary, work: Work) -> Function:
        (q, k, _), _ = inputs(lib, work)
        queries = scree.Array(q, lib.make(work.offsets, "int32"), max_length=work.max_length)
        keys = queries
        if work.key_lengths is not None:
            keys = scree.Array(k, lib.make(work.key_offsets, "int32"), max_length=work.max_keys)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return scree.attention(
                queries.with_values(q),
                keys.with_values(k),
                keys.with_values(v),
                causal=work.causal,
                window=work.window,
                kernel=kernel,
            ).values

        return attend

    return packed(make)


def scree_jitted(lib: MeasuredLibrary, work: Work) -> Function:
    """Build `scree.attention` under `jit`.

    The offsets are an argument, as in training, so that another batch does not compile again.
    """
    import jax

    offsets = lib.make(work.offsets, "int32")

    @jax.jit
    def run(offsets: Any, q: Any, k: Any, v: Any) -> Any:
        template = scree.Array(q, offsets, max_length=work.max_length)
        return scree.attention(
            template, template.with_values(k), template.with_values(v), causal=work.causal
        ).values

    return partial(run, offsets)


# --- padded batches ---
def _padded_inputs(
    lib: MeasuredLibrary, work: Work
) -> tuple[tuple[Any, ...], Any, Callable[[Any], Any]]:
    """Return padded inputs, the padded gradient, and a function that packs a result.

    The padded arrays are (rows, heads, longest, dim), with zeros in the padding.
    """
    require(3 * 4.0 * len(work.lengths) * work.max_length * work.heads * work.dim, lib.device)
    (q, k, v), cotangent = inputs(lib, work)
    tokens, token_mask = (
        lib.make(x, kind) for x, kind in zip(work.tokens, ("int32", "bool"), strict=True)
    )
    xp = lib.xp

    def pad(x: Any) -> Any:
        out = xp.reshape(
            xp.take(x, xp.reshape(tokens, (-1,)), axis=0), (*tokens.shape, *x.shape[1:])
        )
        out = xp.permute_dims(
            xp.where(token_mask[:, :, None, None], out, xp.zeros_like(out)), (0, 2, 1, 3)
        )
        return (
            np.ascontiguousarray(out)
            if lib.name == "numpy"
            else getattr(out, "contiguous", lambda: out)()
        )

    token_indices = lib.make(np.flatnonzero(work.tokens[1].reshape(-1)), "int32")

    def pack_result(x: Any) -> Any:
        x = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.take(xp.reshape(x, (-1, *x.shape[2:])), token_indices, axis=0)

    return (pad(q), pad(k), pad(v)), pad(cotangent), pack_result


def visible(work: Work) -> np.ndarray:
    """Return a (rows, 1, longest, longest) mask: whether a query attends to a key.

    A query in the padding attends to the first key, so that its result stays finite.
    """
    _, token_mask = work.tokens
    mask = token_mask[:, None, None, :] & np.ones((work.max_length, 1), bool)
    if work.causal:
        mask = mask & np.tri(work.max_length, dtype=bool)
    mask[:, :, :, 0] |= ~mask.any(-1)
    return mask


def naive(lib: MeasuredLibrary, work: Work) -> Function:
    require(3 * work.padded_scores, lib.device)
    xp, groups = lib.xp, work.heads // work.kv_heads
    mask = lib.make(visible(work), "bool")

    def attend(q: Any, k: Any, v: Any) -> Any:
        if groups > 1:
            k, v = xp.repeat(k, groups, axis=1), xp.repeat(v, groups, axis=1)
        scores = xp.matmul(q, xp.matrix_transpose(k)) * (1 / math.sqrt(work.dim))
        return xp.matmul(softmax(xp, xp.where(mask, scores, -math.inf)), v)

    return attend


def einsum(lib: MeasuredLibrary, work: Work) -> Function:
    """Build the einsum form that a first version in NumPy usually has."""
    require(3 * work.padded_scores)
    mask = visible(work)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = np.where(mask, np.einsum("nhid,nhjd->nhij", q, k) / math.sqrt(work.dim), -np.inf)
        return np.einsum("nhij,nhjd->nhid", softmax(np, scores), v)

    return attend


def loop_over_rows(lib: MeasuredLibrary, work: Work) -> Function:
    """Build a Python loop over rows, without padding."""
    xp, groups, bounds = lib.xp, work.heads // work.kv_heads, work.offsets.tolist()
    hidden = lib.make(~np.tri(work.max_length, dtype=bool), "bool") if work.causal else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        outputs = []
        for a, b in zip(bounds, bounds[1:], strict=False):
            x, y, z = (xp.permute_dims(t[a:b], (1, 0, 2)) for t in (q, k, v))
            if groups > 1:
                y, z = xp.repeat(y, groups, axis=0), xp.repeat(z, groups, axis=0)
            scores = xp.matmul(x, xp.matrix_transpose(y)) * (1 / math.sqrt(work.dim))
            if hidden is not None:
                scores = xp.where(hidden[: b - a, : b - a], -math.inf, scores)
            outputs.append(xp.permute_dims(xp.matmul(softmax(xp, scores), z), (1, 0, 2)))
        return xp.concat(outputs, axis=0)

    return attend


def torch_sdpa(backend: str | None) -> Make:
    """Build scaled dot-product attention of PyTorch on padded batches.

    A causal call needs no mask: the tokens come before the padding.
    """

    def make(lib: MeasuredLibrary, work: Work) -> Function:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mask = None if work.causal else lib.make(visible(work), "bool")
        kernel_context = (
            partial(sdpa_kernel, getattr(SDPBackend, backend)) if backend else nullcontext
        )

        def attend(q: Any, k: Any, v: Any) -> Any:
            with kernel_context():
                return torch.nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=work.causal,
                    enable_gqa=work.heads != work.kv_heads,
                )

        return attend

    return make


def torch_rows(lib: MeasuredLibrary, work: Work) -> Function:
    import torch

    lengths, keys = list(work.lengths), list(work.keys)
    masks: list[Any] = [None] * len(lengths)
    if work.window is not None or (work.causal and work.key_lengths is not None):
        masks = [
            lib.make(work.visible_keys(row, np.arange(n)), "bool") for row, n in enumerate(lengths)
        ]

    def attend(q: Any, k: Any, v: Any) -> Any:
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in row),
                attn_mask=mask,
                is_causal=work.causal and mask is None,
                enable_gqa=work.heads != work.kv_heads,
            )[0].transpose(0, 1)
            for mask, *row in zip(
                masks, q.split(lengths), k.split(keys), v.split(keys), strict=True
            )
        ]
        return torch.cat(outputs)

    return attend


def torch_nested(lib: MeasuredLibrary, work: Work) -> Function:
    import torch

    nested = nested_tensor_maker(lib, work.lengths)

    def attend(q: Any, k: Any, v: Any) -> Any:
        rows = (nested(x).transpose(1, 2) for x in (q, k, v))
        return (
            torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=work.causal)
            .transpose(1, 2)
            .values()
        )

    return attend


def torch_flex(lib: MeasuredLibrary, work: Work) -> Function:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = lib.make(np.repeat(np.arange(len(work.lengths)), work.lengths), "int32")

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = row[i] == row[j]
        return same & (i >= j) if work.causal else same

    # Unless it is compiled, the mask takes an int64 per pair, a few times at once.
    large = 4 * 8.0 * work.total**2 > available(lib.device)
    mask = create_block_mask(
        mask_mod, None, None, work.total, work.total, device=row.device, _compile=large
    )
    if lib.device == "cpu":
        # flex_attention has no backward on the CPU. After a failed one it would not compile again.
        torch.compiler.reset()
    run = torch_compiled(flex_attention)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return run(q, k, v, block_mask=mask, enable_gqa=work.heads != work.kv_heads)[0].transpose(
            0, 1
        )

    return attend


# --- kernels for CUDA ---
def _varlen_arguments(lib: MeasuredLibrary, work: Work) -> tuple[Any, Any, int, int]:
    """Return the offsets of queries and of keys, and the longest rows of both."""
    cu_seqlens = lib.make(work.offsets, "int32")
    if work.key_lengths is None:
        return cu_seqlens, cu_seqlens, work.max_length, work.max_length
    return cu_seqlens, lib.make(work.key_offsets, "int32"), work.max_length, work.max_keys


def _differentiated(forward: Function, backward: Function) -> Function:
    """Combine two operators into one differentiable function.

    `forward` returns the result, followed by the last arguments of
    ``backward(dout, q, k, v, out, ...)``.
    """
    import torch

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, *ctx.rest = forward(q, k, v)
            ctx.save_for_backward(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return backward(dout, *ctx.saved_tensors, *ctx.rest)

    apply: Function = Attend.apply
    return apply


def fa2(lib: MeasuredLibrary, work: Work) -> Function:
    """Build FlashAttention-2 from the operators of PyTorch, without PyTorch's wrapper."""
    import torch

    aten, varlen = torch.ops.aten, (*_varlen_arguments(lib, work), 0.0, work.causal)
    window = {}
    if work.window is not None:
        window = dict(zip(("window_size_left", "window_size_right"), work.window, strict=True))

    def forward(q: Any, k: Any, v: Any) -> Any:
        return aten._flash_attention_forward(q, k, v, *varlen, False, **window)[:4]

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rng: Any, unused: Any
    ) -> Any:
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, *varlen, rng, unused, **window
        )

    return _differentiated(forward, backward)


def varlen(lib: MeasuredLibrary, work: Work) -> Function:
    from torch.nn.attention.varlen import varlen_attn

    arguments = _varlen_arguments(lib, work)
    window = work.window or ((-1, 0) if work.causal else (-1, -1))
    parameters = signature(varlen_attn).parameters
    grouped = (
        {"enable_gqa": True} if work.heads != work.kv_heads and "enable_gqa" in parameters else {}
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, *arguments, window_size=window, **grouped)

    return attend


def flash(module: str) -> Make:
    """Build FlashAttention-3 or -4, which have the same argument names."""

    def make(lib: MeasuredLibrary, work: Work) -> Function:
        run = import_module(module).flash_attn_varlen_func
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = dict(zip(names, _varlen_arguments(lib, work), strict=True))
        if work.window is not None:
            options["window_size"] = work.window

        def attend(q: Any, k: Any, v: Any) -> Any:
            out = run(q, k, v, **options, causal=work.causal)
            return out[0] if isinstance(out, tuple) else out

        return attend

    return make


def efficient(lib: MeasuredLibrary, work: Work) -> Function:
    """Build the memory-efficient kernel of xFormers on packed rows, which accepts float32."""
    import torch

    cu_seqlens, _, max_length, _ = _varlen_arguments(lib, work)
    aten, mask = torch.ops.aten, int(work.causal)

    def forward(q: Any, k: Any, v: Any) -> Any:
        results = aten._efficient_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            cu_seqlens,
            cu_seqlens,
            max_length,
            max_length,
            0.0,
            mask,
            True,
        )
        return results[0][0], *results[1:]

    def backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        seed: Any,
        offset: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Any:
        results = aten._efficient_attention_backward(
            *(x[None] for x in (dout, q, k, v)),
            None,
            out[None],
            cu_seqlens,
            cu_seqlens,
            max_seqlen_q,
            max_seqlen_k,
            lse,
            0.0,
            seed,
            offset,
            mask,
            False,
        )
        return tuple(x[0] for x in results[:3])

    return _differentiated(forward, backward)


# --- JAX and MLX ---
def jax_nn(lib: MeasuredLibrary, work: Work, implementation: str | None = None) -> Prepared:
    """Prepare JAX's padded attention, by XLA or by cuDNN."""
    import jax

    return _padded_jax(lib, work, jax.nn.dot_product_attention, implementation=implementation)


def tokamax(lib: MeasuredLibrary, work: Work) -> Prepared:
    """Prepare the padded attention of Tokamax, by the implementation that it chooses."""
    return _padded_jax(lib, work, import_module("tokamax").dot_product_attention)


def _padded_jax(lib: MeasuredLibrary, work: Work, run: Function, **options: Any) -> Prepared:
    tokens, token_mask = work.tokens
    q, k, v, cotangent = (
        lib.make(np.where(token_mask[:, :, None, None], x[tokens], 0), work.dtype)
        for x in work.arrays
    )
    lengths, token_indices = (
        lib.make(np.asarray(work.lengths), "int32"),
        lib.make(np.flatnonzero(token_mask.reshape(-1)), "int32"),
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        return run(
            q,
            k,
            v,
            is_causal=work.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            **options,
        )

    def pack_result(x: Any) -> Any:
        return x.reshape(-1, *x.shape[2:])[token_indices]

    return Prepared(attend, (q, k, v), cotangent, pack_result)


def mlx_fast(lib: MeasuredLibrary, work: Work) -> Function:
    import mlx.core as mx

    mask = "causal" if work.causal else lib.make(visible(work), "bool")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=1 / math.sqrt(work.dim), mask=mask
        )

    return attend
