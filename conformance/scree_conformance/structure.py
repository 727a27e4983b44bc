"""Cases of creation, conversion and indexing of ragged arrays, and of their layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import scree

from .bench import Bench
from .layouts import Layout, lengths_of
from .oracle import Rows
from .table import operation

ANY = ("float32", "int32", "bool", "bfloat16")


@operation("ragged.pack ragged.unpack", dtypes=ANY)
def pack(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows in, rows out, for any ragged_dim."""
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", dim)
        rows = bench.xp.ragged.unpack(x.x)
        assert isinstance(rows, list)
        assert len(rows) == x.x.batch_size
        for row, exact in zip(rows, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        for row, exact in zip(x.x, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        if rows:
            back = bench.xp.ragged.pack(rows, ragged_dim=dim)
            bench.close(back, list(x.exact), dtype=dtype)
            assert bench.lib.dtype_name(back.offsets) == "int32"
            assert back.shape == x.x.shape


@operation(
    "ragged.from_offsets ragged.from_cu_seqlens ragged.from_lengths ragged.from_segment_ids",
    dtypes=("float32",),
)
def creation(bench: Bench, layout: Layout, dtype: str) -> None:
    """Values are not copied; lengths and ids give the same rows."""
    lengths, make = lengths_of(layout), bench.lib.make
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, dim=dim)
        for f in (scree.from_offsets, scree.from_cu_seqlens, scree.Array):
            for kind in ("int32", "int64") if "int64" in bench.lib.dtypes else ("int32",):
                cu = make(bench.lib.read(x.x.offsets), kind)
                got = f(x.x.values, cu, ragged_dim=dim)
                assert got.values is x.x.values, "values were copied"
                assert got.offsets is cu, "offsets were copied"
                bench.close(got, list(x.exact))
        for form in (lengths, make(np.asarray(lengths, np.int32), "int32")):
            bench.close(scree.from_lengths(x.x.values, form, ragged_dim=dim), list(x.exact))
        ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        bench.close(
            scree.from_segment_ids(x.x.values, make(ids, "int32"), len(lengths), ragged_dim=dim),
            list(x.exact),
        )
        if not lengths or lengths[-1]:  # without num_segments, the last id says how many there are
            bench.close(
                scree.from_segment_ids(x.x.values, make(ids, "int32"), ragged_dim=dim),
                list(x.exact),
            )


@operation("ragged.to_padded", dtypes=ANY, kernel="pad")
def padding(bench: Bench, layout: Layout, dtype: str) -> None:
    """Padding on both sides, to more than the longest row."""
    lengths = lengths_of(layout)
    n, longest = len(lengths), max(lengths, default=0)
    for dim in (0, 1):
        x = bench.ragged(layout, (2,), dtype, "natural", dim)
        for side in ("right", "left"):
            for length, fill in ((None, 0), (longest + 2, 1)):
                padded, mask = bench.run(
                    bench.xp.ragged.to_padded, x.x, side=side, fill_value=fill, length=length
                )
                size = longest if length is None else length
                expected = np.full(
                    (n, 2, size) if dim else (n, size, 2), fill, x.exact.template.dtype
                )
                token_mask = np.zeros((n, size), bool)
                for i, row in enumerate(x.exact):
                    cut = (
                        slice(0, lengths[i]) if side == "right" else slice(size - lengths[i], size)
                    )
                    token_mask[i, cut] = True
                    expected[(i, slice(None), cut) if dim else (i, cut)] = row
                bench.close(padded, expected, dtype=dtype, note=f"{side}, length={length}: ")
                bench.close(mask, token_mask, dtype="bool")


@operation("ragged.from_padded", dtypes=ANY, kernel="unpad")
def unpadding(bench: Bench, layout: Layout, dtype: str) -> None:
    """Padding on both sides, to more than the longest row, and back by mask and by lengths.

    Both with and without the number of tokens.
    """
    lengths, make, read, unpad = (
        lengths_of(layout),
        bench.lib.make,
        bench.lib.read,
        bench.xp.ragged.from_padded,
    )
    for dim in (0, 1):
        x = bench.ragged(layout, (2,), dtype, "natural", dim)
        for side in ("right", "left"):
            for length in (None, max(lengths, default=0) + 2):
                padded, mask = bench.xp.ragged.to_padded(x.x, side=side, length=length)
                for m in (mask, make(read(mask), "int32"), make(read(mask), "uint8")):
                    bench.close(
                        bench.run(unpad, padded, m, ragged_dim=dim), list(x.exact), dtype=dtype
                    )
                if side == "right":
                    for form in (lengths, make(np.asarray(lengths, np.int32), "int32")):
                        unpadded = bench.run(
                            unpad, padded, lengths=form, ragged_dim=dim, total=sum(lengths)
                        )
                        bench.close(unpadded, list(x.exact))
    scattered = bench.rng.integers(0, 2, (4, 6)).astype(bool)  # holes anywhere
    dense = bench.dense((4, 6, 2), dtype, "natural")
    bench.close(
        bench.run(unpad, dense.x, make(scattered, "bool"), total=int(scattered.sum())),
        [row[keep] for row, keep in zip(dense.exact, scattered, strict=True)],
        dtype=dtype,
    )


SLICES = [
    slice(1, None), slice(None, 2), slice(1, 3), slice(-2, None), slice(None, -1), slice(-3, -1),
    slice(None, None, 2),
    slice(1, None, 2), slice(None, None, -1), slice(None, None, -2), slice(-1, 0, -1),
    slice(3, None, -1), slice(None, 1, -1),
    slice(100, None), slice(None, -100), slice(-100, 100), slice(100, None, -3), slice(2, 2),
    slice(None),
]  # fmt: skip


@operation("indexing", dtypes=("float32", "int32", "bool"))
def indexing(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every form of `arr[...]`, by Python's rules on lists of rows."""
    n, make = len(lengths_of(layout)), bench.lib.make
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", dim)
        arr, rows = x.x, x.exact
        for i in {0, n - 1, -1, -n} if n else ():
            bench.close(arr[i], rows[i], dtype=dtype)
            bench.close(
                arr[i, ..., 1] if not dim else arr[i, 1],
                rows[i][..., 1] if not dim else rows[i][1],
                dtype=dtype,
            )
        for key in bench.some(SLICES):
            bench.close(arr[key], rows[key], dtype=dtype, note=f"arr[{key}], ragged_dim={dim}: ")
            inner = (slice(None), key) if not dim else (slice(None), slice(None), key)
            bench.close(
                arr[inner], [row[inner[1:]] for row in rows], dtype=dtype, note=f"arr[{inner}]: "
            )
            both = (slice(None, None, -1), *inner[1:])
            bench.close(
                arr[both],
                [row[inner[1:]] for row in rows[::-1]],
                dtype=dtype,
                note=f"arr[{both}]: ",
            )
        picks = [n - 1, 0, -1, 0] if n else []
        mask = bench.rng.integers(0, 2, n).astype(bool)
        for key in (picks, make(np.asarray(picks, np.int32), "int32")):
            bench.close(arr[key], [rows[i] for i in picks], dtype=dtype)
        bench.close(
            arr[make(mask, "bool")],
            [row for row, keep in zip(rows, mask, strict=True) if keep],
            dtype=dtype,
        )
        element = (slice(None), slice(None), 1) if not dim else (slice(None), 1)
        bench.close(
            arr[element],
            [row[:, 1] if not dim else row[1] for row in rows],
            dtype=dtype,
            note="one element: ",
        )
        bench.close(arr[..., 1:], [row[..., 1:] for row in rows], dtype=dtype)
        if not dim:
            bench.close(arr[..., 1], [row[:, 1] for row in rows], dtype=dtype)
        assert arr[...].values is arr.values
        whole = Rows((row for row in rows if row.shape[dim] >= 1), rows.template)
        keep = arr[make(np.asarray([length >= 1 for length in lengths_of(layout)], bool), "bool")]
        for i in (0, -1):
            key = (slice(None), i) if not dim else (slice(None), slice(None), i)
            bench.close(
                keep[key],
                whole.stack(
                    lambda row: np.take(row, i, axis=dim) if row.size else row.sum(axis=dim)
                ),
                dtype=dtype,
                note=f"token {i} of each row: ",
            )


@operation("indexing: ragged masks", dtypes=("float32", "int32", "bfloat16"))
def masks(bench: Bench, layout: Layout, dtype: str) -> None:
    """`arr[mask]` keeps the rows: by token, and by element in the order of the row."""
    x = bench.ragged(layout, (3,), dtype)
    tokens = bench.like(x, (), "bool", "bool")
    bench.close(
        x.x[tokens.x],
        [row[keep] for row, keep in zip(x.exact, tokens.exact, strict=True)],
        dtype=dtype,
    )
    bench.close(x.x[x.x > 0], [row[row > 0] for row in x.exact], dtype=dtype)
    none = tokens.x.with_values(bench.xp.zeros_like(tokens.x.values))
    bench.close(x.x[none], [row[:0] for row in x.exact], dtype=dtype, note="no token: ")


@operation("indexing: ragged positions", dtypes=("float32", "bfloat16"))
def places(bench: Bench, layout: Layout, dtype: str) -> None:
    """`arr[index]` takes from each row the tokens at the positions in the same row of `index`.

    Negative positions count from the end of the row.
    """
    lengths = lengths_of(layout)
    counts = [int(bench.rng.integers(0, 4)) if n else 0 for n in lengths]
    rows = [
        bench.rng.integers(-n, n, k) if k else np.zeros(0, int)
        for n, k in zip(lengths, counts, strict=True)
    ]
    index = bench.of(bench.lib.make(np.concatenate([np.zeros(0, int), *rows]), "int32"), counts)
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, dim=dim)
        bench.close(
            x.x[index.x],
            [np.take(row, place, axis=dim) for row, place in zip(x.exact, rows, strict=True)],
            dtype=dtype,
        )
    if sum(lengths) and bench.lib.host:
        outside = bench.of(bench.lib.make([600], "int32"), [1, *[0] * (len(lengths) - 1)])
        raises(IndexError, "outside of its row", lambda: x.x[outside.x])


@operation("indexing: None, Ellipsis and arrays on element axes", dtypes=("float32",))
def axes(bench: Bench, layout: Layout, dtype: str) -> None:
    """New axes of size 1 after the batch axis, an ellipsis anywhere, and indices on element axes.

    The arrays index one element axis at a time.
    """
    x = bench.ragged(layout, (4, 3), dtype)
    arr, make, every = x.x, bench.lib.make, slice(None)
    keys: list[tuple[Any, ...]] = [
        (every, None), (every, every, None), (..., None), (every, None, ..., 1),
        (every, ..., 2, None), (..., 1, every),
        (every, every, slice(1, 3), None, slice(None, None, 2)), (every, slice(1, None), 0),
        (every, None, slice(None, 2), None),
    ]  # fmt: skip
    for key in bench.some(keys):
        bench.close(
            arr[key],
            [row[key[1:] if key[0] is not ... else key] for row in x.exact],
            note=f"arr[{key}]: ",
        )
    for places in ([2, 0, 0], [-1], []):
        index = make(np.asarray(places, np.int32), "int32")
        if min(places, default=0) >= 0:
            bench.close(
                arr[..., index], [row[..., places] for row in x.exact], note=f"arr[..., {places}]: "
            )
            bench.close(
                arr[:, :, index], [row[:, places] for row in x.exact], note=f"arr[:, :, {places}]: "
            )


#: Update -> NumPy's function, which visits every position once.
UPDATES = {
    "set": None,
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@operation("at", dtypes=("float32", "int32"))
def updates(bench: Bench, layout: Layout, dtype: str) -> None:
    """`scree.at(arr)[key].set(value)` and the other updates: rows, slices, elements, masks.

    Some positions receive many values.
    """
    x = bench.ragged(layout, (3,), dtype, "integer")
    value = bench.dense((), dtype, "natural")
    n = len(lengths_of(layout))
    mask = x.x > 0
    keys: dict[str, tuple[Any, Any]] = {
        "[:, 1:3]": (np.s_[:, 1:3], lambda i, row: np.s_[1:3]),
        "[:, ::-2, 1]": (np.s_[:, ::-2, 1], lambda i, row: np.s_[::-2, 1]),
        "[..., 0]": (np.s_[..., 0], lambda i, row: np.s_[..., 0]),
        "[arr > 0]": (mask, lambda i, row: row > 0),
        "[1:]": (np.s_[1:], lambda i, row: np.s_[:] if i else np.s_[:0]),
    }  # fmt: skip
    for name, f in UPDATES.items():
        for note, (key, inner) in bench.some(keys.items()):
            got = getattr(scree.at(x.x)[key], name)(value.x)
            rows = [row.copy() for row in x.exact]
            for i, row in enumerate(rows):
                at = inner(i, row)
                row[at] = value.exact if f is None else f(row[at], value.exact)
            bench.close(got, rows, dtype=dtype, note=f"{note}.{name}: ")
    per_row = bench.dense((n, 1, 3), dtype, "natural")
    bench.close(
        scree.at(x.x)[...].add(per_row.x),
        [row + v for row, v in zip(x.exact, per_row.exact, strict=True)],
    )
    bench.close(x.x, list(x.exact), note="the array itself: ")
    if n:
        index = bench.of(
            bench.lib.make(np.asarray([0, -1, 0], np.int32), "int32"), [3] + [0] * (n - 1)
        )
        if lengths_of(layout)[0]:
            first = x.exact[0].copy()
            np.add.at(first, [0, -1, 0], 2)
            bench.close(
                scree.at(x.x)[index.x].add(2), [first, *x.exact[1:]], note="a place twice: "
            )


@operation("broadcasting: errors", ("plain", "ones", "one_row", "empty_between"), ("float32",))
def misfits(bench: Bench, layout: Layout, dtype: str) -> None:
    """Errors name the misfit: a missing axis, other sizes, a dense ragged axis, rows of length 1.

    Also other rows.
    """
    n, longest = len(lengths_of(layout)), max(lengths_of(layout))
    x = bench.ragged(layout, (2,), dtype).x
    misfit = [(5,), (n, 7, 1), (n + 1, 1, 2), (1, n, 1, 2), (n, longest + 1, 2)]
    for shape in misfit:
        raises(
            ValueError, f"shape {shape} does not broadcast", lambda: x + bench.dense(shape, dtype).x
        )
    if n > 2:
        hint = "one entry per row"
        raises(ValueError, hint, lambda: x + bench.dense((n,), dtype).x)
        raises(ValueError, hint, lambda: bench.xp.where(x > 0, bench.dense((n,), dtype).x, x))
    other = bench.ragged([*lengths_of(layout), 1], (2,), dtype).x
    raises(ValueError, "rows", lambda: x + other)
    raises(ValueError, "same axes", lambda: x + bench.ragged(layout, (), dtype).x)


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Check that a call raises, and that its message contains the text."""
    try:
        got = call()
    except kind as error:
        assert text in str(error), f"expected {text!r} in the message, got {error}"
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}, got {got!r}")


@operation("ragged.segment_ids ragged.positions: tiles and properties", dtypes=("float32",))
def layout_of(bench: Bench, layout: Layout, dtype: str) -> None:
    """Lengths, row and position of each token, tiles; and the properties of an array."""
    lengths = lengths_of(layout)
    n, total = len(lengths), sum(lengths)
    x = bench.ragged(layout, (3, 2), dtype, dim=1).x
    np.testing.assert_array_equal(bench.read(x.lengths), lengths)
    np.testing.assert_array_equal(
        bench.read(bench.xp.ragged.segment_ids(x)), np.repeat(np.arange(n), lengths)
    )
    positions = np.concatenate([np.zeros(0, int), *map(np.arange, lengths)])
    np.testing.assert_array_equal(bench.read(bench.xp.ragged.positions(x)), positions)
    assert x.shape == (n, 3, None, 2)
    assert (x.batch_size, len(x), x.total_length, x.ndim) == (n, n, total, 4)
    assert (x.element_shape, x.size, x.nbytes) == ((3, 2), 6 * total, 24 * total + 4 * n + 4)
    for size in (1, 4, 32):
        tiles = x.layout.tiles(size)
        tokens, valid = bench.read(tiles.tokens), bench.read(tiles.valid)
        tile_tokens = [tokens[i][valid[i]].tolist() for i in range(len(tokens)) if valid[i].any()]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=int)])
        expected = [
            list(range(a, min(a + size, int(e))))
            for s, e in zip(offsets, offsets[1:], strict=False)
            for a in range(int(s), int(e), size)
        ]
        assert tile_tokens == expected, f"tiles({size})"
        assert tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < max(total, 1))


@operation("ragged.same_layout ragged.align", dtypes=("float32",))
def sharing(bench: Bench, layout: Layout, dtype: str) -> None:
    """Layouts are shared by identity, compared by value where that is free, else declared."""
    a, b = bench.ragged(layout, (2,), dtype), bench.ragged(layout, (2,), dtype)
    same = bench.xp.ragged.same_layout
    assert same(a.x, a.x) is True
    assert same(a.x, a.x + 1) is True
    assert same(a.x, b.x) is (True if bench.lib.host else None)
    other = bench.ragged([*lengths_of(layout), 1], (2,), dtype).x
    assert same(a.x, other) is False
    joined = bench.xp.ragged.align(b.x, like=a.x)
    assert same(joined, a.x) is True
    assert joined.values is b.x.values
    bench.close(
        a.x + joined,
        [p + q for p, q in zip(a.exact, b.exact, strict=True)],
        [p + q for p, q in zip(a.exact, b.exact, strict=True)],
        [
            p.astype(np.float32) + q.astype(np.float32)
            for p, q in zip(a.exact, b.exact, strict=True)
        ],
    )


@operation("mT with_values to_device", dtypes=("float32",))
def methods(bench: Bench, layout: Layout, dtype: str) -> None:
    """Views keep the layout; values of another shape may take it."""
    x = bench.ragged(layout, (2, 3), dtype)
    bench.close(x.x.mT, [row.swapaxes(1, 2) for row in x.exact])
    y = bench.ragged(layout, (2,), dtype)
    bench.close(y.x.mT, [row.T for row in y.exact])
    assert y.x.mT.shape == (len(lengths_of(layout)), 2, None)
    assert y.x.mT.offsets is y.x.offsets
    moved = x.x.to_device(x.x.device)
    bench.close(moved, list(x.exact))
    assert moved.device == x.x.device
