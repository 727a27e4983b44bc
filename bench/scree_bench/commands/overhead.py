"""`overhead`: host time of a call relative to the bare library, on input too small to matter."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import scree
from scree.broadcasting import as_values

from .. import plots, results
from ..libraries import MeasuredLibrary, installed_libraries, resolve_device
from ..measure import Thunk
from ..options import Backend, Device, Out, Quick, Seconds
from ..results import Result, Table
from ..session import SECONDS, Build, Session

LENGTHS = (4, 2, 7)
#: Sizes for the calls of a model's layer.
HEADS, WIDTH = 4, 64
#: Last words of the names of such calls.
OF_A_LAYER = (" in a layer", " with gradients", ", on one thread", ", without autograd")
IMPORTS = ("numpy", "scree", "torch", "jax", "mlx.core")
#: Kind of function -> maximum seconds over the bare call, on NumPy.
LIMITS = {"elementwise": 25e-6, "reduction": 60e-6}


def calls(lib: MeasuredLibrary) -> dict[str, tuple[Thunk, Thunk | None]]:
    """Return our call and the equivalent bare call on the values, if there is one, by name."""
    rng, total = np.random.default_rng(0), sum(LENGTHS)
    values = lib.make(rng.standard_normal((total, 2, 16), dtype=np.float32))
    arr: Any = scree.from_lengths(values, LENGTHS)
    offsets, xp, bare = arr.offsets, scree.namespace(arr), arr.layout.xp
    weight = lib.make(np.ones(16, np.float32))
    rows = scree.unpack(arr)
    return {
        "namespace": (lambda: scree.namespace(arr), None),
        "from_cu_seqlens": (lambda: scree.from_cu_seqlens(values, offsets, max_length=7), None),
        "with_values": (lambda: arr.with_values(values), None),
        "exp": (lambda: xp.exp(arr), lambda: bare.exp(values)),
        "add": (lambda: arr + arr, lambda: values + values),
        "multiply by a number": (lambda: arr * 2.0, lambda: values * 2.0),
        "sum of rows": (lambda: xp.sum(arr, axis=1), lambda: bare.sum(values, axis=0)),
        "max of rows": (lambda: xp.max(arr, axis=1), lambda: bare.max(values, axis=0)),
        "mean of all": (lambda: xp.mean(arr), lambda: bare.mean(values)),
        "softmax": (lambda: xp.ragged.softmax(arr), None),
        "rms_norm": (lambda: xp.ragged.rms_norm(arr, weight), None),
        "attention": (lambda: xp.ragged.attention(arr, arr, arr, causal=True), None),
        "pack": (lambda: scree.pack(rows), lambda: bare.concat(rows)),
        "index a row": (lambda: arr[1], lambda: values[4:6]),
    }


def layer_calls(lib: MeasuredLibrary) -> dict[str, dict[str, Thunk]]:
    """Return the calls of a model's layer, forward alone and with gradients: scree's and PyTorch's.

    "empty" is an autograd function in Python that only allocates: the lower bound for such
    functions. PyTorch's attention on CUDA is the operator of FlashAttention-2. With gradients it
    goes through PyTorch's autograd, which implements it in C++, or through `varlen_attn`, which
    calls it. Without autograd, its forward and backward operators run in sequence, as do scree's.
    """
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, like: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            return torch.empty_like(like)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None, *map(torch.empty_like, ctx.saved_tensors)

    rng, half = np.random.default_rng(0), "float16" if lib.device == "cuda" else "float32"
    shapes = *((sum(LENGTHS), HEADS, WIDTH),) * 3, (WIDTH,), (WIDTH, WIDTH)
    plain = [lib.make(rng.standard_normal(shape), half) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in plain]
    rows: Any = scree.from_lengths(plain[0], LENGTHS)
    functional, xp = torch.nn.functional, scree.namespace(rows)
    flash = (
        _flash(rows, (plain[0], plain[1], plain[2]), leaves[:3], torch.randn_like(plain[0]))
        if lib.device == "cuda"
        else {}
    )

    def layers(
        x: Any, y: Any, z: Any, weight: Any, matrix: Any
    ) -> dict[str, tuple[Thunk, Thunk | None, tuple[Any, ...]]]:
        """Return our call, PyTorch's, and their inputs, by name."""
        q, k, v = map(rows.with_values, (x, y, z))
        attention = flash.get("autograd" if x.requires_grad else "forward")
        return {
            "attention": (lambda: xp.ragged.attention(q, k, v, causal=True), attention, (x, y, z)),
            "rms_norm": (lambda: xp.ragged.rms_norm(q, weight),
                         lambda: functional.rms_norm(x, (WIDTH,), weight), (x, weight)),
            "softmax": (lambda: xp.ragged.softmax(q), lambda: functional.softmax(x, 0), (x,)),
            "sum of rows": (lambda: xp.sum(q, axis=1), lambda: x.sum(0), (x,)),
            "rope": (lambda: xp.ragged.rope(q), None, (x,)),
            "swiglu": (lambda: xp.ragged.swiglu(q), None, (x,)),
            "add": (lambda: q + k, lambda: x + y, (x, y)),
            "product": (lambda: q @ matrix, lambda: x @ matrix, (x, matrix)),
        }  # fmt: skip

    def gradients(f: Thunk, inputs: tuple[Any, ...]) -> Thunk:
        out = f()
        like = torch.randn_like(as_values(out))
        if out is as_values(out):
            return lambda: torch.autograd.grad(f(), inputs, like)
        return lambda: torch.autograd.grad(f().values, inputs, like)

    calls_by_name: dict[str, dict[str, Thunk | None]] = {}
    for name, (ours, bare, _) in layers(*plain).items():
        calls_by_name[f"{name} in a layer"] = {"scree": ours, "bare": bare}
    for name, (ours, bare, inputs) in layers(*leaves).items():
        like = as_values(ours()).detach()
        calls_by_name[f"{name} with gradients"] = {
            "scree": gradients(ours, inputs),
            "bare": None if bare is None else gradients(bare, inputs),
            "empty": gradients(partial(Empty.apply, like, *inputs), inputs),
        }  # fmt: skip
    if flash:
        calls_by_name["attention and its gradients, without autograd"] = {
            "scree": flash["ours"],
            "bare": flash["both"],
        }
        if "varlen_attn" in flash:
            calls_by_name["attention with gradients"]["varlen_attn"] = gradients(
                flash["varlen_attn"], tuple(leaves[:3])
            )
    return {
        name: {contender: f for contender, f in each.items() if f is not None}
        for name, each in calls_by_name.items()
    }


