"""Autotuning of the portable kernels' tiles on the current device, with ``SCREE_AUTOTUNE=1``.

The tables of `tile_configs` cover the devices on which they were measured. On other devices the
first call of a kind tries the candidates below on its own arguments. It prints the best tiles as a
line of those tables. So the first call should be a typical one. It takes minutes, most of them
compilation.

The choice is kept in Triton's cache directory, in one file per model of GPU and version of Triton.
Processes on one file system share it: the first to come measures, the others wait and read. So all
ranks of a program use the same tiles.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from scree.dispatch.operation import KernelUnavailableError

from ..runtime.device import TRITON_VERSION
from ..runtime.file_lock import file_lock
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
#: Device and kind of call -> best tiles.
RESULTS: dict[tuple, Tiles] = {}


def milliseconds(call: Callable[[Any], Any], config: Any) -> float:
    """Return the device time of a call; infinity if its config does not compile or fit."""
    try:
        time: float = do_bench(lambda: call(config), warmup=5, rep=20, return_mode="median")
        return time
    except (KernelUnavailableError, CompilationError, OutOfResources):
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
    alibi: int,
) -> Tiles:
    """Return the fastest tiles for calls of a kind.

    Parameters
    ----------
    kind
        The key of the result: itemsize, padded head_dim, dtype, features. Each kind is measured once
        per model of GPU.
    make_config
        Makes the launch config with given tiles.
    initial
        The tiles to start from.
    q, k, v, layout, spec, alibi
        The call to measure.
    """
    key = q.device, *kind
    if key not in RESULTS:
        path, name = results_file(q.device), " ".join(map(str, kind))
        with file_lock(path.with_suffix(".lock")):
            saved = json.loads(path.read_text()) if path.exists() else {}
            if name in saved:
                RESULTS[key] = Tiles(*(Tile(*tile) for tile in saved[name]))
            else:
                RESULTS[key] = _measure(make_config, initial, q, k, v, layout, spec, alibi)
                path.write_text(json.dumps({**saved, name: RESULTS[key]}, indent=1))
                features = ", ".join(map(str, kind[2:]))
                print(
                    f"scree: measured on {q.device}: {kind[:2]}: {RESULTS[key]},  # {features}",
                    flush=True,
                )
    return RESULTS[key]


def results_file(device: torch.device) -> Path:
    """Return the file with the choices for a model of GPU and a version of Triton."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    version = ".".join(map(str, TRITON_VERSION))
    folder = Path(knobs.cache.dir) / "scree"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"attention-{re.sub('[^A-Za-z0-9]+', '-', name)}-triton{version}.json"


def _measure(
    make_config: Callable[[Tiles], Any],
    initial: Tiles,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Any,
    spec: Any,
    alibi: int,
) -> Tiles:
    q, k, v = q.detach(), k.detach(), v.detach()
    slopes = torch.ones(q.shape[2 - alibi : 2], device=q.device) if alibi else None
    seed = torch.zeros(1, dtype=torch.int64, device=q.device) if spec.dropout else None
    out, lse = make_config(initial).forward(q, k, v, slopes, layout, spec, seed)

    def forward(config: Any) -> Any:
        return config.forward(q, k, v, slopes, layout, spec, seed)

    def backward(config: Any) -> Any:
        return config.backward(q, k, v, slopes, out, lse, out, None, layout, spec, seed)

    best = initial
    for name, call in (("forward", forward), ("dq", backward), ("dkdv", backward)):
        shapes = [Tile(*shape, 2) for shape in SHAPES]
        best = _fastest(make_config, call, best, name, shapes)
        stages = [getattr(best, name)._replace(num_stages=stages) for stages in STAGES]
        best = _fastest(make_config, call, best, name, stages)
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
