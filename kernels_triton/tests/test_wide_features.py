"""Rows of wide tokens, in partitions so short that every path through the kernels runs; without a GPU in the interpreter."""

import pytest
import torch
from kernels_reference import Case, check, check_product, f16, f32

from scree_triton.runtime.launch import INTERPRETED
from scree_triton.segments import interface, reductions, wide_features

DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (40, 2, 0, 9, 1, 4, 4, 0, 0, 17)
NAMES = ("softmax", "log_softmax", "logsumexp", "sum", "mean", "max", "cumulative_sum")
CASES = [
    *(Case(name, f32, (3,), LENGTHS) for name in NAMES),
    *(
        Case(name, f16, (130,), LENGTHS, wide=True) for name in ("softmax", "sum", "cumulative_sum")
    ),  # two blocks of columns
    *(
        Case(name, f32, (24,), (70,)) for name in ("logsumexp", "cumulative_sum")
    ),  # parts of one row alone
    Case("max", f16, (130,), (130, 3)),  # narrower blocks of columns
    *(
        Case(name, f32, (2, 16), (3,) * 20, bounded=True)
        for name in ("log_softmax", "mean", "cumulative_sum")
    ),  # nothing is cut
    *(Case(name, f32, (50,), (70, 90, 66, 40), bounded=True) for name in NAMES),  # one CTA per row
]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Make partitions short, and let a CTA process a whole row that is not long."""
    monkeypatch.setattr(wide_features, "_MIN_PARTITION_STEPS", 0)
    monkeypatch.setattr(wide_features, "_MIN_MEAN_LENGTH", 65)
    monkeypatch.setattr(wide_features, "_LONG_MEAN_LENGTH", 80)
    monkeypatch.setattr(wide_features, "_UNROLL", 2)
    for module, cached in (
        (wide_features, wide_features._launch),
        (interface, interface._launch_config),
    ):
        monkeypatch.setattr(module, cached.__name__, cached.__wrapped__)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_error(case):
    check(case, DEVICE)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, (70, 90, 66, 40)], ids=["partitions", "one CTA per row"]
)
def test_gradient_of_a_product(lengths):
    check_product(lengths, (50,), f32, DEVICE, bounded=True)


@pytest.mark.parametrize("map", [reductions.NONE, reductions.SOFTMAX], ids=["reduced", "mapped"])
def test_counts_are_left_as_found(map, monkeypatch):
    """The next call on the stream finds zeros."""
    counts = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(wide_features, "counters", lambda device, number: counts[:number])
    x = torch.randn(180, 130, device=DEVICE)
    rows = interface.Rows(torch.tensor([0, 100, 101, 180], dtype=torch.int32, device=DEVICE), None)
    first = interface.over_rows(x, rows, reductions.LSE, map)
    assert not counts.any()
    assert torch.equal(first, interface.over_rows(x, rows, reductions.LSE, map))


def test_cumulative_reverse_is_cumulative_of_the_flipped_rows():
    x = torch.randint(-9, 9, (193, 40), device=DEVICE).float()
    found, expected = (
        interface.over_rows(values, rows(edges), reductions.SUM, map)
        for values, edges, map in (
            (x, (0, 150, 150, 193), reductions.CUMULATIVE_REVERSE),
            (x.flip(0), (0, 43, 43, 193), reductions.CUMULATIVE),
        )
    )
    assert torch.equal(found, expected.flip(0))


@pytest.mark.parametrize("longest", [None, 3])
def test_tokens_behind_the_last_row(longest):
    """They become 0, and are in no reduction."""
    x = torch.randn(200, 20, device=DEVICE)
    x[8:] = torch.nan
    ragged = interface.Rows(rows((0, 3, 5, 5, 8)).offsets, longest)
    found = interface.over_rows(x, ragged, reductions.SUM, reductions.CUMULATIVE)
    expected = torch.cat(
        [part.cumsum(0) for part in x[:8].split([3, 2, 0, 3])] + [torch.zeros_like(x[8:])]
    )
    torch.testing.assert_close(found, expected)
    found = interface.over_rows(x, ragged, reductions.SUM)
    torch.testing.assert_close(
        found, torch.stack([part.sum(0) for part in x[:8].split([3, 2, 0, 3])])
    )


def rows(edges):
    return interface.Rows(torch.tensor(edges, dtype=torch.int32, device=DEVICE), None)
