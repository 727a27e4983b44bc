"""The backend of JAX."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as xp
import numpy as np

from . import UNREADABLE, Backend

#: Numbers of tokens outside of `jax.jit` after which a warning is due.
MAX_TOTALS = 10
_totals: set[int] = set()


def _warn_of_many_totals(total: int) -> None:
    """Warn once if functions ran on many different numbers of tokens outside of `jax.jit`."""
    if len(_totals) > MAX_TOTALS:
        return
    _totals.add(total)
    if len(_totals) > MAX_TOTALS:
        warnings.warn(
            f"functions ran on {MAX_TOTALS + 1} different numbers of tokens outside of jax.jit, and "
            "JAX compiles each function again for each number; use jax.jit on batches of few shapes, "
            "which scree.bucket gives",
            stacklevel=2,
        )


def _peek(x: Any) -> np.ndarray | None:
    if isinstance(x, jax.core.Tracer) or x.platform() != "cpu" or len(x.devices()) != 1:
        return None
    return np.asarray(x)


def _read(x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(UNREADABLE)
    return np.asarray(x)


def _row_ids(repeats: Any, total: int) -> Any:
    host = _peek(repeats)
    if host is not None:
        _warn_of_many_totals(total)
        row_ids = np.repeat(np.arange(host.size, dtype=host.dtype), host)
        return jax.device_put(row_ids, device(repeats))
    return xp.repeat(xp.arange(repeats.shape[0]), repeats, total_repeat_length=total)


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    if not isinstance(key, jax.Array):
        raise TypeError(f"key: expected a key of jax.random, got {type(key).__name__}")
    return jax.random.uniform(key, shape)


def device(x: Any) -> Any:
    """Return the device of an array; None if a trace hides it, or unless committed to one device."""
    if isinstance(x, jax.core.Tracer) or not x.committed or len(x.devices()) > 1:
        return None
    return x.device


def _untraced(offsets: Any) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(offsets, jax.core.Tracer) else jax.ensure_compile_time_eval()


def _from_numpy(host: np.ndarray, dtype: Any, device: Any) -> Any:
    # jax.numpy.asarray would compile a function for every shape.
    return jax.device_put(np.asarray(host, dtype=dtype), device)


def _to_device(x: Any, device: Any) -> Any:
    # Clients of array-api-compat write "cpu" for every library.
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return jax.device_put(x, device)


BACKEND = Backend(
    "jax",
    xp,
    _peek,
    _read,
    row_ids=_row_ids,
    device=device,
    to_device=_to_device,
    uniform=_uniform,
    untraced=_untraced,
    checkpoint=jax.checkpoint,
    gathers_rows_by_tiles=lambda: jax.default_backend() != "cpu",
    from_numpy=_from_numpy,
    write=lambda x, index, values: x.at[index].set(values),
    erf=jax.scipy.special.erf,
)
