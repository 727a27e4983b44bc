"""Linear-map autograd: gradients of every order for the layout operations, eager and compiled.

The layout operations are linear, so the gradient of each is another entry of `LINEAR_MAPS`. This
module registers every entry of the table with autograd and `torch.compile`.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..runtime.autograd import differentiable, save_args, saved_args
from ..runtime.compile import define_operator, uses_operators
from ..runtime.fallback import falls_back_to
from . import standard
from .concat import concat, split
from .gather import gather, gather_last, scatter_last, scatter_unique, select, select_backward
from .padding import pad, unpad
from .scatter_add import scatter_add
from .strided_copy import resized_shape


class LinearMap(NamedTuple):
    """A function that is linear in its first argument.

    `gradient(f, dy, shape, *args)` computes the gradient of an x of this shape with the functions
    `f`. `empty(x, *args)` returns empty outputs for shape inference.
    """

    run: Callable[..., Any]
    gradient: Callable[..., torch.Tensor]
    empty: Callable[..., Any]


LINEAR_MAPS = {
    "pad": LinearMap(
        pad,
        lambda f, dy, shape, offsets, dim, length, left, *_: f.unpad(
            dy, offsets, dim, shape[dim], left
        ),
        lambda x, offsets, dim, length, left, fill, with_mask: (
            x.new_empty((offsets.shape[0] - 1, *resized_shape(x.shape, dim, length))),
            x.new_empty((offsets.shape[0] - 1, length) if with_mask else (0,), dtype=torch.bool),
        ),
    ),
    "unpad": LinearMap(
        unpad,
        lambda f, dy, shape, offsets, dim, total, left: f.pad(
            dy, offsets, dim, shape[dim + 1], left, 0, False
        )[0],
        lambda x, offsets, dim, total, left: x.new_empty(
            resized_shape(x.shape, dim + 1, total)[1:]
        ),
    ),
    "gather": LinearMap(
        gather,
        lambda f, dy, shape, index, distinct: (f.scatter_unique if distinct else f.scatter_add)(
            dy, index, shape[0]
        ),
        lambda x, index, *_: x.new_empty((index.shape[0], *x.shape[1:])),
    ),
    "scatter_unique": LinearMap(
        scatter_unique,
        lambda f, dy, shape, index, size: f.gather(dy, index, True),
        lambda x, index, size: x.new_empty((size, *x.shape[1:])),
    ),
    "scatter_last": LinearMap(
        scatter_last,
        lambda f, dy, shape, index, kept: f.gather_last(dy, index, kept),
        lambda x, index, kept: x.new_empty((kept.shape[0], *x.shape[1:])),
    ),
    "gather_last": LinearMap(
        gather_last,
        lambda f, dy, shape, index, kept: f.scatter_last(dy, index, kept),
        lambda dy, index, kept: dy.new_empty((index.shape[0], *dy.shape[1:])),
    ),
    "scatter_add": LinearMap(
        scatter_add,
        lambda f, dy, shape, index, size: f.gather(dy, index, False),
        lambda x, index, size: x.new_empty((size, *x.shape[1:])),
    ),
    "select": LinearMap(
        select,
        lambda f, dy, shape, offsets, starts, dim, total, step, distinct, *_: f.select_backward(
            dy, shape, offsets, starts, dim, step, distinct
        ),
        lambda x, offsets, starts, dim, total, *_: x.new_empty(resized_shape(x.shape, dim, total)),
    ),
    "select_backward": LinearMap(
        select_backward,
        lambda f, dy, shape, _, offsets, starts, dim, step, distinct: f.select(
            dy, offsets, starts, dim, shape[dim], step, distinct
        ),
        lambda dy, shape, *_: dy.new_empty(shape),
    ),
}


def _falling_back(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with a fallback, for gradients and operators.

    The dispatch of scree replaces the kernel of an eager call.
    """
    module = f"{__package__}.interface"
    return falls_back_to(getattr(standard, run.__name__), module)(run)


# The functions of the table for the gradients of eager code, which are differentiable themselves,
# and the operators for compiled code.
_EAGER = SimpleNamespace()
_OPERATORS = SimpleNamespace()


