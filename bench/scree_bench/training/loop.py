"""The training loop: PyTorch's AdamW, a cosine schedule, and checkpoints that resume exactly."""

from __future__ import annotations

import gc
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import scree

from . import models
from .forms import FORMS, Loss, Plan
from .heads import HEADS
from .text import Batches, Documents

#: Precision -> data types of the weights and of the products.
PRECISIONS = {
    "amp": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
    "fp32": ("float32", "float32"),
}
#: Checkpoints that are kept, the newest ones.
KEPT_CHECKPOINTS = 2


class Settings(NamedTuple):
    """Settings of a run that all contenders share."""

    plan: Plan
    device: str
    precision: str
    #: Batches per step of the optimizer.
    accumulate: int
    #: Steps of the schedule, and of its linear warm-up.
    steps: int
    warm_up: int
    rate: float
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    @property
    def step_tokens(self) -> int:
        """Real tokens per step."""
        return self.plan.total * self.accumulate


class Step(NamedTuple):
    """A step: its number, loss, operations, and end as a time or a CUDA event."""

    number: int
    loss: Any
    flops: float
    end: Any


@cache
def make_loss(plan: Plan, form: str, compiled: bool, head: str, precision: str) -> Loss:
    """Return ``loss(parameters, *arrays)``, which casts the parameters for the products.

    Runs with other seeds share the function, so that it compiles once. A form whose shapes change
    compiles one layer instead of the whole model, because a model of dynamic shapes takes minutes.
    """
    import torch

    by_layer = compiled and FORMS[form].changes_shape
    loss = FORMS[form].make_loss(plan._replace(compiles_layers=by_layer), HEADS[head](by_layer))
    dtype = getattr(torch, PRECISIONS[precision][1])

    def run(p: dict[str, Any], *arrays: Any) -> Any:
        return loss({name: x.to(dtype) for name, x in p.items()}, *arrays)

    if not compiled or by_layer:
        return run
    compiled_loss: Loss = torch.compile(run, dynamic=False)
    return compiled_loss


