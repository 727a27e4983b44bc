"""Batches of samples: collating, splitting, windows and modalities."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..array import Array
from ..backends import backend, is_array
from ..bridges.dlpack import backend_of, convert, to_backend
from ..bridges.lists import from_lists
from ..broadcasting import check_ragged
from ..checks import check_integer, read_integers
from ..construct import pack
from ..indexing.getitem import select
from ..layout import Layout


def collate(samples: Sequence[Any], library: Any = None) -> Any:
    """Combine samples into a batch of ragged arrays; for the ``collate_fn`` of a DataLoader.

    Parameters
    ----------
    samples
        Arrays or lists of numbers whose first axes differ in length; or mappings of names to them,
        with the same names in each. A field of numbers becomes a dense array with one entry per
        sample. Or an Arrow table, or a list of them, as ``datasets`` gives with_format("arrow").
    library
        Library of the result; by default the library of the samples, and NumPy for lists and
        numbers.

    Returns
    -------
    Array or dict
        One ragged array, or one per name. Fields of equal lengths are on one layout.

    Raises
    ------
    ValueError
        If there are no samples, or their names differ.
    TypeError
        If a field does not contain arrays or numbers of one dtype; nothing is promoted.

    Examples
    --------
    >>> import scree.data
    >>> batch = scree.data.collate([{"ids": [5, 6, 7], "label": 1}, {"ids": [8], "label": 0}])
    >>> batch["ids"].lengths, batch["label"]
    (array([3, 1], dtype=int32), array([1, 0]))
    """
    if not hasattr(samples, "__len__"):
        raise TypeError(f"samples: expected a list of samples, got {type(samples).__name__}")
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    if _is_table(samples) or _is_table(samples[0]):
        return _collate_tables([samples] if _is_table(samples) else samples, library)
    if not isinstance(samples[0], Mapping):
        return _collate_field("samples", samples, library)
    names = set(samples[0])
    for i, sample in enumerate(samples):
        if set(sample) != names:
            raise ValueError(
                f"samples[{i}]: expected the names {sorted(names)}, got {sorted(sample)}"
            )
    fields = ((n, _collate_field(n, [s[n] for s in samples], library)) for n in samples[0])
    return _share_layouts(fields)


def _share_layouts(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields by name; ragged ones of equal lengths on one layout."""
    batch: dict[str, Any] = {}
    layouts: dict[tuple[Any, ...], Array] = {}
    for name, field in fields:
        if isinstance(field, Array):
            lib, offsets = field.layout.backend, field.layout.read_offsets()
            key = (lib.name, str(field.device), offsets.tobytes())
            field = layouts.setdefault(key, field).with_values(field.values)
        batch[name] = field
    return batch


def _is_table(x: Any) -> bool:
    return hasattr(x, "column_names") and hasattr(x, "to_batches")


def _collate_tables(tables: Sequence[Any], library: Any) -> dict[str, Any]:
    """Return the columns of Arrow tables, one under the other."""
    from pyarrow import concat_tables

    from ..bridges.arrow import from_table

    columns = from_table(concat_tables(tables))
    if library is not None:
        columns = {
            name: to_backend(x, library)
            if isinstance(x, Array)
            else convert(x, backend_of(library))
            for name, x in columns.items()
        }
    return _share_layouts(columns.items())


def _collate_field(name: str, items: Sequence[Any], library: Any) -> Any:
    """Return a dense array of numbers or a ragged array of rows; `name` is for errors."""
    are_numbers = all(isinstance(x, bool | int | float | np.generic) for x in items)
    if are_numbers or all(is_array(x) and x.ndim == 0 for x in items):
        dense = np.asarray(items) if are_numbers else backend(items[0]).xp.stack(list(items))
        return dense if library is None else convert(dense, backend_of(library))
    try:
        packed = pack(items) if is_array(items[0]) else from_lists(items)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return packed if library is None else to_backend(packed, library)


