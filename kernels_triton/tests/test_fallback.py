"""Kernels that do not compile: gradients and operators fall back to other implementations."""

import warnings

import pytest
import torch
from program_calls import CALLS, NOT_DIFFERENTIABLE, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

import scree
from scree.dispatch import registry
from scree_triton.runtime import fallback, launch

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
ROWS = (5, 17, 0, 1, 9)
DIFFERENTIABLE = [name for name in CALLS if name not in NOT_DIFFERENTIABLE]
#: The operation of `scree.explain`, for calls with kernels of one module.
EXPLAINED = {
    "attention": "attention",
    "rms_norm": "rms_norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
}


@pytest.fixture
def kernels_fail(monkeypatch):
    """Return a function that makes every launch from now on fail to compile."""
    monkeypatch.setattr(fallback, "_UNAVAILABLE", {})

    class Kernel:
        """Kernel that needs more shared memory than the device has."""

        __name__ = "big_kernel"

        def __getitem__(self, grid):
            def run(*args, **constants):
                raise OutOfResources(300_000, 100_000, "shared memory")

            return run

    def fail():
        plain = launch.Launch.__call__

        def call(self, programs, args):
            kernel, variants, failures = self.kernel, self.variants, dict(self.failures)
            self.kernel, self.variants = Kernel(), {}
            try:
                plain(self, programs, args)
            finally:
                self.kernel, self.variants, self.failures = kernel, variants, failures

        monkeypatch.setattr(launch.Launch, "__call__", call)

    with registry.isolated():
        yield fail


class PassThrough(TorchDispatchMode):
    """Dispatch mode under which calls go through the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def loss_of(name, inputs):
    out = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
    return out.float().nan_to_num(0.0, 0.0, 0.0).square().sum()


def gradients_of(loss, inputs):
    grads = torch.autograd.grad(loss, inputs[1:3], allow_unused=True)
    return [g for g in grads if g is not None]


def assert_close(got, expected):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_whose_kernels_do_not_compile_falls_back(name, kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    expected = gradients_of(loss_of(name, inputs), inputs)
    losses = [loss_of(name, inputs), loss_of(name, inputs)]
    kernels_fail()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [gradients_of(loss, inputs) for loss in losses]
    for got in results:
        assert_close(got, expected)
    messages = [str(w.message) for w in caught if "run without a kernel" in str(w.message)]
    assert len(messages) == len(set(messages))
    if name in EXPLAINED:
        assert len(messages) == 1 and "big_kernel does not compile" in messages[0]


@pytest.mark.parametrize("name", CALLS)
def test_operators_whose_kernels_do_not_compile_fall_back(name, kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    if name in NOT_DIFFERENTIABLE:
        expected = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
    else:
        loss = loss_of(name, inputs)
        expected = [loss.detach(), *gradients_of(loss, inputs)]
    kernels_fail()
    with PassThrough(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in NOT_DIFFERENTIABLE:
            got = CALLS[name](inputs.array(inputs.x), inputs.weight, inputs.classes)
            assert torch.equal(got, expected)
            return
        loss = loss_of(name, inputs)
        got = [loss.detach(), *gradients_of(loss, inputs)]
    assert_close(got, expected)


def test_explain_says_that_a_gradient_falls_back(kernels_fail):
    inputs = make_inputs(DEVICE, lengths=ROWS)
    x = inputs.array(inputs.x)
    loss = scree.swiglu(x).values.sum()
    kernels_fail()
    with pytest.warns(RuntimeWarning, match="gradients and compiled calls run without a kernel"):
        loss.backward()
    explanation = scree.explain("swiglu", x)
    assert explanation.provider == "triton"
    assert "big_kernel does not compile" in explanation.note
    half = x.with_values(x.values.detach().half())
    assert scree.explain("swiglu", half).note is None
