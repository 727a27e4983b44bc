"""Ragged arrays in files: safetensors, which is memory-mapped, or NumPy's ``.npz``.

Loading never executes code from a file.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

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
#: Libraries that use memory-mapped values without a copy.
MAPPED_LIBRARIES = ("numpy", "torch", "array_api_strict")
_WRITE = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
MAX_DIGITS = 19  # of integers in a header; Python takes seconds to read millions of digits

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
        If the path has another ending, or a name is empty or contains a dot or a character that
        files cannot hold.
    TypeError
        If the format lacks a dtype: ``.npz`` has no bfloat16, safetensors no complex128.

    See Also
    --------
    load : Read the file.

    Notes
    -----
    The array ``x`` is stored as the tensors ``x.values`` and ``x.offsets``, which other programs
    can read, with its ragged axis, `max_length` and CRC-32 checksums as metadata.

    The file is written completely or not at all, also if several processes write it at once or a
    process is killed. The data is written to a file of its own in the same folder, which then takes
    the name; file and folder are flushed to the disk before `save` returns.

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
        if not _is_name(name) or (name == "" and arr is not arrays):
            raise ValueError(
                "arrays: expected names without dots, NUL and surrogates, and not empty, "
                f"got {name!r}"
            )
        layout_name = name_of_layout.setdefault(id(arr.layout), name)
        host = to_backend(drop_tail(arr), "numpy")
        tensors[_join(name, "values")] = host.values
        if layout_name == name:
            tensors[_join(name, "offsets")] = host.offsets
        entry = {"rows": layout_name, "ragged_dim": arr.ragged_dim, "max_length": arr.max_length}
        described = _describe(name, entry, host.values)
        entry["crc32"] = [described, _checksum(host.offsets), _checksum(host.values)]
        metadata[name] = entry
    write = _write_safetensors if suffix == ".safetensors" else _write_npz
    _replace_file(path, lambda file: write(file, tensors, json.dumps(metadata)))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and not any(c in "\0." or "\ud800" <= c <= "\udfff" for c in name)


def _describe(name: str, entry: dict[str, Any], values: np.ndarray) -> int:
    """Return the checksum of everything about an array except its numbers."""
    parts = name, *(entry[key] for key in ("rows", "ragged_dim", "max_length"))
    return zlib.crc32(json.dumps([*parts, dtype_name(values.dtype), values.shape]).encode())


def _checksum(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _replace_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file under another name in the folder of `path`, flush it, and give it its name.

    On Linux the file has no name before it is complete, so a killed process leaves nothing.
    """
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        # A file system without files that have no name, or without /proc.
        if not (hasattr(os, "O_TMPFILE") and _write_unnamed(path, scratch, write)):
            # Never an existing file, and never the target of a link.
            flags = os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            _write_flushed(path, os.open(scratch, flags | _WRITE, 0o666), write)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_unnamed(path: Path, scratch: Path, write: Callable[[IO[bytes]], None]) -> bool:
    """Write a file without a name and name it `scratch`; return False if that is not supported."""
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | _WRITE, 0o666)
    # Only the file system knows whether it can; a missing folder fails again with a name.
    except OSError:
        return False
    link = f"/proc/self/fd/{descriptor}"
    try:
        if not os.path.islink(link):
            return False
        _write_flushed(path, os.dup(descriptor), write)
        # With a directory, although the path is absolute: only then Python follows the link.
        os.link(link, scratch, src_dir_fd=descriptor, follow_symlinks=True)
        return True
    finally:
        os.close(descriptor)


def _write_flushed(path: Path, descriptor: int, write: Callable[[IO[bytes]], None]) -> None:
    """Write to a descriptor and close it; the file gets the mode of the file that it replaces."""
    with os.fdopen(descriptor, "wb") as file:
        write(file)
        file.flush()
        if path.exists() and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
        os.fsync(file.fileno())


