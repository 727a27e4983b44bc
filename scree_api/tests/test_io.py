"""Files of ragged arrays: round trips, other readers, memory mapping, and errors for damage."""

import json
import resource
import subprocess
import sys
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scree

LENGTHS = [3, 0, 2, 1]
LIBRARIES = ("torch", "jax", "mlx", "array_api_strict")
FORMATS = ("safetensors", "npz")
BATCHES = {"rows": LENGTHS, "no rows": [], "empty rows": [0, 0], "one row": [4]}


def make(
    dtype: str = "float32",
    lengths: list[int] = LENGTHS,
    element_shape: tuple[int, ...] = (2,),
    dim: int = 0,
) -> scree.Array:
    shape = (*element_shape[:dim], sum(lengths), *element_shape[dim:])
    values = (np.arange(np.prod(shape, dtype=int)) % 5).reshape(shape).astype(dtype)
    return scree.from_lengths(values, lengths, ragged_dim=dim, max_length=7)


def assert_same(a: scree.Array, b: scree.Array) -> None:
    assert (a.shape, a.dtype, a.ragged_dim, a.max_length) == (
        b.shape,
        b.dtype,
        b.ragged_dim,
        b.max_length,
    )
    assert a.offsets.dtype == b.offsets.dtype
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.values, b.values)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64"]
)
def test_round_trip_keeps_the_array(suffix: str, batch: str, dtype: str, tmp_path: Path) -> None:
    for element_shape, dim in (((), 0), ((2,), 0), ((2, 3), 1)):
        arr = make(dtype, BATCHES[batch], element_shape, dim)
        scree.save(tmp_path / f"x.{suffix}", arr)
        assert_same(scree.load(tmp_path / f"x.{suffix}"), arr)
    assert [path.name for path in tmp_path.iterdir()] == [f"x.{suffix}"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_round_trip_keeps_offsets_and_names(suffix: str, tmp_path: Path) -> None:
    x = scree.Array(
        np.asfortranarray(make().values)[::-1], np.cumsum([0, *LENGTHS]).astype(np.int64)
    )
    batch = {"x": x, "y": x.with_values(np.arange(6)), "other": make("int32", [1, 5])}
    scree.save(tmp_path / f"batch.{suffix}", batch)
    loaded = scree.load(tmp_path / f"batch.{suffix}")
    assert list(loaded) == list(batch)
    for name, arr in batch.items():
        assert_same(loaded[name], arr)
    assert loaded["x"].layout is loaded["y"].layout
    assert loaded["x"].layout is not loaded["other"].layout


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=pytest.mark.needs(name)) for name in LIBRARIES]
)
def test_round_trip_of_every_library(suffix: str, library: str, tmp_path: Path) -> None:
    arr = make()
    scree.save(
        tmp_path / f"x.{suffix}", {"a": arr.to_backend(library), "b": arr.to_backend(library)}
    )
    loaded = scree.load(tmp_path / f"x.{suffix}", library)
    assert loaded["a"].layout.backend.name == library
    assert_same(loaded["a"].to_numpy(), arr)


@pytest.mark.needs("torch", "ml_dtypes")
def test_bfloat16_round_trip(tmp_path: Path) -> None:
    import torch

    arr = scree.from_lengths(torch.arange(6).to(torch.bfloat16), LENGTHS)
    scree.save(tmp_path / "x.safetensors", arr)
    assert torch.equal(scree.load(tmp_path / "x.safetensors", "torch").values, arr.values)
    with pytest.raises(TypeError, match=r"values: \.npz has no bfloat16; save it as \.safetensors"):
        scree.save(tmp_path / "x.npz", arr)
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.needs("safetensors")
def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    import safetensors.numpy as safetensors

    arr = make()
    scree.save(tmp_path / "x.safetensors", {"x": arr})
    loaded = safetensors.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(loaded["x.values"], arr.values)
    np.testing.assert_array_equal(loaded["x.offsets"], arr.offsets)
    scree.save(tmp_path / "x.npz", arr)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["values"], arr.values)


def test_load_maps_values_and_never_writes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    before = path.read_bytes()
    arr = scree.load(path)
    base = arr.values
    while not isinstance(base, np.memmap):
        base = base.base
    assert base.mode == "c"
    arr.values[:] = 9
    assert path.read_bytes() == before


