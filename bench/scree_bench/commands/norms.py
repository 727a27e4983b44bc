"""`norms`: rms_norm and layer_norm against PyTorch, eager and compiled, and imported kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import numpy as np
import typer

import scree

from .. import jax_operations, plots, results
from ..formulas import EPS
from ..libraries import (
    Function,
    MeasuredLibrary,
    installed_libraries,
    resolve_device,
    torch_compiled,
)
from ..measure import PATIENCE
from ..operations import PHASES, Contender, Operation, measure
from ..options import (
    Device,
    Dtype,
    KernelBackend,
    Out,
    Patience,
    Quick,
    Seconds,
    Seed,
    data_type,
    parse_numbers,
)
from ..peers import NO_TIME, compiler_unavailable, unavailable_on_cuda
from ..results import Result, Table
from ..session import SECONDS, Session

SHAPES = {"cuda": "12160x4096,12160x1024", "cpu": "2048x4096,2048x1024"}
SHOWN = (
    *(f"{phase}_{value}" for phase in PHASES for value in ("s", "rate", "of_copy_share")),
    "forward_host_s",
    "both_host_s",
    "relative_error",
)


def _liger(name: str) -> Function:
    if name == "rms_norm":
        run = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
        return lambda x, w: run(x, w, EPS, 0.0, "llama", False)
    run = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
    return lambda x, w, b: run(x, w, b, EPS)


def _quack(name: str) -> Function:
    run = import_module("quack.rmsnorm").rmsnorm
    if name == "rms_norm":
        return lambda x, w: run(x, w, eps=EPS)
    return lambda x, w, r: run(x, w, residual=r, eps=EPS, prenorm=True)


#: Third-party kernels: module -> its norms, and a function that loads one.
IMPORTED: dict[str, tuple[tuple[str, ...], Callable[[str], Function]]] = {
    "liger_kernel": (("rms_norm", "layer_norm"), _liger),
    "quack": (("rms_norm", "rms_norm of a sum"), _quack),
}

#: Name -> the norm in PyTorch's functions, and the reads and writes of all tokens that it needs,
#: forward and backward.
NORMS: dict[str, tuple[Callable[[Any], Function], tuple[int, int]]] = {
    "rms_norm": (lambda F: lambda x, w: F.rms_norm(x, w.shape, w, EPS), (2, 3)),
    "rms_norm of a sum": (
        lambda F: lambda x, w, r: (F.rms_norm(x + r, w.shape, w, EPS), x + r),
        (4, 4),
    ),
    "layer_norm": (lambda F: lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS), (2, 3)),
}


def scree_norm(name: str, rows: scree.Array, kernel: str | None) -> Function:
    """Return the norm of scree on tokens with the layout of `rows`; the norm of a sum returns the sum too."""

    def run(x: Any, w: Any, other: Any = None) -> Any:
        arr = rows.with_values(x)
        if name == "layer_norm":
            return scree.layer_norm(arr, w, other, eps=EPS, kernel=kernel).values
        if name == "rms_norm":
            return scree.rms_norm(arr, w, eps=EPS, kernel=kernel).values
        normed, total = scree.rms_norm(
            arr, w, residual=arr.with_values(other), eps=EPS, kernel=kernel
        )
        return normed.values, total.values

    return run


def functions(
    session: Session, lib: MeasuredLibrary, name: str, dtype: str, rows: scree.Array
) -> dict[str, Function]:
    """Return the norm of each contender by name; the norm of a sum returns the sum too."""
    import torch.nn.functional as F

    ours = partial(scree_norm, name, rows)
    eager = NORMS[name][0](F)
    by_name = {"scree": ours(None), "torch": eager}
    if session.device == "cuda":  # elsewhere scree takes the standard path anyway
        by_name["scree, standard path"] = ours("standard")
    if reason := NO_TIME if session.quick else compiler_unavailable(lib):
        session.leave_out("torch, compiled", reason)
    else:
        by_name["torch, compiled"] = torch_compiled(eager)
    for module, (names, get) in IMPORTED.items():
        if name in names:
            if reason := unavailable_on_cuda(lib, dtype):
                session.leave_out(module, reason)
                continue
            try:
                by_name[module] = get(name)
            except Exception as error:  # a package may also be incompatible with its dependencies
                session.leave_out(module, f"cannot be imported ({error})")
    return by_name


def command(
    shapes: Annotated[
        str,
        typer.Option(help=f"Tokens x width; {SHAPES['cuda']} on CUDA, {SHAPES['cpu']} on the CPU."),
    ] = "",
    dtype: Dtype = "",
    backend: KernelBackend = "torch",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure rms_norm and layer_norm, forward and backward, relative to a plain copy of PyTorch.

    Only necessary bytes count. Forward reads x and writes the result; backward reads x and the
    gradient, and writes a gradient. The share is relative to a plain copy of as many bytes. The
    norm of a sum adds a residual first and returns the sum too.
    """
    with Session("norms", locals(), resolve_device(device)) as session:
        dtype = data_type(dtype, session.device)
        sizes = [
            parse_numbers(x, "--shapes", "x") for x in (shapes or SHAPES[session.device]).split(",")
        ]
        if any(len(size) != 2 for size in sizes):
            raise typer.BadParameter(
                f"--shapes: expected tokens x width, such as 12160x4096, got {shapes!r}"
            )
        sizes = [[64, 256]] if quick else sizes
        for lib in installed_libraries(session, backend, ("torch", "jax"), on_cuda=("jax",)):
            for tokens, width in session.track(sizes):
                for name in NORMS:
                    measure(
                        session,
                        lib,
                        {"tokens": tokens, "width": width, "dtype": dtype},
                        _operation(session, lib, name, tokens, width, dtype, seed),
                    )


def _operation(
    session: Session,
    lib: MeasuredLibrary,
    name: str,
    tokens: int,
    width: int,
    dtype: str,
    seed: int,
) -> Operation:
    normal = lib.normal(seed, dtype)
    x, w = normal(tokens, width), normal(width)
    leaves = {"rms_norm": (x, w), "layer_norm": (x, w, normal(width))}.get(name) or (
        x,
        w,
        normal(tokens, width),
    )
    rows = scree.Array(
        x, lib.make(np.asarray([0, tokens // 3, tokens]), "int32"), max_length=tokens
    )
    plain, (forward, backward) = NORMS[name]
    size = float(tokens * width * x.dtype.itemsize)
    traffic = forward * size, backward * size, (forward + backward) * size
    if lib.name == "jax":
        return jax_operations.norm(name, partial(scree_norm, name, rows), leaves, traffic)

    import torch.nn.functional as F

    def build(run: Function) -> Contender:
        return lambda: (run, leaves)

    runs = functions(session, lib, name, dtype, rows)
    return Operation(
        name,
        {contender: build(run) for contender, run in runs.items()},
        traffic,
        lambda: plain(F)(*map(lib.as_float64, leaves)),
    )


def tables(result: Result) -> list[Table]:
    """Return the main values."""
    return results.tables(result.rows, SHOWN)


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of bytes per second, forward and backward."""

    def paint(figure: Any, phase: str) -> None:
        value = f"{phase}_rate"
        groups = plots.grouped(result.rows, value, plots.labels(result.rows))
        plots.bars(
            figure.add_subplot(), groups, value, f"Norms, {phase}: bytes per second, more is better"
        )

    timed = [
        phase
        for phase in ("forward", "backward")
        if any(f"{phase}_rate" in row.values for row in result.rows)
    ]
    return {f"norms-{phase}": partial(paint, phase=phase) for phase in timed}
