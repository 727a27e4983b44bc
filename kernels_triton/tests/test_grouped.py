"""Grouped products beyond what every operation is tested for: rows of every kind of tile, and tokens behind the last row."""

import math

import pytest
import torch
from kernels_reference import bf16, distance, f16

import scree
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [f16] if INTERPRETED else [f16, bf16])
@pytest.mark.parametrize(
    "lengths, slack, k, m",
    [([3, 0, 2], 0, 16, 24)]
    if INTERPRETED
    else [
        (
            [0, 1, 64, 65, 0, 128, 129, 300, 0],
            37,
            200,
            392,
        ),  # a last tile of each height, and one of 136 columns
        ([5] * 20, 0, 64, 128),  # half of the columns of a tile
        ([700, 2000], 3, 2048, 1408),
        ([131] * 34, 1, 768, 2048),  # more tiles than programs, and a last round that is cut in two
    ],
)
def test_product_and_gradients(lengths, slack, k, m, dtype):
    """Against float64; what stands behind the last row is NaN and comes to nothing; equal calls give equal bits."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    total = sum(lengths)
    values, weight, dy = (
        random(total + slack, k),
        random(len(lengths), k, m).requires_grad_(),
        random(total + slack, m),
    )
    values[total:], dy[total:] = math.nan, math.nan
    values.requires_grad_()
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)

    def run():
        y = (scree.from_offsets(values, offsets) @ weight).values
        return y.detach(), *torch.autograd.grad(y, (values, weight), dy)

    y, dx, dw = run()
    rows = [
        (x.double(), d.double(), w.double())
        for x, d, w in zip(
            values.detach()[:total].split(lengths), dy[:total].split(lengths), weight.detach()
        )
    ]
    floor = {f16: 3e-4, bf16: 2.4e-3}[dtype]
    assert distance(y[:total], torch.cat([x @ w for x, _, w in rows])) < floor
    assert distance(dx[:total], torch.cat([d @ w.T for _, d, w in rows])) < floor
    assert distance(dw, torch.stack([x.T @ d for x, d, _ in rows])) < floor
    assert not y[total:].any() and not dx[total:].any()
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dw), run()))
