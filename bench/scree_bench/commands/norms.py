"""`norms`: rms_norm and layer_norm against PyTorch's own, compiled ones, and the kernels that can be imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import numpy as np
import typer

import scree

from .. import plots, results
from ..formulas import EPS
from ..libraries import Function, Library, torch_compiled, wanted, where
from ..measure import PATIENCE
from ..operations import PHASES, Contender, Operation, measure
from ..options import Device, Dtype, Out, Patience, Quick, Seconds, Seed, data_type, numbers
from ..peers import NO_TIME, compiler, lacking
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


#: Other people's kernels: module -> the norms it has, and how to get at them.
IMPORTED: dict[str, tuple[tuple[str, ...], Callable[[str], Function]]] = {
    "liger_kernel": (("rms_norm", "layer_norm"), _liger),
    "quack": (("rms_norm", "rms_norm of a sum"), _quack),
}

#: Name -> as one writes it in PyTorch's functions, and how often it must read or write all tokens, forward and backward.
NORMS: dict[str, tuple[Callable[[Any], Function], tuple[int, int]]] = {
    "rms_norm": (lambda F: lambda x, w: F.rms_norm(x, w.shape, w, EPS), (2, 3)),
    "rms_norm of a sum": (
        lambda F: lambda x, w, r: (F.rms_norm(x + r, w.shape, w, EPS), x + r),
        (4, 4),
    ),
    "layer_norm": (lambda F: lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS), (2, 3)),
}


def functions(
    session: Session, lib: Library, name: str, dtype: str, rows: scree.Array
) -> dict[str, Function]:
    """Who -> the norm of the tokens of such rows; that of a sum gives the sum too."""
    import torch.nn.functional as F  # noqa: N812

    def ours(kernel: str | None) -> Function:
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

    own = NORMS[name][0](F)
    found = {"scree": ours(None), "torch": own}
    if session.device == "cuda":  # elsewhere it is what runs anyway
        found["scree, standard path"] = ours("standard")
    if why := NO_TIME if session.quick else compiler(lib):
        session.leave_out("torch, compiled", why)
    else:
        found["torch, compiled"] = torch_compiled(own)
    for module, (names, get) in IMPORTED.items():
        if name in names:
            if why := lacking(lib, dtype):
                session.leave_out(module, why)
                continue
            try:
                found[module] = get(name)
            except Exception as error:  # also where a package does not fit its dependencies
                session.leave_out(module, f"cannot be imported ({error})")
    return found


def command(
    shapes: Annotated[
        str,
        typer.Option(help=f"Tokens x width; {SHAPES['cuda']} on CUDA, {SHAPES['cpu']} on the CPU."),
    ] = "",
    dtype: Dtype = "",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """rms_norm and layer_norm, forward and backward: bytes a second, and the share of a plain copy of as many bytes.

    Bytes are those that must pass: x once in and once out forward, x and the gradient in and a gradient out backward. The norm of
    a sum adds a residual first and gives the sum too.
    """
    with Session("norms", locals(), where(device)) as session:
        dtype = data_type(dtype, session.device)
        sizes = [numbers(x, "--shapes", "x") for x in (shapes or SHAPES[session.device]).split(",")]
        if any(len(size) != 2 for size in sizes):
            raise typer.BadParameter(
                f"--shapes: expected tokens x width, as 12160x4096, got {shapes!r}"
            )
        sizes = [[64, 256]] if quick else sizes
        for lib in wanted(session, "torch", ("torch",)):
            for tokens, width in session.track(sizes):
                for name in NORMS:
                    measure(
                        session,
                        lib,
                        {"tokens": tokens, "width": width, "dtype": dtype},
                        _operation(session, lib, name, tokens, width, dtype, seed),
                    )


def _operation(
    session: Session, lib: Library, name: str, tokens: int, width: int, dtype: str, seed: int
) -> Operation:
    import torch.nn.functional as F  # noqa: N812

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
    plain, passes = NORMS[name]
    moved, (forward, backward) = float(x.numel() * x.element_size()), passes

    def contender(run: Function) -> Contender:
        return lambda: (run, leaves)

    runs = functions(session, lib, name, dtype, rows)
    return Operation(
        name,
        {who: contender(run) for who, run in runs.items()},
        (forward * moved, backward * moved, (forward + backward) * moved),
        lambda: plain(F)(*map(lib.wide, leaves)),
    )


def tables(result: Result) -> list[Table]:
    """The values that say most."""
    return results.tables(result.rows, SHOWN)


def pictures(result: Result) -> plots.Pictures:
    """Bytes a second, forward and backward."""

    def paint(figure: Any, phase: str) -> None:
        value = f"{phase}_rate"
        groups = plots.grouped(result.rows, value, plots.labels(result.rows))
        plots.bars(
            figure.add_subplot(), groups, value, f"Norms, {phase}: bytes a second, more is better"
        )

    there = [
        phase
        for phase in ("forward", "backward")
        if any(f"{phase}_rate" in row.values for row in result.rows)
    ]
    return {f"norms-{phase}": partial(paint, phase=phase) for phase in there}
