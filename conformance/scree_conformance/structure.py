"""Cases of creation, conversion and indexing of ragged arrays, and of their layouts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import scree

from .bench import Bench, Input
from .layouts import Layout, lengths_of
from .oracle import Rows, map_rows
from .table import operation

DTYPES = ("float32", "int32", "bool", "bfloat16")


@operation("ragged.pack ragged.unpack", dtypes=DTYPES)
def pack(bench: Bench, layout: Layout, dtype: str) -> None:
    """Packed and unpacked rows, for every `ragged_dim`."""
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", ragged_dim)
        rows = bench.xp.ragged.unpack(x.array)
        assert isinstance(rows, list)
        assert len(rows) == x.array.batch_size
        for row, exact in zip(rows, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        for row, exact in zip(x.array, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        if rows:
            packed_again = bench.xp.ragged.pack(rows, ragged_dim=ragged_dim)
            bench.close(packed_again, list(x.exact), dtype=dtype)
            assert bench.lib.dtype_name(packed_again.offsets) == "int32"
            assert packed_again.shape == x.array.shape


@operation(
    "ragged.from_offsets ragged.from_cu_seqlens ragged.from_lengths ragged.from_segment_ids",
    dtypes=("float32",),
)
def creation(bench: Bench, layout: Layout, dtype: str) -> None:
    """Arrays from offsets, which are not copied, from lengths and from segment ids."""
    lengths, make = lengths_of(layout), bench.lib.make
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim)
        for f in (scree.from_offsets, scree.from_cu_seqlens, scree.Array):
            for offsets_dtype in ("int32", "int64") if "int64" in bench.lib.dtypes else ("int32",):
                cu_seqlens = make(bench.lib.read(x.array.offsets), offsets_dtype)
                got = f(x.array.values, cu_seqlens, ragged_dim=ragged_dim)
                assert got.values is x.array.values, "values were copied"
                assert got.offsets is cu_seqlens, "offsets were copied"
                bench.close(got, list(x.exact))
        for row_lengths in (lengths, make(np.asarray(lengths, np.int32), "int32")):
            bench.close(
                scree.from_lengths(x.array.values, row_lengths, ragged_dim=ragged_dim),
                list(x.exact),
            )
        ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        bench.close(
            scree.from_segment_ids(
                x.array.values, make(ids, "int32"), len(lengths), ragged_dim=ragged_dim
            ),
            list(x.exact),
        )
        # Without num_segments, the largest id determines the number of rows.
        if not lengths or lengths[-1]:
            bench.close(
                scree.from_segment_ids(x.array.values, make(ids, "int32"), ragged_dim=ragged_dim),
                list(x.exact),
            )


@operation("ragged.to_padded", dtypes=DTYPES, kernel="pad")
def padding(bench: Bench, layout: Layout, dtype: str) -> None:
    """Padding on either side, to the longest row and beyond."""
    lengths = lengths_of(layout)
    n, longest = len(lengths), max(lengths, default=0)
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (2,), dtype, "natural", ragged_dim)
        for side in ("right", "left"):
            for length, fill_value in ((None, 0), (longest + 2, 1)):
                padded, mask = bench.run(
                    bench.xp.ragged.to_padded,
                    x.array,
                    side=side,
                    fill_value=fill_value,
                    length=length,
                )
                padded_length = longest if length is None else length
                shape = (n, 2, padded_length) if ragged_dim else (n, padded_length, 2)
                expected = np.full(shape, fill_value, x.exact.template.dtype)
                token_mask = np.zeros((n, padded_length), bool)
                for i, row in enumerate(x.exact):
                    start = 0 if side == "right" else padded_length - lengths[i]
                    tokens = slice(start, start + lengths[i])
                    token_mask[i, tokens] = True
                    expected[(i, slice(None), tokens) if ragged_dim else (i, tokens)] = row
                bench.close(padded, expected, dtype=dtype, note=f"{side}, length={length}: ")
                bench.close(mask, token_mask, dtype="bool")


@operation("ragged.from_padded", dtypes=DTYPES, kernel="unpad")
def unpadding(bench: Bench, layout: Layout, dtype: str) -> None:
    """Padding on either side, removed by mask and by lengths, with and without `total`."""
    lengths, make = lengths_of(layout), bench.lib.make
    unpad = partial(bench.run, bench.xp.ragged.from_padded)
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (2,), dtype, "natural", ragged_dim)
        for side in ("right", "left"):
            for length in (None, max(lengths, default=0) + 2):
                padded, mask = bench.xp.ragged.to_padded(x.array, side=side, length=length)
                integer_masks = [make(bench.lib.read(mask), name) for name in ("int32", "uint8")]
                for any_mask in (mask, *integer_masks):
                    unpadded = unpad(padded, any_mask, ragged_dim=ragged_dim)
                    bench.close(unpadded, list(x.exact), dtype=dtype)
                # The lengths describe padding on the right.
                if side == "left":
                    continue
                for row_lengths in (lengths, make(np.asarray(lengths, np.int32), "int32")):
                    unpadded = unpad(
                        padded, lengths=row_lengths, ragged_dim=ragged_dim, total=sum(lengths)
                    )
                    bench.close(unpadded, list(x.exact))
    mask_with_holes = bench.rng.integers(0, 2, (4, 6)).astype(bool)
    dense = bench.dense((4, 6, 2), dtype, "natural")
    bench.close(
        unpad(dense.array, make(mask_with_holes, "bool"), total=int(mask_with_holes.sum())),
        [row[keep] for row, keep in zip(dense.exact, mask_with_holes, strict=True)],
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
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", ragged_dim)
        arr, rows = x.array, x.exact
        for i in {0, n - 1, -1, -n} if n else ():
            bench.close(arr[i], rows[i], dtype=dtype)
            bench.close(
                arr[i, ..., 1] if not ragged_dim else arr[i, 1],
                rows[i][..., 1] if not ragged_dim else rows[i][1],
                dtype=dtype,
            )
        for key in bench.select(SLICES):
            bench.close(
                arr[key], rows[key], dtype=dtype, note=f"arr[{key}], ragged_dim={ragged_dim}: "
            )
            token_key = (slice(None), key) if not ragged_dim else (slice(None), slice(None), key)
            bench.close(
                arr[token_key],
                [row[token_key[1:]] for row in rows],
                dtype=dtype,
                note=f"arr[{token_key}]: ",
            )
            reversed_key = (slice(None, None, -1), *token_key[1:])
            bench.close(
                arr[reversed_key],
                [row[token_key[1:]] for row in rows[::-1]],
                dtype=dtype,
                note=f"arr[{reversed_key}]: ",
            )
        row_indices = [n - 1, 0, -1, 0] if n else []
        row_mask = bench.rng.integers(0, 2, n).astype(bool)
        for key in (row_indices, make(np.asarray(row_indices, np.int32), "int32")):
            bench.close(arr[key], [rows[i] for i in row_indices], dtype=dtype)
        bench.close(
            arr[make(row_mask, "bool")],
            [row for row, keep in zip(rows, row_mask, strict=True) if keep],
            dtype=dtype,
        )
        element_key = (slice(None), slice(None), 1) if not ragged_dim else (slice(None), 1)
        bench.close(
            arr[element_key],
            [row[:, 1] if not ragged_dim else row[1] for row in rows],
            dtype=dtype,
            note="one element: ",
        )
        bench.close(arr[..., 1:], [row[..., 1:] for row in rows], dtype=dtype)
        if not ragged_dim:
            bench.close(arr[..., 1], [row[:, 1] for row in rows], dtype=dtype)
        assert arr[...].values is arr.values
        nonempty_rows = Rows((row for row in rows if row.shape[ragged_dim] >= 1), rows.template)
        nonempty_array = arr[
            make(np.asarray([length >= 1 for length in lengths_of(layout)], bool), "bool")
        ]
        for i in (0, -1):
            key = (slice(None), i) if not ragged_dim else (slice(None), slice(None), i)
            bench.close(
                nonempty_array[key],
                nonempty_rows.stack(
                    lambda row: (
                        np.take(row, i, axis=ragged_dim) if row.size else row.sum(axis=ragged_dim)
                    )
                ),
                dtype=dtype,
                note=f"token {i} of each row: ",
            )


@operation("indexing: ragged masks", dtypes=("float32", "int32", "bfloat16"))
def masks(bench: Bench, layout: Layout, dtype: str) -> None:
    """`arr[mask]` with a mask of tokens, and with a mask of elements."""
    x = bench.ragged(layout, (3,), dtype)
    tokens = bench.like(x, (), "bool", "bool")
    bench.close(
        x.array[tokens.array],
        [row[keep] for row, keep in zip(x.exact, tokens.exact, strict=True)],
        dtype=dtype,
    )
    bench.close(x.array[x.array > 0], [row[row > 0] for row in x.exact], dtype=dtype)
    no_tokens = tokens.array.with_values(bench.xp.zeros_like(tokens.array.values))
    bench.close(x.array[no_tokens], [row[:0] for row in x.exact], dtype=dtype, note="no token: ")


@operation("indexing: ragged positions", dtypes=("float32", "bfloat16"))
def ragged_positions(bench: Bench, layout: Layout, dtype: str) -> None:
    """`arr[index]` with the positions of tokens in each row, also counted from its end."""
    lengths = lengths_of(layout)
    counts = [int(bench.rng.integers(0, 4)) if length else 0 for length in lengths]
    positions_of_rows = [
        bench.rng.integers(-length, length, count) if count else np.zeros(0, int)
        for length, count in zip(lengths, counts, strict=True)
    ]
    index = bench.of(
        bench.lib.make(np.concatenate([np.zeros(0, int), *positions_of_rows]), "int32"), counts
    )
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, ragged_dim=ragged_dim)
        bench.close(
            x.array[index.array],
            [
                np.take(row, positions, axis=ragged_dim)
                for row, positions in zip(x.exact, positions_of_rows, strict=True)
            ],
            dtype=dtype,
        )
    if sum(lengths) and bench.lib.host:
        out_of_bounds = bench.of(bench.lib.make([600], "int32"), [1, *[0] * (len(lengths) - 1)])
        raises(IndexError, "outside of its row", lambda: x.array[out_of_bounds.array])


@operation("indexing: None, Ellipsis and arrays on element axes", dtypes=("float32",))
def axes(bench: Bench, layout: Layout, dtype: str) -> None:
    """New axes after the batch axis, an ellipsis at any position, and indices on element axes.

    An array indexes one element axis at a time.
    """
    x = bench.ragged(layout, (4, 3), dtype)
    arr, make, whole_axis = x.array, bench.lib.make, slice(None)
    keys: list[tuple[Any, ...]] = [
        (whole_axis, None), (whole_axis, whole_axis, None), (..., None), (whole_axis, None, ..., 1),
        (whole_axis, ..., 2, None), (..., 1, whole_axis),
        (whole_axis, whole_axis, slice(1, 3), None, slice(None, None, 2)), (whole_axis, slice(1, None), 0),
        (whole_axis, None, slice(None, 2), None),
    ]  # fmt: skip
    for key in bench.select(keys):
        bench.close(
            arr[key],
            [row[key[1:] if key[0] is not ... else key] for row in x.exact],
            note=f"arr[{key}]: ",
        )
    for positions in ([2, 0, 0], []):
        index = make(np.asarray(positions, np.int32), "int32")
        bench.close(
            arr[..., index],
            [row[..., positions] for row in x.exact],
            note=f"arr[..., {positions}]: ",
        )
        bench.close(
            arr[:, :, index],
            [row[:, positions] for row in x.exact],
            note=f"arr[:, :, {positions}]: ",
        )


#: Update -> NumPy's function; None assigns.
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

    One index contains a position twice.
    """
    x = bench.ragged(layout, (3,), dtype, "integer")
    value = bench.dense((), dtype, "natural")
    n = len(lengths_of(layout))
    mask = x.array > 0
    keys: dict[str, tuple[Any, Any]] = {
        "[:, 1:3]": (np.s_[:, 1:3], lambda i, row: np.s_[1:3]),
        "[:, ::-2, 1]": (np.s_[:, ::-2, 1], lambda i, row: np.s_[::-2, 1]),
        "[..., 0]": (np.s_[..., 0], lambda i, row: np.s_[..., 0]),
        "[arr > 0]": (mask, lambda i, row: row > 0),
        "[1:]": (np.s_[1:], lambda i, row: np.s_[:] if i else np.s_[:0]),
    }  # fmt: skip
    for name, f in UPDATES.items():
        for note, (key, key_of_row) in bench.select(keys.items()):
            got = getattr(scree.at(x.array)[key], name)(value.array)
            rows = [row.copy() for row in x.exact]
            for i, row in enumerate(rows):
                row_key = key_of_row(i, row)
                row[row_key] = value.exact if f is None else f(row[row_key], value.exact)
            bench.close(got, rows, dtype=dtype, note=f"{note}.{name}: ")
    per_row = bench.dense((n, 1, 3), dtype, "natural")
    bench.close(
        scree.at(x.array)[...].add(per_row.array),
        [row + row_value for row, row_value in zip(x.exact, per_row.exact, strict=True)],
    )
    bench.close(x.array, list(x.exact), note="the original array: ")
    if n:
        index = bench.of(
            bench.lib.make(np.asarray([0, -1, 0], np.int32), "int32"), [3] + [0] * (n - 1)
        )
        if lengths_of(layout)[0]:
            first_row = x.exact[0].copy()
            np.add.at(first_row, [0, -1, 0], 2)
            bench.close(
                scree.at(x.array)[index.array].add(2),
                [first_row, *x.exact[1:]],
                note="a position twice: ",
            )


