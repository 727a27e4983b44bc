"""The training loop on JAX: the Llama of `models`, with optax, compiled as one function per step.

Initial weights, batches, loss, schedule and optimizer are the same as in `loop`. The number of tokens and
of rows is fixed, so the function compiles once.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import scree

from ..gpt import IGNORED
from . import models
from .forms import FORMS, Part, Plan
from .loop import PRECISIONS, Settings, Step
from .models import Size
from .text import Batches, Documents


def hidden_states(p: dict[str, Any], size: Size, x: scree.Array, recompute: str) -> scree.Array:
    """Return the hidden states after all layers and the last norm.

    Parameters
    ----------
    p
        The parameters by name, see `models.parameters`.
    size
        The size of the model, a Llama.
    x
        (n, None, width) the embeddings of the tokens.
    recompute
        One of `models.RECOMPUTE`.
    """
    import jax

    norm = partial(scree.rms_norm, eps=size.eps)

    def layer(p: dict[str, Any], y: Any, x: Any) -> tuple[Any, Any]:
        array = layout.with_values
        y, x = norm(array(y), p["norm1"], residual=array(x))
        qkv = (y.values @ p["qkv"]).reshape(total, -1, size.dim)
        q, k, v = scree.split(array(qkv), (size.heads, size.kv_heads, size.kv_heads), axis=2)
        q, k = scree.rope(q, k)
        a = scree.attention(q, k, v, causal=True)
        a = array(a.values.reshape(total, -1) @ p["out"])
        y, x = norm(a, p["norm2"], residual=x)
        return down(y.values @ p["up"], p["down"]), x.values

    def down(up: Any, weight: Any) -> Any:
        return scree.swiglu(up) @ weight

    run = jax.checkpoint(layer) if recompute == "layers" else layer
    down = jax.checkpoint(down) if recompute == "activations" else down
    # The first layer adds 0 to the embeddings, so that all layers are one function.
    layout, total = x, x.values.shape[0]
    y, values = jax.numpy.zeros_like(x.values), x.values
    for i in range(size.layers):
        y, values = run(models.layer_parameters(p, i), y, values)
    result: scree.Array = norm(
        layout.with_values(y), p["norm"], residual=layout.with_values(values)
    )[0]
    return result


def make_loss(plan: Plan, precision: str) -> Any:
    """Return ``loss(parameters, ids, targets, offsets)``, which casts parameters for the products."""
    import jax.numpy as jnp

    dtype = jnp.dtype(PRECISIONS[precision][1])

    def loss(parameters: dict[str, Any], ids: Any, targets: Any, offsets: Any) -> Any:
        p = {name: x.astype(dtype) for name, x in parameters.items()}
        # Gradients of the embedding are added in the dtype of the weights.
        embedded = parameters["embedding"][ids].astype(dtype)
        x = scree.from_cu_seqlens(embedded, offsets, max_length=plan.context)
        x = hidden_states(p, plan.size, x, plan.recompute)
        return scree.linear_cross_entropy(
            x, p["embedding"], x.with_values(targets), ignore_index=IGNORED
        )

    return loss


class JaxTraining:
    """A model in training on JAX; it has the interface of `loop.Training`."""

    def __init__(
        self, settings: Settings, documents: Documents, form: str, compiled: bool, head: str
    ) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        import torch

        self.settings, self.jax, self.form = settings, jax, FORMS[form]
        weights = getattr(torch, PRECISIONS[settings.precision][0])
        drawn = models.parameters(settings.plan.size, settings.device, weights, settings.seed)
        # Copies, because the step overwrites the memory of its arguments.
        self.parameters = {
            name: jnp.array(jnp.from_dlpack(x.detach()), copy=True) for name, x in drawn.items()
        }
        jax.block_until_ready(self.parameters)
        del drawn
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        adam = optax.adamw(
            self._rate, b1=0.9, b2=0.95, weight_decay=settings.decay,
            mask=lambda p: {name: x.ndim > 1 for name, x in p.items()},
        )  # fmt: skip
        clip = [optax.clip_by_global_norm(settings.clip)] if settings.clip else []
        optimizer = optax.chain(*clip, adam)
        # JAX would compile again for arrays that the step returns if these had no fixed device.
        initial = self.parameters, optimizer.init(self.parameters)
        self.parameters, self.state = jax.device_put(initial, jax.local_devices()[0])
        loss = make_loss(settings.plan, settings.precision)

        def run(p: Any, state: Any, batches: Any, shares: Any) -> Any:
            def total(p: Any) -> Any:
                return sum(loss(p, *arrays) * share for arrays, share in zip(batches, shares))

            value, grads = jax.value_and_grad(total)(p)
            updates, state = optimizer.update(grads, state, p)
            return optax.apply_updates(p, updates), state, value

        self._run = jax.jit(run, donate_argnums=(0, 1))
        self.batches = Batches(documents, settings.plan.total, settings.seed)
        self.step = 0
        self._pending: Any = None
        self._ends: dict[int, float] = {}

    def _rate(self, step: Any) -> Any:
        """Return the learning rate of a step, see `loop.Training.rate`."""
        import jax.numpy as jnp

        s = self.settings
        share = jnp.minimum(1.0, (step - s.warm_up) / max(1, s.steps - s.warm_up))
        cosine = s.rate * (0.55 + 0.45 * jnp.cos(jnp.pi * share))
        return jnp.where(step < s.warm_up, s.rate * (step + 1) / max(1, s.warm_up), cosine)

    def run(self) -> Step:
        """Make one step; the host waits for the previous step only."""
        rows = [self.batches.take() for _ in range(self.settings.accumulate)]
        parts: list[Part] = [part for r in rows for part in self.form.parts(self.settings.plan, r)]
        targets = sum(part.targets for part in parts)
        batches = [tuple(x.astype(np.int32) for x in part.arrays) for part in parts]
        shares = [np.float32(part.targets / targets) for part in parts]
        self.parameters, self.state, loss = self._run(
            self.parameters, self.state, self.jax.device_put(batches), shares
        )
        self._finish()
        self.step += 1
        self._pending = loss
        flops = models.flops(self.settings.plan.size, [len(row) for r in rows for row in r])
        return Step(self.step, loss, flops, self.step)

    def _finish(self) -> None:
        """Wait for the step that runs, and keep the time of its end."""
        if self._pending is not None:
            self._pending.block_until_ready()
            self._pending = None
            self._ends[self.step] = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device is idle."""
        self._finish()

    def now(self) -> int:
        """Return the number of the last step, whose end is now. The device is idle."""
        self._ends[self.step] = time.perf_counter()
        return self.step

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds between the ends of two steps, on the clock of the host."""
        return self._ends[end] - self._ends[start]

    def reset_peak(self) -> None:
        """Do nothing, because JAX counts the peak from its start."""

    def resume(self, folder: Path) -> tuple[list[float], float]:
        """Raise `NotImplementedError`: JAX has no checkpoints here."""
        raise NotImplementedError("there are no checkpoints on JAX; run without --checkpoint")

    def save(self, folder: Path, losses: list[float], seconds: float) -> None:
        """Raise `NotImplementedError`: JAX has no checkpoints here."""
        self.resume(folder)

    def peak_bytes(self) -> int | None:
        """Return the largest memory so far, with the memory of the compiler's own measurements."""
        statistics = self.jax.local_devices()[0].memory_stats() or {}
        return statistics.get("peak_bytes_in_use")
