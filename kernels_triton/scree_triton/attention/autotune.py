"""Autotuning of the portable kernels' tiles on the current device, with ``SCREE_AUTOTUNE=1``.

The tables of `tile_configs` cover the devices on which they were measured. On other devices the
first call of a kind tries the candidates below on its own arguments. It prints the best tiles as a
line of those tables. So the first call should be a typical one. It takes minutes, most of them
compilation.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from .tile_configs import Tile, Tiles

#: Queries, keys and warps; the stages are tried on the best of these.
SHAPES = (
    (32, 32, 4),
    (64, 32, 4),
    (32, 64, 4),
    (64, 64, 4),
    (64, 64, 8),
    (128, 32, 4),
    (128, 64, 8),
    (64, 128, 8),
    (32, 128, 8),
    (128, 128, 8),
)
STAGES = (1, 2, 3)
#: Kind of call -> best tiles.
RESULTS: dict[tuple, Tiles] = {}


def milliseconds(call: Callable[[Any], Any], config: Any) -> float:
    """Return the device time of a call; infinity if its config does not compile or fit."""
    try:
        time: float = do_bench(lambda: call(config), warmup=5, rep=20, return_mode="median")
        return time
    except (CompilationError, OutOfResources):
        # Tiles that the device cannot hold are never the fastest.
        return float("inf")


def autotune_tiles(
    kind: tuple,
    make_config: Callable[[Tiles], Any],
    initial: Tiles,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Any,
    spec: Any,
    alibi: bool,
) -> Tiles:
    """Return the fastest tiles for calls of a kind.

    Parameters
    ----------
    kind
        The key of the result: device, itemsize, padded head_dim, dtype, features. Each kind is
        measured once.
    make_config
        Makes the launch config with given tiles.
    initial
        The tiles to start from.
    q, k, v, layout, spec, alibi
        The call to measure.
    """
    if kind in RESULTS:
        return RESULTS[kind]
    q, k, v = q.detach(), k.detach(), v.detach()
    slopes = torch.ones(q.shape[1], device=q.device) if alibi else None
    out, lse = make_config(initial).forward(q, k, v, slopes, layout, spec)

    def forward(config: Any) -> Any:
        return config.forward(q, k, v, slopes, layout, spec)

    def backward(config: Any) -> Any:
        return config.backward(q, k, v, slopes, out, lse, out, None, layout, spec)

    best = initial
    for name, call in (("forward", forward), ("dq", backward), ("dkdv", backward)):
        shapes = [Tile(*shape, 2) for shape in SHAPES]
        best = _fastest(make_config, call, best, name, shapes)
        stages = [getattr(best, name)._replace(num_stages=stages) for stages in STAGES]
        best = _fastest(make_config, call, best, name, stages)
    RESULTS[kind] = best
    print(
        f"scree: measured on {q.device}: {kind[1:3]}: {best},  # {', '.join(map(str, kind[3:]))}",
        flush=True,
    )
    return best


def _fastest(
    make_config: Callable[[Tiles], Any],
    call: Callable[[Any], Any],
    best: Tiles,
    name: str,
    candidates: list[Tile],
) -> Tiles:
    """Return `best`, with the tile of kernel `name` replaced if a candidate is faster."""
    tried = dict.fromkeys([best, *(best._replace(**{name: tile}) for tile in candidates)])
    return min(tried, key=lambda tiles: milliseconds(call, make_config(tiles)))