@operation("broadcasting: errors", ("plain", "ones", "one_row", "empty_between"), ("float32",))
def broadcasting_errors(bench: Bench, layout: Layout, dtype: str) -> None:
    """Errors for a missing axis, other sizes, a dense ragged axis, and other row lengths."""
    n, longest = len(lengths_of(layout)), max(lengths_of(layout))
    x = bench.ragged(layout, (2,), dtype).array
    shapes = [(5,), (n, 7, 1), (n + 1, 1, 2), (1, n, 1, 2), (n, longest + 1, 2)]
    for shape in shapes:
        raises(
            ValueError,
            f"shape {shape} does not broadcast",
            lambda: x + bench.dense(shape, dtype).array,
        )
    if n > 2:
        hint = "one entry per row"
        raises(ValueError, hint, lambda: x + bench.dense((n,), dtype).array)
        raises(ValueError, hint, lambda: bench.xp.where(x > 0, bench.dense((n,), dtype).array, x))
    other_layout = bench.ragged([*lengths_of(layout), 1], (2,), dtype).array
    raises(ValueError, "rows", lambda: x + other_layout)
    raises(ValueError, "same axes", lambda: x + bench.ragged(layout, (), dtype).array)


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
    """Row lengths, the row and position of each token, tiles, and the properties of an array."""
    lengths = lengths_of(layout)
    batch_size, total_length = len(lengths), sum(lengths)
    x = bench.ragged(layout, (3, 2), dtype, ragged_dim=1).array
    np.testing.assert_array_equal(bench.read(x.lengths), lengths)
    np.testing.assert_array_equal(
        bench.read(bench.xp.ragged.segment_ids(x)), np.repeat(np.arange(batch_size), lengths)
    )
    positions = np.concatenate([np.zeros(0, int), *map(np.arange, lengths)])
    np.testing.assert_array_equal(bench.read(bench.xp.ragged.positions(x)), positions)
    assert x.shape == (batch_size, 3, None, 2)
    assert (x.batch_size, len(x), x.total_length, x.ndim) == (
        batch_size,
        batch_size,
        total_length,
        4,
    )
    assert (x.element_shape, x.size, x.nbytes) == (
        (3, 2),
        6 * total_length,
        24 * total_length + 4 * batch_size + 4,
    )
    for tile_size in (1, 4, 32):
        tiles = x.layout.tiles(tile_size)
        tokens, valid = bench.read(tiles.tokens), bench.read(tiles.valid)
        tile_tokens = [tokens[i][valid[i]].tolist() for i in range(len(tokens)) if valid[i].any()]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=int)])
        expected = [
            list(range(tile_start, min(tile_start + tile_size, int(end))))
            for start, end in zip(offsets, offsets[1:], strict=False)
            for tile_start in range(int(start), int(end), tile_size)
        ]
        assert tile_tokens == expected, f"tiles({tile_size})"
        assert tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < max(total_length, 1))


