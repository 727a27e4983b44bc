"""Forms of a training step: the arrays that each makes of a batch, and its loss.

All forms get the same documents in the same order, and have the same targets. The packed forms have
a fixed number of tokens and of rows; rows that a batch does not need are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

import scree
from scree.dispatch.registry import kernels

from ..gpt import IGNORED
from ..peers import importable
from . import models
from .heads import Head
from .models import Attend, Size
from .text import labels

#: Tokens whose computation takes as long as a part of a padded batch takes besides its tokens:
#: casts of all weights, sums of all gradients, and the host.
PART_TOKENS = 2048


class Plan(NamedTuple):
    """Settings that the arrays of all batches share."""

    size: Size
    #: Tokens per batch, most documents per batch, and most tokens per document.
    total: int
    max_rows: int
    context: int
    #: What the backward pass computes again: one of `models.RECOMPUTE`.
    recompute: str = "nothing"
    #: Whether a form whose shapes change compiles its layers, once for all layers.
    compiles_layers: bool = False


class Part(NamedTuple):
    """Arrays of a batch or of a part of it, and the number of their targets."""

    arrays: tuple[np.ndarray, ...]
    targets: int


#: ``loss(parameters, *arrays)`` gives the mean over the targets.
Loss = Callable[..., Any]


class Form(NamedTuple):
    """A way to train on a batch: its arrays, its loss, and whether the shapes change."""

    parts: Callable[[Plan, list[np.ndarray]], list[Part]]
    make_loss: Callable[[Plan, Head], Loss]
    changes_shape: bool = False
    #: Modules that must be importable, and whether it runs on CUDA devices only.
    modules: tuple[str, ...] = ()
    needs_cuda: bool = False
    #: Whether it runs on JAX, always compiled. Then `make_loss` is unused: see `jax_loop`.
    on_jax: bool = False


# --- arrays ---
def _count(labels: np.ndarray) -> int:
    return int((labels != IGNORED).sum())


def packed(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return tokens, labels and offsets of the documents, one after the other."""
    targets = labels(rows)
    offsets = np.full(plan.max_rows + 1, plan.total, np.int32)
    offsets[: len(rows) + 1] = np.cumsum([0, *map(len, rows)])
    return [Part((np.concatenate(rows), targets, offsets), _count(targets))]