def _record_map(ctx, x, run, name, *args):
    ctx.set_materialize_grads(False)
    ctx.name, ctx.shape = name, x.shape
    save_args(ctx, args)
    out = run(x, *args)
    if isinstance(out, tuple):
        ctx.mark_non_differentiable(*out[1:])
    return out


def _map_gradient(ctx, dy, *_):
    args = saved_args(ctx)
    dx = LINEAR_MAPS[ctx.name].gradient(_EAGER, dy, ctx.shape, *args)
    return dx, *(None,) * (2 + len(args))


_differentiable_map = differentiable("Map", _record_map, _map_gradient, second_derivative="own")


def _make_operator(name: str) -> None:
    linear = LINEAR_MAPS[name]
    run = _falling_back(linear.run)

    def save(ctx, inputs, output):
        x, *args = inputs
        ctx.shape = x.shape
        save_args(ctx, args)

    def differentiate(ctx, dy, *_):
        return (linear.gradient(_OPERATORS, dy, ctx.shape, *saved_args(ctx)),)

    operator = define_operator(name, run, linear.empty, save=save, backward=differentiate)
    setattr(_OPERATORS, name, operator)
    setattr(_EAGER, name, partial(_eager, run, name))


def _eager(run: Callable[..., Any], name: str, x: torch.Tensor, *args: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        return _differentiable_map(x, run, name, *args)
    return run(x, *args)


def apply(name: str, x: torch.Tensor, *args: Any) -> Any:
    """Call the linear map of this name."""
    if uses_operators(x):
        return getattr(_OPERATORS, name)(x, *args)
    return _eager(LINEAR_MAPS[name].run, name, x, *args)


for _name in LINEAR_MAPS:
    _make_operator(_name)


_concat_or_fall_back, _split_or_fall_back = _falling_back(concat), _falling_back(split)


def _record_concat(ctx, run, offsets, dim, *xs):
    ctx.dim, ctx.totals = dim, [x.shape[dim] for x in xs]
    save_args(ctx, offsets)
    return run(xs, offsets, dim)


def _concat_gradient(ctx, dy):
    return None, None, None, *_differentiable_split(dy, saved_args(ctx), ctx.totals, ctx.dim)


_differentiable_concat = differentiable(
    "Concat", _record_concat, _concat_gradient, second_derivative="own"
)


def _record_split(ctx, dy, offsets, totals, dim):
    ctx.dim = dim
    save_args(ctx, offsets)
    return tuple(_split_or_fall_back(dy, offsets, totals, dim))


def _split_gradient(ctx, *dxs):
    return (
        _differentiable_concat(_concat_or_fall_back, saved_args(ctx), ctx.dim, *dxs),
        None,
        None,
        None,
    )


_differentiable_split = differentiable(
    "Split", _record_split, _split_gradient, second_derivative="own"
)


def _concat_fake(xs, offsets, dim):
    return xs[0].new_empty(resized_shape(xs[0].shape, dim, sum(x.shape[dim] for x in xs)))


def _split_fake(dy, offsets, totals, dim):
    return [dy.new_empty(resized_shape(dy.shape, dim, total)) for total in totals]


def _save_concat(ctx, inputs, output):
    xs, offsets, ctx.dim = inputs
    ctx.totals = [x.shape[ctx.dim] for x in xs]
    ctx.save_for_backward(*offsets)


def _concat_operator_gradient(ctx, dy):
    return _split_op(dy, ctx.saved_tensors, ctx.totals, ctx.dim), [None] * len(ctx.totals)


_concat_op = define_operator(
    "concat",
    _concat_or_fall_back,
    _concat_fake,
    save=_save_concat,
    backward=_concat_operator_gradient,
)
_split_op = define_operator("split", _split_or_fall_back, _split_fake)


def concat_rows(xs: list[torch.Tensor], offsets: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate row i of each of up to four arrays, with a gradient."""
    if uses_operators(*xs):
        return _concat_op(xs, offsets, dim)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _differentiable_concat(concat, offsets, dim, *xs)
    return concat(xs, offsets, dim)