@operation("ragged.same_layout ragged.align", dtypes=("float32",))
def shared_layouts(bench: Bench, layout: Layout, dtype: str) -> None:
    """Layouts that are the same object, equal by value, or declared equal by `align`."""
    a, b = bench.ragged(layout, (2,), dtype), bench.ragged(layout, (2,), dtype)
    same_layout = bench.xp.ragged.same_layout
    assert same_layout(a.array, a.array) is True
    assert same_layout(a.array, a.array + 1) is True
    assert same_layout(a.array, b.array) is (True if bench.lib.host else None)
    longer = bench.ragged([*lengths_of(layout), 1], (2,), dtype).array
    assert same_layout(a.array, longer) is False
    aligned = bench.xp.ragged.align(b.array, like=a.array)
    assert same_layout(aligned, a.array) is True
    assert aligned.values is b.array.values
    bench.check(operator.add, map_rows(operator.add), a, Input(aligned, b.exact))


@operation("mT with_values to_device", dtypes=("float32",))
def methods(bench: Bench, layout: Layout, dtype: str) -> None:
    """Methods that keep the layout."""
    x = bench.ragged(layout, (2, 3), dtype)
    bench.close(x.array.mT, [row.swapaxes(1, 2) for row in x.exact])
    y = bench.ragged(layout, (2,), dtype)
    bench.close(y.array.mT, [row.T for row in y.exact])
    assert y.array.mT.shape == (len(lengths_of(layout)), 2, None)
    assert y.array.mT.offsets is y.array.offsets
    moved = x.array.to_device(x.array.device)
    bench.close(moved, list(x.exact))
    assert moved.device == x.array.device