def split_balanced(arr: Any, k: int, cost: Any = "tokens") -> list[np.ndarray]:
    """Divide rows into k parts of nearly equal cost.

    Parameters
    ----------
    arr
        Ragged array, whose offsets are read; or (n,) lengths.
    k
        Number of parts.
    cost
        "tokens", the length of a row; "attention", the square of the length; or (n,) costs, such
        as ``6 * h * n + n * n``.

    Returns
    -------
    list
        k arrays of row indices in increasing order. Each row is in one of them:
        ``[arr[rows] for rows in split_balanced(arr, k)]``. A part is empty only if there are fewer
        rows than parts.

    Raises
    ------
    ValueError
        If there is not one finite cost >= 0 per row, or `k` is less than 1.

    Notes
    -----
    This is the differencing method of Karmarkar and Karp (1982) for k parts. It combines the two
    most uneven partial partitions, the heavy parts of one with the light parts of the other, until
    one partition is left.

    Examples
    --------
    >>> import scree.data
    >>> scree.data.split_balanced([8, 1, 4, 3], 2)
    [array([1, 2, 3]), array([0])]
    """
    lengths, k = read_lengths(arr), check_integer("k", k, 1)
    if isinstance(cost, str):
        if cost not in ("tokens", "attention"):
            raise ValueError(
                f"cost: expected 'tokens', 'attention' or one number per row, got {cost!r}"
            )
        costs = lengths if cost == "tokens" else lengths.astype(np.float64) ** 2
    else:
        costs = read_integers("cost", cost)
        if costs.shape != lengths.shape or costs.dtype.kind not in "iuf":
            raise ValueError(
                f"cost: expected {lengths.size} numbers, one per row, "
                f"got {costs.dtype} of shape {costs.shape}"
            )
        invalid = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
        if invalid.size:
            raise ValueError(
                f"cost: expected finite numbers >= 0, got {costs[invalid[0]]} for row {invalid[0]}"
            )
    part_of_row = np.zeros(lengths.size, np.int64)
    for i, rows in enumerate(_karmarkar_karp(costs.tolist(), k)):
        part_of_row[rows] = i
    return _fill_empty_parts([np.flatnonzero(part_of_row == i) for i in range(k)])


def _karmarkar_karp(costs: list[float], k: int) -> list[list[int]]:
    """Return the rows of each part.

    A partial partition is a list of k parts (load, tree) by falling load. The lightest load is
    subtracted from all of them. A tree contains the rows of a part: it is None, a row, or a pair of
    trees.
    """
    empty_parts: list[tuple[float, Any]] = [(0, None)] * (k - 1)
    # Entries are (minus the heaviest load, a number that breaks ties, the partial partition).
    heap = [(-cost, row, [(cost, row), *empty_parts]) for row, cost in enumerate(costs)]
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        (_, _, parts), (_, _, other_parts) = heapq.heappop(heap), heapq.heappop(heap)
        combined = [
            (load + other_load, _join_trees(tree, other_tree))
            for (load, tree), (other_load, other_tree) in zip(
                parts, reversed(other_parts), strict=True
            )
        ]
        combined.sort(key=lambda part: -part[0])
        lightest, count = combined[-1][0], count + 1
        partition = [(load - lightest, tree) for load, tree in combined]
        heapq.heappush(heap, (-partition[0][0], count, partition))
    return [_leaves(tree) for _, tree in heap[0][2]] if heap else []


def _join_trees(a: Any, b: Any) -> Any:
    return a if b is None else b if a is None else (a, b)


def _leaves(tree: Any) -> list[int]:
    """Return the rows of a tree; without recursion, as its depth may be the number of rows."""
    rows, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            rows.append(node)
    return rows


