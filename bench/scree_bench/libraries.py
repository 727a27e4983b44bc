"""The libraries under measurement: how each finishes its work, differentiates, compiles, and counts its memory.

How to make and read their arrays stands in `scree_conformance.backends`; this adds what a measurement needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

import scree
from scree_conformance import backends

from .measure import traced_peak
from .options import words

if TYPE_CHECKING:
    from .session import Session

Function = Callable[..., Any]

FORMS = 100  # in which `torch.compile` may have one function


def _itself(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Step:
    """A call that is ready to be made: a thunk that shows its parts, since compilers count memory from them."""

    run: Function
    args: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        return self.run(*self.args)


Steps = dict[str, Callable[[], Step]]


@dataclass(frozen=True)
class Library:
    """One library on one device.

    Attributes
    ----------
    name, device
        Its name, and "cpu" or "cuda".
    arrays
        How to make and read its arrays.
    wait
        Waits until a result has been computed, and returns it.
    phases
        ``phases(function, args, cotangent)``: what to call for "forward", and where the library differentiates for "backward"
        (the gradients of all `args`, from a graph that is kept) and "both". They are built when asked for.
    peak
        ``peak(step)``: the most bytes that a call holds at once beside its arguments, by the library's own count.
    compiled
        The function as users of the library run it: under `jit` where that is the custom.
    """

    name: str
    device: str
    arrays: backends.Library
    wait: Function = _itself
    phases: Callable[[Function, Sequence[Any], Any], Steps] | None = None
    peak: Callable[[Step], int] = traced_peak
    compiled: Callable[[Function], Function] = _itself

    def make(self, x: np.ndarray, dtype: str = "float32") -> Any:
        """A NumPy array as one of the library."""
        return self.arrays.make(x, dtype)

    def normal(self, seed: int, dtype: str = "float32") -> Callable[..., Any]:
        """``normal(*shape)``: new random numbers at each call; on CUDA they are made there, since on the host they take seconds."""
        if self.device == "cuda":
            import torch

            generator = torch.Generator(self.device).manual_seed(seed)
            return lambda *shape: torch.randn(shape, generator=generator, device=self.device).to(
                self.arrays.dtypes[dtype]
            )
        rng = np.random.default_rng(seed)
        return lambda *shape: self.make(rng.standard_normal(shape, dtype=np.float32), dtype)

    def wide(self, x: Any, like: Any = None) -> Any:
        """An array in float64: PyTorch's on its device, others as NumPy's; the latter also where `like` is one of NumPy's."""
        if self.name == "torch" and not isinstance(like, np.ndarray):
            return x.detach().double()
        return self.arrays.read(x)

    @property
    def xp(self) -> Any:
        """Its namespace, which knows ragged arrays too."""
        return scree.namespace(self.make(np.zeros(1)))

    def steps(self, function: Function, args: Sequence[Any], cotangent: Any = None) -> Steps:
        """What to time: "forward", and "backward" and "both" where the library differentiates."""
        if self.phases is None or cotangent is None:
            return {"forward": lambda: Step(self.compiled(function), tuple(args))}
        return self.phases(function, args, cotangent)


# ------------------------------------------------------------------------------------------------ PyTorch
def _torch_phases(function: Function, args: Sequence[Any], cotangent: Any) -> Steps:
    import torch

    def leaves() -> tuple[Any, ...]:
        return tuple(x.detach().requires_grad_() for x in args)

    def forward(*inputs: Any) -> Any:
        with torch.no_grad():
            return function(*inputs)

    def backward() -> Step:
        inputs = leaves()
        out = function(*inputs)
        return Step(lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True))

    def both(*inputs: Any) -> Any:
        return torch.autograd.grad(function(*inputs), inputs, cotangent)

    return {
        "forward": lambda: Step(forward, tuple(args)),
        "backward": backward,
        "both": lambda: Step(both, leaves()),
    }


def torch_compiled(function: Function) -> Function:
    """The function under `torch.compile`, for each shape anew; it may meet many, where PyTorch would stop after eight."""
    import torch
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = FORMS
    found: Function = torch.compile(function, dynamic=False)
    return found


def nesting(lib: Library, lengths: np.ndarray | Sequence[int]) -> Function:
    """What makes PyTorch's nested tensor of the tokens of such rows, with the bounds that spare it a look at the device."""
    import torch

    offsets = lib.make(np.concatenate([[0], np.cumsum(lengths)]), "int64")
    return partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=offsets,
        min_seqlen=int(min(lengths)),
        max_seqlen=int(max(lengths)),
    )


