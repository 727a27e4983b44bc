"""Ragged arrays in files: safetensors, which is memory-mapped, or NumPy's ``.npz``.

Loading never executes code from a file.
"""

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

#: Dtype code of safetensors -> name of the dtype, for the dtypes that both have.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
CODES = {name: code for code, name in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
VALUES_ALIGNMENT = 64  # bytes; every library can use memory with this alignment without a copy
FORMATS = (".safetensors", ".npz")

#: Errors that NumPy raises for a damaged or foreign file, in addition to those of zip archives.
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
        Path that ends in ``.safetensors`` or ``.npz``.
    arrays
        Ragged array of any library, or a mapping of names to ragged arrays. Arrays on one layout
        share their offsets in the file, and share one layout again when they are loaded.

    Raises
    ------
    ValueError
        If the path has another ending, or a name is empty or contains a dot.
    TypeError
        If the format lacks a dtype: ``.npz`` has no bfloat16, safetensors no complex128.

    See Also
    --------
    load : Read the file.

    Notes
    -----
    The array ``x`` is stored as the tensors ``x.values`` and ``x.offsets``, which other programs
    can read, with its ragged axis and `max_length` as metadata. The file is written completely or
    not at all.

    Examples
    --------
    >>> import numpy as np, scree, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scree.save(f"{folder}/x.safetensors", scree.from_lengths(np.arange(3), [2, 0, 1]))
    ...     print(scree.load(f"{folder}/x.safetensors")[2])
    [2]
    """
    path = Path(path)
    suffix = _check_suffix(path)
    if not isinstance(arrays, Array | Mapping):
        raise TypeError(
            "arrays: expected a ragged array or a mapping of names to ragged arrays, "
            f"got {type(arrays).__name__}"
        )
    arrays_by_name = {"": arrays} if isinstance(arrays, Array) else dict(arrays)
    tensors: dict[str, np.ndarray] = {}
    metadata: dict[str, Any] = {}
    name_of_layout: dict[int, str] = {}  # the array that stores the offsets of a layout
    for name, arr in arrays_by_name.items():
        if not isinstance(arr, Array):
            raise TypeError(f"arrays[{name!r}]: expected a ragged array, got {type(arr).__name__}")
        if not isinstance(name, str) or "." in name or (name == "" and arr is not arrays):
            raise ValueError(f"arrays: expected names without dots, and not empty, got {name!r}")
        layout_name = name_of_layout.setdefault(id(arr.layout), name)
        host = to_backend(drop_tail(arr), "numpy")
        tensors[_join(name, "values")] = host.values
        if layout_name == name:
            tensors[_join(name, "offsets")] = host.offsets
        metadata[name] = {
            "rows": layout_name,
            "ragged_dim": arr.ragged_dim,
            "max_length": arr.max_length,
        }
    write = _write_safetensors if suffix == ".safetensors" else _write_npz
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary, tensors, json.dumps(metadata))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], library: Any = "numpy", *, device: Any = None) -> Any:
    """Read a file that `save` wrote.

    Parameters
    ----------
    path
        Path of a ``.safetensors`` or ``.npz`` file.
    library
        Library of the arrays, by its name or namespace.
    device
        Device of the arrays; host memory by default.

    Returns
    -------
    Array or dict
        The array, or the mapping of names to arrays, that was saved. The values of a safetensors
        file are memory-mapped: they are read on first access, and writes do not change the file.
        NumPy, PyTorch and array-api-strict use the mapped memory without a copy.

    Raises
    ------
    ValueError
        If the file is truncated, damaged or not written by `save`. Data outside the file is never
        read, and code in the file is never executed.
    FileNotFoundError
        If there is no file at `path`.

    See Also
    --------
    save : Write the file.

    Examples
    --------
    >>> import numpy as np, scree, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scree.save(f"{folder}/rows.npz", scree.from_lengths(np.arange(5), [2, 3]))
    ...     scree.load(f"{folder}/rows.npz").lengths
    array([2, 3], dtype=int32)
    """
    path = Path(path)
    read = _read_safetensors if _check_suffix(path) == ".safetensors" else _read_npz
    tensors, metadata = read(path)
    arrays: dict[str, Array] = {}
    try:
        for name, entry in json.loads(metadata).items():
            values, layout_name = tensors[_join(name, "values")], entry["rows"]
            if layout_name == name:
                arrays[name] = Array(
                    values,
                    tensors[_join(name, "offsets")],
                    entry["ragged_dim"],
                    entry["max_length"],
                )
            else:
                arrays[name] = arrays[layout_name].with_values(
                    values, ragged_dim=entry["ragged_dim"]
                )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        raise _damage_error(path, f"its arrays do not fit together ({error})") from error
    # Arrays that shared a layout share the converted layout.
    first_of_layout: dict[int, Array] = {}
    converted: dict[str, Array] = {}
    for name, arr in arrays.items():
        target = to_backend(arr, library, device=device)
        first = first_of_layout.setdefault(id(arr.layout), target)
        converted[name] = first.with_values(target.values, ragged_dim=target.ragged_dim)
    return converted.get("", converted)


def _check_suffix(path: Path) -> str:
    """Return the suffix of the path; raise unless it is the suffix of a format."""
    if path.suffix not in FORMATS:
        raise ValueError(
            f"path: expected a name that ends in {' or '.join(FORMATS)}, got {path.name!r}"
        )
    return path.suffix


def _join(name: str, part: str) -> str:
    """Return the name of a tensor in the file; a single array has the empty name."""
    return f"{name}.{part}" if name else part


def _damage_error(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"path: expected a file that scree.save wrote, got {path}, "
        f"which is damaged or has another origin: {reason}"
    )


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"scree": metadata}}
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
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The file begins with 8 bytes, the length of the header.
    encoded += b" " * (-(len(encoded) + 8) % VALUES_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for x in tensors.values():
            np.ascontiguousarray(x).view(np.uint8 if x.ndim else x.dtype).tofile(file)


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return the memory-mapped tensors by name, and the metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_length <= min(size - 8, MAX_HEADER_BYTES):
            raise _damage_error(path, f"it has {size} bytes and a header of {header_length}")
        encoded = file.read(header_length)
    try:
        header = json.loads(encoded)
        metadata = header.pop("__metadata__")["scree"]
        tensors = {
            name: _map_tensor(path, 8 + header_length, size, **entry)
            for name, entry in header.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _damage_error(path, f"its header does not describe arrays ({error})") from error
    return tensors, metadata


def _map_tensor(
    path: Path, start: int, size: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> np.ndarray:
    """Return a memory-mapped tensor of the file; raise if it is not within the file.

    `start` is the position of the data in the file, `size` the size of the file.
    """
    begin, end = data_offsets
    name = DTYPES[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("a size is not a non-negative integer")
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401 (registers the dtype with NumPy)
    numpy_dtype = np.dtype(name)
    if end - begin != math.prod(shape) * numpy_dtype.itemsize or start + end > size:
        raise ValueError(
            f"{dtype} of shape {shape} at {begin} to {end} does not fit into {size - start} bytes"
        )
    if begin == end:
        return np.empty(shape, numpy_dtype)
    mapped = np.memmap(path, np.uint8, "c", start + begin, (end - begin,))
    return mapped.view(np.ndarray).view(numpy_dtype).reshape(shape)


def _write_npz(path: Path, tensors: dict[str, np.ndarray], metadata: str) -> None:
    for name, x in tensors.items():
        if x.dtype.kind not in "biufc":
            raise TypeError(f"{name}: .npz has no {x.dtype}; save it as .safetensors")
    encoded = np.frombuffer(metadata.encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, scree=encoded, **tensors)


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return the tensors by name, and the metadata."""
    import zipfile  # not at the top, because it would slow down `import scree`
    import zlib

    try:
        with np.load(path, allow_pickle=False) as file:
            tensors = {name: file[name] for name in file.files}
        return tensors, bytes(tensors.pop("scree")).decode()
    except FileNotFoundError:
        raise
    except (*NPZ_ERRORS, zipfile.BadZipFile, zlib.error) as error:
        raise _damage_error(path, f"it is not an .npz file of arrays ({error})") from error
