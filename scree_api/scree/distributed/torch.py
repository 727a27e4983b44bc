"""Collectives of torch.distributed with gradients: the loss is the sum of the losses of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .pieces import WHOLE, KeyPlan

#: Decorator of a function at which a compiler breaks the graph.
not_compiled = torch.compiler.disable


class Group:
    """The ranks over which rows are cut.

    Attributes
    ----------
    group
        Process group of torch.distributed.
    rank, size
        Index of this process in the group, and the number of processes.
    """

    def __init__(self, mesh: Any) -> None:
        if isinstance(mesh, dist.device_mesh.DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh: expected one dimension, got {mesh.ndim}, {mesh.mesh_dim_names}; "
                    'select one, as mesh["cp"]'
                )
            mesh = mesh.get_group()
        elif not isinstance(mesh, dist.ProcessGroup):
            raise TypeError(
                "mesh: expected a torch.distributed DeviceMesh of one dimension or a ProcessGroup, "
                f"got {type(mesh).__name__}"
            )
        self.group = mesh
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)

    @not_compiled
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return (size, ...) the equally shaped tensors of all ranks."""
        return _AllGather.apply(x, self)

    @not_compiled
    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, without gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def exchange(
        self, k: torch.Tensor, v: torch.Tensor, plan: KeyPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all pieces of this rank, (keys, num_kv_heads, dim)."""
        return _Exchange.apply(k, v, plan, self)

    def tokens_of_all_ranks(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Exchange heads for tokens: (own tokens, heads, dim) to (tokens, heads / size, dim).

        The tokens of all ranks are in the order of the ranks; `counts` has their numbers.
        """
        return _SwapHeads.apply(x, counts, self, True)

    def heads_of_all_ranks(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Exchange tokens for heads, the inverse of `tokens_of_all_ranks`."""
        return _SwapHeads.apply(x, counts, self, False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are added."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((group.size, *x.shape))
        dist.all_gather(list(out.unbind(0)), x.contiguous(), group=group.group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.to(_wide(grad.dtype), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group.group)
        return total[ctx.group.rank].to(grad.dtype), None


class _Exchange(torch.autograd.Function):
    """Send the tokens that other ranks need, and join the runs of keys of each piece."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, plan: KeyPlan, group: Group
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.group, ctx.shapes = plan, group, (k.shape, v.shape)
        cut = [_narrow(x, plan.cut) for x in (k, v)]
        sent = [_narrow(x, runs).reshape(-1) for runs in plan.sent for x in cut]
        received = _all_to_all(torch.cat(sent), plan, ctx.shapes, group)
        parts = _split(received, plan, ctx.shapes)
        return tuple(
            _join(x, own, views, plan, group.rank)
            for x, own, views in zip((k, v), cut, parts, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, group, shapes = ctx.plan, ctx.group, ctx.shapes
        options: Any = {"dtype": _wide(grads[0].dtype), "device": grads[0].device}
        num_cut = sum(length for _, length in plan.cut)
        outs = [grad.new_empty(shape) for grad, shape in zip(grads, shapes, strict=True)]
        sums = [torch.zeros((num_cut, *shape[1:]), **options) for shape in shapes]
        flat = torch.zeros(_width(shapes) * sum(plan.received), **options)
        parts = _split(flat, plan, shapes)
        for out, own, views, grad in zip(outs, sums, parts, grads, strict=True):
            at = 0
            # One addition after the other, so their order is fixed.
            for source, start, length in plan.keys:
                part = grad.narrow(0, at, length)
                if source == WHOLE:
                    out.narrow(0, start, length).copy_(part)
                else:
                    target = own if source == group.rank else views[source]
                    target.narrow(0, start, length).add_(part)
                at += length
        returned = _all_to_all(flat.to(grads[0].dtype), plan, shapes, group, back=True)
        at = 0
        for runs in plan.sent:
            for own, shape in zip(sums, shapes, strict=True):
                for start, length in runs:
                    size = length * math.prod(shape[1:])
                    part = returned.narrow(0, at, size).view(length, *shape[1:])
                    own.narrow(0, start, length).add_(part)
                    at += size
        for out, own in zip(outs, sums, strict=True):
            at = 0
            for start, length in plan.cut:
                out.narrow(0, start, length).copy_(own.narrow(0, at, length))
                at += length
        return *outs, None, None


class _SwapHeads(torch.autograd.Function):
    """Exchange heads for tokens or back; the gradient is the opposite exchange."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: list[int], group: Group, to_tokens: bool
    ) -> torch.Tensor:
        ctx.arguments = counts, group, to_tokens
        return _swap_heads(x, counts, group, to_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts, group, to_tokens = ctx.arguments
        return _swap_heads(grad, counts, group, not to_tokens), None, None, None


def _swap_heads(x: torch.Tensor, counts: list[int], group: Group, to_tokens: bool) -> torch.Tensor:
    own, size = counts[group.rank], group.size
    part = math.prod(x.shape[1:]) // (size if to_tokens else 1)  # elements of a token on one rank
    all_sizes, own_sizes = [count * part for count in counts], [own * part] * size
    out = x.new_empty(sum(all_sizes if to_tokens else own_sizes))
    if to_tokens:
        heads = x.shape[1] // size
        by_rank = x.unflatten(1, (size, heads)).movedim(1, 0).contiguous()
        dist.all_to_all_single(out, by_rank.flatten(), all_sizes, own_sizes, group=group.group)
        return out.view(sum(counts), heads, *x.shape[2:])
    dist.all_to_all_single(out, x.contiguous().flatten(), own_sizes, all_sizes, group=group.group)
    return out.view(size, own, *x.shape[1:]).movedim(0, 1).flatten(1, 2)


def _width(shapes: Any) -> int:
    """Return the number of elements of a token of all arrays together."""
    return sum(math.prod(shape[1:]) for shape in shapes)


def _narrow(x: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """Return runs (start, length) of tokens, joined."""
    if len(runs) == 1:
        return x.narrow(0, *runs[0])
    return torch.cat([x.narrow(0, *run) for run in runs]) if runs else x[:0]


def _all_to_all(
    x: torch.Tensor, plan: KeyPlan, shapes: Any, group: Group, back: bool = False
) -> torch.Tensor:
    """Return what the other ranks sent to this one, by rank, or send it back."""
    width = _width(shapes)
    sent = [width * sum(length for _, length in runs) for runs in plan.sent]
    received = [width * count for count in plan.received]
    if back:
        sent, received = received, sent
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group=group.group)
    return out


def _split(flat: torch.Tensor, plan: KeyPlan, shapes: Any) -> list[list[torch.Tensor]]:
    """Return views of the received keys and of the values, per rank."""
    parts: list[list[torch.Tensor]] = [[] for _ in shapes]
    at = 0
    for count in plan.received:
        for views, shape in zip(parts, shapes, strict=True):
            size = count * math.prod(shape[1:])
            views.append(flat.narrow(0, at, size).view(count, *shape[1:]))
            at += size
    return parts


def _join(
    x: torch.Tensor, cut: torch.Tensor, parts: list[torch.Tensor], plan: KeyPlan, rank: int
) -> torch.Tensor:
    """Return the keys of all pieces."""
    sources = {**dict(enumerate(parts)), rank: cut, WHOLE: x}
    runs = [sources[source].narrow(0, start, length) for source, start, length in plan.keys]
    return torch.cat(runs) if runs else x[:0].clone()