def allocations(thunk: Callable[[], Any]) -> tuple[list[tuple[float, int]], Any]:
    """Seconds and bytes held, after each allocation of PyTorch's CPU tensors during a call; and the profile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = thunk()
        del kept
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    held, line = 0, []
    for event in events:
        held += event.nbytes()
        line.append(((event.start_ns() - events[0].start_ns()) / 1e9, held))
    return line, found


def _torch_peak(step: Step) -> int:
    step()  # what is made once and kept is not the call's
    return max((held for _, held in allocations(step)[0]), default=0)


def _cuda_peak(step: Step) -> int:
    import torch

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = step()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def _torch(arrays: backends.Library, device: str) -> Library:
    import torch
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # backwards are timed on a graph that is kept
    peak = _cuda_peak if device == "cuda" else _torch_peak

    def wait(x: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return x

    return Library("torch", device, arrays, wait, _torch_phases, peak)


# ------------------------------------------------------------------------------------------------ JAX
def _jax(arrays: backends.Library, device: str) -> Library:
    import jax

    def phases(function: Function, args: Sequence[Any], cotangent: Any) -> Steps:
        def backward() -> Step:
            return Step(
                jax.jit(lambda pull, g: pull(g)), (jax.vjp(jax.jit(function), *args)[1], cotangent)
            )

        def both(inputs: Any, g: Any) -> Any:
            return jax.vjp(function, *inputs)[1](g)

        return {
            "forward": lambda: Step(jax.jit(function), tuple(args)), "backward": backward,
            "both": lambda: Step(jax.jit(both), (tuple(args), cotangent)),
        }  # fmt: skip

    def peak(step: Step) -> int:
        run: Any = step.run
        found = run.lower(*step.args).compile().memory_analysis()
        return int(found.temp_size_in_bytes + found.output_size_in_bytes)

    return Library("jax", device, arrays, jax.block_until_ready, phases, peak, jax.jit)


# ------------------------------------------------------------------------------------------------ MLX
def _mlx(arrays: backends.Library, device: str) -> Library:
    import mlx.core as mx

    def wait(x: Any) -> Any:
        mx.eval(x.values if isinstance(x, scree.Array) else x)
        return x

    def phases(function: Function, args: Sequence[Any], cotangent: Any) -> Steps:
        def both(*inputs: Any) -> Any:
            return mx.vjp(function, list(inputs), [cotangent])[1]

        return {
            "forward": lambda: Step(function, tuple(args)),
            "both": lambda: Step(both, tuple(args)),
        }

    def peak(step: Step) -> int:
        wait(step())
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        wait(step())
        return int(mx.get_peak_memory() - before)

    return Library("mlx", device, arrays, wait, phases, peak)


def _numpy(arrays: backends.Library, device: str) -> Library:
    return Library("numpy", device, arrays)


LOADERS: dict[str, Callable[[backends.Library, str], Library]] = {
    "numpy": _numpy, "torch": _torch, "jax": _jax, "mlx": _mlx,
}  # fmt: skip


def where(wanted: str) -> str:
    """The device for ``--device``."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"--device: expected auto, cpu or cuda, got {wanted!r}")
    if wanted == "cpu" or find_spec("torch") is None:
        if wanted == "cuda":
            raise typer.BadParameter("--device cuda: needs PyTorch, which is not installed")
        return "cpu"
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: PyTorch finds no CUDA device here")
    return "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str, device: str = "cpu") -> Library:
    """A library by name; `ImportError` where it is not installed."""
    return LOADERS[name](backends.load(name, None if device == "cpu" else device), device)


def wanted(session: Session, names: str, among: Sequence[str] = tuple(LOADERS)) -> list[Library]:
    """The libraries for ``--backend`` that are installed; the session notes those that are not.

    On "cuda" only PyTorch runs: what the others would run on cannot be told from here.
    """
    listed = words(names, "--backend", ("all", *among))
    found = []
    for name in among if "all" in listed else listed:
        if session.device == "cuda" and name != "torch":
            session.leave_out(
                name, "only PyTorch is measured on this device; run --device cpu for it"
            )
            continue
        try:
            found.append(load(name, session.device))
        except ImportError as error:
            session.leave_out(name, f"not installed ({error})")
    return found
