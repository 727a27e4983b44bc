"""`norms`: rms_norm and layer_norm against PyTorch's own, compiled ones, and the kernels that can be imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import numpy as np
import typer

import scree

from .. import plots
from ..libraries import Function, Library, wanted, where
from ..measure import PATIENCE
from ..operations import COPY, Operation, measure
from ..options import Device, Out, Patience, Quick, Seconds, Seed, numbers
from ..results import Result
from ..session import Session

EPS = 1e-6


def _liger(name: str) -> Function:
    if name == "rms_norm":
        run = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
        return lambda x, w, b: run(x, w, EPS, 0.0, "llama", False)
    run = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
    return lambda x, w, b: run(x, w, b, EPS)


def _quack(name: str) -> Function:
    run = import_module("quack.rmsnorm").rmsnorm
    return lambda x, w, b: run(x, w, eps=EPS)


#: Other people's kernels: module -> the norms it has, and how to get at them.
IMPORTED: dict[str, tuple[tuple[str, ...], Callable[[str], Function]]] = {
    "liger_kernel": (("rms_norm", "layer_norm"), _liger),
    "quack": (("rms_norm",), _quack),
}


def functions(session: Session, name: str, offsets: Any, longest: int) -> dict[str, Function]:
    """Who -> ``function(x, weight, bias)`` on the tokens of all rows."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    def ours(kernel: str | None) -> Function:
        def run(x: Any, w: Any, b: Any) -> Any:
            arr = scree.Array(x, offsets, max_length=longest)
            if name == "rms_norm":
                return scree.rms_norm(arr, w, eps=EPS, kernel=kernel).values
            return scree.layer_norm(arr, w, b, eps=EPS, kernel=kernel).values

        return run

    def own(x: Any, w: Any, b: Any) -> Any:
        return F.rms_norm(x, w.shape, w, EPS) if name == "rms_norm" else F.layer_norm(x, w.shape, w, b, EPS)

    found = {"scree": ours(None), "scree, standard path": ours("standard"), "torch": own}
    if session.quick:
        session.leave_out("torch, compiled", "takes long to compile; run without --quick")
    else:
        found["torch, compiled"] = torch.compile(own, dynamic=False)
    for module, (names, get) in IMPORTED.items():
        if name in names:
            if session.device != "cuda":
                session.leave_out(module, "runs on CUDA devices only")
                continue
            try:
                found[module] = get(name)
            except Exception as error:  # also where a package does not fit its dependencies
                session.leave_out(module, f"cannot be imported ({error})")
    return found


def command(
    shapes: Annotated[str, typer.Option(help="Tokens x width, with commas between them.")] = "12160x4096,12160x1024",
    dtype: Annotated[str, typer.Option(help="bfloat16 on CUDA and float32 on the CPU by default.")] = "",
    device: Device = "auto", seed: Seed = 0, seconds: Seconds = 0.5, patience: Patience = PATIENCE,
    quick: Quick = False, out: Out = None,
) -> None:  # fmt: skip
    """rms_norm and layer_norm, forward and backward: bytes a second, and the share of a plain copy.

    Bytes are those that must pass: x once in and once out forward, x and the gradient in and a gradient out backward.
    """
    with Session("norms", locals(), where(device)) as session:
        dtype = dtype or ("bfloat16" if session.device == "cuda" else "float32")
        sizes = [numbers(x, "x") for x in shapes.split(",")]
        if any(len(size) != 2 for size in sizes):
            raise typer.BadParameter(f"--shapes: expected tokens x width, as 12160x4096, got {shapes!r}")
        sizes = [[64, 256]] if quick else sizes
        for lib in wanted(session, "torch", ("torch",)):
            for tokens, width in session.track(sizes):
                for name in ("rms_norm", "layer_norm"):
                    measure(session, lib, {"tokens": tokens, "width": width, "dtype": dtype},
                            _operation(session, lib, name, tokens, width, dtype, seed))  # fmt: skip


def _operation(session: Session, lib: Library, name: str, tokens: int, width: int, dtype: str, seed: int) -> Operation:
    rng = np.random.default_rng(seed)
    x, w, b = (lib.make(rng.standard_normal(shape, dtype=np.float32), dtype) for shape in ((tokens, width), (width,), (width,)))
    offsets = lib.make(np.asarray([0, tokens // 3, tokens]), "int32")
    leaves = (x, w) if name == "rms_norm" else (x, w, b)
    moved = float(x.numel() * x.element_size())

    def contender(run: Function) -> Callable[[], tuple[Function, tuple[Any, ...]]]:
        return lambda: ((lambda *args: run(*args, *(b,) * (3 - len(args)))), leaves)

    def truth() -> Any:
        y, scale, shift = (lib.wide(t) for t in (x, w, b))
        y = y - y.mean(-1, keepdims=True) if name == "layer_norm" else y
        y = y / ((y * y).mean(-1, keepdims=True) + EPS).sqrt() * scale
        return y + shift if name == "layer_norm" else y

    runs = functions(session, name, offsets, tokens)
    return Operation(name, {who: contender(run) for who, run in runs.items()}, (2 * moved, 3 * moved, 5 * moved), truth)


def pictures(result: Result) -> plots.Pictures:
    """Bytes a second, forward and backward."""

    def paint(figure: Any, phase: str) -> None:
        value = f"{phase}_rate"
        groups = plots.grouped(result.rows, value, plots.labels(result.rows))
        plots.bars(figure.add_subplot(), groups, value, f"Norms, {phase}: bytes a second, more is better")

    return {f"norms-{phase}": lambda figure, phase=phase: paint(figure, phase) for phase in ("forward", "backward")}
