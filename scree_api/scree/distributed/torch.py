"""Collectives of torch.distributed with gradients of the sum of the losses of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .pieces import KeyPlan, RemotePlan

#: The most chunks of heads of an exchange, and the fewest tokens of a batch that is exchanged in chunks.
MAX_CHUNKS, MIN_CHUNKED_TOKENS = 4, 16_384
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
        order: TokenOrder,
        parts: Parts,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the log-sum-exp of attention whose ranks exchange heads for tokens.

        The exchange of some heads runs during attention of other heads. Without `return_lse` the
        log-sum-exp is None.
        """
        return _AttentionOfHeads.apply(q, k, v, order, parts, self, return_lse)

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


class TokenOrder(NamedTuple):
    """The order of the tokens of a batch on the ranks.

    Attributes
    ----------
    counts
        Number of tokens per rank.
    order
        (total,) index of each token of the whole rows among the tokens of all ranks.
    inverse
        (total,) index of each token of all ranks among the tokens of the whole rows.
    """

    counts: list[int]
    order: torch.Tensor
    inverse: torch.Tensor


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
        sent = [_narrow(x, runs).reshape(-1) for runs in plan.sent for x in (k, v)]
        received, work = _start_all_to_all(torch.cat(sent), plan, shapes, group)
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


class _AttentionOfHeads(torch.autograd.Function):
    """Attention of whole rows for a part of the heads, while other heads are exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        order: TokenOrder,
        parts: Parts,
        group: Group,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = _count_chunks(k.shape[1] // group.size, sum(order.counts))
        shapes = [_chunk_shape(x, group, chunks) for x in (q, k, v)]
        swap = _Swap(order, group, chunks)
        received = swap.start_to_tokens([q, k, v])
        saved, outputs = [], []
        for tokens, work in received:
            work.wait()
            own_q, own_k, own_v = _split_heads(tokens.index_select(0, order.order), shapes)
            out, lse = parts.attend(own_q, own_k, own_v, True)
            outputs.append(swap.start_to_heads([out]))
            saved += [own_q, own_k, own_v, out, lse]
        heads = shapes[0][0]
        own_lses = saved[4::5] if return_lse else []
        lses = [swap.start_to_heads([x[..., None]]) for x in own_lses]
        (out,) = swap.finish(outputs, [(heads, v.shape[2])])
        lse = swap.finish(lses, [(heads, 1)])[0][..., 0] if lses else None
        ctx.save_for_backward(*saved)
        ctx.swap, ctx.parts, ctx.shapes = swap, parts, shapes
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        swap, saved, shapes = ctx.swap, ctx.saved_tensors, ctx.shapes
        chunks = [saved[i : i + 5] for i in range(0, len(saved), 5)]
        order, num_heads = swap.order, swap.chunks * swap.group.size * shapes[0][0]
        if dout is None:
            out = chunks[0][3]
            dout = out.new_zeros(order.counts[swap.group.rank], num_heads, out.shape[2])
        received = swap.start_to_tokens([dout])
        dlses: Any = [None] * len(chunks)
        if dlse is not None:
            dlses = swap.start_to_tokens([dlse[..., None]])
        returned = []
        for (q, k, v, out, lse), (tokens, work), with_lse in zip(
            chunks, received, dlses, strict=True
        ):
            work.wait()
            part = tokens.index_select(0, order.order).view(out.shape)
            dlse_part = None
            if with_lse is not None:
                with_lse[1].wait()
                dlse_part = with_lse[0].index_select(0, order.order)
            grads = ctx.parts.gradients(q, k, v, out, lse, part, dlse_part, True)
            returned.append(swap.start_to_heads(grads))
        return *swap.finish(returned, shapes), None, None, None, None


def _count_chunks(kv_heads: int, total: int) -> int:
    """Return into how many chunks an exchange divides the heads of a rank.

    The number of chunks divides `kv_heads`, the key heads of a rank. A batch of few tokens (`total`) has
    one chunk, because the launches of more chunks would take longer than they save.
    """
    if total < MIN_CHUNKED_TOKENS:
        return 1
    return max(x for x in range(1, min(kv_heads, MAX_CHUNKS) + 1) if kv_heads % x == 0)


def _chunk_shape(x: torch.Tensor, group: Group, chunks: int) -> tuple[int, int]:
    """Return the number of heads of a rank per chunk, and the size of a head."""
    return x.shape[1] // (group.size * chunks), x.shape[2]


def _split_heads(x: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return views (tokens, heads, dim) of joined heads (tokens, width)."""
    parts = x.split([heads * dim for heads, dim in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


class _Swap(NamedTuple):
    """Exchanges of heads for tokens and back, in chunks of heads."""

    order: TokenOrder
    group: Group
    chunks: int

    def start_to_tokens(self, arrays: list[torch.Tensor]) -> list[tuple[torch.Tensor, Any]]:
        """Start to exchange heads for tokens.

        Return per chunk the tokens of all ranks, and a handle. The tokens are (tokens, width), with the
        heads of all arrays along the last axis.
        """
        counts, size = self.order.counts, self.group.size
        own = counts[self.group.rank]
        shapes = [_chunk_shape(x, self.group, self.chunks) for x in arrays]
        width = sum(heads * dim for heads, dim in shapes)
        sent = arrays[0].new_empty(self.chunks, size, own, width)
        at = 0
        for x, (heads, dim) in zip(arrays, shapes, strict=True):
            by_rank = x.unflatten(1, (size, self.chunks, heads)).permute(2, 1, 0, 3, 4)
            target = sent.narrow(3, at, heads * dim).unflatten(3, (heads, dim))
            target.copy_(by_rank)
            at += heads * dim
        results = []
        for chunk in sent.unbind(0):
            tokens = chunk.new_empty(sum(counts), width)
            sizes = [count * width for count in counts], [own * width] * size
            results.append((tokens, self._start(tokens, chunk, *sizes)))
        return results

    def start_to_heads(self, arrays: Any) -> tuple[torch.Tensor, Any]:
        """Start the inverse exchange for the heads (tokens, heads, dim) of one chunk.

        Return the received heads, (ranks, tokens of this rank, width), and a handle.
        """
        counts, size = self.order.counts, self.group.size
        parts = [x.flatten(1).index_select(0, self.order.inverse) for x in arrays]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        width, own = sent.shape[1], counts[self.group.rank]
        received = sent.new_empty(size, own, width)
        sizes = [own * width] * size, [count * width for count in counts]
        return received, self._start(received, sent, *sizes)

    def finish(
        self, results: list[tuple[torch.Tensor, Any]], shapes: list[tuple[int, int]]
    ) -> list[torch.Tensor]:
        """Wait for the results of `start_to_heads` of all chunks, and return arrays of all heads."""
        own, size = self.order.counts[self.group.rank], self.group.size
        like = results[0][0]
        arrays = [like.new_empty(own, size, self.chunks, *shape) for shape in shapes]
        for i, (received, work) in enumerate(results):
            work.wait()
            at = 0
            for array, (heads, dim) in zip(arrays, shapes, strict=True):
                part = received.narrow(2, at, heads * dim).unflatten(2, (heads, dim))
                array[:, :, i].copy_(part.transpose(0, 1))
                at += heads * dim
        return [x.flatten(1, 3) for x in arrays]

    def _start(
        self, received: torch.Tensor, sent: torch.Tensor, counts: list[int], sent_counts: list[int]
    ) -> Any:
        """Start an exchange with the numbers of elements to receive from and to send to each rank."""
        flat, sent_flat, group = received.flatten(), sent.flatten(), self.group.group
        return dist.all_to_all_single(
            flat, sent_flat, counts, sent_counts, group=group, async_op=True
        )


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
