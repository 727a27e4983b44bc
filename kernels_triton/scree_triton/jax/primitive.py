"""Primitives of JAX that launch Triton kernels on CUDA, and run other functions elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def define_primitive(
    name: str,
    types: Callable[..., list[Any]],
    kernels: Callable[..., list[Any]],
    fallback: Callable[..., list[Any]],
    batch: Callable[..., Any],
    derive: Callable[..., Any],
) -> Primitive:
    """Return a primitive that runs `kernels` on CUDA, and `fallback` on all other platforms.

    Parameters
    ----------
    name
        The name in a traced function.
    types
        ``types(*avals, static=)`` returns the abstract values of the results.
    kernels, fallback
        Functions of the arrays and of `static`, which is hashable. They return a list of arrays.
    batch
        The rule for `jax.vmap`, as in `jax.interpreters.batching`.
    derive
        The rule for derivatives of the primitive, as in `jax.interpreters.ad`.

    Returns
    -------
    Primitive
        Bind it to arrays and ``static=``.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    primitive.def_impl(
        lambda *arrays, static: jax.jit(partial(primitive.bind, static=static))(*arrays)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(fallback, multiple_results=True))
    mlir.register_lowering(
        primitive, mlir.lower_fun(kernels, multiple_results=True), platform="cuda"
    )
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = derive
    return primitive
