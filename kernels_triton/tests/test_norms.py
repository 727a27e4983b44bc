"""Norms of a sum in half precision: the norm is of the sum before it is rounded."""

import pytest
import torch
from kernels_reference import bf16, distance, f16, f32

import scree
from scree_triton.runtime.launch import INTERPRETED

pytestmark = [] if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = f16 if INTERPRETED else bf16  # the interpreter has no bfloat16


def problem(width=256, tokens=32):
    """x, the residual, a float32 weight, and the gradient of the norm."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, residual, dy = (
        torch.randn(tokens, width, generator=generator, device=DEVICE).to(HALF) for _ in range(3)
    )
    weight = torch.randn(width, generator=generator, device=DEVICE)
    return [p.requires_grad_() for p in (x, residual, weight)], dy


def exact_norm(x, residual, weight):
    """The norm of the sum in float64."""
    total = x.double() + residual.double()
    return total / torch.sqrt((total**2).mean(-1, keepdim=True) + 1e-6) * weight.double()


@pytest.mark.parametrize("kernel", ["standard", "triton"])
def test_rms_norm_of_a_sum_is_rounded_once(kernel):
    (x, residual, weight), _ = problem()
    y, total = scree.rms_norm(x, weight, residual=residual, kernel=kernel)
    exact = exact_norm(x, residual, weight).detach()
    once, twice = exact.to(HALF), scree.rms_norm(x + residual, weight).detach()
    assert y.dtype == HALF and torch.equal(total.detach(), (x + residual).detach())
    assert distance(y.detach(), exact) < 1.01 * distance(once, exact)
    assert distance(twice, exact) > 1.2 * distance(once, exact)


@pytest.mark.parametrize("kernel", ["standard", "triton"])
@pytest.mark.parametrize("uses_sum", [False, True])
def test_gradients_of_rms_norm_of_a_sum_agree_with_float64(kernel, uses_sum):
    leaves, dy = problem()
    y, total = scree.rms_norm(leaves[0], leaves[2], residual=leaves[1], kernel=kernel)
    gradients = torch.autograd.grad(y + total if uses_sum else y, leaves, dy)
    wide = [p.detach().double().requires_grad_() for p in leaves]
    exact = exact_norm(*wide)
    exact = exact + wide[0] + wide[1] if uses_sum else exact
    expected = torch.autograd.grad(exact, wide, dy.double())
    eps = torch.finfo(HALF).eps
    for got, right in zip(gradients[:2], expected[:2]):
        assert got.dtype == HALF and distance(got, right) < eps
    # The kernel reads the rounded sum again, and the standard implementation keeps it in float32.
    assert gradients[2].dtype == f32
    assert distance(gradients[2], expected[2]) < (eps / 2 if kernel == "triton" else 2e-6)
