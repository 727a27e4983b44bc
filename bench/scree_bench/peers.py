"""Attention by everyone who has one: ours, each library's own on padded batches, and the kernels that can be imported.

A peer gets a `Work` and prepares its own form of it: what is converted there, padding for instance, is not timed. Its results
come back packed, so that all are compared with the same float64 reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scree

from .formulas import softmax
from .libraries import Function, Library, nesting, torch_compiled
from .measure import available, require
from .work import Work, inputs

if TYPE_CHECKING:
    from .session import Session

NO_TIME = "takes long; run without --quick"
EINSUM = 5e7  # bytes of padded scores up to which NumPy's einsum is run, at a few operations a nanosecond


class Prepared(NamedTuple):
    """What a peer runs: ``function(*args)``, the gradient to send back, and how a result or gradient becomes packed."""

    function: Function
    args: tuple[Any, ...]
    cotangent: Any
    packed: Callable[[Any], Any]


class Peer(NamedTuple):
    """A contender: its name, the library it needs, and how it prepares a work."""

    name: str
    library: str
    prepare: Callable[[Library, Work], Prepared]
    missing: Callable[[Library, Work], str | None] = lambda lib, work: None
    slow: bool = False  # to compile: not with --quick
    backward: bool = True  # whether it has one


def ours(kernel: str | None) -> Callable[[Library, Work], Prepared]:
    """`scree.attention` on the kernel that is named, or on the first that accepts."""

    def prepare(lib: Library, work: Work) -> Prepared:
        args, cotangent = inputs(lib, work)
        offsets = lib.make(work.offsets, "int32")
        like = scree.Array(args[0], offsets, max_length=work.longest)

        def attend(q: Any, k: Any, v: Any) -> Any:
            rows = (like.with_values(x) for x in (q, k, v))
            return scree.attention(*rows, causal=work.causal, kernel=kernel).values

        return Prepared(attend, args, cotangent, lambda x: x)

    return prepare


def _ours_traced(lib: Library, work: Work) -> Prepared:
    """Under `jit`, where the offsets are an argument as they are in training: another batch does not compile again."""
    (q, k, v), cotangent = inputs(lib, work)
    offsets = lib.make(work.offsets, "int32")
    import jax

    @jax.jit
    def run(offsets: Any, q: Any, k: Any, v: Any) -> Any:
        like = scree.Array(q, offsets, max_length=work.longest)
        return scree.attention(like, like.with_values(k), like.with_values(v), causal=work.causal).values

    return Prepared(lambda q, k, v: run(offsets, q, k, v), (q, k, v), cotangent, lambda x: x)


# ------------------------------------------------------------------------------------------- padded batches
def _dense(lib: Library, work: Work) -> tuple[tuple[Any, ...], Any, Callable[[Any], Any]]:
    """Inputs and gradient as (rows, heads, longest, dim), zeros in the padding, and the way back."""
    require(3 * 4.0 * len(work.lengths) * work.longest * work.heads * work.dim, lib.device)
    args, cotangent = inputs(lib, work)
    tokens, real = (lib.make(x, kind) for x, kind in zip(work.tokens, ("int32", "bool"), strict=True))
    xp = lib.xp

    def pad(x: Any) -> Any:
        found = xp.reshape(xp.take(x, xp.reshape(tokens, (-1,)), axis=0), (*tokens.shape, *x.shape[1:]))
        found = xp.permute_dims(xp.where(real[:, :, None, None], found, xp.zeros_like(found)), (0, 2, 1, 3))
        return np.ascontiguousarray(found) if lib.name == "numpy" else getattr(found, "contiguous", lambda: found)()

    slots = lib.make(np.flatnonzero(work.tokens[1].reshape(-1)), "int32")

    def packed(x: Any) -> Any:
        x = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.take(xp.reshape(x, (-1, *x.shape[2:])), slots, axis=0)

    q, k, v = map(pad, args)
    return (q, k, v), pad(cotangent), packed


def visible(work: Work) -> np.ndarray:
    """(rows, 1, longest, longest) which query may see which key; a query in the padding sees the first key, to stay finite."""
    _, real = work.tokens
    seen = real[:, None, None, :] & np.ones((work.longest, 1), bool)
    if work.causal:
        seen = seen & np.tri(work.longest, dtype=bool)
    seen[:, :, :, 0] |= ~seen.any(-1)
    return seen


def _naive(lib: Library, work: Work) -> Prepared:
    require(3 * work.padded_scores, lib.device)
    args, cotangent, packed = _dense(lib, work)
    xp, groups = lib.xp, work.heads // work.kv_heads
    mask = lib.make(visible(work), "bool")

    def attend(q: Any, k: Any, v: Any) -> Any:
        if groups > 1:
            k, v = xp.repeat(k, groups, axis=1), xp.repeat(v, groups, axis=1)
        scores = xp.matmul(q, xp.matrix_transpose(k)) * (1 / math.sqrt(work.dim))
        return xp.matmul(softmax(xp, xp.where(mask, scores, -math.inf)), v)

    return Prepared(attend, args, cotangent, packed)


def _einsum(lib: Library, work: Work) -> Prepared:
    """What a first try in NumPy looks like."""
    require(3 * work.padded_scores)
    args, cotangent, packed = _dense(lib, work)
    mask = visible(work)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = np.where(mask, np.einsum("nhid,nhjd->nhij", q, k) / math.sqrt(work.dim), -np.inf)
        return np.einsum("nhij,nhjd->nhid", softmax(np, scores), v)

    return Prepared(attend, args, cotangent, packed)


def _rows(lib: Library, work: Work) -> Prepared:
    """A Python loop over rows: the plain form, without padding."""
    args, cotangent = inputs(lib, work)
    xp, groups, bounds = lib.xp, work.heads // work.kv_heads, work.offsets.tolist()
    hidden = lib.make(~np.tri(work.longest, dtype=bool), "bool") if work.causal else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        outs = []
        for a, b in zip(bounds, bounds[1:], strict=False):
            x, y, z = (xp.permute_dims(t[a:b], (1, 0, 2)) for t in (q, k, v))
            if groups > 1:
                y, z = xp.repeat(y, groups, axis=0), xp.repeat(z, groups, axis=0)
            scores = xp.matmul(x, xp.matrix_transpose(y)) * (1 / math.sqrt(work.dim))
            if hidden is not None:
                scores = xp.where(hidden[: b - a, : b - a], -math.inf, scores)
            outs.append(xp.permute_dims(xp.matmul(softmax(xp, scores), z), (1, 0, 2)))
        return xp.concat(outs, axis=0)

    return Prepared(attend, args, cotangent, lambda x: x)


def _torch_sdpa(backend: str | None) -> Callable[[Library, Work], Prepared]:
    """Padded batches in PyTorch. A causal call needs no mask: real tokens come before the padding."""

    def prepare(lib: Library, work: Work) -> Prepared:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        args, cotangent, packed = _dense(lib, work)
        mask = None if work.causal else lib.make(visible(work), "bool")
        chosen = partial(sdpa_kernel, getattr(SDPBackend, backend)) if backend else nullcontext

        def attend(q: Any, k: Any, v: Any) -> Any:
            with chosen():
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=work.causal, enable_gqa=work.heads != work.kv_heads
                )

        return Prepared(attend, args, cotangent, packed)

    return prepare


def _torch_rows(lib: Library, work: Work) -> Prepared:
    import torch

    args, cotangent = inputs(lib, work)
    lengths = list(work.lengths)

    def attend(q: Any, k: Any, v: Any) -> Any:
        outs = [
            torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in row), is_causal=work.causal, enable_gqa=work.heads != work.kv_heads
            )[0].transpose(0, 1)
            for row in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(outs)

    return Prepared(attend, args, cotangent, lambda x: x)


def _torch_nested(lib: Library, work: Work) -> Prepared:
    import torch

    args, cotangent = inputs(lib, work)
    nested = nesting(lib, work.lengths)

    def attend(q: Any, k: Any, v: Any) -> Any:
        rows = (nested(x).transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=work.causal).transpose(1, 2).values()

    return Prepared(attend, args, cotangent, lambda x: x)


def _torch_flex(lib: Library, work: Work) -> Prepared:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    args, cotangent = inputs(lib, work)
    row = lib.make(np.repeat(np.arange(len(work.lengths)), work.lengths), "int32")

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = row[i] == row[j]
        return same & (i >= j) if work.causal else same

    large = 4 * 8.0 * work.total**2 > available(lib.device)  # an int64 for each pair, a few at once, unless it is compiled
    mask = create_block_mask(seen, None, None, work.total, work.total, device=args[0].device, _compile=large)
    if lib.device == "cpu":
        torch.compiler.reset()  # it has no backward there, and after one that failed it would not be compiled again
    run = torch_compiled(flex_attention)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return run(q, k, v, block_mask=mask, enable_gqa=work.heads != work.kv_heads)[0].transpose(0, 1)

    return Prepared(attend, args, cotangent, lambda x: x)


# ---------------------------------------------------------------------------------------- kernels for CUDA
def _bounds(lib: Library, work: Work) -> tuple[Any, int]:
    return lib.make(work.offsets, "int32"), work.longest


def _differentiated(forward: Function, backward: Function) -> Function:
    """Two operators as one function: `forward` gives the result and what ``backward(dout, q, k, v, out, ...)`` takes behind it."""
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

    found: Function = Attend.apply
    return found


def _fa2(lib: Library, work: Work) -> Prepared:
    """FlashAttention-2 as PyTorch carries it, without what PyTorch puts around it."""
    import torch

    args, cotangent = inputs(lib, work)
    cu, longest = _bounds(lib, work)
    aten, rows = torch.ops.aten, (cu, cu, longest, longest, 0.0, work.causal)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return aten._flash_attention_forward(q, k, v, *rows, False)[:4]

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rng: Any, unused: Any) -> Any:
        return aten._flash_attention_backward(dout, q, k, v, out, lse, *rows, rng, unused)

    return Prepared(_differentiated(forward, backward), args, cotangent, lambda x: x)


def _varlen(lib: Library, work: Work) -> Prepared:
    from torch.nn.attention.varlen import varlen_attn

    args, cotangent = inputs(lib, work)
    cu, longest = _bounds(lib, work)
    window = (-1, 0) if work.causal else (-1, -1)
    known = signature(varlen_attn).parameters
    grouped = {"enable_gqa": True} if work.heads != work.kv_heads and "enable_gqa" in known else {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window, **grouped)

    return Prepared(attend, args, cotangent, lambda x: x)


def _flash(module: str) -> Callable[[Library, Work], Prepared]:
    """FlashAttention-3 and -4, which share the names of their arguments."""

    def prepare(lib: Library, work: Work) -> Prepared:
        from importlib import import_module

        run = import_module(module).flash_attn_varlen_func
        args, cotangent = inputs(lib, work)
        cu, longest = _bounds(lib, work)

        def attend(q: Any, k: Any, v: Any) -> Any:
            out = run(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=work.causal)
            return out[0] if isinstance(out, tuple) else out

        return Prepared(attend, args, cotangent, lambda x: x)

    return prepare


def _efficient(lib: Library, work: Work) -> Prepared:
    """The memory-efficient kernel of xFormers on packed rows: the one that takes float32."""
    import torch

    args, cotangent = inputs(lib, work)
    cu, longest = _bounds(lib, work)
    aten, mask = torch.ops.aten, int(work.causal)

    def forward(q: Any, k: Any, v: Any) -> Any:
        found = aten._efficient_attention_forward(q[None], k[None], v[None], None, cu, cu, longest, longest, 0.0, mask, True)
        return found[0][0], *found[1:]

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, most_q: int, most_k: int) -> Any:
        found = aten._efficient_attention_backward(
            *(x[None] for x in (dout, q, k, v)), None, out[None], cu, cu, most_q, most_k, lse, 0.0, seed, offset, mask, False
        )
        return tuple(x[0] for x in found[:3])

    return Prepared(_differentiated(forward, backward), args, cotangent, lambda x: x)


# ---------------------------------------------------------------------------------------------- JAX and MLX
def _jax_own(lib: Library, work: Work) -> Prepared:
    import jax

    tokens, real = work.tokens
    q, k, v, cotangent = (lib.make(np.where(real[:, :, None, None], x[tokens], 0), work.dtype) for x in work.arrays)
    lengths, slots = lib.make(np.asarray(work.lengths), "int32"), lib.make(np.flatnonzero(real.reshape(-1)), "int32")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=work.causal, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )

    def packed(x: Any) -> Any:
        return x.reshape(-1, *x.shape[2:])[slots]

    return Prepared(attend, (q, k, v), cotangent, packed)


def _mlx_own(lib: Library, work: Work) -> Prepared:
    import mlx.core as mx

    args, cotangent, packed = _dense(lib, work)
    mask = "causal" if work.causal else lib.make(visible(work), "bool")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(work.dim), mask=mask)

    return Prepared(attend, args, cotangent, packed)


# ----------------------------------------------------------------------------------------------- who may run
def _on_cuda(*dtypes: str, modules: Sequence[str] = ()) -> Callable[[Library, Work], str | None]:
    return lambda lib, work: lacking(lib, work.dtype, dtypes, modules)


def lacking(lib: Library, dtype: str, dtypes: Sequence[str] = (), modules: Sequence[str] = ()) -> str | None:
    """Why a kernel for CUDA cannot run: not on this device, not for this data type, not without these modules; or None."""
    if lib.device != "cuda":
        return "runs on CUDA devices only"
    if dtypes and dtype not in dtypes:
        return f"takes {' and '.join(dtypes)}, not {dtype}"
    absent = [m for m in modules if not importable(m)]
    return f"{' and '.join(absent)} cannot be imported" if absent else None


def importable(module: str) -> bool:
    """Whether there is such a module."""
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around the module
        return False


def compiler(lib: Library) -> str | None:
    """Why nothing can be compiled here, or None."""
    from shutil import which

    if lib.device == "cpu" and not (which("g++") or which("clang++") or which("c++")):
        return "needs a C++ compiler on the CPU"
    return None


def _few(lib: Library, work: Work) -> str | None:
    return None if work.padded_scores <= EINSUM else "takes minutes on so many scores"


def _nested(lib: Library, work: Work) -> str | None:
    if work.causal and lib.device == "cpu":
        return "is not causal on the CPU"
    return None if work.heads == work.kv_heads else "has no grouped heads"


_HALF = ("float16", "bfloat16")

#: All of them, ours first: ratios are against it.
PEERS: tuple[Peer, ...] = (
    Peer("scree", "numpy", ours(None)),
    Peer("scree", "torch", ours(None)),
    Peer("scree (jit)", "jax", _ours_traced),
    Peer("scree", "mlx", ours(None)),
    Peer("scree, standard path", "torch", ours("standard")),
    Peer("padded, einsum", "numpy", _einsum, _few),
    *(Peer("padded, matmul", name, _naive) for name in ("numpy", "torch", "jax", "mlx")),
    *(Peer("loop over rows", name, _rows, slow=name == "jax") for name in ("numpy", "jax", "mlx")),
    Peer("padded, SDPA", "torch", _torch_sdpa(None)),
    Peer("loop over rows, SDPA", "torch", _torch_rows),
    Peer("torch.nested, SDPA", "torch", _torch_nested, _nested),
    Peer("flex_attention", "torch", _torch_flex, lambda lib, work: compiler(lib), slow=True),
    Peer("padded, jax.nn", "jax", _jax_own),
    Peer("padded, mx.fast", "mlx", _mlx_own),
    *(Peer(f"padded, SDPA {b.partition('_')[0].lower()}", "torch", _torch_sdpa(b), _on_cuda(*_HALF))
      for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION")),
    Peer("padded, SDPA efficient", "torch", _torch_sdpa("EFFICIENT_ATTENTION"), _on_cuda()),
    Peer("FA2 (aten)", "torch", _fa2, _on_cuda(*_HALF)),
    Peer("varlen_attn (FA2)", "torch", _varlen, _on_cuda(*_HALF)),
    Peer("FA3", "torch", _flash("flash_attn_interface"), _on_cuda(*_HALF, modules=["flash_attn_interface"])),
    Peer("FA3 (forward only)", "torch", _flash("fa3_fwd_interface"), _on_cuda("bfloat16", modules=["fa3_fwd_interface"]),
         backward=False),
    Peer("FA4", "torch", _flash("flash_attn.cute"), _on_cuda(*_HALF, modules=["flash_attn.cute"])),
    Peer("efficient, packed", "torch", _efficient, _on_cuda("float32")),
)  # fmt: skip


def contenders(session: Session, lib: Library, work: Work, only: Sequence[str] = ()) -> list[Peer]:
    """The peers that can run a work on a library; the session notes the others with the reason.

    With `only`, those that it names, or whose names begin with an entry that is no name.
    """
    names = {peer.name for peer in PEERS}
    beginnings = tuple(x for x in only if x not in names)
    found = []
    for peer in PEERS:
        if peer.library == lib.name and (not only or peer.name in only or peer.name.startswith(beginnings)):
            why = NO_TIME if session.quick and peer.slow else peer.missing(lib, work)
            if why is None:
                found.append(peer)
            else:
                session.leave_out(f"{peer.name} on {lib.name}", why)
    return found