class Training:
    """A model in training, in one form."""

    def __init__(
        self, settings: Settings, documents: Documents, form: str, compiled: bool, head: str
    ) -> None:
        import torch

        self.settings, self.torch = settings, torch
        # cuDNN's attention plans each new shape for about 100 ms.
        torch.backends.cuda.enable_cudnn_sdp(not FORMS[form].changes_shape)
        weights = getattr(torch, PRECISIONS[settings.precision][0])
        self.form = FORMS[form]
        self.parameters = models.parameters(
            settings.plan.size, settings.device, weights, settings.seed
        )
        # The first call of scree loads its kernels; inside of a compiled function it compiles twice.
        scree.namespace(self.parameters["norm"])
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.batches = Batches(documents, settings.plan.total, settings.seed)
        self.step = 0
        self.loss = make_loss(settings.plan, form, compiled, head, settings.precision)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine to a tenth."""
        s = self.settings
        if step < s.warm_up:
            return s.rate * (step + 1) / s.warm_up
        share = min(1.0, (step - s.warm_up) / max(1, s.steps - s.warm_up))
        return s.rate * (0.55 + 0.45 * math.cos(math.pi * share))

    def run(self) -> Step:
        """Make one step. The loss stays on the device, so that the host does not wait for it."""
        with self._range("batch"):
            rows = [self.batches.take() for _ in range(self.settings.accumulate)]
            parts = [part for r in rows for part in self.form.parts(self.settings.plan, r)]
            targets = sum(part.targets for part in parts)
        total: Any = 0.0
        for part in parts:
            with self._range("copy to the device"):
                arrays = tuple(map(self._to_device, part.arrays))
            loss = self.loss(self.parameters, *arrays) * (part.targets / targets)
            loss.backward()
            total = total + loss.detach()
        with self._range("optimizer"):
            if self.settings.clip:
                gradients = [p.grad for p in self.parameters.values()]
                norm = self.torch.nn.utils.get_total_norm(gradients, foreach=True)
                # The fused optimizer divides by it, which saves a pass over all gradients.
                self.optimizer.grad_scale = (norm.float() / self.settings.clip).clamp(min=1)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        lengths = [len(row) for r in rows for row in r]
        self.step += 1
        flops = models.flops(self.settings.plan.size, lengths)
        return Step(self.step, total, flops, self.now())

    def _range(self, name: str) -> Any:
        """Mark a range for the profiler."""
        return self.torch.profiler.record_function(name)

    def _to_device(self, x: np.ndarray) -> Any:
        tensor = self.torch.from_numpy(x)
        if self.settings.device == "cuda":
            tensor = tensor.pin_memory().to("cuda", non_blocking=True)
        return tensor

    def now(self) -> Any:
        """Return the present time of the device: a CUDA event, or seconds."""
        if self.settings.device != "cuda":
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two times of `now`, whose device is idle."""
        if self.settings.device != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.settings.device == "cuda":
            self.torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Count the peak of memory from now on."""
        if self.settings.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the peak of memory, or None on the CPU."""
        if self.settings.device != "cuda":
            return None
        return int(self.torch.cuda.max_memory_allocated())

    # --- checkpoints ---
    def _state(self, losses: list[float], seconds: float) -> dict[str, Any]:
        torch, moments = self.torch, {}
        for name, p in self.parameters.items():
            state = self.optimizer.state[p]
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if key not in state:
                    state[key] = (
                        torch.zeros((), device=p.device) if key == "step" else torch.zeros_like(p)
                    )
                moments[f"{name}.{key}"] = state[key]
        position = self.batches.state()
        curve = torch.full((self.settings.steps,), math.nan, dtype=torch.float64)
        curve[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        return {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "moments": moments,
            "losses": curve,
            "progress": torch.tensor(
                [self.step, position["epoch"], position["position"], seconds], dtype=torch.float64
            ),
        }

    def save(self, folder: Path, losses: list[float], seconds: float) -> None:
        """Write a checkpoint; a process that ends here leaves the older checkpoints."""
        import torch.distributed.checkpoint as dcp

        folder.mkdir(parents=True, exist_ok=True)
        part, path = folder / "part", folder / f"step-{self.step:08d}"
        if part.exists():  # of a process that ended while it wrote
            shutil.rmtree(part)
        with _checkpoint_of_one_process():
            dcp.save(self._state(losses, seconds), checkpoint_id=part)
        if path.exists():
            shutil.rmtree(path)
        part.rename(path)
        for old in sorted(folder.glob("step-*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def resume(self, folder: Path) -> tuple[list[float], float]:
        """Continue from the newest checkpoint of a folder, if there is one.

        Returns the losses of the steps so far, and the seconds that they took.
        """
        paths = sorted(folder.glob("step-*"))
        if not paths:
            return [], 0.0
        import torch.distributed.checkpoint as dcp

        state = self._state([], 0.0)
        with _checkpoint_of_one_process():
            dcp.load(state, checkpoint_id=paths[-1])
        step, epoch, position = (int(x) for x in state["progress"][:3])
        self.step = step
        self.batches.load({"epoch": epoch, "position": position})
        return state["losses"][:step].tolist(), float(state["progress"][3])


@contextmanager
def _checkpoint_of_one_process() -> Iterator[None]:
    """Silence the question whether a checkpoint without a process group is meant, and let Ctrl-C end it."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
        try:
            yield
        except CheckpointException as error:
            # PyTorch collects all exceptions of the ranks, also Ctrl-C.
            if any(isinstance(x, KeyboardInterrupt) for x, _ in error.failures.values()):
                raise KeyboardInterrupt from None
            raise


def compiled_graphs() -> int:
    """Return how many graphs the compiler has made so far."""
    import torch._dynamo.utils as dynamo

    return int(dynamo.counters["stats"]["unique_graphs"])


def release(compiled: bool) -> None:
    """Free the memory of the last run, and with `compiled` also all compiled functions."""
    import torch

    if compiled:
        make_loss.cache_clear()
        torch._dynamo.reset()

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
