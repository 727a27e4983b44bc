"""Grouped products beyond what every operation is tested for: rows of every kind of tile, and tokens behind the last row."""

import math

import pytest
import torch
from kernels_reference import bf16, distance, f16

import scree
from scree_triton.gemm import grouped
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


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "tiled", "pointers"])
def test_product_of_a_matrix_beyond_int32_equals_the_dense_product(kernels, monkeypatch):
    if kernels != "hopper":
        monkeypatch.setattr(grouped, "_sm90_kernels", lambda device: None)
    if kernels == "pointers":
        monkeypatch.setattr(grouped, "_supports_tiled", lambda device: False)
    tokens, k, m = 70, 1 << 16, (1 << 15) + 64  # 2**31 + 2**22 elements, 4.3 GB
    x, weight, dy = (
        torch.randn(shape, dtype=f16, device="cuda") / 16
        for shape in ((tokens, k), (k, m), (tokens, m))
    )
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    assert distance(grouped.product(x, weight[None], offsets), x @ weight) < 1e-3
    # The gradient of x reads the matrix by columns.
    assert distance(grouped.product(dy, weight[None].mT, offsets), dy @ weight.T) < 1e-3
    assert distance(grouped.product(x, weight.T.contiguous().T[None], offsets), x @ weight) < 1e-3
    got = grouped.weight_gradient(x, dy, offsets)[0]
    for rows in (slice(0, 64), slice(k - 64, k)):
        assert distance(got[rows], x[:, rows].T @ dy) < 1e-3


@pytest.mark.gpu
def test_product_of_tokens_with_a_stride_beyond_int32_equals_the_dense_product():
    wide = torch.empty((150, 1 << 24), dtype=f16, device="cuda")  # 5 GB
    x = wide[:, 8:71]  # 63 numbers: no TMA
    x.normal_()
    weight = torch.randn((1, 63, 33), dtype=f16, device="cuda")
    dy = torch.randn((150, 33), dtype=f16, device="cuda")
    offsets = torch.tensor([0, 150], dtype=torch.int32, device="cuda")
    assert distance(grouped.product(x, weight, offsets), x @ weight[0]) < 1e-3
    assert distance(grouped.weight_gradient(x, dy, offsets)[0], x.T @ dy) < 1e-3