# ---------------------------------------------------------------- damage
@pytest.mark.parametrize("suffix", FORMATS)
def test_load_truncated_file_raises(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    scree.save(path, make())
    content = path.read_bytes()
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"path: expected a file that scree\.save wrote"):
            scree.load(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_load_file_with_a_wrong_byte_raises_or_is_valid(suffix: str, tmp_path: Path) -> None:
    """Change single bytes: no crash, and nothing outside the file is read.

    A wrong byte of memory-mapped values is noticed on request.
    """
    path = tmp_path / f"x.{suffix}"
    scree.save(path, make("uint8"))
    content = path.read_bytes()
    for at in range(0, len(content), 3):
        for flip in (0xFF, 0x01):
            broken = bytearray(content)
            broken[at] ^= flip
            path.write_bytes(broken)
            try:
                arr = scree.load(path)
            except ValueError as error:
                assert str(error).startswith("path: expected a file that scree.save wrote")
            else:
                arr = arr if isinstance(arr, scree.Array) else next(iter(arr.values()))
                arr.validate()
                assert arr.values.nbytes + arr.offsets.nbytes <= len(content)
                if not np.array_equal(arr.values, make("uint8").values):
                    with pytest.raises(ValueError, match="the checksum of the array does not"):
                        scree.load(path, verify="all")


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


HEADERS = {
    "values beyond the end": lambda h: h["values"].update(shape=[600, 2], data_offsets=[0, 4800]),
    "values before the start": lambda h: h["values"].update(data_offsets=[-48, 0]),
    "a size that is not a number": lambda h: h["values"].update(shape=["6", 2]),
    "a negative size": lambda h: h["values"].update(shape=[-6, -2]),
    "a huge size": lambda h: h["values"].update(shape=[2**70, 2]),
    "an unknown dtype": lambda h: h["values"].update(dtype="object"),
    "no offsets": lambda h: h.pop("offsets"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "an unknown entry": lambda h: h["values"].update(more=1),
    "offsets of floats": lambda h: h["offsets"].update(dtype="F32"),
    "an unknown layout": lambda h: h["__metadata__"].update(
        scree='{"": {"rows": "x", "ragged_dim": 0, "max_length": null}}'
    ),
    "a ragged axis out of bounds": lambda h: h["__metadata__"].update(
        scree='{"": {"rows": "", "ragged_dim": 5, "max_length": null}}'
    ),
    "metadata of another type": lambda h: h["__metadata__"].update(scree="[]"),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_load_wrong_header_raises(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    entries, element_shape = header(path)
    HEADERS[damage](entries)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + element_shape)
    with pytest.raises(ValueError, match=r"path: expected a file that scree\.save wrote"):
        scree.load(path)


@pytest.mark.needs("safetensors")
def test_load_decreasing_offsets_raises(tmp_path: Path) -> None:
    import safetensors.numpy as safetensors

    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    metadata = header(path)[0]["__metadata__"]
    entry = {"rows": "", "ragged_dim": 0, "max_length": None}
    metadata["scree"] = json.dumps({"": entry})  # without checksums
    offsets = np.asarray([0, 9, 3, 5, 6], dtype=np.int32)
    safetensors.save_file({"values": make().values, "offsets": offsets}, path, metadata=metadata)
    with pytest.raises(ValueError, match="never fall"):
        scree.load(path)


METADATA = json.dumps({"": {"rows": "", "ragged_dim": 0, "max_length": None}})


def test_load_never_unpickles(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(
        path,
        values=np.asarray([object()]),
        offsets=np.zeros(1, np.int32),
        scree=np.frombuffer(METADATA.encode(), np.uint8),
    )
    with pytest.raises(ValueError, match="path: expected"):
        scree.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("values", "print(1)")
    with pytest.raises(ValueError, match="path: expected"):
        scree.load(path)


def test_invalid_argument_raises(tmp_path: Path) -> None:
    for call in (lambda p: scree.save(p, make()), scree.load):
        with pytest.raises(
            ValueError, match=r"path: expected a name that ends in .safetensors or .npz, got 'x.pt'"
        ):
            call(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError):
        scree.load(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError):
        scree.load(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="arrays: expected names without dots"):
        scree.save(tmp_path / "x.npz", {"a.b": make()})
    with pytest.raises(
        ValueError,
        match="arrays: expected names without dots, NUL and surrogates, and not empty, got 3",
    ):
        scree.save(tmp_path / "x.npz", {3: make()})
    with pytest.raises(
        TypeError,
        match="arrays: expected a ragged array or a mapping of names to ragged arrays, got list",
    ):
        scree.save(tmp_path / "x.npz", [make()])
    with pytest.raises(TypeError, match=r"arrays\['a'\]: expected a ragged array"):
        scree.save(tmp_path / "x.npz", {"a": np.zeros(3)})
    with pytest.raises(TypeError, match="values: safetensors has no complex128"):
        scree.save(tmp_path / "x.safetensors", make("complex128"))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- checksums
@pytest.mark.needs("jax")
def test_load_wrong_value_raises_where_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    content = bytearray(path.read_bytes())
    content[-(make().offsets.nbytes + 5)] ^= 1  # in the values
    path.write_bytes(content)
    scree.load(path)  # memory-mapped
    scree.load(path, verify=False)
    for arguments in (dict(library="jax"), dict(verify="all")):
        with pytest.raises(ValueError, match="the checksum of the array does not match"):
            scree.load(path, **arguments)
    scree.load(path, "jax", verify=False)


def test_load_wrong_metadata_raises(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make("float32"))
    content = path.read_bytes()
    for old, new in ((b'"F32"', b'"I32"'), (b'max_length\\": 7', b'max_length\\": 6')):
        assert content.count(old) >= 1
        path.write_bytes(content.replace(old, new, 1))
        with pytest.raises(ValueError, match="checksum"):
            scree.load(path)


def test_load_invalid_verify_raises(tmp_path: Path) -> None:
    scree.save(tmp_path / "x.npz", make())
    with pytest.raises(ValueError, match='verify: expected True, False or "all", got 1'):
        scree.load(tmp_path / "x.npz", verify=1)


# ---------------------------------------------------------------- writers
def test_save_threads_never_mix_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = [scree.from_lengths(np.full(1000 + i, i), [500, 500 + i]) for i in range(8)]

    def write(arr: scree.Array) -> None:
        for _ in range(20):
            scree.save(path, arr)
            loaded = scree.load(path, verify="all")
            assert loaded.values.size == 1000 + loaded.values[0]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, arrays))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


KILLED = """
import sys, numpy as np, scree
arr = scree.from_lengths(np.arange(300_000), [100_000, 200_000])
print("ready", flush=True)
while True:
    scree.save(sys.argv[1], arr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_save_killed_process_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    for i in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * i)
        process.kill()
        process.wait()
        process.stdout.close()
        assert scree.load(path, verify="all").batch_size in (2, len(LENGTHS))
    assert len(list(tmp_path.iterdir())) <= 2


def test_save_writes_through_no_link_and_keeps_the_mode(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.npz"
    victim.write_text("untouched")
    path.symlink_to(victim)
    scree.save(path, make())
    assert victim.read_text() == "untouched"
    assert not path.is_symlink()
    path.chmod(0o640)
    scree.save(path, make())
    assert path.stat().st_mode & 0o777 == 0o640
    scree.save(tmp_path / "new.npz", make())
    (tmp_path / "other").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("new.npz", "other")]
    assert modes[0] == modes[1]


def test_save_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, make())
    with pytest.raises(TypeError, match="complex128"):
        scree.save(path, make("complex128"))
    assert_same(scree.load(path), make())
    assert len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------- cost
def test_load_many_arrays_holds_one_file_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    scree.save(path, {f"a{i}": make() for i in range(600)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        assert len(scree.load(path)) == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_load_ignores_members_that_no_array_names(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    scree.save(path, make())
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file,
        file.open("bomb.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array(member, np.zeros(1 << 27, np.uint8))
    tracemalloc.start()
    assert_same(scree.load(path), make())
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_load_header_of_huge_integers_raises_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    number = "9" * 4000
    text = f'{{"__metadata__": {{"scree": "{{}}"}}, "x": [{", ".join([number] * 700)}]}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="a number has 4000 digits"):
        scree.load(path)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a.b", ""])
@pytest.mark.parametrize("suffix", FORMATS)
def test_save_name_that_files_cannot_hold_raises(suffix: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arrays: expected names without dots, NUL"):
        scree.save(tmp_path / f"x.{suffix}", {name: make()})