def _fill_empty_parts(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Give one row of the part with the most rows to each empty part.

    Without this, rows without cost could all be in one part.
    """
    for i, part in enumerate(parts):
        fullest = max(range(len(parts)), key=lambda j: parts[j].size)
        if not part.size and parts[fullest].size > 1:
            parts[i], parts[fullest] = parts[fullest][-1:], parts[fullest][:-1]
    return parts


def truncate(arr: Array, length: int, *, side: str = "right") -> Array:
    """Cut each row to at most `length` tokens.

    Parameters
    ----------
    arr
        Ragged array; its offsets are read.
    length
        Maximum number of tokens per row.
    side
        "right" or "left", the side from which tokens are removed.

    Returns
    -------
    Array
        Array of the same shape with rows of at most `length` tokens; a copy of the kept tokens.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.
    ValueError
        If `length` is negative, or `side` is neither "right" nor "left".

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> scree.data.truncate(scree.from_lengths(np.arange(5), [1, 4]), 2, side="left").values
    array([0, 3, 4])
    """
    length = check_integer("length", length, 0)
    if side not in ("right", "left"):
        raise ValueError(f"side: expected 'right' or 'left', got {side!r}")
    lengths = np.diff(check_ragged("arr", arr).layout.read_offsets())
    new_lengths = np.minimum(lengths, length)
    starts = arr.offsets[:-1]
    if side == "left":
        starts = starts + arr.layout.to_index(lengths - new_lengths)
    layout = Layout.from_host_lengths(arr.layout.backend, new_lengths, like=arr.offsets)
    return select(arr, layout, starts)


def chunk(arr: Array, size: int, *, overlap: int = 0) -> tuple[Array, Any]:
    """Split each row into windows of at most `size` tokens.

    Parameters
    ----------
    arr
        Ragged array; its offsets are read.
    size
        Number of tokens per window; the last window of a row may be shorter.
    overlap
        Number of tokens that consecutive windows share, less than `size`.

    Returns
    -------
    windows, rows
        Ragged array with one row per window, in the order of the rows of `arr`; and (num_windows,)
        index of the row of each window. An empty row has no window.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.
    ValueError
        If `size` is less than 1, or `overlap` is not in [0, size).

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> windows, rows = scree.data.chunk(scree.from_lengths(np.arange(7), [5, 2]), 3, overlap=1)
    >>> scree.unpack(windows), rows
    ([array([0, 1, 2]), array([2, 3, 4]), array([5, 6])], array([0, 0, 1], dtype=int32))
    """
    size = check_integer("size", size, 1)
    overlap = check_integer("overlap", overlap, 0, size, ", the size of a window")
    offsets = check_ragged("arr", arr).layout.read_offsets().astype(np.int64)
    lengths, step = np.diff(offsets), size - overlap
    counts = np.where(lengths > 0, np.maximum(-(-(lengths - overlap) // step), 1), 0)
    rows = np.repeat(np.arange(lengths.size), counts)
    positions = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    window_lengths = np.minimum(size, lengths[rows] - positions)
    layout = Layout.from_host_lengths(arr.layout.backend, window_lengths, like=arr.offsets)
    windows = select(arr, layout, arr.layout.to_index(offsets[rows] + positions))
    return windows, arr.layout.to_index(rows)


class Interleaved(NamedTuple):
    """A batch of several modalities: three ragged arrays on one layout.

    Attributes
    ----------
    tokens
        (n, None, ...) tokens of all segments of a row, in order.
    modality
        (n, None) int32 modality of each token. ``modality == 1`` is the mask of one modality, and
        ``tokens[modality == 1]`` contains its tokens, row by row.
    segment
        (n, None) int32 index of the segment of each token in its row.

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> text, image = 0, 1
    >>> batch = scree.data.interleave([[(text, np.asarray([5, 6])), (image, np.asarray([90]))]])
    >>> batch.modality.tolist(), batch.segment.tolist()
    ([[0, 0, 1]], [[0, 0, 1]])
    """

    tokens: Array
    modality: Array
    segment: Array


def interleave(samples: Sequence[Sequence[tuple[int, Any]]]) -> Interleaved:
    """Combine rows of segments, such as alternating text and images, into one ragged batch.

    Parameters
    ----------
    samples
        For each row its segments in order: pairs of an integer, the modality, and an array
        (length, ...). All arrays have one library, dtype and element shape, such as embeddings.

    Returns
    -------
    Interleaved
        The tokens, and the modality and segment of each token, on one layout.

    Raises
    ------
    TypeError
        If a modality is not an integer, or the arrays have different libraries or dtypes.
    ValueError
        If there are no segments, or element shapes differ.

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> text, image = 0, 1
    >>> batch = scree.data.interleave([
    ...     [(text, np.asarray([5, 6])), (image, np.asarray([90, 91])), (text, np.asarray([7]))],
    ...     [(image, np.asarray([93]))],
    ... ])
    >>> batch.tokens.lengths, batch.tokens[batch.modality == image].values
    (array([5, 1], dtype=int32), array([90, 91, 93]))
    """
    if not isinstance(samples, Sequence):
        raise TypeError(f"samples: expected a list of rows, got {type(samples).__name__}")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Sequence) or not all(
            isinstance(part, Sequence) and len(part) == 2 for part in sample
        ):
            raise TypeError(
                f"samples[{i}]: expected pairs of a modality and an array, got {sample!r:.80}"
            )
    modalities = np.asarray([modality for sample in samples for modality, _ in sample])
    segments = [tokens for sample in samples for _, tokens in sample]
    if not segments:
        raise ValueError("samples: expected at least one segment, got none")
    if modalities.dtype.kind not in "iu":
        raise TypeError(
            f"samples: expected an integer for each segment's modality, got {modalities.dtype}"
        )
    packed = pack(segments)  # one row per segment
    lib, device = packed.layout.backend, packed.layout.device
    segment_offsets = packed.layout.read_offsets().astype(np.int64)
    segment_lengths = np.diff(segment_offsets)
    counts = np.asarray([len(sample) for sample in samples])
    ends = np.cumsum(counts)
    row_lengths = np.diff(segment_offsets[ends], prepend=0)
    layout = Layout.from_host_lengths(lib, row_lengths, like=packed.offsets)
    tokens = Array.from_layout(packed.values, layout)

    def per_token(per_segment: np.ndarray) -> Array:
        host = np.repeat(per_segment, segment_lengths).astype(np.int32)
        return tokens.with_values(lib.from_host(host, lib.xp.int32, device))

    segment_indices = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return Interleaved(tokens, per_token(modalities), per_token(segment_indices))


def read_lengths(x: Any) -> np.ndarray:
    """Return row lengths on the host, from a ragged array, an array or a list."""
    if isinstance(x, Array):
        return np.diff(check_ragged("lengths", x).layout.read_offsets()).astype(np.int64)
    lengths = read_integers("lengths", x)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
        raise ValueError(
            "lengths: expected one axis of integers >= 0, "
            f"got {lengths.dtype} of shape {lengths.shape}"
        )
    return lengths.astype(np.int64)
