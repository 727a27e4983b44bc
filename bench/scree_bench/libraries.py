"""Measured libraries: how each synchronizes, differentiates, compiles and counts memory.

`scree_conformance.backends` makes and reads their arrays. This module adds what measurements need.
"""

from __future__ import annotations

import os
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
from .options import parse_words

if TYPE_CHECKING:
    from .session import Session

Function = Callable[..., Any]

#: Compiled variants that `torch.compile` may keep per function.
MAX_RECOMPILES = 100


def _identity(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Step:
    """A prepared call: a callable that exposes its function and arguments.

    Compilers count memory from these.
    """

    run: Function
    args: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        return self.run(*self.args)


Steps = dict[str, Callable[[], Step]]


@dataclass(frozen=True)
class MeasuredLibrary:
    """One library on one device, with the calls that time it and count its memory.

    Attributes
    ----------
    arrays
        The library of the conformance suite, which makes and reads its arrays.
    device
        "cpu" or "cuda".
    wait
        Waits until a result has been computed, and returns it.
    phases
        ``phases(function, args, cotangent)`` returns builders of the calls "forward" and, if the
        library differentiates, "backward" and "both". "backward" computes the gradients of all
        `args` from a retained graph.
    peak
        ``peak(step)``: the peak bytes of a call in addition to its arguments, as counted by the
        library.
    compiled
        The function as users of the library run it, for example under `jit`.
    """

    arrays: backends.Library
    device: str
    wait: Function = _identity
    phases: Callable[[Function, Sequence[Any], Any], Steps] | None = None
    peak: Callable[[Step], int] = traced_peak
    compiled: Callable[[Function], Function] = _identity

    @property
    def name(self) -> str:
        """The name of the library."""
        return self.arrays.name

    def make(self, x: np.ndarray, dtype: str = "float32") -> Any:
        """Convert a NumPy array to an array of the library."""
        return self.arrays.make(x, dtype)

    def normal(self, seed: int, dtype: str = "float32") -> Callable[..., Any]:
        """Return ``normal(*shape)``, which makes new random numbers at each call.

        On CUDA the numbers are generated on the device, since generating them on the host takes
        seconds.
        """
        if self.device == "cuda" and self.name == "jax":
            import jax

            keys = iter(jax.random.split(jax.random.key(seed), 100))
            return lambda *shape: jax.random.normal(next(keys), shape).astype(
                self.arrays.dtypes[dtype]
            )
        if self.device == "cuda":
            import torch

            generator = torch.Generator(self.device).manual_seed(seed)
            return lambda *shape: torch.randn(shape, generator=generator, device=self.device).to(
                self.arrays.dtypes[dtype]
            )
        rng = np.random.default_rng(seed)
        return lambda *shape: self.make(rng.standard_normal(shape, dtype=np.float32), dtype)

    def as_float64(self, x: Any, like: Any = None) -> Any:
        """Convert an array to float64.

        PyTorch's arrays stay on their device; other arrays become NumPy arrays. All arrays become
        NumPy arrays if `like` is a NumPy array.
        """
        if self.name == "torch" and not isinstance(like, np.ndarray):
            return x.detach().double()
        return self.arrays.read(x)

    @property
    def xp(self) -> Any:
        """The namespace of the library, which also accepts ragged arrays."""
        return scree.namespace(self.make(np.zeros(1)))

    def steps(self, function: Function, args: Sequence[Any], cotangent: Any = None) -> Steps:
        """Return builders of the calls to time.

        These are "forward" and, if the library differentiates, "backward" and "both".
        """
        if self.phases is None or cotangent is None:
            return {"forward": lambda: Step(self.compiled(function), tuple(args))}
        return self.phases(function, args, cotangent)


# --- PyTorch ---
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
    """Compile a function with `torch.compile`, once per shape.

    The limit of recompilations is raised to `FORMS`; PyTorch would stop after eight.
    """
    import torch
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = MAX_RECOMPILES
    compiled: Function = torch.compile(function, dynamic=False)
    return compiled


def nested_tensor_maker(lib: MeasuredLibrary, lengths: np.ndarray | Sequence[int]) -> Function:
    """Return a function that makes PyTorch's nested tensor of packed tokens.

    The minimum and maximum lengths are passed, which avoids a device-to-host synchronization.
    """
    import torch

    offsets = lib.make(np.concatenate([[0], np.cumsum(lengths)]), "int64")
    return partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=offsets,
        min_seqlen=int(min(lengths)),
        max_seqlen=int(max(lengths)),
    )


