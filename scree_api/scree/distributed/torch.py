"""Collectives of torch.distributed with gradients: the loss is the sum of the losses of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .pieces import KeyPlan


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

    @torch.compiler.disable
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return (size, ...) the equally shaped tensors of all ranks."""
        return _AllGather.apply(x, self)

    @torch.compiler.disable
    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, without gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    @torch.compiler.disable
    def exchange(self, x: torch.Tensor, indices: ExchangeIndices) -> torch.Tensor:
        """Return (keys, ...) the keys of all pieces of this rank."""
        return _Exchange.apply(x, indices, self)


class ExchangeIndices(NamedTuple):
    """A `KeyPlan` with its indices on the device."""

    plan: KeyPlan
    send_index: torch.Tensor
    key_index: torch.Tensor
    layers: list[torch.Tensor | None]  # positions of the keys of each layer; None for all

    @classmethod
    def from_plan(cls, plan: KeyPlan, device: Any) -> ExchangeIndices:
        """Copy the indices of a plan to a device."""

        def move(x: Any) -> torch.Tensor:
            return torch.from_numpy(x).to(device)

        layers = [None] if len(plan.layers) < 2 else [move(x) for x in plan.layers]
        return cls(plan, move(plan.send_index), move(plan.key_index), layers)


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
    """Send tokens to the ranks that need them, and gather the keys of each piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: ExchangeIndices, group: Group) -> torch.Tensor:
        ctx.indices, ctx.group, ctx.own = indices, group, x.shape[0]
        plan = indices.plan
        buffer = x.new_empty((ctx.own + sum(plan.receive_counts), *x.shape[1:]))
        buffer[: ctx.own] = x
        dist.all_to_all_single(
            buffer[ctx.own :],
            x.index_select(0, indices.send_index),
            plan.receive_counts,
            plan.send_counts,
            group=group.group,
        )
        return buffer.index_select(0, indices.key_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        indices, own, plan = ctx.indices, ctx.own, ctx.indices.plan
        wide = _wide(grad.dtype)
        shape = (own + sum(plan.receive_counts), *grad.shape[1:])
        buffer = torch.zeros(shape, dtype=wide, device=grad.device)
        # In a layer no index comes twice, so the order of the additions is fixed.
        for layer in indices.layers:
            index, part = indices.key_index, grad
            if layer is not None:
                index, part = index.index_select(0, layer), part.index_select(0, layer)
            buffer.index_add_(0, index, part.to(wide))
        sent = grad.new_empty((sum(plan.send_counts), *grad.shape[1:]))
        dist.all_to_all_single(
            sent,
            buffer[own:].to(grad.dtype),
            plan.send_counts,
            plan.receive_counts,
            group=ctx.group.group,
        )
        total, start = buffer[:own], 0
        for count in plan.send_counts:
            if count:
                end = start + count
                total.index_add_(0, indices.send_index[start:end], sent[start:end].to(wide))
                start = end
        return total.to(grad.dtype), None, None
