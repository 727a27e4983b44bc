"""Collectives of torch.distributed with gradients of the sum of the losses of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .pieces import KeyPlan, RemotePlan

#: Per rank, in the order of its tokens, its runs (start, length) of the tokens of the whole rows.
TokenRuns = list[list[tuple[int, int]]]
#: Bytes of the elements in which strided arrays are copied.
WORD_BYTES = 8
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

    def attend_to_heads(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        runs: TokenRuns,
        parts: Parts,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the log-sum-exp of attention whose ranks exchange heads for tokens.

        Without `return_lse` the log-sum-exp is None.
        """
        return _AttentionOfHeads.apply(q, k, v, runs, parts, self, return_lse)

    def tokens_of_all_ranks(self, x: torch.Tensor, runs: TokenRuns) -> torch.Tensor:
        """Return the tokens of the whole rows for this rank's part of the heads.

        (own tokens, heads, dim) becomes (tokens, heads / size, dim).
        """
        return _SwapForTokens.apply(x, runs, self)

    def heads_of_all_ranks(
        self, arrays: list[torch.Tensor], runs: TokenRuns
    ) -> tuple[torch.Tensor, ...]:
        """Return all heads for this rank's tokens, per array: the inverse of `tokens_of_all_ranks`."""
        return _SwapForHeads.apply(runs, self, *arrays)


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
        received, work = _start_all_to_all(_pack([k, v], plan), plan, ctx.shapes, group)
        work.wait()
        return tuple(_join_keys([k, v], received, plan, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, group, shapes = ctx.plan, ctx.group, ctx.shapes
        options: Any = {"dtype": _wide(grads[0].dtype), "device": grads[0].device}
        totals = [torch.zeros(shape, **options) for shape in shapes]
        flat = torch.zeros(_width(shapes) * sum(plan.received), **options)
        parts = _split(flat, plan, shapes)
        for total, views, grad in zip(totals, parts, grads, strict=True):
            # One addition after the other, so their order is fixed.
            for (rank, start, length), tokens in _key_runs(plan, grad):
                target = total if rank == group.rank else views[rank]
                target.narrow(0, start, length).add_(tokens)
        returned, work = _start_all_to_all(flat.to(grads[0].dtype), plan, shapes, group, back=True)
        work.wait()
        _add_returned(totals, returned, plan)
        return *(x.to(grads[0].dtype) for x in totals), None, None


class Parts(Protocol):
    """The attention that `Group.attend_to_parts` runs on own keys and on received keys.

    `Group.attend_to_heads` runs it on whole rows, which count as own keys.

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
        received, work = _start_all_to_all(_pack([k, v], plan), plan, shapes, group)
        out, lse = parts.attend(q, k, v, True)
        work.wait()
        keys, values = _join_keys([k, v], received, plan, group)
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
        flat = _sum_received(grads, plan, shapes)
        returned, work = _start_all_to_all(flat, plan, shapes, group, back=True)
        dq, dk, dv = parts.gradients(q, k, v, out, lse, dout, dlse, True)
        if dq_part is not None:
            for run, tokens in _runs(dq, plan.queries, dq_part):
                run.add_(tokens)
        work.wait()
        totals = [dk, dv]
        if group.size > 2:  # sums of more than two numbers are rounded once
            totals = [x.to(_wide(x.dtype)) for x in totals]
        _add_returned(totals, returned, plan)
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


def _pack(arrays: list[torch.Tensor], plan: KeyPlan) -> torch.Tensor:
    """Return the tokens that other ranks need, flat: per rank, the runs of each array in turn."""
    parts = [x.narrow(0, *run) for runs in plan.sent for x in arrays for run in runs]
    return _join(parts) if parts else arrays[0].new_empty(0)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of (tokens, heads, dim) arrays, joined and flat."""
    parts = [x.flatten(1) for x in parts]
    if any(x.shape[1] != parts[0].shape[1] for x in parts):
        return torch.cat([x.reshape(-1) for x in parts])
    dtype = parts[0].dtype
    # One call, because views and copies of each part take more host time than the copies.
    return torch.cat(_in_words(*parts)).view(dtype).view(-1)


def _join_keys(
    arrays: list[torch.Tensor], received: torch.Tensor, plan: KeyPlan, group: Group
) -> list[torch.Tensor]:
    """Return the keys of a plan per array, from the tokens of this rank and from other ranks.

    A single run of received tokens is not copied.
    """
    shapes = [x.shape for x in arrays]
    if len(plan.keys) == 1 and plan.keys[0][0] != group.rank:
        rank, start, length = plan.keys[0]
        return [views[rank].narrow(0, start, length) for views in _split(received, plan, shapes)]
    total = sum(length for _, _, length in plan.keys)
    joined = [x.new_empty(total, *x.shape[1:]) for x in arrays]
    received, *words = _in_words(received, *arrays, *joined)
    arrays, targets = words[: len(arrays)], words[len(arrays) :]
    parts = _split(received, plan, [x.shape for x in arrays])
    for x, views, target in zip(arrays, parts, targets, strict=True):
        for (rank, start, length), tokens in _key_runs(plan, target):
            source = x if rank == group.rank else views[rank]
            tokens.copy_(source.narrow(0, start, length))
    return joined


def _add_returned(totals: list[torch.Tensor], returned: torch.Tensor, plan: KeyPlan) -> None:
    """Add the gradients that other ranks return to the gradients of this rank's tokens."""
    at = 0
    for runs in plan.sent:
        for x in totals:
            for run in runs:
                tokens = x.narrow(0, *run)
                tokens.add_(returned.narrow(0, at, tokens.numel()).view(tokens.shape))
                at += tokens.numel()


def _sum_received(grads: Any, plan: RemotePlan, shapes: Any) -> torch.Tensor:
    """Return the gradients of the received tokens, flat; `grads` are gradients of the joined keys."""
    dtype = grads[0].dtype
    if plan.is_partition and plan.keys:
        # Per rank, the runs of each array in the order of the received tokens.
        runs = [list(_key_runs(plan, x)) for x in grads]
        order = sorted(range(len(plan.keys)), key=plan.keys.__getitem__)
        return _join(
            [
                part[i][1]
                for rank in range(len(plan.received))
                for part in runs
                for i in order
                if plan.keys[i][0] == rank
            ]
        )
    flat = torch.zeros(
        _width(shapes) * sum(plan.received), dtype=_wide(dtype), device=grads[0].device
    )
    for views, x in zip(_split(flat, plan, shapes), grads, strict=True):
        for (rank, start, length), tokens in _key_runs(plan, x):
            views[rank].narrow(0, start, length).add_(tokens)
    return flat.to(dtype)


def _key_runs(
    plan: KeyPlan, x: torch.Tensor
) -> Iterator[tuple[tuple[int, int, int], torch.Tensor]]:
    """Yield each run (rank, start, length) of a plan's keys with its tokens among the joined keys `x`."""
    yield from zip(plan.keys, x.split_with_sizes([length for _, _, length in plan.keys]))


def _runs(
    target: torch.Tensor, runs: list[tuple[int, int]], x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each run (start, length) of `target` with its tokens among the joined tokens `x`."""
    parts = x.split_with_sizes([length for _, length in runs])
    for run, tokens in zip(runs, parts, strict=True):
        yield target.narrow(0, *run), tokens


class _AttentionOfHeads(torch.autograd.Function):
    """Attention of whole rows for a part of the heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        runs: TokenRuns,
        parts: Parts,
        group: Group,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shapes = [(x.shape[1] // group.size, x.shape[2]) for x in (q, k, v)]
        tokens = _swap_for_tokens([q, k, v], runs, group)
        own_q, own_k, own_v = _split_heads(tokens, shapes)
        out, lse = parts.attend(own_q, own_k, own_v, True)
        ctx.save_for_backward(tokens, out, lse)
        ctx.runs, ctx.parts, ctx.group, ctx.shapes = runs, parts, group, shapes
        ctx.return_lse = return_lse
        ctx.set_materialize_grads(False)
        if not return_lse:
            return _swap_for_heads([out], runs, group)[0], None
        out, lse = _swap_for_heads([out, lse], runs, group)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        tokens, out, lse = ctx.saved_tensors
        runs, group = ctx.runs, ctx.group
        count = sum(length for _, length in runs[group.rank])
        if dout is None:
            dout = out.new_zeros(count, group.size * out.shape[1], out.shape[2])
        dout = _swap_for_tokens([dout], runs, group).view(out.shape)
        if ctx.return_lse:
            # The losses of other ranks may use the log-sum-exp, so all ranks exchange its gradient.
            if dlse is None:
                dlse = lse.new_zeros(count, group.size * lse.shape[1])
            dlse = _swap_for_tokens([dlse], runs, group)
        q, k, v = _split_heads(tokens, ctx.shapes)
        grads = ctx.parts.gradients(q, k, v, out, lse, dout, dlse, True)
        return *_swap_for_heads(grads, runs, group), None, None, None, None


def _split_heads(x: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return views (tokens, heads, dim) of joined heads (tokens, width)."""
    parts = x.split([heads * dim for heads, dim in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


class _SwapForTokens(torch.autograd.Function):
    """Exchange heads for tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runs: TokenRuns, group: Group) -> torch.Tensor:
        ctx.arguments = runs, group
        tokens = _swap_for_tokens([x], runs, group)
        return tokens.view(-1, x.shape[1] // group.size, *x.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _swap_for_heads([grad], *ctx.arguments)[0], None, None


class _SwapForHeads(torch.autograd.Function):
    """Exchange tokens for heads; all ranks exchange the gradients of all arrays."""

    @staticmethod
    def forward(
        ctx: Any, runs: TokenRuns, group: Group, *arrays: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = runs, group
        return tuple(_swap_for_heads(arrays, runs, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        runs, group = ctx.arguments
        tokens = [
            _swap_for_tokens([x], runs, group).view(-1, x.shape[1] // group.size, *x.shape[2:])
            for x in grads
        ]
        return None, None, *tokens


def _swap_for_tokens(arrays: list[torch.Tensor], runs: TokenRuns, group: Group) -> torch.Tensor:
    """Exchange the heads of all ranks for the tokens of the whole rows.

    Return (tokens, width): this rank's heads of all arrays (own tokens, heads, ...), along the last axis.
    """
    own, size = group.rank, group.size
    count, lengths = arrays[0].shape[0], [length for _, length in runs[own]]
    widths = [math.prod(x.shape[1:]) // size for x in arrays]
    by_rank = [x.reshape(count, size, width) for x, width in zip(arrays, widths, strict=True)]
    tokens = arrays[0].new_empty(sum(n for part in runs for _, n in part), sum(widths))
    # Tokens arrive at their places in the whole rows.
    received = [[tokens.narrow(0, *run) for run in part] for part in runs]
    words, *by_rank = _in_words(tokens, *by_rank)
    widths = [x.shape[2] for x in by_rank]
    sent: list[Any] = [()] * size
    for rank in range(size):
        if rank != own:
            packed = words.new_empty(count, words.shape[1])
            for column, x in zip(packed.split_with_sizes(widths, 1), by_rank, strict=True):
                column.copy_(x[:, rank])
            sent[rank] = packed.view(tokens.dtype).split_with_sizes(lengths)
    works = _start_exchange(sent, received, group)
    # These copies run during the exchange.
    for column, x in zip(words.split_with_sizes(widths, 1), by_rank, strict=True):
        for run, part in _runs(column, runs[own], x[:, own]):
            run.copy_(part)
    for work in works:
        work.wait()
    return tokens


def _swap_for_heads(arrays: Any, runs: TokenRuns, group: Group) -> list[torch.Tensor]:
    """Exchange tokens of the whole rows for all heads of this rank's tokens, for each array.

    The inverse of `_swap_for_tokens`: (tokens, heads / size, ...) becomes (own tokens, heads, ...).
    """
    own, size = group.rank, group.size
    lengths = [length for _, length in runs[own]]
    count = sum(lengths)
    arrays = [x.contiguous() for x in arrays]
    sent = [[x.narrow(0, *run) for x in arrays for run in part] for part in runs]
    parts = [x.new_empty(size, count, *x.shape[1:]) for x in arrays]
    received = [
        [run for x in parts for run in x[rank].split_with_sizes(lengths)] for rank in range(size)
    ]
    works = _start_exchange(sent, received, group)
    results = [x.new_empty(count, size, *x.shape[1:]) for x in arrays]
    words = [_in_words(*x) for x in zip(arrays, parts, results, strict=True)]
    # These copies run during the exchange.
    for x, _, result in words:
        for run, part in _runs(x, runs[own], result[:, own]):
            part.copy_(run)
    for work in works:
        work.wait()
    for _, part, result in words:
        for rank in range(size):
            if rank != own:
                result[:, rank].copy_(part[rank])
    return [x.flatten(1, 2) for x in results]


def _start_exchange(sent: Any, received: Any, group: Group) -> list[Any]:
    """Start to send lists of contiguous tensors to each rank, and to receive them; return handles."""
    operations = []
    for rank in range(group.size):
        if rank != group.rank:
            for operation, tensors in ((dist.isend, sent[rank]), (dist.irecv, received[rank])):
                operations += [
                    dist.P2POp(operation, x, group=group.group, group_peer=rank) for x in tensors
                ]
    return dist.batch_isend_irecv(operations)


def _in_words(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the arrays with elements of a word if all have them, or else the arrays.

    A thread of PyTorch's kernel for strided copies copies one element at a time.
    """
    if all(map(_has_words, arrays)):
        return [x.view(torch.int64) for x in arrays]
    return [*arrays]


def _has_words(x: torch.Tensor) -> bool:
    """Return whether all runs along the last axis consist of aligned words."""
    count = WORD_BYTES // x.element_size()
    sizes = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return (
        x.stride(-1) == 1 and x.data_ptr() % WORD_BYTES == 0 and not any(n % count for n in sizes)
    )


def _width(shapes: Any) -> int:
    """Return the number of elements per token, summed over the arrays."""
    return sum(math.prod(shape[1:]) for shape in shapes)


def _narrow(x: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """Return runs (start, length) of tokens, joined: a view of a single run."""
    parts = [x.narrow(0, *run) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