def _flash(q: Any, plain: tuple[Any, Any, Any], leaves: list[Any], grad: Any) -> dict[str, Thunk]:
    """Return PyTorch's FlashAttention-2, on values and on autograd leaves, and our kernels.

    Our forward and backward run without autograd.
    """
    import torch

    from scree_triton.attention.interface import make_spec
    from scree_triton.attention.launch_configs import get_launch_config
    from scree_triton.attention.metadata import VarlenLayout

    aten, offsets, max_length = torch.ops.aten, q.offsets.to(torch.int32), max(LENGTHS)
    rows, spec = (
        VarlenLayout(q.offsets, q.offsets, q.layout.cache),
        make_spec(True, None, None, WIDTH**-0.5, None),
    )
    backward = get_launch_config(*plain, rows, spec, False).prepare_backward(
        rows, q.total_length, q.total_length, spec
    )
    others = [q.with_values(x) for x in plain[1:]]

    def forward(*inputs: Any) -> Any:
        return aten._flash_attention_forward(
            *inputs, offsets, offsets, max_length, max_length, 0.0, True, False
        )

    def both() -> Any:
        out, lse, seed, counter, _ = forward(*plain)
        return aten._flash_attention_backward(
            grad,
            *plain,
            out,
            lse,
            offsets,
            offsets,
            max_length,
            max_length,
            0.0,
            True,
            seed,
            counter,
        )

    def ours() -> Any:
        out, lse = scree.attention(q, *others, causal=True, return_lse=True)
        return backward(*plain, None, out.values, lse.values.t(), grad, None)

    thunks: dict[str, Thunk] = {
        "forward": lambda: forward(*plain),
        "autograd": lambda: forward(*leaves)[0],
        "both": both,
        "ours": ours,
    }
    if find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        thunks["varlen_attn"] = lambda: varlen_attn(
            *leaves, offsets, offsets, max_length, max_length, window_size=(-1, 0)
        )
    return thunks


def functions() -> Iterator[tuple[str, str, Thunk, Thunk]]:
    """Yield kind, name, our call and the bare call of functions of the standard, on NumPy.

    They are all elementwise functions and all reductions.
    """
    x = scree.from_lengths(np.linspace(0.1, 0.9, sum(LENGTHS)), LENGTHS)
    i, b = x.with_values(np.arange(x.total_length)), x.with_values(x.values > 0.5)
    xp, bare = scree.namespace(x), x.layout.xp
    candidates = ((x,), (x, x), (i,), (i, i), (b,), (b, b), (b, x, x))
    for name, kind in scree.functions.KINDS.items():
        if kind.name == "reduction":
            ours, its = getattr(xp, name), getattr(bare, name)
            yield kind.name, name, partial(ours, x, axis=1), partial(its, x.values, axis=0)
        elif kind.name == "elementwise":
            inputs = next(arrays for arrays in candidates if _takes(getattr(bare, name), arrays))
            dense = [arr.values for arr in inputs]
            yield (
                kind.name,
                name,
                partial(getattr(xp, name), *inputs),
                partial(getattr(bare, name), *dense),
            )


