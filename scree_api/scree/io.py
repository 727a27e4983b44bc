"""`save` and `load`: ragged arrays in files, by safetensors (memory-mapped) or NumPy's ``.npz``. Loading never runs code."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .array import Array
from .bridges.dlpack import dtype_name, to_backend
from .indexing.getitem import drop_tail

#: The format's names of the dtypes that both sides have.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64",
}  # fmt: skip
CODES = {name: code for code, name in DTYPES.items()}
MOST_HEADER = 100_000_000  # bytes; the format's own limit
FORMATS = (".safetensors", ".npz")

#: What NumPy says of a file that is none of its own, beside the errors of archives.
NPZ_ERRORS = (
    KeyError,
    ValueError,
    EOFError,
    OSError,
    AttributeError,
    RuntimeError,
    MemoryError,
    OverflowError,
    struct.error,
)


def save(path: str | os.PathLike[str], arrays: Array | Mapping[str, Array]) -> None:
    """Write a ragged array, or several with their names, to a file.

    Parameters
    ----------
    path
        Ends in ``.safetensors`` or ``.npz``.
    arrays
        A ragged array of any library, or a mapping of names to such arrays. Arrays on one layout share their offsets in the
        file, and share them again when they are loaded.

    Raises
    ------
    ValueError
        If the path ends in anything else, or a name has a dot.
    TypeError
        If a dtype has no form in the format: ``.npz`` has no bfloat16, safetensors no complex128.

    Notes
    -----
    The array ``x`` is stored as the tensors ``x.values`` and ``x.offsets``, which any program can read, and its ragged axis and
    `max_length` as metadata. The file appears whole or not at all.

    Examples
    --------
    >>> import numpy as np, scree, tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     scree.save(home + "/x.safetensors", scree.from_lengths(np.arange(3), [2, 0, 1]))
    ...     print(scree.load(home + "/x.safetensors")[2])
    [2]
    """
    path = Path(path)
    kind = _format(path)
    if not isinstance(arrays, Array | Mapping):
        raise TypeError(
            f"arrays: expected a ragged array, or a mapping of names to such, got {type(arrays).__name__}"
        )
    named = {"": arrays} if isinstance(arrays, Array) else dict(arrays)
    tensors: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, arr in named.items():
        if not isinstance(arr, Array):
            raise TypeError(f"arrays[{name!r}]: expected a ragged array, got {type(arr).__name__}")
        if not isinstance(name, str) or "." in name or (name == "" and arr is not arrays):
            raise ValueError(f"arrays: expected names without dots, and not empty, got {name!r}")
        shared = first.setdefault(id(arr.layout), name)
        host = to_backend(drop_tail(arr), "numpy")
        tensors[_join(name, "values")] = host.values
        if shared == name:
            tensors[_join(name, "offsets")] = host.offsets
        about[name] = {"rows": shared, "ragged_dim": arr.ragged_dim, "max_length": arr.max_length}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        (_write_safetensors if kind == ".safetensors" else _write_npz)(
            scratch, tensors, json.dumps(about)
        )
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], library: Any = "numpy", *, device: Any = None) -> Any:
    """Read what `save` wrote.

    Parameters
    ----------
    path
        A ``.safetensors`` or ``.npz`` file.
    library
        The library of the arrays, by its name or namespace.
    device
        Where they shall be; in host memory by default.

    Returns
    -------
    Array or dict
        What was given to `save`. From safetensors the values are mapped: they are read when they are looked at, row by row, and
        what is written to them stays in memory. NumPy, PyTorch and array-api-strict share that memory.

    Raises
    ------
    ValueError
        If the file is cut off or damaged, or not one of `save`. Nothing outside the file is read, and nothing in it is run.

    Examples
    --------
    >>> import numpy as np, scree, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scree.save(f"{folder}/rows.npz", scree.from_lengths(np.arange(5), [2, 3]))
    ...     scree.load(f"{folder}/rows.npz").lengths
    array([2, 3], dtype=int32)
    """
    path = Path(path)
    kind = _format(path)
    tensors, text = (_read_safetensors if kind == ".safetensors" else _read_npz)(path)
    try:
        about = json.loads(text)
        found: dict[str, Array] = {}
        for name, entry in about.items():
            values, rows = tensors[_join(name, "values")], entry["rows"]
            if rows == name:
                found[name] = Array(
                    values,
                    tensors[_join(name, "offsets")],
                    entry["ragged_dim"],
                    entry["max_length"],
                )
            else:
                found[name] = found[rows].with_values(values, ragged_dim=entry["ragged_dim"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        raise _damaged(path, f"its arrays do not fit together ({error})") from error
    moved: dict[int, Array] = {}
    for name, arr in found.items():
        there = to_backend(arr, library, device=device)
        like = moved.setdefault(id(arr.layout), there)
        found[name] = like.with_values(there.values, ragged_dim=there.ragged_dim)
    return found.get("", found)


def _format(path: Path) -> str:
    if path.suffix not in FORMATS:
        raise ValueError(
            f"path: expected a name that ends in {' or '.join(FORMATS)}, got {path.name!r}"
        )
    return path.suffix


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"path: expected a file that scree.save wrote, but {path} is damaged or another: {why}"
    )


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray], about: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"scree": about}}
    end = 0
    for name, x in tensors.items():
        if dtype_name(x.dtype) not in CODES:
            raise TypeError(f"{name}: safetensors has no {x.dtype}; convert it with astype")
        header[name] = {
            "dtype": CODES[dtype_name(x.dtype)],
            "shape": list(x.shape),
            "data_offsets": [end, end + x.nbytes],
        }
        end += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (
        -(len(text) + 8) % 64
    )  # so that the values lie where every library can take them as they are
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            np.ascontiguousarray(x).view(np.uint8 if x.ndim else x.dtype).tofile(file)


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER):
            raise _damaged(path, f"it has {size} bytes and a header of {length}")
        text = file.read(length)
    try:
        header = json.loads(text)
        about = header.pop("__metadata__")["scree"]
        return {
            name: _mapped(path, 8 + length, size, **entry) for name, entry in header.items()
        }, about
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no header of arrays ({error})") from error


def _mapped(
    path: Path, start: int, size: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> np.ndarray:
    """One tensor of the file, after a check that it lies within the file."""
    first, last = data_offsets
    name = DTYPES[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError("a size is no number")
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401 (teaches NumPy the name)
    kind = np.dtype(name)
    if last - first != math.prod(shape) * kind.itemsize or start + last > size:
        raise ValueError(
            f"{dtype} of shape {shape} at {first} to {last} does not fit into {size - start} bytes"
        )
    if first == last:
        return np.empty(shape, kind)
    return (
        np.memmap(path, np.uint8, "c", start + first, (last - first,))
        .view(np.ndarray)
        .view(kind)
        .reshape(shape)
    )


def _write_npz(path: Path, tensors: dict[str, np.ndarray], about: str) -> None:
    for name, x in tensors.items():
        if x.dtype.kind not in "biufc":
            raise TypeError(f"{name}: .npz has no {x.dtype}; save it as .safetensors")
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, scree=np.frombuffer(about.encode(), np.uint8), **tensors)


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    import zipfile  # here, because `import scree` should not wait for it
    import zlib

    try:
        with np.load(path, allow_pickle=False) as file:
            tensors = {name: file[name] for name in file.files}
        return tensors, bytes(tensors.pop("scree")).decode()
    except FileNotFoundError:
        raise
    except (*NPZ_ERRORS, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, f"it is no .npz of arrays ({error})") from error
