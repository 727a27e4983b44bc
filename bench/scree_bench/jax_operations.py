"""Norms and operations on rows in JAX: scree, and XLA on tokens or padded batches.

The operations have the same names as on PyTorch, and the contenders have other names. So one table holds
the results of both libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import scree

from .formulas import EPS
from .libraries import Function
from .operations import Contender, Operation
from .peers import importable

if TYPE_CHECKING:
    from .commands.kernels import Batch

SCREE, STANDARD, PADDED, XLA = "scree, JAX", "scree, JAX, standard path", "padded, XLA", "XLA"


def _contenders(
    run: Callable[[str | None], Function],
    args: Sequence[Any],
    peer: Function | None = None,
    peer_args: Sequence[Any] | None = None,
) -> dict[str, Contender]:
    """Return scree, its standard path, and a peer; a peer with arguments of its own is padded."""
    contenders: dict[str, Contender] = {
        SCREE: lambda: (run(None), tuple(args)),
        STANDARD: lambda: (run("standard"), tuple(args)),
    }
    if peer is not None:
        name = XLA if peer_args is None else PADDED
        contenders[name] = lambda: (peer, tuple(args if peer_args is None else peer_args))
    return contenders


# --- norms ---
def norm(
    name: str,
    ours: Callable[[str | None], Function],
    leaves: Sequence[Any],
    traffic: tuple[float, float, float],
) -> Operation:
    """Return the operation of `commands.norms` with this name on (tokens, width) and weights.

    `ours` returns scree's function for a kernel.
    """
    import jax.numpy as jnp

    def plain(x: Any, w: Any, other: Any = None) -> Any:
        total = x + other if name == "rms_norm of a sum" else x
        y = total.astype(jnp.promote_types(total.dtype, jnp.float32))
        if name == "layer_norm":
            y = y - y.mean(-1, keepdims=True)
        y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + EPS) * w
        y = (y + other if name == "layer_norm" else y).astype(x.dtype)
        return (y, total) if name == "rms_norm of a sum" else y

    def reference() -> Any:
        x, w, *others = (np.asarray(x, np.float64) for x in leaves)
        total = x + others[0] if name == "rms_norm of a sum" else x
        y = total - total.mean(-1, keepdims=True) if name == "layer_norm" else total
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * w
        y = y + others[0] if name == "layer_norm" else y
        return (y, total) if name == "rms_norm of a sum" else y

    contenders = _contenders(ours, leaves, plain)
    if importable("tokamax") and name != "rms_norm of a sum":
        contenders["Tokamax"] = lambda: (_tokamax_norm(name), tuple(leaves))
    return Operation(name, contenders, traffic, reference)


def _tokamax_norm(name: str) -> Function:
    run = import_module("tokamax").layer_norm
    if name == "layer_norm":
        return lambda x, w, b: run(x, w, b, epsilon=EPS)
    return lambda x, w: run(x, w, None, epsilon=EPS, subtract_mean=False)


# --- rows ---
def _loop(b: Batch, function: Callable[[np.ndarray], Any], join: Function) -> Callable[[], Any]:
    """Return a float64 loop over rows."""
    rows = np.split(b.lib.as_float64(b.values), np.cumsum(b.lengths)[:-1])
    return lambda: join([function(row) for row in rows])


def _softmax(name: str) -> Callable[[Batch], Operation]:
    ragged, per_row = getattr(scree, name), name == "logsumexp"

    def operation(b: Batch) -> Operation:
        import jax

        peer = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}.get(name)
        peer = peer or jax.scipy.special.logsumexp

        def ours(kernel: str | None) -> Function:
            def run(x: Any) -> Any:
                out = ragged(b.rows(x), kernel=kernel)
                return out if per_row else out.values

            return run

        def exact(row: np.ndarray) -> Any:
            shift = row.max(0)
            log_sum = shift + np.log(np.exp(row - shift).sum(0))
            if per_row:
                return log_sum
            return row - log_sum if name == "log_softmax" else np.exp(row - log_sum)

        forward, backward = (1 if per_row else 2) * b.bytes, (2 if per_row else 3) * b.bytes
        contenders = _contenders(ours, [b.values], lambda x: peer(x, 1), [b.padded(-np.inf)])
        # A padded result has another form than the reference.
        yardsticks = {} if per_row else {PADDED: contenders.pop(PADDED)}
        return Operation(
            name,
            contenders,
            (forward, backward, forward + backward),
            _loop(b, exact, np.stack if per_row else np.concatenate),
            yardsticks=yardsticks,
        )

    return operation


def _reduction(name: str) -> Callable[[Batch], Operation]:
    def operation(b: Batch) -> Operation:
        import jax.numpy as jnp

        xp, fill = b.lib.xp, {"max": -np.inf}.get(name, 0.0)
        lengths = b.lib.make(b.lengths.reshape(-1, *[1] * len(b.token)), "float32")
        backward = (1 if name in ("sum", "mean") else 2) * b.bytes

        def ours(kernel: str | None) -> Function:
            return lambda x: getattr(xp, name)(b.rows(x), axis=1)

        def padded(x: Any) -> Any:
            if name == "mean":
                return (jnp.sum(x, 1, dtype=jnp.float32) / lengths).astype(x.dtype)
            return getattr(jnp, name)(x, axis=1)

        contenders = _contenders(ours, [b.values], padded, [b.padded(fill)])
        del contenders[STANDARD]  # functions of the standard take no kernel
        return Operation(
            f"{name} of rows",
            contenders,
            (b.bytes, backward, b.bytes + backward),
            _loop(b, lambda row: getattr(row, name)(0), np.stack),
        )

    return operation


def _rope(b: Batch) -> Operation:
    dim = b.values.shape[-1] if b.values.ndim > 2 else 64
    heads = b.values.reshape(b.total, -1, dim)

    def expected() -> Any:
        at = np.concatenate([*map(np.arange, b.lengths)])[:, None, None]
        angle = at * 10000.0 ** (-np.arange(0, dim, 2) / dim)
        low, high = np.split(b.lib.as_float64(heads), 2, -1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def ours(kernel: str | None) -> Function:
        return lambda x: scree.rope(b.rows(x), kernel=kernel).values

    traffic = 2 * b.bytes, 2 * b.bytes, 4 * b.bytes
    return Operation("rope", _contenders(ours, [heads]), traffic, expected)


def _plain_cross_entropy(logits: Any, targets: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.mean(jax.scipy.special.logsumexp(logits, axis=1) - chosen)


def _exact_cross_entropy(logits: np.ndarray, targets: Any) -> Any:
    shift = logits.max(1, keepdims=True)
    log_sum = shift[:, 0] + np.log(np.exp(logits - shift).sum(1))
    return np.mean(log_sum - logits[np.arange(len(logits)), np.asarray(targets)])


def _cross_entropy(b: Batch) -> Operation:
    targets = b.lib.make(b.rng.integers(0, b.width, b.total), "int32")

    def ours(kernel: str | None) -> Function:
        return lambda x: scree.cross_entropy(b.rows(x), b.rows(targets), kernel=kernel)

    return Operation(
        "cross_entropy",
        _contenders(ours, [b.values], lambda x: _plain_cross_entropy(x, targets)),
        (b.bytes, 2 * b.bytes, 3 * b.bytes),
        lambda: _exact_cross_entropy(b.lib.as_float64(b.values), targets),
    )


def _linear_cross_entropy(b: Batch) -> Operation:
    count = 2 * b.width
    targets = b.lib.make(b.rng.integers(0, count, b.total), "int32")
    weight = b.normal(count, b.width) / b.width**0.5
    flops = 2.0 * b.total * b.width * count

    def ours(kernel: str | None) -> Function:
        return lambda x, w: scree.linear_cross_entropy(b.rows(x), w, b.rows(targets), kernel=kernel)

    return Operation(
        "linear_cross_entropy",
        _contenders(ours, [b.values, weight], lambda x, w: _plain_cross_entropy(x @ w.T, targets)),
        flops=(flops, 2 * flops, 3 * flops),
        reference=lambda: _exact_cross_entropy(
            b.lib.as_float64(b.values) @ b.lib.as_float64(weight).T, targets
        ),
    )


def _grouped(b: Batch) -> Operation:
    import jax

    xp = b.lib.xp
    weights = b.normal(len(b.lengths), b.width, b.width) / b.width**0.5
    sizes = b.lib.make(b.lengths, "int32")
    flops = 2.0 * b.total * b.width**2

    def expected() -> Any:
        w = b.lib.as_float64(weights)
        rows = np.split(b.lib.as_float64(b.values), np.cumsum(b.lengths)[:-1])
        return np.concatenate([row @ w[i] for i, row in enumerate(rows)])

    return Operation(
        "grouped product",
        {
            SCREE: lambda: (lambda x, w: xp.matmul(b.rows(x), w).values, (b.values, weights)),
            "jax.lax.ragged_dot": lambda: (
                lambda x, w: jax.lax.ragged_dot(x, w, sizes),
                (b.values, weights),
            ),
        },
        flops=(flops, 2 * flops, 3 * flops),
        reference=expected,
    )


#: Operations of `commands.kernels` along the rows of the batch of the options.
ALONG_ROWS_OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    *map(_softmax, ("softmax", "log_softmax", "logsumexp")),
    *map(_reduction, ("sum", "mean", "max")),
)

#: All its operations on this batch.
OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    *ALONG_ROWS_OPERATIONS,
    _rope,
    _cross_entropy,
    _linear_cross_entropy,
    _grouped,
)
