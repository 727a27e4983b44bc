"""The cost model of the exchange chooses the form that was faster on H200 GPUs."""

import numpy as np
import pytest

from scree.distributed.exchange import HeadCounts, is_faster_by_heads
from scree.distributed.pieces import cut_rows

#: Attention of the measurements in docs/guides/multi-gpu.md, and of the 124M model.
MEASURED = HeadCounts(heads=32, kv_heads=8, dims=256, itemsize=2)
SMALL_MODEL = HeadCounts(heads=12, kv_heads=12, dims=128, itemsize=2)


def choose(
    lengths: list[int],
    num_ranks: int,
    counts: HeadCounts = MEASURED,
    window: tuple[int | None, int | None] = (None, 0),
    overlaps: bool = True,
) -> bool:
    array = np.asarray(lengths, np.int64)
    pieces = cut_rows(array, num_ranks, (4096, 1))
    is_cut = np.zeros(array.size, bool)
    is_cut[pieces.rows[pieces.lengths != array[pieces.rows]]] = True
    return is_faster_by_heads(array, is_cut, num_ranks, counts, window, overlaps)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "window", "expected"),
    [
        ([32_768], 2, None, False),
        ([32_768], 4, None, True),
        ([131_072], 2, None, True),
        ([131_072], 2, 4095, False),
        ([131_072], 4, None, True),
        ([131_072], 4, 4095, False),
        ([524_288], 4, 4095, False),
        ([524_288], 4, None, True),
        # One long document among short ones: an exchange of heads would send these too.
        ([40_000, *[1500] * 60], 4, None, False),
        ([400_000, *[2600] * 48], 4, None, True),
    ],
)
def test_is_faster_by_heads_measured_batches(
    lengths: list[int], num_ranks: int, window: int | None, expected: bool
) -> None:
    assert choose(lengths, num_ranks, window=(window, 0)) == expected


def test_is_faster_by_heads_small_model() -> None:
    assert choose([65_536], 2, SMALL_MODEL)
    packed = [608, 280, 1408, 3840, 11_256, 2408, 888, 624, 6296, 23_784, 3080, 320, 480, 10_264]
    assert not choose(packed, 2, SMALL_MODEL)


def test_is_faster_by_heads_without_overlap() -> None:
    # Slopes and windows with a bound after the query wait for the keys, so many keys cost more than heads.
    many = MEASURED._replace(kv_heads=32)
    assert choose([16_384], 8, many, overlaps=False)
    assert not choose([16_384], 2, MEASURED, overlaps=False)
