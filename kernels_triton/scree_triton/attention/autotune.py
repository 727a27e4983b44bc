"""Measuring the tiles of the portable kernels on the device at hand: what ``SCREE_AUTOTUNE=1`` asks for.

The tables of `tuned` know the devices that they were measured on. Elsewhere the first call of a kind tries the candidates
below on its own arguments and prints the best in the form of a line of those tables. So the first call should be a typical
one; it takes minutes, most of them compilation.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from .tile_configs import Tile, Tiles

#: Queries, keys and warps; the stages are tried on the best of them.
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
_FOUND: dict[tuple, Tiles] = {}


def milliseconds(call: Callable[[Any], Any], plan: Any) -> float:
    """Device time of a call of a plan; infinite for what does not compile or fit."""
    try:
        return do_bench(lambda: call(plan), warmup=5, rep=20, return_mode="median")  # type: ignore[no-any-return]
    except (
        CompilationError,
        OutOfResources,
    ):  # tiles that the device cannot hold are never the fastest
        return float("inf")


def measured(
    kind: tuple,
    make: Callable[[Tiles], Any],
    start: Tiles,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Any,
    spec: Any,
    alibi: bool,
) -> Tiles:
    """The best tiles for calls of a kind.

    Parameters
    ----------
    kind
        What the tiles are for: device, dtype, padded head_dim, features. Measured once.
    make
        Makes a plan of tiles.
    start
        The tiles to begin with.
    q, k, v, rows, spec, alibi
        The call to measure.
    """
    if kind in _FOUND:
        return _FOUND[kind]
    q, k, v = q.detach(), k.detach(), v.detach()
    slopes = torch.ones(q.shape[1], device=q.device) if alibi else None
    out, lse = make(start).forward(q, k, v, slopes, rows, spec)

    def forward(plan: Any) -> Any:
        return plan.forward(q, k, v, slopes, rows, spec)

    def backward(plan: Any) -> Any:
        return plan.backward(q, k, v, slopes, out, lse, out, None, rows, spec)

    best = start
    for name, call in (("forward", forward), ("dq", backward), ("dkdv", backward)):
        best = _fastest(make, call, best, name, [Tile(*shape, 2) for shape in SHAPES])
        best = _fastest(
            make,
            call,
            best,
            name,
            [getattr(best, name)._replace(stages=stages) for stages in STAGES],
        )
    _FOUND[kind] = best
    print(
        f"scree: measured on {q.device}: {kind[1:3]}: {best},  # {', '.join(map(str, kind[3:]))}",
        flush=True,
    )
    return best


def _fastest(
    make: Callable[[Tiles], Any],
    call: Callable[[Any], Any],
    best: Tiles,
    name: str,
    candidates: list[Tile],
) -> Tiles:
    """`best` with the candidate for one kernel that makes it faster than all others, if one does."""
    every = dict.fromkeys([best, *(best._replace(**{name: tile}) for tile in candidates)])
    return min(every, key=lambda tiles: milliseconds(call, make(tiles)))