def allocations(thunk: Callable[[], Any]) -> tuple[list[tuple[float, int]], Any]:
    """Return the memory over time of a call, and the profile.

    The first value has one pair (seconds, bytes held) per allocation of PyTorch's CPU tensors.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = thunk()
        del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    held, timeline = 0, []
    for event in events:
        held += event.nbytes()
        timeline.append(((event.start_ns() - events[0].start_ns()) / 1e9, held))
    return timeline, profiler


def _torch_peak(step: Step) -> int:
    # Exclude memory that the first call allocates and keeps.
    step()
    return max((held for _, held in allocations(step)[0]), default=0)


def _cuda_peak(step: Step) -> int:
    import torch

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _torch(arrays: backends.Library, device: str) -> MeasuredLibrary:
    import torch
    import torch._functorch.config as functorch

    # The backward pass is timed on a retained graph, whose buffers must survive a call.
    functorch.donated_buffer = False
    peak = _cuda_peak if device == "cuda" else _torch_peak

    def wait(x: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return x

    return MeasuredLibrary(arrays, device, wait, _torch_phases, peak)


# --- JAX ---
def _jax(arrays: backends.Library, device: str) -> MeasuredLibrary:
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
        memory = run.lower(*step.args).compile().memory_analysis()
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

    return MeasuredLibrary(arrays, device, jax.block_until_ready, phases, peak, jax.jit)


# --- MLX ---
def _mlx(arrays: backends.Library, device: str) -> MeasuredLibrary:
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

    return MeasuredLibrary(arrays, device, wait, phases, peak)


def _numpy(arrays: backends.Library, device: str) -> MeasuredLibrary:
    return MeasuredLibrary(arrays, device)


LOADERS: dict[str, Callable[[backends.Library, str], MeasuredLibrary]] = {
    "numpy": _numpy, "torch": _torch, "jax": _jax, "mlx": _mlx,
}  # fmt: skip


def resolve_device(name: str) -> str:
    """Return the device for ``--device``."""
    if name not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"--device: expected auto, cpu or cuda, got {name!r}")
    if name == "cpu" or find_spec("torch") is None:
        if name == "cuda":
            raise typer.BadParameter("--device cuda: needs PyTorch, which is not installed")
        return "cpu"
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: PyTorch finds no CUDA device here")
    return "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str, device: str = "cpu") -> MeasuredLibrary:
    """Load a library by name. Raises `ImportError` if it is not installed."""
    # By default JAX reserves three quarters of the GPU's memory, which PyTorch needs too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return LOADERS[name](backends.load(name, None if device == "cpu" else device), device)


def installed_libraries(
    session: Session, names: str, among: Sequence[str] = tuple(LOADERS), on_cuda: Sequence[str] = ()
) -> list[MeasuredLibrary]:
    """Return the installed libraries for ``--backend``; the session notes the missing libraries.

    On "cuda" PyTorch runs, and every library of `on_cuda` that ``--backend`` names.
    """
    listed = parse_words(names, "--backend", ("all", *among))
    libraries = []
    for name in among if "all" in listed else listed:
        if session.device == "cuda" and name != "torch":
            reason = "only PyTorch is measured on this device; run --device cpu for it"
            if name in on_cuda:
                reason = f"runs on this device with --backend torch,{name}"
            if name not in on_cuda or "all" in listed:
                session.leave_out(name, reason)
                continue
        try:
            libraries.append(load(name, session.device))
        except ImportError as error:
            session.leave_out(name, f"not installed ({error})")
        except RuntimeError as error:  # JAX without a CUDA device
            session.leave_out(name, f"finds no device ({error})")
    return libraries
