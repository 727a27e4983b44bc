"""Functions of each element, of dtypes alone, and those that ragged arrays do not have."""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..backends import Backend
from ..broadcasting import Function, against, shared_layout, unless_ragged


def elementwise(f: Function, name: str, lib: Backend) -> Function:
    """Functions of each element: the values by the library's function, dense operands broadcast."""
    most = (
        0 if name == "where" else 2
    )  # operands of a plain call; of one, which is not the standard's, `where` gives a tuple

    def call(*args: Any, **kwargs: Any) -> Any:
        ragged = [x for x in args if isinstance(x, Array)]
        if kwargs:
            ragged += [x for x in kwargs.values() if isinstance(x, Array)]
        if not ragged:
            return f(*args, **kwargs)
        first = ragged[0] if len(ragged) == 1 else shared_layout(name, ragged)
        if not kwargs and len(ragged) == len(args) <= most and ragged[-1].layout is first.layout:
            return Array._of(f(*[x.values for x in ragged]), first.layout, first.ragged_dim)

        def operand(x: Any) -> Any:
            return x.values if isinstance(x, Array) else against(name, x, first)

        return first.with_values(
            f(*map(operand, args), **{k: operand(x) for k, x in kwargs.items()})
        )

    return call


def same_rows(f: Function, name: str, lib: Backend) -> Function:
    """Functions of one array that keep its shape: casts and arrays like another."""

    def ragged(x: Array, /, *args: Any, device: Any = None, **kwargs: Any) -> Array:
        x = x if device is None or device == x.device else x.to_device(device)
        return x.with_values(f(x.values, *args, **kwargs))

    return unless_ragged(f, ragged)


def dtypes(f: Function, name: str, lib: Backend) -> Function:
    """Functions that look at dtypes alone."""

    def call(*args: Any) -> Any:
        return f(*(x.dtype if isinstance(x, Array) else x for x in args))

    return call


def unsupported(f: Function, name: str, why: str) -> Function:
    """Functions that ragged arrays do not have: a clear refusal, and the library's own for dense arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Array) for x in (*args, *kwargs.values())):
            raise TypeError(f"{name} does not take ragged arrays: {why}")
        return f(*args, **kwargs)

    return call
