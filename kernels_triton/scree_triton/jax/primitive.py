"""Primitives of JAX that launch Triton kernels on CUDA, and run other functions elsewhere.

Where kernels do not compile on CUDA, the other functions run too, with one warning and a line in
`scree.explain`. They also run where XLA would have to split a launch between devices. Only the lowering
knows the number of devices of a program.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

#: Why kernels do not run in a program on several devices.
SPLIT = (
    "XLA cannot split the Triton kernels between devices, so another implementation runs; call the "
    "function inside jax.shard_map"
)
#: Kind of call -> why its kernels do not run.
UNAVAILABLE: dict[Hashable, str] = {}


def record_failure(name: str, kind: Hashable, error: Exception) -> str:
    """Keep why the kernels of a kind of call do not run; warn once per reason, and return it."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    reason = f"the Triton kernels cannot run this kind of call: {reason}"
    if reason not in UNAVAILABLE.values():
        warnings.warn(f"{name}: {reason}", RuntimeWarning, stacklevel=3)
    UNAVAILABLE[kind] = reason
    return reason


def _splits_launches(module_context: Any) -> bool:
    """Return whether XLA would have to split the launches of a module between devices."""
    axes = getattr(module_context, "axis_context", None)
    if hasattr(axes, "num_devices"):
        return bool(axes.num_devices > 1)
    if hasattr(axes, "manual_axes"):  # inside shard_map
        return {*axes.manual_axes} != {*axes.mesh.axis_names}
    return jax.device_count() > 1


def define_primitive(
    name: str,
    types: Callable[..., list[Any]],
    kernels: Callable[..., list[Any]],
    fallback: Callable[..., list[Any]],
    batch: Callable[..., Any],
    derive: Callable[..., Any],
    kind_of: Callable[..., Hashable],
) -> Primitive:
    """Return a primitive that runs `kernels` on CUDA, and `fallback` on all other platforms.

    `fallback` runs on CUDA too if `kernels` raises, because a kernel does not compile. If the forward pass
    of a kind of call falls back, its backward pass falls back too.

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
    kind_of
        ``kind_of(*arrays, static=)`` returns the key in `UNAVAILABLE`.

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

    def run_or_fall_back(*arrays: Any, static: Any) -> list[Any]:
        kind = kind_of(*arrays, static=static)
        if kind not in UNAVAILABLE:
            try:
                return kernels(*arrays, static=static)
            # Triton, its assembler and the recording raise errors of many types.
            except Exception as error:
                record_failure(name, kind, error)
        return fallback(*arrays, static=static)

    lower_fallback = mlir.lower_fun(fallback, multiple_results=True)
    lower_kernels = mlir.lower_fun(run_or_fall_back, multiple_results=True)

    def lower_on_cuda(context: Any, *arrays: Any, static: Any) -> Any:
        lower = lower_kernels
        if _splits_launches(context.module_context):
            warnings.warn(f"{name}: {SPLIT}", RuntimeWarning, stacklevel=2)
            lower = lower_fallback
        return lower(context, *arrays, static=static)

    mlir.register_lowering(primitive, lower_fallback)
    mlir.register_lowering(primitive, lower_on_cuda, platform="cuda")
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = derive
    return primitive