def _takes(function: Callable[..., Any], arrays: tuple[Any, ...]) -> bool:
    try:
        return isinstance(function(*(arr.values for arr in arrays)), np.ndarray)
    # The types or the number of arguments are wrong.
    except (TypeError, ValueError):
        return False


def command(
    backend: Backend = "all",
    device: Device = "auto",
    seconds: Seconds = SECONDS,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure microseconds per call against the bare library, and the time of imports.

    The input has thirteen tokens in three rows, so host time dominates. On the CPU each call of an
    asynchronous library waits for its result; on CUDA no call waits. The calls of a layer of a
    PyTorch model are compared with PyTorch's functions, forward and with gradients, and with an
    autograd function that computes nothing.
    """
    with Session("overhead", locals(), resolve_device(device)) as session:
        for lib in installed_libraries(session, backend):
            for what, (ours, bare) in session.track(calls(lib).items(), lib.name):
                case = {"backend": lib.name, "call": what}
                contenders: dict[str, Build] = {"scree": partial(_values, ours)}
                if bare is not None:
                    contenders["bare"] = partial(_identity, bare)
                rows = session.time(
                    case,
                    "call_s",
                    contenders,
                    wait=_identity if lib.device == "cuda" else lib.wait,
                    device="cpu",
                )
                if bare is not None and all("call_s" in row.values for row in rows.values()):
                    rows["scree"].values["over_s"] = (
                        rows["scree"].values["call_s"] - rows["bare"].values["call_s"]
                    )
            if lib.name == "torch":
                import torch

                for what, thunks in session.track(layer_calls(lib).items(), "against PyTorch"):
                    builds: dict[str, Build] = {
                        contender: partial(_identity, f) for contender, f in thunks.items()
                    }
                    session.time(
                        {"backend": lib.name, "call": what}, "call_s", builds, device="cpu"
                    )
                    # On other devices autograd has one thread anyway.
                    if lib.device == "cuda" and "with gradients" in what:
                        with torch.autograd.set_multithreading_enabled(False):
                            case = {"backend": lib.name, "call": f"{what}, on one thread"}
                            session.time(case, "call_s", builds, device="cpu")
            if lib.name == "numpy":
                every = list(functions())
                for kind, name, ours, bare in session.track(
                    every[::12] if quick else every, "every function"
                ):
                    case = {"kind": kind, "function": name}
                    rows = session.time(
                        case,
                        "call_s",
                        {"scree": partial(_values, ours), "bare": partial(_identity, bare)},
                    )
                    if all("call_s" in row.values for row in rows.values()):
                        over = rows["scree"].values["call_s"] - rows["bare"].values["call_s"]
                        rows["scree"].values |= {"over_s": over, "limit_s": LIMITS[kind]}
        names = [name for name in IMPORTS if find_spec(name.partition(".")[0]) is not None]
        few = quick or session.device == "cuda"
        for name in names[2:] if few else ():
            session.leave_out(
                f"import {name}", "takes seconds; run without --quick on --device cpu"
            )
        commands = {name: partial(_importer, name) for name in (names[:2] if few else names)}
        imports: dict[str, Build] = {"nothing": partial(_importer, ""), **commands}
        session.time({"what": "import in a new process"}, "import_s", imports, device="cpu")


def _identity(x: Any) -> Any:
    return x


def _values(thunk: Thunk) -> Thunk:
    """Return a call whose result a library can wait for: the values of a ragged array."""

    def call() -> Any:
        result = thunk()
        if isinstance(result, scree.Array):
            return result.values
        return result if hasattr(result, "shape") else ()

    return call


def _importer(name: str) -> Thunk:
    code = f"import {name}" if name else ""
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def tables(result: Result) -> list[Table]:
    """Return our call and the bare call side by side."""
    calls, others = (
        [row for row in result.rows if ("call" in row.case) is kind] for kind in (True, False)
    )
    side_by_side = results.pivot(
        calls, "call_s", ["backend", "call"], "a call, and the equivalent bare call"
    )
    return [side_by_side, *results.tables(others)]


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the time of each call, and of a layer's calls against PyTorch's."""
    drawn: plots.Pictures = {}
    libraries = dict.fromkeys(row.case["backend"] for row in result.rows if "backend" in row.case)
    for name, layer in itertools.product(libraries, (False, True)):
        rows = [
            row
            for row in result.rows
            if row.case.get("backend") == name and row.case["call"].endswith(OF_A_LAYER) is layer
        ]

        def paint(figure: Any, rows: Any = rows, name: str = name) -> None:
            groups = plots.grouped(rows, "call_s", plots.labels(rows))
            plots.bars(figure.add_subplot(), groups, "call_s", f"A call on thirteen tokens, {name}")

        if rows:
            drawn[f"overhead-{name}{'-layer' if layer else ''}"] = paint
    return drawn