def load(
    path: str | os.PathLike[str],
    library: Any = "numpy",
    *,
    device: Any = None,
    verify: bool | str = True,
) -> Any:
    """Read a file that `save` wrote.

    Parameters
    ----------
    path
        Path of a ``.safetensors`` or ``.npz`` file.
    library
        Library of the arrays, by its name or namespace.
    device
        Device of the arrays; host memory by default.
    verify
        Whether the checksums of offsets and of values that are read into memory are compared. With
        ``"all"`` memory-mapped values are compared too, which reads them all. Files without
        checksums are loaded as well.

    Returns
    -------
    Array or dict
        The array, or the mapping of names to arrays, that was saved. The values of a safetensors
        file are memory-mapped: they are read on first access, and writes do not change the file.
        NumPy, PyTorch and array-api-strict use the mapped memory without a copy.

    Raises
    ------
    ValueError
        If the file is truncated, damaged or not written by `save`, or `verify` is something else.
        Data outside the file is never read, and code in the file is never executed. Damage of
        memory-mapped values is noticed with ``verify="all"`` only.
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
    if not isinstance(verify, bool) and verify != "all":
        raise ValueError(f'verify: expected True, False or "all", got {verify!r}')
    read = _read_safetensors if _check_suffix(path) == ".safetensors" else _read_npz
    tensors, metadata = read(path)
    is_mapped = path.suffix == ".safetensors" and _is_used_in_place(library, device)
    arrays: dict[str, Array] = {}
    try:
        for name, entry in metadata.items():
            values, layout_name = tensors[_join(name, "values")], entry["rows"]
            sums = entry["crc32"] if verify and "crc32" in entry else None
            if sums is not None:
                is_same = sums[0] == _describe(name, entry, values)
                if verify == "all" or not is_mapped:
                    is_same = is_same and sums[2] == _checksum(values)
                if layout_name == name:
                    is_same = is_same and sums[1] == _checksum(tensors[_join(name, "offsets")])
                if not is_same:
                    raise ValueError(f"the checksum of {name or 'the array'} does not match")
            if layout_name == name:
                offsets = tensors[_join(name, "offsets")]
                arrays[name] = Array(values, offsets, entry["ragged_dim"], entry["max_length"])
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


def _is_used_in_place(library: Any, device: Any) -> bool:
    """Return whether the library uses memory-mapped values without a copy."""
    name = library if isinstance(library, str) else getattr(library, "__name__", "")
    is_host = device is None or str(device).lower().startswith("cpu")
    return is_host and any(part in MAPPED_LIBRARIES for part in name.split("."))


def _parse(text: str | bytes) -> Any:
    """Parse JSON without integers of many digits."""

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"a number has {len(digits)} digits")
        return int(digits)

    return json.loads(text, parse_int=integer)


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


def _write_safetensors(file: IO[bytes], tensors: dict[str, np.ndarray], metadata: str) -> None:
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
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for x in tensors.values():
        file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return the memory-mapped tensors by name, and the metadata.

    All tensors are views of one mapping, which holds one file descriptor.
    """
    # The name may belong to another file by the time of the next call.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_length <= min(size - 8, MAX_HEADER_BYTES):
            raise _damage_error(path, f"it has {size} bytes and a header of {header_length}")
        encoded = file.read(header_length)
        mapped = np.memmap(file, np.uint8, "c", 0, (size,)).view(np.ndarray)
    try:
        header = _parse(encoded)
        metadata = _parse(header.pop("__metadata__")["scree"])
        data = mapped[8 + header_length :]
        tensors = {name: _view_tensor(data, **entry) for name, entry in header.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _damage_error(path, f"its header does not describe arrays ({error})") from error
    return tensors, metadata


def _view_tensor(
    data: np.ndarray, dtype: str, shape: list[int], data_offsets: list[int]
) -> np.ndarray:
    """Return a tensor of the memory-mapped data; raise if it is not within the data."""
    begin, end = data_offsets
    name = DTYPES[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("a size is not a non-negative integer")
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401 (registers the dtype with NumPy)
    numpy_dtype = np.dtype(name)
    if end - begin != math.prod(shape) * numpy_dtype.itemsize or end > data.size:
        raise ValueError(
            f"{dtype} of shape {shape} at {begin} to {end} does not fit into {data.size} bytes"
        )
    if begin == end:
        return np.empty(shape, numpy_dtype)
    return data[begin:end].view(numpy_dtype).reshape(shape)


def _write_npz(file: IO[bytes], tensors: dict[str, np.ndarray], metadata: str) -> None:
    for name, x in tensors.items():
        if x.dtype.kind not in "biufc":
            raise TypeError(f"{name}: .npz has no {x.dtype}; save it as .safetensors")
    encoded = np.frombuffer(metadata.encode(), np.uint8)
    np.savez(file, allow_pickle=False, scree=encoded, **tensors)


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return the tensors that the metadata names, and the metadata.

    Other members of the file are not decompressed.
    """
    import zipfile  # not at the top, because it would slow down `import scree`

    try:
        with np.load(path, allow_pickle=False) as file:
            if file.zip.getinfo("scree.npy").file_size > MAX_HEADER_BYTES:
                raise ValueError("its metadata is too large")
            metadata = _parse(bytes(file["scree"]).decode())
            names = [_join(name, "values") for name in metadata]
            names += [
                _join(name, "offsets") for name, entry in metadata.items() if entry["rows"] == name
            ]
            return {name: file[name] for name in names}, metadata
    except FileNotFoundError:
        raise
    except (*NPZ_ERRORS, zipfile.BadZipFile, zlib.error, RecursionError, TypeError) as error:
        raise _damage_error(path, f"it is not an .npz file of arrays ({error})") from error