def packed_with_positions(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return the packed arrays and the position of each token in its document."""
    (part,) = packed(plan, rows)
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    return [part._replace(arrays=(*part.arrays, positions))]


def with_documents(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return tokens, labels, positions and the document of each token."""
    (part,) = packed_with_positions(plan, rows)
    ids, targets, _, positions = part.arrays
    documents = np.repeat(np.arange(len(rows), dtype=np.int32), [*map(len, rows)])
    return [Part((ids, targets, positions, documents), part.targets)]


def windows(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return tokens and labels in windows of the context, across documents.

    The last window may be shorter; it is a part of its own.
    """
    ids, targets = np.concatenate(rows), labels(rows)
    whole = plan.total // plan.context * plan.context
    parts = []
    for part in (slice(0, whole), slice(whole, plan.total)):
        if ids[part].size:
            length = min(plan.context, ids[part].size)
            arrays = tuple(x[part].reshape(-1, length) for x in (ids, targets))
            parts.append(Part(arrays, _count(arrays[1])))
    return parts


def padded(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return padded tokens and labels, in parts of at most the tokens of the batch with padding."""
    groups: list[list[np.ndarray]] = [[]]
    longest = 0
    for row in rows:
        longest = max(longest, _rounded(len(row)))
        if groups[-1] and longest * (len(groups[-1]) + 1) > plan.total:
            groups.append([])
            longest = _rounded(len(row))
        groups[-1].append(row)
    return _padded_parts(groups)


def padded_sorted(plan: Plan, rows: list[np.ndarray]) -> list[Part]:
    """Return parts of documents of similar lengths that cost the least in all.

    The cost of a part is its number of tokens with padding, plus `PART_TOKENS`.
    """
    rows = sorted(rows, key=len, reverse=True)
    # The least cost of the first rows, and the row at which their last part begins.
    costs, begins = [0], [0]
    for end in range(1, len(rows) + 1):
        options = [
            (costs[i] + _rounded(len(rows[i])) * (end - i) + PART_TOKENS, i)
            for i in range(end)
            if i == end - 1 or _rounded(len(rows[i])) * (end - i) <= plan.total
        ]
        cost, begin = min(options)
        costs.append(cost)
        begins.append(begin)
    groups, end = [], len(rows)
    while end:
        groups.append(rows[begins[end] : end])
        end = begins[end]
    return _padded_parts(groups[::-1])


def _rounded(length: int) -> int:
    """Return a length rounded up to a multiple of 8."""
    return -(-length // 8) * 8


def _padded_parts(groups: list[list[np.ndarray]]) -> list[Part]:
    parts = []
    for group in groups:
        ids = np.zeros((len(group), _rounded(max(map(len, group)))), np.int64)
        targets = np.full(ids.shape, IGNORED)
        for i, row in enumerate(group):
            ids[i, : len(row)], targets[i, : len(row) - 1] = row, row[1:]
        parts.append(Part((ids, targets), _count(targets)))
    return [part for part in parts if part.targets]


# --- losses ---
def ragged_loss(plan: Plan, head: Head) -> Loss:
    """Return the loss on scree; its own linear cross-entropy takes the place of `head`."""
    # Enough logits to compute them once. For 1.2B, 2,048 tokens take 1% less time than 1,366.
    max_logits = plan.size.vocabulary * max(2048, -(-plan.total // 12))

    def loss(p: dict[str, Any], ids: Any, targets: Any, offsets: Any) -> Any:
        x = models.ragged(p, plan.size, ids, offsets, plan.context, plan.recompute)
        return scree.linear_cross_entropy(
            x, p["embedding"], x.with_values(targets), ignore_index=IGNORED, max_logits=max_logits
        )

    return loss


def _plain_layer(plan: Plan, attend: Attend) -> Callable[..., Any]:
    return partial(models.plain_layer, plan.size, attend, plan.recompute == "activations")


def _plain(
    plan: Plan, p: dict[str, Any], ids: Any, positions: Any, run_layer: Callable[..., Any]
) -> Any:
    return models.plain(p, plan.size, ids, positions, run_layer, plan.recompute == "layers")


def _varlen_loss(make_attend: Callable[[Plan, Any], Attend]) -> Callable[[Plan, Head], Loss]:
    def make_loss(plan: Plan, head: Head) -> Loss:
        def loss(p: dict[str, Any], ids: Any, targets: Any, offsets: Any, positions: Any) -> Any:
            run_layer = _plain_layer(plan, make_attend(plan, offsets))
            x = _plain(plan, p, ids, positions, run_layer)
            return head(x, p["embedding"], targets)

        return loss

    return make_loss


def _repeated(plan: Plan, *arrays: Any) -> Any:
    repeats = plan.size.heads // plan.size.kv_heads
    return tuple(x.repeat_interleave(repeats, -2) if repeats > 1 else x for x in arrays)


def _varlen_attn(plan: Plan, offsets: Any) -> Attend:
    """PyTorch's attention of packed rows."""
    from torch.nn.attention.varlen import varlen_attn

    names = signature(varlen_attn).parameters
    options: dict[str, Any] = (
        {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    )
    is_grouped = "enable_gqa" in names and plan.size.heads != plan.size.kv_heads
    if is_grouped:
        options["enable_gqa"] = True

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not is_grouped:
            k, v = _repeated(plan, k, v)
        return varlen_attn(q, k, v, offsets, offsets, plan.context, plan.context, **options)

    return attend


def _aten_flash(plan: Plan, offsets: Any) -> Attend:
    """FlashAttention-2 by PyTorch's own operator."""
    import torch

    def attend(q: Any, k: Any, v: Any) -> Any:
        lengths = offsets, offsets, plan.context, plan.context
        out = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False)
        return out[0]

    return attend


def _flash(module: str) -> Callable[[Plan, Any], Attend]:
    def make_attend(plan: Plan, offsets: Any) -> Attend:
        run = import_module(module).flash_attn_varlen_func

        def attend(q: Any, k: Any, v: Any) -> Any:
            out = run(
                q, k, v,
                cu_seqlens_q=offsets, cu_seqlens_k=offsets,
                max_seqlen_q=plan.context, max_seqlen_k=plan.context, causal=True,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        return attend

    return make_attend


def _flash2(plan: Plan, offsets: Any) -> Attend:
    return (_flash("flash_attn") if importable("flash_attn.bert_padding") else _aten_flash)(
        plan, offsets
    )


def dense_loss(plan: Plan, head: Head) -> Loss:
    """Return the loss of padded rows, or of windows, by PyTorch's causal attention."""
    import torch
    import torch.nn.functional as F

    def attend(*qkv: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        is_grouped = plan.size.heads != plan.size.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    layer = _plain_layer(plan, attend)
    run_layer: Callable[..., Any] = layer
    if plan.compiles_layers:
        compiled = torch.compile(lambda *arguments: layer(*arguments))

        def run_layer(weights: Any, x: Any, *angles: Any) -> Any:
            torch._dynamo.maybe_mark_dynamic(x, [0, 1])
            for angle in angles:
                torch._dynamo.maybe_mark_dynamic(angle, 0)
            return compiled(weights, x, *angles)

    def loss(p: dict[str, Any], ids: Any, targets: Any) -> Any:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = _plain(plan, p, ids, positions, run_layer)
        return head(x, p["embedding"], targets)

    return loss


def flex_loss(plan: Plan, head: Head) -> Loss:
    """Return the loss of one window with document masks by FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention = torch.compile(flex_attention, dynamic=False)
    make_mask = torch.compile(create_block_mask, dynamic=False)

    def loss(p: dict[str, Any], ids: Any, targets: Any, positions: Any, documents: Any) -> Any:
        def is_visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (documents[i] == documents[j]) & (i >= j)

        mask = make_mask(is_visible, None, None, plan.total, plan.total, device=ids.device.type)

        def attend(*qkv: Any) -> Any:
            q, k, v = (x.transpose(0, 1)[None] for x in qkv)
            is_grouped = plan.size.heads != plan.size.kv_heads
            out = attention(q, k, v, block_mask=mask, enable_gqa=is_grouped)
            return out[0].transpose(0, 1)

        x = _plain(plan, p, ids, positions, _plain_layer(plan, attend))
        return head(x, p["embedding"], targets)

    return loss


#: Name -> form, scree first. The reference of the loss curves is "padded sorted".
FORMS: dict[str, Form] = {
    "scree": Form(packed, ragged_loss),
    "scree JAX": Form(packed, ragged_loss, modules=("jax", "optax"), on_jax=True),
    "padded": Form(padded, dense_loss, changes_shape=True),
    "padded sorted": Form(padded_sorted, dense_loss, changes_shape=True),
    "windows": Form(windows, dense_loss),
    "windows flex_attention": Form(with_documents, flex_loss, needs_cuda=True),
    "varlen_attn": Form(packed_with_positions, _varlen_loss(_varlen_attn), needs_cuda=True),
    "FA2": Form(packed_with_positions, _varlen_loss(_flash2), needs_cuda=True),
    "FA3": Form(
        packed_with_positions,
        _varlen_loss(_flash("flash_attn_interface")),
        modules=("flash_attn_interface",),
        needs_cuda=True,
    ),
    "FA4": Form(
        packed_with_positions,
        _varlen_loss(_flash("flash_attn.cute")),
        modules=("flash_attn.cute",),
        needs_cuda=True,
    ),
}
REFERENCE = "padded sorted"


def unavailable(form: Form, size: Size, device: str) -> str | None:
    """Return the reason why a form cannot run, or None."""
    if form.needs_cuda and device != "cuda":
        return "runs on CUDA devices only"
    if form.on_jax and size.positions:
        return "trains Llama-like models only"
    absent = [module for module in form.modules if not importable(module)]
    if absent:
        return f"{' and '.join(absent)} cannot be imported"
    if form.on_jax:
        import jax

        if jax.default_backend() != {"cuda": "gpu"}.get(device, device):
            return f"JAX runs on {jax.default_backend()} here"
        # Loads the kernels too, before a function is traced.
        scree.namespace(jax.numpy.zeros(1))
        if device == "cuda" and not any(x.provider == "triton_jax" for x in kernels("attention")):
            return "no kernels for JAX are registered; install scree again, or torch and Triton"
    return None
