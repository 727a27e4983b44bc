"""Functions that are linear in what they move, with gradients of every order, for eager and for compiled code.

The gradient of such a function is another one of them, so that a row of the table `LINEAR` is all that a function needs:
autograd and `torch.compile` hear of all of them in one way.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator
from .concat import join, unjoin
from .gather import keep, put, select, take, unkeep, unselect
from .padding import pad, unpad
from .scatter_add import add
from .strided_copy import resized


class _Linear(NamedTuple):
    """A function that is linear in its first argument.

    `gradient(f, dy, shape, *args)` is that of an x of this shape, by the functions `f`; `empty(x, *args)` shows the result.
    """

    run: Callable[..., Any]
    gradient: Callable[..., torch.Tensor]
    empty: Callable[..., Any]


LINEAR = {
    "pad": _Linear(
        pad,
        lambda f, dy, shape, offsets, dim, length, left, *_: f.unpad(
            dy, offsets, dim, shape[dim], left
        ),
        lambda x, offsets, dim, length, left, fill, marks: (
            x.new_empty((offsets.shape[0] - 1, *resized(x.shape, dim, length))),
            x.new_empty((offsets.shape[0] - 1, length) if marks else (0,), dtype=torch.bool),
        ),
    ),
    "unpad": _Linear(
        unpad,
        lambda f, dy, shape, offsets, dim, total, left: f.pad(
            dy, offsets, dim, shape[dim + 1], left, 0, False
        )[0],
        lambda x, offsets, dim, total, left: x.new_empty(resized(x.shape, dim + 1, total)[1:]),
    ),
    "take": _Linear(
        take,
        lambda f, dy, shape, index, distinct: (f.put if distinct else f.add)(dy, index, shape[0]),
        lambda x, index, *_: x.new_empty((index.shape[0], *x.shape[1:])),
    ),
    "put": _Linear(
        put,
        lambda f, dy, shape, index, size: f.take(dy, index, True),
        lambda x, index, size: x.new_empty((size, *x.shape[1:])),
    ),
    "keep": _Linear(
        keep,
        lambda f, dy, shape, index, kept: f.unkeep(dy, index, kept),
        lambda x, index, kept: x.new_empty((kept.shape[0], *x.shape[1:])),
    ),
    "unkeep": _Linear(
        unkeep,
        lambda f, dy, shape, index, kept: f.keep(dy, index, kept),
        lambda dy, index, kept: dy.new_empty((index.shape[0], *dy.shape[1:])),
    ),
    "add": _Linear(
        add,
        lambda f, dy, shape, index, size: f.take(dy, index, False),
        lambda x, index, size: x.new_empty((size, *x.shape[1:])),
    ),
    "select": _Linear(
        select,
        lambda f, dy, shape, offsets, starts, dim, total, step, distinct, *_: f.unselect(
            dy, shape, offsets, starts, dim, step, distinct
        ),
        lambda x, offsets, starts, dim, total, *_: x.new_empty(resized(x.shape, dim, total)),
    ),
    "unselect": _Linear(
        unselect,
        lambda f, dy, shape, _, offsets, starts, dim, step, distinct: f.select(
            dy, offsets, starts, dim, shape[dim], step, distinct
        ),
        lambda dy, shape, *_: dy.new_empty(shape),
    ),
}
_EAGER = (
    SimpleNamespace()
)  # the functions of this table for eager code, which are differentiable in their turn
_OPERATORS = SimpleNamespace()  # and for compiled code


def _record_map(ctx, x, name, *args):
    ctx.set_materialize_grads(False)
    ctx.name, ctx.shape, ctx.args = name, x.shape, args
    out = LINEAR[name].run(x, *args)
    if isinstance(out, tuple):
        ctx.mark_non_differentiable(*out[1:])
    return out


def _map_gradient(ctx, dy, *_):
    return (
        LINEAR[ctx.name].gradient(_EAGER, dy, ctx.shape, *ctx.args),
        None,
        *(None,) * len(ctx.args),
    )


_differentiable_map = differentiable("Map", _record_map, _map_gradient, twice_differentiable=True)


def _make_operator(name: str) -> None:
    linear = LINEAR[name]

    def keep(ctx, inputs, output):
        x, *args = inputs
        ctx.shape, ctx.rest = (
            x.shape,
            [None if isinstance(arg, torch.Tensor) else arg for arg in args],
        )
        ctx.tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.tensors))

    def differentiate(ctx, dy, *_):
        args = list(ctx.rest)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors):
            args[i] = tensor
        return (linear.gradient(_OPERATORS, dy, ctx.shape, *args),)

    operator = define_operator(name, linear.run, linear.empty, save=keep, backward=differentiate)
    setattr(_OPERATORS, name, operator)
    setattr(_EAGER, name, partial(_eager, name))


def _eager(name: str, x: torch.Tensor, *args: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        return _differentiable_map(x, name, *args)
    return LINEAR[name].run(x, *args)


def apply(name: str, x: torch.Tensor, *args: Any) -> Any:
    """A function of the table, by its name."""
    return (
        getattr(_OPERATORS, name)(x, *args)
        if torch.compiler.is_compiling()
        else _eager(name, x, *args)
    )


for _name in LINEAR:
    _make_operator(_name)


def _record_join(ctx, offsets, dim, *xs):
    ctx.offsets, ctx.dim, ctx.totals = offsets, dim, [x.shape[dim] for x in xs]
    return join(xs, offsets, dim)


def _join_gradient(ctx, dy):
    return None, None, *_differentiable_unjoin(dy, ctx.offsets, ctx.totals, ctx.dim)


_differentiable_join = differentiable(
    "Join", _record_join, _join_gradient, twice_differentiable=True
)


def _record_unjoin(ctx, dy, offsets, totals, dim):
    ctx.offsets, ctx.dim = offsets, dim
    return tuple(unjoin(dy, offsets, totals, dim))


def _unjoin_gradient(ctx, *dxs):
    return _differentiable_join(ctx.offsets, ctx.dim, *dxs), None, None, None


_differentiable_unjoin = differentiable(
    "Unjoin", _record_unjoin, _unjoin_gradient, twice_differentiable=True
)


def _join_fake(xs, offsets, dim):
    return xs[0].new_empty(resized(xs[0].shape, dim, sum(x.shape[dim] for x in xs)))


def _unjoin_fake(dy, offsets, totals, dim):
    return [dy.new_empty(resized(dy.shape, dim, total)) for total in totals]


def _keep_joined(ctx, inputs, output):
    xs, offsets, ctx.dim = inputs
    ctx.totals = [x.shape[ctx.dim] for x in xs]
    ctx.save_for_backward(*offsets)


def _join_operator_gradient(ctx, dy):
    return _unjoin_op(dy, ctx.saved_tensors, ctx.totals, ctx.dim), [None] * len(ctx.totals)


_join_op = define_operator(
    "join", join, _join_fake, save=_keep_joined, backward=_join_operator_gradient
)
_unjoin_op = define_operator("unjoin", unjoin, _unjoin_fake)


def join_rows(xs: list[torch.Tensor], offsets: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Row i of each of up to four arrays end to end, with a gradient."""
    if torch.compiler.is_compiling():
        return _join_op(xs, offsets, dim)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _differentiable_join(offsets, dim, *xs)
    return join(xs, offsets, dim)
