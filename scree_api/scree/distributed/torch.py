"""Collectives of torch.distributed with gradients of the sum of the losses of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .pieces import KeyPlan, RemotePlan

#: Decorator of a function at which torch.compile breaks the graph.
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

    @staticmethod
    @not_compiled
    def outside_of_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function outside of compiled graphs: torch.compile breaks the graph here."""
        return function(*arguments)

    def without_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a constant."""
        return x.detach()

    def attend_to_parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RemotePlan, parts: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp of attention to own keys and received keys.

        The exchange runs during attention to the own keys.
        """
        return _AttentionToParts.apply(q, k, v, plan, parts, self)

    def tokens_of_all_ranks(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the tokens of all ranks for this rank's part of the heads.

        (own tokens, heads, dim) becomes (tokens, heads / size, dim), in the order of the ranks.
        `counts` has the number of tokens per rank.
        """
        return _SwapHeads.apply(x, counts, self, True)

    def heads_of_all_ranks(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return all heads for this rank's tokens: the inverse of `tokens_of_all_ranks`."""
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
        sent = [_narrow(x, runs).reshape(-1) for runs in plan.sent for x in (k, v)]
        received, work = _start_all_to_all(torch.cat(sent), plan, ctx.shapes, group)
        work.wait()
        parts = _split(received, plan, ctx.shapes)
        return tuple(
            _join([*_sources(x, views, plan, group)], x)
            for x, views in zip((k, v), parts, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, group, shapes = ctx.plan, ctx.group, ctx.shapes
        options: Any = {"dtype": _wide(grads[0].dtype), "device": grads[0].device}
        totals = [torch.zeros(shape, **options) for shape in shapes]
        flat = torch.zeros(_width(shapes) * sum(plan.received), **options)
        parts = _split(flat, plan, shapes)
        for total, views, grad in zip(totals, parts, grads, strict=True):
            lengths = [length for _, _, length in plan.keys]
            # One addition after the other, so their order is fixed.
            for target, x in zip(_sources(total, views, plan, group), grad.split(lengths)):
                target.add_(x)
        returned, work = _start_all_to_all(flat.to(grads[0].dtype), plan, shapes, group, back=True)
        work.wait()
        _add_returned(totals, returned, plan, shapes)
        return *(x.to(grads[0].dtype) for x in totals), None, None


class Parts(Protocol):
    """The attention that `Group.attend_to_parts` runs on own keys and on received keys.

    q is (queries, num_heads, head_dim), k is (keys, num_kv_heads, head_dim) and v is (keys,
    num_kv_heads, value_dim). Outputs are (queries, num_heads, value_dim), and log-sum-exps are
    (queries, num_heads). `is_local` says whether the keys are own keys.
    """

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_local: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp for some of the keys."""

    def merge(
        self, outputs: list[torch.Tensor], lses: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp for all keys."""

    def gradients(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, is_local: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v; `out` and `lse` are results for all keys."""


class _AttentionToParts(torch.autograd.Function):
    """Attention that exchanges keys, and their gradients, while it computes the own keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, plan: RemotePlan, parts: Parts, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = k.shape, v.shape
        sent = [_narrow(x, runs).reshape(-1) for runs in plan.sent for x in (k, v)]
        received, work = _start_all_to_all(torch.cat(sent), plan, shapes, group)
        _let_collective_start(q.device)
        out, lse = parts.attend(q, k, v, True)
        work.wait()
        keys, values = (
            _join([*_sources(x, views, plan, group)], x)
            for x, views in zip((k, v), _split(received, plan, shapes), strict=True)
        )
        if plan.queries:
            part = parts.attend(_narrow(q, plan.queries), keys, values, False)
            own = _narrow(out, plan.queries), _narrow(lse, plan.queries)
            merged = parts.merge([own[0], part[0]], [own[1], part[1]])
            if plan.queries == [(0, q.shape[0])]:
                out, lse = merged
            else:
                lse = lse.contiguous()
                for whole, x in zip((out, lse), merged, strict=True):
                    for run, tokens in _runs(whole, plan.queries, x):
                        run.copy_(tokens)
        ctx.save_for_backward(q, k, v, keys, values, out, lse)
        ctx.plan, ctx.parts, ctx.group = plan, parts, group
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        plan, parts, group, shapes = ctx.plan, ctx.parts, ctx.group, (k.shape, v.shape)
        dout = torch.zeros_like(out) if dout is None else dout
        dq_part, grads = None, (keys, values)
        if plan.queries:
            queries = [
                x if x is None else _narrow(x, plan.queries) for x in (q, out, lse, dout, dlse)
            ]
            dq_part, *grads = parts.gradients(queries[0], keys, values, *queries[1:], False)
        flat = _sum_runs(grads, plan, shapes)
        returned, work = _start_all_to_all(flat, plan, shapes, group, back=True)
        _let_collective_start(q.device)
        dq, dk, dv = parts.gradients(q, k, v, out, lse, dout, dlse, True)
        if dq_part is not None:
            for run, tokens in _runs(dq, plan.queries, dq_part):
                run.add_(tokens)
        work.wait()
        totals = [dk, dv]
        if group.size > 2:  # sums of more than two numbers are rounded once
            totals = [x.to(_wide(x.dtype)) for x in totals]
        _add_returned(totals, returned, plan, shapes)
        return dq, totals[0].to(k.dtype), totals[1].to(v.dtype), None, None, None


def _start_all_to_all(
    x: torch.Tensor, plan: KeyPlan, shapes: Any, group: Group, back: bool = False
) -> tuple[torch.Tensor, Any]:
    """Start an exchange of tokens, or of their gradients back; return the result and a handle."""
    width = _width(shapes)
    sent = [width * sum(length for _, length in runs) for runs in plan.sent]
    received = [width * count for count in plan.received]
    if back:
        sent, received = received, sent
    out = x.new_empty(sum(received))
    work = dist.all_to_all_single(out, x, received, sent, group=group.group, async_op=True)
    return out, work


def _let_collective_start(device: torch.device) -> None:
    """Delay the next kernels by some microseconds, so that the kernel of a collective begins first.

    Attention occupies all SMs until it ends. If it began before the collective, the collective would
    run after it instead of beside it.
    """
    if device.type != "cuda":
        return
    current, (stream, buffer) = torch.cuda.current_stream(device), _side_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        buffer.zero_()
    current.wait_stream(stream)


@cache
def _side_stream(device: torch.device) -> tuple[torch.cuda.Stream, torch.Tensor]:
    """Return a stream of a device, and memory that kernels on this stream write."""
    # Collectives run on streams of low priority.
    return torch.cuda.Stream(device, priority=-1), torch.empty(1, device=device)


def _sources(
    own: torch.Tensor, received: list[torch.Tensor], plan: KeyPlan, group: Group
) -> Iterator[torch.Tensor]:
    """Yield a view of each run of a plan's keys, in `own` or in the tokens from other ranks."""
    for rank, start, length in plan.keys:
        yield (own if rank == group.rank else received[rank]).narrow(0, start, length)


def _add_returned(
    totals: list[torch.Tensor], returned: torch.Tensor, plan: KeyPlan, shapes: Any
) -> None:
    """Add the gradients that other ranks return to the gradients of this rank's tokens."""
    at = 0
    for runs in plan.sent:
        for total, shape in zip(totals, shapes, strict=True):
            size = sum(length for _, length in runs) * math.prod(shape[1:])
            part = returned.narrow(0, at, size).view(-1, *shape[1:])
            for run, tokens in _runs(total, runs, part):
                run.add_(tokens)
            at += size


def _sum_runs(grads: Any, plan: RemotePlan, shapes: Any) -> torch.Tensor:
    """Return the gradients of the received tokens, flat; `grads` are gradients of joined runs."""
    total, width = sum(plan.received), _width(shapes)
    sources = [part for part, count in enumerate(plan.received) if count]
    if len(plan.keys) == len(sources) == 1 and plan.keys[0][1:] == (0, total):
        return torch.cat([x.reshape(-1) for x in grads])
    dtype = grads[0].dtype
    flat = torch.zeros(width * total, dtype=_wide(dtype), device=grads[0].device)
    for views, x in zip(_split(flat, plan, shapes), grads, strict=True):
        at = 0
        for part, start, length in plan.keys:
            views[part].narrow(0, start, length).add_(x.narrow(0, at, length))
            at += length
    return flat.to(dtype)


def _runs(
    target: torch.Tensor, runs: list[tuple[int, int]], x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return each run (start, length) of `target` with its tokens among the joined tokens `x`."""
    for run, tokens in zip(runs, x.split([length for _, length in runs]), strict=True):
        yield target.narrow(0, *run), tokens


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
    """Return the number of elements per token, summed over the arrays."""
    return sum(math.prod(shape[1:]) for shape in shapes)


def _narrow(x: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """Return runs (start, length) of tokens, joined."""
    return _join([x.narrow(0, *run) for run in runs], x)


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the parts, concatenated: a view of a single part, and no tokens of `like` without parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else like[:0]


def _split(flat: torch.Tensor, plan: KeyPlan, shapes: Any) -> list[list[torch.Tensor]]:
    """Return per array the views of the received tokens, one per rank."""
    parts: list[list[torch.Tensor]] = [[] for _ in shapes]
    at = 0
    for count in plan.received:
        for views, shape in zip(parts, shapes, strict=True):
            size = count * math.prod(shape[1:])
            views.append(flat.narrow(0, at, size).view(count, *shape[1:]))
            at += size
    return parts
